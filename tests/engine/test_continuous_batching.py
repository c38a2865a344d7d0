"""Requests in company: handles, priorities, cancels, deadlines, failures, interleaved prefill."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from support.engine import turns
from support.engine.batched import CountingPool
from support.engine.turns import Phase
from support.fake_drafters import Drafting, Knows
from support.models import shared
from support.tiny_families import STATES, builders, first
from support.tiny_models import build_llava, make_image
from vlmfast import (
    VLM,
    Answer,
    DeadlineExceeded,
    ModelError,
    RecipeError,
    Request,
    RequestCancelled,
    VLMFastError,
)
from vlmfast.api.generation import gate
from vlmfast.api.request import messages_of, sequence_of, sequence_of_request, submitted
from vlmfast.core.protocols import DecodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree

QUESTION = "what is here ?"
GUARD = 60.0  # seconds; only a test that fails waits as long


def request(image: int = 0, recipe: Any = None, tokens: int = 6, **generation: Any) -> Request:
    generation = {"max_new_tokens": tokens, "eos_token_id": None} | generation
    return Request(QUESTION, [make_image(seed=image)], recipe=recipe, generation=generation)


def alone(vlm: VLM, r: Request) -> list[int]:
    return vlm.ask(r.question, r.images, recipe=r.recipe, **r.generation).token_ids


def assert_idle(vlm: VLM, threads: set[threading.Thread]) -> None:
    """Nothing is left of any request."""
    assert not turns.left_over(vlm)
    assert set(threading.enumerate()) <= threads
    assert vlm.model.config.text_config._attn_implementation == "sdpa"
    assert not any(layer._forward_pre_hooks for layer in vlm.adapter.decoder.layers)
    assert not any(block._forward_pre_hooks for block in vlm.adapter.vision_blocks())
    if isinstance(vlm.adapter.pool, CountingPool):
        vlm.prefix_cache.clear()  # what is left is in use
        assert vlm.adapter.pool.out == 0


def counting() -> VLM:
    """A model that counts its buffers."""
    vlm = turns.renewed(shared(build_llava, layers=4, dtype=torch.float64))
    vlm.adapter.pool = CountingPool()
    return vlm


@pytest.fixture
def vlm() -> Iterator[VLM]:
    vlm = counting()
    threads = set(threading.enumerate())
    yield vlm
    assert_idle(vlm, threads)


class Acts(LogitsProcessor):
    """Calls a function at one token of an answer."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        self.at, self.act, self.calls = at, act, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.calls == self.at:
            self.act()
        self.calls += 1
        return scores


def acting(at: int, act: Callable[[], Any]) -> LogitsProcessorList:
    return LogitsProcessorList([Acts(at, act)])


def waits(at: int, event: threading.Event) -> LogitsProcessorList:
    """Holds an answer at one of its tokens until an event; without the event it fails."""

    def wait() -> None:
        assert event.wait(GUARD), "the event has not happened"

    return acting(at, wait)


def raises(error: BaseException) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error

    return act


# --- handles -------------------------------------------------------------------------------------


def test_a_listener_hears_each_token_and_the_end(vlm: VLM) -> None:
    expected = alone(vlm, request(1))
    heard: list[tuple[int, bool]] = []
    ended = threading.Event()
    handle = vlm.submit(request(1))

    def listen() -> None:
        heard.append((handle.sequence.count, handle.done))
        if handle.done:
            ended.set()

    handle.listen(listen)
    assert ended.wait(GUARD)
    assert handle.result().token_ids == expected
    assert heard[-1] == (6, True)
    assert {1, 2, 3, 4, 5} <= {count for count, _ in heard[1:]}


def test_a_listener_hears_of_errors(vlm: VLM) -> None:
    broken = request(1, logits_processor=acting(2, raises(RuntimeError("broken"))))
    ended = threading.Event()
    handle = vlm.submit(broken)
    handle.listen(lambda: handle.done and ended.set())
    assert ended.wait(GUARD)
    with pytest.raises(RuntimeError, match="broken"):
        handle.result()
    cancelled = vlm.submit(request(2, tokens=500))
    gone = threading.Event()
    cancelled.listen(lambda: cancelled.done and gone.set())
    cancelled.cancel()
    assert gone.wait(GUARD)
    with pytest.raises(RequestCancelled):
        cancelled.result()


