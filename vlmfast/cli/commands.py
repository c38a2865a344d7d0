"""The command line: ``vlmfast ask``, ``compare``, ``bench``, ``check``, ``methods``, ``env``,
``train``, ``tune``, ``eval``, ``report``, ``serve``, ``demo``.

Each command imports what it needs when it runs, so that ``vlmfast --help`` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmfast.errors import MediaError, ModelError, VLMFastError
from vlmfast.version import __version__

from .output import (
    answer_json,
    audit_row,
    audited,
    bench_row,
    check_rows,
    comparison_row,
    divergence,
    in_bytes,
    print_json,
    print_table,
    stats_row,
)

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

_INTERRUPTED, _BROKEN_PIPE = 130, 141  # 128 + the signal, as in shells


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the process's own by default.

    Returns
    -------
    int
        0, or 2 after a user error, which is printed to stderr in one line. Usage errors and
        ``--help`` raise `SystemExit`, as in argparse.
    """
    parser = _parser()
    debug = False
    try:
        args = parser.parse_args(argv)
        debug = args.debug
        if args.command is None:
            parser.print_help()
            return 0
        _survive_narrow_encodings()
        with contextlib.nullcontext() if debug else _quiet():
            code = args.run(args) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe; without this Python prints another error at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        if debug:
            raise
        return _INTERRUPTED
    except Exception as error:
        message = _message(error)
        if debug or message is None:
            raise
        print(f"vlmfast: error: {message}", file=sys.stderr)
        return 2
    return code


