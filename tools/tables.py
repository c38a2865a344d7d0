"""Tables of README and the documentation, from the committed results.

``python tools/tables.py`` writes those of README between their markers; a test checks that they
match. Those of the documentation are put in when it is built.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from charts import html_of
from sources import RESULTS, ROOT, both, measured, numbers, pair, table, within
from timings import (
    drafters,
    gpu_answers,
    gpu_kernels,
    gpu_steps,
    launches,
    overhead,
    passkeys,
    presses,
    reduce_cost,
    served_beside,
    served_scaling,
    served_times,
    served_vllm,
    speed,
    timings,
    tower_calls,
    tower_time,
    vllm_launches,
)

from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names
from vlmfast.eval.axes import shrinks_cache, with_field
from vlmfast.eval.results import slug
from vlmfast.eval.summary import unguarded

BUDGETS = (0.33, 0.22, 0.11, 0.05)
_SOURCES = {
    "attention of CLS": "hired:budget={}",
    "attention received": "hired:budget={},saliency=received",
    "feature norm": "hired:budget={},saliency=norm",
}
_COMPARED = {
    "`divprune`": "divprune:budget={}",
    "`random`": "random:budget={}",
}
_PRESETS = {"faithful": 0.33, "balanced": 0.22, "fast": 0.11}  # budgets of `random` and `hired`
# Column -> the folders of its methods.
_KINDS = {
    "views": ("views",),
    "vision encoder": ("encoder",),
    "before the LLM": ("frames", "tokens"),
    "LLM layers": ("prefill",),
    "KV cache": ("cache",),
    "drafters": ("drafters",),
}
_POLICIES = ("hired", "visionzip", "flashvid", "scope", "divprune", "random")


def saliency() -> str:
    """``hired`` by saliency source, compared with ``divprune`` and ``random``."""
    found = numbers("saliency")
    rows = [["images % / videos %", *(f"{100 * budget:.0f} %" for budget in BUDGETS)]]
    for name, recipe in {**_SOURCES, **_COMPARED}.items():
        label = f"`hired` by {name}" if name in _SOURCES else name
        rows.append([label, *(pair(found[recipe.format(budget)]) for budget in BUDGETS)])
    return table(rows)


def positions() -> str:
    """Both position policies of the main methods, side by side."""
    kept, compact = numbers(""), numbers("positions")
    budgets = (0.22, 0.11)
    head = ["images % / videos %"]
    head += [f"{100 * b:.0f} %, {policy}" for b in budgets for policy in ("keep", "compact")]
    rows = [head]
    for method in _POLICIES:
        cells = []
        for budget in budgets:
            cells.append(pair(kept[f"{method}:budget={budget}"]))
            cells.append(pair(compact[f"{method}:positions=compact,budget={budget}"]))
        rows.append([f"`{method}`", *cells])
    return table(rows)


def fresh() -> str:
    """What the presets lose on fresh scenes, and what they are above ``random``."""
    text = (RESULTS / "fresh" / "report.md").read_text(encoding="utf-8")
    pairs = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" | ") == 6]
    rows = [["points", "images", "videos"]]
    for other, label in (("`none`", "minus `none`"), ("`random:", "minus `random`")):
        for name in _PRESETS:
            run = f"`{Recipe.parse(name)}`"
            found = [p for p in pairs if p[0].startswith(run) and p[1].startswith(other)]
            rows.append([f"`{name}` {label}", *found[0][2:4]])
    return table(rows)


def presets() -> str:
    """Accuracy of the presets on fresh scenes, beside ``random`` at their cost."""
    found = numbers("fresh")
    rows = [["recipe", "kept", "images", "videos", "images, compact", "videos, compact"]]
    rows.append(["`none`", "100 %", *both(found["none"]), "", ""])
    for name in _PRESETS:
        recipe = Recipe.parse(name)
        run = found[str(recipe)]
        compact = pair(found[str(with_field(recipe, "positions", "compact"))]).split(" / ")
        rows.append([f"`{name}`", f"{100 * run['kept']:.0f} %", *both(run), *compact])
    for method in ("hired", "random"):
        for budget in _PRESETS.values():
            name = f"{method}:budget={budget}"
            run = found[name]
            draws = f", mean of {run['draws']} draws" if run.get("draws") else ""
            rows.append([f"`{name}`{draws}", f"{100 * run['kept']:.0f} %", *both(run), "", ""])
    return table(rows)


def runs_where() -> str:
    """How many methods of each kind run on a model family, counted from the full table."""
    text = (RESULTS / "families.md").read_text(encoding="utf-8")
    lines = text.partition("<!-- support -->\n")[2].partition("\n<!-- end")[0].splitlines()
    head, _, *support = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    families = [cell.strip("`") for cell in head[1:]]
    cells = {row[0].strip("`"): dict(zip(families, row[1:], strict=True)) for row in support}
    homes = stage_names()
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in families:
        counts = []
        for kinds in _KINDS.values():
            names = [name for name in cells if homes[name].split(".")[-2] in kinds]
            run = sum(cells[name][family] != "–" for name in names)
            counts.append("all" if run == len(names) else f"{run} of {len(names)}")
        alike.setdefault((cells["hired"][family], *counts), []).append(f"`{family}`")
    rows = [[", ".join(names), *cells] for cells, names in alike.items()]
    return table([["families", "saliency", *_KINDS], *rows])


_EPS = (2, 4, 8)


def _attacked(task: str = "robustness") -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The recipes of the task ``robustness``, and the numbers of its runs by name."""
    runs = measured("robustness-tiny")["tasks"][task]["recipes"]
    return [name for name in runs if "@" not in name], runs


