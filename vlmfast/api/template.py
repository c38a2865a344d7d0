"""Writes prompts with the chat template of a processor.

The template sees a text content as Hugging Face's ``apply_chat_template`` shows it: as a string.
Some templates take lists of entries alone. Given a string they leave it out without an error, so
that such a turn is passed as a list.
"""

from __future__ import annotations

from typing import Any

from vlmfast.errors import ModelError, VLMFastError, one_line
from vlmfast.models.base import Adapter


def templated(adapter: Adapter, turns: list[dict], *, answer: bool = True) -> str:
    """Render the chat template.

    Parameters
    ----------
    turns : list of dict
        Contents are texts, or lists in which an image is ``{"type": "image"}``.
    answer : bool
        Whether the prompt of an answer follows.

    Raises
    ------
    ModelError
        For a processor without a template.
    VLMFastError
        For turns that the template rejects.
    """
    from jinja2 import TemplateError

    rejections = (TemplateError, TypeError, ValueError)
    if not getattr(adapter.writer, "chat_template", None):
        raise ModelError(
            f"the processor of {adapter.config.model_type} has no chat template; "
            "set vlm.processor.chat_template"
        )

    def write(turns: list[dict]) -> str:
        template = adapter.writer.apply_chat_template
        return template(turns, add_generation_prompt=answer, tokenize=False)

    def lost(as_lists: set[int]) -> set[int]:
        """The turns with a text of which the prompt has none."""
        words = {at: f"text-{at}-" for at in texts}
        probe = [
            {**turn, "content": words.get(at, turn["content"])} for at, turn in enumerate(turns)
        ]
        try:
            prompt = write(_listed(probe, as_lists))
        except rejections:
            return texts
        return {at for at, word in words.items() if word not in prompt}

    texts = {at for at, turn in enumerate(turns) if isinstance(turn["content"], str)}
    as_lists = lost(set()) if texts else set()
    if as_lists:
        as_lists -= lost(as_lists)
    try:
        return write(_listed(turns, as_lists))
    except rejections as error:
        raise VLMFastError(f"the chat template rejected the messages: {one_line(error)}") from error


def _listed(turns: list[dict], which: set[int]) -> list[dict[str, Any]]:
    """Turns of which some have their text as a list of one entry."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if at in which else turn
        for at, turn in enumerate(turns)
    ]
