"""The user's own code in forward passes: hooks, and a ``forward`` put on a module.

The engine calls the parts of a model: the vision tower, the projector, the language model and its
head. Their hooks act as everywhere. The model itself, and the module in it that joins tower and
language model, are called only where they have hooks, or a ``forward``, of the user's: around the
language model, which has its input already.

A captured, fused or compiled step does not call modules one by one, so there are none of these
while a module of a step has such code. It may come and go at any time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import BaseModelOutputWithPast

from vlmfast.core.calls import is_of, users_calls, users_forward
from vlmfast.errors import ModelError
from vlmfast.models.base import Adapter

from .fused_kinds import LayerKind, kind_of
from .modules import modules_of
from .tower import replaced

Forward = Callable[..., Any]
_forward = attrgetter("forward")


class StepModules:
    """The modules of a decode step, as they were found.

    Parameters
    ----------
    adapter : Adapter

    Attributes
    ----------
    around : dict of str to Module
        Those that contain the language model and have code of the user's, by name.
    own_code : bool
        Whether any of the modules has.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._hooks = RemovableHandle.next_id  # as many had been registered until now
        self._decoder, model, around = adapter.decoder, _model(adapter), _around(adapter)
        parts = adapter.decoder, model.get_input_embeddings(), model.get_output_embeddings()
        found = modules_of(adapter, "step", *parts)
        outer = list(around.values())
        self._states = [*map(vars, outer), *found.states]
        self._forwards = [own.get("forward") for own in self._states]
        kinds: set[type[nn.Module]] = {type(module) for module in (*outer, *found.all)}
        self._classes = list(kinds), [kind.forward for kind in kinds]
        self.around = {name: module for name, module in around.items() if _is_changed(module)}
        self.own_code = bool(self.around) or users_calls(*found.all)

    @functools.cached_property
    def kind(self) -> LayerKind | None:
        """The layers, if `fused_step` serves them."""
        return kind_of(self._decoder)

    @property
    def current(self) -> bool:
        """Whether nothing has been put on a module since, or may have been removed."""
        if self.own_code or self._hooks != RemovableHandle.next_id:
            return False
        kinds, forwards = self._classes
        if not all(map(is_, map(_forward, kinds), forwards)):
            return False
        return self._forwards == [own.get("forward") for own in self._states]


def step_modules(adapter: Adapter) -> StepModules:
    """The modules of a decode step, looked at again where something may have changed."""
    known: StepModules | None = adapter.kept.get("step_modules")
    if known is None or not known.current:
        known = adapter.kept["step_modules"] = StepModules(adapter)
    return known


# --- the modules around the language model -------------------------------------------------------


def _model(adapter: Adapter) -> Any:
    return getattr(adapter.model, "_orig_mod", adapter.model)  # `generate` is not compiled


def _around(adapter: Adapter) -> dict[str, nn.Module]:
    """The modules that contain the language model, by name, the model itself first."""
    model: nn.Module = _model(adapter)
    if (known := adapter.kept.get("around")) is not None:
        return known
    name = next(name for name, module in model.named_modules() if module is adapter.decoder)
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(len(parts))]
    return adapter.kept.setdefault("around", {path: model.get_submodule(path) for path in paths})


_own_run: ContextVar[Forward | None] = ContextVar("vlmfast_own_run", default=None)


class _Output(BaseModelOutputWithPast):
    """What the module around the language model returns; families read more, which is not there."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def called(
    adapter: Adapter, run: Callable[[], Tensor], given: Mapping[str, Any], count: int
) -> tuple[Tensor, Tensor]:
    """Hidden states of the language model, and logits after the last ``count`` of them.

    Parameters
    ----------
    run : callable
        Runs the language model: hidden states (B, T, D).
    given : mapping of str to Any
        What Hugging Face gives to the model in this forward pass. Users' code sees it, and must
        leave it as it is.

    Returns
    -------
    hidden : Tensor, (B, T, D)
    logits : Tensor, (B, count, V)

    Raises
    ------
    ModelError
        Where users' code cannot act as in Hugging Face's forward pass.
    """
    around = step_modules(adapter).around
    if not around:
        hidden = run()
        return hidden, adapter.logits(hidden[:, -count:])
    model, names = _model(adapter), " and ".join(name or "the model" for name in around)
    inner = model.base_model
    for name, module in around.items():
        if inner is model or (
            module is not model and (module is not inner or _own_forward(module))
        ):
            raise ModelError(
                f"{name} has {'a forward' if _own_forward(module) else 'hooks'} of its own, which "
                f"is not supported: vlmfast calls the parts of {type(module).__name__}, and not "
                "itself; hooks of the parts, and of the model, act as in generate"
            )
    given = {key: value for key, value in given.items() if key != "labels"}
    given["position_ids"] = given["position_ids"].clone()  # the engine counts on in place
    versions = {key: _version(value) for key, value in given.items()}
    made: list[Tensor] = []

    def own_run(*args: Any, **kwargs: Any) -> _Output:
        passed = dict(zip(inspect.signature(inner.forward).parameters, args, strict=False)) | kwargs
        changed = [
            key
            for key, value in given.items()
            if passed.get(key, value) is not value or _version(value) != versions[key]
        ]
        if changed or made:
            what = f"changes {', '.join(changed)}" if changed else "calls that of a part again"
            raise ModelError(
                f"a hook or forward of {names} {what}, which is not supported: vlmfast has read "
                "the input before; change the request, or hook the vision tower, the projector or "
                "the language model"
            )
        made.append(run())
        return _Output(made[0], given[adapter.cache_name])

    with _called_instead(inner, own_run):
        output = model(**given, use_cache=True, logits_to_keep=count, return_dict=True)
    if not made:
        raise ModelError(
            f"the forward of {names} does not call that of {type(inner).__name__}, which is not "
            "supported; remove it, or use Hugging Face's generate"
        )
    return made[0], output.logits[:, -count:].to(made[0].device)


@contextmanager
def _called_instead(module: nn.Module, run: Forward) -> Iterator[None]:
    """Inside the block, and in this thread alone, ``run`` is the ``forward`` of a module."""

    def wrapped(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (_own_run.get() or forward)(*args, **kwargs)

        return chosen

    token = _own_run.set(run)
    try:
        with replaced(module, wrapped):
            yield
    finally:
        _own_run.reset(token)


def _is_changed(module: nn.Module) -> bool:
    return users_calls(module) or _own_forward(module)


def _own_forward(module: nn.Module) -> bool:
    """Whether the ``forward`` of a module is not that of its class in Transformers."""
    if users_forward(module):
        return True
    defined = [kind for kind in type(module).__mro__ if "forward" in vars(kind)]
    if is_of(vars(defined[0])["forward"]):
        return False
    # Of a subclass, or put on the class; a family of another package has its own.
    return any(kind.__module__.startswith("transformers.") for kind in defined)


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None
