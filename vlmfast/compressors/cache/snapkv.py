"""SnapKV: keep the keys that the end of the prompt attends to.

The answer attends to the same keys as the last tokens of the prompt. SnapKV (NeurIPS 2024, arXiv
2404.14469) lets the last ``w`` rows of each layer, its observation window, vote on all keys before
them, smooths the votes so that neighbours of a selected key are kept with it, and keeps the window
and the best of the rest. With ``P`` the layer's causal attention, for ``j < N - w``::

    s[h, j] = sum over the last w rows i of P[h, i, j]
    z[h]    = pool(s[h])                    1-D, odd kernel, stride 1, zeros beyond both ends
    keep      the window and the int(keep N) - w largest of z[h]

Different from the authors' code, and why:

- Query heads that share a KV head vote together (``agg``: their mean) before pooling, and each KV
  head is stored once. The authors repeat the keys for each query head first, which makes the cache
  of a grouped-query model larger than an uncompressed one.
- The budget is a fraction of the prompt. The authors keep a fixed number of slots; with N slots,
  ``keep = capacity / N`` is the same.
- A ``window`` below 1 is a fraction of the kept slots, as in ports to vision-language models (0.1).
  Then the last 32 rows vote, since the tenth of a short prompt's budget is hardly a row. The
  default is the paper's number; a fraction that leaves no more than the window is an error.
- Softmax, sums and pooling are float32 throughout; ties go to the lower index; kept slots keep the
  order of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.errors import RecipeError

from ..evictor import Evictor, per_kv_head, pooled

ROWS = 32  # rows that vote if the window is a fraction


def votes(received: Tensor, ranked: Tensor, agg: str, kernel: int, pool: str) -> Tensor:
    """Score of each slot.

    Parameters
    ----------
    received : Tensor, float32, (H, G, N)
        Attention that each key received from the rows that vote.
    ranked : Tensor, bool, (H, N)
        Slots before the window; others are excluded from pooling.

    Returns
    -------
    Tensor, float32, (H, N)
    """
    return pooled(per_kv_head(received, agg) * ranked, kernel, pool)


@dataclass(frozen=True)
class SnapKV(Evictor):
    """Keeps the keys that the end of the prompt attends to, and their neighbours."""

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "NeurIPS 2024, arXiv 2404.14469"
    tier: ClassVar[str] = "baseline"
    query_dependent: ClassVar[bool] = True

    window: float = param(
        32.0, "last slots, which vote and are kept; below 1 a fraction of the kept slots", gt=0.0
    )
    kernel: int = param(7, "width of the pooling kernel, an odd number", ge=1, le=65535)
    pool: str = param("max", "how neighbours are pooled", choices=("max", "avg"))
    agg: str = param(
        "mean",
        "how the votes of the query heads of one KV head are combined",
        choices=("mean", "max", "sum"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise RecipeError(f"{self.name}: kernel={self.kernel} is even; it must be odd")
        if self.window > 1 and self.window % 1 != 0:  # infinite: NaN
            raise RecipeError(
                f"{self.name}: window={self.window:g} must be a whole number, or a fraction below 1"
            )

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        rows = int(self.window) if self.window >= 1 else ROWS
        return dict.fromkeys(range(depth), ColumnRequest("window", rows))

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        assert stats is not None and stats.sum is not None
        return votes(stats.sum, ranked, self.agg, self.kernel, self.pool)
