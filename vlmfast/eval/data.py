"""Input of tasks: rows of data sets, videos by name, subtitles."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmfast.core.files import read_bytes
from vlmfast.errors import MediaError, VLMFastError, check_memory
from vlmfast.media.sources import is_url, short, shown

from .tasks import Doc, check_choice

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.media import VideoInfo


@dataclass
class Rows:
    """The rows of one split, of parquet files.

    Parameters
    ----------
    source : str or Path
        A parquet file, a folder of parquet files whose names start with the split's name, as in a
        copy of a hub repository, or a hub id.
    split : str
    needed : sequence of str
        Required columns.
    image_columns : sequence of str
        Columns of images, which are read when they are needed.

    Raises
    ------
    VLMFastError
        If the source is missing or cannot be read, or a column is missing.
    """

    source: str | Path
    split: str
    needed: Sequence[str]
    image_columns: Sequence[str] = ()
    _open: tuple[int, Any] | None = field(default=None, init=False, repr=False)

    @cached_property
    def _groups(self) -> list[tuple[int, Any, int]]:
        """The first row of each row group, its file, and its number in the file."""
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise VLMFastError(
                "this task needs pyarrow, which is not installed: pip install 'vlmfast[eval]'"
            ) from error
        found, first = [], 0
        for file in map(ParquetFile, _parquet_files(self._path(), self.split)):
            columns = file.schema_arrow.names
            missing = [name for name in self.needed if name not in columns]
            if missing:
                raise VLMFastError(
                    f"{self.source} has no column {', '.join(map(repr, missing))}; "
                    f"it has {', '.join(columns)}"
                )
            for number in range(file.num_row_groups):
                found.append((first, file, number))
                first += file.metadata.row_group(number).num_rows
        return found

    def _path(self) -> Path:
        """A file or folder; what a hub id names is downloaded."""
        from huggingface_hub import snapshot_download

        if Path(self.source).exists():
            return Path(self.source)
        name = f"{self.split}*.parquet"
        kwargs: dict[str, Any] = {"repo_type": "dataset", "allow_patterns": [name, f"*/{name}"]}
        return Path(snapshot_download(str(self.source), **kwargs))

    def _read(self, file: Any, group: int, images: bool) -> Any:
        names = file.schema_arrow.names
        return file.read_row_group(group, [n for n in names if (n in self.image_columns) is images])

    @cached_property
    def texts(self) -> list[dict[str, Any]]:
        """All columns of all rows except the images."""
        with _readable(self.source):
            tables = [self._read(file, group, False) for _, file, group in self._groups]
            return [row for table in tables for row in table.to_pylist()]

    def row(self, number: int) -> dict[str, Any]:
        """The images of one row. Rows are read fastest in ascending order."""
        with _readable(self.source):
            first, file, group = next(g for g in reversed(self._groups) if g[0] <= number)
            if self._open is None or self._open[0] != first:
                self._open = first, self._read(file, group, True)
            return self._open[1].slice(number - first, 1).to_pylist()[0]


@contextmanager
def _readable(source: str | Path) -> Iterator[None]:
    """Convert the errors of data libraries into one clear error."""
    try:
        yield
    except VLMFastError:
        raise
    except Exception as error:
        check_memory(error)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise VLMFastError(f"cannot read {source}: {reason}") from error


def _parquet_files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.parquet"))
    found = [file for file in files if re.match(rf"{re.escape(split)}\b", file.name)]
    if not found:
        others = ", ".join(str(file.relative_to(path)) for file in files[:5])
        raise VLMFastError(
            f"{path} has no parquet file of split {split!r} ({split}-*.parquet); "
            f"found {others or 'no parquet files'}"
        )
    return found


def read_docs(
    rows: Rows, make: Callable[[int, dict[str, Any]], Doc], limit: int | None, seed: int, group: str
) -> list[Doc]:
    """What ``make`` makes of all rows, or of the first ``limit`` of each ``group``.

    Raises
    ------
    VLMFastError
        For duplicate ids, of which the second sample would be skipped, and for a ``seed`` but 0.
    """
    check_choice("seed", seed, (0,))
    if limit is not None and limit < 1:
        raise VLMFastError(f"limit is {limit}; it must be at least 1 question per type")
    seen: set[str] = set()
    taken: dict[str, int] = {}
    chosen = []
    for number, row in enumerate(rows.texts):
        doc = make(number, row)
        if doc.doc_id in seen:
            raise VLMFastError(f"{rows.source} has the id {doc.doc_id!r} twice")
        seen.add(doc.doc_id)
        name = dict(doc.groups)[group]
        taken[name] = taken.get(name, 0) + 1
        if limit is None or taken[name] <= limit:
            chosen.append(doc)
    return chosen


def row_image(
    row: dict[str, Any], name: str, data: str | Path = ".", allow_outside: bool = False
) -> Image.Image:
    """The image in a column, RGB.

    Parameters
    ----------
    row : dict
        Contains an image's bytes, path or URL under ``name``.
    name : str
    data : str or Path
        Source of the rows. Paths must be inside its folder and are relative to it.
    allow_outside : bool
        Also load other paths and URLs.

    Raises
    ------
    MediaError
        If the column is empty or points outside the folder, or the image is damaged.
    """
    from vlmfast.media import load_image

    value = row.get(name)
    if isinstance(value, dict):  # format of datasets and parquet files
        value = value.get("bytes") or value.get("path")
    if value is None:
        raise MediaError(f"{name} is empty")
    if isinstance(value, str) and value[:5].lower() != "data:":
        if is_url(value):
            if not allow_outside:
                raise MediaError(f"{name} is the URL {shown(value)}; {_ALLOW}")
            return load_image(value)
        path = Path(data)
        folder = path if path.is_dir() else path.parent if path.is_file() else None
        return load_image(within(folder, value, name, allow_outside))
    return load_image(value)


_ALLOW = "use --allow-outside (allow_outside=True) to load it"


def within(
    folder: str | Path | None, path: str | Path, name: str, allow_outside: bool = False
) -> Path:
    """Resolve a path from a data set and check that it is inside ``folder``, links resolved.

    Raises
    ------
    MediaError
        If the path is outside the folder, or ``folder`` is None. The message starts with ``name``.
    """
    found = Path(path) if folder is None else Path(folder, path)
    try:
        inside = folder is not None and found.resolve().is_relative_to(Path(folder).resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a null character, a circle of links
        raise MediaError(f"{name}: {short(str(path))} is not a path") from error
    if not inside and not allow_outside:
        where = "in the data" if folder is None else f"in {folder}"
        raise MediaError(f"{name} is {short(str(path))}, which is not {where}; {_ALLOW}")
    return found


# --- videos --------------------------------------------------------------------------------------

_FOLDERS = ("", "data", "video", "videos")
_ENDINGS = (".mp4", ".MP4", ".mkv", ".webm")


def find_video(folder: str | Path | None, name: str) -> Path | None:
    """``<folder>/<name>.mp4``, also in its subfolders and with other container formats."""
    if folder is None:
        return None
    paths = (Path(folder, sub, name + ending) for sub in _FOLDERS for ending in _ENDINGS)
    return next((path for path in paths if path.is_file()), None)


# --- subtitles -----------------------------------------------------------------------------------

# Start and end in seconds, and the text with its tags.
Subtitle = tuple[float, float, str]
_TIME = r"(?:(\d+):)?(\d+):(\d+)[,.](\d+)"
_SPAN = re.compile(rf"{_TIME}\s*-->\s*{_TIME}(?:\s.*)?")  # WebVTT adds the place on the screen
_WHITE = re.compile(r'<font color="white" size=".72c">(.*?)</font>')
# Tags of SRT and WebVTT, times within a line, and ASS overrides. "1 < 2" and "<3" are text.
_TAGS = re.compile(r"</?[A-Za-z][^<>]*>|<[\d:.]*:[\d:.]*>|</>|\{\\[^{}]*\}")
_BREAKS = re.compile(r"<br\s*/?>|\\[Nh]", re.IGNORECASE)


def read_subtitles(path: Path) -> list[Subtitle]:
    """The entries of an SRT or WebVTT file without duplicates; empty for an empty file.

    Raises
    ------
    MediaError
        If the encoding is neither UTF-8 nor UTF-16 with a byte order mark, a time is invalid, or
        there are no entries in the text. Encodings are not guessed: a wrong guess would corrupt the
        prompt.
    """
    try:
        data = read_bytes(path)
        marked = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        text = data.decode("utf-16" if marked else "utf-8-sig")
    except OSError as error:
        raise MediaError(f"cannot read {path.name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise MediaError(
            f"subtitles {path.name} are not UTF-8 (byte {error.start}); convert them"
        ) from error
    web = text.startswith("WEBVTT")
    found: dict[Subtitle, None] = {}
    lines = [line.strip() for line in re.split(r"\r\n|\r|\n", text)]
    heads = [at for at, line in enumerate(lines) if _is_span(line, lines[at - 1 : at], path)]
    counted = bool(heads) and heads[0] > 0 and lines[heads[0] - 1].isdigit()
    for at, after in itertools.pairwise([*heads, len(lines)]):
        # Some writers leave empty lines in an entry, or none before the number of the next.
        said = lines[at + 1 : after]
        if web:
            said = list(itertools.takewhile(bool, said))
        else:
            numbered = counted and after < len(lines) and said and said[-1].isdigit()
            said = list(filter(None, said[:-1] if numbered else said))
        if said and (times := _SPAN.fullmatch(lines[at])):
            start, end = _seconds(times.groups()[:4]), _seconds(times.groups()[4:])
            found[start, end, " ".join(said)] = None
    if not heads and text.strip() and not web:
        raise MediaError(f"subtitles {path.name} are neither SRT nor WebVTT: they have no times")
    return list(found)


def _is_span(line: str, before: list[str], path: Path) -> bool:
    """Whether a line states when the next lines are shown; the times after a number must."""
    if _SPAN.fullmatch(line):
        return True
    start, arrow, end = line.partition("-->")
    if arrow and before and before[0].isdigit():
        wrong = end if re.fullmatch(_TIME, start.strip()) else start
        raise MediaError(f"subtitles {path.name}: {wrong.strip()!r} is not a time")
    return False


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, rest = (part or "0" for part in parts)
    return int(hours) * 3600 + int(minutes) * 60 + int(seconds) + int(rest) / 10 ** len(rest)


def spoken(subtitles: Sequence[Subtitle], frames: Sequence[int], info: VideoInfo, mode: str) -> str:
    """The subtitles at the selected frames, formatted as in the code base ``mode``.

    Without duplicates and in order. lmms-eval rounds spans down to frames, orders the lines as a
    Python set, and keeps the last of each span and only those in its white font; vlmevalkit has one
    line for each frame.
    """
    times = [frame / info.fps for frame in frames]
    if mode == "vlmevalkit":
        shown = [
            next((text for start, end, text in subtitles if start < time < end), "")
            for time in times
        ]
        return "\n".join(text for text in map(_plain, shown) if text)
    if mode == "lmms-eval":
        subtitles = [
            (*span, text) for span, text in {(s, e): text for s, e, text in subtitles}.items()
        ]
        spans = [(int(start * info.fps), int(end * info.fps)) for start, end, _ in subtitles]
        seen = [i for f in frames for i, (start, end) in enumerate(spans) if start <= f < end]
        white = (_WHITE.findall(subtitles[i][2]) for i in list(set(seen)))
        return "\n".join(texts[0] for texts in white if texts)
    heard = (
        _plain(text) for start, end, text in subtitles if any(start <= time < end for time in times)
    )
    return "\n".join(filter(None, heard))


def _plain(text: str) -> str:
    """What a player shows of an entry, in one line."""
    shown = html.unescape(_TAGS.sub("", _BREAKS.sub(" ", text)))
    return " ".join(shown.split())
