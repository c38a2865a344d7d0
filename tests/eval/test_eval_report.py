"""Tables and plots of results with known ground truth."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from support.closeness import close
from support.engine.commands import minus
from support.eval_fakes import write_results
from vlmfast.errors import VLMFastError
from vlmfast.eval.report import (
    folded,
    load,
    on_common_samples,
    write_difference,
    write_report,
)
from vlmfast.eval.results import read
from vlmfast.eval.summary import compare, difference, summarise

LIMIT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A good method, a useless one, the baselines, the full model and its controls."""
    out = tmp_path_factory.mktemp("results")
    write_results(out, "none", 0.8, limit=LIMIT)
    write_results(out, "none", 0.3, control="question-only", limit=LIMIT)
    for share, good, poor in ((0.33, 0.75, 0.6), (0.11, 0.7, 0.4)):
        write_results(out, f"hired:budget={share}", good, share, limit=LIMIT)
        for name in ("random", "grid", "downsample"):
            write_results(out, f"{name}:budget={share}", poor, share, limit=LIMIT)
    write_results(out, "hired:alpha=0.9,budget=0.11", 0.4, 0.11, limit=LIMIT)
    return out


@pytest.fixture(scope="module")
def report(folder, tmp_path_factory) -> tuple[str, list[Path]]:
    """Of `folder`, in a folder that does not exist before."""
    return write_report(folder, tmp_path_factory.mktemp("report") / "new")


def tables_of(text: str) -> list[tuple[list[str], dict[str, list[str]]]]:
    """The head and the rows of every table, by the first cell."""
    found = []
    for block in re.split(r"\n\n+", text):
        if block.startswith("|"):
            lines = [line.strip("| ").split(" | ") for line in block.splitlines()]
            found.append((lines[0], {row[0].strip("`"): row[1:] for row in lines[2:]}))
    return found


def recipes_of(text: str) -> dict[str, dict[str, str]]:
    """The cells of each recipe by column, of the table of all recipes."""
    head, rows = next(table for table in tables_of(text) if table[0][0] == "recipe")
    return {name: dict(zip(head[1:], cells, strict=True)) for name, cells in rows.items()}


def number(cell: str) -> float:
    return float(re.match(r"[-+]?[\d.]+", cell).group())


def test_numbers(folder):
    full, hired = (read(folder / "shapes" / n) for n in ("none", "hired_budget=0.33"))
    n = summarise(hired, full)
    for m in ("image", "video"):
        assert n[f"accuracy_{m}_ci"][0] < n[f"accuracy_{m}"] < n[f"accuracy_{m}_ci"][1]
        types = [t for name, t in n["types"].items() if name.startswith(m) and "capt" not in name]
        mean = sum(t["accuracy"] for t in types) / len(types)
        close(n[f"accuracy_{m}"], mean, terms=len(types))
        assert n[f"caption_{m}"] is not None
    assert len(n["types"]) == 21
    assert {"image/exist", "video/exist"} <= set(n["types"])
    assert all(t["n"] == LIMIT and t["ci"][0] < t["ci"][1] for t in n["types"].values())
    for name, value in {
        "kept": 0.33,
        "equivalent_tokens_image": 0.33 * 336,
        "visual_tokens_in": (13 * 336 + 8 * 544) / 21,
        "ttft_s_image": 0.0299,
    }.items():
        close(n[name], value, terms=21 * LIMIT)  # means over samples
    assert n["samples"] == 21 * LIMIT
    assert n["errors"] == 0
    assert 0.7 < n["loyalty"] < 1
    assert summarise(full, full)["loyalty"] == 1.0
    json.dumps(n, allow_nan=False)


def test_numbers_of_half_a_task(tmp_path):
    run = read(write_results(tmp_path, "none", 0.8, limit=2, videos=False))
    n = summarise(run, run)
    assert n["accuracy_video"] is n["accuracy_video_ci"] is n["ttft_s_video"] is None
    json.dumps(n, allow_nan=False)
    assert "videos %" not in recipes_of(write_report(tmp_path, tmp_path)[0])["none"]


