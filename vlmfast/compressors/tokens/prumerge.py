"""PruMerge: patches to which CLS attends far more than to others, and what the rest adds to them.

Most patches of a view get hardly any attention from CLS. LLaVA-PruMerge (ICCV 2025, arXiv
2403.15388) keeps the outliers. With ``a`` the CLS row of the tower's last layer, as if that layer
had one wide head, over the ``N`` patches of a view::

    ratio = share of the a_j above Q3 + 1.5 (Q3 - Q1)          k = trunc(N ratio)

the ``k`` largest are kept. Each takes in what is near it, kept or not, by the cosine of the keys of
the same layer, all heads side by side; and one more token stands for all that is gone::

    x_i' = x_i + sum over the 32 nearest j != i of a_j x_j
    x_rest = sum over all that are not kept of a_j x_j

A softmax over a sum of heads is no sum of softmaxes, but it follows from them: with ``p_h`` the row
of head h of H, ``a = softmax(H^(-1/2) sum over h of log p_h)``.

``rate`` and ``budget`` give all views of a picture the same number of tokens, x_rest among them.
A view that keeps all of its tokens stays as it is. Newlines go.

Different from the authors' code, and why:

- Every view counts its own outliers; theirs takes one ratio for a whole batch, so that what a
  picture keeps depends on its neighbours. A view without outliers keeps its best patch.
- Features are those behind the projector, where encode stages work, not before it.
- Tokens stay in the order of the prompt (theirs: by falling attention). x_rest takes the place of
  the last patch that is gone, and its weight is the number of those: for ``repair``, a kept patch
  stands for itself.
- Letterbox patches that the prompt lacks take no part.
- On vision towers without CLS, ``p_h`` is the attention that patches receive, scaled to sum to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param, repair_param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import by_view, merged

from ..reducer import Reducer
from ..select import apportion, best

NEAREST = 32


def one_head(rows: Tensor, cls: bool = True) -> Tensor:
    """CLS rows of all heads as that of one wide head.

    Parameters
    ----------
    rows : Tensor, (V, H, N)
        Softmax attention to the patches.
    cls : bool
        Whether what is missing to 1 went to CLS itself; otherwise rows are scaled to 1.

    Returns
    -------
    Tensor, float32, (V, N)
    """
    rows = rows.double()
    if cls:
        whole = torch.cat([1 - rows.sum(-1, keepdim=True), rows], dim=-1)
    else:
        whole = rows / rows.sum(-1, keepdim=True)
    logits = whole.clamp(min=1e-30).log().sum(1) * rows.shape[1] ** -0.5
    return logits.softmax(-1)[:, int(cls) :].float()


def outliers(attention: Tensor) -> int:
    """``k`` of one view, by its CLS row (N,); at least one."""
    low, high = attention.double().quantile(attention.new_tensor([0.25, 0.75]).double())
    above = int((attention > high + 1.5 * (high - low)).sum())
    # As the authors: a ratio, whose product with N is cut.
    return max(int(len(attention) * (above / len(attention))), 1)


def mixture(attention: Tensor, keys: Tensor, kept: Tensor) -> Tensor:
    """What each new token is made of: float32, (k + 1, N); times the features, the new tokens.

    Parameters
    ----------
    attention : Tensor, (N,)
    keys : Tensor, (N, D)
    kept : Tensor, int64, (k,)
    """
    n, units = len(attention), normalize(keys.float(), dim=-1)
    near = units[kept] @ units.T
    near = near.scatter(1, kept[:, None], -torch.inf)  # a patch is no neighbour of itself
    near = best(near, [min(NEAREST, n - 1)] * len(kept))
    new = (near * attention).scatter(1, kept[:, None], 1.0)
    rest = attention.index_fill(0, kept, 0.0)
    return torch.cat([new, rest[None]]).float()


@dataclass(frozen=True)
class PruMerge(Reducer):
    """Keeps the outliers of CLS attention, and adds to them what is near."""

    name: ClassVar[str] = "prumerge"
    paper: ClassVar[str] = "ICCV 2025, arXiv 2403.15388"

    rate: float | None = param(
        None, "share of the visual tokens that stays; none: by the outliers", gt=0.0, le=1.0
    )
    repair: bool = repair_param(False)
    saliency: str = saliency_param()

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """Of the last block, although its output goes nowhere in LLaVA."""
        return (SaliencyRequest("last", self.saliency, keys=True, wide=True),)

    def chosen(self, attention: Tensor, total: int | None) -> Tensor:
        """Patches of one view, (N,), that are kept: ``total - 1`` of them, or the outliers."""
        k = outliers(attention) if total is None else total - 1
        return best(attention[None], [k])[0].nonzero()[:, 0]

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens:
        total = None if self.share is None else self.target(tokens)
        tokens = tokens.select(tokens.layout.patches)
        salient = stats.salient(*self.saliencies(), geometry)
        attention = one_head(salient.rows, cls=salient.source == "cls")
        views = by_view(tokens.layout, geometry, attention, salient.keys)
        totals = [None] * len(views)
        if total is not None:
            totals = apportion(total, [1.0] * len(views), [len(index) for index, *_ in views])
        home = torch.arange(len(tokens), device=attention.device)
        parts = []  # indices of a view, its new tokens, what they are made of
        for (index, a, keys), count in zip(views, totals, strict=True):
            if count == 0:
                home[index] = -1
            elif not len(index):
                continue
            elif count is None or count < len(index):
                kept = self.chosen(a, count)
                gone = torch.ones_like(a, dtype=torch.bool).index_fill(0, kept, False)
                gone = gone.nonzero()[:, 0]
                if not len(gone):
                    continue
                home[index[gone]] = index[gone[-1]]
                places = torch.cat([kept, gone[-1:]])
                parts.append((index, index[places], mixture(a, keys, kept)))

        def combine(features: Tensor, home: Tensor) -> Tensor:
            new = features.clone()
            for index, places, mix in parts:
                new[places] = (mix @ features[index].float()).to(features.dtype)
            return new

        none = home[:0]
        return merged(tokens, home, combine, none, tokens.features[:0])
