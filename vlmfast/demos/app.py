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
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")  # kept in memory all the same

try:
    import gradio as gr
except ImportError as error:
    from vlmfast.errors import VLMFastError

    raise VLMFastError("the demo needs Gradio 6: pip install 'vlmfast[demo]'") from error

from vlmfast.api.vlm import VLM
from vlmfast.core.recipe import PRESETS
from vlmfast.errors import VLMFastError

from . import builder, panels
from .drawn import write_examples
from .talk import FULL, RECIPE, Conversation, Desk, Media, Stopped

_LOG = logging.getLogger(__name__)
_LOCAL = ("127.0.0.1", "localhost", "::1")
_UPLOAD = "512mb"
_QUEUE = 32
_AT_ONCE = 2  # users whose answers take turns; others wait in the queue
_PAGES = 128  # whose controls Gradio remembers; it forgets none that was closed
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
.drawn .grid-wrap { max-height: none !important; min-height: 8rem !important;
  padding-top: 2.25rem !important; }
.drawn .grid-container { height: auto !important; max-height: none !important; }
.drawn .gallery-item { height: auto; }
.drawn .thumbnail-lg { display: flex; flex-direction: column; aspect-ratio: auto !important;
  height: auto !important; }
.drawn .thumbnail-lg img { height: auto !important; min-height: 5rem;
  object-fit: contain !important; }
.drawn .caption-label { position: static !important; max-width: 100% !important;
  border: 0 !important; white-space: normal !important; }
@media (max-width: 640px) { .drawn .grid-container { grid-template-columns: 1fr 1fr !important; } }
.gradio-container { --block-info-text-color: #52525b; --button-primary-background-fill: #c2410c;
  --button-primary-background-fill-hover: #9a3412; --tab-ink: #9a3412; }
.dark .gradio-container, .gradio-container.dark { --block-info-text-color: #a1a1aa;
  --tab-ink: #fb923c; }
button[role="tab"].selected { color: var(--tab-ink) !important; }
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
    trace: Any
    strip: Any

    @property
    def drawings(self) -> list[Any]:
        """What is drawn of a turn once it is complete."""
        drawn = [self.slider, self.depths, self.trace]
        return [*drawn, self.strip] if self.kind == "video" else drawn


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
                state_session_capacity=_PAGES,
                allowed_paths=[str(Path(path).parent) for path, _ in panels.plots()],
                footer_links=["gradio", "settings"],
                prevent_thread_lock=True,
                ssr_mode=False,
                quiet=True,
            )
        except OSError as error:
            raise VLMFastError(
                f"port {port} of {host} cannot be had; if something listens there, give another"
            ) from error
        ready(f"http://{host}:{page.server_port}")
        page.block_thread()


def build(desk: Desk, folder: Path, recipe: str, *, choose_model: bool) -> gr.Blocks:
    """The page of a desk; files it writes go below ``folder``."""
    examples = write_examples(folder / "examples")
    recipe = str(desk.vlm.recipe(recipe))
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
    source = desk.vlm.adapter.sources()[0]
    shown = builder.read(recipe, source)
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
            1,
            desk.limits.tokens,
            value=96,
            step=1,
            label="Longest answer, in tokens",
            elem_id="tokens",
        )
        history = gr.Checkbox(
            not desk.toy,
            label="A question sees the ones before it",
            info="tiny learned to answer single questions and is best without",
            elem_id="history",
        )

    def changed(good: str, change: Callable[[], str]) -> list[Any]:
        """All that follows the text, which comes first; a mistake leaves the last good recipe."""
        try:
            text = change()
            recipe = str(desk.vlm.recipe(text))  # a preset is what it stands for on this model
            shown = builder.read(recipe, source)
            note = _recipe_note(shown)
        except VLMFastError as error:
            text, recipe, shown = good, good, builder.read(good, source)
            note = {"value": panels.message(str(error), error=True), "visible": True}
        return [
            text,
            recipe,
            gr.update(**note),
            shown.preset,
            shown.keep,
            *(shown.slots[place].method for place in methods),
            *(gr.update(**_dial(place, shown.slots[place])) for place in dials),
        ]

    outputs = [text, good, note, preset, keep, *methods.values(), *dials.values()]
    quick = {
        "outputs": outputs,
        "queue": False,
        "show_progress": "hidden",
        "trigger_mode": "always_last",
        "api_visibility": "private",
    }
    # The text itself stays as it was typed.
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
                frames = gr.Slider(
                    1,
                    32,
                    value=4,
                    step=1,
                    label="Frames read, evenly spread",
                    elem_id=f"{kind}-frames",
                )
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
            drawn = gr.Dataset(
                components=[media, question],
                samples=examples,
                headers=[what, "Question"],
                label=f"Drawn {what.lower()}s",
                type="index",
            )
            # Not gr.Examples, which puts a new component with a preprocess of its own in the place
            # of `media`.
            drawn.click(
                lambda number: examples[number],
                drawn,
                [media, question],
                queue=False,
                show_progress="hidden",
                api_visibility="private",
            )
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
        visible=kind == "video",
        interactive=False,
        object_fit="contain",
        elem_id=f"{kind}-strip",
        elem_classes="drawn",
    )
    depths = gr.Gallery(
        label="What the language model sees, by depth",
        columns=3,
        fit_columns=False,
        interactive=False,
        object_fit="contain",
        elem_id=f"{kind}-depths",
        elem_classes="drawn",
    )
    trace = gr.DownloadButton("Trace as JSON", interactive=False, elem_id=f"{kind}-trace")
    buttons, drawings = (ask, again, stop), (slider, depths, trace, strip)
    panel = Panel(kind, media, question, *buttons, note, *sides, counters, *drawings)
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
    ) -> Iterator[list]:
        user = _user(request, panel.kind)
        media = Media(panel.kind, path, int(frames) or 1)
        talks = desk.ask(user, media, question, recipe, int(tokens), history)
        yield from _shown(desk, user, talks)

    def asked_again(tokens: int, request: gr.Request) -> Iterator[list]:
        user = _user(request, panel.kind)
        yield from _shown(desk, user, desk.look_again(user, int(tokens)))

    def drawn(request: gr.Request) -> list:
        user = _user(request, panel.kind)
        return _drawn(panel, desk.talk(user), folder / "traces" / user)

    def stopped(request: gr.Request) -> None:
        if talk := desk.talk(_user(request, panel.kind)):
            talk.stop()

    answers = [panel.note, panel.full, panel.recipe, panel.counters, panel.trace]
    running = {
        "show_progress": "hidden",
        "concurrency_limit": _AT_ONCE,
        "concurrency_id": "model",
        "api_visibility": "private",
    }
    quick = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    inputs = [panel.media, frames, panel.question, text, tokens, history]
    for done in (
        panel.ask.click(asked, inputs, answers, **running),
        panel.question.submit(asked, inputs, answers, **running),
        panel.again.click(asked_again, [tokens], answers, **running),
    ):
        done.then(drawn, None, panel.drawings, **quick)
    panel.stop.click(stopped, **quick)


