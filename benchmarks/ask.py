"""Compare vlmfast with Hugging Face's ``generate``: ``python benchmarks/ask.py``.

Two models: the shipped `tiny`, and a LLaVA-NeXT of Qwen2-0.5B's shape with random weights (24
layers, width 896, 2,928 visual tokens for a square image). Each variant has its own process, so
that its peak memory can be measured. Variants are interleaved, so that thermal throttling or other
load affects all of them. Reports medians with quartiles, and ratios to Hugging Face. Every run
decodes the same number of tokens, and the tokens of ``none`` must equal Hugging Face's, or the
benchmark fails.

==========  ====================================================================================
``ttft``    RGB image in host memory to first token on the host, with processor and vision tower
``prefill`` the language model over the prompt, to the logits of the first token
``tpot``    time per further token
``memory``  peak during the answer; CPU: resident size, GPU: allocated size
``working`` the same without the memory of the loaded model
==========  ====================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
TINY = ROOT / "vlmfast" / "weights" / "tiny"
HF, SHAPED = "huggingface", "qwen2-0.5b-shape"
METRICS = ("ttft", "prefill", "tpot", "memory", "working")
# Layers and width of the vision tower, heads.
TOWERS = {"large": (24, 1024, 16), "small": (6, 384, 6)}
QUESTION = "How many yellow objects are there?"


# --- models --------------------------------------------------------------------------------------


def qwen_shaped(tower: str, layers: int, seed: int = 0) -> tuple[Any, Any]:
    """LLaVA-NeXT of Qwen2-0.5B's shape on a CLIP tower at 336/14, random weights."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
        Qwen2Config,
    )

    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_models

    depth, width, heads = TOWERS[tower]
    pinpoints = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            image_size=336,
            patch_size=14,
            projection_dim=768,
        ),
        text_config=Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=layers,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
        ),
        image_token_id=tiny_models.IMAGE_ID,
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaNextForConditionalGeneration(config).eval()
    size = {"height": 336, "width": 336}
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": 336}, crop_size=size, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tiny_models.build_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    return model, processor


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The `VLM` under test and the image of the question."""
    import torch
    from PIL import Image

    import vlmfast

    dtype = getattr(torch, args.dtype)
    if args.model != SHAPED:
        vlm = vlmfast.VLM.from_pretrained(
            args.model, device=args.device, dtype=dtype, prefix_cache_bytes=0
        )
        image = Image.open(ROOT / "examples" / "picture.png").convert("RGB")
    else:
        model, processor = qwen_shaped(args.tower, args.layers)
        import tiny_models

        vlm = vlmfast.VLM(model.to(args.device, dtype), processor, prefix_cache_bytes=0)
        image = tiny_models.make_image(672, 672)
    # Every variant decodes the same number of tokens.
    vlm.model.generation_config.eos_token_id = None
    return vlm, image


# --- one variant in one process ------------------------------------------------------------------


class Memory:
    """Peak memory between `reset` and `read`."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")

    def reset(self) -> int:
        """Reset the peak; returns the current memory."""
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        with contextlib.suppress(OSError):
            # Linux: the peak becomes the current size. Elsewhere the peak is that of the process.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return self._linux("VmRSS") or self._process()

    def read(self) -> int:
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated()
        return self._linux("VmHWM") or self._process()

    @staticmethod
    def _linux(field: str) -> int:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
        return 0

    @staticmethod
    def _process() -> int:
        from vlmfast.engine.stats import peak_memory

        return peak_memory()


