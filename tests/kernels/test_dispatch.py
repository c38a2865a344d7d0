"""Dispatch between Triton and the PyTorch references, without silent fallbacks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import vlmfast
from support.engine.kernels import (
    HAS_TRITON,
    INTERPRETED,
    KERNELS,
    Absent,
    Choice,
    check_heads,
    forget_warnings,
    padded,
    parse_choice,
    pointer,
    pretend_gpu,
    upcast,
    use_triton,
    without_interpreter,
    without_triton,
)
from vlmfast.errors import VLMFastError

CPU = torch.zeros(2)


class Cuda:
    """A tensor on a GPU, as far as the dispatch reads it."""

    def __init__(self, index: int = 0, kind: str = "cuda") -> None:
        self.device = torch.device(kind, index)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """A process that has not warned."""
    forget_warnings()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    pretend_gpu(monkeypatch)
    monkeypatch.delenv("VLMFAST_KERNELS", raising=False)
    return monkeypatch


def test_cpu_uses_reference_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "torch"):
        if value is None:
            monkeypatch.delenv("VLMFAST_KERNELS", raising=False)
        else:
            monkeypatch.setenv("VLMFAST_KERNELS", value)
        assert not use_triton("x", CPU, None)
    assert not use_triton("x")


def test_gpu_uses_triton_by_default(gpu: pytest.MonkeyPatch) -> None:
    assert use_triton("x", Cuda(), None, Cuda())
    gpu.setenv("VLMFAST_KERNELS", "triton")
    assert use_triton("x", Cuda())
    gpu.setenv("VLMFAST_KERNELS", "torch")
    assert not use_triton("x", Cuda())


@pytest.mark.parametrize("value", ["Triton", "cuda", "0"])
def test_unknown_choice_raises(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", value)
    with pytest.raises(VLMFastError, match=f"VLMFAST_KERNELS='{value}' must be one of torch, tri"):
        use_triton("x", CPU)


@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_mixed_devices_raise(gpu: pytest.MonkeyPatch, choice: str) -> None:
    gpu.setenv("VLMFAST_KERNELS", choice)
    with pytest.raises(VLMFastError, match="gather: tensors on cpu, cuda:0; it takes one device"):
        use_triton("gather", CPU, Cuda())
    with pytest.raises(VLMFastError, match="cuda:0, cuda:1"):
        use_triton("gather", Cuda(1), None, Cuda())


def test_other_than_current_gpu_raises(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(VLMFastError, match=r"on cuda:1, but .* is cuda:0; call it under"):
        use_triton("x", Cuda(1))


def old_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


def rocm(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "7.0")


@pytest.mark.parametrize(
    ("machine", "kind", "reason"),
    [
        (old_gpu, "cuda", r"compute capability 7\.5, the kernels need 8\.0"),
        (rocm, "cuda", "not tested on ROCm"),
        (without_triton, "cuda", "Triton is missing; install it"),
        (lambda gpu: None, "xpu", "written for CUDA"),
        (lambda gpu: None, "mps", "written for CUDA"),
    ],
    ids=["old", "rocm", "no Triton", "xpu", "mps"],
)
def test_device_without_kernels_runs_references_and_warns_once(gpu, machine, kind, reason) -> None:
    machine(gpu)
    with pytest.warns(RuntimeWarning, match=f"{reason}.*; {kind}:0 runs .* references.* slower"):
        assert not use_triton("x", Cuda(kind=kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_triton("y", Cuda(kind=kind))
    # Each device has its own warning; kernels would run on the current one.
    gpu.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.warns(RuntimeWarning, match=f"{kind}:1 runs"):
        assert not use_triton("x", Cuda(1, kind))
    # Tensors of another device are found there too.
    with pytest.raises(VLMFastError, match="it takes one device"):
        use_triton("x", CPU, Cuda(kind=kind))
    gpu.setattr(torch.cuda, "current_device", lambda: 0)
    gpu.setenv("VLMFAST_KERNELS", "triton")
    with pytest.raises(VLMFastError, match=rf"^x: .*{reason}.*; on {kind}:0 set VLMFAST_KERN"):
        use_triton("x", Cuda(kind=kind))
    gpu.setenv("VLMFAST_KERNELS", "torch")
    assert not use_triton("x", Cuda(kind=kind))


def test_supported_gpu_and_cpu_do_not_warn(gpu: pytest.MonkeyPatch) -> None:
    """Control for the warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use_triton("x", Cuda())
        without_triton(gpu)
        assert not use_triton("x", CPU)
    assert not use_triton("x", torch.zeros(2, device="meta"))


def test_missing_triton_raises_if_it_is_forced(gpu: pytest.MonkeyPatch) -> None:
    without_triton(gpu)
    gpu.setenv("VLMFAST_KERNELS", "triton")
    with pytest.raises(VLMFastError, match="x: Triton is missing"):
        use_triton("x", CPU)