def _shown(desk: Desk, user: str, talks: Iterator[Conversation]) -> Iterator[list]:
    """The note, both chats, the counters and no trace yet, while a conversation goes on.

    All of them each time: Gradio builds a component anew for one that is left out, and keeps it.
    """

    def now(text: str, talk: Conversation | None, *, error: bool = False) -> list:
        turn = talk and (talk.current or (talk.turns or [None])[-1])
        return [
            panels.message(text, error=error),
            panels.chat(talk, FULL),
            panels.chat(talk, RECIPE),
            panels.table(panels.counters(turn)),
            gr.DownloadButton(interactive=False),
        ]

    yield now("Reading …", desk.talk(user))
    try:
        for talk in talks:
            yield now("Answering …", talk)
        answers = talk.turns[-1].answers.values()
        if any(answer.stats.time_total_s >= desk.limits.seconds for answer in answers):
            said = f"Cut off: an answer may take {desk.limits.seconds:g} s. Ask for a shorter one."
            yield now(said, talk, error=True)
        else:
            yield now(f"Answered under {talk.turns[-1].shown.recipe}.", talk)
    except Exception as error:
        yield now(_said(error), desk.talk(user), error=not isinstance(error, Stopped))
    finally:
        talks.close()


def _drawn(panel: Panel, talk: Conversation | None, folder: Path) -> list:
    """What belongs to the last turn: the slider, the depths, the trace, the frames of a clip."""
    if talk is None or not talk.turns:
        blank = [None, None, gr.DownloadButton(value=None, interactive=False), None]
        return blank[: len(panel.drawings)]
    turn = talk.turns[-1]
    trace = panels.write_trace(talk, turn, folder)
    drawn = [
        panels.slider(turn.answers[FULL], turn.shown),
        panels.depths(turn.shown),
        gr.DownloadButton(value=str(trace), interactive=True),
    ]
    return [*drawn, panels.frame_strip(turn.shown)] if panel.kind == "video" else drawn


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
