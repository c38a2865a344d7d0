"""Run every path that needs a GPU once: ``python benchmarks/gpu_hour.py``.

Weights are random or those of `tiny`, and nothing is downloaded. Six parts run in this order; name
parts to run only those.

===========  ===================================================================================
``probe``    device, versions, copy bandwidth, time of the first and of later answers
``smoke``    every method of the library on `tiny`: captured decoding, eager decoding and the
             kernels' PyTorch references must all give the CPU's tokens; requests that join and
             leave, streaming, a session; captures while another thread allocates memory
``bfloat16`` answers of `tiny` and `pocket` in bfloat16, compared with the CPU's
``kernels``  the rows of `kernels.py`, in its own process, with their thresholds
``step``     launches per layer of each model family; decode steps of LLaVA-NeXT and of Qwen2.5-VL
             at 7B, compared with the time to read weights and cache once at the copy bandwidth;
             time of a capture
``serve``    tokens per second of requests with equal and with different answer lengths, with and
             without the time of their prompts, captures that they share, time of the first
             token, idle memory
===========  ===================================================================================

Rows with a threshold (`gpu_limits.py`) have a verdict: ``PASS``, ``MISS`` (too slow) or ``FAIL``
(wrong result or error). The result file is written after every row, with device, versions, command
and date; it keeps the rows of parts that are not run again on the same device. ``--dry`` checks the
script at small sizes on a CPU, where steps are repeated instead of captured and times have no
verdict. The exit code is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import end_to_end
import gpu_limits as limits
import kv
import shapes
import torch
from ask import RESULTS
from gpu_answers import IMAGE, QUESTION, WHOLE, asked, bfloat16, smoke

from vlmfast import VLM
from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.forward import forward
from vlmfast.engine.fused import fusable
from vlmfast.engine.graphs import Graphs, State, StepGraphs, cuda_graph
from vlmfast.engine.opening import reading
from vlmfast.engine.prefill import Inputs
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import drawn, provenance
from vlmfast.eval.results import write_json

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("probe", "smoke", "bfloat16", "kernels", "step", "serve")
# Builders of `tests/tiny_families.py`, two layers each.
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "idefics3")


# --- rows ----------------------------------------------------------------------------------------


@dataclass
class Report:
    """Rows of the result file, written and printed immediately.

    Parameters
    ----------
    path : Path
    about : dict
        Command, device, versions, date.
    """

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""

    def row(self, what: str, value: Any, aim: str = "", ok: bool | None = None) -> None:
        """Add a row; ``ok`` is whether the threshold was met, ``None`` without a threshold."""
        self.add(what, value, aim, "" if ok is None else "PASS" if ok else "MISS")

    def exact(self, what: str, value: Any, aim: str, ok: bool) -> None:
        """The same for results that must be correct: ``FAIL`` instead of ``MISS``."""
        self.add(what, value, aim, "PASS" if ok else "FAIL")

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Convert errors to rows; errors that break the CUDA context end the script."""
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            traceback.print_exc(limit=4)
            self.add(what, f"{type(error).__name__}: {text}", "", "FAIL")
            if "CUDA error" in text or "illegal memory access" in text:
                raise SystemExit(1) from error

    def add(self, what: str, value: Any, aim: str, verdict: str) -> None:
        """Add a row, print it and write the file."""
        row = {"part": self.part, "what": what, "value": value, "aim": aim, "verdict": verdict}
        self.rows.append(row)
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{verdict:5} {what:64} {shown:>24}  {aim}", flush=True)
        write_json(self.path, {**self.about, "rows": self.rows})


