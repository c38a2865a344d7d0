"""FastKV: in the middle of the model few tokens go on, and every layer keeps few of what it sees.

Deep layers agree about which tokens matter. FastKV (arXiv 2502.01068, third version; the first two
describe other schemes) lets layers up to one in the middle, the TSP layer, read the whole prompt of
N rows. Behind it only ``max(int(tsp N), int(share N))`` rows go on (token-selective propagation),
which makes the prefill cheaper. Every layer stores the same ``int(share N)`` slots, whether it saw
the whole prompt or what was left of it. Both choices are made by the last ``w`` rows. With ``P``
the causal attention of a layer in query head h, for ``j < N - w``::

    s[h, j] = sum over the last w rows i of P[h, i, j]
    z[h]    = pool(s[h])                                average of 7, zeros beyond both ends
    slots     the window and the best by sum of z over the heads of a KV head
    rows      the window and the best by sum of z over all heads        in the TSP layer

Rows that go on keep their rotary ids.

Different from the authors' code, and why:

- All text goes on; only visual tokens are dropped. Text is what the user wrote, and a prompt has
  little of it. So ``tsp`` must leave room for the text: a share that does not is an error.
- At least as many rows go on as each layer keeps slots, so ``share=1`` leaves the model as it is.
  The authors' ``tsp`` does not know ``share``.
- Layers behind the TSP layer keep ``share`` divided by the part of the rows that is left, as the
  authors' do with ``tsp``; counts are taken from what really went on.
- Any depth: a ``layer`` below 1 is a share of the model's depth (16 layers of 32 read everything).
- One row window of attention is computed from queries and keys for each of both choices. Ties go to
  the lower index, kept slots stay in the order of the prompt, arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.params import param
from vlmfast.core.protocols import PrefillStage
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import StatRequest
from vlmfast.errors import RecipeError
from vlmfast.kernels.select import top_k

from ..budget import check_layers, drop_layers
from ..evictor import least_share
from ..part import Part
from .snapkv import ROWS, SnapKV, votes


@dataclass(frozen=True)
class FastKV(SnapKV):
    """Lets few tokens into the second half of the model, and keeps few slots in every layer."""

    name: ClassVar[str] = "fastkv"
    paper: ClassVar[str] = "arXiv 2502.01068"
    # Not annotated: it is no parameter, but the parts read it.
    positions = "keep"

    share: float = param(
        0.1, "share of the prompt's keys and values that stays in each layer", gt=0.0, le=1.0
    )
    window: float = param(
        8.0, "last slots, which vote and stay; a value below 1 is a share of what stays", gt=0.0
    )
    pool: str = param("avg", "how neighbours are pooled", choices=("max", "avg"))
    agg: str = param(
        "sum", "what query heads of one KV head make of their votes", choices=("mean", "max", "sum")
    )
    tsp: float = param(0.2, "share of the prompt's rows that goes on", gt=0.0, le=1.0)
    layer: float = param(
        0.5, "layers that read everything; a value below 1 is a share of the model's depth", gt=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, (self.layer,))

    def expand(self) -> tuple[Stage, ...]:
        return (Propagation(self), self)

    def floor(self, depth: int) -> float:
        return self.cut(depth) / depth

    def cut(self, depth: int) -> int:
        """Layers that read everything."""
        return drop_layers(self.name, (self.layer,), depth)[0]

    def capacity(self, context: PrefillContext, layer: int, n: int) -> int:
        before, left = context.notes.get(self.name, {}).get("rows", (1, 1))
        if layer < self.cut(context.depth):
            before = left
        return int(self.share * (n * before / left))


@dataclass(frozen=True)
class Propagation(Part, PrefillStage):
    """Which rows go on behind the TSP layer."""

    name: ClassVar[str] = FastKV.name

    def layers(self, depth: int) -> tuple[int, ...]:
        return (self.of.cut(depth),)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        rows = int(self.of.window) if self.of.window >= 1 else ROWS
        return {self.of.cut(depth) - 1: StatRequest("window", n=rows)}

    def keep(self, context: PrefillContext, layer: int) -> Tensor | None:
        visual, n = context.layout.visual, len(context.layout)
        count = max(int(self.of.tsp * n), int(self.of.share * n))
        window = self.of.last(count)
        before = torch.arange(n, device=visual.device) < n - window
        must = int((~visual | ~before).sum())
        if count == n or must == n:
            return None
        if count < must:
            raise RecipeError(
                f"fastkv: tsp={self.of.tsp:g} lets {count} of {n} rows go on into layer {layer}, "
                f"fewer than the {must} that are text or the window of {window}; it must be at "
                f"least {least_share(must, n):g}"
            )
        received = context.stats[layer - 1].sum(1)[None]  # all heads choose together
        score = votes(received, before, self.of.agg, self.of.kernel, self.of.pool)[0]
        context.notes.setdefault(self.name, {})["rows"] = (n, count)
        return top_k(score, count, ~visual | ~before)
