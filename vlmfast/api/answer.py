"""Requests, answers and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlmfast.core.display import Cost, shortened, text_table
from vlmfast.errors import VLMFastError

if TYPE_CHECKING:
    import pandas

    from vlmfast.core.recipe import Recipe
    from vlmfast.core.stage import Stage
    from vlmfast.engine.sampling import TokenLogprobs
    from vlmfast.engine.stats import Stats, Trace
    from vlmfast.media.types import ImageLike, VideoLike


_BRIEF = 120  # characters of a text on one line


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        facts = ", ".join([self.recipe, *map(str, self.stats.costs())])
        return f"{type(self).__name__}({shortened(self.text, _BRIEF)!r}, {facts})"


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
    timestamps : list of float, optional
        As in `VLM.ask`.
    """

    question: str | None = None
    images: ImageLike | Sequence[ImageLike] | None = None
    video: VideoLike | None = None
    num_frames: int | None = None
    fps: float | None = None
    recipe: str | Stage | Recipe | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    messages: list[dict] | None = None
    tenant: str = ""
    timestamps: Sequence[float] | None = None


@dataclass(repr=False)
class Comparison:
    """A recipe compared with the full model.

    Parameters
    ----------
    recipe : str
        As it was given.
    answer : Answer or None
        ``None`` if the recipe was refused.
    agreement : float or None
        Fraction of positions whose token equals the full model's, over the longer answer.
    error : str, optional
        The reason, if the recipe was refused.
    full : Answer, optional
        The full model's.
    """

    recipe: str
    answer: Answer | None
    agreement: float | None
    error: str | None = None
    full: Answer | None = field(default=None, compare=False)

    def costs(self) -> list[Cost]:
        """`Stats.costs` against the full model's; none if the recipe was refused."""
        if self.answer is None:
            return []
        return self.answer.stats.costs(None if self.full is None else self.full.stats)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values: the recipe, its answer, its costs and the reason of a refusal.

        Times are in seconds, sizes in bytes. ``equivalent_tokens`` is explained in `Stats`. All but
        ``recipe`` and ``error`` are ``None`` if the recipe was refused.
        """
        stats = None if self.answer is None else self.answer.stats
        return {
            "recipe": self.recipe,
            "answer": None if self.answer is None else self.answer.text,
            "agreement": self.agreement,
            **{name: None if stats is None else getattr(stats, name) for name in _COLUMNS},
            "error": self.error,
        }

    def __repr__(self) -> str:
        if self.answer is None:
            return f"Comparison({self.recipe}, refused: {shortened(self.error or '', 2 * _BRIEF)})"
        facts = [f"{self.agreement:.0%} agreement", *map(str, self.costs())]
        text = shortened(self.answer.text, _BRIEF)
        return f"Comparison({text!r}, {self.recipe}, {', '.join(facts)})"


class ComparisonTable(list[Comparison]):
    """The rows of `VLM.compare`: a list whose first row is the full model; shown as a table."""

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a ``pandas.DataFrame``, with the columns of `Comparison.to_dict`.

        Raises
        ------
        VLMFastError
            If pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise VLMFastError("to_pandas needs the package pandas: pip install pandas") from error
        return DataFrame([row.to_dict() for row in self])

    def __repr__(self) -> str:
        if not self:
            return "ComparisonTable([])"
        rows = [{k: shortened(text, _BRIEF) for k, text in row.items()} for row in self._rows()]
        return text_table(rows, left=("recipe", "answer"))

    def _rows(self) -> list[dict[str, str]]:
        names = dict.fromkeys(cost.name for row in self for cost in row.costs())
        rows = []
        for row in self:
            costs = {cost.name: cost.brief for cost in row.costs()}
            shown = f"refused: {row.error}" if row.answer is None else row.answer.text
            rows.append(
                {
                    "recipe": row.recipe,
                    **{name: costs.get(name, "-") for name in names},
                    "agreement": "-" if row.agreement is None else f"{row.agreement:.0%}",
                    "answer": shown,
                }
            )
        return rows


# Of `Stats`, in a row of a comparison.
_COLUMNS = (
    "visual_tokens_in",
    "equivalent_tokens",
    "ttft_s",
    "tokens_per_s",
    "generated_tokens",
    "kv_bytes",
    "kv_bytes_full",
)


def agreement(tokens: list[int], full: list[int]) -> float:
    """Fraction of equal positions over the longer answer; 1.0 when both are empty."""
    longest = max(len(tokens), len(full))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(tokens, full, strict=False)) / longest
