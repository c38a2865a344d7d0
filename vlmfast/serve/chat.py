"""``POST /v1/chat/completions``: fields to a `Query`, and an answer to its objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from vlmfast.engine.sampling import TokenLogprobs

from .config import ServerConfig
from .errors import RequestError
from .opening import Pending, Result
from .query import Media, Query, Recipes, Turn
from .schema import (
    Asked,
    AssistantMessage,
    ChatRequest,
    ImagePart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    UserMessage,
)
from .stream import data


def query_of(request: ChatRequest, recipes: Recipes, config: ServerConfig) -> Query:
    """What a request asks.

    Raises
    ------
    RequestError
        For fields that contradict each other or exceed the server's limits.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if request.num_frames is not None and request.fps is not None:
        raise RequestError("num_frames and fps cannot both be given", param="fps")
    form = request.response_format
    return Query(
        **settings_of(request, recipes),
        turns=turns_of(request.messages),
        max_new_tokens=_length(request, config),
        seed=request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        stops=stops_of(request.stop, config.max_stops),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        response_format=None if form is None else form.model_dump(by_alias=True),
    )


def settings_of(request: Asked, recipes: Recipes) -> dict[str, Any]:
    """The part of a `Query` that has the same names in both of OpenAI's APIs."""
    names = ("model", "temperature", "top_p", "top_k", "num_frames", "fps", "trace", "cache_salt")
    found = {name: getattr(request, name) for name in names}
    return {**found, "recipe": recipes.of(request), "stream": bool(request.stream)}


def _length(request: ChatRequest, config: ServerConfig) -> int | None:
    given = {"max_completion_tokens": request.max_completion_tokens}
    given["max_tokens"] = request.max_tokens
    named = {name: value for name, value in given.items() if value is not None}
    if len(set(named.values())) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ", param="max_tokens")
    for name, value in named.items():
        check_length(name, value, config)
        return value
    return None


def check_length(name: str, value: int, config: ServerConfig) -> None:
    """Raise where an answer could be longer than the server allows."""
    if value > config.max_new_tokens:
        raise RequestError(f"{name}={value} must be at most {config.max_new_tokens}", param=name)


def stops_of(stop: str | list[str] | None, most: int) -> tuple[str, ...]:
    """The stop strings of a request."""
    found = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(found) > most:
        raise RequestError(
            f"stop has {len(found)} strings and must have at most {most}", param="stop"
        )
    for text in found:
        if not 1 <= len(text) <= 256:
            raise RequestError("stop: each string must have 1 to 256 characters", param="stop")
    return found


def turns_of(messages: list[Message]) -> list[Turn]:
    """The messages of a request."""
    return [_turn(message, place) for place, message in enumerate(messages)]


def _turn(message: SystemMessage | UserMessage | AssistantMessage, place: int) -> Turn:
    role = "system" if message.role == "developer" else message.role
    content = message.content
    where = f"messages[{place}].content"
    refusal = message.refusal if isinstance(message, AssistantMessage) else None
    if content is None or isinstance(content, str):
        texts = [text for text in (content, refusal) if text]
        return Turn(role, texts if len(texts) > 1 else "".join(texts))
    parts = [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]
    if refusal:
        parts.append(refusal)
    return Turn(role, parts or "")


def _part(part: Any, where: str) -> str | Media:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, RefusalPart):
        return part.refusal
    if isinstance(part, ImagePart):
        return Media("image", part.image_url.url, f"{where}.image_url.url")
    return Media("video", part.video_url.url, f"{where}.video_url.url")


# --- objects -------------------------------------------------------------------------------------


def usage_of(result: Result, trace: bool) -> dict[str, Any]:
    """What an answer cost, with vlmfast's own figures under ``vlmfast``."""
    answer = result.answer
    completion = len(answer.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": result.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": answer.stats.cached_tokens},
        "vlmfast": result.cost(trace),
    }


class Logprobs:
    """Log-probabilities as the API returns them, for one tokenizer.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizer
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)

    def of(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """The tokens of an answer, or a part of it; its end token is left out."""
        return {
            "content": [
                {
                    **self._one(step.token, step.logprob),
                    "top_logprobs": [self._one(*pair) for pair in step.top],
                }
                for step in tokens
                if step.token not in self._special
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        # Infinite for a token that cannot occur; JSON has no infinity.
        return {
            "token": text,
            "logprob": max(logprob, -9999.0),
            "bytes": None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()),
        }


def completion(result: Result, query: Query, logprobs: Logprobs) -> dict[str, Any]:
    """A ``chat.completion``."""
    answer = result.answer
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": None if answer.logprobs is None else logprobs.of(answer.logprobs),
        "finish_reason": answer.finish_reason,
    }
    return {
        **_head("chat.completion", query.model),
        "choices": [choice],
        "usage": usage_of(result, query.trace),
    }


def _head(kind: str, model: str) -> dict[str, Any]:
    name = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


async def chunks(
    running: Pending,
    include_usage: bool,
    logprobs: Logprobs,
    finished: Callable[[Result], None],
) -> AsyncIterator[str]:
    """The events of a streamed ``chat.completion.chunk``.

    Parameters
    ----------
    running : Pending
    include_usage : bool
        Whether a last chunk has the usage.
    logprobs : Logprobs
    finished : callable
        Called with the result.
    """
    query = running.query
    head = _head("chat.completion.chunk", query.model)
    usage = {"usage": None} if include_usage else {}

    def chunk(delta: dict[str, Any], tokens: Any = None, reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": tokens, "finish_reason": reason}
        return data({**head, "choices": [choice], **usage})

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    async for piece in running.pieces():
        asked = query.top_logprobs is not None
        yield chunk({"content": piece.text}, logprobs.of(piece.logprobs) if asked else None)
    result = await running.result()
    finished(result)
    yield chunk({}, reason=result.answer.finish_reason)
    if include_usage:
        yield data({**head, "choices": [], "usage": usage_of(result, query.trace)})
    yield "data: [DONE]\n\n"