def test_perfect_score_has_an_interval(tmp_path):
    for skill, mean in ((2.0, 1.0), (-1.0, 0.0)):
        path = write_results(tmp_path / str(mean), "none", skill, limit=2)
        n = summarise(read(path))
        assert n["accuracy_image"] == mean
        assert n["accuracy_image_ci"][1] - n["accuracy_image_ci"][0] > 0.2


def test_differences_are_paired(folder):
    hired, random = (read(folder / "shapes" / f"{n}_budget=0.11") for n in ("hired", "random"))
    mean, low, high = difference(hired, random, "image")
    alone = summarise(hired)["accuracy_image"] - summarise(random)["accuracy_image"]
    close(mean, alone, terms=21 * LIMIT, scale=1)
    assert 0 < low < mean < high
    back = difference(random, hired, "image")
    for number, other in zip(back, (-mean, -high, -low), strict=True):
        close(number, other, terms=21 * LIMIT, scale=1)
    assert difference(hired, hired, "video") == (0.0, 0.0, 0.0)


def test_report(report):
    text, files = report
    names = ["report.md", "shapes.html", "report.json"]
    assert [file.name for file in files] == names
    assert {file.parent.name for file in files} == {"new"}
    assert len({file.parent for file in files}) == 1
    found = json.loads(files[2].read_text())["tasks"]["shapes"]
    assert found["recipes"]["none"]["loyalty"] == 1.0
    assert len(found["recipes"]) == 11
    assert files[0].read_text(encoding="utf-8") == text
    assert "`shapes.html`" in text
    rows = recipes_of(text)
    assert next(iter(rows)) == "none"
    assert list(rows)[-1] == "none@question-only"
    assert len(rows) == 11
    assert number(rows["none"]["loyalty %"]) == 100
    assert number(rows["hired:budget=0.33"]["tokens kept %"]) == 33
    assert rows["none"]["equivalent tokens"] == "336.0 / 544.0"
    assert number(rows["hired:budget=0.33"]["TTFT ms"]) == 29.9
    assert not {"peak memory MB", "later questions, images %"} & set(rows["none"])  # not measured
    warnings = re.findall(r"\*\*Warning:\*\* (.*)", text)
    few = [warning for warning in warnings if "too few for intervals" in warning]
    assert [re.sub(r"\d+", "N", w) for w in few] == [
        "only N videos: too few for intervals; use a larger `--limit`."
    ]
    worse = [warning for warning in warnings if warning not in few]
    assert sorted(worse) == [
        f"not better than `{control}` of the same cost (single questions, {noun}): "
        "`hired:alpha=0.9,budget=0.11`."
        for control in ("downsample", "random")
        for noun in ("images", "videos")
    ]


def test_methods_by_budgets_at_a_glance(report, folder, tmp_path):
    text, _ = report
    head, rows = tables_of(text)[0]
    assert head == ["single questions, kept of the tokens", "33 %", "11 %"]
    assert list(rows) == ["hired", "hired:alpha=0.9", "downsample", "grid", "random"]
    cells = recipes_of(text)["hired:budget=0.11"]
    accuracies = [f"{number(cells[f'{noun} %']):.1f}" for noun in ("images", "videos")]
    # Bold where it beats random, plain where not, a dash where not run.
    assert rows["hired"][1] == " / ".join(f"**{a}**" for a in accuracies)
    assert "**" not in rows["downsample"][1]
    assert rows["hired:alpha=0.9"][0] == "–"
    alone = tmp_path / "alone"
    write_results(alone, "none", 0.8, limit=LIMIT)
    write_results(alone, "hired:budget=0.2", 0.8, 0.4, limit=LIMIT)
    assert "Bold: " not in write_report(alone, alone)[0]
    write_results(alone, "random:budget=0.2", 0.8, 0.2, limit=LIMIT)
    assert "(40.0 %)" in tables_of(write_report(alone, alone)[0])[0][1]["hired"][0]


