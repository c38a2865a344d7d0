"""Ctrl-C anywhere: what the call has changed is restored, and the next answer is right."""

from __future__ import annotations

import functools
import inspect
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine import turns
from support.interrupts import Line, interrupted, interruptible, lines_of, no_hang, state
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request, VLMFastError

QUESTION, IMAGE = "what is here ?", make_image(seed=0)
GIVEN = {"max_new_tokens": 4, "eos_token_id": None}
PARTS = 16  # in which all lines are tried
SIGNALS = 400

Call = Callable[[VLM], Any]


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava(layers=4))


# --- calls ---------------------------------------------------------------------------------------


def ask(vlm: VLM) -> list[int]:
    return vlm.ask(QUESTION, IMAGE, recipe="hired:0.5+h2o:0.7", **GIVEN).token_ids


def drafted(vlm: VLM) -> list[int]:
    return vlm.ask(QUESTION, IMAGE, recipe="pyramiddrop+draft-ngram", **GIVEN).token_ids


def many(vlm: VLM) -> list[list[int]]:
    recipes = ("none", "kivi:bits=4,group=4,residual=8", "h2o:0.7", "none")
    requests = [
        Request(QUESTION, [make_image(seed=n)], recipe=recipe, generation=GIVEN)
        for n, recipe in enumerate(recipes)
    ]
    return [answer.token_ids for answer in vlm.ask_many(requests, batch_size=3)]


def stream(vlm: VLM) -> list[int]:
    *_, answer = vlm.stream(QUESTION, IMAGE, **GIVEN)
    return answer.token_ids


def session(vlm: VLM) -> list[list[int]]:
    with vlm.session(IMAGE, recipe="hired:0.5") as opened:
        return [opened.ask(text, **GIVEN).token_ids for text in (QUESTION, "and there ?")]


CALLS: tuple[Call, ...] = (ask, drafted, many, stream, session)


def cold(vlm: VLM, call: Call) -> Any:
    vlm.prefix_cache.clear()
    return call(vlm)


def check(vlm: VLM, before: tuple, wanted: dict[Call, Any], *calls: Call) -> None:
    """Everything is restored, and the next answers are right, also those of another thread."""
    assert state(vlm) == before
    for call in (*calls, stream):
        assert call(vlm) == wanted[call]
    load = vlm.engine.load()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    nothing_in_use(vlm)


def nothing_in_use(vlm: VLM) -> None:
    """All entries of the prefix cache can be dropped, and all of its bytes be taken again."""
    cache = vlm.prefix_cache
    cache.free()
    assert cache.stats().entries == 0
    assert turns.takes_all(vlm)
    cache.clear()


# --- each line -----------------------------------------------------------------------------------


@functools.cache
def lines(vlm: VLM) -> dict[Line, Call]:
    """The lines of the engine, with the first call that runs each, also the second time."""
    found: dict[Line, Call] = {}
    for call in CALLS:  # lines that a model runs once cannot be tried
        call(vlm)
    for call in CALLS:
        vlm.prefix_cache.clear()
        for line in lines_of(lambda call=call: call(vlm)):
            found.setdefault(line, call)
    return found


def try_lines(vlm: VLM, chosen: dict[Line, Call]) -> None:
    wanted = {call: cold(vlm, call) for call in CALLS}
    before = state(vlm)
    for line, call in chosen.items():
        vlm.prefix_cache.clear()
        with no_hang():
            with pytest.raises(KeyboardInterrupt):
                interrupted(lambda call=call: call(vlm), line)
            check(vlm, before, wanted, call)


def test_an_interrupt_at_some_lines(vlm: VLM) -> None:
    found = lines(vlm)
    assert len(found) > 1500 and len({Path(file).name for file, _ in found}) > 25
    try_lines(vlm, {line: found[line] for line in random.Random(0).sample(list(found), 5)})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_an_interrupt_at_each_line(vlm: VLM, part: int) -> None:
    def number(line: Line) -> int:
        return zlib.crc32(f"{Path(line[0]).name}:{line[1]}".encode()) % PARTS

    try_lines(vlm, {line: call for line, call in lines(vlm).items() if number(line) == part})


