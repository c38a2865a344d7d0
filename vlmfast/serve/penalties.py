"""Presence and frequency penalties as OpenAI defines them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class OpenAIPenalties(LogitsProcessor):
    """Lowers the logits of tokens that are in the answer already.

    With c[j] the number of times that token j was generated, prompt excluded::

        mu[j] <- mu[j] - c[j] * frequency - (c[j] > 0) * presence

    (OpenAI API reference, "frequency and presence penalties"). One object serves one request: the
    first call gives the length of its prompt.

    Parameters
    ----------
    presence, frequency : float
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self._prompt: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalized scores.

        Parameters
        ----------
        input_ids : Tensor, int64, (1, S + T)
        scores : Tensor, floating, (1, V)
            Not modified.
        """
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        answer = input_ids[:, self._prompt :]
        count = torch.zeros_like(scores)
        count.scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - count * self._frequency - (count > 0) * self._presence
