"""Several devices on one machine: tensors with a device of their own, computed on the host.

Every operation checks that its tensors are on one device, as a GPU does, and computes real values,
so that answers can be compared. The devices are named ``cuda``; PyTorch's calls of the driver do
nothing meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from vlmfast.engine import attention

CPU = torch.device("cpu")


class Placed(Tensor):
    """A tensor on a pretended device."""

    value: Tensor

    @staticmethod
    def __new__(
        cls, value: Tensor, device: torch.device | None = None, requires_grad: bool = False
    ) -> Placed:
        # accelerate calls the class of a weight with its value, also to leave it on ``meta``.
        if value.device.type == "meta":
            return nn.Parameter(value, requires_grad=requires_grad)
        device = value.device if device is None else device
        value = value.value if isinstance(value, Placed) else value
        made = Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        made.value = value
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.value.tolist()

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({self.value}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Sends tensors that are created on a pretended device through `computed`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Made(TorchFunctionMode):
    """Numbers of Python become a tensor on the host, which an operation then moves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)):
            if isinstance(args[0], list):
                args = (tree_map_only(Tensor, lambda x: x.tolist(), args[0]), *args[1:])
            return func(*args, **kwargs).to(device)
        if func is scaled_dot_product_attention and kwargs.get("attn_mask") is not None:
            kwargs["attn_mask"] = kwargs["attn_mask"].to(args[0].device)  # of `_causal` too
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list | tuple):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x) if isinstance(x, list) else x for x in parts)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


def _causal(rows: int, keys: int) -> Tensor:
    """``causal_lower_right`` as a mask: modes cannot make its subclass of a tensor."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the host, its result on the device of its tensors."""
    name = func._schema.name
    flat, spec = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, Tensor)]
    # A number on the host may be combined with tensors of any device.
    devices = {x.device for x in tensors if not (x.device == CPU and x.dim() == 0)}
    asked = kwargs.get("device")
    moves = name in ("aten::_to_copy", "aten::copy_")
    indexed = name.startswith(("aten::index", "aten::_index"))
    if indexed and len(devices) > 1:  # indices may be on the host
        devices -= {CPU}
    if len(devices) > 1 and not moves:
        raise RuntimeError(f"{name} works on {', '.join(sorted(map(str, devices)))}")
    if moves and name == "aten::copy_":
        target = args[0].device
    elif asked is not None:
        target = torch.device(asked)
    else:
        target = next(iter(devices), CPU)
    if asked is not None and target.type != "meta":
        kwargs = {**kwargs, "device": CPU}
        flat, spec = tree_flatten((args, kwargs))
    inner = [x.value if isinstance(x, Placed) else x for x in flat]
    own, named = tree_unflatten(inner, spec)
    made = func(*own, **named)
    if func._schema.is_mutable:
        written = {id(x.value): x for x in tensors if isinstance(x, Placed)}
        return tree_map_only(Tensor, lambda x: written.get(id(x), _on(x, target)), made)
    return tree_map_only(Tensor, lambda x: _on(x, target), made)


def _on(value: Tensor, device: torch.device) -> Tensor:
    if device.type in ("cpu", "meta") or isinstance(value, Placed):
        return value
    return Placed(value, device)


class Event:
    """A mark in a stream, by the clock of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@contextmanager
def pretended() -> Iterator[None]:
    """Inside the block, tensors may be on any CUDA device."""
    torch._C._ensureCUDADeviceGuardSet()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    memory = mock.Mock(total_memory=1 << 34)
    calls = {
        "_lazy_init": None,
        "synchronize": None,
        "current_stream": None,
        "mem_get_info": (1 << 34, 1 << 34),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "get_device_properties": memory,
        "device": nullcontext(),
    }
    own = threading.Thread.run

    def run(thread: threading.Thread) -> None:  # modes belong to a thread
        with Devices(), Made():
            own(thread)

    with ExitStack() as stack:
        for name, value in calls.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=value))
        stack.enter_context(mock.patch("torch.cuda.Event", Event))
        # Kernels cannot be launched; nothing is copied asynchronously.
        stack.enter_context(mock.patch.dict("os.environ", VLMFAST_KERNELS="torch"))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(attention, "causal_lower_right", _causal))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        stack.enter_context(Devices())
        stack.enter_context(Made())
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
