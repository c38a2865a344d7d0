"""Answers in a given format: a grammar allows the tokens that continue it."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from .errors import RequestError

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

_FORMATS = "text, json_object and json_schema"
_MAX_BYTES = 64 << 10
_CACHED = 16  # compiled schemas
# llguidance compiles nested schemas and references by recursion, at up to 7 KB of the thread's
# stack (2 MB at least) a level, and crashes the process when it is full.
_MAX_LEVELS = 250
# It bounds the time of other keywords itself, but not of these: the states of an automaton that
# divides by the least common multiple, and comparisons of each pattern with all others.
_MAX_MULTIPLE = 1000
_MAX_PATTERNS = 32
# At most one space after a separator and no other whitespace, which small models may repeat
# without end.
_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
# Every character that an object with any values cannot be written without.
_ALPHABET = '{}[]":,-.0123456789aeflnrstu'


class Grammars:
    """Compiles response formats into logits processors; threads may share it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
    vocabulary : int
        Ids that the model scores.
    eos_token_ids : sequence of int
        Ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos_token_ids: Sequence[int]) -> None:
        self._source, self._vocabulary = tokenizer, vocabulary
        self._ends = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def processor(
        self, response_format: dict[str, Any], *, param: str = "response_format"
    ) -> LogitsProcessor | None:
        """The processor of one request.

        Parameters
        ----------
        response_format : dict
            As in OpenAI's API: ``{"type": "text"}``, ``{"type": "json_object"}`` or
            ``{"type": "json_schema", "json_schema": {"schema": {...}, ...}}``. Schemas are followed
            strictly, whether or not the request sets ``strict``.
        param : str
            Name of the argument in errors.

        Returns
        -------
        callable or None
            As `JSONProcessor`; ``None`` for text.

        Raises
        ------
        RequestError
            For an unknown format, a schema that is not valid, not supported or too complex, and
            where the model's vocabulary cannot write JSON.
        """
        kind = response_format.get("type") if isinstance(response_format, dict) else None
        if kind == "text":
            return None
        if kind == "json_object":
            schema: Any = {"type": "object"}
        elif kind == "json_schema":
            given = response_format.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            param += ".json_schema.schema"
            if not isinstance(schema, dict):
                raise RequestError(f"{param} must be a JSON schema, as an object", param=param)
        else:
            raise RequestError(f"{param}.type must be one of {_FORMATS}", param=f"{param}.type")
        return JSONProcessor(self._matcher(schema, param), param)

    def _matcher(self, schema: dict[str, Any], param: str) -> LLMatcher:
        """A matcher of a request's own, at the beginning of an answer."""
        text = _checked(schema, param)
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found.deep_copy()
            tokenizer = self._built(param)
        found = _compiled(tokenizer, text, param)
        with self._lock:
            self._compiled[text] = found
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
            return found.deep_copy()

    def _built(self, param: str) -> LLTokenizer:
        """llguidance's copy of the tokenizer, built once."""
        if self._tokenizer is None:
            try:
                size = max(self._vocabulary, len(self._source))
                built = from_tokenizer(self._source, size, self._ends)
            except ValueError as error:
                raise _unwritable(param) from error
            if any(built.decode_str(built.greedy_tokenize(sign)) != sign for sign in _ALPHABET):
                raise _unwritable(param)
            self._tokenizer = built
        return self._tokenizer


