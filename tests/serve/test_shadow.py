"""Shadow mode: what `/metrics` says of answers under a recipe equals a comparison offline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LogitsProcessorList

from support.tiny_models import make_image
from vlmfast import VLM, Recipe, VLMFastError
from vlmfast.serve import shadow
from vlmfast.serve.config import ServerConfig

TOKENS, GREEDY = 6, {"temperature": 0}
QUESTIONS = ("What is here?", "How many objects are there?", "What color is the largest object?")


def offline(vlm: VLM, text: str, seed: int, recipe: str) -> tuple[list[int], Any]:
    """The tokens of an answer, and the distribution of its first one."""
    seen = []

    def keep(ids: Any, scores: Any) -> Any:
        seen.append(scores[0].softmax(-1))
        return scores

    answer = vlm.ask(
        text,
        images=make_image(64, 64, seed=seed),
        recipe=recipe,
        max_new_tokens=TOKENS,
        do_sample=False,
        logits_processor=LogitsProcessorList([keep]),
    )
    return answer.token_ids, seen[0]


def growth(served: Any) -> Callable[[str], float]:
    """By how much a metric grows from now on."""
    names = ("answers_total", "answers_equal_total", "left_out_total")
    names += ("first_token_overlap_count", "first_token_overlap_sum")
    before = {name: served.metric(f"shadow_{name}") for name in names}
    return lambda name: served.metric(f"shadow_{name}") - before[name]


@pytest.mark.parametrize("requests", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_agreement_is_that_of_a_comparison_offline(
    shipped: VLM, shadowed: Any, requests: int
) -> None:
    asked = [(QUESTIONS[n % len(QUESTIONS)], n) for n in range(requests)]
    grown, answered = growth(shadowed), shadowed.metric("request_prompt_tokens_count")
    recipe = shadowed.server.config.aliases["fast"]
    known = shadowed.metric("shadow_answers_total", recipe=str(Recipe.parse(recipe)))
    for n, (text, seed) in enumerate(asked):
        more: dict[str, Any] = {"stream": True} if n % 2 else {}
        response = shadowed.chat(text, seed, model="fast", max_tokens=TOKENS, **more, **GREEDY)
        assert response.status_code == 200
        shadowed.until(lambda n=n: grown("answers_total") == n + 1)
    own = shadowed.metric("shadow_answers_total", recipe=str(Recipe.parse(recipe)))
    assert own - known == requests and grown("left_out_total") == 0
    answers = shadowed.metric("request_prompt_tokens_count")
    assert answers - answered == requests  # of clients alone
    pairs = [[offline(shipped, *one, name) for name in (recipe, "none")] for one in asked]
    same = [reduced[0] == full[0] for reduced, full in pairs]
    assert grown("answers_equal_total") == sum(same)
    assert requests < 200 or 0 < sum(same) < requests  # both kinds occur
    shared = sum(float(reduced[1].minimum(full[1]).sum()) for reduced, full in pairs)
    assert grown("first_token_overlap_sum") == pytest.approx(shared, abs=1e-3 * requests)
    assert shared < requests - 1e-2  # the distributions differ


def test_what_is_not_answered_again(shadowed: Any) -> None:
    """The full model's answers, and counts of tokens; sampled ones are compared at their first."""
    grown = growth(shadowed)
    shadowed.chat(model="full", max_tokens=2, **GREEDY)
    shadowed.chat(model="fast", max_tokens=2, temperature=1.0)
    shadowed.chat(model="fast", max_tokens=2, stop=["e"], **GREEDY)
    shadowed.until(lambda: grown("first_token_overlap_count") == 2)
    assert grown("answers_total") == 1


def test_schema_is_followed_again(shadowed: Any) -> None:
    grown = growth(shadowed)
    schema = {"name": "n", "schema": {"type": "integer"}}
    form = {"type": "json_schema", "json_schema": schema}
    response = shadowed.chat(model="fast", max_tokens=4, response_format=form, **GREEDY)
    assert response.status_code == 200
    shadowed.until(lambda: grown("answers_total") == 1)


def test_requests_beyond_the_bound_are_left_out(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_BYTES", 1)
    served = serve(shadow=1.0, recipe="hired:0.1")
    served.chat(max_tokens=1, **GREEDY)
    assert served.metric("shadow_left_out_total") == 1


def test_clients_go_first() -> None:
    """Requests are answered again where no client's request is prepared or answered."""
    asked, idle, seen = threading.Event(), [False], []

    def is_idle() -> bool:
        asked.set()
        return idle[0]

    done = threading.Event()
    found = shadow.Shadow(1.0, is_idle, lambda found: done.set())
    found.add(shadow.Sample([], lambda answer: seen.append(idle[0])), None)  # type: ignore
    assert asked.wait(60)
    idle[0] = True
    assert done.wait(60)
    found.close()
    assert seen == [True]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_share_is_a_fraction(share: float) -> None:
    with pytest.raises(VLMFastError, match="must be a number from 0 to 1"):
        ServerConfig(shadow=share)
