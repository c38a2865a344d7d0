"""A stand-in for lmms-eval's program: it writes results in its schema (0.7.3), for invented scores.

`install` puts it on a path as the package ``lmms_eval``. ``plan.json`` next to the package has the
metrics of each ``RECIPE TASK``, or what goes wrong there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MAIN = """
import argparse, json, os, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("model", "model_args", "tasks", "batch_size", "output_path", "limit", "include_path"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
model = dict(pair.split("=", 1) for pair in args.model_args.split(","))
key = f"{model['recipe']} {args.tasks}"
home = Path(__file__).parents[1]
with open(home / "calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
plan = json.loads((home / "plan.json").read_text())[key]
if plan.get("wait"):
    (home / "pid").write_text(str(os.getpid()))
    time.sleep(60)
for line in plan.get("log", ()):
    print(line, file=sys.stderr)
folder = Path(args.output_path) / model["pretrained"].replace("/", "__")
if "metrics" in plan:
    n = min(int(args.limit or plan["n"]), plan["n"])
    own = {"alias": args.tasks}
    for name, value in plan["metrics"].items():
        own |= {f"{name},none": value, f"{name}_stderr,none": "N/A"}
    found = {
        "results": {args.tasks: own},
        "configs": {args.tasks: {"task": args.tasks, "output_type": "generate_until"}},
        "versions": {args.tasks: 0.0},
        "n-shot": {args.tasks: 0},
        "n-samples": {args.tasks: {"original": plan["n"], "effective": n}},
        "config": {"model": args.model, "model_args": args.model_args, "limit": args.limit},
    }
    folder.mkdir(parents=True)
    text = json.dumps(found)
    (folder / "20261101_120000_results.json").write_text(text[: plan.get("cut")])
sys.exit(plan.get("code", 0))
"""


class Fake:
    """The program in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        package = folder / "lmms_eval"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(_MAIN)
        self.plan: dict[str, dict[str, Any]] = {}

    def score(self, recipe: str, task: str, n: int, **metrics: float) -> None:
        """Plan the metrics of a recipe on a task with ``n`` questions."""
        self.set(recipe, task, n=n, metrics=metrics)

    def set(self, recipe: str, task: str, **what: Any) -> None:
        """Plan anything; a recipe as lmms-eval gets it."""
        self.plan[f"{recipe} {task}"] = what
        (self.folder / "plan.json").write_text(json.dumps(self.plan))

    @property
    def calls(self) -> list[str]:
        """Arguments of the calls so far."""
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []
