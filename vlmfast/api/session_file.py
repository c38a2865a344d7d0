"""Saves sessions and loads them: their conversation, and their media as the processor gave them.

A file is one safetensors file. Its tensors are pixels; everything else is JSON in its metadata,
with a checksum of both. A checksum detects damage but not forgery, so every part is checked against
the model before anything is computed: what depends on the sizes of images alone is computed again
from blank ones, and pixels must have the shapes of theirs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.files import read_bytes, readable, replace_bytes
from vlmfast.core.params import check_keys
from vlmfast.core.recipe import Recipe
from vlmfast.engine.features import digest
from vlmfast.errors import ModelError, RecipeError, VLMFastError, check_memory
from vlmfast.media import MAX_VIDEO_PIXELS, FrameTimes
from vlmfast.models.base import Adapter
from vlmfast.version import __version__

from .conversation import Consumed, turns
from .generation import shown
from .identity import identity
from .layouts import blank
from .request import Rendered, render
from .session_media import Media, is_pixels

__all__ = ["State", "checked_messages", "read", "write"]

_KIND, _VERSION = "vlmfast-session", "2"
_LONGEST = 4096  # characters of a recipe
_LEAST = 64  # values that the pixels of an image have at least, where views have no fixed size


@dataclass
class State:
    """What a file tells of a session.

    Parameters
    ----------
    history : bool
    messages : list of dict
    consumed : Consumed, optional
    media : Media, optional
    """

    history: bool
    messages: list[dict]
    consumed: Consumed | None
    media: Media | None


def checked_messages(messages: object, history: bool) -> list[dict]:
    """The turns of a conversation, which ends with an answer.

    Raises
    ------
    VLMFastError
        For the first turn that is none, and for any without ``history``.
    """
    if not isinstance(messages, list | tuple):
        raise VLMFastError(f"messages must be a list of turns, not {shown(messages)}")
    if messages and not history:
        raise VLMFastError("messages: this session was opened with history=False")
    for number, turn in enumerate(messages):
        role = ("user", "assistant")[number % 2]
        if (
            not isinstance(turn, dict)
            or turn.get("role") != role
            or not isinstance(turn.get("content"), str)
            or (role == "user" and not turn["content"].strip())
        ):
            raise VLMFastError(f"messages[{number}] must have the role {role} and a text")
        check_keys(f"messages[{number}]", turn, ("role", "content"))
    if len(messages) % 2:
        raise VLMFastError("messages must end with an answer; ask puts the next question")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


# --- files ---------------------------------------------------------------------------------------


def write(path: str | Path, adapter: Adapter, recipe: Recipe, state: State) -> None:
    """Write a session's state, replacing an existing file atomically.

    Raises
    ------
    VLMFastError
        With the reason, if the file cannot be written.
    """
    _one_device(adapter)
    media, consumed, pixels = state.media, state.consumed, dict[str, Tensor]()
    session: dict[str, Any] = {
        "history": state.history,
        "messages": state.messages,
        "consumed": None,
        "media": None,
    }
    if media is not None:
        pixels = {key: of.contiguous() for key, of in media.tensors.items() if is_pixels(key)}
        session["media"] = {
            "content": media.content,
            "sizes": media.sizes,
            "frames": media.frames,
            "times": [asdict(of) for of in media.times],
        }
    if consumed is not None:
        start = 0 if media is None else len(media.prefix)
        session["consumed"] = {"text": consumed.text, "ids": consumed.ids[start:]}
    metadata = {
        "kind": _KIND,
        "version": _VERSION,
        "vlmfast": __version__,
        "recipe": str(recipe),
        "model": json.dumps(identity(adapter)),
        "session": json.dumps(session),
    }
    write_content(path, metadata, pixels)


def write_content(path: str | Path, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write a file with a checksum; tensors in host memory, contiguous."""
    from safetensors.torch import save

    replace_bytes(path, [save(tensors, {**metadata, "digest": _checksum(metadata, tensors)})])


