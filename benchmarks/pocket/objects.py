"""Take drawings of objects from packages: ``python benchmarks/pocket/objects.py FOLDER``.

``FOLDER`` has the archives of two packages of the same emoji, one for each drawing style: Noto of
Google (Apache-2.0) and Twemoji of Twitter (CC-BY 4.0). ``npm pack emoji-datasource-google@16.0.0
emoji-datasource-twitter@16.0.0 --pack-destination FOLDER`` writes them. They are checked against
their SHA-256. Of their files, those of 64 pixels, the list of names and the licences are unpacked
to ``FOLDER/objects``.

An object has a name that is one token of the decoder's tokenizer. Every 20th object and, of every
10th, the drawings of Twitter are kept apart: no scene of the training has them.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import check_sum
from PIL import Image

from vlmfast.core.files import make_folder, replace_text

RELEASE = "16.0.0"
SIDE = 64  # of a drawing, in pixels
CATEGORIES = ("Animals & Nature", "Food & Drink", "Travel & Places", "Objects", "Activities")
# Groups of drawings that differ in a detail alone.
SIMILAR = ("clock", "moon", "flag")


@dataclass(frozen=True)
class Style:
    """A drawing style: its package, the SHA-256 of the archive, and the licence of the drawings."""

    package: str
    sha256: str
    licence: str


STYLES = {
    "google": Style(
        "emoji-datasource-google",
        "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
        "Noto Emoji, Copyright Google LLC, Apache License 2.0",
    ),
    "twitter": Style(
        "emoji-datasource-twitter",
        "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877",
        "Twemoji, Copyright Twitter, Inc and other contributors, CC-BY 4.0",
    ),
}


class Objects:
    """Named drawings.

    Parameters
    ----------
    files : mapping of str to mapping of str to Path
        Name of an object to drawing style to image.
    """

    def __init__(self, files: Mapping[str, Mapping[str, Path]]) -> None:
        self.files = {name: dict(files[name]) for name in sorted(files)}
        self.drawing = functools.cache(self._drawing)

    @property
    def names(self) -> list[str]:
        return list(self.files)

    def _drawing(self, name: str, style: str) -> Image.Image:
        """The image of an object, RGBA."""
        with Image.open(self.files[name][style]) as image:
            return image.convert("RGBA")

    def drawings(self, split: str) -> dict[str, list[str]]:
        """Styles of every object in a split.

        Parameters
        ----------
        split : {"train", "objects", "style"}
            Drawings of the training, objects without any drawing in the training, or drawings of
            trained objects in the style in which they were not trained.
        """
        found = {name: _styles(name, list(styles), split) for name, styles in self.files.items()}
        return {name: styles for name, styles in found.items() if styles}


def _styles(name: str, styles: list[str], split: str) -> list[str]:
    place = zlib.crc32(name.encode()) % 20  # the same whatever other objects there are
    if place == 0:
        return styles if split == "objects" else []
    kept = [style for style in styles if style == "twitter"] if place in (1, 2) else []
    if split == "style":
        return kept
    return [style for style in styles if style not in kept] if split == "train" else []


def read(folder: Path, tokenizer: Any) -> Objects:
    """The objects in ``folder``, which `make` has made, whose name is one token."""
    files: dict[str, dict[str, Path]] = {}
    for entry in json.loads((folder / "emoji.json").read_text(encoding="utf-8")):
        name = _name(entry)
        if name and len(tokenizer(f" {name}", add_special_tokens=False).input_ids) == 1:
            files[name] = {style: folder / style / entry["image"] for style in STYLES}
    return Objects(files)


def _name(entry: Mapping[str, Any]) -> str:
    """The name of an emoji in words, or an empty string if it is no object."""
    name = entry["short_name"].replace("_", " ").replace("-", " ")
    drawn = all(entry[f"has_img_{style}"] for style in STYLES)
    usable = drawn and entry["category"] in CATEGORIES and name.replace(" ", "").isalpha()
    return name if usable and not any(word in name for word in SIMILAR) else ""


def unpack(path: Path, style: str, folder: Path) -> None:
    """Write the drawings of an archive to ``folder/style``, and its list of names to ``folder``."""
    images, wanted = f"package/img/{style}/{SIDE}", folder / style
    wanted.mkdir(parents=True)
    with tarfile.open(path) as tar:
        for member in tar:
            parent, _, name = member.name.rpartition("/")
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            if parent == images:
                (wanted / name).write_bytes(content.read())
            elif parent == "package" and name == "emoji.json":
                (folder / name).write_bytes(content.read())
            elif parent == "package" and name in ("LICENSE", "README.md"):
                (folder / f"{style}-{name}").write_bytes(content.read())


def make(folder: Path) -> Path:
    """Make ``folder/objects`` if it is not there yet, and return it.

    Raises
    ------
    SystemExit
        If an archive is missing or another one.
    """
    target = folder / "objects"
    if target.exists():
        return target
    part = folder / "objects.part"
    shutil.rmtree(part, ignore_errors=True)
    make_folder(part)
    for name, style in STYLES.items():
        path = folder / f"{style.package}-{RELEASE}.tgz"
        if not path.is_file():
            raise SystemExit(f"{path} is missing; `npm pack {style.package}@{RELEASE}` writes it")
        check_sum(path.name, [path], style.sha256)
        unpack(path, name, part)
    licences = "".join(f"- {name}: {style.licence}\n" for name, style in STYLES.items())
    replace_text(part / "NOTICE.md", f"Licences of the drawings:\n\n{licences}")
    part.rename(target)
    return target


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Take drawings of objects from packages.")
    parser.add_argument("folder", type=Path, help="folder of archives from `npm pack`")
    args = parser.parse_args(argv)
    print(f"drawings in {make(args.folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
