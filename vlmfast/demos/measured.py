"""The tab with the measured accuracy of methods: an interactive chart that marks the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError
from vlmfast.eval.chart import Measured, figure, rows

from .comparison import user_of
from .recipe_controls import RecipeControls
from .talk import Desk

# Reports of the same questions, and what their recipes reduce.
_AXES = {
    "Visual tokens": (("report.json", "presets/report.json"), "kept"),
    "KV cache": (("cache/report.json",), "held"),
}
_ABOUT = (
    "Accuracy of `tiny` on held-out generated scenes, against the fraction kept. "
    "Use it to compare methods; the numbers do not transfer to other models."
)


def measured(desk: Desk, controls: RecipeControls, tab: gr.Tab) -> None:
    """Fill the tab; the chart is drawn when the tab is opened."""
    with tab:
        gr.Markdown(_ABOUT, elem_classes="footnote")
        axis = gr.Radio(
            list(_AXES), value=next(iter(_AXES)), label="Reduced", elem_id="measured-axis"
        )
        plot = gr.Plot(show_label=False, elem_id="measured-plot")

    opened = gr.State(False)

    def drawn(axis: str, recipe: str, request: gr.Request) -> Any:
        talk = desk.talk(user_of(request, "image"))
        try:
            marked = desk.recipe(recipe)
        except VLMFastError:  # while it is being written
            return gr.skip()
        asked, kept = (None, None) if talk is None else (talk.recipe, talk.kept)
        return chart(axis, marked, asked, kept)

    def changed(opened: bool, axis: str, recipe: str, request: gr.Request) -> Any:
        return drawn(axis, recipe, request) if opened else gr.skip()

    inputs = [axis, controls.text]
    options: dict[str, Any] = {
        "queue": False,
        "api_visibility": "private",
        "trigger_mode": "always_last",
    }
    tab.select(drawn, inputs, plot, **options).then(lambda: True, None, opened, **options)
    axis.input(drawn, inputs, plot, **options)
    controls.text.change(changed, [opened, *inputs], plot, **options)


def chart(axis: str, recipe: Recipe, asked: Recipe | None, kept: float | None) -> Any:
    """The chart of a report.

    Parameters
    ----------
    axis : str
        One of the choices of the tab.
    recipe : Recipe
        The recipe to mark.
    asked : Recipe, optional
        The recipe of the last answer, which kept the fraction ``kept`` of the visual tokens.
    kept : float, optional
    """
    files, reduced = _AXES[axis]
    found: list[Measured] = []
    for file in files:  # each contains the full model
        present = {row.recipe for row in found}
        found += [r for r in rows(results() / file, axis=reduced) if r.recipe not in present]
    same = reduced == "kept" and asked == recipe
    return figure(found, current=str(recipe), kept=kept if same else None)


def results() -> Path:
    """The folder of the reports: in the package, or in a clone."""
    folder = Path(__file__).parent / "results"
    return folder if folder.is_dir() else Path(__file__).parents[2] / "docs" / "results"