# --- kernels by name -----------------------------------------------------------------------------


def test_every_name_of_the_code_is_known() -> None:
    """`KERNELS` lists what `use_triton` is asked for, by file, and nothing else."""
    package = Path(vlmfast.__file__).parent
    found: dict[str, set[str]] = {}
    for path in (*package.glob("kernels/*.py"), *package.glob("engine/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "use_triton":
                found.setdefault(path.stem, set()).add(ast.literal_eval(node.args[0]))
    assert {file: set(names) for file, names in KERNELS.items()} == found
    assert len([name for names in KERNELS.values() for name in names]) == len(
        {name for names in KERNELS.values() for name in names}
    )


def test_named_kernels_run_the_reference(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("VLMFAST_KERNELS", "-decode_mixed, -dpp")
    assert not use_triton("decode_mixed", Cuda())
    assert not use_triton("dpp", Cuda())
    assert use_triton("max_min", Cuda())  # the same file
    assert not use_triton("swiglu", CPU)  # all others run as by default
    gpu.setenv("VLMFAST_KERNELS", "-pool")
    assert not any(use_triton(name, Cuda()) for name in ("cell_average", "cell_mix", "resample"))
    assert use_triton("decode_mixed", Cuda())
    # What is turned off needs no current device.
    assert not use_triton("resample", Cuda(1))
    with pytest.raises(VLMFastError, match="it takes one device"):
        use_triton("resample", Cuda(1), CPU)


@pytest.mark.parametrize("value", ["-", "-decode", "-swiglu,-decode", "-swiglu,-", "-swiglu,,-dpp"])
def test_unknown_kernel_raises(gpu: pytest.MonkeyPatch, value: str) -> None:
    gpu.setenv("VLMFAST_KERNELS", value)
    for tensor in (CPU, Cuda()):
        with pytest.raises(VLMFastError, match=f"^VLMFAST_KERNELS='{value}'") as caught:
            use_triton("x", tensor)
        assert "\n" not in str(caught.value) and "decode_mixed" in str(caught.value)


def test_choices_are_parsed() -> None:
    assert parse_choice("") == Choice()
    assert parse_choice("torch") == Choice(forced="torch")
    assert parse_choice("-select") == Choice(off=frozenset({"top_k", "mass_count"}))
    assert parse_choice("-select") is parse_choice("-select")


# --- imports -------------------------------------------------------------------------------------


def test_triton_on_cpu_without_interpreter_raises(gpu: pytest.MonkeyPatch) -> None:
    without_interpreter(gpu)
    gpu.setenv("VLMFAST_KERNELS", "triton")
    with pytest.raises(VLMFastError, match="with TRITON_INTERPRET=1 set before vlmfast is"):
        use_triton("x", CPU)


def test_triton_is_imported_only_if_required() -> None:
    folder = Path(vlmfast.__file__).parent / "kernels"
    files = sorted(f"vlmfast.kernels.{path.stem}" for path in folder.glob("[!_]*.py"))
    load = f"import {', '.join(files)}; print('triton' in sys.modules)"
    again = "[sys.modules.pop(name) for name in list(sys.modules) if 'vlmfast.kernels' in name]"
    code = f"import os, sys; {load}; {again}; os.environ['VLMFAST_KERNELS'] = 'triton'; {load}"
    unwanted = ("TRITON_INTERPRET", "VLMFAST_KERNELS")
    env = {key: value for key, value in os.environ.items() if key not in unwanted}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", str(HAS_TRITON)]


def test_kernels_can_be_defined_without_triton() -> None:
    absent = Absent()

    def kernel() -> int:
        return 3

    assert absent.jit(kernel)() == 3
    assert absent.jit(do_not_specialize=("n",))(kernel)() == 3
    assert absent.language.constexpr is absent


@pytest.mark.parametrize("dim", [8, 72, 80, 96, 128, 256])
def test_supported_head_dimensions(dim: int) -> None:
    check_heads("x", dim)


@pytest.mark.parametrize("dim", [0, 4, 12, 100, 264])
def test_unsupported_head_dimension_raises(dim: int) -> None:
    with pytest.raises(VLMFastError, match=f"x: head dimension {dim}; it takes multiples of 8 up"):
        check_heads("x", dim)


def test_padded_pointer_and_upcast() -> None:
    assert [padded(n) for n in (0, 1, 16, 17, 80, 128)] == [16, 16, 16, 32, 128, 128]
    assert [padded(n, 1) for n in (0, 1, 2, 3)] == [1, 1, 2, 4]
    assert pointer(torch.bfloat16) == "*bf16"
    assert upcast(torch.zeros(1))
    assert upcast(torch.zeros(1, dtype=torch.bfloat16)) == INTERPRETED
