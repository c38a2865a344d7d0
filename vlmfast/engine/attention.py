"""The two attention functions that replace Hugging Face's while a context is active.

They are registered under names of their own and chosen per call, so no class is patched. The text
name has no mask function on purpose: Hugging Face then builds no mask, and causality, padding and
trees follow one rule here. The vision name has the SDPA mask function: towers with padded tiles
need their mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from vlmfast.core.contexts import DecodeContext, PrefillContext
from vlmfast.core.drafting import Observer, SlotList
from vlmfast.core.placement import device_of
from vlmfast.core.statistics import StatRequest
from vlmfast.errors import ModelError
from vlmfast.kernels._triton import use_triton
from vlmfast.kernels.biased_attention import biased_attention
from vlmfast.kernels.decode_mixed import decode_mixed
from vlmfast.kernels.decode_slots import decode_slots, gathered
from vlmfast.kernels.tree_verify import tree_verify
from vlmfast.models.rope import rotary_by_length

from .attention_maps import (
    Call,
    attention_rows,
    context_of,
    received_logits,
    received_sum,
    scale_of,
    span,
    with_bias,
)
from .joint import JointCache
from .kv_layer import KVLayer
from .modules import Modules
from .restore import Changes
from .vision_attention import vision_attention

# transformers tests these names for "flash", "sdpa" and "/". With "flash", towers that pack their
# images in one row call attention once per block, with the boundaries of the parts that attend to
# themselves, instead of part by part.
TEXT, VISION = "vlmfast_text", "vlmfast_vision_flash"

if TYPE_CHECKING:

    class TextAttention(nn.Module):
        """An attention module of the language model, with its layer index."""

        layer_idx: int


_FEW = 64  # query rows that the decode kernel takes


def text_attention(
    module: TextAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Self-attention of the language model.

    Parameters
    ----------
    query : Tensor, (B, Hq, T, D)
    key, value : Tensor, (B, Hkv, S, D)
        What the cache's ``update`` returned: all tokens so far during prefill, the whole static
        buffer afterwards.

    Returns
    -------
    output : Tensor, (B, T, Hq, D)
    """
    context, device = context_of(kwargs), query.device
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ModelError("capped attention logits and attention sinks are not supported")
    call = Call(module, query, key, value, attention_mask, scaling, dropout)
    if isinstance(context, DecodeContext):
        if not context.cache.split:
            return _cached(call, context), None
        with _current(device):
            return _cached(call, context.on(device)), None
    assert isinstance(context, PrefillContext)
    home = context.layout.device
    if home == device:
        return _prefilled(call, context), None
    # Of a model on several devices.
    with _current(device), _collected(context, call.layer, home):
        return _prefilled(call, context.on(device)), None


@contextmanager
def _collected(context: PrefillContext, layer: int, home: torch.device) -> Iterator[None]:
    """Move the statistics of a layer on another device to that of the layout."""
    yield
    for found in (context.stats, context.received):
        if layer in found:
            found[layer] = found[layer].to(home)


def _prefilled(call: Call, context: PrefillContext) -> Tensor:
    """Attention of a prompt, or of a chunk of one."""
    if context.extends:
        return _extended(call, context)
    query, key, value, scaling = call.query, call.key, call.value, call.scaling
    index, bias = call.layer, context.key_bias()
    request = context.requests.get(index)
    if request is not None:
        rows = _query_rows(request, context)
        take = received_sum if request.rows == "columns" else attention_rows
        first, last = span(context, index)
        context.stats[index] = take(
            query[0], key[0], rows, scaling, bias=bias, first=first, last=last
        )
        if request.received:
            visual = context.layout.visual_rows()
            context.received[index] = received_logits(
                query[0], key[0], visual, scaling, context.share(visual)
            )
    if context.probe:
        return torch.zeros_like(query).transpose(1, 2)
    own = None
    if index in context.attend:
        own = context.attend[index](context, index, query, key, value, scaling)
    if bias is not None:
        context.cache.layers[index].bias = bias
    output = _dense(call, context, bias) if own is None else own.transpose(1, 2)
    if context.after is not None:
        context.after(index, query, key, value, scaling)
    elif (layer := context.cache.layers[index]).window is not None:
        layer.enter(context)
        layer.slide(context.first_left(index))
    return output


