"""The command ``vlmfast reproduce``."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from vlmfast.core.display import text_table
from vlmfast.core.env import environment
from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.files import make_folder, replace_text
from vlmfast.core.help import add_dtype, count, examples, names
from vlmfast.core.journal import Journal, read_lines
from vlmfast.errors import VLMFastError
from vlmfast.eval.results import slug, write_json

from .papers import Catalogue, Paper, Task, catalogue
from .rows import ROWS, Key, Measured, NoResult, Row, Settings, command, measure, results_of, shown
from .table import NO_RESULT, WITHIN, about_paper, compare, markdown

_LEFT = ("paper", "arXiv", "model", "values", "recipe", "task", "result")
_FACTS = ("title", "arxiv", "origin", "table", "tolerance")
INSTALL = "pip install 'lmms-eval==0.7.3'"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``vlmfast reproduce``."""
    parser.description = (
        "Measure the results of a paper again with lmms-eval, and compare them with the published "
        "values. Each recipe and task is a row that is saved: repeat the command to continue an "
        "interrupted run."
    )
    parser.epilog = examples(
        "vlmfast reproduce --list",
        "vlmfast reproduce hired --dry",
        "vlmfast reproduce hired --out runs/papers --device cuda:0",
        "vlmfast reproduce visionzip --tasks gqa,pope --limit 500 --out runs/short",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    about, papers = "name of a paper; --list shows them", tuple(catalogue().papers)
    what.add_argument("paper", nargs="?", choices=papers, metavar="PAPER", help=about)
    about = "list the papers with their models and tasks"
    what.add_argument("--list", action="store_true", help=about)
    add = parser.add_argument
    about = "check the recipes and tasks and print the commands, without running them"
    add("--dry", action="store_true", help=about)
    out = Path("vlmfast-reproduce")
    add("--out", type=Path, default=out, metavar="DIR", help="folder of the results")
    add("--tasks", type=names, metavar="T,T", help="only these tasks (default: the paper's)")
    add("--model", help="a folder or a hub id (default: the paper's model)")
    about = "questions of each task (default: all, as in the papers); tolerances grow accordingly"
    add("--limit", type=count, metavar="N", help=about)
    add("--device", help="such as cpu or cuda:0 (default: a GPU if available)")
    add_dtype(parser)
    about = "folder of lmms-eval tasks that it does not ship"
    add("--include-path", type=Path, metavar="DIR", help=about)
    add("--json", action="store_true", help="print report.json to stdout")


def run(args: Namespace) -> int:
    """Run ``vlmfast reproduce`` and return the exit code."""
    known = catalogue()
    if args.list:
        print(text_table([_listed(paper) for paper in known.papers.values()], left=_LEFT))
        return ExitCode.FINISHED
    paper = known.papers[args.paper]
    tasks = _tasks(known, paper, args.tasks)
    model = args.model or paper.model
    settings = Settings(model, args.limit, args.device, args.dtype, args.include_path)
    if "," in model:
        raise VLMFastError(f"--model {model!r} has a comma, which lmms-eval splits at")
    folder = args.out / paper.name
    rows = [
        Row(recipe, task, folder / slug(recipe) / task.name)
        for task in tasks
        for recipe in ("none", *(m.recipe for m in paper.methods if task.name in m.values))
    ]
    if args.dry:
        _print_plan(paper, rows, settings, results_of(read_lines(folder / ROWS)[0]))
        return ExitCode.FINISHED
    _check_tasks(tasks, settings)
    if importlib.util.find_spec("lmms_eval") is None:
        raise VLMFastError(f"lmms-eval is missing; run {INSTALL}")
    make_folder(folder)
    with Journal(folder / ROWS, settings.about) as journal:
        found = _measure_all(rows, settings, journal)
        compared = [
            compare(paper, method, task, found)
            for method in paper.methods
            for task in tasks
            if task.name in method.values
        ]
        facts = {key: getattr(paper, key) for key in _FACTS} | {"environment": environment()}
        value = {"paper": paper.name, **facts, **settings.about, "rows": compared}
        text = markdown(paper, compared, known.tasks)
        replace_text(folder / "report.md", text)
        write_json(folder / "report.json", value)
    if args.json:
        print(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        print(f"{text}\nwritten: {folder / 'report.md'}, {folder / 'report.json'}")
    verdicts = {row["verdict"] for row in compared}
    if NO_RESULT in verdicts:
        return ExitCode.CUT_SHORT
    return ExitCode.FINISHED if verdicts == {WITHIN} else ExitCode.CHECK_FAILED


def _listed(paper: Paper) -> dict[str, str]:
    return {
        "paper": paper.name,
        "arXiv": paper.arxiv,
        "model": paper.model,
        "recipes": str(len(paper.methods)),
        "tasks": str(len(paper.full)),
        "values": paper.origin,
    }


def _tasks(known: Catalogue, paper: Paper, chosen: tuple[str, ...] | None) -> list[Task]:
    """The tasks to measure, in the paper's order."""
    unknown = [name for name in chosen or () if name not in paper.full]
    if unknown:
        raise VLMFastError(
            f"{paper.name} has no task {unknown[0]!r}; tasks: {', '.join(paper.full)}"
        )
    return [known.tasks[name] for name in paper.full if chosen is None or name in chosen]


def _check_tasks(tasks: list[Task], settings: Settings) -> None:
    """Raise for undefined tasks, before hours of work."""
    if settings.include is None:
        external = [task.name for task in tasks if task.external]
        if external:
            raise VLMFastError(
                f"lmms-eval has no task {', '.join(external)}: add --include-path DIR with their "
                "definitions (docs/evaluation.md), or choose others with --tasks"
            )
    elif not settings.include.is_dir():
        raise VLMFastError(f"--include-path {settings.include} is not a folder")


def _measure_all(
    rows: list[Row], settings: Settings, journal: Journal
) -> dict[Key, Measured | str]:
    """Measure the rows that have no result yet; the result of each, or the reason."""
    found: dict[Key, Measured | str] = {**results_of(journal.lines)}
    for number, row in enumerate(rows, start=1):
        full = found.get(("none", row.task.name))
        if row.key in found or (row.recipe != "none" and not isinstance(full, Measured)):
            continue  # known, or nothing to compare with
        where = f"{number} of {len(rows)}: {row.recipe} on {row.task.name}"
        print(f"{where}; log: {row.folder / 'log.txt'}", file=sys.stderr, flush=True)
        try:
            found[row.key] = result = measure(row, settings)
        except NoResult as error:
            found[row.key] = str(error)
            print(f"{where}: no result: {error}", file=sys.stderr, flush=True)
        else:
            line = {"recipe": row.recipe, "task": row.task.name, **asdict(result)}
            journal.append({**line, "command": shown(command(row, settings))})
    return found


def _print_plan(
    paper: Paper, rows: list[Row], settings: Settings, known: Mapping[Key, Measured]
) -> None:
    """The commands of the rows, and the published values."""
    published = {"none": paper.full, **{m.recipe: m.values for m in paper.methods}}
    print("\n".join(about_paper(paper)))
    for row in rows:
        state = "; needs --include-path" * row.task.external
        state = "; finished" if row.key in known else state
        value = published[row.recipe][row.task.name]
        print(f"\n# {row.recipe} on {row.task.name}: published {value:g}{state}")
        print(shown(command(row, settings)))
    if importlib.util.find_spec("lmms_eval") is None:
        print(f"\nlmms-eval is missing; before the run: {INSTALL}")
