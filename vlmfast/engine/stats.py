"""The cost of an answer, and where each visual token was dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmfast.core import display
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ItemGeometry

_OF_PARTS = (
    "visual_tokens_in", "cached_tokens", "vision_passes", "views", "views_encoded",
    "time_vision_s", "time_reduce_s", "time_prefill_s",
)  # fmt: skip


def clock(device: torch.device) -> float:
    """Seconds; waits for the device first, so that the work before it is counted."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Stats:
    """Cost of one answer. Times in seconds, sizes in bytes.

    ``saliency`` is the source by which stages ranked visual tokens in the vision tower (``cls``,
    ``received`` or ``norm``, see `vlmfast.core.saliency`), ``left_out`` names parts of methods that
    this model does not support. ``vision_passes`` counts the forward passes over the images: one,
    and one for each jittered view that a guard adds; none where the prefix cache had all of them.
    ``views`` counts the views of the images that the tower was given, crops and frames included,
    and ``views_encoded`` those that it encoded. ``visual_tokens_kept`` counts the tokens after each
    stage; ``equivalent_tokens`` is the number of visual tokens averaged over the language model's
    layers, the common cost axis. ``flops_prefill`` counts the visual tokens' part of the prefill by
    the papers' formula, per layer with n tokens, width d and FFN width m:
    ``4 n d^2 + 2 n^2 d + 3 n d m``. ``kv_bytes_full`` is the size of the cache if nothing had been
    dropped.
    ``kv_tokens_per_layer`` counts the cache's slots when decoding begins, in the longest head.
    ``prefill_chunks`` counts the forward passes over the prompt that `prefill_chunk_size` led to.
    ``cached_tokens`` counts the ids of the prompt that were found in the prefix cache. Where it had
    keys and values, ``prompt_reused`` of the ids were not prefilled and ``prompt_fed`` were; in a
    session both are always counted. Otherwise they are ids of images and videos that the vision
    tower did not encode again.

    Speculation: ``rounds`` are forward passes that checked
    ``drafted`` tokens, of which ``accepted`` were in the answer; ``mean_emitted`` counts the tokens
    of a round, the model's own included, ``mean_accepted`` the drafted ones among them;
    ``accepted_at_depth`` of ``drafted_at_depth`` rounds went beyond that many drafts. ``redecoded``
    counts near ties resolved by the single-token path. ``speculation`` names the drafters, or the
    reason why none ran.

    ``preemptions`` counts how often memory ran short, so that the prompt and the answer so far were
    computed again; costs of the prompt are those of the last time.

    Times are wall times. The engine answers several requests at once, so they include steps that it
    runs for others. ``queue_s`` runs from submission to the start of the prefill. ``ttft_s`` runs
    from RGB images in host memory to the first token on the host, ``queue_s`` and the decode steps
    of other sequences during the prefill included. ``time_vision_s`` and ``time_prefill_s`` are
    those of this prompt, with the decode steps between its blocks. ``time_reduce_s`` is the stages'
    own work. Its part inside the vision tower is also in ``time_vision_s``, that inside the
    language model in ``time_prefill_s``. It does not include the cost of additional rows in the
    tower's own blocks. On a GPU, these three are times of the device. ``tpot_s`` is the mean time
    between two tokens of this answer, with the prefills of other prompts in between, and
    ``tokens_per_s`` its inverse, not the throughput of the engine. ``time_verify_s`` counts the
    forward passes that checked drafts in full for every sequence that shared them, and
    ``time_draft_s`` the drafters of this one, with those forward passes of the model that they
    draft with; on a GPU, both are times of the device, too.

    ``peak_memory_bytes`` is, on a GPU, the peak since a prefill last began while no sequence was
    decoded, with all sequences since then: of this answer alone, where there were no others. On a
    CPU it is the peak of the whole process so far.
    """

    visual_tokens_in: int = 0
    saliency: str = ""
    left_out: list[str] = field(default_factory=list)
    vision_passes: int = 0
    views: int = 0
    views_encoded: int = 0
    visual_tokens_kept: dict[str, int] = field(default_factory=dict)
    visual_tokens_per_layer: list[int] = field(default_factory=list)
    equivalent_tokens: float = 0.0
    flops_prefill: float = 0.0
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    kv_tokens_per_layer: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    prompt_reused: int = 0
    prompt_fed: int = 0
    prefill_chunks: int = 1
    generated_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    mean_emitted: float = 0.0
    mean_accepted: float = 0.0
    drafted_at_depth: list[int] = field(default_factory=list)
    accepted_at_depth: list[int] = field(default_factory=list)
    redecoded: int = 0
    preemptions: int = 0
    speculation: str = ""
    time_draft_s: float = 0.0
    time_verify_s: float = 0.0
    time_media_s: float = 0.0
    time_processor_s: float = 0.0
    time_vision_s: float = 0.0
    time_reduce_s: float = 0.0
    time_prefill_s: float = 0.0
    ttft_s: float = 0.0
    time_total_s: float = 0.0
    queue_s: float = 0.0
    tpot_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_memory_bytes: int = 0

    def __post_init__(self) -> None:
        # Marks around parts whose times the device still has, and what else is read later.
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._later: list[Callable[[], None]] = []

    def timed(self, name: str, device: torch.device) -> AbstractContextManager[None]:
        """Add the time of the block to a field, see `timed`."""
        return timed(name, device, [self])

    def later(self, record: Callable[[], None]) -> None:
        """Call a function that waits for the device when the statistics are `read`."""
        self._later.append(record)

    def read(self) -> None:
        """Add the times of the blocks so far; waits only for blocks that the device still runs."""
        for record in self._later:
            record()
        self._later.clear()
        for name, begin, end in self._marks:
            if not end.query():
                end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        self._marks.clear()

    def include(self, other: Stats) -> None:
        """Add the cost of another part of the prompt before its language model, without waiting."""
        for name in _OF_PARTS:
            self._add(name, getattr(other, name))
        self._marks += other._marks
        for name, count in other.visual_tokens_kept.items():
            self.visual_tokens_kept[name] = self.visual_tokens_kept.get(name, 0) + count

    def restart(self) -> None:
        """Forget the cost of a prompt that is prefilled again."""
        self.read()
        for name in _OF_PARTS:
            setattr(self, name, 0)
        self.left_out, self.visual_tokens_kept = [], {}
        self.preemptions += 1

    def _add(self, name: str, more: float) -> None:
        setattr(self, name, getattr(self, name) + more)

    def layer_tokens(self, per_layer: list[int], config: Any) -> None:
        """Record the visual tokens that entered each layer of a language model."""
        self.visual_tokens_per_layer = per_layer
        self.equivalent_tokens = sum(per_layer) / len(per_layer)
        d, m = config.hidden_size, config.intermediate_size
        self.flops_prefill = float(
            sum(4 * n * d * d + 2 * n * n * d + 3 * n * d * m for n in per_layer)
        )

    def finish(
        self, generated: int, start: float, first: float, end: float, device: torch.device
    ) -> None:
        """Derive the rates from clock readings around the first and the last token."""
        self.read()
        self.generated_tokens = generated
        self.ttft_s, self.time_total_s = first - start, end - start
        if generated > 1:
            self.tpot_s = (end - first) / (generated - 1)
            self.tokens_per_s = 1 / self.tpot_s
        self.peak_memory_bytes = peak_memory(device)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def costs(self, full: Stats | None = None) -> list[display.Cost]:
        """Visual tokens, KV cache and time to the first token, where they are known.

        Parameters
        ----------
        full : Stats, optional
            The full model's for the same request, to compare the time with.
        """
        found = []
        if before := self.visual_tokens_in:
            known = bool(self.visual_tokens_per_layer)
            kept = self.equivalent_tokens if known else before
            texts = display.count(kept), display.count(before)
            found.append(display.Cost("visual tokens", *texts, kept / before if known else None))
        if own := self.kv_bytes:
            all_ = self.kv_bytes_full
            texts = display.size(own), display.size(all_)
            found.append(display.Cost("KV cache", *texts, own / all_ if all_ else None))
        if own_s := self.ttft_s:
            full_s = 0.0 if full is None else full.ttft_s
            texts = display.seconds(own_s), display.seconds(full_s)
            found.append(display.Cost("first token", *texts, own_s / full_s if full_s else None))
        return found

    def __repr__(self) -> str:
        costs = [*map(str, self.costs()), display.plural(self.generated_tokens, "token")]
        return f"Stats({', '.join(costs)} generated)"


