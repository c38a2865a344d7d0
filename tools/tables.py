"""Write tables of README and the documentation from the committed results.

``python tools/tables.py`` writes each table between its markers. A test checks that they match
the reports.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmfast.core.display import markdown_table
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names
from vlmfast.eval.axes import shrinks_cache, with_field
from vlmfast.eval.results import slug
from vlmfast.eval.summary import unguarded

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
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


def numbers(folder: str, task: str = "shapes") -> dict[str, dict[str, Any]]:
    """The numbers of one report by recipe."""
    text = (RESULTS / folder / "report.json").read_text(encoding="utf-8")
    recipes = json.loads(text)["tasks"][task]["recipes"]
    return {run["recipe"]: run for run in recipes.values() if run["control"] is None}


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    return markdown_table(rows[0], rows[1:])


def saliency() -> str:
    """``hired`` by saliency source, compared with ``divprune`` and ``random``."""
    found = numbers("saliency")
    rows = [["images % / videos %", *(f"{100 * budget:.0f} %" for budget in BUDGETS)]]
    for name, recipe in {**_SOURCES, **_COMPARED}.items():
        label = f"`hired` by {name}" if name in _SOURCES else name
        rows.append([label, *(_pair(found[recipe.format(budget)]) for budget in BUDGETS)])
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
            cells.append(_pair(kept[f"{method}:budget={budget}"]))
            cells.append(_pair(compact[f"{method}:positions=compact,budget={budget}"]))
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


def _pair(run: dict[str, Any]) -> str:
    return f"{100 * run['accuracy_image']:.1f} / {100 * run['accuracy_video']:.1f}"


def presets() -> str:
    """Accuracy of the presets on fresh scenes, beside ``random`` at their cost."""
    found = numbers("fresh")
    rows = [["recipe", "kept", "images", "videos", "images, compact", "videos, compact"]]
    rows.append(["`none`", "100 %", *_both(found["none"]), "", ""])
    for name in _PRESETS:
        recipe = Recipe.parse(name)
        run = found[str(recipe)]
        compact = _pair(found[str(with_field(recipe, "positions", "compact"))]).split(" / ")
        rows.append([f"`{name}`", f"{100 * run['kept']:.0f} %", *_both(run), *compact])
    for method in ("hired", "random"):
        for budget in _PRESETS.values():
            name = f"{method}:budget={budget}"
            run = found[name]
            draws = f", mean of {run['draws']} draws" if run.get("draws") else ""
            rows.append([f"`{name}`{draws}", f"{100 * run['kept']:.0f} %", *_both(run), "", ""])
    return table(rows)


def speed() -> str:
    """The short table of README: what a recipe saves, as ratios to Hugging Face."""
    rows = [["model, recipe", "visual tokens", "TTFT", "prefill", "per token", "peak memory"]]
    for model, variants in _measured("ask-cpu-bfloat16")["models"].items():
        for recipe, row in variants.items():
            cells = [f"`{model}`, {recipe}", f"{row['visual_tokens']:,}"]
            for metric in ("ttft", "prefill", "tpot", "memory"):
                scale, unit = (1e-6, "MB") if metric == "memory" else (1e3, "ms")
                value = row[metric]["median"] * scale
                cell = f"{value:,.{0 if value >= 100 else 1}f} {unit}"
                if recipe != "huggingface":
                    cell += f" ({row['ratio'][metric]:.2f}×)"
                cells.append(cell)
            rows.append(cells)
    return table(rows)


def _script(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # where its dataclasses look for their annotations
    sys.path.insert(0, str(ROOT / folder))  # scripts import each other
    try:
        spec.loader.exec_module(script)
    finally:
        sys.path.remove(str(ROOT / folder))
    return script


def timings() -> str:
    """Every measure of ``benchmarks/ask.py``, with quartiles."""
    ask, tables = _script("benchmarks", "ask"), []
    for name, rows in _measured("ask-cpu-bfloat16")["models"].items():
        tables.append(ask.markdown(name, rows))
        if all("media" in row for row in rows.values()):
            tables.append(ask.parts_table(name, rows))
    return "\n\n".join(tables)


def runs_where() -> str:
    """How many methods of each kind run on a model family, counted from docs/models.md."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
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
    runs = _measured("robustness-tiny")["tasks"][task]["recipes"]
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
    found = _measured("tune-tiny")
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
        image, video = _both(run)
        rows.append([f"`{name}`", kept[0], image, kept[1], video])
    return table(rows)


