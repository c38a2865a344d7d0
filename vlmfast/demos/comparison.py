"""A tab of the page: one input, the answers of the full model and of a recipe, and their cost."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Generator, Iterator
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
# In the browser, before the server answers.
_AT_ONCE = f"() => {json.dumps(panels.progress('Asking …'))}"


def user_of(request: gr.Request, kind: str) -> str:
    """The key of a page's conversation in a tab."""
    return f"{request.session_hash}-{kind}"


class Comparison:
    """The components of a tab, which are added to the page, and what they do.

    Parameters
    ----------
    desk : Desk
    files : Files
    kind : {"image", "video"}
    examples : list of [str, str]
        Paths and questions; the tab opens with the first.
    thumbnails : list of str
    """

    def __init__(
        self,
        desk: Desk,
        files: Files,
        kind: str,
        examples: list[list[str]],
        thumbnails: list[str],
    ) -> None:
        self.desk, self.files, self.kind, self.examples = desk, files, kind, examples
        path, asked = examples[0]
        self.opening = Opening(Media(kind, path), asked)
        self.built = talk = desk.opened(self.opening)  # the page contains it from the start
        turn = talk.turns[-1] if talk else None
        with gr.Column(elem_classes="comparison", elem_id=f"{kind}-comparison"):
            self.status = gr.HTML(
                panels.result(turn) if turn else panels.progress("Preparing the first example …"),
                elem_id=f"{kind}-status",
            )
            with gr.Row(elem_classes="result"):
                with gr.Column(elem_classes="shown", min_width=160):
                    self.view = gr.HTML(_view_of(talk) if talk else "", elem_id=f"{kind}-view")
                    gr.HTML(_CONTROLS.format(kind=kind), js_on_load=_ON_LOAD)
                with gr.Column(elem_classes="said", min_width=160):
                    self.question = gr.Textbox(
                        asked,
                        label=f"Question about the {kind}",
                        elem_id=f"{kind}-question",
                        max_lines=3,
                        submit_btn=False,
                    )
                    with gr.Row(elem_classes="buttons"):
                        self.ask = _button("Ask", f"{kind}-ask", 60, variant="primary")
                        self.again = _button("Look again at full detail", f"{kind}-again", 190)
                        self.stop = _button("Stop", f"{kind}-stop", 60)
                    with gr.Row(elem_classes="answers"):
                        self.sides = [
                            gr.HTML(
                                panels.answer_html(talk, side, title),
                                elem_id=f"{kind}-{side}",
                                elem_classes="answer-card",
                                min_width=120,
                            )
                            for side, title in _TITLES.items()
                        ]
                    self.counters = gr.HTML(
                        panels.table(panels.counters(turn)), elem_id=f"{kind}-counters"
                    )
            self.path = gr.State(path)
            with gr.Row(elem_classes="inputs"):
                with gr.Column(scale=1, min_width=200):
                    self.media = _dropzone(kind)
                    self.frames = gr.Slider(
                        1,
                        32,
                        value=self.opening.media.num_frames,
                        step=1,
                        label="Number of frames, evenly spaced",
                        elem_id=f"{kind}-frames",
                        visible=kind == "video",
                    )
                with gr.Column(scale=3, min_width=280):
                    gr.HTML('<p class="strip-label">Examples: select one to ask it</p>')
                    with gr.Row(elem_classes="strip", elem_id=f"{kind}-examples"):
                        self.buttons = [
                            gr.Button(text, icon=icon, elem_classes="example", min_width=120)
                            for (_, text), icon in zip(examples, thumbnails, strict=True)
                        ]

    def connect(self, controls: RecipeControls, opens: Any) -> None:
        """Connect the components; ``opens`` is the event that shows the tab first."""
        # What is updated during an answer.
        answers = [self.status, self.view, *self.sides, self.counters]
        inputs = [self.path, self.frames, self.question]
        inputs += [controls.text, controls.tokens, controls.history]

        def begun(trigger: Any) -> Any:
            return trigger(None, None, self.status, js=_AT_ONCE, **_QUICK)

        begun(self.ask.click).then(self.asked, inputs, answers, **RUNNING)
        begun(self.question.submit).then(self.asked, inputs, answers, **RUNNING)
        begun(self.again.click).then(self.asked_again, controls.tokens, answers, **RUNNING)
        opens(self.opened, None, answers, **RUNNING)
        for button, example in zip(self.buttons, self.examples, strict=True):
            chosen = begun(button.click).then(
                lambda example=example: example, None, [self.path, self.question], **_QUICK
            )
            chosen.then(self.asked, inputs, answers, **RUNNING)
        self.media.upload(
            self.uploaded,
            [self.media, self.frames],
            [self.media, self.path, *answers],
            **_QUICK,
        )
        self.stop.click(self.stopped, **_QUICK)

    def opened(self, request: gr.Request) -> Iterator[list]:
        user = user_of(request, self.kind)
        if self.built is not None and self.desk.opened(self.opening) is self.built:
            yield [gr.skip()] * 5
            return
        # The last check follows the last state, which an upload may have preceded by a moment.
        talks = self.desk.open(self.opening)
        for state in itertools.chain(_shown(self.desk, talks), [None]):
            if self.desk.talk(user) is not None:  # the user asked meanwhile
                return
            if (path := self.files.latest(user)) is not None:
                yield _ready(self.kind, path, self.opening.media.num_frames)
                return
            if state is not None:
                yield state

    def asked(
        self,
        path: str | None,
        frames: int,
        question: str,
        recipe: str,
        tokens: int,
        history: bool,
        request: gr.Request,
    ) -> Iterator[list]:
        media, user = Media(self.kind, path, int(frames)), user_of(request, self.kind)
        talks = self.desk.ask(user, media, question, recipe, int(tokens), history)
        yield from _shown(self.desk, talks)

    def asked_again(self, tokens: int, request: gr.Request) -> Iterator[list]:
        user = user_of(request, self.kind)
        yield from _shown(self.desk, self.desk.look_again(user, int(tokens), self.opening))

    def uploaded(self, path: str | None, frames: int, request: gr.Request) -> list:
        self.files.claim(user_of(request, self.kind), path)
        return [None, path, *_ready(self.kind, path, int(frames))]

    def stopped(self, request: gr.Request) -> None:
        if talk := self.desk.talk(user_of(request, self.kind)):
            talk.stop()


