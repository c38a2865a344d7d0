"""The compressor: four ways to shorten the rows of a picture, and the gate that chooses.

Nothing here knows of stages or of training. Rows are patches alone, newlines taken out.
"""

from __future__ import annotations

import math
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


# --- where things are -----------------------------------------------------------------------------


def surroundings(layout: TokenLayout, cells: Cells) -> Tensor:
    """What a kernel knows of each row, float32, (N, 8).

    Offset (y, x) from the centre of its cell, in cells; its second powers; the size of a cell in
    patches, as logarithms; whether the row belongs to an overview beside crops.
    """
    y, x = cells.offset.unbind(1)
    powers = torch.stack([y * y, x * x, y * x], dim=1)
    size = cells.offset.new_tensor(cells.size).log().expand(len(layout), 2)
    return torch.cat([cells.offset, powers, size, overview(layout)], dim=1)


def overview(layout: TokenLayout) -> Tensor:
    """1 for rows of the base view of a picture that has crops too: float32, (N, 1)."""
    base = layout.tile == 0
    return (base & ~base.all())[:, None].float()


def centres(layout: TokenLayout) -> Tensor:
    """(y, x) of each row's middle in its picture, as shares: float32, (N, 2)."""
    box = layout.box.float()
    return torch.stack([box[:, 1] + box[:, 3], box[:, 0] + box[:, 2]], dim=1) / 2


def anchors(n: int) -> Tensor:
    """Points (y, x) in the unit square, float32, (n, 2); the first of them cover it evenly too.

    The additive recurrence by the powers of the plastic number's inverse (M. Roberts, 2018).
    """
    plastic = 1.32471795724474602596
    step = torch.tensor([plastic**-1, plastic**-2], dtype=torch.float64)
    return (0.5 + torch.arange(n)[:, None] * step).frac().float()


def squared_distance(points: Tensor, others: Tensor) -> Tensor:
    """Squared distances (n, N) between points (n, 2) and others (N, 2)."""
    return (points[:, None] - others).square().sum(-1)