@pytest.mark.parametrize("call", [ask, many], ids=lambda call: call.__name__)
def test_an_interrupt_while_a_row_leaves_its_batch(vlm: VLM, call: Call) -> None:
    # A stream first: its thread may still be leaving when the stream has ended.
    wanted = {each: cold(vlm, each) for each in (stream, call)}
    before = state(vlm)
    with no_hang():
        with turns.no_row_leaves(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            call(vlm)
        check(vlm, before, wanted, call)


def test_an_interrupt_leaves_no_entry_in_use(vlm: VLM, tmp_path: Path) -> None:
    """Also outside of the engine's steps, where a session is measured and saved."""

    def twice() -> None:
        for _ in range(2):
            vlm.ask(QUESTION, IMAGE, **GIVEN)

    with vlm.session(IMAGE, recipe="hired:0.5") as opened:

        def saved() -> None:
            opened.ask(QUESTION, **GIVEN)
            assert opened.bytes
            opened.save(tmp_path / "a.session")

        for call in (twice, saved):
            call()
            vlm.prefix_cache.clear()
            found = lines_of(call, inspect.getfile(type(vlm.prefix_cache)))
            for line in random.Random(0).sample(found, 8):
                vlm.prefix_cache.clear()
                with no_hang(), pytest.raises(KeyboardInterrupt):
                    interrupted(call, line)
                nothing_in_use(vlm)


def test_an_interrupt_returns_no_buffer_twice(vlm: VLM, monkeypatch) -> None:
    """Two requests would write to it. An answer of one token is never in a batch."""
    pool, idle, twice = vlm.adapter.pool, set(), []
    given, taken = pool.give, pool.take

    def give(buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            memory = buffer.untyped_storage().data_ptr()
            if memory in idle:
                twice.append(buffer.shape)
            idle.add(memory)
        given(buffer)

    def take(*shape: Any, **more: Any) -> torch.Tensor:
        buffer = taken(*shape, **more)
        idle.discard(buffer.untyped_storage().data_ptr())
        return buffer

    monkeypatch.setattr(pool, "give", give)
    monkeypatch.setattr(pool, "take", take)
    for line in (line for function in turns.BUFFER_RETURNS for line in lines_in(function)):
        with no_hang(), suppress(KeyboardInterrupt):
            interrupted(lambda: vlm.ask(QUESTION, IMAGE, max_new_tokens=1), line)
        assert not twice, line
    assert idle


def test_an_interrupt_leaves_no_request(vlm: VLM) -> None:
    """Also one between its submission and the wait for its answer."""
    with vlm.session(IMAGE) as opened:

        def asked(vlm: VLM) -> list[int]:
            return opened.ask(QUESTION, **GIVEN).token_ids

        for call in (stream, session, asked):
            for line in lines_of(lambda call=call: call(vlm), turns.HANDLES):
                with no_hang(), pytest.raises(KeyboardInterrupt):
                    interrupted(lambda call=call: call(vlm), line)
                load = vlm.engine.load()
                assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0), line


def test_an_interrupt_leaves_no_submitted_request(vlm: VLM, monkeypatch) -> None:
    """The caller has no handle of it; also while the background thread starts."""
    request = Request(QUESTION, IMAGE, generation=GIVEN)
    wanted, handles = vlm.submit(request).result().token_ids, []

    def submit() -> None:
        handles.append(vlm.submit(request))

    def check() -> None:
        load = vlm.engine.load()
        assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
        submit()
        assert handles.pop().result().token_ids == wanted

    found = lines_of(submit, *map(inspect.getfile, (VLM, type(vlm.engine))), turns.HANDLES)
    handles.pop().close()
    assert len({file for file, _ in found}) == 3
    own = [line for line in found if line[0] == inspect.getfile(VLM)]
    count = 0
    for line in random.Random(0).sample(found, 8) + own[-2:]:
        with no_hang():
            try:
                interrupted(submit, line)
            except KeyboardInterrupt:
                count += 1
            else:  # some lines depend on whether the background thread still runs
                handles.pop().close()
            check()
    assert count > 5

    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with no_hang():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted_start)
            with pytest.raises(KeyboardInterrupt):
                submit()
        check()


