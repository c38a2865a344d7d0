"""Compile every kernel for a Hopper GPU, on a machine without one.

``python -m vlmfast.kernels.compile [file ...]`` prints registers, shared memory and spills of each
variant that the kernel files list under ``VARIANTS``, and fails if a kernel spills or does not
compile. The compiler may reject code that the interpreter runs.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TARGET = ("cuda", 90, 32)
SHARED = 227 * 1024  # bytes available to one program on this target


def compiled(variant: Any) -> dict[str, Any]:
    """Registers, shared memory (bytes) and spills (bytes) of one variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for position, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        kind = variant.signature[name]
        if isinstance(kind, tuple):
            signature[name] = tuple(_type(each) for each in kind)
            aligned |= {(position, i): _ALIGNED for i, each in enumerate(kind) if _is_aligned(each)}
        else:
            signature[name] = _type(kind)
            aligned |= {(position,): _ALIGNED} if _is_aligned(kind) else {}
    binary = triton.compile(
        ASTSource(variant.kernel, signature, constexprs=dict(variant.constants), attrs=aligned),
        target=GPUTarget(*TARGET),
        # Triton's defaults; since 3.9 they must be passed.
        options={
            "num_warps": variant.warps,
            "num_stages": variant.stages,
            "enable_fp_fusion": True,
        },
    )
    return {"shared": binary.metadata.shared, **_resources(binary.asm["cubin"])}


_ALIGNED = [["tt.divisibility", 16]]


def _type(kind: str) -> str:
    return kind.partition(":")[0]


def _is_aligned(kind: str) -> bool:
    """Whether a launch would specialize on it; pointers from torch are aligned."""
    return kind.startswith("*") or kind.endswith(":16")


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and spills of a binary, as reported by cuobjdump."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spills": found["STACK"] + found["LOCAL"]}


def files() -> list[str]:
    """Names of the kernel files."""
    import vlmfast.kernels as package

    names = (info.name for info in pkgutil.iter_modules(package.__path__))
    return [name for name in names if not name.startswith("_") and name != "compile"]


def variants(file: str) -> list[Any]:
    """Variants that a kernel file lists."""
    module = importlib.import_module(f"vlmfast.kernels.{file}")
    return list(getattr(module, "VARIANTS", ()))


def report(file: str, index: int) -> dict[str, Any]:
    """Compile a variant; the result has an ``error`` if it spills or does not compile."""
    variant = variants(file)[index]
    line: dict[str, Any] = {"file": file, "kernel": variant.kernel.__name__}
    types = [variant.signature.get(name) for name in variant.kernel.arg_names]
    line["types"] = [
        kind for kind in types if kind is not None and str(kind) not in ("i32", "i32:16")
    ]
    line["constants"] = variant.constants
    line["warps"] = variant.warps
    try:
        line |= compiled(variant)
    except Exception as error:  # any exception of the compiler is the result
        return line | {"error": f"{type(error).__name__}: {error}".strip()}
    if line["spills"]:
        line["error"] = f"spills {line['spills']} bytes"
    elif line["shared"] > SHARED:
        line["error"] = f"uses {line['shared']} bytes of shared memory; {SHARED} are available"
    return line


def main(chosen: list[str]) -> int:
    """Print one line of JSON per variant; returns 0 if all compile without spills."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("unset TRITON_INTERPRET: interpreted kernels cannot be compiled\n")
        return 2
    os.environ["VLMFAST_KERNELS"] = "triton"  # read where the kernel files are imported
    known = files()
    if unknown := [name for name in chosen if name not in known]:
        sys.stderr.write(
            f"unknown kernel files {', '.join(unknown)}; allowed are {', '.join(known)}\n"
        )
        return 2
    work = [(name, i) for name in chosen or known for i in range(len(variants(name)))]
    failed = 0
    with ProcessPoolExecutor(_cores(), mp_context=get_context("spawn")) as pool:
        for line in pool.map(report, *zip(*work, strict=True)) if work else ():
            failed += "error" in line
            sys.stdout.write(json.dumps(line, default=str) + "\n")
            sys.stdout.flush()
    return 1 if failed else 0


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
