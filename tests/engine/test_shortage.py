"""Memory that runs short: every answer is right, or its request ends with a memory error."""

from __future__ import annotations

import errno
import functools
import gc
import random
from typing import Any

import pytest
import torch

from support.engine.batched import CountingPool
from support.engine.turns import (
    free_memory,
    grown_by,
    prefixes_cannot_be_copied,
    renewed,
)
from support.models import shared
from support.shortage import Allocations
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Answer, Request
from vlmfast.core.buffers import BufferPool

QUESTION = "what is here ?"
KIVI = "kivi:bits=4,group=4,residual=8"


def request(image: int, recipe: str = "none", tokens: int = 6) -> Request:
    generation = {"max_new_tokens": tokens, "eos_token_id": None}
    return Request(QUESTION, [make_image(seed=image)], recipe=recipe, generation=generation)


def alone(vlm: VLM, r: Request) -> list[int]:
    return vlm.ask(r.question, r.images, recipe=r.recipe, **r.generation).token_ids


@functools.cache
def known(vlm: VLM, image: int, recipe: str = "none", tokens: int = 6) -> list[int]:
    """The answer to a `request` alone."""
    return alone(vlm, request(image, recipe, tokens))


def check(found: list[Any], wanted: list[list[int]]) -> int:
    """Each answer is right or a memory error; returns how many are right."""
    right = 0
    for answer, ids in zip(found, wanted, strict=True):
        if isinstance(answer, Answer):
            assert answer.token_ids == ids
            right += 1
        else:
            assert isinstance(answer, torch.OutOfMemoryError), repr(answer)
    return right


@pytest.fixture(scope="module")
def vlm() -> VLM:
    vlm = renewed(shared(build_llava, layers=4, dtype=torch.float64))
    vlm.prefix_cache.limit = 0
    return vlm


@functools.cache
def joined(vlm: VLM) -> tuple[list[Request], list[list[int]], int]:
    """Requests that join a batch, their answers, and how many buffers of it are allocated."""
    given = [(n, KIVI, 6 + n % 2) for n in range(4)]
    requests, wanted = [request(*of) for of in given], [known(vlm, *of) for of in given]
    assert len(set(map(tuple, wanted))) > 2  # a control: answers differ
    with Allocations(of="new_zeros") as free:
        vlm.ask_many(requests, batch_size=4)
    return requests, wanted, free.count


@pytest.mark.cases(4)
@pytest.mark.parametrize("last", range(1, 37))
def test_a_row_that_cannot_join_a_batch_is_answered_beside_it(vlm: VLM, last: int) -> None:
    """Whatever part of the buffers that rows share it is that does not fit."""
    requests, wanted, count = joined(vlm)
    with Allocations(count - last, lasts=2, of="new_zeros") as short:
        found = vlm.ask_many(requests, batch_size=4, errors="keep")
    assert short.failed and check(found, wanted) == len(requests)


# --- any allocation ------------------------------------------------------------------------------

MIXED = (
    ("none", 7),
    (KIVI, 6),
    ("zipcache", 5),
    ("snapkv:keep=0.8,window=4", 6),
    ("hired:0.5", 8),
    ("pyramiddrop", 5),
    ("h2o:0.7", 7),
    ("draft-ngram", 9),
    ("hired:0.5+kivi:bits=4,group=4,residual=8", 6),
    ("draft-recycle", 7),
    ("lookm:0.7", 6),
    ("draft-self", 8),
)


def batches(seed: int) -> list[tuple[int, str, int]]:
    """Eight requests with various recipes."""
    chosen = random.Random(seed).sample(MIXED, 8)
    return [(n % 3, *recipe_and_tokens) for n, recipe_and_tokens in enumerate(chosen)]


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(125))
def test_every_answer_is_right_or_an_error_of_its_own(vlm: VLM, seed: int) -> None:
    """A thousand requests in batches, in each of which an allocation fails, and fails again."""
    chance, given = random.Random(seed), batches(seed)
    requests, wanted = [request(*of) for of in given], [known(vlm, *of) for of in given]
    assert len(set(map(tuple, wanted))) > 3  # a control: answers differ
    vlm.ask_many(requests, batch_size=6)  # drafters learn, and allocate less afterwards
    with Allocations() as free:
        vlm.ask_many(requests, batch_size=6)
    with Allocations(chance.randrange(free.count), lasts=chance.choice((1, 2, 5))) as short:
        found = vlm.ask_many(requests, batch_size=6, errors="keep")
    assert short.failed
    check(found, wanted)
    load = vlm.engine.load()
    assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
    assert check(vlm.ask_many(requests, batch_size=6), wanted) == len(requests)


# As PyTorch, the system, and NumPy state it.
STATED = (
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError("Unable to allocate 8 bytes"),
)


