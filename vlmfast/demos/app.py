"""The page, in Gradio 6: it shows what `talk` answers and `panels` draws."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

try:
    import gradio as gr
except ImportError as error:
    from ..errors import VLMFastError

    raise VLMFastError("the demo needs Gradio 6: pip install 'vlmfast[demo]'") from error

from ..errors import VLMFastError
from ..recipe import PRESETS, Recipe
from ..vlm import VLM
from . import builder, panels
from .drawn import write_examples
from .talk import FULL, RECIPE, Conversation, Desk, Media, Stopped

_LOG = logging.getLogger(__name__)
_LOCAL = ("127.0.0.1", "localhost", "::1")
_UPLOAD = "512mb"
_QUEUE = 32
_AT_ONCE = 2  # users whose answers take turns; others wait in the queue
_DAY = 86_400
_TOY = (
    "**`tiny` is a toy.** It has six million weights and knows the scenes that this project draws, "
    "such as the examples, and nothing else: it answers about a photograph as if that were one. "
    "What a recipe costs *it* says nothing about a real model; "
    "`vlmfast demo --model llava-hf/llava-v1.6-mistral-7b-hf` shows one."
)
_READ = (
    "Left of the handle the picture as it came in, right what the recipe kept to the last layer. "
    "Orange: around patches that were kept; blue: around patches that became one token; the darker "
    "a patch, the earlier it was dropped. Where the model sees a small view of the whole beside "
    "crops, the crops are drawn, and the counters count both."
)
_CSS = """
.note { padding: .5rem .75rem; border-radius: .5rem; border: 1px solid var(--border-color-primary);
  color: var(--body-text-color); background: var(--background-fill-secondary); }
