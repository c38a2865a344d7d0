"""The compressor: four ways to shorten the rows of an image, and the gate that chooses.

It is independent of stages and of training. Rows are patches only, without newlines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, one_hot

from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.statistics import ItemGeometry
from vlmfast.core.views import covering
from vlmfast.errors import RecipeError
from vlmfast.kernels.pool import cell_mix, resample

from ...cells import Cells, grouped
from ..random import shuffled

BRANCHES = ("prune", "pool", "conv", "resample", "text")
MODES = ("select", "weighted", "concat")
_KERNEL = 32  # hidden units of the network that draws the convolution's kernel


# --- geometry -------------------------------------------------------------------------------------


def surroundings(layout: TokenLayout, cells: Cells) -> Tensor:
    """Geometric input of the kernel for each row: float32, (N, 8).

    Offset (y, x) from the centre of its cell, in cells; its second powers; the size of a cell in
    patches, as logarithms; whether the row belongs to an overview of an image that also has crops.
    """
    y, x = cells.offset.unbind(1)
    powers = torch.stack([y * y, x * x, y * x], dim=1)
    sizes = torch.tensor(cells.size, dtype=cells.offset.dtype).log().tolist()
    size = [cells.offset.new_full((len(layout), 1), value) for value in sizes]
    return torch.cat([cells.offset, powers, *size, overview(layout)], dim=1)


def overview(layout: TokenLayout) -> Tensor:
    """1 for rows of the base view of an image that also has crops: float32, (N, 1)."""
    base = layout.tile == 0
    return (base & ~base.all())[:, None].float()


def centres(layout: TokenLayout) -> Tensor:
    """(y, x) of each row's centre, as fractions of its image: float32, (N, 2)."""
    box = layout.box.float()
    return torch.stack([box[:, 1] + box[:, 3], box[:, 0] + box[:, 2]], dim=1) / 2


def anchors(n: int) -> Tensor:
    """Points (y, x) in the unit square, float32, (n, 2); every prefix covers it evenly as well.

    The additive recurrence by the powers of the plastic number's inverse (M. Roberts, 2018).
    """
    plastic = 1.32471795724474602596
    step = torch.tensor([plastic**-1, plastic**-2], dtype=torch.float64)
    return (0.5 + torch.arange(n)[:, None] * step).frac().float()


def squared_distance(points: Tensor, others: Tensor) -> Tensor:
    """Squared distances (n, N) between points (n, 2) and others (N, 2)."""
    return (points[:, None] - others).square().sum(-1)


def separate(wanted: list[int], n: int) -> list[int]:
    """Distinct rows of ``n``, each the free one nearest to the wanted one, in order."""
    taken: dict[int, None] = {}
    for row in wanted:
        steps = (row + sign * far for far in range(n) for sign in (1, -1))
        taken[next(r for r in steps if 0 <= r < n and r not in taken)] = None
    return list(taken)


# --- the parts ------------------------------------------------------------------------------------


class Residual(nn.Module):
    """``x + W2 gelu(W1 [norm(x), side])`` with ``W2 = 0`` at the start, and the hidden units."""

    def __init__(self, width: int, side: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width + side, hidden), nn.Linear(hidden, width)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor, *side: Tensor) -> tuple[Tensor, Tensor]:
        rows = [self.norm(x), *(s.expand(*x.shape[:-1], s.shape[-1]) for s in side)]
        hidden = gelu(self.inner(torch.cat(rows, dim=-1)))
        return x + self.outer(hidden), hidden