def test_a_listener_that_fails_ends_its_request_alone(vlm: VLM) -> None:
    other = vlm.submit(request(2))
    handle = vlm.submit(request(1))

    def listen() -> None:
        if handle.sequence.count == 2:
            raise RuntimeError("deaf")

    handle.listen(listen)
    with pytest.raises(RuntimeError, match="deaf"):
        handle.result()
    assert other.result().token_ids == alone(vlm, request(2))


def test_load_counts_requests_by_phase(vlm: VLM) -> None:
    before = vlm.engine.load()
    assert (before.waiting, before.prefilling, before.decoding, before.cache_bytes) == (0, 0, 0, 0)
    vlm.engine.max_rows = 1
    release = threading.Event()
    first = vlm.submit(request(1, logits_processor=waits(3, release)))
    second = vlm.submit(request(2))
    while vlm.engine.load().decoding == 0:
        time.sleep(0.001)
    load = vlm.engine.load()
    assert (load.waiting, load.prefilling, load.decoding) == (1, 0, 1)
    assert 0 < load.cache_bytes < load.max_cache_bytes and load.steps > before.steps
    release.set()
    assert first.result().token_ids and second.result().token_ids
    after = vlm.engine.load()
    assert (after.waiting, after.decoding, after.cache_bytes) == (0, 0, 0)


def test_default_length(vlm: VLM, monkeypatch) -> None:
    """It counts where the request sets none, and is cut to the positions of the model."""
    open_ended = Request(QUESTION, [make_image()], generation={"eos_token_id": None})
    assert len(vlm.submit(open_ended, default_new_tokens=5).result().token_ids) == 5
    set_length = request(tokens=3)
    assert len(vlm.submit(set_length, default_new_tokens=5).result().token_ids) == 3
    most = 100
    monkeypatch.setattr(vlm.model.config.text_config, "max_position_embeddings", most)
    found = vlm.submit(open_ended, default_new_tokens=10 * most).result()
    assert 5 < len(found.token_ids) < most
    for wrong in (0, -1, 1.5, None, True):
        with pytest.raises(VLMFastError, match="default_new_tokens"):
            vlm.submit(open_ended, default_new_tokens=wrong)


def test_iterating_gives_the_text_in_pieces(vlm: VLM) -> None:
    for r in (request(0, tokens=20), request(1, "snapkv:0.7", tokens=9)):
        *pieces, answer = vlm.submit(r)
        assert isinstance(answer, Answer)
        assert "".join(pieces).strip() == answer.text
        assert answer.token_ids == alone(vlm, r)


def test_pieces_come_while_the_answer_is_generated(tiny: VLM) -> None:
    threads, received = set(threading.enumerate()), threading.Event()
    generation = {"max_new_tokens": 40, "eos_token_id": None}
    generation["logits_processor"] = waits(20, received)
    pieces = []
    for piece in tiny.submit(Request("describe the image", make_image(), generation=generation)):
        pieces.append(piece)
        received.set()  # without which the second half is never generated
    assert len(pieces) > 4 and len(pieces[-1].token_ids) == 40
    assert_idle(tiny, threads)


def test_an_answer_that_is_complete_can_still_be_iterated(vlm: VLM) -> None:
    handle = vlm.submit(request())
    answer = handle.result()
    *pieces, last = handle
    assert last is answer and "".join(pieces).strip() == answer.text


def test_result_gives_up_after_its_timeout(vlm: VLM) -> None:
    inside, go = threading.Event(), threading.Event()
    processors = LogitsProcessorList([Acts(0, inside.set), *waits(1, go)])
    handle = vlm.submit(request(logits_processor=processors))
    assert inside.wait(GUARD)  # another thread runs the engine
    with pytest.raises(TimeoutError, match=r"not complete after 0\.05 s"):
        handle.result(timeout=0.05)
    assert not handle.done
    go.set()
    assert handle.result(timeout=GUARD).token_ids == alone(vlm, request())


def test_requests_are_submitted_from_many_threads(vlm: VLM) -> None:
    requests = [request(n % 4, (None, "hired:0.5", "kivi:residual=8,group=4")[n % 3], 5 + n % 3)
                for n in range(9)]  # fmt: skip
    wanted = [alone(vlm, r) for r in requests]
    got: list = [None] * len(requests)

    def work(number: int) -> None:
        got[number] = vlm.submit(requests[number]).result().token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == wanted


