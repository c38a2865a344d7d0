"""Which JSON schemas are compiled: bounds on everything whose time and memory grow with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from .errors import RequestError

_MAX_BYTES = 64 << 10
# llguidance compiles nested schemas and references by recursion, at up to 7 KB of the thread's
# stack (2 MB at least) a level, and crashes the process when it is full.
_MAX_LEVELS = 250
# It bounds the time of other keywords itself, but not of these: the states of an automaton that
# divides by the least common multiple, and comparisons of each pattern with all others.
_MAX_MULTIPLE = 1000
_MAX_PATTERNS = 32
# The patterns of an allOf become one automaton, whose states are tuples of theirs, its alternatives
# are combined each with each, and the time of a token is quadratic in their number: 0.01 s.
_MAX_INTERSECTED = 8
_MAX_ALTERNATIVES = 256
# Beyond, integers are written with an exponent; -2**63 in double precision recurses without end.
_SMALLEST, _LARGEST = -(2**63) + 1024, 2**63


def checked(schema: dict[str, Any], param: str) -> str:
    """The text of a schema that llguidance compiles in bounded time and stack.

    Raises
    ------
    RequestError
    """
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except RecursionError as error:
        raise refused("it is nested too deeply", param) from error
    except (TypeError, ValueError) as error:
        raise refused("it is not JSON", param) from error
    reason = next(_reasons(schema, len(text)), None)
    if reason is not None:
        raise refused(reason, param)
    return text


def _reasons(schema: dict[str, Any], size: int) -> Iterator[str]:
    """Why a schema of ``size`` bytes is not compiled."""
    if size > _MAX_BYTES:
        yield f"it has {size} bytes, and {_MAX_BYTES} are allowed"
    if "x-guidance" in schema:
        yield "the keyword x-guidance is not supported"
    values = list(_values(schema))
    if not all(_SMALLEST <= value <= _LARGEST for value, _ in values if _is_number(value)):
        yield "a number in it is not between -2**63 + 1024 and 2**63"
    objects = [(value, depth) for value, depth in values if isinstance(value, dict)]
    references = {ref for one, _ in objects if isinstance(ref := one.get("$ref"), str)}
    if any(not ref.startswith("#") for ref in references):
        yield "each $ref must begin with #, as only the schema itself is read"
    deepest = max(depth for _, depth in objects)
    # A reference by n names is to an object that contains n levels less than the whole.
    levels = deepest + sum(max(deepest - ref.count("/"), 0) for ref in references)
    if min(levels, len(objects)) > _MAX_LEVELS:
        yield f"it has more than {_MAX_LEVELS} levels, references included"
    multiples = {one["multipleOf"] for one, _ in objects if _is_number(one.get("multipleOf"))}
    if math.lcm(*map(_digits, multiples)) > _MAX_MULTIPLE:
        yield f"the least common multiple of its multipleOf has more than {_MAX_MULTIPLE} steps"
    patterns = [one["patternProperties"] for one, _ in objects if "patternProperties" in one]
    if sum(len(found) for found in patterns if isinstance(found, dict)) > _MAX_PATTERNS:
        yield f"it has more than {_MAX_PATTERNS} patternProperties"
    found: dict[int, tuple[int, int]] = {}  # patterns and alternatives, by the object's id
    for one, _ in reversed(objects):  # parts before what contains them
        parts = {
            key: [found[id(part)] for part in one[key] if isinstance(part, dict)]
            for key in ("allOf", "anyOf", "oneOf")
            if isinstance(one.get(key), list)
        }
        whole = parts.pop("allOf", [])
        combined = ("pattern" in one) + sum(count for count, _ in whole)
        alternatives = math.prod(count for _, count in whole)
        for chosen in parts.values():
            combined += max((count for count, _ in chosen), default=0)
            alternatives *= sum(count for _, count in chosen) or 1
        if combined > _MAX_INTERSECTED:
            yield f"an allOf in it combines more than {_MAX_INTERSECTED} patterns"
        if alternatives > _MAX_ALTERNATIVES:
            yield (
                f"it has more than {_MAX_ALTERNATIVES} alternatives in one place, "
                "combinations included"
            )
        found[id(one)] = combined, alternatives


def _values(schema: dict[str, Any]) -> Iterator[tuple[Any, int]]:
    """Every value in a schema, outer ones first, with its depth from 1 on."""
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(value: float) -> int:
    """The significant digits of a number as an integer: 25 for 0.25, 3 for 300, 1 for 0."""
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))) or 1


def refused(why: str, param: str) -> RequestError:
    why = " ".join(why.split())
    why = why if len(why) <= 160 else f"{why[:160]}..."
    return RequestError(f"{param} cannot be used: {why}", param=param)
