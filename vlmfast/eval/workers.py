"""Several processes on one evaluation: under ``torchrun`` or ``accelerate launch``, or by hand."""

from __future__ import annotations

import os
import re
from datetime import timedelta

from vlmfast.errors import VLMFastError

_PATIENCE = timedelta(days=7)  # parts take unequally long


def launched() -> tuple[int, int] | None:
    """Which part a launcher gave to this process, of how many; None without a launcher."""
    parts = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), parts) if parts > 1 else None


def chosen(text: str | None) -> tuple[int, int] | None:
    """Read ``0/4``, the first of four parts, or what a launcher says.

    Raises
    ------
    VLMFastError
        For another text, or for both at once.
    """
    if text is None:
        return launched()
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not int(match[1]) < int(match[2]):
        raise VLMFastError(f"shard {text!r} is not i/n with i below n, such as 0/4 for the first")
    if launched() is not None:
        raise VLMFastError("--shard is for processes started by hand, and a launcher started this")
    return int(match[1]), int(match[2])


def is_first() -> bool:
    """Whether this process is the one that prints."""
    part = launched()
    return part is None or part[0] == 0


def own_device() -> str | None:
    """The GPU that a launcher means for this process; None where there is no choice."""
    import torch

    if launched() is None or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def meet() -> None:
    """Wait until all processes of a launcher are here."""
    import torch.distributed as dist

    if launched() is None:
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_PATIENCE)
    dist.barrier()


def part_ways() -> None:
    """Undo `meet`."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
