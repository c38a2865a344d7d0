"""VisionZip: keep the dominant tokens and merge the rest by similarity.

In each view VisionZip (CVPR 2025, arXiv 2412.04467) keeps ``D`` *dominant* tokens, CLS and the
``D - 1`` patches with the largest CLS row (sum over heads), and ``C`` *contextual* ones. With ``m``
other patches in raster order, and their keys in the same layer, mean over heads::

    targets t = number 0, s, 2s, ... of them, C in all         s = max(1, floor(m / C))
    token of t = x_t + mean of the x whose keys are most like that of t (cosine)

``keep`` and ``budget`` give each view the same D + C, as 54 : 10. Newlines are dropped.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- Features are those after the projector, where encode stages run, not before it.
- Letterbox patches that are not in the prompt are ignored.
- Tokens keep the order of the prompt; theirs end with the contextual ones. CLS takes the position
  of its view's first dropped patch.
- Towers without CLS rank patches by received attention, as on Qwen-VL, and keep D patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import TokenCount, existing, inexact
from vlmfast.core.layout import VisualTokens, marked_rows
from vlmfast.core.params import param, proportional_attention_param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.core.views import by_view, merged

from ..guard import GuardedRanking
from ..select import apportion, best, most_alike, plus_mean


def spread(rest: int, contextual: int) -> slice:
    """The ``contextual`` tokens, or fewer, of ``rest`` others that these merge into."""
    step = max(1, rest // contextual)
    return slice(0, min(step * contextual, rest), step)


def homes(
    attention: Tensor,
    keys: Tensor,
    dominant: int,
    contextual: int,
    choose: Callable[..., Tensor] = best,
) -> Tensor:
    """The patch that each patch of a view merges into, -1 if dropped: int64, (N,).

    ``attention`` is (N,) and ``keys`` (N, d); ``choose`` marks the dominant patches as `best` does.
    """
    home = torch.arange(len(keys), device=keys.device)
    n = len(keys)
    rest = marked_rows(~choose(attention[None], [dominant])[0], n - min(dominant, n))
    if contextual == 0:
        return home.index_fill(0, rest, -1)
    targets = rest[spread(len(rest), contextual)]
    home = home.index_copy(0, rest, targets[most_alike(keys[rest], keys[targets])])
    return home.index_copy(0, targets, targets)  # also where keys are equal


@dataclass(frozen=True)
class VisionZip(GuardedRanking):
    """Keeps the patches that CLS attends to, and merges the rest into a few tokens."""

    name: ClassVar[str] = "visionzip"
    paper: ClassVar[str] = "CVPR 2025, arXiv 2412.04467"
    tier: ClassVar[str] = "baseline"
    wants_cls = True

    dominant: int = param(
        0, "D: tokens kept per view; D + C > 0 replaces keep", ge=0, excludes=("keep", "budget")
    )
    contextual: int = param(0, "C: merged tokens per view", ge=0, excludes=("keep", "budget"))
    proportional_attention: bool = proportional_attention_param(False)
    saliency: str = saliency_param()

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        return (self.guarded(SaliencyRequest("features", self.saliency, keys=True)),)

    def counts(self, total: int, sizes: list[int]) -> list[tuple[int, int]]:
        """``(D, C)`` of views with ``sizes`` patches: as given, or ``total`` tokens in sum."""
        if self.dominant + self.contextual > 0:
            return [(d := min(self.dominant, n), min(self.contextual, n - d)) for n in sizes]
        totals = apportion(total, [1.0] * len(sizes), sizes)
        return [(t - round(t * 10 / 64), round(t * 10 / 64)) for t in totals]

    def count_left(self, before: TokenCount) -> TokenCount:
        """Up to one token of each view is its CLS token, which is no patch."""
        first, last = before.image.geometry.views
        if self.dominant + self.contextual > 0:
            if not before.full:
                raise inexact(self.name, "how many patches of each view the stages before it keep")
            sizes = existing(before.image).flatten(1).sum(1).tolist()
            k = sum(d + c for d, c in self.counts(0, sizes))
        else:
            k = before.at_most(self.target(before), self.name)
        return before.left(k, k - (last - first))

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens:
        total, tokens = self.target(tokens), tokens.patches()
        (asked,) = self.saliencies()
        salient = stats.salient(asked, geometry)
        assert salient.keys is not None
        projected = int(stats.cls is not None)  # whether CLS is one of the D tokens
        home, cls = torch.empty_like(tokens.layout.order), []
        views = by_view(tokens.layout, geometry, salient.rows.sum(1), salient.keys)
        counts = self.counts(total, [len(index) for index, *_ in views])
        left = 0
        for (index, attention, keys), (d, c) in zip(views, counts, strict=True):
            n, dominant = len(index), max(d - projected, 0)
            new = homes(attention, keys, dominant, c, self.best)
            home[index] = torch.where(new < 0, new, index[new])
            rest = n - min(dominant, n)
            stay = n - rest + (len(range(rest)[spread(rest, c)]) if c else 0)
            gone = index[marked_rows(home[index] != index, n - stay)]
            cls.append(gone[: min(d, projected)])
            left += stay + len(cls[-1])
        features = tokens.features[:0] if stats.cls is None else stats.cls
        return merged(tokens, home, plus_mean, torch.cat(cls), features, left)
