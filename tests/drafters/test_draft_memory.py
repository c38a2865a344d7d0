"""What drafters remember of former answers: for a tenant alone, and for the last few recipes."""

from __future__ import annotations

from typing import Any

import pytest

from support.engine.draws import REMEMBERED, remembered
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request


@pytest.fixture
def vlm() -> VLM:
    return VLM(*build_llava(layers=2))


def accepted(vlm: VLM, tenant: str, recipe: str = "draft-recycle", **generation: Any) -> int:
    generation = {"max_new_tokens": 40, "eos_token_id": None} | generation
    request = Request(
        "what is here ?", make_image(), recipe=recipe, tenant=tenant, generation=generation
    )
    return vlm.submit(request).result().stats.accepted


def test_tenants_do_not_share_what_drafters_learn(vlm: VLM) -> None:
    first = accepted(vlm, "a")
    assert accepted(vlm, "b") == first
    assert accepted(vlm, "a") > first  # the control


def test_number_of_remembered_recipes_is_bounded(vlm: VLM) -> None:
    for nodes in range(2, REMEMBERED + 12):
        accepted(vlm, "", f"draft-recycle:nodes={nodes}", max_new_tokens=2)
    assert remembered(vlm) == (REMEMBERED, 0)
