"""The tab with the measured accuracy of methods: an interactive chart that marks the recipe."""

from __future__ import annotations

from typing import Any

import gradio as gr

from vlmfast.errors import VLMFastError

from .comparison import user_of
from .recipe_controls import RecipeControls
from .reports import AXES, chart
from .talk import Desk

_ABOUT = (
    "Accuracy of `tiny` on held-out generated scenes, against the fraction kept. "
    "Use it to compare methods; the numbers do not transfer to other models."
)


def measured(desk: Desk, controls: RecipeControls, tab: gr.Tab) -> None:
    """Fill the tab; the chart is drawn when the tab is opened."""
    with tab:
        gr.Markdown(_ABOUT, elem_classes="footnote")
        axis = gr.Radio(
            list(AXES), value=next(iter(AXES)), label="Reduced", elem_id="measured-axis"
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
