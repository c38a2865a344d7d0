"""What a task is, and the tasks there are."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import VLMFastError
from ..stages import nearest

# Task -> (module, class); a module is imported when its task is asked for.
_TASKS = {"shapes": ("shapes", "Shapes")}


@dataclass(frozen=True)
class Doc:
    """One question of a task.

    Parameters
    ----------
    doc_id : str
        Unique in the task, the same in every run.
    type : str
        Kind of question; headline scores are means over types.
    modality : {"image", "video"}
    picture : str
        What it is about. Questions about one picture are not independent of each other.
    question, target : str
    kind : {"question", "caption"}
        Captions have a score of their own and stay out of the accuracy.
    seed : int
        What the task needs to draw it again.
    """

    doc_id: str
    type: str
    modality: str
    picture: str
    question: str
    target: str
    kind: str
    seed: int


class Task(Protocol):
    """A set of questions with pictures and a way to score answers.

    Attributes
    ----------
    name, version : str
        Another version means that scores do not compare.
    controls : tuple of str
        Variants in which the answer cannot be seen.
    generation : dict
        Arguments of ``generate`` for each kind of question.
    """

    name: str
    version: str
    controls: tuple[str, ...]
    generation: dict[str, dict[str, Any]]

    def docs(self, limit: int, seed: int) -> list[Doc]:
        """``limit`` questions of each type; a larger limit adds to those of a smaller one."""

    def media(self, doc: Doc, control: str | None) -> dict[str, Any]:
        """Keyword arguments of ``VLM.ask`` that carry the picture or the clip."""

    def filter(self, doc: Doc, text: str) -> str:
        """The part of an answer that is scored."""

    def score(self, doc: Doc, answer: str) -> float:
        """Score of a filtered answer, 0 to 1."""


def find_task(name: str) -> Task:
    """The task called ``name``.

    Raises
    ------
    VLMFastError
        Lists the tasks there are.
    """
    if name not in _TASKS:
        raise VLMFastError(
            f"unknown task {name!r}{nearest(name, list(_TASKS))}; tasks: {', '.join(_TASKS)}"
        )
    module, attribute = _TASKS[name]
    return getattr(importlib.import_module(f".{module}", __package__), attribute)()
