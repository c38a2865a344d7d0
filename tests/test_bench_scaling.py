"""The arithmetic of ``benchmarks/scaling.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "scaling.py"
if not SCRIPT.is_file():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)


@pytest.fixture(scope="module")
def scaling() -> Any:
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    module = sys.modules["scaling"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plan_multiplies_one_server(scaling: Any) -> None:
    of = scaling.Bytes(request=1000.0, features=100.0, cache=50.0)
    found = scaling.plan(rate=1000, answers_per_s=30, answer_s=0.5, of=of)
    assert (found.servers, found.in_flight) == (34, 500)
    assert (found.cache_bytes, found.request_bytes_s) == (25_000, 1_000_000)
    assert found.feature_bytes_s == 100_000
    assert scaling.plan(1000, 60, 0.5, of).servers == 17


def test_command_prints_what_the_results_say(
    scaling: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert scaling.main(["--rate", "100", "--images", "2", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(scaling.RESULTS.read_text())
    assert report["date"] in printed and report["command"] in printed
    found = json.loads(out.read_text())
    for recipe in ("none", "balanced"):
        load = scaling.load_of(report, recipe, 16)
        servers = found[recipe]["plan"]["servers"]
        assert (servers - 1) * load["answers_per_s"]["median"] < 100
        assert servers * load["answers_per_s"]["median"] >= 100
    # A recipe lowers the bytes of features and caches, and not those of a request.
    full, fewer = (found[recipe]["one"] for recipe in ("none", "balanced"))
    assert fewer["cache"] < full["cache"] and fewer["features"] < full["features"]
    assert fewer["request"] == full["request"]


def test_missing_results_are_named(scaling: Any) -> None:
    with pytest.raises(SystemExit, match="no results of fast at 16 clients; there are balanced"):
        scaling.load_of(json.loads(scaling.RESULTS.read_text()), "fast", 16)
