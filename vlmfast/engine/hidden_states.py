"""Auxiliary hidden states for drafters, captured by hooks on decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import Context, PrefillContext, current_context
from vlmfast.core.drafting import Read
from vlmfast.core.layout import TokenLayout
from vlmfast.core.protocols import DrafterStage

if TYPE_CHECKING:
    from vlmfast.models.base import TextDecoder


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
