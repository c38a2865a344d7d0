"""Results of the checks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FOLDERS = re.compile(r"(?:[A-Za-z]:)?[\\/](?:[^\s\\/:'\"<>]+[\\/])+")


@dataclass(frozen=True)
class Row:
    """One check.

    Parameters
    ----------
    name : str
        A kernel file, or what was checked of the model.
    passed : bool or None
        None if it was not checked; ``note`` gives the reason.
    about : str
        Shapes and dtypes.
    note : str
        What was wrong. No paths: results are meant to be published.
    error : float, optional
        Largest deviation as a fraction of the tolerance.
    seconds : float, optional
        Measured on CUDA alone.
    bytes : int, optional
        Bytes that the task must move.
    share : float, optional
        Their rate as a fraction of that of a large copy.
    """

    name: str
    passed: bool | None
    about: str = ""
    note: str = ""
    error: float | None = None
    seconds: float | None = None
    bytes: int | None = None
    share: float | None = None


def attempt(name: str, check: Callable[..., Row], *args: Any) -> Row:
    """``check(name, *args)``; any exception is a failure, with its message."""
    try:
        return check(name, *args)
    except Exception as error:
        return Row(name, False, note=message_of(error))


def message_of(error: BaseException) -> str:
    """Type and message of an exception in one line, without folders."""
    return one_line(f"{type(error).__name__}: {error}")


def one_line(text: str) -> str:
    """``text`` in one line of at most 200 characters, without folders."""
    return _FOLDERS.sub("", " ".join(text.split()))[:200]
