"""`VLM.compare`: one question under several recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.engine.prefix_cache import prefix_cache_of
from vlmfast.errors import DeadlineExceeded, RequestCancelled, VLMFastError
from vlmfast.models.base import Adapter

from .answer import Answer, Comparison, ComparisonTable, agreement
from .generation import gate, shown
from .request import ASK, OF_ASK, answered, recipe_of


def compared(
    adapter: Adapter,
    messages: Callable[[], list[dict[str, Any]]],
    recipes: Sequence[str | Stage | Recipe | None],
    errors: str,
    generation: dict[str, Any],
) -> ComparisonTable:
    """The full model first, then each recipe; ``messages`` is called after all else is checked."""
    recipes = [recipes] if isinstance(recipes, str | Stage | Recipe) else recipes
    if not isinstance(recipes, list | tuple):
        raise VLMFastError(f"recipes must be a list of recipes, not {shown(recipes)}")
    if errors not in ("row", "raise"):
        raise VLMFastError(f"errors={shown(errors)} must be 'row' or 'raise'")
    plans = [_unless_refused(partial(recipe_of, adapter, recipe), errors) for recipe in recipes]
    _check_any_ran(plans)
    elsewhere = {**OF_ASK, "recipe": "compare takes a list, recipes="}
    names = (*ASK, "recipes", "errors")
    passed = gate(adapter, generation, names=names, elsewhere=elsewhere)
    given = messages()
    loaded: dict[int, Any] = {}
    answers: list[Answer | VLMFastError] = []
    with prefix_cache_of(adapter).bypassed():
        full = answered(adapter, given, Recipe(), passed, loaded)
        for plan in plans:
            run = partial(answered, adapter, given, plan, passed, loaded)
            refused = isinstance(plan, VLMFastError)
            answers.append(plan if refused else _unless_refused(run, errors))
    _check_any_ran(answers)
    table = ComparisonTable([Comparison(full.recipe, full, 1.0, full=full)])
    for recipe, plan, answer in zip(recipes, plans, answers, strict=True):
        if isinstance(answer, Answer):
            same = agreement(answer.token_ids, full.token_ids)
            table.append(Comparison(answer.recipe, answer, same, full=full))
        else:
            text = recipe if isinstance(recipe, str) else shown(recipe)
            name = plan.text if isinstance(plan, Recipe) else text
            table.append(Comparison(name, None, None, str(answer), full))
    return table


def _unless_refused(call: Callable[[], Any], errors: str) -> Any:
    """The result of ``call``, or the error by which it refuses a recipe."""
    try:
        return call()
    except (RequestCancelled, DeadlineExceeded):
        raise
    except VLMFastError as error:
        if errors == "raise":
            raise
        return error


def _check_any_ran(results: list[Any]) -> None:
    """Raise the first error if all results are errors."""
    if results and all(isinstance(result, VLMFastError) for result in results):
        raise results[0]
