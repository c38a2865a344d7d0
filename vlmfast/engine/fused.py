"""A forward pass over new tokens with kernels that fuse the work between matrix products.

Hugging Face's decoder launches 36 (Llama) to 80 (Gemma 3) small operations per layer in addition to
its matrix products and attention: norms with their sums, the rotation of queries and keys, the
cache writes, the gated activation. Here four kernels replace them, on the unchanged modules of the
model: `residual_norm` twice, `rotate_append`, `swiglu` or `geglu_tanh`. Up to 16 rows are also
multiplied by kernels, `linears` and `gated_linear`, where the linear layers are PyTorch's own. What
differs between families stands in `fused_kinds`. Every rounding is that of the modules' own
forward; only sums are computed in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import DecodeContext
from vlmfast.kernels._triton import use_triton
from vlmfast.kernels.few_rows import MOST, gated_linear, linears
from vlmfast.kernels.norm_rope_append import HeadNorm, residual_norm, rotate_append
from vlmfast.models.base import Adapter

from .attention import text_attention
from .calls import step_modules
from .fused_kinds import LayerKind, is_own
from .joint import JointLayer
from .kv_layer import KVLayer

_PLAIN = (nn.Parameter,)  # weights, not those of quantized or sharded layers


def fusable(adapter: Adapter) -> bool:
    """Whether new tokens go through `fused_step`: supported layers, and kernels.

    Kernels run on CUDA, or where ``VLMFAST_KERNELS=triton`` is set.
    """
    weight = getattr(getattr(adapter.decoder, "norm", None), "weight", None)
    if weight is None or not use_triton("fused_step", weight):
        return False
    return step_modules(adapter).kind is not None


def fused_step(
    adapter: Adapter,
    embeds: Tensor,
    position: Tensor,
    context: DecodeContext,
    aux_layers: Sequence[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """The output of the model's own decoder; the cache is written to, not advanced.

    Parameters
    ----------
    adapter : Adapter
        One that is `fusable`.
    embeds : Tensor, (B, T, D)
        New tokens of each row, few of them; no host sync.
    position : Tensor, int64, (B, T), or (3, B, T) for M-RoPE
        Their rotary ids.
    context : DecodeContext
        Its cache has free slots for them.
    aux_layers : sequence of int
        Layers whose input is returned.

    Returns
    -------
    hidden : Tensor, (B, T, D)
        After the last norm.
    seen : dict of int to Tensor, (B, T, D)
        Input of the layers ``aux_layers``.
    """
    decoder, kind, cache = adapter.decoder, step_modules(adapter).kind, context.cache
    offsets = cache.offsets
    assert kind is not None
    tables: dict[tuple[int | None, str], tuple[Tensor, ...]] = {}
    seen: dict[int, Tensor] = {}
    # What the last module has added to the residual stream, the stream without it, and the norm
    # that this addition still has to pass.
    added, stream, branch = embeds, None, None
    layers: Iterable[Any] = decoder.layers  # with the parts that `kind_of` has checked
    caches: Iterable[KVLayer | JointLayer] = cache.layers
    for index, (layer, cached) in enumerate(zip(layers, caches, strict=True)):
        offset = offsets.get(index)
        key = None if offset is None else id(offset), adapter.rotary(index)
        if key not in tables:
            at = position if offset is None else position - offset
            tables[key] = adapter.tables(embeds, at, index)
        x, stream = _norm(kind, layer.input_layernorm, added, stream, branch)
        if index in aux_layers:
            seen[index] = stream
        added = _attend(kind, layer.self_attn, x, tables[key], cached, context)
        branch = _named(layer, kind.attention_branch_norm)
        x, stream = _norm(kind, getattr(layer, kind.mlp_norm), added, stream, branch)
        added = _mlp(kind, layer.mlp, x)
        branch = _named(layer, kind.mlp_branch_norm)
    return _norm(kind, decoder.norm, added, stream, branch)[0], seen


def _attend(
    kind: LayerKind,
    attention: Any,
    x: Tensor,
    tables: tuple[Tensor, ...],
    cached: KVLayer | JointLayer,
    context: DecodeContext,
) -> Tensor:
    """An attention module on the normalized input (B, T, D) of a layer."""
    norm = kind.head_norm(attention)
    query, key, value = (
        projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projected in _linears(x, attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if isinstance(cached, JointLayer):
        parts = (cached.split(x) for x in (query, key, value, *tables))
        rotated = [_append(norm, *part) for part in zip(cached.parts, *parts, strict=True)]
        query = torch.cat(rotated)
    else:
        query = _append(norm, cached, query, key, value, *tables)
    output, _ = text_attention(
        attention,
        query,
        cached.keys,  # read from the groups' own caches where there are several
        cached.values,
        None,
        attention.scaling,
        vlmfast_context=context,
    )
    return _linears(output.flatten(2), attention.o_proj)[0]


def _mlp(kind: LayerKind, mlp: Any, x: Tensor) -> Tensor:
    """An MLP module on its normalized input (B, T, D)."""
    gate, up = mlp.gate_proj, mlp.up_proj
    if _own(x, gate, up):
        weights, biases = (gate.weight, up.weight), (gate.bias, up.bias)
        activated = gated_linear(x, weights, biases, gelu_tanh=kind.gelu_tanh)
    else:
        activated = kind.gated(gate(x), up(x))
    return _linears(activated, mlp.down_proj)[0]


def _linears(x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
    """Linear layers on the same rows (B, T, D)."""
    if _own(x, *layers):
        return linears(x, [of.weight for of in layers], [of.bias for of in layers])
    return tuple(layer(x) for layer in layers)


def _own(x: Tensor, *layers: Any) -> bool:
    """Whether layers only multiply the few rows of ``x`` by a plain weight."""
    return (
        x[..., 0].numel() <= MOST
        and not torch.is_autocast_enabled(x.device.type)
        and all(is_own(layer, "torch.nn.modules.linear", "Linear") for layer in layers)
        and all(type(layer.weight) in _PLAIN for layer in layers)
        and all(layer.weight.dtype == x.dtype for layer in layers)
    )


def _append(
    norm: HeadNorm | None,
    cached: KVLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Rotate queries and keys of new tokens, and write keys and values to the cache."""
    tokens = query.shape[2]
    cached.reserve(tokens)
    query = rotate_append(
        query, key, value, cos, sin, cached.keys, cached.values, cached.length, norm
    )
    cached.note(tokens)
    return query


def _norm(
    kind: LayerKind, norm: Any, x: Tensor, residual: Tensor | None, branch: Any
) -> tuple[Tensor, Tensor]:
    """``norm`` of the residual stream plus ``x``, and the sum; ``branch`` is a norm of ``x``."""
    weight = None if branch is None else branch.weight
    return residual_norm(x, norm.weight, kind.eps_of(norm), residual, weight, kind.unit_offset)


def _named(layer: Any, name: str | None) -> Any:
    return None if name is None else getattr(layer, name)
