"""Batched decoding: forward passes over the new tokens of sequences, and their cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import Context, DecodeContext
from vlmfast.core.protocols import DecodeStage
from vlmfast.core.tree import Tree
from vlmfast.kernels.tree_verify import WORD
from vlmfast.models.base import Adapter

from .cache import KVCache, RowSlots
from .fused import fusable, fused_step
from .graphs import Graphs, StepGraph
from .hidden_states import capture_layer_inputs
from .output import Output

_WIDTHS = (2, 4, 8, 16, 32, 48, 64)  # nodes of a captured tree


def lasting(function: Callable) -> Callable:
    """Run without gradients, and outside of inference mode, whose tensors become read-only."""
    return torch.inference_mode(False)(torch.no_grad()(function))


class DecodeRow(Protocol):
    """What a decoder must know about one of its sequences.

    Attributes
    ----------
    stages : list of DecodeStage
    notes : dict
        As in `PrefillContext`.
    prompt_slots : Tensor, int64, (L, H)
        Slots of the tail when decoding began.
    steps : int
        Tokens that have been fed since; the decoder counts them.
    aux_layers : tuple of int
        Layers whose input its drafters read.
    """

    stages: list[DecodeStage]
    notes: dict[str, dict[str, Any]]
    prompt_slots: Tensor | None
    steps: int

    @property
    def aux_layers(self) -> tuple[int, ...]: ...


class Decoder:
    """Sequences that are decoded together, one token each per step.

    Parameters
    ----------
    adapter : Adapter
    cache : KVCache
        Frozen.
    position : Tensor, int64, (B, 1), or (3, B, 1) for M-RoPE
        Rotary ids of the next tokens; changed in place.
    rows : list of DecodeRow
    """

    def __init__(
        self, adapter: Adapter, cache: KVCache, position: Tensor, rows: Many[DecodeRow]
    ) -> None:
        self.adapter, self.cache, self.position = adapter, cache, position
        self.context = DecodeContext(cache=cache)
        self.graph: StepGraph | None = None
        self.seat(rows)
        # Layers whose rows were renumbered in prefill, and by how much; on the device once.
        shifts = {index: tuple(layer.shift) for index, layer in enumerate(cache.layers)}
        self._shifts = {index: shift for index, shift in shifts.items() if any(shift)}
        self._offsets = {
            shift: torch.tensor(shift, device=position.device)[:, None]
            for shift in set(self._shifts.values())
        }

    def seat(self, rows: Many[DecodeRow]) -> None:
        """Set the sequences whose cache this is."""
        self.rows = list(rows)
        self.aux_layers = tuple(sorted({layer for row in rows for layer in row.aux_layers}))

    @staticmethod
    def join(decoders: Many[Decoder]) -> Decoder:
        """One decoder for the sequences of all, which must not be used afterwards."""
        if len(decoders) == 1:
            return decoders[0]
        position = torch.cat([decoder.position for decoder in decoders], dim=-2)
        cache = KVCache.cat([decoder.cache for decoder in decoders])
        for decoder in decoders:
            decoder.retire()
        rows = [row for decoder in decoders for row in decoder.rows]
        return Decoder(decoders[0].adapter, cache, position, rows)

    def select(self, rows: Many[int]) -> Decoder:
        """A decoder for ``rows`` alone; this one must not be used afterwards."""
        self.cache.select(rows)
        index = torch.tensor(list(rows), device=self.position.device)
        position = self.position.index_select(-2, index)
        self.retire()
        return Decoder(self.adapter, self.cache, position, [self.rows[row] for row in rows])

    def next(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens`` (B, 1); returns the logits (B, V) after them. No host sync."""
        self.run_decode_stages()
        return self.feed(tokens).logits[:, -1]

    def feed(self, tokens: Tensor) -> Output:
        """As `next`, without the decode stages; returns the full output."""
        self.cache.reserve(1)
        output = self.captured(tokens) if self.captures else self.forward(tokens)
        self.cache.advance_host()
        return output

    def verify(self, trees: Many[Tree]) -> Output:
        """Check one tree per row, after its cached tokens; `accept` then counts tokens."""
        width = max(len(tree) for tree in trees)
        if self.captures:  # few widths, so that few steps are captured
            width = next(w for w in _WIDTHS if w >= width) if width <= _WIDTHS[-1] else width
        tokens = torch.zeros(len(trees), width, dtype=torch.int64)
        offset, mask = torch.zeros_like(tokens), torch.eye(width, dtype=torch.bool)
        mask = mask.repeat(len(trees), 1, 1)
        for row, tree in enumerate(trees):
            n = len(tree)
            tokens[row] = tree.tokens[0]  # padding: any token, masked out
            tokens[row, :n] = torch.tensor(tree.tokens)
            offset[row, :n] = torch.tensor(tree.depths)
            mask[row, :n, :n] = tree.mask()
            if self.cache.attention_mass:  # padding must not count as a reader
                mask[row, n:] = False
        given = tuple(x.to(self.position.device) for x in (tokens, offset, mask))
        self.cache.reserve(width)
        return self.captured(*given) if self.captures else self.forward(*given)

    def accept(self, paths: Many[Many[int]]) -> None:
        """Count the nodes of ``paths``, root first, of the trees that `verify` has checked."""
        counts = [len(path) for path in paths]
        longest = max(max(counts), 1)
        device = self.position.device
        index = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
        moves = any(list(path) != list(range(len(path))) for path in paths)
        self.cache.accept(index.to(device), counts, moves=moves)
        self.position.add_(torch.tensor(counts, device=device)[:, None])
        for row, count in zip(self.rows, counts, strict=True):
            row.steps += count - 1  # `run_decode_stages` has counted the root

    def rewind(self, tokens: int) -> None:
        """Remove the last ``tokens`` of every row."""
        self.cache.crop(tokens)
        self.position.sub_(tokens)

    def spare(self, number: int) -> int:
        """How many drafted tokens a row may take before a decode stage has work to do."""
        row, spare = self.rows[number], 1 << 30
        if any(
            stage.attention_mass for stage in row.stages
        ):  # what rejected tokens attend to would count
            return 0
        for stage in row.stages:
            assert row.prompt_slots is not None
            gap = -row.steps % stage.every
            quiet = min(
                stage.quiet(self._slots(number, layer, prompt), layer)
                for layer, prompt in enumerate(row.prompt_slots)
            )
            spare = min(spare, max(gap, quiet, 0))
        return spare

    @property
    def captures(self) -> bool:
        """Whether steps are captured: on CUDA, unless the user chose otherwise."""
        mode = self.adapter.decoding
        return mode == "graph" or (mode == "auto" and self.position.is_cuda)

    @property
    def graphs(self) -> Graphs:
        return self.adapter.kept.setdefault("graphs", Graphs())

    def captured(self, *given: Tensor) -> Output:
        """Run a step through a graph, captured where none fits. Arguments as in `forward`."""
        if self.graph is None or not self.graph.serves(self):
            if self.graph is not None:
                # Some buffers may still belong to the old step: copy them before it is reused.
                own = self.graph.state
                self.load({k: x.clone() if own.get(k) is x else x for k, x in self.state().items()})
                self.retire()
            self.graph = self.graphs.get(self)
            self.cache.mark_graph_owned(True)
        return self.graph.replay(self, *given)

    def retire(self) -> None:
        """Make the captured step available to others; its buffers must be unused by now."""
        if self.graph is not None:
            self.graphs.put(self.graph)
            self.graph = None
            self.cache.mark_graph_owned(False)

    def release(self) -> None:
        """Return all buffers; the decoder must not be used afterwards."""
        self.cache.release()
        self.retire()

    def forward(
        self, tokens: Tensor, offset: Tensor | None = None, tree: Tensor | None = None
    ) -> Output:
        """The device part of a step, from embedding to logits, which can be captured.

        Parameters
        ----------
        tokens : Tensor, int64, (B, T)
        offset : Tensor, int64, (B, T), optional
            Offset of each token from the next position. Without it, T is 1 and the token is
            counted.
        tree : Tensor, bool, (B, T, T), optional
            Which of the tokens see each other.
        """
        position = self.position if offset is None else self.position + offset
        self.context.tree, self.context.ancestors = tree, None
        if tree is not None and tree.shape[1] <= WORD:
            bits = torch.arange(tree.shape[1], device=tree.device)
            self.context.ancestors = (tree.long() << bits).sum(-1, keepdim=True)
        embeds, compiles = self.adapter.embed(tokens), self.adapter.decoding == "compile"
        if not compiles and fusable(self.adapter):
            offsets = {layer: self._offsets[shift] for layer, shift in self._shifts.items()}
            hidden, seen = fused_step(
                self.adapter, embeds, position, self.cache, self.context, offsets, self.aux_layers
            )
        else:
            hidden, seen = self._modules(embeds, position)
        aux_hidden_states = (
            torch.stack([seen[layer] for layer in self.aux_layers], 2) if self.aux_layers else None
        )
        if tree is not None:
            return Output(self.adapter.logits(hidden), hidden, aux_hidden_states)
        self.cache.advance_device()
        self.position.add_(1)
        return Output(self.adapter.logits(hidden[:, -1])[:, None], hidden, aux_hidden_states)

    def _modules(self, embeds: Tensor, position: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """`fused_step` through the model's own modules."""
        decoder = self.adapter.decoder
        with (
            self.shifted(self.context, position),
            capture_layer_inputs(decoder, self.aux_layers, self.context) as seen,
        ):
            if self.adapter.decoding == "compile":
                decoder = self.adapter.kept.setdefault("compiled", torch.compile(decoder))
            hidden = decoder(
                inputs_embeds=embeds,
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
                vlmfast_context=self.context,
            ).last_hidden_state
        return hidden, seen

    def shallow(self, number: int, token: int, drafted: int, layers: Many[int]) -> Tensor:
        """Logits (V,) after ``token`` of one row, computed by ``layers`` alone.

        Parameters
        ----------
        drafted : int
            Tokens that were drafted in this way before it; nothing is counted.
        layers : sequence of int
        """
        decoder, cache = self.adapter.decoder, self.cache
        tokens = torch.full((len(self.rows), 1), token, device=self.position.device)
        cache.advance(drafted)
        cache.reserve(1)
        position = self.position + drafted
        self.context.tree = None
        if cache.attention_mass:  # what is drafted must not count as a reader of other rows
            self.context.tree = torch.zeros(len(self.rows), 1, 1, dtype=torch.bool)
            self.context.tree[number] = True
            self.context.tree = self.context.tree.to(position.device)
        try:
            with self.shifted(self.context, position):
                hidden = self.adapter.embed(tokens)
                for index in layers:
                    hidden = decoder.layers[index](
                        hidden,
                        attention_mask=None,
                        position_ids=position,
                        past_key_values=cache,
                        use_cache=True,
                        position_embeddings=self.adapter.tables(hidden, position, index),
                        vlmfast_context=self.context,
                    )
            return self.adapter.logits(decoder.norm(hidden)[number, -1])
        finally:
            cache.advance(-drafted)

    def state(self) -> dict[tuple, Tensor]:
        """Every tensor except the weights that a step reads or writes."""
        shifts = {("shift", *shift): offset for shift, offset in self._offsets.items()}
        return {("position",): self.position, **shifts, **self.cache.state()}

    def load(self, state: dict[tuple, Tensor]) -> None:
        """Switch to the tensors of ``state``, which hold the same values."""
        self.position = state["position",]
        self._offsets = {shift: state["shift", *shift] for shift in self._offsets}
        self.cache.load(state)

    def run_decode_stages(self) -> None:
        """Run the decode stages of each row on its cache."""
        for number, row in enumerate(self.rows):
            for stage in row.stages:
                if row.steps % stage.every == 0:
                    assert row.prompt_slots is not None
                    for layer, prompt in enumerate(row.prompt_slots):
                        stage.step(self._slots(number, layer, prompt), layer)
            row.steps += 1

    def _slots(self, number: int, layer: int, prompt: Tensor) -> RowSlots:
        notes = self.rows[number].notes
        return RowSlots(self.cache, layer, number, prompt, notes, self.adapter.rotate)

    @contextmanager
    def shifted(self, context: Context, position: Tensor) -> Iterator[None]:
        """Inside the block, layers renumbered in prefill rotate by their own positions."""
        tables: dict[tuple, tuple[Tensor, ...]] = {}

        def hook(index: int, shift: tuple[int, ...]) -> Callable[..., tuple[tuple, dict] | None]:
            key = shift, self.adapter.rotary(index)

            def rotate(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
                if kwargs.get("vlmfast_context") is not context:
                    return None
                if key not in tables:
                    own = position - self._offsets[shift]
                    tables[key] = self.adapter.tables(args[0], own, index)
                return args, {**kwargs, "position_embeddings": tables[key]}

            return rotate

        handles = [
            self.adapter.decoder.layers[index].register_forward_pre_hook(
                hook(index, shift), with_kwargs=True
            )
            for index, shift in self._shifts.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
