"""What a cache stage receives and returns: the keys and values of one layer of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .former import FormerAttribute

if TYPE_CHECKING:
    from vlmfast.kernels.quantize_kv import Segment

SLOTWISE = ("keys", "values", "order", "position", "visual", "bias", "attention_mass")


@dataclass(frozen=True, eq=False)
class KV:
    """Keys and values of one layer, ``N`` slots in each of ``H`` KV heads.

    Parameters
    ----------
    keys, values : Tensor, (H, N, D)
        In the model's dtype; keys with their rotary ids applied.
    order : Tensor, int64, (H, N)
        Index of each slot's token in the full prompt, ascending. Heads may hold different tokens.
    position : Tensor, int64, (H, N)
        Rotary id under which the key was rotated (the temporal one for M-RoPE).
    visual : Tensor, bool, (H, N)
        Whether the token belongs to an image or a video.
    lengths : Tensor, int64, (H,)
        Valid slots of each head; the others, at the end, are padding.
    bias : Tensor, float32, (H, N), optional
        What attention adds to the logit of each key.
    attention_mass : Tensor, float32, (H, N), optional
        Attention that each slot has received so far, where a decode stage continues to count it.
    segments : tuple of Segment
        Quantized slots; ``keys`` and ``values`` hold the rest.
    """

    keys: Tensor
    values: Tensor
    order: Tensor
    position: Tensor
    visual: Tensor
    lengths: Tensor
    bias: Tensor | None = None
    attention_mass: Tensor | None = None
    mass = FormerAttribute("attention_mass")
    segments: tuple[Segment, ...] = ()

    def __len__(self) -> int:
        return self.keys.shape[1]

    @property
    def valid(self) -> Tensor:
        """Tensor, bool, (H, N): slots that exist."""
        slots = torch.arange(len(self), device=self.keys.device)
        return slots < self.lengths[:, None]

    def select(self, index: Tensor, lengths: Tensor | None = None) -> KV:
        """Slots ``index``: int64, (M,) for all heads or (H, M), ascending.

        ``lengths`` (H,): how many of the M are valid, where heads keep different numbers.
        """
        index = index.expand(len(self.keys), -1)
        if lengths is None:
            lengths = torch.full_like(self.lengths, index.shape[1])
        chosen = {}
        for name in SLOTWISE:
            x = getattr(self, name)
            if x is not None:
                at = index if x.dim() == 2 else index[..., None].expand(-1, -1, x.shape[2])
                chosen[name] = x.gather(1, at)
        return replace(self, **chosen, lengths=lengths)

    def select_mask(self, keep: Tensor) -> KV:
        """Slots that ``keep`` (H, N) marks; heads may keep different numbers."""
        counts = keep.sum(1)
        # A stable sort puts the kept slots first, in their order.
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(counts.max())]
        return self.select(index, counts)