@dataclass(frozen=True)
class Bench:
    """Device and size of the parts.

    ``share``: which recipes of `smoke`, number and step. ``minutes``: limit of `kernels`.
    """

    report: Report
    device: torch.device
    dry: bool
    share: tuple[int, int] = WHOLE
    minutes: float = 7.5

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def most(self, what: str, value: float, limit: float | None = None) -> None:
        """A measurement of at most ``limit``."""
        self._judged(what, value, "<=", limit, limit is not None and value <= limit)

    def least(self, what: str, value: float, limit: float | None = None) -> None:
        """A measurement of at least ``limit``."""
        self._judged(what, value, ">=", limit, limit is not None and value >= limit)

    def _judged(self, what: str, value: float, sign: str, limit: float | None, ok: bool) -> None:
        if self.dry or limit is None:
            self.report.row(what, value)
        else:
            self.report.row(what, value, f"{sign} {limit:g}", ok)

    def vlm(self, model: Any, processor: Any, **given: Any) -> VLM:
        """A model without prefix cache; in a dry run its steps are captured by `repeated`."""
        vlm = VLM(model, processor, prefix_cache_bytes=0, **given)
        if self.dry and "decoding" not in given:
            vlm.adapter.decoding = "graph"
            vlm.adapter.kept["graphs"] = Graphs(record=repeated)
        return vlm

    @property
    def record(self) -> Any:
        """What captures a step."""
        return repeated if self.dry else cuda_graph

    def cleaned(self) -> None:
        """Free what no model holds."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def bandwidth(self) -> float:
        """Bytes per second of a large copy, reads plus writes."""
        x = torch.randn(1 << (20 if self.dry else 28), device=self.device)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.seconds(lambda: y.copy_(x), 10)

    def seconds(self, call: Callable[[], Any], count: int) -> float:
        """Median time of a call including the device's work."""
        for _ in range(3):
            call()
        found = []
        for _ in range(count):
            begin = clock(self.device)
            call()
            found.append(clock(self.device) - begin)
        return statistics.median(found)


def repeated(step: Callable[[], None], state: Callable[[], State]) -> Callable[[], None]:
    """Stands in for `cuda_graph` on a CPU: repeats the step, and raises if its tensors move."""
    addresses = {key: x.data_ptr() for key, x in state().items()}

    def replay() -> None:
        if addresses != {key: x.data_ptr() for key, x in state().items()}:
            raise RuntimeError("a tensor of the captured step has moved")
        step()

    return replay


# --- probe ---------------------------------------------------------------------------------------


def probe(bench: Bench) -> None:
    report = bench.report
    report.row("device", report.about["device"])
    if not bench.dry:
        major, minor = torch.cuda.get_device_capability()
        report.exact("compute capability", f"{major}.{minor}", ">= 8.0", major >= 8)
    known = [rate for name, rate in limits.COPY.items() if name in report.about["device"]]
    expected = limits.COPY_SHARE * known[0] / 1e12 if known else None
    bench.least("bandwidth of a copy, TB/s", bench.bandwidth() / 1e12, expected)
    begin = clock(bench.device)
    vlm = VLM.from_pretrained("tiny", device=bench.device, prefix_cache_bytes=0)
    bench.most("loading tiny, s", clock(bench.device) - begin)
    answers = (
        ("first answer, kernels compile", limits.FIRST_ANSWER),
        ("second", limits.SECOND_ANSWER),
        ("third", limits.THIRD_ANSWER),
    )
    for what, limit in answers:
        begin = clock(bench.device)
        answer = vlm.ask(QUESTION, IMAGE, max_new_tokens=8)
        bench.most(f"{what} ({answer.text}), s", clock(bench.device) - begin, limit)
    with report.guarded("streaming, in a thread of its own"):
        *pieces, _ = vlm.stream(QUESTION, IMAGE, max_new_tokens=4)
        report.row("streaming, in a thread of its own", "".join(pieces))


# --- kernels -------------------------------------------------------------------------------------


def kernel_rows(bench: Bench) -> None:
    """`kernels.py` in its own process, and the verdicts of its rows."""
    report = bench.report
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(Path(__file__).with_name("kernels.py"))]
        if bench.dry:
            out = Path(scratch) / "kernels.json"
            command += ["--check", "--kernel", "swiglu", "--shapes", "small", "--out", str(out)]
        else:
            out = report.path.with_name(report.path.name.replace("gpu_hour", "kernels"))
            command += ["--minutes", str(bench.minutes), "--row-seconds", "40", "--missing"]
            command += ["--out", str(out)]
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if not out.is_file():
            report.exact("kernels.py", f"exit code {code}, no result", "a result file", False)
            return
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    wrong = [key for key, row in rows.items() if not row.get("check", {}).get("passed")]
    agree = f"{len(rows) - len(wrong)} of {len(rows)}"
    report.exact("kernels that agree with their references", agree, "all", not wrong and bool(rows))
    for key in wrong:
        report.row(key, rows[key].get("error") or rows[key]["check"]["why"])
    if not bench.dry:
        for limit in limits.LIMITS:
            report.add(limit.row, *limits.verdict(limit, rows))


