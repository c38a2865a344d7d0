"""crops: encode the whole view of an image first, and then only the crops that have content.

High-resolution models encode a small view of the whole image and crops of it. Reducers drop most of
the crops' tokens after the vision tower has computed all of them, so the fewer tokens they keep,
the larger is the tower's part of the time to the first token. Most of what decides how many tokens
a crop keeps is known before the crop is encoded: HiRED (AAAI 2025, arXiv 2408.10945) gives it a
budget in proportion to its *content*, which it reads from the whole view alone. This method reads
the content at that point and leaves the tower out of crops with little of it.

With ``a_j`` the saliency of patch j of the whole view in the first block, sum over heads (attention
of CLS, or attention received where the tower has no CLS), and ``R_i`` the patches whose center lies
in the area of crop i, of ``C``::

    s_i = sum over j in R_i of a_j / sum over j of a_j
    k   = round(keep C)
    m   = the smallest number of crops whose s_i sum to at least cover
    encode the min(k, m) crops with the largest s_i

The encoded crops keep their tokens, at their positions. All tokens of other crops are dropped, and
so is the newline of a row of the stitched crops in which no token is left. An image has one forward
pass of ``1`` view and another one of ``min(k, m)`` views, instead of one pass of ``1 + C``: tower,
projector and prefill cost nothing for the other crops. With ``keep=0`` the whole view is left, and
with ``keep=1`` and ``cover=1`` nothing is changed. Reducers may follow; HiRED's ``budget`` is then
divided among the encoded crops alone.

What the rule loses: let ``B_i = s_i B`` be HiRED's budget of crop i. After HiRED alone the prompt
has ``sum over i of B_i`` tokens of crops. Without the crops of least content it loses those with
the smallest ``B_i``; their part of the budget, ``1 - sum over encoded i of s_i``, goes to crops
with more content. ``cover`` bounds that part: at ``cover=0.9`` at most a tenth of the content is in
crops that are not encoded.

Nearest work: GlobalCom2 (AAAI 2026, arXiv 2501.05179) also lets the whole view guide the crops, but
by how many tokens each of them keeps after it was encoded. AwaRes (arXiv 2603.16932) trains a model
to request crops by tool calls, after it has read the whole view and the question. CARES (arXiv
2510.19496) trains a small model to choose the resolution of the whole image. Here nothing is
trained, the question is not read, so that a session can share the images, and the decision costs a
sum over the patches of one view.

- Ties go to the lower index.
- A family may place its crops on a canvas with a border. The area of a crop is its part of the
  canvas, as in HiRED.
- Frames of a video that have crops are images like others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.params import param, positions_param
from vlmfast.core.protocols import ViewStage
from vlmfast.core.saliency import BLOCKS, Saliency, SaliencyRequest
from vlmfast.core.statistics import ItemGeometry

from ..tokens.hired import content_by_area


def worth_encoding(content: Tensor, keep: float, cover: float) -> list[int]:
    """The crops that are encoded, ascending.

    Parameters
    ----------
    content : Tensor, float64, (C,)
        Not negative. Where it is 0 everywhere, all crops count the same.
    keep, cover : float
    """
    share = content / content.sum()
    if not bool(share.isfinite().all()):
        share = torch.full_like(content, 1 / len(content))
    order = share.sort(descending=True, stable=True)
    k = round(keep * len(content))
    if cover < 1:
        k = min(k, int((order.values.cumsum(0) < cover).sum()) + (cover > 0))
    return sorted(order.indices[:k].tolist())


@dataclass(frozen=True)
class Crops(ViewStage):
    """Encodes the whole view first, and only those crops in which it finds content."""

    name: ClassVar[str] = "crops"
    paper: ClassVar[str] = "ours, after AAAI 2025, arXiv 2408.10945"
    lead: ClassVar[str | None] = "keep"

    keep: float = param(0.5, "fraction of an image's crops that are encoded", ge=0.0, le=1.0)
    cover: float = param(
        1.0,
        "fraction of the content that encoded crops need not exceed; 1: no limit",
        ge=0.0,
        le=1.0,
    )
    block: str = param(
        "first",
        "block of the vision tower whose saliency is the content: the first, the one whose output "
        "is used, or the last",
        choices=BLOCKS,
    )
    saliency: str = param(
        "auto",
        "source of saliency: attention of CLS or attention received; auto: the first of these that "
        "the vision tower has",
        choices=("auto", "cls", "received"),
    )
    positions: str = positions_param()

    @property
    def chooses_crops(self) -> bool:
        """Whether any crop may be left out."""
        return self.keep < 1 or self.cover < 1

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        return (SaliencyRequest(self.block, self.saliency),)

    def crops(self, geometry: ItemGeometry, saliency: tuple[Saliency, ...]) -> list[int]:
        content = saliency[0].rows[0].sum(0).cpu()
        found = content_by_area(content, geometry.patches, geometry.tiles)
        return worth_encoding(found, self.keep, self.cover)
