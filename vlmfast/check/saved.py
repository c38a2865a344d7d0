"""Storing which kernels stay off on a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from vlmfast.core.files import make_folder, replace_text
from vlmfast.errors import VLMFastError
from vlmfast.kernels._saved import machine, read_saved, saved_path


def save(kernels: Sequence[str], device: torch.device) -> Path:
    """Turn off ``kernels`` on the GPU ``device``, and no others; entries of other GPUs remain.

    Processes that are running keep what they have read. A damaged file is replaced.

    Raises
    ------
    VLMFastError
        If the file cannot be written.
    """
    path = saved_path()
    try:
        entries = read_saved()
    except VLMFastError:
        entries = {}
    entries.pop(machine(device), None)
    if kernels:
        entries[machine(device)] = sorted(kernels)
    make_folder(path.parent)
    replace_text(path, json.dumps(entries, indent=2) + "\n")
    return path
