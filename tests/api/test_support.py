"""Methods supported by each family: the documented table, and the command."""

from __future__ import annotations

import json
import os

import pytest

from support import tiny_families
from support.paths import ROOT
from vlmfast import VLM
from vlmfast.api.support import Support, support, support_of
from vlmfast.cli import main
from vlmfast.core.registry import stage_class, stage_names

pytestmark = pytest.mark.cold

BUILD = tiny_families.builders()
FAMILIES = sorted(BUILD)
DOCS = ROOT / "docs" / "results" / "families.md"
START, END = "<!-- support -->\n", "<!-- end of support -->"


def cell(image: Support, video: Support) -> str:
    """``yes``, ``no``, the supported medium, the source of saliency, or missing weights."""
    if "no weights" in image.note:
        return "train"
    if image.runs is None:
        return "CLIP"
    source = image.saliency or video.saliency
    if image.runs and video.runs:
        part = " (part)" if image.note or video.note else ""
        return (source or "yes") + part
    return "image" if image.runs else "video" if video.runs else "–"


def column(name: str) -> dict[str, str]:
    vlm = VLM(*BUILD[name]())
    both = (support(vlm), support(vlm, video=True))
    return {image.method: cell(image, video) for image, video in zip(*both, strict=True)}


def table() -> dict[str, dict[str, str]]:
    """The documented table, by family and method."""
    text = DOCS.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    lines = [line.split("|")[1:-1] for line in text.strip().splitlines()]
    if not lines:
        return {}
    names = [method.strip(" `") for method in lines[0][1:]]
    rows = {line[0].strip(" `"): line[1:] for line in lines[2:]}
    return {
        name: {method: cells[number].strip() for method, cells in rows.items()}
        for number, name in enumerate(names)
    }


def write(found: dict[str, dict[str, str]]) -> None:
    head = ["method", *(f"`{name}`" for name in FAMILIES)]
    lines = [head, ["---"] * len(head)]
    for method in sorted(stage_names()):
        cells = (found.get(name, {}).get(method, "") for name in FAMILIES)
        lines.append([f"`{method}`", *cells])
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    made = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    DOCS.write_text(f"{before}{START}{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


FAST = (*tiny_families.FIRST, "lfm2_vl", "ovis2")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in FAMILIES]
)
def test_documented_support_table(name):
    """``VLMFAST_WRITE_TABLE=1`` rewrites the table, one column per test, in a single process."""
    if name == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    found = column(name)
    if os.environ.get("VLMFAST_WRITE_TABLE"):
        write(table() | {name: found})
    assert table()[name] == found


def test_unsupported_method_has_a_reason():
    vlm = VLM(*BUILD["fast_vlm"]())
    assert support_of(vlm, "hired") == Support("hired", True, "norm")
    refused = support_of(vlm, "tome")
    assert not refused.runs
    assert "inside the vision tower" in refused.note
    assert support_of(vlm, "atp").note.startswith("atp: there are no weights")
    assert support_of(vlm, "clip-relevance").runs is None
    assert stage_class("frames-clip").other_model
    part = support_of(vlm, "mustdrop")
    assert (part.runs, part.note) == (True, "without its part inside the vision tower")


def test_methods_command(capsys):
    assert main(["methods", "hired", "divprune", "--model", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["hired", "yes", "cls"],
        ["divprune", "yes", "-"],
    ]
    assert main(["methods", "hired", "--model", "tiny", "--video", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only == {"method": "hired", "runs": True, "saliency": "cls", "note": ""}
    assert main(["methods", "hired"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hired  (core, tokens")
    assert "divprune" not in out
    assert main(["methods", "hirred"]) == 2
    assert "nearest are hired," in capsys.readouterr().err