def _message(error: Exception) -> str | None:
    """The one-line message of a user error; ``None`` for a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, VLMFastError):
        return text
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU's memory is too small: {text}"
    return None


# --- arguments -----------------------------------------------------------------------------------


class _Command(argparse.ArgumentParser):
    """A parser that adds its arguments on use, since their modules may be slow to import."""

    fill: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
            _add_debug(self)
        return super().parse_known_args(*args, **kwargs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlmfast",
        description="Faster vision-language models with one-line compression recipes.",
        epilog="`vlmfast COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"vlmfast {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show tracebacks, warnings and log lines"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Command
    )
    for name, (about, fill, run) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:])
        command.fill = fill
        command.set_defaults(run=run)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    # Also allowed after the command; suppressed, or its default would undo a `--debug` before it.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _add_model(
    parser: argparse.ArgumentParser, *, json: bool = True, default: str | None = "tiny"
) -> None:
    shipped = "tiny (shipped, default)" if default else "tiny (shipped)"
    parser.add_argument("--model", default=default, help=f"{shipped}, a folder or a hub id")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if available)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights (default: the checkpoint's)",
    )
    if json:
        _fill_json(parser)


def _add_question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="an image or a video, detected by its content")
    parser.add_argument("question", metavar="QUESTION")
    _add_model(parser)
    parser.add_argument(
        "--max-new-tokens", type=_count, metavar="N", help="maximum length of the answer"
    )
    frames = parser.add_mutually_exclusive_group()
    frames.add_argument(
        "--num-frames",
        type=_count,
        metavar="N",
        help="number of frames to read from a video (default 8)",
    )
    frames.add_argument("--fps", type=float, help="frames to read per second of a video")


def _fill_ask(parser: argparse.ArgumentParser) -> None:
    _add_question(parser)
    parser.add_argument(
        "--recipe", default="none", help="recipe to run, e.g. balanced or hired:0.2"
    )
    parser.add_argument(
        "--max-kv-tokens",
        type=_count,
        metavar="N",
        help="prefill a video block by block, so that no layer caches more than N tokens",
    )


def _fill_compare(parser: argparse.ArgumentParser) -> None:
    _add_question(parser)
    parser.add_argument(
        "--recipe",
        action="append",
        default=[],
        dest="recipes",
        metavar="RECIPE",
        required=True,
        help="recipe to run, e.g. balanced or hired:0.2; may be given several times",
    )
    parser.add_argument("--overlay", metavar="PNG", help="draw which visual tokens were kept")
    parser.add_argument(
        "--no-warmup",
        dest="warmup",
        action="store_false",
        help="skip the warm-up run before timing",
    )


def _fill_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    default = _module("eval.bench").RECIPES
    parser.add_argument(
        "--recipe",
        action="append",
        dest="recipes",
        metavar="RECIPE",
        help=f"recipe to measure; may be given several times (default: {', '.join(default)})",
    )
    parser.add_argument(
        "--new-tokens",
        type=_count,
        default=32,
        metavar="N",
        help="length of each answer (default 32)",
    )
    parser.add_argument(
        "--repeats", type=_count, default=3, metavar="N", help="timed repetitions (default 3)"
    )
    audit = parser.add_argument_group(
        "losslessness of drafters", "exits with 1 if rounding does not explain a difference"
    )
    audit.add_argument(
        "--audit-lossless",
        action="store_true",
        help="compare answers with and without drafter under each recipe (default: none)",
    )
    audit.add_argument(
        "--drafter",
        action="append",
        dest="drafters",
        metavar="RECIPE",
        help="e.g. draft-ngram+draft-recycle; may be given several times (default: all supported)",
    )
    audit.add_argument("--prompts", type=_count, metavar="N", help="generated images (default 24)")
    audit.add_argument(
        "--strict", action="store_true", help="strict verification, which also covers near ties"
    )


def _fill_check(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _module("check.commands").add_arguments(parser)


def _fill_demo(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, json=False)
    parser.add_argument("--recipe", default="balanced", help="initial recipe of the page")
    parser.add_argument(
        "--server", metavar="URL", help="ask the model of a running `vlmfast serve` instead"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of this server (default: VLMFAST_API_KEY)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    parser.add_argument(
        "--port", type=_count, default=7860, metavar="N", help="port (default 7860)"
    )


def _fill_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "served", nargs="?", metavar="MODEL", help="tiny (shipped, default), a folder or a hub id"
    )
    _add_model(parser, json=False)
    _module("serve.commands").add_arguments(parser)


def _fill_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="METHOD", help="methods to list (default: all)")
    _add_model(parser, default=None)
    parser.add_argument(
        "--video", action="store_true", help="with --model: test with a video, not an image"
    )


def _fill_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")


def _fill_train(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=_Command)
    tiny = what.add_parser("tiny", help="the shipped model, on generated images and videos")
    tiny.fill = lambda p: _module("train.tiny.training").add_arguments(p)
    drafter = what.add_parser("drafter", help="a drafter, on answers of its model")
    drafter.fill = lambda p: _module("train.drafters").add_arguments(p)
    training = _module("train.stages")
    for name in training.trainable():
        about = _module("core.registry").stage_class(name).__doc__ or ""
        method = what.add_parser(name, help=about.strip().partition("\n")[0])
        method.fill = partial(training.add_arguments, name=name)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _module(name: str) -> Any:
    return importlib.import_module(f"vlmfast.{name}")


# --- commands ------------------------------------------------------------------------------------


def _ask(args: argparse.Namespace) -> None:
    vlm, media = _vlm(args), _media(args)
    if args.max_kv_tokens is not None:
        if "video" not in media:
            raise MediaError(f"{args.file} is an image; --max-kv-tokens is for videos")
        media |= {"max_kv_tokens": args.max_kv_tokens, "progress": sys.stderr.isatty()}
    answer = vlm.ask(args.question, **media, recipe=args.recipe, **_generation(args))
    if args.json:
        print_json({**_heading(args), **answer_json(answer)})
        return
    print(answer.text)
    print()
    print_table([stats_row(args.recipe, answer.stats)])


def _heading(args: argparse.Namespace) -> dict[str, Any]:
    return {"file": args.file, "question": args.question, "model": args.model}


def _compare(args: argparse.Namespace) -> None:
    _check_overlay(args.overlay)
    vlm, media = _vlm(args), _media(args)
    if args.warmup:
        vlm.compare(args.question, **media, recipes=args.recipes, max_new_tokens=2)
    rows = vlm.compare(args.question, **media, recipes=args.recipes, **_generation(args))
    if args.overlay:
        from vlmfast.api.overlays import contact_sheet

        contact_sheet([row.answer for row in rows]).save(args.overlay)
    if args.json:
        answers = [{**answer_json(row.answer), "agreement": row.agreement} for row in rows]
        print_json({**_heading(args), "answers": answers})
        return
    print(f"{args.file}: {args.question}")
    print()
    # As given: the canonical text omits defaults.
    names = ["none", *args.recipes]
    print_table([comparison_row(*pair) for pair in zip(names, rows, strict=True)])


def _bench(args: argparse.Namespace) -> int | None:
    bench = _module("eval.bench")
    if args.audit_lossless:
        return _audit(args)
    if args.drafters or args.prompts or args.strict:
        raise VLMFastError("--drafter, --prompts and --strict belong to --audit-lossless")
    args.recipes = args.recipes or list(bench.RECIPES)
    rows = bench.bench(_vlm(args), args.recipes, new_tokens=args.new_tokens, repeats=args.repeats)
    if args.json:
        about = {"model": args.model, "new_tokens": args.new_tokens, "repeats": args.repeats}
        print_json({**bench.facts(), **about, "rows": [vars(row) for row in rows]})
        return None
    print_table(
        [bench_row(*pair, rows[0]) for pair in zip(["none", *args.recipes], rows, strict=True)]
    )
    return None


def _audit(args: argparse.Namespace) -> int:
    from vlmfast.core.recipe import Recipe

    bench, args.recipes = _module("eval.bench"), args.recipes or ["none"]
    for drafter in args.drafters or ():  # before a checkpoint is loaded
        Recipe.parse(drafter)
    vlm = _vlm(args)
    rows = bench.audit(
        vlm,
        args.recipes,
        args.drafters,
        count=args.prompts or 24,
        new_tokens=args.new_tokens,
        strict=args.strict,
    )
    about = bench.numerics(vlm)
    bugs = sum(row.bugs for row in rows)
    if args.json:
        about |= {"model": args.model, "new_tokens": args.new_tokens, "strict": args.strict}
        found = [{**asdict(row), "bugs": row.bugs} for row in rows]
        print_json({**about, **bench.facts(), "near": bench.NEAR, "rows": found, "bugs": bugs})
        return int(bool(bugs))
    print(f"{args.model}: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    print()
    print_table([audit_row(row) for row in rows])
    for row in rows:
        for gone in row.divergences:
            print(divergence(row, gone))
        if not row.drafted:
            print(f"nothing was drafted: {audited(row)}: {row.speculation}")
    return int(bool(bugs))


def _check(args: argparse.Namespace) -> int:
    commands = _module("check.commands")
    vlm = _vlm(args)
    found = commands.check(vlm, quick=args.quick)
    if args.json:
        name = Path(args.model).name if Path(args.model).is_dir() else args.model
        print_json({"checkpoint": name, "quick": args.quick, **found.to_dict()})
    else:
        print(f"kernels, {found.how}")
        print()
        print_table(check_rows("kernel", commands.summary(found.kernels)))
        print()
        print(f"{args.model} on {found.device}")
        print()
        print_table(check_rows("check", found.model))
        print()
        print("passed" if found.passed else "failed")
        if found.setting:
            print(f"{found.setting} runs the PyTorch references of these kernels")
    if args.save:
        message = commands.save(found, vlm.adapter.device)
        print(message, file=sys.stderr if args.json else sys.stdout)
    return 0 if found.passed else 1


def _methods(args: argparse.Namespace) -> None:
    from vlmfast.api.vlm import methods

    if args.model is not None:
        _supported(args)
        return
    for name in args.names:
        _module("core.registry").stage_class(name)  # raises for an unknown name and lists all
    found = [method for method in methods() if not args.names or method["name"] in args.names]
    if args.json:
        print_json(found)
        return
    for number, method in enumerate(found):
        if number:
            print()
        about = [method["protocol"], "needs training" if method["trained"] else "", method["paper"]]
        print(f"{method['name']}  ({', '.join(part for part in about if part)})")
        print(f"  {method['summary']}")
        for parameter in method["parameters"]:
            about = [parameter.get("doc", "")]
            if parameter.get("choices"):
                about.append("one of " + ", ".join(parameter["choices"]))
            if parameter["name"] == method["value"]:
                about.append("the bare value")
            value = parameter["default"]
            value = f"{value:.4g}" if isinstance(value, float) else value
            print(f"    {parameter['name']}={value}  {'; '.join(about)}")


def _supported(args: argparse.Namespace) -> None:
    """Print which methods run on a model."""
    from dataclasses import asdict

    from vlmfast.api.support import support, support_of

    args.recipes = args.names  # checked before the model is loaded
    vlm = _vlm(args)
    if args.names:
        found = [support_of(vlm, name, video=args.video) for name in args.names]
    else:
        found = support(vlm, video=args.video)
    if args.json:
        print_json([asdict(method) for method in found])
        return
    print_table(
        [
            {
                "method": method.method,
                "runs": {True: "yes", False: "no", None: "?"}[method.runs],
                "saliency": method.saliency or "-",
                "note": method.note,
            }
            for method in found
        ]
    )


def _env(args: argparse.Namespace) -> None:
    from vlmfast.core.env import environment

    facts = environment()
    if args.json:
        print_json(facts)
        return
    facts |= facts.pop("packages")
    facts["memory"] = in_bytes(facts.pop("memory_bytes"))
    gpus = [
        f"{gpu['name']} ({in_bytes(gpu['memory_bytes'])}, {gpu['capability']}, kernels: "
        f"{gpu['kernels']})"
        for gpu in facts.pop("gpus")
    ]
    facts["gpus"] = ", ".join(gpus) or None
    facts["variables"] = " ".join(f"{k}={v}" for k, v in facts["variables"].items()) or None
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key:<{width}}  {'-' if value is None else value}")


def _train(args: argparse.Namespace) -> int:
    if args.what == "tiny":
        return _module("train.tiny.training").run(args)
    if args.what == "drafter":
        trainer = _module("train.drafters").DrafterTrainer(args)
    else:
        trainer = _module("train.stages").Trainer(args.what, args)
    trainer.train()
    print(f"{trainer.out / 'weights'}: {trainer.name} after {trainer.step} steps")
    return 0


def _eval(args: argparse.Namespace) -> int:
    return _module("eval.commands").run_eval(args)


def _report(args: argparse.Namespace) -> int:
    return _module("eval.commands").run_report(args)


def _demo(args: argparse.Namespace) -> None:
    app = _module("demos.app")  # raises for missing packages before a checkpoint is loaded

    def ready(address: str) -> None:
        print(f"{name} is served at {address} (stop with Ctrl+C)", flush=True)

    vlm, name = _demo_model(args)
    app.launch(vlm, name, recipe=args.recipe, host=args.host, port=args.port, ready=ready)


def _demo_model(args: argparse.Namespace) -> tuple[Any, str]:
    """The model of the demo and its name on the page."""
    if args.server is None:
        if args.api_key is not None:
            raise VLMFastError("--api-key needs --server")
        return _vlm(args), args.model
    if (args.model, args.device, args.dtype) != ("tiny", None, "auto"):
        raise VLMFastError("--model, --device and --dtype cannot be combined with --server")
    # As the server reads it: one key, or several separated by commas.
    key = args.api_key or os.environ.get("VLMFAST_API_KEY", "").partition(",")[0]
    remote = _module("demos.remote").RemoteVLM(args.server, key)
    return remote, remote.name


def _serve(args: argparse.Namespace) -> None:
    args.model = args.served or args.model
    _module("serve.commands").run(args, partial(_vlm, args))


_COMMANDS: dict[str, tuple[str, Callable[[Any], None], Callable[[Any], int | None]]] = {
    "ask": ("answer a question about an image or a video", _fill_ask, _ask),
    "compare": ("compare recipes with the full model", _fill_compare, _compare),
    "bench": ("measure speed and memory of recipes on this machine", _fill_bench, _bench),
    "check": ("check kernels and a model on this machine", _fill_check, _check),
    "methods": (
        "list methods and their parameters, or which run on a model",
        _fill_methods,
        _methods,
    ),
    "env": ("print the environment for a bug report", _fill_json, _env),
    "eval": (
        "evaluate recipes on a task; interrupted runs resume",
        lambda parser: _module("eval.commands").add_eval(parser),
        _eval,
    ),
    "report": (
        "write tables and plots of evaluation results",
        lambda parser: _module("eval.commands").add_report(parser),
        _report,
    ),
    "tune": (
        "find the cheapest recipe that stays accurate on your data; interrupted runs resume",
        lambda parser: _module("tune.commands").add_arguments(parser),
        lambda args: _module("tune.commands").run(args, partial(_vlm, args)),
    ),
    "train": ("train the shipped model, a drafter or a method", _fill_train, _train),
    "serve": ("serve a model through OpenAI's API", _fill_serve, _serve),
    "demo": ("serve a page that compares the full model with a recipe", _fill_demo, _demo),
}


# --- inputs --------------------------------------------------------------------------------------


def _vlm(args: argparse.Namespace) -> VLM:
    import torch

    from vlmfast.api.vlm import VLM
    from vlmfast.core.recipe import Recipe

    # Before loading a checkpoint, which may take minutes.
    for recipe in getattr(args, "recipes", None) or [getattr(args, "recipe", None) or "none"]:
        if recipe != "auto":  # depends on the checkpoint
            Recipe.parse(recipe)
    try:
        device = None if args.device is None else torch.device(args.device)
    except RuntimeError:
        raise ModelError(f"device {args.device!r} is not known; use cpu, cuda or cuda:1") from None
    if device is not None and device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ModelError(f"device {args.device!r} does not exist: PyTorch sees {count} GPUs")
    if not args.debug:
        from transformers.utils import logging

        logging.set_verbosity_error()
        if args.model == "tiny" or Path(args.model).is_dir():
            # No progress bar without a download.
            logging.disable_progress_bar()
    return VLM.from_pretrained(args.model, device=device, dtype=args.dtype)


def _media(args: argparse.Namespace) -> dict[str, Any]:
    """The media arguments of `VLM.ask` for FILE."""
    from vlmfast.media import kind_of

    if kind_of(args.file) == "video":
        return {"video": args.file, "num_frames": args.num_frames, "fps": args.fps}
    if args.num_frames or args.fps:
        raise MediaError(f"{args.file} is an image; --num-frames and --fps are for videos")
    return {"images": args.file}


def _generation(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}


def _check_overlay(path: str | None) -> None:
    """Reject an overlay that cannot be written, before anything is computed."""
    if path is None:
        return
    from PIL import Image

    if Path(path).suffix.lower() not in Image.registered_extensions():
        raise MediaError(f"--overlay {path}: the name must end in .png or another image format")
    if not Path(path).parent.is_dir():
        raise MediaError(f"--overlay {path}: folder {Path(path).parent} does not exist")


# --- surroundings --------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log lines of libraries: stderr is for vlmfast's own messages."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"vlmfast: warning: {message}", file=sys.stderr)

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", ".* is deprecated, use ", FutureWarning)
        warnings.filterwarnings("default", "kernels: ", RuntimeWarning)
        warnings.showwarning = show
        yield


def _survive_narrow_encodings() -> None:
    """Print ``?`` for characters of an answer that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
