"""The commands ``vlmfast eval`` and ``vlmfast report``."""

from __future__ import annotations

import shlex
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.files import writable
from vlmfast.core.help import RECIPES, add_dtype, count, examples
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.errors import RecipeError, VLMFastError

from .axes import measured, shrinks_cache, takes_budget, with_budget, with_field, with_share
from .draws import DRAWS, with_draws
from .failures import note_failures
from .results import named, slug, variant_of, write_json
from .workers import is_first

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

    from .results import Results
    from .robustness import Robustness
    from .tasks import Task

# Arguments that go to tasks; a task rejects those that it does not have.
_OF_DATA = ("data", "split", "mode", "videos", "subtitles", "num_frames", "allow_outside")
OF_TASKS = (*_OF_DATA, "eps", "steps")


def add_eval(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast eval``."""
    parser.description = (
        "Measure the accuracy of recipes. Every answer is saved immediately: repeat the command to "
        "resume an interrupted run."
    )
    parser.epilog = examples(
        "vlmfast eval shapes --limit 2 --recipe hired --recipe random --budget 0.33,0.11",
        "vlmfast eval shapes --recipe cache --share 0.5,0.2 --session --out runs/cache",
        "vlmfast eval pope --model MODEL --recipe balanced --recipe random:0.22",
        "vlmfast eval mmmu --model MODEL --recipe visionzip --budget 0.33 --mode vlmevalkit",
        "vlmfast eval video-mme --model MODEL --videos /data/video-mme --num-frames 32",
        "vlmfast eval robustness --recipe hired:0.2 --recipe hired:keep=0.2,guard=4 --eps 2,8",
    )
    add = parser.add_argument
    about = "shapes (generated scenes, offline), mmmu, video-mme, pope or robustness (shapes with "
    about += "small perturbations); for others use lmms-eval, see docs/evaluation.md"
    add("tasks", nargs="+", metavar="TASK", help=about)
    add("--model", default="tiny", help="tiny (shipped), a folder or a hub id")
    add_dtype(parser)
    about = f"recipe to run; may be given several times: {RECIPES}; 'all' is every method, "
    about += "including trained ones with weights for the model, 'cache' every cache compression "
    about += "method. The full model is always included"
    add("--recipe", action="append", metavar="RECIPE", help=about)
    about = "run each reducer at these budgets, such as 0.33,0.11"
    add("--budget", type=fractions, default=(), metavar="B,B", help=about)
    about = "run each cache method at these fractions of the cache, such as 0.5,0.2,0.1; "
    about += "quantizers have no such parameter and run unchanged. With 'all' and 'cache', windows "
    about += "are a tenth of the kept slots, and bits are 4 and 2"
    add("--share", type=fractions, default=(), metavar="S,S", help=about)
    about = "rotary ids of the kept tokens, of every recipe (default: as each recipe says)"
    add("--positions", choices=("keep", "compact"), help=about)
    about = "also run the full model with a grey image (question-only) and with the background "
    about += "alone (background-only)"
    add("--controls", action="store_true", help=about)
    about = "run random selection with N seeds and average them (default: %(default)s); a recipe "
    about += "with a seed of its own runs once"
    add("--draws", type=count, default=DRAWS, metavar="N", help=about)
    about = "also ask all questions about an image one after another, in a session that prefills "
    about += "the image once, to measure the cost of later questions"
    add("--session", action="store_true", help=about)
    about = "questions of each type: shapes' types, MMMU's subjects, Video-MME's durations, POPE's "
    about += "categories (default: all; for shapes 100, for robustness 10)"
    add("--limit", type=count, metavar="N", help=about)
    about = "questions that are decoded together"
    add("--batch-size", type=count, default=1, metavar="N", help=about)
    about = "run only part I of N, such as 0/4 for the first of four; all parts write to one "
    about += "folder. Set automatically under torchrun and accelerate launch"
    add("--shard", metavar="I/N", help=about)
    about = "a parquet file, a folder of them, or a hub id, in the schema of MMMU/MMMU, "
    about += "lmms-lab/Video-MME or lmms-lab/POPE (default: these)"
    add("--data", metavar="DATA", help=about)
    add("--split", help="mmmu: validation (default), dev or test, whose answers are hidden")
    about = "source of prompts, parsers and scores: official (default, the benchmark's authors), "
    about += "lmms-eval or vlmevalkit (exact matching)"
    add("--mode", help=about)
    about = "video-mme: folder of <videoID>.mp4 and subtitle/<videoID>.srt (default: DATA)"
    add("--videos", metavar="DIR", help=about)
    about = "video-mme: include the subtitles at the selected frames"
    add("--subtitles", action="store_true", default=None, help=about)
    about = "also load files that a data set refers to by a URL, or by a path or link outside the "
    about += "folder of DATA or --videos"
    add("--allow-outside", action="store_true", default=None, help=about)
    add("--num-frames", type=int, metavar="N", help="video-mme: frames per video (default: 32)")
    about = "robustness: largest changes of a pixel value, of 0 to 255 (default: 2,4,8)"
    add("--eps", type=whole_numbers, metavar="E,E", help=about)
    about = "robustness: steps of the optimization of an image (default: 20)"
    add("--steps", type=int, metavar="N", help=about)
    out = Path("vlmfast-results")
    add("--out", type=Path, default=out, metavar="DIR", help="folder of the answers")
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--seed", type=int, default=0, help="seed of the questions")
    add("--device", help="such as cpu or cuda:0 (default: a GPU if available)")
    about = "maximum number of failed samples per recipe"
    add("--max-errors", type=int, default=10, metavar="N", help=about)


def run_eval(
    args: Namespace, find: Callable[..., Task] | None = None, program: str = "vlmfast"
) -> int:
    """Run ``vlmfast eval`` and return the exit code.

    Parameters
    ----------
    args : Namespace
        Of a parser that `add_eval` has prepared.
    find : callable, optional
        From a task's name and options to the task; by default `find_task`.
    program : str
        What is typed before the arguments. Results record it.
    """
    from vlmfast.core.placement import usable

    from .runner import part_of, weights_sha256
    from .tasks import find_task
    from .workers import chosen, own_device, part_ways

    # Check all arguments before loading a model.
    own = {key: getattr(args, key) for key in OF_TASKS if getattr(args, key) is not None}
    tasks = [(find or find_task)(name, **own) for name in dict.fromkeys(args.tasks)]
    args.typed = f"{program} {shlex.join(sys.argv[1:])}"
    args.part = chosen(args.shard)
    if args.session and args.batch_size > 1:
        raise VLMFastError(f"--batch-size {args.batch_size} must be 1 with --session")
    names, axes = args.recipe or ["none"], (args.budget, args.positions, args.share)
    draws = args.draws
    if any(task.name == "robustness" for task in tasks):
        from .robustness import check

        draws = 1  # images are optimized for each of them
        check(planned(names, *axes), args.session, args.controls)
    recipes = with_draws(planned(names, *axes), draws)
    for task in tasks:
        part_of(task.docs(args.limit, args.seed), *(args.part or (0, 1)))
    check_folder(args.out)
    if args.json is not None:
        check_folder(args.json.parent)
        if args.json.is_dir():
            raise VLMFastError(f"--json {args.json} is a folder; it must be a file")
    usable(args.device)

    vlm = _load(args.model, args.device or own_device(), args.dtype)
    explicit = [text for text in args.recipe or () if text not in GROUPS]
    asked = with_draws(planned(explicit, *axes), draws) if explicit else []
    refused = {task.name: _refused(vlm, task, recipes, args) for task in tasks}
    _check_refused(refused, recipes, asked)
    args.weights = weights_sha256(vlm)
    reports = [r for task in tasks for r in _run_task(vlm, task, recipes, args, refused[task.name])]
    part_ways()
    if is_first():
        if args.json is not None:
            value = {"tasks": {r["task"]: r for r in reports}}
            write_json(args.json, reports[0] if len(reports) == 1 else value)
        print(f"\nanswers are in {args.out}; 'vlmfast report {args.out}' makes a table and a plot")
    # A group is what can run on this model.
    left_out = {run.name for each in refused.values() for run in each if run.recipe not in asked}
    incomplete = any(set(report["failed"]) - left_out for report in reports)
    return ExitCode.CUT_SHORT if incomplete else ExitCode.FINISHED


@dataclass(frozen=True)
class _Run:
    """One row: a recipe, perhaps with a control or in sessions."""

    recipe: Recipe
    control: str | None = None
    session: bool = False

    @property
    def variant(self) -> str | None:
        return variant_of(self.control, self.session)

    @property
    def name(self) -> str:
        return named(str(self.recipe), self.variant)


def _refused(vlm: VLM, task: Task, recipes: list[Recipe], args: Namespace) -> dict[_Run, str]:
    """The runs that are impossible on this model or task, with the reason."""
    from .runner import refusal

    docs = task.docs(args.limit, args.seed)
    found: dict[_Run, str] = {}
    for recipe in recipes:
        for session in (False, True) if args.session else (False,):
            run = _Run(recipe, session=session)
            # A recipe with results has run before.
            if (args.out / task.name / slug(str(recipe), run.variant)).exists():
                continue
            reason = refusal(vlm, task, recipe, docs, session=session)
            if reason is not None:
                found[run] = reason
                break  # if it does not run on its own, it does not run in sessions
    return found


def _check_refused(
    refused: dict[str, dict[_Run, str]], recipes: list[Recipe], asked: list[Recipe]
) -> None:
    """Report refused runs on stderr, one line for each reason.

    Raises
    ------
    RecipeError
        If recipes were requested by name and no recipe can run on any task.
    """
    found = {run: reason for each in refused.values() for run, reason in each.items()}
    reasons: dict[str, list[str]] = {}
    for run, reason in found.items():
        reasons.setdefault(reason, []).append(run.name)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if asked and all(_Run(recipe) in each for recipe in recipes for each in refused.values()):
        raise RecipeError("; ".join(lines))
    if is_first():
        for line in lines:
            print(f"left out: {line}", file=sys.stderr)


def _load(name: str, device: str | None, dtype: str) -> VLM:
    from transformers.utils import logging

    from vlmfast.api.vlm import VLM

    if name == "tiny" or Path(name).is_dir():
        # No progress bar if nothing is downloaded.
        logging.disable_progress_bar()
    return VLM.from_pretrained(name, device=device, dtype=dtype)


def _plan(
    vlm: VLM, task: Task, recipes: list[Recipe], args: Namespace
) -> Iterator[tuple[Task, _Run]]:
    """The full model first, its controls, and all recipes; what a task of several parts asks."""
    if task.name == "robustness":
        for part, recipe, control in cast("Robustness", task).plan(vlm, recipes):
            yield part, _Run(recipe, control)
        return
    everything = [Recipe(), *recipes]
    controls = task.controls if args.controls else ()
    yield from ((task, _Run(Recipe(), control)) for control in (None, *controls))
    yield from ((task, _Run(recipe)) for recipe in recipes)
    if args.session:
        yield from ((task, _Run(recipe, session=True)) for recipe in everything)


def _run_task(
    vlm: VLM, task: Task, recipes: list[Recipe], args: Namespace, refused: dict[_Run, str]
) -> list[dict[str, Any]]:
    """Run all recipes on one task, print the table and return the values for ``--json``.

    Those in ``refused`` are not run; their reasons are among the failures.
    """
    from .report import failure_table, metrics_table, on_common_samples, table
    from .runner import TooManyErrors
    from .summary import compare

    failed = {task.name: {run.name: reason for run, reason in refused.items()}}
    if is_first():
        note_failures(args.out / task.name, failed[task.name])
    recipes = [recipe for recipe in recipes if _Run(recipe) not in refused]
    runs: dict[str, list[Results]] = {}
    for part, asked in _plan(vlm, task, recipes, args):
        if asked in refused:
            continue
        reasons = failed.setdefault(part.name, {})
        try:
            run = _evaluate(vlm, part, asked, args)
        except TooManyErrors as error:
            if not runs:  # all results need the full model
                raise
            reasons[asked.name] = str(error)
        else:
            runs.setdefault(part.name, []).append(run)
        if is_first():
            note_failures(args.out / part.name, {asked.name: reasons.get(asked.name)})
    reports = []
    for name, reasons in failed.items():
        own = runs.get(name, [])
        # Other parts of a shard may have fewer samples.
        rows = compare(on_common_samples(own)[0] if own and args.part is not None else own)
        if is_first():
            texts = table(rows), metrics_table(rows), failure_table(reasons)
            print("\n\n".join(filter(None, texts)))
        numbers = {row.run.name: row.numbers for row in rows}
        first = [str(recipe) for recipe in recipes if str(recipe) in numbers] or [*numbers, ""]
        about = {
            "task": name,
            "task_version": task.version,
            "model": args.model,
            "weights_sha256": args.weights,
            "limit": args.limit,
            "seed": args.seed,
        }
        about |= numbers.get(first[0], {})
        reports.append({**about, "recipes": numbers, "failed": reasons})
    return reports


def _evaluate(vlm: VLM, task: Task, asked: _Run, args: Namespace) -> Results:
    """One run; under a launcher, the combined results of all processes."""
    from .runner import TooManyErrors, check_errors, evaluate, finished
    from .workers import launched, meet

    shared = ("seed", "batch_size", "max_errors", "model", "weights")
    try:
        run = evaluate(
            vlm,
            task,
            asked.recipe,
            args.out,
            args.limit,
            control=asked.control,
            session=asked.session,
            shard=args.part,
            command=args.typed,
            progress=is_first(),
            **{name: getattr(args, name) for name in shared},
        )
    except TooManyErrors:
        meet()
        raise
    meet()
    if launched() is None:
        return run
    run = finished(task, run.path, args.limit, args.seed)
    # All processes read the same files, so either all of them raise or none does.
    errors = [s["error"] for s in run.samples.values() if "error" in s]
    check_errors(errors, run.path, args.max_errors)
    return run


def fractions(text: str) -> tuple[float, ...]:
    """Parse numbers such as ``0.33,0.11``.

    Raises
    ------
    ArgumentTypeError
        If a part is not a number above 0 and at most 1.
    """
    values = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError:
            values.append(-1.0)
        if not 0 < values[-1] <= 1:
            raise ArgumentTypeError(f"{part.strip()!r} is not a number above 0 and at most 1")
    return tuple(dict.fromkeys(values))


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers such as ``2,4,8``.

    Raises
    ------
    ArgumentTypeError
        If a part is not a whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 2,4,8") from None


def planned(
    names: Sequence[str],
    at_budgets: Sequence[float] = (),
    positions: str | None = None,
    at_shares: Sequence[float] = (),
) -> list[Recipe]:
    """The recipes to run in addition to the full model, without duplicates.

    Raises
    ------
    RecipeError
        For an invalid recipe, or a budget or share that no stage has.
    """
    recipes: list[Recipe] = []
    for name in names:
        group = GROUPS[name](at_shares) if name in GROUPS else [Recipe.parse(name)]
        for recipe in group:
            if positions is not None:
                recipe = with_field(recipe, "positions", positions)
            budgeted = bool(at_budgets) and takes_budget(recipe)
            shared = bool(at_shares) and shrinks_cache(recipe)
            # In a group, methods with neither parameter run once, unchanged.
            if recipe and name not in GROUPS and not (budgeted or shared):
                if at_budgets:
                    raise RecipeError(f"recipe {name!r} has no stage with a budget; drop --budget")
                if at_shares:
                    raise RecipeError(f"recipe {name!r} has no cache method; drop --share")
            versions = [with_budget(recipe, b) for b in at_budgets] if budgeted else [recipe]
            if shared:
                versions = [with_share(r, share) for r in versions for share in at_shares]
            recipes += versions
    recipes = [recipe for recipe in dict.fromkeys(recipes) if recipe]
    if at_budgets and not recipes:
        raise RecipeError("--budget is for recipes that drop tokens; add --recipe")
    if at_shares and not recipes:
        raise RecipeError("--share is for recipes with a cache method; add --recipe")
    return recipes


def _every_method(at_shares: Sequence[float]) -> list[Recipe]:
    recipes = [Recipe((stage_class(name)(),)) for name in sorted(stage_names())]
    if not at_shares:
        return recipes
    return [r for each in recipes for r in (measured(each) if shrinks_cache(each) else [each])]


def _every_cache_method(at_shares: Sequence[float]) -> list[Recipe]:
    return [recipe for recipe in _every_method(at_shares) if shrinks_cache(recipe)]


# Names for groups of recipes.
GROUPS = {"all": _every_method, "cache": _every_cache_method}


def check_folder(folder: Path) -> None:
    """Raise an error early if a folder cannot be written."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def add_report(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast report``."""
    parser.description = (
        "Write tables and plots of a result folder, or the differences between two folders."
    )
    parser.epilog = examples(
        "vlmfast report runs/a",
        "vlmfast report runs/a runs/b --out runs/difference",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="output folder of 'vlmfast eval --out DIR'")
    add("other", type=Path, metavar="DIR2", nargs="?", help="compare with these results")
    add("--out", type=Path, metavar="DIR", help="folder of the report (default: the last DIR)")


def run_report(args: Namespace) -> int:
    """Run ``vlmfast report`` and return the exit code."""
    from .report import write_difference, write_report

    out = args.out or args.other or args.folder
    for folder in filter(None, (args.folder, args.other)):
        if not folder.is_dir():
            raise VLMFastError(f"{folder} is not a folder")
    if args.other is None:
        text, files = write_report(args.folder, out)
    else:
        text, files = write_difference(args.folder, args.other, out)
    print(text)
    print("written: " + ", ".join(str(file) for file in files))
    return 0
