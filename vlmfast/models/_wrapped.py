"""Models in wrappers of other libraries: adapters of PEFT, quantized and dispatched weights."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.placement import device_of, devices_of, hooks_of, loaded_value
from vlmfast.errors import ModelError

# Hooks of accelerate that act where modules are called, and not in the model's own `forward`.
_HOOKS = {"AlignDevicesHook", "ModelHook"}


def base_of(model: Any) -> Any:
    """The Hugging Face model in a ``PeftModel``, whose layers are those of its adapters.

    Other models are returned as they are.

    Raises
    ------
    ModelError
        For adapters that change the prompt, or whose layers take other inputs than the model's.
    """
    peft = sys.modules.get("peft")  # imported wherever such a model exists
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    for config in model.peft_config.values():
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        other = config.is_prompt_learning or config.is_adaption_prompt or kind in ("POLY", "XLORA")
        if other or getattr(config, "alora_invocation_tokens", None):
            raise ModelError(
                f"the model has an adapter of type {kind} that depends on the prompt, which is not "
                "supported; adapters of single layers are, such as LoRA"
            )
    return model.base_model.model


def check_placement(model: nn.Module) -> None:
    """Refuse a model without weights, and hooks that run only in its own ``forward``.

    Raises
    ------
    ModelError
    """
    if None in devices_of(model):
        raise ModelError("the model is on the meta device; load its weights first")
    for name, part in model.named_modules():
        for hook in hooks_of(part):
            if type(hook).__name__ not in _HOOKS:
                raise ModelError(
                    f"{name or 'the model'} has a {type(hook).__name__} of accelerate, which is "
                    "not supported; use device_map, cpu_offload or disk_offload"
                )


def synchronizes(module: nn.Module) -> bool:
    """Whether a layer reads from the device, so that no graph can contain it.

    LLM.int8 of bitsandbytes looks for outliers in its input.
    """
    return any(of.__name__ == "Linear8bitLt" for of in type(module).__mro__)


def is_quantized(module: Any) -> bool:
    """Whether a module is a linear layer whose weight is not a plain matrix of floats."""
    if not isinstance(module, nn.Linear):
        return False
    weight: Any = module.weight
    packed = hasattr(type(weight), "__tensor_flatten__") or not weight.is_floating_point()
    return packed or tuple(weight.shape) != (module.out_features, module.in_features)


@torch.no_grad()
def entries(module: nn.Module, name: str, flat: Tensor) -> Tensor:
    """Elements ``flat`` of the flattened matrix of a layer, float32, as the layer applies it.

    Parameters
    ----------
    module : Module
        With the parameter ``name`` of two dimensions.
    flat : Tensor, int64, (N,)
    """
    weight = module.get_parameter(name)
    if not is_quantized(module):
        value = loaded_value(module, name, weight).detach().flatten()
        return value[flat.to(value.device)].float()
    assert isinstance(module, nn.Linear)  # see `is_quantized`
    # One product per element; no library's own way to dequantize is needed.
    row, column = flat // module.in_features, flat % module.in_features
    device = device_of(module)
    single = torch.nn.functional.one_hot(column, module.in_features).float().to(device)
    if weight.is_floating_point():  # as torchao's weights appear
        single = single.to(weight.dtype)
    made = module(single).float()
    if module.bias is not None:
        made = made - loaded_value(module, "bias", module.bias).to(device).float()
    return made.gather(1, row[:, None].to(device))[:, 0]
