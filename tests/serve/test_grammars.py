"""Structured output: answers parse and follow their schema; hostile schemas are refused."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import jsonschema_rs
import torch
from pydantic_core import from_json
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from support import fuzz_bodies
from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.errors import DeadlineExceeded
from vlmfast.serve.errors import RequestError
from vlmfast.serve.grammar_compiler import MAX_TOKEN_S
from vlmfast.serve.grammars import Grammars
from vlmfast.serve.text import TextStream

SHAPE = {"enum": ["circle", "star", "ring"]}


def record(optional: dict[str, Any] | None = None, **needed: Any) -> dict[str, Any]:
    """The schema of an object."""
    found = {"type": "object", "properties": needed | (optional or {}), "required": [*needed]}
    return found | {"additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "nested": record(a=record(shape=SHAPE, large={"type": "boolean"}), n={"type": "null"}),
    "enum": SHAPE,
    "range": record(n={"type": "integer", "minimum": -3, "maximum": 250}),
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "pattern": record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "optional": record({"a": SHAPE, "c": {"type": "null"}}, b={"type": "boolean"}),
    "tree": record({"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, v=SHAPE),
}


@pytest.fixture(scope="module")
def grammars(vlm: VLM) -> Grammars:
    tokenizer = vlm.processor.tokenizer
    return Grammars(tokenizer, vlm.adapter.vocabulary, [tokenizer.eos_token_id])


def formatted(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def ask(vlm: VLM, processor: Any, **more: Any) -> Any:
    processors = [] if processor is None else [processor]
    more = {"max_new_tokens": 64, **more}
    return vlm.ask("Describe it.", make_image(), logits_processor=processors, **more)


def is_complete(vlm: VLM, answer: Any) -> bool:
    return answer.token_ids[-1] == vlm.processor.tokenizer.eos_token_id


# --- answers -------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_follow_their_schema(
    vlm: VLM, grammars: Grammars, name: str, seed: int | None
) -> None:
    sampled = {} if seed is None else {"do_sample": True, "seed": seed, "temperature": 1.5}
    stream, prefixes = TextStream(vlm.processor.tokenizer), []

    class Streamer:
        def put(self, token: Any) -> None:
            stream.put(token)
            prefixes.append(stream.text)

        def end(self) -> None:
            stream.end()

    processor = grammars.processor(formatted(SCHEMAS[name]))
    answer = ask(vlm, processor, streamer=Streamer(), **sampled)
    assert is_complete(vlm, answer)
    jsonschema_rs.validate(SCHEMAS[name], json.loads(answer.text))
    assert stream.text == answer.text
    for prefix in filter(None, prefixes):
        from_json(prefix, allow_partial="trailing-strings")


def test_answers_without_a_grammar_do_not_parse(vlm: VLM) -> None:
    """The control."""
    with pytest.raises(json.JSONDecodeError):
        json.loads(ask(vlm, None).text)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_json_objects(vlm: VLM, grammars: Grammars, seed: int) -> None:
    processor = grammars.processor({"type": "json_object"})
    sampled = {"do_sample": True, "seed": seed, "temperature": 1.2}
    answer = ask(vlm, processor, max_new_tokens=120, **(sampled if seed else {}))
    if is_complete(vlm, answer):
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert isinstance(from_json(answer.text, allow_partial="trailing-strings"), dict)


@pytest.mark.cases(1)
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 5}])
def test_drafts_do_not_change_the_answer(
    vlm: VLM, grammars: Grammars, sampled: dict[str, Any]
) -> None:
    schema = {"type": "array", "items": record(shape=SHAPE), "minItems": 5, "maxItems": 5}

    def answer(recipe: str) -> Any:
        processor = grammars.processor(formatted(schema))
        return ask(vlm, processor, recipe=recipe, max_new_tokens=120, **sampled)

    drafted = answer("draft-ngram")
    assert drafted.token_ids == answer("none").token_ids
    assert drafted.stats.accepted > 0


# --- the processor -------------------------------------------------------------------------------


def allowed(processor: Any, vlm: VLM, text: str, width: int = 512) -> set[int]:
    """Allowed tokens after a text, read token by token."""
    ids = [1, 7, *vlm.processor.tokenizer(text, add_special_tokens=False).input_ids]
    for length in range(2, len(ids) + 1):
        scores = processor(torch.tensor([ids[:length]]), torch.zeros(1, width))
    return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())


def test_repeated_ids_get_the_same_scores(grammars: Grammars) -> None:
    processor = grammars.processor(formatted(SHAPE))
    scores, ids = torch.randn(1, 512), torch.tensor([[1, 2, 3]])
    kept = scores.clone()
    first = processor(ids, scores)
    assert torch.equal(processor(ids, scores), first) and torch.equal(scores, kept)
    token = first.argmax(-1, keepdim=True)
    assert torch.equal(first[0, token[0]], scores[0, token[0]])
    more = torch.cat([ids, token], dim=1)
    second = processor(more, scores)
    assert torch.equal(processor(more, scores), second)
    assert not torch.equal(first, second)


def test_padded_scores_are_masked(vlm: VLM, grammars: Grammars) -> None:
    for width in (512, 520, 600):
        found = allowed(grammars.processor(formatted(SHAPE)), vlm, "", width)
        assert found and max(found) < 512


def test_only_end_tokens_follow_a_complete_value(vlm: VLM) -> None:
    grammars = Grammars(vlm.processor.tokenizer, 512, [2, 0])
    assert allowed(grammars.processor(formatted(SHAPE)), vlm, '"star"') == {0, 2}
    assert not allowed(grammars.processor(formatted(SHAPE)), vlm, '"st') & {0, 2}
    integer = grammars.processor(formatted({"type": "integer", "maximum": 500}))
    assert allowed(integer, vlm, "12") > {0, 2}


def test_one_space_may_follow_a_separator(vlm: VLM, grammars: Grammars) -> None:
    tokenizer = vlm.processor.tokenizer
    for before, spaced in (
        *(("{", False), ('{"a":1', False), ('{"a": ', False), ('{"a":1, ', False)),
        *(('{"a":', True), ('{"a":1,', True)),
    ):
        processor = grammars.processor({"type": "json_object"})
        found = tokenizer.convert_ids_to_tokens(sorted(allowed(processor, vlm, before)))
        # As byte-level tokenizers write a space, a newline and a tab.
        blank = [token for token in found if token.startswith(("Ġ", "Ċ", "ĉ"))]
        assert found and bool(blank) is spaced and ("Ġ" in blank) is spaced


def test_a_token_outside_the_grammar_is_a_defect(grammars: Grammars) -> None:
    processor = grammars.processor(formatted(SHAPE))
    processor(torch.tensor([[1, 7]]), torch.zeros(1, 512))
    with pytest.raises(RuntimeError, match="does not follow the grammar"):
        processor(torch.tensor([[1, 7, 300]]), torch.zeros(1, 512))


def test_endless_forced_text_ends_the_request(vlm: VLM, grammars: Grammars) -> None:
    """Arrays in arrays, without anything else that may follow."""
    schema = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    with pytest.raises(RequestError, match="cannot be followed further"):
        ask(vlm, grammars.processor(formatted(schema)))


def test_a_grammar_that_becomes_too_complex_ends_the_request(vlm: VLM, grammars: Grammars) -> None:
    many = {f"p{n}": {"type": "string"} for n in range(1500)}
    processor = grammars.processor(formatted({"type": "object", "properties": many}))
    with pytest.raises(RequestError, match="cannot be followed further") as found:
        ask(vlm, processor)
    assert found.value.status == 400
    assert found.value.param == "response_format.json_schema.schema"


# --- requests ------------------------------------------------------------------------------------


def test_unknown_formats_are_refused(grammars: Grammars) -> None:
    assert grammars.processor({"type": "text"}) is None  # text needs none
    for given in ({}, {"type": "xml"}, {"type": None}, [], None):
        with pytest.raises(RequestError, match="must be one of") as found:
            grammars.processor(given, param="text.format")
        assert found.value.param == "text.format.type"


def chain(count: int, step: Any) -> dict[str, Any]:
    links = {f"a{n}": step({"$ref": f"#/$defs/a{n + 1}"}) for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "integer"}}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def linked(count: int, step: Any) -> dict[str, Any]:
    """Definitions of which each contains what `step` makes, and the next one."""
    links = {f"a{n}": step(n) | {"$ref": f"#/$defs/a{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "string"}}}


BAD: dict[str, Any] = {
    "not an object": [1],
    "missing": None,
    "boolean": True,
    "unknown type": {"type": "strin"},
    "type of a wrong type": {"type": 5},
    "wrong properties": {"type": "object", "properties": [1]},
    "open group": {"type": "string", "pattern": "("},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "unsupported": {"not": {"type": "string"}},
    "unsupported array": {"type": "array", "uniqueItems": True},
    "no value": {"type": "integer", "minimum": 5, "maximum": 1},
    "empty enum": {"enum": []},
    "only itself": {"$ref": "#"},
    "only itself, twice": {"allOf": [{"$ref": "#"}]},
    "http": {"$ref": "http://127.0.0.1:9/schema"},
    "file": {"$ref": "file:///etc/passwd"},
    "relative": {"$ref": "other.json"},
    "missing definition": {"$ref": "#/$defs/none"},
    "not a number": {"type": "number", "minimum": float("nan")},
    "options": {"type": "object", "x-guidance": {"whitespace_flexible": True}},
    "deep": deep(10_000),
    "less deep": deep(200),
    "enormous enum": {"enum": [f"value {n}" for n in range(10_000)]},
    "enormous text": {"const": "x" * 70_000},
    # Each of these ends or hangs a process that compiles it.
    "chain of items": chain(1200, lambda link: {"items": link}),
    "chain of allOf": chain(1500, lambda link: {"allOf": [link]}),
    "long links": chain(400, lambda link: {"items": {"items": {"items": {"items": link}}}}),
    "large divisor": {"type": "integer", "multipleOf": 7919**2},
    "small divisor of many digits": {"type": "number", "multipleOf": 0.062710561},
    "divisors": {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991, 983)]},
    "divisors and zero": {"anyOf": [{"multipleOf": 0}, {"multipleOf": 7919**2}]},
    "constant of 64 bits": {"const": -(2**63)},
    "value of 64 bits": {"enum": [1, {"a": [-(2**63) + 1]}]},
    "float of 64 bits": {"const": -9.2233720368547758e18},
    "minimum of 64 bits": {"type": "integer", "minimum": -(2**63)},
    "maximum of 64 bits": {"type": "number", "maximum": -(2**63) + 1},
    "large number": {"const": 10**400},
    "patterns together": {
        "type": "string",
        "allOf": [{"pattern": f"a{{{n}}}.*"} for n in range(60)],
    },
    "patterns in levels": {"allOf": [{"anyOf": [{"allOf": [{"pattern": "a"}] * 9}]}]},
    "patterns of references": linked(20, lambda n: {"pattern": f".*a{n}.*"}),
    "many alternatives": {"anyOf": [{"minimum": n} for n in range(1000)]},
    "alternatives": {
        "allOf": [{"anyOf": [{"minimum": 9 * n + m} for m in range(9)]} for n in range(4)]
    },
    "patterns of names": {"patternProperties": {f"^a{n}.*b{n}$": {} for n in range(600)}},
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BAD)
def test_bad_schemas_are_refused(grammars: Grammars, name: str) -> None:
    with pytest.raises(RequestError) as found:
        grammars.processor(formatted(BAD[name]))
    assert found.value.status == 400
    assert found.value.param == "response_format.json_schema.schema"
    assert "\n" not in found.value.message and len(found.value.message) < 300


PATTERNS = ("((a{100}){100}){100}", "(.*a){20}(.{1000})", "(a|b)*a(a|b){25}")
LARGE: list[dict[str, Any]] = [
    *({"type": "string", "pattern": each} for each in PATTERNS),
    {"type": "string", "minLength": 10**7},
    {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
    {"type": "object", "minProperties": 10**8},
    chain(30, lambda link: {"anyOf": [link, link, {"type": "null"}]}),
    chain(40, lambda link: {"properties": {"a": {"items": link}}}),
    {"type": "object", "properties": {f"p{n}": {"multipleOf": 997} for n in range(200)}},
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schema", LARGE)
def test_large_schemas_are_followed(vlm: VLM, grammars: Grammars, schema: Any) -> None:
    assert ask(vlm, grammars.processor(formatted(schema)), max_new_tokens=8).token_ids


def unchecked(schema: Any, param: str) -> str:
    return json.dumps(schema)


def test_schemas_that_end_their_process_are_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bounds that keep most of them from being compiled at all."""
    monkeypatch.setattr("vlmfast.serve.grammars.checked", unchecked)
    for name, reason in {
        "constant of 64 bits": "too complex to compile",
        "patterns together": r"more than \d+ (MiB|s) to compile",
        "chain of items": "too complex to compile",
    }.items():
        with pytest.raises(RequestError, match=reason) as found:
            grammars.processor(formatted(BAD[name]))
        assert found.value.status == 400
    with pytest.raises(DeadlineExceeded):
        grammars.processor(formatted(BAD["patterns together"]), end=time.monotonic())
    assert grammars.processor(formatted({"const": "still compiled"}))
    grammars.close()
    assert grammars.processor(formatted({"const": "compiled by another process"}))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes by /proc")
