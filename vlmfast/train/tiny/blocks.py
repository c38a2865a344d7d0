"""CPU training forward pass of the language blocks: stock weights, fused operations.

Elementwise work and attention dominate a step on a CPU with fast matrix units. Here the slots'
scores are computed only where the packed mask allows them, and the pointwise operations can be
compiled; the results are those of the stock modules up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x (B, L, H, D)`` against ``cos``, ``sin`` of (B, L, 1, D)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _softmax(s: Tensor, mask: Tensor) -> Tensor:
    s = s.float() + mask
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)).bfloat16()


def _softmax_grad(p: Tensor, g: Tensor) -> Tensor:
    p, g = p.float(), g.float()
    return (p * (g - (p * g).sum(-1, keepdim=True))).bfloat16()


def _joint_softmax(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    a, b = a.float(), b.float() + mask
    top = torch.maximum(a.amax(-1, keepdim=True), b.amax(-1, keepdim=True))
    ea, eb = torch.exp(a - top), torch.exp(b - top)
    inv = 1.0 / (ea.sum(-1, keepdim=True) + eb.sum(-1, keepdim=True))
    return (ea * inv).bfloat16(), (eb * inv).bfloat16()


def _joint_softmax_grad(pa: Tensor, pb: Tensor, ga: Tensor, gb: Tensor) -> tuple[Tensor, Tensor]:
    pa, pb, ga, gb = pa.float(), pb.float(), ga.float(), gb.float()
    d = (pa * ga).sum(-1, keepdim=True) + (pb * gb).sum(-1, keepdim=True)
    return (pa * (ga - d)).bfloat16(), (pb * (gb - d)).bfloat16()


OPS: dict[str, Callable] = {
    "rms": _rms,
    "rope": _rope,
    "swiglu": _swiglu,
    "gelu": _gelu,
    "softmax": _softmax,
    "softmax_grad": _softmax_grad,
    "joint_softmax": _joint_softmax,
    "joint_softmax_grad": _joint_softmax_grad,
}


def compile_ops() -> None:
    """Compile the pointwise operations, once for all shapes."""
    torch._dynamo.config.cache_size_limit = 64
    for name, op in list(OPS.items()):
        OPS[name] = torch.compile(op, dynamic=True)


def _groups(slots: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Runs of equal slots as ``(start, number, length)``."""
    out: list[list[int]] = []
    at = 0
    for length in slots:
        if out and out[-1][2] == length:
            out[-1][1] += 1
        else:
            out.append([at, 1, length])
        at += length
    return [(start, number, length) for start, number, length in out]


def _split(x: Tensor, start: int, number: int, length: int) -> Tensor:
    """``x (N, G, S, D)`` to the slots of one group, (N * number, G * length, D)."""
    n, g, _, d = x.shape
    part = x[:, :, start : start + number * length].reshape(n, g, number, length, d)
    return part.transpose(1, 2).reshape(n * number, g * length, d)


def _join(y: Tensor, n: int, g: int, number: int, length: int) -> Tensor:
    """Undo :func:`_split`; (N, G, number * length, D)."""
    y = y.view(n, number, g, length, -1).transpose(1, 2)
    return y.reshape(n, g, number * length, -1)


