"""Run every path that needs a GPU once: ``python benchmarks/gpu_hour.py``.

Weights are random or those of `tiny`, and nothing is downloaded. Four parts run in this order; name
parts to run only those.

=========  =====================================================================================
``probe``  device, versions, copy bandwidth, time of the first and of later answers
``smoke``  every method of the library on `tiny`: captured decoding, eager decoding and the
           kernels' PyTorch references must all give the CPU's tokens; a ragged batch, streaming,
           a session; captures while another thread allocates memory
``step``   decode steps of LLaVA-NeXT and of Qwen2.5-VL at 7B, compared with the time to read
           weights and cache once at the copy bandwidth; kernels per layer, time of a capture
``serve``  tokens per second of batches with equal and with different answer lengths
=========  =====================================================================================

Rows with a target have a verdict: ``PASS``, ``MISS`` (target missed) or ``FAIL`` (wrong result or
error). The result file is written after every row, with device, versions, command and date.
``--dry`` checks the script at small sizes on a CPU; times have no verdict then. The
exit code is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shlex
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import end_to_end
import kv
import torch

import vlmfast
from kernels import kernels
from vlmfast import VLM, RecipeError, Request
from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.forward import forward
from vlmfast.engine.fused import fusable
from vlmfast.engine.graphs import StepGraphs, cuda_graph
from vlmfast.engine.opening import reading
from vlmfast.engine.prefill import Inputs
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import drawn, facts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("probe", "smoke", "step", "serve")
QUESTION = "What is in the bottom left?"
IMAGE = str(ROOT / "examples" / "picture.png")
# In addition to each method at its defaults.
STACKS = (
    "none",
    "downsample:0.3,proportional_attention=true",
    "pyramiddrop:positions=compact",
    "kivi:residual=32",
    "zipvl:tau=0.9,kv=drop,rows=all",
    "draft-auto+kivi",
    "hired:0.5+pyramiddrop+zipvl",
)
DRY_RECIPES = ("none", "hired:0.2", "zipvl")
# Targets: seconds, and the ratio of the time to read weights and cache once to the step time.
FIRST, LATER, SECOND_REQUEST, CAPTURE = 1.5, 0.3, 0.5, 0.15
OF_FLOOR = {"llava-next-7b": 0.75, "qwen2.5-vl-7b": 0.70}
KERNELS_PER_LAYER = 16


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
        """Add a row; ``ok`` is whether the target was met, ``None`` without a target."""
        self._add(what, value, aim, "" if ok is None else "PASS" if ok else "MISS")

    def exact(self, what: str, value: Any, aim: str, ok: bool) -> None:
        """The same for results that must be correct: ``FAIL`` instead of ``MISS``."""
        self._add(what, value, aim, "PASS" if ok else "FAIL")

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Convert errors to rows; errors that break the CUDA context end the script."""
        try:
            yield
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            traceback.print_exc(limit=4)
            self._add(what, f"{type(error).__name__}: {text}", "", "FAIL")
            if "CUDA error" in text or "illegal memory access" in text:
                raise SystemExit(1) from error

    def _add(self, what: str, value: Any, aim: str, verdict: str) -> None:
        row = {"part": self.part, "what": what, "value": value, "aim": aim, "verdict": verdict}
        self.rows.append(row)
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{verdict:5} {what:64} {shown:>24}  {aim}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.about, "rows": self.rows}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")

    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["verdict"] == "FAIL"]


@dataclass(frozen=True)
class Bench:
    """Device and size of the parts."""

    report: Report
    device: torch.device
    dry: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def timed(self, what: str, seconds: float, aim: float | None = None) -> None:
        """A row in seconds, at most ``aim``."""
        judged = aim is not None and not self.dry
        text = f"<= {aim:g}" if judged else ""
        self.report.row(f"{what}, s", seconds, text, seconds <= aim if judged else None)

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


# --- probe ---------------------------------------------------------------------------------------


