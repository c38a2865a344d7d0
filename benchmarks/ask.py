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
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vlmfast.core.progress import Progress
from vlmfast.eval.bench import forget_peak, peak, provenance, spread, turns
from vlmfast.eval.results import write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
TINY = ROOT / "vlmfast" / "weights" / "tiny"
HF, SHAPED = "huggingface", "qwen2-0.5b-shape"
METRICS = ("ttft", "prefill", "tpot", "memory", "working")
PARTS = ("media", "vision", "stages")


class Tower(NamedTuple):
    """The shape of a vision tower.

    Parameters
    ----------
    name : str
    layers, width, heads, mlp, side, patch : int
        ``side`` is that of a view in pixels.
    kind : {"clip", "siglip", "qwen2_5_vl"}
    """

    name: str
    layers: int
    width: int
    heads: int
    mlp: int
    side: int
    patch: int = 14
    kind: str = "clip"


TOWERS = {
    "clip-vit-l-14-336": Tower("CLIP ViT-L/14-336", 24, 1024, 16, 4096, 336),
    "siglip-so400m-14-384": Tower("SigLIP-so400m/14-384", 27, 1152, 16, 4304, 384, kind="siglip"),
    "qwen2.5-vl": Tower("tower of Qwen2.5-VL", 32, 1280, 16, 3420, 448, kind="qwen2_5_vl"),
    "small": Tower("small tower, of no model", 6, 384, 6, 1536, 336),
}
QUESTION = "How many yellow objects are there?"


# --- models --------------------------------------------------------------------------------------


def text_of(layers: int, **more: Any) -> dict[str, Any]:
    """Qwen2-0.5B's shape."""
    return {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **more},
        "tie_word_embeddings": True,
    }


def qwen_shaped(tower: str, layers: int, seed: int = 0) -> tuple[Any, Any]:
    """A model with a language model of Qwen2-0.5B's shape after a tower, random weights."""
    import torch

    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    shape = TOWERS[tower]
    build = {"clip": llava_next, "siglip": llava_onevision, "qwen2_5_vl": qwen2_5_vl}[shape.kind]
    torch.manual_seed(seed)
    return build(shape, layers)


def llava_next(shape: Tower, layers: int) -> tuple[Any, Any]:
    from transformers import (
        CLIPVisionConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
        Qwen2Config,
    )

    import tiny_models

    side = shape.side
    pinpoints = grids(side)
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**vit(shape), projection_dim=768),
        text_config=Qwen2Config(**text_of(layers)),
        image_token_id=tiny_models.IMAGE_ID,
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=True,
    )
    size = {"height": side, "width": side}
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": side}, crop_size=size, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tiny_models.build_tokenizer(),
        patch_size=shape.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    return LlavaNextForConditionalGeneration(config).eval(), processor


def llava_onevision(shape: Tower, layers: int) -> tuple[Any, Any]:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
        Qwen2Config,
        SiglipVisionConfig,
    )

    import tiny_families

    tokens = tiny_families.tokenizer(image_token="<image>", video_token="<video>")
    image, video = tiny_families.ids(tokens, "<image>", "<video>")
    pinpoints, size = grids(shape.side), {"height": shape.side, "width": shape.side}
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**vit(shape), vision_use_head=False),
        text_config=Qwen2Config(**text_of(layers)),
        image_token_id=image,
        video_token_id=video,
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokens,
        num_image_tokens=(shape.side // shape.patch) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        chat_template=tiny_families.template("<image>\n", "<video>\n"),
    )
    return LlavaOnevisionForConditionalGeneration(config).eval(), processor


def qwen2_5_vl(shape: Tower, layers: int) -> tuple[Any, Any]:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    import tiny_families

    tokens = tiny_families.tokenizer(**tiny_families.QWEN)
    start, end, image, video = tiny_families.ids(tokens, *tiny_families.QWEN.values())
    depth, text = shape.layers, text_of(layers, mrope_section=[8, 12, 12])
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": depth,
            "hidden_size": shape.width,
            "intermediate_size": shape.mlp,
            "num_heads": shape.heads,
            "patch_size": shape.patch,
            "window_size": 112,
            "fullatt_block_indexes": list(range(depth // 4 - 1, depth, depth // 4)),
            "out_hidden_size": text["hidden_size"],
        },
        text_config=text,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    pixels = {"shortest_edge": 56 * 56, "longest_edge": 1344 * 1344}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=shape.patch, size=pixels),
        video_processor=Qwen2VLVideoProcessor(patch_size=shape.patch),
        tokenizer=tokens,
        chat_template=tiny_families.QWEN_TEMPLATE,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval(), processor