def _dense(call: Call, context: PrefillContext, bias: Tensor | None) -> Tensor:
    """Attention of a prompt over its own rows."""
    query, key, value, mask = call.query, call.key, call.value, call.mask
    visible = context.visible(call.layer)
    if visible is not None:
        mask = visible[None, None]
    if bias is not None:
        n = key.shape[2]
        if mask is None and has_kernels(query, key):
            return biased_attention(query, key, value, bias, call.scaling).transpose(1, 2)
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool, device=key.device).tril()
        mask = with_bias(mask, bias, query.dtype)
    return call.of(query, key, value, mask)


def _cached(
    call: Call, context: DecodeContext, *, alone: bool = True, chunk: bool = False
) -> Tensor:
    """Attention of new tokens over a frozen cache; its tail already contains them.

    Parameters
    ----------
    alone : bool
        Whether the step has no rows of other caches.
    chunk : bool
        Whether the tokens are a chunk of a prompt, whose shapes may differ from others'.
    """
    if isinstance(context.cache, JointCache):
        return _grouped(call, context)
    query, key, value, scaling = call.query, call.key, call.value, call.scaling
    index, tokens = call.layer, query.shape[2]
    layer = context.cache.layers[index]
    sliding = context.cache.sliding(index, tokens)
    if context.observers is not None:
        mask = layer.mask(tokens, context.tree, sliding, layer.extent(tokens))
        _observe(index, query, layer, mask, context.observers, scaling)
    if context.views is not None:
        return _listed(query, layer, context.views[0][index], sliding, scaling)
    plain = not layer.segments and layer.attention_mass is None
    # Few rows over a cache on a GPU: the decode kernel, which reads only slots in use.
    kernels = has_kernels(query, key) if context.kernels is None else context.kernels
    dense = plain and not (tokens <= _FEW and kernels)
    alone = alone and len(query) == 1
    if dense and layer.prefix and not (sliding and layer.rank is not None):
        attend = partial(_last, call, layer, sliding, alone)
        if tokens == 1:
            return attend(query, key, value, layer.max_lengths[0] + 1)
        if alone and context.tree is not None and query.dtype.itemsize == 2:
            return _by_node(query, key, value, context.tree[0], layer.max_lengths[0], attend)
    if context.ancestors is not None and layer.attention_mass is None and not sliding and kernels:
        at = layer.length[..., None] + torch.arange(tokens, device=key.device)
        at = at[..., None].expand(-1, -1, -1, key.shape[3])
        own = key.gather(2, at), value.gather(2, at)
        lengths, words = layer.length, context.ancestors
        output, _ = tree_verify(
            query, key, value, lengths, *own, words, scaling, layer.segments, layer.bias
        )
        return output.transpose(1, 2)
    bias, segments = layer.bias, layer.segments
    tail = max(layer.max_lengths) + tokens if chunk else layer.extent(tokens)
    # A single token sees all slots in use, without a tree or a window: their number says which.
    if not dense and tokens == 1 and context.tree is None and not sliding:
        mask = layer.length + 1 if context.lengths is None else context.lengths[index]
    else:
        mask = layer.mask(tokens, context.tree, sliding, tail)
    if tail < key.shape[2]:
        key, value = key[:, :, :tail], value[:, :, :tail]
        bias = None if bias is None else bias[:, :, :tail]
    if sliding and segments:  # rows see different parts of them, which needs a mask
        parts = [layer.opened(segment, tokens, context.tree, key.dtype) for segment in segments]
        key, value, mask, bias = _joined([*parts, (key, value, mask, bias)])
        segments = []
    if dense:
        if bias is not None:
            mask = with_bias(mask, bias[:, :, None], query.dtype)
        output = _buffer_attention(query, key, value, mask, scaling)
    else:
        output, _, attention_mass = decode_mixed(
            query,
            segments,
            key,
            value,
            mask,
            scaling,
            bias,
            want_attention_mass=layer.attention_mass is not None,
        )
        if attention_mass is not None:
            layer.receive(attention_mass[:, :, -tail:], sliding)
        output = output.transpose(1, 2)
    return output


