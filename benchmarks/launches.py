"""Launches and host reads of every method, on the path that CUDA takes, counted without a GPU.

Two models of a small width with random weights: what is counted does not depend on it. They are
LLaVA-NeXT with the depth of a 7B model (24 blocks of CLIP, five views, 32 layers) and 336 visual
tokens, and one with the 32 blocks and the windows of Qwen2.5-VL-7B's tower. Trained methods run on
the shipped model.

``python benchmarks/launches.py --label NAME`` adds the counts of this code to the result file under
a name, next to those of other revisions, and prints them. The same code gives the same counts on
every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from shapes import Shape, build, with_tests

from vlmfast.check.launches import Launches, counted
from vlmfast.core.registry import stage_names

RESULT = harness.RESULTS / "launches.json"
DTYPE = "bfloat16"
LLAVA = Shape(
    "llama", 32, 64, 128, 4, 2, 512, (224, 224), ((112, 224), (224, 112), (224, 224)),
    tower=(24, 64, 4, 112, 14),
)  # fmt: skip
QWEN_SIZES = ((448, 448), (672, 672), (1344, 1008))
SHIPPED = ("none", "pvc", "elastic", "atp")
# Of several images, of a video, or of another checkpoint.
LEFT_OUT = (
    "frames-clip", "static-frames", "clip-relevance", "draft-auto", "draft-eagle", "draft-vispec",
    *SHIPPED,
)  # fmt: skip
COMBINED = ("hired:0.2+snapkv:0.5", "hired:0.2+pyramiddrop+zipvl")


def recipes() -> list[str]:
    """All methods with their defaults that run on one image, and two combined recipes."""
    return ["none", *(name for name in stage_names() if name not in LEFT_OUT), *COMBINED]


def qwen(folder: Path) -> None:
    """Save a model with the tower of Qwen2.5-VL-7B, narrow, and two layers."""
    with_tests()
    from support import tiny_families

    model, processor = tiny_families.build_qwen2_5_vl(
        patch=14,
        largest=1344 * 1008,
        depth=32,
        window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def llava(folder: Path) -> None:
    """Save a narrow model of `LLAVA`."""
    model, processor = build(LLAVA, torch.device("cpu"), torch.float32)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and counts of every part: a model at one size."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "llava-next"
        llava(made)
        yield "llava-next", _counted(str(made), recipes(), LLAVA.image)
        yield "tiny", _counted("tiny", SHIPPED, LLAVA.image)
        made = Path(folder) / "qwen2.5-vl"
        qwen(made)
        for size in QWEN_SIZES:
            yield f"qwen2.5-vl {size[0]}x{size[1]}", _counted(str(made), ["none"], size)


def _counted(model: str, names: Any, size: tuple[int, int]) -> dict[str, Any]:
    return Launches(size, counted(model, names, size, DTYPE)).to_dict()


def main(argv: list[str]) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--label", required=True, help="name of these counts in the result file")
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    found = {}
    for name, part in parts():
        found[name] = part
        for request in part["requests"]:
            first, step = request["first_token"], request["step"]
            print(
                f"{name} {request['recipe']}: first token {first['launches']} launches, "
                f"{sum(first['reads'].values())} reads {first['reads']}; decode step "
                f"{step['launches']}, {sum(step['reads'].values())}",
                flush=True,
            )
    known = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    counts = {**harness.begin("launches.py", argv, args), "parts": found}
    labels = known.get("labels", {}) | {args.label: counts}
    harness.written(RESULT, {"dtype": DTYPE, "labels": labels})


if __name__ == "__main__":
    main(sys.argv[1:])
