"""Log-likelihoods of given answers under a recipe, for tasks that compare options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vlmfast.api.conversation import answer_ids
from vlmfast.errors import VLMFastError

if TYPE_CHECKING:
    from torch import Tensor

    from vlmfast.api.vlm import VLM
    from vlmfast.core.recipe import Recipe


class Likelihood(NamedTuple):
    """How likely an answer is after a prompt.

    Parameters
    ----------
    logprob : float
        Sum of the log-probabilities of its tokens, without the end token.
    greedy : bool
        Whether greedy decoding would generate these tokens.
    """

    logprob: float
    greedy: bool


class _Forced:
    """Allows only the next token of an answer, for ``prefix_allowed_tokens_fn``."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self._prompt: int | None = None  # ids of the prompt; the first call has no others

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        if self._prompt is None:
            self._prompt = len(ids)
        return [self.ids[min(len(ids) - self._prompt, len(self.ids) - 1)]]


def likelihoods(
    vlm: VLM,
    prompts: Iterable[tuple[list[dict], str]],
    recipe: Recipe | str | None = None,
    batch_size: int = 8,
) -> list[Likelihood]:
    """Log-likelihoods of answers, each after its own conversation.

    An answer is decoded with its tokens prescribed. Its log-probabilities are therefore those that
    decoding has under the recipe, also with compressed caches.

    Parameters
    ----------
    vlm : VLM
    prompts : iterable of (list of dict, str)
        Messages as `VLM.chat` takes them, and an answer. Blanks around the answer are ignored: the
        chat template decides what separates it from the prompt.
    recipe : str, Stage or Recipe, optional
    batch_size : int
        Answers decoded together.

    Returns
    -------
    list of Likelihood
        In the order of the prompts.

    Raises
    ------
    VLMFastError
        For an empty answer, and as `VLM.ask_many`.
    """
    from vlmfast.api.vlm import Request

    wanted: list[list[int]] = []

    def requests() -> Iterator[Request]:
        for messages, text in prompts:
            if not text.strip():
                raise VLMFastError(f"answer {len(wanted)} is empty; it must have a token")
            ids = answer_ids(vlm.adapter, None, text.strip(), end=False)
            wanted.append(ids)
            generation: dict[str, Any] = {
                "do_sample": False,
                "max_new_tokens": len(ids),
                "min_new_tokens": None,
                "stop_strings": None,
                "prefix_allowed_tokens_fn": _Forced(ids),
                "top_logprobs": 1,
            }
            yield Request(messages=messages, recipe=recipe, generation=generation)

    answers = vlm.ask_many(requests(), batch_size=batch_size)
    return [_scored(answer, ids) for answer, ids in zip(answers, wanted, strict=True)]


def _scored(answer: Any, ids: list[int]) -> Likelihood:
    if answer.token_ids != ids:
        raise VLMFastError(
            f"the answer's tokens {ids} cannot be generated: the model's generation config "
            f"suppresses some of them, and gives {answer.token_ids}"
        )
    pairs = [(found.logprob, found.top[0][0] == found.token) for found in answer.logprobs]
    return Likelihood(sum(value for value, _ in pairs), all(best for _, best in pairs))
