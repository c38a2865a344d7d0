"""Time ``ask`` against another checkout: ``python tools/against.py PATH``.

Two processes, one per checkout, answer the same questions in turn, so that other load affects both.
Prints the median ratio of CPU time, this checkout over the other, for each recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
QUESTION = "Describe the image."
RECIPES = ("none", "hired:0.2", "lookm:0.5", "draft-ngram")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, nargs="?", help="the checkout to compare with")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.other is None or not (args.other / "vlmfast").is_dir():
        parser.error("the other checkout must be a folder that contains vlmfast")
    ours, theirs = started(HERE), started(args.other.resolve())
    for recipe in RECIPES:
        for process in (ours, theirs):
            asked(process, recipe)  # the first answer warms up
        ratios = []
        for pair in range(args.pairs):
            first, second = (ours, theirs) if pair % 2 else (theirs, ours)
            seconds = {id(process): asked(process, recipe) for process in (first, second)}
            ratios.append(seconds[id(ours)] / seconds[id(theirs)])
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{recipe}: CPU time ratio {middle:.3f} [{low:.3f}, {high:.3f}], {args.pairs} pairs")
    for process in (ours, theirs):
        process.terminate()


def started(checkout: Path) -> subprocess.Popen[str]:
    """Start a process that answers with the package of ``checkout``."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, cwd=checkout, **pipes)


def asked(process: subprocess.Popen[str], recipe: str) -> float:
    """CPU seconds of one answer."""
    process.stdin.write(json.dumps(recipe) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def serve() -> None:
    """Answer with each recipe from stdin and print the CPU time."""
    import torch

    import vlmfast

    torch.set_num_threads(1)
    vlm = vlmfast.VLM.from_pretrained("tiny", device="cpu")
    if hasattr(vlm, "prefix_cache"):  # every answer in full, as in revisions without it
        vlm.prefix_cache.limit = 0
    image = Path(vlmfast.__file__).parents[1] / "examples" / "picture.png"
    for line in sys.stdin:
        begin = time.process_time()
        vlm.ask(QUESTION, image, recipe=json.loads(line), max_new_tokens=32)
        print(time.process_time() - begin, flush=True)


if __name__ == "__main__":
    main()
