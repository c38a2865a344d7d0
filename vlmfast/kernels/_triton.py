"""Optional import of Triton, and the choice between a kernel and its PyTorch reference.

`KERNELS` names every kernel, `use_triton` chooses.

Triton is imported on machines with a GPU, in its interpreter (``TRITON_INTERPRET=1``) and with
``VLMFAST_KERNELS=triton``. Elsewhere the kernels are plain functions that are never called.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CHOICES = ("torch", "triton")

# By file, the names that `use_triton` is asked for.
KERNELS = {
    "attention": ("attention",),  # of the engine: whether it calls the attention kernels at all
    "biased_attention": ("biased_attention",),
    "col_stats": ("col_stats", "row_lse"),
    "coverage": ("cover",),
    "decode_mixed": ("decode_mixed",),
    "decode_slots": ("decode_slots",),
    "diversity": ("density_peaks", "dpp", "max_min"),
    "few_rows": ("few_rows",),
    "fused": ("fused_step",),  # of the engine: fused decode steps
    "gather_rows": ("gather_rows",),
    "merge": ("merge",),
    "norm_rope_append": ("residual_norm", "rotate_append"),
    "pool": ("cell_average", "cell_mix", "resample"),
    "quantize_kv": ("quantize_kv",),
    "select": ("mass_count", "top_k"),
    "swiglu": ("swiglu",),
    "tree_verify": ("tree_verify",),
}


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
    except ImportError:  # a platform without Triton
        triton = tl = _Absent()
else:
    triton = tl = _Absent()


@dataclass(frozen=True)
class Choice:
    """The meaning of ``VLMFAST_KERNELS``.

    Parameters
    ----------
    forced : str
        ``torch`` or ``triton``; empty by default.
    off : frozenset of str
        Names in `KERNELS` whose reference runs; all others run as by default.
    """

    forced: str = ""
    off: frozenset[str] = frozenset()


@cache
def parse_choice(text: str) -> Choice:
    """Read a value of ``VLMFAST_KERNELS``: empty, one of `CHOICES`, or ``-name[,-name...]``.

    Raises
    ------
    VLMFastError
        For any other text and for unknown names.
    """
    if text in ("", *CHOICES):
        return Choice(forced=text)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.startswith("-") for part in parts):
        raise VLMFastError(
            f"VLMFAST_KERNELS={text!r} must be one of {', '.join(CHOICES)}, or kernels to turn "
            "off, such as -decode_mixed,-swiglu"
        )
    try:
        return Choice(off=names_of(part[1:] for part in parts))
    except VLMFastError as error:
        raise VLMFastError(f"VLMFAST_KERNELS={text!r}: {error}") from None


def names_of(kernels: Iterable[str]) -> frozenset[str]:
    """What ``kernels`` are called in `use_triton`; each is a file or a name in `KERNELS`.

    Raises
    ------
    VLMFastError
        For an unknown one.
    """
    found: set[str] = set()
    known = {name for names in KERNELS.values() for name in names}
    for kernel in kernels:
        if kernel not in KERNELS and kernel not in known:
            raise VLMFastError(
                f"{kernel!r} is not a kernel; allowed are {', '.join(sorted({*KERNELS, *known}))}"
            )
        found.update(KERNELS.get(kernel, (kernel,)))
    return frozenset(found)


def requested() -> str:
    """The value of ``VLMFAST_KERNELS``, empty by default."""
    return os.environ.get("VLMFAST_KERNELS", "")


def limitation(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device``; None if they can."""
    if device.type not in ("cuda", "cpu"):
        return "the kernels are written for CUDA"
    if device.type == "cuda" and torch.version.hip is not None:
        return "the kernels are not tested on ROCm"
    if isinstance(triton, _Absent):
        return "Triton is missing; install it"
    if device.type == "cpu":
        where = "Triton runs on CUDA, or with TRITON_INTERPRET=1 set before vlmfast is imported"
        return None if INTERPRETED else where
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        return f"compute capability {major}.{minor}, the kernels need 8.0 or newer"
    return None


def use_triton(name: str, *tensors: Tensor | None) -> bool:
    """Whether kernel ``name`` runs on Triton: by default on CUDA, where the kernels can run.

    ``VLMFAST_KERNELS`` chooses (`parse_choice`). On devices without kernels the references run,
    with one warning.

    Raises
    ------
    VLMFastError
        For tensors on several devices, or on another GPU than the current one; for an unknown
        ``VLMFAST_KERNELS``, and for ``VLMFAST_KERNELS=triton`` where Triton cannot run.
    """
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise VLMFastError(
            f"{name}: tensors on {', '.join(sorted(map(str, devices)))}; it takes one device"
        )
    wanted = parse_choice(requested())
    if wanted.forced == "torch" or name in wanted.off:
        return False
    device = next(iter(devices), torch.device("cpu"))
    if not wanted.forced and device.type in ("cpu", "meta"):
        return False
    # Triton launches on the current device, not on that of the tensors.
    cuda = device.type == "cuda"
    current = torch.device("cuda", torch.cuda.current_device()) if cuda else device
    if reason := limitation(current):
        if wanted.forced:
            raise VLMFastError(f"{name}: {reason}; on {current} set VLMFAST_KERNELS=torch")
        _warn(
            f"kernels: {reason}; {current} runs their PyTorch references, with the same answers "
            "but slower, and with more memory for a quantized cache"
        )
        return False
    if device != current:
        raise VLMFastError(
            f"{name}: tensors on {device}, but the current device is {current}; call it under "
            f"torch.cuda.device({device.index})"
        )
    return True


@cache
def _warn(text: str) -> None:
    """Warn once per process and text."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)


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


def contiguous_last(x: Tensor) -> Tensor:
    """With a contiguous last axis, as the kernels require."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


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
    warps : int
    stages : int, optional
        As its launch passes them; by default Triton's.
    fp_fusion : bool
        Whether a product and a sum may become one operation, which rounds once.
    """

    kernel: Any
    signature: Mapping[str, str | tuple[str, ...]]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int | None = None
    fp_fusion: bool = True
