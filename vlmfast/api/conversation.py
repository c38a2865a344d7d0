"""The prompt of a conversation about images: its text, and its ids.

A model's answer may have other ids than its text has when it is tokenized again. A session keeps
the ids that the model has consumed, as long as the chat template repeats the answer verbatim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vlmfast.errors import ModelError
from vlmfast.models.base import Adapter

from .template import templated


@dataclass(frozen=True)
class Consumed:
    """The beginning of a conversation, up to the end of its last answer.

    Parameters
    ----------
    text : str
        As the chat template writes it, with one mark for each image.
    ids : list of int
        That the model has read and generated for it, placeholders included.
    """

    text: str
    ids: list[int]


def turns(media: list[dict], messages: list[dict], question: str) -> list[dict]:
    """The conversation as `VLM.chat` takes it, with blank images, to render its text.

    ``media`` are the content entries before the first question.
    """
    from PIL import Image

    blank = Image.new("RGB", (1, 1))
    blanks: dict[str, dict[str, Any]] = {"image": {"image": blank}, "video": {"video": [blank]}}
    shown = [{**part, **blanks.get(part["type"], {})} for part in media]
    first, *rest = [*messages, {"role": "user", "content": question}]
    if not shown:
        return [first, *rest]
    return [
        {"role": "user", "content": [*shown, {"type": "text", "text": first["content"]}]},
        *rest,
    ]


def split(text: str, marks: tuple[str, ...]) -> tuple[str, str]:
    """A prompt's text up to the end of its last image or video, and the rest."""
    end = max((text.rindex(mark) + len(mark) for mark in marks if mark in text), default=0)
    return text[:end], text[end:]


def tail_ids(adapter: Adapter, tail: str) -> list[int]:
    """Ids of the text after an image: it is tokenized after one, as in the whole prompt."""
    text = adapter.image_token() + tail
    return adapter.processor.tokenizer(text, add_special_tokens=False).input_ids[1:]


def before(adapter: Adapter, ids: list[int], tail: str) -> list[int]:
    """The ids of a prompt without those of ``tail``.

    Raises
    ------
    ModelError
        When the processor tokenizes this text differently after its images.
    """
    own = tail_ids(adapter, tail)
    end = len(ids) - len(own)
    if ids[end:] != own or adapter.image_token_id in own:
        raise ModelError(
            f"{type(adapter.processor).__name__} does not tokenize the text after an image on its "
            "own; sessions cannot be opened on this model"
        )
    return ids[:end]


def answered(adapter: Adapter, text: str, ids: list[int], tokens: list[int]) -> Consumed | None:
    """A prompt and its answer; ``None`` where the answer has no text of its own after the prompt.

    Parameters
    ----------
    text : str
        Of the prompt.
    ids : list of int
        Of the prompt.
    tokens : list of int
        The answer; special tokens at its end are not part of its text.
    """
    tokenizer = adapter.processor.tokenizer
    special = set(tokenizer.all_special_ids)
    end = len(tokens)
    while end and tokens[end - 1] in special:
        end -= 1
    # Decoded after the prompt's own text: some tokenizers drop a blank at the beginning.
    tail = tail_ids(adapter, split(text, adapter.marks())[1])
    head, whole = (
        tokenizer.decode(of, skip_special_tokens=False) for of in (tail, tail + tokens[:end])
    )
    if not whole.startswith(head):
        return None
    return Consumed(text + whole[len(head) :], ids + tokens[:end])


def continued(adapter: Adapter, text: str, ids: list[int], consumed: Consumed | None) -> list[int]:
    """The ids of a prompt that begins with what the model has consumed.

    Parameters
    ----------
    text : str
        Of the prompt.
    ids : list of int
        ``text``, tokenized as a whole.
    consumed : Consumed, optional

    Returns
    -------
    list of int
        ``ids`` where the text does not begin with the consumed one, or a token of ``ids`` reaches
        across its end.
    """
    if consumed is None or not text.startswith(consumed.text):
        return ids
    own = len(split(text, adapter.marks())[0])
    if own > len(consumed.text):
        return ids
    mark = adapter.image_token()
    tokenizer = adapter.processor.tokenizer
    if not tokenizer.is_fast:  # it does not tell where tokens begin
        return ids
    found = tokenizer(mark + text[own:], add_special_tokens=False, return_offsets_mapping=True)
    end = len(consumed.text) - own + len(mark)
    spans = found.offset_mapping
    after = [at for at, (start, _) in enumerate(spans) if start >= end]
    first = after[0] if after else len(spans)
    if first and spans[first - 1][1] > end:
        return ids
    rest = found.input_ids[first:]
    return consumed.ids + rest if ids[len(ids) - len(rest) :] == rest else ids


def answer_ids(adapter: Adapter, prompt: str | None, answer: str, *, end: bool) -> list[int]:
    """Ids of an answer as the chat template writes it after a prompt.

    Parameters
    ----------
    prompt : str, optional
        By default that of a short question: only its end matters.
    answer : str
    end : bool
        Whether to include the end token.

    Raises
    ------
    ModelError
        When the template changes the answer.
    """
    tokenizer = adapter.processor.tokenizer
    # The template decides whether a blank separates prompt and answer.
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    question = templated(adapter, turn[:1])
    dialogue = templated(adapter, turn, answer=False)
    tail = dialogue[len(question) :] if dialogue.startswith(question) else f" {answer}"
    if not end:
        blank, found, _ = tail.partition(answer)
        if not found:
            raise ModelError(f"the chat template changes the answer {answer!r}")
        tail = answer if blank.strip() else blank + answer
    elif tokenizer.eos_token:
        # Blanks around the end of a turn belong to the template; a model does not generate them.
        tail = tail.partition(tokenizer.eos_token)[0].rstrip() + tokenizer.eos_token
    prompt = question if prompt is None else prompt
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    whole = tokenizer(prompt + tail, add_special_tokens=False)["input_ids"]
    if whole[: len(before)] != before:  # a token spans the boundary
        return tokenizer(tail, add_special_tokens=False)["input_ids"]
    return whole[len(before) :]
