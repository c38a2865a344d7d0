"""Images and videos as they lie in what a processor made of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Media:
    """A picture or a clip within a batch.

    Parameters
    ----------
    tokens : int
        Its placeholders.
    tensors : dict of str to Tensor
        Its part of what the processor made of all pictures and clips.
    size : (int, int)
        Height and width in pixels, of each frame.
    frames : int
        Of a clip: entries that `Adapter.items` wants. 0 of a picture.
    tiles : (int, int), optional
        Rows and columns of crops, where ``size`` does not say it.
    """

    tokens: int
    tensors: dict[str, Tensor]
    size: tuple[int, int]
    frames: int = 0
    tiles: tuple[int, int] | None = None


def runs(ids: Tensor, token: int) -> list[tuple[int, int]]:
    """First index and length of each unbroken run of ``token`` in ``ids`` (S,)."""
    here = (ids == token).int()
    edges = here.diff(prepend=here.new_zeros(1), append=here.new_zeros(1))
    first, behind = (edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten()
    return list(zip(first.tolist(), (behind - first).tolist(), strict=True))


def tiling(views: Tensor) -> tuple[int, int]:
    """Rows and columns of crops (V, C, H, W) of a picture, whose last view is the whole of it.

    A processor may not say it: 1 x 6, 2 x 3, 3 x 2 and 6 x 1 are all six crops. It is the
    arrangement that looks most like the whole.
    """
    crops, whole = views[:-1].float(), views[-1:].float()
    n = len(crops)

    def apart(down: int) -> float:
        rows = [torch.cat(list(row), dim=-1) for row in crops.split(n // down)]
        canvas = torch.cat(rows, dim=-2)[None]
        shown = torch.nn.functional.interpolate(
            canvas, size=whole.shape[-2:], mode="bilinear", antialias=True
        )
        return float((shown - whole).square().mean())

    down = min((d for d in range(1, n + 1) if n % d == 0), key=apart)
    return down, n // down
