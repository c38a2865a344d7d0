"""The commands ``vlmfast eval`` and ``vlmfast report``."""

from __future__ import annotations

import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.errors import ModelError, RecipeError, VLMFastError

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

    from .results import Results
    from .tasks import Task

# Arguments that go to tasks, which say what they have no use for.
_OF_TASKS = ("data", "split", "mode", "videos", "subtitles", "num_frames", "allow_outside")


def add_eval(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast eval``."""
    parser.description = (
        "Measure what recipes cost in answers. Every answer is kept as it comes: the same command "
        "goes on where an interrupted run stopped."
    )
    add = parser.add_argument
    add(
        "tasks",
        nargs="+",
        metavar="TASK",
        help="shapes (drawn scenes, offline), mmmu, video-mme or pope; all others come through "
        "lmms-eval, see docs/evaluation.md",
    )
    add("--model", default="tiny", help="shipped model, hub id or folder (default: %(default)s)")
    add(
        "--recipe",
        action="append",
        metavar="R",
        help="may be repeated; 'all' is every method, trained ones where there are weights for the "
        "model, 'cache' every method that makes the cache smaller. The full model (none) is always "
        "run too",
    )
    add("--budget", metavar="B,B", help="run each reducer at these budgets, such as 0.33,0.11")
    add(
        "--share",
        metavar="S,S",
        help="run each cache method at these shares of the cache, such as 0.5,0.2,0.1; those that "
        "quantise have none and run as they are. Of 'all' and 'cache', windows are a tenth of what "
        "stays, and bits are 4 and 2",
    )
    add(
        "--positions",
        choices=("keep", "compact"),
        help="rotary ids of the kept tokens, of every recipe (default: each method's own)",
    )
    add(
        "--controls",
        action="store_true",
        help="also ask the full model without the picture (question-only) and without what is "
        "in it (background-only)",
    )
    add(
        "--session",
        action="store_true",
        help="also ask all questions about a picture one after another, in a session that reads "
        "the picture once: what second questions cost",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help="questions of each type: shapes' types, MMMU's subjects, Video-MME's durations, "
        "POPE's categories (default: all there are; of shapes 100)",
    )
    add(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="questions that are decoded together (default: %(default)s)",
    )
    add(
        "--shard",
        metavar="I/N",
        help="ask part I of N only, 0/4 is the first of four; parts write to one folder. Under "
        "torchrun and accelerate launch each process takes its part without this",
    )
    add(
        "--data",
        metavar="DATA",
        help="a parquet file, a folder of them, or a hub id, in the schema of MMMU/MMMU, "
        "lmms-lab/Video-MME or lmms-lab/POPE (default: these)",
    )
    add("--split", help="of mmmu: validation (default), dev or test, whose answers are hidden")
    add(
        "--mode",
        help="whose prompts, parsers and scores: official (default, the benchmark's authors), "
        "lmms-eval or vlmevalkit (exact matching)",
    )
    add(
        "--videos",
        metavar="DIR",
        help="of video-mme: folder of <videoID>.mp4 and subtitle/<videoID>.srt (default: DATA)",
    )
    add(
        "--subtitles",
        action="store_true",
        default=None,
        help="of video-mme: with what is said at the chosen frames",
    )
    add(
        "--allow-outside",
        action="store_true",
        default=None,
        help="of data sets: also read what they name by a URL, or by a path or link that leaves "
        "the folder of DATA or --videos",
    )
    add("--num-frames", type=int, metavar="N", help="of video-mme: frames of a video (default: 32)")
    add(
        "--out",
        type=Path,
        default=Path("vlmfast-results"),
        metavar="DIR",
        help="where the answers go (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the numbers there")
    add("--seed", type=int, default=0, help="another seed, other questions (default: %(default)s)")
    add("--device", help="such as cpu or cuda:0 (default: a GPU when there is one)")
    add(
        "--max-errors",
        type=int,
        default=10,
        metavar="N",
        help="samples of a recipe that may fail (default: %(default)s)",
    )


def run_eval(args: Namespace) -> int:
    """Run ``vlmfast eval``; the exit code."""
    from .results import writable, write_json
    from .runner import part_of, weights_sha256
    from .tasks import find_task
    from .workers import chosen, is_first, own_device, part_ways

    # Everything that can be wrong is looked at before a model is loaded.
    own = {key: getattr(args, key) for key in _OF_TASKS if getattr(args, key) is not None}
    tasks = [find_task(name, **own) for name in dict.fromkeys(args.tasks)]
    shard = chosen(args.shard)
    if args.batch_size < 1 or (args.session and args.batch_size > 1):
        raise VLMFastError(
            f"--batch-size {args.batch_size} must be at least 1, and 1 with --session"
        )
    axes = budgets(args.budget), args.positions, budgets(args.share, "share")
    recipes = planned(args.recipe or ["none"], *axes)
    for task in tasks:
        part_of(task.docs(args.limit, args.seed), *(shard or (0, 1)))
    check_folder(args.out)
    if args.json is not None:
        check_folder(args.json.parent)
        if args.json.is_dir():
            raise VLMFastError(f"--json {args.json} is a folder; it must be a file")
    check_device(args.device)

    vlm = _load(args.model, args.device or own_device())
    words = [word for word in args.recipe or () if word not in _GROUPS]
    asked = planned(words, *axes) if words else []
    recipes = _with_weights(vlm, recipes, asked)
    recipes = _down_to_the_floor(vlm, recipes)
    weights = weights_sha256(vlm)
    reports = [_run_task(vlm, task, recipes, args, weights, shard) for task in tasks]
    part_ways()
    failed = [reason for report in reports for reason in report["failed"].values()]
    if args.json is not None and is_first():
        value = reports[0] if len(reports) == 1 else {"tasks": {r["task"]: r for r in reports}}
        with writable(args.json):
            write_json(args.json, value)
    if is_first():
        print(f"\nanswers are in {args.out}; 'vlmfast report {args.out}' makes a table and a plot")
    if failed:
        raise VLMFastError("; ".join(failed))
    return 0


def _load(name: str, device: str | None) -> VLM:
    from transformers.utils import logging

    from vlmfast.api.vlm import VLM

    if name == "tiny" or Path(name).is_dir():
        # Where nothing is downloaded a progress bar is noise.
        logging.disable_progress_bar()
    return VLM.from_pretrained(name, device=device)


def _run_task(
    vlm: VLM,
    task: Task,
    recipes: list[Recipe],
    args: Namespace,
    weights: str | None,
    shard: tuple[int, int] | None,
) -> dict[str, Any]:
    """All recipes on one task; prints the table and returns what ``--json`` writes."""
    from .report import metrics_table, on_common_samples, tables
    from .results import named
    from .runner import TooManyErrors
    from .summary import compare
    from .workers import is_first

    controls = task.controls if args.controls else ()
    plan = [(Recipe(), None, False), *((Recipe(), c, False) for c in controls)]
    plan += [(recipe, None, False) for recipe in recipes]
    if args.session:
        plan += [(recipe, None, True) for recipe in (Recipe(), *recipes)]
    runs, failed = [], {}
    for recipe, control, session in plan:
        try:
            run = _evaluate(vlm, task, recipe, control, session, args, weights, shard)
        except TooManyErrors as error:
            if not runs:  # nothing stands without the full model
                raise
            variant = control or ("session" if session else None)
            failed[named(str(recipe), variant)] = str(error)
            continue
        runs.append(run)
    if shard is not None:  # other parts may not be as far
        runs = on_common_samples(runs)[0]
    rows = compare(runs)
    if is_first():
        print("\n\n".join(filter(None, (tables(rows), metrics_table(rows)))))
    rows += [row.session for row in rows if row.session]
    numbers = {row.run.name: row.numbers for row in rows}
    asked = [str(recipe) for recipe in recipes if str(recipe) in numbers]
    return {
        "task": task.name,
        "task_version": task.version,
        "model": args.model,
        "weights_sha256": weights,
        "limit": args.limit,
        "seed": args.seed,
        **numbers[asked[0] if asked else "none"],
        "recipes": numbers,
        "failed": failed,
    }


def _evaluate(
    vlm: VLM,
    task: Task,
    recipe: Recipe,
    control: str | None,
    session: bool,
    args: Namespace,
    weights: str | None,
    shard: tuple[int, int] | None,
) -> Results:
    """One run; under a launcher, what all its processes have together."""
    from .runner import TooManyErrors, check_errors, evaluate, finished
    from .workers import is_first, launched, meet

    try:
        run = evaluate(
            vlm,
            task,
            recipe,
            args.out,
            args.limit,
            seed=args.seed,
            control=control,
            session=session,
            batch_size=args.batch_size,
            shard=shard,
            max_errors=args.max_errors,
            model=args.model,
            weights=weights,
            command=shlex.join(["vlmfast", *sys.argv[1:]]),
            progress=is_first(),
        )
    except TooManyErrors:
        meet()
        raise
    meet()
    if launched() is None:
        return run
    run = finished(task, run.path, args.limit, args.seed)
    # All processes see the same files, so all of them end here or none does.
    errors = [s["error"] for s in run.samples.values() if "error" in s]
    check_errors(errors, run.path, args.max_errors)
    return run


def budgets(text: str | None, what: str = "budget") -> list[float]:
    """Read ``0.33,0.11``.

    Raises
    ------
    RecipeError
        When a part is not a number above 0 and at most 1.
    """
    values = []
    for part in text.split(",") if text is not None else ():
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            raise RecipeError(f"{what} {part.strip()!r} is not a number above 0 and at most 1")
        values.append(value)
    return list(dict.fromkeys(values))


def _with_weights(vlm: VLM, recipes: list[Recipe], asked: list[Recipe]) -> list[Recipe]:
    """The recipes whose trained methods have weights for the model.

    Raises
    ------
    RecipeError
        When one of those that were ``asked`` for by name has none. Others, which came with
        ``all``, are left out, with a line on stderr.
    """
    left, told = [], set()
    for recipe in recipes:
        try:
            for stage in recipe:
                if stage.trained:
                    vlm.adapter.trained(stage)
        except RecipeError as error:
            if recipe in asked:
                raise
            if str(error) not in told:
                print(f"left out: {error}", file=sys.stderr)
                told.add(str(error))
            continue
        left.append(recipe)
    return left


def _down_to_the_floor(vlm: VLM, recipes: list[Recipe]) -> list[Recipe]:
    """The recipes without those that only repeat what a method does at its floor.

    All budgets below the floor of a method inside the language model give the same tokens; the
    first of them is run. (What merges in the tower may go lower on some pictures than on others.)
    """
    from .axes import with_budget

    left: list[Recipe] = []
    at_floor: dict[Recipe, Recipe] = {}
    for recipe in recipes:
        stage, budget = recipe[0], getattr(recipe[0], "budget", None)
        inside = len(recipe) == 1 and stage.protocol == "prefill"
        if inside and budget is not None and budget < stage.floor(vlm.adapter.depth):
            first = at_floor.setdefault(with_budget(recipe, None), recipe)
            if first != recipe:
                print(f"left out: {recipe} gives what {first} gives, the floor", file=sys.stderr)
                continue
        left.append(recipe)
    return left


def planned(
    words: list[str],
    at_budgets: list[float],
    positions: str | None = None,
    at_shares: list[float] = (),
) -> list[Recipe]:
    """The recipes to run beside the full model, each once.

    Raises
    ------
    RecipeError
        For a recipe that cannot be read, or with a budget or a share and nothing that takes one.
    """
    from .axes import shrinks_cache, takes_budget, with_budget, with_field, with_share

    recipes: list[Recipe] = []
    for word in words:
        grouped = word in _GROUPS
        group = _GROUPS[word](at_shares) if grouped else [Recipe.parse(word)]
        for recipe in group:
            if positions is not None:
                recipe = with_field(recipe, "positions", positions)
            budgeted = bool(at_budgets) and takes_budget(recipe)
            shared = bool(at_shares) and shrinks_cache(recipe)
            if (at_budgets or at_shares) and recipe and not (grouped or budgeted or shared):
                # Of all methods, those that have neither run once, as they are.
                if at_budgets:
                    raise RecipeError(f"recipe {word!r} has no stage with a budget; drop --budget")
                raise RecipeError(f"recipe {word!r} has no cache method; drop --share")
            versions = [recipe]
            if budgeted:
                versions = [with_budget(recipe, budget) for budget in at_budgets]
            if shared:
                versions = [with_share(r, share) for r in versions for share in at_shares]
            recipes += versions
    recipes = [recipe for recipe in dict.fromkeys(recipes) if recipe]
    if at_budgets and not recipes:
        raise RecipeError("--budget is for recipes that drop tokens; add --recipe")
    if at_shares and not recipes:
        raise RecipeError("--share is for recipes with a cache method; add --recipe")
    return recipes


def _every_method(at_shares: list[float]) -> list[Recipe]:
    from .axes import shrinks_cache

    recipes = [Recipe((stage_class(name)(),)) for name in sorted(stage_names())]
    if not at_shares:
        return recipes
    return [r for of in recipes for r in (measured(of) if shrinks_cache(of) else [of])]


def _every_cache_method(at_shares: list[float]) -> list[Recipe]:
    from .axes import shrinks_cache

    return [recipe for recipe in _every_method(at_shares) if shrinks_cache(recipe)]


# What a word stands for that is no recipe.
_GROUPS = {"all": _every_method, "cache": _every_cache_method}


def measured(recipe: Recipe) -> list[Recipe]:
    """What of a cache method is run at shares of short prompts; the one place that decides it.

    Windows are a tenth of what stays, as ports to vision-language models have it: of 35 slots, a
    tenth of a small picture's prompt, SnapKV's own window of 32 would leave it next to nothing to
    choose. A method whose first parameter is its bits has no share; it is run at 4 and at 2.
    Everything else is at its default, and so is a method that is asked for by name.
    """
    from .axes import with_field

    (stage,) = recipe
    if stage.lead == "bits":
        return [with_field(recipe, "bits", bits) for bits in (4, 2)]
    return [with_field(recipe, "window", 0.1)]  # where it has one


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, before hours are spent."""
    from .results import writable

    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def check_device(name: str | None) -> None:
    """Refuse a device that is not there."""
    import torch

    if name is None:
        return
    try:
        torch.empty(0, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"device {name!r} cannot be used: {reason}") from error


def add_report(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast report``."""
    parser.description = (
        "Tables and plots of result folders; of two folders, what changed from one to the other."
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what 'vlmfast eval --out DIR' wrote")
    add("other", type=Path, metavar="DIR2", nargs="?", help="compare with these results")
    add("--out", type=Path, metavar="DIR", help="where the report goes (default: the last DIR)")


def run_report(args: Namespace) -> int:
    """Run ``vlmfast report``; the exit code."""
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
