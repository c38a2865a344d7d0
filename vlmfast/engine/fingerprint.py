"""A fingerprint of a model: changes whenever what its modules compute changes.

It is the one answer to the question whether a model is still the one that something was made with:
an entry of the prefix cache, the features of a session, a captured step.

Version counters of parameters are not enough. ``weight.data.mul_(0.5)`` leaves them as they are,
and inference tensors have none. A few elements of every tensor are therefore read as well, all of
them with one transfer to the host. Weights are not enough either: modules compute with attributes
such as ``eps``, with adapters that are switched and scaled, and with settings of their config.
Python objects are compared with those of the last time by identity, which costs little, and read
by value where one of them is another.
"""

from __future__ import annotations

import enum
import hashlib
import marshal
from array import array
from collections.abc import Iterable, Iterator, MutableMapping
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain, count
from operator import is_
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as globally
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel

from vlmfast.core.calls import is_of, replaced_forward
from vlmfast.core.placement import stored
from vlmfast.models.base import Adapter

_PLACES = 8  # of a tensor that are read
_WHOLE = 128  # bytes below which a tensor is read in full
_KEPT = 8  # structures of one model
_PLAIN = (Tensor, nn.Parameter)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, PreTrainedConfig)
_SHOWN = (enum.Enum, torch.dtype, torch.device, np.generic, int, float, str)  # by their ``repr``
# Attributes of modules and configs that no result depends on, or that hold the state of a call.
_UNREAD = frozenset(
    (
        *vars(nn.Module()),
        "forward",  # see `Structure.code`
        "generate",  # of `attach`, like the next one
        "__getstate__",
        "generation_config",
        "gradient_checkpointing",  # which the engine suspends
        "_gradient_checkpointing_func",
        "rope_deltas",  # of the last prompt
        "_output_capturing_hooks_installed",  # by transformers, in the first forward pass
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
    )
)
# Those that are others where an equal model was loaded in another way.
_PLACED = frozenset(
    ("name_or_path", "transformers_version", "architectures", "dtype", "model_type")
)
_HIDDEN = ("_hf_", "_old_", "_is_hf_", "_keep_", "_keys_", "_weight_", "hf_", "quantization_")


def fingerprint(*modules: nn.Module, skip: Iterable[nn.Module] = (), **given: Any) -> bytes | None:
    """The digest of one part; see `fingerprints`."""
    return fingerprints((modules, skip), **given)[0]


def fingerprints(
    *parts: tuple[Many[nn.Module], Iterable[nn.Module]],
    hooks: bool = False,
    training: bool = False,
    values: bool = False,
    addresses: bool = False,
    kept: dict[Any, Structure] | None = None,
) -> list[bytes | None]:
    """A digest of all that the modules of each part compute with, read with one transfer.

    It takes about half a millisecond for 150 tensors, and covers address, version counter, shape,
    strides, dtype and device of every parameter and buffer, and some elements of each, spread over
    the whole tensor. A change through ``.data`` of only a few elements of a large tensor may be
    missed.

    It also covers the class of every module, its config, and its attributes, as far as they are
    plain values, functions, tensors, arrays, modules, or containers of these, dataclasses included:
    ``eps``, for example, or which adapters are active, merged or scaled.

    Parameters
    ----------
    *parts : (modules, skip)
        ``skip`` are submodules that are left out, with all that they contain.
    hooks : bool
        Whether hooks and a ``forward`` of the caller's own are part of it. Otherwise there is none
        while a module has any: they may change its output, or count its calls.
    training : bool
        Whether training mode is part of it. Otherwise there is none while a module is in it: its
        output may be random.
    values : bool
        Whether only the values of the weights count, which stay as they are on another device.
    addresses : bool
        Whether changes of values in place do not count; nothing is read from the device then.
    kept : dict, optional
        Structures of earlier calls, which are used and replaced.

    Returns
    -------
    list of bytes or None
        ``None`` in the cases that ``hooks`` and ``training`` describe.
    """
    kept = {} if kept is None else kept
    shared = _own_hooks(globally._global_forward_pre_hooks, globally._global_forward_hooks)
    digests: list[Any] = []
    read: list[tuple[list[Tensor], Layout]] = []
    for modules, skip in parts:
        structure = _structure(tuple(modules), tuple(skip), kept)
        calls, forwards = structure.code()
        calls += shared
        if (structure.training and not training) or (calls and not hooks):
            digests.append(None)
            continue
        tensors, places = structure.weights()
        layout = structure.layout_of(tensors)
        digest = structure.digest.copy()
        digest.update(repr((calls, forwards, () if values else places)).encode())
        digest.update(layout.kinds if values else layout.described)
        if not values:
            digest.update(array("q", [tensor.data_ptr() for tensor in tensors]))
        if not values and not addresses:  # inference tensors have no version
            versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
            digest.update(array("q", versions))
        digests.append(digest)
        read.append((tensors, layout))
    found = [digest for digest in digests if digest is not None]
    for digest, samples in () if addresses else zip(found, _samples(*read), strict=True):
        digest.update(samples)
    return [None if digest is None else digest.digest() for digest in digests]


