"""The forward pass of a decode step, and what drafters read of forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import Context, DecodeContext, PrefillContext, current_context
from vlmfast.core.drafting import Observer, Read, SlotList
from vlmfast.core.layout import TokenLayout
from vlmfast.core.protocols import DrafterStage
from vlmfast.kernels.tree_verify import WORD
from vlmfast.models.base import Adapter

from .attention import has_kernels
from .cache import KVCache
from .calls import called, step_modules
from .fused import fusable, fused_step
from .joint import JointCache

if TYPE_CHECKING:
    from vlmfast.models.base import TextDecoder


@dataclass
class Output:
    """The output of a forward pass over T new tokens of each row.

    Parameters
    ----------
    logits : Tensor, (B, T, V)
    hidden : Tensor, (B, T, D)
        After the last norm.
    aux_hidden_states : Tensor, (B, T, K, D), optional
        Input of the layers `Batch.aux_layers`.
    """

    logits: Tensor
    hidden: Tensor
    aux_hidden_states: Tensor | None = None


def forward(
    adapter: Adapter,
    cache: KVCache | JointCache,
    aux_layers: tuple[int, ...],
    tokens: Tensor,
    offset: Tensor | None = None,
    tree: Tensor | None = None,
    *,
    views: Sequence[Sequence[SlotList]] | None = None,
    observers: Sequence[tuple[int, Observer] | None] | None = None,
) -> Output:
    """The device part of a step, from embedding to logits, which can be captured.

    Parameters
    ----------
    cache : KVCache or JointCache
    aux_layers : tuple of int
        Layers whose input is returned.
    tokens : Tensor, int64, (B, T)
    offset : Tensor, int64, (B, T), optional
        Offset of each token from the next position. Without it, T is 1 and the token is
        counted.
    tree : Tensor, bool, (B, T, T), optional
        Which of the tokens see each other.
    views, observers : optional
        As in `DecodeContext`.
    """
    position = cache.position
    assert position is not None
    position = position if offset is None else position + offset
    context = DecodeContext(cache, tree, views=views, observers=observers)
    if tree is not None and tree.shape[1] <= WORD:
        bits = torch.arange(tree.shape[1], device=tree.device)
        context.ancestors = (tree.long() << bits).sum(-1, keepdim=True)
    if tree is None and isinstance(cache, KVCache) and not cache.split:  # once for all layers
        context.lengths = cache.length + 1
    embeds = adapter.embed(tokens)
    if not cache.split:
        context.kernels = has_kernels(embeds)
    seen: dict[int, Tensor] = {}

    def run() -> Tensor:
        nonlocal seen
        fused = adapter.decoding != "compile" and fusable(adapter)
        step = fused_step if fused else _modules
        hidden, seen = step(adapter, embeds, position, context, aux_layers)
        return hidden.to(embeds.device)  # of a model on several devices

    count = 1 if tree is None else tokens.shape[1]
    if views is None:
        given = {"input_ids": tokens, "position_ids": position, adapter.cache_name: cache}
        hidden, logits = called(adapter, run, given, count)
    else:  # a draft, which is not the model's
        hidden = run()
        logits = adapter.logits(hidden[:, -count:])
    inner = [seen[layer].to(embeds.device) for layer in aux_layers]
    aux = torch.stack(inner, 2) if aux_layers else None
    if tree is None:
        cache.count_token()
    return Output(logits, hidden, aux)


def _modules(
    adapter: Adapter,
    embeds: Tensor,
    position: Tensor,
    context: DecodeContext,
    aux_layers: tuple[int, ...],
) -> tuple[Tensor, dict[int, Tensor]]:
    """`fused_step` through the model's own modules."""
    decoder, cache = adapter.decoder, context.cache
    # Lists of slots and observers change from one pass to the next.
    compiled = adapter.decoding == "compile" and context.views is context.observers is None
    # What was compiled calls no hooks that came later.
    if compiled and not (cache.offsets or aux_layers or step_modules(adapter).own_code):
        decoder = adapter.kept.setdefault("compiled", torch.compile(decoder))
    with (
        shifted(adapter, context, position),
        capture_layer_inputs(adapter.decoder, aux_layers, context) as seen,
    ):
        hidden = decoder(
            inputs_embeds=embeds,
            position_ids=position,
            **{adapter.cache_name: cache},
            use_cache=True,
            vlmfast_context=context,
        ).last_hidden_state
    return hidden, {layer: rows for layer, (rows, _) in seen.items()}


