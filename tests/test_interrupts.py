"""Ctrl-C anywhere: what the call has changed is restored, and the next answer is right."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from interrupts import Line, interrupted, lines_of, no_hang, state
from tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.engine.batches import Batches

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
def test_an_interrupt_while_a_row_leaves_its_batch(vlm: VLM, call: Call, monkeypatch) -> None:
    wanted = {each: cold(vlm, each) for each in (call, stream)}
    before = state(vlm)

    def leave(self: Batches, sequence: Any) -> None:
        raise KeyboardInterrupt

    with no_hang(), monkeypatch.context() as patch:
        patch.setattr(Batches, "leave", leave)
        with pytest.raises(KeyboardInterrupt):
            call(vlm)
    with no_hang():
        check(vlm, before, wanted, call)


def test_an_interrupt_leaves_no_request(vlm: VLM) -> None:
    """Also one between its submission and the wait for its answer."""
    with vlm.session(IMAGE) as opened:

        def asked(vlm: VLM) -> list[int]:
            return opened.ask(QUESTION, **GIVEN).token_ids

        for call in (stream, session, asked):
            found = lines_of(lambda call=call: call(vlm))
            for line in (line for line in found if Path(line[0]).name == "handle.py"):
                with no_hang(), pytest.raises(KeyboardInterrupt):
                    interrupted(lambda call=call: call(vlm), line)
                load = vlm.engine.load()
                assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0), line


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
