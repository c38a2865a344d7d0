"""Ask a model about unseen scenes: ``python benchmarks/pocket/evaluate.py MODEL PARTS``.

``MODEL`` is a folder of ``build.py``, ``PARTS`` that of ``parts.py`` and ``objects.py``.

Answers are free and greedy, through vlmfast, and count if they equal the expected text.
``--compare N`` also compares the tokens of ``N`` answers with those of Hugging Face's ``generate``,
and fails if some differ.

===========  ===================================================================================
``train``    new scenes of the drawings that were trained on
``style``    objects in a drawing style in which they were not trained
``objects``  objects that were not trained at all
===========  ===================================================================================
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import build
import objects
from evidence import GREEDY, Scenes
from scenes import TYPES

from vlmfast import VLM, Request
from vlmfast.core.exit_codes import ExitCode
from vlmfast.eval.bench import provenance
from vlmfast.eval.results import write_json
from vlmfast.eval.scores import wilson
from vlmfast.eval.tasks import Doc


def evaluate(
    vlm: VLM, task: Scenes, docs: Sequence[Doc], recipe: str, batch_size: int = 8
) -> dict[str, dict[str, Any]]:
    """Exact accuracy by type of question.

    Returns
    -------
    dict
        Type to ``right``, ``asked``, ``accuracy`` and ``interval`` (Wilson's, 95 %).
    """
    requests = (
        Request(doc.question, images=task.frames(doc), recipe=recipe, generation=GREEDY)
        for doc in docs
    )
    answers = vlm.ask_many(requests, batch_size=batch_size)
    scores: dict[str, list[float]] = {}
    for doc, answer in zip(docs, answers, strict=True):
        type_ = doc.type.rpartition("-")[2]  # the same of every kind of layout
        scores.setdefault(type_, []).append(task.judge(doc, answer.text)["score"])
    found = {}
    for type_, of in scores.items():
        share, *interval = wilson(sum(of), len(of))
        counts = {"right": int(sum(of)), "asked": len(of)}
        found[type_] = {**counts, "accuracy": share, "interval": interval}
    return found


def compare(vlm: VLM, task: Scenes, docs: Sequence[Doc]) -> int:
    """How many greedy answers under ``none`` have Hugging Face's tokens."""
    equal = 0
    for doc in docs:
        images = task.frames(doc)
        own = vlm.ask(doc.question, images=images, recipe="none", **GREEDY).token_ids
        inputs = vlm.inputs(doc.question, images=images)
        ids = vlm.model.generate(**inputs, **GREEDY)
        equal += own == ids[0, inputs["input_ids"].shape[1] :].tolist()
    return equal


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Evaluate, print a table, write the result."""
    vlm = VLM.from_pretrained(args.model, device=args.device, dtype=args.dtype)
    drawn = objects.read(args.parts / "objects", vlm.processor.tokenizer)
    size = vlm.model.config.vision_config.image_size
    task = Scenes(drawn, size, args.kind or list(TYPES), args.split)
    docs = task.docs(args.scenes, 0)
    begin = time.monotonic()
    found = evaluate(vlm, task, docs, args.recipe, args.batch_size)
    seconds = round(time.monotonic() - begin, 1)
    for type_, of in found.items():
        low, high = of["interval"]
        print(
            f"{type_:8}{of['right']:5} of {of['asked']:5}  "
            f"{of['accuracy']:6.1%}  [{low:.1%}, {high:.1%}]"
        )
    result = provenance("pocket/evaluate.py", argv, str(vlm.model.device))
    result |= {name: getattr(args, name) for name in ("recipe", "split", "dtype")}
    result |= {"model": build.about(args.model), "types": found, "seconds": seconds}
    compared = docs[: args.compare]
    if compared:
        equal = compare(vlm, task, compared)
        result["compared"] = {"equal": equal, "asked": len(compared)}
        print(f"{equal} of {len(compared)} greedy answers have the tokens of generate")
    if args.out is not None:
        write_json(args.out, result)
    right = not compared or equal == len(compared)
    return ExitCode.FINISHED if right else ExitCode.CHECK_FAILED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a model about unseen scenes.")
    parser.add_argument("model", type=Path, help="folder of build.py")
    parser.add_argument("parts", type=Path, help="folder of parts.py and objects.py")
    parser.add_argument("--recipe", default="none")
    parser.add_argument("--split", choices=["train", "style", "objects"], default="train")
    parser.add_argument("--kind", action="append", choices=list(TYPES), help="by default all")
    parser.add_argument("--scenes", type=int, default=100, help="layouts of each kind")
    parser.add_argument("--compare", type=int, default=0, metavar="N")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="float32")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = sys.argv[1:] if argv is None else argv
    return run(parser.parse_args(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
