"""A tab of the page: one input, the answers of the full model and of a recipe, and their cost."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from vlmfast.errors import VLMFastError, is_out_of_memory

from . import panels, views
from .files import Files
from .recipe_controls import RecipeControls
from .talk import FULL, RECIPE, Conversation, Desk, Media, Opening, Stopped

_LOG = logging.getLogger(__name__)
CONCURRENT = 2  # users served concurrently; others wait in the queue
_TITLES = {FULL: "Full model", RECIPE: "Recipe"}
RUNNING: dict[str, Any] = {
    "show_progress": "hidden",
    "concurrency_limit": CONCURRENT,
    "concurrency_id": "model",
    "api_visibility": "private",
}
_QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
_CONTROLS = """
<div class="view-controls">
  <label><input type="radio" name="{kind}-shown" value="kept" checked> Kept tokens</label>
  <label><input type="radio" name="{kind}-shown" value="input"> Input</label>
  <label class="dimmer">Dim dropped patches
    <input type="range" min="0" max="100" value="80" id="{kind}-dim"></label>
</div>
"""
# The mask is dimmed by a CSS variable of the tab.
_ON_LOAD = """
element.querySelector('input[type=range]').addEventListener('input', event =>
  element.closest('.comparison').style.setProperty('--dim', event.target.value / 100));
"""


@dataclass
class Panel:
    """The components of a tab."""

    kind: str
    opening: Opening
    status: Any
    view: Any
    question: Any
    ask: Any
    again: Any
    stop: Any
    full: Any
    recipe: Any
    counters: Any
    media: Any
    path: Any
    frames: Any
    examples: list[Any]
    depths: Any
    trace: Any

    @property
    def answers(self) -> list[Any]:
        """The components that are updated during an answer."""
        return [self.status, self.view, self.full, self.recipe, self.counters, self.trace]

    @property
    def drawings(self) -> list[Any]:
        """The components that are updated once a turn is complete."""
        return [self.depths, self.trace]


def user_of(request: gr.Request, kind: str) -> str:
    """The key of a page's conversation in a tab."""
    return f"{request.session_hash}-{kind}"


def comparison(desk: Desk, kind: str, examples: list[list[str]], thumbnails: list[str]) -> Panel:
    """Add the components of a tab to the page; `wire` connects them."""
    path, asked = examples[0]
    opening = Opening(Media(kind, path), asked)
    talk = desk.opened(opening)
    turn = talk.turns[-1] if talk else None
    shown = turn.shown if turn else None
    with gr.Column(elem_classes="comparison", elem_id=f"{kind}-comparison"):
        status = gr.HTML(
            panels.result(turn) if turn else panels.progress("Preparing the first example …"),
            elem_id=f"{kind}-status",
        )
        with gr.Row(elem_classes="result"):
            with gr.Column(elem_classes="shown", min_width=160):
                view = gr.HTML(
                    views.kept_html(shown) if shown else "",
                    elem_id=f"{kind}-view",
                )
                gr.HTML(_CONTROLS.format(kind=kind), js_on_load=_ON_LOAD)
            with gr.Column(elem_classes="said", min_width=160):
                question = gr.Textbox(
                    asked,
                    label=f"Question about the {kind}",
                    elem_id=f"{kind}-question",
                    max_lines=3,
                    submit_btn=False,
                )
                with gr.Row(elem_classes="buttons"):
                    ask = gr.Button("Ask", variant="primary", elem_id=f"{kind}-ask", min_width=60)
                    again = gr.Button(
                        "Look again at full detail", elem_id=f"{kind}-again", min_width=190
                    )
                    stop = gr.Button("Stop", elem_id=f"{kind}-stop", min_width=60)
                with gr.Row(elem_classes="answers"):
                    sides = [
                        gr.HTML(
                            panels.answer_html(talk, side, title),
                            elem_id=f"{kind}-{side}",
                            elem_classes="answer-card",
                            min_width=120,
                        )
                        for side, title in _TITLES.items()
                    ]
                counters = gr.HTML(panels.table(panels.counters(turn)), elem_id=f"{kind}-counters")
        current = gr.State(path)
        with gr.Row(elem_classes="inputs"):
            with gr.Column(scale=1, min_width=200):
                media = _dropzone(kind)
                frames = gr.Slider(
                    1,
                    32,
                    value=opening.media.num_frames,
                    step=1,
                    label="Number of frames, evenly spaced",
                    elem_id=f"{kind}-frames",
                    visible=kind == "video",
                )
            with gr.Column(scale=3, min_width=280):
                gr.HTML('<p class="strip-label">Examples: select one to ask it</p>')
                with gr.Row(elem_classes="strip", elem_id=f"{kind}-examples"):
                    buttons = [
                        gr.Button(text, icon=icon, elem_classes="example", min_width=120)
                        for (_, text), icon in zip(examples, thumbnails, strict=True)
                    ]
        with gr.Accordion("Tokens in the language model, by depth", open=False):
            depths = gr.HTML(
                views.depths_html(shown) if shown else "",
                elem_id=f"{kind}-depths",
            )
            trace = gr.DownloadButton(
                "Trace as JSON", interactive=False, elem_id=f"{kind}-trace", size="sm"
            )
    full, recipe = sides
    parts = (status, view, question, ask, again, stop, full, recipe, counters)
    return Panel(kind, opening, *parts, media, current, frames, buttons, depths, trace)


