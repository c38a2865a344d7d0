"""What each run of ``vlmfast eval`` does again, with the same result, is done once."""

from __future__ import annotations

import functools
import importlib.metadata

import pytest

from support.engine.commands import draws_scenes_once, seeds_no_absent_gpus

version = functools.cache(importlib.metadata.version)


@pytest.fixture(autouse=True)
def _once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name != "test_eval_shapes.py":  # which compares what is drawn twice
        draws_scenes_once(monkeypatch)
    seeds_no_absent_gpus(monkeypatch)
    monkeypatch.setattr(importlib.metadata, "version", version)
