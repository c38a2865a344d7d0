"""Dispatch between Triton and the PyTorch references, without silent fallbacks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from vlmfast.errors import VLMFastError
from vlmfast.kernels import _triton
from vlmfast.kernels._triton import Variant, check_heads, padded, pointer, upcast, use_triton

CPU = torch.zeros(2)


class Cuda:
    """A tensor on a GPU, as far as the dispatch reads it."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(_triton, "triton", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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


def test_old_gpu_raises(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(VLMFastError, match=r"col_stats: needs .* 8\.0 or newer; set VLMFAST_KERN"):
        use_triton("col_stats", Cuda())


def test_missing_triton_raises(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(_triton, "triton", _triton._Absent())
    with pytest.raises(VLMFastError, match="x: Triton is missing; install it"):
        use_triton("x", Cuda())
    gpu.setenv("VLMFAST_KERNELS", "triton")
    with pytest.raises(VLMFastError, match="x: Triton is missing"):
        use_triton("x", CPU)
    gpu.setenv("VLMFAST_KERNELS", "torch")
    assert not use_triton("x", Cuda())


def test_triton_on_cpu_without_interpreter_raises(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(_triton, "INTERPRETED", False)
    gpu.setenv("VLMFAST_KERNELS", "triton")
    with pytest.raises(VLMFastError, match="with TRITON_INTERPRET=1 set before vlmfast is"):
        use_triton("x", CPU)


def test_triton_is_imported_only_if_required() -> None:
    code = (
        "import sys, vlmfast.kernels.col_stats, vlmfast.kernels.select; "
        "print('triton' in sys.modules)"
    )
    unwanted = ("TRITON_INTERPRET", "VLMFAST_KERNELS")
    env = {key: value for key, value in os.environ.items() if key not in unwanted}
    env["CUDA_VISIBLE_DEVICES"] = ""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env=env | more, capture_output=True, text=True, check=True
        ).stdout.strip()
        for more in ({}, {"VLMFAST_KERNELS": "triton"})
    ]
    assert outputs[0] == "False"
    assert outputs[1] == str(not isinstance(_triton.triton, _triton._Absent))


def test_kernels_can_be_defined_without_triton() -> None:
    absent = _triton._Absent()

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


def test_padded_pointer_upcast_and_variant() -> None:
    assert [padded(n) for n in (0, 1, 16, 17, 80, 128)] == [16, 16, 16, 32, 128, 128]
    assert [padded(n, 1) for n in (0, 1, 2, 3)] == [1, 1, 2, 4]
    assert pointer(torch.bfloat16) == "*bf16"
    assert upcast(torch.zeros(1))
    assert upcast(torch.zeros(1, dtype=torch.bfloat16)) == _triton.INTERPRETED
    assert Variant(None, {}, {}) == Variant(None, {}, {}, note="the same")
