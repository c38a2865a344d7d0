"""How a layer of any language model rotates its keys, found by what it does.

Layers may pair neighbouring dimensions, normalize keys after their rotation, or have no rotary
embedding at all, and no config tells. `turn` calls the attention of a layer on the same rows at two
positions and compares its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._parts import Call, recording

_SHIFT = 7


@torch.no_grad()
def turn(
    call: Call,
    attention: nn.Module,
    tables: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    rotate: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
) -> str:
    """What the position of a row does to its key.

    Parameters
    ----------
    call : Call
        How a layer calls its attention.
    attention : nn.Module
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

    def keys_at(position: Tensor) -> Tensor:
        """Keys (H, N, D) of ``rows`` at ``position``."""

        def real(value: Any) -> Any:
            if isinstance(value, tuple):
                return tables(rows, position)
            if not isinstance(value, Tensor):
                return value
            return rows if value.dtype.is_floating_point else position

        given = {key: real(of) for key, of in call.given.items() if key != "vlmfast_context"}
        with recording(attention) as calls:
            attention(*map(real, call.args), **given)
        return calls[0].key[0]

    position = torch.arange(rows.shape[1], device=rows.device)[None]
    first, later = keys_at(position), keys_at(position + _SHIFT)
    # A rotation in this dtype rounds tables, products and a sum.
    allowed = 8 * max(torch.finfo(rows.dtype).eps, 1e-5) * float(later.abs().max())
    if float((later - first).abs().max()) <= allowed:
        return "unchanged"
    delta = torch.full(first.shape[:2], _SHIFT, device=first.device)
    fits = float((later - rotate(first, delta)).abs().max()) <= allowed
    return "rotated" if fits else "other"