def _kind(recipe: str) -> int:
    """The order of recipes: the full model, crops, crops and hired, others."""
    kinds = ("none", "crops", "hired", "random")
    stages = [stage.partition(":")[0] for stage in recipe.split("+")]
    return 2 * kinds.index(stages[0]) + len(stages) - 1


# Of README: the full model, a reducer, merging inside the tower, and fewer crops.
_TOWERS = (
    "none",
    "hired:budget=0.22",
    "tome:budget=0.5+divprune:budget=0.44",
    "tome:budget=0.33+divprune:budget=0.33",
    "crops:0.5+hired:budget=0.4",
)


def equal_time(*recipes: str) -> str:
    """Accuracy beside the measured time to the first token, the slowest recipe first."""
    plot = _script("tools", "ttft_png")
    every = ["none", *(p.recipe for own in plot.curves().values() for p in own)]
    found = plot.points(list(recipes) or every)
    rows = [["recipe", "kept", "TTFT", "images", "minus `none`"]]
    for p in sorted(found, key=lambda point: point.faster):
        rows.append(
            [
                f"`{p.recipe}`",
                f"{100 * p.kept:.0f} %",
                f"{p.faster:.2f}×",
                f"{p.accuracy:.1f} [{p.low:.1f}, {p.high:.1f}]",
                f"{p.accuracy - found[0].accuracy:+.1f}",
            ]
        )
    return table(rows)


def overhead() -> str:
    """CPU time of `none` and of Hugging Face."""
    return _script("benchmarks", "overhead").markdown(_measured("overhead-tiny-cpu")["row"])


def tower_time(name: str) -> str:
    """The parts of the time to the first token of a run of ``benchmarks/ask.py``."""
    ((model, rows),) = _measured(name)["models"].items()
    return _script("benchmarks", "ask").parts_table(model, rows)


def reduce_cost() -> str:
    """What each method costs and saves before the first token."""
    return _script("benchmarks", "reduce").table(_measured("reduce-cpu-bfloat16")["rows"])


def static_frames() -> str:
    """Frames that ``static-frames`` encodes, and answers that it changes."""
    found = _measured("static-frames-tiny")["rows"]
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


def served_vllm(setting: str) -> str:
    """Answers per second of this server and of vLLM's, with and without a recipe."""
    found, clients = _loads(f"serve-vllm-{setting}-cpu-float32")
    rows = [["answers/s (median TTFT)", *map(_clients, clients)]]
    for server, loads in found.items():
        name = server if server.startswith("vllm") else f"vlmfast serve {server}"
        cells = []
        for n in clients:
            rate, first = loads[n]["answers_per_s"]["median"], loads[n]["ttft_ms"]["p50"]
            cells.append(f"{rate:.2f} ({first / 1e3:.2f} s)")
        rows.append([f"`{name}`", *cells])
    return table(rows)


def _served() -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in _measured("serve-cpu-bfloat16")["rows"]}


def _quartiles(row: dict[str, Any]) -> str:
    return f"{row['median']:.2f} [{row['q1']:.2f}, {row['q3']:.2f}]"


def _clients(n: int) -> str:
    return f"{n} client{'s' * (n > 1)}"