def settings_sha256(*modules: nn.Module, skip: Iterable[nn.Module] = ()) -> str:
    """A digest of all but the weights, which an equal model in another process has as well.

    The arguments are those of `fingerprint`.
    """
    return hashlib.sha256(Structure(modules, tuple(skip), portable=True).settings).hexdigest()


def structures_of(adapter: Adapter) -> dict[Any, Structure]:
    """What `fingerprint` has ``kept`` of a model."""
    return adapter.kept.setdefault("structures", {})


def _structure(
    modules: tuple[nn.Module, ...], skip: tuple[Any, ...], kept: dict[Any, Structure]
) -> Structure:
    """The structure of modules, the one from before where nothing of it has changed."""
    found = kept.get((modules, skip))
    if found is None or found.changed():
        found = kept[modules, skip] = Structure(modules, skip)
        for old in list(kept)[:-_KEPT]:
            kept.pop(old, None)
    return found


class Layout(NamedTuple):
    """How tensors lie in memory, and which of their elements are read.

    Parameters
    ----------
    read : list
        Their dtypes, shapes, strides and devices.
    described, kinds : bytes
        Digests of these, and of dtypes and shapes alone.
    views : list of (shape, strides)
        Of the elements that are read.
    groups : list of (device, list of int)
        Indices of the tensors of one device and dtype.
    """

    read: list[Any]
    described: bytes
    kinds: bytes
    views: list[tuple[tuple[int], tuple[int]]]
    groups: list[tuple[torch.device, list[int]]]