def probe(bench: Bench) -> None:
    report = bench.report
    report.row("device", report.about["device"])
    if not bench.dry:
        major, minor = torch.cuda.get_device_capability()
        report.exact("compute capability", f"{major}.{minor}", ">= 8.0", major >= 8)
    report.row("bandwidth of a copy, TB/s", bench.bandwidth() / 1e12)
    begin = clock(bench.device)
    vlm = VLM.from_pretrained("tiny", device=bench.device, prefix_cache_bytes=0)
    bench.timed("loading tiny", clock(bench.device) - begin)
    for what, aim in (("first answer, kernels compile", None), ("second", FIRST), ("third", LATER)):
        begin = clock(bench.device)
        answer = vlm.ask(QUESTION, IMAGE, max_new_tokens=8)
        bench.timed(f"{what} ({answer.text})", clock(bench.device) - begin, aim)
    with report.guarded("streaming, in a thread of its own"):
        *pieces, _ = vlm.stream(QUESTION, IMAGE, max_new_tokens=4)
        report.row("streaming, in a thread of its own", "".join(pieces))


# --- smoke ---------------------------------------------------------------------------------------


def smoke(bench: Bench) -> None:
    report, new = bench.report, 6 if bench.dry else 48
    length = {"max_new_tokens": new, "min_new_tokens": new}
    cpu = VLM.from_pretrained("tiny", device="cpu", dtype=torch.float32, prefix_cache_bytes=0)
    auto = VLM.from_pretrained(
        "tiny", device=bench.device, dtype=torch.float32, prefix_cache_bytes=0
    )
    eager = VLM(auto.model, auto.processor, decoding="eager", prefix_cache_bytes=0)
    modes = {"auto": (auto, None), "eager": (eager, None), "references": (eager, "torch")}
    differing, ran, second = [], 0, {}
    for recipe in DRY_RECIPES if bench.dry else recipes():
        with report.guarded(f"recipe {recipe}"):
            try:
                wanted = cpu.ask(QUESTION, IMAGE, recipe=recipe, **length).token_ids
            except RecipeError as refusal:  # such as a method without weights for `tiny`
                report.row(f"recipe {recipe}", f"refused: {refusal}")
                continue
            for mode, (vlm, choice) in modes.items():
                with kernels(choice) if choice else contextlib.nullcontext():
                    got = vlm.ask(QUESTION, IMAGE, recipe=recipe, **length).token_ids
                ran += 1
                if got != wanted:
                    differing.append(f"{recipe} ({mode})")
            begin = clock(bench.device)
            auto.ask(QUESTION, IMAGE, recipe=recipe, **length)
            second[recipe] = clock(bench.device) - begin
    right = f"{ran - len(differing)} of {ran}"
    report.exact("answers that are the CPU's, in float32", right, "all", not differing)
    for what in differing:
        report.row("tokens differ", what)
    for recipe in sorted(second, key=second.get, reverse=True)[:5]:
        bench.timed(f"a later request, {recipe}", second[recipe], SECOND_REQUEST)
    with report.guarded("ragged batch"):
        ragged(report, auto, cpu)
    with report.guarded("session"), auto.session(images=IMAGE, recipe="lookm:0.5") as session:
        texts = [session.ask(q, max_new_tokens=6).text for q in (QUESTION, "And above it?")]
        report.row("two questions of a session", " / ".join(texts))
    with report.guarded("captures beside a thread that allocates"):
        beside_a_thread(bench)


def recipes() -> list[str]:
    """`STACKS`, and every method except frame selection at its defaults."""
    names = [method["name"] for method in vlmfast.methods() if method["protocol"] != "media"]
    return [*STACKS, *names]


def ragged(report: Report, vlm: VLM, cpu: VLM) -> None:
    """Six requests with different recipes and lengths in a batch of three."""
    pairs = zip(
        ("none", "hired:0.2", "zipvl", "kivi", "snapkv:0.3", "none"),
        (5, 9, 4, 12, 7, 3),
        strict=True,
    )
    requests = [
        Request(QUESTION, IMAGE, recipe=text, generation={"max_new_tokens": n, "min_new_tokens": n})
        for text, n in pairs
    ]
    got, wanted = (
        [answer.token_ids for answer in model.ask_many(requests, batch_size=3)]
        for model in (vlm, cpu)
    )
    same = sum(a == b for a, b in zip(got, wanted, strict=True))
    report.exact("ragged batch: answers that are the CPU's", same, "6", same == 6)


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
    bench.report.exact("captures beside a thread that allocates", "no error", "no error", True)


# --- step ----------------------------------------------------------------------------------------


