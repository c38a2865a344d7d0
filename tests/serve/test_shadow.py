"""Shadow mode: what `/metrics` says of answers under a recipe equals a comparison offline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LogitsProcessorList

from tiny_models import make_image
from vlmfast import VLM, Request, VLMFastError
from vlmfast.serve import shadow
from vlmfast.serve.config import ServerConfig

RECIPE, TOKENS, GREEDY = "hired:0.1", 6, {"temperature": 0}
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


@pytest.mark.parametrize("requests", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_agreement_is_that_of_a_comparison_offline(
    shipped: VLM, serve: Callable[..., Any], requests: int
) -> None:
    asked = [(QUESTIONS[n % len(QUESTIONS)], n) for n in range(requests)]
    served = serve(shadow=1.0, aliases={"fast": RECIPE})
    for n, (text, seed) in enumerate(asked):
        more: dict[str, Any] = {"stream": True} if n % 2 else {}
        response = served.chat(text, seed, model="fast", max_tokens=TOKENS, **more, **GREEDY)
        assert response.status_code == 200
        served.until(lambda n=n: served.metric("shadow_answers_total") == n + 1)
    equal = served.metric("shadow_answers_equal_total", recipe=RECIPE)
    overlap = served.metric("shadow_first_token_overlap_sum", recipe=RECIPE)
    assert served.metric("shadow_left_out_total") == 0
    assert served.metric("request_success_total") == requests  # of clients alone
    pairs = [[offline(shipped, *one, recipe) for recipe in (RECIPE, "none")] for one in asked]
    same = [own[0] == full[0] for own, full in pairs]
    assert equal == sum(same)
    assert requests < 200 or 0 < sum(same) < requests  # both kinds occur
    shared = sum(float(own[1].minimum(full[1]).sum()) for own, full in pairs)
    assert overlap == pytest.approx(shared, abs=1e-3 * requests)
    assert shared < requests - 1e-2  # the distributions differ


def test_what_is_not_answered_again(serve: Callable[..., Any]) -> None:
    """The full model's answers, and counts of tokens; sampled ones are compared at their first."""
    served = serve(shadow=1.0, aliases={"fast": RECIPE})
    served.chat(model="tiny", max_tokens=2, **GREEDY)
    served.chat(model="fast", max_tokens=2, temperature=1.0)
    served.chat(model="fast", max_tokens=2, stop=["e"], **GREEDY)
    served.until(lambda: served.metric("shadow_first_token_overlap_count") == 2)
    assert served.metric("shadow_answers_total") == 1


def test_schema_is_followed_again(serve: Callable[..., Any]) -> None:
    served = serve(shadow=1.0, aliases={"fast": RECIPE})
    schema = {"name": "n", "schema": {"type": "integer"}}
    form = {"type": "json_schema", "json_schema": schema}
    response = served.chat(model="fast", max_tokens=4, response_format=form, **GREEDY)
    assert response.status_code == 200
    served.until(lambda: served.metric("shadow_answers_total") == 1)


def test_requests_beyond_the_bound_are_left_out(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MOST_BYTES", 1)
    served = serve(shadow=1.0, aliases={"fast": RECIPE})
    served.chat(model="fast", max_tokens=1, **GREEDY)
    assert served.metric("shadow_left_out_total") == 1


def test_clients_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered again where no client's request is prepared or answered."""
    asked, idle, seen = threading.Event(), [False], []

    def is_idle() -> bool:
        asked.set()
        return idle[0]

    done = threading.Event()
    monkeypatch.setattr(shadow, "agreement", lambda *given: seen.append(idle[0]))
    found = shadow.Shadow(None, 1.0, is_idle, lambda found: done.set())  # type: ignore[arg-type]
    found.add(shadow.Sample(Request("?"), dict, 1), None)  # type: ignore[arg-type]
    assert asked.wait(60)
    idle[0] = True
    assert done.wait(60)
    found.close()
    assert seen == [True]


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_share_is_a_fraction(share: float) -> None:
    with pytest.raises(VLMFastError, match="must be a number from 0 to 1"):
        ServerConfig(shadow=share)
