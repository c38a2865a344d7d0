"""Where the weights of a model are and where its modules run, with or without accelerate.

Hugging Face's ``device_map`` leaves a hook of accelerate on every module. It moves the inputs of
the module to its device and, for an offloaded module, loads the weights for the forward pass: in
between they are on ``meta``, and the hook's map has their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.errors import ModelError, one_line


def usable(name: str | torch.device | None) -> torch.device | None:
    """A device that a user has named; ``None`` stays.

    Raises
    ------
    ModelError
        If there is no such device, or it cannot be used.
    """
    if name is None:
        return None
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {str(name)!r} cannot be used: {one_line(error)}") from error


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of accelerate on a module itself, in their order."""
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def devices_of(module: nn.Module) -> list[torch.device | None]:
    """The devices on which the parts of a module run, each once, in their order.

    They are those of the weights and, where these are offloaded, of the hooks that load them.
    ``None`` means weights on ``meta`` that no hook loads.
    """
    return list(dict.fromkeys(_devices(module, None)))


def _devices(module: nn.Module, above: torch.device | None) -> Iterator[torch.device | None]:
    own = None
    for hook in hooks_of(module):
        if getattr(hook, "offload", False) and hook.execution_device is not None:
            own = torch.device(hook.execution_device)
            above = own if hook.place_submodules else above
    for weight in module.parameters(recurse=False):
        yield (own or above) if weight.device.type == "meta" else weight.device
    for child in module.children():
        yield from _devices(child, above)


def device_of(module: nn.Module) -> torch.device | None:
    """The first of `devices_of`; ``None`` for a module without weights, too."""
    return next(_devices(module, None), None)


def hooked(model: nn.Module) -> bool:
    """Whether accelerate moves or loads something in the forward pass of any module."""
    return any(hooks_of(part) for part in model.modules())


def stored(hook: Any, name: str) -> Tensor | str | None:
    """The value of an offloaded weight; of one on disk, what identifies it."""
    for each in getattr(hook, "hooks", [hook]):
        found, key = getattr(each, "weights_map", None), name
        while found is not None:
            if hasattr(found, "prefix"):  # PrefixedDataset
                found, key = found.dataset, f"{found.prefix}{key}"
            elif hasattr(found, "index"):  # OffloadedWeightsLoader
                state: Mapping[str, Tensor] = found.state_dict
                if key in state:
                    return state[key]
                return f"{found.save_folder} {key} {found.index.get(key)}"
            else:
                return found.get(key)
    return None


def loaded_value(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The value of a module's own weight, read from where it is offloaded to."""
    if weight.device.type == "meta":
        for hook in hooks_of(module):
            if getattr(hook, "weights_map", None) is not None:
                return hook.weights_map[name]
    return weight


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all weights, those of quantized layers in the parts they consist of.

    Tied weights are listed once, under their first name, as in ``named_parameters``.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            value = loaded_value(module, name, weight)
            yield from _parts(f"{path}.{name}" if path else name, value)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(value, "__tensor_flatten__"):
        for part in value.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(value, part))
    else:
        yield name, value


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """Inside the block, the weights of a module itself are there although it is not called.

    ``get_image_features`` of a model reads weights of the model, and is not its ``forward``.
    """
    hooks = [hook for hook in hooks_of(module) if getattr(hook, "offload", False)]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.post_forward(module, None)
