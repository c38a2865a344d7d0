"""Nested values (lists, tuples, dicts, dataclasses) and the tensors in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def moved(value: Any, device: torch.device | str) -> Any:
    """Nested values with all tensors on ``device``; those already there are shared, not copied."""
    return mapped(value, lambda tensor: tensor.to(device))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested values with ``change`` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: mapped(getattr(value, f.name), change) for f in fields(value)}
        return type(value)(**parts)
    return value
