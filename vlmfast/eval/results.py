"""Result folders: ``DIR/<task>/<recipe>/{samples.jsonl, timings.jsonl, meta.json}``.

A folder stays valid if the process is killed: both JSONL files are journals, and ``meta.json`` is
written before the first line. Times have their own file, so that
``samples.jsonl`` is reproducible byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmfast.core.files import make_folder, read_bytes, readable, replace_text, writable
from vlmfast.core.journal import Journal, folder_lock, read_lines
from vlmfast.errors import VLMFastError

SCHEMA = 1
# Costs that are stored with a sample: without times, which are not reproducible.
COSTS = ("visual_tokens_in", "equivalent_tokens", "kv_bytes", "kv_bytes_full")
SAMPLES, TIMINGS, META = "samples.jsonl", "timings.jsonl", "meta.json"

# Fields that must be equal within one table, and fields that identify one folder in it.
_SHARED = ("schema", "task", "task_version", "weights_sha256", "seed", "options", "generation")
_OWN = ("recipe", "control", "session", "stage_weights")
_NEEDED = (*_SHARED[:-1], "recipe", "control", "model", "method", "budget")


@dataclass
class Results:
    """Answers of one recipe to one task.

    Parameters
    ----------
    path : Path
    meta : dict
    samples, timings : dict of str to dict
        Lines of the two files by ``doc_id``.
    """

    path: Path
    meta: dict[str, Any]
    samples: dict[str, dict] = field(default_factory=dict)
    timings: dict[str, dict] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Recipe and variant."""
        return named(self.meta["recipe"], self.variant)

    @property
    def label(self) -> str:
        """`name` in Markdown, with the source of saliency and the number of draws, if any."""
        return self.labelled(self.name)

    def labelled(self, name: str) -> str:
        """Another name of the run in the same format."""
        source, draws = self.meta.get("saliency"), self.meta.get("draws")
        about = [*([source] if source else []), *([f"mean of {draws} draws"] if draws else [])]
        return f"`{name}`" + (f" ({', '.join(about)})" if about else "")

    @property
    def variant(self) -> str | None:
        """The control, or ``session``."""
        return variant_of(self.meta.get("control"), self.meta.get("session"))

    def only(self, docs: set[str]) -> Results:
        """The same results for the samples ``docs``."""
        return Results(
            self.path,
            self.meta,
            {doc: line for doc, line in self.samples.items() if doc in docs},
            {doc: line for doc, line in self.timings.items() if doc in docs},
        )


def variant_of(control: str | None, session: bool | None) -> str | None:
    """The control, ``session``, or None."""
    return control or ("session" if session else None)


def named(recipe: str, variant: str | None) -> str:
    """Name of a recipe with its variant: a control, or ``session``."""
    return f"{recipe}@{variant}" if variant else recipe


def slug(recipe: str, variant: str | None = None) -> str:
    """A folder name for a recipe, unique for each recipe."""
    plain = recipe.replace(":", "_")  # method names have no underscore
    name = re.sub(r"[^A-Za-z0-9._+=,-]", "-", plain)
    if name != plain or len(name) > 80:
        name = f"{name[:80]}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    return named(name, variant)


def read(path: Path) -> Results:
    """Read the results of one folder, finished or not.

    Raises
    ------
    VLMFastError
        If the folder contains no results or they are damaged.
    """
    meta = _read_meta(path)
    samples, timings = (
        {line["doc_id"]: line for line in _read_lines(path, name)} for name in (SAMPLES, TIMINGS)
    )
    return Results(path, meta, samples, timings)


def _all(path: Path, name: str) -> list[Path]:
    """A file and those of the shards in the same folder."""
    stem, ending = name.split(".")
    return [path / name, *sorted(path.glob(f"{stem}.*-of-*.{ending}"))]


def shard_file(name: str, shard: tuple[int, int] | None) -> str:
    """``samples.jsonl``, or ``samples.0-of-4.jsonl`` of shard ``(0, 4)``."""
    stem, ending = name.split(".")
    return name if shard is None else f"{stem}.{shard[0]}-of-{shard[1]}.{ending}"


