"""What commands load, and how much of it they do; fakes of a model need no engine.

Functions whose first argument is a ``patch`` change the library until it is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmfast.engine.stats import Stats
from vlmfast.eval.summary import _minus as minus

__all__ = ["Stats", "minus"]

Patch = pytest.MonkeyPatch


def loads(patch: Patch, load: Callable[..., Any]) -> None:
    """Commands get their model from ``load``."""
    patch.setattr("vlmfast.eval.commands._load", load)
    patch.setattr("vlmfast.cli.commands._vlm", load)


def seeds_no_absent_gpus(patch: Patch) -> None:
    """`torch.manual_seed` leaves out devices that are not there.

    For each kind of them it stores the stack of its caller, which takes longer than a fake answers.
    """
    if not torch.cuda.is_available():
        patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)


# --- eval ----------------------------------------------------------------------------------------


@cache
def _scene(modality: str, seed: int) -> Any:
    from vlmfast.eval import shapes

    return shapes._EXAMPLES[modality](seed)


def draws_scenes_once(patch: Patch) -> None:
    """The task ``shapes`` keeps all of its scenes."""
    patch.setattr("vlmfast.eval.shapes._example", _scene)


def scenes_per_seed(patch: Patch, number: int) -> None:
    """The task ``shapes`` has so many scenes for each seed."""
    patch.setattr("vlmfast.eval.shapes._STRIDE", number)


def attacked_tokens(patch: Patch, number: int) -> None:
    """Attacks attribute so many tokens of a caption."""
    patch.setattr("vlmfast.eval.robustness_attacks._CAPTION", number)


def gap(referee: Any, scores: Tensor, pair: list[int]) -> float:
    """How far the lower of two tokens is below the best, as the referee of an audit measures it."""
    return referee._gap(scores, pair)


def frames_of(task: Any, video: Any) -> list[int]:
    """The frames of a video that a task shows."""
    return list(task._frames(video))


# --- train ---------------------------------------------------------------------------------------


def held_out(number: int) -> int:
    """The number of a conversation on which no drafter is trained."""
    from vlmfast.train.drafters import _HELD_OUT

    return _HELD_OUT + number


def answers_at_once(patch: Patch, number: int) -> None:
    """Training of drafters generates so many answers at a time."""
    patch.setattr("vlmfast.train.drafters._BLOCK", number)