def tables_under(text: str, title: str) -> list[list[str]]:
    """Rows of the first table under a title, without head and rule."""
    block = text.partition(f"### {title}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in block.split("\n")][2:]


def test_pairs_of_methods(report):
    rows = tables_under(report[0], "Pairs")
    pairs = {(row[0].strip("`"), row[1].strip("`")): row for row in rows}
    good, poor = "hired:budget=0.11", "hired:alpha=0.9,budget=0.11"
    for recipe in (good, poor):
        for other in ("none", "random:budget=0.11", "downsample:budget=0.11"):
            assert (recipe, other) in pairs
    better = pairs[good, "random:budget=0.11"]
    assert number(better[2]) > 0
    assert int(better[4]) > int(better[5])
    assert float(better[6]) < 0.001
    assert float(pairs[poor, "random:budget=0.11"][6]) > 0.05
    assert number(pairs[good, "none"][2]) < 0


def test_chart_is_a_page_that_loads_nothing_from_elsewhere(report):
    _, file, _ = report[1]
    page = file.read_text(encoding="utf-8")
    scripts = re.findall(r"<script[^>]* src=\"([^\"]+)\"", page)
    assert scripts == ["plotly.min.js"]
    assert (file.parent / scripts[0]).stat().st_size > 1e6
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page)
    for recipe in ("hired:budget=0.11", "random:budget=0.33", "downsample:budget=0.11"):
        assert f'"{recipe}"' in page
    assert "question-only" not in page


def test_long_tables_are_folded():
    head = "| recipe | kept |\n| --- | ---: |"
    short, long = (f"{head}\n" + "\n".join(["| a | 1 |"] * n) for n in (12, 13))
    assert folded("All", short) == short
    assert folded("All", long) == (
        f'<details markdown="1">\n<summary>All (13 rows)</summary>\n\n{long}\n\n</details>'
    )


def test_random_control_matches_the_measured_cost(tmp_path):
    """A method over its budget is compared with random at its measured cost."""
    write_results(tmp_path, "none", 0.8, limit=2)
    for share in (0.33, 0.11):
        write_results(tmp_path, f"random:budget={share}", 0.5, share, limit=2)
    write_results(tmp_path, "hired:budget=0.11", 0.7, 0.35, limit=2)
    write_results(tmp_path, "hired:budget=0.2", 0.7, 0.2, limit=2)
    runs = load(tmp_path)["shapes"]
    random = {
        row.run.name: [control.run.name for control in row.controls.values()]
        for row in compare(runs)
    }
    assert random["hired:budget=0.11"] == ["random:budget=0.33"]
    assert random["hired:budget=0.2"] == []
    text, _ = write_report(tmp_path, tmp_path)
    assert "no control of about the same cost as `hired:budget=0.2`." in text


def test_draws_of_a_control_are_one_row(tmp_path):
    """Their mean, with an interval that contains their variance."""
    write_results(tmp_path, "none", 0.8, limit=LIMIT)
    write_results(tmp_path, "hired:budget=0.11", 0.7, 0.11, limit=LIMIT)
    names = ["random:budget=0.11", *(f"random:seed={n},budget=0.11" for n in range(1, 5))]
    for name, skill in zip(names, (0.3, 0.4, 0.5, 0.6, 0.7), strict=True):
        write_results(tmp_path, name, skill, 0.11, limit=LIMIT)
    runs = load(tmp_path)["shapes"]
    rows = {row.run.name: row for row in compare(runs)}
    assert set(rows) == {"none", "hired:budget=0.11", names[0]}
    row = rows[names[0]]
    alone = {run.name: summarise(run) for run in runs if run.name in names}
    of_draws = [alone[name]["accuracy_image"] for name in names]
    assert row.numbers["draws"] == 5
    assert abs(row.numbers["accuracy_image"] - sum(of_draws) / 5) < 1e-9
    low, high = row.numbers["accuracy_image_ci"]
    first = alone[names[2]]["accuracy_image_ci"]
    assert high - low > 0.15 > 1e-3 < first[1] - first[0]
    method = rows["hired:budget=0.11"]
    assert method.controls == {"random": row}
    gap = method.gap(row, "image")
    differences = [difference(method.run, run, "image")[0] for run in runs if run.name in alone]
    assert abs(gap[0] - sum(differences) / 5) < 1e-9
    text, _ = write_report(tmp_path, tmp_path)
    assert f"`{names[0]}` (mean of 5 draws)" in text
    assert names[1] not in text


