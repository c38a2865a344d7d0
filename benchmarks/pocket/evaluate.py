"""Ask a model about unseen scenes: ``python benchmarks/pocket/evaluate.py MODEL PARTS``.

``MODEL`` is a folder of ``build.py``, ``PARTS`` that of ``parts.py`` and ``objects.py``.

Answers are free and greedy, through vlmfast, and count if they equal the expected text. With the
default recipe and drawings the command fails unless 80 % of the answers to "what" and "where" are
right, where these are asked. ``--compare N`` also compares the tokens of ``N`` answers with Hugging
Face's ``generate``.

===========  ===================================================================================
``train``    new scenes of the drawings that were trained on
``style``    objects in a drawing style in which they were not trained
``objects``  objects that were not trained at all
===========  ===================================================================================
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import build
import objects
import scenes
import torch
import transformers
from objects import Objects
from PIL import Image
from scenes import TYPES, Question

from vlmfast import VLM, Request
from vlmfast.core.files import make_folder, replace_text
from vlmfast.eval.scores import normalise, wilson

Asked = Sequence[tuple[list[Image.Image], list[Question]]]
GATE = 0.8
GATED = ("what", "where")
NEW_TOKENS = 24
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def examples(
    drawn: Objects, split: str, kinds: Sequence[str], number: int, size: int
) -> Iterator[tuple[list[Image.Image], list[Question]]]:
    """Images of unseen layouts, each with one question of every type."""
    drawings = drawn.drawings(split)
    for kind in kinds:
        for i in range(number):
            seed = scenes.seed_of("test", kind, i)
            layout = scenes.layout(seed, kind, drawings, size)
            images, _ = scenes.draw(layout, drawn)
            rng = random.Random(seed)
            yield images, [scenes.question(layout, type_, rng) for type_ in TYPES[kind]]


def evaluate(
    vlm: VLM,
    asked: Asked,
    recipe: str,
    batch_size: int = 8,
) -> dict[str, dict[str, Any]]:
    """Exact accuracy by type of question.

    Returns
    -------
    dict
        Type to ``right``, ``asked``, ``accuracy`` and ``interval`` (Wilson's, 95 %).
    """
    flat = [(images, of) for images, questions in asked for of in questions]
    requests = (
        Request(of.text, images=images, recipe=recipe, generation=GREEDY) for images, of in flat
    )
    answers = vlm.ask_many(requests, batch_size=batch_size)
    counts: dict[str, list[int]] = {}
    for (_, of), answer in zip(flat, answers, strict=True):
        right, total = counts.get(of.type, (0, 0))
        counts[of.type] = [right + (normalise(answer.text) == normalise(of.answer)), total + 1]
    found = {}
    for type_, (right, total) in counts.items():
        share, *interval = wilson(right, total)
        found[type_] = {"right": right, "asked": total, "accuracy": share, "interval": interval}
    return found


def compare(vlm: VLM, asked: Asked, number: int) -> int:
    """How many of ``number`` greedy answers under ``none`` have Hugging Face's tokens."""
    flat = [(images, of.text) for images, questions in asked for of in questions]
    equal = 0
    for images, text in flat[:number]:
        own = vlm.ask(text, images=images, recipe="none", **GREEDY).token_ids
        equal += own == reference(vlm, text, images)
    return equal


def reference(vlm: VLM, text: str, images: Sequence[Image.Image]) -> list[int]:
    """Tokens of Hugging Face's ``generate``."""
    content = [*({"type": "image", "image": of} for of in images), {"type": "text", "text": text}]
    inputs = vlm.processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(vlm.model.device, vlm.model.dtype)
    with torch.inference_mode():
        out = vlm.model.generate(**inputs, **GREEDY)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def gate(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Types of questions whose accuracy is below the gate."""
    return [of for of in GATED if found.get(of, {"accuracy": 0.0})["accuracy"] < GATE]


def is_gated(args: argparse.Namespace, found: Mapping[str, Any]) -> bool:
    """Whether the gate applies: to the default recipe and drawings, if its types were asked."""
    default = args.recipe == "none" and args.split == "train"
    return args.gate and default and set(GATED) <= set(found)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print a table, write the result; 1 where the gate is missed, else 0."""
    model = build.about(args.model)
    vlm = VLM.from_pretrained(args.model, device=args.device, dtype=args.dtype)
    drawn = objects.read(args.parts / "objects", vlm.processor.tokenizer)
    size = vlm.model.config.vision_config.image_size
    asked = list(examples(drawn, args.split, args.kind, args.scenes, size))
    begin = time.monotonic()
    found = evaluate(vlm, asked, args.recipe, args.batch_size)
    seconds = time.monotonic() - begin
    for type_, of in found.items():
        low, high = of["interval"]
        print(
            f"{type_:8}{of['right']:5} of {of['asked']:5}  "
            f"{of['accuracy']:6.1%}  [{low:.1%}, {high:.1%}]"
        )
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "recipe": args.recipe,
        "split": args.split,
        "dtype": args.dtype,
        "device": str(vlm.model.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "model": model,
        "types": found,
        "seconds": round(seconds, 1),
    }
    write(args.out, result)  # also if the comparison is interrupted
    missed = gate(found) if is_gated(args, found) else []
    if args.compare:
        equal = compare(vlm, asked, args.compare)
        result["compared"] = {"equal": equal, "asked": args.compare}
        write(args.out, result)
        print(f"{equal} of {args.compare} greedy answers have the tokens of generate")
        if equal < args.compare:
            missed.append("compare")
    for name in missed:
        print(f"missed: {name}")
    return 1 if missed else 0


def write(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, if there is a file for it."""
    if out is not None:
        make_folder(out.parent)
        replace_text(out, json.dumps(result, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a model about unseen scenes.")
    parser.add_argument("model", type=Path, help="folder of build.py")
    parser.add_argument("parts", type=Path, help="folder of parts.py and objects.py")
    parser.add_argument("--recipe", default="none")
    parser.add_argument("--split", choices=["train", "style", "objects"], default="train")
    parser.add_argument("--kind", action="append", choices=list(TYPES), help="by default all")
    parser.add_argument("--scenes", type=int, default=100, help="layouts of each kind")
    parser.add_argument("--compare", type=int, default=0, metavar="N")
    parser.add_argument("--no-gate", dest="gate", action="store_false")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="float32")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(argv)
    args.kind = args.kind or list(TYPES)
    questions = args.scenes * sum(len(TYPES[kind]) for kind in args.kind)
    if args.compare > questions:
        parser.error(f"--compare {args.compare} is more than the {questions} questions")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