class Structure:
    """What modules consist of, apart from the values of their tensors.

    Parameters
    ----------
    modules, skip : tuple of Module
        As in `fingerprint`.
    portable : bool
        Whether ``settings`` are those of an equal model in another process.

    Attributes
    ----------
    settings : bytes
        Classes and attributes of all modules.
    digest : hash
        Of these.
    training : bool
        Whether a module is in training mode.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], skip: tuple[Any, ...], *, portable: bool = False
    ) -> None:
        self.training, self._portable = False, portable
        self._weights: list[Iterable[Tensor | None]] = []
        self._hooked: list[dict[str, Any]] = []  # modules that accelerate may have offloaded
        self._states: list[dict[str, Any]] = []  # attributes of modules
        self._kinds: dict[type[nn.Module], None] = {}
        # Other threads may look at the same structure: what belongs together is set at once.
        self._classes: tuple[list[Any], list[int], list[int]] = [], [], []  # see `code`
        self._layout = Layout([], b"", b"", [], [])
        self._tensors: list[Tensor] = []  # that are attributes
        # Live views of attributes, and containers: what they contain, and what they contained.
        self._parts: list[Iterable[Any]] = []
        self._seen: list[Any] = []
        self._numbers: dict[int, int] = {id(module): -1 for module in skip}
        self._waiting: list[nn.Module] = []  # children
        self._loose: list[nn.Module] = []  # modules in attributes
        self._done: set[int] = set(self._numbers)
        found: list[Any] = [*map(self._number, modules), *self._modules(self._waiting)]
        # Calls of ``train`` and ``eval`` do not reach modules that are no children.
        training = self.training
        found += self._modules(self._loose)
        self.training = training
        # In this version of the format equal values have equal bytes.
        self.settings = marshal.dumps(found, 2)
        self.digest = hashlib.blake2b(self.settings, digest_size=16)

    def changed(self) -> bool:
        """Whether an object in it is another one now."""
        seen = [*chain.from_iterable(self._parts)]
        return len(seen) != len(self._seen) or not all(map(is_, seen, self._seen))

    def code(self) -> tuple[list[int], list[int]]:
        """Hooks and functions of the caller's own, and the ``forward`` of each class.

        The first may change what a module computes; the engine has others. Each registration of a
        hook has a number that no other one gets.
        """
        forwards = [kind.forward for kind in self._kinds]
        known, numbers, replaced = self._classes
        if forwards != known:
            numbers = [*map(_number_of, forwards)]
            replaced = [_number_of(kind.forward) for kind in self._kinds if replaced_forward(kind)]
            self._classes = forwards, numbers, replaced
        found = [*replaced]
        for own in self._states:
            if own["_forward_pre_hooks"] or own["_forward_hooks"] or "forward" in own:
                found += _own_hooks(own["_forward_pre_hooks"], own["_forward_hooks"])
                forward = own.get("forward")
                if forward is not None and not is_of(forward):
                    found.append(_number_of(forward))
        return found, numbers

    def layout_of(self, tensors: list[Tensor]) -> Layout:
        """The layout of all tensors, that of the last call where it is the same."""
        dtypes, shapes = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
        strides, devices = [tensor.stride() for tensor in tensors], [x.device for x in tensors]
        read: list[Any] = [dtypes, shapes, strides, devices]
        found = self._layout
        if read != found.read:
            groups: dict[Any, list[int]] = {}
            for index, kind in enumerate(zip(devices, dtypes, strict=True)):
                groups.setdefault(kind, []).append(index)
            found = self._layout = Layout(
                read,
                _hash(repr(read)),
                _hash(repr((dtypes, shapes))),
                [_view(tensor) for tensor in tensors],
                [(device, indices) for (device, _), indices in groups.items()],
            )
        return found

    def weights(self) -> tuple[list[Tensor], list[tuple[str, str]]]:
        """All tensors, and the places of weights that are on disk."""
        tensors: list[Tensor] = []
        places: list[tuple[str, str]] = []
        for tensor in chain(*self._weights, self._tensors):
            if tensor is None or tensor.is_meta:
                continue
            if type(tensor) in _PLAIN:
                tensors.append(tensor)
            else:
                tensors += _inner(tensor)
        for state in self._hooked:
            for name, tensor in chain(state["_parameters"].items(), state["_buffers"].items()):
                if tensor is not None and tensor.is_meta:
                    value = stored(state["_hf_hook"], name)
                    if isinstance(value, str):
                        places.append((name, value))
                    elif value is not None:
                        tensors += _inner(value)
        return tensors, places

    def _see(self, *parts: Iterable[Any]) -> None:
        """Notice changes of what ``parts`` contain; called before they are read."""
        for part in parts:
            self._parts.append(part)
            self._seen += part

    def _modules(self, waiting: list[nn.Module]) -> Iterator[list[Any]]:
        """The settings of modules, children included, each once."""
        while waiting or self._waiting:
            module = (self._waiting or waiting).pop()
            if id(module) not in self._done:
                self._done.add(id(module))
                yield self._module(module)

    def _module(self, module: nn.Module) -> list[Any]:
        """The settings of a module without those of its children."""
        state = vars(module)
        self._kinds[type(module)] = None
        children = state["_modules"]
        self._see(state.values(), children.values())
        self._states.append(state)
        self._weights += (state["_parameters"].values(), state["_buffers"].values())
        if state.get("_hf_hook") is not None:
            self._hooked.append(state)
        self.training = self.training or bool(state.get("training"))
        own = [(name, self._value(of)) for name, of in list(state.items()) if self._reads(name, of)]
        if self._portable:  # models have others where they were read from files
            whole = isinstance(module, PreTrainedModel)
            own = sorted((of for of in own if of[0] == "config" or not whole), key=repr)
        parts = [None if child is None else self._number(child) for child in children.values()]
        return [self._code(type(module)), state.get("training"), own, parts]

    def _reads(self, name: str, value: Any) -> bool:
        """Whether an attribute or a setting counts."""
        if name in _UNREAD:
            return False
        if hasattr(nn.Module, name) and callable(value):  # ``to``, which accelerate replaces
            return False
        return not (self._portable and (name in _PLACED or name.startswith(_HIDDEN)))

    def _code(self, call: Any) -> Any:
        """What identifies a function or class."""
        if self._portable:
            return f"{getattr(call, '__module__', None)}.{getattr(call, '__qualname__', None)}"
        return _number_of(call), _number_of(getattr(call, "__code__", type(call)))

    def _number(self, module: nn.Module, *, loose: bool = False) -> int:
        """The number of a module, which is read later."""
        (self._loose if loose else self._waiting).append(module)
        return self._numbers.setdefault(id(module), len(self._numbers))

    def _value(self, value: Any) -> Any:
        """An attribute, or a part of one, as simple values."""
        if type(value) in _SIMPLE:
            return value
        if isinstance(value, Tensor):
            self._tensors.append(value)
        elif isinstance(value, nn.Module):
            return self._number(value, loose=True)
        elif isinstance(value, _SHOWN):
            return repr(value)
        elif isinstance(value, MethodType):
            return self._value(value.__func__)
        elif isinstance(value, partial):
            return [self._value(part) for part in (value.func, value.args, value.keywords)]
        elif isinstance(value, np.ndarray):
            return self._array(value)
        elif isinstance(value, _CONTAINERS) or (not self._portable and _is_record(value)):
            return self._container(value)
        elif callable(value):
            return self._code(value)
        return type(value).__qualname__

    def _array(self, value: np.ndarray) -> Any:
        """The content of an array; it is read in each call where PyTorch can share its memory."""
        if value.dtype.kind in "biufc" and value.flags.writeable:
            with suppress(TypeError, ValueError), torch.inference_mode(False):
                self._tensors.append(torch.from_numpy(value))
                return type(value).__qualname__
        return [value.dtype.str, *value.shape, self._value(value.tolist())]

    def _container(self, value: Any) -> Any:
        """What a container contains, or the settings of a config; a number where it was read."""
        if (number := self._numbers.get(id(value))) is not None:
            return number
        self._numbers[id(value)] = len(self._numbers)
        if not isinstance(value, dict | PreTrainedConfig) and not _is_record(value):
            self._see(value)
            parts = [self._value(part) for part in value]
            return sorted(parts, key=repr) if isinstance(value, set | frozenset) else parts
        state = value if isinstance(value, dict) else vars(value)
        self._see(state, state.values())
        if isinstance(value, dict):
            items = [(self._value(name), self._value(of)) for name, of in state.items()]
            return sorted(items, key=repr) if self._portable else items
        if isinstance(value, PreTrainedConfig):
            # The engine switches attention, for example, and modules have the configs of parts. A
            # config that was read from a file has another order.
            return [
                (name, self._value(of))
                for name, of in sorted(state.items())
                if name[0] != "_" and self._reads(name, of) and not isinstance(of, PreTrainedConfig)
            ]
        names = [f.name for f in fields(value)] if is_dataclass(value) else list(state)
        return [self._code(type(value)), [(name, self._value(state.get(name))) for name in names]]


def _own_hooks(*hooks: dict[int, Any]) -> list[int]:
    """The numbers of hooks of the caller's own."""
    return [number for calls in hooks for number, of in calls.items() if not is_of(of)]


