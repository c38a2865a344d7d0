"""The command line: ``vlmfast ask``, ``compare``, ``bench``, ``methods``, ``env``, ``train``,
``eval``, ``report``, ``demo``.

Nothing heavy is imported before a command needs it, so that ``vlmfast --help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
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

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM, Answer, Comparison
    from vlmfast.engine.stats import Stats

_INTERRUPTED, _BROKEN_PIPE = 130, 141  # 128 + the signal, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the process's own by default.

    Returns
    -------
    int
        0, or 2 after an error that is the caller's to mend: it stands on stderr in one line.
        Usage errors and ``--help`` leave through `SystemExit`, as argparse does.
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
        # The reader has gone; Python would complain once more when it flushes at exit.
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
    """One line for what the caller can mend; ``None`` for what is a defect."""
    text = " ".join(str(error).split())
    if isinstance(error, VLMFastError):
        return text
    if type(error).__name__ == "OutOfMemoryError":
        return f"the GPU's memory is too small: {text}"
    return None


# --- arguments -----------------------------------------------------------------------------------


class _Command(argparse.ArgumentParser):
    """A parser that asks for its arguments when it is chosen: their modules may be heavy."""

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
        description="Vision-language models, several times faster, by a recipe of one line.",
        epilog="`vlmfast COMMAND --help` lists what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"vlmfast {__version__}")
    parser.add_argument("--debug", action="store_true", help="tracebacks, warnings and log lines")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Command
    )
    for name, (about, fill, run) in _COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:])
        command.fill = fill
        command.set_defaults(run=run)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    # Also behind the command; suppressed, or it would undo a `--debug` in front of it.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _add_model(
    parser: argparse.ArgumentParser, *, json: bool = True, default: str | None = "tiny"
) -> None:
    shipped = "tiny (shipped, default)" if default else "tiny (shipped)"
    parser.add_argument("--model", default=default, help=f"{shipped}, a folder or a hub id")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="number format of the weights (default: the checkpoint's own)",
    )
    if json:
        _fill_json(parser)


def _add_question(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a picture or a clip; the content decides")
    parser.add_argument("question", metavar="QUESTION")
    _add_model(parser)
    parser.add_argument("--max-new-tokens", type=_count, metavar="N", help="length of the answer")
    frames = parser.add_mutually_exclusive_group()
    frames.add_argument(
        "--num-frames", type=_count, metavar="N", help="frames read of a clip (default 8)"
    )
    frames.add_argument("--fps", type=float, help="frames read of each second of a clip")


def _fill_ask(parser: argparse.ArgumentParser) -> None:
    _add_question(parser)
    parser.add_argument(
        "--recipe", default="none", help="what is dropped, e.g. balanced or hired:0.2"
    )
    parser.add_argument(
        "--max-kv-tokens",
        type=_count,
        metavar="N",
        help="read a clip block by block; no layer ever caches more tokens than that",
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
        help="what is dropped, e.g. balanced or hired:0.2; may be given several times",
    )
    parser.add_argument("--overlay", metavar="PNG", help="draw which visual tokens were kept")
    parser.add_argument(
        "--no-warmup",
        dest="warmup",
        action="store_false",
        help="do not run everything once before the clock starts",
    )


def _fill_bench(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    default = _module("eval.bench").RECIPES
    parser.add_argument(
        "--recipe",
        action="append",
        dest="recipes",
        metavar="RECIPE",
        help=f"beside the full model; may be given several times (default: {', '.join(default)})",
    )
    parser.add_argument(
        "--new-tokens", type=_count, default=32, metavar="N", help="length of each answer (32)"
    )
    parser.add_argument(
        "--repeats", type=_count, default=3, metavar="N", help="turns that are counted (3)"
    )
    audit = parser.add_argument_group(
        "whether drafts change answers", "a difference that rounding does not explain exits with 1"
    )
    audit.add_argument(
        "--audit-lossless",
        action="store_true",
        help="compare drafted answers with plain ones under each recipe (default: none)",
    )
    audit.add_argument(
        "--drafter",
        action="append",
        dest="drafters",
        metavar="RECIPE",
        help="e.g. draft-ngram+draft-recycle; may be given several times (default: all that run)",
    )
    audit.add_argument("--prompts", type=_count, metavar="N", help="drawn pictures (24)")
    audit.add_argument(
        "--strict", action="store_true", help="strict answers, whose near ties must be right too"
    )


def _fill_demo(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, json=False)
    parser.add_argument("--recipe", default="balanced", help="what the page begins with")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (this machine alone)")
    parser.add_argument("--port", type=_count, default=7860, metavar="N", help="(7860)")


def _fill_methods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="METHOD", help="these alone (default: all)")
    _add_model(parser, default=None)
    parser.add_argument(
        "--video", action="store_true", help="with --model: ask about a video, not an image"
    )


def _fill_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _fill_train(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=_Command)
    tiny = what.add_parser("tiny", help="the shipped model, on drawn pictures and clips")
    tiny.fill = lambda p: _module("train.tiny.training").add_arguments(p)
    drafter = what.add_parser("drafter", help="a drafter, from the answers of the model itself")
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
            raise MediaError(f"{args.file} is a picture; --max-kv-tokens is for clips")
        media |= {"max_kv_tokens": args.max_kv_tokens, "progress": sys.stderr.isatty()}
    answer = vlm.ask(args.question, **media, recipe=args.recipe, **_generation(args))
    if args.json:
        _print_json({**_heading(args), **_answer_json(answer)})
        return
    print(answer.text)
    print()
    _print_table([_stats_row(args.recipe, answer.stats)])


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
        answers = [{**_answer_json(row.answer), "agreement": row.agreement} for row in rows]
        _print_json({**_heading(args), "answers": answers})
        return
    print(f"{args.file}: {args.question}")
    print()
    # As they were written: the canonical text leaves out what is a default.
    names = ["none", *args.recipes]
    _print_table([_comparison_row(*pair) for pair in zip(names, rows, strict=True)])


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
        _print_json({**bench.facts(), **about, "rows": [vars(row) for row in rows]})
        return None
    _print_table(
        [_bench_row(*pair, rows[0]) for pair in zip(["none", *args.recipes], rows, strict=True)]
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
        _print_json({**about, **bench.facts(), "near": bench.NEAR, "rows": found, "bugs": bugs})
        return int(bool(bugs))
    print(f"{args.model}: " + ", ".join(f"{key} {value}" for key, value in about.items()))
    print()
    _print_table([_audit_row(row) for row in rows])
    for row in rows:
        for gone in row.divergences:
            print(_divergence(row, gone))
        if not row.drafted:
            print(f"nothing was drafted: {_audited(row)}: {row.speculation}")
    return int(bool(bugs))


def _methods(args: argparse.Namespace) -> None:
    from vlmfast.api.vlm import methods

    if args.model is not None:
        _supported(args)
        return
    for name in args.names:
        _module("core.registry").stage_class(name)  # an unknown one is an error that lists them
    found = [method for method in methods() if not args.names or method["name"] in args.names]
    if args.json:
        _print_json(found)
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
    """Which methods run on a model."""
    from dataclasses import asdict

    from vlmfast.api.support import support, support_of

    args.recipes = args.names  # checked before the model is loaded
    vlm = _vlm(args)
    if args.names:
        found = [support_of(vlm, name, video=args.video) for name in args.names]
    else:
        found = support(vlm, video=args.video)
    if args.json:
        _print_json([asdict(of) for of in found])
        return
    _print_table(
        [
            {
                "method": of.method,
                "runs": {True: "yes", False: "no", None: "?"}[of.runs],
                "saliency": of.saliency or "-",
                "note": of.note,
            }
            for of in found
        ]
    )


def _env(args: argparse.Namespace) -> None:
    from vlmfast.core.env import environment

    facts = environment()
    if args.json:
        _print_json(facts)
        return
    facts |= facts.pop("packages")
    facts["memory"] = _bytes(facts.pop("memory_bytes"))
    gpus = [f"{gpu['name']} ({_bytes(gpu['memory_bytes'])})" for gpu in facts.pop("gpus")]
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
    app = _module("demos.app")  # says what is missing before a checkpoint is loaded

    def ready(address: str) -> None:
        print(f"{args.model} answers at {address} (Ctrl+C ends it)", flush=True)

    app.launch(
        _vlm(args), args.model, recipe=args.recipe, host=args.host, port=args.port, ready=ready
    )


_COMMANDS: dict[str, tuple[str, Callable[[Any], None], Callable[[Any], int | None]]] = {
    "ask": ("answer a question about a picture or a clip", _fill_ask, _ask),
    "compare": ("the full model beside recipes", _fill_compare, _compare),
    "bench": ("what recipes save on this machine", _fill_bench, _bench),
    "methods": ("methods with their parameters, or which run on a model", _fill_methods, _methods),
    "env": ("what a bug report needs", _fill_json, _env),
    "eval": (
        "measure recipes on a task, resumably",
        lambda parser: _module("eval.commands").add_eval(parser),
        _eval,
    ),
    "report": (
        "tables and plots of evaluation results",
        lambda parser: _module("eval.commands").add_report(parser),
        _report,
    ),
    "train": ("train what the project ships", _fill_train, _train),
    "demo": ("a page that shows the full model beside a recipe", _fill_demo, _demo),
}


# --- the way in ----------------------------------------------------------------------------------


def _vlm(args: argparse.Namespace) -> VLM:
    import torch

    from vlmfast.api.vlm import VLM
    from vlmfast.core.recipe import Recipe

    # Before a checkpoint is loaded for minutes.
    for recipe in getattr(args, "recipes", None) or [getattr(args, "recipe", None) or "none"]:
        Recipe.parse(recipe)
    try:
        device = None if args.device is None else torch.device(args.device)
    except RuntimeError:
        raise ModelError(f"device {args.device!r} is not known; use cpu, cuda or cuda:1") from None
    if device is not None and device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ModelError(f"device {args.device!r} is not there: PyTorch sees {count} GPUs")
    if not args.debug:
        from transformers.utils import logging

        logging.set_verbosity_error()
        if args.model == "tiny" or Path(args.model).is_dir():
            # Where nothing is downloaded a progress bar is noise.
            logging.disable_progress_bar()
    return VLM.from_pretrained(args.model, device=device, dtype=args.dtype)


def _media(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `VLM.ask` that hold what FILE is."""
    from vlmfast.media import kind_of

    if kind_of(args.file) == "video":
        return {"video": args.file, "num_frames": args.num_frames, "fps": args.fps}
    if args.num_frames or args.fps:
        raise MediaError(f"{args.file} is a picture; --num-frames and --fps are for clips")
    return {"images": args.file}