def ends_in_order(vlm: VLM, priorities: list[int]) -> list[int]:
    """The numbers of requests in the order in which they end, one at a time."""
    vlm.engine.max_rows, ended = 1, []

    class Ends:
        def __init__(self, number: int) -> None:
            self.number = number

        def put(self, tokens: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            ended.append(self.number)

    with turns.paused(vlm):  # until all are submitted, nothing runs
        handles = [
            vlm.submit(request(streamer=Ends(n), tokens=2), priority=p)
            for n, p in enumerate(priorities)
        ]
    for handle in handles:
        handle.result()
    return ended


def test_requests_are_answered_by_priority_and_then_in_order(vlm: VLM) -> None:
    assert ends_in_order(vlm, [0, 0, 0]) == [0, 1, 2]
    assert ends_in_order(vlm, [1, 0, -1, 0]) == [2, 1, 3, 0]


def test_queue_time_is_reported(vlm: VLM) -> None:
    """By a clock that stands still but for five seconds inside the first answer."""
    vlm.engine.max_rows = 1
    with turns.clock(vlm) as now:
        passes = acting(2, lambda: now.__setitem__(0, now[0] + 5.0))
        with turns.paused(vlm):
            handles = [vlm.submit(request(logits_processor=passes)), vlm.submit(request())]
        assert [handle.result().stats.queue_s for handle in handles] == [0.0, 5.0]


@pytest.mark.parametrize(("name", "value"), [("priority", 0.5), ("priority", True), ("deadline", 0),
                                         ("deadline", "1"), ("deadline", math.nan)])  # fmt: skip
def test_wrong_arguments_are_refused(vlm: VLM, name: str, value: Any) -> None:
    with pytest.raises(VLMFastError, match=f"^{name}="):
        vlm.submit(request(), **{name: value})


# --- ends ----------------------------------------------------------------------------------------


def phases(vlm: VLM) -> dict[Phase, Callable[[Callable[[Any], None]], Any]]:
    """Handles whose request is ended by a function while it is in a phase."""

    def waiting(end: Callable[[Any], None]) -> Any:
        handle = vlm.submit(request())
        end(handle)
        return handle

    def prefill(end: Callable[[Any], None]) -> Any:
        holder: list = []

        def act(*_: Any) -> None:
            hook.remove()
            end(holder[0])

        hook = vlm.adapter.decoder.layers[1].register_forward_pre_hook(act)
        sequence_handle = vlm.submit(request())
        holder.append(sequence_handle)
        return sequence_handle

    def decode(end: Callable[[Any], None]) -> Any:
        holder: list = []
        ready = threading.Event()

        def act() -> None:
            assert ready.wait(GUARD)
            end(holder[0])

        holder.append(vlm.submit(request(tokens=20, logits_processor=acting(3, act))))
        ready.set()
        return holder[0]

    return {Phase.WAITING: waiting, Phase.PREFILL: prefill, Phase.DECODE: decode}


def cancel(handle: Any) -> None:
    handle.cancel()


def expire(handle: Any) -> None:
    handle.sequence.deadline = 0.0


@pytest.mark.cases(2)
@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILL, Phase.DECODE])
@pytest.mark.parametrize(
    ("end", "error"),
    [(cancel, RequestCancelled), (expire, DeadlineExceeded)],
    ids=["cancel", "expire"],
)
def test_a_request_ends_early_in_each_phase(vlm: VLM, phase: Phase, end: Any, error: type) -> None:
    wanted, ended_in = alone(vlm, request(1, tokens=12)), []
    with turns.paused(vlm):  # until both are submitted, nothing runs
        ended, other = phases(vlm)[phase](end), vlm.submit(request(1, tokens=12))
        ended.sequence.on_end = lambda sequence: ended_in.append(sequence.phase)
    with pytest.raises(error, match=r"after \d+ tokens of its answer"):
        ended.result()
    assert ended_in == [phase]
    assert ended.sequence.count == (4 if phase is Phase.DECODE else 0)
    assert other.result().token_ids == wanted
    ended.cancel()  # has no effect any more
    assert ended.done


