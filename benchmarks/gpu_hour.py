"""Run every path that needs a GPU once: ``python benchmarks/gpu_hour.py``.

Weights are random or those of `tiny`, and nothing is downloaded. Four parts run in this order; name
parts to run only those.

===========  ===================================================================================
``smoke``    every method of the library on `tiny`: captured decoding, eager decoding and the
             kernels' PyTorch references must all give the CPU's tokens; requests that join and
             leave, a session; captures while another thread allocates memory
``bfloat16`` answers of `tiny` and `pocket` in bfloat16, compared with the CPU's
``step``     decode steps of LLaVA-NeXT and of Qwen2.5-VL at 7B and Qwen3-VL at 8B, compared with
             the time to read weights and cache once at the copy bandwidth; time of a capture
``serve``    tokens per second of requests with equal and with different answer lengths, with and
             without the time of their prompts, captures that they share, idle memory
===========  ===================================================================================

Rows with a threshold have a verdict: ``PASS``, ``MISS`` (too slow) or ``FAIL``
(wrong result or error). The result file is written after every row, with device, versions, command
and date; it keeps the rows of parts that are not run again on the same device. ``--dry`` checks the
script at small sizes on a CPU, where steps are repeated instead of captured and times have no
verdict. The exit code is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import harness
import kv
import shapes
import torch
from gpu_answers import asked, bfloat16, smoke
from gpu_rows import Bench, Report
from ttft import anatomy

from vlmfast import VLM
from vlmfast.check.kernels import measure_copy
from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.forward import forward
from vlmfast.engine.fused import fusable
from vlmfast.engine.graphs import StepGraphs
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import drawn

PARTS = ("smoke", "bfloat16", "step", "serve")
# Thresholds are estimates from the compiled code. Floor over the time of a decode step of one
# request with 2,944 tokens, at least: the bytes that it reads over the measured bandwidth.
STEP_OF_FLOOR = {"llava-next-7b": 0.75, "qwen2.5-vl-7b": 0.70}
SHORT_CACHE = 1.8  # times that a step of 16 rows is faster with a fifth of the keys and values
RAGGED = 0.7  # tokens per second with different answer lengths, over those with equal ones
CAPTURE = 0.15  # seconds, at most
IDLE = 2.0  # GB that are reserved and not allocated after all requests, at most


# --- step ----------------------------------------------------------------------------------------


def step(bench: Bench) -> None:
    bandwidth = 1e10 if bench.dry else measure_copy(bench.device)
    small = shapes.MODELS["tiny-shape" if bench.dry else "llava-next-7b"]
    models = {"llava-next-7b": partial(shapes.build, small, bench.device, bench.dtype)}
    for name in shapes.QWEN:
        models[name] = partial(shapes.qwen, name, bench.device, bench.dtype, bench.dry)
    many = 2 if bench.dry else 16
    for name, build in models.items():
        with bench.report.guarded(name):
            vlm = bench.vlm(*build())
            bench.report.row(f"{name}: fused decode step", fusable(vlm.adapter))
            for recipe in ("none", "snapkv:0.2", "kivi", "zipcache"):
                steps(bench, vlm, name, recipe, 1, bandwidth)
            full = steps(bench, vlm, name, "none", many, bandwidth)
            short = steps(bench, vlm, name, "snapkv:0.2", many, bandwidth)
            what = f"{name} | batch {many}: step of none over snapkv:0.2"
            bench.within(what, full / short, least=SHORT_CACHE)
            del vlm
        bench.cleaned()


def weights(model: Any) -> int:
    """Bytes of weights that a decode step reads."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight.nbytes
    return sum(p.nbytes for p in decoder.parameters()) - embedding + head.weight.nbytes


@torch.no_grad()
def steps(bench: Bench, vlm: VLM, name: str, recipe: str, batch: int, bandwidth: float) -> float:
    """Measure decode steps of ``batch`` requests of equal length; returns the seconds of one."""
    report, what = bench.report, f"{name} | {recipe} | batch {batch}"
    with switched(vlm.model):
        asked, plan = kv.noise(vlm, 256 if bench.dry else 2944), Recipe.parse(recipe)
        runs = [kv.prefilled(vlm, plan, asked, 200)[0] for _ in range(batch)]
        decoder = Batch(batch)
        for run in runs:
            decoder.join(run.group)
        (group,) = decoder.groups
        tokens = torch.full((batch, 1), 7, device=bench.device)
        first = harness.seconds(bench.device, partial(decoder.next, tokens))
        report.row(f"{what}: first step, compiles and captures, s", first)
        for _ in range(3):
            decoder.next(tokens)
        captured = vlm.adapter.kept["graphs"].captured
        count = 4 if bench.dry else 24
        begin = clock(bench.device)
        for _ in range(count):  # asynchronous, as far as the method allows it
            decoder.next(tokens)
        took = (clock(bench.device) - begin) / count
        floor = (weights(vlm.model) + group.cache.held_bytes()) / bandwidth
        report.row(f"{what}: floor, ms", 1e3 * floor)
        report.row(f"{what}: step, ms", 1e3 * took)
        judged = batch == 1 and recipe == "none"
        least = STEP_OF_FLOOR.get(name) if judged else None
        bench.within(f"{what}: floor over step", floor / took, least=least)
        more = vlm.adapter.kept["graphs"].captured - captured
        report.row(f"{what}: captures of later steps", more, "0", more == 0)
        with report.guarded(f"{what}: captured step"):
            capture(bench, what, group, tokens)
        group.release()
    return took


