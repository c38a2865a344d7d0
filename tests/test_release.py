"""Changelog, citation, templates, and the checks of the wheel."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import vlmfast
from documented import Wrong, check, commands

ROOT = Path(vlmfast.__file__).parent.parent
if not (ROOT / "CITATION.cff").is_file():
    pytest.skip("these files are not part of this distribution", allow_module_level=True)

GITHUB = ROOT / ".github"
FORMS = {path.name: path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))}
del FORMS["config.yml"]

# The order of https://keepachangelog.com/en/1.1.0/.
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
NUMBER = r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- changelog -----------------------------------------------------------------------------------


def parts(text: str, level: int) -> list[tuple[str, str]]:
    """Title and body of each heading of a level."""
    pieces = re.split(rf"^{'#' * level} (.+)$", text, flags=re.MULTILINE)[1:]
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def changelog_problems(text: str, version: str) -> list[str]:
    """Problems of the changelog of a package at ``version``."""
    found, releases = [], []
    versions = parts(text, 2)
    if [title for title, _ in versions].count("[Unreleased]") != 1:
        found.append("there must be one section [Unreleased]")
    elif versions[0][0] != "[Unreleased]":
        found.append("[Unreleased] must be the first section")
    for title, body in versions:
        names = [name for name, _ in parts(body, 3)]
        found += [f"{title}: unknown section {name}" for name in names if name not in SECTIONS]
        known = [SECTIONS.index(name) for name in names if name in SECTIONS]
        if known != sorted(set(known)):
            found.append(f"{title}: sections are not in the order {', '.join(SECTIONS)}")
        found += [
            f"{title}: {name} is empty" for name, lines in parts(body, 3) if not lines.strip()
        ]
        if title == "[Unreleased]":
            continue
        match = re.fullmatch(rf"\[{NUMBER}\] - (\d{{4}}-\d\d-\d\d)", title)
        if match is None:
            found.append(f"{title}: must be [X.Y.Z] - YYYY-MM-DD")
            continue
        try:
            date = datetime.date.fromisoformat(match[4])
        except ValueError:
            found.append(f"{title}: {match[4]} is not a date")
            continue
        releases.append((tuple(int(match[i]) for i in (1, 2, 3)), date))
    for (new, later), (old, earlier) in itertools.pairwise(releases):
        if new <= old or later < earlier:
            found.append(f"{new} of {later} comes before {old} of {earlier}")
    if releases and tuple(map(int, version.split(".")[:3])) < releases[0][0]:
        found.append(f"the package is at {version}, before the latest release")
    return found


def test_changelog() -> None:
    assert not changelog_problems(read("CHANGELOG.md"), vlmfast.__version__)


GOOD = """# Changelog
## [Unreleased]
### Added
- a
### Fixed
- b
## [0.2.0] - 2030-02-01
### Removed
- c
## [0.1.0] - 2030-01-01
### Added
- d
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("## [Unreleased]\n", "", "one section [Unreleased]"),
        ("## [0.2.0] - 2030-02-01", "## [Unreleased]", "one section [Unreleased]"),
        ("[0.2.0] - 2030-02-01", "[0.2.0]", "must be [X.Y.Z] - YYYY-MM-DD"),
        ("[0.2.0] - 2030", "[0.2] - 2030", "must be [X.Y.Z] - YYYY-MM-DD"),
        ("2030-02-01", "2030-02-30", "2030-02-30 is not a date"),
        ("2030-02-01", "2029-02-01", "comes before"),
        ("[0.2.0]", "[0.0.9]", "comes before"),
        ("[0.2.0]", "[0.3.0]", "before the latest release"),
        ("### Added\n- a", "### News\n- a", "unknown section News"),
        ("### Added\n- a", "### Security\n- a", "not in the order"),
        ("### Fixed\n- b", "### Added\n- b", "not in the order"),
        ("### Fixed\n- b\n", "### Fixed\n", "Fixed is empty"),
    ],
)
def test_invalid_changelogs_are_rejected(old: str, new: str, problem: str) -> None:
    assert not changelog_problems(GOOD, "0.2.0")
    assert old in GOOD
    assert any(problem in line for line in changelog_problems(GOOD.replace(old, new, 1), "0.2.0"))


def test_unreleased_must_be_first() -> None:
    unreleased, rest = GOOD.split("## [0.2.0]")
    text = f"## [0.2.0]{rest}{unreleased}"
    assert changelog_problems(text, "0.2.0") == ["[Unreleased] must be the first section"]


