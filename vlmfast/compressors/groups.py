"""Groups of tokens that are compared with each other: one image, or all frames of a video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vlmfast.core.counting import runs
from vlmfast.core.layout import VisualTokens, marked_rows
from vlmfast.core.statistics import ItemGeometry


@dataclass(frozen=True, eq=False)
class Group:
    """Some of the tokens of a prompt, which the host knows without reading the device.

    Parameters
    ----------
    tokens : VisualTokens
        All of them.
    first, last : int
        The first and the last ``TokenLayout.item`` of the group.
    """

    tokens: VisualTokens
    first: int
    last: int

    def __len__(self) -> int:
        """Number of tokens, newlines included."""
        return int(self._among(self.tokens.layout.on_host[1]).sum())

    def index(self) -> Tensor:
        """Indices of the tokens: int64, ascending."""
        return marked_rows(self._among(self.tokens.layout.item), len(self))

    def patches(self) -> Tensor:
        """Indices of the patches: int64, ascending."""
        mask, known = self._patches()
        return marked_rows(mask, int(known.sum()))

    def select(self) -> VisualTokens:
        """The patches."""
        return self.tokens.marked(*self._patches())

    def _patches(self) -> tuple[Tensor, Tensor]:
        """Which tokens are patches of the group, on the device and on the host."""
        layout = self.tokens.layout
        known = self._among(layout.on_host[1]) & layout.patches_on_host
        return self._among(layout.item) & layout.patches, known

    def _among(self, item: Tensor) -> Tensor:
        return (item >= self.first) & (item <= self.last)


def groups_of(tokens: VisualTokens, items: Sequence[ItemGeometry]) -> list[Group]:
    """The tokens of each image and of each video.

    A long video is split as `counting.runs` describes.
    """
    numbers, sizes = (x.tolist() for x in tokens.layout.on_host[1].unique(return_counts=True))
    found: dict[int, Group] = {}
    for run, item in zip(runs([items[i].video for i in numbers], sizes), numbers, strict=True):
        first = found[run].first if run in found else item
        found[run] = Group(tokens, first, item)
    return list(found.values())


def together(tokens: VisualTokens, items: Sequence[ItemGeometry]) -> list[Tensor]:
    """Indices of the tokens of each group of `groups_of`: int64, ascending."""
    return [group.index() for group in groups_of(tokens, items)]
