"""``pool``: the ways to shorten the rows of a picture, without a copy of each row for each use.

`cell_average`: equal cells of a grid, each the mean of its rows, weighted::

    out_c = sum over t in c of w_t x_t / sum over t in c of w_t

`cell_mix`: a strided depthwise convolution whose kernel depends on what it covers; head ``i``
weights its own share of the features::

    a_cti = softmax over t in c of score_ti           out_ci = sum over t in c of a_cti x_ti

`resample`: few learned queries, each at a place of the picture, read all rows::

    a_iqt = softmax over t of (q_qi . k_ti / sqrt(d) + bias_t - pull_i |place_t - at_q|^2)
    out_qi = sum over t of a_iqt x_ti               share_qt = mean over i of a_iqt

Shapes: rows (N, D), N rows in C cells of at most m rows or read by Q queries, H heads. Grids: one
program per cell and 256 features (of one head); `resample` one per 16 queries, head and 128
features, walking over the rows 32 at a time, then one per 16 queries and 64 rows for ``share``.
Bytes: rows once, what comes out once: in float32 at 2,928 rows of 4,096 in 732 cells 60 MB, 14 us
at 4.3 TB/s; `resample` reads rows once for each 16 queries, mostly from the second-level cache.
Floor of `resample`: 2 Q N (D + H d) operations in float32, 1.9e9 for 80 queries there, 31 us at
62e12 per second. No gradients: the references serve where one is wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, padded, pointer, tl, triton, use_triton


def cell_average(rows: Tensor, weight: Tensor, table: Tensor, there: Tensor) -> Tensor:
    """Weighted mean of the rows of each cell.

    Parameters
    ----------
    rows : Tensor, (N, D)
    weight : Tensor, float32, (N,)
    table : Tensor, int64, (C, m)
        Rows of each cell.
    there : Tensor, bool, (C, m)
        Which entries of the table are more than padding; in every cell at least one.

    Returns
    -------
    Tensor, (C, D)
        In the dtype of the rows, computed in float32.
    """
    _check_cells("cell_average", rows, table, there)
    if weight.shape != rows.shape[:1]:
        raise VLMFastError(
            f"cell_average: {len(rows)} rows and weights {tuple(weight.shape)}; it takes one each"
        )
    if use_triton("cell_average", rows, weight, table, there) and not _learning(rows, weight):
        return _launch_average(rows, weight, table, there)
    return cell_average_ref(rows, weight, table, there)


def cell_average_ref(rows: Tensor, weight: Tensor, table: Tensor, there: Tensor) -> Tensor:
    """`cell_average` in plain PyTorch."""
    mass = there * weight[table]
    share = mass / mass.sum(1, keepdim=True)
    return (rows.float()[table] * share[..., None]).sum(-2).to(rows.dtype)


def cell_mix(rows: Tensor, score: Tensor, table: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of each cell, weighted by a softmax of their scores, by each head its own features.

    Parameters
    ----------
    rows : Tensor, float32, (N, D)
    score : Tensor, float32, (N, H)
        H a divisor of D.
    table, there : Tensor, (C, m)
        As in `cell_average`.

    Returns
    -------
    mixed : Tensor, float32, (C, D)
    share : Tensor, float32, (C, m, H)
        Zero in padding.
    """
    _check_cells("cell_mix", rows, table, there)
    heads = score.shape[-1]
    if score.shape != (len(rows), heads) or not heads or rows.shape[1] % heads:
        raise VLMFastError(
            f"cell_mix: rows {tuple(rows.shape)} and scores {tuple(score.shape)}; it takes (N, D) "
            "and (N, H), H a divisor of D"
        )
    _check_float("cell_mix", rows, score)
    if use_triton("cell_mix", rows, score, table, there) and not _learning(rows, score):
        return _launch_mix(rows, score, table, there)
    return cell_mix_ref(rows, score, table, there)


def cell_mix_ref(
    rows: Tensor, score: Tensor, table: Tensor, there: Tensor
) -> tuple[Tensor, Tensor]:
    """`cell_mix` in plain PyTorch."""
    share = score[table].masked_fill(~there[..., None], -torch.inf).softmax(-2)
    parts = rows[table].unflatten(-1, (score.shape[1], -1))
    return (share[..., None] * parts).sum(-3).flatten(-2), share


