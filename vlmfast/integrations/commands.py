"""The commands ``vlmfast encode`` and ``vlmfast export``."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from vlmfast.api.vlm import VLM
from vlmfast.core.help import RECIPES, examples
from vlmfast.core.progress import Progress
from vlmfast.core.recipe import Recipe
from vlmfast.media import kind_of

TARGETS = ("vllm",)


def add_encode(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast encode``."""
    parser.description = (
        "Encode images once, for engines that take features instead of images. Every image is "
        "saved immediately: repeat the command to resume an interrupted run."
    )
    parser.epilog = examples(
        "vlmfast encode examples/picture.png --recipe hired:budget=0.2 --out features",
        "vlmfast encode images/*.jpg --model MODEL --recipe balanced --out features",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="images")
    about = f"recipe that chooses the visual tokens: {RECIPES}"
    parser.add_argument("--recipe", default="none", help=about)
    out, about = Path("vlmfast-features"), "folder of the features and their manifest"
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help=about)


def run_encode(args: Namespace, load: Callable[[], VLM]) -> None:
    """Run ``vlmfast encode``."""
    from vlmfast.api.encoding import check_encodable

    from .features import encode_files

    for file in args.files:
        kind_of(file)  # raises for one that is missing
    if args.recipe != "auto":  # depends on the checkpoint
        check_encodable(Recipe.parse(args.recipe))
    vlm = load()
    with Progress("encode", len(args.files), "images", show=not args.json) as bar:
        found = encode_files(
            vlm, args.files, args.recipe, args.out, model=args.model, done=bar.update
        )
    before, kept = (sum(entry[key] for entry in found.entries) for key in ("tokens", "kept"))
    if args.json:
        print(json.dumps({**found.header, "out": str(args.out), "images": list(found.entries)}))
        return
    print(f"{args.out}: {len(found)} images, {before:,} → {kept:,} visual tokens")


def add_export(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast export``."""
    parser.description = "Write a checkpoint that another engine loads."
    parser.epilog = examples("vlmfast export tiny-vllm --for vllm")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument("--for", dest="target", choices=TARGETS, required=True, help="the engine")
    about = "tiny (shipped), or the folder of a checkpoint"
    parser.add_argument("--model", default="tiny", help=about)


def run_export(args: Namespace) -> None:
    """Run ``vlmfast export``."""
    from .vllm import export

    files = export(args.model, args.folder)
    print(f"{args.folder}: {len(files)} files for vLLM")
