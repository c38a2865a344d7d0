"""Compare complete answers with Hugging Face: ``python benchmarks/end_to_end.py --model NAME``.

Models have the sizes of published ones and random weights (`shapes.py`). For ``zipvl`` this means a
cache near its maximum size.

Measures Hugging Face's ``generate`` (``sdpa``, and with a static cache, whose decode step it
compiles on a GPU) and vlmfast at every batch size. All requests ask about the same image.

============  =====================================================================================
``first``     seconds from RGB images in host memory until every request has its first token
``rate``      tokens per second of the batch, from the third token on: the second may include a
              graph capture or a compilation
``memory``    peak allocated memory during the answers, with the model (CPU: resident size)
============  =====================================================================================

Before the measurement, every variant decodes 8 given tokens. Its logits may differ from its
reference by three times the difference between Hugging Face's ``eager`` and ``sdpa`` attention. For
``none`` and the static cache the reference is Hugging Face's ``sdpa`` with one request. For other
recipes it is the same recipe with one request and the kernels' PyTorch references, without graphs
or compilation. If the difference is larger, no ratio is reported.

Every part, a variant at a batch size, is written as soon as it is finished. The script ends before
``--minutes`` are over, with exit code 3 if parts are missing; the same command resumes it. Failed
parts are repeated then, except those that ran out of memory.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import harness
import torch
from ask import QUESTION
from harness import FULL, Parts, padded
from shapes import MODELS, build
from torch import Tensor

from vlmfast import VLM
from vlmfast.api.vlm import Request
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import drawn, forget_peak, peak

HF, STATIC = "hf sdpa", "hf static"
RECIPES = ("none", "hired:0.2", "pyramiddrop", "hired:0.2+pyramiddrop+zipvl")
FORCED = 8  # number of tokens whose logits are compared
LEAST = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # smallest tolerance, relative


# --- an image and a question ---------------------------------------------------------------------


@dataclass
class Job:
    """A model, an image and a question."""

    model: Any
    processor: Any
    image: Any
    question: str
    decoding: str = "auto"

    @property
    def device(self) -> torch.device:
        return self.model.device

    def vlm(self) -> VLM:
        """A new VLM without the buffers and captured steps of earlier variants."""
        return VLM(self.model, self.processor, decoding=self.decoding, prefix_cache_bytes=0)


def prepared(name: str, device: torch.device, dtype: torch.dtype, args: argparse.Namespace) -> Job:
    shape = MODELS[name]
    model, processor = build(shape, device, dtype, args.layers)
    height, width = shape.image
    image = drawn(max(shape.image)).resize((width, height))
    return Job(model, processor, image, QUESTION, args.decoding)


# --- one answer ----------------------------------------------------------------------------------


class Watch:
    """A stopping criterion that never stops and records the time of the first two tokens."""

    def __init__(self, device: torch.device, calls: int) -> None:
        self.device, self.calls, self.seen = device, calls, 0
        self.times: list[float] = []

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen += 1
        # Only the first two steps: `clock` synchronizes, which would slow later ones.
        if self.seen % self.calls == 0 and len(self.times) < 2:
            self.times.append(clock(self.device))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


class Forced:
    """A logits processor that records the logits and forces the given tokens."""

    def __init__(self, tokens: list[int] | None) -> None:
        self.tokens = tokens
        self.logits: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.to(torch.float32, copy=True))
        if self.tokens is None:
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.tokens[len(self.logits) - 1]] = 0.0
        return chosen


@dataclass
class Run:
    """Cost of one batch of answers in seconds and bytes, and its logits (B, n, V) if recorded."""

    first: float
    second: float
    rate: float
    memory: int | None
    parts: dict[str, float] = field(default_factory=dict)
    logits: Tensor | None = None
    tokens: list[int] = field(default_factory=list)


Answer = Callable[[int, int, "list[int] | bool"], Run]


def huggingface(job: Job, static: bool = False) -> Answer:
    """``(batch, new tokens, forced tokens) -> Run``; ``True`` only records the logits."""
    vlm = job.vlm()
    more = {"cache_implementation": "static"} if static else {}

    def answer(batch: int, new: int, forced: list[int] | bool = False) -> Run:
        watch, probe = Watch(job.device, 1), Forced(forced if isinstance(forced, list) else None)
        forget_peak(job.device)
        begin = clock(job.device)
        inputs = padded(vlm, job.question, [job.image] * batch)
        ids = job.model.generate(
            **inputs,
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=[watch],
            logits_processor=[probe] if forced else [],
            **more,
        )
        end = clock(job.device)
        run = _run(begin, watch, end, batch, new, peak(job.device))
        run.tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
        run.logits = torch.stack(probe.logits, 1) if forced else None
        return run

    return answer


def own(job: Job, recipe: str) -> Answer:
    """As `huggingface`, with vlmfast."""
    vlm = job.vlm()

    def answer(batch: int, new: int, forced: list[int] | bool = False) -> Run:
        watch = Watch(job.device, batch)
        tokens = forced if isinstance(forced, list) else None
        probes = [Forced(tokens) for _ in range(batch)]
        generation = {"max_new_tokens": new, "do_sample": False, "stopping_criteria": [watch]}
        requests = [
            Request(
                job.question,
                job.image,
                recipe=recipe,
                generation=generation | ({"logits_processor": [probe]} if forced else {}),
            )
            for probe in probes
        ]
        forget_peak(job.device)
        begin = clock(job.device)
        answers = vlm.ask_many(requests, batch_size=batch)
        end = clock(job.device)
        run = _run(begin, watch, end, batch, new, peak(job.device))
        stats = [answer.stats for answer in answers]
        run.tokens = answers[0].token_ids
        run.parts = {
            "prompt_tokens": stats[0].prompt_tokens,
            "visual_tokens": stats[0].equivalent_tokens,
            "processor": sum(s.time_processor_s for s in stats),
            "vision": sum(s.time_vision_s for s in stats),
            "reduce": sum(s.time_reduce_s for s in stats),
            "prefill": sum(s.time_prefill_s for s in stats),
            "kv_bytes": sum(s.kv_bytes for s in stats),
            "kv_bytes_full": sum(s.kv_bytes_full for s in stats),
        }
        if forced:
            run.logits = torch.stack([torch.stack(probe.logits, 1)[0] for probe in probes])
        return run

    return answer


def _run(begin: float, watch: Watch, end: float, batch: int, new: int, memory: int | None) -> Run:
    first, second = watch.times
    rate = batch * (new - 2) / (end - second) if new > 2 else 0.0
    return Run(first - begin, second - first, rate, memory)


def variant(job: Job, name: str) -> Answer:
    return huggingface(job, name == STATIC) if name in (HF, STATIC) else own(job, name)


# --- comparing -----------------------------------------------------------------------------------


@dataclass
class Judge:
    """Checks the logits of a variant.

    Parameters
    ----------
    tokens : list of int
        Greedy answer of Hugging Face; forced in every variant.
    logits : Tensor, (n, V)
        Hugging Face's logits after the prompt and after each token but the last.
    own : float
        Relative difference between its ``eager`` and ``sdpa`` attention.
    """

    job: Job
    tokens: list[int]
    logits: Tensor
    own: float
    allowed: float
    references: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(job: Job) -> Judge:
        answer = huggingface(job)
        run = answer(1, FORCED, True)
        logits = run.logits[0]
        job.model.set_attn_implementation("eager")
        try:
            other = answer(1, FORCED, run.tokens).logits
        finally:
            job.model.set_attn_implementation("sdpa")
        off = apart(other, logits)
        return Judge(job, run.tokens, logits, off, max(3 * off, LEAST[job.model.dtype]))

    def check(self, name: str, answer: Answer, batch: int) -> dict[str, Any]:
        """Whether the check ``passed``, ``error``, ``allowed`` error, and what was ``compared``."""
        got = answer(batch, FORCED, self.tokens).logits
        wanted, with_what = self.logits, "Hugging Face (sdpa)"
        if name not in (HF, STATIC, "none"):
            wanted, with_what = self.reference(name), "the same recipe by the PyTorch references"
        error = apart(got, wanted)
        return {
            "passed": error <= self.allowed,
            "error": error,
            "allowed": self.allowed,
            "hf_eager_error": self.own,
            "compared": f"logits of {FORCED} given tokens, {batch} requests, with {with_what}",
        }

    def reference(self, recipe: str) -> Tensor:
        if recipe not in self.references:
            job = copy.copy(self.job)
            job.decoding = "eager"
            with mock.patch.dict(os.environ, VLMFAST_KERNELS="torch"):
                run = own(job, recipe)(1, FORCED, self.tokens)
            self.references[recipe] = run.logits[0]
        return self.references[recipe]


def apart(got: Tensor, wanted: Tensor) -> float:
    """Largest relative error of a request: logits (B, n, V) against centered logits (n, V)."""
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
    off = (got - wanted).flatten(1).norm(dim=1) / spread
    return float(off.max()) if bool(off.isfinite().all()) else float("inf")


# --- the benchmark -------------------------------------------------------------------------------


def part(job: Job, judge: Judge, name: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run a variant at a batch size: the check, a warm-up run, and the measured runs."""
    answer = variant(job, name)
    found: dict[str, Any] = {"check": judge.check(name, answer, batch)}
    found["warm_up"] = harness.seconds(job.device, partial(answer, batch, args.new_tokens))
    runs = [answer(batch, args.new_tokens) for _ in range(args.repeats)]
    for key in ("first", "second", "rate", "memory"):
        values = [getattr(run, key) for run in runs]
        found[key] = None if None in values else statistics.median(values)
        found.setdefault("samples", {})[key] = values
    found["parts"] = {key: statistics.median(r.parts[key] for r in runs) for key in runs[0].parts}
    return found


