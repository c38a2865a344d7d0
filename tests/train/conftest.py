"""The seeding of a step costs what it does for the devices that are there."""

from __future__ import annotations

import pytest

from support.engine.commands import seeds_no_absent_gpus


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds_no_absent_gpus(monkeypatch)
