"""Exact reproductions of how three code bases parse and score answers.

Their scores of the same answers differ by a point or more, so a score must be reported with its
mode: ``official`` is the code of each benchmark's authors, ``lmms-eval`` version 0.7.3, and
``vlmevalkit`` version 0.3rc1 with exact matching, which its users can also replace by a judge.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from vlmfast.errors import VLMFastError

MODES = ("official", "lmms-eval", "vlmevalkit")
# Of the code bases that are reproduced; part of the mode's name in results.
VERSIONS = {"lmms-eval": "0.7.3", "vlmevalkit": "0.3rc1"}


class Parsed(NamedTuple):
    """A parsed answer.

    Parameters
    ----------
    answer : str or list
        A letter (``""`` or ``"Z"`` if none was found), ``yes`` or ``no``, or for an open question
        every text and number that could be the answer.
    found : bool
        False if the mode could not parse the answer, even if it then guesses.
    """

    answer: Any
    found: bool


def check_mode(mode: str) -> str:
    """Return a mode without its version.

    Raises
    ------
    VLMFastError
        For unknown modes and for other versions of known ones.
    """
    for known in MODES:
        if mode in (known, versioned(known)):
            return known
    names = ", ".join(map(versioned, VERSIONS))
    raise VLMFastError(f"mode {mode!r} must be one of {', '.join(MODES)}, or {names}")


def versioned(mode: str) -> str:
    """A mode's name in results, with the version of its code base: ``lmms-eval-0.7.3``."""
    return f"{mode}-{VERSIONS[mode]}" if mode in VERSIONS else mode


def drawn_by(doc_id: str) -> random.Random:
    """Random numbers for one sample, independent of other samples."""
    return random.Random(f"vlmfast {doc_id}")


def judged(parsed: Parsed, target: str) -> dict[str, Any]:
    """The fields of a sample for an answer that must be one text."""
    score = float(parsed.answer == target)
    return {"filtered_resps": [parsed.answer], "score": score, "answered": parsed.found}


def share(values: Iterable[float]) -> float:
    """The mean; 0 without values, as in the code bases."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def letters(number: int) -> list[str]:
    """The first ``number`` letters: A, B, C, ..."""
    return [chr(ord("A") + i) for i in range(number)]
