"""Compare vlmfast with Hugging Face's ``generate``: ``python benchmarks/ask.py``.

Two models: the shipped `tiny`, and a language model of Qwen2-0.5B's shape with random weights (24
layers, width 896) after a vision tower of the shape that ``--tower`` names. A square image has
2,928 visual tokens there with CLIP ViT-L/14 at 336 pixels in LLaVA-NeXT, 3,699 with SigLIP-so400m
in LLaVA-OneVision, and 1,024 with the tower of Qwen2.5-VL. ``--frames N`` asks about a video
instead, of which a square moves (``--clip moving``) or nothing does (``--clip static``).

Each variant has its own process, so that its peak memory can be measured; with ``--one-process``,
for more variants than fit in memory, it is not. Variants are interleaved, so that other load
affects all of them. Reports medians with quartiles, and ratios to Hugging Face. Every
run decodes the same number of tokens, and the tokens of ``none`` must equal Hugging Face's, or the
benchmark fails.

==========  ====================================================================================
``ttft``    RGB image in host memory to first token on the host: all of the following
``media``   the processor
``vision``  the vision tower and its projector
``stages``  the recipe's stages; those inside the tower or the language model also count there
``prefill`` the language model over the prompt, to the logits of the first token
``tpot``    time per further token, after the first
``memory``  peak during the answer; CPU: resident size, GPU: allocated size
``working`` the same without the memory of the loaded model
==========  ====================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import harness
import torch
from PIL import Image
from shapes import SHAPED, TOWERS, after_tower

from vlmfast import VLM
from vlmfast.check.commands import size
from vlmfast.core.display import markdown_table
from vlmfast.engine.stats import clock, peak_memory
from vlmfast.eval.bench import forget_peak, peak, spread

TINY = harness.ROOT / "vlmfast" / "weights" / "tiny"
HF = "huggingface"
METRICS = ("ttft", "prefill", "tpot", "memory", "working")
PARTS = ("media", "vision", "stages")
QUESTION = "How many yellow objects are there?"


# --- models --------------------------------------------------------------------------------------


def clip_of(image: Any, frames: int, moving: bool) -> list[Any]:
    """Frames of a video: an image, over which a square moves from left to right."""
    side, found = image.width // 8, []
    for number in range(frames):
        frame = image.copy()
        at = (image.width - side) * number // max(frames - 1, 1) if moving else 0
        frame.paste((250, 220, 30), (at, at // 2, at + side, at // 2 + side))
        found.append(frame)
    return found


def load(model: str, args: argparse.Namespace) -> tuple[VLM, Image.Image]:
    """A model and an image."""
    dtype, off = getattr(torch, args.dtype), {"prefix_cache_bytes": 0}
    if model == SHAPED:
        made = after_tower(args.tower, args.layers, torch.device(args.device), dtype)
        from support.tiny_models import make_image

        side = 2 * TOWERS[args.tower].side
        return VLM(*made, **off), make_image(*(getattr(args, "size", None) or (side, side)))
    vlm = VLM.from_pretrained(model, device=args.device, dtype=dtype, **off)
    # Every variant decodes the same number of tokens.
    vlm.model.generation_config.eos_token_id = None
    return vlm, Image.open(harness.ROOT / "examples" / "picture.png").convert("RGB")


# --- one variant in one process ------------------------------------------------------------------


class Times:
    """A streamer that notes when each token comes, the prompt first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.times = clock, []

    def put(self, value: Any) -> None:
        self.times.append(self.clock())

    def end(self) -> None:
        pass


@contextlib.contextmanager
def spans(
    first: Any, last: Any, clock: Callable[[], float], most: int = sys.maxsize
) -> Iterator[list[float]]:
    """Start of each call of one module and end of each call of another, in turn.

    ``most``: how many of these times. On a GPU each waits for its work.
    """
    times: list[float] = []

    def note(*_: Any) -> None:
        if len(times) < most:
            times.append(clock())

    handles = [first.register_forward_pre_hook(note), last.register_forward_hook(note)]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()


def run_huggingface(
    vlm: VLM, media: dict[str, Any], question: str, new_tokens: int
) -> dict[str, Any]:
    now, model, adapter = partial(clock, vlm.adapter.device), vlm.model, vlm.adapter
    streamer, start = Times(now), now()
    inputs = vlm.inputs(question, **media)
    read = now()
    with (
        spans(model.get_decoder(), model.get_output_embeddings(), now, 2) as prefill,
        spans(adapter.tower(), adapter.mergers()[0], now) as vision,
    ):
        ids = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, streamer=streamer
        )
    end, first = now(), streamer.times[1]
    tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "ttft": first - start,
        "media": read - start,
        "vision": sum(vision[1::2]) - sum(vision[::2]),
        "stages": 0.0,
        "prefill": prefill[1] - prefill[0],
        "tpot": (end - first) / (len(tokens) - 1),
        "tokens": tokens,
        "visual_tokens": int(adapter.visual(inputs["input_ids"]).sum()),
    }


def run_vlmfast(
    vlm: VLM, media: dict[str, Any], question: str, new_tokens: int, recipe: str
) -> dict[str, Any]:
    answer = vlm.ask(question, **media, recipe=recipe, max_new_tokens=new_tokens, do_sample=False)
    stats = answer.stats
    return {
        "ttft": stats.ttft_s,
        "prefill": stats.time_prefill_s,
        "tpot": stats.tpot_s,
        "media": stats.time_media_s + stats.time_processor_s,
        "vision": stats.time_vision_s,
        "stages": stats.time_reduce_s,
        "tokens": answer.token_ids,
        "visual_tokens": round(stats.equivalent_tokens),
    }