def robustness() -> str:
    """Accuracy of each recipe on clean, noisy and attacked images."""
    recipes, runs = _attacked()
    rows = [["recipe", "clean", "noise, 8/255", *(f"attack, {eps}/255" for eps in _EPS)]]
    rows[0].append("full model, attack, 8/255")
    for recipe in recipes:
        controls = ["", "@noise-8", *(f"@attack-{eps}" for eps in _EPS)]
        names = [f"{recipe}{control}" for control in controls]
        names.append(f"none@attack-8-{slug(recipe)}")
        found = [runs.get(name) for name in names]
        shown = [f"{100 * of['accuracy_image']:.1f}" if of else "" for of in found]
        rows.append([f"`{recipe}`", *shown])
    return table(rows)


def changed() -> str:
    """Fraction of the kept tokens that noise and the attack replace, and the paired drop."""
    recipes, runs = _attacked()
    rows = [["recipe"]]
    for eps in _EPS:
        rows[0] += [f"changed, {eps}/255", "drop"]
    for recipe in recipes[1:]:
        cells = []
        for eps in _EPS:
            both = [runs[f"{recipe}@{kind}-{eps}"] for kind in ("noise", "attack")]
            cells.append(" / ".join(f"{100 * of['metrics']['changed']:.0f} %" for of in both))
            cells.append(_points(both[1]["gaps_image"][recipe]))
        rows.append([f"`{recipe}`", *cells])
    return table(rows)


def guards() -> str:
    """What guards win back."""
    recipes, runs = _attacked()
    rows = [["recipe", "passes", "clean", *(f"attack, {eps}/255" for eps in _EPS)]]
    for recipe in recipes:
        base = unguarded(recipe)
        if base != recipe:
            controls = ("", *(f"@attack-{eps}" for eps in _EPS))
            gaps = [runs[f"{recipe}{of}"]["gaps_image"][f"{base}{of}"] for of in controls]
            passes = 1 + max(getattr(stage, "guard", 0) for stage in Recipe.parse(recipe))
            rows.append([f"`{recipe}`", str(passes), *map(_points, gaps)])
    return table(rows)


def verbose() -> str:
    """Lengths of answers on verbose images."""
    recipes, runs = _attacked("robustness-verbose")
    rows = [["recipe", "clean", "noise, 8/255", "verbose, 8/255"]]
    for recipe in recipes:
        found = [runs[f"{recipe}{of}"]["metrics"] for of in ("", "@noise-8", "@verbose-8")]
        cells = [f"{m['tokens']:.1f} / {m['longest']} ({m['at_limit']:.0%})" for m in found]
        rows.append([f"`{recipe}`", *(cell.replace("%", " %") for cell in cells)])
    return table(rows)


