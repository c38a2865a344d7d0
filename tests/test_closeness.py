"""The tolerances of the tests, and how `make test-cpus` evaluates their use."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from closeness import APART, apart, close, tolerance

TOOL = Path(__file__).parent.parent / "tools" / "test_cpus.py"
UNIT = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """These comparisons are at the edge of the tolerance on purpose."""
    monkeypatch.delenv("VLMFAST_CLOSENESS", raising=False)


def test_close_refuses_beyond_the_tolerance() -> None:
    want = torch.tensor([4.0, -0.5])
    bound = float(tolerance(None, 9, 4.0, want))
    assert bound == 8 * UNIT * 3 * 4
    assert close(want.double() + 0.9 * bound, want, terms=9) == pytest.approx(0.9 * bound)
    with pytest.raises(AssertionError, match=r"which is 1\.1 of the tolerance"):
        close(want.double() + 1.1 * bound, want, terms=9)
    with pytest.raises(AssertionError):  # a bound for each entry
        close(want.double() + 0.9 * bound, want, terms=9, scale=want.abs())


def test_the_coarser_type_counts() -> None:
    got, want = torch.full((3,), 1.01), torch.ones(3, dtype=torch.bfloat16)
    close(got, want)
    close(got, want.float(), torch.bfloat16)
    with pytest.raises(AssertionError):
        close(got, want.float())


def test_floats_lists_and_arrays() -> None:
    close(0.1 + 0.2, 0.3)
    close([0.1 + 0.2, 1], [0.3, 1])
    close(np.array([0.1 + 0.2]), np.array([0.3]))
    for wrong in (0.3 + 1e-12, 0.3 - 1e-12):
        with pytest.raises(AssertionError):
            close([wrong], [0.3])
    close(torch.zeros(0), torch.zeros(0))


def test_shapes_are_compared() -> None:
    for compare in (close, apart):
        with pytest.raises(AssertionError):
            compare(torch.ones(2, 1), torch.ones(2))


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_non_finite_values_must_match(odd: float) -> None:
    want = torch.tensor([odd, 1.0])
    close(want.clone(), want)
    for wrong in ([1.0, 1.0], [odd, odd], [math.inf if odd != math.inf else -odd, 1.0]):
        with pytest.raises(AssertionError):
            close(torch.tensor(wrong), want)
    apart(torch.ones(2), want)  # infinitely far
    with pytest.raises(AssertionError, match="only 0 tolerances"):
        apart(want.clone(), want)


def test_apart_refuses_close_values() -> None:
    got = torch.ones(3)
    step = float(tolerance(torch.float32, 4, 1.0))
    far = got.double() + torch.tensor([0, 0, 1.1 * APART * step])
    assert apart(got, far, torch.float32, 4) == pytest.approx(1.1 * APART * step)
    with pytest.raises(AssertionError, match="30 are wanted"):
        apart(got, got.double() + 0.9 * APART * step, torch.float32, 4)


def test_shares_and_controls_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFAST_CLOSENESS", str(tmp_path))
    one = torch.ones(1)
    close(one, one)
    with pytest.raises(AssertionError):
        close(2 * one, one)
    apart(one, 2 * one)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    times = 1 / (8 * UNIT)
    assert [{k: v for k, v in line.items() if k != "test"} for line in lines] == [
        {"share": 0.0},
        {"control": times},
        {"control": times},
    ]
    assert all("test_shares_and_controls_are_recorded" in line["test"] for line in lines)


# --- the tool ------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not TOOL.is_file():
        pytest.skip("the tool is not part of this distribution")
    spec = importlib.util.spec_from_file_location("test_cpus", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "test_cpus", module)
    spec.loader.exec_module(module)
    return module


def test_tool_reports_failed_checks(tool: ModuleType) -> None:
    good = [{"test": "a", "share": 0.1}, {"test": "a", "share": 0.3}, {"test": "b", "control": 31}]
    summary = tool.Summary()
    assert summary.complaints() == ["nothing was compared"]
    summary.add(map(json.dumps, good))
    assert summary.shares == {"a": 0.3} and summary.controls == {"b": 31}
    assert summary.complaints() == []
    wrong = [{"test": "c", "share": 0.34}, {"test": "b", "control": 29.5}]
    summary.add(map(json.dumps, wrong))
    summary.status = 1
    assert summary.complaints() == [
        "pytest ended with status 1",
        "c uses 0.34 of its tolerance",
        "b has a control only 29.5 tolerances away",
    ]
    assert "   0.34  c\n    0.3  a" in summary.text()


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_settings_cover_the_processors_capability(tool: ModuleType, capability: str) -> None:
    found = tool.settings(capability)
    assert len(found) <= 5 and {of.threads for of in found} == {1, 2, 4}
    older = {"AVX512": {"default", "avx2"}, "AVX2": {"default"}, "DEFAULT": set()}[capability]
    assert {of.instructions for of in found} == {"native", *older}


def test_setting_clears_the_variables_of_others(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    native = tool.Setting("native", 2).environment(tmp_path)
    assert not set(tool.WORDS) & set(native) and native["VLMFAST_THREADS"] == "2"
    oldest = tool.Setting("default", 1).environment(tmp_path)
    assert [oldest[word] for word in tool.WORDS] == list(tool.INSTRUCTIONS["default"])


def test_comparing_test_is_marked(request: pytest.FixtureRequest) -> None:
    close(1.0, 1.0)
    assert request.node.get_closest_marker("equality")
