"""The pages: links resolve, numbers equal those of the reports, examples run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from PIL import Image

import vlmfast

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("the pages are not part of this distribution", allow_module_level=True)

WRITTEN = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(file.relative_to(ROOT)) for file in WRITTEN]
METHODS = vlmfast.methods()


@pytest.fixture(scope="module")
def tools():
    """The modules of ``tools``."""
    sys.path.insert(0, str(ROOT / "tools"))
    names = (
        "pages",
        "hooks",
        "check_site",
        "tables",
        "sources",
        "timings",
        "engine_svg",
        "charts",
        "home_png",
    )
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(ROOT / "tools"))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def vlm():
    return vlmfast.VLM.from_pretrained("tiny")


# --- written pages -------------------------------------------------------------------------------


def without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as code hosts and MkDocs form them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", t.lower()).strip()) for t in titles}


def broken(file: Path) -> list[str]:
    """Relative links and images without a target."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(file.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        there = target.exists()
        if not there or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    assert not broken(ROOT / name)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# One, two\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# A\n[x](b.md#one-two) [x](#a) [x](b.md#three) [x](c.md) ![x](d.png) [x](#b)\n"
        "`[x](code.md)` <https://a.example> [x](https://b.example)\n```\n[x](fence.md)\n```\n"
    )
    assert broken(page) == ["b.md#three", "c.md", "d.png", "#b"]


def in_nav(entries: list) -> list[str]:
    """Files of a navigation, in order."""
    files = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            files += in_nav(value) if isinstance(value, list) else [value]
    return files