def _points(gap: list[float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in gap))


def draws() -> str:
    """How good the recipes are that the race chooses on drawn scenes."""
    found = measured("tune-tiny")
    head = ["`--for`", "within the limit", "certified", "loss, median", "loss, largest"]
    rows = [[*head, "cost, median", "times the cheapest, median"]]
    for objective in ("ttft", "memory"):
        about = found[objective]
        losses = [100 * one["loss_on_rest"] for one in about["each"]]
        cost = statistics.median(one["cost"] for one in about["each"])
        rows.append(
            [
                f"`{objective}`",
                f"{about['within_bound']} of {about['draws']}",
                f"{about['certified']} of {about['draws']}",
                f"{statistics.median(losses):+.1f}",
                f"{max(losses):+.1f}",
                f"{100 * cost:.0f} %",
                f"{about['median_cost_over_cheapest']:.2f}",
            ]
        )
    return table(rows)


def views() -> str:
    """Accuracy with ``crops``, beside reducers of all crops, by the tokens kept."""
    found = numbers("views")
    rows = [["recipe", "kept, images", "images", "kept, videos", "videos"]]
    order = sorted(found, key=lambda name: (_kind(name), -found[name]["kept_image"]))
    for name in order:
        run = found[name]
        kept = [f"{100 * run[f'kept_{kind}']:.0f} %" for kind in ("image", "video")]
        image, video = both(run)
        rows.append([f"`{name}`", kept[0], image, kept[1], video])
    return table(rows)


def _kind(recipe: str) -> int:
    """The order of recipes: the full model, crops, crops and hired, others."""
    kinds = ("none", "crops", "hired", "random")
    stages = [stage.partition(":")[0] for stage in recipe.split("+")]
    return 2 * kinds.index(stages[0]) + len(stages) - 1


_STACKED = (0.66, 0.44, 0.22, 0.1)
# Label -> the recipes of one curve.
_CURVES = {
    "none": ("none",),
    "hired": tuple(f"hired:budget={budget}" for budget in BUDGETS),
    "hired + divprune": tuple(f"hired:budget=0.5+divprune:budget={b}" for b in _STACKED),
    "tome:0.5 + divprune": tuple(f"tome:budget=0.5+divprune:budget={b}" for b in (0.44, 0.22)),
    "tome:0.33 + divprune": ("tome:budget=0.33+divprune:budget=0.33",),
    "tome + hired + divprune": ("tome:budget=0.5+hired:budget=0.5+divprune:budget=0.44",),
    "crops:0.5 + hired": tuple(f"crops:0.5+hired:budget={b}" for b in (0.6, 0.4, 0.2, 0.1)),
    "crops:0.25 + hired": tuple(f"crops:0.25+hired:budget={b}" for b in (0.4, 0.2)),
}


def _timed() -> dict[str, list[tuple[str, float, dict[str, Any]]]]:
    """Recipes with Hugging Face's time to the first token over theirs, and their numbers."""
    accuracy = {str(Recipe.parse(name)): run for name, run in numbers("views-stacks").items()}
    (times,) = measured("ask-views-cpu-float32")["models"].values()
    timed = {str(Recipe.parse(name)): of for name, of in times.items() if name != "huggingface"}
    return {
        label: [
            (recipe, timed[name]["ratio"]["ttft"], accuracy[name])
            for recipe in recipes
            if (name := str(Recipe.parse(recipe))) in accuracy and name in timed
        ]
        for label, recipes in _CURVES.items()
    }


def equal_time() -> str:
    """Accuracy beside the measured time to the first token, the slowest recipe first."""
    curves = _timed()
    ((_, _, full),) = curves["none"]
    rows = [["recipe", "kept", "TTFT", "images", "minus `none`"]]
    found = [point for own in curves.values() for point in own]
    for recipe, faster, run in sorted(found, key=lambda point: point[1]):
        minus = 100 * run["accuracy_image"] - 100 * full["accuracy_image"]
        kept = f"{100 * run['kept_image']:.0f} %"
        row = [f"`{recipe}`", kept, f"{faster:.2f}×", within(run, "image"), f"{minus:+.1f}"]
        rows.append(row)
    return table(rows)


