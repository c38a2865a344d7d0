"""Tables of accuracies, of the models that ship and of `pocket`; each public function is one."""

from __future__ import annotations

import json
import statistics
from typing import Any

from sources import (
    RESULTS,
    ROOT,
    grid,
    listed,
    measured,
    numbers,
    percent,
    read,
    rows_of,
    table,
    within,
)

from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names
from vlmfast.eval.axes import shrinks_cache, with_field
from vlmfast.eval.results import slug
from vlmfast.eval.summary import unguarded

BUDGETS = (0.33, 0.22, 0.11, 0.05)
_PRESETS = {"faithful": 0.33, "balanced": 0.22, "fast": 0.11}  # budgets of `random` and `hired`


# --- reducers ------------------------------------------------------------------------------------

_SOURCES = {
    "`hired` by attention of CLS": "hired:budget={}",
    "`hired` by attention received": "hired:budget={},saliency=received",
    "`hired` by feature norm": "hired:budget={},saliency=norm",
    "`divprune`": "divprune:budget={}",
    "`random`": "random:budget={}",
}


def saliency_measured() -> str:
    """``hired`` by saliency source, compared with ``divprune`` and ``random``."""
    found = numbers("saliency")
    columns = {percent(budget): budget for budget in BUDGETS}
    return grid(
        "images % / videos %",
        _SOURCES,
        columns,
        lambda recipe, budget: found[recipe.format(budget)]["pair"],
    )


def positions() -> str:
    """Both position policies of the main methods, side by side."""
    kept, compact = numbers(""), numbers("positions")
    methods = ("hired", "visionzip", "flashvid", "scope", "divprune", "random")
    columns = {}
    for budget in (0.22, 0.11):
        columns[f"{percent(budget)}, keep"] = kept, f":budget={budget}"
        columns[f"{percent(budget)}, compact"] = compact, f":positions=compact,budget={budget}"
    return grid(
        "images % / videos %",
        {f"`{method}`": method for method in methods},
        columns,
        lambda method, column: column[0][method + column[1]]["pair"],
    )


def fresh() -> str:
    """What the presets lose on fresh scenes, and what they are above ``random``."""
    pairs = [row for row in rows_of(RESULTS / "fresh" / "report.md") if "against" in row]
    found = []
    for other, label in (("`none`", "minus `none`"), ("`random:", "minus `random`")):
        for name in _PRESETS:
            run = f"`{Recipe.parse(name)}`"
            row = next(
                row
                for row in pairs
                if row["recipe"].startswith(run) and row["against"].startswith(other)
            )
            found.append({**row, "label": f"`{name}` {label}"})
    columns = {"images": "{images, points}", "videos": "{videos, points}"}
    return listed(found, {"points": "{label}", **columns})


def presets() -> str:
    """Accuracy of the presets on fresh scenes, beside ``random`` at their cost."""
    found = numbers("fresh")
    rows = [{**found["none"], "label": "`none`", "compact": (None, None)}]
    for name in _PRESETS:
        recipe = Recipe.parse(name)
        compact = found[str(with_field(recipe, "positions", "compact"))]["pair"].split(" / ")
        rows.append({**found[str(recipe)], "label": f"`{name}`", "compact": compact})
    for method in ("hired", "random"):
        for budget in BUDGETS[1:3]:
            run = found[f"{method}:budget={budget}"]
            draws = f", mean of {run['draws']} draws" if run.get("draws") else ""
            rows.append({**run, "label": f"`{run['recipe']}`{draws}", "compact": (None, None)})
    columns = {"recipe": "{label}", "kept": "{kept:.0f %}", "images": "{image}"}
    columns |= {"videos": "{video}", "images, compact": "{compact[0]}"}
    return listed(rows, {**columns, "videos, compact": "{compact[1]}"})


# Column -> the folders of its methods.
_KINDS = {
    "views": ("views",),
    "vision encoder": ("encoder",),
    "before the LLM": ("frames", "tokens"),
    "LLM layers": ("prefill",),
    "KV cache": ("cache",),
    "drafters": ("drafters",),
}