def separate(wanted: list[int], n: int) -> list[int]:
    """Different rows of ``n``, each as near to the wanted one as the earlier ones left it."""
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
    """A strided convolution whose kernel also reads what it covers.

    With ``o_t`` the offset of patch t in its cell, ``s`` the size of a cell and heads ``i``, each
    of which weights its own share of the features::

        x'_t = x_t + f(x_t, x_t - mean of its cell, o_t, s)
        a_it = softmax over t in cell of (log weight_t + k_i(o_t, s) + c_i f's hidden units)
        y_i  = sum of a_it x'_it            out = y + g(y, s)

    f, g, k and c give zero at the start: the weighted average of each cell.
    """

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.read = Residual(width, width + 8, hidden)
        self.kernel = nn.Sequential(nn.Linear(8, _KERNEL), nn.GELU(), nn.Linear(_KERNEL, heads))
        self.content = nn.Linear(hidden, heads)
        self.write = Residual(width, 3, hidden)
        for last in (self.kernel[-1], self.content):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(
        self, x: Tensor, weight: Tensor, cells: Cells, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows (N, D) to (C, D), and the shares of the patches (C, m, heads).

        ``place`` (N, 8) are their `surroundings`.
        """
        units = self.read.norm(x)
        mean = cells.average(units, weight)
        x, hidden = self.read(x, units - mean[..., cells.cell, :], place)
        score = weight.log()[:, None] + self.kernel(place) + self.content(hidden)
        y, share = cell_mix(x, score, cells.table, cells.there)
        return self.write(y, place[cells.index, 5:])[0], share


class Resample(nn.Module):
    """Learned queries, each at a place of the picture, read all of its patches.

    Query q of n stands at ``p_q``; a patch of any view lies at ``p_t`` in the picture. With a
    sharpness ``s_i`` (1 at the start) and the learned ``e_qi`` (0 at the start) of head i::

        x'_t  = x_t + f(x_t, p_t)
        a_iqt = softmax over t of (log weight_t - 2 n s_i |p_t - p_q|^2 + e_qi . K_i norm(x_t))
        y_qi  = sum of a_iqt x'_it          out = y + g(y, p_q, log n)

    The places of the first n queries cover the picture for every n. At the start a query averages
    what is around it.
    """

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
    """Which branch serves this question: logits from the question, the pictures and the costs.

    The mean of the visual rows attends to the question's token embeddings; what it reads there,
    mean and spread of the visual rows and the branches' costs go through two layers, of which the
    last is zero at the start.
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
            Tokens that each branch keeps, as a share; ``None`` where it is closed.
        """
        words, seen = self.norm(question), self.norm(summary)
        score = self.key(words) @ self.query(seen[0]) / self.query.out_features**0.5
        asked = score.softmax(0) @ words
        costs = [0.0 if share is None else -math.log(max(share, 1e-3)) for share in shares]
        costs = torch.tensor(costs, device=words.device)
        logits = self.outer(gelu(self.inner(torch.cat([asked, *seen, costs]))))
        closed = torch.tensor([share is None for share in shares], device=words.device)
        return logits.masked_fill(closed, -torch.inf)


def summarise(rows: Tensor) -> Tensor:
    """Mean and spread of visual rows (N, D), float32, (2, D)."""
    spread, mean = torch.std_mean(rows.float(), dim=0, correction=0)
    return torch.stack([mean, spread])


# --- the whole ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What a branch makes of the N patches of a picture, before each row has a place of its own.

    Parameters
    ----------
    features : Tensor, (C, D)
    index : Tensor, int64, (C,)
        The patch in whose place each row would like to stand.
    weight, protected, box : Tensor
        As in `TokenLayout`, C rows: of the patches that each row stands for.
    extra : tuple of Tensor, each (C, D)
        As in `VisualTokens`.
    """

    features: Tensor
    index: Tensor
    weight: Tensor
    protected: Tensor
    box: Tensor
    extra: tuple[Tensor, ...]


class ElasticCompressor(nn.Module):
    """Branches and gate. Rows come and go in their own dtype; the work is done in float32.

    Parameters
    ----------
    width : int
        Of a visual row; a multiple of `heads`.
    hidden : int
        Units inside each residual part and inside the gate.
    queries : int
        Learned queries: the most rows that ``resample`` can give.
    text : bool
        Whether the gate knows the branch ``text``.
    """

    heads, depth = 8, 16

    def __init__(
        self, width: int, hidden: int = 256, queries: int = 80, text: bool = False
    ) -> None:
        super().__init__()
        if width % self.heads:
            raise RecipeError(
                f"elastic: a width of {width} cannot be shared among {self.heads} heads"
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
        """One picture under one branch.

        Parameters
        ----------
        name : str
            One of `BRANCHES`.
        patches : VisualTokens
            Of one picture, newlines taken out.
        count : int
            Rows that are wanted; ``pool`` and ``conv`` come as near as equal cells allow.
        key : tuple of int
            What the draw of ``prune`` depends on.
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
        """The rows of several branches side by side, each with its own count."""
        parts = []
        for name, n in counts.items():
            if name == "resample":
                parts.append(self._resample(patches, n))
            elif name != "prune":
                made = self._pool if name == "pool" else self._conv
                parts.append(made(patches, grouped(patches.layout, geometry, n)))
        room = len(patches) - sum(len(part.index) for part in parts)
        if room < 0:
            raise RecipeError("elastic: mode=concat would leave more tokens than there are")
        if "prune" in counts:  # its rows have the first choice of places: their own
            parts.insert(0, self._prune(patches, min(counts["prune"], room), key))
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

        Row by row the three belong together: pruning draws one patch of each cell.
        """
        cells = grouped(patches.layout, geometry, count)
        turn = shuffled(len(patches), *key).argsort().to(cells.table.device)
        first = turn[cells.table].masked_fill(~cells.there, len(patches)).argmin(1, keepdim=True)
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
        place = surroundings(layout, cells)
        rows, share = self.conv(features.float(), layout.weight, cells, place)

        def weighted(level: Tensor) -> Tensor:
            return (
                (share.mean(-1, keepdim=True) * cells.gather(level.float())).sum(-2).to(level.dtype)
            )

        return self._of_cells(patches, cells, rows.to(features.dtype), weighted)

    def _of_cells(self, patches: VisualTokens, cells: Cells, features: Tensor, level) -> Rows:
        layout = patches.layout
        weight, protected = cells.total(layout.weight), cells.any(layout.protected)
        box = covering(layout.box, cells.cell, len(cells.index))
        extra = tuple(map(level, patches.extra))
        return Rows(features, cells.index, weight, protected, box, extra)

    def _resample(self, patches: VisualTokens, count: int) -> Rows:
        layout, features = patches.layout, patches.features
        count, at, base = min(count, len(layout)), centres(layout), overview(layout)
        rows, attention = self.resample(features.float(), layout.weight, at, base, count)
        # A query stands in the place of the nearest patch, of equals in that of a crop.
        far = squared_distance(self.resample.anchors[:count], at) + 1e-3 * base.T
        index = far.sort(dim=1, stable=True).indices[:, 0]
        # What a patch stands for is shared out by how much each query looks at it; its box goes to
        # the query that looks most.
        held = attention.detach() / attention.detach().sum(0).clamp(min=1e-30)
        main = attention.argmax(0)
        own = torch.arange(count, device=main.device)
        boxes = torch.cat([layout.box, layout.box[index]])
        return Rows(
            rows.to(features.dtype),
            index,
            held @ layout.weight,
            (one_hot(main, count).T.bool() & layout.protected).any(1),
            covering(boxes, torch.cat([main, own]), count),
            tuple((attention @ level.float()).to(level.dtype) for level in patches.extra),
        )


def place(patches: VisualTokens, parts: list[Rows]) -> VisualTokens:
    """Rows in the order of the prompt, each in the place of a patch that no other one has."""
    index = torch.cat([part.index for part in parts])
    rows = torch.tensor(separate(index.tolist(), len(patches)), device=index.device)
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