def test_every_page_is_in_the_navigation(tools) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    files = in_nav(nav)
    written = {file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")}
    assert sorted(files) == sorted(written)
    config = tools.hooks.on_config(SimpleNamespace(nav=nav))
    made = set(in_nav(config.nav)) - written
    assert made == {"methods/index.md", *(f"methods/{m['name']}.md" for m in METHODS)}


def blocks(name: str, language: str = "python") -> list[str]:
    text = (DOCS / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_python_of_the_faq_runs(tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    values = []
    for block in blocks("faq.md"):
        *body, last = ast.parse(block).body
        value = isinstance(last, ast.Expr)
        exec(compile(ast.Module(body if value else [*body, last], []), "faq.md", "exec"), names)
        values.append(
            eval(compile(ast.Expression(last.value), "faq.md", "eval"), names) if value else None
        )
    text = (DOCS / "faq.md").read_text(encoding="utf-8")
    assert (tmp_path / "kept.png").stat().st_size > 1000
    assert str(names["answer"].trace.to_dict()["tokens"][0]) in text
    assert True in values  # the unwrapped model's tokens


def test_numbers_of_the_examples_are_current(vlm) -> None:
    question, image = "What is in the bottom left?", str(ROOT / "examples" / "picture.png")
    answers = {
        recipe: vlm.ask(question, images=image, recipe=recipe)
        for recipe in ("none", "hired:0.2", "hired:budget=0.2", "pyramiddrop")
    }
    answers["stack"] = vlm.ask(question, images=image, recipe="hired:0.5+pyramiddrop")
    assert {answer.text for answer in answers.values()} == {"yellow triangle"}
    seen = {name: answer.stats.visual_tokens_per_layer for name, answer in answers.items()}
    assert seen["none"] == [336] * 6
    assert seen["hired:0.2"] == [63] * 6
    assert seen["hired:budget=0.2"] == [67] * 6
    assert seen["pyramiddrop"] == [336, 336, 168, 84, 42, 42]
    assert seen["stack"] == [158, 158, 79, 39, 19, 19]
    video = {"video": str(ROOT / "examples" / "clip.mp4"), "num_frames": 4}
    about_video = {
        recipe: vlm.ask("Which way does the cyan star move?", recipe=recipe, **video)
        for recipe in ("none", "pvc", "hired:0.2", "hired:0.2,positions=compact")
    }
    assert [a.text for a in about_video.values()] == ["up", "up", "up", "left"]
    assert [a.stats.equivalent_tokens for a in about_video.values()] == [544, 64, 100, 100]


def test_figures_of_the_home_page_are_measured(vlm) -> None:
    text = " ".join((DOCS / "index.md").read_text(encoding="utf-8").split())
    question, image = "What is in the bottom left?", str(ROOT / "examples" / "picture.png")
    full, fast = (vlm.ask(question, images=image, recipe=r) for r in ("none", "balanced"))
    counts = [answer.stats.equivalent_tokens for answer in (full, fast)]
    assert f"**{counts[0] / counts[1]:.1f}× fewer visual tokens**" in text
    assert "{:.0f} → {:.0f} on this image".format(*counts) in text
    assert f"<b>{counts[0]:.0f}</b> visual tokens: “{full.text}”" in text
    assert f"<b>{counts[1]:.0f}</b> visual tokens: “{fast.text}”" in text
    report = json.loads((DOCS / "results" / "fresh" / "report.json").read_text(encoding="utf-8"))
    runs = report["tasks"]["shapes"]["recipes"]
    assert runs["random:budget=0.22"]["draws"] == 3
    pairs = [
        [f"{100 * runs[name][f'accuracy_{m}']:.1f} %" for m in ("image", "video")]
        for name in (
            str(vlmfast.Recipe.parse("balanced")),
            "none",
            "random:budget=0.22",
        )
    ]
    found = re.search(
        r"\*\*([\d.]+ %) and (.+?) accuracy\*\* .*? The full model has (.+?) and (.+?), "
        r"random patches at the same cost (.+?) and ([\d.]+ %)\.",
        text,
    )
    assert list(found.groups()) == [text for pair in pairs for text in pair]
    file = ROOT / "benchmarks" / "results" / "ask-cpu-bfloat16.json"
    if file.is_file():
        found = re.search(
            r"\*\*([\d.]+)× faster first token\*\* .*?: (.+?) s → (.+?) s with `(.+?)`", text
        )
        *_, model = json.loads(file.read_text(encoding="utf-8"))["models"].values()
        times = [model[r]["ttft"]["median"] for r in ("huggingface", found[4])]
        assert found.groups()[:3] == (
            f"{times[0] / times[1]:.1f}",
            f"{times[0]:.2f}",
            f"{times[1]:.2f}",
        )


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


def test_error_messages_read_as_shown() -> None:
    text = next(b for b in blocks("recipes.md", "") if b.startswith("pyramiddrop+hired"))
    for line in text.splitlines():
        recipe, shown = line.split(maxsplit=1)
        with pytest.raises(vlmfast.RecipeError) as error:
            vlmfast.Recipe.parse(recipe)
        assert shown.removesuffix(" ...") in str(error.value)


def test_presets_equal_those_of_the_code() -> None:
    from vlmfast.core.recipe import PRESETS

    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    for name, recipe in PRESETS.items():
        shown = f"`{recipe}`" if recipe else "every token is kept"
        assert f"| `{name}` | {shown} |" in text


def test_api_has_every_public_name() -> None:
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for path in listed:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__
    names = {path.rpartition(".")[2] for path in listed}
    assert set(vlmfast.__all__) - {"__version__"} <= names


def test_drawing_of_the_engine_is_current(tools) -> None:
    """Write it with ``python tools/engine_svg.py docs/images/engine.svg``."""
    from vlmfast.engine.sequence import Phase

    drawn = tools.engine_svg.draw_svg()
    assert (DOCS / "images" / "engine.svg").read_text(encoding="utf-8") == drawn
    shown = {node.text for node in ElementTree.fromstring(drawn).iter() if node.text}
    assert {phase.value for phase in Phase} <= shown
    # The table of the page has the same phases, in the same order.
    text = (DOCS / "engine.md").read_text(encoding="utf-8").partition("| phase |")[2]
    named = re.findall(r"^\| (\w+) \|", text.partition("\n\n")[0], re.MULTILINE)
    assert named == list(tools.engine_svg.PHASES)


def test_methods_without_chunked_prefill_are_listed() -> None:
    from vlmfast.core.registry import stage_class, stage_names
    from vlmfast.engine.chunks import splits

    text = (DOCS / "engine.md").read_text(encoding="utf-8")
    listed = text.partition("Prompts with images stay whole")[2].partition(".")[0]
    whole = [name for name in stage_names() if not splits(stage_class(name)())]
    assert re.findall(r"`([a-z0-9-]+)`", listed) == sorted(whole)


def test_bounds_of_the_engine_are_current(vlm) -> None:
    text = (DOCS / "engine.md").read_text(encoding="utf-8")
    assert f"decoded together, {vlm.engine.max_rows} by default" in text
    assert vlm.engine.max_cache_bytes is None


# --- generated pages -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tools):
    """All pages, without their curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools.pages, "curves", lambda word, report: f"<curves of {word}>")
        return tools.pages.pages()


def rows(text: str) -> dict[str, list[str]]:
    """Cells by first cell of the table of numbers."""
    part = text.partition("## Measured")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def test_every_method_has_a_page(made) -> None:
    assert set(made) == {"methods/index.md", *(f"methods/{m['name']}.md" for m in METHODS)}
    for m in METHODS:
        page = made[f"methods/{m['name']}.md"]
        assert page.startswith(f"# {m['name']}\n\n**{m['summary']}**")
        assert f"[`{m['name']}`]({m['name']}.md)" in made["methods/index.md"]
        for p in m["parameters"]:
            assert f"| `{p['name']}`" in page
        for number in re.findall(r"\d{4}\.\d{5}", m["paper"]):
            assert f"https://arxiv.org/abs/{number}" in page


def test_numbers_equal_those_of_the_reports(tools, made) -> None:
    files = sorted((DOCS / "results").rglob("report.json"), key=lambda f: (len(f.parts), f))
    reports = [
        task["recipes"]
        for file in files
        for task in json.loads(file.read_text(encoding="utf-8"))["tasks"].values()
    ]
    assert len(reports) >= 2
    seen = 0
    for m in METHODS:
        if m["protocol"] == "drafter":
            continue
        word, page = m["name"], made[f"methods/{m['name']}.md"]
        ran = [
            of
            for of in reports
            if any(re.fullmatch(rf"{word}(:[^+@]*)?", n["recipe"]) for n in of.values())
        ]
        assert ("Not measured on `tiny`" in page) == (not ran)
        if not ran:
            continue
        table = rows(page)
        assert f"<curves of {word}>" in page and "none" in table
        assert any(re.fullmatch(rf"{word}(:.*)?", name) for name in table)
        for name, cells in table.items():
            n = ran[0][name]
            axis = "held" if "KV cache size %" in page else "kept"
            paid = " / ".join(f"{100 * n[f'{axis}_{x}']:.1f}" for x in ("image", "video"))
            keys = [f"{k}_{x}" for k in ("accuracy", "caption") for x in ("image", "video")]
            scores = [
                "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * v for v in (n[k], *n[f"{k}_ci"])))
                for k in keys[: len(cells) - 1]
            ]
            assert cells == [paid, *scores]
            seen += 1
    assert seen > 50


def test_pages_have_every_table_once(tools) -> None:
    pages = "\n".join(file.read_text(encoding="utf-8") for file in DOCS.glob("*.md"))
    assert sorted(re.findall(r"<!-- table: (\S+) -->", pages)) == sorted(tools.tables.PAGES)
    for name, make in tools.tables.PAGES.items():
        page = tools.tables.filled(f"before\n<!-- table: {name} -->\nafter")
        assert page == f"before\n{make()}\nafter" and "| ---" in page
    with pytest.raises(ValueError, match="there is no table speeed; tables are"):
        tools.tables.filled("<!-- table: speeed -->")


def test_tables_of_readme_equal_those_of_the_reports(tools) -> None:
    """``python tools/tables.py`` writes them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark, make in tools.tables.README.items():
        assert tools.tables.written(text, mark, make()) == text
        other = re.sub(r"\d", lambda digit: str(9 - int(digit[0])), make(), count=1)
        assert tools.tables.written(text, mark, other) != text


def test_changed_report_changes_the_page(tools, tmp_path: Path) -> None:
    """Control for the test above: the page shows the number of the report."""
    shutil.copytree(DOCS / "results", tmp_path / "results")
    file = tmp_path / "results" / "report.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    name, numbers = next(
        (k, n) for k, n in data["tasks"]["shapes"]["recipes"].items() if k.startswith("tome")
    )
    old = f"{100 * numbers['accuracy_image']:.1f} ["
    numbers["accuracy_image"] = 0.123456
    file.write_text(json.dumps(data))

    def cell(docs: Path) -> str:
        (report,) = (r for r in tools.pages.reports(docs) if r.place == "results")
        (line,) = (
            x for x in tools.pages.numbers_table("tome", report).splitlines() if f"`{name}`" in x
        )
        return line

    assert old in cell(DOCS) and "12.3 [" not in cell(DOCS)
    assert "12.3 [" in cell(tmp_path) and old not in cell(tmp_path)


def test_drafters_show_their_accepted_drafts(tools, made) -> None:
    parts = json.loads(tools.pages.DRAFTS.read_text(encoding="utf-8"))["parts"]
    for word in ("draft-eagle", "draft-layerskip", "draft-ngram", "draft-recycle", "draft-auto"):
        page = made[f"methods/{word}.md"]
        own = [k for k, p in parts.items() if word in k and "mean_accepted" in p]
        assert own and len(re.findall(r"^\| `draft", page.split("## Parameters")[0], re.M)) == len(
            own
        )
        for key in own:
            assert f"| {parts[key]['mean_accepted']:.2f} |" in page
    assert "Not measured" in made["methods/draft-vispec.md"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("word", ["tome", "kivi"])
def test_curves_are_plain_svg(tools, word: str) -> None:
    report = tools.pages.measured(word, tools.pages.reports())[0]
    drawn = tools.pages.curves(word, report)
    panels = re.findall(r"<svg.*?</svg>", drawn, re.DOTALL)
    assert len(panels) == (4 if word == "kivi" else 2)
    for panel in panels:
        ElementTree.fromstring(panel)
        assert "<style" not in panel and "<metadata" not in panel
        assert "currentColor" in panel
    assert f">{word}" in panels[0] and ">random<" in panels[0]


def test_points_of_a_curve(tools) -> None:
    report = tools.pages.measured("kivi", tools.pages.reports())[0]
    (line,) = tools.pages.lines_of("kivi", report).values()
    assert set(line) == {"kivi", "kivi:4"}
    points = tools.pages.points(line, "held", "accuracy", "image")
    two, four = report.recipes["kivi"], report.recipes["kivi:4"]
    assert [p[0] for p in points] == [100 * two["held_image"], 100 * four["held_image"]]
    assert [p[1] for p in points] == [100 * two["accuracy_image"], 100 * four["accuracy_image"]]
    # Points that differ in more than their budget are on separate lines.
    lines = tools.pages.lines_of("quickprefill", report)
    assert set(lines) == {"quickprefill", "quickprefill:score=key-norm"}


def test_examples_run(tools, made, vlm) -> None:
    for m in METHODS:
        word, recipe = m["name"], tools.pages.example(m["name"])
        assert f"--recipe {recipe}\n" in made[f"methods/{word}.md"]
        if word in tools.pages.NEEDS:
            vlmfast.Recipe.parse(recipe)
            continue
        answer = vlm.ask(
            "What is in the bottom left?",
            images=str(ROOT / "examples" / "picture.png"),
            recipe=recipe,
            max_new_tokens=4,
        )
        assert answer.text and answer.recipe == recipe
        assert answer.canonical_recipe == str(vlmfast.Recipe.parse(recipe))


def test_docstrings_become_markdown(tools) -> None:
    text = tools.pages.prose("Title.\n\nWith::\n\n    a <x\n\n    b\n\nx <v, w> and ``<k>``.\n")
    assert text == "Title.\n\nWith:\n\n```text\na <x\n\nb\n```\n\nx &lt;v, w> and ``<k>``."
    text = tools.pages.prose("- a::\n\n      x\n        y\n\n  b\n- c\n  d\n\nend\n")
    assert text == "- a:\n\n    ```text\n    x\n      y\n    ```\n\n    b\n\n- c\n    d\n\nend"
    assert tools.pages.paper("A, arXiv 2401.15077; 2503.01840") == (
        "A, [arXiv 2401.15077](https://arxiv.org/abs/2401.15077); "
        "[2503.01840](https://arxiv.org/abs/2503.01840)"
    )


# --- the site ------------------------------------------------------------------------------------


@pytest.mark.parametrize("repo", [None, "https://host.example/vlmfast/"])
def test_links_to_files_outside_the_docs(tools, repo: str | None) -> None:
    def rewritten(text: str, page: str) -> str:
        file = SimpleNamespace(src_uri=page)
        return tools.hooks.on_page_markdown(
            text,
            page=SimpleNamespace(file=file),
            config=SimpleNamespace(repo_url=repo),
            files=None,
        )

    inside = "[a](start.md#x) [b](https://c.example/../d) ![p](../docs/images/a.png) [e](#f)"
    assert rewritten(inside, "index.md") == inside
    base = "https://host.example/vlmfast/blob/HEAD"
    code = "[`README.md`](../README.md)"
    assert rewritten(code, "a.md") == (
        f"[`README.md`]({base}/README.md)" if repo else "`README.md`"
    )
    name = "[`x.json`](../../benchmarks/x.json)"
    assert rewritten(name, "methods/a.md") == (
        f"[`x.json`]({base}/benchmarks/x.json)" if repo else "`benchmarks/x.json`"
    )
    text = "[the result](../../benchmarks/results/x.json)"
    shown = (
        f"[the result]({base}/benchmarks/results/x.json)"
        if repo
        else ("the result (`benchmarks/results/x.json`)")
    )
    assert rewritten(text, "methods/a.md") == shown
    assert rewritten("| `hired`, `nosuch` | `hired` |", "kv.md") == (
        "| [`hired`](methods/hired.md), `nosuch` | `hired` |"
    )


def on_page(tools, name: str) -> str:
    """A page as the hook of the charts leaves it."""
    return tools.charts.on_page_markdown(
        (DOCS / name).read_text(encoding="utf-8"),
        page=SimpleNamespace(file=SimpleNamespace(src_uri=name)),
        config=SimpleNamespace(docs_dir=str(DOCS)),
        files=None,
    )


def test_reports_have_charts_of_their_numbers(tools) -> None:
    found = re.findall(
        r'^<div class="chart" data-script="([^"]+)" data-search-exclude>'
        r'<script type="application/json">(.*)</script></div>$',
        on_page(tools, "results/cache/report.md"),
        re.MULTILINE,
    )
    ((script, data),) = found
    assert script == "../../assets/plotly.min.js"
    assert "<" not in data
    shown = json.loads(data)
    lines = {trace.get("name"): trace for trace in shown["data"]}
    report = json.loads((DOCS / "results" / "cache" / "report.json").read_text(encoding="utf-8"))
    numbers = report["tasks"]["shapes"]["recipes"]["zipvl"]
    assert lines["zipvl"]["y"] == [100 * numbers["caption_image"]]
    assert lines["zipvl"]["x"] == [100 * numbers["held_image"]]
    assert on_page(tools, "evaluation.md") == (DOCS / "evaluation.md").read_text(encoding="utf-8")


def test_every_report_is_folded_and_has_a_chart(tools) -> None:
    for file in sorted((DOCS / "results").rglob("report.md")):
        text = file.read_text(encoding="utf-8")
        page = on_page(tools, file.relative_to(DOCS).as_posix())
        assert page.count('class="chart"') == text.count("Interactive chart: ") > 0
        visible = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
        lines, folded = len(visible.splitlines()), text.count("<details")
        assert folded == text.count("</details>")
        # Tables of a few recipes are not folded.
        assert lines < min(100, len(text.splitlines())) if folded else lines < 120
        assert "| `none` |" in text


def test_built_site_is_checked(tools, tmp_path: Path) -> None:
    good = '<a href="b.html#x">b</a><a href="https://x.example">x</a><img src="i.png">'
    (tmp_path / "b.html").write_text('<h1 id="x">b</h1><a href="/a.html">a</a>')
    (tmp_path / "i.png").write_bytes(b"")
    page = tmp_path / "a.html"
    page.write_text(good)
    assert tools.check_site.problems(tmp_path) == []
    for bad in (
        '<a href="c.html">c</a>',
        '<a href="b.html#y">y</a>',
        '<img src="j.png">',
        '<div data-script="plotly.js"></div>',
        '<div data-script="https://cdn.example/plotly.js"></div>',
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<p style="background: url(https://x.example/i.png)">',
        "<style>@import 'https://x.example/i.css';</style>",
    ):
        page.write_text(good + bad)
        assert len(tools.check_site.problems(tmp_path)) == 1, bad
    page.write_text(good)
    (tmp_path / "s.css").write_text("@font-face{src:url(https://fonts.example/f.woff2)}")
    assert len(tools.check_site.problems(tmp_path)) == 1
