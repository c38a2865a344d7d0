"""`benchmarks/pocket/objects.py` unpacks what it has checked, and keeps some drawings apart."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from support.tiny_pocket import objects

ENTRY = {"category": "Objects", "has_img_google": True, "has_img_twitter": True}
EMOJI = [
    {**ENTRY, "short_name": "cat", "image": "1.png"},
    {**ENTRY, "short_name": "mouse_trap", "image": "2.png"},
    {**ENTRY, "short_name": "cat2", "image": "3.png"},
    {**ENTRY, "short_name": "alarm_clock", "image": "4.png"},
    {**ENTRY, "short_name": "smile", "image": "5.png", "category": "Smileys & Emotion"},
    {**ENTRY, "short_name": "dog", "image": "6.png", "has_img_twitter": False},
]


def one_token(text: str, **_: bool) -> SimpleNamespace:
    """A tokenizer of words."""
    return SimpleNamespace(input_ids=text.split())


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small archives of both packages, with the sums that are expected of them."""
    folder = tmp_path
    png = io.BytesIO()
    Image.new("RGBA", (64, 64), (1, 2, 3, 255)).save(png, "png")
    for name, style in objects.STYLES.items():
        path = folder / f"{style.package}-{objects.RELEASE}.tgz"
        files = {
            f"package/img/{name}/64/1.png": png.getvalue(),
            f"package/img/{name}/sheets/64.png": b"large",
            "package/img/../../../escaped.png": b"outside",
            "package/emoji.json": json.dumps(EMOJI).encode(),
            "package/emoji_pretty.json": b"large",
            "package/LICENSE": b"MIT",
            "package/README.md": b"licences of the drawings",
        }
        with tarfile.open(path, "w:gz") as tar:
            for file, content in files.items():
                member = tarfile.TarInfo(file)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        monkeypatch.setitem(objects.STYLES, name, replace(style, sha256=digest))
    return folder


def test_unpacks_drawings_names_and_licences(archives: Path) -> None:
    made = objects.make(archives)
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    licences = {f"{style}-{name}" for style in objects.STYLES for name in ("LICENSE", "README.md")}
    drawings = {"google/1.png", "twitter/1.png"}
    assert files == {*drawings, *licences, "emoji.json", "NOTICE.md"}
    assert "CC-BY 4.0" in (made / "NOTICE.md").read_text()
    read = objects.read(made, one_token)
    assert read.names == ["cat"]
    assert read.drawing("cat", "twitter").getpixel((5, 5)) == (1, 2, 3, 255)


def test_archive_of_another_sum_is_refused(archives: Path) -> None:
    path = archives / f"{objects.STYLES['twitter'].package}-{objects.RELEASE}.tgz"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(SystemExit, match=r"twitter-16\.0\.0\.tgz has SHA-256 .* expected is"):
        objects.make(archives)
    assert not (archives / "objects").exists()
    path.unlink()
    with pytest.raises(SystemExit, match="is missing; `npm pack emoji-datasource-twitter@"):
        objects.make(archives)


def test_splits_share_no_drawing() -> None:
    names = [f"object {n}" for n in range(400)]
    styles = {style: Path(style) for style in objects.STYLES}
    drawn = objects.Objects(dict.fromkeys(names, styles))
    pairs = {
        split: {(name, of) for name, found in drawn.drawings(split).items() for of in found}
        for split in ("train", "objects", "style")
    }
    assert sum(map(len, pairs.values())) == len(set().union(*pairs.values())) == 2 * len(names)
    trained = {name for name, _ in pairs["train"]}
    assert trained.isdisjoint(name for name, _ in pairs["objects"])
    assert {name for name, _ in pairs["style"]} <= trained
    assert {style for _, style in pairs["style"]} == {"twitter"}
    assert all(pairs.values())
    # The split of an object does not depend on the others.
    some = objects.Objects(dict.fromkeys(names[::7], styles))
    for split, found in pairs.items():
        assert {(n, of) for n, all_ in some.drawings(split).items() for of in all_} == {
            pair for pair in found if pair[0] in names[::7]
        }
