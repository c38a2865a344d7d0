"""Temporary files of the demo: all in one folder, which is removed when the process ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UPLOADS = "GRADIO_TEMP_DIR"  # read by Gradio


class Files:
    """Owner of a temporary folder.

    Parameters
    ----------
    root : Path

    Attributes
    ----------
    examples, uploads : Path
    """

    def __init__(self, root: Path) -> None:
        self.examples, self.uploads = root / "examples", root / "uploads"
        # Of each user, the files with the times at which they were written.
        self._claimed: dict[str, dict[Path, int]] = defaultdict(dict)
        self._lock = threading.Lock()
        self.uploads.mkdir(parents=True)

    def latest(self, user: str) -> str | None:
        """The last file that a user uploaded."""
        with self._lock:
            paths = list(self._claimed.get(user, ()))
        return str(paths[-1]) if paths else None

    def claim(self, user: str, path: str | None) -> None:
        """Record that a user uploaded a file. Equal files of several users are stored once."""
        if path is None or not Path(path).is_relative_to(self.uploads):
            return
        with self._lock:
            self._claimed[user].pop(Path(path), None)  # the last one is at the end
            self._claimed[user][Path(path)] = _time_of(Path(path))

    def release(self, user: str) -> None:
        """Remove the files of a user who left the page, except those that others use."""
        with self._lock:
            for path, written in self._claimed.pop(user, {}).items():
                used = any(path in own for own in self._claimed.values())
                # Another user may just have uploaded an equal file.
                if not used and _time_of(path) == written:
                    shutil.rmtree(path.parent, ignore_errors=True)  # named by the file's hash


def _time_of(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@contextmanager
def temporary() -> Iterator[Files]:
    """A folder that is removed on exit, also after SIGINT and SIGTERM.

    Gradio stores uploads in it.
    """
    before = os.environ.get(_UPLOADS)
    with tempfile.TemporaryDirectory(prefix="vlmfast-demo-", ignore_cleanup_errors=True) as folder:
        files = Files(Path(folder).resolve())
        os.environ[_UPLOADS] = str(files.uploads)
        try:
            yield files
        finally:
            if before is None:
                del os.environ[_UPLOADS]
            else:
                os.environ[_UPLOADS] = before
