"""How a layer of any language model rotates its keys, found by what it does.

Layers may pair neighbouring dimensions, normalize keys after their rotation, or have no rotary
embedding at all, and no config tells. `turn` calls the attention of a layer on the same rows at two
positions and compares its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ._parts import DecoderParts

# No "flash", "sdpa" or "/" in this name: transformers tests for such substrings.
_KEYS = "vlmfast_keys"
_SHIFT = 7
_keys: ContextVar[list[Tensor] | None] = ContextVar("vlmfast_keys", default=None)


def _record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    seen = _keys.get()
    assert seen is not None
    seen.append(key)
    return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_KEYS, _record)


@torch.no_grad()
def turn(
    parts: DecoderParts,
    layer: int,
    attention: nn.Module,
    tables: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    rotate: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
) -> str:
    """What the position of a row does to its key.

    Parameters
    ----------
    parts : DecoderParts
    layer : int
    attention : nn.Module
        Of that layer.
    tables : callable
        Rotary tables of rows (1, N, D) at positions (1, N).
    rotate : callable
        Rotates keys (H, N, D) by ids (H, N) and is compared with.
    rows : Tensor, (1, N, D)
        As the attention takes them; on its device and in its dtype.

    Returns
    -------
    {"rotated", "unchanged", "other"}
    """
    position = torch.arange(rows.shape[1], device=rows.device)[None]
    first, later = (
        _keys_of(parts, layer, attention, tables, rows, at) for at in (position, position + _SHIFT)
    )
    # A rotation in this dtype rounds tables, products and a sum.
    allowed = 8 * max(torch.finfo(rows.dtype).eps, 1e-5) * float(later.abs().max())
    if float((later - first).abs().max()) <= allowed:
        return "unchanged"
    delta = torch.full(first.shape[:2], _SHIFT, device=first.device)
    fits = float((later - rotate(first, delta)).abs().max()) <= allowed
    return "rotated" if fits else "other"


def _keys_of(
    parts: DecoderParts,
    layer: int,
    attention: nn.Module,
    tables: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    rows: Tensor,
    position: Tensor,
) -> Tensor:
    """Keys (H, N, D) of ``rows`` at ``position``."""
    call = parts.calls[layer]
    assert call is not None
    given = {key: value for key, value in call.given.items() if key != "vlmfast_context"}

    def real(value: Any) -> Any:
        if isinstance(value, tuple):
            return tables(rows, position)
        if not isinstance(value, Tensor):
            return value
        return rows if value.dtype.is_floating_point else position

    with _recording(attention) as seen:
        attention(*map(real, call.args), **{name: real(value) for name, value in given.items()})
    return seen[0][0]


@contextmanager
def _recording(attention: nn.Module) -> Iterator[list[Tensor]]:
    config: Any = attention.config
    seen: list[Tensor] = []
    before, token = config._attn_implementation, _keys.set(seen)
    config._attn_implementation = _KEYS
    try:
        yield seen
    finally:
        config._attn_implementation = before
        _keys.reset(token)
