"""Memory that runs short beside others: a request waits, starts again, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from support.engine.memory import steps_within
from support.shortage import Allocations
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Answer, Request
from vlmfast.core.buffers import BufferPool

QUESTION = "what is here ?"
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "kivi": {"recipe": "kivi:bits=4,group=4,residual=8"},
    "h2o": {"recipe": "h2o:0.7"},
    "drafts": {"recipe": "draft-ngram+draft-recycle"},
    "strict drafts": {"recipe": "lookm:0.8+draft-self", "strict": True},
    "sampled": {"do_sample": True, "seed": 5, "temperature": 0.7, "repetition_penalty": 1.2},
    "scores": {"top_logprobs": 3, "repetition_penalty": 1.2},
}


@pytest.fixture(scope="module")
def vlm() -> VLM:
    vlm = VLM(*build_llava(layers=2, dtype=torch.float64))
    vlm.prefix_cache.limit = 0
    return vlm


def request(image: int, tokens: int = 6, recipe: str = "none", **more: Any) -> Request:
    generation = {"max_new_tokens": tokens, "eos_token_id": None, "do_sample": False, **more}
    return Request(QUESTION, [make_image(seed=image)], recipe=recipe, generation=generation)


def answered(
    vlm: VLM, requests: Sequence[Request], fails: int | None = None
) -> tuple[list[Answer], Allocations]:
    """Answers of requests in company, where the engine's own allocations are counted."""
    with steps_within(vlm, Allocations(fails)) as allocations:
        handles = [vlm.submit(one) for one in requests]
        answers = [handle.result() for handle in handles]
    return answers, allocations


def spread(allocations: Allocations, count: int) -> list[int]:
    """Numbers of ``count`` of them, spread over a run."""
    return [allocations.count * (2 * at + 1) // (2 * count) for at in range(count)]


def failing(patch: pytest.MonkeyPatch, fail: Sequence[int]) -> list[int]:
    """Let some takes of a buffer fail, by their number; the list gets an entry for each take."""
    take, taken = BufferPool.take, []

    def short(pool: BufferPool, *given: Any, **more: Any) -> torch.Tensor:
        taken.append(len(taken))
        if taken[-1] in fail:
            raise torch.OutOfMemoryError("stand-in")
        return take(pool, *given, **more)

    patch.setattr(BufferPool, "take", short)
    return taken


@pytest.mark.cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_shortage_ends_no_request(vlm: VLM, way: str) -> None:
    requests = [request(n, 4 + n, **WAYS[way]) for n in range(3)]
    wanted, allocations = answered(vlm, requests)
    assert len({tuple(answer.token_ids) for answer in wanted}) == 3
    preemptions = []
    for fails in spread(allocations, 6):
        for own, other in zip(answered(vlm, requests, fails)[0], wanted, strict=True):
            assert own.token_ids == other.token_ids
            assert len(own.logprobs or ()) == len(other.logprobs or ())
            preemptions.append(own.stats.preemptions)
    assert sum(preemptions) >= 3 and not any(answer.stats.preemptions for answer in wanted)


class Reader:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.read += tokens.tolist()

    def end(self) -> None:
        self.read.append(-1)


def test_streamed_tokens_are_read_once(vlm: VLM) -> None:
    readers = [Reader() for _ in range(3)]
    requests = [request(n, 8, streamer=reader) for n, reader in enumerate(readers)]
    wanted, allocations = answered(vlm, requests)
    preempted = 0
    for fails in spread(allocations, 4):
        for reader in readers:
            reader.read.clear()
        answers, _ = answered(vlm, requests, fails)
        for answer, reader, other in zip(answers, readers, wanted, strict=True):
            assert reader.read == [*answer.token_ids, -1] == [*other.token_ids, -1]
            preempted += answer.stats.preemptions
    assert preempted >= 2


@pytest.mark.parametrize("cached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sessions_and_long_videos_start_again(cached: bool, monkeypatch) -> None:
    """And a session goes on after it, as if nothing had been."""
    vlm = VLM(*build_llava(layers=2, dtype=torch.float64))
    vlm.prefix_cache.limit = 1 << 24 if cached else 0
    video = [make_image(40, 40, seed) for seed in range(6)]
    quiet = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": False}
    found: list[list[int]] = []
    preemptions: list[list[int]] = []

    def beside(ask: Callable[[], Answer]) -> None:
        """Ask while two other requests are answered."""
        others = [vlm.submit(request(n)) for n in range(2)]
        answers = [ask(), *(handle.result() for handle in others)]
        found.extend(answer.token_ids for answer in answers)
        preemptions.append([answer.stats.preemptions for answer in answers])

    def run() -> list[list[int]]:
        found.clear()
        with vlm.session(images=make_image(seed=7), history=True) as session:
            beside(lambda: session.ask(QUESTION, **quiet))
            beside(lambda: session.ask("and now ?", **quiet))
            beside(lambda: vlm.ask(QUESTION, video=video, max_kv_tokens=120, **quiet))
        return list(found)

    with monkeypatch.context() as patch:
        taken = failing(patch, ())
        wanted = run()
    for fails in range(0, len(taken), 4):
        with monkeypatch.context() as patch:
            failing(patch, [fails])
            assert run() == wanted
    assert all(any(own[0] for own in preemptions[way::3]) for way in range(3))  # also those asked


def test_a_request_that_is_short_alone_ends(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second attempt; what comes after it is answered."""
    tried: list[int] = []

    def short(*given: Any, **more: Any) -> torch.Tensor:
        tried.append(1)
        raise torch.OutOfMemoryError("stand-in")

    handle = vlm.submit(request(0))
    with monkeypatch.context() as patch:
        patch.setattr(BufferPool, "take", short)
        with pytest.raises(torch.OutOfMemoryError):
            handle.result()
    assert len(tried) == 2
    assert vlm.ask(QUESTION, make_image(), max_new_tokens=3, eos_token_id=None).token_ids


def test_a_request_that_is_short_alone_once_goes_on(vlm: VLM) -> None:
    """Its repetition penalty counts what it had emitted, its cache is that of its prompt."""
    requests = [request(0, 16, repetition_penalty=1.3)]
    (wanted,), allocations = answered(vlm, requests)
    plain = answered(vlm, [request(0, 16)])[0][0]
    assert plain.token_ids != wanted.token_ids  # a control: the penalty matters
    for fails in spread(allocations, 6)[2:]:
        (found,), short = answered(vlm, requests, fails)
        assert found.token_ids == wanted.token_ids
        assert found.stats.preemptions == short.failed == 1
        assert found.stats.kv_bytes == wanted.stats.kv_bytes


def test_fewer_run_at_once_until_one_has_ended(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space for two rows: three are answered, the third after the first."""
    take, beside = BufferPool.take, []

    def short(pool: BufferPool, *given: Any, **more: Any) -> torch.Tensor:
        load = vlm.engine.load()
        beside.append(load.prefilling + load.decoding)
        if beside[-1] > 2:
            raise torch.OutOfMemoryError("stand-in")
        return take(pool, *given, **more)

    requests = [request(n, 6 + 4 * n) for n in range(3)]
    wanted = [answer.token_ids for answer in vlm.ask_many(requests, batch_size=1)]
    monkeypatch.setattr(BufferPool, "take", short)
    answers = vlm.ask_many(requests, batch_size=3)
    assert [answer.token_ids for answer in answers] == wanted
    assert max(beside) == 3 and 1 <= sum(answer.stats.preemptions for answer in answers) <= 2
