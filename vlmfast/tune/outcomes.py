"""What each recipe answers to each question, computed once and stored in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmfast.core.files import make_folder
from vlmfast.core.journal import Journal
from vlmfast.errors import MediaUnavailable, VLMFastError

from .data import Question

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

FULL = "none"
AT_ONCE = 32  # answers that an interruption can lose


class CannotRun(Exception):
    """A recipe cannot answer a question; the message is the reason."""


@dataclass(frozen=True)
class Outcome:
    """One answer.

    Parameters
    ----------
    score : int
        1 if it is correct, else 0.
    tokens : float
        Visual tokens, averaged over the layers of the language model.
    bytes : int
        Size of the KV cache.
    """

    score: int
    tokens: float
    bytes: int


class Source(Protocol):
    """Outcomes of recipes; ``none`` is the full model."""

    def outcomes(self, recipe: str, questions: Sequence[int]) -> list[Outcome]:
        """Outcomes of a recipe on questions, in their order.

        Raises
        ------
        CannotRun
            For a recipe that the model does not support.
        MediaUnavailable
            For media that cannot be read now. Nothing is recorded of their questions.
        """


class Store(Journal):
    """The answers of a run, so that an interrupted run continues.

    Parameters
    ----------
    path : Path
    about : dict
        Identifies the run.

    Raises
    ------
    VLMFastError
        See `Journal`.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        make_folder(path.parent)
        super().__init__(path, about, ("recipe", "question"))
        self._found = {(row["recipe"], row["question"]): row for row in self.lines}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, recipe: str, question: int) -> dict[str, Any] | None:
        return self._found.get((recipe, question))

    def has(self, recipe: str) -> bool:
        """Whether there is any answer under a recipe."""
        return any(name == recipe for name, _ in self._found)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self.append(*rows)
        self._found |= {(row["recipe"], row["question"]): row for row in rows}


class ModelSource:
    """Outcomes from a model's answers.

    Parameters
    ----------
    vlm : VLM
    questions : list of Question
    store : Store
    batch_size, max_new_tokens : int
    answered : callable, optional
        Called after each answer that is not from the store.
    """

    def __init__(
        self,
        vlm: VLM,
        questions: list[Question],
        store: Store,
        *,
        batch_size: int = 8,
        max_new_tokens: int = 32,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self.vlm, self.questions, self.store = vlm, questions, store
        self.batch_size, self.max_new_tokens = batch_size, max_new_tokens
        self.answered = answered

    def outcomes(self, recipe: str, questions: Sequence[int]) -> list[Outcome]:
        if error := self._error(recipe, questions):
            raise CannotRun(error)
        left = [index for index in questions if self.store.get(recipe, index) is None]
        while left:
            # One first: most recipes that cannot run fail on any question.
            size = AT_ONCE if self.store.has(recipe) else 1
            part, left = left[:size], left[size:]
            self._answer(recipe, part)
            if error := self._error(recipe, part):
                raise CannotRun(error)
        return [self._outcome(recipe, index) for index in questions]

    def _error(self, recipe: str, questions: Sequence[int]) -> str | None:
        rows = [self.store.get(recipe, index) for index in questions]
        return next((row["error"] for row in rows if row and row.get("error")), None)

    def _answer(self, recipe: str, questions: Sequence[int]) -> None:
        import torch

        from vlmfast.api.vlm import Request

        generation = {"do_sample": False, "max_new_tokens": self.max_new_tokens}

        def requests() -> Iterator[Request]:
            for index in questions:
                # For methods that draw at random while they prefill, which precedes the next
                # request: the same numbers in an interrupted run.
                torch.manual_seed(index)
                asked = self.questions[index]
                yield Request(
                    asked.question, **asked.arguments(), recipe=recipe, generation=generation
                )

        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            answers = self.vlm.ask_many(requests(), batch_size=self.batch_size, errors="keep")
        rows: list[dict[str, Any]] = []
        unread: str | None = None
        for index, answer in zip(questions, answers, strict=True):
            row: dict[str, Any] = {"recipe": recipe, "question": index}
            if isinstance(answer, VLMFastError):
                text = " ".join(str(answer).split())
                row["error"] = f"line {self.questions[index].line}: {text}"
                if isinstance(answer, MediaUnavailable):
                    unread = unread or row["error"]
                    continue
            elif isinstance(answer, Exception):
                raise answer
            else:
                stats = answer.stats
                row |= {
                    "answer": answer.text,
                    "equivalent_tokens": stats.equivalent_tokens,
                    "kv_bytes": stats.kv_bytes,
                }
            rows.append(row)
            self.answered()
        self.store.add(rows)
        if unread is not None:
            raise MediaUnavailable(f"{unread}; repeat the command to continue")

    def _outcome(self, recipe: str, index: int) -> Outcome:
        from vlmfast.eval.scores import normalise

        row, targets = self.store.get(recipe, index), self.questions[index].answers
        assert row is not None
        if not targets:
            if recipe != FULL:
                self.outcomes(FULL, [index])
            full = self.store.get(FULL, index)
            assert full is not None
            targets = (full["answer"],)
        score = normalise(row["answer"]) in map(normalise, targets)
        return Outcome(int(score), row["equivalent_tokens"], row["kv_bytes"])
