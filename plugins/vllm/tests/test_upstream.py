"""Faults of vLLM's own pruning that ``docs/upstream.md`` names; a test that passes was mended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="make test-vllm builds its environment")

import random_models  # noqa: E402
from engines import engine  # noqa: E402

START, IMAGE, VIDEO, TEXT = 5, 6, 7, 9


def after_an_image(rows: int, columns: int) -> int:
    """The rotary id of the text after an image of tokens that follows two text tokens."""
    from vllm.multimodal.video_prune.evs import compute_mrope_for_media, recompute_mrope_positions

    ids = torch.tensor([TEXT, START, *[IMAGE] * (rows * columns), TEXT])
    places = compute_mrope_for_media([1, 2 * rows, 2 * columns], 2).T
    before = torch.arange(len(ids)).expand(3, -1).clone()
    found, _ = recompute_mrope_positions(ids, [places], before, 0, START, IMAGE, VIDEO)
    return int(found[0, -1])


def test_text_after_a_landscape_image() -> None:
    """The control."""
    assert after_an_image(2, 4) == 2 + 4


@pytest.mark.xfail(strict=True, reason="the extent is the width of the grid")
def test_text_after_a_portrait_image() -> None:
    assert after_an_image(4, 2) == 2 + 4


def ids_of_an_image(dtype: torch.dtype) -> torch.Tensor:
    """The columns (3, N) that vLLM adds to an image of 1 x 512 tokens."""
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model

    model = SimpleNamespace(visual=SimpleNamespace(spatial_merge_size=2))
    given = {"image_grid_thw": torch.tensor([[1, 2, 1024]])}
    (found,) = Model._postprocess_image_embeds_evs(
        model, (torch.zeros(512, 4, dtype=dtype),), given
    )
    return found[:, 4:7].long().T


def test_ids_in_float32() -> None:
    """The control."""
    assert ids_of_an_image(torch.float32)[2].tolist() == list(range(512))


@pytest.mark.xfail(strict=True, reason="ids have the dtype of the embeddings")
def test_ids_in_bfloat16() -> None:
    assert ids_of_an_image(torch.bfloat16)[2].tolist() == list(range(512))


@pytest.mark.xfail(strict=True, reason="the runner of CPUs does not set the flag")
def test_the_runner_of_cpus_knows_that_ids_are_returned(tmp_path: Path) -> None:
    from vllm.model_executor.models.interfaces import supports_multimodal_pruning

    random_models.build_qwen("qwen2_5_vl", tmp_path)
    with engine(tmp_path, video_pruning_rate=0.5) as llm:
        core = llm.llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        settings = runner.model_config.multimodal_config
        returned = supports_multimodal_pruning(llm.model)
        known = runner.is_multimodal_pruning_enabled
    assert known == (returned and settings.is_multimodal_pruning_enabled())
