"""How much memory caches may take."""

from __future__ import annotations

import math
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def total_bytes(device: torch.device) -> float:
    """Memory of a device, infinite where it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return _meminfo("MemTotal")


def free_bytes(device: torch.device) -> float:
    """Memory of a device that can still be allocated, infinite where it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> float:
    """An entry of Linux' memory statistics, in bytes."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return math.inf
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return math.inf if found is None else float(found.split()[1]) * 1024
