"""FlashVID: keep salient tokens of each frame, and merge the others along time.

The strongest published training-free reducer of videos at a tenth of their tokens (99.1 % on
LLaVA-OneVision), and the only one that was also shown to trade tokens for ten times the frames.
FlashVID (ICLR 2026, arXiv 2602.08024) cuts a video where the cosine of the means of two
neighbouring frames is below 0.9, and further at the least similar neighbours until there are 8
segments. A fraction ``alpha`` of the budget is chosen frame by frame, max-min with distances
calibrated by the CLS row ``a`` (mean over heads) and by the similarity of a token to its segment,
whose frames f have means m_f::

    w_j = a_j mean over f of <x_j, m_f>      add argmax over j of  w_j min over chosen i of d(i, j)

with d = 1 - cos; the first by its nearest neighbour. Every other token is linked to the most
similar one in the previous frame, if their cosine is above 0.8 and no segment ends between them.
The linked trees become the means of their tokens, at the position of the first. If more trees are
left than the rest of the budget, the trees of each frame are clustered (density peaks over the 7
nearest; distances by sqrt(width)) in proportion to their number, and become the cluster means.

Different from the authors' code, and why:

- Kept tokens keep their rotary ids; with ``positions=compact`` they are renumbered, as theirs are.
- A video keeps exactly its budget; theirs rounds every frame and cluster up. If linking would leave
  fewer trees than the budget allows, only the most similar links are made.
- Each frame gets clusters in proportion to its number of trees.
- Its second part, a drop by attention in a deep layer of the language model, is a separate stage
  here: ``flashvid:...+fastv:k=20``.
- A single image is a video of one frame: tokens are chosen, and the rest is clustered.
- On vision towers without CLS, ``a`` is the attention that patches receive in the block that feeds
  the projector, pooled with the features, as on LLaVA-OneVision, LLaVA-Video and Qwen-VL there.
- ``w`` below 0 counts as 0. Newlines are dropped. With ``proportional_attention``, a token weighs
  as much as the tokens of its cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.params import param, proportional_attention_param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import VisionStats
from vlmfast.core.views import merged, token_saliency
from vlmfast.kernels.diversity import cosine, density_peaks, euclidean

from ..groups import together
from ..guard import Guarded
from ..select import apportion

NEIGHBOURS = 7
LARGE = 1e15  # bound of a score, whose product with a distance is finite


def segments(means: Tensor, threshold: float, least: int) -> Tensor:
    """Segment number of each frame, from the mean features (F, D): int64, (F,)."""
    units = normalize(means.float(), dim=-1)
    alike = (units[1:] * units[:-1]).sum(-1)
    cut = alike < threshold
    missing = least - 1 - int(cut.sum())
    if missing > 0:
        rest = alike.masked_fill(cut, torch.inf).sort(stable=True).indices[: int((~cut).sum())]
        cut = cut.index_fill(0, rest[:missing], True)
    return torch.cat([cut.new_zeros(1), cut]).cumsum(0)


def calibrated(similarity: Tensor, weight: Tensor, k: int) -> Tensor:
    """``k`` diverse rows of a similarity (N, N), distances weighted by (N,): int64, (k,)."""
    n = len(weight)
    if k == 0:
        return torch.arange(0, device=weight.device)
    distance = 1 - similarity
    own = torch.eye(n, dtype=torch.bool, device=weight.device)
    near = distance.masked_fill(own, torch.inf).amin(1) if n > 1 else weight
    chosen, barred = [], torch.zeros_like(weight)
    for i in range(k):
        score = near * weight + barred
        best = torch.where(score == score.max(), torch.arange(n, device=own.device), n).min()[None]
        chosen.append(best)
        barred = barred.index_fill(0, best, -torch.inf)
        row = distance.index_select(0, best)[0]
        near = row if i == 0 else torch.minimum(near, row)
    return torch.cat(chosen)


def means(rows: Tensor, group: Tensor) -> Tensor:
    """The mean of each row's group: (N, D)."""
    _, number, size = group.unique(return_inverse=True, return_counts=True)
    member = (number == torch.arange(len(size), device=number.device)[:, None]).float()
    return (member @ rows.float() / size[:, None])[number]


