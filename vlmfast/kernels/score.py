"""``atp_score``: what an insertion point of ATP says of each visual token.

With heads ``h``, attention ``a`` and logits ``r`` that token i receives, weights ``u`` (a softmax)
and ``v`` of the heads, and ``s`` how much of each token is there::

    cross_i = log(sum_h u_h a_hi / s_i * sum_j s_j)       own_i = sum_h v_h r_hi - their mean by s
    both_i = sigmoid(slope * (own_i, cross_i) + offset)
    red_i = mean of both_i                                mean = sum_i s_i both_i / sum_i s_i

Shapes: attention, received (H, N), everything else (N,) or smaller. Two launches, each one program
per 256 tokens: the sums over heads with each block's part of the sums over tokens; then, which
needs those, the rest. In plain PyTorch these are some twenty launches.
Bytes: attention and received once, 8 H N: 147 kB at 32 heads and 576 tokens. Floor: the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._triton import Variant, padded, tl, triton, use_triton

TINY = 1e-12  # below any softmax weight that matters; keeps the logarithm finite
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
    """Redundancy of each token, and the means that thresholds are made from.

    Parameters
    ----------
    attention, received : Tensor, float32, (H, N)
        Softmax attention of the text, mean over its rows, and logits from the visual rows.
    soft : Tensor, float32, (N,)
        How much of each token is there.
    cross_heads, self_heads : Tensor, float32, (H,)
        Before their softmax, and as they are.
    slope, offset : Tensor, float32, (2,)

    Returns
    -------
    red : Tensor, float32, (N,)
    means : Tensor, float32, (2,)
        Of the level among visual tokens, and of that between text and them. The reference serves
        where a gradient is wanted.
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
    """How much more the text looks at a token than it would at random, in nats.

    Parameters
    ----------
    attention : Tensor, (N,)
        Softmax attention of the text to the visual tokens.
    soft : Tensor, (N,)
        How much of each token is there; 1 at inference. The attention contains it.

    Returns
    -------
    Tensor, (N,)
        ``log(n a_i)``; 0 is an equal share of the whole attention.
    """
    return (attention / soft * soft.sum()).clamp(min=TINY).log()


def self_level(received: Tensor, soft: Tensor) -> Tensor:
    """Logits (N,) received from the visual tokens, against their mean over these tokens."""
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
    BH: tl.constexpr,
    BN: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    h = tl.arange(0, BH)
    u = tl.load(cross_heads + h, mask=h < H, other=-1e30)
    u = tl.where(h < H, tl.exp(u - tl.max(u, 0)), 0.0)
    total = tl.sum(u, 0)
    own = tl.zeros((BN,), tl.float32)
    cross = tl.zeros((BN,), tl.float32)
    for head in range(H):
        weight = tl.sum(tl.where(h == head, u, 0.0), 0) / total
        cross += weight * tl.load(attention + head * stride_a + n, mask=n < N, other=0.0)
        weight = tl.load(self_heads + head)
        own += weight * tl.load(received + head * stride_r + n, mask=n < N, other=0.0)
    there = tl.load(soft + n, mask=n < N, other=0.0)
    tl.store(levels + n, own, mask=n < N)
    tl.store(levels + N + n, cross, mask=n < N)
    tl.store(parts + tl.program_id(0), tl.sum(own * there, 0))
    tl.store(parts + tl.num_programs(0) + tl.program_id(0), tl.sum(there, 0))


@triton.jit(do_not_specialize=("N",))
def _tokens(
    levels,
    parts,
    soft,
    slope,
    offset,
    red,  # out: (N,)
    means,  # out: (2, blocks): shares of both means
    tiny,
    N,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    blocks, block = tl.num_programs(0), tl.program_id(0)
    n = block * BN + tl.arange(0, BN)
    p = tl.arange(0, BP)
    mean = tl.sum(tl.load(parts + p, mask=p < blocks, other=0.0), 0)
    total = tl.sum(tl.load(parts + blocks + p, mask=p < blocks, other=0.0), 0)
    there = tl.load(soft + n, mask=n < N, other=1.0)
    own = tl.load(levels + n, mask=n < N, other=0.0) - mean / total
    cross = tl.load(levels + N + n, mask=n < N, other=1.0) / there * total
    cross = tl.log(tl.maximum(cross, tiny))
    own = 1.0 / (1.0 + tl.exp(-(tl.load(slope) * own + tl.load(offset))))
    cross = 1.0 / (1.0 + tl.exp(-(tl.load(slope + 1) * cross + tl.load(offset + 1))))
    tl.store(red + n, (own + cross) * 0.5, mask=n < N)
    there = tl.where(n < N, there, 0.0) / total
    tl.store(means + block, tl.sum(own * there, 0))
    tl.store(means + blocks + block, tl.sum(cross * there, 0))


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

    def room(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=attention.device)

    levels, parts, red, means = room(2, n), room(2, blocks), room(n), room(2, blocks)
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
        BH=padded(h),
        BN=_BLOCK,
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
        BN=_BLOCK,
        BP=padded(blocks),
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
    *(Variant(_heads, _TYPES, {"BH": heads, "BN": _BLOCK}) for heads in (16, 32, 64)),
    *(Variant(_tokens, _TYPES, {"BN": _BLOCK, "BP": parts}) for parts in (16, 128)),
]
