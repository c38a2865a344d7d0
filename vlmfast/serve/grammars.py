"""Answers that follow a grammar: JSON objects, and JSON that a schema describes.

llguidance compiles the schema and computes which tokens may follow; see
https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import LogitsProcessor

from vlmfast.errors import VLMFastError

from .errors import RequestError

_MAX_SCHEMA = 64 << 10  # characters
_KEPT = 64  # compiled schemas
_SCHEMA = "response_format.json_schema.schema"
_OBJECT = {"type": "object"}
# Otherwise models that are unsure emit white space until the answer is full.
_OPTIONS: Any = {"whitespace_flexible": False}


class Grammars:
    """Compiles the response formats of requests, for one model.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerFast
    vocabulary : int
        Number of logits.
    ends : sequence of int
        Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, list(ends)
        self._lock = threading.Lock()
        self._ready: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def processor(self, response_format: dict[str, Any]) -> Grammar | None:
        """The logits processor of one request; ``None`` where any text may follow.

        Parameters
        ----------
        response_format : dict
            As OpenAI's API takes it: of type ``text``, ``json_object`` or ``json_schema``.

        Raises
        ------
        RequestError
            For a schema that is wrong, too complex or not supported, and for a model whose
            tokenizer cannot write JSON.
        """
        if response_format["type"] == "text":
            return None
        schema, param = _OBJECT, "response_format"
        if response_format["type"] == "json_schema":
            schema, param = response_format["json_schema"]["schema"], _SCHEMA
        try:
            text = json.dumps(schema)
        except (RecursionError, ValueError) as error:
            message = f"{param}: is not JSON, or nested too deeply"
            raise RequestError(message, param=param) from error
        if len(text) > _MAX_SCHEMA:
            raise RequestError(
                f"{param}: has {len(text)} characters and must have at most {_MAX_SCHEMA}",
                param=param,
            )
        return Grammar(self._matcher(text, param).deep_copy())

    def _matcher(self, schema: str, param: str) -> LLMatcher:
        """The compiled grammar of a schema, in its first state."""
        with self._lock:
            if (found := self._compiled.get(schema)) is not None:
                self._compiled.move_to_end(schema)
                return found
            if self._ready is None:
                self._ready = self._read_tokenizer()
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise RequestError(f"{param}: {_one_line(error)}", param=param) from error
        matcher = LLMatcher(self._ready, grammar, log_level=0)
        if matcher.is_error():
            reason = _one_line(matcher.get_error().partition("<state>")[0])
            raise RequestError(f"{param}: {reason}", param=param)
        if not any(matcher.compute_bitmask()):
            raise RequestError(
                f"{param}: the tokenizer of this model cannot write such an answer", param=param
            )
        with self._lock:
            self._compiled[schema] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _read_tokenizer(self) -> LLTokenizer:
        param = "response_format"
        if not self._ends:
            raise RequestError("response_format needs a model with an end token", param=param)
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
        except ValueError as error:
            raise RequestError(
                "response_format is not supported with the tokenizer of this model", param=param
            ) from error


class Grammar(LogitsProcessor):
    """Masks the tokens that cannot follow; one object serves one request.

    Parameters
    ----------
    matcher : LLMatcher
        In its first state; it belongs to this object.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._read: int | None = None  # ids of prompt and answer that it has seen

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masked scores.

        Parameters
        ----------
        input_ids : Tensor, int64, (1, S + T)
            The first call, without a token of the answer, gives the length of the prompt.
        scores : Tensor, floating, (1, V)
            Not modified.
        """
        if self._read is None:
            self._read = input_ids.shape[1]
        new = input_ids[0, self._read :].tolist()
        self._read += len(new)
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error().partition("<state>")[0])
            raise VLMFastError(f"{_SCHEMA}: cannot be followed: {reason}")
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.flatten()[: scores.shape[1]].bool()
        missing = scores.shape[1] - len(allowed)
        allowed = torch.nn.functional.pad(allowed, (0, missing)).to(scores.device)
        return scores.masked_fill(~allowed, -math.inf)


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
