"""Several devices on one machine: tensors with a device of their own, computed on the host.

Every operation checks that its tensors are on one device, as a GPU does, and computes real values,
so that answers can be compared. The devices are named ``cuda``; PyTorch's calls of the driver do
nothing meanwhile. A `Watch` sees what a GPU would be given to do, and what the host waits for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from vlmfast.engine import attention

_READERS = ("vlmfast.", "transformers.")
CPU = torch.device("cpu")
# What returns metadata, or memory without values.
_FREE = ("empty", "new_empty", "_unsafe_view", "set_", "resize_", "record_stream", "lift_fresh")
# What the host waits for: the shape of the result, or the result itself, depends on values.
_READ = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "nonzero",
    "equal": "equal",
    "bincount": "shape",
    "_unique": "shape",
    "_unique2": "shape",
    "unique_dim": "shape",
    "unique_consecutive": "shape",
    "unique_dim_consecutive": "shape",
}


class Watch:
    """Counts what the pretended devices are given to do; see `pretended`.

    Attributes
    ----------
    counts : Counter of str
        ``launches`` of operations that are no views, ``attention`` the calls of
        ``scaled_dot_product_attention`` among them, and the host's reads by kind: `READS`.
    places : Counter of (str, str)
        Reads by the function that reads, of this package or transformers, and kind.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()
        self._pauses, self.blanks = 0, False

    @property
    def active(self) -> bool:
        """Whether it counts now."""
        return not self._pauses

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the block."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def close(self) -> None:
        """Count nothing from now on."""
        self._pauses += 1

    @contextmanager
    def blank(self) -> Iterator[None]:
        """New memory is zero inside the block: kernels that are not launched leave it as it is."""
        self.blanks = True
        try:
            yield
        finally:
            self.blanks = False

    def add(self, kind: str, times: int = 1) -> None:
        """Count ``times`` more of a kind."""
        if self.active and times:
            self.counts[kind] += times
            if kind in READS:
                self.places[_reader(), kind] += times

    def operation(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        target: torch.device,
    ) -> None:
        """Count an operation on ``tensors`` whose result is on ``target``."""
        space, _, name = func._schema.name.partition("::")
        if not self.active or space == "prim":
            return
        if target.type != "cuda" and all(x.device.type != "cuda" for x in tensors):
            return
        if name in ("_to_copy", "copy_"):
            source = tensors[-1].device.type
            if "cpu" in (source, target.type):
                self.add("copy to host" if target.type == "cpu" else "copy to device")
                return
        elif name == "_local_scalar_dense":
            self.add("item")
            return
        aliases = [returned.alias_info for returned in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return
        if name.startswith(_FREE):
            return
        self.add("launches")
        if name in _READ or _waits(name, args, kwargs):
            self.add(_READ.get(name, "shape"))
        if name.startswith(("index", "_index_put", "_unsafe_index")):
            self._indexed(name, args)

    def _indexed(self, name: str, args: Any) -> None:
        """Count what indices cost: masks become numbers, and those on the host are copied."""
        indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        given = [x for x in indices if isinstance(x, Tensor)]
        value = args[2] if len(args) > 2 and isinstance(args[2], Tensor) else None
        masks = [x for x in given if x.dtype in (torch.bool, torch.uint8)]
        # One number of the host for all of them: PyTorch fills.
        fills = value is not None and value.numel() == 1 and value.device == CPU
        if masks and not (fills and len(masks) == len(given)):
            self.add("mask as index", len(masks))
        self.add("copy to device", sum(x.device == CPU for x in given))


READS = (
    "item",
    "nonzero",
    "equal",
    "shape",
    "mask as index",
    "copy to host",
    "copy to device",
    "synchronize",
)


def _reader() -> str:
    """The function that reads: the innermost one outside of PyTorch and this folder."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_READERS) and not name.startswith(__package__):
            return f"{name}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def _waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host needs values to know the shape of a result, or to choose a kernel."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "isin" and all(isinstance(x, Tensor) for x in args[:2]):
        # As in PyTorch: many are sorted, and made unique before.
        return args[1].numel() >= 10 * args[0].numel() ** 0.145 and not kwargs.get("assume_unique")
    return False


class Placed(Tensor):
    """A tensor on a pretended device."""

    value: Tensor

    @staticmethod
    def __new__(
        cls, value: Tensor, device: torch.device | None = None, requires_grad: bool = False
    ) -> Placed:
        # accelerate calls the class of a weight with its value, also to leave it on ``meta``.
        if value.device.type == "meta":
            return nn.Parameter(value, requires_grad=requires_grad)  # type: ignore[return-value]
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

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({self.value}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(func, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Sends tensors that are created on a pretended device through `computed`."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {}, self.watch)


class Made(TorchFunctionMode):
    """Numbers of Python become a tensor on the host, which an operation then moves."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)):
            if isinstance(args[0], list):
                args = (tree_map_only(Tensor, lambda x: x.tolist(), args[0]), *args[1:])
            return func(*args, **kwargs).to(device)
        if func is scaled_dot_product_attention:
            return self._attention(args, kwargs)
        if func is Tensor.__deepcopy__:
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        if func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list | tuple):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x) if isinstance(x, list) else x for x in parts)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)

    def _attention(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """One launch, whatever computes it on the host."""
        if args[0].device.type == "cuda":
            self.watch.add("launches")
            self.watch.add("attention")
        with self.watch.paused():
            mask, *rest = args[3:] or (kwargs.pop("attn_mask", None),)
            mask = None if mask is None else mask.to(args[0].device)  # of `_causal` too
            query, key, value = args[:3]
            return scaled_dot_product_attention(query, key, value, mask, *rest, **kwargs)


def _causal(rows: int, keys: int) -> Tensor:
    """``causal_lower_right`` as a mask: modes cannot make its subclass of a tensor."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def computed(func: Any, args: Any, kwargs: dict[str, Any], watch: Watch | None = None) -> Any:
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
    if watch is not None:
        watch.operation(func, args, kwargs, tensors, target)
    if asked is not None and target.type != "meta":
        kwargs = {**kwargs, "device": CPU}
        flat, spec = tree_flatten((args, kwargs))
    inner = [x.value if isinstance(x, Placed) else x for x in flat]
    own, named = tree_unflatten(inner, spec)
    made = func(*own, **named)
    if watch is not None and watch.blanks and name.startswith(("aten::empty", "aten::new_empty")):
        made.zero_()
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

    def __init__(self, watch: Watch, enable_timing: bool = False) -> None:
        assert enable_timing
        self.watch = watch

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.watch.add("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


@contextmanager
def pretended(*, kernels: bool = False) -> Iterator[Watch]:
    """Inside the block, tensors may be on any CUDA device.

    ``kernels``: whether ``VLMFAST_KERNELS`` stays as it is; by default the PyTorch references run.
    """
    watch = Watch()
    torch._C._ensureCUDADeviceGuardSet()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    memory = mock.Mock(total_memory=1 << 34)
    calls = {
        "_lazy_init": None,
        "current_stream": None,
        "mem_get_info": (1 << 34, 1 << 34),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "get_device_properties": memory,
        "get_device_capability": (9, 0),
        "current_device": 0,
        "device": nullcontext(),
    }
    own = threading.Thread.run

    def run(thread: threading.Thread) -> None:  # modes belong to a thread
        with Devices(watch), Made(watch):
            own(thread)

    with ExitStack() as stack:
        for name, value in calls.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=value))
        stack.enter_context(mock.patch("torch.cuda.Event", partial(Event, watch)))
        waits = mock.Mock(side_effect=lambda device=None: watch.add("synchronize"))
        stack.enter_context(mock.patch("torch.cuda.synchronize", waits))
        # Kernels cannot be launched; nothing is copied asynchronously.
        if not kernels:
            stack.enter_context(mock.patch.dict("os.environ", VLMFAST_KERNELS="torch"))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(attention, "causal_lower_right", _causal))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        stack.enter_context(Devices(watch))
        stack.enter_context(Made(watch))
        try:
            yield watch
        finally:
            watch.close()
            torch.__future__.set_overwrite_module_params_on_conversion(before)
