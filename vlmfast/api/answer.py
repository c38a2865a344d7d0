"""Requests, answers and comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmfast.engine.sampling import TokenLogprobs
    from vlmfast.engine.stats import Stats, Trace


@dataclass
class Answer:
    """One answer, its cost and the visual tokens dropped for it.

    Parameters
    ----------
    text : str
    token_ids : list of int
        Generated ids, including the end token if one was generated.
    stats : Stats
    trace : Trace
    recipe : str
        The recipe as it was given, e.g. ``hired:0.2`` or ``balanced``.
    finish_reason : {"stop", "length"}
        Whether an end token, a stop string or a stopping criterion ended the answer, or its length.
    logprobs : list of TokenLogprobs, optional
        One for each token, where ``top_logprobs`` was given.
    canonical_recipe : str
        What ran: presets expanded, default values omitted and layers fitted to the model. By
        default ``recipe``.
    """

    text: str
    token_ids: list[int]
    stats: Stats
    trace: Trace = field(repr=False)
    recipe: str = "none"
    finish_reason: str = "stop"
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    canonical_recipe: str = ""

    def __post_init__(self) -> None:
        self.canonical_recipe = self.canonical_recipe or self.recipe


@dataclass
class Request:
    """One request of a batch: the arguments of `VLM.ask`, or the messages of `VLM.chat`.

    Parameters
    ----------
    question : str, optional
    images, video, num_frames, fps, recipe : optional
    generation : dict
        Hugging Face's generation arguments.
    messages : list of dict, optional
        Replaces the question, its images and its video.
    tenant : str
        Requests share entries of the prefix cache only with requests of the same tenant.
    """

    question: str | None = None
    images: Any = None
    video: Any = None
    num_frames: int | None = None
    fps: float | None = None
    recipe: Any = None
    generation: dict[str, Any] = field(default_factory=dict)
    messages: list[dict] | None = None
    tenant: str = ""


@dataclass
class Comparison:
    """A recipe compared with the full model.

    Parameters
    ----------
    recipe : str
    answer : Answer
    agreement : float
        Fraction of positions whose token equals the full model's, over the longer answer.
    """

    recipe: str
    answer: Answer
    agreement: float


def agreement(tokens: list[int], full: list[int]) -> float:
    """Fraction of equal positions over the longer answer; 1.0 when both are empty."""
    longest = max(len(tokens), len(full))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(tokens, full, strict=False)) / longest
