"""Atomic replacement of files: after any interruption, the old or the new file is complete."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from vlmfast.errors import VLMFastError

__all__ = ["make_folder", "replace_bytes", "replace_text", "replacing"]


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Write a temporary file next to ``path``, and replace ``path`` by it when the block ends.

    Parameters
    ----------
    path : str or Path
        In a folder that exists.

    Yields
    ------
    BinaryIO
        The new file. It is flushed to the disk before it replaces the old one; after an exception
        it is removed.

    Raises
    ------
    VLMFastError
        With the path and the reason, where the file cannot be written.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        try:
            with open(draft, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise _cannot(path, error) from error
    except RuntimeError as error:
        # torch.save raises an error of its own while it handles that of the file.
        if isinstance(error.__context__, OSError):
            raise _cannot(path, error.__context__) from error
        raise


def replace_bytes(path: str | Path, parts: Iterable[bytes | memoryview]) -> None:
    """`replacing`, for content that exists already, in parts."""
    with replacing(path) as file:
        for part in parts:
            file.write(part)


def replace_text(path: str | Path, text: str) -> None:
    """`replacing`, for a text; UTF-8, lines as they are."""
    replace_bytes(path, [text.encode()])


def make_folder(path: str | Path) -> None:
    """Make a folder and its parents, if they do not exist.

    Raises
    ------
    VLMFastError
        With the path and the reason.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot(Path(path), error) from error


def _cannot(path: Path, error: OSError) -> VLMFastError:
    return VLMFastError(f"{path} cannot be written: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    """Flush the folder itself to the disk, where folders can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
