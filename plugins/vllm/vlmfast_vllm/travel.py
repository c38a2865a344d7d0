"""What travels through vLLM beside pixels and features. Imports nothing of vLLM.

To the model goes a `Note`: a row of int32 for each image or video, a field of the processor's
output. To the language model go rotary ids, as more columns of the features (`with_places`),
because vLLM caches and cuts the encoder's output as one tensor of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from vlmfast.errors import ModelError

BASE = 256  # bfloat16 holds the integers up to it exactly
COLUMNS = 6  # t, y and x, in two digits each


@dataclass(frozen=True)
class Note:
    """One image or video of a request.

    Parameters
    ----------
    recipe : str
    before : int
        Text tokens of the prompt before the first placeholder.
    text : tuple of int
        Ids of all text tokens of the prompt, where the recipe reads them.
    tag : int
        Of its content and of all else that decides what is kept, where extents depend on it; up to
        62 bits.
    around : tuple of int
        Ids of the text of a video, with one placeholder for each step, where this text is a part of
        the encoder's output.
    """

    recipe: str
    before: int = 0
    text: tuple[int, ...] = field(default=())
    around: tuple[int, ...] = field(default=())
    tag: int = 0

    def row(self) -> list[int]:
        name = self.recipe.encode()
        lengths = [len(name), len(self.text), len(self.around)]
        tag = [self.tag >> 31, self.tag & (2**31 - 1)]
        return [*lengths, self.before, *tag, *name, *self.text, *self.around]

    @staticmethod
    def of(row: Tensor) -> Note:
        name, text, around, before, high, low, *rest = row.flatten().tolist()
        ends = [0, name, name + text, name + text + around]
        parts = [rest[a:b] for a, b in pairwise(ends)]
        tag = high << 31 | low
        return Note(bytes(parts[0]).decode(), before, tuple(parts[1]), tuple(parts[2]), tag)


def rows(notes: Sequence[Note]) -> Tensor:
    """Rows of notes, int32, (n, W), padded to the longest."""
    found = [note.row() for note in notes]
    width = max(map(len, found))
    return torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.int32)


def batches(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Consecutive items of at most ``most`` in all, or a single one."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    yield slice(first, len(sizes))


def digits(places: Tensor) -> Tensor:
    """Rotary ids (3, K) of the host, as columns (K, `COLUMNS`).

    Raises
    ------
    ModelError
        If an id has more than two digits.
    """
    if places.numel() and int(places.max()) >= BASE**2:
        raise ModelError(
            f"an image or video takes {int(places.max()) + 1} rotary ids; at most "
            f"{BASE**2} are supported"
        )
    return torch.stack([places // BASE, places % BASE], dim=-1).transpose(0, 1).flatten(1)


def with_places(parts: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Parts of features (K, D) with the columns of `digits` after them."""
    return torch.cat([*parts, columns.to(parts[0].device, parts[0].dtype)], dim=1)


def split_places(given: Tensor) -> tuple[Tensor, Tensor]:
    """Features (K, D) and rotary ids (3, K): the inverse of `with_places`."""
    high, low = given[:, -COLUMNS:].long().unflatten(1, (3, 2)).unbind(-1)
    return given[:, :-COLUMNS], (high * BASE + low).T
