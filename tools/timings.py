"""Tables of times, launches and memory, and those beside other libraries."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

from sources import ROOT, measured, script, table

PARTS = ("first", "per token")


def speed() -> str:
    """The short table of README: what a recipe saves, as ratios to Hugging Face."""
    rows = [["model, recipe", "visual tokens", "TTFT", "prefill", "per token", "peak memory"]]
    for model, variants in measured("ask-cpu-bfloat16")["models"].items():
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


def timings() -> str:
    """Every measure of ``benchmarks/ask.py``, with quartiles."""
    ask, tables = script("benchmarks", "ask"), []
    for name, rows in measured("ask-cpu-bfloat16")["models"].items():
        tables.append(ask.markdown(name, rows))
        if all("media" in row for row in rows.values()):
            tables.append(ask.parts_table(name, rows))
    return "\n\n".join(tables)


def overhead() -> str:
    """CPU time of `none` and of Hugging Face."""
    rows = [["model", "pairs", "CPU time", "Hugging Face", "`none`", "ratio"]]
    files = {"tiny": PARTS, "qwen2-0.5b": PARTS[:1], "qwen2-0.5b-tokens": PARTS[1:]}
    for name, parts in files.items():
        result = measured(f"overhead-{name}-cpu")
        for part in parts:
            found, row = result["row"][part], [f"`{result['model']}`", str(result["row"]["pairs"])]
            row += [part, *(f"{1e3 * fmean(x):,.1f} ms" for x in found["seconds"].values())]
            ratio = found["ratio"]
            row.append(f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]")
            rows.append(row)
    return table(rows)


def tower_time(name: str) -> str:
    """The parts of the time to the first token of a run of ``benchmarks/ask.py``."""
    ((model, rows),) = measured(name)["models"].items()
    return script("benchmarks", "ask").parts_table(model, rows)


def reduce_cost() -> str:
    """What each method costs and saves before the first token."""
    return script("benchmarks", "reduce").table(measured("reduce-cpu-bfloat16")["rows"])


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
    return {row["what"]: row for row in measured("serve-cpu-bfloat16")["rows"]}


def _quartiles(row: dict[str, Any]) -> str:
    return f"{row['median']:.2f} [{row['q1']:.2f}, {row['q3']:.2f}]"


def _clients(n: int) -> str:
    return f"{n} client{'s' * (n > 1)}"


def _loads(
    name: str = "serve-cpu-bfloat16",
) -> tuple[dict[str, dict[int, dict[str, Any]]], list[int]]:
    """Loads of a result of ``benchmarks/serve.py`` by server and clients, and these numbers."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for load in measured(name)["loads"]:
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
    # Methods of a kind stand together.
    methods = dict.fromkeys((line["side"], line["method"]) for line in lines)
    for side, method in sorted(methods, key=lambda of: re.split(r"\W", of[1].lower())[0]):
        if method == "none":
            continue
        rows.append([_press(side, method), *(cell(found[side, method, keep]) for keep in keeps)])
    return table(rows)


def _press(side: str, method: str) -> str:
    name, comma, rest = method.partition(", ")
    return f"`{name}`{comma}{rest}" if side == "vlmfast" else f"kvpress {method}"


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


def gpu_answers() -> str:
    """Whole answers on a GPU, compared with Hugging Face's at the same batch size."""
    report = measured("end_to_end-llava-next-7b-nvidia-h200")
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
    for row in measured("gpu_hour-nvidia-h200")["rows"]:
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
    for key, row in measured(f"kernels-{gpu}")["rows"].items():
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
    *before, now = [_by_recipe(label["parts"]) for label in measured("launches")["labels"].values()]
    rows = [["recipe", "layer of prefill", "first token", "before", "decode step"]]
    for recipe, request in now.items():
        then = [_launches(known[recipe]["first_token"]) for known in before]
        first, step = _launches(request["first_token"]), _launches(request["step"])
        rows.append([f"`{recipe}`", _launches(*request["layers"]), first, *then, step])
    if not before:
        rows[0].remove("before")
    return table(rows)


def vllm_launches() -> str:
    """What the plug-in adds to a request of vLLM under each recipe."""
    found = measured("vllm-launches")["recipes"]
    rows = [["recipe", "image, Qwen2.5-VL", "`compact`", "its prefill", "decode step"]]
    rows[0].append("image, LLaVA-NeXT")
    for recipe, of in found.items():
        if "compact" in recipe:
            continue
        parts = of["qwen2_5_vl"]
        other = found.get(f"{recipe},positions=compact", {}).get("qwen2_5_vl")
        rows.append(
            [
                f"`{recipe}`",
                _launches(parts["encode"]),
                _launches(other["encode"]) if other else "",
                _launches(parts["prefill"]),
                _launches(parts["decode"]),
                _launches(of["llava_next"]["encode"]),
            ]
        )
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
    labels = [label["parts"] for label in measured("launches")["labels"].values()]
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
