"""Hooks and ``forward`` methods that users put on modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as globally

# Code whose result depends on the weights alone, or that only moves them.
PACKAGES = ("vlmfast.", "transformers.", "torch.nn.", "torch._", "accelerate.")
_DECORATORS = "torch.utils._contextlib"  # such as `torch.no_grad`


def is_of(call: Callable[..., Any], packages: tuple[str, ...] = PACKAGES) -> bool:
    """Whether a callable, and all that it wraps, is code of ``packages``.

    Names do not tell: ``functools.wraps`` copies them.
    """
    waiting, seen = [call], set[int]()
    while waiting:
        each: Any = waiting.pop()
        each = getattr(each, "__func__", each)
        if id(each) in seen:
            continue
        seen.add(id(each))
        inner = [each.func] if isinstance(each, functools.partial) else []
        own = getattr(each, "__dict__", {})
        names = ("__wrapped__", "_torchdynamo_orig_callable")
        waiting += inner + [own[name] for name in names if name in own]
        module = getattr(each, "__globals__", {}).get("__name__") or type(each).__module__
        if not (inner or module == _DECORATORS or f"{module}.".startswith(packages)):
            return False
    return True


def registered(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that PyTorch calls before and after the forward pass of a module.

    Those of all modules come first.
    """
    own = vars(module)
    found = (
        globally._global_forward_pre_hooks,
        globally._global_forward_hooks,
        own["_forward_pre_hooks"],
        own["_forward_hooks"],
    )
    return [hook for hooks in found if hooks for hook in hooks.values()]


def replaced_forward(kind: type[nn.Module]) -> bool:
    """Whether a user has replaced the ``forward`` of a class of `PACKAGES`."""
    return f"{kind.__module__}.".startswith(PACKAGES) and not is_of(kind.forward)


def users_forward(module: nn.Module) -> bool:
    """Whether a user has replaced the ``forward`` of a module or its class, or a wrapper has."""
    return _own_forward(module) or replaced_forward(type(module))


def _own_forward(module: nn.Module) -> bool:
    own = vars(module)
    return any(name in own and not is_of(own[name]) for name in ("forward", "_old_forward"))


def users_calls(*modules: nn.Module) -> bool:
    """Whether a forward pass of any of the modules themselves runs code of the user's."""
    # Of hundreds of modules hardly any has something on it, and there are few classes.
    special = [module for module in modules if _has_calls(vars(module))]
    return (
        not all(is_of(hook) for module in (*special, *modules[:1]) for hook in registered(module))
        or any(map(_own_forward, special))
        or any(map(replaced_forward, set(map(type, modules))))
    )


def _has_calls(own: dict[str, Any]) -> bool:
    """Whether anything is registered, or put, on the module with these attributes."""
    return bool(
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or "forward" in own
        or "_old_forward" in own
    )
