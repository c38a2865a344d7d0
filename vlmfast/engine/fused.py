"""A forward pass over new tokens with kernels that fuse the work between matrix products.

Hugging Face's decoder launches about fifteen small operations per layer in addition to its matrix
products and attention: two norms with their sums, the rotation of queries and keys, the cache
writes, the gated activation. Here four kernels replace them, on the unchanged modules of the model:
`residual_norm` twice, `rotate_append`, `swiglu`. Every rounding is that of the modules' own
forward; only the sums of a norm are computed in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import DecodeContext
from vlmfast.kernels._triton import use_triton
from vlmfast.kernels.norm_rope_append import WIDEST, residual_norm, rotate_append
from vlmfast.kernels.swiglu import swiglu
from vlmfast.models.base import Adapter

from .attention import text_attention
from .cache import JointCache, JointLayer, KVCache
from .kv_layer import KVLayer

if TYPE_CHECKING:
    from vlmfast.models.base import TextDecoder

# Families whose layers do exactly this, by their modules in transformers. A class that only has
# the same names may scale a residual or add one to the weight of a norm.
_KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}


def fusable(adapter: Adapter) -> bool:
    """Whether new tokens go through `fused_step`: supported layers, and kernels.

    Kernels run on CUDA, or where ``VLMFAST_KERNELS=triton`` is set. The layers are checked once
    per model.
    """
    if "fusable" not in adapter.kept:
        adapter.kept["fusable"] = _known(adapter.decoder)
    if not adapter.kept["fusable"]:
        return False
    return use_triton("fused_step", adapter.decoder.norm.get_parameter("weight"))


def fused_step(
    adapter: Adapter,
    embeds: Tensor,
    position: Tensor,
    cache: KVCache | JointCache,
    context: DecodeContext,
    offsets: Mapping[int, Tensor] | None = None,
    aux_layers: Sequence[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """The output of the model's own decoder; the cache is written to, not advanced.

    Parameters
    ----------
    adapter : Adapter
        One that is `fusable`.
    embeds : Tensor, (B, T, D)
        New tokens of each row, few of them; no host sync.
    position : Tensor, int64, (B, T)
        Their rotary ids.
    cache : KVCache or JointCache
        Frozen, with free slots for them.
    context : DecodeContext
    offsets : mapping of int to Tensor, int64 (B, 1), optional
        By layer, what is subtracted from ``position`` for its rotary ids.
    aux_layers : sequence of int
        Layers whose input is returned.

    Returns
    -------
    hidden : Tensor, (B, T, D)
        After the last norm.
    seen : dict of int to Tensor, (B, T, D)
        Input of the layers ``aux_layers``.
    """
    decoder, offsets = adapter.decoder, offsets or {}
    tables: dict[int | None, tuple[Tensor, Tensor]] = {}
    seen: dict[int, Tensor] = {}
    added, stream = embeds, None
    layers: Iterable[Any] = decoder.layers  # with the parts that `_known` has checked
    caches: Iterable[KVLayer | JointLayer] = cache.layers
    for index, (layer, cached) in enumerate(zip(layers, caches, strict=True)):
        offset = offsets.get(index)
        if id(offset) not in tables:
            at = position if offset is None else position - offset
            tables[id(offset)] = decoder.rotary_emb(embeds, at)
        attention, mlp = layer.self_attn, layer.mlp
        x, stream = _norm(layer.input_layernorm, added, stream)
        if index in aux_layers:
            seen[index] = stream
        query, key, value = (
            project(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if isinstance(cached, JointLayer):
            parts = (cached.split(x) for x in (query, key, value, *tables[id(offset)]))
            rotated = [_append(*part) for part in zip(cached.parts, *parts, strict=True)]
            query = torch.cat(rotated)
        else:
            query = _append(cached, query, key, value, *tables[id(offset)])
        output, _ = text_attention(
            attention,
            query,
            cached.keys,  # read from the groups' own caches where there are several
            cached.values,
            None,
            attention.scaling,
            vlmfast_context=context,
        )
        added = attention.o_proj(output.flatten(2))
        x, stream = _norm(layer.post_attention_layernorm, added, stream)
        added = mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
    return _norm(decoder.norm, added, stream)[0], seen


def _append(
    cached: KVLayer, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Rotate queries and keys of new tokens, and write keys and values to the cache."""
    tokens = query.shape[2]
    cached.reserve(tokens)
    query = rotate_append(query, key, value, cos, sin, cached.keys, cached.values, cached.length)
    cached.note(tokens)
    return query


def _norm(module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return residual_norm(x, module.weight, module.variance_epsilon, residual)


def _known(decoder: TextDecoder) -> bool:
    """Whether the layers are of a kind in `_KINDS`, as transformers defines them."""
    kind = decoder.config.model_type
    if kind not in _KINDS or decoder.config.hidden_act != "silu":
        return False
    layers: list[Any] = list(decoder.layers)
    norm: Any = decoder.norm
    parts = [(decoder, "Model"), (norm, "RMSNorm")]
    for layer in layers:
        parts += [
            (layer, "DecoderLayer"),
            (layer.self_attn, "Attention"),
            (layer.mlp, "MLP"),
            (layer.input_layernorm, "RMSNorm"),
            (layer.post_attention_layernorm, "RMSNorm"),
        ]
    module, width, head = (
        f"transformers.models.{kind}.modeling_{kind}",
        norm.weight.shape[0],
        layers[0].self_attn.head_dim,
    )
    return (
        all(_is(part, module, _KINDS[kind] + name) for part, name in parts)
        and len({part.weight.dtype for part, name in parts if name == "RMSNorm"}) == 1
        and width <= WIDEST
        and head % 8 == 0
        and head <= 256
    )


def _is(part: nn.Module, module: str, name: str) -> bool:
    """Whether a part is of exactly that class, without hooks and with an unchanged ``forward``."""
    own = type(part)
    changed = "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks
    return (own.__module__, own.__qualname__) == (module, name) and not changed
