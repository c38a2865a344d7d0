"""``row_lse`` and ``col_stats``: statistics per key of a softmax attention never materialized.

For the selected query rows i and the G query heads of each KV head,

    p[h, i, j] = softmax_j(q[h, i] . k[h // G, j] scaling + bias[j])     over visible keys j
    sum[h, j] = sum_i p[h, i, j]       and likewise sumsq, max, entropy, count

Shapes: query (Hq, S, D), key (Hk, S, D), R rows, one output (Hk, G, S) per statistic.

Two launches on a GPU. `_row_lse`, one program per block of rows, query head and part of the keys,
writes the logarithm of each row's sum of exponentials and its largest logit. If there are too few
rows to fill the GPU, the keys are split into parts, which `_join` reduces. `_col_stats`, one
program per block of keys and query head, keeps its keys in registers, loops over the rows from the
first that sees them, and writes every statistic once. Without atomic additions, results do not
depend on the order of programs.

Bytes: queries of the rows and keys, twice (the second time mostly from the second-level cache), and
4 Hq S per statistic. Floor: 2 Hq D x (pairs of row and visible key) operations per launch and the
bytes above; with 64 rows of 2,944 keys in 32 heads of 128 the 24 MB of keys decide, 5.8 us at
4.3 TB/s; with all rows the matrix units and the exponentials, 45 us.
The reference processes the rows in blocks, which bounds rows x keys x heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import no_type_check

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._blocks import Blocks, architecture, blocks
from ._triton import (
    INTERPRETED,
    Variant,
    check_heads,
    contiguous_last,
    padded,
    pointer,
    tl,
    triton,
    upcast,
    use_triton,
)

STATISTICS = ("sum", "sumsq", "max", "entropy", "count", "nnz")
REDUCED = {"head": (), "group": (1,), "all": (0, 1)}  # axes that `per` reduces
_ENTRIES_AT_ONCE = 1 << 21  # of one block's map, over all heads: 8 MiB, which caches hold
_PROGRAMS = 264  # two for each of 132 multiprocessors
_PARTS = 32  # maximum number of parts of the keys


def row_lse(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None = None,
    scaling: float | None = None,
    *,
    causal: bool = True,
    start: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalizer of each row's softmax; arguments as in `col_stats`.

    Returns
    -------
    lse : Tensor, float32, (Hq, R)
        Natural logarithm of the sum of exponentials; -1e30 for a row that sees nothing.
    largest : Tensor, float32, (Hq, R)
        Largest logit; -1e30 for a row that sees nothing.
    """
    _check("row_lse", query, key, rows, bias)
    if not use_triton("row_lse", query, key, rows, bias):
        return row_lse_ref(query, key, rows, scaling, causal=causal, start=start, bias=bias)
    return _launch_rows(query, key, rows, scaling, causal, start, bias)


