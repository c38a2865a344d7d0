"""Reads and writes the files of users: regular files alone, and no links where it writes.

Files are replaced atomically: after any interruption, the old or the new one is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from vlmfast.errors import VLMFastError

_SPECIAL, _NO_PATH = "Is not a regular file", "Is not a path"
# Without the second, opening a pipe waits for its other end.
_NO_LINK, _AT_ONCE = os.O_NOFOLLOW, os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Write a temporary file next to ``path``, and replace ``path`` by it when the block ends.

    Parameters
    ----------
    path : str or Path
        A regular file, which keeps its owner and permissions, or a new one; in a folder that
        exists.

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
    try:
        old = _old(path)
        # No one can have put a link at a name that is not known before.
        draft = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
        # Private until it has the permissions of the old file.
        handle = _open(draft, _NEW, mode=0o666 if old is None else 0o600)
        try:
            with open(handle, "wb") as file:
                if old is not None:
                    _make_alike(file.fileno(), old)
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


def open_to_append(path: str | Path) -> BinaryIO:
    """Open a regular file, or a new one, to append to it.

    Raises
    ------
    VLMFastError
        With the path and the reason, where the file cannot be written.
    """
    path = Path(path)
    with writable(path):
        _old(path)
        return open(path, "ab", opener=partial(_open, more=_NO_LINK | _AT_ONCE))


def open_to_read(path: str | Path) -> BinaryIO:
    """Open a regular file: a pipe may have no writer, and a device no end.

    Raises
    ------
    OSError
        Where the file cannot be opened or is no regular one.
    """
    try:
        return open(path, "rb", opener=partial(_open, more=_AT_ONCE))
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, _NO_PATH) from error


def read_bytes(path: str | Path) -> bytes:
    """The content of a regular file; errors as `open_to_read`."""
    with open_to_read(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """The content of a regular file, UTF-8; errors as `open_to_read`, and `UnicodeDecodeError`."""
    return read_bytes(path).decode()


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
    with writable(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Convert errors of the operating system into one clear error."""
    try:
        yield
    except OSError as error:
        raise _cannot(path, error) from error


@contextlib.contextmanager
def readable(
    what: object,
    error: type[VLMFastError] = VLMFastError,
    damaged: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Convert errors of reading a file, and of parsing it, into one clear error.

    Parameters
    ----------
    what : object
        Named by the error: a path, or an argument.
    error : type
    damaged : tuple of type
        Further exceptions that mean that the content is damaged.
    """
    caught: tuple[type[Exception], ...] = (OSError, ValueError, RecursionError, *damaged)
    try:
        yield
    except VLMFastError:
        raise
    except caught as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{what} cannot be read: {reason}") from problem


def _old(path: Path) -> os.stat_result | None:
    """The file at a path, None if there is none; an OSError if it must not be written."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except ValueError as error:  # a null character
        raise OSError(errno.EINVAL, _NO_PATH) from error
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.EINVAL, "Is a link, and links are not followed")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, _SPECIAL)
    return status


def _make_alike(handle: int, old: os.stat_result) -> None:
    """Give a file the owner, where this user may, and the permissions of another."""
    with contextlib.suppress(PermissionError):
        os.fchown(handle, old.st_uid, old.st_gid)
    os.fchmod(handle, stat.S_IMODE(old.st_mode))


def _open(path: str | Path, flags: int, *, more: int = 0, mode: int = 0o666) -> int:
    """An opener of `open` for regular files."""
    handle = os.open(path, flags | more, mode)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return handle
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, _SPECIAL, path)


def _cannot(path: Path, error: OSError) -> VLMFastError:
    return VLMFastError(f"{path} cannot be written: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    """Flush the folder itself to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
