"""Launches and host reads of a request, on the path that CUDA takes, counted without a GPU.

The model runs on a pretended GPU (`devices`). A launch is an operation that is no view, or a launch
of a Triton kernel: a lower bound, since an operation of PyTorch may launch several kernels. A read
is what the host waits for, or copies: `devices.READS`. Nothing depends on the processor.

Kernels of this package run twice: as on a GPU, to count, where a launch computes nothing; and as
their PyTorch references, whose values go on.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor, nn

from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError
from vlmfast.kernels import _triton

from .devices import READS, Placed, Watch, pretended

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.api.vlm import VLM

SIZE = (672, 672)
QUESTION = "How many yellow objects are there?"
_TOKENS = 3  # of an answer: the second decode step is like later ones
_DRAFTED = 16  # of an answer with drafts, so that several rounds check some
_CHOICES = ("attention", "fused_step")  # names of `use_triton` that are no kernels


@dataclass(frozen=True)
class Cost:
    """What a part of a request costs.

    Parameters
    ----------
    launches : int
    attention : int
        The calls of attention among them.
    reads : dict of str to int
        Reads of the host by kind, without those that are 0.
    """

    launches: int
    attention: int
    reads: dict[str, int]

    @property
    def total_reads(self) -> int:
        return sum(self.reads.values())

    @staticmethod
    def of(counts: Counter[str]) -> Cost:
        reads = {kind: counts[kind] for kind in READS if counts[kind]}
        return Cost(counts["launches"], counts["attention"], reads)


@dataclass(frozen=True)
class Request:
    """The cost of one request, the second with images of its size.

    Parameters
    ----------
    recipe : str
    visual_tokens : int
        Before any was dropped.
    blocks : list of Cost
        By block of the vision tower, with the stages in it.
    layers : list of Cost
        By layer of the language model during prefill, with the stages in it.
    first_token : Cost
        Until the first token is on the host, everything included.
    places : dict of str to int
        The reads among these by function and kind, most first.
    step : Cost
        One decode step after the first; of those of a drafter, one with the most launches, as it
        drafts and checks. Captured, it is one launch.
    """

    recipe: str
    visual_tokens: int
    blocks: list[Cost]
    layers: list[Cost]
    first_token: Cost
    places: dict[str, int]
    step: Cost


@dataclass(frozen=True)
class Launches:
    """What ``vlmfast check --launches`` has counted.

    Parameters
    ----------
    size : (int, int)
        Width and height of the image.
    requests : list of Request
    """

    size: tuple[int, int]
    requests: list[Request]

    def to_dict(self) -> dict[str, Any]:
        """Everything; parts that follow each other and cost the same stand in one entry."""
        return {
            "image": list(self.size),
            "requests": [
                {
                    **asdict(request),
                    "blocks": runs(request.blocks),
                    "layers": runs(request.layers),
                }
                for request in self.requests
            ],
        }


def runs(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Costs with the numbers of the first and the last part of each run of equal ones."""
    found: list[dict[str, Any]] = []
    for number, cost in enumerate(costs):
        if number and cost == costs[number - 1]:
            found[-1]["to"] = number
        else:
            found.append({"from": number, "to": number, **asdict(cost)})
    return found


# --- kernels -------------------------------------------------------------------------------------


