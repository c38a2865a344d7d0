"""Temporary files of the demo: all in one folder, which is removed when the process ends."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
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
        self._traces = root / "traces"
        self._users: dict[Path, set[str]] = {}
        self._written: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.uploads.mkdir(parents=True)

    def new_trace(self, user: str) -> Path:
        """Where to write the trace of a user; earlier ones are removed."""
        path = self._trace(user)
        for old in (path, *self.uploads.glob(f"*/{path.name}")):  # Gradio serves copies
            old.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        return path

    def _trace(self, user: str) -> Path:
        # Names of users come from the browser.
        return self._traces / f"trace-{hashlib.sha256(user.encode()).hexdigest()[:16]}.json"

    def latest(self, user: str) -> str | None:
        """The last file that a user uploaded."""
        with self._lock:
            paths = [path for path, users in self._users.items() if user in users]
        return str(paths[-1]) if paths else None

    def claim(self, user: str, path: str | None) -> None:
        """Record that a user uploaded a file. Equal files of several users are stored once."""
        if path is None or not Path(path).is_relative_to(self.uploads):
            return
        with self._lock:
            users = self._users.pop(Path(path), set())  # the last one is at the end
            self._users[Path(path)] = users | {user}
            self._written[Path(path)] = _time_of(Path(path))

    def release(self, user: str) -> None:
        """Remove the files of a user who left the page, except those that others use."""
        self.new_trace(user)
        with self._lock:
            for path, users in list(self._users.items()):
                users.discard(user)
                if users:
                    continue
                del self._users[path]
                # Another user may just have uploaded an equal file.
                if _time_of(path) == self._written.pop(path):
                    shutil.rmtree(path.parent, ignore_errors=True)  # named by the file's hash


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


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
