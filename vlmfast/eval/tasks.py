"""The interface of tasks, and the registry of tasks."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vlmfast.core.params import nearest
from vlmfast.errors import VLMFastError

from .scorers import check_mode

if TYPE_CHECKING:
    from PIL import Image

# Task -> (module, class); a module is imported when its task is requested.
_TASKS = {
    "shapes": ("shapes", "Shapes"),
    "mmmu": ("mmmu", "MMMU"),
    "video-mme": ("video_mme", "VideoMME"),
    "pope": ("pope", "POPE"),
    "robustness": ("robustness", "Robustness"),
}
HIDDEN = "?"  # the target of questions with hidden answers
_GREY = (128, 128, 128)


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
    media_id : str
        Identifies the image or video. Questions about the same one are not independent.
    question, target : str
    kind : {"question", "caption"}
        Captions have their own score and do not count towards the accuracy.
    seed : int
        Seed of a generated scene, or row number.
    groups : tuple of (str, str)
        Groups such as ``("subject", "Art")``; each has an accuracy.
    options : tuple of str
        Options of a multiple-choice question.
    """

    doc_id: str
    type: str
    modality: str
    media_id: str
    question: str
    target: str
    kind: str
    seed: int
    groups: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


class Task(Protocol):
    """A set of questions about images or videos, and a way to score answers.

    Attributes
    ----------
    name, version : str
        Scores of different versions are not comparable.
    controls : tuple of str
        Variants whose inputs do not show the answer.
    generation : dict
        Arguments of ``generate`` for each kind of question.
    options : dict
        Other settings that must be equal for scores to be comparable.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def controls(self) -> tuple[str, ...]: ...
    @property
    def generation(self) -> dict[str, dict[str, Any]]: ...
    @property
    def options(self) -> dict[str, Any]: ...

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        """``limit`` questions of each type; a larger limit adds to those of a smaller one."""

    def media(self, doc: Doc, control: str | None) -> dict[str, Any]:
        """Keyword arguments of ``VLM.ask`` for the image or video.

        Also the ``question`` if it differs from the doc's own. Or ``messages`` alone, those of
        ``VLM.chat``, if images are placed within the text.
        """

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        """The fields of a sample for an answer.

        ``filtered_resps``, the parsed answer, and its ``score``, 0 to 1, or None for hidden
        targets. Except for shapes also ``answered``: whether parsing found an answer.
        """


def find_task(name: str, **options: Any) -> Task:
    """The task called ``name``, with its own options.

    Raises
    ------
    VLMFastError
        For an unknown task or option; the message lists the known ones.
    """
    if name not in _TASKS:
        raise VLMFastError(
            f"unknown task {name!r}{nearest(name, list(_TASKS))}; tasks: {', '.join(_TASKS)}"
        )
    module, attribute = _TASKS[name]
    task = getattr(importlib.import_module(f".{module}", __package__), attribute)
    known = [key for key in inspect.signature(task).parameters if not key.startswith("_")]
    for option in options:
        if option not in known:
            raise VLMFastError(
                f"task {name} has no option {option}; "
                + (f"it has {', '.join(known)}" if known else "it has none")
            )
    return task(**options)


def metrics(meta: dict[str, Any], samples: Iterable[dict[str, Any]]) -> dict[str, float]:
    """A task's own metrics, by their names in lmms-eval; empty for tasks without.

    Samples without a score are left out.
    """
    family = next((t for t in ("mmmu", "video-mme", "pope") if meta["task"].startswith(t)), None)
    scored = [s for s in samples if s["score"] is not None]
    if family is None or not scored:
        return {}
    module = importlib.import_module(f".scorers.{family.replace('-', '_')}", __package__)
    return module.metrics(scored, check_mode(meta["options"]["mode"]))


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise an error if ``value`` is not one of the choices."""
    if value not in choices:
        raise VLMFastError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def grey(frame: Image.Image) -> Image.Image:
    """A grey image of the same size."""
    from PIL import Image

    return Image.new("RGB", frame.size, _GREY)
