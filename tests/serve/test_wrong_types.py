"""Wrong types in every field of a request, nested ones included: refused with the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

from pydantic import BaseModel

from support import server_fuzz
from vlmfast.serve.responses import ResponsesRequest
from vlmfast.serve.schema import ChatRequest
from vlmfast.serve.tokens import TokenizeRequest

REQUESTS = {
    server_fuzz.CHAT: ChatRequest,
    server_fuzz.RESPONSES: ResponsesRequest,
    server_fuzz.TOKENIZE: TokenizeRequest,
}
# One value of each type of JSON; 1.5 is a number and no integer.
VALUES = {
    "null": None,
    "boolean": True,
    "integer": 7,
    "number": 1.5,
    "string": "a",
    "array": [],
    "object": {},
}
# Of values that a schema names.
NAMES = {type(None): "null", bool: "boolean", int: "integer", str: "string"}


class Walk:
    """The fields of a request and what is wrong for them, by its JSON schema.

    Parameters
    ----------
    model : type of BaseModel
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._schema = model.model_json_schema()

    def example(self) -> Any:
        """A request that has only what is required."""
        return self._example(self._schema)

    def wrong(self) -> Iterator[tuple[str, str, Any]]:
        """Requests that are wrong in one field: its location, the one reported, the request."""
        yield from self._nested(self._schema, "")

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            return self._schema["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    def _alternatives(self, schema: dict[str, Any], key: str = "") -> list[dict[str, Any]]:
        """The schemas that a value may follow, each with the field by which it is chosen."""
        schema = self._resolved(schema)
        parts = schema.get("anyOf") or schema.get("oneOf")
        if not parts:
            return [{**schema, "chosen by": key}]
        key = schema.get("discriminator", {}).get("propertyName", "")
        return [of for part in parts for of in self._alternatives(part, key)]

    def _types(self, schema: dict[str, Any]) -> set[str]:
        """The types of JSON that a value may have."""
        found: set[str] = set()
        for part in self._alternatives(schema):
            if "const" in part or "enum" in part:
                values = part.get("enum", [part.get("const")])
                found |= {NAMES[type(value)] for value in values}
            elif "type" in part:
                found |= {part["type"]}
            else:
                return set(VALUES)
        return found | ({"integer"} if "number" in found else set())

    def _example(self, schema: dict[str, Any]) -> Any:
        part = self._alternatives(schema)[0]
        if "const" in part or "enum" in part:
            return part.get("enum", [part.get("const")])[0]
        if part["type"] == "object":
            fields = part.get("properties", {})
            return {name: self._example(fields[name]) for name in part.get("required", ())}
        if part["type"] == "array":
            return [self._example(part["items"])] * part.get("minItems", 0)
        return VALUES[part["type"]]

    def _nested(self, schema: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
        """Values that are wrong within, whatever alternative they follow."""
        for part in self._alternatives(schema):
            if part.get("type") == "array" and part.get("maxItems") != 0:
                for at, reported, value in self._all(part["items"], f"{path}[0]", path):
                    yield at, reported, [value]
            if part.get("type") != "object":
                continue
            example = self._example(part)
            fields = dict(part.get("properties", {}))
            more = part.get("additionalProperties")
            if isinstance(more, dict) and part.get("maxProperties") != 0:
                fields["any"] = more
            for name, field in fields.items():
                here = f"{path}.{name}".removeprefix(".")
                for at, reported, value in self._all(field, here, path):
                    # By this field an alternative is chosen: with none, the whole object is wrong.
                    # Reasoning is chosen by its type, from among messages, which need none.
                    chosen = name == part["chosen by"] or part.get("title") == "Reasoning"
                    chosen = chosen and name in part["required"]
                    yield at, path if chosen else reported, {**example, name: value}

    def _all(self, schema: dict[str, Any], path: str, outer: str) -> Iterator[tuple[str, str, Any]]:
        """Values of a wrong type, and those that are wrong within."""
        types = self._types(schema)
        for name, value in VALUES.items():
            if name not in types:
                yield path, path, value
        for part in self._alternatives(schema):
            # Equal to what is allowed, of another type: 0 for false, true for 1.
            if isinstance(only := part.get("const"), int):
                yield path, path, int(only) if isinstance(only, bool) else bool(only)
        yield from self._nested(schema, path)


def test_wrong_types_in_every_field_are_refused(served: Any) -> None:
    seen: dict[str, set[str]] = {}
    wrong: list[str] = []
    with served.client() as client:
        for path, model in REQUESTS.items():
            walk = Walk(model)
            model.model_validate(walk.example())  # which is wrong in nothing
            for at, reported, body in walk.wrong():
                seen.setdefault(path, set()).add(at)
                if body["model"] == VALUES["string"]:
                    body["model"] = "tiny"
                response = client.post(path, json=body)
                shown = f"{path} {at}: {json.dumps(body)[:200]}: {response.status_code}"
                if response.status_code != 400:
                    wrong.append(shown)
                    continue
                error = response.json()["error"]
                problem = server_fuzz.wrong_error(response.text)
                if problem or error["param"] != reported:
                    wrong.append(f"{shown}, {problem}, {error}")
        assert client.get("/health").status_code == 200
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])
    assert {
        "messages[0]",
        "messages[0].content[0].image_url.url",
        "messages[0].content[0].video_url",
        "response_format.json_schema.schema",
        "stream_options.include_usage",
        "metadata.any",
        "stop[0]",
    } <= seen[server_fuzz.CHAT]
    assert {"input[0].content[0].image_url", "text.format.schema"} <= seen[server_fuzz.RESPONSES]
    assert "messages[0].content[0].text" in seen[server_fuzz.TOKENIZE]
    assert all(
        seen[path] >= set(model.model_fields) - {"model"} for path, model in REQUESTS.items()
    )
