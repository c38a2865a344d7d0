"""Losses of drafters: the distance of their features and tokens from the target's.

All are means over the rows of ``mask`` (..., bool or float), with 1e-5 added to the row count, as
in EAGLE and ViSpec. ``student`` and ``teacher`` are logits (..., V).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss


def masked_mean(rows: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``rows`` (...) over ``mask`` (...)."""
    mask = mask.to(rows.dtype)
    return (rows * mask).sum() / (mask.sum() + 1e-5)


def feature_loss(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Smooth L1 (beta 1) of features (..., D), mean over D: EAGLE's ``vloss``, weight 1."""
    return masked_mean(smooth_l1_loss(predicted, target, reduction="none").mean(-1), mask)


def token_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy to the teacher's distribution: EAGLE's ``ploss``, weight 0.1."""
    return masked_mean(-(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1), mask)


def distance_loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """``sum |p - q|`` of the distributions: ViSpec's second stage, weight 10."""
    return masked_mean((student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1), mask)


def ranking_loss(student: Tensor, teacher: Tensor, mask: Tensor, top: int = 10) -> Tensor:
    """ListMLE over the teacher's ``top`` tokens: ViSpec's, weight 0.1.

    With y the student's logits in the teacher's order: ``-sum_i (y_i - logsumexp_(j >= i) y_j)``.
    """
    y = student.gather(-1, teacher.topk(min(top, teacher.shape[-1]), dim=-1).indices)
    rest = y.flip(-1).logcumsumexp(-1).flip(-1)
    return masked_mean((rest - y).sum(-1), mask)


def restricted(logits: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The teacher's logits over a draft vocabulary, and the rows whose argmax is in it.

    Parameters
    ----------
    logits : Tensor, (..., V)
    ids : Tensor, int64, (n,), or None
        See `EagleModule.vocabulary`; ``None`` for all.

    Returns
    -------
    logits : Tensor, (..., n)
        Their softmax is the teacher's distribution, renormalised.
    inside : Tensor, bool, (...), or None
        Rows whose argmax is in the vocabulary: EAGLE-3 learns from these only. ``None`` for all.
    """
    if ids is None:
        return logits, None
    return logits[..., ids], torch.isin(logits.argmax(-1), ids)