# --- step ----------------------------------------------------------------------------------------


def step(bench: Bench) -> None:
    for name in FAMILIES:
        with bench.report.guarded(f"launches per layer, {name}"):
            launches_per_layer(bench, name)
    bandwidth = bench.bandwidth()
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
            bench.least(what, full / short, limits.SHORT_CACHE)
            del vlm
        bench.cleaned()


@torch.no_grad()
def launches_per_layer(bench: Bench, name: str) -> None:
    """Kernels of a captured step of two layers, less those of one."""
    found = []
    for layers in (2, 1):
        model, processor = shapes.family(name)
        decoder = model.get_decoder()
        del decoder.layers[layers:]
        config = decoder.config
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:layers]
        vlm = bench.vlm(model.to(bench.device, bench.dtype), processor)
        with switched(vlm.model):
            run = prefilled(vlm, "none", 48)
            batch = Batch()
            batch.join(run.group)
            batch.next(torch.full((1, 1), 7, device=bench.device))
            replay = next(iter(run.group.graphs._replays.values()))
            found.append(sum(count for count, _ in launched(bench, replay).values()))
            batch.release()
    what = f"launches per layer, {name}, {'fused' if fusable(vlm.adapter) else 'modules'}"
    bench.most(what, found[0] - found[1], limits.LAUNCHES_PER_LAYER)


