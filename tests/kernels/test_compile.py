"""All kernels compile for a Hopper GPU without spills; no GPU is needed."""

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
    """Run another Python: this process interprets kernels, and cannot compile them."""
    left_out = ("TRITON_INTERPRET", "VLMFAST_KERNELS")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return subprocess.run([sys.executable, *args], env=kept | env, capture_output=True, text=True)


def test_all_variants_compile_without_spills() -> None:
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
def invalid(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.load(x))

@triton.jit
def fine(x, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)

types = {"x": "*fp32", "out": "*fp32", "n": "i32"}
VARIANTS = [
    Variant(spilling, types, {"N": 8192}, warps=1),
    Variant(invalid, types, {"N": 100}),
    Variant(fine, types, {"N": 128}),
]
"""


def test_spills_and_compile_errors_are_reported(tmp_path: Path) -> None:
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
    spilling, invalid, fine = map(json.loads, done.stdout.splitlines())
    assert spilling["spills"] > 0 and spilling["error"] == f"spills {spilling['spills']} bytes"
    assert "power of 2" in invalid["error"] and "registers" not in invalid
    assert "error" not in fine and fine["kernel"] == "fine" and fine["registers"] > 0


def test_command_rejects_unknown_files_and_interpreter() -> None:
    done = run("-m", "vlmfast.kernels.compile", "col_stats", "nothing")
    assert done.returncode == 2 and "unknown kernel files nothing; allowed are " in done.stderr
    done = run("-m", "vlmfast.kernels.compile", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "unset TRITON_INTERPRET" in done.stderr


def test_launch_arguments_bind_and_compile() -> None:
    """With Triton's own argument binder, which its interpreter does not use."""
    done = run(str(HERE / "bound.py"), VLMFAST_KERNELS="triton")
    assert done.returncode == 0, done.stderr
    kernels = {"_row_lse", "_join", "_col_stats", "_top_k", "_mass_count", "_gather_rows"}
    kernels |= {"_extent", "_finish", "_value_parameters", "_pack", "_attend", "_attend_one"}
    kernels |= {"_attention_mass", "_norm", "_rotate", "_swiglu"}
    assert kernels <= set(done.stdout.split())
