"""Measure recipes on pocket: ``python benchmarks/pocket/evidence.py pocket --parts PARTS``.

All options are those of ``vlmfast eval``, and ``vlmfast report`` reads the results. ``--model`` is
a folder of ``build.py``. Answers are greedy, and are right if they equal the expected text.

===========  ===================================================================================
``train``    new scenes of the drawings that were trained on
``style``    objects in a drawing style in which they were not trained
``objects``  objects that were not trained at all
===========  ===================================================================================
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import objects
import scenes
from objects import Objects
from PIL import Image
from scenes import TYPES, Layout
from transformers import AutoConfig, AutoTokenizer

from vlmfast import VLMFastError
from vlmfast.core.exit_codes import ExitCode
from vlmfast.eval.commands import add_eval, run_eval
from vlmfast.eval.scores import normalise
from vlmfast.eval.tasks import Doc, Task, find_task, grey

GREEDY = {"max_new_tokens": 24, "do_sample": False}
LIMIT = 100  # questions of each type
STRIDE = 2**20  # layouts of one seed


class Scenes:
    """Questions about layouts of drawn objects.

    Parameters
    ----------
    drawn : Objects
    size : int
        Height and width of the images in pixels.
    kinds : sequence of {"scene", "word", "video"}
    split : {"train", "style", "objects"}
    """

    name, version = "pocket", "1"
    controls = ("question-only",)
    generation: ClassVar[dict[str, dict[str, Any]]] = {"question": GREEDY}

    def __init__(self, drawn: Objects, size: int, kinds: Sequence[str], split: str = "train"):
        self.drawn, self.size, self.kinds, self.split = drawn, size, tuple(kinds), split
        self._drawings = drawn.drawings(split)
        self._frames = lru_cache(maxsize=4)(self._draw)

    @property
    def options(self) -> dict[str, Any]:
        return {"kinds": list(self.kinds), "split": self.split, "size": self.size}

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        limit = LIMIT if limit is None else limit
        return [doc for kind in self.kinds for doc in self._docs(kind, limit, seed)]

    def _docs(self, kind: str, limit: int, seed: int) -> Iterator[Doc]:
        modality = "video" if kind == "video" else "image"
        for number in range(seed * STRIDE, seed * STRIDE + limit):
            of = self._layout(kind, number)
            rng = random.Random(of.seed)
            for type_ in TYPES[kind]:
                asked = scenes.question(of, type_, rng)
                name = type_ if kind == "scene" else f"{kind}-{type_}"
                media = f"{kind}-{number}"
                doc_id = f"{media}-{type_}"
                text, answer = asked.text, asked.answer
                yield Doc(doc_id, name, modality, media, text, answer, "question", number)

    def _layout(self, kind: str, number: int) -> Layout:
        seed = scenes.seed_of("test", kind, number)
        return scenes.layout(seed, kind, self._drawings, self.size)

    def _draw(self, media_id: str) -> list[Image.Image]:
        kind, number = media_id.split("-")
        return scenes.draw(self._layout(kind, int(number)), self.drawn)[0]

    def frames(self, doc: Doc) -> list[Image.Image]:
        """The images of the layout that a question is about."""
        return self._frames(doc.media_id)

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        frames = self.frames(doc)
        if control == "question-only":
            frames = [grey(frame) for frame in frames]
        if doc.modality == "image":
            return {"images": frames[0]}
        return {"video": frames, "num_frames": len(frames)}

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        answer = normalise(text)
        return {"filtered_resps": [answer], "score": float(answer == normalise(doc.target))}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    add_eval(parser)
    parser.description = "Measure the accuracy of recipes on pocket."
    parser.add_argument("--parts", type=Path, required=True, help="folder of objects.py")
    parser.add_argument("--kind", action="append", choices=list(TYPES), help="default: scene, word")
    parser.add_argument("--drawings", choices=["train", "style", "objects"], default="train")
    args = parser.parse_args(argv)

    def find(name: str, **options: Any) -> Task:
        if name != Scenes.name:
            return find_task(name, **options)
        if options:
            raise VLMFastError(f"task {name} has no option {', '.join(options)}")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        size = AutoConfig.from_pretrained(args.model).vision_config.image_size
        drawn = objects.read(args.parts / "objects", tokenizer)
        return Scenes(drawn, size, args.kind or ("scene", "word"), args.drawings)

    try:
        return run_eval(args, find, "python benchmarks/pocket/evidence.py")
    except VLMFastError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
