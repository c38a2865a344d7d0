"""Cases in the format of golden files for options that no stored file has.

Each maker is a second implementation, written from the equations in loops over heads and rows and
in double precision. Where a reference ranks in the precision of its inputs, the last sums are
rounded to ``dtype``. Inputs are seeded, with a few heavy columns, so that choices are well apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Case = tuple[dict[str, Tensor], dict[str, str]]


def words(**values: Any) -> dict[str, str]:
    """Parameters as files store them."""
    return {name: str(value) for name, value in values.items()}


def qkv(
    seed: int, heads: int, groups: int, n: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (heads * groups, n, dim), keys and values (heads, n, dim) of ``dtype``."""
    random = torch.Generator().manual_seed(seed)

    def normal(h: int) -> Tensor:
        return torch.randn(h, n, dim, generator=random)

    q, k, v = normal(heads * groups), normal(heads), normal(heads)
    heavy = torch.randperm(n, generator=random)[: n // 4]
    k[:, heavy] += 1.5 * q.mean((0, 1)) + torch.randn(n // 4, 1, generator=random)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attention(q: Tensor, k: Tensor, rows: int | None = None) -> Tensor:
    """Causal probabilities of the last ``rows`` of n rows, float64, (Hq, rows, n)."""
    hq, n = len(q), k.shape[1]
    rows = n if rows is None else rows
    q = q[:, -rows:].double()
    out = torch.zeros(hq, rows, n, dtype=torch.float64)
    for h in range(hq):
        keys = k[h // (hq // len(k))].double()
        for i in range(rows):
            seen = n - rows + i + 1
            out[h, i, :seen] = (keys[:seen] @ q[h, i] / math.sqrt(k.shape[2])).softmax(0)
    return out


def grouped(score: Tensor, heads: int, agg: str) -> Tensor:
    """Scores of query heads (Hq, n) to those of KV heads (H, n)."""
    per_head = score.unflatten(0, (heads, -1))
    return per_head.amax(1) if agg == "max" else getattr(per_head, agg)(1)


def evicted(
    kind: str, *, agg: str, pooling: str, dtype: torch.dtype, batch: int = 1, seed: int = 0
) -> Case:
    """SnapKV's (``kind="snapkv"``) or H2O's choice from a prompt, per sequence of the batch."""
    n, window, capacity, kernel, heads = 72, 8, 26, 5, 2
    columns: dict[str, list[Tensor]] = {name: [] for name in ("q", "k", "v", "kept")}
    for at in range(batch):
        q, k, v = qkv(seed + at, heads, 3, n, 16, dtype)
        p = attention(q, k, window if kind == "snapkv" else None).to(dtype)
        score = grouped(p.sum(1)[:, : n - window], heads, agg)
        if kind == "snapkv":
            score = smoothed(score, kernel, pooling)
        best = score.sort(dim=1, descending=True, stable=True).indices[:, : capacity - window]
        last = torch.arange(n - window, n).expand(heads, -1)
        for name, value in (("q", q), ("k", k), ("v", v), ("kept", torch.cat([best, last], 1))):
            columns[name].append(value)
    data = {name: torch.stack(values) for name, values in columns.items()}
    index = data["kept"][..., None].expand(-1, -1, -1, 16)
    data |= {f"{name}_out": data[name].gather(2, index) for name in "kv"}
    meta = words(
        window=window, capacity=capacity, kernel=kernel, pooling=pooling, gqa_score_agg=agg
    )
    return data, meta


def smoothed(score: Tensor, kernel: int, pooling: str) -> Tensor:
    """Average, or maximum, of each score (H, n) and its neighbours; zeros beyond both ends."""
    reach, n = kernel // 2, score.shape[1]
    out = torch.zeros_like(score)
    for j in range(n):
        near = score[:, max(j - reach, 0) : j + reach + 1]
        out[:, j] = near.amax(1) if pooling == "maxpool" else near.sum(1) / kernel
    return out


def prumerge(*, adaptive: bool, plus: bool, views: int = 1, ratio: float = 0.125) -> Case:
    """Outliers (or a fixed share) of CLS attention, the even grid, neighbours and the rest."""
    side, width = 12, 32
    n = side * side
    random = torch.Generator().manual_seed(7)
    q, k, x = (torch.randn(views, 1 + n, width, generator=random) for _ in range(3))
    heavy = torch.randperm(n, generator=random)[:9] + 1
    k[:, heavy] += 1.2 * q[:, :1]
    a = torch.stack(
        [(k[v].double() @ q[v, 0].double() / math.sqrt(width)).softmax(0)[1:] for v in range(views)]
    )
    if adaptive:
        flat = a.flatten().sort().values
        low, high = (quantile(flat, at) for at in (0.25, 0.75))
        ratio = int((flat > high + 1.5 * (high - low)).sum()) / len(flat)
    count, step = int(n * ratio), int(1 / ratio)
    index, out = [], []
    for view in range(views):
        best = a[view].sort(descending=True, stable=True).indices[:count].tolist()
        index.append(torch.tensor(best))
        if plus:
            even = range(0, n - 1, step // 3) if adaptive else range(step // 2, n - 1, step)
            best += [j for j in even if not (adaptive and j in best)]
        out.append(merged(a[view], k[view, 1:], x[view, 1:], best))
    data = {
        "q_layer23": q,
        "k_layer23": k,
        "features_penultimate": x,
        "cls_attn": a.float(),
        "topk_index": torch.stack(index),
        "out": torch.stack(out).float(),
        "adaptive": torch.tensor(int(adaptive)),
        "plus": torch.tensor(int(plus)),
    }
    return data | ({} if adaptive else {"reduction_ratio": torch.tensor(ratio).double()}), {}


def quantile(ascending: Tensor, at: float) -> float:
    """Linear interpolation between the two entries nearest to a quantile."""
    place = at * (len(ascending) - 1)
    low = int(place)
    return float(ascending[low] + (place - low) * (ascending[low + 1] - ascending[low]))


def merged(a: Tensor, keys: Tensor, x: Tensor, kept: list[int]) -> Tensor:
    """PruMerge's rows of one view: each kept patch and its 32 nearest, and one for the dropped."""
    keys, x = keys.double(), x.double()
    keys = keys / keys.norm(dim=1, keepdim=True)
    n, out = len(a), []
    gone = [j for j in range(n) if j not in kept]
    # A patch that is chosen twice occurs twice among the rows, and as many dropped ones are lost.
    rows = kept + gone[len(kept) - len(set(kept)) :]
    for at, j in enumerate(kept):
        alike = keys[rows] @ keys[j]
        alike[at] = -math.inf
        near = alike.sort(descending=True, stable=True).indices[:32].tolist()
        out.append(x[j] + sum(a[rows[m]] * x[rows[m]] for m in near))
    out.append(sum(a[j] * x[j] for j in rows[len(kept) :]))
    return torch.stack(out)