class Conv(nn.Module):
    """A strided convolution whose kernel also depends on the content of its cell.

    With ``o_t`` the offset of patch t in its cell, ``s`` the size of a cell and heads ``i``, each
    of which weights its own slice of the features::

        x'_t = x_t + f(x_t, x_t - mean of its cell, o_t, s)
        a_it = softmax over t in cell of (log weight_t + k_i(o_t, s) + c_i f's hidden units)
        y_i  = sum of a_it x'_it            out = y + g(y, s)

    f, g, k and c are zero at initialization: the output is the weighted average of each cell.
    """

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = Residual(width, width + 8, hidden)
        first, last = nn.Linear(8, _KERNEL), nn.Linear(_KERNEL, heads)
        self.kernel = nn.Sequential(first, nn.GELU(), last)
        self.content = nn.Linear(hidden, heads)
        self.write = Residual(width, 3, hidden)
        for linear in (last, self.content):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(
        self, x: Tensor, weight: Tensor, cells: Cells, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows (N, D) to (C, D), and the weights of the patches (C, m, heads).

        ``place`` (N, 8) are their `surroundings`.
        """
        units = self.read.norm(x)
        mean = cells.average(units, weight)
        x, hidden = self.read(x, units - mean[..., cells.cell, :], place)
        score = weight.log()[:, None] + self.kernel(place) + self.content(hidden)
        y, share = cell_mix(x, score, cells.table, cells.there)
        return self.write(y, place[cells.index, 5:])[0], share


class Resample(nn.Module):
    """Learned queries, each with a position in the image, attend to all of its patches.

    Query q of n has position ``p_q``; a patch of any view has position ``p_t`` in the image. With a
    sharpness ``s_i`` (initially 1) and the learned ``e_qi`` (initially 0) of head i::

        x'_t  = x_t + f(x_t, p_t)
        a_iqt = softmax over t of (log weight_t - 2 n s_i |p_t - p_q|^2 + e_qi . K_i norm(x_t))
        y_qi  = sum of a_iqt x'_it          out = y + g(y, p_q, log n)

    The positions of the first n queries cover the image for every n. Initially a query averages the
    patches around it.
    """

    anchors: Tensor

    def __init__(self, width: int, hidden: int, heads: int, queries: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.read, self.write = Residual(width, 3, hidden), Residual(width, 3, hidden)
        self.key = nn.Linear(width, heads * depth, bias=False)
        self.queries = nn.Parameter(torch.zeros(queries, heads, depth))
        self.by_count = nn.Parameter(torch.zeros(heads, depth))
        self.sharpness = nn.Parameter(torch.zeros(heads))
        self.register_buffer("anchors", anchors(queries), persistent=False)

    def forward(
        self, x: Tensor, weight: Tensor, place: Tensor, overview: Tensor, n: int
    ) -> tuple[Tensor, Tensor]:
        """Rows (N, D) to (n, D), and the attention (n, N), mean over heads."""
        at, size = self.anchors[:n], math.log(n)
        key = self.key(self.read.norm(x)).unflatten(-1, (self.heads, -1))
        query = self.queries[:n] + size * self.by_count
        rows = self.read(x, torch.cat([place, overview], dim=1))[0]
        pull = 2 * n * self.sharpness.exp()
        y, attention = resample(query, key, rows, weight.log(), at, place, pull)
        side = torch.cat([at, at.new_full((n, 1), size)], dim=1)
        return self.write(y, side)[0], attention


class Gate(nn.Module):
    """Chooses the branch: logits from the question, the images and the costs.

    The mean of the visual rows attends to the question's token embeddings. The result, mean and
    spread of the visual rows and the branches' costs go through two layers, of which the last is
    zero at initialization.
    """

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, depth)
        self.key = nn.Linear(width, depth, bias=False)
        self.inner = nn.Linear(3 * width + len(BRANCHES), hidden)
        self.outer = nn.Linear(hidden, len(BRANCHES))
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, question: Tensor, summary: Tensor, shares: list[float | None]) -> Tensor:
        """Logits (5,) in the order of `BRANCHES`; minus infinity where a branch is closed.

        Parameters
        ----------
        question : Tensor, float32, (T, D)
        summary : Tensor, float32, (2, D)
            See `summarise`.
        shares : list of float or None
            Fraction of the tokens that each branch keeps; ``None`` if it is closed.
        """
        text, visual = self.norm(question), self.norm(summary)
        score = self.key(text) @ self.query(visual[0]) / self.query.out_features**0.5
        asked = score.softmax(0) @ text
        costs = [0.0 if share is None else -math.log(max(share, 1e-3)) for share in shares]
        closed = [float(share is None) for share in shares]
        cost, is_closed = torch.tensor([costs, closed], device=text.device)  # one copy
        logits = self.outer(gelu(self.inner(torch.cat([asked, *visual, cost]))))
        return logits.masked_fill(is_closed > 0, -torch.inf)


def summarise(rows: Tensor) -> Tensor:
    """Mean and spread of visual rows (N, D), float32, (2, D)."""
    spread, mean = torch.std_mean(rows.float(), dim=0, correction=0)
    return torch.stack([mean, spread])


def fractions(counts: Sequence[Sequence[int | None]], total: int) -> list[float | None]:
    """Fraction of ``total`` tokens that each branch keeps, from its counts for each image."""
    branches = zip(*counts, strict=True)
    return [None if None in branch else sum(branch) / total for branch in branches]


# --- the whole ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Output of a branch for the N patches of an image, before positions are made distinct.

    Parameters
    ----------
    features : Tensor, (C, D)
    index : Tensor, int64, (C,)
        The patch whose position each row prefers.
    weight, protected, box : Tensor
        As in `TokenLayout`, C rows: of the patches that each row represents.
    extra : tuple of Tensor, each (C, D)
        As in `VisualTokens`.
    distinct : bool
        Whether no two rows prefer the same position.
    """

    features: Tensor
    index: Tensor
    weight: Tensor
    protected: Tensor
    box: Tensor
    extra: tuple[Tensor, ...]
    distinct: bool = True


class ElasticCompressor(nn.Module):
    """Branches and gate. Computes in float32 and returns rows in the dtype of the input.

    Parameters
    ----------
    width : int
        Of a visual row; a multiple of `heads`.
    hidden : int
        Units inside each residual part and inside the gate.
    queries : int
        Learned queries: the most rows that ``resample`` can give.
    text : bool
        Whether the gate can choose the branch ``text``.
    """

    heads, depth = 8, 16

    def __init__(
        self, width: int, hidden: int = 256, queries: int = 80, text: bool = False
    ) -> None:
        super().__init__()
        if width % self.heads:
            raise RecipeError(
                f"elastic: a width of {width} is not divisible by the {self.heads} heads"
            )
        self.text = text
        self.conv = Conv(width, hidden, self.heads)
        self.resample = Resample(width, hidden, self.heads, queries, self.depth)
        self.gate = Gate(width, hidden // 2, 2 * self.depth)

    @property
    def queries(self) -> int:
        return self.resample.queries.shape[0]

    def branch(
        self,
        name: str,
        patches: VisualTokens,
        geometry: ItemGeometry,
        count: int,
        key: tuple[int, ...] = (0,),
    ) -> VisualTokens:
        """One image under one branch.

        Parameters
        ----------
        name : str
            One of `BRANCHES`.
        patches : VisualTokens
            Of one image, without newlines.
        count : int
            Target number of rows; ``pool`` and ``conv`` come as near as equal cells allow.
        key : tuple of int
            Seed of the draw of ``prune``.
        """
        if name == "text":
            return patches.select(torch.arange(0, device=patches.layout.device))
        return self.concat(patches, geometry, {name: count}, key)

    def concat(
        self,
        patches: VisualTokens,
        geometry: ItemGeometry,
        counts: dict[str, int],
        key: tuple[int, ...] = (0,),
    ) -> VisualTokens:
        """The rows of several branches concatenated, each with its own count.

        An image with fewer patches than they have rows is unchanged.
        """
        parts = []
        for name, n in counts.items():
            if name == "resample":
                parts.append(self._resample(patches, n))
            elif name != "prune":
                made = self._pool if name == "pool" else self._conv
                parts.append(made(patches, grouped(patches.layout, geometry, n)))
        free = len(patches) - sum(len(part.index) for part in parts)
        if free < 0:
            return patches
        if "prune" in counts:  # first, so that its rows keep their own positions
            parts.insert(0, self._prune(patches, min(counts["prune"], free), key))
        return place(patches, parts)

    def weighted(
        self,
        patches: VisualTokens,
        geometry: ItemGeometry,
        count: int,
        gates: Tensor,
        key: tuple[int, ...] = (0,),
    ) -> VisualTokens:
        """Prune, pool and conv at one count, summed with ``gates`` (3,) in this order.

        The three match row by row: pruning draws one patch of each cell.
        """
        cells = grouped(patches.layout, geometry, count)
        rank = shuffled(len(patches), *key).argsort().to(cells.table.device)
        first = rank[cells.table].masked_fill(~cells.there, len(patches)).argmin(1, keepdim=True)
        pruned = patches.select(cells.table.gather(1, first).flatten())
        pool, conv = self._pool(patches, cells), self._conv(patches, cells)

        def total(*rows: Tensor) -> Tensor:
            return sum(g * r.float() for g, r in zip(gates, rows, strict=True)).to(rows[0].dtype)

        levels = zip(pruned.extra, pool.extra, conv.extra, strict=True)
        rows = Rows(
            total(pruned.features, pool.features, conv.features),
            pool.index,
            pool.weight,
            pool.protected,
            pool.box,
            tuple(total(*level) for level in levels),
        )
        return place(patches, [rows])

    def _prune(self, patches: VisualTokens, count: int, key: tuple[int, ...]) -> Rows:
        index = shuffled(len(patches), *key)[:count].sort().values.to(patches.layout.device)
        kept, layout = patches.select(index), patches.layout.select(index)
        return Rows(kept.features, index, layout.weight, layout.protected, layout.box, kept.extra)

    def _pool(self, patches: VisualTokens, cells: Cells) -> Rows:
        weight = patches.layout.weight

        def pooled(level: Tensor) -> Tensor:
            return cells.average(level, weight)

        return self._of_cells(patches, cells, pooled(patches.features), pooled)

    def _conv(self, patches: VisualTokens, cells: Cells) -> Rows:
        features, layout = patches.features, patches.layout
        around = surroundings(layout, cells)
        rows, share = self.conv(features.float(), layout.weight, cells, around)

        def weighted(level: Tensor) -> Tensor:
            return (
                (share.mean(-1, keepdim=True) * cells.gather(level.float())).sum(-2).to(level.dtype)
            )

        return self._of_cells(patches, cells, rows.to(features.dtype), weighted)

    def _of_cells(
        self,
        patches: VisualTokens,
        cells: Cells,
        features: Tensor,
        level: Callable[[Tensor], Tensor],
    ) -> Rows:
        layout = patches.layout
        weight, protected = cells.total(layout.weight), cells.any(layout.protected)
        box = covering(layout.box, cells.cell, len(cells.index))
        extra = tuple(map(level, patches.extra))
        return Rows(features, cells.index, weight, protected, box, extra)

    def _resample(self, patches: VisualTokens, count: int) -> Rows:
        layout, features = patches.layout, patches.features
        count, at, base = min(count, len(layout)), centres(layout), overview(layout)
        rows, attention = self.resample(features.float(), layout.weight, at, base, count)
        # A query takes the position of the nearest patch; on a tie, that of a crop.
        far = squared_distance(self.resample.anchors[:count], at) + 1e-3 * base.T
        index = far.sort(dim=1, stable=True).indices[:, 0]
        # The weight of a patch is split among queries by attention; its box goes to the query that
        # attends to it most.
        fraction = attention.detach() / attention.detach().sum(0).clamp(min=1e-30)
        main = attention.argmax(0)
        own = torch.arange(count, device=main.device)
        boxes = torch.cat([layout.box, layout.box[index]])
        return Rows(
            rows.to(features.dtype),
            index,
            fraction @ layout.weight,
            (one_hot(main, count).T.bool() & layout.protected).any(1),
            covering(boxes, torch.cat([main, own]), count),
            tuple((attention @ level.float()).to(level.dtype) for level in patches.extra),
            distinct=False,
        )


def place(patches: VisualTokens, parts: list[Rows]) -> VisualTokens:
    """Rows in the order of the prompt, each at the position of a different patch."""
    rows = torch.cat([part.index for part in parts])
    if len(parts) > 1 or not parts[0].distinct:
        rows = torch.tensor(separate(rows.tolist(), len(patches)), device=rows.device)
    rank = rows.argsort()

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])[rank]

    changes = {name: joined(name) for name in ("weight", "protected", "box")}
    levels = zip(*(part.extra for part in parts), strict=True)
    return VisualTokens(
        joined("features"),
        patches.layout.select(rows[rank]).replace(**changes),
        tuple(torch.cat(level)[rank] for level in levels),
    )
