"""The state of one layer that has no keys and values: a short convolution, linear attention.

Such a layer carries a state of fixed size from token to token. It is kept beside the cache's slots:
in the cache, the layer has slots without width, which count rows as those of other layers do, so
that everything that is done to rows is done to all layers alike. No token can be taken out of a
state. It cannot be cut back to fewer tokens, and a token that was dropped before the layer never
entered it: the rows on both sides of a gap then follow each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from vlmfast.core.buffers import BufferPool

from .kv_layer import KVLayer, Take


class StateLayer(KVLayer):
    """The state of a layer, for one row during prefill and for B rows afterwards.

    Attributes
    ----------
    states : dict of (str, int) to Tensor, (B, ...)
        Kind (``"conv"`` or ``"recurrent"``) and number of each state of the layer; changed in
        place once they exist.
    """

    stateful = True
    record_past = False  # states cannot be taken back

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(pool)
        self.states: dict[tuple[str, int], Tensor] = {}
        self._rows: dict[tuple[str, int], Tensor] = {}  # with more rows than are in use

    # --- what Hugging Face's layers call ---------------------------------------------------------

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """Some versions of Hugging Face's layers read the states here."""
        return self._of("conv")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return self._of("recurrent")

    def _of(self, kind: str) -> dict[int, Tensor]:
        return {index: state for (own, index), state in self.states.items() if own == kind}

    def append_inputs(self, new: Tensor, index: int, kernel: int) -> Tensor:
        """Append (B, D, T) to the last inputs of a convolution.

        Returns
        -------
        Tensor, (B, D, T')
            The inputs so far that the convolution reads, the new ones last.
        """
        if not self.frozen:
            nothing = new.new_zeros(len(new), 1, new.shape[-1], 0)
            self.update(nothing, nothing)
        before = self.states.get(("conv", index))
        inputs = new if before is None else torch.cat([before, new], -1)
        inputs = pad(inputs, (max(kernel - inputs.shape[-1], 0), 0))
        self.set("conv", index, inputs[..., -kernel:])
        return inputs

    def set(self, kind: str, index: int, state: Tensor) -> Tensor:
        """Replace a state by (B, ...)."""
        known = self.states.get((kind, index))
        if known is None:
            known = self.states[kind, index] = state.clone()
        elif known is not state:
            known.copy_(state)
        return known

    # --- rows ------------------------------------------------------------------------------------

    def state(self, index: int) -> dict[tuple, Tensor]:
        own = {(index, *name): buffer for name, buffer in self._rows.items()}
        return super().state(index) | own

    def resized(self, size: int, take: Take) -> Callable[[], None]:
        rows, buffers = len(self.max_lengths), {}
        for name, state in self.states.items():
            buffers[name] = state.new_zeros(size, *state.shape[1:])
            buffers[name][:rows] = state
        move_slots = super().resized(size, take)

        def move() -> None:
            move_slots()
            self._rows = buffers

        return move

    def show(self, rows: int) -> None:
        super().show(rows)
        for name, buffer in self._rows.items():
            self.states[name] = buffer[:rows]

    def join(self, other: KVLayer, source: int) -> None:
        assert isinstance(other, StateLayer)
        row = len(self.max_lengths)
        for name, buffer in self._rows.items():
            buffer[row] = other.states[name][source]
        super().join(other, source)

    def leave(self, row: int, *, keep: bool) -> None:
        last = len(self.max_lengths) - 1
        for buffer in self._rows.values():
            buffer[row] = buffer[last]
        super().leave(row, keep=keep)

    def release(self) -> None:
        super().release()
        self.states, self._rows = {}, {}

    # --- sizes -----------------------------------------------------------------------------------

    def slots(self, row: int) -> int:
        """None: what a row costs here does not depend on its tokens."""
        return 0