# --- caches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    """A good cache method, a useless one, both controls, a quantizer; in sessions too."""
    out = tmp_path_factory.mktemp("caches")
    for session in (False, True):
        write_results(out, "none", 0.8, session=session, limit=LIMIT)
        for share in (0.5, 0.1):
            # In a session the good one improves further, the other equals the controls.
            more = {"session": session, "limit": LIMIT}
            good, poor = (0.8, 0.45) if session else (0.75, 0.5)
            write_results(out, f"lookm:{share}", good, held=share, **more)
            write_results(out, f"h2o:{share}", poor, held=share * 1.05, **more)
            write_results(out, f"streamingllm:{share}", 0.5, held=share, **more)
            write_results(out, f"random:budget={share}", 0.5, share, held=share * 1.1, **more)
        write_results(out, "kivi", 0.79, held=0.2, session=session, limit=LIMIT)
    return out


def test_numbers_of_a_cache(caches):
    full, alone, asked = (
        read(caches / "shapes" / name) for name in ("none", "lookm_0.1", "lookm_0.1@session")
    )
    n, s = summarise(alone, full), summarise(asked, full)
    for name in ("held", "held_image"):
        close(n[name], 0.1, terms=21 * LIMIT)
    assert n["kept"] == 1
    assert summarise(full)["held"] == 1
    for m in ("image", "video"):
        assert n[f"accuracy_first_{m}"] is n[f"accuracy_later_{m}"] is None
        first = [
            x["score"]
            for x in asked.samples.values()
            if x["turn"] == 0 and x["modality"] == m and "caption" not in x["type"]
        ]
        assert 0 < len(first) < sum(x["modality"] == m for x in asked.samples.values()) / 2
        assert s[f"accuracy_first_{m}"] is not None
        low, high = s[f"accuracy_later_{m}_ci"]
        assert low < s[f"accuracy_later_{m}"] < high
    assert s["ttft_later_s_image"] > 0
    json.dumps(s, allow_nan=False)


@pytest.fixture(scope="module")
def cache_report(caches, tmp_path_factory) -> tuple[str, list[Path]]:
    return write_report(caches, tmp_path_factory.mktemp("cache-report"))


def test_report_of_caches(cache_report):
    text, files = cache_report
    names = ["report.md", "shapes-cache.html", "report.json"]
    assert [file.name for file in files] == names
    *grids, (_, _), _ = tables_of(text)
    views = ["single questions", "captions", "later questions in a session"]
    assert [head[0].partition(", kept of the cache")[0] for head, _ in grids] == views
    for head, grid in grids:
        assert head[1:] == ["50 %", "10 %", "default"]
        assert list(grid) == ["h2o", "kivi", "lookm", "streamingllm"]
        assert grid["kivi"][:2] == ["–", "–"]
        assert "(20.0 %)" in grid["kivi"][2]
        assert grid["lookm"][2] == "–"
        # Beats both controls on images and videos; a dozen captions are too few to show it.
        assert grid["lookm"][0].count("**") == 4 or "captions" in head[0]
        assert "**" not in grid["h2o"][0]
        assert "(" not in grid["lookm"][0] + grid["h2o"][0]
    rows = recipes_of(text)
    assert list(rows)[:2] == ["none", "none@session"]
    assert {"random:budget=0.5", "streamingllm:0.1"} <= set(rows)
    alone, asked = rows["lookm:0.1"], rows["lookm:0.1@session"]
    assert number(alone["cache %"]) == 10
    for key in ("images %", "videos %", "captions of images %", "captions of videos %"):
        assert re.match(r"[\d.]+ \[[\d.]+, [\d.]+\]$", alone[key])
    assert alone["later questions, images %"] == alone["a session processes images"] == "–"
    assert number(asked["later questions, images %"]) > 0
    assert asked["a session processes images"] == "once"
    pairs = {tuple(row[i].strip("`") for i in (0, 1)): row for row in tables_under(text, "Pairs")}
    assert number(pairs["lookm:0.1", "none"][2]) < 0
    for control in ("streamingllm:0.1", "random:budget=0.1"):
        assert number(pairs["lookm:0.1", control][2]) > 0
    better, poorer = (pairs[f"{of}:0.1@session", f"{of}:0.1"][2] for of in ("lookm", "h2o"))
    assert number(better) > 0 > number(poorer)
    worse = [w for w in re.findall(r"\*\*Warning:\*\* (.*)", text) if "not better" in w]
    worse = [w for w in worse if "captions" not in w]
    assert worse
    assert all("`h2o" in w and "`lookm" not in w for w in worse)
    assert any(
        "`random` of the same cost (later questions in a session, images)" in w for w in worse
    )


