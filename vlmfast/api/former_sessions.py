"""Session files of earlier versions: entries that they lack are filled in before they are checked.

Format 1 names classes by the modules that they were in, and how many ids were prefilled first.
Until version 0.1.0 stages read the CLS row of a vision block themselves, where they ask for a
`Saliency` today, and caches did not count the tokens that a sliding window has dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlmfast.core.moved import former_names
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import VisionStats
from vlmfast.models.base import Adapter

__all__ = ["completed", "former_paths"]

_RENAMED = {"mass": "attention_mass"}


def completed(adapter: Adapter, recipe: Recipe, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a session in the present format.

    Parameters
    ----------
    adapter : Adapter
    recipe : Recipe
        Under which the session was saved.
    state : dict
        As unpacked, from a file of the present format or of an earlier version.

    Raises
    ------
    ValueError
        Where an entry is missing that cannot be computed from the others.
    """
    known, rest = state.get("pictures"), dict(state)
    if "cache" in rest:
        cache = rest.pop("cache")
        rest["caches"] = [] if cache is None else [_cache(adapter, cache)]
    if known is not None:
        vision = known.seen.vision
        missing = {
            asked.key: asked
            for stage in recipe.acting(EncodeStage)
            for asked in stage.saliencies()
            if asked.key not in vision.saliency
        }
        found = {key: _of_rows(adapter, vision, asked) for key, asked in missing.items()}
        vision = replace(vision, saliency=vision.saliency | found)
        known = replace(known, seen=replace(known.seen, vision=vision))
    return {"consumed": None} | rest | {"pictures": known}


def former_paths(cls: type) -> list[str]:
    """Paths, as ``module.Class``, by which files of format 1 name a class."""
    return [f"{cls.__module__}.{cls.__qualname__}", *former_names(cls)]


def _cache(adapter: Adapter, cache: dict[str, Any]) -> dict[str, Any]:
    """The only cache of a file of format 1."""
    layers = [
        ({} if "gap" in layer else {"gap": _gap(adapter, index)})
        | layer
        | {"buffers": _renamed(layer["buffers"])}
        for index, layer in enumerate(cache["layers"])
    ]
    present = {name: of for name, of in _renamed(cache).items() if name != "base"}
    return present | {"layers": layers}


def _renamed(entries: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(key, key): value for key, value in entries.items()}


def _gap(adapter: Adapter, layer: int) -> list[int]:
    if adapter.windows[layer] is not None:
        raise ValueError(f"layer {layer} has a sliding window, and its dropped tokens are missing")
    return [0]


def _of_rows(adapter: Adapter, vision: VisionStats, asked: SaliencyRequest) -> tuple[Saliency, ...]:
    """A request's answer from the CLS rows that an earlier version stored."""
    block = adapter.salient_block(asked.block)
    rows, keys = vision.rows.get(block), vision.keys.get(block)
    if adapter.source(asked) != "cls" or rows is None or (asked.keys and keys is None):
        raise ValueError(f"the saliency {asked.key} is missing")
    views = [adapter.whole_first(item) for item in vision.items]
    return tuple(
        Saliency("cls", rows[of], keys[of] if asked.keys and keys is not None else None)
        for of in views
    )
