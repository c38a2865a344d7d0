"""CPU time of `none` compared with Hugging Face's ``generate``: ``python benchmarks/overhead.py``.

Both answer the same questions in one process, with a model each, in turn, and the tokens must be
equal. Every pair has an image of its own, and the prefix cache is off.

============  ======================================================================================
``first``     from RGB image in host memory to the first token
``per token`` a further token, the mean over an answer
============  ======================================================================================

Ratios are Hugging Face's time over vlmfast's: of sums over all pairs, with the 95 % interval of a
bootstrap over pairs. CPU time hardly depends on what else the machine does. Still, use an idle one:
other load changes what caches of the processor hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import ask
import harness
from shapes import SHAPED

NONE, PARTS = "none", ("first", "per token")


def image_of(original: Any, number: int) -> Any:
    """An image that differs from the others in one pixel."""
    image = original.copy()
    image.putpixel((0, 0), (number % 256, number // 256, 0))
    return image


def answer(vlm: Any, name: str, image: Any, count: int) -> dict[str, Any]:
    """CPU seconds of one answer of ``count`` tokens, and its tokens."""
    streamer, begin = ask.Times(time.process_time), time.process_time()
    more = {"max_new_tokens": count, "do_sample": False, "streamer": streamer}
    if name == ask.HF:
        inputs = vlm.inputs(ask.QUESTION, images=image)
        ids = vlm.model.generate(**inputs, **more)
        tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
    else:
        tokens = vlm.ask(ask.QUESTION, images=image, recipe=name, **more).token_ids
    first, *_, last = streamer.times[-count:]  # Hugging Face's begins with the prompt
    return {"first": first - begin, "per token": (last - first) / (count - 1), "tokens": tokens}


def measured(vlms: dict[str, Any], original: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All pairs of one model."""

    def asked(name: str) -> Callable[[], dict[str, Any]]:
        numbers = itertools.count()
        return lambda: answer(vlms[name], name, image_of(original, next(numbers)), args.new_tokens)

    runs = {name: asked(name) for name in vlms}
    samples = harness.interleaved(runs, args.pairs, warmup=args.warmup, name=args.model)
    theirs, own = samples[ask.HF], samples[NONE]
    equal = all(a["tokens"] == b["tokens"] for a, b in zip(theirs, own, strict=True))
    row: dict[str, Any] = {"same_tokens": equal, "pairs": args.pairs}
    for part in PARTS:
        seconds = {name: [one[part] for one in of] for name, of in samples.items()}
        pairs = list(zip(*seconds.values(), strict=True))
        row[part] = {"ratio": harness.ratio(pairs), "seconds": seconds}
    return row


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, pairs=20, warmup=2, new_tokens=33, dtype="float32", layers=24, out=None
    )
    parser.add_argument("--model", default="tiny", help=f"also {SHAPED}, folders and hub ids")
    # The time of all threads counts.
    fixed = {"device": "cpu", "threads": 1, "tower": "clip-vit-l-14-336"}
    args = parser.parse_args(argv, argparse.Namespace(**fixed))
    if args.pairs < 2 or args.new_tokens < 2:
        parser.error("--pairs and --new-tokens must be at least 2")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    report, vlms = harness.begin("overhead.py", argv, args), dict[str, Any]()
    for name in (ask.HF, NONE):  # a model each: vlmfast switches the attention of its own
        vlms[name], image = ask.load(args.model, args)
    row = measured(vlms, image, args)
    print(f"{args.model}, {args.dtype}, {args.pairs} pairs")
    print(harness.shown({part: row[part] for part in PARTS}, "ratio"))
    if args.out is not None:
        harness.written(args.out, report | {"model": args.model, "row": row})
    if not row["same_tokens"]:
        print("the tokens of none differ from Hugging Face's", file=sys.stderr)
    return int(not row["same_tokens"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