def vit(shape: Tower) -> dict[str, Any]:
    """The arguments of a vision config of transformers."""
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "image_size": shape.side,
        "patch_size": shape.patch,
    }


def grids(side: int) -> list[list[int]]:
    """Canvases of crops: up to 2 x 2, 1 x 3 and 3 x 1 views."""
    shapes = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    return [[rows * side, columns * side] for rows, columns in shapes]


def clip_of(image: Any, frames: int, moving: bool) -> list[Any]:
    """Frames of a video: an image, over which a square moves from left to right."""
    side, found = image.width // 8, []
    for number in range(frames):
        frame = image.copy()
        at = (image.width - side) * number // max(frames - 1, 1) if moving else 0
        frame.paste((250, 220, 30), (at, at // 2, at + side, at // 2 + side))
        found.append(frame)
    return found


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The `VLM` under test, and the image or video of the question."""
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
        side = str(2 * TOWERS[args.tower].side)
        image = tiny_models.make_image(*map(int, (args.size or f"{side}x{side}").split("x")))
    # Every variant decodes the same number of tokens.
    vlm.model.generation_config.eos_token_id = None
    if not args.frames:
        return vlm, {"images": image}
    video = clip_of(image, args.frames, args.clip == "moving")
    return vlm, {"video": video, "num_frames": args.frames}


# --- one variant in one process ------------------------------------------------------------------


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


@contextlib.contextmanager
def vision_timer(adapter: Any, clock: Callable[[], float]) -> Iterator[list[float]]:
    """Start of each call of the tower and end of each call of the projector, in turn."""
    times: list[float] = []
    handles = [
        adapter.tower().register_forward_pre_hook(lambda *_: times.append(clock())),
        adapter.mergers()[0].register_forward_hook(lambda *_: times.append(clock())),
    ]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()


def run_huggingface(
    vlm: Any, media: dict[str, Any], question: str, new_tokens: int
) -> dict[str, Any]:
    from vlmfast.engine.stats import clock

    now = lambda: clock(vlm.adapter.device)  # noqa: E731
    streamer = FirstToken(now)
    start = now()
    inputs = vlm.inputs(question, **media)
    read = now()
    with prefill_timer(vlm.model, now) as prefill, vision_timer(vlm.adapter, now) as vision:
        ids = vlm.model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, streamer=streamer
        )
    end = now()
    tokens = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "ttft": streamer.first - start,
        "media": read - start,
        "vision": sum(vision[1::2]) - sum(vision[::2]),
        "stages": 0.0,
        "prefill": prefill[1] - prefill[0],
        "tpot": (end - streamer.first) / (len(tokens) - 1),
        "tokens": tokens,
        "visual_tokens": int(vlm.adapter.visual(inputs["input_ids"]).sum()),
    }


def run_vlmfast(
    vlm: Any, media: dict[str, Any], question: str, new_tokens: int, recipe: str
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


def worker(args: argparse.Namespace) -> None:
    """Run the variant that each line on stdin names; each result is one line of JSON."""
    import torch

    from vlmfast.engine.stats import peak_memory

    if args.threads:
        torch.set_num_threads(args.threads)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the libraries must not mix with the replies
    vlm, media = load(args)
    device = vlm.adapter.device
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        name = line.strip()
        forget_peak(device)
        before = peak(device) or peak_memory(device)  # now the current size
        if name == HF:
            result = run_huggingface(vlm, media, QUESTION, args.new_tokens)
        else:
            result = run_vlmfast(vlm, media, QUESTION, args.new_tokens, name)
        after = peak(device) or peak_memory(device)
        result["memory"] = 0 if args.one_process else after
        result["working"] = 0 if args.one_process else after - before
        print(json.dumps(result), file=replies, flush=True)


class Worker:
    """A process with a model."""

    def __init__(self, model: str, args: argparse.Namespace) -> None:
        options = ["dtype", "device", "tower", "layers", "new_tokens", "threads", "frames", "clip"]
        options += ["size"] if args.size else []
        command = [sys.executable, __file__, "--worker", "--models", model]
        if args.one_process:
            command.append("--one-process")
        for option in options:
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reply("the model")

    def _reply(self, name: str) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{name}: the worker exited with {self.process.wait()}")
        return json.loads(line)

    def run(self, name: str) -> dict[str, Any]:
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return self._reply(name)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# --- the benchmark -------------------------------------------------------------------------------


def bench_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one model, interleaved."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in (HF, *args.recipes)}
    workers: list[Worker] = []
    try:
        # Sequentially, because building a model uses all cores.
        for _ in (HF,) if args.one_process else samples:
            workers.append(Worker(model, args))
        variants = list(zip(samples, itertools.cycle(workers), strict=False))
        with Progress(model, (args.warmup + args.repeats) * len(variants), "answers") as bar:
            for (name, worker), counts in turns(variants, args.repeats, warmup=args.warmup):
                sample = worker.run(name)
                if counts:
                    samples[name].append(sample)
                bar.update()
    finally:
        for worker in workers:
            worker.close()
    reference = samples[HF][0]["tokens"]
    base = {metric: spread([s[metric] for s in samples[HF]]) for metric in METRICS}
    rows = {}
    for name, own in samples.items():
        row: dict[str, Any] = {
            metric: spread([s[metric] for s in own]) for metric in (*METRICS, *PARTS)
        }
        row["ratio"] = {
            metric: base[metric]["median"] / row[metric]["median"]
            for metric in METRICS
            if row[metric]["median"] > 0
        }
        tokens = own[0]["tokens"]
        row["visual_tokens"] = own[0]["visual_tokens"]
        row["agreement"] = sum(a == b for a, b in zip(tokens, reference, strict=True)) / len(tokens)
        row["samples"] = [{m: s[m] for m in (*METRICS, *PARTS)} for s in own]
        rows[name] = row
    return rows


def markdown(model: str, rows: dict[str, Any]) -> str:
    """One table per model: median, quartiles in brackets, ratio to Hugging Face."""
    from vlmfast.eval.report import markdown_table  # takes seconds to import

    head = [model, "visual tokens", "TTFT", "prefill", "per token", "peak memory"]
    head += ["working memory", "same tokens"]
    lines = []
    for name, row in rows.items():
        cells = [name, str(row["visual_tokens"])]
        for metric in METRICS:
            scale, unit = (1e-6, "MB") if metric in ("memory", "working") else (1e3, "ms")
            value = {key: number * scale for key, number in row[metric].items()}
            if unit == "MB" and not row["memory"]["median"]:
                cells.append("–")
                continue
            digits = 0 if value["median"] >= 100 else 1
            cell = f"{value['median']:,.{digits}f} {unit}"
            if unit == "ms":
                cell += f" [{value['q1']:,.{digits}f}, {value['q3']:,.{digits}f}]"
            if name != HF and metric in row["ratio"]:
                cell += f" ({row['ratio'][metric]:.2f}x)"
            cells.append(cell)
        lines.append([*cells, f"{row['agreement']:.0%}"])
    return markdown_table(head, lines)


def parts_table(model: str, rows: dict[str, Any]) -> str:
    """The time to the first token by its parts, medians, and the time per further token."""
    from vlmfast.eval.report import markdown_table

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
    parser.add_argument(
        "--tower", default="clip-vit-l-14-336", choices=tuple(TOWERS), help="vision tower"
    )
    parser.add_argument("--size", help="WIDTHxHEIGHT of the image (default: twice the tower's side)")
    parser.add_argument("--frames", type=int, default=0, help="ask about a video of N frames")
    parser.add_argument("--clip", default="moving", choices=("moving", "static"))
    parser.add_argument("--one-process", action="store_true", help="of all variants; no memory")
    parser.add_argument("--layers", type=int, default=24, help="of the large language model")
    parser.add_argument("--quick", action="store_true", help="checks the script, measures nothing")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/ask-....json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
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
    return provenance(script, arguments, args.device) | {
        "dtype": args.dtype,
        "repeats": args.repeats,
        "tower": TOWERS[args.tower]._asdict(),
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
    if args.size:
        report["size"] = args.size
    if args.frames:
        report |= {"frames": args.frames, "clip": args.clip}
    failed = False
    for model in args.models:
        if model == "tiny" and not (TINY / "model.safetensors").is_file():
            print("tiny: vlmfast/weights/tiny is missing, left out", file=sys.stderr)
            continue
        start = time.perf_counter()
        rows = report["models"][model] = bench_model(model, args)
        title = model
        if model == SHAPED:
            title = f"{model}, {TOWERS[args.tower].name}, {args.layers} layers"
        print(f"\n{markdown(title, rows)}\n\n{parts_table(title, rows)}")
        print(f"\n{time.perf_counter() - start:.0f} s in total")
        if "none" in rows and rows["none"]["agreement"] < 1:
            print(f"{model}: the tokens of none differ from Hugging Face's", file=sys.stderr)
            failed = True
    if args.quick and args.out is None:
        return int(failed)
    out = args.out or RESULTS / f"ask-{args.device.partition(':')[0]}-{args.dtype}.json"
    write_json(out, report)
    print(f"written: {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
