"""The command line: ``vlmfast ask``, ``compare``, ``bench``, ``check``, ``methods``, ``env``,
``train``, ``tune``, ``eval``, ``report``, ``reproduce``, ``encode``, ``export``, ``serve``,
``demo``, ``examples``, ``completion``.

Each command imports what it needs when it runs, so that ``vlmfast --help`` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.help import examples
from vlmfast.core.hub import check_model
from vlmfast.errors import (
    MediaError,
    OutOfMemory,
    VLMFastError,
    is_out_of_memory,
)
from vlmfast.version import __version__

from . import arguments, completion
from .arguments import later, module
from .output import (
    answer_json,
    audit_row,
    audited,
    bench_row,
    check_rows,
    comparison_json,
    comparison_row,
    divergence,
    in_bytes,
    launch_row,
    print_json,
    print_table,
    stats_row,
)
from .parser import Command, Help, add_logging, log_level
from .streams import discard_output, open_missing, survive_narrow_encodings

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM


LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the process's own by default.

    Returns
    -------
    int
        An `ExitCode`. A user error is printed to stderr in one line. Usage errors and ``--help``
        raise `SystemExit`, as in argparse.
    """
    open_missing()
    parser = build_parser()
    debug = False
    try:
        try:
            args = parser.parse_args(argv)
            debug = args.debug
            if args.command is None:
                parser.print_help()
                sys.stdout.flush()
                return ExitCode.FINISHED
            survive_narrow_encodings()
            with _logged(args), contextlib.nullcontext() if debug else _quiet():
                code = args.run(args) or ExitCode.FINISHED
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return ExitCode.BROKEN_PIPE
    except KeyboardInterrupt:
        if debug:
            raise
        return ExitCode.INTERRUPTED
    except Exception as error:
        message = _message(error)
        if _is_full(error):
            discard_output()
        if debug or message is None:
            raise
        with contextlib.suppress(OSError):  # there is no other place for it
            print(f"vlmfast: error: {message}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return code


def _message(error: Exception) -> str | None:
    """The one-line message of a user error; ``None`` for a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, VLMFastError | OutOfMemory):
        return text
    if isinstance(error, OSError) and _is_full(error):
        return f"the output cannot be written: {error.strerror}"
    if is_out_of_memory(error):
        return f"the memory is too small: {text or type(error).__name__}"
    return None


def _is_full(error: Exception) -> bool:
    """Whether stdout cannot be written; errors of files come from `core.files`, and name them."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlmfast",
        description="Faster vision-language models with one-line compression recipes.",
        epilog=examples(
            'vlmfast ask examples/picture.png "What is in the bottom left?" --recipe balanced',
            "vlmfast methods --where tokens",
            "vlmfast COMMAND --help                  # options, defaults and examples",
        ),
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"vlmfast {__version__}")
    add_logging(parser)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Command
    )
    for name, (about, fill, run) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:])
        command.fill = fill
        command.set_defaults(run=run)
    return parser


# --- commands ------------------------------------------------------------------------------------


def _ask(args: argparse.Namespace) -> None:
    media = _media(args)
    if args.max_kv_tokens is not None:
        if "video" not in media:
            raise MediaError(f"{args.file} is an image; --max-kv-tokens is for videos")
        media |= {"max_kv_tokens": args.max_kv_tokens, "progress": sys.stderr.isatty()}
    answer = _vlm(args).ask(args.question, **media, recipe=args.recipe, **_generation(args))
    if args.json:
        print_json({**_heading(args), **answer_json(answer.recipe, answer)})
        return
    print(answer.text)
    print()
    print_table([stats_row(answer.recipe, answer.stats)])


def _heading(args: argparse.Namespace) -> dict[str, Any]:
    return {"file": args.file, "question": args.question, "model": args.model}


