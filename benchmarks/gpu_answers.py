"""Answers of `gpu_hour.py`: its parts ``smoke`` and ``bfloat16``."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
from gpu_rows import IMAGE, QUESTION, Bench, Report

import vlmfast
from vlmfast import VLM, Answer, RecipeError, Request

POCKET = harness.ROOT / "runs" / "pocket" / "model"  # of `make pocket`
# In addition to each method at its defaults.
STACKS = (
    "none",
    "downsample:0.3,proportional_attention=true",
    "pyramiddrop:positions=compact",
    "kivi:residual=32",
    "zipvl:tau=0.9,kv=drop,rows=all",
    "kivi+draft-auto",
    "hired:0.5+pyramiddrop+zipvl",
)
SECOND_REQUEST = 0.5  # seconds, at most
NEAR_TIE = 0.01  # difference of two logits that other orders of float32 sums explain
DRY_RECIPES = ("none", "hired:0.2", "zipvl")


def smoke(bench: Bench) -> None:
    report = bench.report
    # PyTorch's convolutions round float32 to TF32 by default, its other products do not.
    torch.backends.cudnn.allow_tf32 = False
    cpu, auto, eager = tiny(bench)
    for what, right in answers(bench, (cpu, auto, eager)).items():
        report.row(what, f"{sum(right)} of {len(right)}", "all", all(right), bad="FAIL")
    second = {}
    for recipe in DRY_RECIPES if bench.dry else STACKS:
        ask = partial(auto.ask, QUESTION, IMAGE, recipe=recipe, **fixed(8))
        ask()
        second[recipe] = harness.seconds(bench.device, ask)
    for recipe in sorted(second, key=second.get, reverse=True)[:5]:
        bench.within(f"a later request, {recipe}, s", second[recipe], most=SECOND_REQUEST)
    with report.guarded("requests that join and leave"):
        joined(report, auto, cpu)
    with report.guarded("session"), auto.session(images=IMAGE, recipe="lookm:0.5") as session:
        texts = [session.ask(q, max_new_tokens=6).text for q in (QUESTION, "And above it?")]
        report.row("two questions of a session", " / ".join(texts))
    with report.guarded("captures beside a thread that allocates"):
        beside_a_thread(bench)


def tiny(bench: Bench) -> tuple[VLM, VLM, VLM]:
    """`tiny` in float32: on the CPU, captured, eager."""
    cpu = VLM.from_pretrained("tiny", device="cpu", dtype=torch.float32, prefix_cache_bytes=0)
    own = VLM.from_pretrained("tiny", device=bench.device, dtype=torch.float32)
    auto = bench.vlm(own.model, own.processor)
    return cpu, auto, bench.vlm(own.model, own.processor, decoding="eager")


def fixed(length: int) -> dict[str, int]:
    return {"max_new_tokens": length, "min_new_tokens": length}


def answers(bench: Bench, models: tuple[VLM, VLM, VLM]) -> dict[str, list[bool]]:
    """Compare the answers of all recipes: whether each is right, by what is compared.

    To the CPU only the answer itself is compared. Far beyond its end all tokens are unlikely, and
    the references' tokens are compared, on the same device: the choice of visual tokens is theirs.
    """
    report, (cpu, auto, eager) = bench.report, models
    found: dict[str, list[bool]] = defaultdict(list)
    long = fixed(6 if bench.dry else 48)
    for recipe in DRY_RECIPES if bench.dry else recipes():
        with report.guarded(f"recipe {recipe}"):
            ask = partial(VLM.ask, question=QUESTION, images=IMAGE, recipe=recipe)
            try:
                wanted = ask(cpu, max_new_tokens=8).token_ids
            except RecipeError as refusal:  # such as a method without weights for `tiny`
                report.row(f"recipe {recipe}", f"refused: {refusal}")
                continue
            with mock.patch.dict(os.environ, VLMFAST_KERNELS="torch"):
                reference = ask(eager, **long, top_logprobs=2)
            for mode, vlm in (("auto", auto), ("eager", eager)):
                text = ask(vlm, max_new_tokens=8)
                right = text.token_ids == wanted
                found["answers that are the CPU's, in float32"].append(right)
                if not right:
                    report.row(f"another answer: {recipe} ({mode})", text.text)
                differs = difference(ask(vlm, **long).token_ids, reference)
                found["answers of 48 tokens that are the references'"].append(not differs)
                if differs:
                    report.row(f"tokens differ: {recipe} ({mode})", differs)
    return found


def difference(tokens: list[int], reference: Answer, near: float = NEAR_TIE) -> str:
    """Where tokens are not those of the reference, unless its two best were nearly equal there."""
    pairs = zip_longest(tokens, reference.token_ids)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return ""
    if at >= len(reference.token_ids):
        return f"goes on after token {at}"
    best, second = sorted((p for _, p in reference.logprobs[at].top), reverse=True)[:2]
    return "" if best - second < near else f"from token {at} on, which leads by {best - second}"


def recipes() -> list[str]:
    """`STACKS`, and every method except frame selection at its defaults."""
    names = [method["name"] for method in vlmfast.methods() if method["protocol"] != "media"]
    return [*STACKS, *names]


def bfloat16(bench: Bench) -> None:
    """Answers of `tiny` and, if it was built, of `pocket` in bfloat16 against the CPU's.

    Rounding differs by device, and so may the choice of visual tokens: the rows say how often
    answers are equal and how far the CPU's token leads where they part, without a verdict.
    """
    names = ["tiny", *([str(POCKET)] if POCKET.is_dir() and not bench.dry else [])]
    for name in names:
        given = {"dtype": torch.bfloat16, "prefix_cache_bytes": 0}
        cpu = VLM.from_pretrained(name, device="cpu", **given)
        own = VLM.from_pretrained(name, device=bench.device, **given)
        other, same, ran = bench.vlm(own.model, own.processor), 0, 0
        for recipe in DRY_RECIPES if bench.dry else recipes():
            what = f"{Path(name).parent.name or name} in bfloat16, {recipe}"
            with bench.report.guarded(what):
                ask = partial(VLM.ask, question=QUESTION, images=IMAGE, recipe=recipe)
                try:
                    wanted = ask(cpu, max_new_tokens=8, top_logprobs=2)
                except RecipeError:  # `smoke` has its words
                    continue
                differs = difference(ask(other, max_new_tokens=8).token_ids, wanted, near=0)
                same, ran = same + (not differs), ran + 1
                if differs:
                    bench.report.row(f"{what}: another answer", differs)
        what = f"{Path(name).parent.name or name}: answers in bfloat16 that are the CPU's"
        bench.report.row(what, f"{same} of {ran}")


def joined(report: Report, vlm: VLM, cpu: VLM) -> None:
    """Six requests with different recipes and lengths, of which three are decoded at once."""
    recipe_lengths = {"none": 5, "hired:0.2": 9, "zipvl": 4, "kivi": 12, "snapkv:0.3": 7}
    requests = [asked(IMAGE, recipe, n) for recipe, n in (*recipe_lengths.items(), ("none", 3))]
    vlm.engine.max_rows = 3
    handles = [vlm.submit(request) for request in requests]
    got = [handle.result(timeout=300).token_ids for handle in handles]
    wanted = [cpu.ask(r.question, r.images, recipe=r.recipe, **r.generation) for r in requests]
    same = sum(a == b.token_ids for a, b in zip(got, wanted, strict=True))
    what = "requests that join and leave: answers that are the CPU's"
    report.row(what, same, "6", same == 6, bad="FAIL")


def asked(image: Any, recipe: str, length: int) -> Request:
    """A request for exactly ``length`` tokens."""
    return Request(QUESTION, image, recipe=recipe, generation=fixed(length))


def beside_a_thread(bench: Bench) -> None:
    """Capture decode steps of new shapes while another thread allocates and frees memory."""
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(1 << (12 if bench.dry else 24), device=bench.device).zero_()
            if not bench.dry:
                torch.cuda.empty_cache()

    other = threading.Thread(target=allocate, daemon=True)
    other.start()
    try:
        vlm = VLM.from_pretrained("tiny", device=bench.device, prefix_cache_bytes=0)
        for share in (0.1, 0.2, 0.3, 0.4):
            vlm.ask(QUESTION, IMAGE, recipe=f"hired:{share}", max_new_tokens=4)
    finally:
        stop.set()
        other.join()
    bench.report.row("captures beside a thread that allocates", "no error", "no error", True)
