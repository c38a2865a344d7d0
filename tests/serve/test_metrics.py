"""Metrics against the usage of answers: what was counted is what the clients were told."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vlmfast.serve.metrics import OTHER

ALIASES = {"full": "none", "fast": "hired:0.1", "drafted": "hired:0.5+draft-ngram"}
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
)


def samples(served: Any) -> dict[str, dict[str, float]]:
    """Values of each metric by their labels other than the model's name, without prefix."""
    text = served.get("/metrics").text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            name = sample.name.removeprefix("vlmfast:")
            found.setdefault(name, {})[",".join(labels)] = sample.value
    return found


def streamed_usage(text: str) -> dict[str, Any]:
    """The usage of a streamed chat completion."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return json.loads(events[-2])["usage"]


def usage_of_response(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage of the newer API in the names of chat completions."""
    return {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "prompt_tokens_details": usage["input_tokens_details"],
        "vlmfast": usage["vlmfast"],
    }


def test_counters_are_sums_of_usage(serve: Any) -> None:
    served = serve(recipe="balanced", aliases=ALIASES)
    usages, reasons, seconds = [], [], []

    def chat(*given: Any, **more: Any) -> None:
        start = time.perf_counter()
        response = served.chat(*given, temperature=0, **more)
        seconds.append(time.perf_counter() - start)
        assert response.status_code == 200
        if more.get("stream"):
            usages.append(streamed_usage(response.text))
            reasons.append("stop")
            return
        usages.append(response.json()["usage"])
        reasons.append(response.json()["choices"][0]["finish_reason"])

    for _ in range(2):  # the second time from the prefix cache
        chat("What is up?", 1, model="full", max_tokens=3, cache_salt="metrics")
    chat("Describe it.", 2)
    chat("Describe it.", 2, model="drafted", recipe="draft-ngram", max_tokens=24)
    chat("Describe it.", 2, model="fast", stop=["e"])
    chat("Describe it.", 3, stream=True, stream_options={"include_usage": True})
    chat("Hello?", None, model="fast", max_tokens=1)
    chat("What is here?", 4, model="full", recipe="grid:0.5", max_tokens=2)
    image = {"type": "input_image", "image_url": served.image_url(5)}
    content = [image, {"type": "input_text", "text": "What is here?"}]
    asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    found = served.post("/v1/responses", {"model": "drafted", **asked}).json()
    usages.append(usage_of_response(found["usage"]))
    reasons.append("stop" if found["status"] == "completed" else "length")
    # Neither is an answer.
    assert served.post("/tokenize", served.body("?", None)).status_code == 200
    assert served.chat(max_tokens=0).status_code == 400
    assert served.chat(model="other").status_code == 404

    metrics = samples(served)
    own = [usage["vlmfast"] for usage in usages]

    def total(name: str, of: list[dict[str, Any]]) -> int:
        return sum(each[name] for each in of)

    details = [usage["prompt_tokens_details"] for usage in usages]
    expected = {
        "prompt_tokens_total": total("prompt_tokens", usages),
        "generation_tokens_total": total("completion_tokens", usages),
        "prompt_tokens_cached_total": total("cached_tokens", details),
        "prompt_tokens_fed_total": total("prompt_tokens_fed", own),
        "spec_decode_num_draft_tokens_total": total("drafted_tokens", own),
        "spec_decode_num_accepted_tokens_total": total("accepted_tokens", own),
    }
    assert {name: metrics[name][""] for name in expected} == expected
    assert min(expected.values()) > 0  # each of them was counted
    rounds = metrics["spec_decode_num_drafts_total"][""]
    assert 0 < rounds <= expected["generation_tokens_total"]

    recipes = Counter(of["recipe"] if of["recipe"] != "draft-ngram" else OTHER for of in own)
    recipes[OTHER] += recipes.pop("grid:0.5")
    assert recipes[OTHER] == 2
    assert metrics["request_recipe_total"] == recipes
    stages = Counter({"input": total("visual_tokens_in", own)})
    for of in own:
        for stage, kept in of["visual_tokens_kept"].items():
            stages[stage if stage != "grid" else OTHER] += kept
    assert {"input", "hired", OTHER} <= stages.keys()
    assert metrics["visual_tokens_total"] == stages
    assert metrics["request_success_total"] == Counter(reasons)
    assert metrics["request_errors_total"] == {"400": 1, "404": 1}

    for name in HISTOGRAMS:
        assert metrics[f"{name}_count"][""] == len(usages), name
    assert metrics["request_prompt_tokens_sum"][""] == expected["prompt_tokens_total"]
    several = [usage for usage in usages if usage["completion_tokens"] > 1]
    assert metrics["request_time_per_output_token_seconds_count"][""] == len(several) < len(usages)
    for name, key in (("time_to_first_token", "ttft_s"), ("request_queue_time", "queue_s")):
        value = metrics[f"{name}_seconds_sum"][""]
        assert value == pytest.approx(total(key, own), abs=1e-6 * len(own))

    # Times of an answer lie within what the client waited.
    for usage, waited in zip(own, seconds, strict=False):
        assert math.isfinite(usage["ttft_s"]) and math.isfinite(usage["queue_s"])
        assert 0 <= usage["queue_s"] <= usage["ttft_s"] <= waited
    whole = metrics["e2e_request_latency_seconds_sum"][""]
    assert metrics["time_to_first_token_seconds_sum"][""] <= whole


def test_recipes_of_requests_add_no_labels(serve: Any) -> None:
    """A client cannot let the number of time series grow."""
    served = serve(recipe="balanced", aliases=ALIASES)
    methods = ("hired", "random", "grid")
    recipes = [f"{name}:{keep / 100:g}" for name in methods for keep in range(11, 14)]
    found = set()
    for recipe in recipes:
        answer = served.chat("?", 6, recipe=recipe, max_tokens=1, cache_salt="labels").json()
        found.add(answer["usage"]["vlmfast"]["recipe"])
    for name in ALIASES:
        assert served.chat("?", None, model=name, max_tokens=1).status_code == 200
    metrics = samples(served)
    configured = {"none", "hired:0.1", "hired:0.5+draft-ngram"}
    assert metrics["request_recipe_total"].keys() == {*configured, OTHER}
    assert metrics["request_recipe_total"][OTHER] == len(found) == 9
    assert metrics["visual_tokens_total"].keys() == {"input", "hired", OTHER}