def families() -> str:
    """How many methods of each kind run on a model family, counted from the full table."""
    lines = rows_of(RESULTS / "families.md")
    support = {row["method"].strip("`"): row for row in lines if "method" in row}
    homes = {name: home.split(".")[-2] for name, home in stage_names().items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in list(support["hired"])[1:]:
        counts = []
        for kinds in _KINDS.values():
            own = [row[family] for name, row in support.items() if homes[name] in kinds]
            run = len(own) - own.count("–")
            counts.append("all" if run == len(own) else f"{run} of {len(own)}")
        alike.setdefault((support["hired"][family], *counts), []).append(family)
    rows = [[", ".join(names), *cells] for cells, names in alike.items()]
    return table([["families", "saliency", *_KINDS], *rows])


# --- attacks -------------------------------------------------------------------------------------

_ATTACKS = {f"attack, {eps}/255": f"@attack-{eps}" for eps in (2, 4, 8)}


def _attacked(task: str = "robustness") -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The recipes of the task ``robustness``, and the numbers of its runs by name."""
    runs = measured("robustness-tiny")["tasks"][task]["recipes"]
    return [name for name in runs if "@" not in name], runs


def attacked() -> str:
    """Accuracy of each recipe on clean, noisy and attacked images."""
    recipes, runs = _attacked()

    def cell(recipe: str, name: str) -> str:
        run = runs.get(name.format(recipe, slug(recipe)))
        return f"{100 * run['accuracy_image']:.1f}" if run else ""

    columns = {"clean": "{0}", "noise, 8/255": "{0}@noise-8"}
    columns |= {name: f"{{0}}{control}" for name, control in _ATTACKS.items()}
    columns["full model, attack, 8/255"] = "none@attack-8-{1}"
    return grid("recipe", {f"`{recipe}`": recipe for recipe in recipes}, columns, cell)


def robustness_changed() -> str:
    """Fraction of the kept tokens that noise and the attack replace, and the paired drop."""
    recipes, runs = _attacked()
    rows = [["recipe"]]
    for eps in (2, 4, 8):
        rows[0] += [f"changed, {eps}/255", "drop"]
    for recipe in recipes[1:]:
        cells = []
        for eps in (2, 4, 8):
            noise, attack = (runs[f"{recipe}@{kind}-{eps}"] for kind in ("noise", "attack"))
            cells.append(" / ".join(percent(of["metrics"]["changed"]) for of in (noise, attack)))
            cells.append(_points(attack["gaps_image"][recipe]))
        rows.append([f"`{recipe}`", *cells])
    return table(rows)


def guards() -> str:
    """What guards win back."""
    recipes, runs = _attacked()
    rows = [["recipe", "passes", "clean", *_ATTACKS]]
    for recipe in recipes:
        base = unguarded(recipe)
        if base != recipe:
            controls = ("", *_ATTACKS.values())
            gaps = [runs[f"{recipe}{of}"]["gaps_image"][f"{base}{of}"] for of in controls]
            passes = 1 + max(getattr(stage, "guard", 0) for stage in Recipe.parse(recipe))
            rows.append([f"`{recipe}`", str(passes), *map(_points, gaps)])
    return table(rows)


def verbose() -> str:
    """Lengths of answers on verbose images."""
    recipes, runs = _attacked("robustness-verbose")

    def cell(recipe: str, control: str) -> str:
        of = runs[f"{recipe}{control}"]["metrics"]
        return f"{of['tokens']:.1f} / {of['longest']} ({percent(of['at_limit'])})"

    columns = {"clean": "", "noise, 8/255": "@noise-8", "verbose, 8/255": "@verbose-8"}
    return grid("recipe", {f"`{recipe}`": recipe for recipe in recipes}, columns, cell)


def _points(gap: list[float]) -> str:
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in gap))


# --- views and time ------------------------------------------------------------------------------


def draws() -> str:
    """How good the recipes are that the race chooses on drawn scenes."""
    rows = []
    for objective in ("ttft", "memory"):
        about = measured("tune-tiny")[objective]
        losses = [100 * one["loss_on_rest"] for one in about["each"]]
        found = {"loss": statistics.median(losses), "largest": max(losses), "name": objective}
        cost = statistics.median(one["cost"] for one in about["each"])
        rows.append({**about, **found, "cost": cost})
    columns = {
        "`--for`": "`{name}`",
        "within the limit": "{within_bound} of {draws}",
        "certified": "{certified} of {draws}",
        "loss, median": "{loss:+.1f}",
        "loss, largest": "{largest:+.1f}",
        "cost, median": "{cost:.0f %}",
        "times the cheapest, median": "{median_cost_over_cheapest:.2f}",
    }
    return listed(rows, columns)


def views() -> str:
    """Accuracy with ``crops``, beside reducers of all crops, by the tokens kept."""
    runs = numbers("views").values()
    columns = {
        "recipe": "`{recipe}`",
        "kept, images": "{kept_image:.0f %}",
        "images": "{image}",
        "kept, videos": "{kept_video:.0f %}",
        "videos": "{video}",
    }
    ranked = sorted(runs, key=lambda run: (_kind(run["recipe"]), -run["kept_image"]))
    return listed(ranked, columns)


def _kind(recipe: str) -> int:
    """The order of recipes: the full model, crops, crops and hired, others."""
    kinds = ("none", "crops", "hired", "random")
    stages = [stage.partition(":")[0] for stage in recipe.split("+")]
    return 2 * kinds.index(stages[0]) + len(stages) - 1


def equal_time() -> str:
    """Accuracy beside the ratio of times to the first token, the slowest recipe first."""
    accuracy = {str(Recipe.parse(name)): run for name, run in numbers("views-stacks").items()}
    full, found = 100 * accuracy["none"]["accuracy_image"], []
    (times,) = measured("ask-views-cpu-float32")["models"].values()
    for recipe, row in times.items():
        if recipe != "huggingface":
            run = accuracy[str(Recipe.parse(recipe))]
            about = {"minus": 100 * run["accuracy_image"] - full, "faster": row["ratio"]["ttft"]}
            found.append({**run, **about, "recipe": recipe})
    columns = {
        "recipe": "`{recipe}`",
        "kept": "{kept_image:.0f %}",
        "TTFT": "{faster:.2f}×",
        "images": "{image}",
        "minus `none`": "{minus:+.1f}",
    }
    return listed(sorted(found, key=lambda run: run["faster"]), columns)


def home(part: str) -> str:
    """A figure of the home page: ``tokens``, ``accuracy`` or ``time``."""
    small, *_, large = measured("ask-cpu-bfloat16")["models"].values()
    full, kept = (small[name]["visual_tokens"] for name in ("huggingface", "balanced"))
    slow, fast = (large[name]["ttft"]["median"] for name in ("huggingface", "balanced"))
    found = numbers("fresh")
    runs = [found[str(Recipe.parse(n))] for n in ("balanced", "none", "random:budget=0.22")]
    own, none, random = (f"{run['pair'].replace(' /', ' % and')} %" for run in runs)
    return {
        "tokens": f"**{full / kept:.1f}× fewer visual tokens** with the same answer: {full} → "
        f"{kept} on this image.",
        "accuracy": f"**{own} accuracy** on images and videos with {percent(runs[0]['kept'])} "
        f"of the tokens. The full model has {none}, random patches at the same cost {random}.",
        "time": f"**{slow / fast:.1f}× faster first token** than Hugging Face `generate`: "
        f"{slow:.2f} s → {fast:.2f} s with `balanced` on 2 CPU cores. "
        f"{large['huggingface']['visual_tokens']:,} visual tokens, a LLaVA-NeXT "
        "in the shape of Qwen2-0.5B.",
    }[part]


def static_frames() -> str:
    """Frames that ``static-frames`` encodes, and answers that it changes."""
    found = {(row["version"], row["recipe"]): row for row in measured("static-frames-tiny")["rows"]}
    versions, recipes = (dict.fromkeys(names) for names in zip(*found, strict=True))

    def cell(version: str, recipe: str) -> str:
        row = found[version, recipe]
        return " / ".join(percent(row[key]) for key in ("encoded", "same", "right"))

    return grid(
        "encoded / same answer / right",
        {version: version for version in versions},
        {f"`{recipe}`": recipe for recipe in recipes},
        cell,
    )


# --- pocket --------------------------------------------------------------------------------------


def pocket_curve() -> str:
    """Answers of `pocket` on unseen layouts during its training."""
    path = ROOT / "benchmarks" / "pocket" / "weights" / "curve.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["step"]: line for line in lines if "check_what" in line}
    types = ("what", "where", "count", "list", "moves", "way", "read")
    columns = {f"`{name}`": f"{{check_{name}:.0f %}}" for name in types}
    steps = (50, 100, 200, 400, 800, max(found))
    return listed((found[step] for step in steps), {"step": "{step}", **columns})


def pocket_recipes(group: str) -> str:
    """Accuracy of recipes on `pocket` and `tiny`, of one kind of recipes (`_recipe_kind`)."""
    against = {
        row["recipe"].split("`")[1]: row["images, points"].replace("–", "")
        for row in rows_of(RESULTS / "pocket" / "report.md")
        if row.get("against", "").startswith("`random")
    }
    tiny = numbers("positions") | numbers("")
    rows = []
    for name, run in numbers("pocket", "pocket").items():
        if _recipe_kind(name) == group:
            own = 100 * tiny[name]["accuracy_image"] if name in tiny else None
            rows.append({**run, "against": against.get(name, ""), "own": own})
    columns = {
        "recipe": "`{recipe}`",
        "kept": "{kept:.0f %}",
        "`pocket`": "{image}",
        "against `random`": "{against}",
        "`tiny`": "{own:.1f}",
    }
    return listed(rows, columns)


def pocket_types() -> str:
    """Accuracy on `pocket` by type of question, and how wrong numbers of objects are wrong."""
    counted = {row["recipe"]: row for row in measured("pocket-counting")["rows"]}
    rows = []
    for name, run in numbers("pocket", "pocket").items():
        (*_, stage) = Recipe.parse(name) or (None,)
        kept = getattr(stage, "budget", None) == 0.11 and stage.positions == "keep"
        if (kept and _recipe_kind(name) == "reducers") or name in (
            "none",
            str(Recipe.parse("fast")),
        ):
            wrong = {kind: counted[name][kind] / counted[name]["answers"] for kind in _WRONG}
            rows.append({**run, **wrong})
    kinds = ("what", "where", "list", "empty", "count")
    columns = {f"`{kind}`": f"{{types[image/{kind}][accuracy]:.0f %}}" for kind in kinds}
    columns |= {f"too {kind}": f"{{{kind}:.0f %}}" for kind in _WRONG}
    return listed(rows, {"recipe": "`{recipe}`", "kept": "{kept:.0f %}", **columns})


_WRONG = ("high", "low")


def pocket_presets() -> str:
    """The presets on `pocket`, beside single methods at their budgets."""
    found = numbers("pocket", "pocket")
    methods = ("downsample", "tome", "scope", "hired", "random")
    rows = []
    for name, budget in _PRESETS.items():
        singles = {of: found[f"{of}:budget={budget}"]["pair"] for of in methods}
        rows.append({**found[str(Recipe.parse(name))], **singles, "preset": name})
    columns = {"preset": "`{preset}`", "kept": "{kept:.0f %}", "`pocket`": "{image}"}
    return listed(rows, columns | {f"`{method}`": f"{{{method}}}" for method in methods})


def pocket_videos() -> str:
    """Accuracy of recipes on videos of `pocket`, by type of question."""
    presets = {str(Recipe.parse(name)): name for name in _PRESETS}
    runs = numbers("pocket-videos", "pocket").items()
    rows = [{**run, "name": presets.get(name, name)} for name, run in runs]
    columns = {"recipe": "`{name}`", "kept": "{kept:.0f %}", "all": "{video}"}
    for kind in ("way", "moves", "count"):
        columns[f"`{kind}`"] = f"{{types[video/video-{kind}][accuracy]:.0f %}}"
    return listed(rows, columns)


def pocket_cache() -> str:
    """Accuracy of cache methods on `pocket`, of single questions and of later ones in sessions."""
    found = read(RESULTS / "pocket-cache" / "report.json")["tasks"]["pocket"]["recipes"]
    rows = [
        {
            **run,
            "single": within(run, "accuracy_image"),
            "later": within(found[f"{name}@session"], "accuracy_later_image"),
        }
        for name, run in found.items()
        if name == "none" or ("@" not in name and _recipe_kind(name) == "cache")
    ]
    columns = {
        "recipe": "`{recipe}`",
        "cache": "{held_image:.0f %}",
        "single questions": "{single}",
        "later questions of a session": "{later}",
    }
    return listed(rows, columns)


def _recipe_kind(name: str) -> str:
    recipe = Recipe.parse(name)
    if len(recipe) != 1:
        return "stacks" if recipe else "none"
    if recipe[0].protocol == "drafter":
        return "drafters"
    return "cache" if shrinks_cache(recipe) else "reducers"