class PackedAttention(torch.autograd.Function):
    """Attention under the packed mask.

    ``q (N, G, L, D)``, ``k`` and ``v (N, L, D)`` with ``L = prefix + sum(slots)``; G query heads
    share one key head. The prefix is causal; a slot sees the prefix and its own past.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        prefix: int,
        slots: tuple[int, ...],
        causal: Tensor,
        own_mask: Tensor,
    ) -> Tensor:
        n, g, _, d = q.shape
        q = q * scale
        qp = q[:, :, :prefix].reshape(n, g * prefix, d)
        qs = q[:, :, prefix:]
        kp, vp = k[:, :prefix].contiguous(), v[:, :prefix].contiguous()
        ks, vs = k[:, None, prefix:], v[:, None, prefix:]
        s = torch.bmm(qp, kp.transpose(1, 2)).view(n, g, prefix, prefix)
        p = OPS["softmax"](s, causal).view(n, g * prefix, prefix)
        out_p = torch.bmm(p, vp).view(n, g, prefix, d)
        total = sum(slots)
        flat = qs.reshape(n, g * total, d)
        sa = torch.bmm(flat, kp.transpose(1, 2)).view(n, g, total, prefix)
        sb = q.new_zeros(n, g, total, max(slots))
        for at, m, w in _groups(slots):
            part = torch.bmm(_split(qs, at, m, w), _split(ks, at, m, w).transpose(1, 2))
            sb[:, :, at : at + m * w, :w] = _join(part, n, g, m, w)
        pa, pb = OPS["joint_softmax"](sa, sb, own_mask)
        out_s = torch.bmm(pa.view(n, g * total, prefix), vp).view(n, g, total, d)
        for at, m, w in _groups(slots):
            part = torch.bmm(_split(pb[..., :w], at, m, w), _split(vs, at, m, w))
            out_s[:, :, at : at + m * w] += _join(part, n, g, m, w)
        ctx.save_for_backward(q, k, v, p, pa, pb)
        ctx.meta = (scale, prefix, slots)
        return torch.cat([out_p, out_s], 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p, pa, pb = ctx.saved_tensors
        scale, prefix, slots = ctx.meta
        n, g, length, d = q.shape
        total = length - prefix
        kp, vp = k[:, :prefix].contiguous(), v[:, :prefix].contiguous()
        qs, ks, vs = q[:, :, prefix:], k[:, None, prefix:], v[:, None, prefix:]
        qp = q[:, :, :prefix].reshape(n, g * prefix, d)
        op = grad[:, :, :prefix].reshape(n, g * prefix, d)
        os = grad[:, :, prefix:]
        gq, gk, gv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        gs = OPS["softmax_grad"](
            p.view(n, g, prefix, prefix), torch.bmm(op, vp.transpose(1, 2)).view(n, g, prefix, -1)
        ).view(n, g * prefix, prefix)
        gq[:, :, :prefix] = torch.bmm(gs, kp).view(n, g, prefix, d)
        flat_q, flat_o = qs.reshape(n, g * total, d), os.reshape(n, g * total, d)
        ga = torch.bmm(flat_o, vp.transpose(1, 2)).view(n, g, total, prefix)
        gb = torch.zeros_like(pb)
        for at, m, w in _groups(slots):
            part = torch.bmm(_split(os, at, m, w), _split(vs, at, m, w).transpose(1, 2))
            gb[:, :, at : at + m * w, :w] = _join(part, n, g, m, w)
        ga, gb = OPS["joint_softmax_grad"](pa, pb, ga, gb)
        ga, pa = ga.view(n, g * total, prefix), pa.view(n, g * total, prefix)
        gk[:, :prefix] = torch.bmm(gs.transpose(1, 2), qp) + torch.bmm(ga.transpose(1, 2), flat_q)
        gv[:, :prefix] = torch.bmm(p.transpose(1, 2), op) + torch.bmm(pa.transpose(1, 2), flat_o)
        gq[:, :, prefix:] = torch.bmm(ga, kp).view(n, g, total, d)
        for at, m, w in _groups(slots):
            mine = slice(prefix + at, prefix + at + m * w)
            dgb, dpb = _split(gb[..., :w], at, m, w), _split(pb[..., :w], at, m, w)
            gq[:, :, mine] += _join(torch.bmm(dgb, _split(ks, at, m, w)), n, g, m, w)
            q_own, o_own = _split(qs, at, m, w), _split(os, at, m, w)
            gk[:, mine] = torch.bmm(dgb.transpose(1, 2), q_own).view(n, m * w, d)
            gv[:, mine] = torch.bmm(dpb.transpose(1, 2), o_own).view(n, m * w, d)
        return gq * scale, gk, gv, None, None, None, None, None


def own_mask(slots: tuple[int, ...]) -> Tensor:
    """Additive mask (S, widest) of a slot's tokens over its own tokens."""
    wide = max(slots)
    rows = torch.cat([torch.arange(n) for n in slots])
    return torch.where(torch.arange(wide)[None] <= rows[:, None], 0.0, -1e30)


def causal_mask(n: int) -> Tensor:
    """Additive mask (n, n)."""
    return torch.where(torch.ones(n, n, dtype=torch.bool).tril(), 0.0, -1e30)


def language_block(
    layer: LlamaDecoderLayer,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    prefix: int,
    slots: tuple,
    masks: tuple[Tensor, Tensor],
    peek: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """One Llama block over ``x (B, L, width)``; ``rope`` cos and sin are (B, L, 1, D).

    ``peek`` is called with the queries (B, KV, G, L, D) and keys (B, KV, L, D) of the layer.
    """
    attn, mlp = layer.self_attn, layer.mlp
    b, length, _ = x.shape
    d = attn.head_dim
    h, kv = attn.q_proj.out_features // d, attn.k_proj.out_features // d
    norm = layer.input_layernorm
    y = OPS["rms"](x, norm.weight, norm.variance_epsilon)
    w = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
    qkv = F.linear(y, w).view(b, length, h + 2 * kv, d)
    qk = OPS["rope"](qkv[:, :, : h + kv], *rope)
    q = qk[:, :, :h].transpose(1, 2).reshape(b * kv, h // kv, length, d)
    k = qk[:, :, h:].transpose(1, 2).reshape(b * kv, length, d)
    v = qkv[:, :, h + kv :].transpose(1, 2).reshape(b * kv, length, d)
    if peek is not None:
        peek(q.view(b, kv, h // kv, length, d), k.view(b, kv, length, d))
    out = PackedAttention.apply(q, k, v, attn.scaling, prefix, slots, *masks)
    out = out.view(b, h, length, d).transpose(1, 2).reshape(b, length, h * d)
    x = x + F.linear(out, attn.o_proj.weight)
    norm = layer.post_attention_layernorm
    y = OPS["rms"](x, norm.weight, norm.variance_epsilon)
    w = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return x + F.linear(OPS["swiglu"](F.linear(y, w)), mlp.down_proj.weight)