def read(
    path: str | Path, adapter: Adapter, choose: Callable[[str], Recipe]
) -> tuple[Recipe, State]:
    """Read a file and check all of it.

    Parameters
    ----------
    choose : callable
        Returns the recipe of the session from the text of the saved recipe.

    Raises
    ------
    VLMFastError
        For a file that cannot be read or used; `ModelError` if it was saved with another model,
        `RecipeError` if it was saved under another recipe.
    """
    _one_device(adapter)
    metadata, tensors = read_content(path)
    lacking = [key for key in ("model", "recipe", "session") if not metadata.get(key)]
    if lacking:
        raise VLMFastError(f"{path} cannot be used: it has no {lacking[0]}")
    if len(metadata["recipe"]) > _LONGEST:
        raise VLMFastError(f"{path} cannot be used: its recipe is too long")
    try:
        saved = json.loads(metadata["model"])
        session = json.loads(metadata["session"])
    except (ValueError, RecursionError) as error:
        raise VLMFastError(f"{path} cannot be used: its metadata are not JSON") from error
    _same_model(path, saved, identity(adapter))
    recipe = choose(metadata["recipe"])
    if recipe != Recipe.parse(metadata["recipe"]):
        raise RecipeError(
            f"{path} was saved under the recipe {metadata['recipe'][:200]}, not {recipe}"
        )
    try:
        return recipe, _checked(adapter, session, tensors)
    except Exception as error:  # a forged file can cause any exception
        check_memory(error)
        reason = str(error).partition("\n")[0][:300]
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise VLMFastError(f"{path} cannot be used: {reason}") from error