def _button(text: str, name: str, width: int, variant: Any = "secondary") -> gr.Button:
    return gr.Button(text, elem_id=name, min_width=width, variant=variant)


def _dropzone(kind: str) -> Any:
    """Takes a file and becomes empty again, since the tab shows the input."""
    media: Any  # an instance whose method is replaced
    own: dict[str, Any] = {"label": f"Your {kind}", "height": 150, "elem_id": f"{kind}-media"}
    if kind == "image":
        media = gr.Image(type="filepath", sources=["upload", "clipboard"], **own)
    else:
        media = gr.Video(sources=["upload"], **own)
    # `talk` opens the files and raises errors with clear messages.
    media.preprocess = path_of
    return media


def path_of(payload: Any) -> str | None:
    """The path of an uploaded file."""
    return None if payload is None else payload.path


def _shown(desk: Desk, talks: Generator[Conversation, None, None]) -> Iterator[list]:
    """Yield what the tab shows during an answer."""
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
    return [status, *[gr.skip()] * 4]


def _state(talk: Conversation | None, status: str, view: str) -> list:
    turns = [] if talk is None else talk.turns[-1:]
    if talk is not None and talk.current is not None:
        turns = [talk.current]
    answers = (panels.answer_html(talk, side, title) for side, title in _TITLES.items())
    counters = panels.counters(turns[0] if turns else None)
    return [status, view, *answers, panels.table(counters)]


def _ready(kind: str, path: str | None, frames: int) -> list:
    """What the tab shows of an input without a question."""
    try:
        view = views.plain_html(Media(kind, path, frames).images())
        status = panels.message("Ready: write a question, then Ask.")
    except Exception as error:
        view, status = "", panels.message(message_of(error), error=True)
    return _state(None, status, view)


def _view_of(talk: Conversation) -> str:
    shown = talk.turns[-1].shown if talk.turns else None
    return views.plain_html(talk.images) if shown is None else views.kept_html(shown)


def message_of(error: Exception) -> str:
    """Text of an error on the page. Defects are also logged."""
    text = " ".join(str(error).split())
    if isinstance(error, VLMFastError):
        return text
    if is_out_of_memory(error):
        return "Out of memory: use a smaller input or keep fewer tokens."
    _LOG.error("the demo could not answer", exc_info=error)
    return f"Internal error ({type(error).__name__}); the terminal shows the traceback."
