"""FastKV: few tokens in the deeper layers, and few slots in the cache of every layer.

Deep layers agree about which tokens matter. FastKV (arXiv 2502.01068, third version; the first two
describe other schemes) runs the layers up to one in the middle, the TSP layer, on the whole prompt
of N rows. After it only ``max(int(tsp N), int(keep N))`` rows are kept (token-selective
propagation), which makes the prefill cheaper. Every layer stores the same ``int(keep N)`` slots,
whether it saw the whole prompt or only the kept rows. Both selections are made by the last ``w``
rows. With ``P`` the causal attention of a layer in query head h, for ``j < N - w``::

    s[h, j] = sum over the last w rows i of P[h, i, j]
    z[h]    = pool(s[h])                                average of 7, zeros beyond both ends
    slots     the window and the best by sum of z over the heads of a KV head
    rows      the window and the best by sum of z over all heads        in the TSP layer

Kept rows keep their rotary ids.

Different from the authors' code, and why:

- All text is kept; only visual tokens are dropped. Text is what the user wrote, and a prompt has
  little of it. So ``tsp`` must leave enough rows for the text; otherwise it is an error.
- At least as many rows are kept as each layer stores slots, so ``keep=1`` leaves the model
  unchanged. The authors' ``tsp`` is independent of ``keep``.
- Layers after the TSP layer keep ``keep`` divided by the fraction of kept rows, as the authors' do
  with ``tsp``; counts are taken from the rows actually kept.
- Any depth: a ``layer`` below 1 is a fraction of the model's depth (16 layers of 32 see the whole
  prompt).
- One row window of attention is computed from queries and keys for each of both selections. Ties go
  to the lower index, kept slots keep the order of the prompt, arithmetic is float32.
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
from vlmfast.kernels.select import top_k

from ..budget import check_layers, drop_layers
from ..evictor import kept_param
from ..part import Part
from .snapkv import ROWS, SnapKV, votes


@dataclass(frozen=True)
class FastKV(SnapKV):
    """Keeps few tokens in the second half of the model, and few slots in every layer."""

    name: ClassVar[str] = "fastkv"
    paper: ClassVar[str] = "arXiv 2502.01068"
    tier: ClassVar[str] = "experimental"
    # Not annotated: it is no parameter, but the parts read it.
    positions = "keep"

    keep: float = kept_param(0.1)
    window: float = param(
        8.0, "last slots, which vote and are kept; below 1 a fraction of the kept slots", gt=0.0
    )
    pool: str = param("avg", "how neighbours are pooled", choices=("max", "avg"))
    agg: str = param(
        "sum",
        "how the votes of the query heads of one KV head are combined",
        choices=("mean", "max", "sum"),
    )
    tsp: float = param(0.2, "fraction of the prompt's rows kept after layer", gt=0.0, le=1.0)
    layer: float = param(
        0.5, "layers that see the whole prompt; below 1 a fraction of the model's depth", gt=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers(self.name, (self.layer,))

    def expand(self) -> tuple[Stage, ...]:
        return (Propagation(self), self)

    def floor(self, depth: int) -> float:
        return self.cut(depth) / depth

    def cut(self, depth: int) -> int:
        """Number of layers that see the whole prompt."""
        return drop_layers(self.name, (self.layer,), depth)[0]

    def capacity(self, context: PrefillContext, layer: int, n: int) -> int:
        before, left = context.notes.get(self.name, {}).get("rows", (1, 1))
        if layer < self.cut(context.depth):
            before = left
        return int(self.keep * (n * before / left))


@dataclass(frozen=True)
class Propagation(Part, PrefillStage):
    """Selects the rows kept after the TSP layer."""

    name: ClassVar[str] = FastKV.name

    def layers(self, depth: int) -> tuple[int, ...]:
        return (self.of.cut(depth),)

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        rows = int(self.of.window) if self.of.window >= 1 else ROWS
        return {self.of.cut(depth) - 1: StatRequest("window", n=rows)}

    def select_tokens(self, context: PrefillContext, layer: int) -> Tensor | None:
        visual, n = context.layout.visual, len(context.layout)
        count = max(int(self.of.tsp * n), int(self.of.keep * n))
        window = self.of.last(count)
        before = torch.arange(n, device=visual.device) < n - window
        must = n - sum(context.visual()[: max(n - window, 0)])
        count = max(count, must)
        if count == n:
            return None
        received = context.stats[layer - 1].sum(1)[None]  # one selection for all heads
        score = votes(received, before, self.of.agg, self.of.kernel, self.of.pool)[0]
        context.notes.setdefault(self.name, {})["rows"] = (n, count)
        return top_k(score, count, ~visual | ~before)
