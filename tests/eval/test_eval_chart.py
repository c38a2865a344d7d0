"""The interactive chart of a report: what is drawn, grouped and marked."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from support.eval_fakes import write_results
from support.paths import ROOT
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError
from vlmfast.eval.chart import BASELINE, FULL, STACKS, figure, group_of, rows
from vlmfast.eval.report import write_report


def numbers(recipe: str, kept: float, image: float, video: float | None, **more) -> dict:
    """An entry of ``report.json``."""
    of = {"recipe": recipe, "control": None, "kept": kept, "held": kept, **more}
    for modality, mean in (("image", image), ("video", video)):
        of[f"kept_{modality}"] = of[f"held_{modality}"] = None if mean is None else kept
        for key, score in (("accuracy", mean), ("caption", None), ("accuracy_later", None)):
            of[f"{key}_{modality}"] = score
            of[f"{key}_{modality}_ci"] = None if score is None else [score - 0.02, score + 0.03]
    return of


@pytest.fixture
def report() -> dict:
    recipes = {
        "none": numbers("none", 1.0, 0.95, 0.9),
        "none@question-only": numbers("none", 1.0, 0.3, 0.2, control="question-only"),
        "hired:budget=0.22": numbers("hired:budget=0.22", 0.22, 0.93, 0.8),
        "hired:budget=0.11": numbers("hired:budget=0.11", 0.11, 0.9, 0.7),
        "pvc": numbers("pvc", 0.5, 0.94, None),
        "fastv:budget=0.5": numbers("fastv:budget=0.5", 0.5, 0.8, 0.6),
        "hired+pyramiddrop": numbers("hired+pyramiddrop", 0.1, 0.7, 0.5),
        "random:budget=0.11": numbers("random:budget=0.11", 0.11, 0.6, 0.5),
        "snapkv:0.5": numbers("snapkv:0.5", 0.5, 0.9, 0.9),
        "h2o:0.5": numbers("h2o:0.5", 0.5, 0.9, 0.9),
        "h2o:0.5@session": numbers("h2o:0.5", 0.4, 0.9, 0.9),
        "streamingllm:0.5": numbers("streamingllm:0.5", 0.5, 0.4, 0.4),
    }
    recipes["h2o:0.5@session"] |= {"accuracy_later_image": 0.66}
    recipes["h2o:0.5@session"] |= {"accuracy_later_image_ci": [0.6, 0.7]}
    return {"tasks": {"shapes": {"recipes": recipes, "warnings": []}}}


def by_name(shown, part: int = 0) -> dict:
    """The lines of one part of the figure."""
    axes = list(dict.fromkeys(trace.xaxis for trace in shown.data))
    return {trace.name: trace for trace in shown.data if trace.xaxis == axes[part]}


def titles(shown) -> list[str]:
    return [note.text for note in shown.layout.annotations]


def test_rows_are_those_of_the_axis(report, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    tokens = {row.recipe: row.group for row in rows(file)}
    assert tokens == {
        "none": FULL,
        "hired:budget=0.22": "before the language model",
        "hired:budget=0.11": "before the language model",
        "pvc": "trained",
        "fastv:budget=0.5": "inside encoder or language model",
        "hired+pyramiddrop": STACKS,
        "random:budget=0.11": BASELINE,
    }
    caches = {row.recipe: row.group for row in rows(report, "shapes", "held")}
    assert caches == {
        "none": FULL,
        "random:budget=0.11": BASELINE,
        "snapkv:0.5": "KV cache",
        "h2o:0.5": "KV cache",
        "streamingllm:0.5": BASELINE,
    }


def test_points_equal_the_report(report) -> None:
    shown = by_name(figure(rows(report)))
    line = shown["hired"]
    assert list(line.x) == [11.0, 22.0]
    assert list(line.y) == [90.0, 93.0]
    assert list(line.error_y.array) == pytest.approx([3.0, 3.0])
    assert list(line.error_y.arrayminus) == pytest.approx([2.0, 2.0])
    assert list(line.hovertext) == ["hired:budget=0.11", "hired:budget=0.22"]
    assert list(shown[FULL].y) == [95.0, 95.0]
    assert list(shown[FULL].x) == [10.0, 100.0]


def test_each_view_is_a_part(report) -> None:
    shown = figure(rows(report))
    assert sorted(titles(shown)) == ["Images", "Videos"]  # no captions
    images, videos = by_name(shown), by_name(shown, 1)
    assert list(videos["hired"].y) == [70.0, 80.0]
    assert list(videos[FULL].y) == [90.0, 90.0]
    assert "pvc" in images and "pvc" not in videos
    json.loads(shown.to_json())  # strict JSON, as a browser reads it


def test_baselines_are_grey_and_visible(report) -> None:
    own = by_name(figure(rows(report)))
    assert own["random"].line.color == "#8a8a8a" != own["hired"].line.color
    assert own["random"].visible is True and own["hired"].visible is True
    assert own["fastv"].visible == own[STACKS].visible == "legendonly"
    assert own[STACKS].mode == "markers"


def test_lines_of_a_real_report_are_distinct() -> None:
    file = ROOT / "docs" / "results" / "report.json"
    drawn = by_name(figure(rows(file)))
    assert len(drawn) > 20
    assert len({(t.line.color, t.marker.symbol) for t in drawn.values()}) == len(drawn)


def test_sessions_are_a_view_of_the_cache(report) -> None:
    shown = figure(rows(report, axis="held"))
    assert not any("Caption" in title for title in titles(shown))
    assert "Images, later questions of a session" in titles(shown)
    (later,) = (t for t in shown.data if t.name == "h2o" and list(t.y) == [66.0])
    assert list(later.x) == [40.0]
    # Each question prefills the image of snapkv again.
    assert not any(t.name == "snapkv" and t.xaxis == later.xaxis for t in shown.data)


def test_group_of() -> None:
    assert group_of(Recipe.parse("none")) == FULL
    assert group_of(Recipe.parse("grid:budget=0.2")) == BASELINE
    assert group_of(Recipe.parse("hired:0.5+snapkv:0.5")) == STACKS


@pytest.mark.parametrize(
    ("of", "task", "words"),
    [
        ("absent.json", None, r"the report .*absent\.json cannot be read"),
        ("bad.json", None, "the report.* cannot be read"),
        (None, "pope", "no task pope in the report; it has: shapes"),
        ({}, None, "the report.* cannot be read"),
        ({"tasks": {}}, None, "it has: none"),
    ],
)
def test_errors_name_what_is_wrong(report, tmp_path: Path, of, task, words) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(VLMFastError, match=words):
        rows(tmp_path / of if isinstance(of, str) else report if of is None else of, task)


def test_empty_chart_is_refused() -> None:
    with pytest.raises(VLMFastError, match="nothing to show"):
        figure([])


def test_missing_plotly_is_named_and_leaves_the_tables(report, tmp_path, monkeypatch) -> None:
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("plotly"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(VLMFastError, match=r"pip install 'vlmfast\[eval\]'"):
        figure(rows(report))
    write_results(tmp_path, "none", 0.8, limit=1)
    with pytest.raises(VLMFastError, match="the chart needs plotly"):
        write_report(tmp_path, tmp_path)
    assert (tmp_path / "report.md").exists() and (tmp_path / "report.json").exists()
