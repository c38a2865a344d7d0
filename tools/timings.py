"""Tables of times, launches and memory, and those beside other libraries.

Each public function is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from sources import grid, listed, measured, percent, script, table, within

from vlmfast.core.recipe import Recipe


def speed() -> str:
    """The short table of README: what a recipe saves, as ratios to Hugging Face."""
    rows = [["recipe", "visual tokens", "TTFT", "prefill", "per token", "peak memory"]]
    *_, variants = measured("ask-cpu-bfloat16")["models"].values()
    for recipe, row in variants.items():
        cells = [f"`{recipe}`", f"{row['visual_tokens']:,}"]
        for metric in ("ttft", "prefill", "tpot", "memory"):
            scale, unit = (1e-6, "MB") if metric == "memory" else (1e3, "ms")
            cell = f"{row[metric]['median'] * scale:,.0f} {unit}"
            if recipe != "huggingface":
                cell += f" ({row['ratio'][metric]:.2f}×)"
            cells.append(cell)
        rows.append(cells)
    return table(rows)


def timings() -> str:
    """Every measure of ``benchmarks/ask.py``, with quartiles."""
    ask, tables = script("ask"), []
    for name, rows in measured("ask-cpu-bfloat16")["models"].items():
        tables += [ask.markdown(name, rows), ask.parts_table(name, rows)]
    return "\n\n".join(tables)


def overhead() -> str:
    """CPU time of `none` and of Hugging Face."""
    first, later = "first", "per token"
    files = {"tiny": (first, later), "qwen2-0.5b": (first,), "qwen2-0.5b-tokens": (later,)}
    rows = []
    for name, parts in files.items():
        result = measured(f"overhead-{name}-cpu")
        for part in parts:
            found = result["row"][part]
            theirs, own = (fmean(values) for values in found["seconds"].values())
            about = {"model": result["model"], "pairs": result["row"]["pairs"], "part": part}
            rows.append({**found, **about, "theirs": theirs, "own": own})
    columns = {
        "model": "`{model}`",
        "pairs": "{pairs}",
        "CPU time": "{part}",
        "Hugging Face": "{theirs:,.1f ms}",
        "`none`": "{own:,.1f ms}",
        "ratio": "{ratio[value]:.3f} [{ratio[low]:.3f}, {ratio[high]:.3f}]",
    }
    return listed(rows, columns)


def tower_time(name: str) -> str:
    """The parts of the time to the first token of a run of ``benchmarks/ask.py``."""
    ((model, rows),) = measured(name)["models"].items()
    return script("ask").parts_table(model, rows)


def recipes_cost() -> str:
    """What each method costs and saves before the first token."""
    return script("reduce").table(measured("reduce-cpu-bfloat16")["rows"])


# --- servers -------------------------------------------------------------------------------------

Load = dict[int, dict[str, Any]]  # by the number of clients


def _loads(name: str = "serve-cpu-bfloat16") -> tuple[dict[str, Load], dict[str, int]]:
    """Loads of a result of ``benchmarks/serve.py`` by server, and numbers of clients by title."""
    found: dict[str, Load] = {}
    for load in measured(name)["loads"]:
        found.setdefault(load["server"], {})[load["clients"]] = load
    return found, {_clients(n): n for n in next(iter(found.values()))}


def _clients(n: int) -> str:
    return f"{n} client{'s' * (n > 1)}"


def serving_vllm(setting: str) -> str:
    """Answers per second of this server and of vLLM's, with and without a recipe."""
    found, clients = _loads(f"serve-vllm-{setting}-cpu-float32")
    servers = {
        f"`{name if name.startswith('vllm') else f'vlmfast serve {name}'}`": load
        for name, load in found.items()
    }

    def cell(load: Load, n: int) -> str:
        first = load[n]["ttft_ms"]["p50"] / 1e3
        return f"{load[n]['answers_per_s']['median']:.2f} ({first:.2f} s)"

    return grid("answers/s (median TTFT)", servers, clients, cell)


def inside_vllm(part: str) -> str:
    """Answers per second of vLLM with and without the plug-in, and over those without."""
    found = measured("serve-vllm-cpu-bfloat16")["parts"][part]
    ratios = {of["what"]: of for of in found["rows"]}
    rows = [["answers/s", "visual tokens"]]
    for name, kept in found["kept"].items():
        rows.append([f"`{name}`", f"{kept:,.0f}"])
        for load in found["loads"]:
            if load["server"] != name:
                continue
            clients = _clients(load["clients"])
            ratio = ratios.get(f"answers per second, `{name}` over `vllm serve`, {clients}")
            cell = f"{load['answers_per_s']['median']:.2f}"
            rows[-1].append(cell if ratio is None else f"{cell} ({ratio['median']:.2f}×)")
            if len(rows) == 2:
                rows[0].append(clients)
    return table(rows)