def capture(bench: Bench, what: str, group: RowGroup, tokens: torch.Tensor) -> None:
    """Measure one replay without the host, its kernels, and the time of a capture."""
    replay = next(iter(group.graphs._replays.values()))
    once = partial(harness.seconds, bench.device, replay)
    alone = statistics.median(once() for _ in range(10))
    bench.report.row(f"{what}: replay alone, ms", 1e3 * alone)
    found = anatomy(replay, bench.device)
    bench.report.row(
        f"{what}: launches of the step over its layers", found["work"] / group.adapter.depth
    )
    for kernel, took in found["kernels"].items():
        print(f"{'':6}{1e3 * took:7.3f} ms  {kernel[:80]}")
    again = StepGraphs(group.kind, None, group.cache, bench.record)
    run = partial(again.run, partial(forward, group.adapter), (), tokens)
    took = harness.seconds(bench.device, run)
    bench.within(f"{what}: another capture, s", took, most=CAPTURE)


# --- serve ---------------------------------------------------------------------------------------


def serve(bench: Bench) -> None:
    report = bench.report
    shape = shapes.MODELS["tiny-shape" if bench.dry else "llava-next-7b"]
    vlm = bench.vlm(*shapes.build(shape, bench.device, bench.dtype))
    image, asks = drawn(max(shape.image)), 0
    waves = (("none", 2),) if bench.dry else (("none", 4), ("hired:0.2", 4), ("hired:0.2", 16))
    for recipe, size in waves:
        rates = {}
        for lengths in ("equal", "ragged"):
            what = f"{recipe}, {size} at once, {lengths} lengths"
            with report.guarded(what):
                served(bench, vlm, image, recipe, size, lengths)  # captures
                captured = vlm.adapter.kept["graphs"].captured
                rates[lengths], whole = served(bench, vlm, image, recipe, size, lengths)
                report.row(f"{what}: decoded tokens per second", rates[lengths])
                report.row(f"{what}: tokens per second, prompts counted", whole)
                more = vlm.adapter.kept["graphs"].captured - captured
                report.row(f"{what}: captures in steady state", more, "0", more == 0)
                asks += 4 * size
        if len(rates) == 2:
            share = rates["ragged"] / rates["equal"]
            bench.within(f"{recipe}, {size} at once: ragged over equal", share, least=RAGGED)
    graphs = vlm.adapter.kept["graphs"]
    report.row("steps captured, buffers reused", f"{graphs.captured}, {graphs.reused}")
    if not bench.dry:
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        what = f"reserved and not allocated after {asks} requests, GB"
        bench.within(what, idle / 1e9, most=IDLE)
        report.row("memory allocated at most, GB", torch.cuda.max_memory_allocated() / 1e9)


def served(
    bench: Bench, vlm: VLM, image: Any, recipe: str, size: int, lengths: str
) -> tuple[float, float]:
    """Tokens per second of ``2 * size`` requests that join and leave: without prompts, in all."""
    if bench.dry:
        counts = [6 if lengths == "equal" else 3 + i for i in range(2 * size)]
    else:
        counts = [32 if lengths == "equal" else 8 + 13 * i % 49 for i in range(2 * size)]
    vlm.engine.max_rows = size
    begin = clock(bench.device)
    handles = [vlm.submit(asked(image, recipe, count)) for count in counts]
    answers = [handle.result(timeout=600) for handle in handles]
    took = whole = clock(bench.device) - begin
    for stats in (answer.stats for answer in answers):
        took -= stats.time_processor_s + stats.time_vision_s + stats.time_prefill_s
    tokens = sum(len(answer.token_ids) for answer in answers)
    return tokens / max(took, 1e-9), tokens / whole


# --- the script ----------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__, out=None)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    add("--dry", action="store_true", help="use small sizes on a CPU to check the script")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    # More threads are slower at the sizes of a dry run.
    args.device, args.threads = ("cpu", 1) if args.dry else ("cuda", 0)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device found; --dry runs small sizes on a CPU", file=sys.stderr)
        return 2
    about = harness.begin("gpu_hour.py", argv, args)
    out = harness.path_of(args, "gpu_hour", about["device"])
    report = Report(out, {"dry": args.dry, **about})
    before = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"rows": []}
    if (before.get("device"), before.get("dry")) == (about["device"], args.dry):
        report.rows += [row for row in before["rows"] if row["part"] not in args.parts]
    bench = Bench(report, torch.device(args.device), args.dry)
    run = {"smoke": smoke, "bfloat16": bfloat16, "step": step, "serve": serve}
    for part in args.parts:
        report.part, begin = part, time.perf_counter()
        print(f"\n{part}", flush=True)
        with report.guarded(part):
            run[part](bench)
        report.row(f"{part}: whole time, s", time.perf_counter() - begin)
        bench.cleaned()
    rows = [row for row in report.rows if row["part"] in args.parts]
    failed = [row for row in rows if row["verdict"] == "FAIL"]
    missed = sum(row["verdict"] == "MISS" for row in rows)
    print(f"\n{len(rows)} rows, {missed} MISS, {len(failed)} FAIL")
    for row in failed:
        print(f"FAIL  {row['part']}: {row['what']}: {row['value']}")
    print(f"written: {out}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
