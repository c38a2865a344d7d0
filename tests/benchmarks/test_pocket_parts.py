"""`benchmarks/pocket/parts.py` checks what it takes, and refuses what it cannot use."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.paths import ROOT

_PAGE = """<style>x</style>Docs
<p>Gemma Terms of Use</p>
<p>Terms &amp;</p>
 Send feedback
 End"""
SCRIPT = ROOT / "benchmarks" / "pocket" / "parts.py"


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pocket_parts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def packages(parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages whose files have other contents than the real ones."""
    for name, files in {
        parts.GGUF: ["GEMMA_TERMS.html", "NOTICE.md"],
        **{f"{parts.GGUF}_part{n + 1}": [f"{parts.GGUF_FILE}.part0{n}"] for n in range(4)},
    }.items():
        (tmp_path / "site" / name / "data").mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise RuntimeError('imported')")
        for file in files:
            (tmp_path / "site" / name / "data" / file).write_text(_PAGE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_files_are_checked_together(parts: ModuleType, packages: Path) -> None:
    files = [
        parts.located(f"{parts.GGUF}_part{n + 1}", "data", f"{parts.GGUF_FILE}.part0{n}")
        for n in (0, 1)
    ]
    one, both = (hashlib.sha256(n * files[0].read_bytes()).hexdigest() for n in (1, 2))
    parts.check_sum("the file", files, both)
    with pytest.raises(SystemExit, match=f"the file has SHA-256 {both}, expected is {one}"):
        parts.check_sum("the file", files, one)


def test_decoder_of_another_sum_is_refused_before_anything_is_written(
    parts: ModuleType, packages: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"{parts.GGUF_FILE} has SHA-256"):
        parts.make(tmp_path / "out", accepted=True)
    assert not (tmp_path / "out").exists()
    (packages / f"{parts.GGUF}_part3" / "data" / f"{parts.GGUF_FILE}.part02").unlink()
    with pytest.raises(SystemExit, match="part02 is missing"):
        parts.make(tmp_path / "out", accepted=True)


def test_terms_are_shown_and_must_be_accepted(
    parts: ModuleType, packages: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "out")],
        env={"PYTHONPATH": f"{packages}:{SCRIPT.parents[2]}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("Gemma Terms of Use\nTerms &\n")
    assert not any(word in done.stderr for word in ("Docs", "End", "Traceback"))
    assert "--accept-gemma-terms accepts them" in done.stderr
