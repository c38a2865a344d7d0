"""The recipe on the page: its text, the presets and one control for each place in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vlmfast.core.recipe import PRESETS
from vlmfast.errors import VLMFastError

from . import builder, panels
from .talk import Desk

_QUICK: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "trigger_mode": "always_last",
    "api_visibility": "private",
}


@dataclass
class RecipeControls:
    """The components that other parts of the page read."""

    text: Any
    preset: Any
    tokens: Any
    history: Any
    methods: dict[str, Any]
    good: Any


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
    note = gr.HTML(**_note(shown), elem_id="recipe-note")
    methods, dials = {}, {}
    area = gr.Accordion("Build a recipe", open=False, elem_id="builder")
    with area:
        for row in builder.ROWS:
            with gr.Row():
                for place in row:
                    slot = shown.slots[place]
                    with gr.Column(min_width=180):
                        methods[place] = gr.Dropdown(
                            _offered(place, slot.method, frozenset()),
                            value=slot.method,
                            label=builder.PLACES[place].label,
                            elem_id=f"method-{place}",
                        )
                        dials[place] = gr.Slider(**_dial(place, slot), elem_id=f"dial-{place}")
        keep = gr.Checkbox(
            shown.keep,
            label="Preserve the positions of kept tokens",
            info="Otherwise they are renumbered; tiny was not trained on renumbered positions",
            elem_id="keep",
        )
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
    controls = RecipeControls(text, preset, tokens, history, methods, good)
    _wire(desk, controls, note, keep, dials)
    area.expand(
        lambda good: offer(desk, good),
        good,
        list(methods.values()),
        concurrency_limit=1,
        concurrency_id="model",
        show_progress="minimal",
        api_visibility="private",
    )
    return controls


def offer(desk: Desk, recipe: str) -> list[Any]:
    """Updates of the dropdowns: the methods that run on the model, and those of the recipe."""
    slots, runs = builder.read(recipe).slots, desk.methods()
    return [
        gr.update(choices=_offered(place, slots[place].method, runs)) for place in builder.PLACES
    ]


def _offered(place: str, chosen: str, runs: frozenset[str]) -> list[str]:
    return builder.methods_of(place, runs | {chosen})


def _wire(
    desk: Desk, controls: RecipeControls, note: Any, keep: Any, dials: dict[str, Any]
) -> None:
    text, good, preset, methods = (
        controls.text,
        controls.good,
        controls.preset,
        controls.methods,
    )

    def changed(good: str, change: Callable[[], str]) -> list[Any]:
        """Values of all outputs, text first; on an error they show the last valid recipe."""
        try:
            text = change()
            recipe = str(desk.recipe(text))  # expands presets for this model
            shown = builder.read(recipe)
            about = _note(shown)
        except VLMFastError as error:
            text, recipe, shown = good, good, builder.read(good)
            about = {"value": panels.message(str(error), error=True), "visible": True}
        return [
            text,
            recipe,
            gr.update(**about),
            shown.preset,
            shown.keep,
            *(_method(desk, place, shown.slots[place].method) for place in methods),
            *(gr.update(**_dial(place, shown.slots[place])) for place in dials),
        ]

    outputs = [text, good, note, preset, keep, *methods.values(), *dials.values()]
    quick = {"outputs": outputs, **_QUICK}
    # Leave the text as it was typed.
    written = {**quick, "outputs": outputs[1:]}
    text.input(lambda text, good: changed(good, lambda: text)[1:], [text, good], **written)
    preset.input(
        lambda name, good: changed(
            good, lambda: str(desk.vlm.recipe(name if name in PRESETS else good))
        ),
        [preset, good],
        **quick,
    )
    keep.input(
        lambda keep, good: changed(good, lambda: builder.set_positions(good, keep)),
        [keep, good],
        **quick,
    )
    for place in methods:
        methods[place].input(
            lambda method, keep, good, place=place: changed(
                good, lambda: builder.choose(good, place, method, keep)
            ),
            [methods[place], keep, good],
            **quick,
        )
        dials[place].input(
            lambda value, good, place=place: changed(
                good, lambda: builder.turn(good, place, value)
            ),
            [dials[place], good],
            **quick,
        )


def _method(desk: Desk, place: str, chosen: str) -> Any:
    """A recipe may contain a method that is not offered."""
    known = desk.tested or frozenset()
    return gr.update(choices=_offered(place, chosen, known), value=chosen)


def _dial(place: str, slot: builder.Slot) -> dict[str, Any]:
    """Properties of the slider of a place."""
    dial = slot.dial
    label = f"{builder.PLACES[place].label}: {dial.name if dial else 'no parameter'}"
    if dial is None:
        return {"label": label, "value": 1, "minimum": 0, "maximum": 1, "visible": False}
    if dial.value is None:
        label += f" (until moved, the default of {slot.method})"
    return {
        "label": label,
        "value": dial.high if dial.value is None else dial.value,
        "minimum": dial.low,
        "maximum": dial.high,
        "step": dial.step,
        "visible": True,
    }


def _note(shown: builder.Controls) -> dict[str, Any]:
    text = f"Settings without a control, preserved: {shown.beyond}"
    return {"value": panels.message(text) if shown.beyond else "", "visible": bool(shown.beyond)}
