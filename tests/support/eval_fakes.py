"""A fake VLM that answers at once, and generated results."""

from __future__ import annotations

import random
import time
import zlib
from argparse import ArgumentParser
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from support.engine.commands import Stats
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaError
from vlmfast.eval.axes import method_of, share_of
from vlmfast.eval.commands import add_eval, run_eval
from vlmfast.eval.results import Writer, slug
from vlmfast.eval.shapes import Shapes
from vlmfast.eval.tasks import Doc

WORDS = ("yes", "no", "red", "blue", "2", "top left.", "There are 2 objects.")


@dataclass
class Answer:
    text: str
    stats: Stats


@dataclass
class FakeVLM:
    """Answers by a hash of the question and the recipe, and records its calls."""

    adapter: ClassVar = SimpleNamespace(depth=6, source=lambda asked: "cls")
    delay: float = 0.0
    fail: Any = None  # question -> whether answering fails
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def recipe(self, recipe: Any) -> Recipe:
        return Recipe.of(recipe)

    def ask(
        self,
        question: str,
        images: Any = None,
        video: Any = None,
        *,
        num_frames: int | None = None,
        recipe: Any = None,
        **generation: Any,
    ) -> Answer:
        media = {"images": images, "video": video, "num_frames": num_frames}
        self.asked.append((question, media | {"recipe": recipe} | generation))
        time.sleep(self.delay)
        if self.fail is not None and self.fail(question):
            raise MediaError(f"cannot read the image of {question!r}")
        several = list(images) if isinstance(images, list) else [images]
        frames = several if video is None else video
        key = b"".join([question.encode(), str(recipe).encode(), *(f.tobytes() for f in frames)])
        tokens = 336 if video is None else 544
        budget = next((s.budget for s in recipe or () if getattr(s, "budget", None)), 1.0)
        share = share_of(Recipe.of(recipe)) or budget
        stats = Stats(visual_tokens_in=tokens, equivalent_tokens=round(tokens * budget))
        stats.kv_bytes, stats.kv_bytes_full = round(100 * tokens * share), 100 * tokens
        stats.ttft_s = time.perf_counter() % 1
        return Answer(WORDS[zlib.crc32(key) % len(WORDS)], stats)

    def ask_many(self, requests: Any, *, batch_size: int) -> list[Answer]:
        return [
            self.ask(r.question, r.images, r.video, num_frames=r.num_frames, recipe=r.recipe)
            for r in requests
        ]

    def session(self, *, recipe: Any, history: bool, **media: Any) -> FakeSession:
        assert not history
        return FakeSession(self, media | {"recipe": recipe})


@dataclass
class FakeSession:
    """Calls its model; ``open`` counts the open sessions."""

    vlm: FakeVLM
    about: dict[str, Any]
    open: ClassVar[int] = 0

    def __enter__(self) -> FakeSession:
        FakeSession.open += 1
        return self

    def __exit__(self, *exc: object) -> None:
        FakeSession.open -= 1

    def ask(self, question: str, **generation: Any) -> Answer:
        assert FakeSession.open == 1
        return self.vlm.ask(question, **self.about, **generation)


@cache
def docs(limit: int) -> list[Doc]:
    return Shapes().docs(limit, 0)


def meta(recipe: str = "none", **changes: Any) -> dict[str, Any]:
    method, budget = method_of(Recipe.parse(recipe))
    return {
        "schema": 1,
        "task": "shapes",
        "task_version": "1",
        "model": "tiny",
        "weights_sha256": "0123456789abcdef",
        "options": None,
        "recipe": recipe,
        "method": method,
        "budget": budget,
        "control": None,
        "seed": 0,
        "generation": {},
        **changes,
    }


def write_results(
    folder: Path,
    recipe: str,
    skill: float,
    kept: float = 1.0,
    *,
    limit: int = 20,
    control: str | None = None,
    videos: bool = True,
    held: float | None = None,
    session: bool = False,
    **changes: Any,
) -> Path:
    """Results of a recipe that is right with probability ``skill``.

    The same questions are hard for every recipe, as with a real model. In a session, every third
    question is the first of its session.
    """
    path = folder / "shapes" / slug(recipe, "session" if session else control)
    changes["session"] = session or None
    with Writer(path, meta(recipe, control=control, **changes)) as writer:
        writer.note({"date": "2030-01-01", "command": None, "device": "a CPU", "versions": {}})
        for doc in docs(limit):
            if doc.modality == "video" and not videos:
                continue
            hardness = random.Random(doc.doc_id).random()
            luck = random.Random(f"{doc.doc_id} {recipe} {control}").uniform(-0.1, 0.1)
            right = hardness + luck < skill
            tokens = 336 if doc.modality == "image" else 544
            sample = {
                "doc_id": doc.doc_id,
                "type": doc.type,
                "modality": doc.modality,
                "picture": doc.media_id,
                "prompt_hash": "0",
                "target": doc.target,
                "resps": [["?"]],
                "filtered_resps": [doc.target if right else "?"],
                "score": float(right),
                "visual_tokens_in": tokens,
                "equivalent_tokens": tokens * kept,
                "kv_bytes": tokens * (kept if held is None else held),
                "kv_bytes_full": tokens,
            }
            if session:
                sample["turn"] = len(writer.done) % 3
            writer.add(sample, {"doc_id": doc.doc_id, "ttft_s": 0.02 + 0.03 * kept})
    return path


def run(*words: object) -> int:
    """``vlmfast eval`` with arguments."""
    parser = ArgumentParser()
    add_eval(parser)
    return run_eval(parser.parse_args([str(word) for word in words]))