# --- citation ------------------------------------------------------------------------------------


def citation_problems(text: str, version: str, license_: str) -> list[str]:
    """Problems of a CITATION.cff that can be checked offline."""
    found, data = [], yaml.safe_load(text)
    fixed = {"cff-version": "1.2.0", "type": "software", "version": version, "license": license_}
    found += [f"{k} is {data.get(k)!r}, not {v!r}" for k, v in fixed.items() if data.get(k) != v]
    found += [f"{key} is missing" for key in ("title", "abstract", "message") if not data.get(key)]
    for author in data.get("authors") or [{}]:
        if not author.get("name") and not author.get("family-names"):
            found.append("an author has no name")
    return found


def citation() -> tuple[str, str, str]:
    """Text of the citation, and the version and license that it must contain."""
    license_ = tomllib.loads(read("pyproject.toml"))["project"]["license"]
    return read("CITATION.cff"), vlmfast.__version__, license_


def test_citation() -> None:
    assert not citation_problems(*citation())


@pytest.mark.parametrize(
    ("pattern", "new", "problem"),
    [
        (r"^version: .*", "version: 99.0.0", "version is '99.0.0'"),
        (r"^license: .*", "license: MIT", "license is 'MIT'"),
        (r"^cff-version: .*", "cff-version: 1.1.0", "cff-version is '1.1.0'"),
        (r"^title: .*", "", "title is missing"),
        (r"^authors:\n.*", "", "an author has no name"),
        (r"- name: .*", "- alias: x", "an author has no name"),
    ],
)
def test_invalid_citations_are_rejected(pattern: str, new: str, problem: str) -> None:
    text, version, license_ = citation()
    wrong, count = re.subn(pattern, new, text, count=1, flags=re.MULTILINE)
    assert count == 1
    assert any(problem in line for line in citation_problems(wrong, version, license_))


# --- issue forms ---------------------------------------------------------------------------------


def form_problems(text: str) -> list[str]:
    """Problems that keep a code host from showing an issue form."""
    try:
        form = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    found = [f"{key} is missing" for key in ("name", "description", "body") if not form.get(key)]
    ids: list[Any] = []
    for number, element in enumerate(form.get("body") or []):
        kind, attributes = element.get("type"), element.get("attributes") or {}
        if kind not in ("markdown", "input", "textarea", "dropdown", "checkboxes"):
            found.append(f"body {number}: unknown type {kind}")
        elif kind == "markdown":
            found += [] if attributes.get("value") else [f"body {number}: value is missing"]
            continue
        ids.append(element.get("id"))
        found += [] if attributes.get("label") else [f"body {number}: label is missing"]
        if kind in ("dropdown", "checkboxes"):
            options = attributes.get("options") or []
            texts = kind == "checkboxes" or all(isinstance(option, str) for option in options)
            if not options or not texts:
                found.append(f"body {number}: options must be texts")
    if None in ids or len(set(ids)) < len(ids):
        found.append("ids are missing or not unique")
    if not any(field.get("validations", {}).get("required") for field in form.get("body") or []):
        found.append("nothing is required")
    return found


@pytest.mark.parametrize("name", FORMS)
def test_issue_form(name: str) -> None:
    assert not form_problems(FORMS[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("name: Method request", "name: [Method", "not YAML"),
        ("description: A published", "about: A published", "description is missing"),
        ("body:", "content:", "body is missing"),
        ("type: input", "type: line", "unknown type line"),
        (
            "type: markdown\n    attributes:\n      value",
            "type: markdown\n    a:\n      b",
            "value",
        ),
        ("label: Paper", "title: Paper", "label is missing"),
        ("id: arxiv", "id: paper", "not unique"),
        ("    id: arxiv\n", "", "ids are missing"),
        ('- "No"', "- No", "options must be texts"),  # YAML reads a boolean
        ("required: true", "required: false", "nothing is required"),
    ],
)
def test_invalid_issue_forms_are_rejected(old: str, new: str, problem: str) -> None:
    text = FORMS["method.yml"].read_text(encoding="utf-8")
    assert old in text
    assert any(problem in line for line in form_problems(text.replace(old, new)))


def test_issue_form_chooser() -> None:
    config = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8"))
    assert config == {"blank_issues_enabled": True}


