"""What the stages of a recipe read from the vision tower of a Qwen. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import VisionStats
from vlmfast.engine.attention_maps import received_sum

from .grids import Blocks, Grids
from .recipes import Plan, joined


@dataclass
class Seen:
    """What a pass through the tower left, of the patches (S) of all images.

    Parameters
    ----------
    attended : dict of int to (Tensor, Tensor)
        Block index to its rotated queries and keys, (S, H, d).
    merged : list of Tensor
        Inputs of the merger, (S, D).
    gather : callable
        Tensors of the heads (H, ...) of this rank, as those of all ranks.
    """

    gather: Callable[[Tensor], Tensor]
    attended: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    merged: list[Tensor] = field(default_factory=list)


@contextmanager
def watching(
    visual: Any, family: Grids, plans: Sequence[Plan], gather: Callable[[Tensor], Tensor]
) -> Iterator[Seen]:
    """Record what the stages of some plans read; hooks are on modules that they name alone."""
    seen, requests = Seen(gather), [a for plan in plans for a in plan.requests.values()]
    norms = any(family.source(asked) == "norm" for asked in requests)

    def attended(block: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, given: dict[str, Tensor]) -> None:
            seen.attended[block] = given["query"][0], given["key"][0]

        return hook

    with ExitStack() as hooks:
        for block in {family.block(a) for a in requests if family.source(a) != "norm"}:
            attention = visual.blocks[block].attn.attn
            handle = attention.register_forward_pre_hook(attended(block), with_kwargs=True)
            hooks.callback(handle.remove)
        if norms:
            # The merger itself may have a `__call__` that runs no hooks, its norm has none.
            norm = getattr(visual.merger, "ln_q", None) or visual.merger.norm
            handle = norm.register_forward_pre_hook(
                lambda module, args: seen.merged.append(args[0].flatten(0, -2))
            )
            hooks.callback(handle.remove)
        yield seen


def statistics(
    plan: Plan, family: Grids, media: Blocks, seen: Seen, first: int, tensors: dict[str, Tensor]
) -> VisionStats:
    """Statistics of one image or video.

    Parameters
    ----------
    first : int
        Its first patch among those of the pass.
    tensors : dict of str to Tensor
        As its processor made them; where a stage reads digests.
    """
    saliency = {
        key: _saliency(family, media, seen, first, asked) for key, asked in plan.requests.items()
    }
    stats = VisionStats(media.items, {}, saliency=saliency)
    if not plan.digests:
        return stats
    from vlmfast.engine.features import with_digests

    given = tensors | {"input_ids": torch.zeros(1, 0, dtype=torch.int64)}
    return replace(stats, items=with_digests(family.adapter, given, stats.items))


def _saliency(
    family: Grids, media: Blocks, seen: Seen, first: int, asked: SaliencyRequest
) -> tuple[Saliency, ...]:
    """Of each step."""
    adapter, source, found = family.adapter, family.source(asked), []
    cells = family.config.vision_config.spatial_merge_size**2
    each = len(media) // len(media.items) * cells
    for step, item in enumerate(media.items):
        span = slice(first + step * each, first + (step + 1) * each)
        if source == "norm":
            merged = joined(seen.merged)[span].float()[None]
            rows, many, keys = merged.norm(dim=-1)[:, None], 1, merged if asked.keys else None
        else:
            query, key = (x[span].transpose(0, 1) for x in seen.attended[family.block(asked)])
            received = received_sum(query, key, None, None, causal=False)[:, 0]
            rows, many, keys = seen.gather(received)[None] / each, cells, None
            if asked.keys:
                key = seen.gather(key.float())
                keys = (key.transpose(0, 1).flatten(1) if asked.wide else key.mean(0))[None]
        rows = adapter.to_tokens(rows, item) * many
        if asked.keys:
            keys = adapter.to_tokens(keys.transpose(1, 2), item).transpose(1, 2)
        found.append(Saliency(source, rows, keys))
    return tuple(found)
