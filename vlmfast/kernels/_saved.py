"""Kernels that ``vlmfast check --save`` found wrong on a GPU, in a file of the user."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import torch

from vlmfast.errors import VLMFastError
from vlmfast.version import __version__


def saved_path() -> Path:
    """The file, in the user's configuration folder; it need not exist."""
    if sys.platform == "win32" and (folder := os.environ.get("APPDATA")):
        home = Path(folder)
    else:
        # An empty or relative value is to be ignored, by the XDG specification.
        folder = os.environ.get("XDG_CONFIG_HOME", "")
        home = Path(folder) if Path(folder).is_absolute() else Path(os.path.expanduser("~/.config"))
    return home / "vlmfast" / "kernels.json"


def machine(device: torch.device) -> str:
    """Key of a GPU in the file: another model or version needs another check."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # built from source, or under another name
        triton = "unknown"
    name = torch.cuda.get_device_name(device)
    return f"{name}, {major}.{minor}, triton {triton}, vlmfast {__version__}"


def read_saved() -> dict[str, list[str]]:
    """Kernels that are turned off, by `machine`; empty without a file.

    Raises
    ------
    VLMFastError
        For a file that cannot be read or is not one of these.
    """
    path = saved_path()
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise VLMFastError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    valid = isinstance(saved, dict) and all(
        isinstance(kernels, list) and all(isinstance(kernel, str) for kernel in kernels)
        for kernels in saved.values()
    )
    if not valid:
        raise VLMFastError(f"{path} cannot be read: it must map GPUs to lists of kernels")
    return saved
