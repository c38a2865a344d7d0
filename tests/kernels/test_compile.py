"""All kernels compile for Ampere, Ada and Hopper without spills; no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT, TESTS
from vlmfast.kernels import compile


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


def compile_all(*args: str) -> list[dict[str, Any]]:
    """Compile all kernel files; one entry per variant and architecture."""
    done = run("-m", "vlmfast.kernels.compile", *args)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [line for line in lines if "error" in line]
    assert not failed, "\n".join(
        f"{line['file']}.{line['kernel']} on {line['arch']} {line['constants']}: {line['error']}"
        for line in failed
    )
    assert lines, done.stderr
    files = {line["file"] for line in lines}
    missing = [
        path.stem
        for path in (ROOT / "vlmfast" / "kernels").glob("*.py")
        if "triton.jit" in path.read_text() and not path.stem.startswith("_")
        if path.stem not in files
    ]
    assert not missing, f"no variants in {missing}"
    return lines


def check_codes(lines: list[dict[str, Any]]) -> None:
    """Codes of 4 and 2 bits are read without conversions and without loads below 4 bytes."""
    lines = [
        line
        for line in lines
        if line["kernel"] in ("attend_rows", "attend_row")
        and line["constants"].get("BITS") in (2, 4)
    ]
    assert {line["kernel"] for line in lines} == {"attend_rows", "attend_row"}
    for line in lines:
        assert line["int_to_float"] == 0 and line["narrow_loads"] == 0, line


def test_rotating_third_of_variants_compiles_without_spills() -> None:
    """Variant i of each file for one of three architectures."""
    lines = compile_all("--rotate")
    assert {line["arch"] for line in lines} == {80, 89, 90}
    check_codes(lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_variants_compile_without_spills_on_all_architectures() -> None:
    lines = compile_all()
    per_arch = Counter(line["arch"] for line in lines)
    assert per_arch.keys() == {80, 89, 90} and len(set(per_arch.values())) == 1
    check_codes(lines)


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

@triton.jit
def converting(codes, x, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for start in range(0, n, N):
        total += tl.load(codes + start + at).to(tl.float32) * tl.load(x + start)
    tl.store(out + at, total)

@triton.jit
def sharing(x, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.dot(a, tl.trans(a)))

types = {"x": "*fp32", "out": "*fp32", "n": "i32"}
half = types | {"codes": "*u8", "x": "*fp16"}
VARIANTS = [
    Variant(spilling, types, {"N": 8192}, warps=1),
    Variant(invalid, types, {"N": 100}),
    Variant(fine, types, {"N": 128}),
    Variant(converting, half, {"N": 128}),
    Variant(sharing, half, {"N": 64}),
]
"""


def test_faults_are_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    code = """
import json, bad
from vlmfast.kernels import compile
compile.variants = lambda file, arch: bad.VARIANTS
for i in range(len(bad.VARIANTS)):
    print(json.dumps(compile.report("bad", i, 90), default=str))
compile.SHARED[90] = 1024
print(json.dumps(compile.report("bad", i, 90), default=str))
"""
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("-c", code, VLMFAST_KERNELS="triton", PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    spilling, invalid, fine, converting, shared, too_much = lines
    assert spilling["spills"] > 0 and spilling["error"] == f"spills {spilling['spills']} bytes"
    assert "power of 2" in invalid["error"] and "registers" not in invalid
    assert "error" not in fine and fine["kernel"] == "fine" and fine["registers"] > 0
    assert fine["int_to_float"] == fine["narrow_loads"] == 0
    assert converting["int_to_float"] > 0 and converting["narrow_loads"] > 0
    assert "error" not in shared and shared["shared"] > 1024
    assert too_much["error"].endswith("bytes of shared memory; 1024 are available")


def test_command_rejects_unknown_files_and_interpreter(monkeypatch, capsys) -> None:
    """The last one in a process of its own; the others share this one."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("VLMFAST_KERNELS", "")  # which the command sets
    assert compile.main(["col_stats", "nothing"]) == 2
    assert "unknown kernel files nothing; allowed are " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        compile.main(["--arch", "75"])
    assert "invalid choice: 75 (choose from 80, 89, 90)" in capsys.readouterr().err
    done = run("-m", "vlmfast.kernels.compile", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "unset TRITON_INTERPRET" in done.stderr


def test_launch_arguments_bind_and_compile() -> None:
    """With Triton's own argument binder, which its interpreter does not use."""
    done = run(str(TESTS / "support" / "bound.py"), VLMFAST_KERNELS="triton")
    assert done.returncode == 0, done.stderr
    kernels = {"_row_lse", "_join", "_col_stats", "_top_k", "_mass_count", "_gather_rows"}
    kernels |= {"_extent", "_finish", "_value_parameters", "_pack", "attend_rows", "attend_row"}
    kernels |= {"sum_mass", "join_splits", "_norm", "_rotate", "_swiglu", "_attend_list"}
    kernels |= {"_linears", "_gated"}
    assert kernels <= set(done.stdout.split())


@pytest.mark.slow
def test_launches_find_what_was_compiled(tmp_path: Path) -> None:
    """A folder that was filled on another machine; the control is a stride without a variant."""
    cache = {"TRITON_CACHE_DIR": str(tmp_path), "VLMFAST_KERNELS": "triton"}
    done = run("-m", "vlmfast.kernels.compile", "swiglu", "--arch", "90", **cache)
    assert done.returncode == 0, done.stderr
    code = """
import os, torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from vlmfast.kernels import compile, swiglu

def entries():
    return len(os.listdir(os.environ["TRITON_CACHE_DIR"]))

swiglu.use_triton = lambda *args: True
driver.set_active(compile.NoDevice(90))
JITFunction.__getitem__ = lambda kernel, grid: lambda *a, **k: kernel.warmup(*a, grid=grid, **k)
x = torch.randn(2, 100).bfloat16()
for width in (48, 50):
    before = entries()
    swiglu.swiglu(x[:, :width], x[:, :width])
    y = torch.randn(2, width).bfloat16()
    swiglu.swiglu(y, y)
    print(entries() - before)
"""
    done = run("-c", code, **cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0"]