.note.error { border: 2px solid #d92d20; font-weight: 600; }
table.counters { width: 100%; border-collapse: collapse; color: var(--body-text-color); }
table.counters, table.counters tr, table.counters thead { border: 0 !important; }
table.counters caption { text-align: left; font-weight: 600; padding: .25rem 0; }
table.counters th, table.counters td { padding: .3rem .5rem; overflow-wrap: anywhere;
  text-align: left; vertical-align: top; border: 0 !important;
  border-bottom: 1px solid var(--border-color-primary) !important; }
table.counters tbody th { font-weight: 400; }
table.counters td { font-variant-numeric: tabular-nums; font-weight: 600; }
.gradio-container { overflow-x: hidden; }
.answers button[aria-label="Clear"] { display: none; }
@media (max-width: 640px) { .depths .grid-container { grid-template-columns: 1fr 1fr !important; } }
"""


@dataclass
class Panel:
    """The components of one tab."""

    kind: str
    media: Any
    question: Any
    ask: Any
    again: Any
    stop: Any
    note: Any
    full: Any
    recipe: Any
    counters: Any
    slider: Any
    depths: Any
    strip: Any
    trace: Any


def launch(
    vlm: VLM,
    name: str,
    *,
    recipe: str = "balanced",
    host: str = "127.0.0.1",
    port: int = 7860,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until the process is interrupted.

    Parameters
    ----------
    vlm : VLM
    name : str
        What the model is called.
    recipe : str
        What the page begins with.
    host, port : str, int
        Where it listens.
    ready : callable
        Told the address when it can be opened.

    Raises
    ------
    VLMFastError
        Where the port cannot be had.
    """
    with tempfile.TemporaryDirectory(prefix="vlmfast-demo-") as folder:
        page = build(Desk(vlm, name), Path(folder), recipe, choose_model=host in _LOCAL)
        try:
            page.launch(
                server_name=host,
                server_port=port,
                css=_CSS,
                max_file_size=_UPLOAD,
                allowed_paths=[str(Path(path).parent) for path, _ in panels.plots()],
                footer_links=["gradio", "settings"],
                prevent_thread_lock=True,
                ssr_mode=False,
                quiet=True,
            )
        except OSError as error:
            raise VLMFastError(f"port {port} of {host} cannot be had: {error}") from error
        ready(f"http://{host}:{page.server_port}")
        page.block_thread()


def build(desk: Desk, folder: Path, recipe: str, *, choose_model: bool) -> gr.Blocks:
    """The page of a desk; files it writes go below ``folder``."""
    examples = write_examples(folder / "examples")
    recipe = str(Recipe.parse(recipe))
    with gr.Blocks(title="vlmfast", delete_cache=(3600, _DAY)) as page:
        gr.Markdown("# vlmfast: the full model and a recipe, side by side")
        about = gr.Markdown(_about(desk))
        text, tokens, history = _recipe_area(desk, recipe)
        shared = (text, tokens, history)
        with gr.Tabs():
            with gr.Tab("Picture"):
                _panel(desk, folder, "image", examples["image"], shared)
            with gr.Tab("Clip"):
                _panel(desk, folder, "video", examples["video"], shared)
            with gr.Tab("Measured"):
                _measured()
        if choose_model:
            _model_area(desk, about)

        def gone(request: gr.Request) -> None:
            for kind in ("image", "video"):
                desk.forget(_user(request, kind))

        page.unload(gone)
        page.queue(max_size=_QUEUE)
    return page


def _user(request: gr.Request, kind: str) -> str:
    return f"{request.session_hash}-{kind}"


def _about(desk: Desk) -> str:
    return f"Model: `{desk.name}`. " + (_TOY if desk.toy else "")


# --- the recipe ----------------------------------------------------------------------------------


def _recipe_area(desk: Desk, recipe: str) -> tuple[Any, Any, Any]:
    shown = builder.read(recipe)
    good = gr.State(recipe)  # what the controls start from while the text has a mistake
    with gr.Row():
        text = gr.Textbox(
            recipe,
            label="Recipe",
            info="Methods in the order of the pipeline, joined by +",
            elem_id="recipe",
            scale=3,
            min_width=280,
        )
        preset = gr.Dropdown(
            [*PRESETS, builder.CUSTOM],
            value=shown.preset,
            label="Preset",
            info="Starting points",
            elem_id="preset",
        )
    note = gr.HTML(**_recipe_note(shown), elem_id="recipe-note")
    methods, dials = {}, {}
    with gr.Accordion("Build a recipe", open=False, elem_id="builder"):
        with gr.Row():
            for place, label in builder.PLACES.items():
                slot = shown.slots[place]
                with gr.Column(min_width=180):
                    methods[place] = gr.Dropdown(
                        builder.methods_of(place),
                        value=slot.method,
                        label=label,
                        elem_id=f"method-{place}",
                    )
                    dials[place] = gr.Slider(**_dial(place, slot), elem_id=f"dial-{place}")
        keep = gr.Checkbox(
            shown.keep,
            label="Kept tokens stay at their own positions",
            info="Otherwise they are renumbered, which tiny never learned to read",
            elem_id="keep",
        )
    with gr.Accordion("Answers", open=False):
        tokens = gr.Slider(
            1, desk.limits.tokens, value=96, step=1, label="Longest answer, in tokens"
        )
        history = gr.Checkbox(
            not desk.toy,
            label="A question sees the ones before it",
            info="tiny learned to answer single questions and is best without",
            elem_id="history",
        )

    def mistake(error: VLMFastError) -> Any:
        return gr.update(value=panels.message(str(error), error=True), visible=True)

    def show(text: str, good: str, written: bool) -> list[Any]:
        try:
            shown = builder.read(text)
        except VLMFastError as error:
            # The text stays as it was typed.
            return [gr.skip(), good, mistake(error), *[gr.skip()] * 12]
        return [
            gr.skip() if written else text,
            text,
            gr.update(**_recipe_note(shown)),
            shown.preset,
            shown.keep,
            *(gr.update(value=shown.slots[place].method) for place in methods),
            *(gr.update(**_dial(place, shown.slots[place])) for place in dials),
        ]

    def changed(good: str, change: Any) -> list[Any]:
        try:
            return show(change(), good, written=False)
        except VLMFastError as error:
            shown = show(good, good, written=False)
            shown[2] = mistake(error)
            return shown

    outputs = [text, good, note, preset, keep, *methods.values(), *dials.values()]
    quick = {
        "outputs": outputs,
        "queue": False,
        "show_progress": "hidden",
        "trigger_mode": "always_last",
        "api_visibility": "private",
    }
    text.input(lambda text, good: show(text, good, written=True), [text, good], **quick)
    preset.input(
        lambda name, good: changed(good, lambda: str(Recipe.parse(PRESETS.get(name, good)))),
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
    return text, tokens, history


def _dial(place: str, slot: builder.Slot) -> dict[str, Any]:
    """What the slider of a place shows."""
    dial = slot.dial
    label = f"{builder.PLACES[place]}: {dial.name if dial else 'no number'}"
    if dial is None:
        return {"label": label, "value": 1, "minimum": 0, "maximum": 1, "visible": False}
    if dial.value is None:
        label += f" (its own until moved: {slot.method})"
    return {
        "label": label,
        "value": dial.high if dial.value is None else dial.value,
        "minimum": dial.low,
        "maximum": dial.high,
        "step": dial.step,
        "visible": True,
    }


def _recipe_note(shown: builder.Controls) -> dict[str, Any]:
    said = f"Without a control, kept as written: {shown.beyond}"
    return {"value": panels.message(said) if shown.beyond else "", "visible": bool(shown.beyond)}


# --- a tab ---------------------------------------------------------------------------------------


def _panel(
    desk: Desk,
    folder: Path,
    kind: str,
    examples: list[list[str]],
    shared: tuple[Any, Any, Any],
) -> None:
    what = "Picture" if kind == "image" else "Clip"
    with gr.Row():
        with gr.Column(scale=1, min_width=300):
            if kind == "image":
                media = gr.Image(
                    label="Your picture",
                    type="filepath",
                    sources=["upload", "clipboard"],
                    height=280,
                    elem_id=f"{kind}-media",
                )
                frames = gr.State(0)
            else:
                media = gr.Video(
                    label="Your clip", sources=["upload"], height=280, elem_id=f"{kind}-media"
                )
                frames = gr.Slider(1, 32, value=4, step=1, label="Frames read, evenly spread")
            # Files are opened by `talk`, whose messages say what is wrong with them.
            media.preprocess = _path
        with gr.Column(scale=2, min_width=300):
            question = gr.Textbox(
                label=f"Question about the {what.lower()}",
                placeholder=examples[0][1],
                elem_id=f"{kind}-question",
                submit_btn=False,
            )
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id=f"{kind}-ask", min_width=90)
                again = gr.Button(
                    "Look again at full detail", elem_id=f"{kind}-again", min_width=180
                )
                stop = gr.Button("Stop", elem_id=f"{kind}-stop", min_width=90)
            gr.Examples(examples, [media, question], label=f"Drawn {what.lower()}s")
    note = gr.HTML(elem_id=f"{kind}-note")
    with gr.Row():
        sides = [
            gr.Chatbot(
                label=label,
                height=260,
                min_width=300,
                render_markdown=False,
                feedback_options=None,
                buttons=["copy_all"],
                elem_id=f"{kind}-{side}",
                elem_classes="answers",
            )
            for side, label in ((FULL, "Full model"), (RECIPE, "Recipe"))
        ]
    counters = gr.HTML(panels.table(panels.counters(None)), elem_id=f"{kind}-counters")
    slider = gr.ImageSlider(
        label="In and kept",
        type="pil",
        interactive=False,
        max_height=560,
        elem_id=f"{kind}-slider",
    )
    gr.Markdown(_READ)
    strip = gr.Gallery(
        label="Frames, with what was kept of each",
        columns=4,
        height=260,
        visible=kind == "video",
        interactive=False,
        elem_id=f"{kind}-strip",
    )
    depths = gr.Gallery(
        label="What the language model sees, by depth",
        columns=3,
        height=460,
        fit_columns=False,
        interactive=False,
        object_fit="contain",
        elem_id=f"{kind}-depths",
        elem_classes="depths",
    )
    trace = gr.DownloadButton("Trace as JSON", interactive=False, elem_id=f"{kind}-trace")
    buttons, drawings = (ask, again, stop), (slider, depths, strip)
    panel = Panel(kind, media, question, *buttons, note, *sides, counters, *drawings, trace)
    _wire(desk, folder, panel, frames, shared)


def _path(payload: Any) -> str | None:
    return None if payload is None else payload.path


def _wire(
    desk: Desk, folder: Path, panel: Panel, frames: Any, shared: tuple[Any, Any, Any]
) -> None:
    text, tokens, history = shared

    def asked(
        path: str | None,
        frames: int,
        question: str,
        recipe: str,
        tokens: int,
        history: bool,
        request: gr.Request,
    ) -> Iterator[dict]:
        user = _user(request, panel.kind)
        media = Media(panel.kind, path, int(frames) or 1)
        talks = desk.ask(user, media, question, recipe, int(tokens), history)
        yield from _shown(desk, folder / "traces" / user, panel, talks, {panel.question: ""})

    def asked_again(tokens: int, request: gr.Request) -> Iterator[dict]:
        user = _user(request, panel.kind)
        talks = desk.look_again(user, int(tokens))
        yield from _shown(desk, folder / "traces" / user, panel, talks, {})

    def stopped(request: gr.Request) -> None:
        if talk := desk.talk(_user(request, panel.kind)):
            talk.stop()

    shown = [panel.note, panel.full, panel.recipe, panel.counters, panel.slider]
    shown += [panel.depths, panel.strip, panel.trace]
    running = {
        "show_progress": "hidden",
        "concurrency_limit": _AT_ONCE,
        "concurrency_id": "model",
    }
    inputs = [panel.media, frames, panel.question, text, tokens, history]
    for trigger in (panel.ask.click, panel.question.submit):
        trigger(asked, inputs, [*shown, panel.question], api_visibility="private", **running)
    panel.again.click(asked_again, [tokens], shown, api_visibility="private", **running)
    panel.stop.click(stopped, queue=False, show_progress="hidden", api_visibility="private")


def _shown(
    desk: Desk, folder: Path, panel: Panel, talks: Iterator[Conversation], last: dict
) -> Iterator[dict]:
    """What changes on the page while a conversation goes on."""
    talk = None
    yield {panel.note: panels.message("Reading …")}
    try:
        for talk in talks:
            turn = talk.current or talk.turns[-1]
            yield {
                panel.note: panels.message("Answering …"),
                panel.full: panels.chat(talk, FULL),
                panel.recipe: panels.chat(talk, RECIPE),
                panel.counters: panels.table(panels.counters(turn)),
            }
        yield {**_drawn(desk, folder, panel, talk), **last}
    except Exception as error:
        said = panels.message(_said(error), error=not isinstance(error, Stopped))
        update = {panel.note: said}
        if talk is not None:
            update |= {
                panel.full: panels.chat(talk, FULL),
                panel.recipe: panels.chat(talk, RECIPE),
            }
        yield update
    finally:
        talks.close()


def _drawn(desk: Desk, folder: Path, panel: Panel, talk: Conversation) -> dict:
    turn = talk.turns[-1]
    full, shown = turn.answers[FULL], turn.shown
    slow = any(a.stats.time_total_s >= desk.limits.seconds for a in turn.answers.values())
    said = f"Answered under {shown.recipe}."
    if slow:
        said = f"Cut off: an answer may take {desk.limits.seconds:g} s. Ask for a shorter one."
    drawn = {
        panel.note: panels.message(said, error=slow),
        panel.full: panels.chat(talk, FULL),
        panel.recipe: panels.chat(talk, RECIPE),
        panel.counters: panels.table(panels.counters(turn)),
        panel.slider: panels.slider(full, shown),
        panel.depths: panels.depths(shown),
        panel.trace: gr.DownloadButton(
            value=str(panels.write_trace(talk, turn, folder)), interactive=True
        ),
    }
    if panel.kind == "video":
        drawn[panel.strip] = panels.frame_strip(shown)
    return drawn


def _said(error: Exception) -> str:
    """What the page says of an error; a defect goes to the log as well."""
    text = " ".join(str(error).split())
    if isinstance(error, VLMFastError):
        return text
    if type(error).__name__ == "OutOfMemoryError":
        return "The GPU's memory is too small for this: ask about less, or keep fewer tokens."
    _LOG.error("the demo could not answer", exc_info=error)
    return f"This went wrong inside vlmfast ({type(error).__name__}); the terminal says where."


# --- the rest ------------------------------------------------------------------------------------


def _measured() -> None:
    gr.Markdown(
        "Accuracy of `tiny` on drawn scenes that it was not trained on, against what was kept. "
        "Methods can be compared by it; its numbers cannot be carried over to a real model."
    )
    for path, caption in panels.plots():
        gr.Markdown(f"### {caption[0].upper()}{caption[1:]}")
        gr.Image(path, show_label=False, interactive=False, alt_text=caption, elem_classes="plot")


def _model_area(desk: Desk, about: Any) -> None:
    with gr.Accordion("Another model", open=False, elem_id="model-area"):
        with gr.Row():
            name = gr.Textbox(
                desk.name,
                label="Model",
                info="tiny, a folder or a hub id; everybody on this page gets it",
                elem_id="model",
                scale=3,
            )
            load = gr.Button("Load", elem_id="model-load")
        note = gr.HTML(elem_id="model-note")

    def loaded(name: str) -> list[Any]:
        try:
            desk.load(name, device=desk.vlm.adapter.device)
        except Exception as error:
            return [gr.skip(), panels.message(_said(error), error=True)]
        return [_about(desk), panels.message(f"{desk.name} answers from now on.")]

    load.click(loaded, name, [about, note], concurrency_limit=1, api_visibility="private")
