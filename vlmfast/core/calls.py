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
    own = vars(module)
    names = ("forward", "_old_forward")
    return any(name in own and not is_of(own[name]) for name in names) or replaced_forward(
        type(module)
    )


def users_calls(module: nn.Module) -> bool:
    """Whether a forward pass of a module itself runs code of the user's."""
    return not all(map(is_of, registered(module))) or users_forward(module)