def lines_in(function: Callable) -> list[Line]:
    lines, start = inspect.getsourcelines(function)
    return [(inspect.getfile(function), start + number) for number in range(len(lines))]


def beside(vlm: VLM, other: Callable[[], None], line: Line) -> bool:
    """Whether a call that answers requests of another thread is interrupted at a line."""
    thread = threading.Thread(target=other, daemon=True)

    def once(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if thread.ident is None:
            thread.start()
            while not vlm.engine.load().waiting:
                time.sleep(0.001)
        return scores

    given = GIVEN | {"max_new_tokens": 12, "logits_processor": [once]}
    with no_hang():
        try:
            interrupted(lambda: vlm.ask(QUESTION, IMAGE, **given), line)
        except KeyboardInterrupt:
            return True
        finally:
            thread.join()
    return False


def test_an_interrupt_wakes_threads_that_wait(vlm: VLM) -> None:
    """They run the engine next; an interrupt comes while the one that ran it ends."""
    wanted, found, tried = cold(vlm, ask), [], 0
    vlm.engine.max_rows = 1
    # Others have noticed the last step, and wait for the turn.
    with turns.after_turns(lambda: time.sleep(0.05)):
        for line in lines_in(turns.TURN_END)[-3:]:
            tried += beside(vlm, lambda: found.append(ask(vlm)), line)
            assert found.pop() == wanted, line
    vlm.engine.max_rows = 256
    assert tried == 3


def test_an_interrupt_tells_listeners_the_end(vlm: VLM) -> None:
    """Of a request that ends in the thread that is interrupted."""
    request, tried = Request(QUESTION, IMAGE, generation=GIVEN | {"max_new_tokens": 2}), 0
    told: list[bool] = []

    def other() -> None:
        handle = vlm.submit(request)
        handle.listen(lambda: told.append(handle.done))
        with suppress(VLMFastError):  # it was interrupted
            handle.result()

    for line in lines_in(turns.REQUEST_END):
        told.clear()
        tried += beside(vlm, other, line)
        assert told[-1], line
    assert tried > 5


def test_requests_that_wait_survive_an_interrupt(vlm: VLM) -> None:
    """Of another thread; they were not begun."""
    wanted, vlm.engine.max_rows = cold(vlm, ask), 1
    handles: list[Any] = []

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: handles.append(vlm.submit(request)))
        thread.start()
        thread.join()
        raise KeyboardInterrupt

    request = Request(QUESTION, IMAGE, recipe="hired:0.5+h2o:0.7", generation=GIVEN)
    with pytest.raises(KeyboardInterrupt):
        vlm.ask(QUESTION, IMAGE, logits_processor=[interrupt], **GIVEN)
    assert handles[0].result(60).token_ids == wanted
    vlm.engine.max_rows = 256


# --- real signals --------------------------------------------------------------------------------


@contextmanager
def signalled(seconds: float) -> Iterator[None]:
    """Send SIGINT to this process after a time, if the block still runs."""
    done = threading.Event()

    def send() -> None:
        if not done.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    with interruptible():
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@pytest.mark.slow
def test_interrupts_by_real_signals(vlm: VLM) -> None:
    wanted, took = {}, {}
    for call in CALLS:
        cold(vlm, call)
        start = time.perf_counter()
        wanted[call] = cold(vlm, call)
        took[call] = time.perf_counter() - start
    before, chance, count = state(vlm), random.Random(0), 0
    for _ in range(SIGNALS):
        call = chance.choice(CALLS)
        vlm.prefix_cache.clear()
        with no_hang():
            try:
                with signalled(chance.uniform(0, took[call])):
                    assert call(vlm) == wanted[call]
            except KeyboardInterrupt:
                count += 1
            check(vlm, before, wanted, call)
    assert count > 0
