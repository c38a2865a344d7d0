"""``benchmarks/overhead.py``: CPU time of the same answers by Hugging Face and by vlmfast."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("overhead", FOLDER / "overhead.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--prefix-cache"]])
def test_pairs_are_the_same_answers(overhead: Any, tmp_path: Path, more: list[str]) -> None:
    out = tmp_path / "found.json"
    given = ["--pairs", "2", "--warmup", "0", "--new-tokens", "3", "--out", str(out), *more]
    assert overhead.main(given) == 0
    row = json.loads(out.read_text())["row"]
    assert row["same_tokens"]
    for part in overhead.PARTS:
        found, seconds = row[part]["ratio"], row[part]["seconds"]
        assert found["low"] <= found["value"] <= found["high"]
        theirs, own = seconds.values()
        assert len(theirs) == len(own) == 2
        assert found["value"] == pytest.approx(sum(theirs) / sum(own))


def test_too_few_tokens_are_refused(overhead: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.parse(["--new-tokens", "1"])
    assert "at least 2" in capsys.readouterr().err


def test_images_of_pairs_differ(overhead: Any) -> None:
    from PIL import Image

    original = Image.new("RGB", (8, 8))
    found = [overhead.image_of(original, number).tobytes() for number in range(300)]
    assert len(set(found)) == 300 and original.getpixel((0, 0)) == (0, 0, 0)