def resample(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    bias: Tensor,
    at: Tensor,
    place: Tensor,
    pull: Tensor,
) -> tuple[Tensor, Tensor]:
    """What few queries read of many rows, each most of what is near to it.

    Parameters
    ----------
    query : Tensor, float32, (Q, H, d)
    key : Tensor, float32, (N, H, d)
    rows : Tensor, float32, (N, D)
        H a divisor of D.
    bias : Tensor, float32, (N,)
        Added to the logits of each row; the logarithm of what it stands for.
    at : Tensor, float32, (Q, 2)
    place : Tensor, float32, (N, 2)
    pull : Tensor, float32, (H,)
        How fast attention falls with the squared distance.

    Returns
    -------
    out : Tensor, float32, (Q, D)
    share : Tensor, float32, (Q, N)
        Attention, mean over heads.
    """
    (q, h, d), n = query.shape, len(rows)
    right = (
        key.shape == (n, h, d)
        and bias.shape == (n,)
        and at.shape == (q, 2)
        and place.shape == (n, 2)
        and pull.shape == (h,)
    )
    if not right or not q or not n or not h or rows.shape[1] % h:
        tensors = {"query": query, "key": key, "rows": rows, "bias": bias, "at": at}
        tensors |= {"place": place, "pull": pull}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise VLMFastError(
            f"resample: {shapes}; it takes (Q, H, d), (N, H, d), (N, D), (N,), (Q, 2), (N, 2) and "
            "(H,), none empty, H a divisor of D"
        )
    every = (query, key, rows, bias, at, place, pull)
    _check_float("resample", *every)
    if use_triton("resample", *every) and not _learning(*every):
        return _launch_resample(*every)
    return resample_ref(*every)


def resample_ref(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    bias: Tensor,
    at: Tensor,
    place: Tensor,
    pull: Tensor,
) -> tuple[Tensor, Tensor]:
    """`resample` in plain PyTorch."""
    score = torch.einsum("qhd,thd->hqt", query, key) / query.shape[-1] ** 0.5
    far = (at[:, None] - place).square().sum(-1) * pull[:, None, None]
    attention = (bias - far + score).softmax(-1)
    parts = rows.unflatten(-1, (len(pull), -1))
    out = torch.einsum("hqt,thd->qhd", attention, parts).flatten(-2)
    return out, attention.mean(0)


def _check_cells(name: str, rows: Tensor, table: Tensor, there: Tensor) -> None:
    if rows.dim() != 2 or table.dim() != 2 or table.shape != there.shape or not table.shape[1]:
        raise VLMFastError(
            f"{name}: rows {tuple(rows.shape)}, table {tuple(table.shape)}, there "
            f"{tuple(there.shape)}; it takes (N, D) and (C, m) twice, m at least 1"
        )


def _check_float(name: str, *tensors: Tensor) -> None:
    if any(x.dtype != torch.float32 for x in tensors):
        dtypes = ", ".join(str(x.dtype) for x in tensors)
        raise VLMFastError(f"{name}: tensors in {dtypes}; it takes float32")


