"""Structured output: answers parse, follow their schema, and bad schemas are refused quickly."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
import torch

from tiny_models import make_image
from vlmfast import VLM
from vlmfast.serve.errors import RequestError
from vlmfast.serve.grammars import Grammars

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"color": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
        "required": ["color", "count"],
        "additionalProperties": False,
    },
    "enum": {
        "type": "object",
        "properties": {"shape": {"enum": ["square", "circle", "star"]}},
        "required": ["shape"],
        "additionalProperties": False,
    },
    "range": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 17}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]{3}$"},
    "nested": {
        "type": "object",
        "properties": {
            "box": {
                "type": "object",
                "properties": {
                    "x": {"type": "number", "minimum": 0, "maximum": 1},
                    "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
                },
                "required": ["x"],
                "additionalProperties": False,
            }
        },
        "required": ["box"],
        "additionalProperties": False,
    },
}
FORCED = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}


LONG = {"type": "array", "items": {"type": "boolean"}, "minItems": 500}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def grammars(shipped: VLM) -> Grammars:
    ends = [shipped.processor.tokenizer.eos_token_id]
    return Grammars(shipped.processor.tokenizer, shipped.adapter.vocabulary, ends)


def answer(shipped: VLM, grammars: Grammars, schema: Any, seed: int, **more: Any) -> Any:
    form = {"type": "json_object"} if schema is None else as_format(schema)
    more = {"max_new_tokens": 120, **more}
    if seed:
        more |= {"do_sample": True, "temperature": 1.5, "seed": seed}
    return shipped.ask(
        "What is here?",
        make_image(seed=seed),
        logits_processor=[grammars.processor(form)],
        **more,
    )


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_answers_follow_their_schema(shipped: VLM, grammars: Grammars, name: str) -> None:
    complete = 0
    for seed in range(4):
        found = answer(shipped, grammars, SCHEMAS[name], seed)
        if found.finish_reason == "stop":
            complete += 1
            jsonschema_rs.validate(SCHEMAS[name], json.loads(found.text))
    assert complete > 0
    plain = shipped.ask("What is here?", make_image(), max_new_tokens=60)
    with pytest.raises(ValueError):
        jsonschema_rs.validate(SCHEMAS[name], json.loads(plain.text))


def test_json_objects(shipped: VLM, grammars: Grammars) -> None:
    complete = 0
    for seed in range(6):
        found = answer(shipped, grammars, None, seed)
        assert found.text.startswith("{")
        if found.finish_reason == "stop":
            complete += 1
            assert isinstance(json.loads(found.text), dict)
    assert complete > 0


def test_text_has_no_grammar(grammars: Grammars) -> None:
    assert grammars.processor({"type": "text"}) is None


def test_a_long_answer_ends_by_its_length(shipped: VLM, grammars: Grammars) -> None:
    found = answer(shipped, grammars, LONG, 0, max_new_tokens=60)
    assert found.finish_reason == "length" and found.text.startswith("[")


def test_a_schema_that_forces_an_endless_answer_is_refused(served: Any) -> None:
    found = served.chat(response_format=as_format(FORCED), max_tokens=60)
    error = found.json()["error"]
    assert found.status_code == 400 and "cannot be followed" in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400


def test_large_patterns_are_answered_or_refused(served: Any) -> None:
    bomb = {"type": "string", "pattern": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"}
    found = served.chat(response_format=as_format(bomb), max_tokens=8)
    assert found.status_code in (200, 400)


def test_drafts_do_not_change_the_answer(shipped: VLM, grammars: Grammars) -> None:
    plain = answer(shipped, grammars, LONG, 0, max_new_tokens=60)
    drafted = answer(shipped, grammars, LONG, 0, max_new_tokens=60, recipe="draft-ngram")
    assert drafted.stats.accepted > 0
    assert drafted.token_ids == plain.token_ids


def test_repeated_calls_agree(shipped: VLM, grammars: Grammars) -> None:
    """A strict answer may ask twice for the same ids; scores beyond the tokenizer are masked."""
    processor = grammars.processor(as_format(SCHEMAS["enum"]))
    wide = shipped.adapter.vocabulary + 40
    ids, scores = torch.tensor([[1, 2, 3]]), torch.zeros(1, wide)
    first = processor(ids, scores)
    assert torch.equal(first, processor(ids, scores)) and not scores.any()
    assert bool(first[:, shipped.adapter.vocabulary :].isinf().all())
    token = int(first.argmax())
    after = processor(torch.cat([ids, torch.tensor([[token]])], dim=1), scores)
    assert not torch.equal(first, after)  # the control


def test_one_compiled_schema_serves_many_requests(grammars: Grammars) -> None:
    form = as_format(SCHEMAS["enum"])
    one, two = grammars.processor(form), grammars.processor(form)
    ids, scores = torch.tensor([[1]]), torch.zeros(1, 512)
    first = one(ids, scores)
    one(torch.tensor([[1, int(first.argmax())]]), scores)
    assert torch.equal(two(ids, scores), first)


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(900):
    DEEP = {"type": "array", "items": DEEP}

BAD: dict[str, Any] = {
    "type": {"type": "thing"},
    "properties": {"type": "object", "properties": 5},
    "remote": {"$ref": "https://example.com/schema.json"},
    "file": {"$ref": "file:///etc/passwd"},
    "missing": {"$ref": "#/$defs/none"},
    "regex": {"type": "string", "pattern": "(((("},
    "empty range": {"type": "integer", "minimum": 5, "maximum": 3},
    "large": {"enum": ["x" * 20 + str(n) for n in range(5000)]},
    "unsupported": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
    "deep": DEEP,
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_schemas_are_refused(grammars: Grammars, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.processor(as_format(BAD[name]))
    assert caught.value.status == 400
    assert caught.value.param == "response_format.json_schema.schema"
    assert "\n" not in caught.value.message and len(caught.value.message) < 400
    assert grammars.processor(as_format(SCHEMAS["enum"])) is not None


def test_streamed_json_validates(served: Any) -> None:
    schema = SCHEMAS["nested"]
    options = {"response_format": as_format(schema), "temperature": 1.2, "seed": 3}
    plain = served.chat(max_tokens=150, **options).json()["choices"][0]
    streamed = served.chat(max_tokens=150, stream=True, **options).text
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
    assert text == plain["message"]["content"] and plain["finish_reason"] == "stop"
    jsonschema_rs.validate(schema, json.loads(text))


def test_responses_have_the_same_formats(served: Any) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMAS["enum"], "strict": True}
    body = {"model": "tiny", "input": "Which?", "text": {"format": form}}
    found = served.post("/v1/responses", body).json()["output"][0]["content"][0]["text"]
    jsonschema_rs.validate(SCHEMAS["enum"], json.loads(found))
    bad = {"type": "json_schema", "name": "answer", "schema": {"type": "thing"}}
    assert served.post("/v1/responses", {**body, "text": {"format": bad}}).status_code == 400