def step(bench: Bench) -> None:
    bandwidth = bench.bandwidth()
    small = end_to_end.MODELS["tiny-shape" if bench.dry else "llava-next-7b"]
    models = {
        "llava-next-7b": lambda: end_to_end.build(small, bench.device, bench.dtype),
        "qwen2.5-vl-7b": lambda: qwen(bench),
    }
    for name, build in models.items():
        with bench.report.guarded(name):
            vlm = VLM(*build(), prefix_cache_bytes=0)
            fused = not bench.dry and fusable(vlm.adapter)
            bench.report.row(f"{name}: fused decode step", fused)
            for recipe, batch in (("none", 1), ("none", 2 if bench.dry else 16)):
                steps(bench, vlm, name, recipe, batch, bandwidth)
            for recipe in ("snapkv:0.2", "kivi", "zipcache"):
                steps(bench, vlm, name, recipe, 1, bandwidth)
            del vlm
        gc.collect()
        if not bench.dry:
            torch.cuda.empty_cache()


def qwen(bench: Bench) -> tuple[Any, Any]:
    """Qwen2.5-VL's own modules at 7B with random weights; small ones in a dry run."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_families

    small, processor = tiny_families.build_qwen2_5_vl()
    config, shape = small.config, end_to_end.MODELS["qwen2.5-vl-7b-shape"]
    if not bench.dry:
        text = config.text_config
        text.hidden_size, text.intermediate_size = shape.width, shape.ffn
        text.num_hidden_layers, text.vocab_size = shape.layers, shape.vocabulary
        text.num_attention_heads, text.num_key_value_heads = shape.heads, shape.kv_heads
        text.layer_types = ["full_attention"] * shape.layers
        text.rope_parameters = {**text.rope_parameters, "mrope_section": [16, 24, 24]}
        if getattr(text, "head_dim", None):
            text.head_dim = shape.width // shape.heads
        config.vision_config.out_hidden_size = shape.width
    before = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with torch.device(bench.device):
            model = type(small)(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False), processor


@torch.no_grad()
def steps(bench: Bench, vlm: VLM, name: str, recipe: str, batch: int, bandwidth: float) -> None:
    """Measure decode steps of ``batch`` requests of equal length."""
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
        bench.timed(f"{what}: first step, compiles and captures", clock(bench.device) - begin)
        for _ in range(3):
            decoder.next(tokens)
        count = 4 if bench.dry else 24
        begin = clock(bench.device)
        for _ in range(count):  # asynchronous, as far as the method allows it
            decoder.next(tokens)
        took = (clock(bench.device) - begin) / count
        floor = (end_to_end.weights(vlm.model) + group.cache.held_bytes()) / bandwidth
        report.row(f"{what}: least time of a step, ms", 1e3 * floor)
        report.row(f"{what}: step, ms", 1e3 * took)
        aim = OF_FLOOR[name]
        judged = (f">= {aim}", floor / took >= aim) if not bench.dry else ("", None)
        report.row(f"{what}: least time over time", floor / took, *judged)
        if group.graphs is not None:
            with report.guarded(f"{what}: captured step"):
                capture(bench, what, group, tokens)
        decoder.release()
    if not bench.dry:
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        report.row(f"{what}: reserved and not allocated, GB", idle / 1e9)


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
    from torch.profiler import ProfilerActivity, profile

    report, replay = bench.report, next(iter(group.graphs._replays.values()))
    report.row(f"{what}: replay alone, ms", 1e3 * bench.seconds(replay, 10))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        replay()
        torch.cuda.synchronize()
    events = seen.key_averages()
    launched = sum(event.count for event in events) / group.adapter.depth
    report.row(
        f"{what}: kernels per layer",
        launched,
        f"<= {KERNELS_PER_LAYER}",
        launched <= KERNELS_PER_LAYER,
    )
    slowest = sorted(events, key=lambda event: event.self_device_time_total, reverse=True)
    for event in slowest[:8]:
        milliseconds = event.self_device_time_total / 1e3
        print(f"{'':6}{milliseconds:8.3f} ms {event.count:5} x {event.key[:80]}", flush=True)
    begin = clock(bench.device)
    again = StepGraphs(group.kind, group.cache, cuda_graph)
    again.run(partial(forward, group.adapter), (), tokens)
    bench.timed(f"{what}: another capture", clock(bench.device) - begin, CAPTURE)


# --- serve ---------------------------------------------------------------------------------------


def serve(bench: Bench) -> None:
    report = bench.report
    shape = end_to_end.MODELS["tiny-shape" if bench.dry else "llava-next-7b"]
    vlm = VLM(*end_to_end.build(shape, bench.device, bench.dtype), prefix_cache_bytes=0)
    image = drawn(max(shape.image))
    batches = (("none", 2),) if bench.dry else (("none", 4), ("hired:0.2", 4), ("hired:0.2", 16))
    for recipe, size in batches:
        rates = {}
        for lengths in ("equal", "ragged"):
            what = f"{recipe}, {size} at once, {lengths} lengths"
            with report.guarded(what):
                rates[lengths] = served(bench, vlm, image, recipe, size, lengths == "equal")
                report.row(f"{what}: decoded tokens per second", rates[lengths])
        if len(rates) == 2:
            share = rates["ragged"] / rates["equal"]
            report.row(f"{recipe}, {size} at once: ragged over equal", share)
    graphs = vlm.adapter.kept.get("graphs")
    if graphs is not None:
        report.row("steps captured, and used again", f"{graphs.captured}, {graphs.adopted}")
    stats = vlm.ask("What?", image, max_new_tokens=2).stats
    for name in ("processor", "vision", "reduce", "prefill"):
        seconds = getattr(stats, f"time_{name}_s")
        report.row(f"one request: {name}, ms", 1e3 * seconds)
    if not bench.dry:
        report.row("memory allocated at most, GB", torch.cuda.max_memory_allocated() / 1e9)
        report.row("memory reserved, GB", torch.cuda.memory_reserved() / 1e9)


def served(bench: Bench, vlm: VLM, image: Any, recipe: str, size: int, equal: bool) -> float:
    """Tokens per second of ``2 * size`` requests, without the time of their prompts."""
    if bench.dry:
        lengths = [6 if equal else 3 + i for i in range(2 * size)]
    else:
        lengths = [32 if equal else 8 + 13 * i % 49 for i in range(2 * size)]
    requests = [
        Request(
            "What?", image, recipe=recipe, generation={"max_new_tokens": n, "min_new_tokens": n}
        )
        for n in lengths
    ]
    begin = clock(bench.device)
    answers = vlm.ask_many(requests, batch_size=size)
    took = clock(bench.device) - begin
    for stats in (answer.stats for answer in answers):
        took -= stats.time_processor_s + stats.time_vision_s + stats.time_prefill_s
    return sum(len(answer.token_ids) for answer in answers) / max(took, 1e-9)


# --- the script ----------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    add("--dry", action="store_true", help="use small sizes on a CPU to check the script")
    add("--out", type=Path, help="default: benchmarks/results/gpu_hour-DEVICE.json")
    args = parser.parse_args(argv)
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    return args


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device found; --dry runs small sizes on a CPU", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    about = facts()
    if args.dry:
        about["device"] = "cpu"
        torch.set_num_threads(1)  # more threads are slower at these sizes
    kind = about["device"].replace(" ", "-").lower()
    out = args.out or RESULTS / f"gpu_hour-{kind}.json"
    command = shlex.join(["python", "benchmarks/gpu_hour.py", *arguments])
    report = Report(out, {"command": command, "dry": args.dry, **about})
    bench = Bench(report, torch.device("cpu" if args.dry else "cuda"), args.dry)
    for part in args.parts:
        report.part, begin = part, time.perf_counter()
        print(f"\n{part}", flush=True)
        with report.guarded(part):
            {"probe": probe, "smoke": smoke, "step": step, "serve": serve}[part](bench)
        report.row(f"{part}: whole time, s", time.perf_counter() - begin)
    missed = sum(row["verdict"] == "MISS" for row in report.rows)
    print(f"\n{len(report.rows)} rows, {missed} MISS, {len(report.failed())} FAIL")
    for row in report.failed():
        print(f"FAIL  {row['part']}: {row['what']}: {row['value']}")
    print(f"written: {out}", file=sys.stderr)
    return int(bool(report.failed()))


if __name__ == "__main__":
    sys.exit(main())