def _learning(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("M", "D"))
def _average(
    rows,
    weight,
    table,  # int64 (C, m)
    there,  # bool (C, m)
    out,  # (C, D)
    stride_n,
    M,
    D,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        real = tl.load(there + c * M + m, mask=m < M, other=0) != 0
        row = tl.load(table + c * M + m, mask=real, other=0)
        w = tl.load(weight + row, mask=real, other=0.0)
        x = tl.load(
            rows + row[:, None] * stride_n + d[None, :],
            mask=real[:, None] & (d < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(x.to(tl.float32) * w[:, None], 0)
        total += w
    acc = acc / tl.sum(total, 0)
    tl.store(out + c * D + d, acc.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=("M", "D", "DH"))
def _mix(
    rows,
    score,  # (N, H)
    table,  # int64 (C, m)
    there,  # bool (C, m)
    out,  # (C, D)
    share,  # out: (C, m, H)
    stride_n,
    stride_sn,
    M,
    D,
    DH,  # features of a head
    H: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        real = tl.load(there + c * M + m, mask=m < M, other=0) != 0
        row = tl.load(table + c * M + m, mask=real, other=0)
        x = tl.load(score + row * stride_sn + head, mask=real, other=-1e30)
        new = tl.maximum(top, x)
        total = total * tl.exp(top - new) + tl.where(real, tl.exp(x - new), 0.0)
        top = new
    most = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - most), 0)
    acc = tl.zeros((BD,), tl.float32)
    for m0 in range(0, M, BM):
        m = m0 + tl.arange(0, BM)
        real = tl.load(there + c * M + m, mask=m < M, other=0) != 0
        row = tl.load(table + c * M + m, mask=real, other=0)
        x = tl.load(score + row * stride_sn + head, mask=real, other=-1e30)
        p = tl.where(real, tl.exp(x - most), 0.0) / total
        y = tl.load(
            rows + row[:, None] * stride_n + (head * DH + d)[None, :],
            mask=real[:, None] & (d < DH)[None, :],
            other=0.0,
        )
        acc += tl.sum(y * p[:, None], 0)
        if tl.program_id(2) == 0:
            tl.store(share + (c * M + m) * H + head, p, mask=m < M)
    tl.store(out + c * D + head * DH + d, acc, mask=d < DH)


@triton.jit
def _logits(
    q,
    key,
    bias,
    at_y,
    at_x,
    place,
    slope,
    n,
    head,
    N,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Logits (BQ, BN) of the rows ``n``; -1e30 behind the last."""
    e = tl.arange(0, BD)
    k = tl.load(
        key + (n.to(tl.int64) * H + head)[None, :] * D + e[:, None],
        mask=(n < N)[None, :] & (e < D)[:, None],
        other=0.0,
    )
    y = tl.load(place + 2 * n, mask=n < N, other=0.0)
    x = tl.load(place + 2 * n + 1, mask=n < N, other=0.0)
    y, x = at_y[:, None] - y[None, :], at_x[:, None] - x[None, :]
    own = tl.load(bias + n, mask=n < N, other=0.0)
    logits = tl.dot(q, k, input_precision="ieee") + own[None, :] - (y * y + x * x) * slope
    return tl.where((n < N)[None, :], logits, -1e30)


@triton.jit(do_not_specialize=("Q", "N", "F", "DH"))
def _read(
    query,  # (Q, H, d), times d ** -0.5
    key,  # (N, H, d)
    rows,
    bias,
    at,
    place,
    pull,
    out,  # (Q, F)
    lse,  # out: (H, Q)
    stride_n,
    Q,
    N,
    F,  # features
    DH,  # features of a head
    scaling,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    BF: tl.constexpr,
):
    head = tl.program_id(1)
    i = tl.program_id(0) * BQ + tl.arange(0, BQ)
    f = tl.program_id(2) * BF + tl.arange(0, BF)
    e = tl.arange(0, BD)
    q = tl.load(
        query + (i * H + head)[:, None] * D + e[None, :],
        mask=(i < Q)[:, None] & (e < D)[None, :],
        other=0.0,
    )
    q = q * scaling
    at_y = tl.load(at + 2 * i, mask=i < Q, other=0.0)
    at_x = tl.load(at + 2 * i + 1, mask=i < Q, other=0.0)
    slope = tl.load(pull + head)
    m = tl.full((BQ,), -1e30, tl.float32)
    l = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BF), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        x = _logits(q, key, bias, at_y, at_x, place, slope, n, head, N, H, D, BD)
        v = tl.load(
            rows + n.to(tl.int64)[:, None] * stride_n + (head * DH + f)[None, :],
            mask=(n < N)[:, None] & (f < DH)[None, :],
            other=0.0,
        )
        top = tl.maximum(m, tl.max(x, 1))
        p = tl.where((n < N)[None, :], tl.exp(x - top[:, None]), 0.0)
        keep = tl.exp(m - top)
        l = l * keep + tl.sum(p, 1)
        acc = tl.dot(p, v, acc * keep[:, None], input_precision="ieee")
        m = top
    inside = (i < Q)[:, None] & (f < DH)[None, :]
    tl.store(out + i[:, None] * F + (head * DH + f)[None, :], acc / l[:, None], mask=inside)
    if tl.program_id(2) == 0:
        tl.store(lse + head * Q + i, m + tl.log(l), mask=i < Q)


@triton.jit(do_not_specialize=("Q", "N"))
def _share(
    query,
    key,
    bias,
    at,
    place,
    pull,
    lse,
    share,  # out: (Q, N)
    Q,
    N,
    scaling,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
):
    i = tl.program_id(0) * BQ + tl.arange(0, BQ)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    e = tl.arange(0, BD)
    at_y = tl.load(at + 2 * i, mask=i < Q, other=0.0)
    at_x = tl.load(at + 2 * i + 1, mask=i < Q, other=0.0)
    total = tl.zeros((BQ, BN), tl.float32)
    for head in range(H):
        q = tl.load(
            query + (i * H + head)[:, None] * D + e[None, :],
            mask=(i < Q)[:, None] & (e < D)[None, :],
            other=0.0,
        )
        slope = tl.load(pull + head)
        x = _logits(q * scaling, key, bias, at_y, at_x, place, slope, n, head, N, H, D, BD)
        normal = tl.load(lse + head * Q + i, mask=i < Q, other=0.0)
        total += tl.exp(x - normal[:, None])
    inside = (i < Q)[:, None] & (n < N)[None, :]
    tl.store(share + i.to(tl.int64)[:, None] * N + n[None, :], total / H, mask=inside)


def _plain(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch_average(rows: Tensor, weight: Tensor, table: Tensor, there: Tensor) -> Tensor:
    (cells, m), d = table.shape, rows.shape[1]
    out = torch.empty(cells, d, dtype=rows.dtype, device=rows.device)
    rows = _plain(rows)
    if out.numel():
        _average[(cells, triton.cdiv(d, 256))](
            rows,
            weight.float().contiguous(),
            table.contiguous(),
            there.contiguous(),
            out,
            rows.stride(0),
            m,
            d,
            BM=min(padded(m, 1), 16),
            BD=256,
            num_warps=4,
        )
    return out


def _launch_mix(rows: Tensor, score: Tensor, table: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    (cells, m), d, heads = table.shape, rows.shape[1], score.shape[1]
    out = torch.empty(cells, d, dtype=torch.float32, device=rows.device)
    share = torch.empty(cells, m, heads, dtype=torch.float32, device=rows.device)
    rows, score = _plain(rows), _plain(score)
    if cells:
        _mix[(cells, heads, triton.cdiv(d // heads, 256))](
            rows,
            score,
            table.contiguous(),
            there.contiguous(),
            out,
            share,
            rows.stride(0),
            score.stride(0),
            m,
            d,
            d // heads,
            H=heads,
            BM=min(padded(m, 1), 16),
            BD=256,
            num_warps=4,
        )
    return out, share


def _launch_resample(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    bias: Tensor,
    at: Tensor,
    place: Tensor,
    pull: Tensor,
) -> tuple[Tensor, Tensor]:
    (count, heads, d), (n, features) = query.shape, rows.shape
    device, each = query.device, features // heads
    query, key, bias, at, place, pull = (
        x.contiguous() for x in (query, key, bias, at, place, pull)
    )
    rows = _plain(rows)
    out = torch.empty(count, features, dtype=torch.float32, device=device)
    lse = torch.empty(heads, count, dtype=torch.float32, device=device)
    share = torch.empty(count, n, dtype=torch.float32, device=device)
    shape = {"H": heads, "D": d, "BD": padded(d), "BQ": 16}
    blocks = triton.cdiv(count, 16)
    _read[(blocks, heads, triton.cdiv(each, 128))](
        query,
        key,
        rows,
        bias,
        at,
        place,
        pull,
        out,
        lse,
        rows.stride(0),
        count,
        n,
        features,
        each,
        d**-0.5,
        **shape,
        BN=32,
        BF=128,
        num_warps=4,
    )
    _share[(blocks, triton.cdiv(n, 64))](
        query,
        key,
        bias,
        at,
        place,
        pull,
        lse,
        share,
        count,
        n,
        d**-0.5,
        **shape,
        BN=64,
        num_warps=4,
    )
    return out, share


_FLOATS = ("weight", "score", "share", "query", "key", "bias", "at", "place", "pull", "lse")
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    "table": "*i64",
    "there": "*i1",
    "stride_n": "i32:16",
    "scaling": "fp32",
    **dict.fromkeys(("stride_sn", "M", "D", "DH", "Q", "N", "F"), "i32"),
}


def _variants(dtype: torch.dtype) -> list[Variant]:
    types = _TYPES | dict.fromkeys(("rows", "out"), pointer(dtype))
    found = [Variant(_average, types, {"BM": m, "BD": 256}) for m in (1, 4, 16)]
    if dtype == torch.float32:
        found += [Variant(_mix, types, {"H": 8, "BM": m, "BD": 256}) for m in (1, 4, 16)]
        shape = {"H": 8, "D": 16, "BD": 16, "BQ": 16}
        found += [
            Variant(_read, types, {**shape, "BN": 32, "BF": 128}),
            Variant(_share, types, {**shape, "BN": 64}),
        ]
    return found


VARIANTS = [v for dtype in (torch.float16, torch.bfloat16, torch.float32) for v in _variants(dtype)]
