"""Videos: how they are decoded, and how long ones are read block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from support.engine.passes import rotated_back
from vlmfast.api.long_video import Block, LongVideo
from vlmfast.core import progress


def planned(
    frames: int, per_frame: int, label: int, room: int, cap: int, most: int
) -> tuple[int, int, int]:
    """Number of blocks, visual tokens to keep in all, and frames of a block.

    Parameters
    ----------
    per_frame, label : int
        Tokens of a frame, and of the text between two; nine before and twenty after all.
    room, cap, most : int
        Tokens of the answer, of the cache, and positions.
    """
    long = LongVideo.__new__(LongVideo)
    long.most, long.cap, long.frames, long.per_frame, long.block = most, cap, frames, per_frame, 1
    long.pieces = [range(9), *[range(label)] * (frames - 1), range(20)]
    blocks, space = long._plan(room)
    return blocks, space, long.block


def blocks_read(
    patch: pytest.MonkeyPatch,
    before: Callable[[int], None] = lambda start: None,
    after: Callable[[Block], None] = lambda block: None,
) -> None:
    """Call around the reading of each block, which begins with frame ``start``."""
    read = LongVideo._processed

    def noted(long: LongVideo, start: int, stop: int) -> Block:
        before(start)
        block = read(long, start, stop)
        after(block)
        return block

    patch.setattr(LongVideo, "_processed", noted)


@dataclass
class Renumbered:
    """Keys of each layer before and after their rotary ids were changed, rotated back by these.

    Parameters
    ----------
    off : list of Tensor
        Those after it, rotated back by one more.
    was, now : int
        The next rotary id before and after.
    longest : int
        The longest layer.
    """

    before: list[Tensor]
    after: list[Tensor]
    off: list[Tensor]
    was: int
    now: int
    longest: int


def renumberings(patch: pytest.MonkeyPatch) -> list[Renumbered]:
    """Every time that gaps between the rotary ids of a cache are closed."""
    found, make = list[Renumbered](), LongVideo._make_room

    def noted(long: LongVideo, prefiller: Any, sequence: Any, ids: Any, tokens: int) -> None:
        def keys(off: int = 0) -> list[Tensor]:
            kept = {layer: [each + off for each in of] for layer, of in ids.kept.items()}
            return rotated_back(long.adapter, sequence, kept)

        prompt = sequence.prompt
        before, was = ([], 0) if prompt is None else (keys(), prompt.next_position)
        make(long, prefiller, sequence, ids, tokens)
        if prompt is not None and (now := prompt.next_position) != was:
            longest = max(sequence.group.cache.lengths())
            found.append(Renumbered(before, keys(), keys(off=1), was, now, longest))

    patch.setattr(LongVideo, "_make_room", noted)
    return found


def progress_at_once(patch: pytest.MonkeyPatch) -> None:
    """Write each step of progress outside of a terminal, however short it was."""
    patch.setattr(progress, "_LOG_S", 0)
