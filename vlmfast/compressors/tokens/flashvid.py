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
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import TokenLayout, VisualTokens, marked_rows
from vlmfast.core.params import param, proportional_attention_param, saliency_param
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import VisionStats
from vlmfast.core.views import merged, token_saliency
from vlmfast.kernels.diversity import cosine, density_peaks, euclidean

from ..groups import groups_of
from ..guard import Guarded
from ..select import apportion

NEIGHBOURS = 7
LARGE = 1e15  # bound of a score, whose product with a distance is finite


def segments(means: Tensor, threshold: float, least: int) -> list[int]:
    """Segment number of each of F frames, from the mean features (F, D)."""
    if len(means) == 1:
        return [0]
    units = normalize(means.float(), dim=-1)
    alike = (units[1:] * units[:-1]).sum(-1)
    below = alike < threshold
    order = alike.masked_fill(below, torch.inf).sort(stable=True).indices
    cut, rest = torch.stack([below.long(), order]).tolist()  # the only read
    whole = len(cut) - sum(cut)
    for at in rest[: max(min(least - 1 - sum(cut), whole), 0)]:
        cut[at] = 1
    return list(accumulate([0, *cut]))


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


def means(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """The mean of each row's group, of ``count``, from 0: (N, D)."""
    member = (group == torch.arange(count, device=group.device)[:, None]).float()
    return (member @ rows.float() / member.sum(1, keepdim=True))[group]


@dataclass(frozen=True)
class FlashVID(Guarded):
    """Keeps salient and diverse tokens of each frame, and merges the others along time."""

    name: ClassVar[str] = "flashvid"
    paper: ClassVar[str] = "ICLR 2026, arXiv 2602.08024"
    tier: ClassVar[str] = "core"
    exact: ClassVar[bool] = True
    joins_frames = True

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
        for group in groups_of(tokens, stats.items):
            k, index = self.count_of(len(group)), group.patches()
            parts.append(self._video(group.select(), attention[index], min(k, len(index))))
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
            first = segment.index(number)
            event = (rows[index] @ middle[first : first + segment.count(number)].T).mean(1)
            # A product that is not finite would give an index outside of the frame.
            weight = (attention[index] * event).nan_to_num(0.0).clamp(0, LARGE)
            chosen[index[calibrated(cosine(rows[index]), weight, k)]] = True

        others = [
            index[marked_rows(~chosen[index], n - k)]
            for index, n, k in zip(frames, sizes, picks, strict=True)
        ]
        parent, alike = self._links(rows, others, segment)
        most = len(tokens) - total  # links that leave as many trees as the budget allows
        best = alike.sort(descending=True, stable=True).indices[:most]
        linked = torch.zeros_like(chosen).index_fill(0, best, True) & (alike > self.similarity)
        own = torch.arange(len(tokens), device=device)
        root = torch.where(linked, parent, own)
        for _ in frames:  # a parent is one frame earlier
            root = root[root]
        is_root, counts = root == own, [len(index) for index in others]
        if len(frames) > 1:
            counts = torch.stack([is_root[index].sum() for index in others]).tolist()
        roots = [
            index[marked_rows(is_root[index], n)] for index, n in zip(others, counts, strict=True)
        ]
        trees, tree = sum(picks) + sum(counts), (is_root.cumsum(0) - 1)[root]
        left = apportion(total - sum(picks), [float(n) for n in counts], counts)
        home = self._clusters(means(rows, tree, trees), roots, left, own)[root]
        kept = sum(picks) + sum(left)
        dropped = sum(n for n, k in zip(counts, left, strict=True) if not k)

        def combine(features: Tensor, home: Tensor) -> Tensor:
            here = marked_rows(is_root & (home >= 0), trees - dropped)
            cluster = ((home == own).cumsum(0) - 1)[home[here]]
            new = features.clone()
            of = means(features, tree, trees)[here]
            new[here] = means(of, cluster, kept).to(features.dtype)
            # A token that is not merged stays bit-identical.
            size = torch.zeros_like(own).index_add(0, home.clamp(min=0), (home >= 0).long())
            return torch.where((size == 1)[:, None], features, new)

        return merged(tokens, home, combine, own[:0], tokens.features[:0], kept)

    def _links(
        self, rows: Tensor, frames: list[Tensor], segment: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The most similar token in the previous frame of each of ``frames``, and their cosine."""
        units = normalize(rows, dim=-1).nan_to_num(0.0)
        parent = torch.arange(len(rows), device=rows.device)
        alike = torch.full((len(rows),), -torch.inf, device=rows.device)
        for number in range(1, len(frames)):
            before, here = frames[number - 1 : number + 1]
            if segment[number - 1] == segment[number] and len(before) and len(here):
                cos = units[here] @ units[before].T
                alike[here] = cos.amax(1)
                parent[here] = before[(cos == cos.amax(1, keepdim=True)).int().argmax(1)]
        return parent, alike

    def _clusters(
        self, trees: Tensor, roots: list[Tensor], left: list[int], home: Tensor
    ) -> Tensor:
        """The root that each root merges into so that ``left`` are left of each frame.

        -1 if it is dropped; ``home`` where it merges into none.
        """
        for index, k in zip(roots, left, strict=True):
            if k == 0:
                home = home.index_fill(0, index, -1)
            elif k < len(index):
                distance = euclidean(trees[index])
                centres, label = density_peaks(distance, k, min(k, NEIGHBOURS))
                home = home.index_copy(0, index, index[centres[label]])
        return home
