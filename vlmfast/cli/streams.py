"""Standard output and error that are closed, full or narrow."""

from __future__ import annotations

import contextlib
import os
import sys


def discard_output() -> None:
    """Drop what is left in the buffer: at exit, Python would print another error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_missing() -> None:
    """Discard what is written to streams that the caller has closed.

    Otherwise the next file that is opened takes the number of the stream, and its text.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def survive_narrow_encodings() -> None:
    """Print ``?`` for characters of an answer that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
