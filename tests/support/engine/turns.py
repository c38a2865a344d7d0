"""The loop of the engine: requests, turns, batches, and what a request holds."""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

import vlmfast.engine
from vlmfast import VLM
from vlmfast.api.session import Sessions
from vlmfast.core.buffers import BufferPool
from vlmfast.engine import attention
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.graphs import cuda_graph as captured_step
from vlmfast.engine.handle import Handle
from vlmfast.engine.kv_layer import KVLayer
from vlmfast.engine.prefix_cache import Key, PrefixCache
from vlmfast.engine.prefixes import Prefix
from vlmfast.engine.restore import Changes
from vlmfast.engine.rounds import Rounds
from vlmfast.engine.scheduler import Batches, Scheduler
from vlmfast.engine.sequence import Phase, Sequence
from vlmfast.engine.tower import cuda_graph as captured_tower

SOURCES = Path(vlmfast.engine.__file__).parent
HANDLES = inspect.getfile(Handle)

__all__ = [
    "BUFFER_RETURNS",
    "HANDLES",
    "REQUEST_END",
    "SOURCES",
    "TURN_END",
    "Phase",
    "Sequence",
    "captured_step",
    "captured_tower",
]

# Functions, in whose lines interrupts come.
BUFFER_RETURNS = (KVLayer.release, KVLayer._give, RowGroup.release)
TURN_END, REQUEST_END = Engine._end_turn, Engine._leave


def renewed(vlm: VLM) -> VLM:
    """The same model, wrapped again: with no requests and nothing kept of former ones."""
    again = copy.copy(vlm)
    adapter = again.adapter = copy.copy(vlm.adapter)
    adapter.kept, adapter.modules, adapter._copies = {}, {}, OrderedDict()
    adapter.pool, again._sessions = BufferPool(), Sessions(adapter)
    again.prefix_cache.limit = vlm.prefix_cache.limit
    return again


@contextmanager
def without_prefix_cache() -> Iterator[None]:
    """All models compute everything again."""
    with mock.patch.object(PrefixCache, "enabled", False):
        yield


# --- requests ------------------------------------------------------------------------------------


def unfinished(vlm: VLM) -> list[Sequence]:
    """The requests that have not ended."""
    return list(vlm.engine._unfinished)


def serves(vlm: VLM) -> bool:
    """Whether a background thread answers requests."""
    return vlm.engine._serving


def left_over(vlm: VLM) -> list[str]:
    """What the engine still holds of requests or of a turn; nothing when all have ended."""
    engine, scheduler = vlm.engine, vlm.engine._scheduler
    held = {
        "batches": list(engine._batches),
        "unfinished": engine._unfinished,
        "arrivals": engine._arrivals,
        "prefills": engine._prefills,
        "waiting": scheduler.waiting,
        "begun": scheduler.begun,
        "active": scheduler.active,
        "turn": engine._turn,
    }
    return [name for name, of in held.items() if of]


def rows_and_active(vlm: VLM) -> tuple[set[Sequence], set[Sequence]]:
    """The requests that have a row in a batch, and those whose answers are being decoded."""
    rows = {sequence for batch in vlm.engine._batches for sequence in batch.rows}
    return rows, set(vlm.engine._scheduler.active)


def paused(vlm: VLM) -> AbstractContextManager[Any]:
    """Until the block ends, requests can be submitted and none is answered."""
    return vlm.engine._changed


@contextmanager
def failing(error: Exception) -> Iterator[None]:
    """Steps of the engine fail, outside of any request."""
    with mock.patch.object(Scheduler, "prompts", side_effect=error):
        yield


@contextmanager
def cancels() -> Iterator[threading.Event]:
    """An event that tells when a request is cancelled."""
    cancel, told = Handle.cancel, threading.Event()

    def noted(handle: Handle) -> None:
        cancel(handle)
        told.set()

    with mock.patch.object(Handle, "cancel", noted):
        yield told


# --- time ----------------------------------------------------------------------------------------


@contextmanager
def clock(vlm: VLM) -> Iterator[list[float]]:
    """The time in seconds: it stands still but where a test adds to it."""
    now = [1000.0]
    vlm.engine._decoded_at, vlm.engine._decode_s = now[0], 0.0  # by another clock
    stands = {"monotonic": lambda: now[0], "perf_counter": lambda: now[0], "sleep": time.sleep}
    with (
        mock.patch("vlmfast.engine.engine.time", SimpleNamespace(**stands)),
        mock.patch("vlmfast.engine.stats.time", SimpleNamespace(**stands)),
    ):
        yield now


