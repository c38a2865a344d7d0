"""A worker of vLLM on a CPU that prunes videos: ``--worker-cls benchmarks.evs_worker.Worker``.

The model runner of vLLM 0.32 on a CPU loads its model in a method of its own, which does not note
that the model returns rotary ids of pruned videos. It then fails on the first video.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    """Notes it, as vLLM's runner on a GPU does."""

    def load_model(self, *args: Any, **given: Any) -> None:
        super().load_model(*args, **given)
        self.model_runner.is_multimodal_pruning_enabled = True
