"""The engine: continuous batching of the requests of one model.

A request is submitted from any thread and becomes a sequence. One thread at a time runs the engine,
step by step: a thread that waits for an answer, or else a background thread. A step prefills one
chunk of a prompt, or decodes one token of every row. See docs/engine.md.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from vlmfast.core.protocols import DrafterStage
from vlmfast.errors import ModelError, VLMFastError
from vlmfast.models.base import Adapter

from .attention import switch
from .handle import Handle
from .ledger import Ledger
from .mode import Mode, lasting
from .modules import modules_of
from .prefiller import Prefiller, interleaved
from .prefix_cache import prefix_cache_of
from .restore import Changes
from .rounds import Rounds
from .scheduler import Batches, Scheduler
from .sequence import Phase, Prefill, Sequence
from .speculation import Speculation
from .stats import clock

_PAUSE = 1.0  # least time between two interleaved decode steps, in mean decode steps
_FIRST = 6.0  # how many times longer it is before the first one in a prompt
_PER_WAITING = 3.0  # how many times longer it gets for each prompt that waits, per decoded row
_MOST_PAUSE = 8.0  # how many times longer it is at most
_IDLE = 0.002  # seconds between looks at media that are being read
_INTERRUPTED = "the thread that ran the engine was interrupted; ask again"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Load:
    """What an engine is doing.

    Parameters
    ----------
    waiting, prefilling, decoding : int
        Number of requests.
    steps : int
        Steps so far.
    cache_bytes : int
        Upper bound on the caches of the requests that run, by the length that each may reach.
    max_cache_bytes : float
        Upper bound on the caches of all requests.
    """

    waiting: int
    prefilling: int
    decoding: int
    steps: int
    cache_bytes: int
    max_cache_bytes: float


@dataclass(eq=False)
class Running:
    """One thread's turn to run steps.

    Attributes
    ----------
    changes : Changes
        To the model and to the thread.
    ended : bool
        Whether it has not begun, or ended between two steps.
    error : Exception, optional
        Why it ended elsewhere; an interrupt without one.
    """

    thread: int
    changes: Changes = field(default_factory=Changes)
    ended: bool = True
    error: Exception | None = None


class Engine:
    """Runs the requests of one model; obtained by `engine_of`.

    Parameters
    ----------
    adapter : Adapter
    max_rows : int
        Sequences that are decoded together at most.
    max_cache_bytes : int, optional
        Upper bound on the caches of all running sequences, by the length that each may reach. By
        default a sequence is admitted if its cache fits into the free memory of the device.
    prefill_chunk_size : int, optional
        Rows of a prompt that are prefilled at once; all by default. A request may set its own.

    Attributes
    ----------
    prefiller : Prefiller
    """

    def __init__(
        self,
        adapter: Adapter,
        max_rows: int = 256,
        max_cache_bytes: int | None = None,
        prefill_chunk_size: int | None = None,
    ) -> None:
        self.adapter, self.max_rows, self.max_cache_bytes = adapter, max_rows, max_cache_bytes
        self.prefill_chunk_size = prefill_chunk_size
        self.prefiller = Prefiller(adapter)
        self._reset()

    def _reset(self) -> None:
        """Forget all requests and threads."""
        self._process, self._broken = os.getpid(), False
        # Blocks take the lock itself: an interrupt cannot come between it and the block.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Guarded by the lock:
        self._turn: Running | None = None  # of the thread that runs steps
        self._serving = False  # whether the background thread runs
        self._arrivals: list[Sequence] = []
        self._unfinished: set[Sequence] = set()
        self._count = self._steps = 0
        self._thread: threading.Thread | None = None
        # Only used by the thread that runs steps:
        self._scheduler, self._batches, self._rounds = Scheduler(), Batches(), Rounds(self.adapter)
        self._ledger = Ledger(self.adapter)
        self._prefills: dict[Sequence, Prefill] = {}  # of the sequences that are prefilled
        self._decoded_at, self._decode_s = 0.0, 0.0  # end and mean time of decode steps
        self._interrupted = False  # whether the next decode step in this prompt is not the first

    # --- requests --------------------------------------------------------------------------------

    def submit(
        self,
        sequence: Sequence,
        finish: Callable[[Sequence], Result],
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Handle[Result]:
        """Queue a sequence; any thread may call this. Nothing runs until the handle is used.

        Parameters
        ----------
        finish : callable
            Makes the result of the handle from the finished sequence.
        priority : int
            Lower values are answered first.
        deadline : float, optional
            Seconds from now after which the request is given up.

        Raises
        ------
        ModelError
            When its cache can never fit into the memory.
        VLMFastError
            When a limit of the engine is not a positive integer.
        """
        self._check_process()
        self._check_limits()
        with self._lock:
            self._check_not_inside()
        self._ledger.check(sequence, self.max_cache_bytes)
        if self._unfinished:
            sequence.inputs.wait()
        sequence.priority, sequence.mode = priority, Mode.current(self.adapter.device)
        sequence.bypassed = prefix_cache_of(self.adapter).is_bypassed
        sequence.submitted = time.monotonic()
        sequence.deadline = math.inf if deadline is None else sequence.submitted + deadline
        try:
            with self._lock:
                sequence.arrived = self._count
                self._count += 1
                self._arrivals.append(sequence)
                self._unfinished.add(sequence)
                self._changed.notify_all()
            return Handle(self, sequence, finish)
        except BaseException:  # interrupted: no one waits for it
            sequence.cancelled = True
            with self._lock:
                if sequence in self._arrivals:
                    self._arrivals.remove(sequence)
                    self._unfinished.discard(sequence)
            raise

    def load(self) -> Load:
        """What the engine is doing; any thread may call this."""
        with self._lock:
            phases = [sequence.phase for sequence in self._unfinished]
            running = [each for each in self._unfinished if each.phase is not Phase.WAITING]
            steps = self._steps
        return Load(
            phases.count(Phase.WAITING),
            phases.count(Phase.PREFILL),
            phases.count(Phase.DECODE),
            steps,
            self._ledger.bytes(running),
            self._ledger.most_bytes(self.max_cache_bytes),
        )

    def answer_many(
        self, sequences: Iterator[Sequence], at_once: int, *, keep_errors: bool = False
    ) -> Generator[Sequence, None, None]:
        """Yield sequences as they finish; up to ``at_once`` of them are in the engine.

        A prompt is prefilled as soon as a row is free, one at a time and without padding.

        Parameters
        ----------
        keep_errors : bool
            Whether a sequence that failed is yielded with its ``error``. Otherwise the error is
            raised, and the other sequences are cancelled.
        """
        running: list[Handle[Sequence]] = []
        exhausted = False
        try:
            while True:
                while not exhausted and len(running) < at_once:
                    if (sequence := next(sequences, None)) is None:
                        exhausted = True
                    else:
                        try:
                            running.append(self.submit(sequence, lambda own: own))
                        except ModelError as error:
                            sequence.fail(error)
                            if not keep_errors:
                                raise sequence.numbered from error
                            yield sequence
                if not running:
                    return
                # The first row that is free is taken by the next sequence.
                self.run(partial(_enough, running, exhausted, keep_errors))
                ended = [handle for handle in running if handle.done]
                running = [handle for handle in running if not handle.done]
                for handle in ended:
                    sequence = handle.sequence
                    if sequence.error is not None and not keep_errors:
                        raise sequence.numbered
                    yield sequence
        finally:
            for handle in running:
                handle.cancel()
            for handle in running:
                handle.close()
            self.settle()

    # --- threads ---------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], end: float = math.inf) -> bool:
        """Run the engine until a condition is met, or wait for the thread that runs it.

        Parameters
        ----------
        until : callable
            Evaluated after each step.
        end : float
            Time at which to give up, by `time.monotonic`.

        Returns
        -------
        bool
            Whether the condition was met.
        """
        self._check_process()
        # What blocks of a step have set in this context goes with it, however they end.
        return contextvars.copy_context().run(self._run, until, end)

    def _run(self, until: Callable[[], bool], end: float) -> bool:
        turn = Running(threading.get_ident())
        try:
            try:
                while self._take_turn(turn, until, end):
                    modules = modules_of(self.adapter, "model", self.adapter.model)
                    switch(self.adapter.model, modules, turn.changes)
                    while self._unfinished and not until():
                        if time.monotonic() > end:
                            break
                        if not self.step():
                            time.sleep(_IDLE)
                    turn.ended = True
                    self._end_turn(turn)
                return until()
            except Exception as error:  # requests catch their own
                turn.error = error
                raise
            finally:
                self._end_turn(turn)
        finally:  # again, where an interrupt has ended it
            self._end_turn(turn)

    def _take_turn(self, turn: Running, until: Callable[[], bool], end: float) -> bool:
        """Wait for the turn to run steps. Returns ``False`` where nothing is left to be run."""
        with self._lock:
            while not until() and (self._turn is not None or not self._unfinished):
                self._check_not_inside()
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(None if math.isinf(left) else left)
            if until() or time.monotonic() > end:
                return False
            turn.ended, self._turn = False, turn
            return True

    def _end_turn(self, turn: Running) -> None:
        """Let other threads run steps; where it was cut short, end what it has worked on.

        It may be called again.
        """
        if self._turn is not turn:
            return
        turn.changes.interrupted = not turn.ended and turn.error is None
        turn.changes.undo()
        if not turn.ended:
            self._abandon(turn.error)
            turn.ended = True
        with self._lock:
            self._changed.notify_all()  # again, where an interrupt has ended it
            self._turn = None

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for the background thread, see `start`, until a condition is met."""
        with self._lock:
            self._check_not_inside()
            self._changed.wait_for(until)

    def notify(self) -> None:
        """Make all waiting threads evaluate their conditions."""
        with self._lock:
            self._changed.notify_all()

    def start(self) -> None:
        """Run the engine in a background thread that ends when all requests have ended."""
        self._check_process()
        with self._lock:
            if not self._serving and self._unfinished:
                self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="vlmfast", daemon=True)
        try:
            self._serving = True
            self._thread.start()
        except BaseException:  # the thread says so itself where it has begun
            self._serving = False
            raise

    def serve(self, until: Callable[[], bool]) -> None:
        """Run the engine in this thread, and wait for requests when there are none.

        A thread that lasts keeps PyTorch's own threads; requests start no thread of their own then.

        Parameters
        ----------
        until : callable
            Whether to return; evaluated after each step, and on `notify`.
        """
        self._check_process()
        try:
            self._serving = True
            while not until():
                with suppress(Exception):  # which the requests concerned have as their error
                    self.run(until)
        finally:
            with self._lock:
                self._serving = False
                self._changed.notify_all()

    def _serve(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():  # its start was interrupted
                return
            self._serving = True
        while True:
            with suppress(BaseException):  # which the requests concerned have as their error
                self.run(lambda: not self._unfinished)
            with self._lock:
                if not self._unfinished:
                    self._serving = False
                    return

    def _abandon(self, error: Exception | None) -> None:
        """End all requests by an error that leaves the engine in an unknown state.

        ``None`` for an interrupt, which requests that wait survive. It may be called again.
        """
        with self._lock:
            lost = [each for each in self._unfinished if error or each.phase is not Phase.WAITING]
            self._arrivals = sorted(self._unfinished.difference(lost), key=attrgetter("arrived"))
            self._scheduler, self._batches, self._prefills = Scheduler(), Batches(), {}
        for sequence in lost:
            if not sequence.finished:
                sequence.fail(error or VLMFastError(_INTERRUPTED))
            self._leave(sequence)

    def settle(self) -> None:
        """Wait for the end of the background thread, where it has nothing left to do."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        while thread.is_alive() and not self._unfinished:
            thread.join(_IDLE)

    def _check_not_inside(self) -> None:
        if self._turn is not None and self._turn.thread == threading.get_ident():
            raise VLMFastError(
                "a processor, criterion or streamer of a request asked the model that is answering "
                "it; ask it before or afterwards"
            )

    def _check_process(self) -> None:
        """After a fork, the requests of the parent are the parent's.

        Raises
        ------
        VLMFastError
            When a thread that does not exist in this process was using the model.
        """
        if self._process != os.getpid():
            lost, broken = set(self._unfinished), self._turn is not None
            self._reset()
            self._broken = broken
            for sequence in lost:
                sequence.fail(VLMFastError("the request belongs to the process before the fork"))
                sequence.call_on_end()
                sequence.phase = Phase.FINISHED
        if self._broken:
            raise VLMFastError(
                "this process was forked while the model was answering; load the model again"
            )

    # --- steps -----------------------------------------------------------------------------------

    @lasting
    def step(self) -> bool:
        """Prefill one chunk of a prompt, or decode one token of every row.

        Returns
        -------
        bool
            Whether there was anything to do.
        """
        self._steps += 1
        self._receive()
        if any(map(self._read, self._scheduler.prompts(self._admits))):
            return True
        if self._scheduler.active:
            self._decode()
            return True
        return False

    def _receive(self) -> None:
        """Take submitted sequences, and end those that must end."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        scheduler = self._scheduler
        for sequence in arrivals:
            scheduler.add(sequence)
        self._end_those_that_must([*scheduler.waiting, *scheduler.running])

    def _end_those_that_must(self, sequences: Many[Sequence]) -> None:
        """End sequences that were cancelled or have reached their deadline."""
        for sequence in sequences:
            if sequence.must_end:
                self._end(sequence, sequence.stopped)

    def _read(self, sequence: Sequence) -> bool:
        """Prefill the next chunk of a prompt. Returns whether there was anything to do."""
        assert sequence.mode is not None
        try:
            if sequence not in self._prefills:
                self._begin(sequence)
            with sequence.mode.entered(), self._as_submitted(sequence):
                try:
                    with interleaved(self.adapter, partial(self._between, sequence)):
                        return next(self._prefills[sequence])
                except StopIteration as end:
                    logits = end.value
                self._answer(sequence, logits)
        except Exception as error:
            sequence.fall_short(error)
            self._leave_step(sequence, len(self._scheduler.running) - 1)
        return True

    def _begin(self, sequence: Sequence) -> None:
        """Start the prefill of a prompt."""
        device = self.adapter.device
        self._check_device(sequence)
        if not sequence.stats.preemptions:
            sequence.stats.queue_s = time.monotonic() - sequence.submitted
        sampler = sequence.sampler
        if sampler.seed is None and sampler.sampled and sequence.watch is not None:
            sampler.seed = int(torch.randint(2**62, ()))
        if device.type == "cuda" and not self._scheduler.active:
            torch.cuda.reset_peak_memory_stats(device)
        # Chunks are set for short gaps: such a prompt is interrupted like a long one.
        self._interrupted = self._chunk_size(sequence) is not None
        self._prefills[sequence] = self._whole(sequence)

    def _whole(self, sequence: Sequence) -> Prefill:
        """Prefill a prompt, and feed again what a sequence had emitted when it was preempted."""
        shared = partial(self.prefiller.shared, size=self._chunk_size(sequence))
        logits = yield from (sequence.prefill or shared)(sequence)
        if sequence.emitted:
            sequence.stats.read()  # of the cache as it is before decoding
        for token in sequence.sampler.tokens[:-1]:
            assert sequence.group is not None
            sequence.group.next(torch.tensor([[token]], device=self.adapter.device))
            yield True
        return logits

    def _chunk_size(self, sequence: Sequence) -> int | None:
        return sequence.sampler.config.prefill_chunk_size or self.prefill_chunk_size

    def _answer(self, sequence: Sequence, logits: Tensor | None) -> None:
        """Emit the first token after a prompt, and decode the sequence from now on."""
        if logits is not None and not sequence.emitted:
            self._rounds.take(sequence, logits)
        if logits is None or sequence.done:
            self._end(sequence)
            return
        self._draft(sequence)
        self._batches.join(sequence, expected=len(self._unfinished))
        del self._prefills[sequence]
        self._scheduler.activate(sequence)
        self.notify()

    def _draft(self, sequence: Sequence) -> None:
        """Start the recipe's drafters."""
        if sequence.watch is not None:
            stages = sequence.recipe.acting(DrafterStage)
            sequence.drafts = Speculation(self.adapter, sequence, stages)

    def _between(self, sequence: Sequence) -> None:
        """Between two blocks of a forward pass over a prompt."""
        if sequence.must_end:
            raise sequence.stopped
        if not self._scheduler.streams or self.adapter.decoding == "compile":
            return
        if time.monotonic() - self._decoded_at >= self._pause * self._decode_s:
            self._end_those_that_must(list(self._scheduler.active))
            self._decode()
            self._interrupted = True

    @property
    def _pause(self) -> float:
        """Least time between two interleaved decode steps, in mean decode steps.

        A decode step takes about as long with the row of this prompt as without it. Short prompts
        are therefore not interrupted. Where more prompts wait than rows are decoded, prompts get
        more of the time.
        """
        waiting, active = len(self._scheduler.waiting), len(self._scheduler.active)
        first = 1.0 if self._interrupted else _FIRST
        longer = min(1.0 + _PER_WAITING * waiting / max(active, 1), _MOST_PAUSE)
        return _PAUSE * max(first, longer)

    def _decode(self) -> None:
        """Decode one token of every row."""
        start = time.monotonic()
        for batch in list(self._batches):
            rows = list(batch.rows)
            mode = rows[0].mode
            assert mode is not None
            try:
                self._check_device(rows[0])
                with mode.entered():
                    self._rounds.run(batch)
            except Exception as error:
                for sequence in rows:
                    sequence.keeps_cache &= not sequence.done  # which may lack its last tokens
                    if not sequence.done:
                        sequence.fall_short(error)
            others = len(self._scheduler.running) - sum(each.short for each in rows)
            for sequence in rows:
                if sequence.done:
                    self._leave_step(sequence, others or len(rows) - 1)
        self._decoded_at = time.monotonic()
        spent = self._decoded_at - start
        self._decode_s = spent if not self._decode_s else 0.9 * self._decode_s + 0.1 * spent
        self.notify()

    def _leave_step(self, sequence: Sequence, others: int) -> None:
        """A sequence that is done ends; where memory ran short beside ``others``, it waits again.

        Its prompt and what it has emitted are computed again when it is admitted, beside fewer
        others. It ends where it has run short alone, twice in succession.
        """
        if not sequence.short or (sequence.ran_short_alone and not others):
            self._end(sequence)
            return
        sequence.ran_short_alone = not others
        self._forget(sequence, keep=False)
        self.prefiller.release(sequence)
        sequence.restart()
        sequence.inputs.wait()
        self._rounds = Rounds(self.adapter)  # which knows how far the row had come
        self._ledger.ran_short(others)
        self._scheduler.add(sequence)

    def _forget(self, sequence: Sequence, *, keep: bool) -> None:
        """Nothing works on a sequence any more. ``keep``: its cache, where it keeps that."""
        if (prefill := self._prefills.pop(sequence, None)) is not None:
            prefill.close()
        self._scheduler.remove(sequence)
        self._batches.leave(sequence, keep=keep)

    def _end(self, sequence: Sequence, error: Exception | None = None) -> None:
        """A sequence leaves the engine."""
        if error is not None:
            sequence.fail(error)
        self._forget(sequence, keep=sequence.keeps_cache)
        device = self.adapter.device
        if sequence.first is not None:
            sequence.stats.finish(
                sequence.count, sequence.begin, sequence.first, clock(device), device
            )
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """The end of a sequence that nothing works on any more. It may be called again."""
        with self._as_submitted(sequence):
            sequence.call_on_end()
        if not sequence.keeps_cache:
            self.prefiller.release(sequence)
        sequence.let_go()
        sequence.phase = Phase.FINISHED
        sequence.call_listener()
        with self._lock:
            self._unfinished.discard(sequence)
            if not any(each.stats.preemptions for each in self._unfinished):
                self._ledger.most_rows = None
            self._changed.notify_all()

    def _as_submitted(self, sequence: Sequence) -> AbstractContextManager[None]:
        """The prefix cache as the thread that submitted a sequence wants it, not this one."""
        return prefix_cache_of(self.adapter).bypassed(sequence.bypassed)

    # --- memory and devices ----------------------------------------------------------------------

    def _admits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can run beside those that run."""
        running, bound = self._scheduler.running, self.max_cache_bytes
        return len(running) < self.max_rows and self._ledger.admits(sequence, running, bound)

    def _check_limits(self) -> None:
        for name in ("max_rows", "max_cache_bytes", "prefill_chunk_size"):
            if (value := getattr(self, name)) is None and name != "max_rows":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise VLMFastError(f"{name} must be a positive integer, not {value!r}")

    def _check_device(self, sequence: Sequence) -> None:
        assert sequence.mode is not None
        if sequence.mode.device != self.adapter.device:
            raise ModelError(
                f"the model was moved from {sequence.mode.device} to {self.adapter.device} while a "
                "request was answered"
            )


def _enough(handles: Many[Handle], all_: bool, keep_errors: bool) -> bool:
    """Whether one has ended, or ``all_``; or one has failed and errors are not kept."""
    done = [handle.sequence for handle in handles if handle.done]
    failed = not keep_errors and any(sequence.error is not None for sequence in done)
    return failed or (len(done) == len(handles) if all_ else bool(done))


def engine_of(adapter: Adapter) -> Engine:
    """The engine of a model; there is one for each adapter."""
    engine = adapter.kept.get("engine")
    return engine if engine is not None else adapter.kept.setdefault("engine", Engine(adapter))