def serving_beside() -> str:
    """Answers per second of this server over those of ``transformers serve``."""
    found, (loads, clients) = _served(), _loads()
    other = "`transformers serve`"

    def cell(name: str, n: str) -> str:
        if name:
            return _quartiles(found[f"answers per second, {name} over {other}, {n}"])
        return percent(fmean(found[f"share of answers equal to those of {other}, {n}"]["ratios"]))

    rows = {f"`{name}`": f"`{name}`" for name in loads if f"`{name}`" != other}
    rows["share of answers of `none` that are equal"] = ""
    return grid(f"answers per second over {other}", rows, {n: n for n in clients}, cell)


def serving_scaling() -> str:
    """Answers per second of several clients over those of one."""
    found, (loads, clients) = _served(), _loads()

    def cell(name: str, n: int) -> str:
        start = f"answers per second, {n} clients over 1, {name}"
        return _quartiles(next(row for what, row in found.items() if start in what))

    many = {title: n for title, n in clients.items() if n > 1}
    rows = {f"`{name}`": f"`{name}`" for name in loads}
    return grid("answers per second over 1 client", rows, many, cell)


def serving_times(key: str) -> str:
    """Percentiles of a time in milliseconds, ``ttft`` or ``gap``."""
    loads, clients = _loads()
    title = {"ttft": "time to the first token", "gap": "time between tokens"}[key]

    def cell(load: Load, n: int) -> str:
        return " / ".join(f"{load[n][f'{key}_ms'][p]:.0f}" for p in ("p50", "p95", "p99"))

    servers = {f"`{name}`": load for name, load in loads.items()}
    return grid(f"{title}, ms", servers, clients, cell)


def _served() -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in measured("serve-cpu-bfloat16")["rows"]}


def _quartiles(row: dict[str, Any]) -> str:
    return f"{row['median']:.2f} [{row['q1']:.2f}, {row['q3']:.2f}]"


# --- GPUs ----------------------------------------------------------------------------------------


def _gpu_answers() -> Iterator[dict[str, Any]]:
    """Whole answers on a GPU, compared with Hugging Face's at the same batch size."""
    parts = measured("end_to_end-llava-next-7b-nvidia-h200")["parts"]
    base = parts["hf sdpa | 1"]
    for key, row in parts.items():
        name, batch = key.rsplit(" | ", 1)
        if batch != "1" or not row["check"]["passed"]:
            continue
        empty = {"visual_tokens": 2928, "prefill": None, "kv_bytes": None}
        ratios = {
            "name": name,
            "faster": f" ({base['first'] / row['first']:.2f}×)",
            "more": f" ({row['rate'] / base['rate']:.2f}×)",
        }
        if row is base:
            ratios = {"name": "huggingface", "faster": "", "more": ""}
        yield {**row, **empty, **row["parts"], **ratios}


_GPU = {
    "llava-next-7b, NVIDIA H200": "`{name}`",
    "visual tokens": "{visual_tokens:,.0f}",
    "first token": "{first:.0f ms}{faster}",
    "tokens/s": "{rate:.0f}{more}",
    "memory": "{memory:.1f GB}",
}


def gpu() -> str:
    """README's table of a GPU, beside the accuracy of `tiny` under the same recipes."""
    found, rows = measured("gpu-accuracy")["recipes"], []
    for row in _gpu_answers():
        run = found[str(Recipe.parse(row["name"]))] if row["parts"] else None
        kinds = ("image", "video")
        right = {kind: within(run, f"accuracy_{kind}") if run else None for kind in kinds}
        rows.append({**row, **right})
    return listed(rows, {**_GPU, "`tiny`: images": "{image}", "videos": "{video}"})


def gpu_answers() -> str:
    """Whole answers on a GPU, with the time of prefill and the bytes of the KV cache."""
    return listed(
        _gpu_answers(), {**_GPU, "prefill": "{prefill:.0f ms}", "KV cache": "{kv_bytes:,.0f MB}"}
    )


