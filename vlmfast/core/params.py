"""Hyper-parameters of stages: documented and bounded dataclass fields."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field
from types import NoneType
from typing import Any, get_args

from ..errors import RecipeError, VLMFastError
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
    recipe_name: str | None = None,
    excludes: tuple[str, ...] = (),
) -> Any:
    """A documented and bounded dataclass field of a `Stage`.

    Parameters
    ----------
    default : optional
    doc : str
        One line for ``vlmfast methods NAME`` and the documentation.
    gt, ge, lt, le : float, optional
        Bounds. Of a tuple, those of each entry.
    choices : tuple of str, optional
        Allowed values.
    recipe_name : str, optional
        Name in recipes, where the field's own is taken by a method of the protocol.
    excludes : tuple of str
        Fields of the same purpose, which cannot be given together with this one.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "recipe_name": recipe_name,
        "excludes": excludes,
    }
    bounds = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    limits = {key: value for key, value in bounds.items() if value is not None}
    return field(default=default, metadata=metadata | limits)


def recipe_name(f: Field) -> str:
    """A field's name in recipes."""
    return f.metadata.get("recipe_name") or f.name


def positions_param() -> Any:
    """The position policy that every reducer offers, with one default for all of them."""
    return param(
        "keep",
        "rotary ids of the kept tokens: keep the original ones, or compact (renumbered)",
        choices=("keep", "compact"),
    )


def budget_param(*excludes: str) -> Any:
    """The common cost axis that every reducer offers; it replaces ``keep`` or other fields."""
    return param(
        None,
        "visual tokens kept, averaged over the LLM's layers, as a fraction of the input; "
        "replaces the method's own parameters",
        gt=0.0,
        le=1.0,
        excludes=excludes or ("keep",),
    )


def proportional_attention_param(default: bool = False) -> Any:
    """Offered by every method that merges; its paper's own is the default."""
    return param(
        default,
        "attention adds log(weight), so that a merged token counts as often as its parts",
    )


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
    return param("auto", "folder or hub id (owner/name@revision) of trained weights; auto: shipped")


# Names of comparisons in `operator`. All are false for NaN, which is thus out of every range.
SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LONGEST = 80  # characters of a text that errors quote
LARGEST = 2**60  # of whole numbers: in 64 bits, with room for sums


def describe(metadata: Mapping[str, Any]) -> str:
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
        raise RecipeError(f"{stage}: {key}={quoted(word)} cannot be read as {what}") from None


def nearest(word: str, words: list[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    match = difflib.get_close_matches(word[:_LONGEST].lower(), words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def check_keys(
    what: str,
    given: Iterable[Any],
    known: Collection[str],
    error: type[VLMFastError] = VLMFastError,
) -> None:
    """Raise for the first key that is not known, with the nearest one and all of them.

    Parameters
    ----------
    what : str
        That has the keys, for the error.
    """
    for key in given:
        if key not in known:
            name = str(key)
            raise error(
                f"{what} has the unknown key {quoted(name)}{nearest(name, list(known))}; known "
                f"are {listed(known)}"
            )


def quoted(text: str) -> str:
    """``text`` in quotes on one line, shortened where it is long."""
    return repr(text if len(text) <= _LONGEST else text[:_LONGEST] + "…")


def brief(value: Any) -> str:
    """`show` on one line, shortened where it is long."""
    return quoted(show(value))[1:-1]
