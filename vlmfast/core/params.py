"""Hyper-parameters of stages: documented and bounded dataclass fields."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, Field, field
from types import NoneType
from typing import Any, get_args

from ..errors import RecipeError
from .saliency import SOURCES


def param(
    default: Any = MISSING,
    doc: str = "",
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] | None = None,
    word: str | None = None,
) -> Any:
    """A documented and bounded dataclass field of a `Stage`.

    ``word`` is its name in recipes, where that is taken by a method of the protocol.
    """
    bounds = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    limits = {key: value for key, value in bounds.items() if value is not None}
    return field(default=default, metadata={"doc": doc, "choices": choices, "word": word, **limits})


def word_of(f: Field) -> str:
    """A field's name in recipes."""
    return f.metadata.get("word") or f.name


def positions_param(default: str) -> Any:
    """The position policy that every reducer offers; its paper's own is the default."""
    return param(
        default,
        "rotary ids of the kept tokens: keep the original ones, or compact (renumbered)",
        choices=("keep", "compact"),
    )


def budget_param() -> Any:
    """The common cost axis that every reducer offers."""
    return param(
        None,
        "visual tokens kept, averaged over the LLM's layers, as a share of those that came in; "
        "replaces the method's own parameters",
        gt=0.0,
        le=1.0,
    )


def repair_param(default: bool = False) -> Any:
    """Offered by every method that merges; its paper's own is the default."""
    return param(default, "attention adds log(weight): a merged token counts for all it stands for")


def saliency_param() -> Any:
    """Offered by every method that ranks tokens by their saliency in the vision tower."""
    return param(
        "auto",
        "source of saliency: attention of CLS, attention received, feature norm; "
        "auto: the first of these that the vision tower has",
        choices=("auto", *SOURCES),
    )


def weights_param() -> Any:
    """Offered by every trained method."""
    return param("auto", "folder of trained weights; auto: those that are shipped for the model")


# Names of comparisons in `operator`. All are false for NaN, which is thus out of every range.
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe(metadata: dict[str, Any]) -> str:
    if metadata.get("choices"):
        return "one of " + ", ".join(metadata["choices"])
    return " and ".join(f"{sign} {metadata[k]:g}" for k, sign in SIGNS.items() if k in metadata)


def show(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(show(v) for v in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    text = str(value)
    return text.replace("e+", "e") if isinstance(value, float) else text  # '+' joins recipe words


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) if names else "none"


def parse_value(stage: str, key: str, word: str, hint: Any) -> Any:
    """``word`` as the type that the field declares."""
    options = [a for a in get_args(hint) if a is not NoneType] if NoneType in get_args(hint) else []
    kind = options[0] if options else hint
    if options and word.lower() == "none":
        return None
    try:
        if getattr(kind, "__origin__", None) is tuple:
            return tuple(get_args(kind)[0](part) for part in word.split("/"))
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                word.lower()
            ]
        return kind(word)
    except (ValueError, KeyError):
        what = getattr(kind, "__name__", str(kind))
        raise RecipeError(f"{stage}: {key}={word!r} cannot be read as {what}") from None


def nearest(word: str, words: list[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    match = difflib.get_close_matches(word.lower(), words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
