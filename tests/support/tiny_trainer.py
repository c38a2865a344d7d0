"""The scripts of ``benchmarks/tiny``."""

from __future__ import annotations

import importlib
from itertools import islice

import pytest

from support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "tiny"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
SCRIPTS = (
    *("bpe", "architecture", "labels", "references", "batches", "schedule", "heads"),
    *("network", "folder", "training"),
)
with pytest.MonkeyPatch.context() as patched:
    patched.syspath_prepend(FOLDER)
    modules = map(importlib.import_module, SCRIPTS)
    bpe, architecture, labels, references, batches, schedule, heads = islice(modules, 7)
    network, folder, training = modules