def time_chart() -> str:
    """The same as a chart."""
    from plotly.graph_objects import Figure, Scatter

    shown = Figure()
    for label, own in _timed().items():
        recipes, faster, runs = zip(*own, strict=True)
        y = [100 * run["accuracy_image"] for run in runs]
        marks = [f"{100 * run['kept_image']:.0f} %" for run in runs]
        shown.add_trace(
            Scatter(x=faster, y=y, name=label, text=marks, mode="lines+markers+text").update(
                textposition="top center", hovertext=recipes, hoverinfo="text+x+y"
            )
        )
    shown.update_layout(
        template="none",
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        height=460,
        legend={"orientation": "h", "y": -0.2},
        xaxis_title="time to the first token: Hugging Face / recipe",
        yaxis_title="accuracy of tiny on images (%)",
    )
    return html_of(shown, "")


def home(part: str) -> str:
    """A figure of the home page: ``tokens``, ``accuracy`` or ``time``."""
    small, *_, large = measured("ask-cpu-bfloat16")["models"].values()
    full, kept = (small[name]["visual_tokens"] for name in ("huggingface", "balanced"))
    slow, fast = (large[name]["ttft"]["median"] for name in ("huggingface", "balanced"))
    found = numbers("fresh")
    runs = [found[str(Recipe.parse(n))] for n in ("balanced", "none", "random:budget=0.22")]
    own, none, random = (f"{pair(run).replace(' /', ' % and')} %" for run in runs)
    return {
        "tokens": f"**{full / kept:.1f}× fewer visual tokens** with the same answer: {full} → "
        f"{kept} on this image.",
        "accuracy": f"**{own} accuracy** on images and videos with {100 * runs[0]['kept']:.0f} % "
        f"of the tokens. The full model has {none}, random patches at the same cost {random}.",
        "time": f"**{slow / fast:.1f}× faster first token** than Hugging Face `generate`: "
        f"{slow:.2f} s → {fast:.2f} s with `balanced` on 2 CPU cores. "
        f"{large['huggingface']['visual_tokens']:,} visual tokens, a LLaVA-NeXT "
        "in the shape of Qwen2-0.5B.",
    }[part]


def static_frames() -> str:
    """Frames that ``static-frames`` encodes, and answers that it changes."""
    found = measured("static-frames-tiny")["rows"]
    recipes = list(dict.fromkeys(row["recipe"] for row in found))
    rows = [["encoded / same answer / right", *(f"`{recipe}`" for recipe in recipes)]]
    for name in dict.fromkeys(row["version"] for row in found):
        own = {row["recipe"]: row for row in found if row["version"] == name}
        shares = [
            " / ".join(f"{100 * own[recipe][key]:.0f} %" for key in ("encoded", "same", "right"))
            for recipe in recipes
        ]
        rows.append([name, *shares])
    return table(rows)


_CURVE = ("what", "where", "count", "list", "moves", "way", "read")


def pocket_curve() -> str:
    """Answers of `pocket` on unseen layouts during its training."""
    path = ROOT / "benchmarks" / "pocket" / "weights" / "curve.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["step"]: line for line in lines if "check_what" in line}
    rows = [["step", *(f"`{name}`" for name in _CURVE)]]
    for step in (50, 100, 200, 400, 800, max(found)):
        rows.append([str(step), *(f"{100 * found[step][f'check_{n}']:.0f} %" for n in _CURVE)])
    return table(rows)


def pocket_answers() -> str:
    """Free answers of `pocket` on unseen layouts."""
    found = {
        name: measured(f"pocket-{name}")["types"]
        for name in ("cpu-float32", "nvidia-h100-80gb-hbm3")
    }
    rows = [["", "on a CPU", "on an H100"]]
    for type_ in dict.fromkeys(type_ for types in found.values() for type_ in types):
        cells = []
        for of in (types.get(type_) for types in found.values()):
            cell = "" if of is None else f"{100 * of['accuracy']:.1f} % of {of['asked']}"
            if of is not None:
                cell += " [{:.0f}, {:.0f}]".format(*(100 * bound for bound in of["interval"]))
            cells.append(cell)
        rows.append([f"`{type_}`", *cells])
    return table(rows)