def _last(
    call: Call,
    layer: KVLayer,
    sliding: bool,
    alone: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    end: int,
) -> Tensor:
    """Attention of one token of each row over the first ``end`` slots, the last one its own."""
    start = max(end - layer.window, 0) if sliding and layer.window else 0
    key, value = (x.narrow(2, start, end - start) for x in (key, value))
    bias = None if layer.bias is None else layer.bias[:, :, None, start:end].to(query.dtype)
    if not alone:
        return _buffer_attention(query, key, value, bias, call.scaling)
    # A single row: Hugging Face's own call on these slots is bit-identical.
    if bias is not None and bias.shape[1] != query.shape[1]:
        bias = bias.repeat_interleave(query.shape[1] // bias.shape[1], 1)
    return call.of(query, key, value, bias)


def _by_node(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: Tensor,
    n: int,
    attend: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Tensor:
    """Attention of the nodes of a tree after ``n`` slots, each as if it were a single token.

    In half precision, one call for all nodes rounds differently, which can decide near ties.
    """
    outputs = []
    keys, values = (x[:, :, : n + len(tree)].clone() for x in (key, value))
    for node, seen in enumerate(tree):
        path = n + seen.nonzero().flatten()
        end = n + len(path)
        keys[:, :, n:end], values[:, :, n:end] = key[:, :, path], value[:, :, path]
        outputs.append(attend(query[:, :, node : node + 1], keys, values, end))
    return torch.cat(outputs, 1)


def _grouped(call: Call, context: DecodeContext) -> Tensor:
    """`_cached` for rows of several groups, one group after another."""
    outputs, first = [], 0
    for number, cache in enumerate(context.cache.caches):
        layer, rows = cache.layers[call.layer], slice(first, first + cache.rows)
        tree, ancestors = (
            None if x is None else x[rows] for x in (context.tree, context.ancestors)
        )
        observers = None if context.observers is None else context.observers[rows]
        views = None if context.views is None else [context.views[number]]
        own = DecodeContext(cache, tree, ancestors, views=views, observers=observers)
        part = replace(call, query=call.query[rows], key=layer.keys, value=layer.values)
        outputs.append(_cached(part, own, alone=False))
        first += cache.rows
    return torch.cat(outputs)


def _listed(
    query: Tensor, layer: KVLayer, view: SlotList, sliding: bool, scaling: float | None
) -> Tensor:
    """Attention of one new token of each row over some slots of the tail, (B, 1, Hq, D)."""
    end, start = layer.length + 1, torch.minimum(view.start, layer.length)
    lists = view.slots, view.counts, start, end, view.new(layer.max_lengths) + 1
    if not sliding and has_kernels(query, layer.keys):
        given = query, layer.keys, layer.values, *lists, scaling, layer.bias
        return decode_slots(*given)[0].transpose(1, 2)
    at, mask = gathered(*lists)
    if sliding:
        mask = mask & layer.mask(1, None, True)[:, :, 0].gather(2, at[2])
    mask = mask[:, :, None]
    if layer.bias is not None:
        mask = with_bias(mask, layer.bias[at][:, :, None], query.dtype)
    return _buffer_attention(query, layer.keys[at], layer.values[at], mask, scaling)


def _observe(
    index: int,
    query: Tensor,
    layer: KVLayer,
    mask: Tensor,
    observers: Sequence[tuple[int, Observer] | None],
    scaling: float | None,
) -> None:
    """Show observers the attention of new tokens over the first N slots of the tail.

    ``mask`` (B, H, T, N): what each token sees.
    """
    for row, wanted in enumerate(observers):
        if wanted is None:
            continue
        nodes, observer = wanted
        keys, values = (x[row, :, : mask.shape[3]] for x in (layer.keys, layer.values))
        q = query[row, :, :nodes].float().unflatten(0, (len(keys), -1)) * scale_of(scaling, query)
        logits = q @ keys.float().transpose(-1, -2)[:, None]
        if layer.bias is not None:
            logits = logits + layer.bias[row, :, None, None, : keys.shape[1]]
        logits = logits.masked_fill(~mask[row, :, None, :nodes], -torch.inf)
        observer(index, logits.softmax(-1).flatten(0, 1), keys, values)


def _extended(call: Call, context: PrefillContext) -> Tensor:
    """Attention of a later chunk of a prompt."""
    index, tokens, key = call.layer, call.query.shape[2], call.key
    layer, sliding = context.cache.layers[index], context.cache.sliding(index, tokens)
    if layer.even and not layer.segments and layer.attention_mass is None and not sliding:
        output = _after_slots(call, context)
    else:
        output = _cached(call, DecodeContext(context.cache), chunk=True)
    if context.after is not None:
        at = layer.length[..., None] + torch.arange(tokens, device=key.device)
        at = at[..., None].expand(-1, -1, -1, key.shape[3])
        keys, values = (buffer.gather(2, at) for buffer in (layer.keys, layer.values))
        context.after(index, call.query, keys, values, call.scaling)
    return output


def _after_slots(call: Call, context: PrefillContext) -> Tensor:
    """Attention of a chunk over the slots in use, the same in all heads, and over its own rows."""
    layer, query, tokens = context.cache.layers[call.layer], call.query, call.query.shape[2]
    n = layer.max_lengths[0] + tokens
    key, value = call.key[:, :, :n], call.value[:, :, :n]
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotated in float32 under autocast
    if context.mask_rule is None and layer.bias is None:
        groups = query.shape[1] // key.shape[1]
        output = scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, 1),
            value.repeat_interleave(groups, 1),
            attn_mask=causal_lower_right(tokens, n),  # by lengths, where a kernel can do that
            dropout_p=call.dropout,
            scale=call.scaling,
        )
        return output.transpose(1, 2)
    mask = torch.ones(tokens, n, dtype=torch.bool, device=key.device).tril(n - tokens)
    if context.mask_rule is not None:
        mask[:, n - tokens :] = context.mask_rule(context.layout)
    mask = mask[None, None]
    if layer.bias is not None:
        mask = with_bias(mask, layer.bias[:, :, None, :n], query.dtype)
        mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)
    return call.of(query, key, value, mask)


