"""Lines of JSON that a run appends to a file, so that an interrupted run continues.

A file stays valid if the process is killed: lines are only appended, and readers drop an incomplete
last line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from vlmfast.errors import VLMFastError

from .files import open_to_append, read_bytes, writable

_SYNC_S = 1.0


class Journal:
    """Appends to a JSONL file, and locks out other processes until it is closed.

    Lines are flushed at once, and reach the disk within a second or with the line after that.

    Parameters
    ----------
    path : Path
        In a folder that exists. An incomplete last line is removed.
    about : dict, optional
        What identifies the run, as JSON values: the first line.
    needed : tuple of str
        Keys of all other lines.

    Attributes
    ----------
    lines : list of dict
        The lines of earlier runs, without ``about``.

    Raises
    ------
    VLMFastError
        If the file is of another run, is in use, is damaged or cannot be written.
    """

    def __init__(
        self, path: Path, about: dict[str, Any] | None = None, needed: tuple[str, ...] = ()
    ) -> None:
        self.path, self._synced = path, time.monotonic()
        self._file = open_to_append(path)
        try:
            with writable(path):
                _lock(self._file, path.parent)
                lines, size = read_lines(path)
                self._file.truncate(size)
            if about is not None and lines:
                _check_same(path, lines.pop(0), about)
            elif about is not None:
                self.append(about)
            if not all(key in line for line in lines for key in needed):
                raise VLMFastError(f"{path} is damaged: its lines need {', '.join(needed)}")
            self.lines = lines
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def append(self, *lines: dict[str, Any]) -> None:
        """Append lines with one write."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with writable(self.path):
            self._file.write(text.encode("utf-8", "surrogatepass"))  # of file names
            self._file.flush()
            if time.monotonic() - self._synced >= _SYNC_S:
                self._sync()

    def close(self) -> None:
        try:
            with writable(self.path):
                self._sync()
        finally:
            # Errors of a full disk were already reported.
            with contextlib.suppress(OSError):
                self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a file and their size in bytes; none without a file.

    Raises
    ------
    VLMFastError
        If the file cannot be read, or a line other than the last one is damaged.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise VLMFastError(f"cannot read {path}: {error.strerror or error}") from error
    pieces = data.split(b"\n")[:-1]  # a line without a newline is incomplete
    lines: list[dict[str, Any]] = []
    size = 0
    for number, piece in enumerate(pieces, start=1):
        try:
            line = json.loads(piece)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            if number == len(pieces):  # zeros, as after a power failure
                break
            raise VLMFastError(f"{path}: line {number} is damaged")
        lines.append(line)
        size += len(piece) + 1
    return lines, size


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """One process at a time; the others wait."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _lock(file: IO[bytes], path: Path) -> None:
    """Lock a file until it is closed or the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise VLMFastError(f"another run is writing to {path}") from error


def _check_same(path: Path, found: dict[str, Any], about: dict[str, Any]) -> None:
    about = json.loads(json.dumps(about))
    for key in [*about, *found]:
        if found.get(key) != about.get(key):
            raise VLMFastError(
                f"{path} is of another run: {key} is {json.dumps(found.get(key))} there and "
                f"{json.dumps(about.get(key))} here; use another folder"
            )
