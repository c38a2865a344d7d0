"""Saves and loads sessions, and validates a file before anything in it is used."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlmfast.core import snapshot
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.placement import weights_of
from vlmfast.core.protocols import DecodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import Saliency
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.engine.cache import KVCache
from vlmfast.engine.decode import RowGroup
from vlmfast.engine.features import settings_of_files
from vlmfast.engine.kv_layer import SLOTWISE
from vlmfast.engine.prefill import Seen
from vlmfast.engine.prefix import Prefix
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import ModelError, RecipeError, VLMFastError, check_memory
from vlmfast.kernels.quantize_kv import Segment
from vlmfast.models.base import Adapter
from vlmfast.version import __version__

from .session_checks import capacity

__all__ = ["OF_CACHE", "classes", "frozen", "identity", "read", "thawed", "write"]

_KIND, _VERSION = "vlmfast-session", "1"
_LONGEST = 4096  # characters of a recipe


def identity(adapter: Adapter) -> dict[str, Any]:
    """Identify a model by its sizes, dtype and settings, and a hash of samples of every weight."""
    digest = hashlib.sha256()
    picked: dict[torch.dtype, list[torch.Tensor]] = {}
    for name, weight in weights_of(adapter.model):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        flat = weight.detach().reshape(-1)
        if len(flat):
            index = torch.arange(16, device=flat.device) * (len(flat) - 1) // 15
            picked.setdefault(flat.dtype, []).append(flat[index].cpu())
    for samples in picked.values():
        digest.update(torch.cat(samples).view(torch.uint8).numpy().tobytes())
    return {
        "sizes": adapter.sizes(),
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "weights": digest.hexdigest(),
        "settings": settings_of_files(adapter, language=True),
    }


def _one_device(adapter: Adapter) -> None:
    if adapter.split:
        raise ModelError("sessions of a model on several devices cannot be saved or loaded")


def write(
    path: str | Path, adapter: Adapter, recipe: Recipe, own: tuple[type, ...], state: dict[str, Any]
) -> None:
    """Write a session's state, replacing an existing file atomically.

    Parameters
    ----------
    own : tuple of type
        As in `read`.
    state : dict
        ``history``, ``messages``, ``consumed``, ``stats``, ``pictures`` and ``caches`` (a list
        of what `frozen` returns).

    Raises
    ------
    VLMFastError
        With the reason, if the file cannot be written.
    """
    _one_device(adapter)
    tensors: dict[str, torch.Tensor] = {}
    metadata = {
        "kind": _KIND,
        "version": _VERSION,
        "vlmfast": __version__,
        "recipe": str(recipe),
        "model": json.dumps(identity(adapter)),
        "session": json.dumps(snapshot.pack(state, tensors, "session", classes(recipe, own))),
    }
    snapshot.write(path, metadata, tensors)


def read(
    path: str | Path,
    adapter: Adapter,
    choose: Callable[[str], Recipe],
    own: tuple[type, ...],
    build: Callable[[Recipe, dict[str, Any]], Any],
) -> Any:
    """Read a file and return what ``build`` makes of its recipe and state.

    Parameters
    ----------
    choose : callable
        Returns the recipe of the session from the text of the saved recipe.
    own : tuple of type
        Additional classes that the state may contain.
    build : callable
        Checks the state; any exception becomes a single error about the file.

    Raises
    ------
    VLMFastError
        For a file that cannot be read or used; `ModelError` if it was saved with another model,
        `RecipeError` if it was saved under another recipe.
    """
    _one_device(adapter)
    metadata, tensors = snapshot.read(path, "a saved session")
    if metadata.get("kind") != _KIND:
        raise VLMFastError(f"{path} is not a saved session")
    version = metadata.get("version")
    if version != _VERSION:
        raise VLMFastError(
            f"{path} was saved by vlmfast {str(metadata.get('vlmfast'))[:40]} in format "
            f"{str(version)[:40]}; this vlmfast reads format {_VERSION}"
        )
    lacking = [key for key in ("model", "recipe", "session") if not metadata.get(key)]
    if not lacking and len(metadata["recipe"]) > _LONGEST:
        raise VLMFastError(f"{path} cannot be used: its recipe is too long")
    if lacking:
        raise VLMFastError(f"{path} cannot be used: it has no {lacking[0]}")
    try:
        saved = json.loads(metadata["model"])
        about = json.loads(metadata["session"])
    except (ValueError, RecursionError) as error:
        raise VLMFastError(f"{path} cannot be used: its metadata are not JSON") from error
    _same_model(path, saved, identity(adapter))
    recipe = choose(metadata["recipe"])
    if recipe != Recipe.parse(metadata["recipe"]):
        raise RecipeError(
            f"{path} was saved under the recipe {metadata['recipe'][:200]}, not {recipe}"
        )
    try:
        state = snapshot.unpack(about, tensors, classes(recipe, own))
        if not isinstance(state, dict):
            raise ValueError("it contains no state")
        return build(recipe, state)
    except (ModelError, RecipeError):
        raise
    except Exception as error:  # a forged file can cause any exception
        check_memory(error)
        reason = str(error).partition("\n")[0][:300]
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise VLMFastError(f"{path} cannot be used: {reason}") from error


def _same_model(path: str | Path, saved: Any, own: dict[str, Any]) -> None:
    if saved == own:
        return
    sizes = saved.get("sizes") if isinstance(saved, dict) else None
    if not isinstance(sizes, dict):
        raise ModelError(f"{path} does not say with which model it was saved")
    if sizes != own["sizes"]:
        keys = [key for key, value in own["sizes"].items() if sizes.get(key) != value]
        what = ", ".join(
            f"{key} {str(sizes.get(key))[:40]} and not {own['sizes'][key]}" for key in keys
        )
        raise ModelError(f"{path} was saved with another model: {what or 'additional sizes'}")
    if saved.get("dtype") != own["dtype"]:
        raise ModelError(
            f"{path} was saved with a model in {str(saved.get('dtype'))[:40]}, and this one is in "
            f"{own['dtype']}"
        )
    if saved.get("weights") != own["weights"]:
        raise ModelError(f"{path} was saved with another model: its weights are different")
    raise ModelError(
        f"{path} was saved with other settings of the model, its adapters or its processor; "
        "load it with those"
    )


def classes(recipe: Recipe, own: tuple[type, ...]) -> dict[str, type]:
    """Classes allowed in a file, by their names there: the project's and those of its methods."""
    found = [*own, Seen, Stats, Trace, Segment]
    found += [ItemGeometry, Saliency, TokenLayout, VisionStats, VisualTokens]
    names = {cls.__qualname__: cls for cls in found}
    for part in (part for stage in recipe for part in (stage, *stage.expand())):
        for cls in vars(sys.modules[type(part).__module__]).values():
            dataclass = isinstance(cls, type) and hasattr(cls, "__dataclass_fields__")
            if dataclass and cls not in names.values():
                names[f"{part.name}.{cls.__qualname__}"] = cls
    return names