def _compare(args: argparse.Namespace) -> int:
    _check_overlay(args.overlay)
    media = _media(args)
    vlm = _vlm(args)
    if args.warmup:
        vlm.compare(args.question, **media, recipes=args.recipes, max_new_tokens=2)
    rows = vlm.compare(args.question, **media, recipes=args.recipes, **_generation(args))
    if args.overlay:
        from vlmfast.api.overlays import contact_sheet
        from vlmfast.core.files import replacing

        sheet = contact_sheet([row.answer for row in rows if row.answer is not None])
        with replacing(args.overlay) as file:
            sheet.save(file, _image_format(args.overlay))
    # As given: the canonical text omits defaults.
    named = list(zip(["none", *args.recipes], rows, strict=True))
    if args.json:
        answers = [comparison_json(name, row) for name, row in named]
        print_json({**_heading(args), "answers": answers})
    else:
        print(f"{args.file}: {args.question}")
        print()
        print_table([comparison_row(name, row) for name, row in named])
    refused = any(row.answer is None for row in rows)
    return ExitCode.CUT_SHORT if refused else ExitCode.FINISHED


def _bench(args: argparse.Namespace) -> int | None:
    bench = module("eval.bench")
    if args.audit_lossless:
        return _audit(args)
    if args.drafters or args.prompts or args.strict:
        raise VLMFastError("--drafter, --prompts and --strict belong to --audit-lossless")
    args.recipes = args.recipes or list(bench.RECIPES)
    vlm = _vlm(args)
    rows = bench.bench(
        vlm,
        args.recipes,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        progress=True,
    )
    names = ["none", *args.recipes]
    if args.json:
        about = {"model": args.model, "tower": bench.tower_of(vlm)}
        about |= {"new_tokens": args.new_tokens, "repeats": args.repeats}
        # As given: the canonical text of a row omits defaults.
        found = [{**vars(row), "recipe": name} for name, row in zip(names, rows, strict=True)]
        print_json({**bench.facts(), **about, "rows": found})
        return None
    print_table([bench_row(*pair, rows[0]) for pair in zip(names, rows, strict=True)])
    print(f"\nvision tower: {bench.tower_of(vlm)}")
    return None