def test_closing_a_stream_ends_its_request(tiny: VLM) -> None:
    threads = set(threading.enumerate())
    with turns.cancels() as cancelled:
        stream = tiny.stream("describe the image", make_image(), max_new_tokens=40,
                             eos_token_id=None, logits_processor=waits(6, cancelled))  # fmt: skip
        assert isinstance(next(stream), str)
        (sequence,) = turns.unfinished(tiny)
        stream.close()
    assert isinstance(sequence.error, RequestCancelled) and 0 < sequence.count <= 7
    assert_idle(tiny, threads)


# --- failures ------------------------------------------------------------------------------------


class Stops(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise KeyError("a criterion")


class Streams:
    def put(self, tokens: torch.Tensor) -> None:
        raise KeyError("a streamer")

    def end(self) -> None:
        pass


FAILING = {
    "a processor": {"logits_processor": acting(2, raises(KeyError("a processor")))},
    "a criterion": {"stopping_criteria": [Stops()]},
    "a streamer": {"streamer": Streams()},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", FAILING)
def test_an_error_belongs_to_its_own_request(vlm: VLM, what: str) -> None:
    others = [request(1, tokens=9), request(2, "h2o:0.6", tokens=9)]
    wanted = [alone(vlm, r) for r in others]
    handles = [vlm.submit(r) for r in (others[0], request(0, tokens=9, **FAILING[what]), others[1])]
    with pytest.raises(KeyError, match=what):
        handles[1].result()
    assert [handles[n].result().token_ids for n in (0, 2)] == wanted


@dataclass(frozen=True)
class FailingStage(DecodeStage):
    """Raises at the third token of an answer."""

    name: ClassVar[str] = "test-failing-stage"
    every: ClassVar[int] = 2

    def step(self, slots: Any, layer: int) -> None:
        if bool((slots.length > slots.prompt + 1).any()):
            raise KeyError("a stage")


class FailingDrafter(Drafting):
    def propose(self, root: int, budget: Any) -> Any:
        self.proposals += 1
        if self.proposals == 2:
            raise KeyError("a drafter")
        return Tree.chain([root])


@dataclass(frozen=True)
class Drafts(Knows):
    """Its drafter raises in the second round."""

    name: ClassVar[str] = "test-failing-drafter"

    def open(self, target: Any) -> FailingDrafter:
        return FailingDrafter(self, target)


class SlowDrafter(Drafting):
    """Drafts nothing, in an hour."""

    now: ClassVar[list[float]]

    def propose(self, root: int, budget: Any) -> Any:
        self.now[0] += 3600.0
        return Tree.chain([root])


@dataclass(frozen=True)
class SlowDrafts(Knows):
    name: ClassVar[str] = "test-slow-drafter"

    def open(self, target: Any) -> SlowDrafter:
        return SlowDrafter(self, target)


def test_the_time_of_drafts_excludes_other_drafters(vlm: VLM) -> None:
    """By a clock that stands still but for the drafter of the other request."""
    own = request(0, "draft-self:keep=0.5,confidence=0", tokens=8)
    with turns.clock(vlm) as SlowDrafter.now:
        answers = vlm.ask_many([own, request(1, SlowDrafts(), tokens=8)], batch_size=2)
    assert answers[0].stats.drafted and answers[0].stats.time_draft_s == 0.0
    assert answers[1].stats.time_draft_s >= 3600.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_rows", None), ("max_rows", 0), ("max_cache_bytes", -1), ("prefill_chunk_size", 2.5)],
)
def test_limits_of_the_engine_are_checked(name: str, value: Any) -> None:
    vlm = turns.renewed(shared(build_llava))
    before = getattr(vlm.engine, name)
    setattr(vlm.engine, name, value)
    with pytest.raises(VLMFastError, match=f"{name} must be a positive integer, not {value}"):
        vlm.submit(request(0))
    setattr(vlm.engine, name, before)
    assert vlm.submit(request(0, tokens=3)).result().token_ids


@pytest.mark.parametrize("stage", [FailingStage(), Drafts()], ids=lambda stage: stage.name)
def test_a_method_that_fails_ends_its_request_at_once(vlm: VLM, stage: Any) -> None:
    others = [request(1, tokens=20), request(2, "draft-ngram", tokens=20)]
    wanted = [alone(vlm, r) for r in others]
    with turns.paused(vlm):
        handles = [vlm.submit(r) for r in (others[0], request(0, stage, tokens=20), others[1])]
    with pytest.raises(KeyError, match=r"a (stage|drafter)"):
        handles[1].result()
    assert handles[1].sequence.count <= 4  # not only after its twenty tokens
    assert [handles[n].result().token_ids for n in (0, 2)] == wanted


def test_ask_many_raises_the_first_error_and_cancels_the_rest(vlm: VLM) -> None:
    bad = request(0, tokens=9, logits_processor=acting(1, raises(KeyError("mine"))))
    with pytest.raises(KeyError, match="mine") as caught:
        vlm.ask_many([request(1, tokens=50), bad, request(2)], batch_size=3)
    assert caught.value.__notes__ == ["request 1"]
    wrong = request(0, "fastv:k=9")
    with pytest.raises(RecipeError, match=r"^request 1: fastv"):
        vlm.ask_many([request(1, tokens=50), wrong, request(2)], batch_size=3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_ask_many_keeps_errors_in_their_places(vlm: VLM, batch_size: int) -> None:
    bad = request(0, tokens=9, logits_processor=acting(1, raises(KeyError("mine"))))
    requests = [request(1), bad, Request(" "), request(2, "fastv:k=9"), request(2)]
    found = vlm.ask_many(requests, batch_size=batch_size, errors="keep")
    assert [type(of) for of in found] == [Answer, KeyError, VLMFastError, RecipeError, Answer]
    assert found[0].token_ids == alone(vlm, request(1))
    assert found[4].token_ids == alone(vlm, request(2))
    with pytest.raises(VLMFastError, match="errors='ignore' must be 'raise' or 'keep'"):
        vlm.ask_many([], errors="ignore")


def test_requests_that_raise_half_way(vlm: VLM) -> None:
    def requests() -> Iterator[Request]:
        yield request(0, tokens=40)
        yield request(1, tokens=40)
        raise OSError("the file ends here")

    with pytest.raises(OSError, match="the file ends here"):
        vlm.ask_many(requests(), batch_size=4)


def test_a_processor_that_asks_the_model_gets_one_line(vlm: VLM) -> None:
    def ask() -> None:
        vlm.ask(QUESTION, make_image(1), max_new_tokens=2)

    with pytest.raises(VLMFastError, match="asked the model that is answering") as caught:
        vlm.ask(QUESTION, make_image(), max_new_tokens=4, logits_processor=acting(1, ask))
    assert "\n" not in str(caught.value)


def test_what_can_never_fit_is_refused(vlm: VLM) -> None:
    prompt = vlm.inputs(QUESTION, make_image())["input_ids"].shape[1]
    bound = vlm.engine.max_cache_bytes = vlm.adapter.cache_bytes(prompt + 20)
    need = vlm.adapter.cache_bytes(prompt + 30)
    with pytest.raises(ModelError, match=f"at least {need:,} bytes and there are {bound:,}"):
        vlm.submit(request(tokens=30))
    assert vlm.submit(request(tokens=2)).result()


@pytest.mark.parametrize("errors", ["raise", "keep"])
def test_what_can_never_fit_is_the_error_of_its_own_request(vlm: VLM, errors: str) -> None:
    prompt = vlm.inputs(QUESTION, make_image())["input_ids"].shape[1]
    vlm.engine.max_cache_bytes = vlm.adapter.cache_bytes(prompt + 20)
    requests = [request(0, tokens=4), request(1, tokens=30), request(2, tokens=4)]
    if errors == "raise":
        with pytest.raises(ModelError, match=r"request 1: .* bytes"):
            vlm.ask_many(requests, batch_size=2)
    else:
        found = vlm.ask_many(requests, batch_size=2, errors="keep")
        assert isinstance(found[1], ModelError)
        assert [found[i].token_ids for i in (0, 2)] == [alone(vlm, requests[i]) for i in (0, 2)]


def test_a_session_goes_on_after_the_engine_gave_up(vlm: VLM) -> None:
    """Its question ended with all others, by an error outside of any request."""
    session = vlm.session(make_image())
    wanted = session.ask(QUESTION, max_new_tokens=4).token_ids
    with turns.failing(RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
        session.ask(QUESTION, max_new_tokens=4)
    assert vlm.session(make_image()).ask(QUESTION, max_new_tokens=4).token_ids == wanted
    session.close()
    assert not vlm.engine.load().waiting


def test_requests_wait_for_memory(vlm: VLM) -> None:
    prompt = vlm.inputs(QUESTION, make_image())["input_ids"].shape[1]
    vlm.engine.max_cache_bytes = int(2.5 * vlm.adapter.cache_bytes(prompt + 8))
    requests = [request(seed, tokens=8) for seed in range(5)]
    wanted = [alone(vlm, r) for r in requests]
    with turns.decode_steps(vlm) as steps:
        with turns.paused(vlm):
            handles = [vlm.submit(r) for r in requests]
        assert [handle.result().token_ids for handle in handles] == wanted
    assert max(step.rows for step in steps) == 2


def test_an_allocation_that_fails_ends_no_request(vlm: VLM, monkeypatch) -> None:
    wanted = [alone(vlm, request(n, tokens=12)) for n in (1, 2)]
    take, taken = CountingPool.take, [0]

    def failing(self: CountingPool, *args: Any, **more: Any) -> torch.Tensor:
        taken[0] += two.sequence.phase is Phase.PREFILL
        if taken[0] == 3:
            raise torch.OutOfMemoryError("no memory")
        return take(self, *args, **more)

    monkeypatch.setattr(CountingPool, "take", failing)
    with turns.paused(vlm):
        one = vlm.submit(request(1, tokens=12))
        two = vlm.submit(request(2, tokens=12))
    answers = [handle.result() for handle in (one, two)]
    assert [answer.token_ids for answer in answers] == wanted
    assert [answer.stats.preemptions for answer in answers] == [0, 1]
    vlm.prefix_cache.clear()
    vlm.adapter.pool.out = 0  # buffers that were taken before are freed with their cache


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_fork_inherits_no_request(vlm: VLM) -> None:
    inside, go = threading.Event(), threading.Event()
    processors = LogitsProcessorList([Acts(1, inside.set), *waits(1, go)])
    handle = vlm.submit(request(logits_processor=processors))
    assert inside.wait(GUARD)
    child = os.fork()
    if child == 0:
        try:
            handle.result(timeout=GUARD)
        except VLMFastError as error:
            os._exit(0 if "forked while the model was answering" in str(error) else 1)
        finally:
            os._exit(2)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handle.result().token_ids == alone(vlm, request())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_waiting_request_belongs_to_the_process_that_submitted_it(vlm: VLM) -> None:
    messages = messages_of(QUESTION, make_image())
    passed = gate(vlm.adapter, {"max_new_tokens": 3})
    sequence = sequence_of(vlm.adapter, messages, Recipe(), passed)
    handle = submitted(vlm.adapter, sequence)  # nothing runs yet
    child = os.fork()
    if child == 0:
        try:
            handle.result(timeout=GUARD)
        except VLMFastError as error:
            own = submitted(vlm.adapter, sequence_of(vlm.adapter, messages, Recipe(), passed))
            fine = "before the fork" in str(error) and not own.done
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(handle.result().token_ids) == 3


def test_an_error_of_the_engine_itself_ends_all_requests(vlm: VLM) -> None:
    with turns.failing(KeyError("inside")):
        with turns.paused(vlm):
            handles = [vlm.submit(request(seed)) for seed in range(3)]
        vlm.engine.wait(lambda: all(handle.done for handle in handles))
    for handle in handles:
        with pytest.raises(KeyError, match="inside"):
            handle.result()
    vlm.adapter.pool.out = 0
    assert vlm.submit(request()).result().token_ids


# --- modes ---------------------------------------------------------------------------------------


def test_rows_in_different_modes_never_share_a_step() -> None:
    vlm = shared(build_llava, layers=2)
    requests = [request(seed, tokens=8) for seed in range(4)]
    wanted = []
    for number, r in enumerate(requests):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 1):
            wanted.append(alone(vlm, r))
    on: list[bool] = []
    with turns.decode_steps(vlm, lambda: on.append(torch.is_autocast_enabled("cpu"))) as steps:
        handles = []
        with turns.paused(vlm):
            for number, r in enumerate(requests):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number % 2 == 1):
                    handles.append(vlm.submit(r))
        assert [handle.result().token_ids for handle in handles] == wanted
    assert set(on) == {True, False}
    assert [step.autocast for step in steps] == [{each} for each in on]


def test_gradient_mode_of_the_caller_is_kept(vlm: VLM) -> None:
    with torch.enable_grad():
        assert vlm.submit(request()).result().token_ids
        assert torch.is_grad_enabled()


# --- interleaved prefill -------------------------------------------------------------------------

LONG = ["none", "pyramiddrop", "mustdrop", "zipvl", "snapkv:0.6", "hired:0.5+lookm:0.7", "kivi",
        "tome"]  # fmt: skip
STREAM = 20  # tokens; more than there are blocks


def steps_while_reading(vlm: VLM, recipe: str) -> tuple[int, list[int], list[int]]:
    """Decode steps during the prefill of a long prompt beside a stream; both answers."""
    images = [make_image(seed=seed) for seed in range(1, 5)]
    given = {"max_new_tokens": 5, "eos_token_id": None}
    go = threading.Event()
    with turns.pause(0.0), turns.decode_steps(vlm) as steps:
        stream = vlm.submit(request(0, tokens=STREAM, logits_processor=waits(2, go)))
        stream.sequence.streamed = True
        handle = vlm.submit(Request(QUESTION, images, recipe=recipe, generation=given))
        go.set()
        got, streamed = handle.result().token_ids, stream.result().token_ids
    return sum(bool(step.prefilling) for step in steps), got, streamed


@pytest.mark.cases(4)
@pytest.mark.parametrize("recipe", LONG)
def test_streams_go_on_while_a_prompt_is_prefilled(vlm: VLM, recipe: str) -> None:
    images = [make_image(seed=seed) for seed in range(1, 5)]
    wanted = vlm.ask(QUESTION, images, recipe=recipe, max_new_tokens=5, eos_token_id=None)
    steps, got, streamed = steps_while_reading(vlm, recipe)
    assert got == wanted.token_ids and streamed == alone(vlm, request(0, tokens=STREAM))
    assert steps >= 4  # of four layers and the blocks of the tower


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("block", "pause", "chunk", "interrupted"),
    [
        (0.5, 1.0, None, False),
        (3.0, 1.0, None, True),
        (0.5, 0.0, None, True),
        (0.5, 1.0, 1 << 20, True),
    ],
)
def test_short_prompts_are_not_interrupted(
    vlm: VLM, block: float, pause: float, chunk: int | None, interrupted: bool
) -> None:
    """By a clock on which each block takes ``block`` of the time of a decode step."""
    wanted = [alone(vlm, request(0, tokens=STREAM)), alone(vlm, request(1, tokens=3))]
    vlm.prefix_cache.clear()
    go = threading.Event()
    with turns.pause(pause), turns.clock(vlm) as now:

        def passes(time: float) -> None:
            now[0] += time

        with turns.decode_steps(vlm, partial(passes, 1.0), partial(passes, block)) as steps:
            stream = vlm.submit(request(0, tokens=STREAM, logits_processor=waits(2, go)))
            stream.sequence.streamed = True
            short = vlm.submit(request(1, tokens=3, prefill_chunk_size=chunk))
            go.set()
            assert [stream.result().token_ids, short.result().token_ids] == wanted
    assert any(step.inside for step in steps) is interrupted


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", first(*STATES))
def test_interleaving_on_every_family(family: str) -> None:
    model, processor = builders()[family]()
    vlm = VLM(model.double(), processor)
    images = [make_image(seed=seed) for seed in range(1, 5)]
    wanted = vlm.ask(QUESTION, images, max_new_tokens=5, eos_token_id=None).token_ids
    steps, got, streamed = steps_while_reading(vlm, "none")
    assert got == wanted and streamed == alone(vlm, request(0, tokens=STREAM))
    assert steps >= 2


