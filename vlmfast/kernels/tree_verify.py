"""``tree_verify``: attention of a drafted tree of tokens over a cache and over itself.

Every node of the tree sees the whole cache, and of the tree itself and its ancestors. The pieces
(segments, context, tree) use the programs of `decode_mixed`: the query heads of a KV head times the
nodes are the rows of a tile, so that keys are read, and codes are unpacked, once for 64 of them.
Which nodes of the tree a node sees is stored in one bit per slot.

Bytes: those of `decode_mixed` for the cache, once for every 64 rows (from the second on from the
L2 cache); the tree's own keys and values. Floor for 2,944 slots of 32 heads and D=128:
11.2 us as bfloat16, 2.9 us in 4 bits. ``4 Hq D T slots`` operations: 3.7 us for 60 nodes, so
that a context in 4 bits is compute-bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError

from ._decode_mixed import ANCESTORS, LENGTHS
from ._triton import Variant, use_triton
from .decode_mixed import Floats, attend, decode_mixed_ref, variant
from .quantize_kv import Segment

WORD = 64  # nodes per word of bits


def tree_verify(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tree_keys: Tensor,
    tree_values: Tensor,
    ancestors: Tensor,
    scaling: float | None = None,
    segments: Sequence[Segment] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each node over ``[segments..., context, its ancestors and itself]``.

    Parameters
    ----------
    query : Tensor, (B, Hq, T, D)
        One row per node, rotated to the node's position.
    keys, values : Tensor, (B, Hk, N, D)
        The context, shared by ``Hq // Hk`` query heads each.
    lengths : Tensor, integers, (B, Hk)
        Number of valid slots of the context; the others may hold any values.
    tree_keys, tree_values : Tensor, (B, Hk, T, D)
    ancestors : Tensor, int64, (T,), (T, words) or (B, T, words)
        Bit ``j % 64`` of word ``j // 64`` of row ``i``: whether node ``i`` sees node ``j``. A node
        that does not see itself sees only the context, and nothing without a context.
    scaling : float, optional
        ``D ** -0.5`` by default.
    segments : sequence of Segment
        Quantized keys and values before the context, with a batch axis.
    bias : Tensor, float32, (B, Hk, N), optional
        Added to the logits of each key of the context.

    Returns
    -------
    out : Tensor, (B, Hq, T, D)
        In the query's dtype; zeros for a row that sees nothing.
    lse : Tensor, float32, (B, Hq, T)
        Natural logarithm of the sum of exponentiated logits; -1e30 for a row that sees nothing.

    Raises
    ------
    VLMFastError
        For ancestors of another shape or with too few words; otherwise as `decode_mixed`.
    """
    batch, heads = tree_keys.shape[:2]
    ancestors = _words(ancestors, batch, query.shape[2])
    given = query, keys, values, lengths, tree_keys, tree_values, ancestors
    quantized = [x for segment in segments for x in segment.tensors()]
    if not use_triton("tree_verify", *given, bias, *quantized):
        return tree_verify_ref(*given, scaling, segments, bias)
    context = Floats(keys, values, lengths, LENGTHS, bias)
    tree = Floats(
        tree_keys, tree_values, ancestors[:, None].expand(batch, heads, -1, -1), ANCESTORS
    )
    out, lse, _ = attend("tree_verify", query, [*segments, context, tree], scaling)
    return out, lse


def tree_verify_ref(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tree_keys: Tensor,
    tree_values: Tensor,
    ancestors: Tensor,
    scaling: float | None = None,
    segments: Sequence[Segment] = (),
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`tree_verify` in plain PyTorch: context and tree are one tail of `decode_mixed`."""
    (batch, heads, nodes, _), slots = tree_keys.shape, keys.shape[2]
    ancestors = _words(ancestors, batch, nodes)
    node = torch.arange(nodes, device=query.device)
    sees_node = (ancestors[..., node // WORD] >> (node % WORD)) & 1 != 0
    valid = torch.arange(slots, device=query.device) < lengths[..., None]
    mask = torch.cat(
        [
            valid[:, :, None].expand(batch, heads, nodes, slots),
            sees_node[:, None].expand(batch, heads, nodes, nodes),
        ],
        -1,
    )
    if bias is not None:
        bias = torch.cat([bias, bias.new_zeros(batch, heads, nodes)], -1)
    out, lse, _ = decode_mixed_ref(
        query,
        segments,
        torch.cat([keys, tree_keys], 2),
        torch.cat([values, tree_values], 2),
        mask,
        scaling,
        bias,
    )
    return out, lse


def _words(ancestors: Tensor, batch: int, nodes: int) -> Tensor:
    """Ancestors as (B, T, words)."""
    given = tuple(ancestors.shape)
    if ancestors.dim() == 1:
        ancestors = ancestors[:, None]
    if ancestors.dim() == 2:
        ancestors = ancestors[None].expand(batch, -1, -1)
    words = -(-nodes // WORD)
    if (
        ancestors.dtype != torch.int64
        or ancestors.dim() != 3
        or ancestors.shape[:2] != (batch, nodes)
        or ancestors.shape[2] < words
    ):
        raise VLMFastError(
            f"tree_verify: ancestors {given} of {ancestors.dtype}; {nodes} nodes take int64 "
            f"({nodes}, {words}), or one such tensor for each of {batch} batch rows"
        )
    return ancestors


# --- Triton: programs of `decode_mixed` ----------------------------------------------------------


def variants(arch: int) -> list[Variant]:
    """What launches compile on an architecture."""
    found = [
        variant(arch, "bf16", 128, heads, nodes, layout, *seen)  # query heads per KV head
        for heads, nodes in ((1, 26), (4, 26), (7, 60))
        for layout, seen in (
            ((4, 0, 128), ()),
            ((2, 0, 128), ()),
            ((2, 32, 32), ()),
            (None, (LENGTHS,)),
            (None, (ANCESTORS,)),
        )
    ]
    for seen in (LENGTHS, ANCESTORS):
        found.append(variant(arch, "fp16", 80, 1, 26, None, seen))
        found.append(variant(arch, "bf16", 128, 1, 1, None, seen))
    return found