def _audit(args: argparse.Namespace) -> int:
    from vlmfast.core.recipe import Recipe

    bench, args.recipes = module("eval.bench"), args.recipes or ["none"]
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
        progress=True,
    )
    about = bench.numerics(vlm)
    bugs = sum(row.bugs for row in rows)
    if args.json:
        about |= {"model": args.model, "new_tokens": args.new_tokens, "strict": args.strict}
        found = [{**asdict(row), "bugs": row.bugs} for row in rows]
        print_json({**about, **bench.facts(), "near": bench.NEAR, "rows": found, "bugs": bugs})
        return ExitCode.CHECK_FAILED if bugs else ExitCode.FINISHED
    print(f"{args.model}: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    print()
    print_table([audit_row(row) for row in rows])
    for row in rows:
        for gone in row.divergences:
            print(divergence(row, gone))
        if not row.drafted:
            print(f"nothing was drafted: {audited(row)}: {row.speculation}")
    return ExitCode.CHECK_FAILED if bugs else ExitCode.FINISHED


def _check(args: argparse.Namespace) -> int:
    if args.launches:
        return _launches(args)
    if args.recipes or args.image_size:
        raise VLMFastError("--recipe and --image-size belong to --launches")
    commands = module("check.commands")
    found = commands.check(_vlm(args), quick=args.quick)
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
    return ExitCode.FINISHED if found.passed else ExitCode.CHECK_FAILED


def _launches(args: argparse.Namespace) -> int:
    from vlmfast.core.recipe import Recipe

    if args.quick or args.device is not None:
        raise VLMFastError("--quick and --device cannot be combined with --launches")
    if args.model != "tiny":
        check_model(args.model)
    launches = module("check.launches")
    names = args.recipes or ["none"]
    for name in names:  # before a checkpoint is loaded
        Recipe.parse(name)
    size = args.image_size or launches.SIZE
    found = launches.Launches(size, launches.counted(args.model, names, size, args.dtype))
    if args.json:
        name = Path(args.model).name if Path(args.model).is_dir() else args.model
        print_json({"checkpoint": name, "dtype": args.dtype, **found.to_dict()})
        return ExitCode.FINISHED
    print(f"{args.model}, an image of {size[0]} × {size[1]} pixels: launches / reads of the host")
    print()
    print_table([launch_row(request) for request in found.requests])
    return ExitCode.FINISHED


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
    if args.what == "drafter":
        trainer = module("train.drafters").DrafterTrainer(args)
    else:
        trainer = module("train.stages").StageTrainer(args.what, args)
    trainer.train()
    print(f"{trainer.out / 'weights'}: {trainer.name} after {trainer.step} steps")
    if trainer.progress < 1:
        print(f"stopped early, at {trainer.progress:.0%}; repeat the command to resume")
        return ExitCode.CUT_SHORT
    return ExitCode.FINISHED


def _demo(args: argparse.Namespace) -> None:
    app = module("demos.app")  # raises for missing packages before a checkpoint is loaded

    def ready(address: str) -> None:
        print(f"{name} is served at {address} (stop with Ctrl+C)", flush=True)

    vlm, name = demo_model(args)
    app.launch(
        vlm,
        name,
        recipe=args.recipe,
        host=args.host,
        port=args.port,
        allowed_hosts=args.allowed_hosts,
        ready=ready,
    )


def demo_model(args: argparse.Namespace) -> tuple[Any, str]:
    """The model of the demo and its name on the page."""
    if args.server is None:
        if args.api_key is not None:
            raise VLMFastError("--api-key needs --server")
        return _vlm(args), args.model
    if (args.model, args.device, args.dtype) != ("tiny", None, "auto"):
        raise VLMFastError("--model, --device and --dtype cannot be combined with --server")
    # As the server reads it: one key, or several separated by commas.
    key = args.api_key or os.environ.get("VLMFAST_API_KEY", "").partition(",")[0]
    remote = module("demos.remote").RemoteVLM(args.server, key)
    return remote, remote.name


def _serve(args: argparse.Namespace) -> None:
    args.model = args.served or args.model
    module("serve.commands").run(args, partial(_vlm, args))


def _examples(args: argparse.Namespace) -> None:
    from vlmfast.core.files import make_folder, replace_bytes
    from vlmfast.scenes import files

    make_folder(args.folder)
    for name, drawn in (("picture.png", files.image), ("clip.mp4", files.video)):
        path, (content, example) = args.folder / name, drawn()
        if not path.exists():
            replace_bytes(path, [content])
        print(f"{path}: {' '.join(qa.question for qa in example.qa)}")


def _completion(args: argparse.Namespace) -> None:
    print(completion.script(build_parser(), args.shell))


def _with_model(name: str, function: str) -> Callable[[Any], int | None]:
    """A command of another module, which gets what loads the model."""
    return lambda args: later(name, function)(args, partial(_vlm, args))


_REPRODUCE = "eval.reproduce.commands"
COMMANDS: dict[str, tuple[str, Callable[[Any], None], Callable[[Any], int | None]]] = {
    "ask": ("answer a question about an image or a video", arguments.ask, _ask),
    "compare": ("compare recipes with the full model", arguments.compare, _compare),
    "bench": ("measure speed and memory of recipes on this machine", arguments.bench, _bench),
    "check": ("check kernels and a model on this machine", arguments.check, _check),
    "methods": (
        "list methods, show their parameters, or test which run on a model",
        arguments.methods,
        _with_model("cli.methods", "run"),
    ),
    "env": ("print the environment for a bug report", arguments.env, _env),
    "eval": (
        "evaluate recipes on a task; interrupted runs resume",
        later("eval.commands", "add_eval"),
        later("eval.commands", "run_eval"),
    ),
    "tune": (
        "find the cheapest recipe that stays accurate on your data; interrupted runs resume",
        arguments.tune,
        _with_model("tune.commands", "run"),
    ),
    "report": (
        "write tables and plots of evaluation results",
        later("eval.commands", "add_report"),
        later("eval.commands", "run_report"),
    ),
    "reproduce": (
        "measure published results again; interrupted runs resume",
        later(_REPRODUCE, "add_arguments"),
        later(_REPRODUCE, "run"),
    ),
    "train": ("train the shipped model, a drafter or a method", arguments.train, _train),
    "encode": (
        "encode images for other engines; interrupted runs resume",
        arguments.encode,
        _with_model("integrations.commands", "run_encode"),
    ),
    "export": (
        "write a checkpoint that vLLM loads",
        later("integrations.commands", "add_export"),
        later("integrations.commands", "run_export"),
    ),
    "serve": ("serve a model through OpenAI's API", arguments.serve, _serve),
    "demo": ("serve a page that compares the full model with a recipe", arguments.demo, _demo),
    "examples": (
        "write an image and a video that the shipped model understands",
        arguments.example_files,
        _examples,
    ),
    "completion": (
        "print a script that completes commands in a shell",
        arguments.completion,
        _completion,
    ),
}


# --- inputs --------------------------------------------------------------------------------------


def _vlm(args: argparse.Namespace) -> VLM:
    if args.model != "tiny":
        check_model(args.model)
    from vlmfast.api.vlm import VLM
    from vlmfast.core.placement import usable
    from vlmfast.core.recipe import Recipe

    # Before loading a checkpoint, which may take minutes. "auto" depends on the checkpoint.
    several = getattr(args, "recipes", None)
    texts = several or [getattr(args, "recipe", None) or "none"]
    texts = [text if text == "auto" else Recipe.parse(text).text for text in texts]
    if several:
        args.recipes = texts
    device = usable(args.device)
    if not args.debug:
        from transformers.utils import logging

        logging.set_verbosity_error()
        if args.model == "tiny" or Path(args.model).is_dir():
            # No progress bar without a download.
            logging.disable_progress_bar()
    LOG.info("loading %s", args.model)
    return VLM.from_pretrained(args.model, device=device, dtype=args.dtype)


def _media(args: argparse.Namespace) -> dict[str, Any]:
    """The media arguments of `VLM.ask` for FILE."""
    from vlmfast.media import kind_of, probe_video

    frames = {"num_frames": args.num_frames, "fps": args.fps}
    if kind_of(args.file) == "video":
        return {"video": args.file, **frames}
    if all(value is None for value in frames.values()):
        return {"images": args.file}
    try:
        probe_video(args.file)  # an animated image
    except MediaError as error:
        raise MediaError(f"{error}; --num-frames and --fps are for videos") from error
    return {"video": args.file, **frames}


def _generation(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}


def _check_overlay(path: str | None) -> None:
    """Reject an overlay that cannot be written, before anything is computed."""
    if path is None:
        return
    from PIL import Image

    if _image_format(path) not in Image.SAVE:
        raise MediaError(f"--overlay {path}: the name must end in .png or another image format")
    if not Path(path).parent.is_dir():
        raise MediaError(f"--overlay {path}: folder {Path(path).parent} does not exist")


def _image_format(path: str) -> str | None:
    """Pillow's name of the format that the name of a file ends with."""
    from PIL import Image

    return Image.registered_extensions().get(Path(path).suffix.lower())


# --- surroundings --------------------------------------------------------------------------------


@contextlib.contextmanager
def _logged(args: argparse.Namespace) -> Iterator[None]:
    """Print log lines of the library to stderr."""
    level = "debug" if args.debug else log_level(args.log_level)
    logger, handler = logging.getLogger("vlmfast"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("vlmfast: %(levelname)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and log lines of libraries: stderr is for vlmfast's own messages."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"vlmfast: warning: {message}", file=sys.stderr)

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Of `torch` itself, PyTorch sets the level when it is imported.
    loud = logging.getLogger("torch.utils")
    before = loud.level
    loud.setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        stack.callback(loud.setLevel, before)
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "kernels: ", RuntimeWarning)
        warnings.filterwarnings("default", "vlmfast.(stages|families): ", UserWarning)
        warnings.showwarning = show
        yield
