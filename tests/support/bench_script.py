"""Scripts of ``benchmarks`` as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from support.paths import ROOT

FOLDER = ROOT / "benchmarks"


def script(name: str) -> Any:
    """A script; from its file where a folder of the tests has its name."""
    if not FOLDER.is_dir():
        pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if not (FOLDER.parent / "tests" / name).exists():
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