def test_cache_controls_have_the_same_size(caches):
    rows = {row.run.name: row for row in compare(load(caches)["shapes"])}
    names = {word: of.run.name for word, of in rows["lookm:0.1"].controls.items()}
    assert names == {"streamingllm": "streamingllm:0.1", "random": "random:budget=0.1"}
    asked = rows["lookm:0.1@session"].controls["random"]
    assert asked.run.name == "random:budget=0.1@session"
    assert not rows["kivi"].controls  # no control of similar size
    assert not rows["none"].controls


def test_caches_and_reducers_in_one_report(folder, caches, tmp_path):
    for source in (folder, caches):
        for path in sorted((source / "shapes").iterdir()):
            copy = tmp_path / "shapes" / path.name
            if path.is_dir() and "@session" not in path.name and not copy.exists():
                shutil.copytree(path, copy)
    text, files = write_report(tmp_path, tmp_path / "out")
    names = ["report.md", "shapes.html", "shapes-cache.html", "report.json"]
    assert [f.name for f in files] == names
    grids = {head[0]: rows for head, rows in tables_of(text) if "kept of the" in head[0]}
    tokens = grids["single questions, kept of the tokens"]
    assert "hired" in tokens and "lookm" not in tokens
    assert "hired" not in grids["single questions, kept of the cache"]
    assert {"hired:budget=0.11", "random:budget=0.5", "lookm:0.1"} <= set(recipes_of(text))


def test_report_of_sessions_only(tmp_path):
    for recipe in ("none", "lookm"):
        write_results(tmp_path, recipe, 0.8, held=0.2, session=True, limit=2)
    text, files = write_report(tmp_path, tmp_path)
    assert '"lookm@session"' in files[1].read_text(encoding="utf-8")  # the chart
    assert "the full model is missing" in text


def test_missing_controls_are_reported(tmp_path):
    write_results(tmp_path, "hired:budget=0.11", 0.7, 0.11, limit=2)
    text, _ = write_report(tmp_path, tmp_path)
    for name in ("random", "downsample"):
        assert f"the control `{name}` is missing" in text
    assert "the full model is missing" in text
    assert "loyalty %" not in recipes_of(text)["hired:budget=0.11"]


def test_full_model_alone_needs_no_controls(tmp_path):
    write_results(tmp_path, "none", 0.7, limit=1)
    text, files = write_report(tmp_path, tmp_path)
    assert "missing" not in text
    assert all(file.exists() for file in files)


