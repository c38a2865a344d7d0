"""What goes into the language model: settings, rotary ids, and keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from vlmfast.core.protocols import KV
from vlmfast.engine import opening
from vlmfast.engine.kv_layer import KVLayer
from vlmfast.engine.prefiller import Prefiller

# --- settings ------------------------------------------------------------------------------------


def prepared(model: Any, ids: Tensor, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Prompt, processors, criteria and settings that arguments give a sequence."""
    with mock.patch.object(opening, "Sampler", lambda *given: given[:-1]):
        return opening.sampler_of(model, ids, arguments)


def preparations(patch: pytest.MonkeyPatch, model: Any) -> list[str]:
    """Grows whenever ``generate`` prepares inputs or a cache for a model."""
    called: list[str] = []
    for name in ("_prepare_model_inputs", "_prepare_cache_for_generation"):
        own = getattr(type(model), name)

        def noted(*args: Any, own: Any = own, name: str = name, **more: Any) -> Any:
            called.append(name)
            return own(*args, **more)

        patch.setattr(type(model), name, noted)
    return called


# --- prompts -------------------------------------------------------------------------------------


@dataclass
class Ids:
    """Rotary ids of one request.

    Parameters
    ----------
    position, own : Tensor, (P, S)
        Ids given to the language model, and the family's ids of the full prompt.
    shifts : list of int
        By how much layers were renumbered.
    """

    position: Tensor
    own: Tensor
    shifts: list[int]


def rotary_ids(patch: pytest.MonkeyPatch) -> list[Ids]:
    """The ids of each prompt, as it is prefilled."""
    seen, prefill = list[Ids](), Prefiller.prefill

    def noted(prefiller: Prefiller, sequence: Any, prompt: Any, *more: Any, **named: Any) -> Tensor:
        logits = prefill(prefiller, sequence, prompt, *more, **named)
        shifts = [shift for layer in sequence.group.cache.layers for shift in layer.shift]
        own = prefiller.adapter.positions(sequence.inputs.tensors)
        seen.append(Ids(prompt.layout.position, own, shifts))
        return logits

    patch.setattr(Prefiller, "prefill", noted)
    return seen


def before_prefills(patch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Call before each part of a prompt is prefilled."""
    for name in ("prefill", "extend"):
        own = getattr(Prefiller, name)

        def run(*given: Any, own: Any = own, **named: Any) -> Any:
            call()
            return own(*given, **named)

        patch.setattr(Prefiller, name, run)


# --- keys and values -----------------------------------------------------------------------------


def lengths_of_layers(patch: Any) -> list[int]:
    """Physical length of every layer at each write to it; ``patch`` has a ``setattr``."""
    seen, update, put = list[int](), KVLayer.update, KVLayer.append

    def updated(layer: KVLayer, keys: Tensor, *more: Any, **named: Any) -> Any:
        out = update(layer, keys, *more, **named)
        seen.append(layer.slots(0) + (keys.shape[2] if layer.frozen else 0))
        return out

    def appended(layer: KVLayer, kv: KV) -> None:
        put(layer, kv)
        seen.append(int(layer.length.max()))

    patch.setattr(KVLayer, "update", updated)
    patch.setattr(KVLayer, "append", appended)
    return seen


def written(patch: pytest.MonkeyPatch) -> list[list[KV]]:
    """All keys and values that are put into each layer of one prompt, layer by layer."""
    parts: dict[int, list[KV]] = {}
    layers: list[KVLayer] = []  # kept alive, so that no other one gets the same `id`
    found: list[list[KV]] = []
    for name in ("put", "append"):
        own = getattr(KVLayer, name)

        def noted(layer: KVLayer, kv: KV, own: Any = own) -> Any:
            if id(layer) not in parts:
                layers.append(layer)
                found.append(parts.setdefault(id(layer), []))
            parts[id(layer)].append(kv)
            return own(layer, kv)

        patch.setattr(KVLayer, name, noted)
    return found


def rotated_back(adapter: Any, sequence: Any, kept: dict[int, list[Tensor]]) -> list[Tensor]:
    """The keys of each layer without the rotation by the ids that it has kept."""
    layers = sequence.group.cache.layers
    ids = [torch.cat(kept[index], dim=1) for index in range(len(layers))]
    return [
        adapter.rotate(layer.keys[0, :, : layer.max_lengths[0]], -own)
        for layer, own in zip(layers, ids, strict=True)
    ]
