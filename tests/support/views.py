"""What is left of a prompt whose views are not all encoded, and what that costs."""

from __future__ import annotations

from support.look import Look
from vlmfast import VLM
from vlmfast.core.recipe import Recipe


def looked(vlm: VLM, *stages, asked=(), **media) -> tuple:
    """Tokens, statistics and answer of a prompt after ``stages``."""
    answer = vlm.ask("what ?", **media, recipe=Recipe((*stages, Look(asked))), max_new_tokens=4)
    return Look.seen["tokens"], Look.seen["stats"], answer


def rows_in(vlm: VLM, ask) -> tuple[int, int]:
    """Views that enter the first block of the tower and the projector during a call."""
    counts = [0, 0]

    def count(at: int):
        def hook(module, args, kwargs):
            value = args[0] if args else next(iter(kwargs.values()))
            counts[at] += len(value)

        return hook

    modules = vlm.adapter.vision_blocks()[0], vlm.adapter.projector()
    handles = [
        m.register_forward_pre_hook(count(i), with_kwargs=True) for i, m in enumerate(modules)
    ]
    try:
        ask()
    finally:
        for handle in handles:
            handle.remove()
    return counts[0], counts[1]