def _generation(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}


def _check_overlay(path: str | None) -> None:
    """Refuse an overlay that could not be written, before anything is computed for it."""
    if path is None:
        return
    from PIL import Image

    if Path(path).suffix.lower() not in Image.registered_extensions():
        raise MediaError(f"--overlay {path}: the name must end in .png or another picture format")
    if not Path(path).parent.is_dir():
        raise MediaError(f"--overlay {path}: there is no folder {Path(path).parent}")


# --- the way out ---------------------------------------------------------------------------------


def _heading(args: argparse.Namespace) -> dict[str, Any]:
    return {"file": args.file, "question": args.question, "model": args.model}


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "recipe": answer.recipe,
        "answer": answer.text,
        "token_ids": answer.token_ids,
        "stats": answer.stats.to_dict(),
    }


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str))


def _stats_row(recipe: str, stats: Stats) -> dict[str, str]:
    return {
        "recipe": recipe,
        "visual tokens": _tokens(stats.visual_tokens_in, stats.equivalent_tokens),
        "TTFT": _seconds(stats.ttft_s),
        "tokens/s": f"{stats.tokens_per_s:.0f}" if stats.tokens_per_s else "-",
        "KV cache": _bytes(stats.kv_bytes),
        "saliency": stats.saliency or "-",
    }