def check_same(metas: dict[str, dict], keys: tuple[str, ...] = _SHARED) -> None:
    """Check that results are comparable.

    Raises
    ------
    VLMFastError
        With the first field that differs, and the folders.
    """
    (first, expected), *others = metas.items()
    for name, meta in others:
        for key in keys:
            if meta.get(key) != expected.get(key):
                raise VLMFastError(
                    f"{first} and {name} are results of different runs: {key} is "
                    f"{json.dumps(expected.get(key))} in the one and {json.dumps(meta.get(key))} "
                    "in the other; use another folder"
                )


class Writer:
    """Appends to a result folder; a context manager.

    On entry it creates the folder or resumes an earlier run: `done` are its samples and `errors`
    the messages of failed ones. Other processes are locked out until exit.

    Parameters
    ----------
    path : Path
    meta : dict
        JSON values; must match those in the folder, if any, and in its sibling folders.
    shard : (int, int), optional
        Index of this process and number of processes, if several write to one folder. Each has its
        own files.

    Raises
    ------
    VLMFastError
        If the folder cannot be written, belongs to another run or is in use.
    """

    def __init__(
        self, path: Path, meta: dict[str, Any], shard: tuple[int, int] | None = None
    ) -> None:
        self.path, self.meta, self.shard = path, meta, shard
        self.done: set[str] = set()
        self.errors: list[str] = []

    def __enter__(self) -> Writer:
        self._check_siblings()
        make_folder(self.path)
        with contextlib.ExitStack() as opened:
            self._timings, self._samples = (
                opened.enter_context(Journal(self.path / shard_file(name, self.shard)))
                for name in (TIMINGS, SAMPLES)
            )
            for line in _read_lines(self.path, SAMPLES):  # including other shards
                self._count(line)
            if (self.path / META).exists():
                self.meta = _read_meta(self.path)
            elif self.done:
                raise VLMFastError(f"{self.path} has samples but no {META}; use another folder")
            opened.pop_all()  # closed on exit
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._timings.close()
        finally:
            self._samples.close()

    def add(self, sample: dict[str, Any], timing: dict[str, Any] | None) -> None:
        """Append one sample; see `Journal` for when it is safe."""
        # Times first: a sample in the file counts as done, so it must be complete.
        if timing is not None:
            self._timings.append(timing)
        self._samples.append(sample)
        self._count(sample)

    def note(self, run: dict[str, Any]) -> None:
        """Add facts about this run to ``meta.json``, under ``resumed`` if it resumes another."""
        with writable(self.path), folder_lock(self.path):
            first = not (self.path / META).exists()
            if not first:  # another shard may have written to it since
                self.meta = _read_meta(self.path)
            if self.shard is not None:
                run = {**run, "shard": "{}/{}".format(*self.shard)}
            if self.done or not (first or self.shard is None):
                self.meta = {**self.meta, "resumed": [*self.meta.get("resumed", []), run]}
            else:
                self.meta = {**self.meta, **run}
            write_json(self.path / META, self.meta)

    def _check_siblings(self) -> None:
        """Check that all results of a task in one folder, which form one table, are comparable."""
        if self.path.parent.is_dir():
            for meta in sorted(self.path.parent.glob(f"*/{META}")):
                keys = _SHARED + _OWN if meta.parent == self.path else _SHARED
                metas = {str(meta.parent): _read_meta(meta.parent), "this run": self.meta}
                check_same(metas, keys)

    def _count(self, sample: dict[str, Any]) -> None:
        self.done.add(sample["doc_id"])
        if "error" in sample:
            self.errors.append(sample["error"])


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    make_folder(path.parent)
    replace_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _read_meta(path: Path) -> dict[str, Any]:
    with readable(path / META):
        meta = json.loads(read_bytes(path / META))
    missing = [key for key in _NEEDED if not isinstance(meta, dict) or key not in meta]
    if missing:
        raise VLMFastError(f"{path / META} is not a vlmfast result: it has no {missing[0]!r}")
    return meta


def _read_lines(path: Path, name: str) -> list[dict]:
    """Lines of all shards."""
    found = []
    for file in _all(path, name):
        for number, line in enumerate(read_lines(file)[0], start=1):
            if "doc_id" not in line:
                raise VLMFastError(f"{file}: line {number} is damaged: it has no doc_id")
            found.append(line)
    return found