def test_a_compilation_without_memory_is_not_the_fault_of_its_schema(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system kills the process that needs the most."""
    monkeypatch.setattr("vlmfast.serve.grammars.checked", unchecked)
    grammars.processor(formatted({"const": "started"}))

    def forked(number: int) -> list[int]:
        threads = Path(f"/proc/{number}/task").glob("*/children")
        found = [int(child) for thread in threads for child in thread.read_text().split()]
        return [child for child in found if b"grammar_compiler" in cmdline(child).read_bytes()]

    def cmdline(number: int) -> Path:
        return Path(f"/proc/{number}/cmdline")

    def kill() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if compiling := [each for own in forked(os.getpid()) for each in forked(own)]:
                os.kill(compiling[0], signal.SIGKILL)
                break
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(MemoryError, match="schemas cannot be compiled"):
        grammars.processor(formatted(BAD["patterns together"]))
    killer.join()
    assert grammars.processor(formatted({"const": "still compiled"}))


def test_schemas_of_all_requests_are_bounded(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    held = [grammars.processor(formatted(SHAPE))]
    monkeypatch.setattr("vlmfast.serve.grammars.MAX_BYTES", 1)
    with pytest.raises(RequestError) as found:
        grammars.processor(formatted(SHAPE))
    assert found.value.status == 429 and found.value.retry_after
    held.clear()
    monkeypatch.undo()
    assert grammars.processor(formatted(SHAPE))


def follow_drawn(vlm: VLM, grammars: Grammars, numbers: range) -> float:
    """Follow drawn schemas for a few tokens; the share of those that are not refused.

    The tokens that may follow take no longer later on than at first.
    """
    errors: list[RequestError] = []
    slowest = dict.fromkeys(numbers, 0.0)
    for number in numbers:
        rng = random.Random(f"schemas/{number}")
        ids = [1, 7]
        try:
            processor = grammars.processor(formatted(fuzz_bodies.schema(rng)))
            while len(ids) < 22 and ids[-1] != vlm.processor.tokenizer.eos_token_id:
                start = time.thread_time()
                scores = processor(torch.tensor([ids]), torch.zeros(1, 512))
                slowest[number] = max(slowest[number], time.thread_time() - start)
                ids.append(rng.choice(torch.isfinite(scores[0]).nonzero().flatten().tolist()))
        except RequestError as error:
            errors.append(error)
    assert {error.status for error in errors} == {400}
    assert all(error.param and "\n" not in error.message for error in errors)
    assert max(slowest.values()) < 10 * MAX_TOKEN_S, slowest
    return 1 - len(errors) / len(numbers)


def test_drawn_schemas_are_followed_or_refused(vlm: VLM, grammars: Grammars) -> None:
    assert 0.2 < follow_drawn(vlm, grammars, range(40)) < 0.8


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_drawn_schemas_are_followed_or_refused(
    vlm: VLM, grammars: Grammars, part: int
) -> None:
    assert 0.3 < follow_drawn(vlm, grammars, range(500 * part, 500 * part + 500)) < 0.7


def test_a_vocabulary_without_braces_is_refused() -> None:
    tokens = {token: index for index, token in enumerate(["</s>", *"abc\"',:0123456789"])}
    words = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken("</s>", special=True)])
    joined = Tokenizer(models.WordLevel(tokens, unk_token="a"))
    for made in (words, joined):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
        grammars = Grammars(tokenizer, len(tokens), [0])
        for given in ({"type": "json_object"}, formatted(SHAPE)):
            with pytest.raises(RequestError, match="cannot write JSON") as found:
                grammars.processor(given)
            assert found.value.status == 400
        assert grammars.processor({"type": "text"}) is None


def test_threads_share_compiled_schemas(vlm: VLM, grammars: Grammars) -> None:
    """More than are kept; each request has its own state."""

    def work(offset: int) -> None:
        for n in range(40):
            value = f"{(n + offset) % 25}x"
            processor = grammars.processor(formatted({"const": value}))
            assert allowed(processor, vlm, f'"{value}"') == {2}

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, n * 7) for n in range(4)]:
            done.result()
