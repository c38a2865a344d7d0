"""The named endpoints of the page, for ``gradio_client``."""

from __future__ import annotations

from typing import Any

import gradio as gr

from vlmfast.api.answer import Answer
from vlmfast.errors import MediaError
from vlmfast.media import kind_of

from . import panels
from .comparison import CONCURRENT, FRAMES, message_of, path_of
from .talk import FULL, RECIPE, Desk, Media, Turn

_TOKENS = 96


def endpoints(desk: Desk) -> None:
    """Add ``/ask`` and ``/compare`` to the page."""
    file: Any = gr.File(label="Image or video", visible=False)
    file.preprocess = path_of
    question = gr.Textbox(label="Question", visible=False)
    recipe = gr.Textbox("balanced", label="Recipe", visible=False)
    tokens = gr.Number(_TOKENS, label="Maximum answer length", precision=0, visible=False)
    frames = gr.Number(FRAMES, label="Number of frames", precision=0, visible=False)
    found = gr.JSON(visible=False)

    def ask(
        file: str, question: str, recipe: str, max_new_tokens: int, num_frames: int
    ) -> dict[str, Any]:
        """Answer a question about an image or a video with a recipe: text, recipe, statistics."""
        turn = _turn(desk, file, question, recipe, max_new_tokens, num_frames, (RECIPE,))
        return _plain(turn.answers[RECIPE])

    def compare(
        file: str, question: str, recipe: str, max_new_tokens: int, num_frames: int
    ) -> dict[str, Any]:
        """Answer with the full model and with a recipe: both answers, headline, rows."""
        sides = (FULL, RECIPE)
        turn = _turn(desk, file, question, recipe, max_new_tokens, num_frames, sides)
        return {
            "headline": panels.headline(turn),
            "agreement": turn.agreement,
            "rows": [list(row) for row in panels.counters(turn)],
            **{side: _plain(turn.answers[side]) for side in sides},
        }

    for name, run in (("ask", ask), ("compare", compare)):
        gr.on(
            [],
            run,
            [file, question, recipe, tokens, frames],
            found,
            api_name=name,
            concurrency_limit=CONCURRENT,
            concurrency_id="model",
        )


def _turn(
    desk: Desk,
    path: str | None,
    question: str,
    recipe: str,
    tokens: int,
    frames: int,
    sides: tuple[str, ...],
) -> Turn:
    """A turn of a conversation of its own; errors as messages of the API."""
    try:
        if path is None:
            raise MediaError("no file: pass an image or a video with gradio_client.handle_file")
        kind = kind_of(path)
        media = Media(kind, path, int(frames) if kind == "video" else 1)
        return desk.answer(media, question, recipe, int(tokens), sides)
    except Exception as error:
        text = message_of(error).replace(path or "\0", "the file")
        raise gr.Error(text, print_exception=False) from error


def _plain(answer: Answer) -> dict[str, Any]:
    return {"answer": answer.text, "recipe": answer.recipe, "stats": answer.stats.to_dict()}
