"""VL-Cache: layers whose attention is sparse need fewer slots.

After a picture comes the question, and its rows show what the answer will look at. VL-Cache (ICLR
2025, arXiv 2410.23317) asks the ``R`` rows of text behind the last visual token twice. How much of
what they may see do they look at? With ``A`` the causal attention of layer l in head h, an entry
counts if it reaches ``p`` of the largest of its row::

    gamma[l] = 1 - mean over h of #{A[h, i, j] >= p max over j of A[h, i, j]} / #{j <= i}

The denser a layer, the more of the ``alpha`` of all slots it gets, of L layers with n slots each::

    beta[l]  = clip((1 - gamma[l]) / (sum over layers of 1 - gamma) alpha L, 0.01, 1)

And which slots? Those that the rows attend to most, ``s[h, j] = sum over i of A[h, i, j]``. A tenth
of the average budget, ``max(int(recent alpha n), 1)`` slots, is a window of last ones that every
layer keeps; the other nine tenths are the ``int((1 - recent) beta[l] n)`` best before it.

Different from the authors' code, and why (it is not public; the numbers are checked against the
port of EffiVLM-Bench):

- The port offers a window of ``recent beta[l] n`` too, on top of the whole budget, which then is
  more than ``alpha``. Here window and scored slots are the budget together.
- Grouped-query heads add up their attention and each KV head chooses for itself. With
  ``head_adaptive=false`` all heads add up and keep the same tokens.
- Where reducers left layers prompts of different lengths, a budget is a share of each layer's own.
- Statistics are sums over columns, so the map of the rows is never stored. Ties go to the lower
  index, kept slots stay in the order of the prompt.
- All layers' full keys and values must be there until the last has run: the memory of a prefill
  does not fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.errors import RecipeError

from ..layered import Layered, Scored

FLOOR = 0.01  # of its slots, that every layer keeps


def density(count: Tensor, nnz: Tensor) -> Tensor:
    """``1 - gamma``: share of what the rows may see that they look at, mean over query heads.

    Parameters
    ----------
    count : Tensor, int, (H, G, N)
        Entries of each column that reach the threshold.
    nnz : Tensor, int, (H, N)
        Rows that may see the column.

    Returns
    -------
    Tensor, float64, ()
    """
    return (count.double().sum(2) / nnz.double().sum(1, keepdim=True).clamp(min=1)).mean()


def budgets(densities: Sequence[float], share: float, recent: float) -> list[float]:
    """``(1 - recent) beta``: share of its slots that each layer keeps before the window."""
    scored, whole = 1 - recent, sum(densities)
    ideal = [d / whole * share * scored * len(densities) for d in densities]
    return [min(max(beta, FLOOR * scored), 1.0) for beta in ideal]


@dataclass(frozen=True)
class VLCache(Layered):
    """Gives each layer as many slots as its attention is dense, as the question sees it."""

    name: ClassVar[str] = "vlcache"
    paper: ClassVar[str] = "ICLR 2025, arXiv 2410.23317"
    asks_question: ClassVar[bool] = True

    share: float = param(
        0.1,
        "share of the prompt's keys and values that stays, averaged over layers",
        gt=0.0,
        le=1.0,
    )
    p: float = param(
        0.01, "share of a row's largest attention from which an entry counts", gt=0.0, le=1.0
    )
    recent: float = param(0.1, "share of the budget that is the last slots", ge=0.0, lt=1.0)
    head_adaptive: bool = param(
        True, "each KV head chooses its own tokens, instead of all together"
    )

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return dict.fromkeys(
            range(depth), ColumnRequest("text", threshold=self.p, want=("sum", "count"))
        )

    def last(self, capacity: int) -> int:
        return max(int(self.recent * capacity), 1)

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        received = stats.sum.sum(1)
        if self.head_adaptive:
            return received
        if not bool((kv.order == kv.order[:1]).all()):
            raise RecipeError(
                "vlcache: head_adaptive=false lets all heads keep the same tokens, but a stage "
                "before it has left them different ones; use head_adaptive=true"
            )
        return received.sum(0, keepdim=True).expand_as(received)

    def claim(self, stats: ColumnStats, ranked: Tensor) -> Tensor:
        return density(stats.count, stats.nnz)

    def counts(self, layers: list[Scored]) -> list[int]:
        betas = budgets([of.claim for of in layers], self.share, self.recent)
        return [
            min(max(int(beta * of.n), 1) + of.window, of.n)
            for beta, of in zip(betas, layers, strict=True)
        ]