def _loads(
    name: str = "serve-cpu-bfloat16",
) -> tuple[dict[str, dict[int, dict[str, Any]]], list[int]]:
    """Loads of a result of ``benchmarks/serve.py`` by server and clients, and these numbers."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for load in _measured(name)["loads"]:
        found.setdefault(load["server"], {})[load["clients"]] = load
    return found, list(next(iter(found.values())))


def served_beside() -> str:
    """Answers per second of this server over those of ``transformers serve``."""
    found, (loads, clients) = _served(), _loads()
    other = "transformers serve"
    rows = [[f"answers per second over `{other}`", *map(_clients, clients)]]
    for name in loads:
        if name != other:
            what = f"answers per second, `{name}` over `{other}`"
            cells = (found[f"{what}, {_clients(n)}"] for n in clients)
            rows.append([f"`{name}`", *map(_quartiles, cells)])
    shares = (
        found[f"share of answers equal to those of `{other}`, {_clients(n)}"]["ratios"]
        for n in clients
    )
    cells = (f"{100 * sum(share) / len(share):.0f} %" for share in shares)
    rows.append(["share of answers of `none` that are equal", *cells])
    return table(rows)


def served_scaling() -> str:
    """Answers per second of several clients over those of one."""
    found, (loads, clients) = _served(), _loads()
    many = [n for n in clients if n > 1]
    rows = [["answers per second over 1 client", *map(_clients, many)]]
    for name in loads:
        cells = []
        for n in many:
            start = f"answers per second, {n} clients over 1, `{name}`"
            cells.append(_quartiles(next(row for what, row in found.items() if start in what)))
        rows.append([f"`{name}`", *cells])
    return table(rows)


def served_times(key: str, what: str) -> str:
    """Percentiles of a time in milliseconds."""
    loads, clients = _loads()
    rows = [[f"{what}, ms", *map(_clients, clients)]]
    for name, load in loads.items():
        times = ((load[n][key][p] for p in ("p50", "p95", "p99")) for n in clients)
        rows.append([f"`{name}`", *(" / ".join(f"{x:.0f}" for x in own) for own in times)])
    return table(rows)


# Methods of `benchmarks/compare_presses.py` in the order of the table, those of a kind together.
_PRESSES = (
    ("vlmfast", "snapkv"),
    ("vlmfast", "snapkv:window=64,kernel=5,pool=avg"),
    ("kvpress", "SnapKV"),
    ("vlmfast", "pyramidkv"),
    ("vlmfast", "pyramidkv:window=64,kernel=5,pool=avg"),
    ("kvpress", "PyramidKV, budgets of vlmfast"),
    ("kvpress", "PyramidKV"),
    ("vlmfast", "streamingllm"),
    ("kvpress", "StreamingLLM, rotated"),
    ("kvpress", "StreamingLLM"),
    ("vlmfast", "h2o:decode=false"),
    ("vlmfast", "h2o:decode=false,recent=0"),
    ("vlmfast", "h2o:decode=false,recent=0,average=true"),
    ("kvpress", "ObservedAttention"),
    ("vlmfast", "cake"),
    ("vlmfast", "vlcache"),
    ("vlmfast", "lookm"),
    ("kvpress", "ExpectedAttention"),
    ("kvpress", "TOVA"),
    ("kvpress", "Knorm"),
    ("kvpress", "Random"),
    ("vlmfast", "snapkv, all layers"),
)


def presses() -> str:
    """KL divergence, equal first tokens and perplexity of cache methods beside those of kvpress."""

    def cell(line: dict[str, Any]) -> str:
        kept = f" ({100 * line['slots']:.0f} %)" if line["slots"] < 0.98 * line["keep"] else ""
        perplexity = math.exp(line["nll"])
        return f"{line['kl']:.3f} / {100 * line['top1']:.0f} % / {perplexity:.1f}{kept}"

    return _pressed("KL / same top-1 token / perplexity", cell)


def passkeys() -> str:
    """Passkeys that each method still finds."""

    def cell(line: dict[str, Any]) -> str:
        return f"{10 * line['passkey texts'] * line['passkeys']:.0f}"

    return _pressed("passkeys found", cell)


def _pressed(title: str, cell: Callable[[dict[str, Any]], str]) -> str:
    """A row for each method and a column for each fraction of slots, over all prefixes."""
    lines = [line for line in _presses()["lines"] if line["prefix"] is None]
    found = {(line["side"], line["method"], line["keep"]): line for line in lines}
    keeps = sorted({line["keep"] for line in lines if line["method"] != "none"}, reverse=True)
    rows = [[title, *(f"{100 * keep:.0f} % of the slots" for keep in keeps)]]
    for side, method in _PRESSES:
        rows.append([_press(side, method), *(cell(found[side, method, keep]) for keep in keeps)])
    return table(rows)


def _press(side: str, method: str) -> str:
    name, comma, rest = method.partition(", ")
    return f"`{name}`{comma}{rest}" if side == "vlmfast" else f"kvpress {method}"


def presses_cost() -> str:
    """Time of a prefill over that of the same library without compression, and peak memory."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for line in _presses()["cost"]:
        found.setdefault((line["side"], line["method"]), {})[line["prefix"]] = line
    prefixes = list(next(iter(found.values())))
    rows = [["prefill", *(f"{n:,} tokens" for n in prefixes)]]
    full = (("vlmfast", "none"), ("kvpress", "none"))
    for side, method in (*full, *_PRESSES):
        label = f"{side}, full" if method == "none" else _press(side, method)
        cells = []
        for n in prefixes:
            line = found[side, method][n]
            cells.append(
                f"{line['over full']:.2f}×, {line['wall']:.1f} s, {line['peak'] / 1e6:.0f} MB"
            )
        rows.append([label, *cells])
    return table(rows)


