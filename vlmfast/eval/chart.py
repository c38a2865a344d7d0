"""Interactive chart of accuracy against the kept fraction of visual tokens or of the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmfast.core.files import read_text, replace_text
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
GROUPS = (TRAINED, BEFORE, CACHE, BASELINE, WITHIN, STACKS)
_HIDDEN = (WITHIN, STACKS)  # until they are chosen

# Okabe and Ito's colour-blind safe colours that are visible on white and on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "pentagon", "hexagram")
_DASHES = ("solid", "dashdot", "longdash")
_GREYS = {"random": "dash", "grid": "dot", "downsample": "dashdot", "streamingllm": "dot"}
# Greys and text that have the same contrast to a white and to a dark page.
_GREY, _INK, _LINE = "#8a8a8a", "#7f7f7f", "rgba(127, 127, 127, 0.25)"
_TICKS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
# Below the plot, where it also fits on a phone; long ones scroll.
_LEGEND: dict[str, Any] = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
    "maxheight": 230,
    "groupclick": "toggleitem",
    "tracegroupgap": 4,
    "font": {"size": 12},
}
_COST = {
    "kept": "visual tokens kept, mean of layers (%)",
    "held": "size of the KV cache (%)",
}


@dataclass(frozen=True)
class View:
    """What the y axis shows: accuracy on some of the questions.

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
    if isinstance(report, dict):
        data = report
    else:
        try:
            data = json.loads(read_text(report))
        except (OSError, ValueError) as error:
            raise VLMFastError(f"cannot read the report {report}: {error}") from error
    tasks: dict[str, Any] = {}
    try:
        tasks = data["tasks"]
        return tasks[task if task is not None else next(iter(tasks))]["recipes"]
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        known = ", ".join(tasks)
        raise VLMFastError(
            f"no task {task or 'at all'} in the report; it has: {known or 'none'}"
        ) from error


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
    """One line per method with 95 % intervals, and the full model as a horizontal line.

    One menu switches between images, videos and captions, another one selects a group of methods.
    A click on the legend hides or shows one method. Text and lines are readable on light and on
    dark pages, and the background is transparent.

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
        from plotly.graph_objects import Figure
    except ImportError as error:
        raise VLMFastError(
            "the chart needs plotly, which is not installed: pip install 'vlmfast[eval]'"
        ) from error

    axis = rows[0].axis if rows else "kept"
    views = [view for view in _VIEWS[axis] if any(row.point(view) for row in rows)]
    if not views:
        raise VLMFastError("the chart has nothing to show: no recipe of the report has an accuracy")
    drawn = [_traces(rows, view) for view in views]
    shown = Figure(drawn[0])
    costs = [p[0] for row in rows if row.group != FULL for view in views if (p := row.point(view))]
    ends = min(costs, default=100) / 1.2, max([*costs, 50]) * 1.2
    grid = {"gridcolor": _LINE, "linecolor": _LINE, "zeroline": False}
    shown.update_xaxes(title=_COST[axis], type="log", range=list(map(log10, ends)), **grid)
    shown.update_xaxes(tickvals=_TICKS, title_standoff=8)
    shown.update_yaxes(title="accuracy (%)", **grid)
    shown.update_layout(
        template="none",
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        font={"color": _INK, "size": 13, "family": "system-ui, sans-serif"},
        height=760,
        margin={"l": 56, "r": 12, "t": 88, "b": _LEGEND["maxheight"] + 52},
        hoverlabel={"align": "left"},
        legend=_LEGEND,
    )
    shown.update_layout(updatemenus=[_view_menu(views, drawn), _group_menu(shown.data)])
    return shown


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


def _traces(rows: Sequence[Measured], view: View) -> list[Any]:
    """All traces of a view; views have the same traces in the same order."""
    from plotly.graph_objects import Scatter

    traces: list[Any] = []
    full = next((row for row in rows if row.group == FULL), None)
    if full is not None:
        _, mean, low, high = full.point(view) or (None,) * 4
        about = f"<b>none</b><br>{_score(mean, low, high)}<extra></extra>"
        ends, own = (0.1, 200), {"legendgroup": FULL, "hovertemplate": about}
        traces.append(
            Scatter(
                x=[*ends, *ends[::-1]], y=[low, low, high, high], fill="toself", mode="none"
            ).update(fillcolor="rgba(127, 127, 127, 0.18)", showlegend=False, hoverinfo="skip")
        )
        traces.append(
            Scatter(x=ends, y=[mean, mean], mode="lines", name="full model", **own).update(
                line={"color": _INK, "width": 2}
            )
        )
    number = 0  # of lines in colour, which differ across groups
    for group in GROUPS:
        grouped = [row for row in rows if row.group == group]
        lines: dict[str, list[Measured]] = {}
        for row in grouped:
            lines.setdefault(STACKS if group == STACKS else row.method, []).append(row)
        for place, (name, points) in enumerate(lines.items()):
            trace = _line(points, view, name, place if group == BASELINE else number, group)
            trace.legendgrouptitle = None if group == STACKS else {"text": f"<b>{group}</b>"}
            number += group != BASELINE
            traces.append(trace)
    return traces


def _line(points: list[Measured], view: View, name: str, number: int, group: str) -> Any:
    """One method, by increasing cost."""
    from plotly.graph_objects import Scatter

    found = [(p, row) for row in points if (p := row.point(view))]
    found.sort(key=lambda pair: pair[0])
    x, y, low, high = ([p[i] for p, _ in found] for i in range(4))
    color = _GREY if group == BASELINE else COLORS[number % len(COLORS)]
    dash = _DASHES[number // len(COLORS) % len(_DASHES)]
    if group == BASELINE:
        dash = _GREYS.get(name.partition(":")[0], "dash")
    about = [[row.recipe, _score(*p[1:])] for p, row in found]
    return Scatter(
        x=x,
        y=y,
        name=name,
        mode="markers" if group == STACKS else "lines+markers",
        line={"color": color, "width": 2, "dash": dash},
        marker={"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8, "color": color},
        error_y={
            "array": [h - m for m, h in zip(y, high, strict=True)],
            "arrayminus": [m - l for m, l in zip(y, low, strict=True)],
            "color": _transparent(color),
            "thickness": 1.5,
            "width": 0,
        },
        customdata=about,
        hovertemplate=(
            "<b>%{customdata[0]}</b><br>%{x:.1f} % kept<br>%{customdata[1]}<extra></extra>"
        ),
        legendgroup=group,
    )


def _score(mean: float | None, low: float | None, high: float | None) -> str:
    return "not measured" if mean is None else f"{mean:.1f} % [{low:.1f}, {high:.1f}]"


def _view_menu(views: list[View], drawn: list[list[Any]]) -> dict[str, Any]:
    """A menu of views, which replaces the data and keeps what is hidden."""
    keys = ("x", "y", "customdata", "hovertemplate", "error_y.array", "error_y.arrayminus")
    choices = {
        view.title: {key: [_value(trace, key) for trace in traces] for key in keys}
        for view, traces in zip(views, drawn, strict=True)
    }
    return _menu(choices, above=44)


def _group_menu(traces: Sequence[Any]) -> dict[str, Any]:
    """A menu of groups; the baselines and the full model are always visible."""
    present = [group for group in GROUPS if any(t.legendgroup == group for t in traces)]
    methods = [group for group in present if group != BASELINE]
    shown = {"Selected methods": {*methods} - {*_HIDDEN}}
    if len(methods) > 1:
        shown |= {"All methods": {*methods}}
        shown |= {group: {group} for group in methods}
    choices = {
        label: {
            "visible": [
                "legendonly" if t.legendgroup in {*methods} - groups else True for t in traces
            ]
        }
        for label, groups in shown.items()
    }
    for trace, visible in zip(traces, choices["Selected methods"]["visible"], strict=True):
        trace.visible = visible
    return _menu(choices, above=4)


def _menu(choices: dict[str, dict[str, Any]], above: int) -> dict[str, Any]:
    """A menu that is ``above`` pixels over the plot; each choice updates the traces."""
    buttons = [
        {"label": label, "method": "restyle", "args": [args]} for label, args in choices.items()
    ]
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": above}}
    style = {"bgcolor": "rgba(127, 127, 127, 0.15)", "bordercolor": _LINE, "font": {"size": 12}}
    return {"buttons": buttons, "showactive": True, "active": 0, **place, **style}


def _value(trace: Any, key: str) -> Any:
    """A value of a trace as JSON: tuples are lists."""
    value = trace.to_plotly_json()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return list(value) if isinstance(value, tuple) else value


def _transparent(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.4)"
