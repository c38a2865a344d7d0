"""VL-Cache: fewer slots for layers whose attention is sparse.

The question comes after an image, and its rows show what the answer will attend to. VL-Cache (ICLR
2025, arXiv 2410.23317) uses the ``R`` rows of text after the last visual token twice. First, the
density of their attention sets the budget of a layer. With ``A`` the causal attention of layer l in
head h, an entry counts if it reaches ``p`` of the largest of its row::

    gamma[l] = 1 - mean over h of #{A[h, i, j] >= p max over j of A[h, i, j]} / #{j <= i}

The denser a layer, the more it gets of the budget ``alpha`` of all slots, for L layers with n slots
each::

    beta[l]  = clip((1 - gamma[l]) / (sum over layers of 1 - gamma) alpha L, 0.01, 1)

Second, slots are ranked by what they receive from these rows, ``s[h, j] = sum over i of A[h, i,
j]``. A tenth of the average budget, ``max(int(recent alpha n), 1)`` slots, is a window of last ones
that every layer keeps; the other nine tenths are the ``int((1 - recent) beta[l] n)`` best before
it.

Different from the authors' code, and why (it is not public; the numbers are checked against the
port of EffiVLM-Bench):

- The port has two options that the paper does not. ``layer_windows`` gives each layer a window of
  ``max(int(recent beta[l] n), 1)`` on top of ``int(beta[l] n)`` scored slots, so that about
  ``(1 + recent) alpha`` of all slots are kept. ``layer_adaptive=false`` gives every layer the same
  budget.
- Grouped-query heads sum their attention, and each KV head selects separately. With
  ``head_adaptive=false`` all heads sum and keep the same tokens.
- Where reducers left layers prompts of different lengths, a budget is a fraction of each layer's
  own.
- Statistics are sums over columns, so the attention map is never stored. Ties go to the lower
  index, kept slots keep the order of the prompt.
- The full keys and values of all layers are kept until the last has run, so the memory of a prefill
  is not reduced.
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

from ..evictor import kept_param
from ..layered import Layered, Scored

FLOOR = 0.01  # fraction of its slots that every layer keeps


def density(count: Tensor, nnz: Tensor) -> Tensor:
    """``1 - gamma``: fraction of the visible entries above the threshold, mean over query heads.

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
    """``(1 - recent) beta``: fraction of its slots that each layer keeps before the window."""
    scored, whole = 1 - recent, sum(densities)
    if whole == 0:  # of keys that overflowed: equal parts
        densities, whole = [1.0] * len(densities), len(densities)
    ideal = [d / whole * share * scored * len(densities) for d in densities]
    return [min(max(beta, FLOOR * scored), 1.0) for beta in ideal]


@dataclass(frozen=True)
class VLCache(Layered):
    """Gives each layer slots in proportion to the density of the question's attention."""

    name: ClassVar[str] = "vlcache"
    paper: ClassVar[str] = "ICLR 2025, arXiv 2410.23317"
    query_dependent: ClassVar[bool] = True

    keep: float = kept_param(0.1, per=", averaged over layers")
    p: float = param(
        0.01, "threshold of an entry, as a fraction of its row's largest", gt=0.0, le=1.0
    )
    recent: float = param(0.1, "fraction of the budget for the last slots", ge=0.0, lt=1.0)
    head_adaptive: bool = param(
        True, "each KV head selects its own tokens, instead of one set for all"
    )
    layer_adaptive: bool = param(
        True, "layers share the budget by their density, instead of equally"
    )
    layer_windows: bool = param(
        False,
        "each layer's window is a fraction of its own budget and kept beyond it, instead of one "
        "window for all within the budget",
    )

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        return dict.fromkeys(
            range(depth), ColumnRequest("text", threshold=self.p, want=("sum", "count"))
        )

    def last(self, capacity: int) -> int:
        return 0 if self.layer_windows else max(int(self.recent * capacity), 1)

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        assert stats is not None and stats.sum is not None
        received = stats.sum.sum(1)
        if self.head_adaptive:
            return received
        if kv.layout is None and not bool((kv.order == kv.order[:1]).all()):
            raise RecipeError(
                "vlcache: head_adaptive=false needs the same tokens in all heads, but an earlier "
                "stage has left different ones; use head_adaptive=true"
            )
        return received.sum(0, keepdim=True).expand_as(received)

    def claim(self, stats: ColumnStats, ranked: Tensor) -> Tensor:
        assert stats.count is not None and stats.sum is not None
        return density(stats.count, stats.nnz) if self.layer_adaptive else stats.sum.new_ones(())

    def counts(self, layers: list[Scored]) -> list[int]:
        inside = 0.0 if self.layer_windows else self.recent
        betas = budgets([layer.claim for layer in layers], self.keep, inside)
        if self.layer_windows:
            for beta, layer in zip(betas, layers, strict=True):
                layer.reserve(max(int(self.recent * beta * layer.n), 1))
        return [
            min(max(int(beta * layer.n), 1) + layer.window, layer.n)
            for beta, layer in zip(betas, layers, strict=True)
        ]
