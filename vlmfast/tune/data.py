"""The user's questions: a JSONL file with an image or a video, a question and its answer a line."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmfast.core.files import read_bytes, readable
from vlmfast.core.params import check_keys
from vlmfast.errors import VLMFastError

LEAST = 20  # questions
_KEYS = ("image", "video", "question", "answer", "num_frames", "id")


@dataclass(frozen=True)
class Question:
    """One line of the file.

    Parameters
    ----------
    line : int
        Its number in the file, from 1.
    kind : {"image", "video"}
    media : tuple of str
        Path or URL of each image, or of the video.
    question : str
    answers : tuple of str
        The correct answers. Without any, the full model's answer counts as correct.
    num_frames : int, optional
        Frames to read from the video.
    """

    line: int
    kind: str
    media: tuple[str, ...]
    question: str
    answers: tuple[str, ...] = ()
    num_frames: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vlmfast.Request`."""
        if self.kind == "video":
            return {"video": self.media[0], "num_frames": self.num_frames}
        return {"images": list(self.media)}


@dataclass(frozen=True)
class Split:
    """Indices of the questions that the race may use, in its order, and of those held out."""

    race: tuple[int, ...]
    held_out: tuple[int, ...]


def read(path: str | Path) -> tuple[list[Question], str]:
    """Read a JSONL file.

    Each line has ``image`` (a path or URL, or a list of them) or ``video``, ``question``, and
    optionally ``answer`` (a text or a list of texts), ``num_frames``, and an ``id``, which is not
    used. Paths are relative to the file.

    Returns
    -------
    list of Question, str
        The questions, and the SHA-256 of the file.

    Raises
    ------
    VLMFastError
        With the line, for what cannot be read, for unknown keys and for media that do not exist;
        also for fewer than 20 questions.
    """
    path = Path(path)
    with readable(f"--data {path}"):
        content = read_bytes(path)
        lines = content.decode("utf-8-sig").splitlines()
    found = [_question(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if len(found) < LEAST:
        raise VLMFastError(f"--data {path} has {len(found)} questions; at least {LEAST} are needed")
    return found, hashlib.sha256(content).hexdigest()


def _question(line: str, number: int, path: Path) -> Question:
    where = f"--data {path}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise VLMFastError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise VLMFastError(f"{where} must be an object with 'image' or 'video', and 'question'")
    check_keys(where, (key for key, of in value.items() if of is not None), _KEYS)
    kinds = [kind for kind in ("image", "video") if value.get(kind) is not None]
    if len(kinds) != 1:
        raise VLMFastError(f"{where} must have either 'image' or 'video'")
    kind = kinds[0]
    media = _texts(value[kind], f"{where}: {kind!r}")
    if kind == "video" and len(media) > 1:
        raise VLMFastError(f"{where}: 'video' must be one path")
    question = value.get("question")
    if not isinstance(question, str) or not question.strip():
        raise VLMFastError(f"{where}: 'question' must be a text that is not blank")
    frames = value.get("num_frames")
    if frames is not None and (isinstance(frames, bool) or not isinstance(frames, int)):
        raise VLMFastError(f"{where}: 'num_frames' must be a whole number, not {frames!r}")
    if frames is not None and (frames < 1 or kind == "image"):
        raise VLMFastError(f"{where}: 'num_frames' is for videos, and at least 1")
    answer = value.get("answer")
    answers = () if answer is None else _texts(answer, f"{where}: 'answer'")
    places = tuple(_place(name, path, where, kind) for name in media)
    return Question(number, kind, places, question, answers, frames)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    values = tuple(value) if isinstance(value, list) else (value,)
    if not values or not all(isinstance(v, str) and v.strip() for v in values):
        raise VLMFastError(f"{where} must be a text or a list of texts")
    return values


def _place(name: str, path: Path, where: str, kind: str) -> str:
    if "://" in name:
        return name
    place = path.parent / name
    if not place.is_file():
        raise VLMFastError(f"{where}: {kind} {name!r} does not exist")
    return str(place)


def split(groups: list[Any], share: float, seed: int) -> Split:
    """Hold out a share of the questions at random, whole images and videos at a time.

    Parameters
    ----------
    groups : list
        The image or video of each question.
    share : float
        The least fraction of the questions that is held out.
    seed : int
    """
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    own = list(members.values())
    rng = random.Random(f"vlmfast-tune-{seed}")
    rng.shuffle(own)
    tested: list[int] = []
    while own and len(tested) < share * len(groups):
        tested += own.pop()
    race = [index for indices in own for index in indices]
    rng.shuffle(race)
    return Split(tuple(race), tuple(sorted(tested)))
