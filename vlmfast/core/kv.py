"""What a cache stage receives and returns: the keys and values of one layer of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vlmfast.kernels.quantize_kv import Segment

    from .layout import TokenLayout

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
    segments: tuple[Segment, ...] = ()
    # `counts` and `layout`, with the ``lengths`` for which they hold.
    _known: tuple[Tensor, tuple[int, ...], TokenLayout | None] | None = field(
        default=None, repr=False
    )

    def __len__(self) -> int:
        return self.keys.shape[1]

    @property
    def counts(self) -> tuple[int, ...]:
        """``lengths`` on the host: read from the device once, unless they were `counted`."""
        if self._known is None or self._known[0] is not self.lengths:
            self.counted(self.lengths.tolist())
        assert self._known is not None
        return self._known[1]

    @property
    def layout(self) -> TokenLayout | None:
        """The tokens of all heads, as long as none was dropped; else ``None``."""
        known = self._known
        return None if known is None or known[0] is not self.lengths else known[2]

    def counted(self, counts: Iterable[int], layout: TokenLayout | None = None) -> KV:
        """These keys and values, whose ``lengths``, and tokens, the host knows."""
        object.__setattr__(self, "_known", (self.lengths, tuple(counts), layout))
        return self

    @property
    def valid(self) -> Tensor:
        """Tensor, bool, (H, N): slots that exist."""
        slots = torch.arange(len(self), device=self.keys.device)
        return slots < self.lengths[:, None]

    def select(
        self, index: Tensor, lengths: Tensor | None = None, counts: Iterable[int] | None = None
    ) -> KV:
        """Slots ``index``: int64, (M,) for all heads or (H, M), ascending.

        Parameters
        ----------
        lengths : Tensor, int64, (H,), optional
            How many of the M are valid, where heads keep different numbers.
        counts : iterable of int, optional
            The same on the host, where they are known there.
        """
        index = index.expand(len(self.keys), -1)
        if lengths is None:
            lengths = torch.full_like(self.lengths, index.shape[1])
            counts = [index.shape[1]] * len(index)
        chosen = {}
        for name in SLOTWISE:
            x = getattr(self, name)
            if x is not None:
                at = index if x.dim() == 2 else index[..., None].expand(-1, -1, x.shape[2])
                chosen[name] = x.gather(1, at)
        made = replace(self, **chosen, lengths=lengths)
        return made if counts is None else made.counted(counts)

    def select_mask(self, keep: Tensor, counts: Sequence[int] | None = None) -> KV:
        """Slots that ``keep`` (H, N) marks; heads may keep different numbers.

        ``counts``: how many of each head, where the host knows it; otherwise they are read.
        """
        lengths = keep.sum(1)
        counts = lengths.tolist() if counts is None else counts
        # A stable sort puts the kept slots first, in their order.
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(counts)]
        return self.select(index, lengths, counts)