def test_commands_in_templates_exist() -> None:
    texts = {name: path.read_text(encoding="utf-8") for name, path in FORMS.items()}
    texts["pull request"] = (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    found = {name: commands(name, text) for name, text in texts.items()}
    for group in found.values():
        for command in group:
            check(command)
    assert "vlmfast env" in [command.text for command in found["bug.yml"]]
    assert "make test lint types docs" in [command.text for command in found["pull request"]]
    (wrong,) = commands("bug.yml", "Give the output of `vlmfast environment`.")
    with pytest.raises(Wrong):
        check(wrong)


# --- the wheel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """``tools/release.py``."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_version_is_read_without_import(release: ModuleType) -> None:
    assert release.version() == vlmfast.__version__


METADATA = [f"vlmfast-0.1.0.dist-info/{n}" for n in ("METADATA", "entry_points.txt", "RECORD")]
METADATA.append("vlmfast-0.1.0.dist-info/licenses/LICENSE")


def wheel_of(folder: Path, names: list[str]) -> Path:
    path = folder / "vlmfast-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return path


def test_wheel_contents_are_checked(release: ModuleType, tmp_path: Path) -> None:
    expected = {"vlmfast/__init__.py", "vlmfast/weights/a.safetensors"}
    right = [*sorted(expected), *METADATA]
    assert not release.wheel_problems(wheel_of(tmp_path, right), expected)
    for name in (*expected, *METADATA):
        found = release.wheel_problems(
            wheel_of(tmp_path, [n for n in right if n != name]), expected
        )
        missing = name if name in expected else f".dist-info/{name.partition('/')[2]}"
        assert found == ([] if name.endswith("RECORD") else [f"missing: {missing}"])
    extra = wheel_of(tmp_path, [*right, "vlmfast/notes.txt"])
    assert release.wheel_problems(extra, expected) == [
        "not under version control: vlmfast/notes.txt"
    ]


def test_expected_files_are_tracked_files(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "vlmfast").mkdir()
    for name in ("vlmfast/a.py", "vlmfast/b.py", "c.py"):
        (tmp_path / name).write_text("")
    for command in (["init", "-q"], ["add", "vlmfast/a.py", "c.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert release.expected_files(tmp_path) == {"vlmfast/a.py"}


def test_failing_command_aborts_the_release(release: ModuleType, tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    assert release.run([*python, "print('fine')"], tmp_path) == "fine\n"
    with pytest.raises(release.ReleaseError, match=r"exited with 3:\nbad"):
        release.run([*python, "print('bad'); raise SystemExit(3)"], tmp_path)


def test_commands_run_without_checkout_on_path(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; print(os.environ.get('PYTHONPATH'))"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert release.run([sys.executable, "-c", code], tmp_path) == "None\n"


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ({"--version": "vlmfast 99.0.0"}, "--version printed"),
        ({"ask": "red circle"}, "ask picture.png answered"),
        ({"ask": "yellow triangle"}, "ask clip.mp4 answered"),
        ({}, None),
    ],
)
def test_answers_of_installed_package_are_checked(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, printed: dict[str, str], problem: Any
) -> None:
    calls = []

    def run(command: list[Any], cwd: Path) -> str:
        calls.append(command[1])
        answers = {command_line[0]: answer for command_line, answer in release.QUESTIONS}
        right = f"vlmfast {vlmfast.__version__}" if command[1] == "--version" else ""
        right = answers[command[2]] if command[1] == "ask" else right
        return printed.get(command[1], right) + "\n"

    monkeypatch.setattr(release, "run", run)
    if problem:
        with pytest.raises(release.ReleaseError, match=problem):
            release.use(Path("bin"), Path())
    else:
        release.use(Path("bin"), Path())
        assert calls == ["--version", "ask", "ask", "methods", "env", "train"]


# --- README and URLs of the package --------------------------------------------------------------

REPOSITORY = "https://code.example.org/owner/vlmfast"
BLOB, RAW = f"{REPOSITORY}/blob/v1.2.3", f"{REPOSITORY}/raw/v1.2.3"


@pytest.fixture(scope="module")
def hook(release: ModuleType) -> ModuleType:
    """``hatch_build.py``."""
    pytest.importorskip("hatchling")
    return release.hook()


@pytest.mark.parametrize("address", [None, REPOSITORY])
def test_built_metadata_has_no_relative_link(
    release: ModuleType,
    hook: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
) -> None:
    import hatchling.build

    monkeypatch.setenv(hook.VARIABLE, address or "")
    monkeypatch.chdir(ROOT)  # as build front ends do
    folder = tmp_path / hatchling.build.prepare_metadata_for_build_wheel(str(tmp_path))
    content = (folder / "METADATA").read_bytes()
    assert not release.metadata_problems(content, address)
    readme = read("README.md")
    assert release.relative_links(readme), "the README of the repository has relative links"
    text = content.decode()
    assert (f"{REPOSITORY}/blob/v{vlmfast.__version__}/docs/" in text) == (address is not None)
    for block in re.findall(r"^```.*?^```", readme, re.MULTILINE | re.DOTALL):
        assert block in text
    other = None if address else REPOSITORY
    assert release.metadata_problems(content, other)


def test_problems_of_metadata_are_found(release: ModuleType) -> None:
    head = "Metadata-Version: 2.4\nName: vlmfast\nVersion: 1.2.3\nSummary: s\n"
    head += "License-Expression: Apache-2.0\nDescription-Content-Type: text/markdown\n"
    good = f"{head}\n[docs](https://example.org/docs)\n"
    assert not release.metadata_problems(good.encode(), None)
    for old, new, problem in (
        ("Summary: s\n", "", "summary is missing"),
        ("Version: 1.2.3", "Version: one", "version"),
        ("text/markdown", "text/plain", "README is text/plain"),
        ("https://example.org/docs", "docs/a.md", "docs/a.md is relative"),
        ("Summary", "Project-URL: Source, https://example.org\nSummary", "URLs are"),
    ):
        assert old in good
        found = release.metadata_problems(good.replace(old, new).encode(), None)
        assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("text", "linked", "plain"),
    [
        ("[a](docs/a.md#b) c", f"[a]({BLOB}/docs/a.md#b) c", "a c"),
        ('[a](./b.md "t")', f'[a]({BLOB}/b.md "t")', "a"),
        ("[`a`](b.md)", f"[`a`]({BLOB}/b.md)", "`a`"),
        ("[a\nb](c.md)", f"[a\nb]({BLOB}/c.md)", "a\nb"),
        ("![a](b.png) c", f"![a]({RAW}/b.png) c", " c"),
        ("[![a](b.png)](c.md)", f"[![a]({RAW}/b.png)]({BLOB}/c.md)", ""),
        ("[a](#b)", f"[a]({REPOSITORY}#b)", "a"),
        ("[a](https://x.org/)", "[a](https://x.org/)", "[a](https://x.org/)"),
        ("![a](https://x.org/b.png)",) * 3,
        ("[a][b] [b] [c]\n\n[b]: d.md\n", f"[a]({BLOB}/d.md) [b]({BLOB}/d.md) [c]\n\n", None),
        ('<img alt="a" src="b.png"> c', f'<img alt="a" src="{RAW}/b.png"> c', " c"),
        ('<a href="b.md">c</a>', f'<a href="{BLOB}/b.md">c</a>', "c"),
        ('<a href="https://x.org">c</a>',) * 3,
        ("`[a](b.md)` and `` `[a](b.md)` ``",) * 3,
        ("```\n[a](b.md)\n```\n",) * 3,
        ("x[0](y) and f(a)[1]", f"x[0]({BLOB}/y) and f(a)[1]", "x0 and f(a)[1]"),
    ],
)
def test_links_are_rewritten(
    release: ModuleType, hook: ModuleType, text: str, linked: str, plain: str | None
) -> None:
    assert hook.rewritten(text, REPOSITORY, "v1.2.3") == linked
    found = hook.rewritten(text, None, "v1.2.3")
    assert plain is None or found == plain
    assert not release.relative_links(linked)
    assert not release.relative_links(found)


def test_address_of_the_repository_is_checked(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hook.version(ROOT) == vlmfast.__version__
    for value, wanted in ((f"{REPOSITORY}.git", REPOSITORY), (f"{REPOSITORY}/", REPOSITORY)):
        monkeypatch.setenv(hook.VARIABLE, value)
        assert hook.repository() == wanted
    for value in ("owner/name", "http://example.org/a/b", "https://example.org/a"):
        monkeypatch.setenv(hook.VARIABLE, value)
        with pytest.raises(ValueError, match="must be of the form https://host/owner/name"):
            hook.repository()
