"""Compile every kernel for a Hopper GPU, on a machine without one.

``python -m vlmfast.kernels.compile [file ...]`` prints registers, shared memory and spills of each
variant that the kernel files list under ``VARIANTS``, and fails where a kernel spills or does not
compile. What the interpreter runs, the compiler may still refuse.
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
SHARED = 227 * 1024  # bytes that one program may hold on it


def compiled(variant: Any) -> dict[str, Any]:
    """Registers, shared memory (bytes) and spills (bytes) of one variant."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for at, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        of = variant.signature[name]
        if isinstance(of, tuple):
            signature[name] = tuple(_type(each) for each in of)
            aligned |= {(at, i): _ALIGNED for i, each in enumerate(of) if _is_aligned(each)}
        else:
            signature[name] = _type(of)
            aligned |= {(at,): _ALIGNED} if _is_aligned(of) else {}
    binary = triton.compile(
        ASTSource(variant.kernel, signature, constexprs=dict(variant.constants), attrs=aligned),
        target=GPUTarget(*TARGET),
        # As Triton does it where nobody says; since 3.9 it asks to be told.
        options={
            "num_warps": variant.warps,
            "num_stages": variant.stages,
            "enable_fp_fusion": True,
        },
    )
    return {"shared": binary.metadata.shared, **_resources(binary.asm["cubin"])}


_ALIGNED = [["tt.divisibility", 16]]


def _type(of: str) -> str:
    return of.partition(":")[0]


def _is_aligned(of: str) -> bool:
    """As Triton sees for itself where it launches; memory from torch is."""
    return of.startswith("*") or of.endswith(":16")


def _resources(cubin: bytes) -> dict[str, int]:
    """What the assembler says of a binary."""
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
    """The kernel files."""
    import vlmfast.kernels as package

    names = (info.name for info in pkgutil.iter_modules(package.__path__))
    return [name for name in names if not name.startswith("_") and name != "compile"]


def variants(file: str) -> list[Any]:
    """What a kernel file lists."""
    module = importlib.import_module(f"vlmfast.kernels.{file}")
    return list(getattr(module, "VARIANTS", ()))


def report(file: str, index: int) -> dict[str, Any]:
    """What became of a variant; ``error`` where it spills or does not compile."""
    variant = variants(file)[index]
    line: dict[str, Any] = {"file": file, "kernel": variant.kernel.__name__}
    used = [variant.signature.get(name) for name in variant.kernel.arg_names]
    line["types"] = [of for of in used if of is not None and str(of) not in ("i32", "i32:16")]
    line["constants"] = variant.constants
    line["warps"] = variant.warps
    try:
        line |= compiled(variant)
    except Exception as error:  # whatever the compiler throws is the finding
        return line | {"error": f"{type(error).__name__}: {error}".strip()}
    if line["spills"]:
        line["error"] = f"spills {line['spills']} bytes"
    elif line["shared"] > SHARED:
        line["error"] = f"holds {line['shared']} bytes of shared memory, of {SHARED}"
    return line


def main(chosen: list[str]) -> int:
    """One line of JSON per variant; the exit code says whether all compile without spills."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("unset TRITON_INTERPRET: interpreted kernels cannot be compiled\n")
        return 2
    os.environ["VLMFAST_KERNELS"] = "triton"  # read where the kernel files are imported
    known = files()
    if unknown := [name for name in chosen if name not in known]:
        sys.stderr.write(f"{', '.join(unknown)}: not among {', '.join(known)}\n")
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