def cleaned(job: Job) -> None:
    """Free what a variant leaves on the model."""
    for name in ("_cache", "_compiled_call"):
        if name in job.model.__dict__:
            delattr(job.model, name)
    torch._dynamo.reset()


def good(row: dict[str, Any]) -> bool:
    return "rate" in row and row["check"]["passed"]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, recipe=None, new_tokens=64, repeats=3, layers=0, decoding="auto", dtype=None,
        device=harness.DEVICE, minutes=9.0, again=False, fresh=False, out=None,
    )  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, choices=tuple(MODELS))
    add("--batches", default="1,8,32", help="comma-separated (%(default)s)")
    add("--no-hf", action="store_true", help="do not time Hugging Face (it is still compared)")
    add("--no-static", action="store_true", help="leave out Hugging Face's static cache")
    args = parser.parse_args(argv)
    if args.new_tokens < 3:
        parser.error("--new-tokens must be at least 3")
    args.batches = [int(batch) for batch in args.batches.split(",")]
    args.recipes = args.recipes or list(RECIPES)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


def main(argv: list[str]) -> int:
    args, start = parse(argv), time.perf_counter()
    about = harness.begin("end_to_end.py", argv, args)
    keys = ("model", "dtype", "new_tokens", "layers", "decoding")
    parts = Parts(
        harness.path_of(args, "end_to_end", args.model, about["device"]),
        about,
        {key: getattr(args, key) for key in keys},
        args.fresh,
    )
    names = args.recipes if args.no_hf else [HF, *args.recipes]
    names += [] if args.no_hf or args.no_static else [STATIC]
    wanted = [f"{name} | {batch}" for batch in args.batches for name in names]
    missing = wanted if args.again else parts.missing(wanted)
    if missing:
        job = prepared(args.model, torch.device(args.device), getattr(torch, args.dtype), args)
        judge = Judge.of(job)
        print(f"{args.model}: ready after {time.perf_counter() - start:.0f} s", file=sys.stderr)

    def measure(key: str) -> dict[str, Any]:
        name, batch = key.rsplit(" | ", 1)
        cleaned(job)
        return part(job, judge, name, int(batch), args)

    left = parts.measure(missing, measure, start + 60 * args.minutes)
    print(f"\n{args.model}, {args.dtype}, {about['device']}\n")
    columns = ("parts.visual_tokens", "first", "parts.prefill", "rate", "parts.kv_bytes", "memory")
    print(harness.shown(parts.rows, *columns, "check.passed", "check.error"))
    wrong = {k: r for k, r in parts.rows.items() if not good(r) and r.get("failed") != FULL}
    for key, row in wrong.items():
        print(f"WRONG: {key}: {row.get('failed') or row['check']}")
    return parts.ended(left, len(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