def worker(pipe: Any, model: str, args: argparse.Namespace) -> None:
    """Run the variants whose names come."""
    if args.threads:
        torch.set_num_threads(args.threads)
    vlm, image = load(model, args)
    device, media = vlm.adapter.device, {"images": image}
    if args.frames:
        video = clip_of(image, args.frames, args.clip == "moving")
        media = {"video": video, "num_frames": args.frames}
    pipe.send("ready")
    for name in iter(pipe.recv, None):
        forget_peak(device)
        before = peak(device) or peak_memory(device)  # now the current size
        run = run_huggingface if name == HF else partial(run_vlmfast, recipe=name)
        result = run(vlm, media, QUESTION, args.new_tokens)
        after = peak(device) or peak_memory(device)
        result["memory"] = 0 if args.one_process else after
        result["working"] = 0 if args.one_process else after - before
        pipe.send(result)


# --- the benchmark -------------------------------------------------------------------------------


def bench_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one model, interleaved."""
    names, workers = (HF, *args.recipes), []
    with contextlib.ExitStack() as stack:
        # Sequentially, because building a model uses all cores.
        for _ in (HF,) if args.one_process else names:
            workers.append(harness.Child(worker, model, args))
            stack.callback(workers[-1].close)
        runs = {n: partial(of.ask, n) for n, of in zip(names, cycle(workers), strict=False)}
        samples = harness.interleaved(runs, args.repeats, warmup=args.warmup, name=model)
    reference = samples[HF][0]["tokens"]
    rows: dict[str, Any] = {}
    for name, own in samples.items():
        keys = (*METRICS, *PARTS)
        row: dict[str, Any] = {key: spread([s[key] for s in own]) for key in keys}
        rows[name], tokens = row, own[0]["tokens"]
        row["ratio"] = {
            metric: rows[HF][metric]["median"] / row[metric]["median"]
            for metric in METRICS
            if row[metric]["median"] > 0
        }
        row["visual_tokens"] = own[0]["visual_tokens"]
        row["agreement"] = sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(tokens)
        row["samples"] = [{key: s[key] for key in keys} for s in own]
    return rows


def markdown(model: str, rows: dict[str, Any]) -> str:
    """One table per model: median, quartiles in brackets, ratio to Hugging Face."""
    lines = []
    for name, row in rows.items():
        cells = [name, str(row["visual_tokens"])]
        for metric in METRICS:
            of = row[metric]
            if metric not in ("memory", "working"):
                cell = harness.quartiles(of)
            elif row["memory"]["median"]:
                value = of["median"] * 1e-6
                cell = f"{value:,.{0 if value >= 100 else 1}f} MB"
            else:
                cells.append("–")
                continue
            if name != HF and metric in row["ratio"]:
                cell += f" ({row['ratio'][metric]:.2f}x)"
            cells.append(cell)
        lines.append([*cells, f"{row['agreement']:.0%}"])
    head = [model, "visual tokens", "TTFT", "prefill", "per token", "peak memory"]
    return markdown_table([*head, "working memory", "same tokens"], lines)


def parts_table(model: str, rows: dict[str, Any]) -> str:
    """The time to the first token by its parts, medians, and the time per further token."""
    lines = []
    for name, row in rows.items():
        cells = [name]
        for metric in ("ttft", *PARTS, "prefill", "tpot"):
            value = row[metric]["median"] * 1e3
            cells.append(f"{value:,.{0 if value >= 100 else 1}f} ms")
        if name != HF:
            cells[1] += f" ({row['ratio']['ttft']:.2f}x)"
        lines.append(cells)
    head = [model, "TTFT", "media", "tower", "stages", "prefill", "decode, per token"]
    return markdown_table(head, lines)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, recipe=None, repeats=7, warmup=2, new_tokens=16, dtype="float32",
        device=harness.DEVICE, threads=0, layers=24, out=None,
    )  # fmt: skip
    add = parser.add_argument
    add("--models", default=f"tiny,{SHAPED}", help="comma-separated; also folders and hub ids")
    add("--tower", default="clip-vit-l-14-336", choices=tuple(TOWERS), help="vision tower")
    add("--size", type=size, help="WIDTHxHEIGHT of the image (default: twice the tower's side)")
    add("--frames", type=int, default=0, help="ask about a video of N frames")
    add("--clip", default="moving", choices=("moving", "static"))
    add("--one-process", action="store_true", help="of all variants; no memory")
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    args.recipes = args.recipes or ["none", "balanced", "fast"]
    return args


def heading(script: str, argv: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Provenance of a result."""
    return harness.begin(script, argv, args) | {
        "dtype": args.dtype,
        "repeats": args.repeats,
        "tower": TOWERS[args.tower]._asdict(),
        "layers": args.layers,
    }


def main(argv: list[str]) -> int:
    args = parse(argv)
    report = heading("ask.py", argv, args) | {"new_tokens": args.new_tokens, "models": {}}
    if args.size:
        report["size"] = list(args.size)
    if args.frames:
        report |= {"frames": args.frames, "clip": args.clip}
    failed = False
    for model in args.models:
        rows = report["models"][model] = bench_model(model, args)
        title = model
        if model == SHAPED:
            title = f"{model}, {TOWERS[args.tower].name}, {args.layers} layers"
        print(f"\n{markdown(title, rows)}\n\n{parts_table(title, rows)}")
        if "none" in rows and rows["none"]["agreement"] < 1:
            print(f"{model}: the tokens of none differ from Hugging Face's", file=sys.stderr)
            failed = True
    harness.written(harness.path_of(args, "ask", args.device, args.dtype), report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
