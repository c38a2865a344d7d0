"""Identifies a model, for files that belong to it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from vlmfast.core.placement import weights_of
from vlmfast.engine.features import settings_of_files
from vlmfast.models.base import Adapter


def identity(adapter: Adapter) -> dict[str, Any]:
    """Identify a model by its sizes, dtype and settings, and a hash of samples of every weight."""
    digest = hashlib.sha256()
    picked: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, weight in weights_of(adapter.model):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        flat = weight.detach().reshape(-1)
        if len(flat):
            index = torch.arange(16, device=flat.device) * (len(flat) - 1) // 15
            picked.setdefault(flat.dtype, []).append(flat[index].cpu())
    for samples in picked.values():
        digest.update(torch.cat(samples).view(torch.uint8).numpy().tobytes())
    return {
        "sizes": adapter.sizes(),
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "weights": digest.hexdigest(),
        "settings": settings_of_files(adapter, language=True),
    }
