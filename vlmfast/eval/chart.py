"""Interactive chart of accuracy against the kept fraction of visual tokens or of the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmfast.core.files import read_text, readable, replace_text
from vlmfast.core.protocols import PrefillStage, tower_stages
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError

from .axes import method_of, shrinks_cache
from .summary import BASELINES, CACHE_BASELINES, depends_on_question

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TRAINED, BEFORE = "trained", "before the language model"
WITHIN = "inside encoder or language model"
STACKS, CACHE, BASELINE = "several stages", "KV cache", "baselines"
FULL = "full model"
GROUPS = (TRAINED, BEFORE, CACHE, WITHIN, STACKS, BASELINE)
_HIDDEN = (WITHIN, STACKS)  # until they are chosen

# Okabe and Ito's colour-blind safe colours that are visible on white and on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Another number than that of the colours, so that each line has its own pair of both.
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon")
# Greys and text that have the same contrast to a white and to a dark page.
_GREY, _INK, _LINE = "#8a8a8a", "#7f7f7f", "rgba(127, 127, 127, 0.25)"
_TICKS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
_ROW, _LEGEND = 380, 150  # pixels
_COST = {
    "kept": "visual tokens kept, mean of layers (%)",
    "held": "size of the KV cache (%)",
}


@dataclass(frozen=True)
class View:
    """One part of the figure: accuracy on some of the questions.

    Parameters
    ----------
    title : str
    key : str
        ``accuracy``, ``caption`` or ``accuracy_later``.
    modality : {"image", "video"}
    session : bool
        Use the results of sessions that prefill an image once.
    """

    title: str
    key: str
    modality: str
    session: bool = False


_VIEWS = {
    "kept": (
        View("Images", "accuracy", "image"),
        View("Videos", "accuracy", "video"),
        View("Captions of images", "caption", "image"),
        View("Captions of videos", "caption", "video"),
    ),
    "held": (
        View("Captions of images", "caption", "image"),
        View("Captions of videos", "caption", "video"),
        View("Images, single questions", "accuracy", "image"),
        View("Videos, single questions", "accuracy", "video"),
        View("Images, later questions of a session", "accuracy_later", "image", True),
        View("Videos, later questions of a session", "accuracy_later", "video", True),
    ),
}


@dataclass(frozen=True)
class Measured:
    """One recipe of a report.

    Parameters
    ----------
    recipe : str
        As it was run.
    method : str
        The recipe without its budgets, which the points of a line have in common.
    group : str
        One of `GROUPS`, or `FULL`.
    axis : {"kept", "held"}
        What the recipe reduces: visual tokens, or bytes of the cache.
    numbers : dict
        Its entry in ``report.json``, see `vlmfast.eval.summary.summarise`.
    session : dict, optional
        The entry of its sessions.
    """

    recipe: str
    method: str
    group: str
    axis: str
    numbers: dict[str, Any]
    session: dict[str, Any] | None = None

    def point(self, view: View) -> tuple[float, float, float, float] | None:
        """Cost, accuracy and its 95 % interval in percent; None if not measured."""
        numbers = self.session if view.session else self.numbers
        key = f"{view.key}_{view.modality}"
        cost = None if numbers is None else numbers.get(f"{self.axis}_{view.modality}")
        if numbers is None or numbers.get(key) is None or cost is None:  # where all samples failed
            return None
        return tuple(100 * value for value in (cost, numbers[key], *numbers[f"{key}_ci"]))


def rows(
    report: Path | dict[str, Any], task: str | None = None, axis: str = "kept"
) -> list[Measured]:
    """The recipes of a report that belong into one chart.

    Parameters
    ----------
    report : Path or dict
        ``report.json`` as ``vlmfast report`` writes it, or its content.
    task : str, optional
        The first task of the report by default.
    axis : {"kept", "held"}
        Recipes that drop visual tokens, or recipes that compress the KV cache.

    Raises
    ------
    VLMFastError
        If the file cannot be read, is no report, or has no such task.
    """
    recipes = _recipes(report, task)
    found = []
    for name, numbers in recipes.items():
        alone = name.removesuffix("@session")
        if numbers["control"] or (alone != name and alone in recipes):
            continue
        recipe = Recipe.parse(numbers["recipe"])
        session = None if depends_on_question(recipe) else recipes.get(f"{name}@session")
        method, group = method_of(recipe)[0], group_of(recipe)
        reduced = 0 < (numbers[axis] or 0) < 0.999
        caches = shrinks_cache(recipe) or group == BASELINE
        if not recipe or (reduced and (caches if axis == "held" else not shrinks_cache(recipe))):
            found.append(Measured(name, method, group, axis, numbers, session))
    return found


def _recipes(report: Path | dict[str, Any], task: str | None) -> dict[str, dict[str, Any]]:
    name = "the report" if isinstance(report, dict) else f"the report {report}"
    with readable(name, damaged=(KeyError, TypeError, AttributeError)):
        data = report if isinstance(report, dict) else json.loads(read_text(report))
        tasks = {name: about["recipes"] for name, about in data["tasks"].items()}
    if not tasks or task not in (None, *tasks):
        raise VLMFastError(
            f"no task {task or 'at all'} in the report; it has: {', '.join(tasks) or 'none'}"
        )
    return tasks[task or next(iter(tasks))]


def group_of(recipe: Recipe) -> str:
    """The group of a recipe: one of `GROUPS`, or `FULL` for ``none``."""
    if len(recipe) != 1:
        return STACKS if recipe else FULL
    (stage,) = recipe
    if stage.name in BASELINES + CACHE_BASELINES:
        return BASELINE
    if shrinks_cache(recipe):
        return CACHE
    if stage.trained:
        return TRAINED
    within = bool(tower_stages(recipe)) or bool(recipe.acting(PrefillStage))
    return WITHIN if within else BEFORE


# --- the figure ----------------------------------------------------------------------------------


def figure(rows: Sequence[Measured]) -> Figure:
    """One line per method with 95 % intervals, beside that of the full model.

    Images, videos and captions have a part each. A click on the legend hides or shows a method, and
    a double click shows it alone; methods inside the models and stacks are hidden at first. Text
    and lines are readable on light and on dark pages, and the background is transparent.

    Parameters
    ----------
    rows : sequence of Measured
        See `rows`.

    Raises
    ------
    VLMFastError
        If plotly is not installed, or no row has an accuracy.
    """
    try:
        from plotly import express
        from pyarrow import Table
    except ImportError as error:
        raise VLMFastError(
            "the chart needs plotly and pyarrow: pip install 'vlmfast[eval]'"
        ) from error

    axis = rows[0].axis if rows else "kept"
    points = [point for view in _VIEWS[axis] for point in _points(rows, view)]
    if not points:
        raise VLMFastError("the chart has nothing to show: no recipe of the report has an accuracy")
    groups = {point["method"]: point["group"] for point in points}
    order = sorted(groups, key=lambda method: (FULL, *GROUPS).index(groups[method]))
    greys = {method: _GREY for method, group in groups.items() if group == BASELINE}
    views = list(dict.fromkeys(point["view"] for point in points))
    shown = express.line(
        Table.from_pylist(points),
        x="cost",
        y="accuracy",
        error_y="above",
        error_y_minus="below",
        color="method",
        symbol="method",
        facet_col="view",
        facet_col_wrap=2,
        log_x=True,
        hover_name="recipe",
        labels={"cost": _COST[axis], "accuracy": "accuracy (%)", "method": ""},
        category_orders={"method": order, "view": views},
        color_discrete_sequence=COLORS,
        color_discrete_map={**greys, FULL: _INK},
        symbol_sequence=_SYMBOLS,
        template="none",
        height=_ROW * -(-len(views) // 2) + _LEGEND,
    )
    shown.for_each_annotation(lambda note: note.update(text=note.text.partition("=")[2]))
    for trace in shown.data:
        trace.update(
            mode="markers" if trace.name == STACKS else "lines+markers",
            visible="legendonly" if groups[trace.name] in _HIDDEN else True,
            error_y={"thickness": 1, "width": 0},
        )
    shown.update_xaxes(tickvals=_TICKS, gridcolor=_LINE, linecolor=_LINE, showticklabels=True)
    shown.update_yaxes(gridcolor=_LINE, linecolor=_LINE, zeroline=False)
    clear = "rgba(0, 0, 0, 0)"
    shown.update_layout(
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        font={"color": _INK, "size": 13, "family": "system-ui, sans-serif"},
        margin={"l": 56, "r": 12, "t": 32, "b": _LEGEND + 52},
        # Below the plot, where it also fits on a phone.
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
    )
    return shown


def _points(rows: Sequence[Measured], view: View) -> list[dict[str, Any]]:
    """The points of a part by increasing cost; the full model's is a line over all of them."""
    found = [(point, row) for row in rows if (point := row.point(view))]
    least = min((cost for (cost, *_), _ in found), default=0.0)
    points = []
    for (cost, mean, low, high), row in found:
        about: dict[str, Any] = {"view": view.title, "recipe": row.recipe, "group": row.group}
        about["method"] = {STACKS: STACKS, FULL: FULL}.get(row.group, row.method)
        about |= {"accuracy": mean, "above": high - mean, "below": mean - low}
        ends = {least, cost} if row.group == FULL else {cost}
        points += [about | {"cost": end} for end in ends]
    return sorted(points, key=lambda point: point["cost"])


CONFIG = {"responsive": True, "displaylogo": False}
"""Settings of plotly.js for every page."""


def write_page(shown: Figure, file: Path, title: str) -> None:
    """Write a chart as a page, and next to it the ``plotly.min.js`` that it loads.

    Parameters
    ----------
    shown : plotly.graph_objects.Figure
    file : Path
        In a folder that exists.
    title : str
        Title of the page.
    """
    from plotly.offline import get_plotlyjs

    script = file.with_name("plotly.min.js")
    if not script.is_file():
        replace_text(script, get_plotlyjs())
    # The figure's grey text is readable on both backgrounds.
    chart = shown.to_html(CONFIG, full_html=False, include_plotlyjs=script.name)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
    )
    replace_text(file, f"<!doctype html>\n<html><head>{head}</head>\n{chart}\n</html>\n")
