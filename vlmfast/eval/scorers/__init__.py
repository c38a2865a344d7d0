"""How three code bases read answers and count them, each to the character.

They disagree on the same answers by a point or more, so a score means something only together with
its mode: ``official`` is the code of each benchmark's authors, ``lmms-eval`` version 0.7.3, and
``vlmevalkit`` the exact matching of VLMEvalKit, which its users can also replace by a judge.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from vlmfast.errors import VLMFastError

MODES = ("official", "lmms-eval", "vlmevalkit")


class Parsed(NamedTuple):
    """What was read from an answer.

    Parameters
    ----------
    answer : str or list
        A letter (``""`` or ``"Z"`` where there is none), ``yes`` or ``no``, or for an open question
        every text and number that could be the answer.
    found : bool
        False where the answer says nothing that the mode understands, even where the mode then
        guesses.
    """

    answer: Any
    found: bool


def check_mode(mode: str) -> str:
    """``mode``, or a `VLMFastError` that lists the modes there are."""
    if mode not in MODES:
        raise VLMFastError(f"mode {mode!r} must be one of {', '.join(MODES)}")
    return mode


def drawn_by(doc_id: str) -> random.Random:
    """Random numbers that belong to one sample, whatever came before it."""
    return random.Random(f"vlmfast {doc_id}")


def share(values: Iterable[float]) -> float:
    """Their mean; 0 without any, as the code bases have it."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def letters(number: int) -> list[str]:
    """The names of so many options: A, B, C, ..."""
    return [chr(ord("A") + i) for i in range(number)]