class JSONProcessor:
    """A logits processor that allows only tokens that continue valid JSON.

    Made for one request: the ids of its first call are the prompt. When the value is complete, only
    end tokens are allowed.

    Parameters
    ----------
    matcher : llguidance.LLMatcher
        Of this request alone.
    param : str
        Name of the argument in errors.
    """

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher, self._param = matcher, param
        self._length: int | None = None
        self._allowed = np.zeros(0, dtype=bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores that are -inf for all other tokens.

        Parameters
        ----------
        input_ids : Tensor, int64, (1, S + T)
            Prompt and answer so far. The same ids get the same result.
        scores : Tensor, float32, (1, V)
            Not modified. V may exceed the vocabulary of the tokenizer.

        Returns
        -------
        Tensor, float32, (1, V)

        Raises
        ------
        RequestError
            When the schema has become too complex to follow.
        """
        length = input_ids.shape[1]
        if self._length != length:
            new = [] if self._length is None else input_ids[0, self._length :].tolist()
            self._advance(new)
            self._length = length
        allowed = np.zeros(scores.shape[1], dtype=bool)
        size = min(len(allowed), len(self._allowed))
        allowed[:size] = self._allowed[:size]
        forbidden = torch.from_numpy(~allowed).to(scores.device)
        return scores.masked_fill(forbidden, -math.inf)

    def _advance(self, tokens: list[int]) -> None:
        """Read new tokens of the answer, and find those that may follow."""
        for token in tokens:
            if not (token < len(self._allowed) and self._allowed[token]):
                raise RuntimeError(f"token {token} does not follow the grammar of the request")
            self._matcher.consume_token(token)
            self._compute()
        if not tokens:
            self._compute()

    def _compute(self) -> None:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # its mask then allows end tokens
            raise RequestError(
                f"{self._param} cannot be followed further: it is too complex, or needs characters "
                "that are not in the vocabulary of the model",
                param=self._param,
            )
        self._allowed = np.unpackbits(bits, bitorder="little").astype(bool)


def _unwritable(param: str) -> RequestError:
    return RequestError(
        f"{param} allows text alone: the vocabulary of this model cannot write JSON", param=param
    )


def _compiled(tokenizer: LLTokenizer, text: str, param: str) -> LLMatcher:
    """The matcher of a schema that `_checked` has accepted."""
    limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except ValueError as error:
        raise _refused(str(error), param) from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if not trial.is_error():
            return matcher
        raise _refused("it allows no value, or is too complex", param)
    raise _refused(matcher.get_error(), param)


def _refused(why: str, param: str) -> RequestError:
    why = " ".join(why.split())
    why = why if len(why) <= 160 else f"{why[:160]}..."
    return RequestError(f"{param} cannot be used: {why}", param=param)


def _checked(schema: dict[str, Any], param: str) -> str:
    """The text of a schema that llguidance compiles in bounded time and stack.

    Raises
    ------
    RequestError
    """
    try:
        text = json.dumps(schema, allow_nan=False, separators=(",", ":"))
    except RecursionError as error:
        raise _refused("it is nested too deeply", param) from error
    except (TypeError, ValueError) as error:
        raise _refused("it is not JSON", param) from error
    if len(text) > _MAX_BYTES:
        raise _refused(f"it has {len(text)} bytes, and {_MAX_BYTES} are allowed", param)
    if "x-guidance" in schema:
        raise _refused("the keyword x-guidance is not supported", param)
    objects = list(_objects(schema))
    references = {ref for one, _ in objects if isinstance(ref := one.get("$ref"), str)}
    if any(not ref.startswith("#") for ref in references):
        raise _refused("each $ref must begin with #, as only the schema itself is read", param)
    deepest = max(depth for _, depth in objects)
    # A reference by n names is to an object that contains n levels less than the whole.
    levels = deepest + sum(max(deepest - ref.count("/"), 0) for ref in references)
    if min(levels, len(objects)) > _MAX_LEVELS:
        raise _refused(f"it has more than {_MAX_LEVELS} levels, references included", param)
    multiples = {one["multipleOf"] for one, _ in objects if _is_number(one.get("multipleOf"))}
    if math.lcm(*map(_digits, multiples)) > _MAX_MULTIPLE:
        raise _refused(
            f"the least common multiple of its multipleOf has more than {_MAX_MULTIPLE} steps",
            param,
        )
    patterns = [one["patternProperties"] for one, _ in objects if "patternProperties" in one]
    if sum(len(found) for found in patterns if isinstance(found, dict)) > _MAX_PATTERNS:
        raise _refused(f"it has more than {_MAX_PATTERNS} patternProperties", param)
    return text


def _objects(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Every object in a schema, with its depth from 1 on; arrays are levels, too."""
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, dict):
            yield value, depth
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(value: float) -> int:
    """The significant digits of a number as an integer: 25 for 0.25, 3 for 300, 1 for 0."""
    return int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))) or 1
