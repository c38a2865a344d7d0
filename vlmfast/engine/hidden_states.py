"""Auxiliary hidden states for drafters, captured by hooks on decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import Context, PrefillContext, current_context
from vlmfast.core.drafting import Read
from vlmfast.core.protocols import DrafterStage

if TYPE_CHECKING:
    from vlmfast.models.base import TextDecoder


@contextmanager
def capture_layer_inputs(
    decoder: TextDecoder, layers: Sequence[int], context: Context
) -> Iterator[dict[int, Tensor]]:
    """Capture the input of ``layers`` in a forward pass of ``context``: (B, T, D) by layer."""
    seen: dict[int, Tensor] = {}

    def hook(index: int) -> Callable[..., None]:
        def catch(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if kwargs.get("vlmfast_context") is context or current_context.get() is context:
                seen[index] = args[0]

        return catch

    with ExitStack() as hooks:
        for index in layers:
            layer = decoder.layers[index]
            hooks.enter_context(layer.register_forward_pre_hook(hook(index), with_kwargs=True))
        yield seen


@contextmanager
def nothing_seen() -> Iterator[dict[int, Tensor]]:
    """`Watch.over` where no drafter reads the prompt."""
    yield {}


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
    _orders: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = tuple(
            sorted({at for s in self.stages for at in s.aux_hidden_state_layers(self.depth)})
        )

    @property
    def features(self) -> bool:
        return any(stage.features for stage in self.stages)

    @contextmanager
    def over(self, decoder: TextDecoder, context: PrefillContext) -> Iterator[dict[int, Tensor]]:
        """Capture the auxiliary hidden states of one forward pass of a prompt, and their rows."""

        def hook(index: int) -> Callable[..., None]:
            def note(*_: Any) -> None:
                if current_context.get() is context and context.layout is not None:
                    self._orders[index] = context.layout.order

            return note

        with ExitStack() as hooks:
            for at in self.layers:
                hooks.enter_context(decoder.layers[at].register_forward_pre_hook(hook(at)))
            yield hooks.enter_context(capture_layer_inputs(decoder, self.layers, context))

    def remember(
        self,
        context: PrefillContext,
        embeds: Tensor,
        order: Tensor,
        hidden: Tensor,
        seen: dict[int, Tensor],
    ) -> None:
        """Record what the drafters read of the remaining rows.

        Parameters
        ----------
        embeds : Tensor, (S, D)
            Input of the first layer, rows ``order``.
        hidden : Tensor, (S', D)
            After the last norm, the rows of ``context.layout``.
        seen : dict of int to Tensor
            Captured by `over`.
        """
        if not self.features and not self.layers:
            self.reads.append(Read([], context.layout, embeds[:0]))
            return
        left = context.layout.order
        aux_hidden_states = None
        if self.layers:
            aux_hidden_states = torch.stack(
                [
                    seen[at][0]
                    .to(left.device)
                    .index_select(0, _indices(self._orders.pop(at, left), left))
                    for at in self.layers
                ],
                1,
            )
        rows = embeds.index_select(0, _indices(order, left))
        self.reads.append(
            Read([], context.layout, rows, hidden if self.features else None, aux_hidden_states)
        )


def _indices(order: Tensor, values: Tensor) -> Tensor:
    """Index of each of ``values`` in ``order``; both ascending."""
    return torch.searchsorted(order.contiguous(), values.contiguous())
