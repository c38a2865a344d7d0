"""Loads a checkpoint and its processor, with a clear error for each failure."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vlmfast.core.hub import check_model
from vlmfast.errors import ModelError, check_memory, one_line

from . import alternatives, families, skipped


def load(
    name: str | Path, device: str | torch.device | None, dtype: str | torch.dtype, **kwargs: Any
) -> tuple[Any, Any]:
    """Model on ``device`` in ``dtype``, in evaluation mode, and its processor.

    Parameters
    ----------
    device : optional
        A CUDA device if one is available, else the CPU, or where ``device_map`` says.
    **kwargs
        For Hugging Face's ``from_pretrained``.

    Raises
    ------
    ModelError
    """
    where = ("revision", "cache_dir", "local_files_only")
    check_model(str(name), **{key: kwargs[key] for key in where if key in kwargs})
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    mapped = kwargs.get("device_map") is not None
    if mapped and device is not None:
        raise ModelError("device_map and device both say where the model runs; pass one of them")
    # Unset, transformers asks on the terminal.
    kwargs = {"trust_remote_code": False, **kwargs}
    hub = {
        key: kwargs[key]
        for key in ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code")
        if key in kwargs
    }
    known = families()  # packages of other families may register their classes at import
    config = _try(f"no model configuration in {name}", AutoConfig.from_pretrained, name, **hub)
    kind = config.model_type
    if kind not in known:
        if reason := skipped(kind):
            raise ModelError(f"{name} is a {kind!r} model: {reason}")
        raise ModelError(
            f"{name} is a {kind!r} model, which is not supported; {alternatives(kind)}"
        )
    processor = _try(f"no processor in {name}", AutoProcessor.from_pretrained, name, **hub)
    if getattr(processor, "image_processor", None) is None:
        raise ModelError(
            f"no processor in {name}: found {type(processor).__name__}, "
            "which has no image processor"
        )
    quantized = "quantization_config" in kwargs or hasattr(config, "quantization_config")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if quantized and not mapped:  # quantized layers are made where they stay
        kwargs["device_map"] = {"": device}
    if (mapped or quantized) and find_spec("accelerate") is None:
        raise ModelError(
            f"{'device_map' if mapped else 'a quantized model'} needs the package accelerate; "
            "pip install accelerate"
        )
    model, report = _try(
        f"the weights in {name} do not load",
        AutoModelForImageTextToText.from_pretrained,
        name,
        dtype=dtype,
        output_loading_info=True,
        **kwargs,
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the checkpoint {name} lacks {len(missing)} weights, among them {missing[0]}"
        )
    if mapped or quantized:
        return model.eval(), processor
    return _try(f"no device {device}", model.eval().to, device), processor


def _try(what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:  # a bad checkpoint can raise any exception
        check_memory(error)
        reason = one_line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own, which runs only with trust_remote_code=True"
        raise ModelError(f"{what}: {reason}") from error
