"""The command ``vlmfast tune``."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vlmfast.core.display import text_table
from vlmfast.core.files import make_folder, replace_text
from vlmfast.core.help import count, examples
from vlmfast.core.progress import Progress
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaUnavailable, VLMFastError

from . import data, report, space
from .outcomes import CannotRun, ModelSource, Store
from .race import OBJECTIVES, Result, Settings, race

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

ANSWERS, RECIPE, JSON, PLOT = "answers.jsonl", "recipe.yaml", "tune.json", "tune.html"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast tune``, without the model's."""
    parser.description = (
        "Find the cheapest recipe whose loss of accuracy on your data stays within a bound. Every "
        "answer is saved immediately: repeat the command to continue an interrupted run."
    )
    parser.epilog = examples(
        "vlmfast tune --data questions.jsonl --out runs/tune",
        "vlmfast tune --data questions.jsonl --max-loss 2% --for memory --out runs/tune --strict",
    )
    add = parser.add_argument
    about = "JSONL with 'image' or 'video', 'question' and optionally 'answer' in each line; "
    about += "without an answer, the full model's counts as correct"
    add("--data", type=Path, required=True, metavar="FILE", help=about)
    about = "largest loss of accuracy against the full model, in points (default: %(default)s)"
    add("--max-loss", type=_fraction, default="1%", metavar="P", help=about)
    about = "what to make cheap: the time to the first token, the throughput of a batch, or the KV "
    about += "cache (default: %(default)s)"
    add("--for", dest="objective", choices=OBJECTIVES, default="ttft", help=about)
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the answers and results")
    about = "a candidate; may be repeated (default: all methods, and stacks of the best)"
    add("--recipe", action="append", dest="recipes", metavar="R", help=about)
    about = "confidence of the verdict (default: %(default)s)"
    add("--confidence", type=_fraction, default="95%", metavar="P", help=about)
    about = "part of the questions that is used for the verdict alone (default: %(default)s)"
    add("--held-out", type=_fraction, default="50%", metavar="P", help=about)
    about = "choose the full model if the data cannot certify a recipe"
    add("--strict", action="store_true", help=about)
    about = "maximum length of an answer (default: %(default)s)"
    add("--max-new-tokens", type=count, default=32, metavar="N", help=about)
    about = "questions that are decoded together (default: %(default)s)"
    add("--batch-size", type=count, default=8, metavar="N", help=about)
    add("--seed", type=int, default=0, help="seed of the split (default: %(default)s)")


def _fraction(text: str) -> float:
    """``1%`` or ``0.01``."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"{text!r} must be above 0 % and below 100 %, such as 1% or 0.01")
    return value


def run(args: Namespace, load: Callable[[], VLM]) -> int:
    """Run ``vlmfast tune``; ``load`` makes the model. 1 if a strict run certified nothing."""
    questions, digest = data.read(args.data)
    settings = Settings(
        args.max_loss, args.objective, args.confidence, args.held_out, args.strict, args.seed
    )
    parts = data.split([q.media for q in questions], settings.held_out, settings.seed)
    if len(parts.race) < 2:
        raise VLMFastError(
            f"--data {args.data} has questions about too few images for a held-out part"
        )
    make_folder(args.out)
    vlm = load()
    recipes = [str(vlm.recipe(recipe)) for recipe in args.recipes or ()]
    result = tune(vlm, questions, digest, recipes, settings, args, len(parts.held_out))
    _write(result, settings, vlm, args)
    return int(settings.strict and result.chosen == "none")


def tune(
    vlm: VLM,
    questions: list[data.Question],
    digest: str,
    recipes: list[str],
    settings: Settings,
    args: Namespace,
    tested: int,
) -> Result:
    """Run or continue the race; the answers are in ``args.out``. ``tested`` are held out."""
    from vlmfast.api.identity import identity

    names = recipes or space.candidates(settings.objective)
    progress = Progress("tune", 0, "answers")
    about = {
        "model": identity(vlm.adapter),
        "data": digest,
        "max_new_tokens": args.max_new_tokens,
    }
    store = Store(args.out / ANSWERS, about)
    source = ModelSource(
        vlm,
        questions,
        store,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        answered=progress.update,
    )
    progress.say(f"{len(questions)} questions, {len(names)} candidates, {len(store)} answers known")
    progress.say(report.certifiable(tested, settings))
    try:
        return race(
            source,
            names,
            [question.media for question in questions],
            settings,
            stacks=(lambda best: []) if recipes else space.stacks,
            say=progress.say,
            plan=progress.plan,
        )
    except (CannotRun, MediaUnavailable) as error:
        raise VLMFastError(f"--data {args.data}, {error}") from error
    finally:
        progress.close()
        store.close()


def _write(result: Result, settings: Settings, vlm: VLM, args: Namespace) -> None:
    """Write the files, and print the table, the verdict and what to do next."""
    from vlmfast.api.stored_recipe import store_recipe
    from vlmfast.core.env import environment

    recipe = Recipe.parse(result.chosen)
    command = f"vlmfast {shlex.join(sys.argv[1:])}"
    recipe.save(args.out / RECIPE)
    stored = store_recipe(vlm.adapter, recipe)
    value = {"command": command, "model": args.model, **report.to_dict(result, settings)}
    text = json.dumps({**value, "environment": environment()}, indent=2, allow_nan=False)
    replace_text(args.out / JSON, text + "\n")
    drawn = True
    try:
        report.plot(result, settings, args.out / PLOT)
    except ImportError:
        drawn = False
    if args.json:
        sys.stdout.write(text + "\n")
        return
    lines = [text_table(report.table(result), left=("recipe", "status")), ""]
    for reason, names in report.failures(result).items():
        lines.append(f"cannot run: {', '.join(names)}: {reason}")
    lines += [*report.verdict(result, settings), ""]
    lines.append(f"wrote {args.out / RECIPE}, {JSON}" + (f" and {PLOT}" if drawn else ""))
    if not drawn:
        lines.append("no plot: plotly is missing; run `pip install 'vlmfast[eval]'`")
    lines.append(f"recipe='auto' now uses this choice for this model ({stored})")
    lines.append(f"reproduce: {command}")
    sys.stdout.write("\n".join(lines) + "\n")
