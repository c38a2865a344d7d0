"""Response formats and penalties over HTTP, and text that streams: settings reach the engine."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs

from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.serve.penalties import OpenAIPenalties


def record(optional: dict[str, Any] | None = None, **needed: Any) -> dict[str, Any]:
    """The schema of an object."""
    found = {"type": "object", "properties": needed | (optional or {}), "required": [*needed]}
    return found | {"additionalProperties": False}


ENUM = record(shape={"enum": ["square", "circle", "star"]})
TAGS = {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}}
NESTED = record(box=record(TAGS, x={"type": "number", "minimum": 0, "maximum": 1}))
FORCED = {"$ref": "#/$defs/node", "$defs": {"node": record(next={"$ref": "#/$defs/node"})}}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_a_schema_that_never_ends_is_followed_to_the_length(served: Any) -> None:
    found = served.chat(response_format=as_format(FORCED), max_tokens=60).json()["choices"][0]
    assert found["finish_reason"] == "length"
    assert found["message"]["content"].startswith('{"next":')


def test_hostile_schemas_are_refused(served: Any) -> None:
    """Those of test_grammars.py, by the server."""
    for bad in ({"type": "integer", "multipleOf": 62710561}, {"$ref": "#/$defs/none"}):
        found = served.chat(response_format=as_format(bad), max_tokens=4)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["param"] == "response_format.json_schema.schema"
    bomb = {"type": "string", "pattern": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"}
    found = served.chat(response_format=as_format(bomb), max_tokens=8)
    assert found.status_code in (200, 400)


def text_of(stream: str) -> str:
    """The text of a streamed answer."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


def test_events_are_lines_to_every_client(served: Any) -> None:
    """Some split a text at more characters than the standard of events names."""
    text = "a\u0085b\u2028c\u2029d"
    options = {"response_format": as_format({"const": text}), "max_tokens": 60, "stream": True}
    streamed = served.chat(**options).text
    assert all(line.startswith("data: ") for line in streamed.splitlines() if line)
    assert json.loads(text_of(streamed)) == text


def test_streamed_json_validates(served: Any) -> None:
    options = {"response_format": as_format(NESTED), "temperature": 1.2, "seed": 3}
    plain = served.chat(max_tokens=150, **options).json()["choices"][0]
    text = text_of(served.chat(max_tokens=150, stream=True, **options).text)
    assert text == plain["message"]["content"] and plain["finish_reason"] == "stop"
    jsonschema_rs.validate(NESTED, json.loads(text))


def test_responses_have_the_same_formats(served: Any) -> None:
    form = {"type": "json_schema", "name": "answer", "schema": ENUM, "strict": True}
    body = {"model": "tiny", "input": "Which?", "text": {"format": form}}
    found = served.post("/v1/responses", body).json()["output"][0]["content"][0]["text"]
    jsonschema_rs.validate(ENUM, json.loads(found))
    bad = {"type": "json_schema", "name": "answer", "schema": {"type": "thing"}}
    assert served.post("/v1/responses", {**body, "text": {"format": bad}}).status_code == 400


def test_penalties_reach_the_engine(served: Any, shipped: VLM) -> None:
    changed = 0
    for seed in range(5):
        given = {"logits_processor": [OpenAIPenalties(2.0, 2.0)], "max_new_tokens": 24}
        expected = shipped.ask("Describe it.", make_image(seed=seed), **given).text
        body = {"max_tokens": 24, "model": "full"}
        plain = served.chat("Describe it.", seed, **body).json()
        body |= {"frequency_penalty": 2, "presence_penalty": 2}
        found = served.chat("Describe it.", seed, **body).json()
        assert found["choices"][0]["message"]["content"] == expected
        changed += expected != plain["choices"][0]["message"]["content"]
    assert changed  # the control
