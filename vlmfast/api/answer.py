"""What a user asks and gets back: requests, answers, comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmfast.engine.stats import Stats, Trace


@dataclass
class Answer:
    """One answer, what it cost and what was dropped for it.

    Parameters
    ----------
    text : str
    token_ids : list of int
        Generated ids, the end token included when one was produced.
    stats : Stats
    trace : Trace
    recipe : str
        Canonical text of the recipe.
    """

    text: str
    token_ids: list[int]
    stats: Stats
    trace: Trace = field(repr=False)
    recipe: str = "none"


@dataclass
class Request:
    """One request of a batch: a question as `VLM.ask` takes it, or a conversation as `VLM.chat`.

    Parameters
    ----------
    question : str, optional
    images, video, num_frames, fps, recipe : optional
    generation : dict
        Hugging Face's generation arguments.
    messages : list of dict, optional
        In the place of the question, its images and its video.
    """

    question: str | None = None
    images: Any = None
    video: Any = None
    num_frames: int | None = None
    fps: float | None = None
    recipe: Any = None
    generation: dict[str, Any] = field(default_factory=dict)
    messages: list[dict] | None = None


@dataclass
class Comparison:
    """A recipe beside the full model.

    Parameters
    ----------
    recipe : str
    answer : Answer
    agreement : float
        Share of positions whose token equals the full model's, over the longer of both answers.
    """

    recipe: str
    answer: Answer
    agreement: float


def agreement(tokens: list[int], full: list[int]) -> float:
    """Share of equal positions over the longer answer; 1.0 when both are empty."""
    longest = max(len(tokens), len(full))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(tokens, full, strict=False)) / longest
