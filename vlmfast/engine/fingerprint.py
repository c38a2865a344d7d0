"""A fingerprint of a model's weights: changes whenever what its modules compute changes.

Version counters of parameters are not enough. ``weight.data.mul_(0.5)`` leaves them as they are,
and inference tensors have none. A few elements of every tensor are therefore read as well, all of
them with one transfer to the host.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as globally

from vlmfast.core.calls import is_of
from vlmfast.core.placement import stored

_PLACES = 8  # of a tensor that are read
_WHOLE = 128  # bytes below which a tensor is read in full
# State of adapters (PEFT) that switches or scales them without a change of any weight.
_ADAPTERS = {
    "active_adapter",
    "active_adapters",
    "_active_adapter",
    "disable_adapters",
    "_disable_adapters",
    "merged",
    "merged_adapters",
    "scaling",
}
_PLAIN = (Tensor, nn.Parameter)


def fingerprint(
    *modules: nn.Module,
    skip: Iterable[nn.Module] = (),
    hooks: bool = False,
    values: bool = False,
    addresses: bool = False,
) -> bytes | None:
    """A digest of the weights of modules, about half a millisecond for 150 tensors.

    It covers address, version counter, shape, strides, dtype and device of every parameter and
    buffer, some elements of each, spread over the whole tensor, and which adapters are active,
    merged or scaled. A change through ``.data`` of only a few elements of a large tensor may be
    missed.

    Parameters
    ----------
    *modules : Module
    skip : iterable of Module
        Submodules that are left out, with all that they contain.
    hooks : bool
        Whether hooks and a ``forward`` of the caller's own are part of it. Otherwise there is none
        while a module has any: they may change its output, or count its calls.
    values : bool
        Whether only the values of the weights count, which stay as they are on another device.
    addresses : bool
        Whether changes of values in place do not count; nothing is read from the device then.

    Returns
    -------
    bytes or None
        ``None`` in training mode.
    """
    others: list[Any] = []
    calls = [*globally._global_forward_pre_hooks, *globally._global_forward_hooks]
    tensors: list[Tensor] = []
    for state in _states(modules, skip):
        if state.get("training"):
            return None
        calls += _calls(state)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in state[kind].items():
                if tensor is not None and tensor.device.type == "meta":
                    tensor = stored(state.get("_hf_hook"), name)  # offloaded by accelerate
                if isinstance(tensor, str):
                    others.append((name, tensor))
                elif type(tensor) in _PLAIN:
                    tensors.append(tensor)
                elif tensor is not None:
                    tensors += _inner(tensor)
        if not state.keys().isdisjoint(_ADAPTERS):
            others += [(name, repr(state[name])) for name in sorted(_ADAPTERS & state.keys())]
    if calls and not hooks and not values:
        return None
    numbers: list[int] = []
    for tensor in tensors:
        numbers += (id(tensor.dtype), *tensor.shape)
        if not values:
            version = -1 if addresses or tensor.is_inference() else tensor._version
            numbers += (tensor.data_ptr(), version, tensor.get_device(), *tensor.stride())
    digest = hashlib.blake2b(array("q", numbers), digest_size=16)
    if not values:
        digest.update(repr((others, calls)).encode())
    for part in () if addresses else _samples(tensors):
        digest.update(part)
    return digest.digest()


def _states(modules: Iterable[nn.Module], skip: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """The attributes of modules and of all their submodules, each once."""
    known, waiting = {*skip, None}, list(modules)
    while waiting:
        module = waiting.pop()
        if module not in known:
            known.add(module)
            state = vars(module)
            waiting += state["_modules"].values()
            yield state


def _calls(state: dict[str, Any]) -> list[int]:
    """Hooks and a ``forward`` of the caller's own, which may change what a module computes.

    Each registration of a hook has a number that no other one gets.
    """
    before, after = state["_forward_pre_hooks"], state["_forward_hooks"]
    if not (before or after or "forward" in state):
        return []
    found = [number for calls in (before, after) for number, of in calls.items() if not is_of(of)]
    forward = state.get("forward")
    return found if forward is None or is_of(forward) else [*found, id(forward)]


def _inner(tensor: Tensor) -> list[Tensor]:
    """The tensors that a subclass consists of: quantized weights, for example."""
    if not hasattr(tensor, "__tensor_flatten__"):
        # Those of bitsandbytes have their scales beside them.
        scales = (
            getattr(tensor, "SCB", None),
            getattr(vars(tensor).get("quant_state"), "absmax", None),
        )
        return [tensor, *(scale for scale in scales if scale is not None)]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _inner(getattr(tensor, name))]


@torch.no_grad()
def _samples(tensors: list[Tensor]) -> Iterator[bytes]:
    """Some elements of all tensors, with one transfer from each device."""
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        size = tensor.numel()
        if tensor.nbytes < _WHOLE:
            chosen = tensor.reshape(-1)
        elif tensor.is_contiguous():
            step = int(_steps(size))
            chosen = tensor.as_strided((_PLACES,), (step,), tensor.storage_offset())
        else:
            chosen = tensor.reshape(-1)[:: int(_steps(size))]
        groups.setdefault((tensor.get_device(), tensor.dtype), []).append(chosen)
    parts: dict[int, list[Tensor]] = {}
    for (device, _), group in groups.items():
        parts.setdefault(device, []).append(torch.cat(group).view(torch.uint8))
    for part in parts.values():
        yield torch.cat(part).cpu().numpy().tobytes()


def _steps(size: Any) -> Any:
    """The distance of samples; odd, so that they are not all in one column of a matrix."""
    return (size // _PLACES - 1) | 1