def _dropzone(kind: str) -> Any:
    """Takes a file and becomes empty again, since the tab shows the input."""
    media: Any  # an instance whose method is replaced
    if kind == "image":
        media = gr.Image(
            label="Your image",
            type="filepath",
            sources=["upload", "clipboard"],
            height=150,
            elem_id="image-media",
        )
    else:
        media = gr.Video(label="Your video", sources=["upload"], height=150, elem_id="video-media")
    # `talk` opens the files and raises errors with clear messages.
    media.preprocess = path_of
    return media


def path_of(payload: Any) -> str | None:
    """The path of an uploaded file."""
    return None if payload is None else payload.path


# --- events --------------------------------------------------------------------------------------


def wire(
    desk: Desk,
    files: Files,
    panel: Panel,
    examples: list[list[str]],
    controls: RecipeControls,
    page: gr.Blocks,
    tab: gr.Tab,
) -> None:
    """Connect the components of a tab."""
    kind, opening = panel.kind, panel.opening
    answers = panel.answers

    built = desk.opened(opening)  # the page contains it from the start

    def opened(request: gr.Request) -> Iterator[list]:
        user = user_of(request, kind)
        if built is not None and desk.opened(opening) is built:
            yield [gr.skip()] * len(answers)
            return
        # The last check follows the last state, which an upload may have preceded by a moment.
        for state in itertools.chain(_shown(desk, desk.open(opening)), [None]):
            if desk.talk(user) is not None:  # the user asked meanwhile
                return
            if (path := files.latest(user)) is not None:
                yield _ready(kind, path, opening.media.num_frames)
                return
            if state is not None:
                yield state

    def asked(
        path: str | None,
        frames: int,
        question: str,
        recipe: str,
        tokens: int,
        history: bool,
        request: gr.Request,
    ) -> Iterator[list]:
        media, user = Media(kind, path, int(frames)), user_of(request, kind)
        yield from _shown(desk, desk.ask(user, media, question, recipe, int(tokens), history))

    def asked_again(tokens: int, request: gr.Request) -> Iterator[list]:
        again = desk.look_again(user_of(request, kind), int(tokens), opening)
        yield from _shown(desk, again)

    def uploaded(path: str | None, frames: int, request: gr.Request) -> list:
        files.claim(user_of(request, kind), path)
        return [None, path, *_ready(kind, path, int(frames))]

    def drawn(request: gr.Request) -> list:
        user = user_of(request, kind)
        talk = desk.talk(user) or desk.opened(opening)
        if talk is None or not talk.turns:
            return ["", gr.DownloadButton(value=None, interactive=False)]
        turn = talk.turns[-1]
        file = files.new_trace(user)
        panels.write_trace(talk, turn, file)
        return [
            views.depths_html(turn.shown) if turn.shown else "",
            gr.DownloadButton(value=str(file), interactive=True),
        ]

    def stopped(request: gr.Request) -> None:
        if talk := desk.talk(user_of(request, kind)):
            talk.stop()

    inputs = [panel.path, panel.frames, panel.question, controls.text]
    inputs += [controls.tokens, controls.history]
    at_once = f"() => {json.dumps(panels.progress('Asking …'))}"

    def begun(trigger: Any) -> Any:
        """Show progress in the browser first, before the server answers."""
        return trigger(None, None, panel.status, js=at_once, **_QUICK)

    starts = [
        begun(panel.ask.click).then(asked, inputs, answers, **RUNNING),
        begun(panel.question.submit).then(asked, inputs, answers, **RUNNING),
        begun(panel.again.click).then(asked_again, [controls.tokens], answers, **RUNNING),
        tab.select(opened, None, answers, **RUNNING)
        if kind == "video"
        else page.load(opened, None, answers, **RUNNING),
    ]
    for button, (path, question) in zip(panel.examples, examples, strict=True):
        chosen = begun(button.click).then(
            lambda path=path, question=question: [path, question],
            None,
            [panel.path, panel.question],
            **_QUICK,
        )
        starts.append(chosen.then(asked, inputs, answers, **RUNNING))
    for start in starts:
        start.then(drawn, None, panel.drawings, **_QUICK)
    panel.media.upload(
        uploaded,
        [panel.media, panel.frames],
        [panel.media, panel.path, *answers],
        **_QUICK,
    )
    panel.stop.click(stopped, **_QUICK)