# Of functions, classes and their code. An ``id`` goes to another object once its own is gone.
_CALLS: MutableMapping[Any, int] = WeakIdKeyDictionary()
_COUNT = count()


def _number_of(call: Any) -> int:
    """A number that no other function or class ever gets."""
    try:
        return _CALLS.setdefault(call, next(_COUNT))
    except TypeError:  # built in, without weak references
        return -id(call)


def _is_record(value: Any) -> bool:
    """Whether a value is a namespace, or of a dataclass, whose attributes can be watched."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    if type(value).__module__.startswith("bitsandbytes."):  # the states of its last calls
        return False
    return isinstance(value, SimpleNamespace) or is_dataclass(value)


def _inner(tensor: Tensor) -> list[Tensor]:
    """The tensors that a subclass consists of: quantized weights, for example."""
    if type(tensor) in _PLAIN:
        return [tensor]
    if not hasattr(tensor, "__tensor_flatten__"):
        # Those of bitsandbytes have their scales beside them.
        scales = (
            getattr(tensor, "SCB", None),
            getattr(vars(tensor).get("quant_state"), "absmax", None),
        )
        return [tensor, *(scale for scale in scales if scale is not None)]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _inner(getattr(tensor, name))]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@torch.no_grad()
def _samples(*parts: tuple[list[Tensor], Layout]) -> list[bytes]:
    """Some elements of the tensors of each part, with one transfer from each device."""
    chosen: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for number, (tensors, layout) in enumerate(parts):
        pairs = zip(tensors, layout.views, strict=True)
        views = [tensor.contiguous().as_strided(*view) for tensor, view in pairs]
        for device, group in layout.groups:
            bits = torch.cat([views[n] for n in group]).view(torch.uint8)
            chosen.setdefault(device, []).append((number, bits))
    found = [b""] * len(parts)
    for own in chosen.values():
        data, first = torch.cat([bits for _, bits in own]).cpu().numpy(), 0
        for number, bits in own:
            stop = first + len(bits)
            found[number] += data[first:stop].tobytes()
            first = stop
    return found


def _view(tensor: Tensor) -> tuple[tuple[int], tuple[int]]:
    """All elements of a small tensor, some of any other one: shape and strides, 1-dimensional."""
    if tensor.nbytes < _WHOLE:
        return (tensor.numel(),), (1,)
    # An odd distance, so that they are not all in one column of a matrix.
    return (_PLACES,), ((tensor.numel() // _PLACES - 1) | 1,)
