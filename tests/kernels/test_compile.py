"""Every kernel compiles for a Hopper GPU without spills, here where there may be no GPU at all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _compiler() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return path if path.exists() else None


pytestmark = pytest.mark.skipif(_compiler() is None, reason="Triton has no ptxas on this platform")


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Another Python: this one interprets kernels, and what it interprets it cannot compile."""
    left_out = ("TRITON_INTERPRET", "VLMFAST_KERNELS")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return subprocess.run([sys.executable, *args], env=kept | env, capture_output=True, text=True)


def test_every_variant_compiles_and_none_spills() -> None:
    done = run("-m", "vlmfast.kernels.compile")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [line for line in lines if "error" in line]
    assert not failed, "\n".join(
        f"{line['file']}.{line['kernel']} {line['constants']}: {line['error']}" for line in failed
    )
    assert done.returncode == 0, done.stderr
    assert all(line["spills"] == 0 and 0 < line["registers"] <= 255 for line in lines)
    files = {line["file"] for line in lines}
    missing = [
        path.stem
        for path in (HERE.parents[1] / "vlmfast" / "kernels").glob("*.py")
        if "triton.jit" in path.read_text() and not path.stem.startswith("_")
        if path.stem not in files
    ]
    assert not missing, f"no VARIANTS in {missing}"


BAD = """
from vlmfast.kernels._triton import Variant, tl, triton

@triton.jit
def spilling(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    a = tl.load(x + n)
    tl.store(out + n, a / tl.sum(a, 0))

@triton.jit
def refused(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.load(x))

@triton.jit
def fine(x, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)

types = {"x": "*fp32", "out": "*fp32", "n": "i32"}
VARIANTS = [
    Variant(spilling, types, {"N": 8192}, warps=1),
    Variant(refused, types, {"N": 100}),
    Variant(fine, types, {"N": 128}),
]
"""


def test_what_spills_or_does_not_compile_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    code = """
import json, bad
from vlmfast.kernels import compile
compile.variants = lambda file: bad.VARIANTS
for i in range(len(bad.VARIANTS)):
    print(json.dumps(compile.report("bad", i), default=str))
"""
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("-c", code, VLMFAST_KERNELS="triton", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    spilling, refused, fine = map(json.loads, done.stdout.splitlines())
    assert spilling["spills"] > 0 and spilling["error"] == f"spills {spilling['spills']} bytes"
    assert "power of 2" in refused["error"] and "registers" not in refused
    assert "error" not in fine and fine["kernel"] == "fine" and fine["registers"] > 0


def test_words_of_the_command() -> None:
    done = run("-m", "vlmfast.kernels.compile", "col_stats", "nothing")
    assert done.returncode == 2 and "nothing: not among " in done.stderr
    done = run("-m", "vlmfast.kernels.compile", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "unset TRITON_INTERPRET" in done.stderr


def test_launchers_give_triton_what_it_takes() -> None:
    """Through Triton's own binder of arguments, which its interpreter does without."""
    done = run(str(HERE / "bound.py"), VLMFAST_KERNELS="triton")
    assert done.returncode == 0, done.stderr
    kernels = {"_row_lse", "_join", "_col_stats", "_top_k", "_mass_count", "_gather_rows"}
    kernels |= {"_extent", "_finish", "_value_parameters", "_pack", "_attend", "_attend_one"}
    kernels |= {"_mass", "_norm", "_rotate", "_swiglu"}
    assert kernels <= set(done.stdout.split())
