"""Changelog, citation, templates, and README as the package index shows it."""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import vlmfast
from support.documented import Wrong, check, commands
from support.paths import ROOT

if not (ROOT / "CITATION.cff").is_file():
    pytest.skip("these files are not part of this distribution", allow_module_level=True)

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# The order of https://keepachangelog.com/en/1.1.0/.
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def changelog_problems(text: str, version: str) -> list[str]:
    """Problems of the changelog of a package at ``version``."""
    first, *releases = re.findall(r"^## (.+)$", text, re.M)
    found = [] if first == "[Unreleased]" else ["the first section must be [Unreleased]"]
    dated = []
    for title in releases:
        match = re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", title)
        if match is None:
            return [*found, f"{title}: must be [X.Y.Z] - YYYY-MM-DD"]
        date = datetime.date.fromisoformat(match[4])
        dated.append((*map(int, match.groups()[:3]), date))
    if dated != sorted(dated, reverse=True):
        found.append("releases must be in order, the latest first")
    if dated and tuple(map(int, version.split(".")[:3])) < dated[0][:3]:
        found.append(f"the package is at {version}, before the latest release")
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        names = re.findall(r"^### (.+)$", part, re.M)
        if names != [name for name in SECTIONS if name in names]:
            found.append(f"sections must be {', '.join(SECTIONS)}, in this order")
    return found


GOOD = """## [Unreleased]
### Added
### Fixed
## [0.2.0] - 2030-02-01
### Removed
## [0.1.0] - 2030-01-01
"""


def test_changelog() -> None:
    assert not changelog_problems(read("CHANGELOG.md"), vlmfast.__version__)
    assert not changelog_problems(GOOD, "0.2.0")
    for old, new, problem in (
        ("## [Unreleased]", "## [0.3.0] - 2030-03-01", "first section"),
        ("] - 2030-02-01", "]", "YYYY-MM-DD"),
        ("[0.2.0]", "[0.0.9]", "in order"),
        ("[0.2.0]", "[0.3.0]", "before the latest"),
        ("### Added\n### Fixed", "### Fixed\n### Added", "sections"),
        ("### Added", "### News", "sections"),
    ):
        assert any(problem in p for p in changelog_problems(GOOD.replace(old, new), "0.2.0")), new


def test_citation() -> None:
    data = yaml.safe_load(read("CITATION.cff"))
    license_ = tomllib.loads(read("pyproject.toml"))["project"]["license"]
    assert (data["version"], data["license"]) == (vlmfast.__version__, license_)
    assert data["cff-version"] == "1.2.0" and data["type"] == "software"
    assert data["title"] and data["abstract"] and data["message"] and data["authors"][0]["name"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form(path: Path) -> None:
    """What keeps a code host from showing it."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    fields = [element for element in form["body"] if element["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    for field in fields:
        if field["type"] == "dropdown":  # YAML reads a plain No as a boolean
            assert all(isinstance(option, str) for option in field["attributes"]["options"])


def test_commands_of_templates_exist() -> None:
    texts = [*map(Path.read_text, FORMS), read(".github/PULL_REQUEST_TEMPLATE.md")]
    # Without margins, as indented lines are no Markdown paragraphs.
    found = [c for text in texts for c in commands("form", re.sub(r"^ +", "", text, flags=re.M))]
    for command in found:
        check(command)
    assert {"vlmfast env", "make test lint types docs"} <= {command.text for command in found}
    (wrong,) = commands("form", "Give the output of `vlmfast environment`.")
    with pytest.raises(Wrong):
        check(wrong)


def test_package_index_shows_no_relative_links() -> None:
    """Also without a repository beside it; code is left as it is."""
    hooks = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["metadata"]["hooks"]
    text = readme = read("README.md")
    for of in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(of["pattern"], of["replacement"], text)
    relative = r"\]\((?!https?:)"
    assert re.search(relative, readme) and not re.search(relative, text)
    code = re.compile(r"^```.*?^```", re.M | re.S)
    assert code.findall(readme) == code.findall(text)
