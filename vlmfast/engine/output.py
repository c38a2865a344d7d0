"""What a forward pass over new tokens gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Output:
    """What a forward pass over T new tokens of each row gives.

    Parameters
    ----------
    logits : Tensor, (B, T, V)
    hidden : Tensor, (B, T, D)
        After the last norm.
    taps : Tensor, (B, T, K, D), optional
        What went into the layers `Decoder.taps`.
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None = None
