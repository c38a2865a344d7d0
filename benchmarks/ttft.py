"""Where the time to the first token goes: ``python benchmarks/ttft.py``.

===========  ===================================================================================
``machine``  copy bandwidth, rate of a matrix product, time of a launch and of a host read
``answers``  Hugging Face's ``generate`` and vlmfast's recipes, from an image in host memory to
             the first token on the host, one token each
``layer``    a decoder layer over a prompt: as it is, captured, compiled
``towers``   the vision towers of Qwen2.5-VL and Qwen3-VL, Hugging Face's and vlmfast's
===========  ===================================================================================

Variants take turns, so that another load affects all of them. Each row of ``answers`` and
``towers`` has the median and quartiles of its times, the ratio to Hugging Face's of the same turn,
and the anatomy of one more answer under PyTorch's profiler:

============  =====================================================================================
``busy``      time in which the device ran something, in seconds
``launches``  kernels, copies and captured graphs that the host started; on a CPU operations
``reads``     how often the host waited for the device: copies to the host, synchronizations
============  =====================================================================================

Models have random weights (`shapes.py`). Every row is written as soon as it is measured, and no row
starts that may exceed ``--minutes``; then the exit code is 3 and the same command resumes. Rows of
another device or of other versions are not kept. ``--dry`` checks the script on a CPU with small
models.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import kernels
import shapes
import torch
from end_to_end import HF, QUESTION, Job

from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.prefill import Inputs, look
from vlmfast.engine.stats import Stats, Trace, clock
from vlmfast.eval.bench import drawn, spread

RECIPES = ("none", "hired:0.2", "hired:0.2+pyramiddrop+zipvl")
SIZES = ((448, 448), (672, 672), (1344, 1008))  # width, height
ROWS = (640, 2981)  # of a prompt under `hired:0.2` and `none`
WARM = 3  # calls before the first measured one: a tower is captured at the third of a shape
# Events of the host that start work on the device, and those that wait for it.
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")
READS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
CPU_READS = ("aten::_local_scalar_dense", "aten::nonzero")


# --- anatomy -------------------------------------------------------------------------------------


def anatomy(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Profile a call.

    Returns
    -------
    dict
        ``busy`` (``None`` on a CPU), ``launches`` and ``reads`` as above, ``work``, what the device
        ran, and its longest ``kernels`` with their seconds.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as seen:
        call()
        clock(device)  # the profiler adds one wait, which is not counted
    events = seen.events()
    if not cuda:
        own = [event.name for event in events if event.name.startswith("aten::")]
        outer = [e for e in events if e.name.startswith("aten::") and not _inside(e)]
        reads = sum(name in CPU_READS for name in own)
        found = {"busy": None, "launches": len(outer), "reads": reads}
        return found | {"work": len(outer), "kernels": {}}
    host = [event.name for event in events if event.device_type == DeviceType.CPU]
    work = [event for event in events if event.device_type == DeviceType.CUDA]
    took: dict[str, float] = {}
    for event in work:
        took[event.name] = took.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    longest = sorted(took, key=took.__getitem__, reverse=True)[:12]
    return {
        "busy": union((e.time_range.start / 1e6, e.time_range.end / 1e6) for e in work),
        "launches": sum(any(word in name for word in LAUNCHES) for name in host),
        "reads": sum(name.endswith(READS) for name in host) - 1,
        "work": len(work),
        "kernels": {name: took[name] for name in longest},
    }


def _inside(event: Any) -> bool:
    """Whether an operation is a part of another operation."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return parent is not None


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The time that is covered by any of the spans."""
    covered, until = 0.0, -float("inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


@dataclass(frozen=True)
class Bench:
    """Where and how often variants are measured."""

    device: torch.device
    dtype: torch.dtype
    dry: bool
    repeats: int

    def compared(self, variants: dict[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
        """Time variants in turn; ratios are to the first."""
        calls = {name: partial(self.per_call, call) for name, call in variants.items()}
        times = harness.interleaved(calls, self.repeats, warmup=WARM)
        base, found = next(iter(times.values())), {}
        for name, taken in times.items():
            ratios = [a / b for a, b in zip(base, taken, strict=True)]
            found[name] = {"time": spread(taken), "ratio": spread(ratios)}
            found[name] |= anatomy(variants[name], self.device)
        return found

    def per_call(self, call: Callable[[], Any], count: int = 1) -> float:
        """Seconds of one of many calls in a row, which the device may work off later."""
        begin = clock(self.device)
        for _ in range(count):
            call()
        return (clock(self.device) - begin) / count


# --- parts ---------------------------------------------------------------------------------------


def machine(bench: Bench) -> dict[str, Any]:
    one = torch.ones(1, device=bench.device)
    one.add_(1).item()
    return ({} if bench.dry else kernels.machine()) | {
        "launch": bench.per_call(lambda: one.add_(1), 2000),
        "read": bench.per_call(lambda: one.add_(1).item(), 500),
    }


def answers(bench: Bench, name: str) -> dict[str, Any]:
    """Rows of one model: Hugging Face, then recipes."""
    if name in shapes.QWEN:
        model, processor = shapes.qwen(name, bench.device, bench.dtype, bench.dry)
        size = (64, 64) if bench.dry else SIZES[-1]
    else:
        shape = shapes.MODELS["tiny-shape" if bench.dry else name]
        model, processor = shapes.build(shape, bench.device, bench.dtype)
        size = shape.image[::-1]
    job = Job(model, processor, drawn(max(size)).resize(size), QUESTION)
    vlm = job.vlm()

    def generate() -> Any:
        inputs = harness.padded(vlm, QUESTION, [job.image])
        return model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1].item()

    def ask(recipe: str) -> Any:
        return vlm.ask(QUESTION, job.image, recipe=recipe, max_new_tokens=1)

    variants = {HF: generate} | {recipe: partial(ask, recipe) for recipe in RECIPES}
    found = bench.compared(variants)
    for recipe in RECIPES:
        stats = ask(recipe).stats
        parts = ("processor", "vision", "reduce", "prefill")
        found[recipe]["parts"] = {part: getattr(stats, f"time_{part}_s") for part in parts}
        found[recipe]["visual_tokens"] = stats.equivalent_tokens
        found[recipe]["prompt_tokens"] = stats.prompt_tokens
    return found


@torch.no_grad()
def layer(bench: Bench) -> dict[str, Any]:
    """A layer of LLaVA-NeXT's language model over prompts of `ROWS`."""
    shape = shapes.MODELS["tiny-shape" if bench.dry else "llava-next-7b"]
    model, _ = shapes.build(shape, bench.device, bench.dtype, layers=1)
    decoder = model.get_decoder()
    found = {}
    for rows in (16, 40) if bench.dry else ROWS:
        x = torch.randn(1, rows, shape.width, device=bench.device, dtype=bench.dtype)
        tables = decoder.rotary_emb(x, torch.arange(rows, device=bench.device)[None])
        run = partial(decoder.layers[0], x, position_embeddings=tables)
        variants: dict[str, Callable[[], Any]] = {"as it is": run}
        if not bench.dry:
            variants["captured"] = kernels.captured(run)
        backend = "aot_eager" if bench.dry else "inductor"
        variants["compiled"] = torch.compile(run, dynamic=False, backend=backend)
        for name, row in bench.compared(variants).items():
            found[f"{name}, {rows} rows"] = row
    return found


