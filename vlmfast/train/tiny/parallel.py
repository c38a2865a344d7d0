"""Data-parallel training in processes of few threads.

On a shared CPU, threads synchronize thousands of times per step, processes only once.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Group:
    """The processes of one run; a group of one does nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.children: list[Any] = []

    def agree(self, progress: float, stop: bool) -> tuple[float, bool]:
        """Broadcast the progress and the stop flag of the first process."""
        if self.size == 1:
            return progress, stop
        state = torch.tensor([progress, float(stop)], dtype=torch.float64)
        dist.broadcast(state, 0)
        return float(state[0]), bool(state[1])

    @torch.no_grad()
    def average(self, named: dict[str, nn.Parameter]) -> None:
        """Replace gradients by their mean over the processes."""
        if self.size == 1:
            return
        # A rare question may be in one process's batch only. Missing gradients count as zero, so
        # that all processes send the same amount; flags mark those that are missing everywhere.
        every = list(named.values())
        flags = torch.tensor([float(p.grad is not None) for p in every])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in every]
        flat = torch.cat([flags, *(g.flatten().float() for g in parts)])
        dist.all_reduce(flat)
        present, flat = flat[: len(every)], flat[len(every) :] / self.size
        at = 0
        for p, n in zip(every, present.tolist(), strict=True):
            if n:
                p.grad = flat[at : at + p.numel()].view_as(p).to(p.dtype)
            at += p.numel()

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
        for child in self.children:
            child.join(timeout=60)


def join(rank: int, size: int, meeting: str) -> Group:
    """Join the process group that is initialized through the file ``meeting``."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    return Group(rank, size)


def launch(size: int, work: Callable[[Any, int, str], None], args: Any) -> Group:
    """Start ``size - 1`` processes running ``work(args, rank, meeting)`` and join their group."""
    if size == 1:
        return Group()
    handle, meeting = tempfile.mkstemp(prefix="vlmfast-meeting-")
    os.close(handle)
    Path(meeting).unlink()
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=work, args=(args, rank, meeting), daemon=True)
        for rank in range(1, size)
    ]
    for child in children:
        child.start()
    group = join(0, size, meeting)
    group.children = children
    return group