def drafters() -> str:
    """Accepted tokens and speed of drafters on the same texts."""
    rows = [["drafter", "accepted tokens per forward pass", "speed", "same tokens as without"]]
    for line in _presses()["drafts"]:
        if line["method"] != "none":
            same = f"{line['same']} of {line['documents']}"
            numbers = f"{line['accepted per pass']:.2f}", f"{line['speedup']:.2f}×"
            rows.append([f"`{line['method']}`", *numbers, same])
    return table(rows)


def _presses() -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "presses-gemma3-270m.json"
    return json.loads(path.read_text(encoding="utf-8"))


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
        name: _measured(f"pocket-{name}")["types"]
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
        rows.append([f"`{name}`", kept, _within(run, "image"), against.get(name, ""), own])
    return table(rows)


def pocket_types() -> str:
    """Accuracy on `pocket` by type of question, and how wrong numbers of objects are wrong."""
    counted = {row["recipe"]: row for row in _measured("pocket-counting")["rows"]}
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
        rows.append([f"`{name}`", f"{100 * run['kept']:.0f} %", _within(run, "image"), *cells])
    return table(rows)


def pocket_videos() -> str:
    """Accuracy of recipes on videos of `pocket`, by type of question."""
    presets = {str(Recipe.parse(name)): name for name in _PRESETS}
    kinds = ("way", "moves", "count")
    rows = [["recipe", "kept", "all", *(f"`{kind}`" for kind in kinds)]]
    for name, run in numbers("pocket-videos", "pocket").items():
        cells = [f"{100 * run['types'][f'video/video-{kind}']['accuracy']:.0f} %" for kind in kinds]
        kept = f"{100 * run['kept']:.0f} %"
        rows.append([f"`{presets.get(name, name)}`", kept, _within(run, "video"), *cells])
    return table(rows)


def pocket_cache() -> str:
    """Accuracy of cache methods on `pocket`, of single questions and of later ones in sessions."""
    rows = [["recipe", "cache", "single questions", "later questions of a session"]]
    text = (RESULTS / "pocket-cache" / "report.json").read_text(encoding="utf-8")
    recipes = json.loads(text)["tasks"]["pocket"]["recipes"]
    for name, run in recipes.items():
        if name == "none" or ("@" not in name and _recipe_kind(name) == "cache"):
            single = _within(run, "image")
            later = _within(recipes[f"{name}@session"], "later_image")
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


def gpu_answers() -> str:
    """Whole answers on a GPU, compared with Hugging Face's at the same batch size."""
    report = _measured("end_to_end-llava-next-7b-nvidia-h200")
    head = ["recipe", "visual tokens", "first token", "prefill", "tokens/s", "KV cache", "memory"]
    rows = [[f"{report['settings']['model']}, {report['device']}", *head[1:]]]
    base = report["parts"]["hf sdpa | 1"]
    for key, row in report["parts"].items():
        name, batch = key.rsplit(" | ", 1)
        if batch != "1" or not row["check"]["passed"]:
            continue
        first, rate = f"{1e3 * row['first']:.0f} ms", f"{row['rate']:.0f}"
        parts = row["parts"]
        if row is not base:
            first += f" ({base['first'] / row['first']:.2f}x)"
            rate += f" ({row['rate'] / base['rate']:.2f}x)"
        rows.append(
            [
                "Hugging Face `generate`" if row is base else f"`{name}`",
                f"{parts.get('visual_tokens', 2928):,.0f}",
                first,
                f"{1e3 * parts['prefill']:.0f} ms" if parts else "",
                rate,
                f"{parts['kv_bytes'] / 1e6:,.0f} MB" if parts else "",
                f"{row['memory'] / 1e9:.1f} GB",
            ]
        )
    return table(rows)


