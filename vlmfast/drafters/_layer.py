"""The decoder layer of trained drafters: one Llama layer with the variants of published drafters.

Shapes: B sequences, S rows, K keys, H query heads, G key heads, width D, head width d. Each
row has an explicit rotary id, since drafters leave rows out.

Attention is passed as a function ``attend(q, k, v)`` with rotated ``q`` (B, H, S, d), ``k`` and
``v`` (B, G, S, d), which returns (B, H, S, d): `causal` covers the rows themselves, `Cache.attend`
also those before them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# --- attention ------------------------------------------------------------------------------------


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees itself and the rows before it."""
    return _attention(q, k, v, None)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention under a mask, causal without one; grouped where the head counts differ."""
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and q.shape[2] > 1,
        enable_gqa=q.shape[1] != k.shape[1],
    )


class Cache:
    """Keys and values of one sequence: stable rows, then those of a tree until `crop`.

    Attributes
    ----------
    length : int
        Rows in the cache.
    """

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # (2, 1, G, capacity, d)

    @property
    def keys(self) -> Tensor:
        """(1, G, length, d), rotated."""
        assert self._buffer is not None
        return self._buffer[0, :, :, : self.length]

    @property
    def values(self) -> Tensor:
        """(1, G, length, d)."""
        assert self._buffer is not None
        return self._buffer[1, :, :, : self.length]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add the rows of ``k`` and ``v``, (1, G, S, d)."""
        wanted = self.length + k.shape[2]
        if self._buffer is None or wanted > self._buffer.shape[3]:
            buffer = k.new_empty(2, 1, k.shape[1], max(2 * wanted, 64), k.shape[3])
            if self._buffer is not None:
                buffer[:, :, :, : self.length] = self._buffer[:, :, :, : self.length]
            self._buffer = buffer
        self._buffer[0, :, :, self.length : wanted] = k
        self._buffer[1, :, :, self.length : wanted] = v
        self.length = wanted

    def crop(self, length: int) -> None:
        """Drop the rows after the first ``length``."""
        self.length = min(self.length, length)

    def attend(self, mask: Tensor | None = None) -> Attend:
        """Attention that appends the new rows to the cache and attends to all of it.

        Parameters
        ----------
        mask : Tensor, bool, (S, n), optional
            Which of the last ``n`` rows, including the new ones, each row sees; all earlier rows
            are seen. Causal without it.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.append(k, v)
            rows, keys = q.shape[2], self.length
            seen = None
            if mask is not None:
                stable = mask.new_ones(rows, keys - mask.shape[1])
                seen = torch.cat([stable, mask], dim=1)
            elif 1 < rows < keys:
                every = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
                seen = every.tril(keys - rows)  # the last of the keys are the rows themselves
            return _attention(q, self.keys, self.values, seen)

        return attend


# --- the layer ------------------------------------------------------------------------------------


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """``weight x / sqrt(mean x^2 + eps)``, in float32 at least."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(_at_least_float32(x.dtype))
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor, position: Tensor, theta: float, stretch: float = 1.0) -> Tensor:
    """Heads (B, n, S, d) rotated by their rotary ids (B, S), the halves of d paired.

    ``stretch`` divides the ids: linear scaling.
    """
    half, dtype = x.shape[-1] // 2, _at_least_float32(x.dtype)
    power = torch.arange(half, dtype=dtype, device=x.device) / half
    angle = position[:, None, :, None].to(dtype) / stretch * theta**-power
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention over rows of width ``inputs``."""

    def __init__(
        self,
        width: int,
        inputs: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        theta: float,
        stretch: float,
        qkv_bias: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.rotary = theta, stretch
        self.q_proj = nn.Linear(inputs, heads * head_width, bias=qkv_bias)
        self.k_proj = nn.Linear(inputs, kv_heads * head_width, bias=qkv_bias)
        self.v_proj = nn.Linear(inputs, kv_heads * head_width, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, x: Tensor, position: Tensor, attend: Attend) -> Tensor:
        def split(rows: Tensor, heads: int) -> Tensor:
            return rows.unflatten(-1, (heads, -1)).transpose(1, 2)

        q, k = split(self.q_proj(x), self.heads), split(self.k_proj(x), self.kv_heads)
        q, k = rotated(q, position, *self.rotary), rotated(k, position, *self.rotary)
        out = attend(q, k, split(self.v_proj(x), self.kv_heads))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer.

    Rows are D wide, or 2 D wide: the embedding and the hidden state concatenated (EAGLE-3), each
    with its own norm. The residual stream continues the hidden state alone.

    Parameters
    ----------
    hidden : int
        Units of the MLP.
    input_norm : bool
        Whether a norm precedes attention; EAGLE-1 and 2 have none. Always with ``double``.
    double : bool
        Rows are 2 D wide.
    norm_before_residual : bool
        With ``double``: the residual is the hidden state after its norm.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        eps: float = 1e-6,
        theta: float = 10000.0,
        stretch: float = 1.0,
        qkv_bias: bool = False,
        input_norm: bool = True,
        double: bool = False,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self._double, self.norm_before_residual = double, norm_before_residual
        norm = partial(RMSNorm, width, eps)
        sizes = (width, 2 * width if double else width, heads, kv_heads, head_width)
        self.self_attn = Attention(*sizes, theta, stretch, qkv_bias)
        self.mlp = MLP(width, hidden)
        self.input_layernorm = norm() if input_norm or double else None
        self.hidden_norm = norm() if double else None
        self.post_attention_layernorm = norm()

    def forward(self, x: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Rows (B, S, D or 2 D) with rotary ids (B, S) to (B, S, D)."""
        if self._double:
            assert self.hidden_norm is not None and self.input_layernorm is not None
            embeds, x = x.chunk(2, dim=-1)
            hidden = self.hidden_norm(x)
            if self.norm_before_residual:
                x = hidden
            read = torch.cat([self.input_layernorm(embeds), hidden], dim=-1)
        else:
            read = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(read, position, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
