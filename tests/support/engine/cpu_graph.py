"""A stand-in for CUDA graphs on the CPU: it replays recorded operations, not Python.

A CUDA graph reads and writes the addresses that a step used when it was captured. Here a step is
recorded operation by operation. A replay runs these operations again on the same memory: what
Python computed on the host is as old as the capture. Memory that the step did not allocate is not
kept alive by the recording, as on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from vlmfast import VLM
from vlmfast.engine.cache import KVCache
from vlmfast.engine.graphs import Graphs, State, StepGraphs, _advances
from vlmfast.engine.kv_layer import KVLayer

# What a capture refuses: reads by the host, shapes that depend on data, copies from the host.
_REFUSED = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::lift_fresh",
    "aten::repeat_interleave.Tensor",
}
_FILLED_LATER = ("aten::empty", "aten::new_empty")


class Memory:
    """A tensor by its address, as a kernel knows it; it is not kept alive."""

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        self.layout = x.storage_offset(), tuple(x.shape), x.stride()
        self.dtype = x.dtype

    @property
    def key(self) -> tuple:
        return self.storage.cdata, self.layout, self.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "the captured step reads memory that was freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


class Recording(TorchDispatchMode):
    """Runs a step and records its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[tuple[Any, list[Any], Any, list[Tensor]]] = []
        self.given: dict[tuple, Memory] = {}
        self.own: dict[int, Any] = {}  # storages that the step allocates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(func, args)
        out = func(*args, **(kwargs or {}))
        flat, spec = tree_flatten((args, kwargs or {}))
        storages = {_storage(x) for x in flat if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        writes = any(
            of.alias_info is not None and of.alias_info.is_write for of in func._schema.arguments
        )
        fresh = [x for x in made if _storage(x) not in storages]
        for x in fresh:
            self.own[_storage(x)] = x.untyped_storage()
        if writes or (fresh and not func._schema.name.startswith(_FILLED_LATER)):
            assert writes or len(fresh) == len(made), f"{func} returns views and new tensors"
            known = [self._known(x) for x in flat]
            if any(isinstance(x, Memory) for x in known):
                self.tape.append((func, known, spec, fresh))
            else:
                self.tape.append((func, *tree_unflatten(known, spec), fresh))
        return out

    def _known(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or _storage(x) in self.own:
            return x
        memory = Memory(x)
        return self.given.setdefault(memory.key, memory)

    def replay(self) -> None:
        """Run the operations again, on the same memory."""
        known = {id(memory): memory.tensor() for memory in self.given.values()}
        for func, args, kwargs, made in self.tape:
            if not isinstance(kwargs, dict):
                flat = [known[id(x)] if isinstance(x, Memory) else x for x in args]
                args, kwargs = tree_unflatten(flat, kwargs)
            out = func(*args, **kwargs)
            if made:
                for own, x in zip(
                    made, out if isinstance(out, tuple | list) else [out], strict=True
                ):
                    own.copy_(x)


class Allocations(TorchDispatchMode):
    """Finds tensors made in a step that something still holds afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        self.made += [
            (str(func), StorageWeakRef(x.untyped_storage()))
            for x in tree_leaves(out)
            if isinstance(x, Tensor) and _storage(x) not in given
        ]
        return out

    def kept(self, outputs: list[Tensor]) -> list[str]:
        """Operations whose result lasts, apart from the outputs of the step."""
        known = {StorageWeakRef(x.untyped_storage()).cdata for x in outputs}

        def lasting() -> list[str]:
            return [name for name, of in self.made if not of.expired() and of.cdata not in known]

        if lasting():  # maybe only by a cycle of references
            gc.collect()
        return lasting()


class CPUGraphs(Graphs):
    """`Graphs` whose steps are recorded as `Recording`."""

    def new(self, kind: tuple, weights: bytes | None, cache: KVCache) -> StepGraphs:
        steps: StepGraphs

        def record(step: Callable[[], None], state: Callable[[], State]) -> Callable[[], None]:
            self.captured += 1
            return recorded(steps, step, state)

        steps = StepGraphs(kind, weights, cache, record)
        return steps


def recorded(
    steps: StepGraphs, step: Callable[[], None], state: Callable[[], State]
) -> Callable[[], None]:
    """As `graphs.cuda_graph`: warm up, restore, capture, restore."""
    key = list(steps._inputs)[-1]
    before = {name: x.clone() for name, x in state().items() if _advances(name)}

    def restore() -> None:
        for name, x in before.items():
            state()[name].copy_(x)

    watched, recording = Allocations(), Recording()
    with watched:
        step()
    kept = watched.kept(_tensors(steps._outputs[key]))
    assert not kept, f"the step keeps what {', '.join(kept)} made"
    restore()
    with recording:
        step()
    restore()
    addresses = _addresses(steps, key, state)

    def replay() -> None:
        now = _addresses(steps, key, state)
        moved = [str(name) for name in addresses if now.get(name) != addresses[name]]
        assert now.keys() == addresses.keys() and not moved, f"moved: {', '.join(moved)}"
        recording.replay()

    return replay


def refuse(func: Any, args: Any) -> None:
    """Raise for what cannot be captured."""
    name = func._schema.name
    overload = f"{name}.{func._schema.overload_name}"
    assert name not in _REFUSED and overload not in _REFUSED, f"{func} cannot be captured"
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        chosen = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor)]
        assert all(x.dtype != torch.bool for x in chosen), f"{func} by a mask cannot be captured"


def _addresses(steps: StepGraphs, key: tuple, state: Callable[[], State]) -> dict[Any, tuple]:
    named: dict[Any, Tensor] = dict(state())
    named |= {("input", at): x for at, x in enumerate(steps._inputs[key])}
    named |= {("output", at): x for at, x in enumerate(_tensors(steps._outputs[key]))}
    return {name: (x.data_ptr(), x.shape, x.stride()) for name, x in named.items()}


def _tensors(output: Any) -> list[Tensor]:
    given = (output.logits, output.hidden, output.aux_hidden_states)
    return [x for x in given if x is not None]


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def captured_by_stand_in(vlm: VLM, monkeypatch) -> VLM:
    """``vlm``, whose steps are captured by the stand-in."""
    # As on CUDA: masks, not lengths, mark the filled slots.
    monkeypatch.setattr(KVLayer, "prefix", False)
    monkeypatch.setattr(KVLayer, "extent", lambda layer, tokens: layer.capacity)
    vlm.adapter.decoding = "graph"
    vlm.adapter.kept["graphs"] = CPUGraphs()
    return vlm
