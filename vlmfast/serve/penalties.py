"""Presence and frequency penalties as OpenAI defines them."""

from __future__ import annotations

import torch
from torch import Tensor


class OpenAIPenalties:
    """A logits processor that lowers the scores of tokens that the answer contains.

    With ``c[j]`` occurrences of token ``j`` in the answer so far (the prompt does not count) its
    score decreases by ``c[j] * frequency + (c[j] > 0) * presence``.

    Made for one request: the ids of its first call are the prompt.

    Parameters
    ----------
    presence, frequency : float
        From -2 to 2 in OpenAI's API; negative values make repetition more probable.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency
        self._prompt: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalized scores.

        Parameters
        ----------
        input_ids : Tensor, int64, (1, S + T)
            Prompt and answer so far.
        scores : Tensor, float32, (1, V)
            Not modified.

        Returns
        -------
        Tensor, float32, (1, V)
        """
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        answer = input_ids[:, self._prompt :]
        # Counted again in each step: the same ids get the same penalties, in whatever order.
        counts = torch.zeros_like(scores).scatter_add_(
            1, answer, torch.ones_like(answer, dtype=scores.dtype)
        )
        return scores - counts * self.frequency - (counts > 0) * self.presence