@contextmanager
def shifted(
    adapter: Adapter, context: PrefillContext | DecodeContext, position: Tensor
) -> Iterator[None]:
    """Inside the block, layers renumbered in prefill rotate by their own positions.

    Parameters
    ----------
    context : PrefillContext or DecodeContext
        Other forward passes are not affected.
    position : Tensor, int64, (B, T), or (3, B, T) for M-RoPE
    """
    tables: dict[tuple, tuple[Tensor, ...]] = {}

    def hook(index: int, offset: Tensor) -> Callable[..., tuple[tuple, dict] | None]:
        key = id(offset), adapter.rotary(index)

        def rotate(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if (kwargs.get("vlmfast_context") or current_context.get()) is not context:
                return None
            if key not in tables:
                tables[key] = adapter.tables(args[0], position - offset, index)
            return args, {**kwargs, "position_embeddings": tables[key]}

        return rotate

    with ExitStack() as hooks:
        for index, offset in context.cache.offsets.items():
            layer, own = adapter.decoder.layers[index], hook(index, offset)
            hooks.enter_context(layer.register_forward_pre_hook(own, with_kwargs=True))
        yield


def placed(tokens: Sequence[int], device: torch.device) -> Tensor:
    """Tokens as int64, (B, 1), on a device; a single one is not copied there, but filled in."""
    if len(tokens) == 1:
        return torch.full((1, 1), tokens[0], device=device)
    return torch.tensor(tokens, device=device)[:, None]


# --- what drafters read --------------------------------------------------------------------------

LayerInputs = dict[int, tuple[Tensor, TokenLayout | None]]


@contextmanager
def capture_layer_inputs(
    decoder: TextDecoder, layers: Sequence[int], context: Context
) -> Iterator[LayerInputs]:
    """Capture the input of ``layers`` in a forward pass of ``context``.

    By layer: (B, T, D), and of a prompt the layout of these rows.
    """
    seen: LayerInputs = {}

    def hook(index: int) -> Callable[..., None]:
        def catch(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if kwargs.get("vlmfast_context") is context or current_context.get() is context:
                layout = context.layout if isinstance(context, PrefillContext) else None
                seen[index] = args[0], layout

        return catch

    with ExitStack() as hooks:
        for index in layers:
            layer = decoder.layers[index]
            hooks.enter_context(layer.register_forward_pre_hook(hook(index), with_kwargs=True))
        yield seen


@dataclass
class Watch:
    """Records what drafters read of a prompt.

    Parameters
    ----------
    stages : list of DrafterStage
    depth : int
        Layers of the language model.

    Attributes
    ----------
    layers : tuple of int
        Those whose input is recorded.
    reads : list of Read
        The parts of the prompt so far.
    """

    stages: list[DrafterStage]
    depth: int
    layers: tuple[int, ...] = ()
    reads: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers = tuple(
            sorted({at for s in self.stages for at in s.aux_hidden_state_layers(self.depth)})
        )

    @property
    def features(self) -> bool:
        return any(stage.features for stage in self.stages)

    def remember(
        self,
        context: PrefillContext,
        embeds: Tensor,
        order: Tensor,
        hidden: Tensor,
        seen: LayerInputs,
    ) -> None:
        """Record what the drafters read of the remaining rows.

        Parameters
        ----------
        embeds : Tensor, (S, D)
            Input of the first layer, rows ``order``.
        hidden : Tensor, (S', D)
            After the last norm, the rows of ``context.layout``.
        seen : dict
            Of `capture_layer_inputs`.
        """
        if not self.features and not self.layers:
            self.reads.append(Read([], context.layout, embeds[:0]))
            return
        left = context.layout.order
        inner = []
        for at in self.layers:
            rows, layout = seen[at]
            assert layout is not None
            inner.append(rows[0].to(left.device).index_select(0, _indices(layout.order, left)))
        self.reads.append(
            Read(
                [],
                context.layout,
                embeds.index_select(0, _indices(order, left)),
                hidden if self.features else None,
                torch.stack(inner, 1) if inner else None,
            )
        )


def _indices(order: Tensor, values: Tensor) -> Tensor:
    """Index of each of ``values`` in ``order``; both ascending."""
    return torch.searchsorted(order.contiguous(), values.contiguous())
