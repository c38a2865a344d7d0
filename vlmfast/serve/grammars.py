"""Answers in a given format: a grammar allows the tokens that continue it."""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from vlmfast.errors import DeadlineExceeded

from .errors import RequestError, busy
from .grammar_compiler import compiled
from .grammar_schemas import checked, refused
from .grammar_trials import Trials

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

_FORMATS = "text, json_object and json_schema"
_CACHED_BYTES = 128 << 20  # of compiled schemas
MAX_BYTES = 1 << 30  # of those that requests hold
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
        self._tokenizer: tuple[LLTokenizer, Trials] | None = None
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        # Bytes of the matchers whose requests are not forgotten yet.
        self._in_use: weakref.WeakKeyDictionary[JSONProcessor, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def processor(
        self,
        response_format: dict[str, Any],
        *,
        param: str = "response_format",
        end: float = math.inf,
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
        end : float
            When the request is given up, by `time.monotonic`.

        Returns
        -------
        callable or None
            As `JSONProcessor`; ``None`` for text.

        Raises
        ------
        RequestError
            For an unknown format, a schema that is not valid, not supported or too complex, and
            where the model's vocabulary cannot write JSON; 429 where the schemas of other requests
            take all the memory that they may.
        DeadlineExceeded
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
        matcher, size = self._matcher(schema, param, end)
        processor = JSONProcessor(matcher, param)
        with self._lock:
            if sum(self._in_use.values()) + size > MAX_BYTES:
                raise busy("the schemas of all requests are too large together")
            self._in_use[processor] = size
        return processor

    def _matcher(self, schema: dict[str, Any], param: str, end: float) -> tuple[LLMatcher, int]:
        """A matcher of a request's own, at the beginning of an answer, and its bytes."""
        text = checked(schema, param)
        with self._lock:
            found = self._compiled.get(text)
            if found is not None:
                self._compiled.move_to_end(text)
                return found[0].deep_copy(), found[1]
            tokenizer, trials = self._built(param)
        try:
            size = trials.cost(text, end)
            matcher = compiled(tokenizer, text)
        except DeadlineExceeded:
            raise
        except ValueError as error:
            raise refused(str(error), param) from error
        with self._lock:
            self._compiled[text] = matcher, size
            while sum(size for _, size in self._compiled.values()) > _CACHED_BYTES:
                self._compiled.popitem(last=False)
            return matcher.deep_copy(), size

    def _built(self, param: str) -> tuple[LLTokenizer, Trials]:
        """llguidance's copy of the tokenizer, built once, and the process with another one."""
        if self._tokenizer is None:
            size = max(self._vocabulary, len(self._source))
            try:
                built = from_tokenizer(self._source, size, self._ends)
            except ValueError as error:
                raise _unwritable(param) from error
            if any(built.decode_str(built.greedy_tokenize(sign)) != sign for sign in _ALPHABET):
                raise _unwritable(param)
            text = self._source.backend_tokenizer.to_str()
            self._tokenizer = built, Trials(text, size, self._ends)
        return self._tokenizer

    def close(self) -> None:
        """End the process that compiles schemas."""
        if self._tokenizer is not None:
            self._tokenizer[1].close()


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
            raise unfollowed(self._param)
        self._allowed = np.unpackbits(bits, bitorder="little").astype(bool)


def unfollowed(param: str) -> RequestError:
    """The error of an answer that ends before its format is complete."""
    return RequestError(
        f"{param} cannot be followed further: it is too complex, or needs characters that are not "
        "in the vocabulary of the model",
        param=param,
    )


def _unwritable(param: str) -> RequestError:
    return RequestError(
        f"{param} allows text alone: the vocabulary of this model cannot write JSON", param=param
    )
