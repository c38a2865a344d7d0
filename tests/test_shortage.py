"""Memory that runs short: every answer is right, or its request ends with a memory error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shortage import Allocations
from tiny_models import build_llava, make_image
from vlmfast import VLM, Answer, Request

QUESTION = "what is here ?"
KIVI = "kivi:bits=4,group=4,residual=8"


def request(image: int, recipe: str = "none", tokens: int = 6) -> Request:
    generation = {"max_new_tokens": tokens, "eos_token_id": None}
    return Request(QUESTION, [make_image(seed=image)], recipe=recipe, generation=generation)


def alone(vlm: VLM, r: Request) -> list[int]:
    return vlm.ask(r.question, r.images, recipe=r.recipe, **r.generation).token_ids


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
    vlm = VLM(*build_llava(layers=4, dtype=torch.float64))
    vlm.prefix_cache.limit = 0
    return vlm


@pytest.mark.cases(4)
@pytest.mark.parametrize("last", range(1, 37))
def test_a_row_that_cannot_join_a_batch_is_answered_beside_it(vlm: VLM, last: int) -> None:
    """Whatever part of the buffers that rows share it is that does not fit."""
    requests = [request(n, KIVI, 6 + n % 2) for n in range(4)]
    wanted = [alone(vlm, r) for r in requests]
    assert len(set(map(tuple, wanted))) > 2  # a control: answers differ
    with Allocations(of="new_zeros") as free:
        vlm.ask_many(requests, batch_size=4)
    fails = free.count - last
    with Allocations(fails, lasts=2, of="new_zeros") as short:
        found = vlm.ask_many(requests, batch_size=4, errors="keep")
    assert short.failed and check(found, wanted) == len(requests)
