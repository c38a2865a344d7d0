"""Versions and hardware of the machine, for bug reports and result files.

No paths, host or user names: the output is meant to be published.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "transformers",
    "timm",
    "open_clip_torch",
    "numpy",
    "pillow",
    "safetensors",
    "decord",
    "av",
)
_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "TRITON_INTERPRET")


def environment() -> dict[str, Any]:
    """Versions, hardware and the environment variables that change results.

    Returns
    -------
    dict
        ``vlmfast``, ``python``, ``platform``, ``packages`` (``None`` where one is missing),
        ``cpu``, ``cores``, ``threads``, ``memory_bytes``, ``gpus``, ``cuda``, ``variables``.
    """
    import torch

    from vlmfast.version import __version__

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "vlmfast": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "cuda": torch.version.cuda,
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key in _VARIABLES or key.startswith("VLMFAST_")
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