def _tokens(before: int, kept: float) -> str:
    kept = round(kept, 1)
    kept = int(kept) if kept == int(kept) else kept
    return str(before) if kept == before else f"{before} → {kept}"


def _comparison_row(name: str, row: Comparison) -> dict[str, str]:
    return {
        **_stats_row(name, row.answer.stats),
        "agreement": f"{row.agreement:.0%}",
        "answer": " ".join(row.answer.text.split()),
    }


def _bench_row(name: str, row: Any, full: Any) -> dict[str, str]:
    def against(text: str, ratio: float) -> str:
        return text if row is full else f"{text} ({ratio:.2f}x)"

    return {
        "recipe": name,
        "visual tokens": _tokens(row.visual_tokens_in, row.visual_tokens),
        "TTFT": against(_seconds(row.ttft_s), full.ttft_s / row.ttft_s),
        "prefill": against(_seconds(row.prefill_s), full.prefill_s / row.prefill_s),
        "tokens/s": against(f"{row.tokens_per_s:.0f}", row.tokens_per_s / full.tokens_per_s),
        "KV cache": _bytes(row.kv_bytes),
        "peak memory": _bytes(row.peak_memory_bytes),
        "saliency": row.saliency or "-",
        "agreement": f"{row.agreement:.0%}",
    }


def _audited(row: Any) -> str:
    return row.drafter if row.recipe == "none" else f"{row.recipe}+{row.drafter}"


def _audit_row(row: Any) -> dict[str, str]:
    gaps = [gone.gap for gone in row.divergences if gone.gap is not None]
    return {
        "recipe": _audited(row),
        "answers": str(row.prompts),
        "identical": f"{row.identical / row.prompts:.1%}",
        "common prefix": f"{sum(row.prefix) / sum(row.lengths):.1%}",
        "accepted": f"{row.accepted / row.rounds:.2f}" if row.drafted else "-",
        "taken anew": str(row.redecoded),
        "largest gap": f"{max(gaps):.3g} ulp" if gaps else "-",
        "bugs": str(row.bugs),
    }


def _divergence(row: Any, gone: Any) -> str:
    where = f"{'BUG' if gone.bug else 'near tie'}: {_audited(row)}, prompt {gone.prompt}: token "
    if gone.gap is None:
        return f"{where}{gone.at} ends the {'drafted' if gone.drafted is None else 'plain'} answer"
    return (
        f"{where}{gone.at} is {gone.drafted}, plain {gone.plain}; {gone.gap:.3g} ulp apart in "
        f"float32, {gone.own_gap:.3g} in the model's own type"
    )


def _print_table(rows: list[dict[str, str]]) -> None:
    """Aligned columns: texts to the left, numbers to the right; the last may be long."""
    texts = ("recipe", "method", "saliency", "note", "answer")
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for cells in ({key: key for key in widths}, *rows):
        line = [
            f"{cells[key]:<{width}}" if key in texts else f"{cells[key]:>{width}}"
            for key, width in widths.items()
        ]
        print("  ".join(line).rstrip())


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


# --- surroundings --------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings and no log lines of the libraries underneath: stderr is for our errors."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _survive_narrow_encodings() -> None:
    """An answer may hold any character; a terminal that cannot show one shows ``?``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
