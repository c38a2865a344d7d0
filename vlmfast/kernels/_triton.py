"""Optional import of Triton, and the choice between a kernel and its PyTorch reference.

Triton is imported on machines with a GPU, in its interpreter (``TRITON_INTERPRET=1``) and with
``VLMFAST_KERNELS=triton``. Elsewhere the kernels are plain functions that are never called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHOICES = ("torch", "triton")


class _Absent:
    """Placeholder for ``triton`` and ``tl``: kernels can be defined, but not run."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


if INTERPRETED or torch.cuda.is_available() or os.environ.get("VLMFAST_KERNELS") == "triton":
    try:
        import triton
        import triton.language as tl
    except ImportError:  # a platform without Triton: `use_triton` raises if it is requested
        triton = tl = _Absent()
else:
    triton = tl = _Absent()


def use_triton(name: str, *tensors: Tensor | None) -> bool:
    """Whether kernel ``name`` runs on Triton: by default on CUDA; see ``VLMFAST_KERNELS``.

    Raises
    ------
    VLMFastError
        For tensors on several devices or not on the current one, an unknown ``VLMFAST_KERNELS``,
        or Triton where it cannot run. A GPU never falls back to the reference silently.
    """
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise VLMFastError(
            f"{name}: tensors on {', '.join(sorted(map(str, devices)))}; it takes one device"
        )
    wanted = os.environ.get("VLMFAST_KERNELS") or None
    if wanted is not None and wanted not in CHOICES:
        raise VLMFastError(f"VLMFAST_KERNELS={wanted!r} must be one of {', '.join(CHOICES)}")
    device = next(iter(devices), torch.device("cpu"))
    cuda = device.type == "cuda"
    if wanted == "torch" or (wanted is None and not cuda):
        return False
    if isinstance(triton, _Absent):
        raise VLMFastError(f"{name}: Triton is missing; install it, or set VLMFAST_KERNELS=torch")
    if not cuda and not INTERPRETED:
        raise VLMFastError(
            f"{name}: Triton runs on CUDA, or with TRITON_INTERPRET=1 set before vlmfast is "
            "imported; on this device set VLMFAST_KERNELS=torch"
        )
    if cuda and torch.cuda.get_device_capability(device) < (8, 0):
        raise VLMFastError(
            f"{name}: needs a GPU of compute capability 8.0 or newer; set VLMFAST_KERNELS=torch"
        )
    if cuda and device.index != torch.cuda.current_device():
        # Triton launches on the current device, not on that of the tensors.
        raise VLMFastError(
            f"{name}: tensors on {device}, but the current device is "
            f"cuda:{torch.cuda.current_device()}; call it under torch.cuda.device({device.index})"
        )
    return True


def check_heads(name: str, dim: int) -> None:
    """Check that the kernels support heads of ``dim`` channels.

    Raises
    ------
    VLMFastError
        If it is not a multiple of 8 or is above 256.
    """
    if dim % 8 or not 0 < dim <= 256:
        raise VLMFastError(f"{name}: head dimension {dim}; it takes multiples of 8 up to 256")


def upcast(x: Tensor) -> bool:
    """Whether a kernel converts what it loads to float32 before its products.

    float32 must not become TF32, and the interpreter treats bfloat16 as raw bits.
    """
    return INTERPRETED or x.dtype == torch.float32


def padded(size: int, least: int = 16) -> int:
    """Smallest power of two that covers ``size``, at least ``least``."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def pointer(dtype: torch.dtype) -> str:
    """Triton's name for a pointer to ``dtype``, for a `Variant`."""
    return _POINTERS[dtype]


_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel, to compile without a GPU.

    Parameters
    ----------
    kernel : Any
        The jitted function.
    signature : dict of str to str or tuple of str
        Types of its run-time parameters, as Triton writes them (``*fp16``, ``i32``, ``fp32``);
        ``i32:16`` is a multiple of 16. Names that the kernel does not have are ignored.
    constants : dict of str to object
        Its compile-time parameters, and None for absent pointers.
    warps, stages : int
    """

    kernel: Any
    signature: dict[str, str | tuple[str, ...]]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 2
    note: str = field(default="", compare=False)
