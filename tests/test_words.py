"""Words: what ``tools/words.txt`` lists is neither in names nor in texts of the project."""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tools" / "words.txt"
if not LIST.is_file():
    pytest.skip("the list is not part of this distribution", allow_module_level=True)

# Where a listed word is data or names something of its own, and is removed before the search.
KEPT = re.compile(
    "|".join(
        [
            r"examples/(picture\.png|clip\.mp4)|\b(picture\.png|clip\.mp4)",
            r"clip[-_]relevance|frames[-_]clip|ClipRelevance|FramesClip",
            r"Describe the clip\.",  # a question that the demo model was trained on
            r"\bCLIP\b",
            r"[\"']pictures?[\"']",  # keys of result and session files
            r"``pictures``",
        ]
    )
)
SKIPPED = ("tools/words.txt", "tests/test_words.py", "CHANGELOG.md", "tests/answers/")
OWN_NAMES = ("processor.mass",)  # attributes of another library
RECORDED = (  # recorded or generated texts
    "docs/results/",
    "tests/golden/",
    # Texts that the demo model was trained on.
    "vlmfast/scenes/captions.py",
    "vlmfast/train/tiny/export.py",
)


@functools.cache
def patterns(kind: str) -> list[tuple[re.Pattern[str], str, str]]:
    """Pattern, replacement and folder of each entry of a kind."""
    rows = [line.split("\t") for line in LIST.read_text(encoding="utf-8").splitlines()]
    flags = re.IGNORECASE if kind == "text" else 0
    return [
        (re.compile(row[1], flags), row[2], row[3] if len(row) > 3 else "")
        for row in rows
        if row[0] == kind
    ]


@functools.cache
def listed(name: str) -> list[tuple[str, str]]:
    """Replacement and folder of each entry that a name is."""
    return [(new, folder) for pattern, new, folder in patterns("name") if pattern.fullmatch(name)]


@functools.cache
def any_text() -> re.Pattern[str]:
    """What a text contains in which any entry is found: most texts are searched once."""
    return re.compile("|".join(f"(?:{p.pattern})" for p, _, _ in patterns("text")), re.IGNORECASE)


def sources() -> Iterator[Path]:
    for folder in ("vlmfast", "tests", "docs", "benchmarks", "tools", "examples"):
        for suffix in ("*.py", "*.md"):
            yield from sorted((ROOT / folder).rglob(suffix))
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml"))


def findings(path: str, text: str) -> list[str]:
    """One line for each listed word in the names or texts of a file."""
    found = []
    texts = [(1, text)]
    if path.endswith(".py"):
        texts = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = token.start[0]
            if token.type == tokenize.NAME:
                found += [
                    f"{path}:{line}: {token.string}: write {new}"
                    for new, folder in listed(token.string)
                    if path.startswith(folder)
                    if not any(own in token.line for own in OWN_NAMES)
                ]
            # From Python 3.12 on, the texts of an f-string are tokens of their own.
            elif tokenize.tok_name[token.type] in ("STRING", "COMMENT", "FSTRING_MIDDLE"):
                texts.append((line, token.string))
    for line, part in texts:
        part = KEPT.sub("", part)
        if any_text().search(part) is None:
            continue
        found += [
            f"{path}:{line + part.count(chr(10), 0, m.start())}: {m.group()!r}: write {new}"
            for pattern, new, folder in patterns("text")
            if path.startswith(folder)
            for m in pattern.finditer(part)
        ]
    return found


def test_listed_words_are_not_used() -> None:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith((*SKIPPED, *RECORDED)):
            found += findings(name, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("asks_question = 1\n", 1),
        ("def test_pictures_stay():\n    pass\n", 1),
        ("x = 1\n# what comes behind the image\n", 2),
        ('"""One line.\n\nA picture.\n"""\n', 3),
        ("raise ValueError(f'{x} quantises')\n", 1),
        ("def ask(*, repair=True):\n    pass\n", 1),
    ],
)
def test_planted_words_are_found(text: str, line: int) -> None:
    (found,) = findings("planted.py", text)
    assert found.startswith(f"planted.py:{line}: ")


def test_names_of_files_and_methods_are_kept() -> None:
    text = "# examples/picture.png and clip-relevance\nimport clip\nx = torch.clip(y)\n"
    assert findings("planted.py", text) == []
    assert len(findings("planted.md", "A picture\nand nobody in examples/picture.png.")) == 2


def test_every_entry_has_a_replacement() -> None:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    assert all(len(row) in (3, 4) and row[0] in ("name", "text") and row[2] for row in rows)
    assert len(patterns("name")) + len(patterns("text")) == len(rows)