@contextmanager
def counted_kernels(watch: Watch) -> Iterator[None]:
    """Inside the block, every kernel of the package is counted as on a GPU.

    Raises
    ------
    VLMFastError
        Where Triton was not imported.
    """
    from triton.runtime.jit import KernelInterface

    import vlmfast.engine.engine  # noqa: F401  # with the modules whose names are replaced below
    from vlmfast.engine import fused

    if isinstance(_triton.triton, _triton._Absent):
        raise VLMFastError("launches are counted where Triton is imported: VLMFAST_KERNELS=triton")
    running: list[str] = []  # the kernel that is counted now

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: watch.add("launches")

    def use_triton(name: str, *tensors: Tensor | None) -> bool:
        where = {x.device.type for x in tensors if x is not None}
        if not (running or name in _CHOICES) and "cuda" in where and watch.active:
            raise VLMFastError(f"{name} is called by a name that is not counted")
        return known(name, *tensors)

    def twice(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            if running or not watch.active:
                return kernel(*args, **kwargs)
            running.append(kernel.__name__)
            try:
                with watch.blank():
                    kernel(*args, **kwargs)
            finally:
                running.pop()
            with watch.paused(), mock.patch.dict(os.environ, VLMFAST_KERNELS="torch"):
                return kernel(*args, **kwargs)

        return call

    known = _triton.use_triton
    with ExitStack() as stack:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if value is known:
                    stack.enter_context(mock.patch.object(module, name, use_triton))
                elif _is_kernel(value):
                    stack.enter_context(mock.patch.object(module, name, twice(value)))
        patch = functools.partial(mock.patch.object)
        stack.enter_context(patch(KernelInterface, "__getitem__", launch))
        stack.enter_context(patch(fused, "_PLAIN", (*fused._PLAIN, Placed)))
        yield


def _is_kernel(value: Any) -> bool:
    """Whether a function of `vlmfast.kernels` chooses between a kernel and its reference."""
    code = getattr(value, "__code__", None)
    module = getattr(value, "__module__", None) or ""
    inside = module.startswith("vlmfast.kernels.") and module != _triton.__name__
    return inside and code is not None and "use_triton" in code.co_names


def _modules() -> list[Any]:
    """The package's modules, all that call kernels among them."""
    from vlmfast.core.registry import stage_class, stage_names

    for name in stage_names():
        stage_class(name)
    return [module for name, module in list(sys.modules.items()) if name.startswith("vlmfast.")]


# --- requests ------------------------------------------------------------------------------------


class Tokens:
    """A streamer that keeps what was counted when each token had arrived."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.counts = watch, list[Counter[str]]()
        self.places = Counter[tuple[str, str]]()

    def put(self, tokens: Tensor) -> None:
        if not self.counts:
            self.places = self.watch.places.copy()
        self.counts.append(self.watch.counts.copy())

    def end(self) -> None:
        pass


class Steps:
    """What is counted in each decode step."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.counts = watch, list[Counter[str]]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count inside the block."""
        from vlmfast.engine.rounds import Rounds

        own = Rounds.run

        def run(rounds: Any, batch: Any) -> None:
            before = self.watch.counts.copy()
            own(rounds, batch)
            self.counts.append(self.watch.counts - before)

        with mock.patch.object(Rounds, "run", run):
            yield


class Parts:
    """What is counted before the first token in each of a list of modules, one after another.

    A part reaches from its module's begin to that of the next one: hooks between them belong to it.
    """

    def __init__(self, watch: Watch, modules: Sequence[nn.Module], tokens: Tokens) -> None:
        self.watch, self.modules, self.tokens = watch, modules, tokens
        self.counts = [Counter[str]() for _ in modules]
        self._running: tuple[int, Counter[str]] | None = None

    def _begin(self, number: int, module: nn.Module, args: Any) -> None:
        self._end()
        if not self.tokens.counts:
            self._running = number, self.watch.counts.copy()

    def _last(self, module: nn.Module, args: Any, output: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            number, before = self._running
            self.counts[number] += self.watch.counts - before
            self._running = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count inside the block."""
        with ExitStack() as hooks:
            for number, module in enumerate(self.modules):
                begin = functools.partial(self._begin, number)
                hooks.enter_context(module.register_forward_pre_hook(begin))
            if self.modules:
                hooks.enter_context(self.modules[-1].register_forward_hook(self._last))
            yield


def count(vlm: VLM, recipe: str, watch: Watch, size: tuple[int, int] = SIZE) -> Request:
    """Count a request on a model that is on a pretended GPU.

    Parameters
    ----------
    size : (int, int)
        Width and height of its image.
    """
    given: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    vlm.ask(QUESTION, images=_image(size, 0), recipe=recipe, max_new_tokens=1, **given)
    image, tokens, steps = _image(size, 1), Tokens(watch), Steps(watch)
    drafts = any(isinstance(stage, DrafterStage) for stage in Recipe.parse(recipe))
    blocks = Parts(watch, vlm.adapter.vision_blocks(), tokens)
    layers = Parts(watch, list(vlm.adapter.decoder.layers), tokens)
    watch.counts.clear()
    watch.places.clear()
    with blocks.watched(), layers.watched(), steps.watched():
        answer = vlm.ask(
            QUESTION,
            images=image,
            recipe=recipe,
            streamer=tokens,
            max_new_tokens=_DRAFTED if drafts else _TOKENS,
            **given,
        )
    step = max(steps.counts[1:] or steps.counts, key=lambda counts: counts["launches"])
    return Request(
        recipe,
        answer.stats.visual_tokens_in,
        [Cost.of(counts) for counts in blocks.counts],
        [Cost.of(counts) for counts in layers.counts],
        Cost.of(tokens.counts[0]),
        _sorted(tokens.places),
        Cost.of(step),
    )


def _sorted(places: Counter[tuple[str, str]]) -> dict[str, int]:
    order = sorted(places.items(), key=lambda item: (-item[1], item[0]))
    return {f"{reader}: {kind}": times for (reader, kind), times in order}


def _image(size: tuple[int, int], seed: int) -> Image.Image:
    from vlmfast.eval.bench import drawn

    return drawn(max(size), seed).resize(size)


# --- the process that counts ---------------------------------------------------------------------


def counted(
    model: str, recipes: Sequence[str], size: tuple[int, int] = SIZE, dtype: str = "auto"
) -> list[Request]:
    """Count a request under each recipe, in a process that imports Triton without a GPU.

    Parameters
    ----------
    model : str
        As in `VLM.from_pretrained`.
    size, dtype
        As in `count` and `VLM.from_pretrained`.

    Raises
    ------
    VLMFastError
        For whatever the model or a recipe is refused, and where Triton is missing.
    """
    environment = {
        "VLMFAST_KERNELS": "triton",
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    spawned = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawned) as process:
        return process.submit(_counted, model, recipes, size, dtype).result()


def _counted(
    model: str, recipes: Sequence[str], size: tuple[int, int], dtype: str
) -> list[Request]:
    from vlmfast.api.vlm import VLM

    os.environ.pop("VLMFAST_KERNELS")  # it was for the import of Triton
    loaded = VLM.from_pretrained(model, device="cpu", dtype=dtype)
    found = []
    with pretended(kernels=True) as watch, counted_kernels(watch):
        nn.Module.to(loaded.model, "cuda")
        for recipe in recipes:
            vlm = VLM(loaded.model, loaded.processor, decoding="eager")
            found.append(count(vlm, recipe, watch, size))
    return found
