"""The committed results, and parts of the tables that show them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmfast.core.display import markdown_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def numbers(folder: str, task: str = "shapes") -> dict[str, dict[str, Any]]:
    """The numbers of one report by recipe."""
    text = (RESULTS / folder / "report.json").read_text(encoding="utf-8")
    recipes = json.loads(text)["tasks"][task]["recipes"]
    return {run["recipe"]: run for run in recipes.values() if run["control"] is None}


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    return markdown_table(rows[0], rows[1:])


def pair(run: dict[str, Any]) -> str:
    return f"{100 * run['accuracy_image']:.1f} / {100 * run['accuracy_video']:.1f}"


def measured(name: str) -> dict[str, Any]:
    """A result file of ``benchmarks``."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def within(run: dict[str, Any], kind: str) -> str:
    low, high = run[f"accuracy_{kind}_ci"]
    return f"{100 * run[f'accuracy_{kind}']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def both(run: dict[str, Any]) -> list[str]:
    return [within(run, kind) for kind in ("image", "video")]


def script(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script  # where its dataclasses look for their annotations
    sys.path.insert(0, str(ROOT / folder))  # scripts import each other
    try:
        spec.loader.exec_module(script)
    finally:
        sys.path.remove(str(ROOT / folder))
    return script