# --- caches --------------------------------------------------------------------------------------


def frozen(prefix: Prefix) -> dict[str, Any]:
    """The state of a session's cache, from which `thawed` restores it."""
    cache = prefix.cache
    layers = []
    for layer in cache.layers:
        length = layer.max_lengths[0]
        layers.append(
            {
                "held": length,
                "capacity": layer.keys.shape[2],
                "shift": layer.shift,
                "gap": layer.gap,
                "even": layer.even,
                "stored": layer.stored,
                "segments": layer.segments,
                "buffers": {
                    name: buffer[:, :, :length]
                    for name in SLOTWISE
                    if (buffer := getattr(layer, name)) is not None
                },
            }
        )
    return {
        "layers": layers,
        "length": cache.length,
        "logical": cache.logical,
        "compressed": cache.base,
        "track": cache.track,
        "attention_mass": cache.attention_mass,
        "position": prefix.group.position,
        "notes": prefix.notes,
        "prompt": prefix.prompt_slots,
        "steps": prefix.steps,
        "ids": prefix.ids,
        "stats": prefix.stats,
        "trace": prefix.trace,
    }


def thawed(adapter: Adapter, recipe: Recipe, file: dict[str, Any]) -> Prefix:
    """Restore what `frozen` saved; ``file`` has passed `session_checks.check_cache`."""
    saved = snapshot.moved({key: file[key] for key in OF_CACHE}, adapter.device)
    cache = KVCache(adapter.depth, adapter.pool, adapter.windows)
    cache.track, cache.attention_mass = saved["track"], saved["attention_mass"]
    cache.length, cache.logical = saved["length"].clone(), list(saved["logical"])
    cache.base = saved["compressed"]
    cache.seen = torch.tensor(cache.logical, device=adapter.device)
    for layer, length, state in zip(cache.layers, cache.length, saved["layers"], strict=True):
        buffers = state["buffers"]
        layer.lazy_initialization(buffers["keys"], buffers["values"])
        layer.length, layer.seen, layer.even = length, cache.seen, state["even"]
        layer.max_lengths, layer.shift = [state["held"]], list(state["shift"])
        if layer.window is not None:
            layer.gap = list(state["gap"])
        layer.segments = list(state["segments"])
        layer.stored = [list(s) for s in state["stored"]]
        slots = capacity(state["capacity"], state["held"])
        for name, data in buffers.items():
            shape = (*data.shape[:2], slots, *data.shape[3:])
            buffer = adapter.pool.take(shape, data.dtype, data.device)
            buffer[:, :, : data.shape[2]] = data
            setattr(layer, name, buffer)
    stages = recipe.acting(DecodeStage) if cache.track else []
    return Prefix(
        RowGroup(adapter, cache, saved["position"].clone(), []),
        file["ids"],
        file["stats"],
        file["trace"],
        stages,
        saved["notes"],
        saved["prompt"],
        saved["steps"],
    )


OF_CACHE = (
    "layers",
    "length",
    "logical",
    "compressed",
    "track",
    "attention_mass",
    "position",
    "notes",
    "prompt",
    "steps",
)