@pytest.mark.parametrize("error", STATED, ids=lambda error: type(error).__name__)
def test_every_memory_error_is_kept(vlm: VLM, error: Exception, monkeypatch) -> None:
    """Also that of one whose media do not fit."""
    requests, make, made = [request(n) for n in range(3)], vlm.adapter.inputs, []

    def inputs(*given: Any, **more: Any) -> Any:
        made.append(1)
        if len(made) == 2:
            raise error
        return make(*given, **more)

    monkeypatch.setattr(vlm.adapter, "inputs", inputs)
    found = vlm.ask_many(requests, batch_size=2, errors="keep")
    assert [type(one) for one in found] == [Answer, type(error), Answer]
    made.clear()
    with pytest.raises(type(error)) as raised:
        vlm.ask_many(requests, batch_size=2)
    assert raised.value is error and "request 1" in error.__notes__


@pytest.mark.parametrize("error", STATED, ids=lambda error: type(error).__name__)
def test_a_prefix_that_cannot_be_copied_is_not_kept(error: Exception) -> None:
    """Its request is answered, as it needs no copy."""
    vlm = renewed(shared(build_llava, layers=2))
    wanted = alone(vlm, request(0))
    vlm.prefix_cache.clear()
    with prefixes_cannot_be_copied(error) as tried:
        assert alone(vlm, request(0)) == wanted
    assert tried.called


@pytest.mark.slow
def test_rows_that_cannot_grow_wait(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of their batch go on."""
    requests = [request(n, tokens=250) for n in range(3)]  # more than fit beside each other
    wanted, take, grown = [alone(vlm, r) for r in requests], BufferPool.take, []

    def short(pool: BufferPool, shape: tuple[int, ...], *given: Any, **more: Any) -> torch.Tensor:
        load = vlm.engine.load()
        if load.decoding == 3 and not load.prefilling:
            grown.append(shape)
            if len(grown) > 8:  # keys and values of four layers
                raise torch.OutOfMemoryError("stand-in")
        return take(pool, shape, *given, **more)

    monkeypatch.setattr(BufferPool, "take", short)
    with grown_by(4):
        found = vlm.ask_many(requests, batch_size=3)
    assert len(grown) > 8 and check(found, wanted) == 3
    assert [answer.stats.preemptions for answer in found].count(0) == 1


# --- what is idle, and what a request leaves -----------------------------------------------------


def live_bytes(vlm: VLM) -> int:
    """Bytes of all tensors but idle buffers."""
    vlm.adapter.pool.clear()
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    dense = [x for x in tensors if x.layout is torch.strided and x.device.type == "cpu"]
    storages = [x.untyped_storage() for x in dense]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_all_that_is_idle_is_freed_before_the_second_attempt(monkeypatch) -> None:
    """Buffers of prefixes that are dropped are not kept in the pool."""
    vlm = renewed(shared(build_llava, layers=2))
    alone(vlm, request(0))
    alone(vlm, request(1))
    assert vlm.prefix_cache.stats().kinds["prefixes"].bytes
    pool, zeros, idle = vlm.adapter.pool, torch.zeros, []

    def exhausted(*given: Any, **more: Any) -> torch.Tensor:
        idle.append((pool.idle, vlm.prefix_cache.stats().bytes))
        if len(idle) == 1:
            raise torch.OutOfMemoryError("stand-in")
        return zeros(*given, **more)

    monkeypatch.setattr(torch, "zeros", exhausted)
    pool.take((3, 1 << 12), torch.float32, torch.device("cpu"))
    assert min(idle[0]) > 0 and idle[1] == (0, 0)


def test_requests_wait_until_idle_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was dropped counts as free: two rows fit only without what earlier requests left."""
    vlm = renewed(shared(build_llava, layers=2))
    pool = vlm.adapter.pool = CountingPool()
    requests, rows = [request(n, tokens=12) for n in range(4)], []
    for n in range(16, 4, -1):
        alone(vlm, request(n, tokens=12))
    wanted = [alone(vlm, r) for r in requests]
    used = pool.out + pool.idle
    assert used > 2 * vlm.adapter.cache_bytes(256)
    prompt = vlm.inputs(QUESTION, make_image())["input_ids"].shape[1]
    total = used + vlm.adapter.cache_bytes(prompt + 12) - 1

    def free(device: torch.device) -> int:
        return total - pool.out - pool.idle

    take = BufferPool.take

    def counted(own: BufferPool, *given: Any, **more: Any) -> torch.Tensor:
        rows.append(vlm.engine.load().decoding)
        return take(own, *given, **more)

    monkeypatch.setattr(BufferPool, "take", counted)
    with free_memory(free):
        assert check(vlm.ask_many(requests, batch_size=2), wanted) == 4
    assert max(rows) > 0  # a second row was admitted beside the first one


def test_finished_requests_hold_no_tensors_of_the_prompt(vlm: VLM) -> None:
    recipes = ("none", "hired:0.5+h2o:0.7", "pyramiddrop+draft-self", "tome:0.5+draft-ngram")

    def submitted() -> list[Any]:
        handles = [vlm.submit(request(n, recipe)) for n, recipe in enumerate(recipes)]
        assert all(handle.result().token_ids for handle in handles)
        return handles

    submitted()
    before = live_bytes(vlm)
    handles = submitted()
    pixels = vlm.inputs(QUESTION, make_image())["pixel_values"].nbytes
    assert (live_bytes(vlm) - before) / len(handles) < pixels / 4