def _joined(
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys, values, masks and biases of several parts, concatenated."""
    keys, values, masks, biases = zip(*parts, strict=True)
    bias = None
    if any(part is not None for part in biases):
        pairs = zip(keys, biases, strict=True)
        known = [
            key.new_zeros(key.shape[:3], dtype=torch.float32) if part is None else part
            for key, part in pairs
        ]
        bias = torch.cat(known, 2)
    return torch.cat(keys, 2), torch.cat(values, 2), torch.cat(masks, 3), bias


def _buffer_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention over static buffers. ``mask`` (B, Hkv, T, cap); returns (B, T, Hq, D)."""
    b, hq, t, d = query.shape
    hkv = key.shape[1]
    # The query heads of one KV head become extra rows, so keys and values are never repeated.
    rows = query.reshape(b, hkv, hq // hkv * t, d)
    if mask is not None and t > 1:  # one row of the mask serves all query heads
        mask = mask.repeat(1, 1, hq // hkv, 1)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(b, hq, t, -1).transpose(1, 2)


def _query_rows(request: StatRequest, context: PrefillContext) -> Tensor | None:
    """Indices of the query rows that a request selects; ``None`` for all."""
    n, device = len(context.layout) - context.answer, context.layout.device
    if request.rows == "columns":
        return None if context.answer == 0 else torch.arange(n, device=device)
    if request.rows == "text":
        return torch.arange(context.layout.text_start, n, device=device)
    if request.rows in ("last", "window"):
        return torch.arange(max(n - (request.n or 1), 0), n, device=device)
    raise ValueError(f"the language model has no {request.rows!r} rows")


def has_kernels(*tensors: Tensor) -> bool:
    """Whether attention runs on the project's kernels: not where gradients are needed."""
    return not torch.is_grad_enabled() and use_triton("attention", *tensors)


# Attention is switched in these config objects, which several models may share, so the locks belong
# to them. They are kept by identity, because configs compare by value and cannot be hashed.
_SWITCHES = ("text_config", "vision_config")
_ATTENTION = "_attn_implementation_internal"  # without those of the parts of a config
_LOCKS: dict[int, tuple[ReferenceType, AbstractContextManager]] = {}
_GUARD = threading.Lock()


def _locks_of(model: PreTrainedModel) -> list[AbstractContextManager]:
    """The locks of the configs in which ``model`` is switched, in the order to take them in."""
    configs = {id(c): c for c in (getattr(model.config, key) for key in _SWITCHES)}
    with _GUARD:
        for key, config in configs.items():
            if key not in _LOCKS:

                def forget(_: Any, key: int = key) -> None:
                    _LOCKS.pop(key, None)

                # `forget` is called before another object can have this id.
                _LOCKS[key] = ref(config, forget), threading.RLock()
        # One order for all models, so that no two of them wait for each other.
        return [_LOCKS[key][1] for key in sorted(configs)]


@contextmanager
def switched(model: PreTrainedModel) -> Iterator[None]:
    """Prepare ``model`` for the engine in this thread, see `switch`; on exit, it is restored."""
    changes = Changes()
    try:
        try:
            switch(model, Modules((model,)), changes)
            yield
        except Exception:
            raise
        except BaseException:
            changes.interrupted = True
            raise
        finally:
            changes.undo()
    finally:  # again, where an interrupt has ended it
        changes.undo()


def switch(model: PreTrainedModel, modules: Modules, changes: Changes) -> None:
    """Prepare ``model`` for the engine in this thread until ``changes`` are undone.

    It uses vlmfast's attention and `LengthRotary`, its device is the current one, and gradient
    checkpointing, under which layers get no cache, is suspended. Other threads wait.

    Parameters
    ----------
    modules : Modules
        All modules of the model.
    """
    device = device_of(model.get_input_embeddings())
    changes.hold(_locks_of(model))
    changes.note_modules(modules.states)
    changes.note_thread("cpu" if device is None else device.type)
    changes.enter(_current(device))
    # Hugging Face enables checkpointing by an attribute of the instance.
    for own in [own for own in modules.states if own.get("gradient_checkpointing")]:
        changes.add(partial(own.__setitem__, "gradient_checkpointing", True))
        own["gradient_checkpointing"] = False
    changes.enter(rotary_by_length(model.get_decoder()))
    for config, name in _switchable(model, modules):
        changes.add(partial(setattr, config, _ATTENTION, getattr(config, _ATTENTION)))
        setattr(config, _ATTENTION, name)


def _switchable(model: PreTrainedModel, modules: Modules) -> list[tuple[PreTrainedConfig, str]]:
    """The configs of which modules read the name of their attention, and the engine's names.

    They are those that ``set_attn_implementation`` would set, which looks at all modules twice for
    each request.
    """
    names = dict(zip(_SWITCHES, (TEXT, VISION), strict=True))
    found = [(getattr(model.config, key), name) for key, name in names.items()]
    for config, name in found:  # the configs of parts follow
        parts = [getattr(config, key, None) for key in config.sub_configs]
        found += [(part, name) for part in parts if part is not None]
    # Those of classes that have other attention of their own.
    fixed = [
        of.config for of in modules.of(PreTrainedModel) if not of._can_set_attn_implementation()
    ]
    return [(config, name) for config, name in found if all(config is not own for own in fixed)]


def _current(device: torch.device | None) -> AbstractContextManager:
    """Kernels and captures run on the current device, which is set per thread."""
    cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if cuda else nullcontext()


AttentionInterface.register(TEXT, text_attention)
AttentionInterface.register(VISION, vision_attention)
AttentionMaskInterface.register(VISION, sdpa_mask)