def gpu_steps() -> str:
    """Decode steps on a GPU, and the least time in which their bytes can be read."""
    found: dict[str, dict[str, float]] = {}
    for row in _measured("gpu_hour-nvidia-h200")["rows"]:
        what, _, name = row["what"].partition(": ")
        if row["part"] == "step" and what.count(" | ") == 2:
            found.setdefault(what, {})[name] = row["value"]
    rows = [["model", "recipe", "rows", "step", "floor", "floor over step", "launches per layer"]]
    for what, values in found.items():
        model, recipe, batch = what.split(" | ")
        rows.append(
            [
                model,
                f"`{recipe}`",
                batch.removeprefix("batch "),
                f"{values['step, ms']:.2f} ms",
                f"{values['floor, ms']:.2f} ms",
                f"{100 * values['floor over step']:.0f} %",
                f"{values['launches of the step over its layers']:.1f}",
            ]
        )
    return table(rows)


def gpu_kernels(gpu: str) -> str:
    """Kernels on a GPU at LLaVA-NeXT 7B's shape."""
    rows = [["kernel", "time", "floor", "reference", "PyTorch's own"]]
    for key, row in _measured(f"kernels-{gpu}")["rows"].items():
        name, shape = key.rsplit(" | ", 1)
        if shape != "B" or not row["check"]["passed"] or not row["floor"]:
            continue
        other = next(((k, v) for k, v in row["others"].items() if "time" in v), None)
        rows.append(
            [
                name,
                f"{1e6 * row['time']:.0f} us",
                f"{1e6 * row['floor']:.1f} us",
                f"{1e6 * row['reference']['time']:,.0f} us",
                "" if other is None else f"{1e6 * other[1]['time']:.0f} us, {other[0]}",
            ]
        )
    return table(rows)


def launches() -> str:
    """Launches and reads of a request under each recipe, and to its first token in earlier code."""
    *before, now = [
        _by_recipe(label["parts"]) for label in _measured("launches")["labels"].values()
    ]
    rows = [["recipe", "layer of prefill", "first token", "before", "decode step"]]
    for recipe, request in now.items():
        then = [_launches(known[recipe]["first_token"]) for known in before]
        first, step = _launches(request["first_token"]), _launches(request["step"])
        rows.append([f"`{recipe}`", _launches(*request["layers"]), first, *then, step])
    if not before:
        rows[0].remove("before")
    return table(rows)


def _by_recipe(parts: dict[str, Any]) -> dict[str, Any]:
    shipped, shape = (parts[name]["requests"] for name in ("tiny", "llava-next"))
    own = {request["recipe"]: request for request in shape}
    return own | {r["recipe"]: r for r in shipped if r["recipe"] not in own}


def _launches(*costs: dict[str, Any]) -> str:
    """Launches and reads; of several parts the most."""
    most = max(x["launches"] for x in costs), max(sum(x["reads"].values()) for x in costs)
    return f"{most[0]:,} / {most[1]}"


def tower_calls() -> str:
    """Calls of attention in Qwen2.5-VL's tower, by size of the image."""
    labels = [label["parts"] for label in _measured("launches")["labels"].values()]
    rows = [["image", "calls of attention", "launches", "calls before"]]
    for name, part in labels[-1].items():
        if not name.startswith("qwen2.5-vl"):
            continue
        sums = [_tower(label[name]) for label in labels]
        width, height = part["image"]
        calls, launched = sums[-1]
        rows.append([f"{width} x {height}", f"{calls:,}", f"{launched:,}"])
        rows[-1] += [f"{calls:,}" for calls, _ in sums[:-1]]
    if len(labels) == 1:
        rows[0].remove("calls before")
    return table(rows)


def _tower(part: dict[str, Any]) -> tuple[int, int]:
    """Calls of attention and launches in all blocks."""
    (request,) = part["requests"]
    sizes = [(block["to"] - block["from"] + 1, block) for block in request["blocks"]]
    return (
        sum(n * block["attention"] for n, block in sizes),
        sum(n * block["launches"] for n, block in sizes),
    )


