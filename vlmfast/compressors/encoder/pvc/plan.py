"""Plan of PVC: views become sequences of frames, and their cells become tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, product

import torch
from torch import Tensor

from vlmfast.core.statistics import ItemGeometry

from ...cells import copied
from .module import TURNS, ranks


@dataclass(frozen=True)
class Choice:
    """Setting for an image or a video: ``repeats`` tokens for each cell of a view.

    Parameters
    ----------
    side : int
        Side of a cell in patches.
    repeats : int
        Number of times that a view is repeated.
    crops : bool
        Whether crops are encoded in addition to the base view, or dropped.
    """

    side: int
    repeats: int
    crops: bool = True

    @property
    def whole(self) -> bool:
        """Whether every patch gets a token."""
        return self.crops and self.repeats == self.side**2


@dataclass(frozen=True)
class Cells:
    """Views with the same cell size and repeats.

    Parameters
    ----------
    side : int
    views : Tensor, int64, (n,)
    rows : Tensor, int64, (n, repeats)
        Rows of the repeated batch that show each view.
    turn : Tensor, int64, (n,)
        Index of each view's first position among the patches of a cell that take turns.
    rank : Tensor, int64, (n, m)
        Of the patches of a cell in each view, see `ranks`.
    """

    side: int
    views: Tensor
    rows: Tensor
    turn: Tensor
    rank: Tensor


@dataclass(frozen=True)
class Plan:
    """How a vision batch of V views is repeated and compressed.

    Parameters
    ----------
    source : Tensor, int64, (V',)
        View that each row of the repeated batch shows; the first V rows are the views in order.
    time : Tensor, float32, (V',)
        Relative timestamp of each row in its sequence, 0 to 1.
    sequences : tuple of Tensor, each int64, (S, T)
        Rows that follow each other in time; one tensor for each length.
    cells : tuple of Cells
        Views that are in none of them are dropped.
    whole : Tensor, bool, (items,)
        Images that get a token for every patch, and keep their newlines.
    """

    source: Tensor
    time: Tensor
    sequences: tuple[Tensor, ...]
    cells: tuple[Cells, ...]
    whole: Tensor

    def to(self, device: torch.device) -> Plan:
        """The plan on a device, by one copy."""
        if device == self.source.device:
            return self
        of_cells = [x for own in self.cells for x in (own.views, own.rows, own.turn, own.rank)]
        bits = self.time.view(torch.int32)
        source, bits, whole, *rest = copied(
            [self.source, bits, self.whole, *self.sequences, *of_cells], device
        )
        left = iter(rest)
        return Plan(
            source,
            bits.int().view(torch.float32),
            tuple(next(left) for _ in self.sequences),
            tuple(Cells(cells.side, *islice(left, 4)) for cells in self.cells),
            whole.bool(),
        )


def scenes(items: Sequence[ItemGeometry]) -> list[list[int]]:
    """Groups of items: single images, and the frames of each video in temporal order."""
    found: dict[tuple[bool, int], list[int]] = {}
    for index, item in enumerate(items):
        is_video = item.video >= 0
        found.setdefault((is_video, item.video if is_video else index), []).append(index)
    return [sorted(scene, key=lambda i: items[i].frame[0]) for scene in found.values()]


def make_plan(
    items: Sequence[ItemGeometry],
    choose: Callable[[list[ItemGeometry]], Choice],
) -> Plan:
    """The plan of a prompt, on the host; ``choose`` is called for each of its `scenes`.

    The same view of consecutive frames is one sequence, in which every frame occurs ``repeats``
    times. The patches of a cell take turns along it, so that static content is sampled at all of
    them.
    """
    source = list(range(max(item.views[1] for item in items)))
    time = [0.0] * len(source)
    whole = [False] * len(items)
    sequences: dict[int, list[list[int]]] = {}
    cells: dict[tuple[int, int], list[tuple[int, list[int], int]]] = {}
    for scene in scenes(items):
        choice = choose([items[i] for i in scene])
        for i in scene:
            whole[i] = choice.whole
        views = max(items[i].views[1] - items[i].views[0] for i in scene) if choice.crops else 1
        for number in range(views):
            sequence: list[int] = []
            for i in scene:
                view = items[i].views[0] + number
                if view >= items[i].views[1]:  # frames of other sizes have other crops
                    continue
                again = range(len(source), len(source) + choice.repeats - 1)
                rows = [view, *again]
                source += [view] * len(again)
                turn = len(sequence) % TURNS
                cells.setdefault((choice.side, choice.repeats), []).append((view, rows, turn))
                sequence += rows
            time += [0.0] * (len(source) - len(time))
            for number, row in enumerate(sequence):
                time[row] = number / max(len(sequence) - 1, 1)
            sequences.setdefault(len(sequence), []).append(sequence)

    def whole_numbers(values: Sequence) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def alike(side: int, parts: list[tuple[int, list[int], int]]) -> Cells:
        views, rows, turn = (whole_numbers(part) for part in zip(*parts, strict=True))
        return Cells(side, views, rows, turn, ranks(side)[turn])

    return Plan(
        whole_numbers(source),
        torch.tensor(time),
        tuple(whole_numbers(rows) for rows in sequences.values()),
        tuple(alike(side, parts) for (side, _), parts in cells.items()),
        torch.tensor(whole),
    )


# --- equal cost ----------------------------------------------------------------------------------


def canvas(item: ItemGeometry) -> tuple[int, int]:
    """Rows and columns of patches that LLaVA-NeXT keeps of the stitched crops: no letterbox."""
    whole = [tiles * n for tiles, n in zip(item.tiles, item.patches, strict=True)]
    scale = min(n / pixels for n, pixels in zip(whole, item.size, strict=True))
    rows, columns = (
        n - (n - int(round(pixels * scale, 7))) // 2 * 2
        for n, pixels in zip(whole, item.size, strict=True)
    )
    return rows, columns


def tokens_in(item: ItemGeometry, stitched: bool = True) -> int:
    """Visual tokens of an image: base view, and crops with a newline for each of their rows.

    Crops that are not ``stitched`` to a canvas, as those of InternVL, are views like the base view.
    """
    view = item.patches[0] * item.patches[1]
    if not stitched:
        return view * (item.views[1] - item.views[0])
    rows, columns = canvas(item)
    return view + rows * (columns + 1)


def tokens_out(item: ItemGeometry, choice: Choice, stitched: bool = True) -> int:
    """Visual tokens that ``choice`` leaves; by area where cells are cut by the letterbox."""
    if choice.whole:
        return tokens_in(item, stitched)
    h, w = item.patches
    heights, widths = (
        [min(choice.side, n - start) for start in range(0, n, choice.side)] for n in (h, w)
    )
    view = sum(min(choice.repeats, a * b) for a, b in product(heights, widths))
    if not stitched:
        return view * (item.views[1] - item.views[0] if choice.crops else 1)
    rows, columns = canvas(item) if choice.crops else (0, 0)
    return view + round(view * rows * columns / (h * w))


def nearest(
    scene: Sequence[ItemGeometry],
    share: float,
    sides: Sequence[int],
    repeats: Sequence[int],
    stitched: bool = True,
) -> Choice:
    """The choice that leaves nearest to ``share`` of a scene's tokens.

    On a tie the one with the smaller cells, then fewer repeats; but a single crop duplicates the
    base view and is worth less than a repeat. Crops of a single image are not dropped.
    """
    single = all(item.tiles == (1, 1) for item in scene)
    target = share * sum(tokens_in(item, stitched) for item in scene)

    def worth(choice: Choice) -> tuple[float, int, bool, int]:
        far = abs(sum(tokens_out(item, choice, stitched) for item in scene) - target)
        return far, choice.side, choice.crops is single, choice.repeats

    crops = (True, False) if scene[0].video >= 0 else (True,)
    choices = [Choice(s, r, c) for s, r, c in product(sides, repeats, crops) if r <= s * s]
    return min(choices, key=worth)
