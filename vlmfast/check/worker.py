"""Checks of the kernels in a process of their own.

A kernel may crash the process, or leave a GPU unusable for it: then the kernel has failed, and
another process checks the ones that follow. On a CPU the process runs Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from .rows import Row, message_of, one_line

_SECONDS = 1200.0  # for all kernels; beyond it, the one that runs has failed


def spawned(
    kernels: Sequence[str],
    device: torch.device,
    *,
    quick: bool,
    seconds: float = _SECONDS,
    module: str = __name__,
) -> Iterator[dict[str, Any]]:
    """Check kernels in other processes.

    Parameters
    ----------
    kernels : sequence of str
        Files in `vlmfast.kernels`.
    device : torch.device
    quick : bool
    seconds : float
        How long one process may take.
    module : str
        Run as ``python -m``, with the arguments of `main`.

    Yields
    ------
    dict
        ``{"row": {...}}`` for each check, ``{"copy_rate": float}`` on CUDA, and ``{"missing":
        reason}`` where the kernels cannot run at all.
    """
    environment = {**os.environ, "VLMFAST_KERNELS": "triton", "TRITON_INTERPRET": "0"}
    if device.type == "cpu":
        # One thread: the interpreter's tensors are small, and threads would wait for each other.
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    left = list(kernels)
    while left:
        before = len(left)
        command = [sys.executable, "-m", module, str(device), str(int(quick)), *left]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds
            )
            out, reason = done.stdout, one_line(done.stderr.strip().rpartition("\n")[2])
            reason = f"the process ended with {done.returncode}: {reason}"
        except subprocess.TimeoutExpired as error:
            out, reason = (error.stdout or b"").decode(errors="replace"), "did not end in time"
        running: str | None = None
        for line in out.splitlines():
            try:
                found = json.loads(line)
            except ValueError:  # printed by a library, or cut
                continue
            if not isinstance(found, dict):
                continue
            if "begins" in found:
                running = found["begins"]
            elif "ends" in found:
                left.remove(found["ends"])
                running = None
            else:
                yield found
                if "missing" in found:
                    return
        # A process that began no kernel, or ended between two of them without an end, cannot run.
        failed = [running] if running else left if len(left) == before else []
        for name in failed:
            yield {"row": asdict(Row(name, False, note=reason))}
        left = [name for name in left if name not in failed]


def main(arguments: Sequence[str]) -> None:
    """Check the kernels that ``arguments`` name: device, quick (0 or 1), files."""
    from vlmfast.kernels import _triton

    from .kernels import check_all, check_guard, measure_copy

    device, quick, kernels = torch.device(arguments[0]), arguments[1] == "1", arguments[2:]
    reason = _triton.limitation(device)
    if reason is None and device.type == "cpu":
        reason = interpreter_fails()
    if reason is not None:
        _say(missing=reason)
        return
    copy_rate = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        copy_rate = measure_copy(device)
        _say(copy_rate=copy_rate)
        row = check_guard("device guard", _triton.use_triton, torch.cuda.current_device())
        _say(row=asdict(row))
    with torch.no_grad():
        for kernel in kernels:
            _say(begins=kernel)
            try:
                for row in check_all(kernel, device, quick=quick, copy_rate=copy_rate):
                    _say(row=asdict(row))
                if device.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:  # a case that cannot be built, or a GPU that is unusable
                _say(row=asdict(Row(kernel, False, note=message_of(error))))
            _say(ends=kernel)
            if device.type == "cuda" and not _usable(device):
                sys.exit(1)  # another process goes on with the next kernel


def _usable(device: torch.device) -> bool:
    """Whether a GPU still computes: no error of a kernel has ended its context."""
    try:
        return bool((torch.ones(1, device=device) + 1).item() == 2)
    except RuntimeError:
        return False


@cache
def interpreter_fails() -> str | None:
    """Why Triton's interpreter cannot run the kernels: not every version works with every NumPy."""
    from vlmfast.kernels.swiglu import swiglu

    from ._probe import count

    try:
        out = torch.zeros(1, dtype=torch.int32)
        count[(1,)](out, 3)
        swiglu(torch.ones(1, 8), torch.ones(1, 8))
    except Exception as error:
        return f"Triton's interpreter does not run here ({message_of(error)})"
    return None


def _say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
