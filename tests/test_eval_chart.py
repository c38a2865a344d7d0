"""The interactive chart of a report: what is drawn, grouped and marked."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from eval_fakes import write_results
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError
from vlmfast.eval.chart import BASELINE, FULL, GROUPS, STACKS, figure, group_of, rows
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


def by_name(shown) -> dict:
    return {trace.name: trace for trace in shown.data if trace.name}


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
    assert list(line.customdata[0]) == ["hired:budget=0.11", "90.0 % [88.0, 93.0]"]
    assert set(shown["full model"].y) == {95.0}


def test_menu_has_the_data_of_every_view(report) -> None:
    shown = figure(rows(report))
    menu, _ = shown.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["Images", "Videos"]  # no captions
    names = [trace.name for trace in shown.data]
    (data,) = menu.buttons[1].args
    assert data["y"][names.index("hired")] == [70.0, 80.0]
    assert data["y"][names.index("full model")] == [90.0, 90.0]
    assert not data["x"][names.index("pvc")]  # images only
    assert {len(value) for value in data.values()} == {len(names)}
    json.loads(shown.to_json())  # strict JSON, as a browser reads it


def test_baselines_are_grey_and_visible(report) -> None:
    shown = figure(rows(report))
    own = {trace.name: trace for trace in shown.data if trace.legendgroup in GROUPS}
    assert {t.line.color for t in own.values() if t.legendgroup == BASELINE} == {"#8a8a8a"}
    assert own["random"].visible is True and own["hired"].visible is True
    assert own["fastv"].visible == own[STACKS].visible == "legendonly"
    assert own["hired"].line.color != "#8a8a8a"


def test_menu_shows_a_group_beside_the_baselines(report) -> None:
    shown = figure(rows(report))
    _, menu = shown.layout.updatemenus
    choices = {button.label: button.args[0]["visible"] for button in menu.buttons}
    drawn = [trace.legendgroup for trace in shown.data]
    for group in ("trained", "inside encoder or language model"):
        seen = {of for of, on in zip(drawn, choices[group], strict=True) if on is True}
        assert seen - {None} == {FULL, BASELINE, group}
    assert set(choices["All methods"]) == {True}
    # The first one is what the chart shows without a choice.
    assert [trace.visible or True for trace in shown.data] == list(
        menu.buttons[0].args[0]["visible"]
    )


def test_lines_of_a_real_report_are_distinct() -> None:
    file = Path(__file__).parent.parent / "docs" / "results" / "report.json"
    shown = figure(rows(file))
    drawn = [t for t in shown.data if t.legendgroup in GROUPS and t.name != STACKS]
    assert len(drawn) > 20
    looks = {(t.line.color, t.line.dash, t.marker.symbol) for t in drawn}
    assert len(looks) == len(drawn)


def test_sessions_are_a_view_of_the_cache(report) -> None:
    shown = figure(rows(report, axis="held"))
    buttons = {button.label: button.args for button in shown.layout.updatemenus[0].buttons}
    assert not any("Caption" in label for label in buttons)
    (data,) = buttons["Images, later questions of a session"]
    names = [trace.name for trace in shown.data]
    assert data["x"][names.index("h2o")] == [40.0]
    assert data["y"][names.index("h2o")] == [66.0]
    assert data["y"][names.index("snapkv")] == []  # each question prefills the image again


def test_group_of() -> None:
    assert group_of(Recipe.parse("none")) == FULL
    assert group_of(Recipe.parse("grid:budget=0.2")) == BASELINE
    assert group_of(Recipe.parse("hired:0.5+snapkv:0.5")) == STACKS


@pytest.mark.parametrize(
    ("of", "task", "words"),
    [
        ("absent.json", None, r"cannot read the report .*absent\.json"),
        ("bad.json", None, "cannot read the report"),
        (None, "pope", "no task pope in the report; it has: shapes"),
        ({}, None, "it has: none"),
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
