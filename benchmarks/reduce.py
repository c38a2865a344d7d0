"""What every method costs and saves at 2,900 visual tokens: ``python benchmarks/reduce.py``.

A LLaVA-NeXT of Qwen2-0.5B's shape with random weights (`ask.py` builds it) answers about a square
picture with one token, under each method at its default. Methods take turns, so that a machine that
gets warm or busy slows all of them; reported are medians. ``reduce`` is the stages' own work
(``time_reduce_s``; that of stages inside the vision tower lies in ``vision``, that of stages inside
the language model in ``prefill`` as well), ``saved`` is the time to the first token that the method
saves. Trained methods run with untrained weights: only their times mean anything, and a method that
decides by its weights how much to keep is run at ``budget=0.22``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ask
import torch

from vlmfast import VLM
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
        if name == "clip-relevance":  # needs a CLIP model beside this one
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


def measure(vlm: VLM, picture: Any, recipe: Recipe) -> dict[str, float]:
    answer = vlm.ask(ask.QUESTION, images=picture, recipe=recipe, max_new_tokens=1, do_sample=False)
    stats = answer.stats.to_dict()
    return {key: stats[key] for key in (*TIMES, "equivalent_tokens")}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown; times in milliseconds."""
    head = ["recipe", "visual tokens", "vision", "reduce", "prefill", "TTFT", "saved"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, row in rows.items():
        cells = [f"`{name}`", f"{row['equivalent_tokens']:.0f}"]
        cells += [f"{1e3 * row[key]:,.0f}" for key in TIMES]
        saved = 1e3 * (rows["none"]["ttft_s"] - row["ttft_s"])
        cells.append("–" if name == "none" else f"{saved:+,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tower", default="small", choices=tuple(ask.TOWERS))
    parser.add_argument("--layers", type=int, default=24, help="of the language model")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/reduce-....json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    args.model = ask.SHAPED
    vlm, picture = ask.load(args)
    plans = recipes(vlm)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in plans}
    for turn in range(args.repeats + 1):
        for name, recipe in plans.items():
            sample = measure(vlm, picture, recipe)
            if turn:  # the first round warms up
                samples[name].append(sample)
        print(f"{turn} of {args.repeats}", file=sys.stderr)
    rows = {
        name: {key: statistics.median(s[key] for s in taken) for key in taken[0]}
        for name, taken in samples.items()
    }
    print(table(rows))
    report = ask.heading("reduce.py", arguments, args) | {"rows": rows, "samples": samples}
    out = args.out or ask.RESULTS / f"reduce-{args.device.partition(':')[0]}-{args.dtype}.json"
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
