"""The candidates: methods, budgets, positions and stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from vlmfast.core.protocols import PROTOCOLS
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.stage import Stage, at_budget, with_values
from vlmfast.errors import RecipeError
from vlmfast.eval.axes import measured, with_share

BUDGETS = (0.5, 0.33, 0.22, 0.11, 0.05)
SHARES = (0.5, 0.2, 0.1)  # of the cache
STACKED = 4
_ELSEWHERE = {"media", "views", "drafter"}  # protocols of methods without a budget or a share
# Baselines that ignore the content, and methods that do not change what is answered.
_EXCLUDED = ("random", "downsample", "grid", "streamingllm")


def candidates(objective: str) -> list[str]:
    """Single methods, without those that cannot be cheaper than the full model.

    Every method that drops visual tokens takes part with each budget and each policy for the
    positions, every method that compresses the cache with each share or number of bits.

    Parameters
    ----------
    objective : {"ttft", "throughput", "memory"}
        Methods that compress the cache do not shorten the time to the first token.
    """
    found: list[Stage] = []
    for name in filter(_searched, sorted(stage_names())):
        stage = stage_class(name)()
        if _has(stage, "budget"):
            found += _reduced(stage, BUDGETS)
        elif objective != "ttft":
            for recipe in measured(Recipe((stage,))):
                found += [stage for share in SHARES for stage in with_share(recipe, share)]
    return list(dict.fromkeys(text for stage in found if (text := _text((stage,)))))


def stacks(recipes: Sequence[str]) -> list[str]:
    """Stacks of the first `STACKED` recipes that act before the language model and others.

    Parameters
    ----------
    recipes : sequence of str
        The better ones first. Methods that act in the language model or on its cache follow in a
        stack with half of the tokens, or as quantizers with their bits.
    """
    parsed = [Recipe.parse(recipe) for recipe in recipes]
    single = [recipe[0] for recipe in parsed if len(recipe) == 1]
    heads = [s for s in single if s.protocol in ("in-encoder", "encode")][:STACKED]
    tails: dict[str, Stage] = {}
    for stage in single:
        if stage.protocol in ("prefill", "cache", "decode"):
            if _has(stage, "budget"):
                stage = at_budget(stage, 0.5)
            elif _has(stage, "keep"):
                stage = with_values(stage, keep=0.5)
            tails[stage.name] = stage
    chosen = list(tails.values())[:STACKED]
    found = (_text((head, tail)) for head in heads for tail in chosen)
    return [text for text in found if text]


def _searched(name: str) -> bool:
    stage = stage_class(name)
    known = {part.protocol for part in stage().expand()} <= set(PROTOCOLS) - _ELSEWHERE
    return known and name not in _EXCLUDED and not stage.other_model


def _reduced(stage: Stage, budgets: Sequence[float]) -> Iterator[Stage]:
    for positions in ("keep", "compact") if _has(stage, "positions") else (None,):
        for budget in budgets:
            values = {"budget": budget} | ({"positions": positions} if positions else {})
            yield replace(stage, **values)


def _text(stages: Sequence[Stage]) -> str | None:
    """The recipe, or nothing for stages that cannot be combined."""
    try:
        return str(Recipe(tuple(stages)))
    except RecipeError:
        return None


def _has(stage: Stage, name: str) -> bool:
    return any(f.name == name for f in fields(stage))