@contextmanager
def pause(steps: float) -> Iterator[None]:
    """The least time between decode steps inside of a prompt, in mean decode steps."""
    with mock.patch("vlmfast.engine.engine._PAUSE", steps):
        yield


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A decode step of one batch.

    Attributes
    ----------
    rows : int
    prefilling : int
        Prompts that are being prefilled meanwhile.
    inside : bool
        Whether it comes between two blocks of a prompt.
    autocast : set of bool
        Whether requests of its rows were submitted under autocast.
    """

    rows: int
    prefilling: int
    inside: bool
    autocast: set[bool]


@contextmanager
def decode_steps(
    vlm: VLM,
    begins: Callable[[], Any] = lambda: None,
    block: Callable[[], Any] = lambda: None,
) -> Iterator[list[Step]]:
    """The decode steps of the block.

    Parameters
    ----------
    begins, block : callable
        Called before each decode step, and after each block of a prompt.
    """
    between, run, found, inside = Engine._between, Rounds.run, [], [False]

    def reached(engine: Engine, sequence: Sequence) -> None:
        block()
        inside[0] = True
        between(engine, sequence)
        inside[0] = False

    def decoded(own: Rounds, batch: Batch) -> None:
        autocast = {sequence.mode.autocast is not None for sequence in batch.rows}
        prefilling = len(vlm.engine._scheduler.begun)
        found.append(Step(len(batch.rows), prefilling, inside[0], autocast))
        begins()
        run(own, batch)

    with mock.patch.object(Engine, "_between", reached), mock.patch.object(Rounds, "run", decoded):
        yield found


def part(vlm: VLM, name: str) -> tuple[Any, str]:
    """The object and its method that do a part of a request, for `Served.held`."""
    engine = vlm.engine
    return {
        "step": (engine, "step"),
        "prompt": (engine.prefiller, "shared"),
        "later chunk": (engine.prefiller, "extend"),
        "decode step": (engine._rounds, "run"),
    }[name]


def drafting(batch: Batch) -> list[bool]:
    """Which rows of a decode step have drafters."""
    return [row.drafts is not None for row in batch.rows]


# --- interrupts ----------------------------------------------------------------------------------


@contextmanager
def no_row_leaves(error: BaseException) -> Iterator[None]:
    """An error comes where a row is to leave its batch."""
    with mock.patch.object(Batches, "leave", side_effect=error):
        yield


@contextmanager
def after_turns(act: Callable[[], Any]) -> Iterator[None]:
    """Call a function where a thread has put back what its turn has changed."""
    undo = Changes.undo

    def undone(changes: Changes) -> None:
        undo(changes)
        act()

    with mock.patch.object(Changes, "undo", undone):
        yield


# --- locks and devices ---------------------------------------------------------------------------


def locks_of(model: nn.Module) -> list[Any]:
    """The locks that a thread holds while it runs a model."""
    return attention._locks_of(model)


def locked_configs() -> set[int]:
    """The ids of the configs that have a lock."""
    return set(attention._LOCKS)


@contextmanager
def separate_locks(*vlms: VLM) -> Iterator[None]:
    """Each model has a lock of its own, even if they share a config."""
    own = {id(vlm.model): threading.RLock() for vlm in vlms}
    with mock.patch.object(attention, "_locks_of", lambda model: [own[id(model)]]):
        yield


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Models seem to compute on a device."""
    with mock.patch.object(attention, "device_of", return_value=device):
        yield


# --- memory --------------------------------------------------------------------------------------


@contextmanager
def free_memory(free: Callable[[torch.device], int]) -> Iterator[None]:
    """The free bytes of a device, as the engine sees them."""
    with mock.patch("vlmfast.engine.ledger.free_bytes", free):
        yield


@contextmanager
def grown_by(slots: int) -> Iterator[None]:
    """How many slots full buffers gain."""
    with mock.patch("vlmfast.engine.kv_layer.FREE_SLOTS", slots):
        yield


@contextmanager
def prefixes_cannot_be_copied(error: Exception) -> Iterator[mock.Mock]:
    """Copies fail; the mock has been called where one was tried."""
    with mock.patch.object(Prefix, "clone", side_effect=error) as tried:
        yield tried


def takes_all(vlm: VLM) -> bool:
    """Whether the prefix cache takes an entry of all of its bytes: none of it is in use."""
    cache = vlm.prefix_cache
    return cache.put(Key("x", "", 0), None, cache.limit) is not None
