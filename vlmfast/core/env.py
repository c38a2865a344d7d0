"""Versions and hardware of the machine, for bug reports and result files.

No paths, host or user names: the output is meant to be published.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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
_SECRETS = ("KEY", "TOKEN", "PASSWORD", "SECRET")


def environment() -> dict[str, Any]:
    """Versions, hardware and the environment variables that change results.

    Returns
    -------
    dict
        ``vlmfast``, ``python``, ``platform``, ``packages`` (``None`` where one is missing),
        ``cpu``, ``cores``, ``threads``, ``memory_bytes``, ``gpus`` (name, memory, compute
        capability, and how the kernels run there), ``cuda``, ``variables``. Of variables that hold
        a secret or a path, only that they are set.
    """
    import torch

    from vlmfast.version import __version__

    return {
        "vlmfast": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [_gpu(torch.device("cuda", i)) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "variables": {
            key: _shown(key, value)
            for key, value in sorted(os.environ.items())
            if key in _VARIABLES or key.startswith("VLMFAST_")
        },
    }


def _shown(key: str, value: str) -> str:
    hidden = any(word in key for word in _SECRETS) or "/" in value or "\\" in value
    return "(set)" if hidden else value


def _gpu(device: torch.device) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(device)
    return {
        "name": gpu.name,
        "memory_bytes": gpu.total_memory,
        "capability": f"{gpu.major}.{gpu.minor}",
        "kernels": _kernels(device),
    }


def _kernels(device: torch.device) -> str:
    """How the kernels run on a GPU, in a few words."""
    from vlmfast.errors import VLMFastError
    from vlmfast.kernels._triton import limitation, parse_choice

    try:
        choice = parse_choice(os.environ.get("VLMFAST_KERNELS", ""))
    except VLMFastError as error:
        return str(error)
    if choice.forced:
        return choice.forced
    if reason := limitation(device):
        return f"torch: {reason}"
    return f"triton without {', '.join(sorted(choice.off))}" if choice.off else "triton"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
