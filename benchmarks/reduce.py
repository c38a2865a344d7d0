"""Measure cost and savings of every method at 2,900 visual tokens: ``python benchmarks/reduce.py``.

A LLaVA-NeXT of Qwen2-0.5B's shape with random weights (built by `ask.py`) answers a question about
a square image with one token, under each method at its default. Methods are interleaved, so that
thermal throttling or other load affects all of them; medians are reported. ``reduce`` is the time
of the stages (``time_reduce_s``; stages inside the vision tower also count in ``vision``, stages
inside the language model in ``prefill``). ``saved`` is the reduction of the time to the first
token. Trained methods run with untrained weights, so only their times are meaningful; they run at
``budget=0.22``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import ask
import harness
from shapes import SHAPED

from vlmfast import VLM
from vlmfast.core.display import markdown_table
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.eval.axes import shrinks_cache
from vlmfast.train.stages import add_arguments, training_class

TIMES = ("time_vision_s", "time_reduce_s", "time_prefill_s", "ttft_s")


def recipes(vlm: VLM) -> dict[str, Recipe]:
    """Every method that drops visual tokens, at its default; trained ones get a fresh module."""
    found = {"none": Recipe()}
    for name in sorted(stage_names()):
        stage = stage_class(name)()
        if stage.protocol in ("media", "drafter") or shrinks_cache(Recipe((stage,))):
            continue
        if name == "clip-relevance":  # needs a separate CLIP model
            continue
        if stage.trained:
            parser = argparse.ArgumentParser()
            add_arguments(parser, name)
            config = training_class(name)(parser.parse_args([]), vlm.adapter.sizes()).config()
            module = stage.build(vlm.adapter.sizes() | config).float().eval()
            stage = replace(stage, budget=0.22)
            vlm.adapter.modules[name, stage.weights, ""] = module.to(vlm.adapter.device)
        found[str(stage)] = Recipe((stage,))
    return found


def measure(vlm: VLM, image: Any, recipe: Recipe) -> dict[str, float]:
    answer = vlm.ask(ask.QUESTION, images=image, recipe=recipe, max_new_tokens=1, do_sample=False)
    stats = answer.stats.to_dict()
    return {key: stats[key] for key in (*TIMES, "equivalent_tokens")}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    head = ["recipe", "visual tokens", "vision", "stages", "prefill", "TTFT", "TTFT saved"]
    lines = []
    for name, row in rows.items():
        cells = [f"`{name}`", f"{row['equivalent_tokens']:.0f}"]
        cells += [f"{1e3 * row[key]:,.0f} ms" for key in TIMES]
        saved = 1e3 * (rows["none"]["ttft_s"] - row["ttft_s"])
        lines.append([*cells, "–" if name == "none" else f"{saved:,.0f} ms"])
    return markdown_table(head, lines)


def main(argv: list[str]) -> int:
    parser = harness.parser(
        __doc__, repeats=3, dtype="bfloat16", device=harness.DEVICE, layers=24, out=None
    )
    args = parser.parse_args(argv, argparse.Namespace(tower="small"))
    report, (vlm, image) = ask.heading("reduce.py", argv, args), ask.load(SHAPED, args)
    plans = {name: partial(measure, vlm, image, plan) for name, plan in recipes(vlm).items()}
    samples = harness.interleaved(plans, args.repeats, warmup=1, name="reduce")
    rows = {
        name: {key: statistics.median(s[key] for s in taken) for key in taken[0]}
        for name, taken in samples.items()
    }
    print(table(rows))
    report |= {"rows": rows, "samples": samples}
    harness.written(harness.path_of(args, "reduce", args.device, args.dtype), report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
