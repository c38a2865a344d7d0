"""``pool``: pooling of the rows of an image, without gathering copies of the rows.

`cell_average`: the weighted mean of the rows of each cell of a grid::

    out_c = sum over t in c of w_t x_t / sum over t in c of w_t

`cell_mix`: a strided depthwise convolution whose kernel depends on its input; head ``i`` weights
its own slice of the features::

    a_cti = softmax over t in c of score_ti           out_ci = sum over t in c of a_cti x_ti

`resample`: a few learned queries, each at a position in the image, attend to all rows::

    a_iqt = softmax over t of (q_qi . k_ti / sqrt(d) + bias_t - pull_i |place_t - at_q|^2)
    out_qi = sum over t of a_iqt x_ti               share_qt = mean over i of a_iqt

Shapes: rows (N, D), N rows in C cells of at most m rows or read by Q queries, H heads. Grids: one
program per cell and 256 features (of one head); `resample` one per 16 queries, head and 128
features, which loops over the rows 32 at a time, then one per 16 queries and 64 rows for ``share``.
Bytes: rows once, the output once: in float32 at 2,928 rows of 4,096 in 732 cells 60 MB, 14 us
at 4.3 TB/s; `resample` reads rows once for each 16 queries, mostly from the L2 cache.
Floor of `resample`: 2 Q N (D + H d) operations in float32, 1.9e9 for 80 queries there, 31 us at
62e12 per second. No gradients: if they are required, the references are used.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._blocks import Blocks, architecture, blocks
from ._triton import Variant, contiguous_last, padded, pointer, tl, triton, use_triton


def cell_average(rows: Tensor, weight: Tensor, table: Tensor, valid: Tensor) -> Tensor:
    """Weighted mean of the rows of each cell.

    Parameters
    ----------
    rows : Tensor, (N, D)
    weight : Tensor, float32, (N,)
    table : Tensor, int64, (C, m)
        Rows of each cell.
    valid : Tensor, bool, (C, m)
        Which entries of the table are not padding; at least one in every cell.

    Returns
    -------
    Tensor, (C, D)
        In the dtype of the rows, computed in float32.
    """
    _check_cells("cell_average", rows, table, valid)
    if weight.shape != rows.shape[:1]:
        raise VLMFastError(
            f"cell_average: {len(rows)} rows and weights {tuple(weight.shape)}; it takes one each"
        )
    if use_triton("cell_average", rows, weight, table, valid) and not _needs_grad(rows, weight):
        return _launch_average(rows, weight, table, valid)
    return cell_average_ref(rows, weight, table, valid)


def cell_average_ref(rows: Tensor, weight: Tensor, table: Tensor, valid: Tensor) -> Tensor:
    """`cell_average` in plain PyTorch."""
    weighted = valid * weight[table]
    share = weighted / weighted.sum(1, keepdim=True)
    return (rows.float()[table] * share[..., None]).sum(-2).to(rows.dtype)


def cell_mix(rows: Tensor, score: Tensor, table: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of each cell, weighted by a softmax of their scores; each head weights its features.

    Parameters
    ----------
    rows : Tensor, float32, (N, D)
    score : Tensor, float32, (N, H)
        H a divisor of D.
    table, valid : Tensor, (C, m)
        As in `cell_average`.

    Returns
    -------
    mixed : Tensor, float32, (C, D)
    share : Tensor, float32, (C, m, H)
        Zero in padding.
    """
    _check_cells("cell_mix", rows, table, valid)
    heads = score.shape[-1]
    if score.shape != (len(rows), heads) or not heads or rows.shape[1] % heads:
        raise VLMFastError(
            f"cell_mix: rows {tuple(rows.shape)} and scores {tuple(score.shape)}; it takes (N, D) "
            "and (N, H), H a divisor of D"
        )
    _check_float("cell_mix", rows, score)
    if use_triton("cell_mix", rows, score, table, valid) and not _needs_grad(rows, score):
        return _launch_mix(rows, score, table, valid)
    return cell_mix_ref(rows, score, table, valid)


