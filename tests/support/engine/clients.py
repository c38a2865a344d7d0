"""What the page and the actors of Ray hold, and what they do where the engine cannot go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vlmfast.engine.rounds import Rounds

if TYPE_CHECKING:
    from vlmfast.demos.talk import Conversation


def messages_of(talk: Conversation, side: str) -> list[dict[str, Any]]:
    """The history that later questions of one side of the page's conversation see."""
    return talk._sessions[side].messages


@contextmanager
def room_for_one_row() -> Iterator[list[int]]:
    """Memory ends when several rows decode together; yields how many rows each step has."""
    sizes, run = [], Rounds.run

    def small(rounds: Rounds, batch: Any) -> None:
        sizes.append(len(batch.rows))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("too small")
        run(rounds, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounds, "run", small)
        yield sizes