@dataclass(frozen=True)
class FlashVID(Guarded):
    """Keeps salient and diverse tokens of each frame, and merges the others along time."""

    name: ClassVar[str] = "flashvid"
    paper: ClassVar[str] = "ICLR 2026, arXiv 2602.08024"
    exact: ClassVar[bool] = True

    keep: float = param(0.1, "fraction of the visual tokens kept", gt=0.0, le=1.0)
    alpha: float = param(0.7, "fraction of these chosen rather than merged", gt=0.0, le=1.0)
    similarity: float = param(0.8, "cosine above which tokens of two frames are linked", ge=-1.0)
    segment: float = param(0.9, "cosine of two frames below which a segment ends", le=1.0)
    least: int = param(8, "minimum number of segments of a video", ge=1)
    proportional_attention: bool = proportional_attention_param(False)
    saliency: str = saliency_param()

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        return (self.guarded(SaliencyRequest("features", self.saliency)),)

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        if self.fraction == 1:
            return tokens
        attention = token_saliency(tokens, stats, *self.saliencies())
        parts = []
        for index in together(tokens, stats.items):
            k = self.count_of(len(index))
            index = index[tokens.layout.patches[index]]
            parts.append(self._video(tokens.select(index), attention[index], min(k, len(index))))
        levels = zip(*(part.extra for part in parts), strict=True)
        return VisualTokens(
            torch.cat([part.features for part in parts]),
            TokenLayout.cat([part.layout for part in parts]),
            tuple(torch.cat(level) for level in levels),
        )

    def _video(self, tokens: VisualTokens, attention: Tensor, total: int) -> VisualTokens:
        """``total`` tokens of one video or image."""
        rows, device = tokens.features.float(), tokens.features.device
        frames = [index for _, index in tokens.items()]
        middle = torch.stack([rows[index].mean(0) for index in frames])
        segment = segments(middle, self.segment, self.least)
        sizes = [len(index) for index in frames]

        chosen = torch.zeros(len(tokens), dtype=torch.bool, device=device)
        picks = apportion(max(1, round(self.alpha * total)), [1.0] * len(frames), sizes)
        for index, number, k in zip(frames, segment, picks, strict=True):
            event = (rows[index] @ middle[segment == number].T).mean(1)
            # A product that is not finite would give an index outside of the frame.
            weight = (attention[index] * event).nan_to_num(0.0).clamp(0, LARGE)
            chosen[index[calibrated(cosine(rows[index]), weight, k)]] = True

        parent, alike = self._links(rows, frames, segment, chosen)
        rest = total - int(chosen.sum())
        others = int((~chosen).sum())
        most = others - rest  # links that leave as many trees as the budget allows
        linked = alike > self.similarity
        if int(linked.sum()) > most:
            best = alike.sort(descending=True, stable=True).indices[:most]
            linked = torch.zeros_like(linked).index_fill(0, best, True)
        own = torch.arange(len(tokens), device=device)
        root = torch.where(linked, parent, own)
        for _ in frames:  # a parent is one frame earlier
            root = root[root]
        home = self._clusters(means(rows, root), frames, (root == own) & ~chosen, rest, own)[root]

        def combine(features: Tensor, home: Tensor) -> Tensor:
            trees = means(features, root)
            here = (root == own) & (home >= 0)
            new = features.clone()
            new[here] = means(trees[here], home[here]).to(features.dtype)
            # A token that is not merged stays bit-identical.
            alone = torch.bincount(home[home >= 0], minlength=len(own)) == 1
            return torch.where(alone[:, None], features, new)

        return merged(tokens, home, combine, own[:0], tokens.features[:0])

    def _links(
        self, rows: Tensor, frames: list[Tensor], segment: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The most similar token in the previous frame of each token, and their cosine."""
        units = normalize(rows, dim=-1).nan_to_num(0.0)
        parent = torch.arange(len(rows), device=rows.device)
        alike = torch.full((len(rows),), -torch.inf, device=rows.device)
        for number in range(1, len(frames)):
            before, here = (index[~chosen[index]] for index in frames[number - 1 : number + 1])
            if segment[number - 1] == segment[number] and len(before) and len(here):
                cos = units[here] @ units[before].T
                alike[here] = cos.amax(1)
                parent[here] = before[(cos == cos.amax(1, keepdim=True)).int().argmax(1)]
        return parent, alike

    def _clusters(
        self, trees: Tensor, frames: list[Tensor], roots: Tensor, rest: int, own: Tensor
    ) -> Tensor:
        """The root that each root merges into so that ``rest`` are left, -1 if dropped."""
        home, found = own, [index[roots[index]] for index in frames]
        counts = [len(index) for index in found]
        for index, k in zip(
            found, apportion(rest, [float(n) for n in counts], counts), strict=True
        ):
            if k == 0:
                home = home.index_fill(0, index, -1)
            elif k < len(index):
                distance = euclidean(trees[index])
                centres, label = density_peaks(distance, k, min(k, NEIGHBOURS))
                home = home.index_copy(0, index, index[centres[label]])
        return home