def _shown(desk: Desk, talks: Generator[Conversation, None, None]) -> Iterator[list]:
    """Yield the components of `Panel.answers` during an answer."""
    yield _unchanged(panels.progress("Processing the input …"))
    view = ""
    talk: Conversation | None = None
    drawn: Conversation | None = None
    try:
        for talk in talks:
            if talk is not drawn:
                view, drawn = views.plain_html(talk.images), talk
            yield _state(talk, panels.progress("Answering …"), view)
        assert talk is not None
        turn = talk.turns[-1]
        status = panels.result(turn)
        if any(a.stats.time_total_s >= desk.limits.seconds for a in turn.answers.values()):
            text = f"Truncated: answers are limited to {desk.limits.seconds:g} s. Shorten them."
            status = panels.message(text, error=True)
        yield _state(talk, status, _view_of(talk))
    except Exception as error:
        alert = panels.message(message_of(error), error=not isinstance(error, Stopped))
        yield _unchanged(alert) if talk is None else _state(talk, alert, _view_of(talk))
    finally:
        talks.close()


def _unchanged(status: str) -> list:
    return [status, *[gr.skip()] * 4, gr.DownloadButton(interactive=False)]


def _state(talk: Conversation | None, status: str, view: str) -> list:
    turns = [] if talk is None else talk.turns[-1:]
    if talk is not None and talk.current is not None:
        turns = [talk.current]
    return [
        status,
        view,
        *(panels.answer_html(talk, side, title) for side, title in _TITLES.items()),
        panels.table(panels.counters(turns[0] if turns else None)),
        gr.DownloadButton(interactive=False),
    ]


def _ready(kind: str, path: str | None, frames: int) -> list:
    """The components of `Panel.answers` for an input without a question."""
    try:
        images = Media(kind, path, frames).images()
        view = views.plain_html(images)
        status = panels.message("Ready: write a question, then Ask.")
    except Exception as error:
        view, status = "", panels.message(message_of(error), error=True)
    return _state(None, status, view)


def _view_of(talk: Conversation) -> str:
    shown = talk.turns[-1].shown if talk.turns else None
    if shown is not None:
        return views.kept_html(shown)
    return views.plain_html(talk.images)


def message_of(error: Exception) -> str:
    """Text of an error on the page. Defects are also logged."""
    text = " ".join(str(error).split())
    if isinstance(error, VLMFastError):
        return text
    if is_out_of_memory(error):
        return "Out of memory: use a smaller input or keep fewer tokens."
    _LOG.error("the demo could not answer", exc_info=error)
    return f"Internal error ({type(error).__name__}); the terminal shows the traceback."
