"""Private names of the kernels, and what tests of kernels want to know of the engine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from vlmfast.core import env
from vlmfast.engine import attention, forward
from vlmfast.engine.kv_layer import KVLayer
from vlmfast.kernels import _triton, col_stats, compile, coverage, decode_mixed, diversity
from vlmfast.kernels._blocks import TABLE, Blocks, architecture, blocks
from vlmfast.kernels._decode_mixed import _codes as codes
from vlmfast.kernels._triton import (
    INTERPRETED,
    KERNELS,
    Choice,
    check_heads,
    padded,
    parse_choice,
    pointer,
    tl,
    triton,
    upcast,
    use_triton,
)
from vlmfast.kernels._triton import _Absent as Absent

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "KERNELS",
    "LOOP",
    "READ_FOR_ALL",
    "ROWS_OF_LAYERS",
    "TABLE",
    "Absent",
    "Blocks",
    "Choice",
    "architecture",
    "blocks",
    "check_heads",
    "codes",
    "padded",
    "parse_choice",
    "pointer",
    "tl",
    "triton",
    "upcast",
    "use_triton",
]

HAS_TRITON = not isinstance(triton, Absent)

# Where `vlmfast check --launches` finds reads: the loop of the engine; what reads once for all
# methods, and once for a prompt whose images do not follow each other; the slots that are kept.
LOOP = "vlmfast.engine.rounds"
READ_FOR_ALL = {"engine.ledger.check", "core.layout.text_start"}
ROWS_OF_LAYERS = "engine.compress.rows"


# --- the dispatch --------------------------------------------------------------------------------


def forget_warnings() -> None:
    """The process has not warned that a device has no kernels."""
    _triton._warn.cache_clear()


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """One GPU with Triton, as far as the dispatch asks for it."""
    monkeypatch.setattr(_triton, "triton", object())
    monkeypatch.setattr(torch.version, "hip", None)
    # As PyTorch, an error for any other device.
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: [capability][device.index]
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is not installed."""
    monkeypatch.setattr(_triton, "triton", Absent())


def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for a GPU, as without ``TRITON_INTERPRET=1``."""
    monkeypatch.setattr(_triton, "INTERPRETED", False)


def described_kernels(device: torch.device) -> str:
    """What reports of the machine say about the kernels of a GPU."""
    return env._kernels(device)


# --- launches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]


def launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType, run: bool = True) -> list[Launch]:
    """Launches of a file's kernels from now on; without ``run`` they do nothing."""
    found: list[Launch] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                found.append(Launch(self.kernel.__name__, grid, args))
                return self.kernel[grid](*args, **kwargs) if run else None

            return launch

    own = {id(v.kernel): v.kernel for v in compile.variants(module.__name__.split(".")[-1], 90)}
    for name, of in list(sys.modules.items()):  # where the launcher finds it
        if name.startswith("vlmfast.kernels."):
            for key, value in list(vars(of).items()):
                if id(value) in own:
                    monkeypatch.setattr(of, key, Recorded(value))
    return found


def interpreted_memory(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], Any],
    begin: Callable[[Any, tuple[Any, ...]], None],
) -> None:
    """The interpreter reads and writes through what ``make`` returns for its native memory.

    ``begin`` is called with it and the arguments of each launch.
    """
    from triton.runtime import interpreter

    memory, launch = make(interpreter._interpreter), interpreter.GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        begin(memory, (*args, *kwargs.values()))
        launch(executor, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_interpreter", memory)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)


def interpreted_arguments(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], Any]
) -> None:
    """The interpreter uses ``change(arg, value)`` where it made a value of an argument."""
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    monkeypatch.setattr(interpreter, "_implicit_cvt", lambda arg: change(arg, convert(arg)))


def interpreted_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies no arguments back, which on the CPU are used in place."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)


def quicken_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does once what it repeats in every call, to the same end.

    It replaces the functions of ``triton.language`` for a launch, and again in each call of a
    function within a kernel, for which it searches a few hundred names. It also builds its table of
    dtypes for each value.
    """
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    known = functools.cache(dtype_of)
    replaced: set[int] = set()  # modules, by the launch that runs

    @functools.cache
    def modules(fn: Any) -> frozenset[int]:
        return frozenset(id(of) for of in fn.__globals__.values() if of is tl or of is tl.core)

    def patch_once(fn: Any) -> Any:
        if modules(fn) <= replaced:
            return None
        scope = patch(fn)
        if not replaced:
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        replaced.update(modules(fn))
        return scope

    def known_dtype(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, tl.block_type) else of
        return (dtype_of if isinstance(scalar, tl.pointer_type) else known)(scalar)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", known_dtype)


# --- single kernels ------------------------------------------------------------------------------


def parts_of_keys(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """`col_stats` divides the keys among so many programs that there are about ``programs``."""
    monkeypatch.setattr(col_stats, "_PROGRAMS", programs)


def entries_at_once(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    """The reference of `col_stats` computes at most ``entries`` of a map together."""
    monkeypatch.setattr(col_stats, "_ENTRIES_AT_ONCE", entries)


def evaluate_all_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of `cover` evaluates the gains of all columns for each choice."""
    monkeypatch.setattr(coverage, "_lazily", coverage._all)


def parameters_one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`decode_mixed` loads parameters singly; of each segment, how many one load would read."""
    found, find = [], decode_mixed._word

    def one(*args: Any) -> int:
        found.append(find(*args))
        return 1

    monkeypatch.setattr(decode_mixed, "_word", one)
    return found


def rows_of_one_program(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """In `diversity` one program takes matrices of ``rows`` rows, one of several programs 4."""
    limits = {"MAX_MIN_ROWS": rows, "DPP_ROWS": rows, "ROW_TILE": 4, "_TILE": 4}
    for name, value in limits.items():
        monkeypatch.setattr(diversity, name, value)


# --- the engine ----------------------------------------------------------------------------------


def attend_with(
    monkeypatch: pytest.MonkeyPatch, one: Callable[..., Any], tree: Callable[..., Any]
) -> list[int]:
    """The engine calls ``one`` and ``tree`` as its kernels for tokens and for trees of drafts.

    Returns the number of tokens of each mask that it builds.
    """
    masks, build = [], KVLayer.mask
    for of in (attention, forward):
        monkeypatch.setattr(of, "has_kernels", lambda *of: not torch.is_grad_enabled())
    monkeypatch.setattr(attention, "decode_mixed", one)
    monkeypatch.setattr(attention, "tree_verify", tree)

    def mask(layer: KVLayer, tokens: int, *more: Any) -> torch.Tensor:
        masks.append(tokens)
        return build(layer, tokens, *more)

    monkeypatch.setattr(KVLayer, "mask", mask)
    return masks


def without_ancestor_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All trees of drafts have more nodes than a word has bits."""
    monkeypatch.setattr(forward, "WORD", 0)
