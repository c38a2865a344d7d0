"""Parts of requests that `server_fuzz` draws: JSON schemas, bulk, and histories that are echoed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

# Near the ends of integers and of floats, and some that are usual.
EDGES = (-(2**63), 2**63, -(2**64), 2**64, -(2**53), 2**53, 2**31, -(2**31), 10**18, -(10**22), 0)
NUMBERS = (*range(9), -1, 10**6, 255, 0.5, -0.25, 1e-7, 1e-300, 5e-324)

PATTERNS = (
    *("a{%d}.*", ".*a{%d}", ".*a%d.*", "(a|b)*a(a|b){%d}", "(a{%d}){%d}", "^[a-z]{1,%d}$", "x%d"),
    *("(.*a){%d}b", "[^%d]+", "(a?){%d}a{%d}", "(%d|a)+$", "\\\\d{%d}-\\\\w+", "(?=a)%d", "(%d"),
)
WORDS = ("a", "b", "", "type", "\n", "\u2028", "x" * 300, "é", "$ref")


def number(rng: random.Random) -> float:
    """A number near an edge of its type, or one of a few others."""
    if rng.random() < 0.15:
        near = rng.choice(EDGES) + rng.choice((-1025, -1024, -513, -512, -2, -1, 0, 1, 2, 1024))
        return float(near) if rng.random() < 0.2 else near
    return rng.choice(NUMBERS)


def pattern(rng: random.Random) -> str:
    text = rng.choice(PATTERNS)
    return text % tuple(rng.choice((1, 2, 9, 60, 1000)) for _ in range(text.count("%d")))


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A JSON schema: most are accepted, some are hostile, some are none."""
    kinds: tuple[Callable[[random.Random, int], Any], ...] = _SIMPLE
    if depth < 5:
        kinds += _NESTED
    if depth == 0:
        kinds += _WHOLE
    return rng.choice(kinds)(rng, depth)


def _integer(rng: random.Random, depth: int) -> Any:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    chosen = rng.sample(names, rng.randrange(1, 4))
    return {"type": rng.choice(("integer", "number"))} | {name: number(rng) for name in chosen}


def _value(rng: random.Random, depth: int) -> Any:
    values = [number(rng) if rng.random() < 0.7 else rng.choice(WORDS) for _ in range(3)]
    nested = {"a": values, "b": {"c": number(rng)}}
    return rng.choice(
        ({"const": values[0]}, {"enum": values}, {"const": nested}, {"enum": [nested]})
    )


def _string(rng: random.Random, depth: int) -> Any:
    found: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.7:
        found["pattern"] = pattern(rng)
    if rng.random() < 0.3:
        found[rng.choice(("minLength", "maxLength"))] = rng.choice((0, 3, 1000, 10**6, 2**63))
    if rng.random() < 0.2:
        found["format"] = rng.choice(("date-time", "uuid", "email", "ipv6", "uri", "nothing"))
    return found


def _plain(rng: random.Random, depth: int) -> Any:
    return rng.choice(
        ({"type": "boolean"}, {"type": "null"}, {}, True, {"type": ["string", "null"]})
    )


def _object(rng: random.Random, depth: int) -> Any:
    names = [rng.choice(WORDS) + str(n) for n in range(rng.choice((1, 2, 3, 8)))]
    found = {"type": "object", "properties": {name: schema(rng, depth + 1) for name in names}}
    if rng.random() < 0.5:
        found["required"] = names[: rng.randrange(len(names) + 1)]
    if rng.random() < 0.4:
        found["additionalProperties"] = rng.choice((False, True, schema(rng, depth + 1)))
    if rng.random() < 0.2:
        found["patternProperties"] = {pattern(rng): schema(rng, depth + 1) for _ in range(3)}
    return found


def _array(rng: random.Random, depth: int) -> Any:
    found = {"type": "array", "items": schema(rng, depth + 1)}
    if rng.random() < 0.4:
        found[rng.choice(("minItems", "maxItems"))] = rng.choice((0, 1, 5, 1000, 2**31, 2**63))
    if rng.random() < 0.2:
        found["prefixItems"] = [schema(rng, depth + 1) for _ in range(3)]
    return found


def _together(rng: random.Random, depth: int) -> Any:
    key, count = rng.choice(("allOf", "anyOf", "oneOf")), rng.choice((1, 2, 3, 6))
    found: dict[str, Any] = {key: [schema(rng, depth + 1) for _ in range(count)]}
    return found | (_string(rng, depth) if rng.random() < 0.3 else {})


def _patterns(rng: random.Random, depth: int) -> Any:
    """Many patterns that hold together, or one of which does."""
    text, count = rng.choice(PATTERNS[:7]), rng.choice((4, 8, 9, 60, 200))
    parts = [{"pattern": text % ((n + 1,) * text.count("%d"))} for n in range(count)]
    return {"type": "string", rng.choice(("allOf", "allOf", "anyOf", "oneOf")): parts}