def launched(bench: Bench, replay: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """How often a replay launches each kernel, and their time in microseconds.

    In a dry run, each operation of PyTorch.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA
    kind = DeviceType.CPU if bench.dry else DeviceType.CUDA
    with profile(activities=[activity]) as seen:
        replay()
        if not bench.dry:
            torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events():
        if event.device_type == kind:
            count, took = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, took + event.time_range.elapsed_us()
    return found


@torch.no_grad()
def steps(bench: Bench, vlm: VLM, name: str, recipe: str, batch: int, bandwidth: float) -> float:
    """Measure decode steps of ``batch`` requests of equal length; returns the seconds of one."""
    report, what = bench.report, f"{name} | {recipe} | batch {batch}"
    with switched(vlm.model):
        runs = [prefilled(vlm, recipe, 256 if bench.dry else 2944) for _ in range(batch)]
        decoder = Batch(batch)
        for run in runs:
            decoder.join(run.group)
        (group,) = decoder.groups
        tokens = torch.full((batch, 1), 7, device=bench.device)
        begin = clock(bench.device)
        decoder.next(tokens)
        bench.most(f"{what}: first step, compiles and captures, s", clock(bench.device) - begin)
        for _ in range(3):
            decoder.next(tokens)
        captured = vlm.adapter.kept["graphs"].captured
        count = 4 if bench.dry else 24
        begin = clock(bench.device)
        for _ in range(count):  # asynchronous, as far as the method allows it
            decoder.next(tokens)
        took = (clock(bench.device) - begin) / count
        floor = (end_to_end.weights(vlm.model) + group.cache.held_bytes()) / bandwidth
        report.row(f"{what}: floor, ms", 1e3 * floor)
        report.row(f"{what}: step, ms", 1e3 * took)
        judged = batch == 1 and recipe == "none"
        limit = limits.STEP_OF_FLOOR[name] if judged else None
        bench.least(f"{what}: floor over step", floor / took, limit)
        more = vlm.adapter.kept["graphs"].captured - captured
        report.row(f"{what}: captures of later steps", more, "0", more == 0)
        with report.guarded(f"{what}: captured step"):
            capture(bench, what, group, tokens)
        decoder.release()
    return took


def prefilled(vlm: VLM, recipe: str, length: int) -> Sequence:
    """A request after the prefill of random embeddings."""
    prompt = kv.prompt(vlm, length)
    text = {"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=vlm.adapter.device)}
    engine, begin = Engine(vlm.adapter), clock(vlm.adapter.device)
    sequence = reading(vlm.adapter, Inputs(text), Recipe.of(recipe), begin)
    axes = len(vlm.adapter.positions(text))
    position = prompt.layout.position.expand(axes, -1)
    prompt.layout = prompt.layout.replace(position=position)
    sequence.trace.begin(prompt.layout.select(prompt.layout.visual), vlm.adapter.depth)
    engine.prefiller.prefill(sequence, prompt, 200)
    return sequence


def capture(bench: Bench, what: str, group: RowGroup, tokens: torch.Tensor) -> None:
    """Measure one replay without the host, its kernels, and the time of a capture."""
    replay = next(iter(group.graphs._replays.values()))
    bench.report.row(f"{what}: replay alone, ms", 1e3 * bench.seconds(replay, 10))
    counts = launched(bench, replay)
    per_layer = sum(count for count, _ in counts.values()) / group.adapter.depth
    bench.report.row(f"{what}: launches of the step over its layers", per_layer)
    for kernel in sorted(counts, key=lambda name: counts[name][1], reverse=True)[:12]:
        count, took = counts[kernel]
        print(f"{'':6}{count:5} x {took / count:8.2f} us = {took / 1e3:7.3f} ms  {kernel[:80]}")
    begin = clock(bench.device)
    again = StepGraphs(group.kind, None, group.cache, bench.record)
    again.run(partial(forward, group.adapter), (), tokens)
    bench.most(f"{what}: another capture, s", clock(bench.device) - begin, limits.CAPTURE)


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
            bench.least(f"{recipe}, {size} at once: ragged over equal", share, limits.RAGGED)
    graphs = vlm.adapter.kept["graphs"]
    report.row("steps captured, buffers reused", f"{graphs.captured}, {graphs.reused}")
    first = {}
    for recipe in ("none", "hired:0.2"):
        given = {"recipe": recipe, "max_new_tokens": 2}
        parts = ("processor", "vision", "reduce", "prefill")
        vlm.ask(QUESTION, image, **given)
        stats = [vlm.ask(QUESTION, image, **given).stats for _ in range(1 if bench.dry else 5)]
        times = [[getattr(each, f"time_{name}_s") for name in parts] for each in stats]
        first[recipe] = statistics.median(map(sum, times))
        limit = limits.PREFILL if recipe == "none" else None
        prefill = statistics.median(each[-1] for each in times)
        bench.most(f"one request, {recipe}: prefill, s", prefill, limit)
    ratio = first["none"] / first["hired:0.2"]
    bench.least("time to the first token, none over hired:0.2", ratio, limits.TTFT)
    asks += 12
    if not bench.dry:
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        what = f"reserved and not allocated after {asks} requests, GB"
        bench.most(what, idle / 1e9, limits.IDLE_BYTES / 1e9)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    add("--dry", action="store_true", help="use small sizes on a CPU to check the script")
    add("--out", type=Path, help="default: benchmarks/results/gpu_hour-DEVICE.json")
    add("--minutes", type=float, default=7.5, help="time limit of kernels (%(default)s)")
    add("--share", default="0/1", help=argparse.SUPPRESS)  # of the recipes of `smoke`
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    return args


def kept_rows(out: Path, device: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of earlier runs on this device, of parts that are not run now."""
    if not out.is_file():
        return []
    before = json.loads(out.read_text(encoding="utf-8"))
    if before["device"] != device or before["dry"] != args.dry:
        return []
    return [row for row in before["rows"] if row["part"] not in args.parts]


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device found; --dry runs small sizes on a CPU", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    device = torch.device("cpu" if args.dry else "cuda")
    about = provenance("gpu_hour.py", arguments, device.type)
    if args.dry:
        torch.set_num_threads(1)  # more threads are slower at these sizes
    kind = about["device"].replace(" ", "-").lower()
    out = args.out or RESULTS / f"gpu_hour-{kind}.json"
    report = Report(out, {"dry": args.dry, **about})
    report.rows += kept_rows(out, about["device"], args)
    number, count = map(int, args.share.split("/"))
    bench = Bench(report, device, args.dry, (number, count), args.minutes)
    for part in args.parts:
        report.part, begin = part, time.perf_counter()
        print(f"\n{part}", flush=True)
        with report.guarded(part):
            run = {"probe": probe, "smoke": smoke, "bfloat16": bfloat16, "kernels": kernel_rows}
            (run | {"step": step, "serve": serve})[part](bench)
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
    sys.exit(main())
