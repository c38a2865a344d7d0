"""Jittered images: shifted by one pixel, with noise. Reducers average their scores over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Pixels down and right, view by view.
SHIFTS = ((1, 1), (-1, -1), (1, -1), (-1, 1))
NOISE = 4.0  # standard deviation, where pixel values are 0 to 255


def jittered(tensors: dict[str, Tensor], number: int, processor: Any) -> dict[str, Tensor]:
    """Jittered view ``number`` of the images of a prompt, the same on every device.

    All images and crops get the same shift and the same noise, so that the result for one image
    does not depend on the others. Towers that take patches, which cannot be shifted, get the noise
    alone.

    Parameters
    ----------
    tensors : dict of str to Tensor
        What `Adapter.encode` takes; only those of pixels change.
    number : int
    processor : object
        Hugging Face's image processor, for the scale of the normalized pixels.
    """
    return {
        key: _changed(value, number, _scale(processor)) if key.startswith("pixel_values") else value
        for key, value in tensors.items()
    }


def _changed(pixels: Tensor, number: int, scale: float) -> Tensor:
    image = pixels.dim() >= 4  # (..., C, H, W), else (patches, D)
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(pixels.shape[-3:] if image else pixels.shape[-1:], generator=generator)
    if image:
        pixels = shifted(pixels, *SHIFTS[number % len(SHIFTS)])
    return pixels + (noise * NOISE * scale).to(pixels.device, pixels.dtype)


def shifted(pixels: Tensor, down: int, right: int) -> Tensor:
    """Move the content of images (..., H, W); the border is repeated."""
    height, width = pixels.shape[-2:]
    rows = (torch.arange(height, device=pixels.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=pixels.device) - right).clamp(0, width - 1)
    return pixels.index_select(-2, rows).index_select(-1, columns)


def _scale(processor: Any) -> float:
    """Normalized units of one step of a pixel value of 0 to 255, mean over channels."""
    normalizes = getattr(processor, "do_normalize", True)
    std = (getattr(processor, "image_std", None) if normalizes else None) or 1.0
    values = [std] if isinstance(std, float | int) else list(std)
    return len(values) / sum(values) / 255