def _product(rng: random.Random, depth: int) -> Any:
    """Alternatives of which each combination is possible."""
    width, count = rng.choice((2, 9, 30)), rng.choice((2, 4, 9))
    made = rng.choice(
        (
            lambda n, m: {"minimum": 31 * n + m},
            lambda n, m: {"properties": {f"a{n}{m}": {"type": "integer"}}},
            lambda n, m: {"pattern": f"{m}.*{n}"},
            lambda n, m: {"enum": list(range(m, m + 20))},
        )
    )
    key = rng.choice(("anyOf", "oneOf"))
    return {"allOf": [{key: [made(n, m) for m in range(width)]} for n in range(count)]}


def _chain(rng: random.Random, depth: int) -> Any:
    """Definitions of which each refers to the next one, and the last one maybe to the first."""
    count = rng.choice((3, 20, 100, 900))
    step = rng.choice(
        (
            lambda n, link: {"pattern": f".*a{n}.*"} | link,
            lambda n, link: {"items": link},
            lambda n, link: {"allOf": [link]},
            lambda n, link: {"anyOf": [link, link]},
            lambda n, link: {"properties": {"a": link, "b": link}},
        )
    )
    links = {f"a{n}": step(n, {"$ref": f"#/$defs/a{n + 1}"}) for n in range(count)}
    last = {"$ref": "#/$defs/a0"} if rng.random() < 0.2 else {"type": "string"}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": last}}


def _deep(rng: random.Random, depth: int) -> Any:
    found = schema(rng, depth + 4)
    for _ in range(rng.choice((30, 100, 200, 500))):
        key = rng.choice(("items", "properties", "allOf", "not", "additionalProperties"))
        found = {key: {"a": found} if key == "properties" else [found] if key == "allOf" else found}
    return found


def _many(rng: random.Random, depth: int) -> Any:
    count = rng.choice((100, 1000, 3000))
    return rng.choice(
        (
            {"enum": [number(rng) for _ in range(count)]},
            {"properties": {f"a{n}": {"type": "string"} for n in range(count)}},
            {"properties": {f"a{n}": {"pattern": f"a{n}.*"} for n in range(count // 10)}},
            {"anyOf": [{"minimum": n} for n in range(count)]},
            {"patternProperties": {f"^a{n}.*": {} for n in range(count // 20)}},
        )
    )


_SIMPLE = (_integer, _value, _string, _plain)
_NESTED = (_object, _array, _together)
_WHOLE = (_patterns, _product, _chain, _deep, _many)


# --- bodies --------------------------------------------------------------------------------------


def bulk(rng: random.Random, body: dict[str, Any]) -> None:
    """Fill one field of a request with many values of a wrong type, or many unknown names."""
    count = rng.choice((1000, 30_000, 100_000, 300_000))
    values = [rng.choice((1, None, [], {}, "a", True, {"type": "x"}, {"type": "text", "text": ""}))]
    key = "messages" if "messages" in body else "input"
    match rng.randrange(6):
        case 0:
            body[key] = [{"role": "user", "content": values * count}]
        case 1:
            body[key] = values * count
        case 2:
            body[rng.choice(("stop", "modalities", "tools", "include", "unknown"))] = values * count
        case 3:
            name = rng.choice(
                ("metadata", "logit_bias", "stream_options", "text", "response_format")
            )
            body[name] = {str(n): values[0] for n in range(count)}
        case 4:
            body.update({f"a{n}": 1 for n in range(count)})
        case _:
            parts = [{"type": "text", "text": ""}] * 40
            body[key] = [{"role": "user", "content": parts}] * min(count // 10, 5000)


def echo(rng: random.Random, body: dict[str, Any]) -> None:
    """Add a former answer, with fields that are null, empty or wrong, and the question again."""
    key = "messages" if "messages" in body else "input"
    text = rng.choice((None, "", "a circle", [], [{"type": "text", "text": "no"}], 5))
    said: dict[str, Any] = {"role": "assistant", "content": text}
    names = (
        *("refusal", "audio", "function_call", "tool_calls", "annotations", "parsed", "name"),
        *("id", "status", "type", "phase", "logprobs", "reasoning", "weight"),
    )
    values = (None, None, None, [], "", "message", "completed", {}, [{}], 1)
    said |= {name: rng.choice(values) for name in rng.sample(names, rng.randrange(6))}
    if key == "input" and rng.random() < 0.5:
        part = {"type": "output_text", "text": "no", "annotations": rng.choice((None, [], [1]))}
        said |= {"type": "message", "content": [part], "status": "completed", "id": "msg_1"}
    if key == "input" and rng.random() < 0.3:
        thought = {"type": "reasoning", "id": "rs_1", "summary": rng.choice((None, [], 1))}
        body[key] = [*body[key], thought]
    body[key] = [*body[key], said, *body[key][:1]]
    nulls = (
        "verbosity",
        "tools",
        "stop",
        "metadata",
        "text",
        "reasoning",
        "top_logprobs",
        "weight",
    )
    body.update(dict.fromkeys(rng.sample(nulls, rng.randrange(3))))
