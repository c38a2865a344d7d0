"""Nested Python values and tensors in one safetensors file, written atomically.

The first entry of the file's metadata is the SHA-256 of all its bytes, those of the digest itself
counted as zeros. A file that differs in one byte from what was written is thus refused before its
content is parsed. A temporary file next to the target is written first and then replaces it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from vlmfast.errors import VLMFastError, check_memory

from .files import read_bytes, readable, replace_bytes

_OPENING = b'{"__metadata__":{"digest":"'  # after the eight bytes of the header's length
_AT = 8 + len(_OPENING)
_SUM = 64  # characters
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# --- nested values -------------------------------------------------------------------------------


def pack(value: Any, tensors: dict[str, Tensor], name: str, classes: dict[str, type]) -> Any:
    """``value`` as JSON; its tensors go to ``tensors`` under names that begin with ``name``.

    Numbers, texts, lists, tuples, dicts, dtypes, tensors and dataclasses of these can be packed,
    the latter under their names in ``classes``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach().to("cpu").contiguous()
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}.{at}", classes) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        # Keys may be numbers or tuples too.
        return {
            "dict": [
                [pack(key, tensors, name, classes), pack(item, tensors, f"{name}.{key}", classes)]
                for key, item in value.items()
            ]
        }
    if type(value) in classes.values():
        packed = {
            f.name: pack(getattr(value, f.name), tensors, f"{name}.{f.name}", classes)
            for f in fields(value)
        }
        own = next(key for key, cls in classes.items() if cls is type(value))
        return {"class": own, "fields": packed}
    raise VLMFastError(f"{name} is a {type(value).__name__}, which cannot be saved")


def unpack(value: Any, tensors: dict[str, Tensor], classes: dict[str, type]) -> Any:
    """The inverse of `pack`; builds only ``classes``."""
    if isinstance(value, list):
        return [unpack(item, tensors, classes) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dtype" in value:
        return {str(d).removeprefix("torch."): d for d in _DTYPES}[value["dtype"]]
    if "tuple" in value:
        return tuple(unpack(item, tensors, classes) for item in value["tuple"])
    if "dict" in value:
        pairs = [[unpack(item, tensors, classes) for item in pair] for pair in value["dict"]]
        return dict(pairs)
    cls = classes[value["class"]]
    parts = {key: unpack(item, tensors, classes) for key, item in value["fields"].items()}
    hints = get_type_hints(cls)
    for key, part in parts.items():
        if key not in hints or not conforms(part, hints[key]):
            raise ValueError(f"{key} of a {cls.__name__} is unknown or of the wrong type")
    return cls(**parts)


def conforms(value: Any, hint: Any) -> bool:
    """Whether an unpacked value is of the type of a field; an int is accepted as a float."""
    if hint is Any:
        return True
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(conforms(value, option) for option in inside)
    if hint is None or hint is NoneType:
        return value is None
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        if len(inside) == 2 and inside[1] is Ellipsis:
            return all(conforms(item, inside[0]) for item in value)
        return len(value) == len(inside) and all(map(conforms, value, inside))
    if kind is list:
        return isinstance(value, list) and all(conforms(item, inside[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(
            conforms(key, inside[0]) and conforms(item, inside[1]) for key, item in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def moved(value: Any, device: torch.device | str) -> Any:
    """Nested values with all tensors on ``device``; those already there are shared, not copied."""
    return mapped(value, lambda tensor: tensor.to(device))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested values with ``change`` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: mapped(getattr(value, f.name), change) for f in fields(value)}
        return type(value)(**parts)
    return value


# --- files ---------------------------------------------------------------------------------------


def write(path: str | Path, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write a file to ``path`` atomically: an interruption leaves the old or the new one.

    Parameters
    ----------
    metadata : dict of str to str
        The key ``digest`` is reserved.
    tensors : dict of str to Tensor
        On the host, contiguous.

    Raises
    ------
    VLMFastError
        With the reason, where the file cannot be written.
    """
    parts = list(_parts(metadata, tensors))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    head = bytes(parts[0])
    parts[0] = head[:_AT] + digest.hexdigest().encode() + head[_AT + _SUM :]
    replace_bytes(path, parts)


def _parts(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file whose digest is zeros: header, then the tensors."""
    # Wide types first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"digest": "0" * _SUM, **metadata}}
    end = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end := end + tensor.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        # Empty tensors have no bytes that could be viewed.
        if tensors[name].nbytes:
            yield tensors[name].reshape(-1).view(torch.uint8).numpy().data


def read(path: str | Path, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file that `write` made.

    Parameters
    ----------
    what : str
        What the file should be, for messages.

    Raises
    ------
    VLMFastError
        Where the file cannot be read, is of another kind, or has changed since it was written.
    """
    from safetensors.torch import load

    with readable(path):
        data = read_bytes(path)
    if data[8:_AT] != _OPENING or len(data) < _AT + _SUM:
        raise VLMFastError(f"{path} is not {what}, or its beginning is damaged")
    digest = hashlib.sha256(data[:_AT])
    digest.update(b"0" * _SUM)
    digest.update(memoryview(data)[_AT + _SUM :])
    if digest.hexdigest().encode() != data[_AT : _AT + _SUM]:
        raise VLMFastError(f"{path} is damaged: its checksum does not match its content")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return header["__metadata__"], load(data)
    except Exception as error:  # the checksum matches, so the file was written like this
        check_memory(error)
        reason = str(error).partition("\n")[0][:200]
        raise VLMFastError(f"{path} cannot be read: {reason}") from error