def row_lse_ref(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None = None,
    scaling: float | None = None,
    *,
    causal: bool = True,
    start: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`row_lse` in plain PyTorch."""
    hq, s, _ = query.shape
    key = key.float()
    rows = torch.arange(s, device=query.device) if rows is None else rows
    lse, largest = [], []
    for block in rows.split(max(_ENTRIES_AT_ONCE // (hq * s), 1)):
        logits, _ = _logits(query, key, block, scaling, causal, start, bias)
        logits = logits.flatten(0, 1)
        row_max = logits.amax(-1)
        largest.append(row_max)
        lse.append(torch.where(row_max > -1e30, logits.logsumexp(-1), -1e30))
    return torch.cat(lse, 1), torch.cat(largest, 1)


def col_stats(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None = None,
    scaling: float | None = None,
    *,
    threshold: float = 0.0,
    causal: bool = True,
    start: int = 0,
    bias: Tensor | None = None,
    want: Collection[str] = STATISTICS,
    per: str = "head",
) -> dict[str, Tensor]:
    """Sums over query rows of ``softmax(q k^T scaling)``, per query head and key, in float32.

    Parameters
    ----------
    query : Tensor, (Hq, S, D)
    key : Tensor, (Hk, S, D)
        Shared by ``Hq // Hk`` query heads each.
    rows : Tensor, int64, (R,), optional
        Query rows that are summed; all by default.
    scaling : float, optional
        ``D ** -0.5`` by default.
    threshold : float
        ``count`` counts the entries that reach this fraction of their row's largest. An entry that
        equals it may count or not.
    causal : bool
        Whether a row sees no later key.
    start : int
        First valid key; rows before it see nothing and contribute zero.
    bias : Tensor, float32, (S,), optional
        Added to the logits of each key.
    want : collection of str
        Statistics to compute; all by default.
    per : {"head", "group", "all"}
        Axes that are kept: every query head, every KV head, or none. Statistics are summed over the
        rest; ``max`` takes the largest.

    Returns
    -------
    dict
        ``sum``, ``sumsq``, ``max``, ``entropy`` (of ``-p ln(p + 1e-10)``), float32, and ``count``,
        int32, each (Hk, G, S), (Hk, S) or (S,); ``nnz``, int64, (S,): rows that may see the key.
    """
    _check("col_stats", query, key, rows, bias)
    if unknown := [name for name in want if name not in STATISTICS]:
        raise VLMFastError(f"col_stats: want={unknown} must be among {', '.join(STATISTICS)}")
    if per not in REDUCED:
        raise VLMFastError(f"col_stats: per={per!r} must be one of {', '.join(REDUCED)}")
    run = _launch if use_triton("col_stats", query, key, rows, bias) else col_stats_ref
    found = run(
        query,
        key,
        rows,
        scaling,
        threshold=threshold,
        causal=causal,
        start=start,
        bias=bias,
        want=want,
    )
    if dims := REDUCED[per]:
        for name in found.keys() - {"nnz"}:
            x = found[name]
            found[name] = x.amax(dims) if name == "max" else x.sum(dims, dtype=x.dtype)
    return found


def col_stats_ref(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None = None,
    scaling: float | None = None,
    *,
    threshold: float = 0.0,
    causal: bool = True,
    start: int = 0,
    bias: Tensor | None = None,
    want: Collection[str] = STATISTICS,
) -> dict[str, Tensor]:
    """`col_stats` per query head in plain PyTorch."""
    hq, s, _ = query.shape
    key = key.float()
    used_rows = torch.arange(s, device=query.device) if rows is None else rows

    def maps() -> Iterator[Tensor]:
        for block in used_rows.split(max(_ENTRIES_AT_ONCE // (hq * s), 1)):
            logits, hidden = _logits(query, key, block, scaling, causal, start, bias)
            p = logits.softmax(-1)
            # The masked logit is finite, so that a row that sees nothing gives zeros, not NaN.
            yield p if hidden is None else p.masked_fill_(hidden, 0.0)

    out = column_sums(maps(), threshold, want)
    if "nnz" in want:
        ordered = used_rows if rows is None else used_rows.sort().values
        out["nnz"] = _visible(ordered, s, causal, start)
    return out


def column_sums(
    maps: Iterable[Tensor], threshold: float, want: Collection[str]
) -> dict[str, Tensor]:
    """Statistics of attention in blocks of query rows, (..., R, S) each: (..., S), without ``nnz``.

    Arguments as in `col_stats`.
    """
    out: dict[str, Tensor] = {}
    for p in maps:
        found = {}
        if "sum" in want:
            found["sum"] = p.sum(-2)
        if "sumsq" in want:
            found["sumsq"] = p.square().sum(-2)
        if "max" in want:
            found["max"] = p.amax(-2)
        if "entropy" in want:
            found["entropy"] = -torch.xlogy(p, p + 1e-10).sum(-2)
        if "count" in want:
            reached = (p >= threshold * p.amax(-1, keepdim=True)) & (p > 0) & (threshold > 0)
            found["count"] = reached.sum(-2, dtype=torch.int32)
        for name, x in found.items():
            add = torch.maximum if name == "max" else torch.add
            out[name] = add(out[name], x) if name in out else x
    return out


def _logits(
    query: Tensor,
    key: Tensor,
    block: Tensor,
    scaling: float | None,
    causal: bool,
    start: int,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Logits (Hk, G, R, S) of a block of rows, -1e30 where ``hidden`` (R, S), if anything is."""
    hk, s, d = key.shape
    q = query.index_select(1, block).float() * (d**-0.5 if scaling is None else scaling)
    logits = q.unflatten(0, (hk, -1)) @ key.transpose(-1, -2)[:, None]
    if bias is not None:
        logits = logits + bias
    if not causal and not start:
        return logits, None
    columns = torch.arange(s, device=query.device)
    hidden = (columns < start).expand(len(block), -1)
    if causal:
        hidden = hidden | (columns[None] > block[:, None])
    return logits.masked_fill_(hidden, -1e30), hidden


def _before(rows: Tensor, keys: int) -> Tensor:
    """How many of the ascending ``rows`` come before each of ``keys`` keys, int64."""
    return torch.searchsorted(rows, torch.arange(keys, device=rows.device))


def _visible(rows: Tensor, keys: int, causal: bool, start: int) -> Tensor:
    """How many of the ascending ``rows`` see each key, int64; does not synchronize."""
    columns = torch.arange(keys, device=rows.device)
    if causal:
        nnz = len(rows) - _before(rows, keys)
    else:
        nnz = torch.full_like(columns, len(rows))
    return nnz.masked_fill(columns < start, 0)


def _check(name: str, query: Tensor, key: Tensor, rows: Tensor | None, bias: Tensor | None) -> None:
    hq, s, _ = query.shape
    if key.shape[1:] != query.shape[1:] or not len(key) or hq % len(key):
        raise VLMFastError(
            f"{name}: queries {tuple(query.shape)} and keys {tuple(key.shape)}; it takes "
            "(Hq, S, D) and (Hk, S, D), Hk a divisor of Hq"
        )
    if not s or not hq or (rows is not None and not len(rows)):
        raise VLMFastError(f"{name}: no query row or no key; it takes at least one of each")
    if rows is not None and rows.dtype != torch.int64:
        raise VLMFastError(f"{name}: rows of {rows.dtype}; it takes int64")
    if key.dtype != query.dtype:
        raise VLMFastError(
            f"{name}: queries in {query.dtype}, keys in {key.dtype}; it takes one dtype"
        )
    if bias is not None and bias.shape != (s,):
        raise VLMFastError(f"{name}: bias of shape {tuple(bias.shape)}; it takes ({s},)")


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("R", "S", "START", "CHUNK"))
@no_type_check
def _row_lse(
    q,
    k,
    rows,  # int64 (R,), or None for all
    bias,  # float32 (S,), or None
    lse,  # out: float32 (P, Hq, R)
    largest,  # out: float32 (P, Hq, R)
    stride_qh,
    stride_qs,
    stride_kh,
    stride_ks,
    scaling,
    R,
    S,
    START,
    CHUNK,  # keys of one part, a multiple of BLOCK_N
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, part = tl.program_id(1), tl.program_id(2)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    if rows is None:
        position = r
    else:
        position = tl.load(rows + r, mask=r < R, other=-1).to(tl.int32)
    p_q = q + head.to(tl.int64) * stride_qh
    p_q += position.to(tl.int64)[:, None] * stride_qs + d[None, :]  # [BR, BD]
    p_k = k + (head // G).to(tl.int64) * stride_kh
    m_q = (r < R)[:, None] & (d < D)[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)  # [BR, BD]
    if UPCAST:
        b_q = b_q.to(tl.float32)
    row_max = tl.full((BLOCK_R,), -1e30, tl.float32)  # [BR]
    row_sum = tl.zeros((BLOCK_R,), tl.float32)  # [BR]
    first = tl.maximum(part * CHUNK, START // BLOCK_N * BLOCK_N)
    last = tl.minimum(part * CHUNK + CHUNK, S)
    if CAUSAL:
        last = tl.minimum(last, tl.max(tl.where(r < R, position, -1), 0) + 1)
    for n0 in range(first, last, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        b_k = tl.load(  # [BD, BN]
            p_k + n.to(tl.int64)[None, :] * stride_ks + d[:, None],
            mask=(n < S)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        if UPCAST:
            b_k = b_k.to(tl.float32)
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scaling  # [BR, BN]
        if bias is not None:
            b_s += tl.load(bias + n, mask=n < S, other=0.0)[None, :]
        m_s = ((n >= START) & (n < S))[None, :] & (r < R)[:, None]
        if CAUSAL:
            m_s = m_s & (n[None, :] <= position[:, None])
        b_s = tl.where(m_s, b_s, -1e30)
        new_max = tl.maximum(row_max, tl.max(b_s, 1))
        b_p = tl.where(m_s, tl.exp(b_s - new_max[:, None]), 0.0)  # [BR, BN]
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(b_p, 1)
        row_max = new_max
    offsets = (part.to(tl.int64) * tl.num_programs(1) + head) * R + r
    # In float32 -1e30 plus a logarithm is -1e30: the value of a row that sees nothing.
    tl.store(lse + offsets, row_max + tl.log(tl.where(row_sum > 0, row_sum, 1.0)), mask=r < R)
    tl.store(largest + offsets, row_max, mask=r < R)


@triton.jit(do_not_specialize=("N",))
@no_type_check
def _join(
    part_lse,  # float32 (P, N)
    part_largest,
    lse,  # out: float32 (N,)
    largest,
    N,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, BLOCK_P)
    offsets = part.to(tl.int64)[:, None] * N + n[None, :]
    m_part = (part < P)[:, None] & (n < N)[None, :]
    b_lse = tl.load(part_lse + offsets, mask=m_part, other=-1e30)  # [BP, BN]
    max_lse = tl.max(b_lse, 0)
    total = tl.sum(tl.where(b_lse > -1e30, tl.exp(b_lse - max_lse[None, :]), 0.0), 0)
    tl.store(lse + n, max_lse + tl.log(tl.where(total > 0, total, 1.0)), mask=n < N)
    b_largest = tl.load(part_largest + offsets, mask=m_part, other=-1e30)
    tl.store(largest + n, tl.max(b_largest, 0), mask=n < N)


@triton.jit(do_not_specialize=("R", "S", "START"))
@no_type_check
def _col_stats(
    q,
    k,
    rows,  # int64 (R,) ascending, or None for all
    before,  # int64 (S,): rows before each key; None without `rows` or not causal
    bias,  # float32 (S,), or None
    lse,  # float32 (Hq, R)
    largest,
    out_sum,  # out: float32 (Hq, S) each, or None
    out_sumsq,
    out_max,
    out_entropy,
    out_count,  # out: int32 (Hq, S), or None
    stride_qh,
    stride_qs,
    stride_kh,
    stride_ks,
    scaling,
    threshold,
    R,
    S,
    START,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    p_q = q + head.to(tl.int64) * stride_qh
    p_k = k + (head // G).to(tl.int64) * stride_kh
    p_lse = lse + head.to(tl.int64) * R
    p_largest = largest + head.to(tl.int64) * R
    b_k = tl.load(  # [BN, BD]
        p_k + n.to(tl.int64)[:, None] * stride_ks + d[None, :],
        mask=(n < S)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    if UPCAST:
        b_k = b_k.to(tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + n, mask=n < S, other=0.0)
    first = 0
    if CAUSAL:
        first = tl.program_id(0) * BLOCK_N
        if before is not None:
            first = tl.load(before + first).to(tl.int32)
    acc_sum = tl.zeros((BLOCK_N,), tl.float32)  # [BN]
    acc_sumsq = tl.zeros((BLOCK_N,), tl.float32)
    acc_max = tl.zeros((BLOCK_N,), tl.float32)
    acc_entropy = tl.zeros((BLOCK_N,), tl.float32)
    acc_count = tl.zeros((BLOCK_N,), tl.int32)
    for r0 in range(first, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        if rows is None:
            position = r
        else:
            position = tl.load(rows + r, mask=r < R, other=-1).to(tl.int32)
        b_q = tl.load(  # [BD, BR]
            p_q + position.to(tl.int64)[None, :] * stride_qs + d[:, None],
            mask=(r < R)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        if UPCAST:
            b_q = b_q.to(tl.float32)
        # Keys on the first axis: sums over rows then stay within a warp.
        b_s = tl.dot(b_k, b_q, input_precision="ieee") * scaling  # [BN, BR]
        if bias is not None:
            b_s += b_bias[:, None]
        b_lse = tl.load(p_lse + r, mask=r < R, other=0.0)
        m_s = ((n >= START) & (n < S))[:, None] & (r < R)[None, :]
        if CAUSAL:
            m_s = m_s & (n[:, None] <= position[None, :])
        b_s = tl.where(m_s, b_s, -1e30)
        b_p = tl.where(m_s, tl.exp(b_s - b_lse[None, :]), 0.0)  # [BN, BR]
        if out_sum is not None:
            acc_sum += tl.sum(b_p, 1)
        if out_sumsq is not None:
            acc_sumsq += tl.sum(b_p * b_p, 1)
        if out_max is not None:
            acc_max = tl.maximum(acc_max, tl.max(b_p, 1))
        if out_entropy is not None:
            acc_entropy -= tl.sum(b_p * tl.log(b_p + 1e-10), 1)
        if out_count is not None:
            row_max = tl.exp(tl.load(p_largest + r, mask=r < R, other=0.0) - b_lse)
            m_count = m_s & (b_p >= threshold * row_max[None, :])
            acc_count += tl.sum(m_count.to(tl.int32), 1)
    offsets = head.to(tl.int64) * S + n
    if out_sum is not None:
        tl.store(out_sum + offsets, acc_sum, mask=n < S)
    if out_sumsq is not None:
        tl.store(out_sumsq + offsets, acc_sumsq, mask=n < S)
    if out_max is not None:
        tl.store(out_max + offsets, acc_max, mask=n < S)
    if out_entropy is not None:
        tl.store(out_entropy + offsets, acc_entropy, mask=n < S)
    if out_count is not None:
        tl.store(out_count + offsets, acc_count, mask=n < S)


def _blocks(rows: int, d: int, dtype: torch.dtype, arch: int) -> Blocks:
    """Blocks; in float32, without tensor cores, larger ones do not fit into registers."""
    condition = "16 rows" if rows <= 16 else "many rows"
    if dtype == torch.float32 and not INTERPRETED:
        condition = "float32"
    return blocks("col_stats", condition, arch).resized(BLOCK_D=padded(d))


def _launch_rows(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None,
    scaling: float | None,
    causal: bool,
    start: int,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Normalizer and largest logit of each row, (Hq, R) each."""
    (hq, s, d), r = query.shape, query.shape[1] if rows is None else len(rows)
    check_heads("row_lse", d)
    query, key = contiguous_last(query), contiguous_last(key)
    up = upcast(query)
    arch = architecture(query.device)
    tile = _blocks(r, d, query.dtype, arch)
    row_blocks = -(-r // tile.sizes["BLOCK_R"])
    keys = -(-s // tile.sizes["BLOCK_N"])
    parts = min(max(_PROGRAMS // (row_blocks * hq), 1), _PARTS, keys)
    chunk = -(-keys // parts) * tile.sizes["BLOCK_N"]
    parts = -(-s // chunk)
    lse = torch.empty(parts, hq, r, device=query.device)
    largest = torch.empty(parts, hq, r, device=query.device)
    _row_lse[(row_blocks, hq, parts)](
        query,
        key,
        None if rows is None else rows.contiguous(),
        None if bias is None else bias.float().contiguous(),
        lse,
        largest,
        *query.stride()[:2],
        *key.stride()[:2],
        d**-0.5 if scaling is None else scaling,
        r,
        s,
        start,
        chunk,
        G=hq // len(key),
        D=d,
        CAUSAL=causal,
        UPCAST=up,
        **tile.options(),
    )
    if parts == 1:
        return lse[0], largest[0]
    whole = torch.empty(2, hq, r, device=query.device)
    join = blocks("col_stats", "join", arch).resized(BLOCK_P=padded(parts, 1))
    _join[(-(-hq * r // join.sizes["BLOCK_N"]),)](
        lse, largest, *whole, hq * r, P=parts, **join.options()
    )
    return whole[0], whole[1]


def _launch(
    query: Tensor,
    key: Tensor,
    rows: Tensor | None,
    scaling: float | None,
    *,
    threshold: float,
    causal: bool,
    start: int,
    bias: Tensor | None,
    want: Collection[str],
) -> dict[str, Tensor]:
    (hq, s, d), hk = query.shape, len(key)
    check_heads("col_stats", d)
    query, key = contiguous_last(query), contiguous_last(key)
    rows = None if rows is None else rows.sort().values
    used_rows = torch.arange(s, device=query.device) if rows is None else rows
    out: dict[str, Tensor] = {}
    for name in STATISTICS:
        if name == "nnz" and name in want:
            out[name] = _visible(used_rows, s, causal, start)
        elif name == "count" and name in want and not threshold:
            out[name] = torch.zeros(hk, hq // hk, s, device=query.device, dtype=torch.int32)
        elif name in want:
            dtype = torch.int32 if name == "count" else torch.float32
            out[name] = torch.empty(hk, hq // hk, s, device=query.device, dtype=dtype)
    written = {f"out_{name}": out.get(name) for name in STATISTICS if name != "nnz"}
    if not threshold:
        written["out_count"] = None
    if not any(pointer is not None for pointer in written.values()):
        return out
    up = upcast(query)
    tile = _blocks(len(used_rows), d, query.dtype, architecture(query.device))
    lse, largest = _launch_rows(query, key, rows, scaling, causal, start, bias)
    _col_stats[(-(-s // tile.sizes["BLOCK_N"]), hq)](
        query,
        key,
        rows,
        _before(rows, s) if causal and rows is not None else None,
        None if bias is None else bias.float().contiguous(),
        lse,
        largest,
        *written.values(),
        *query.stride()[:2],
        *key.stride()[:2],
        d**-0.5 if scaling is None else scaling,
        threshold,
        len(used_rows),
        s,
        start,
        G=hq // hk,
        D=d,
        CAUSAL=causal,
        UPCAST=up,
        **tile.options(),
    )
    return out


_TYPES = {
    "rows": "*i64",
    "before": "*i64",
    "bias": "*fp32",
    **dict.fromkeys(("part_lse", "part_largest", "lse", "largest"), "*fp32"),
    **dict.fromkeys(("out_sum", "out_sumsq", "out_max", "out_entropy"), "*fp32"),
    "out_count": "*i32",
    **dict.fromkeys(("stride_qh", "stride_qs", "stride_kh", "stride_ks"), "i32:16"),
    **dict.fromkeys(("scaling", "threshold"), "fp32"),
    **dict.fromkeys(("R", "S", "N", "START", "CHUNK"), "i32"),
}


def _variants(
    arch: int, dtype: torch.dtype, d: int, rows: int = 64, **given: object
) -> list[Variant]:
    types = _TYPES | dict.fromkeys("qk", pointer(dtype))
    given = {"G": 4, "D": d, "CAUSAL": True, "UPCAST": dtype == torch.float32, **given}
    tile = _blocks(rows, d, dtype, arch)
    return [tile.variant(kernel, types, given) for kernel in (_row_lse, _col_stats)]


def variants(arch: int) -> list[Variant]:
    """What launches compile on an architecture."""
    join = blocks("col_stats", "join", arch).resized(BLOCK_P=_PARTS)
    return [
        *_variants(arch, torch.float16, 128),
        *(v for d in (64, 96, 128, 256) for v in _variants(arch, torch.bfloat16, d)),
        *_variants(arch, torch.bfloat16, 128, rows=1),
        *_variants(arch, torch.bfloat16, 80, CAUSAL=False),
        *_variants(arch, torch.float32, 256),
        join.variant(_join, _TYPES, {"P": _PARTS}),
    ]