def pocket_recipes(group: str) -> str:
    """Accuracy of recipes on `pocket` and `tiny`, of one kind of recipes (`_recipe_kind`)."""
    against = dict(_against("pocket", "random"))
    tiny = numbers("positions") | numbers("")
    rows = [["recipe", "kept", "`pocket`", "against `random`", "`tiny`"]]
    for name, run in numbers("pocket", "pocket").items():
        if _recipe_kind(name) != group:
            continue
        own = f"{100 * tiny[name]['accuracy_image']:.1f}" if name in tiny else ""
        kept = f"{100 * run['kept']:.0f} %"
        rows.append([f"`{name}`", kept, within(run, "image"), against.get(name, ""), own])
    return table(rows)


def pocket_types() -> str:
    """Accuracy on `pocket` by type of question, and how wrong numbers of objects are wrong."""
    counted = {row["recipe"]: row for row in measured("pocket-counting")["rows"]}
    kinds = ("what", "where", "list", "empty", "count")
    rows = [["recipe", "kept", *(f"`{kind}`" for kind in kinds), "too high", "too low"]]
    for name, run in numbers("pocket", "pocket").items():
        (*_, stage) = Recipe.parse(name) or (None,)
        kept = getattr(stage, "budget", None) == 0.11 and stage.positions == "keep"
        if (kept and _recipe_kind(name) == "reducers") or name in (
            "none",
            str(Recipe.parse("fast")),
        ):
            own = counted[name]
            cells = [f"{100 * run['types'][f'image/{kind}']['accuracy']:.0f} %" for kind in kinds]
            cells += [f"{100 * own[kind] / own['answers']:.0f} %" for kind in ("high", "low")]
            rows.append([f"`{name}`", f"{100 * run['kept']:.0f} %", *cells])
    return table(rows)


def pocket_presets() -> str:
    """The presets on `pocket`, beside single methods at their budgets."""
    found = numbers("pocket", "pocket")
    methods = ("downsample", "tome", "scope", "hired", "random")
    rows = [["preset", "kept", "`pocket`", *(f"`{method}`" for method in methods)]]
    for name, budget in _PRESETS.items():
        run = found[str(Recipe.parse(name))]
        singles = [found[f"{method}:budget={budget}"] for method in methods]
        cells = [f"{100 * one['accuracy_image']:.1f}" for one in singles]
        rows.append([f"`{name}`", f"{100 * run['kept']:.0f} %", within(run, "image"), *cells])
    return table(rows)


def pocket_videos() -> str:
    """Accuracy of recipes on videos of `pocket`, by type of question."""
    presets = {str(Recipe.parse(name)): name for name in _PRESETS}
    kinds = ("way", "moves", "count")
    rows = [["recipe", "kept", "all", *(f"`{kind}`" for kind in kinds)]]
    for name, run in numbers("pocket-videos", "pocket").items():
        cells = [f"{100 * run['types'][f'video/video-{kind}']['accuracy']:.0f} %" for kind in kinds]
        kept = f"{100 * run['kept']:.0f} %"
        rows.append([f"`{presets.get(name, name)}`", kept, within(run, "video"), *cells])
    return table(rows)


def pocket_cache() -> str:
    """Accuracy of cache methods on `pocket`, of single questions and of later ones in sessions."""
    rows = [["recipe", "cache", "single questions", "later questions of a session"]]
    text = (RESULTS / "pocket-cache" / "report.json").read_text(encoding="utf-8")
    recipes = json.loads(text)["tasks"]["pocket"]["recipes"]
    for name, run in recipes.items():
        if name == "none" or ("@" not in name and _recipe_kind(name) == "cache"):
            single = within(run, "image")
            later = within(recipes[f"{name}@session"], "later_image")
            rows.append([f"`{name}`", f"{100 * run['held_image']:.0f} %", single, later])
    return table(rows)