def test_failed_samples_are_reported(tmp_path):
    path = write_results(tmp_path, "none", 0.7, limit=1)
    lines = (path / "samples.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {
        "error": "x", "resps": [], "filtered_resps": [], "score": 0.0,
        "visual_tokens_in": None, "equivalent_tokens": None,
    }  # fmt: skip
    (path / "samples.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    text, _ = write_report(tmp_path, tmp_path)
    assert "1 samples of `none` failed" in text
    # Two failures do not count as an agreement.
    assert summarise(read(path), read(path))["loyalty"] < 1


def test_unfinished_runs_are_compared_on_common_samples(tmp_path):
    write_results(tmp_path, "none", 0.8, limit=4)
    path = write_results(tmp_path, "random:budget=0.33", 0.5, 0.33, limit=4)
    lines = (path / "samples.jsonl").read_text().splitlines(keepends=True)
    (path / "samples.jsonl").write_text("".join(lines[:30]) + lines[30][:40])
    common, notes = on_common_samples(load(tmp_path)["shapes"])
    assert [len(run.samples) for run in common] == [30, 30]
    assert "random:budget=0.33 (30)" in notes[0]
    text, _ = write_report(tmp_path, tmp_path)
    assert "the 30 common samples" in text
    assert "30 questions" in text


def test_runs_without_a_common_sample_are_reported(tmp_path):
    path = write_results(tmp_path, "none", 0.8, limit=2)
    other = write_results(tmp_path, "random", 0.5, 0.2, limit=2)
    for folder, part in ((path, slice(0, 5)), (other, slice(5, 9))):
        lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
        (folder / "samples.jsonl").write_text("".join(lines[part]))
    with pytest.raises(VLMFastError, match="no sample in common: none has 5, random has 4"):
        write_report(tmp_path, tmp_path)


def test_results_of_different_models_are_not_put_in_one_table(tmp_path):
    write_results(tmp_path, "none", 0.8, limit=1)
    write_results(tmp_path / "b", "random", 0.8, 0.2, limit=1, weights_sha256="other")
    (tmp_path / "b" / "shapes" / "random").rename(tmp_path / "shapes" / "random")
    with pytest.raises(VLMFastError, match="different runs: weights_sha256"):
        write_report(tmp_path, tmp_path)


def test_folders_without_results_are_refused(tmp_path):
    with pytest.raises(VLMFastError, match="no results in"):
        load(tmp_path)
    path = write_results(tmp_path, "none", 0.8, limit=1)
    (path / "samples.jsonl").unlink()
    with pytest.raises(VLMFastError, match="no run has finished a sample"):
        load(tmp_path)


def test_task_folder_is_accepted(folder):
    assert len(load(folder / "shapes")["shapes"]) == 11


def test_two_folders_are_compared(folder, tmp_path):
    write_results(tmp_path, "none", 0.8, limit=LIMIT, weights_sha256="retrained")
    write_results(tmp_path, "hired:budget=0.33", 0.35, 0.2, limit=9, weights_sha256="retrained")
    text, files = write_difference(folder, tmp_path, tmp_path / "d")
    assert files == [tmp_path / "d" / "difference.md"]
    rows = recipes_of(text)
    assert set(rows) == {"none", "hired:budget=0.33"}
    same, worse = rows["none"], rows["hired:budget=0.33"]
    assert same["images, points"] == same["videos, points"] == "+0.0 [+0.0, +0.0]"
    assert worse["samples"] == str(21 * 9)
    assert number(worse["images, points"]) < -20
    assert float(worse["McNemar's p"]) < 0.01 < float(same["McNemar's p"]) == 1
    assert "(-39 %)" in worse["equivalent tokens"]
    assert f"Only in {folder}: hired:budget=0.11, hired:alpha=0.9,budget=0.11, " in text
    assert f"Only in {tmp_path}" not in text


def test_incomparable_folders_are_refused(folder, tmp_path):
    write_results(tmp_path / "a", "none", 0.8, limit=1, seed=3)
    with pytest.raises(VLMFastError, match="seed is 0 in the one and 3 in the other"):
        write_difference(folder, tmp_path / "a", tmp_path)
    write_results(tmp_path / "b", "random:seed=4", 0.5, 0.2, limit=1)
    with pytest.raises(VLMFastError, match="no recipe of shapes in common"):
        write_difference(folder, tmp_path / "b", tmp_path)


def test_draws_that_an_interrupted_run_lacks_are_left_out():
    assert minus([1.0, 0.0, 1.0], [1.0, 1.0]) == [0.0, -1.0]
    assert minus([1.0], [1.0, 0.0]) == [0.0, 1.0]


def test_a_recipe_whose_samples_all_failed_is_no_point():
    from vlmfast.eval.chart import Measured, View

    numbers = {"accuracy_image": 0.0, "accuracy_image_ci": (0.0, 0.0), "kept_image": None}
    row = Measured("a", "a", "b", "kept", numbers)
    assert row.point(View("Images", "accuracy", "image")) is None
    numbers["kept_image"] = 0.5
    assert row.point(View("Images", "accuracy", "image"))[0] == 50
