"""CPU time of `none` compared with Hugging Face's ``generate``: ``python benchmarks/overhead.py``.

Both answer the same questions in one process, with a model each, in turn, and the tokens must be
equal. With ``--by-token`` they take turns after each token, so that both have the same share of
what else the machine does: for models whose steps take so long that no cache of the processor lasts
from one step to the next. Every pair has an image of its own, and the prefix cache is off.

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
import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ask
import harness
from shapes import SHAPED

from vlmfast.check.commands import size
from vlmfast.core.progress import Progress

NONE, PARTS = "none", ("first", "per token")


class Turns:
    """Of two threads one runs, until it ends, or with ``by_token`` has a token."""

    def __init__(self, names: tuple[str, str], by_token: bool) -> None:
        self.names, self.now, self.by_token = list(names), names[0], by_token
        self.changed = threading.Condition()

    def wait(self, name: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.now == name)

    def pass_on(self, name: str, *, ends: bool = False) -> None:
        """Let the other one run, if it has not ended."""
        with self.changed:
            if ends:
                self.names.remove(name)
            self.now = next((other for other in self.names if other != name), name)
            self.changed.notify_all()


class Tokens:
    """A streamer that notes the CPU time of every token, and lets the other side run after it."""

    def __init__(self, name: str, turns: Turns) -> None:
        self.name, self.turns = name, turns
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        self.turns.wait(self.name)
        self.since = time.process_time()

    def put(self, value: Any) -> None:
        if value.numel() > 1:  # the prompt
            return
        self.times.append(time.process_time() - self.since)
        if self.turns.by_token:
            self.turns.pass_on(self.name)
        self.start()

    def end(self) -> None:
        pass


def image_of(original: Any, number: int) -> Any:
    """An image that differs from the others in one pixel."""
    image = original.copy()
    image.putpixel((0, 0), (number % 256, number // 256, 0))
    return image


def answer(vlm: Any, name: str, turns: Turns, image: Any, count: int) -> dict[str, Any]:
    """CPU seconds of one answer of ``count`` tokens, and its tokens."""
    try:
        streamer = Tokens(name, turns)
        more = {"max_new_tokens": count, "do_sample": False, "streamer": streamer}
        if name == ask.HF:
            inputs = vlm.inputs(ask.QUESTION, images=image)
            ids = vlm.model.generate(**inputs, **more)
            tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
        else:
            tokens = vlm.ask(ask.QUESTION, images=image, recipe=name, **more).token_ids
    finally:
        turns.pass_on(name, ends=True)
    first, *others = streamer.times
    return {"first": first, "per token": sum(others) / len(others), "tokens": tokens}


def measured(vlms: dict[str, Any], original: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All pairs of one model."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in vlms}
    with (
        ThreadPoolExecutor(len(vlms)) as threads,
        Progress(args.model, args.pairs + args.warmup, "pairs") as bar,
    ):
        for number in range(args.pairs + args.warmup):
            gc.collect()  # a collection of all that was imported falls on neither side
            names = (ask.HF, NONE)[:: 1 - 2 * (number % 2)]
            turns, image = Turns(names, args.by_token), image_of(original, number)
            asked = {
                name: threads.submit(answer, vlms[name], name, turns, image, args.new_tokens)
                for name in names
            }
            results = {name: found.result() for name, found in asked.items()}
            if number >= args.warmup:
                for name, result in results.items():
                    samples[name].append(result)
            bar.update()
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
    add = parser.add_argument
    add("--model", default="tiny", help=f"also {SHAPED}, folders and hub ids")
    add("--size", type=size, help="WIDTHxHEIGHT of the image, by default as ask.py")
    add("--by-token", action="store_true", help="take turns after each token, not each answer")
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
