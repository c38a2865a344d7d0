"""The recipe on the page: its text, the presets and a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vlmfast.core.recipe import PRESETS
from vlmfast.errors import VLMFastError

from . import builder, panels
from .talk import Desk


@dataclass
class RecipeControls:
    """The components that other parts of the page read."""

    text: Any
    tokens: Any
    history: Any


def recipe_controls(desk: Desk) -> RecipeControls:
    """Add the controls to the page."""
    recipe = str(desk.first)
    shown = builder.read(recipe)
    good = gr.State(recipe)  # last valid recipe, used while the text has an error
    with gr.Row(elem_classes="recipe"):
        text = gr.Textbox(
            recipe,
            label="Recipe: methods in pipeline order, joined by +",
            elem_id="recipe",
            scale=3,
            min_width=220,
        )
        preset = gr.Dropdown(
            [*builder.presets(), (builder.CUSTOM, builder.CUSTOM)],
            value=shown.preset,
            label="Preset",
            elem_id="preset",
            scale=2,
            min_width=180,
        )
    note = gr.HTML(visible=False, elem_id="recipe-note")
    budget = gr.Slider(builder.LEAST, 1, step=0.005, **_slider(shown), elem_id="budget")
    with gr.Accordion("Answer length and history", open=False, elem_id="generation"):
        tokens = gr.Slider(
            1,
            desk.limits.tokens,
            value=96,
            step=1,
            label="Maximum answer length (tokens)",
            elem_id="tokens",
        )
        history = gr.Checkbox(
            not desk.is_demo_model,
            label="Include earlier questions in the context",
            info="tiny was trained on single questions and works best without them",
            elem_id="history",
        )
    outputs = [text, good, note, preset, budget]
    edits: tuple[tuple[Any, Callable[[Any, str], str]], ...] = (
        (text, lambda text, good: text),
        (preset, lambda name, good: str(desk.vlm.recipe(name if name in PRESETS else good))),
        (budget, lambda budget, good: builder.set_budget(good, budget)),
    )
    for control, edit in edits:
        own = int(control is text)  # leave the text as it was typed
        control.input(
            lambda value, good, edit=edit, own=own: _changed(desk, edit, value, good)[own:],
            [control, good],
            outputs[own:],
            queue=False,
            show_progress="hidden",
            trigger_mode="always_last",
            api_visibility="private",
        )
    return RecipeControls(text, tokens, history)


def _changed(desk: Desk, edit: Callable[[Any, str], str], value: Any, good: str) -> list[Any]:
    """Values of all outputs, text first; on an error they show the last valid recipe."""
    note = gr.update(visible=False)
    try:
        text = edit(value, good)
        recipe = str(desk.recipe(text))  # expands presets for this model
        shown = builder.read(recipe)
    except VLMFastError as error:
        text, recipe, shown = good, good, builder.read(good)
        note = gr.update(value=panels.message(str(error), error=True), visible=True)
    return [text, recipe, note, shown.preset, gr.update(**_slider(shown))]


def _slider(shown: builder.Controls) -> dict[str, Any]:
    """Properties of the slider of the budget."""
    label = f"Budget of {shown.method}"
    if shown.budget is None:
        label += f" (until moved, the default of {shown.method})"
    return {"label": label, "value": shown.budget or 1, "visible": bool(shown.method)}
