"""The benchmark of the prefix cache, on little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench_script import script
from vlmfast.engine.prefixes import Prefixes

prefix = script("prefix")


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MODELS", ("tiny",))
    monkeypatch.setattr(prefix, "IMAGES", 5)
    monkeypatch.setattr(prefix, "PLACES", prefix.PLACES[:2])


def run(tmp_path: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    out = tmp_path / "prefix.json"
    code = prefix.main(["--repeat", "1", *more, "--out", str(out)])
    return code, json.loads(out.read_text())["rows"]


@pytest.mark.slow
def test_all_parts(tmp_path: Path) -> None:
    code, rows = run(tmp_path)
    assert code == 0 and {row["name"] for row in rows} == set(prefix.NAMES)
    by_name = {row["name"]: row for row in rows}
    assert 0 < by_name["second"]["median"] < 1
    assert 0 < by_name["memory"]["median"] <= 1
    assert not by_name["memory"]["what"].endswith(" 0 evictions")


def test_other_answers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the cache, every prompt continues from that of the first image."""
    scope = Prefixes.scope

    def blind(self: Prefixes, recipe: Any, digests: Any = (), *given: Any, **more: Any) -> Any:
        return scope(self, recipe, digests and ("",), *given, **more)

    monkeypatch.setattr(Prefixes, "scope", blind)
    code, (row,) = run(tmp_path, "--only", "batch")
    assert code == 1 and row["wrong"] and row["median"] is None