# --- random schedules ----------------------------------------------------------------------------

RECIPES = [None, "hired:0.5", "pyramiddrop", "h2o:0.6", "kivi:bits=4,residual=8,group=4",
           "snapkv:0.7", "streamingllm:0.7", "zipcache:page=8", "draft-ngram"]  # fmt: skip
_KNOWN: dict[str, Any] = {}


def known() -> tuple[VLM, list[Request], list[list[int]]]:
    """A model, requests and their answers, computed once."""
    if not _KNOWN:
        vlm = counting()
        requests = [request(n % 3, recipe, 3 + n) for n, recipe in enumerate(RECIPES)]
        seeded = {"do_sample": True, "temperature": 1.2, "seed": 5}
        requests.append(request(1, None, 12, **seeded))
        requests.append(request(2, "draft-ngram", 12, **seeded))
        _KNOWN.update(vlm=vlm, requests=requests, wanted=[alone(vlm, r) for r in requests])
    return _KNOWN["vlm"], _KNOWN["requests"], _KNOWN["wanted"]


class Schedules(RuleBasedStateMachine):
    """Submits, cancels, deadlines and failures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.vlm, self.requests, self.wanted = known()
        self.threads = set(threading.enumerate())
        self.open: list[tuple[Any, int, type | None]] = []

    def submit(self, number: int, fails: type | None = None, **more: Any) -> None:
        deadline = more.pop("deadline", None)
        priority = more.pop("priority", 0)
        sequence = sequence_of_request(self.vlm.adapter, self.requests[number], more)
        handle = submitted(self.vlm.adapter, sequence, priority=priority, deadline=deadline)
        self.open.append((handle, number, fails))

    @rule(number=st.integers(0, len(RECIPES) + 1), priority=st.integers(-1, 1))
    def submits(self, number: int, priority: int) -> None:
        self.submit(number, priority=priority)

    @rule(number=st.integers(0, len(RECIPES) - 1), at=st.integers(0, 3))
    def submits_a_failing_one(self, number: int, at: int) -> None:
        if at < self.requests[number].generation["max_new_tokens"]:
            self.submit(number, KeyError, logits_processor=acting(at, raises(KeyError("planted"))))

    @rule(number=st.integers(0, len(RECIPES) - 1))
    def submits_a_late_one(self, number: int) -> None:
        self.submit(number, DeadlineExceeded, deadline=1e-9)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancels(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        handle, number, fails = self.open[at]
        if handle.done or fails is not None:
            return
        serving = turns.serves(self.vlm)
        handle.cancel()
        if serving:  # the background thread may complete the answer first
            handle.close()
        if not serving or handle.sequence.error is not None:
            self.open[at] = handle, number, RequestCancelled

    @rule(limit=st.sampled_from([0, 200_000, 1 << 30]))
    def bounds_the_prefix_cache(self, limit: int) -> None:
        """To nothing, to less than two prompts, or to more than all."""
        self.vlm.prefix_cache.limit = limit

    @rule(steps=st.integers(1, 6))
    def runs(self, steps: int) -> None:
        left = [steps]

        def until() -> bool:
            left[0] -= 1
            return left[0] < 0 or not turns.unfinished(self.vlm)

        if turns.unfinished(self.vlm):
            self.vlm.engine.run(until)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def waits(self, data: Any) -> None:
        self.check(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @precondition(lambda self: self.open)
    @rule()
    def streams(self) -> None:
        handle, number, fails = self.open.pop()
        if fails is None:
            *_, answer = handle
            assert answer.token_ids == self.wanted[number]
        else:
            self.check((handle, number, fails))

    def check(self, entry: tuple[Any, int, type | None]) -> None:
        handle, number, fails = entry
        if fails is None:
            assert handle.result().token_ids == self.wanted[number]
        else:
            with pytest.raises(fails):
                handle.result()

    @invariant()
    def rows_are_those_of_active_sequences(self) -> None:
        if not turns.serves(self.vlm):
            rows, active = turns.rows_and_active(self.vlm)
            assert rows == active

    def teardown(self) -> None:
        for entry in self.open:
            self.check(entry)
        self.vlm.engine.settle()
        assert_idle(self.vlm, self.threads)


def machine(examples: int, steps: int) -> type:
    found = type(f"Schedules{examples}", (Schedules,), {})
    case = found.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return case


class TestSchedules(machine(40, 14)):
    pass


@pytest.mark.slow
class TestManySchedules(machine(500, 20)):
    pass