@torch.no_grad()
def towers(bench: Bench, name: str) -> dict[str, Any]:
    """A family's own tower and projector at several sizes; few layers of the language model."""
    model, processor = shapes.qwen(name, bench.device, bench.dtype, bench.dry, layers=2)
    found = {}
    for size in [(64, 64)] if bench.dry else SIZES:
        job = Job(model, processor, drawn(max(size)).resize(size), QUESTION)
        vlm = job.vlm()
        adapter, tensors = vlm.adapter, harness.padded(vlm, QUESTION, [job.image])
        inputs = Inputs(tensors, [size[::-1]])
        pixels = {key: tensors[key] for key in ("pixel_values", "image_grid_thw")}

        def own(adapter: Any = adapter, inputs: Inputs = inputs) -> None:
            with switched(adapter.model):
                look(adapter, inputs, Recipe(), Stats(), Trace())

        variants = {HF: partial(model.get_image_features, **pixels), "vlmfast": own}
        for variant, row in bench.compared(variants).items():
            found[f"{variant}, {size[0]} x {size[1]}"] = row
    return found


WORK: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "machine": machine,
    "answers: llava-next-7b": partial(answers, name="llava-next-7b"),
    "layer": layer,
    "towers: qwen2.5-vl-7b": partial(towers, name="qwen2.5-vl-7b"),
    "answers: qwen2.5-vl-7b": partial(answers, name="qwen2.5-vl-7b"),
    "towers: qwen3-vl-8b": partial(towers, name="qwen3-vl-8b"),
}


# --- the script ----------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__, repeats=10, minutes=4.0, fresh=False, out=None)
    parser.add_argument("--dry", action="store_true", help="small models on a CPU, as a check")
    args = parser.parse_args(argv)
    args.device = "cpu" if args.dry else "cuda"
    return args


def main(argv: list[str]) -> int:
    args, start = parse(argv), time.perf_counter()
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device found; --dry runs small models on a CPU", file=sys.stderr)
        return 2
    about = harness.begin("ttft.py", argv, args)
    settings = {"repeats": args.repeats, "dry": args.dry}
    parts = harness.Parts(
        harness.path_of(args, "ttft", about["device"]), about, settings, args.fresh
    )
    dtype = torch.float32 if args.dry else torch.bfloat16
    bench = Bench(torch.device(args.device), dtype, args.dry, args.repeats)
    end = start + 60 * args.minutes
    left = parts.measure(parts.missing(list(WORK)), lambda name: WORK[name](bench), end)
    timed = {
        f"{part}, {name}": row
        for part, found in parts.rows.items()
        for name, row in found.items()
        if isinstance(row, dict)
    }
    print(f"\n{about['device']}\n")
    print(harness.shown(timed, "time", "ratio", "busy", "launches", "reads"))
    failed = {name: row["failed"] for name, row in parts.rows.items() if "failed" in row}
    for name, why in failed.items():
        print(f"FAIL  {name}: {why}")
    return parts.ended(left, len(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