class FirstToken:
    """A streamer that notes when the first token reached the host."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.calls, self.first = clock, 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call is the prompt
            self.first = self.clock()

    def end(self) -> None:
        pass


@contextlib.contextmanager
def prefill_timer(model: Any, clock: Callable[[], float]) -> Iterator[list[float]]:
    """Start (decoder) and end (output head) of the first forward pass."""
    times: list[float] = []

    def begin(*_: Any) -> None:
        if not times:
            times.append(clock())

    def end(*_: Any) -> None:
        if len(times) == 1:
            times.append(clock())

    handles = [
        model.get_decoder().register_forward_pre_hook(begin),
        model.get_output_embeddings().register_forward_hook(end),
    ]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()


def run_huggingface(vlm: Any, image: Any, question: str, new_tokens: int) -> dict[str, Any]:
    from vlmfast.engine.stats import clock

    now = lambda: clock(vlm.adapter.device)  # noqa: E731
    streamer = FirstToken(now)
    start = now()
    inputs = vlm.inputs(question, images=image)
    with prefill_timer(vlm.model, now) as prefill:
        ids = vlm.model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, streamer=streamer
        )
    end = now()
    tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "ttft": streamer.first - start,
        "prefill": prefill[1] - prefill[0],
        "tpot": (end - streamer.first) / (len(tokens) - 1),
        "tokens": tokens,
        "visual_tokens": int((inputs["input_ids"] == vlm.adapter.image_token_id).sum()),
    }


def run_vlmfast(
    vlm: Any, image: Any, question: str, new_tokens: int, recipe: str
) -> dict[str, Any]:
    answer = vlm.ask(
        question, images=image, recipe=recipe, max_new_tokens=new_tokens, do_sample=False
    )
    stats = answer.stats
    return {
        "ttft": stats.ttft_s,
        "prefill": stats.time_prefill_s,
        "tpot": stats.tpot_s,
        "vision": stats.time_vision_s,
        "reduce": stats.time_reduce_s,
        "tokens": answer.token_ids,
        "visual_tokens": round(stats.equivalent_tokens),
    }


def worker(args: argparse.Namespace) -> None:
    """Run once for every line on stdin; each result is one line of JSON."""
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the libraries must not mix with the replies
    vlm, image = load(args)
    memory = Memory(args.device)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for _ in sys.stdin:
        before = memory.reset()
        if args.variant == HF:
            result = run_huggingface(vlm, image, QUESTION, args.new_tokens)
        else:
            result = run_vlmfast(vlm, image, QUESTION, args.new_tokens, args.variant)
        result["memory"] = memory.read()
        result["working"] = result["memory"] - before
        print(json.dumps(result), file=replies, flush=True)


class Variant:
    """A worker process and its samples."""

    def __init__(self, name: str, model: str, args: argparse.Namespace) -> None:
        self.name, self.samples = name, []
        options = ["dtype", "device", "tower", "layers", "new_tokens", "threads"]
        command = [sys.executable, __file__, "--worker", "--variant", name, "--models", model]
        for option in options:
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reply()

    def _reply(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker exited with {self.process.wait()}")
        return json.loads(line)

    def run(self, *, keep: bool = True) -> None:
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        sample = self._reply()
        if keep:
            self.samples.append(sample)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# --- the benchmark -------------------------------------------------------------------------------


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def bench_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one model, interleaved."""
    variants: list[Variant] = []
    try:
        # Sequentially, because building a model uses all cores.
        for name in (HF, *args.recipes):
            variants.append(Variant(name, model, args))
        for variant in variants:
            for _ in range(args.warmup):
                variant.run(keep=False)
        for turn in range(args.repeats):
            for i in range(len(variants)):
                variants[(turn + i) % len(variants)].run()
            print(f"{model}: {turn + 1} of {args.repeats}", file=sys.stderr)
    finally:
        for variant in variants:
            variant.close()
    reference = variants[0].samples[0]["tokens"]
    base = {metric: spread([s[metric] for s in variants[0].samples]) for metric in METRICS}
    rows = {}
    for variant in variants:
        row: dict[str, Any] = {
            metric: spread([s[metric] for s in variant.samples])
            for metric in (*METRICS, "vision", "reduce")
            if metric in variant.samples[0]
        }
        row["ratio"] = {
            metric: base[metric]["median"] / row[metric]["median"]
            for metric in METRICS
            if row[metric]["median"] > 0
        }
        tokens = variant.samples[0]["tokens"]
        row["visual_tokens"] = variant.samples[0]["visual_tokens"]
        row["agreement"] = sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(tokens)
        row["samples"] = [{m: s[m] for m in METRICS} for s in variant.samples]
        rows[variant.name] = row
    return rows


def markdown(model: str, rows: dict[str, Any]) -> str:
    """One table per model: median, quartiles in brackets, ratio to Hugging Face."""
    lines = [
        f"| {model} | visual tokens | TTFT | prefill | per token | peak memory | working memory "
        "| same tokens |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        cells = [name, str(row["visual_tokens"])]
        for metric in METRICS:
            scale, unit = (1e-6, "MB") if metric in ("memory", "working") else (1e3, "ms")
            value = {key: number * scale for key, number in row[metric].items()}
            digits = 0 if value["median"] >= 100 else 1
            cell = f"{value['median']:,.{digits}f} {unit}"
            if unit == "ms":
                cell += f" [{value['q1']:,.{digits}f}, {value['q3']:,.{digits}f}]"
            if name != HF and metric in row["ratio"]:
                cell += f" ({row['ratio'][metric]:.2f}x)"
            cells.append(cell)
        cells.append(f"{row['agreement']:.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default=f"tiny,{SHAPED}", help="comma-separated; also folders and hub ids"
    )
    parser.add_argument(
        "--recipe", action="append", dest="recipes", help="default: none, balanced and fast"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--threads", type=int, default=0, help="0: PyTorch's default")
    parser.add_argument("--tower", default="large", choices=tuple(TOWERS), help="vision tower")
    parser.add_argument("--layers", type=int, default=24, help="of the large language model")
    parser.add_argument("--quick", action="store_true", help="checks the script, measures nothing")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/ask-....json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.repeats, args.warmup, args.new_tokens = 2, 1, 4
        args.tower, args.layers = "small", 2
    args.models = args.models.split(",")
    args.recipes = args.recipes or ["none", "balanced", "fast"]
    if args.device in (None, "None"):
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def heading(script: str, arguments: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Provenance of a result."""
    from vlmfast.core.env import environment

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *arguments]),
        "environment": environment(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "device": args.device,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "tower": dict(zip(("layers", "width", "heads"), TOWERS[args.tower], strict=True)),
        "layers": args.layers,
    }


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    if args.worker:
        args.model = args.models[0]
        worker(args)
        return 0
    report = heading("ask.py", arguments, args) | {"new_tokens": args.new_tokens, "models": {}}
    failed = False
    for model in args.models:
        if model == "tiny" and not (TINY / "model.safetensors").is_file():
            print("tiny: vlmfast/weights/tiny is missing, left out", file=sys.stderr)
            continue
        start = time.perf_counter()
        rows = report["models"][model] = bench_model(model, args)
        title = f"{model}, {args.tower} tower, {args.layers} layers" if model == SHAPED else model
        print(f"\n{markdown(title, rows)}\n\n{time.perf_counter() - start:.0f} s in total")
        if "none" in rows and rows["none"]["agreement"] < 1:
            print(f"{model}: the tokens of none differ from Hugging Face's", file=sys.stderr)
            failed = True
    if args.quick and args.out is None:
        return int(failed)
    out = args.out or RESULTS / f"ask-{args.device.partition(':')[0]}-{args.dtype}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
