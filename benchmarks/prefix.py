"""Measure the prefix cache: ``python benchmarks/prefix.py``.

============  ==================================================================================
``sessions``  prompts whose images were prefilled again, over all turns of conversations on small
              models of every family, under every cache method that does not read the question
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
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ask
import torch
from engine import conditions

from vlmfast import VLM, RecipeError, Request
from vlmfast.core.protocols import CacheStage, DecodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names
from vlmfast.eval.bench import provenance
from vlmfast.eval.report import markdown_table
from vlmfast.eval.results import write_json
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

NAMES = ("sessions", "second", "batch", "memory")
QUESTIONS = ("What is in the bottom left?", "What is in the top right?", "How many circles?")
WORDS = ("what is here ?", "what colour is it ?", "is there more of it ?")  # of small tokenizers
# Defaults of these methods do nothing on short prompts.
SHORT = {
    "kivi": "kivi:group=8,residual=16",
    "zipcache": "zipcache:page=4",
    "h2o": "h2o:0.5",
    "streamingllm": "streamingllm:0.4",
    "lookm": "lookm:0.8",
}


@dataclass
class Row:
    """One line of the table.

    Parameters
    ----------
    name : str
        As in ``--only``.
    what : str
    values : list of float
        One for each repeat.
    wrong : bool
        Whether answers with and without the cache differ.
    """

    name: str
    what: str
    values: list[float]
    wrong: bool = False

    def report(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self) | {"median": None if self.wrong else statistics.median(self.values)}


# --- sessions ------------------------------------------------------------------------------------


def methods() -> Iterator[str]:
    """Recipes of all cache methods that do not read the question."""
    for name in sorted(stage_names()):
        recipe = SHORT.get(name, name)
        stages = [p for s in Recipe.parse(recipe) for p in (s, *s.expand())]
        kinds = any(isinstance(stage, CacheStage | DecodeStage) for stage in stages)
        if kinds and not any(stage.query_dependent for stage in stages):
            yield recipe


def sessions(args: argparse.Namespace) -> Iterator[Row]:
    sys.path.insert(0, str(ask.ROOT / "tests"))
    import tiny_families
    from tiny_models import make_image

    for recipe in methods():
        families = again = total = 0
        for family, build in sorted(tiny_families.builders().items()):
            if family == "smolvlm":
                continue  # its processor needs a further package; the architecture is idefics3's
            vlm = VLM(*build())
            try:
                with vlm.session(images=make_image(120, 90), recipe=recipe):
                    families += 1
            except RecipeError:
                continue
            for number in range(args.sessions):
                image = make_image(120, 90, seed=number)
                with vlm.session(images=image, recipe=recipe) as session:
                    if session.reuses != "kv":
                        raise SystemExit(f"{recipe} on {family} shares no keys and values")
                    opened = session.stats.prompt_reused + session.stats.prompt_fed
                    for turn in range(args.turns):
                        answer = session.ask(WORDS[turn % 3], max_new_tokens=6)
                        total += 1
                        again += answer.stats.prompt_reused < opened
        what = f"{recipe}: prompts read again, of {total} on {families} families"
        yield Row("sessions", what, [again])


# --- prompts -------------------------------------------------------------------------------------


def first_token(vlm: VLM, question: str, image: Any) -> tuple[float, int]:
    """Seconds to the first token, and ids that were found in the cache."""
    stats = vlm.ask(question, image, max_new_tokens=1, do_sample=False).stats
    return stats.ttft_s, stats.cached_tokens


def second(args: argparse.Namespace) -> Iterator[Row]:
    for model in args.models:
        about = argparse.Namespace(
            model=model,
            device=args.device,
            dtype=args.dtype,
            tower="clip-vit-l-14-336",
            layers=24,
            size=None,
            frames=0,
        )
        vlm, media = ask.load(about)
        image = media["images"]
        questions = QUESTIONS if model != ask.SHAPED else WORDS
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


def requests(args: argparse.Namespace) -> list[Request]:
    images = [image_example(EVAL_SEED_START + number).image for number in range(args.images)]
    generation = {"max_new_tokens": 8, "do_sample": False}
    return [
        Request(f"What is in the {place}?", image, generation=generation)
        for image in images
        for place in PLACES[: args.questions]
    ]


PLACES = tuple(f"{y} {x}" for y in ("top", "bottom") for x in ("left", "right")) + tuple(
    f"{place} of the image" for place in ("middle", "left", "right", "top", "bottom", "corner")
)


def batch(args: argparse.Namespace) -> Iterator[Row]:
    asked = requests(args)
    vlm = VLM.from_pretrained("tiny", device=args.device, dtype=torch.float32)
    vlm.prefix_cache.limit = 1 << 32

    def run(warm: bool) -> tuple[float, list[list[int]]]:
        vlm.prefix_cache.clear()
        limit, vlm.prefix_cache.limit = vlm.prefix_cache.limit, (1 << 32) * warm
        begin = time.perf_counter()
        tokens = [answer.token_ids for answer in vlm.ask_many(asked, batch_size=16)]
        spent = time.perf_counter() - begin
        vlm.prefix_cache.limit = limit
        return spent, tokens

    run(False)
    ratios, wrong = [], False
    for _ in range(args.repeat):
        (without, wanted), (with_cache, tokens) = run(False), run(True)
        wrong |= tokens != wanted
        ratios.append(with_cache / without)
    what = f"{args.questions} questions on each of {args.images} images: with over without"
    yield Row("batch", what, [] if wrong else ratios, wrong)


def memory(args: argparse.Namespace) -> Iterator[Row]:
    asked = requests(args)
    vlm = VLM.from_pretrained("tiny", device=args.device, dtype=torch.float32)
    vlm.prefix_cache.limit = 1 << 32
    first = len(asked) // args.images
    vlm.ask_many(asked[:first])
    vlm.prefix_cache.limit = bound = 3 * vlm.prefix_cache.stats().bytes
    largest = 0
    for begin in range(0, len(asked), first):
        vlm.ask_many(asked[begin : begin + first], batch_size=4)
        largest = max(largest, vlm.prefix_cache.stats().bytes)
    evictions = vlm.prefix_cache.stats().evictions
    what = f"largest size over the bound of {bound / 1e6:.1f} MB, {evictions} evictions"
    yield Row("memory", what, [largest / bound])


MEASURED = {"sessions": sessions, "second": second, "batch": batch, "memory": memory}


def markdown(table: list[Row]) -> str:
    lines = []
    for row in table:
        value = "WRONG" if row.wrong else f"{statistics.median(row.values):.3g}"
        lines.append([f"`{row.name}`", row.what, value])
    return markdown_table(["", "what", "measured"], lines)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    add("--models", nargs="+", default=["tiny", ask.SHAPED], help="of `second` (%(default)s)")
    add("--sessions", type=int, default=40, help="on each family (%(default)s)")
    add("--turns", type=int, default=5, help="of a conversation (%(default)s)")
    add("--images", type=int, default=32)
    add("--questions", type=int, default=10, choices=range(1, 11), help="about each image")
    add("--repeat", type=int, default=5, help="runs of each variant (%(default)s)")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of `second`")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=0, help="0: PyTorch's default (%(default)s)")
    add("--out", type=Path, help="default: benchmarks/results/prefix-....json")
    args = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.threads:
        torch.set_num_threads(args.threads)
    report = provenance("prefix.py", arguments, args.device)
    report["threads"] = torch.get_num_threads()
    out = args.out or ask.RESULTS / f"prefix-{args.device.partition(':')[0]}.json"
    table: list[Row] = []
    for name, measure in MEASURED.items():
        if name in (args.only or NAMES):
            for row in measure(args):
                table.append(row)
                print(f"{row.name}: {row.what}: {row.values}", file=sys.stderr)
                report["rows"] = [row.report() for row in table]
                write_json(out, report)
    print(f"\n{conditions(report)}\n\n{markdown(table)}")
    print(f"\nwritten: {out}", file=sys.stderr)
    return int(any(row.wrong for row in table))


if __name__ == "__main__":
    sys.exit(main())
