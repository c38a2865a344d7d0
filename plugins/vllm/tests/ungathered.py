"""Workers that do not gather heads: the control of several ranks."""

from __future__ import annotations

from torch import Tensor
from vlmfast_vllm import qwen


def alone(heads: Tensor) -> Tensor:
    return heads


qwen._of_all_ranks = alone


class Worker:
    """An extension of vLLM's worker, so that each of its processes imports this file."""
