"""CPU time of `none` compared with Hugging Face's ``generate``: ``python benchmarks/overhead.py``.

Both answer the same questions in one process, in turn, and the tokens must be equal. Every pair has
an image of its own, so that nothing is found in the prefix cache. With ``--prefix-cache`` images
and prompts are hashed and stored as by default, otherwise it is off.

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
import os
import sys
import time
from pathlib import Path
from typing import Any

import ask
import numpy as np
from draft_views import ratio

from vlmfast.core.progress import Progress
from vlmfast.eval.bench import provenance, turns
from vlmfast.eval.report import markdown_table
from vlmfast.eval.results import write_json

NONE, PARTS = "none", ("first", "per token")


class Tokens:
    """A streamer that notes the CPU time of every token, and that of the prompt where it comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.process_time())

    def end(self) -> None:
        pass


def image_of(original: Any, number: int) -> Any:
    """An image that differs from the others in one pixel."""
    image = original.copy()
    image.putpixel((0, 0), (number % 256, number // 256, 0))
    return image


def run(vlm: Any, name: str, image: Any, count: int) -> dict[str, Any]:
    """CPU seconds of one answer of ``count`` tokens, and its tokens."""
    streamer, start = Tokens(), time.process_time()
    more = {"max_new_tokens": count, "do_sample": False, "streamer": streamer}
    if name == ask.HF:
        inputs = vlm.inputs(ask.QUESTION, images=image)
        ids = vlm.model.generate(**inputs, **more)
        tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
    else:
        tokens = vlm.ask(ask.QUESTION, images=image, recipe=name, **more).token_ids
    first, *_, last = streamer.times[-count:]
    return {"first": first - start, "per token": (last - first) / (count - 1), "tokens": tokens}


def measured(vlm: Any, original: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All pairs of one model."""
    samples: dict[str, list[dict[str, Any]]] = {ask.HF: [], NONE: []}
    steps = turns(list(samples), args.pairs, warmup=args.warmup)
    with Progress(args.model, 2 * (args.pairs + args.warmup), "answers") as bar:
        for number, (name, counts) in enumerate(steps):
            found = run(vlm, name, image_of(original, number // 2), args.new_tokens)
            if counts:
                samples[name].append(found)
            bar.update()
    theirs, own = samples[ask.HF], samples[NONE]
    equal = all(a["tokens"] == b["tokens"] for a, b in zip(theirs, own, strict=True))
    row: dict[str, Any] = {"same_tokens": equal, "pairs": args.pairs}
    for part in PARTS:
        seconds = {name: [one[part] for one in of] for name, of in samples.items()}
        row[part] = {"ratio": ratio(list(zip(*seconds.values(), strict=True))), "seconds": seconds}
    return row


def markdown(row: dict[str, Any]) -> str:
    lines = []
    for part in PARTS:
        found = row[part]["ratio"]
        cells = [f"{np.mean(of) * 1e3:.2f} ms" for of in row[part]["seconds"].values()]
        cells.append(f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]")
        lines.append([part, *cells])
    return markdown_table(["CPU time", "Hugging Face", "`none`", "ratio"], lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help=f"also {ask.SHAPED}, folders and hub ids")
    add("--pairs", type=int, default=20)
    add("--warmup", type=int, default=2)
    add("--new-tokens", type=int, default=33)
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--tower", default="clip-vit-l-14-336", choices=tuple(ask.TOWERS))
    add("--layers", type=int, default=24, help=f"of {ask.SHAPED}")
    add("--size", type=ask.size, help="WIDTHxHEIGHT of the image, by default as ask.py")
    add("--prefix-cache", action="store_true", help="hash and store images and prompts")
    add("--out", type=Path, help="write the result there")
    args = parser.parse_args(argv)
    args.device, args.frames = "cpu", 0
    if args.pairs < 2 or args.new_tokens < 2:
        parser.error("--pairs and --new-tokens must be at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    import torch

    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)  # the time of all threads counts
    vlm, media = ask.load(args)
    if args.prefix_cache:
        vlm.prefix_cache.limit = 2**30
    row = measured(vlm, media["images"], args)
    report = provenance("overhead.py", arguments, args.device) | {"model": args.model, "row": row}
    print(f"{args.model}, {args.dtype}, {args.pairs} pairs\n\n{markdown(row)}")
    if args.out is not None:
        write_json(args.out, report)
    if not row["same_tokens"]:
        print("the tokens of none differ from Hugging Face's", file=sys.stderr)
    return int(not row["same_tokens"])


if __name__ == "__main__":
    sys.exit(main())