def gpu_steps() -> str:
    """Decode steps on a GPU, and the least time in which their bytes can be read."""
    found: dict[str, dict[str, Any]] = {}
    for row in measured("gpu_hour-nvidia-h200")["rows"]:
        what, _, name = row["what"].partition(": ")
        if row["part"] == "step" and what.count(" | ") == 2:
            model, recipe, batch = what.split(" | ")
            about = {"model": model, "recipe": recipe, "batch": batch.removeprefix("batch ")}
            found.setdefault(what, about)[name] = row["value"]
    columns = {
        "model": "{model}",
        "recipe": "`{recipe}`",
        "rows": "{batch}",
        "step": "{step, ms:.2f} ms",
        "floor": "{floor, ms:.2f} ms",
        "floor over step": "{floor over step:.0f %}",
        "launches per layer": "{launches of the step over its layers:.1f}",
    }
    return listed(found.values(), columns)


def gpu_kernels(gpu: str) -> str:
    """Kernels on a GPU at LLaVA-NeXT 7B's shape."""
    rows = []
    for key, row in measured(f"kernels-{gpu}")["rows"].items():
        name, shape = key.rsplit(" | ", 1)
        if shape == "B" and row["check"]["passed"] and row["floor"]:
            timed = [(of["time"], other) for other, of in row["others"].items() if "time" in of]
            other = f"{1e6 * timed[0][0]:.0f} us, {timed[0][1]}" if timed else ""
            rows.append({**row, "name": name, "other": other})
    columns = {
        "kernel": "{name}",
        "time": "{time:.0f us}",
        "floor": "{floor:.1f us}",
        "reference": "{reference[time]:,.0f us}",
        "PyTorch's own": "{other}",
    }
    return listed(rows, columns)


# --- launches ------------------------------------------------------------------------------------


def launches_requests() -> str:
    """Launches and reads of a request under each recipe, and to its first token in earlier code."""
    labels = measured("launches")["labels"]
    before, now = (_by_recipe(labels[name]["parts"]) for name in ("before", "after"))
    rows = [["recipe", "layer of prefill", "first token", "before", "decode step"]]
    for recipe, request in now.items():
        first = [_launches(of[recipe]["first_token"]) for of in (now, before)]
        step = _launches(request["step"])
        rows.append([f"`{recipe}`", _launches(*request["layers"]), *first, step])
    return table(rows)


def _launches(*costs: dict[str, Any]) -> str:
    """Launches and reads; of several parts the most."""
    most = max(x["launches"] for x in costs), max(sum(x["reads"].values()) for x in costs)
    return f"{most[0]:,} / {most[1]}"


def _by_recipe(parts: dict[str, Any]) -> dict[str, Any]:
    shipped, shape = (parts[name]["requests"] for name in ("tiny", "llava-next"))
    own = {request["recipe"]: request for request in shape}
    return own | {r["recipe"]: r for r in shipped if r["recipe"] not in own}


def launches_towers() -> str:
    """Calls of attention in Qwen2.5-VL's tower, by size of the image."""
    labels = measured("launches")["labels"]
    before, now = (labels[name]["parts"] for name in ("before", "after"))
    rows = [["image", "calls of attention", "launches", "calls before"]]
    for name, part in now.items():
        if name.startswith("qwen2.5-vl"):
            width, height = part["image"]
            counts = _in_blocks(part, "attention"), _in_blocks(part, "launches")
            counts += (_in_blocks(before[name], "attention"),)
            rows.append([f"{width} x {height}", *(f"{count:,}" for count in counts)])
    return table(rows)


def _in_blocks(part: dict[str, Any], what: str) -> int:
    """Calls of attention or launches in all blocks."""
    (request,) = part["requests"]
    return sum((of["to"] - of["from"] + 1) * of[what] for of in request["blocks"])


def vllm_launches() -> str:
    """What the plug-in adds to a request of vLLM under each recipe."""
    found = measured("vllm-launches")["recipes"]
    rows = []
    for recipe, of in found.items():
        if "compact" not in recipe:
            other = found.get(f"{recipe},positions=compact", {}).get("qwen2_5_vl")
            parts = {name: _launches(cost) for name, cost in of["qwen2_5_vl"].items()}
            compact = _launches(other["encode"]) if other else ""
            llava = _launches(of["llava_next"]["encode"])
            rows.append({**parts, "recipe": recipe, "compact": compact, "llava": llava})
    columns = {
        "recipe": "`{recipe}`",
        "image, Qwen2.5-VL": "{encode}",
        "`compact`": "{compact}",
        "its prefill": "{prefill}",
        "decode step": "{decode}",
        "image, LLaVA-NeXT": "{llava}",
    }
    return listed(rows, columns)
