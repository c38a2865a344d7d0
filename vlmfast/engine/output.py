"""The output of a forward pass over new tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Output:
    """The output of a forward pass over T new tokens of each row.

    Parameters
    ----------
    logits : Tensor, (B, T, V)
    hidden : Tensor, (B, T, D)
        After the last norm.
    aux_hidden_states : Tensor, (B, T, K, D), optional
        Input of the layers `RowGroup.aux_layers`.
    """

    logits: Tensor
    hidden: Tensor
    aux_hidden_states: Tensor | None = None
