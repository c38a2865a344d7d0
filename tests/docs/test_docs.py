"""The pages: links resolve, numbers equal those of the reports, examples run."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import vlmfast
from support.documented import blocks
from support.paths import ROOT

DOCS = ROOT / "docs"
if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("the pages are not part of this distribution", allow_module_level=True)

WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
METHODS = vlmfast.methods()


@pytest.fixture(scope="module")
def tools():
    """The modules of ``tools``."""
    names = ("sources", "charts", "accuracy", "timings", "tables", "pages", "hooks", "home_png")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# --- written pages -------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as code hosts and MkDocs form them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", t.lower()).strip()) for t in titles}


def broken(file: Path) -> list[str]:
    """Relative links and images without a target; MkDocs does not follow those out of ``docs``."""
    found, texts = [], blocks("", file.read_text(encoding="utf-8"))
    plain = " ".join(re.sub(r"`[^`]*`", "code", b.text) for b in texts if b.language is None)
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", plain):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            found.append(link)
    return found


def test_links_resolve(tmp_path: Path) -> None:
    assert not [f"{file}: {link}" for file in WRITTEN for link in broken(file)]
    page = tmp_path / "a.md"
    page.write_text("# A\n[x](#a) [x](#b) [x](c.md) `[x](code.md)` [x](https://b.example)\n")
    assert broken(page) == ["#b", "c.md"]


def test_images_of_the_home_page_are_current(tools) -> None:
    """``python tools/home_png.py docs/images`` writes them."""
    vlm = vlmfast.VLM.from_pretrained("tiny", dtype=tools.home_png.DTYPE)
    for name, recipe in tools.home_png.RECIPES.items():
        _, drawn = tools.home_png.draw(vlm, recipe)
        with Image.open(DOCS / "images" / name) as stored:
            shown = np.asarray(stored.convert("RGB"), dtype=int)
        # An exchanged patch changes hundreds of pixels; other versions of Pillow scale alike.
        far = np.abs(shown - np.asarray(drawn, dtype=int)).max(-1) > 40
        assert shown.shape == (448, 904, 3)
        assert far.sum() < 200


def test_error_messages_and_presets_are_those_of_the_code() -> None:
    from vlmfast.core.recipe import PRESETS

    text = read("docs/recipes.md")
    (shown,) = re.findall(r"^```\n(pyramiddrop\+hired.*?)^```", text, re.MULTILINE | re.DOTALL)
    for line in shown.splitlines():
        recipe, message = line.split(maxsplit=1)
        with pytest.raises(vlmfast.RecipeError, match=re.escape(message.removesuffix(" ..."))):
            vlmfast.Recipe.parse(recipe)
    for name, recipe in PRESETS.items():
        kept = f"`{recipe}`" if recipe else "every token is kept"
        assert f"| `{name}` | {kept} |" in text


def test_api_has_every_public_name() -> None:
    listed = re.findall(r"^::: (\S+)$", read("docs/api.md"), re.MULTILINE)
    assert set(vlmfast.__all__) - {"__version__"} <= {name.rpartition(".")[2] for name in listed}


def test_page_of_the_engine_is_current(tiny: vlmfast.VLM) -> None:
    from support.engine.prompts import splits
    from support.engine.turns import Phase
    from vlmfast.core.registry import stage_class, stage_names

    text, drawing = read("docs/engine.md"), read("docs/images/engine.svg")
    table = text.partition("| phase |")[2].partition("\n\n")[0]
    phases = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert {phase.value for phase in Phase} <= set(phases)
    assert all(f">{phase}<" in drawing for phase in phases)
    listed = text.partition("Prompts with images stay whole")[2].partition(".")[0]
    whole = [name for name in stage_names() if not splits(stage_class(name)())]
    assert re.findall(r"`([a-z0-9-]+)`", listed) == sorted(whole)
    assert f"decoded together, {tiny.engine.max_rows} by default" in text


# --- generated pages -----------------------------------------------------------------------------


def test_every_method_has_a_page(tools) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools.pages, "curves", lambda word, report: f"<curves of {word}>")
        made = tools.pages.pages()
    assert set(made) == {"methods/index.md", *(f"methods/{m['name']}.md" for m in METHODS)}
    for m in METHODS:
        page = made[f"methods/{m['name']}.md"]
        assert page.startswith(f"# {m['name']}\n\n**{m['summary']}**")
        assert all(f"| `{p['name']}`" in page for p in m["parameters"])
        assert f"[`{m['name']}`]({m['name']}.md) | {m['tier']} |" in made["methods/index.md"]
    runs = json.loads(read("docs/results/report.json"))["tasks"]["shapes"]["recipes"]
    run = runs["tome:budget=0.22"]
    low, high = run["accuracy_image_ci"]
    score = f"{100 * run['accuracy_image']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    (row,) = re.findall(r"^\| `tome:budget=0.22` \| (.*) \|$", made["methods/tome.md"], re.M)
    assert score in row and "| `random:budget=0.22` |" in made["methods/tome.md"]
    assert "<curves of tome>" in made["methods/tome.md"]
    drafts = json.loads(tools.pages.DRAFTS.read_text(encoding="utf-8"))["parts"]
    accepted = drafts["captions | none | draft-eagle"]["mean_accepted"]
    assert f"| {accepted:.2f} |" in made["methods/draft-eagle.md"]


def test_examples_of_the_methods_run(tools, tiny: vlmfast.VLM) -> None:
    image, question = str(ROOT / "examples" / "picture.png"), "What is in the bottom left?"
    for method in (m for m in METHODS if m["name"] not in tools.pages.NEEDS):
        recipe = tools.pages.example(method["name"])
        longest = 4 if method["protocol"] == "drafter" else 2  # one step of decoding
        answer = tiny.ask(question, image, recipe=recipe, max_new_tokens=longest)
        assert answer.text and answer.recipe == recipe


def test_docstrings_become_markdown(tools) -> None:
    text = tools.pages.prose("With::\n\n    a <x\n\nx <v, w> and ``<k>``.\n")
    assert text == "With:\n\n    a <x\n\nx &lt;v, w> and ``<k>``."
    text = tools.pages.prose("- a::\n\n      x\n\n  b\n- c\n  d\n\nend\n")
    assert text == "- a:\n\n        x\n\n    b\n\n- c\n    d\n\nend"


def test_tables_are_shown_and_those_of_readme_are_current(tools) -> None:
    """``python tools/tables.py`` writes those of README; MkDocs puts in the others."""
    pages = "\n".join(file.read_text(encoding="utf-8") for file in DOCS.glob("*.md"))
    marks = [found[0] for found in tools.tables.MARK.finditer(pages)]
    shown = {mark.split()[2] for mark in marks}
    assert shown | {*tools.tables.README} == {*tools.tables.TABLES}
    assert not any("<!--" in tools.tables.filled(mark) for mark in marks)
    with pytest.raises(ValueError, match=r"there is no table speeds; tables are .*, speed, "):
        tools.tables.filled("<!-- table: speeds -->")
    text = read("README.md")
    for name in tools.tables.README:
        table = tools.tables.TABLES[name]()
        assert tools.tables.written(text, name, table) == text
        assert tools.tables.written(text, name, f"{table}\n") != text


@pytest.mark.parametrize("repo", [None, "https://host.example/vlmfast/"])
def test_links_out_of_the_docs(tools, repo: str | None) -> None:
    """To the repository, if there is one; names in the first column lead to the methods."""

    def changed(text: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri="methods/a.md"))
        config = SimpleNamespace(repo_url=repo)
        return tools.hooks.on_page_markdown(text, page=page, config=config, files=None)

    inside = "[a](start.md#x) [b](https://c.example/../d) ![p](../docs/images/a.png) [e](#f)"
    assert changed(inside) == inside
    url = "https://host.example/vlmfast/blob/HEAD/x.py"
    assert changed("[`x.py`](../../x.py)") == (f"[`x.py`]({url})" if repo else "`x.py`")
    assert changed("[x](../../x.py)") == (f"[x]({url})" if repo else "x (`x.py`)")


def test_reports_have_charts_of_their_numbers(tools) -> None:
    for file in sorted((DOCS / "results").rglob("report.md")):
        text = file.read_text(encoding="utf-8")
        page = SimpleNamespace(file=SimpleNamespace(src_uri=file.relative_to(DOCS).as_posix()))
        shown = tools.charts.on_page_markdown(
            text, page=page, config=SimpleNamespace(docs_dir=str(DOCS)), files=None
        )
        found = re.findall(r'data-script="(\S+)" .*?json">([^<]*)</script>', shown)
        assert len(found) == text.count("Interactive chart: ") > 0
        assert text.count("<details") == text.count("</details>")
        if file.parent.name == "cache":
            ((script, data),) = found
            assert script == "../../assets/plotly.min.js"
            names = {trace["name"] for trace in json.loads(data)["data"]}
            assert {"full model", "zipvl"} <= names
