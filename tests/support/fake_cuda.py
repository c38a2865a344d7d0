"""A decode step on a fake GPU: detects synchronization and mixed devices.

Parameters, buffers and cache become fake tensors on ``cuda``. A dispatch mode inspects every
operation. Reading the data of a fake tensor (``.item()``, ``int(t)``, ``nonzero``) raises.
"""

from __future__ import annotations

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

from support.engine.batched import fusing, groups_of, move
from support.engine.prompts import switched
from support.engine.storage import run_step


class Watch(TorchDispatchMode):
    """Records every operation with its shapes, and complains about tensors on the CPU."""

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


class Launches(TorchDispatchMode):
    """Records every operation that launches a kernel: no views, and no uninitialized tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        aliases = [returned.alias_info for returned in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        metadata = space == "prim" or name.startswith(("empty", "new_empty", "_unsafe_view"))
        if not view and not metadata:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_kernels(names: list[str]) -> Iterator[None]:
    """Triton kernels run as on a GPU, except that a launch only adds a name to ``names``."""
    from triton.runtime.jit import KernelInterface

    from vlmfast.kernels import decode_mixed, few_rows

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: names.append(kernel.fn.__name__)

    kept = {key: value for key, value in os.environ.items() if key != "VLMFAST_KERNELS"}
    with (
        mock.patch.dict(os.environ, kept, clear=True),
        mock.patch.object(KernelInterface, "__getitem__", launch),
        mock.patch.object(decode_mixed, "INTERPRETED", False),
        mock.patch.object(few_rows, "INTERPRETED", False),
        fusing(nn.Parameter, FakeTensor),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield


def on_cuda(item: Any, seen: dict[int, Any] | None = None) -> Any:
    """``item`` with every tensor replaced by a fake one on ``cuda``; views stay views."""
    seen = {} if seen is None else seen
    if id(item) in seen:
        return seen[id(item)]
    if isinstance(item, FakeTensor):
        return item
    if isinstance(item, Tensor):
        base = item._base
        if base is not None:
            made = on_cuda(base, seen).as_strided(item.size(), item.stride(), item.storage_offset())
        else:
            made = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="cuda")
    elif isinstance(item, dict):
        made = {key: on_cuda(value, seen) for key, value in item.items()}
    elif isinstance(item, list | tuple):
        made = type(item)(on_cuda(value, seen) for value in item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type) and _frozen(item):
        fields = {f.name: on_cuda(getattr(item, f.name), seen) for f in dataclasses.fields(item)}
        made = dataclasses.replace(item, **fields)
    else:
        return item
    seen[id(item)] = made
    seen[-id(item)] = item  # so that its id is not reused meanwhile
    return made


def _frozen(item: Any) -> bool:
    return type(item).__module__.startswith("vlmfast.")


@contextmanager
def module_on_cuda(module: nn.Module, seen: dict[int, Any]) -> Iterator[None]:
    """Inside the block, the parameters and buffers of a module are on a fake GPU."""
    before: list[tuple[nn.Module, str, Tensor]] = []
    for part in module.modules():
        weights = part.named_parameters(recurse=False, remove_duplicate=False)
        others = part.named_buffers(recurse=False, remove_duplicate=False)
        before += [(part, *named) for named in (*weights, *others)]
    try:
        for part, name, tensor in before:
            made = on_cuda(tensor, seen)
            setattr(part, name, nn.Parameter(made, False) if name in part._parameters else made)
        yield
    finally:
        for part, name, tensor in before:
            setattr(part, name, tensor)


@contextmanager
def pretended(vlm: Any, decoder: Any) -> Iterator[Watch]:
    """Move ``vlm``'s model and ``decoder`` to a fake GPU; the decoder cannot be used afterwards."""
    seen: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=False), module_on_cuda(vlm.model, seen):
        move(decoder, lambda item: on_cuda(item, seen))
        yield Watch()


def steps(
    vlm: Any, decoder: Any, count: int, change: Callable[[], None] | None = None, width: int = 1
) -> Watch:
    """Watch ``count`` decode steps, or tree verifications of ``width`` tokens."""
    # Graphs and kernels cannot be launched on a fake GPU.
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
                    for group in groups_of(decoder):
                        group.cache.reserve(width)
                    run_step(groups_of(decoder), tokens, tokens, tree)
                if change is not None:
                    change()
    return watch


def launches(vlm: Any, decoder: Any, *prepare: Callable[[], Any]) -> list[list[str]]:
    """Names of the kernels that decode steps launch, from embedding to logits.

    ``prepare``: called before each step.
    """
    vlm.adapter.decoding, found = "eager", []
    with torch.no_grad(), switched(vlm.model), pretended(vlm, decoder):
        tokens = torch.zeros(len(decoder.rows), 1, dtype=torch.int64, device="cuda")
        for change in prepare:
            change()
            with Launches() as watch, counted_kernels(watch.names):
                decoder.next(tokens)
            found.append(watch.names)
    return found


def shapes(watch: Watch) -> list[list[tuple[str, tuple]]]:
    """Operations of each step, with shapes."""
    parts: list[list] = []
    for entry in watch.trace:
        if entry[0] == "step":
            parts.append([])
        else:
            parts[-1].append(entry)
    return parts