def _recipe_kind(name: str) -> str:
    recipe = Recipe.parse(name)
    if len(recipe) != 1:
        return "stacks" if recipe else "none"
    if recipe[0].protocol == "drafter":
        return "drafters"
    return "cache" if shrinks_cache(recipe) else "reducers"


def _against(folder: str, other: str) -> Iterator[tuple[str, str]]:
    """Recipes of a report, and the difference to ``other`` on images."""
    text = (RESULTS / folder / "report.md").read_text(encoding="utf-8")
    column = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            column = None
        elif cells[0] == "recipe":
            wanted = [n for n, cell in enumerate(cells) if cell == f"against {other}, images"]
            column = wanted[0] if wanted else None
        elif column is not None and line.startswith("| `"):
            yield cells[0].split("`")[1], cells[column].replace("–", "")


# Mark -> function that returns the table, on README and on the pages of the documentation.
README: dict[str, Callable[[], str]] = {
    "presets": presets,
    "speed": speed,
}
PAGES: dict[str, Callable[[], str]] = {
    "saliency-measured": saliency,
    "vllm-no-caches": partial(served_vllm, "no-caches"),
    "vllm-caches": partial(served_vllm, "caches"),
    "vllm-launches": vllm_launches,
    "serving-beside": served_beside,
    "serving-scaling": served_scaling,
    "serving-first": partial(served_times, "ttft_ms", "time to the first token"),
    "serving-gaps": partial(served_times, "gap_ms", "time between tokens"),
    "pocket-curve": pocket_curve,
    "pocket-answers": pocket_answers,
    "pocket-reducers": partial(pocket_recipes, "reducers"),
    "pocket-types": pocket_types,
    "pocket-presets": pocket_presets,
    "pocket-videos": pocket_videos,
    "pocket-stacks": partial(pocket_recipes, "stacks"),
    "pocket-cache": pocket_cache,
    "launches-requests": launches,
    "launches-towers": tower_calls,
    "recipes-cost": reduce_cost,
    "gpu-answers": gpu_answers,
    "gpu-steps": gpu_steps,
    "gpu-kernels": partial(gpu_kernels, "nvidia-h200"),
    "kernels-h100": partial(gpu_kernels, "nvidia-h100-80gb-hbm3"),
    "presses": presses,
    "passkeys": passkeys,
    "families": runs_where,
    "drafters": drafters,
    "positions": positions,
    "fresh": fresh,
    "attacked": robustness,
    "robustness-changed": changed,
    "guards": guards,
    "verbose": verbose,
    "timings": timings,
    "overhead": overhead,
    "qwen-tower": partial(tower_time, "ask-qwen-tower-cpu-bfloat16"),
    "draws": draws,
    "views": views,
    "static-frames": static_frames,
    "time-crops": partial(tower_time, "ask-views-cpu-float32"),
    "equal-time": equal_time,
    "time-chart": time_chart,
    **{f"home-{part}": partial(home, part) for part in ("tokens", "accuracy", "time")},
    "time-static": partial(tower_time, "ask-static-clip-cpu-bfloat16"),
    "time-moving": partial(tower_time, "ask-moving-clip-cpu-float32"),
}
_MARK = re.compile(r"<!-- table: (\S+) -->")


def filled(page: str) -> str:
    """A page of the documentation with its tables, each in the place of ``<!-- table: NAME -->``.

    Raises
    ------
    ValueError
        For a table that does not exist.
    """

    def made(mark: re.Match[str]) -> str:
        if mark[1] not in PAGES:
            raise ValueError(f"there is no table {mark[1]}; tables are {', '.join(PAGES)}")
        return PAGES[mark[1]]()

    return _MARK.sub(made, page)


def written(text: str, mark: str, table: str) -> str:
    """Return ``text`` with ``table`` between ``<!-- mark -->`` and ``<!-- end -->``."""
    before, found, rest = text.partition(f"<!-- {mark} -->\n")
    if not found:
        raise ValueError(f"the page has no mark <!-- {mark} -->")
    return f"{before}{found}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    for mark, make in README.items():
        text = written(text, mark, make())
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
