"""static-frames: do not encode a frame of a video again that looks like the last encoded one.

Where the camera and the scene rest, most frames of a video are the same up to noise, and the vision
tower computes the same features again. With ``x_t`` the normalized pixels of frame t, cut into
squares of ``patch`` pixels, and ``r`` the last frame before t that was encoded::

    d(t) = max over squares p of mean over p of |x_t - x_r|
    encode t  if  d(t) > threshold  or  t - r = refresh;  else t gets the features of r

The maximum over squares detects a small object that moves, which a mean over the frame would hide.
The reference is the last *encoded* frame, so that slow changes add up until they exceed the
threshold, and ``refresh`` bounds how old features may be. With ``threshold=0`` only frames that are
equal are reused, which changes no feature, and with ``refresh=1`` every frame is encoded.

The prompt does not change: a frame that is not encoded keeps its tokens and its place in time.
Methods that merge along time (`flashvid`) can follow and drop the repeated tokens.

Nearest work: run-length tokenization (NeurIPS 2024, arXiv 2411.05222) drops single patches of video
transformers by the same difference, 0.1 by default, from the frame before. Eventful Transformers
(ICCV 2023, arXiv 2308.13494) recompute single tokens in each block, by the change of their
activations. Both need towers that take part of a frame. Here whole frames are left out, so every
tower that encodes frames one by one can be used as it is.

- Differences are compared in float32.
- Families that encode several frames together (Qwen-VL) are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from vlmfast.core.params import param
from vlmfast.core.protocols import ViewStage


def change(frame: Tensor, reference: Tensor, patch: int) -> Tensor:
    """The largest mean difference of a square of ``patch`` pixels: float32, ().

    Parameters
    ----------
    frame, reference : Tensor, (V, C, H, W)
        Squares at the right and lower edge may be smaller.
    """
    difference = (frame.float() - reference.float()).abs().mean(1, keepdim=True)
    side = min(patch, *difference.shape[-2:])
    means = avg_pool2d(difference, side, ceil_mode=True, count_include_pad=False)
    return means.max()


@dataclass(frozen=True)
class StaticFrames(ViewStage):
    """Reuses the features of the last encoded frame while a video does not change."""

    name: ClassVar[str] = "static-frames"
    paper: ClassVar[str] = "ours, after NeurIPS 2024, arXiv 2411.05222"
    lead: ClassVar[str | None] = "threshold"

    threshold: float = param(
        0.1,
        "largest change of a square, in normalized pixel values, of a frame that is not encoded",
        ge=0.0,
    )
    refresh: int = param(8, "frames after which one is encoded anyway; 1: encode all", ge=1)
    patch: int = param(14, "side of the squares in pixels", ge=1)

    @property
    def reuses_frames(self) -> bool:
        """Whether any frame may be left out."""
        return self.refresh > 1

    def reused(self, pixels: Tensor) -> list[int]:
        found = [0]
        for frame in range(1, len(pixels)):
            last = found[-1]
            age = frame - last
            if age < self.refresh:
                moved = change(pixels[frame], pixels[last], self.patch)
                same = bool(moved <= torch.tensor(self.threshold))
                found.append(last if same else frame)
            else:
                found.append(frame)
        return found