def read_content(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file whose checksum is that of its content."""
    from safetensors.torch import load

    with readable(path):
        data = read_bytes(path)
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header["__metadata__"]
        stated, own = metadata.pop("digest", None), _checksum(metadata, tensors)
    except Exception as error:  # the parser has errors of its own
        check_memory(error)
        raise VLMFastError(f"{path} is not a saved session, or it is damaged") from error
    if metadata.get("kind") != _KIND:
        raise VLMFastError(f"{path} is not a saved session")
    version = metadata.get("version")
    if version != _VERSION:
        raise VLMFastError(
            f"{path} was saved by vlmfast {str(metadata.get('vlmfast'))[:40]} in format "
            f"{str(version)[:40]}; this vlmfast reads format {_VERSION}"
        )
    if stated != own:
        raise VLMFastError(f"{path} is damaged: its checksum does not match its content")
    return metadata, tensors


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    text = json.dumps(metadata, sort_keys=True).encode()
    return hashlib.sha256(text + digest(tensors)).hexdigest()


def _one_device(adapter: Adapter) -> None:
    if adapter.split:
        raise ModelError("sessions of a model on several devices cannot be saved or loaded")


def _same_model(path: str | Path, saved: Any, own: dict[str, Any]) -> None:
    if saved == own:
        return
    sizes = saved.get("sizes") if isinstance(saved, dict) else None
    if not isinstance(sizes, dict):
        raise ModelError(f"{path} does not say with which model it was saved")
    if sizes != own["sizes"]:
        keys = [key for key, value in own["sizes"].items() if sizes.get(key) != value]
        what = ", ".join(
            f"{key} {str(sizes.get(key))[:40]} and not {own['sizes'][key]}" for key in keys
        )
        raise ModelError(f"{path} was saved with another model: {what or 'additional sizes'}")
    if saved.get("dtype") != own["dtype"]:
        raise ModelError(
            f"{path} was saved with a model in {str(saved.get('dtype'))[:40]}, and this one is in "
            f"{own['dtype']}"
        )
    if saved.get("weights") != own["weights"]:
        raise ModelError(f"{path} was saved with another model: its weights are different")
    raise ModelError(
        f"{path} was saved with other settings of the model, its adapters or its processor; "
        "load it with those"
    )


# --- checks --------------------------------------------------------------------------------------


def _need(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _checked(adapter: Adapter, session: Any, tensors: dict[str, Tensor]) -> State:
    """The state in a file; raises any exception if a part of it cannot be right."""
    names = {"history", "messages", "consumed", "media"}
    _need(isinstance(session, dict) and session.keys() == names, "its parts are others")
    history, media, consumed = session["history"], None, None
    _need(isinstance(history, bool), "history is neither true nor false")
    messages = checked_messages(session["messages"], history)
    if session["media"] is not None:
        media = _checked_media(adapter, session["media"], messages, tensors)
    _need(media is not None or not tensors, "it has pixels of no image")
    if session["consumed"] is not None:
        text, ids = session["consumed"]["text"], session["consumed"]["ids"]
        _need(isinstance(text, str), "the conversation has no text")
        for at in ids:
            fine = type(at) is int and 0 <= at < adapter.vocabulary
            _need(fine, f"{str(at)[:40]} is no id of a text")
        spoken = torch.tensor(ids, dtype=torch.int64)
        _need(not adapter.visual(spoken).any(), "there are image tokens in the conversation")
        content = [] if media is None else media.content
        prompt = render(adapter, turns(content, messages, "?"), Recipe()).text
        if messages and prompt.startswith(text):  # the messages may have been replaced
            consumed = Consumed(text, ids if media is None else media.prefix + ids)
    return State(history, messages, consumed, media)


def _checked_media(
    adapter: Adapter, saved: dict[str, Any], messages: list[dict], tensors: dict[str, Tensor]
) -> Media:
    """The media of a file: blank ones of its sizes, with its pixels."""
    content, sizes, frames = saved["content"], saved["sizes"], saved["frames"]
    for part in content:
        text = part["type"] == "text" and isinstance(part.get("text"), str)
        _need(text or part in ({"type": "image"}, {"type": "video"}), "media are not a turn")
    fine = all(is_pixels(key) and of.is_floating_point() for key, of in tensors.items())
    _need(fine, "its tensors are not the pixels of its images")
    # The processor may enlarge the blank images: few bytes must not become many.
    values, view = sum(of.numel() for of in tensors.values()), adapter.view_size()
    least = len(sizes) * (_LEAST if view is None else 3 * view[0] * view[1])
    _need(0 < least <= values, f"{len(sizes)} images have {values} values")
    made = cache(blank)  # one image of each size
    blanks, pixels = [], 0
    for size in sizes:
        blanks.append(made(tuple(size)))
        pixels += blanks[-1].width * blanks[-1].height
        _need(pixels <= MAX_VIDEO_PIXELS, "the images are too large together")
    times: list[FrameTimes] = []
    for one in saved["times"]:
        lists: dict[str, Any] = {key: tuple(one.pop(key)) for key in ("indices", "timestamps_s")}
        times.append(FrameTimes(**one, **lists))
    whole = [n for of in (*frames, *(of.indices for of in times)) for n in of]
    _need(all(type(n) is int for n in whole), "frames are not whole numbers")
    frames = [tuple(of) for of in frames]
    framed = [(at, i, len(of.indices)) for at, of in enumerate(times) for i in range(len(of))]
    _need([of for of in frames if of != (-1, 0, 1)] == framed, "frames and times differ")
    _need(len(frames) == len(sizes), "frames and sizes differ")

    # The conversation too: a placeholder in it would be mistaken for one of the images.
    text = render(adapter, turns(content, messages, "?"), Recipe()).text
    images, videos = adapter.parted(blanks, frames)
    placeholders = sum(map(text.count, adapter.marks()))
    _need(placeholders == len(images) + len(videos), "its images stand in another prompt")
    media = Media.of(adapter, content, Rendered("", blanks, frames, times))
    own = {key: of for key, of in media.tensors.items() if is_pixels(key)}
    _need(tensors.keys() == own.keys(), "its tensors are not the pixels of its images")
    for key, of in tensors.items():
        like = own[key]
        fits = of.dtype == like.dtype and of.shape == like.shape
        what = f"{of.dtype} {tuple(of.shape)}, not {like.dtype} {tuple(like.shape)}"
        _need(fits, f"{key} is {what}")
        _need(of.isfinite().all(), f"{key} contains values that are not finite")
    media.tensors |= tensors
    media.images = []
    return media
