"""`Answerer` on batches as Ray Data makes them, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import fresh, tiny_models
from support.engine.clients import room_for_one_row
from vlmfast import VLM, VLMFastError
from vlmfast.integrations.ray import Answerer

RECIPE = "divprune:0.3"


@pytest.fixture(scope="module")
def answerer(random_llava_next: Path) -> Answerer:
    return Answerer(str(random_llava_next), RECIPE, device="cpu", max_new_tokens=6)


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, Any]:
    tiny_models.make_image(80, 60).save(tmp_path / "a.png")
    array = np.asarray(tiny_models.make_image(64, 64, seed=1))
    images = np.empty(4, dtype=object)
    images[:] = [str(tmp_path / "a.png"), array, None, b"no image"]
    return {"id": np.arange(4), "image": images, "question": np.array(["What?"] * 4)}


def test_rows_are_answered_and_errors_become_rows(
    answerer: Answerer, batch: dict[str, Any]
) -> None:
    found = answerer(batch)
    assert list(found["id"]) == [0, 1, 2, 3]
    for i in (0, 1):
        wanted = answerer.vlm.ask(
            "What?", images=batch["image"][i], recipe=RECIPE, max_new_tokens=6
        )
        assert found["answer"][i] == wanted.text and found["error"][i] is None
    assert found["answer"][0] != found["answer"][1]
    assert list(found["answer"][2:]) == [None, None]
    assert "no image in column 'image'" in found["error"][2]
    assert "image" in found["error"][3] and found["error"][3] != found["error"][2]


def test_missing_column_is_named(answerer: Answerer, batch: dict[str, Any]) -> None:
    del batch["image"]
    with pytest.raises(VLMFastError, match=r"no column 'image'; it has 'id', 'question'"):
        answerer(batch)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_batch_that_does_not_fit_is_halved(
    answerer: Answerer,
    batch: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    """And the row that does not fit alone is an error."""
    real, sizes = VLM.ask_many, []
    broken = batch["image"][1]

    def ask_many(self: VLM, requests: Any, **options: Any) -> Any:
        sizes.append(len(requests))
        if len(requests) > 1 or requests[0].images is broken:
            raise error("DefaultCPUAllocator: can't allocate memory")
        return real(self, requests, **options)

    whole = answerer(batch)
    monkeypatch.setattr(VLM, "ask_many", ask_many)
    found = answerer(batch)
    assert sizes[0] == 3 and sizes.count(1) == 3
    assert found["answer"][0] == whole["answer"][0]
    assert "too small for this row" in found["error"][1]


def test_wrong_recipe_is_refused_when_the_actor_starts(random_llava_next: Path) -> None:
    with pytest.raises(VLMFastError, match="hired"):
        Answerer(str(random_llava_next), "hierd:0.2", device="cpu")


def test_nothing_imports_ray() -> None:
    done = fresh.run("import sys, vlmfast.integrations.ray; print('ray' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_memory_that_is_exhausted_inside_the_engine_halves_the_batch_too(
    answerer: Answerer, batch: dict[str, Any]
) -> None:
    """There it is the error of all rows that were decoded together."""
    whole = answerer(batch)
    with room_for_one_row() as sizes:
        found = answerer(batch)
    assert max(sizes) > 1
    assert list(found["answer"]) == list(whole["answer"])
    assert list(found["error"]) == list(whole["error"])
