"""Published results as data: ``papers.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

DATA = Path(__file__).with_name("papers.toml")
CHANGED = 0.1  # answers that differ between two runs which score alike
_ERRORS = 2  # standard errors


@dataclass(frozen=True)
class Task:
    """A task of lmms-eval.

    Parameters
    ----------
    name : str
        In the data.
    title : str
        In papers.
    metrics : list of str
        Metrics of its result; several are added.
    scale : float
        Factor from lmms-eval's value to the published one.
    maximum : float
        Largest possible published value.
    questions : int, optional
    external : bool
        Not in lmms-eval.
    lmms : str
        Name in lmms-eval; by default ``name``.
    """

    name: str
    title: str
    metrics: list[str]
    scale: float
    maximum: float
    questions: int | None = None
    external: bool = False
    lmms: str = ""

    @property
    def lmms_name(self) -> str:
        return self.lmms or self.name


@dataclass(frozen=True)
class Method:
    """A recipe with its published values by task."""

    recipe: str
    values: dict[str, float]


@dataclass(frozen=True)
class Paper:
    """The published results of one method on one model.

    Parameters
    ----------
    name, title, arxiv, model, table : str
    origin : str
        ``authors``: values of the paper itself. ``quoted``: as later papers quote them.
    tolerance : float
        Percent, without sampling errors.
    reason : str
        Why this tolerance.
    notes : list of str
    full : dict
        Values of the full model by task.
    methods : tuple of Method
    left_out : dict
        Columns that are not measured, with the reason.
    """

    name: str
    title: str
    arxiv: str
    model: str
    origin: str
    table: str
    tolerance: float
    reason: str
    notes: list[str]
    full: dict[str, float]
    methods: tuple[Method, ...]
    left_out: dict[str, str]

    def of_method(self, task: Task, questions: int | None) -> float | None:
        """Tolerance of the retained fraction in percentage points, for a number of questions.

        ``tolerance`` plus two standard errors of a paired difference in which a tenth of the
        answers change; None if the number of questions is unknown.
        """
        if not questions:
            return None
        return self.tolerance + _ERRORS * 100 * sqrt(CHANGED / questions) / self._accuracy(task)

    def of_full(self, task: Task, questions: int | None) -> float | None:
        """Tolerance of the full model's score in percent of the published one.

        All questions are the same ones as in the paper. For a part of them, or for external tasks,
        two standard errors of the score are added.
        """
        if not questions:
            return None
        if task.questions is not None and questions >= task.questions:
            return self.tolerance
        p = self._accuracy(task)
        return self.tolerance + _ERRORS * 100 * sqrt(p * (1 - p) / questions) / p

    def _accuracy(self, task: Task) -> float:
        return self.full[task.name] / task.maximum


@dataclass(frozen=True)
class Catalogue:
    """All papers and tasks."""

    tasks: dict[str, Task]
    papers: dict[str, Paper]


def catalogue() -> Catalogue:
    """Read the data."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    tasks = {name: Task(name, **about) for name, about in data["tasks"].items()}
    papers = {}
    for name, about in data["papers"].items():
        methods = tuple(Method(**method) for method in about.pop("methods"))
        papers[name] = Paper(name, methods=methods, **{"left_out": {}, **about})
    return Catalogue(tasks, papers)
