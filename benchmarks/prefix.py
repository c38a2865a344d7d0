"""Measure the prefix cache: ``python benchmarks/prefix.py``.

============  ==================================================================================
``second``    time to the first token of a second question about an image over that of the first
``batch``     wall time of `VLM.ask_many` for several questions about each image, with the cache
              over without it
``memory``    largest size of the cache in such a run over its bound, which is below what the run
              would store
============  ==================================================================================

The models of ``second`` are the shipped `tiny` and a LLaVA-NeXT of Qwen2-0.5B's shape with random
weights. The first question is asked of an empty cache. ``batch`` and ``memory`` use `tiny`. Answers
with and without the cache are compared in float32; where they differ, no ratio is reported and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import ask
import harness
import shapes
import torch
from harness import Row

from vlmfast import VLM, Request
from vlmfast.eval.results import write_json
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

NAMES = ("second", "batch", "memory")
MODELS = ("tiny", shapes.SHAPED)  # of `second`
IMAGES = 32
PLACES = (
    *("top left", "top right", "bottom left", "bottom right"),
    *(f"{of} of the image" for of in ("middle", "left", "right", "top", "bottom", "corner")),
)
QUESTIONS = ("What is in the bottom left?", "What is in the top right?", "How many circles?")
WORDS = ("what is here ?", "what colour is it ?", "is there more of it ?")  # of its tokenizer


# --- prompts -------------------------------------------------------------------------------------


def first_token(vlm: VLM, question: str, image: Any) -> tuple[float, int]:
    """Seconds to the first token, and ids that were found in the cache."""
    stats = vlm.ask(question, image, max_new_tokens=1, do_sample=False).stats
    return stats.ttft_s, stats.cached_tokens


def second(args: argparse.Namespace) -> Iterator[Row]:
    for model in MODELS:
        about = {"tower": "clip-vit-l-14-336", "layers": 24}
        vlm, image = ask.load(model, argparse.Namespace(**vars(args) | about))
        questions = QUESTIONS if model != shapes.SHAPED else WORDS
        ratios = []
        vlm.ask(questions[2], image, max_new_tokens=1)  # warm-up
        vlm.prefix_cache.limit = 1 << 32
        for _ in range(args.repeat):
            vlm.prefix_cache.clear()
            cold, nothing = first_token(vlm, questions[0], image)
            warm, found = first_token(vlm, questions[1], image)
            if nothing or not found:
                raise SystemExit("the first question was warm, or the second one cold")
            ratios.append(warm / cold)
        yield Row("second", f"{model}: second question over the first, {found} ids found", ratios)


def requests() -> list[Request]:
    """Ten questions about each image."""
    images = [image_example(EVAL_SEED_START + number).image for number in range(IMAGES)]
    generation = {"max_new_tokens": 8, "do_sample": False}
    return [
        Request(f"What is in the {place}?", image, generation=generation)
        for image in images
        for place in PLACES
    ]


def batch(args: argparse.Namespace) -> Iterator[Row]:
    asked = requests()
    vlm = VLM.from_pretrained("tiny", device=args.device, dtype=torch.float32)
    found: list[list[list[int]]] = []

    def run(limit: int) -> float:
        vlm.prefix_cache.limit = limit
        vlm.prefix_cache.clear()
        begin = time.perf_counter()
        answers = vlm.ask_many(asked, batch_size=16)
        spent = time.perf_counter() - begin
        found.append([answer.token_ids for answer in answers])
        return spent

    times = harness.interleaved({n: partial(run, n) for n in (0, 1 << 32)}, args.repeat, warmup=1)
    wrong = any(tokens != found[0] for tokens in found)
    ratios = [with_cache / without for without, with_cache in zip(*times.values(), strict=True)]
    what = f"{len(PLACES)} questions on each of {IMAGES} images: with over without"
    yield Row("batch", what, [] if wrong else ratios, wrong=wrong)


def memory(args: argparse.Namespace) -> Iterator[Row]:
    asked = requests()
    vlm = VLM.from_pretrained("tiny", device=args.device, dtype=torch.float32)
    vlm.prefix_cache.limit = 1 << 32
    first = len(PLACES)
    vlm.ask_many(asked[:first])
    vlm.prefix_cache.limit = bound = 3 * vlm.prefix_cache.stats().bytes
    largest = 0
    for begin in range(0, len(asked), first):
        vlm.ask_many(asked[begin : begin + first], batch_size=4)
        largest = max(largest, vlm.prefix_cache.stats().bytes)
    evictions = vlm.prefix_cache.stats().evictions
    what = f"largest size over the bound of {bound / 1e6:.1f} MB, {evictions} evictions"
    yield Row("memory", what, [largest / bound])


MEASURED = {"second": second, "batch": batch, "memory": memory}


def main(argv: list[str]) -> int:
    parser = harness.parser(
        __doc__, repeat=5, dtype="bfloat16", device=harness.DEVICE, threads=0, out=None
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    args = parser.parse_args(argv)
    report = harness.begin("prefix.py", argv, args) | {"threads": torch.get_num_threads()}
    out, table = harness.path_of(args, "prefix", args.device), []
    for name in args.only or NAMES:
        for row in MEASURED[name](args):
            table.append(row)
            print(f"{row.name}: {row.what}: {row.ratios}", file=sys.stderr)
            report["rows"] = [row.report() for row in table]
            write_json(out, report)
    print(f"\n{report['device']}\n\n{harness.table(table)}")
    print(f"\nwritten: {out}", file=sys.stderr)
    return int(any(row.wrong for row in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
