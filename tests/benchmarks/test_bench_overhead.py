"""``benchmarks/overhead.py``: CPU time of the same answers by Hugging Face and by vlmfast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.bench_script import script


@pytest.fixture
def overhead() -> Any:
    return script("overhead")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--by-token"]])
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


def test_images_of_pairs_differ(overhead: Any) -> None:
    from PIL import Image

    original = Image.new("RGB", (8, 8))
    found = [overhead.image_of(original, number).tobytes() for number in range(300)]
    assert len(set(found)) == 300 and original.getpixel((0, 0)) == (0, 0, 0)
