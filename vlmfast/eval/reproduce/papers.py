"""Published results as data: ``papers.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from vlmfast.core.files import read_text
from vlmfast.core.recipe import Recipe
from vlmfast.errors import RecipeError, VLMFastError

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
    metrics : tuple of str
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
    metrics: tuple[str, ...]
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
    notes : tuple of str
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
    notes: tuple[str, ...]
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

    def paper(self, name: str) -> Paper:
        """
        Raises
        ------
        VLMFastError
            For an unknown name.
        """
        if name not in self.papers:
            raise VLMFastError(f"unknown paper {name!r}; papers: {', '.join(self.papers)}")
        return self.papers[name]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the data; empty if all of it can be used."""
        found = []
        for paper in self.papers.values():
            for name, values in (
                ("full", paper.full),
                *((method.recipe, method.values) for method in paper.methods),
            ):
                where = f"{paper.name}, {name}"
                for task, value in values.items():
                    if task not in self.tasks:
                        found.append(f"{where}: unknown task {task!r}")
                    elif task not in paper.full:
                        found.append(f"{where}: {task} has no value of the full model")
                    elif not 0 < value <= self.tasks[task].maximum:
                        most = self.tasks[task].maximum
                        found.append(f"{where}: {task} is {value}; it must be in (0, {most:g}]")
            for method in paper.methods:
                try:
                    Recipe.parse(method.recipe)
                except RecipeError as error:
                    found.append(f"{paper.name}, {method.recipe}: {error}")
        return found


def catalogue(path: Path = DATA) -> Catalogue:
    """Read the data.

    Raises
    ------
    VLMFastError
        If the file cannot be read or has an unknown or missing field.
    """
    try:
        data = tomllib.loads(read_text(path))
        tasks = {name: _task(name, about) for name, about in data["tasks"].items()}
        papers = {name: _paper(name, about) for name, about in data["papers"].items()}
    except OSError as error:
        raise VLMFastError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise VLMFastError(f"{path} is damaged: {error}") from error
    return Catalogue(tasks, papers)


def _task(name: str, about: dict[str, Any]) -> Task:
    return Task(name, **{**about, "metrics": tuple(about["metrics"])})


def _paper(name: str, about: dict[str, Any]) -> Paper:
    return Paper(
        name,
        **{
            "left_out": {},
            **about,
            "notes": tuple(about["notes"]),
            "methods": tuple(Method(**method) for method in about["methods"]),
        },
    )
