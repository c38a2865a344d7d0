"""Evaluate with several processes: with ``torchrun``, ``accelerate launch`` or ``--shard``."""

from __future__ import annotations

import os
import re
from datetime import timedelta

from vlmfast.errors import VLMFastError

_TIMEOUT = timedelta(days=7)  # the run time of parts differs


def launched() -> tuple[int, int] | None:
    """Rank of this process and number of processes; None without a launcher."""
    parts = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), parts) if parts > 1 else None


def chosen(text: str | None) -> tuple[int, int] | None:
    """Parse ``0/4`` (the first of four parts); by default, the part of `launched`.

    Raises
    ------
    VLMFastError
        For another format, or under a launcher.
    """
    if text is None:
        return launched()
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not int(match[1]) < int(match[2]):
        raise VLMFastError(f"shard {text!r} is not i/n with i below n, such as 0/4 for the first")
    if launched() is not None:
        raise VLMFastError("--shard cannot be used under a launcher, which sets the part itself")
    return int(match[1]), int(match[2])


def is_first() -> bool:
    """Whether this process prints."""
    part = launched()
    return part is None or part[0] == 0


def own_device() -> str | None:
    """The GPU of this process under a launcher; None without a launcher or GPU."""
    import torch

    if launched() is None or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def meet() -> None:
    """Wait for all processes of a launcher (barrier)."""
    import torch.distributed as dist

    if launched() is None:
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    dist.barrier()


def part_ways() -> None:
    """Destroy the process group created by `meet`."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