@contextmanager
def timed(name: str, device: torch.device, all_: Sequence[Stats]) -> Iterator[None]:
    """Add the time of the block to a field of several `Stats`.

    On a GPU, events mark its ends, and `Stats.read` adds their distance later: a host that waits
    for the device before it gives more work leaves it idle.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        for stats in all_:
            stats._add(name, seconds)
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    yield
    end.record(stream)
    for stats in all_:
        stats._marks.append((name, begin, end))


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of the GPU's allocator since the last reset, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(eq=False)
class Trace:
    """How many layers each visual token entered.

    Parameters
    ----------
    layout : TokenLayout, N rows
        All visual tokens before anything was dropped.
    depth : Tensor, int64, (N,)
        Number of language-model layers that the token entered: 0 when it was dropped before the
        first, ``layers`` when it was never dropped.
    stages : list of (str, int)
        Every stage that ran, with the layer before which it dropped.
    entered : TokenLayout
        The visual rows that entered the language model; ``weight`` above 1 where rows were merged.
    images : list of PIL.Image.Image
        The images, by ``layout.item``.
    frames : list of (int, int, int)
        By ``layout.item`` the video that it is a frame of (-1: none), its index among the frames
        that were read, and their number.
    saliency : str
        As in `Stats`.
    """

    layout: TokenLayout | None = None
    entered: TokenLayout | None = None
    depth: Tensor | None = None
    layers: int = 0
    stages: list[tuple[str, int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    frames: list[tuple] = field(default_factory=list)
    saliency: str = ""

    def begin(self, layout: TokenLayout, layers: int, items: Sequence[ItemGeometry] = ()) -> None:
        self.layout, self.entered, self.layers = layout, layout, layers
        self.depth = torch.full((len(layout),), layers, device=layout.device)
        self.frames = frames_of(items)

    def drop_before(self, layer: int, left: TokenLayout, name: str) -> None:
        """Record that tokens not among ``left`` (visual rows) do not enter ``layer``."""
        assert self.layout is not None and self.depth is not None
        at = torch.searchsorted(self.layout.order, left.order)
        entering = torch.zeros_like(self.depth, dtype=torch.bool).index_fill(0, at, True)
        self.depth = torch.where(entering, self.depth, self.depth.clamp(max=layer))
        if layer == 0:
            self.entered = left
        self.stages.append((name, layer))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists.

        ``tokens`` has one entry per visual token before anything was dropped, ``merged`` one per
        row that entered the language model as something else: its place in ``tokens``, the box
        around what it shows, the number of tokens that it represents (``weight``) and its kind.
        ``items`` has one entry per image or frame, by the ``item`` of a token. Boxes are -1 where
        a token shows no part of an image.
        """
        about = {
            "layers": self.layers,
            "saliency": self.saliency,
            "stages": [{"name": name, "layer": layer} for name, layer in self.stages],
        }
        if self.layout is None or self.depth is None:
            return {**about, "items": [], "tokens": [], "merged": []}
        rows = zip(
            self.layout.item.tolist(),
            self.layout.tile.tolist(),
            self.layout.kind.tolist(),
            _boxes(self.layout),
            self.depth.tolist(),
            strict=True,
        )
        keys = ("item", "tile", "kind", "box", "depth")
        items = [
            {"video": None if video < 0 else video, "frame": frame, "frames": frames}
            for video, frame, frames in self.frames
        ]
        tokens = [dict(zip(keys, row, strict=True)) for row in rows]
        return {**about, "items": items, "tokens": tokens, "merged": self._merged()}

    def _merged(self) -> list[dict[str, Any]]:
        """The rows of ``entered`` that differ from the token in their place."""
        assert self.layout is not None and self.entered is not None
        token = torch.searchsorted(self.layout.order, self.entered.order)
        before = self.layout.select(token)
        rows = zip(
            token.tolist(),
            _boxes(self.entered),
            self.entered.weight.tolist(),
            self.entered.kind.tolist(),
            _boxes(before),
            before.weight.tolist(),
            before.kind.tolist(),
            strict=True,
        )
        keys = ("token", "box", "weight", "kind")
        return [dict(zip(keys, row[:4], strict=True)) for row in rows if row[1:4] != row[4:]]

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def _counts(self) -> list[tuple[str, int]]:
        """Visual tokens before anything was dropped, after each stage, and in all layers."""
        if self.depth is None:
            return [("visual tokens", 0)]
        found = [("visual tokens", len(self.depth))]
        for name, layer in self.stages:
            found.append((f"after {name} before layer {layer}", int((self.depth > layer).sum())))
        return [*found, (f"in all {self.layers} layers", int((self.depth == self.layers).sum()))]

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{count} {name}' for name, count in self._counts())})"


def frames_of(items: Sequence[ItemGeometry]) -> list[tuple]:
    """`Trace.frames` of images."""
    return [(item.video, *item.frame) for item in items]


def _boxes(layout: TokenLayout) -> list[list[float]]:
    return layout.box.nan_to_num(-1).tolist()
