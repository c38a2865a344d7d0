"""Chat completions over HTTP: as the library answers, streamed as plain, with usage and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import tiny_families
from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.core.layout import Kind

QUESTION = "What is in the bottom left?"


def events(response: Any) -> list[Any]:
    """The objects of a stream."""
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.parametrize("name", ["tiny", "full", "fast"])
def test_answers_are_those_of_the_library(served: Any, name: str) -> None:
    recipe = served.server.config.recipes[name]
    expected = served.vlm.ask(QUESTION, make_image(seed=3), recipe=recipe, max_new_tokens=12)
    found = served.chat(QUESTION, 3, model=name, max_tokens=12).json()
    (choice,) = found["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    usage = found["usage"]
    assert usage["completion_tokens"] == len(expected.token_ids)
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["vlmfast"]["recipe"] == expected.canonical_recipe
    assert usage["vlmfast"]["visual_tokens_in"] == expected.stats.visual_tokens_in
    assert usage["vlmfast"]["visual_tokens_kept"] == expected.stats.visual_tokens_kept


def test_names_have_their_own_recipes(served: Any) -> None:
    fed = {
        name: served.chat(image=4, model=name, max_tokens=1, cache_salt="names").json()["usage"][
            "vlmfast"
        ]
        for name in ("tiny", "full", "fast")
    }
    tokens = [fed[name]["prompt_tokens_fed"] for name in ("full", "tiny", "fast")]
    assert tokens == sorted(tokens, reverse=True) and len(set(tokens)) == 3
    own = served.chat(image=4, model="full", recipe="hired:0.1", max_tokens=1).json()["usage"]
    for key in ("recipe", "visual_tokens_kept"):
        assert own["vlmfast"][key] == fed["fast"][key] != fed["tiny"][key]


def test_usage_adds_up(served: Any) -> None:
    """What is fed is the text and what the recipe left, except for what was cached."""
    first = served.chat("What is up?", 5, model="fast", max_tokens=1, cache_salt="adds").json()
    usage, own = first["usage"], first["usage"]["vlmfast"]
    kept = own["visual_tokens_kept"]["hired"]
    assert usage["prompt_tokens"] - own["visual_tokens_in"] + kept == own["prompt_tokens_fed"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    again = served.chat("What is up?", 5, model="fast", max_tokens=1, cache_salt="adds").json()
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usage["prompt_tokens"]
    assert again["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    assert again["usage"]["vlmfast"]["prompt_tokens_fed"] == usage["prompt_tokens"] - cached


def test_messages_reach_the_template_as_in_the_library(serve: Any) -> None:
    vlm = VLM(*tiny_families.builders()["qwen2_5_vl"](0))
    vlm.processor.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}"
        "({{ m['content'] }}){% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}A:"
    )
    served = serve(vlm, model="qwen")

    def answers(path: str, **body: Any) -> str:
        body = {"model": "qwen", "temperature": 0, **body}
        found = served.post(path, body).json()
        if path == "/v1/responses":
            return found["output"][0]["content"][0]["text"]
        return found["choices"][0]["message"]["content"]

    def chatted(*messages: dict[str, Any]) -> str:
        return vlm.chat(list(messages), max_new_tokens=8, do_sample=False).text

    hello, listed = ({"role": "user", "content": text} for text in ("Hello", [text_part("Hello")]))
    assert chatted(hello) != chatted(listed)
    for turn in (hello, listed):
        found = answers("/v1/chat/completions", messages=[turn], max_tokens=8)
        assert found == chatted(turn)
    assert answers("/v1/responses", input="Hello", max_output_tokens=8) == chatted(hello)
    # A turn of an image alone.
    before = [hello, {"role": "assistant", "content": "ok"}]
    url = {"type": "image_url", "image_url": {"url": served.image_url(3)}}
    found = answers(
        "/v1/chat/completions",
        messages=[*before, {"role": "user", "content": [url]}],
        max_tokens=8,
    )
    shown = {"role": "user", "content": [{"type": "image", "image": make_image(seed=3)}]}
    assert found == chatted(*before, shown)
    # A refusal alone is a text, as is a turn without parts.
    refusal = {"role": "assistant", "content": None, "refusal": "ok"}
    found = answers("/v1/chat/completions", messages=[hello, refusal, hello], max_tokens=8)
    parted = {"role": "assistant", "content": [text_part("ok")]}
    assert found == chatted(*before, hello) != chatted(hello, parted, hello)
    empty = {"role": "assistant", "content": []}
    found = answers("/v1/responses", input=[hello, empty, hello], max_output_tokens=8)
    said, parted = ({"role": "assistant", "content": text} for text in ("", [text_part("")]))
    assert found == chatted(hello, said, hello) != chatted(hello, parted, hello)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e"]}])
def test_streamed_is_plain(served: Any, more: dict[str, Any]) -> None:
    options = {"temperature": 0, "max_tokens": 24, "cache_salt": "s", **more}
    plain = served.chat("Describe it.", 6, **options).json()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(served.chat("Describe it.", 6, **options, **usage))
    (choice,) = plain["choices"]
    assert len(chunks) > 3
    assert text_of(chunks) == choice["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == plain["usage"][name]
    if "logprobs" in more:
        parts = [c["choices"][0]["logprobs"] for c in chunks[1:-2]]
        tokens = [step["token"] for part in parts for step in part["content"]]
        assert tokens == [step["token"] for step in choice["logprobs"]["content"]]
        assert "".join(tokens).strip() == choice["message"]["content"]
    if "stop" in more:
        assert "e" not in choice["message"]["content"] and choice["finish_reason"] == "stop"
        whole = served.chat("Describe it.", 6, temperature=0, max_tokens=24).json()
        whole = whole["choices"][0]["message"]["content"]
        assert whole.partition("e")[0].strip() == choice["message"]["content"] != whole


def test_without_usage_no_chunk_has_any(served: Any) -> None:
    chunks = events(served.chat(max_tokens=3, stream=True))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_settings_reach_the_engine(served: Any) -> None:
    def answer(**more: Any) -> str:
        found = served.chat("Describe it.", 7, max_tokens=8, **more).json()
        return found["choices"][0]["message"]["content"]

    greedy = answer(temperature=0)
    assert answer() == greedy  # the checkpoint decodes greedily
    hot = [answer(temperature=2, seed=seed) for seed in range(4)]
    assert len({greedy, *hot}) > 2
    assert answer(temperature=2, seed=1) == hot[1]
    assert answer(temperature=2, seed=1, top_k=1) == greedy
    assert answer(temperature=2, seed=1, top_p=0.001) == greedy


def test_trace_has_the_boxes_of_kept_tokens(served: Any) -> None:
    usage = served.chat(image=8, model="fast", max_tokens=1, trace=True).json()["usage"]
    trace = usage["vlmfast"]["trace"]
    entered = [token for token in trace["tokens"] if token["depth"] == trace["layers"]]
    assert len(entered) == usage["vlmfast"]["visual_tokens_kept"]["hired"]
    assert len(trace["tokens"]) == usage["vlmfast"]["visual_tokens_in"]
    assert all(0 <= low <= 1 for token in entered for low in token["box"])
    assert "trace" not in served.chat(max_tokens=1).json()["usage"]["vlmfast"]


@pytest.mark.parametrize(
    ("recipe", "merges"), [("downsample", True), ("prumerge", True), ("none", False)]
)
def test_trace_has_the_boxes_of_merged_tokens(served: Any, recipe: str, merges: bool) -> None:
    """All tokens are accounted for: by the number that each row represents, and by boxes."""
    asked = {"model": "full", "recipe": recipe, "max_tokens": 1, "trace": True}
    usage = served.chat(image=8, **asked).json()["usage"]["vlmfast"]
    trace = usage["trace"]
    tokens, merged = trace["tokens"], trace["merged"]
    assert bool(merged) is merges
    entered = [number for number, token in enumerate(tokens) if token["depth"]]
    assert {one["token"] for one in merged} <= set(entered)
    weights = dict.fromkeys(entered, 1) | {one["token"]: one["weight"] for one in merged}
    patches = sum(weight for at, weight in weights.items() if tokens[at]["kind"] != Kind.NEWLINE)
    assert patches == sum(token["kind"] != Kind.NEWLINE for token in tokens)
    for one in merged:
        (left, top, right, bottom), own = one["box"], tokens[one["token"]]["box"]
        assert left <= own[0] < own[2] <= right and top <= own[1] < own[3] <= bottom
    if recipe == "downsample":
        whole = [one["box"] for one in merged if tokens[one["token"]]["tile"] == 0]
        assert sum((r - x) * (b - y) for x, y, r, b in whole) == pytest.approx(1, rel=1e-5)


def test_length_defaults_to_the_limit(served: Any) -> None:
    """An answer is not cut at an arbitrary length."""
    found = served.chat("Describe it.", 9, max_tokens=2).json()["choices"][0]
    assert found["finish_reason"] == "length"
    assert served.chat("Describe it.", 9).json()["choices"][0]["finish_reason"] == "stop"


def test_conversations(served: Any) -> None:
    """Former answers and images of former turns are part of the prompt."""
    image = {"type": "image_url", "image_url": {"url": served.image_url(10)}}
    later = [
        {"role": "assistant", "content": "a shape"},
        {"role": "user", "content": "Where is it?"},
    ]

    def turns(shown: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [shown, text_part("What is here?")]}, *later]

    body = {"model": "full", "messages": turns(image), "max_tokens": 8}
    found = served.post("/v1/chat/completions", body).json()
    own = turns({"type": "image", "image": make_image(seed=10)})
    expected = served.vlm.chat(own, max_new_tokens=8)
    assert found["choices"][0]["message"]["content"] == expected.text


def test_tokenize(served: Any) -> None:
    asked = served.body(image=11)
    full = served.post("/tokenize", {**asked, "model": "full"}).json()
    ids = served.vlm.inputs("What is here?", make_image(seed=11))["input_ids"][0].tolist()
    assert full["tokens"] == ids == full["vlmfast"]["tokens"] and full["count"] == len(ids)
    some = served.post("/tokenize", {**asked, "model": "fast"}).json()
    assert some["tokens"] == ids
    own = some["vlmfast"]
    kept = own["visual_tokens_kept"]["hired"]
    assert own["count"] == len(own["tokens"]) == len(ids) - own["visual_tokens_in"] + kept
    mark = served.vlm.adapter.image_token_id
    assert [i for i in own["tokens"] if i != mark] == [i for i in ids if i != mark]


def test_models(served: Any) -> None:
    found = served.get("/v1/models").json()
    assert [model["id"] for model in found["data"]] == ["tiny", "full", "fast"]
    assert served.get("/v1/models/fast").json()["recipe"] == "hired:0.1"
    missing = served.get("/v1/models/none")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