def _measured(name: str) -> dict[str, Any]:
    """A result file of ``benchmarks``."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _within(run: dict[str, Any], kind: str) -> str:
    low, high = run[f"accuracy_{kind}_ci"]
    return f"{100 * run[f'accuracy_{kind}']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _both(run: dict[str, Any]) -> list[str]:
    return [_within(run, kind) for kind in ("image", "video")]


# (page, mark) -> function that returns the table.
TABLES = {
    ("docs/saliency.md", "measured"): saliency,
    ("docs/scaling.md", "vllm-no-caches"): partial(served_vllm, "no-caches"),
    ("docs/scaling.md", "vllm-caches"): partial(served_vllm, "caches"),
    ("docs/serving.md", "beside"): served_beside,
    ("docs/serving.md", "scaling"): served_scaling,
    ("docs/serving.md", "first"): partial(served_times, "ttft_ms", "time to the first token"),
    ("docs/serving.md", "gaps"): partial(served_times, "gap_ms", "time between tokens"),
    ("docs/serving.md", "whole"): partial(served_times, "total_ms", "time to the end"),
    ("docs/pocket.md", "curve"): pocket_curve,
    ("docs/pocket.md", "answers"): pocket_answers,
    ("docs/pocket.md", "reducers"): partial(pocket_recipes, "reducers"),
    ("docs/pocket.md", "types"): pocket_types,
    ("docs/pocket.md", "presets"): pocket_presets,
    ("docs/pocket.md", "videos"): pocket_videos,
    ("docs/pocket.md", "stacks"): partial(pocket_recipes, "stacks"),
    ("docs/pocket.md", "cache"): pocket_cache,
    ("docs/launches.md", "requests"): launches,
    ("docs/launches.md", "towers"): tower_calls,
    ("docs/recipes.md", "cost"): reduce_cost,
    ("docs/gpu.md", "answers"): gpu_answers,
    ("docs/gpu.md", "steps"): gpu_steps,
    ("docs/gpu.md", "kernels"): partial(gpu_kernels, "nvidia-h200"),
    ("docs/gpu.md", "kernels-h100"): partial(gpu_kernels, "nvidia-h100-80gb-hbm3"),
    ("docs/presses.md", "presses"): presses,
    ("docs/presses.md", "passkeys"): passkeys,
    ("docs/presses.md", "cost"): presses_cost,
    ("docs/presses.md", "drafters"): drafters,
    ("docs/accuracy.md", "positions"): positions,
    ("docs/accuracy.md", "fresh"): fresh,
    ("docs/robustness.md", "attacked"): robustness,
    ("docs/robustness.md", "changed"): changed,
    ("docs/robustness.md", "guards"): guards,
    ("docs/robustness.md", "verbose"): verbose,
    ("docs/speed.md", "timings"): timings,
    ("docs/speed.md", "overhead"): overhead,
    ("docs/tune.md", "draws"): draws,
    ("docs/views.md", "views"): views,
    ("docs/views.md", "static-frames"): static_frames,
    ("docs/views.md", "time-crops"): partial(tower_time, "ask-views-cpu-float32"),
    ("docs/views.md", "equal-time"): equal_time,
    ("docs/views.md", "time-static"): partial(tower_time, "ask-static-clip-cpu-bfloat16"),
    ("docs/views.md", "time-moving"): partial(tower_time, "ask-moving-clip-cpu-float32"),
    ("README.md", "presets"): presets,
    ("README.md", "speed"): speed,
    ("README.md", "towers"): partial(equal_time, *_TOWERS),
    ("README.md", "families"): runs_where,
}


def written(text: str, mark: str, table: str) -> str:
    """Return ``text`` with ``table`` between ``<!-- mark -->`` and ``<!-- end -->``."""
    before, found, rest = text.partition(f"<!-- {mark} -->\n")
    if not found:
        raise ValueError(f"the page has no mark <!-- {mark} -->")
    return f"{before}{found}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def main() -> None:
    for (page, mark), make in TABLES.items():
        path = ROOT / page
        text = written(path.read_text(encoding="utf-8"), mark, make())
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
