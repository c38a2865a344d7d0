"""Compile every kernel for Ampere, Ada and Hopper GPUs, on a machine without one.

``python -m vlmfast.kernels.compile [--arch 80 89 90] [file ...]`` prints registers, shared memory
and spills of each variant that the kernel files list, and fails if a kernel spills, needs more
shared memory than the architecture has, or does not compile. The compiler may reject code that the
interpreter runs.

A kernel file lists its variants as ``VARIANTS``, or as ``variants(arch)`` if its block sizes depend
on the architecture.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

# Shared memory that one program can use, in bytes, by compute capability (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability").
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def compiled(variant: Any, arch: int) -> dict[str, Any]:
    """Compile one variant for ``arch``, as a launch would, and count what it needs.

    Launches on such a GPU find it in Triton's cache. In this process no kernel can run afterwards.

    Returns
    -------
    dict
        ``registers``; ``shared`` and ``spills`` in bytes; ``int_to_float``, conversions of integers
        to floats, and ``narrow_loads``, loads of one or two bytes from global memory, both as
        instructions in the longest loop of the PTX.
    """
    from triton.runtime import driver

    arguments = dict(variant.constants)
    for name in variant.kernel.arg_names:
        if name not in arguments:
            kind = variant.signature[name]
            several = isinstance(kind, tuple)
            arguments[name] = tuple(map(_argument, kind)) if several else _argument(kind)
    options = {"num_warps": variant.warps, "enable_fp_fusion": variant.fp_fusion}
    if variant.stages is not None:
        options["num_stages"] = variant.stages
    driver.set_active(NoDevice(arch))
    binary = variant.kernel.warmup(grid=(1,), **arguments, **options)
    loop = _longest_loop(binary.asm["ptx"])
    return {
        "shared": binary.metadata.shared,
        **_resources(binary.asm["cubin"]),
        **{name: len(re.findall(code, loop)) for name, code in _COUNTED.items()},
    }


_COUNTED = {
    "int_to_float": r"\bcvt\.rn\.(?:b?f16|f32)\.[su]\d+\b",
    "narrow_loads": r"\bld\.global(?:\.(?!v\d)\w+)*?\.[bsu](?:8|16)\b",
}


def _longest_loop(ptx: str) -> str:
    """From a label to the last branch back to it; everything if nothing branches back."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE)}
    loops = [
        ptx[labels[found[1]] : found.end()]
        for found in re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", ptx)
        if labels[found[1]] < found.start()
    ]
    return max(loops, key=len, default=ptx)


_DTYPES = {"i1": "bool", "u8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64"}
_DTYPES |= {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class NoDevice:
    """A driver of Triton that only says for what it compiles."""

    arch: int

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton has a cache for each device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _argument(kind: str) -> Any:
    """What a launch would pass for a type of a signature."""
    from triton.runtime.jit import MockTensor

    base, _, multiple = kind.partition(":")
    if base.startswith("*"):
        return MockTensor(getattr(torch, _DTYPES[base[1:]]))
    return {"i32": 17 * int(multiple or 1), "fp32": 0.5}[base]


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
    others = ("calls", "catalogue", "compile")
    return [name for name in names if not name.startswith("_") and name not in others]


def variants(file: str, arch: int) -> list[Any]:
    """Variants that a kernel file lists for an architecture."""
    module = importlib.import_module(f"vlmfast.kernels.{file}")
    if hasattr(module, "variants"):
        return list(module.variants(arch))
    return list(getattr(module, "VARIANTS", ()))


def report(file: str, index: int, arch: int) -> dict[str, Any]:
    """Compile a variant; the result has an ``error`` if it spills or does not compile."""
    variant = variants(file, arch)[index]
    line: dict[str, Any] = {"file": file, "kernel": variant.kernel.__name__, "arch": arch}
    types = [variant.signature.get(name) for name in variant.kernel.arg_names]
    line["types"] = [
        kind for kind in types if kind is not None and str(kind) not in ("i32", "i32:16")
    ]
    line["constants"] = variant.constants
    line["warps"] = variant.warps
    try:
        line |= compiled(variant, arch)
    except Exception as error:  # any exception of the compiler is the result
        return line | {"error": f"{type(error).__name__}: {error}".strip()}
    if line["spills"]:
        line["error"] = f"spills {line['spills']} bytes"
    elif line["shared"] > SHARED[arch]:
        line["error"] = (
            f"uses {line['shared']} bytes of shared memory; {SHARED[arch]} are available"
        )
    return line


def main(arguments: list[str]) -> int:
    """Print one line of JSON per variant and architecture; 0 if all compile without spills."""
    parser = argparse.ArgumentParser(prog="python -m vlmfast.kernels.compile", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="file")
    parser.add_argument("--arch", nargs="+", type=int, choices=SHARED, default=list(SHARED))
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="each variant for one of the architectures",
    )
    options = parser.parse_args(arguments)
    chosen, archs = options.files, options.arch
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
    work = [
        (name, i, arch)
        for name in chosen or known
        for at, arch in enumerate(archs)
        for i in range(len(variants(name, arch)))
        if not options.rotate or i % len(archs) == at
    ]
    failed = 0
    # Copies of this process have imported PyTorch and Triton, which takes seconds.
    start = "fork" if sys.platform == "linux" else "spawn"
    with ProcessPoolExecutor(_cores(), mp_context=get_context(start)) as pool:
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
