"""The arguments of each command, with examples."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vlmfast.core.help import RECIPES, add_dtype, count, examples, names

from .methods import PLACES
from .parser import Command

_PICTURE = 'examples/picture.png "What is in the bottom left?"'
_CLIP = 'examples/clip.mp4 "Which way does the cyan star move?" --num-frames 4'
_HUB = "--model llava-hf/llava-v1.6-mistral-7b-hf"


def module(name: str) -> Any:
    """The module ``vlmfast.NAME``, imported when it is needed."""
    return importlib.import_module(f"vlmfast.{name}")


def later(name: str, function: str) -> Callable[..., Any]:
    """A function of ``vlmfast.NAME``, which is imported when it is called."""
    return lambda *args: getattr(module(name), function)(*args)


def ask(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        f"vlmfast ask {_PICTURE}",
        f"vlmfast ask {_PICTURE} --recipe balanced --json",
        f"vlmfast ask {_CLIP} --recipe balanced",
        f'vlmfast ask street.jpg "What is on the sign?" {_HUB} --recipe hired:0.2',
    )
    _add_question(parser)
    parser.add_argument("--recipe", default="none", help=f"recipe to run: {RECIPES}")
    parser.add_argument(
        "--max-kv-tokens",
        type=count,
        metavar="N",
        help="prefill a video block by block, so that no layer caches more than N tokens",
    )


def compare(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        f"vlmfast compare {_PICTURE} --recipe balanced --recipe random:0.22",
        f"vlmfast compare {_PICTURE} --recipe balanced --overlay kept.png",
        f"vlmfast compare {_CLIP} --recipe balanced",
    )
    _add_question(parser)
    _add_several(parser, "--recipe", "recipe to run", f": {RECIPES}", dest="recipes", required=True)
    parser.add_argument("--overlay", metavar="PNG", help="draw which visual tokens were kept")
    parser.add_argument(
        "--no-warmup",
        dest="warmup",
        action="store_false",
        help="skip the warm-up run before timing",
    )


def bench(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        "vlmfast bench",
        "vlmfast bench --recipe balanced --recipe hired:0.5+snapkv:0.5 --repeats 5",
        f"vlmfast bench {_HUB} --recipe balanced --json",
        "vlmfast bench --audit-lossless --drafter draft-eagle --prompts 4",
    )
    add_model(parser)
    default = module("eval.bench").RECIPES
    about = f": {RECIPES} (default: {', '.join(default)})"
    _add_several(parser, "--recipe", "recipe to measure", about, dest="recipes")
    parser.add_argument(
        "--new-tokens", type=count, default=32, metavar="N", help="length of each answer"
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="timed repetitions")
    audit = parser.add_argument_group(
        "losslessness of drafters", "exits with 1 if rounding does not explain a difference"
    )
    audit.add_argument(
        "--audit-lossless",
        action="store_true",
        help="compare answers with and without drafter under each recipe (default: none)",
    )
    about = " (default: all supported)"
    _add_several(audit, "--drafter", "e.g. draft-ngram+draft-recycle", about, dest="drafters")
    audit.add_argument("--prompts", type=count, metavar="N", help="generated images (default: 24)")
    audit.add_argument(
        "--strict", action="store_true", help="strict verification, which also covers near ties"
    )


def check(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples("vlmfast check --quick", f"vlmfast check {_HUB} --device cuda")
    add_model(parser)
    module("check.commands").add_arguments(parser)


def methods(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        "vlmfast methods",
        "vlmfast methods hired snapkv           # parameters and papers",
        "vlmfast methods --where tokens",
        f"vlmfast methods {_HUB}   # which of them run",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="METHOD", help="show these methods or presets (default: all)")
    where = "only those that act there"
    _add_several(parser, "--where", where, metavar=None, choices=tuple(PLACES))
    add_model(parser, default=None, about="test which methods run on this model: ")
    add("--video", action="store_true", help="with --model: test with a video, not an image")


def env(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples("vlmfast env", "vlmfast env --json")
    _add_json(parser)


def tune(parser: argparse.ArgumentParser) -> None:
    module("tune.commands").add_arguments(parser)
    add_model(parser)


def encode(parser: argparse.ArgumentParser) -> None:
    module("integrations.commands").add_encode(parser)
    add_model(parser)


def train(parser: argparse.ArgumentParser) -> None:
    training, registry = module("train.stages"), module("core.registry")
    parser.epilog = examples(
        "vlmfast train elastic --steps 1000 --out runs/elastic",
        "vlmfast train drafter --help            # options and examples of each",
    )
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=Command)

    about = "a drafter, on answers of its model"
    drafter = what.add_parser("drafter", help=about, description=f"Train {about}")
    drafter.fill = lambda p: module("train.drafters").add_arguments(p)
    for name in training.trainable():
        about = (registry.stage_class(name).__doc__ or "").strip().partition("\n")[0]
        method = what.add_parser(name, help=about, description=f"Train {name}. {about}")
        method.fill = partial(training.add_arguments, name=name)


def serve(parser: Command) -> None:
    parser.passed_on = "engine_options"
    parser.add_argument(
        "served", nargs="?", metavar="MODEL", help="tiny (shipped, default), a folder or a hub id"
    )
    add_model(parser, json=False)
    module("serve.commands").add_arguments(parser)


def demo(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        "vlmfast demo",
        f"vlmfast demo {_HUB} --recipe balanced",
        "vlmfast demo --server http://127.0.0.1:8000",
    )
    add_model(parser, json=False)
    add = parser.add_argument
    add("--recipe", default="balanced", help=f"initial recipe of the page: {RECIPES}")
    add("--server", metavar="URL", help="ask the model of a running `vlmfast serve` instead")
    add("--api-key", metavar="KEY", help="key of this server (default: VLMFAST_API_KEY)")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    add(
        "--allowed-hosts",
        type=names,
        default=(),
        metavar="NAME,NAME",
        help="accepted Host headers (default: this machine's, where it listens for it only)",
    )
    add("--port", type=count, default=7860, metavar="N", help="port")


def example_files(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples("vlmfast examples", "vlmfast examples folder")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("examples"),
        metavar="FOLDER",
        help="folder of the files; those that exist stay as they are (default: examples)",
    )


def completion(parser: argparse.ArgumentParser) -> None:
    parser.epilog = examples(
        "vlmfast completion bash > ~/.local/share/bash-completion/completions/vlmfast",
        "vlmfast completion zsh > ~/.local/share/zsh_completion/_vlmfast",
        "vlmfast completion fish > ~/.config/fish/completions/vlmfast.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell of the script")


def add_model(
    parser: argparse.ArgumentParser,
    *,
    json: bool = True,
    default: str | None = "tiny",
    about: str = "",
) -> None:
    """Model, device and dtype; with ``json`` also ``--json``."""
    parser.add_argument(
        "--model", default=default, help=f"{about}tiny (shipped), a folder or a hub id"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if available)")
    add_dtype(parser)
    if json:
        _add_json(parser)


def _add_several(
    parser: argparse._ActionsContainer,
    name: str,
    what: str,
    more: str = "",
    *,
    metavar: str | None = "RECIPE",
    **options: Any,
) -> None:
    """An option whose values are collected in a list."""
    about = f"{what}; may be given several times{more}"
    parser.add_argument(name, action="append", metavar=metavar, help=about, **options)


def _add_question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="an image or a video, detected by its content")
    parser.add_argument("question", metavar="QUESTION", help="one argument, so quote it")
    add_model(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=count,
        metavar="N",
        help="maximum length of the answer (default: the checkpoint's, or 128)",
    )
    frames = parser.add_mutually_exclusive_group()
    frames.add_argument(
        "--num-frames",
        type=count,
        metavar="N",
        help="number of frames to read from a video, or an animated image (default: 8)",
    )
    frames.add_argument(
        "--fps", type=float, help="frames to read per second of a video, or an animated image"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
