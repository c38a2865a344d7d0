"""A decode step on a GPU that is not there: what would wait for the device, or mix devices.

Parameters, buffers and cache become fake tensors on ``cuda``; a dispatch mode looks at every
operation. Reading a fake tensor's content (``.item()``, ``int(t)``, ``nonzero``) raises by itself.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Notes every operation with its shapes; complains about tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[tuple[str, tuple]] = []
        self.complaints: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [
            t for t in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)
        ]
        self.trace.append((str(func), tuple(tuple(t.shape) for t in tensors)))
        devices = {t.device.type for t in tensors}
        if "cpu" in devices:
            self.complaints.append(f"{func} works on {', '.join(sorted(devices))}")
        if str(func) == "aten._to_copy.default" and len(devices) > 1:
            self.complaints.append(f"{func} moves a tensor between devices")
        return out


def on_cuda(of: Any, seen: dict[int, Any] | None = None) -> Any:
    """``of`` with every tensor in it as a fake one on ``cuda``; views of one tensor stay views."""
    seen = {} if seen is None else seen
    if id(of) in seen:
        return seen[id(of)]
    if isinstance(of, FakeTensor):
        return of
    if isinstance(of, Tensor):
        base = of._base
        if base is not None:
            made = on_cuda(base, seen).as_strided(of.size(), of.stride(), of.storage_offset())
        else:
            made = torch.empty_strided(of.size(), of.stride(), dtype=of.dtype, device="cuda")
    elif isinstance(of, dict):
        made = {key: on_cuda(value, seen) for key, value in of.items()}
    elif isinstance(of, list | tuple):
        made = type(of)(on_cuda(value, seen) for value in of)
    elif dataclasses.is_dataclass(of) and not isinstance(of, type) and _frozen(of):
        fields = {f.name: on_cuda(getattr(of, f.name), seen) for f in dataclasses.fields(of)}
        made = dataclasses.replace(of, **fields)
    else:
        return of
    seen[id(of)] = made
    seen[-id(of)] = of  # so that its id is not given to another object meanwhile
    return made


def _frozen(of: Any) -> bool:
    return type(of).__module__.startswith("vlmfast.")


def module_on_cuda(module: nn.Module, seen: dict[int, Any]) -> None:
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, of in table.items():
                if of is not None:
                    made = on_cuda(of, seen)
                    table[name] = made if table is part._buffers else nn.Parameter(made, False)


@contextmanager
def pretended(vlm: Any, decoder: Any) -> Iterator[Watch]:
    """``vlm``'s model and ``decoder`` on a GPU that is not there; both are used up."""
    seen: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=False):
        module_on_cuda(vlm.model, seen)
        cache = decoder.cache
        cache.length, cache.seen = on_cuda(cache.length, seen), on_cuda(cache.seen, seen)
        for layer, length in zip(cache.layers, cache.length, strict=True):
            layer.length, layer.seen = length, cache.seen
            for name in ("keys", "values", "order", "rank", "mass", "bias"):
                setattr(layer, name, on_cuda(getattr(layer, name), seen))
            layer.segments = [on_cuda(segment, seen) for segment in layer.segments]
            layer.device = torch.device("cuda")
        decoder.position = on_cuda(decoder.position, seen)
        decoder._offsets = on_cuda(decoder._offsets, seen)
        for row in decoder.rows:
            row.prompt_slots = on_cuda(row.prompt_slots, seen)
            row.notes = on_cuda(row.notes, seen)
        watch = Watch()
        yield watch


def steps(
    vlm: Any, decoder: Any, count: int, change: Callable[[], None] | None = None, width: int = 1
) -> Watch:
    """``count`` decode steps under watch, or as many checks of trees of ``width`` tokens."""
    from vlmfast.engine.attention import switched

    # Neither a graph nor a kernel can be launched on a GPU that is not there.
    vlm.adapter.decoding = "eager"
    references = mock.patch.dict(os.environ, VLMFAST_KERNELS="torch")
    with references, torch.no_grad(), switched(vlm.model), pretended(vlm, decoder) as watch:
        tokens = torch.zeros(len(decoder.rows), width, dtype=torch.int64, device="cuda")
        tree = torch.ones(len(tokens), width, width, dtype=torch.bool, device="cuda")
        with watch:
            for _ in range(count):
                watch.trace.append(("step", ()))
                if width == 1:
                    decoder.next(tokens)
                else:
                    decoder.cache.reserve(width)
                    decoder.forward(tokens, tokens, tree)
                if change is not None:
                    change()
    return watch


def shapes(watch: Watch) -> list[list[tuple[str, tuple]]]:
    """What each step did."""
    parts: list[list] = []
    for entry in watch.trace:
        if entry[0] == "step":
            parts.append([])
        else:
            parts[-1].append(entry)
    return parts


__all__ = ["copy", "pretended", "shapes", "steps"]
