"""``atp_score``: score of each visual token at an insertion point of ATP.

With heads ``h``, attention ``a`` and logits ``r`` that token i receives, weights ``u`` (a softmax)
and ``v`` of the heads, and the soft mask ``s``::

    cross_i = log(sum_h u_h a_hi / s_i * sum_j s_j)       own_i = sum_h v_h r_hi - their mean by s
    both_i = sigmoid(slope * (own_i, cross_i) + offset)
    red_i = mean of both_i                                mean = sum_i s_i both_i / sum_i s_i

Shapes: attention, received (H, N), everything else (N,) or smaller. Two launches, each one program
per 256 tokens: first the sums over heads and each block's part of the sums over tokens, then the
rest, which depends on them. In plain PyTorch these are about twenty launches.
Bytes: attention and received once, 8 H N: 147 kB at 32 heads and 576 tokens. Floor: the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, padded, tl, triton, use_triton

TINY = 1e-12  # below any relevant softmax weight; keeps the logarithm finite
_BLOCK = 256


def atp_score(
    attention: Tensor,
    received: Tensor,
    soft: Tensor,
    cross_heads: Tensor,
    self_heads: Tensor,
    slope: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor]:
    """Redundancy of each token, and the means that thresholds are computed from.

    Parameters
    ----------
    attention, received : Tensor, float32, (H, N)
        Softmax attention of the text, mean over its rows, and logits from the visual rows.
    soft : Tensor, float32, (N,)
        Soft mask of the tokens.
    cross_heads, self_heads : Tensor, float32, (H,)
        Weights before their softmax, and weights without softmax.
    slope, offset : Tensor, float32, (2,)

    Returns
    -------
    red : Tensor, float32, (N,)
    means : Tensor, float32, (2,)
        Of the level among visual tokens, and of the level between text and visual tokens. The
        reference is used if a gradient is required.
    """
    every = (attention, received, soft, cross_heads, self_heads, slope, offset)
    h, n = attention.shape
    shapes = [tuple(x.shape) for x in every]
    if shapes != [(h, n), (h, n), (n,), (h,), (h,), (2,), (2,)] or not h or not n:
        raise VLMFastError(
            f"atp_score: shapes {', '.join(map(str, shapes))}; it takes (H, N) twice, (N,), (H,) "
            "twice and (2,) twice, none empty"
        )
    if any(x.dtype != torch.float32 for x in every):
        dtypes = ", ".join(str(x.dtype) for x in every)
        raise VLMFastError(f"atp_score: tensors in {dtypes}; it takes float32")
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in every)
    if use_triton("atp_score", *every) and not learning:
        return _launch(*every)
    return atp_score_ref(*every)


def cross_level(attention: Tensor, soft: Tensor) -> Tensor:
    """Attention of the text to a token relative to uniform attention, in nats.

    Parameters
    ----------
    attention : Tensor, (N,)
        Softmax attention of the text to the visual tokens.
    soft : Tensor, (N,)
        Soft mask of the tokens; 1 at inference. Already applied to the attention.

    Returns
    -------
    Tensor, (N,)
        ``log(n a_i)``; 0 is uniform attention.
    """
    return (attention / soft * soft.sum()).clamp(min=TINY).log()


def self_level(received: Tensor, soft: Tensor) -> Tensor:
    """Logits (N,) received from the visual tokens, minus their mean over these tokens."""
    return received - (received * soft).sum() / soft.sum()


def atp_score_ref(
    attention: Tensor,
    received: Tensor,
    soft: Tensor,
    cross_heads: Tensor,
    self_heads: Tensor,
    slope: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor]:
    """`atp_score` in plain PyTorch."""
    cross = (cross_heads.softmax(0)[:, None] * attention).sum(0)
    own = (self_heads[:, None] * received).sum(0)
    levels = torch.stack([self_level(own, soft), cross_level(cross, soft)])
    both = (slope[:, None] * levels + offset[:, None]).sigmoid()
    return both.mean(0), (both * soft).sum(1) / soft.sum()


# --- Triton --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("H", "N"))
def _heads(
    attention,
    received,
    soft,
    cross_heads,
    self_heads,
    levels,  # out: (2, N): own and cross, sums over heads
    parts,  # out: (2, blocks): sums over the tokens of own * soft, and of soft
    stride_a,
    stride_r,
    H,
    N,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.arange(0, BLOCK_H)
    b_u = tl.load(cross_heads + h, mask=h < H, other=-1e30)
    b_u = tl.where(h < H, tl.exp(b_u - tl.max(b_u, 0)), 0.0)
    norm = tl.sum(b_u, 0)
    acc_own = tl.zeros((BLOCK_N,), tl.float32)
    acc_cross = tl.zeros((BLOCK_N,), tl.float32)
    for head in range(H):
        head_weight = tl.sum(tl.where(h == head, b_u, 0.0), 0) / norm
        acc_cross += head_weight * tl.load(attention + head * stride_a + n, mask=n < N, other=0.0)
        head_weight = tl.load(self_heads + head)
        acc_own += head_weight * tl.load(received + head * stride_r + n, mask=n < N, other=0.0)
    b_soft = tl.load(soft + n, mask=n < N, other=0.0)
    tl.store(levels + n, acc_own, mask=n < N)
    tl.store(levels + N + n, acc_cross, mask=n < N)
    tl.store(parts + tl.program_id(0), tl.sum(acc_own * b_soft, 0))
    tl.store(parts + tl.num_programs(0) + tl.program_id(0), tl.sum(b_soft, 0))


@triton.jit(do_not_specialize=("N",))
def _tokens(
    levels,
    parts,
    soft,
    slope,
    offset,
    red,  # out: (N,)
    means,  # out: (2, blocks): each block's part of both means
    tiny,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    blocks, block = tl.num_programs(0), tl.program_id(0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    own_sum = tl.sum(tl.load(parts + p, mask=p < blocks, other=0.0), 0)
    soft_sum = tl.sum(tl.load(parts + blocks + p, mask=p < blocks, other=0.0), 0)
    b_soft = tl.load(soft + n, mask=n < N, other=1.0)
    b_own = tl.load(levels + n, mask=n < N, other=0.0) - own_sum / soft_sum
    b_cross = tl.load(levels + N + n, mask=n < N, other=1.0) / b_soft * soft_sum
    b_cross = tl.log(tl.maximum(b_cross, tiny))
    b_own = 1.0 / (1.0 + tl.exp(-(tl.load(slope) * b_own + tl.load(offset))))
    b_cross = 1.0 / (1.0 + tl.exp(-(tl.load(slope + 1) * b_cross + tl.load(offset + 1))))
    tl.store(red + n, (b_own + b_cross) * 0.5, mask=n < N)
    b_soft = tl.where(n < N, b_soft, 0.0) / soft_sum
    tl.store(means + block, tl.sum(b_own * b_soft, 0))
    tl.store(means + blocks + block, tl.sum(b_cross * b_soft, 0))


def _launch(
    attention: Tensor,
    received: Tensor,
    soft: Tensor,
    cross_heads: Tensor,
    self_heads: Tensor,
    slope: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor]:
    h, n = attention.shape
    blocks = triton.cdiv(n, _BLOCK)
    attention, received = (x if x.stride(1) == 1 else x.contiguous() for x in (attention, received))
    soft, cross_heads, self_heads, slope, offset = (
        x.contiguous() for x in (soft, cross_heads, self_heads, slope, offset)
    )

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=attention.device)

    levels, parts, red, means = empty(2, n), empty(2, blocks), empty(n), empty(2, blocks)
    _heads[(blocks,)](
        attention,
        received,
        soft,
        cross_heads,
        self_heads,
        levels,
        parts,
        attention.stride(0),
        received.stride(0),
        h,
        n,
        BLOCK_H=padded(h),
        BLOCK_N=_BLOCK,
        num_warps=4,
    )
    _tokens[(blocks,)](
        levels,
        parts,
        soft,
        slope,
        offset,
        red,
        means,
        TINY,
        n,
        BLOCK_N=_BLOCK,
        BLOCK_P=padded(blocks),
        num_warps=4,
    )
    return red, means.sum(1)


_FLOATS = ("attention", "received", "soft", "cross_heads", "self_heads", "slope", "offset")
_TYPES = {
    **dict.fromkeys((*_FLOATS, "levels", "parts", "red", "means"), "*fp32"),
    **dict.fromkeys(("stride_a", "stride_r", "H", "N"), "i32"),
    "tiny": "fp32",
}
VARIANTS = [
    *(Variant(_heads, _TYPES, {"BLOCK_H": heads, "BLOCK_N": _BLOCK}) for heads in (16, 32, 64)),
    *(Variant(_tokens, _TYPES, {"BLOCK_N": _BLOCK, "BLOCK_P": parts}) for parts in (16, 128)),
]