def cell_mix_ref(
    rows: Tensor, score: Tensor, table: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """`cell_mix` in plain PyTorch."""
    share = score[table].masked_fill(~valid[..., None], -torch.inf).softmax(-2)
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
    """Attention of a few queries over many rows, with a penalty on distance.

    Parameters
    ----------
    query : Tensor, float32, (Q, H, d)
    key : Tensor, float32, (N, H, d)
    rows : Tensor, float32, (N, D)
        H a divisor of D.
    bias : Tensor, float32, (N,)
        Added to the logits of each row; the logarithm of its weight.
    at : Tensor, float32, (Q, 2)
        Positions of the queries.
    place : Tensor, float32, (N, 2)
        Positions of the rows.
    pull : Tensor, float32, (H,)
        Factor of the squared distance that is subtracted from the logits.

    Returns
    -------
    out : Tensor, float32, (Q, D)
    share : Tensor, float32, (Q, N)
        Attention, mean over heads.
    """
    (q, h, d), n = query.shape, len(rows)
    matches = (
        key.shape == (n, h, d)
        and bias.shape == (n,)
        and at.shape == (q, 2)
        and place.shape == (n, 2)
        and pull.shape == (h,)
    )
    if not matches or not q or not n or not h or rows.shape[1] % h:
        tensors = {"query": query, "key": key, "rows": rows, "bias": bias, "at": at}
        tensors |= {"place": place, "pull": pull}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
        raise VLMFastError(
            f"resample: {shapes}; it takes (Q, H, d), (N, H, d), (N, D), (N,), (Q, 2), (N, 2) and "
            "(H,), none empty, H a divisor of D"
        )
    every = (query, key, rows, bias, at, place, pull)
    _check_float("resample", *every)
    if use_triton("resample", *every) and not _needs_grad(*every):
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
    distance = (at[:, None] - place).square().sum(-1) * pull[:, None, None]
    attention = (bias - distance + score).softmax(-1)
    parts = rows.unflatten(-1, (len(pull), -1))
    out = torch.einsum("hqt,thd->qhd", attention, parts).flatten(-2)
    return out, attention.mean(0)


def _check_cells(name: str, rows: Tensor, table: Tensor, valid: Tensor) -> None:
    if rows.dim() != 2 or table.dim() != 2 or table.shape != valid.shape or not table.shape[1]:
        raise VLMFastError(
            f"{name}: rows {tuple(rows.shape)}, table {tuple(table.shape)}, valid "
            f"{tuple(valid.shape)}; it takes (N, D) and (C, m) twice, m at least 1"
        )


def _check_float(name: str, *tensors: Tensor) -> None:
    if any(x.dtype != torch.float32 for x in tensors):
        dtypes = ", ".join(str(x.dtype) for x in tensors)
        raise VLMFastError(f"{name}: tensors in {dtypes}; it takes float32")


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("M", "D"))
@no_type_check
def _average(
    rows,
    weight,
    table,  # int64 (C, m)
    valid,  # bool (C, m)
    out,  # (C, D)
    stride_n,
    M,
    D,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    acc_weight = tl.zeros((BLOCK_M,), tl.float32)
    for m0 in range(0, M, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        m_row = tl.load(valid + c * M + m, mask=m < M, other=0) != 0
        row = tl.load(table + c * M + m, mask=m_row, other=0)
        b_weight = tl.load(weight + row, mask=m_row, other=0.0)
        b_x = tl.load(
            rows + row[:, None] * stride_n + d[None, :],
            mask=m_row[:, None] & (d < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(b_x.to(tl.float32) * b_weight[:, None], 0)
        acc_weight += b_weight
    acc = acc / tl.sum(acc_weight, 0)
    tl.store(out + c * D + d, acc.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=("M", "D", "DH"))
@no_type_check
def _mix(
    rows,
    score,  # (N, H)
    table,  # int64 (C, m)
    valid,  # bool (C, m)
    out,  # (C, D)
    share,  # out: (C, m, H)
    stride_n,
    stride_sn,
    M,
    D,
    DH,  # features of a head
    H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    c, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    lane_max = tl.full((BLOCK_M,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for m0 in range(0, M, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        m_row = tl.load(valid + c * M + m, mask=m < M, other=0) != 0
        row = tl.load(table + c * M + m, mask=m_row, other=0)
        b_score = tl.load(score + row * stride_sn + head, mask=m_row, other=-1e30)
        new_max = tl.maximum(lane_max, b_score)
        row_sum = row_sum * tl.exp(lane_max - new_max) + tl.where(
            m_row, tl.exp(b_score - new_max), 0.0
        )
        lane_max = new_max
    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(row_sum * tl.exp(lane_max - row_max), 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for m0 in range(0, M, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        m_row = tl.load(valid + c * M + m, mask=m < M, other=0) != 0
        row = tl.load(table + c * M + m, mask=m_row, other=0)
        b_score = tl.load(score + row * stride_sn + head, mask=m_row, other=-1e30)
        b_p = tl.where(m_row, tl.exp(b_score - row_max), 0.0) / row_sum
        b_x = tl.load(
            rows + row[:, None] * stride_n + (head * DH + d)[None, :],
            mask=m_row[:, None] & (d < DH)[None, :],
            other=0.0,
        )
        acc += tl.sum(b_x * b_p[:, None], 0)
        if tl.program_id(2) == 0:
            tl.store(share + (c * M + m) * H + head, b_p, mask=m < M)
    tl.store(out + c * D + head * DH + d, acc, mask=d < DH)


@triton.jit
@no_type_check
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
    BLOCK_D: tl.constexpr,
):
    """Logits [BQ, BN] of the rows ``n``; -1e30 after the last."""
    e = tl.arange(0, BLOCK_D)
    b_k = tl.load(
        key + (n.to(tl.int64) * H + head)[None, :] * D + e[:, None],
        mask=(n < N)[None, :] & (e < D)[:, None],
        other=0.0,
    )
    b_y = tl.load(place + 2 * n, mask=n < N, other=0.0)
    b_x = tl.load(place + 2 * n + 1, mask=n < N, other=0.0)
    b_y, b_x = at_y[:, None] - b_y[None, :], at_x[:, None] - b_x[None, :]
    b_bias = tl.load(bias + n, mask=n < N, other=0.0)
    b_s = tl.dot(q, b_k, input_precision="ieee") + b_bias[None, :] - (b_y * b_y + b_x * b_x) * slope
    return tl.where((n < N)[None, :], b_s, -1e30)


@triton.jit(do_not_specialize=("Q", "N", "F", "DH"))
@no_type_check
def _read(
    query,  # (Q, H, d)
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
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    head = tl.program_id(1)
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    e = tl.arange(0, BLOCK_D)
    b_q = tl.load(
        query + (i * H + head)[:, None] * D + e[None, :],
        mask=(i < Q)[:, None] & (e < D)[None, :],
        other=0.0,
    )
    b_q = b_q * scaling
    at_y = tl.load(at + 2 * i, mask=i < Q, other=0.0)
    at_x = tl.load(at + 2 * i + 1, mask=i < Q, other=0.0)
    slope = tl.load(pull + head)
    row_max = tl.full((BLOCK_Q,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_F), tl.float32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        b_s = _logits(b_q, key, bias, at_y, at_x, place, slope, n, head, N, H, D, BLOCK_D)
        b_v = tl.load(
            rows + n.to(tl.int64)[:, None] * stride_n + (head * DH + f)[None, :],
            mask=(n < N)[:, None] & (f < DH)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        b_p = tl.where((n < N)[None, :], tl.exp(b_s - new_max[:, None]), 0.0)
        alpha = tl.exp(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(b_p, 1)
        acc = tl.dot(b_p, b_v, acc * alpha[:, None], input_precision="ieee")
        row_max = new_max
    m_out = (i < Q)[:, None] & (f < DH)[None, :]
    tl.store(out + i[:, None] * F + (head * DH + f)[None, :], acc / row_sum[:, None], mask=m_out)
    if tl.program_id(2) == 0:
        tl.store(lse + head * Q + i, row_max + tl.log(row_sum), mask=i < Q)


@triton.jit(do_not_specialize=("Q", "N"))
@no_type_check
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
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_D)
    at_y = tl.load(at + 2 * i, mask=i < Q, other=0.0)
    at_x = tl.load(at + 2 * i + 1, mask=i < Q, other=0.0)
    acc = tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
    for head in range(H):
        b_q = tl.load(
            query + (i * H + head)[:, None] * D + e[None, :],
            mask=(i < Q)[:, None] & (e < D)[None, :],
            other=0.0,
        )
        slope = tl.load(pull + head)
        b_s = _logits(b_q * scaling, key, bias, at_y, at_x, place, slope, n, head, N, H, D, BLOCK_D)
        b_lse = tl.load(lse + head * Q + i, mask=i < Q, other=0.0)
        acc += tl.exp(b_s - b_lse[:, None])
    m_out = (i < Q)[:, None] & (n < N)[None, :]
    tl.store(share + i.to(tl.int64)[:, None] * N + n[None, :], acc / H, mask=m_out)


def _blocks(kernel: str, members: int, device: torch.device) -> Blocks:
    """For cells of up to ``members`` rows."""
    return _fitted(blocks("pool", kernel, architecture(device)), members)


def _fitted(tile: Blocks, members: int) -> Blocks:
    return tile.resized(BLOCK_M=min(padded(members, 1), tile.sizes["BLOCK_M"]))


def _launch_average(rows: Tensor, weight: Tensor, table: Tensor, valid: Tensor) -> Tensor:
    (cells, m), d = table.shape, rows.shape[1]
    out = torch.empty(cells, d, dtype=rows.dtype, device=rows.device)
    rows = contiguous_last(rows)
    if out.numel():
        tile = _blocks("average", m, rows.device)
        _average[(cells, triton.cdiv(d, tile.sizes["BLOCK_D"]))](
            rows,
            weight.float().contiguous(),
            table.contiguous(),
            valid.contiguous(),
            out,
            rows.stride(0),
            m,
            d,
            **tile.options(),
        )
    return out


def _launch_mix(rows: Tensor, score: Tensor, table: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    (cells, m), d, heads = table.shape, rows.shape[1], score.shape[1]
    out = torch.empty(cells, d, dtype=torch.float32, device=rows.device)
    share = torch.empty(cells, m, heads, dtype=torch.float32, device=rows.device)
    rows, score = contiguous_last(rows), contiguous_last(score)
    if cells:
        tile = _blocks("mix", m, rows.device)
        _mix[(cells, heads, triton.cdiv(d // heads, tile.sizes["BLOCK_D"]))](
            rows,
            score,
            table.contiguous(),
            valid.contiguous(),
            out,
            share,
            rows.stride(0),
            score.stride(0),
            m,
            d,
            d // heads,
            H=heads,
            **tile.options(),
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
    rows = contiguous_last(rows)
    out = torch.empty(count, features, dtype=torch.float32, device=device)
    lse = torch.empty(heads, count, dtype=torch.float32, device=device)
    share = torch.empty(count, n, dtype=torch.float32, device=device)
    shape = {"H": heads, "D": d, "BLOCK_D": padded(d)}
    read, shares = (blocks("pool", name, architecture(device)) for name in ("read", "share"))
    count_blocks = triton.cdiv(count, read.sizes["BLOCK_Q"])
    _read[(count_blocks, heads, triton.cdiv(each, read.sizes["BLOCK_F"]))](
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
        **read.options(),
    )
    grid = (triton.cdiv(count, shares.sizes["BLOCK_Q"]), triton.cdiv(n, shares.sizes["BLOCK_N"]))
    _share[grid](
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
        **shares.options(),
    )
    return out, share


_FLOATS = ("weight", "score", "share", "query", "key", "bias", "at", "place", "pull", "lse")
_TYPES = {
    **dict.fromkeys(_FLOATS, "*fp32"),
    "table": "*i64",
    "valid": "*i1",
    "stride_n": "i32:16",
    "scaling": "fp32",
    **dict.fromkeys(("stride_sn", "M", "D", "DH", "Q", "N", "F"), "i32"),
}


def _variants(arch: int, dtype: torch.dtype) -> list[Variant]:
    types = _TYPES | dict.fromkeys(("rows", "out"), pointer(dtype))

    def each_size(kernel: Any, name: str, constants: dict[str, int]) -> list[Variant]:
        tile = blocks("pool", name, arch)
        return [_fitted(tile, m).variant(kernel, types, constants) for m in (1, 4, 16)]

    found = each_size(_average, "average", {})
    if dtype == torch.float32:
        found += each_size(_mix, "mix", {"H": 8})
        shape = {"H": 8, "D": 16, "BLOCK_D": 16}
        for kernel, name in ((_read, "read"), (_share, "share")):
            found.append(blocks("pool", name, arch).variant(kernel, types, shape))
    return found


def variants(arch: int) -> list[Variant]:
    """What launches compile on an architecture."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return [v for dtype in dtypes for v in _variants(arch, dtype)]
