"""PruMerge: keep the outliers of CLS attention, and merge their neighbours into them.

Most patches of a view receive little attention from CLS. LLaVA-PruMerge (ICCV 2025, arXiv
2403.15388) keeps the outliers. With ``a`` the CLS row of the tower's last layer, as if that layer
had one wide head, over the ``N`` patches of a view::

    ratio = fraction of the a_j above Q3 + 1.5 (Q3 - Q1)          k = trunc(N ratio)

the ``k`` largest are kept. The nearest patches, kept or not, are added to each, by the cosine of
the keys of the same layer, all heads concatenated; one more token represents all dropped patches::

    x_i' = x_i + sum over the 32 nearest j != i of a_j x_j
    x_rest = sum over all that are not kept of a_j x_j

The softmax over a sum of heads is not a sum of softmaxes, but follows from them: with ``p_h`` the
row of head h of H, ``a = softmax(H^(-1/2) sum over h of log p_h)``.

``keep`` and ``budget`` give all views of an image the same number of tokens, x_rest included. A
view that keeps all of its tokens is unchanged. Newlines are dropped.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Every view counts its own outliers; theirs takes one ratio for a whole batch, so that the tokens
  kept of an image depend on the other images. A view without outliers keeps its best patch.
- Features are those after the projector, where encode stages run, not before it.
- Tokens keep the order of the prompt (theirs: by decreasing attention). x_rest takes the position
  of the last dropped patch, and its weight is the number of dropped patches. With
  ``proportional_attention``, the weight of a kept patch is 1.
- Letterbox patches that are not in the prompt are ignored.
- On vision towers without CLS, ``p_h`` is the attention that patches receive, scaled to sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens, marked_rows
from vlmfast.core.params import param, proportional_attention_param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import by_view, merged

from ..guard import GuardedRanking
from ..select import apportion, best

NEAREST = 32


def one_head(rows: Tensor, cls: bool = True) -> Tensor:
    """Combine the CLS rows of all heads into that of one wide head.

    Parameters
    ----------
    rows : Tensor, (V, H, N)
        Softmax attention to the patches.
    cls : bool
        Whether the remainder to 1 is the attention of CLS to itself; otherwise rows are scaled to
        sum to 1.

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


def outliers(views: Sequence[Tensor]) -> list[int]:
    """``k`` of each view, from its CLS row (N,): at least one; all are read together."""
    counts = [_above(attention) for attention in views]
    above = torch.stack(counts).tolist() if counts else []
    # As the authors: a ratio, whose product with N is truncated.
    return [max(int(len(a) * (n / len(a))), 1) for a, n in zip(views, above, strict=True)]


def _above(attention: Tensor) -> Tensor:
    """The number of outliers, int64, ()."""
    low, high = (attention.double().quantile(share) for share in (0.25, 0.75))
    return (attention > high + 1.5 * (high - low)).sum()


def mixture(attention: Tensor, keys: Tensor, kept: Tensor) -> Tensor:
    """Mixing weights of the new tokens; their product with the features: float32, (k + 1, N).

    Parameters
    ----------
    attention : Tensor, (N,)
    keys : Tensor, (N, D)
    kept : Tensor, int64, (k,)
    """
    n, units = len(attention), normalize(keys.float(), dim=-1)
    near = units[kept] @ units.T
    near = near.scatter(1, kept[:, None], -torch.inf)  # a patch is not its own neighbour
    near = best(near, [min(NEAREST, n - 1)] * len(kept))
    new = (near * attention).scatter(1, kept[:, None], 1.0)
    rest = attention.index_fill(0, kept, 0.0)
    return torch.cat([new, rest[None]]).float()


@dataclass(frozen=True)
class PruMerge(GuardedRanking):
    """Keeps the outliers of CLS attention, and merges neighbours into them."""

    name: ClassVar[str] = "prumerge"
    paper: ClassVar[str] = "ICCV 2025, arXiv 2403.15388"
    tier: ClassVar[str] = "baseline"
    exact: ClassVar[bool] = True

    keep: float | None = param(  # type: ignore[assignment]  # none: not a fraction
        None,
        "fraction of the visual tokens kept; none: as many as outliers",
        gt=0.0,
        le=1.0,
    )
    proportional_attention: bool = proportional_attention_param(False)
    saliency: str = saliency_param()

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """Of the last block, whose output LLaVA does not use."""
        return (self.guarded(SaliencyRequest("last", self.saliency, keys=True, wide=True)),)

    def chosen(self, attention: Tensor, total: int | None, k: int) -> tuple[Tensor, int | None]:
        """Which patches of one view are kept, bool, (N,), and how many, if the host knows it.

        ``total - 1`` of them, or the ``k`` outliers.
        """
        k = min(k if total is None else total - 1, len(attention))
        return self.best(attention[None], [k])[0], k

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens:
        total = None if self.fraction is None else self.target(tokens)
        tokens = tokens.patches()
        (asked,) = self.saliencies()
        salient = stats.salient(asked, geometry)
        assert salient.keys is not None
        attention = one_head(salient.rows, cls=salient.source == "cls")
        views = by_view(tokens.layout, geometry, attention, salient.keys)
        totals: Sequence[int | None] = [None] * len(views)
        if total is not None:
            totals = apportion(total, [1.0] * len(views), [len(index) for index, *_ in views])
        home = torch.arange(len(tokens), device=attention.device)
        parts = []  # indices of a view, of its new tokens, mixing weights
        some = [a for index, a, _ in views if total is None and len(index)]
        found, left = iter(outliers(some)), len(tokens)
        acting = []  # views of which some patches merge
        for (index, a, keys), count in zip(views, totals, strict=True):
            if count == 0:
                home[index] = -1
                left -= len(index)
            elif len(index) and (count is None or count < len(index)):
                marks, known = self.chosen(a, count, next(found) if count is None else 0)
                acting.append((index, a, keys, marks, known))
        unknown = [marks.sum() for *_, marks, known in acting if known is None]
        read = iter(torch.stack(unknown).tolist() if unknown else ())  # together
        for index, a, keys, marks, known in acting:
            k = next(read) if known is None else known
            if k == len(a):
                continue
            kept, gone = marked_rows(marks, k), marked_rows(~marks, len(a) - k)
            left -= len(gone) - 1
            home[index[gone]] = index[gone[-1:]]
            targets = torch.cat([kept, gone[-1:]])
            parts.append((index, index[targets], mixture(a, keys, kept)))

        def combine(features: Tensor, home: Tensor) -> Tensor:
            new = features.clone()
            for index, targets, mix in parts:
                new[targets] = (mix @ features[index].float()).to(features.dtype)
            return new

        none = home[:0]
        return merged(tokens, home, combine, none, tokens.features[:0], left)
