"""``POST /v1/responses``: the objects and events of OpenAI's newer API, over the same `Query`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from .chat import check_length, settings_of, usage_of
from .config import ServerConfig
from .errors import RequestError, as_request_error
from .opening import Pending, Result
from .query import Media, Query, Recipes, Turn
from .schema import (
    MAX_PARTS,
    Asked,
    Detail,
    JsonObject,
    JsonSchema,
    Nothing,
    Off,
    RefusalPart,
    Strict,
    TextFormat,
    Url,
    several,
    text_or,
)
from .stream import named

# --- requests ------------------------------------------------------------------------------------


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: Url
    detail: Detail = "auto"
    file_id: None = None


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: Nothing = None
    logprobs: Nothing = None
    # Of OpenAI's client, which reads `text` as a class.
    parsed: Any = Field(None, description="without effect")


InputPart: TypeAlias = Annotated[InputText | InputImage, Field(discriminator="type")]
OutputPart: TypeAlias = Annotated[OutputText | RefusalPart, Field(discriminator="type")]


class _Listed(Strict):
    """What a response's output says of each message, beside its role and content."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class InputMessage(_Listed):
    role: Literal["user"]
    content: text_or(several(InputPart, MAX_PARTS, 1))  # type: ignore[valid-type]


class Instruction(_Listed):
    role: Literal["system", "developer"]
    content: text_or(several(InputText, MAX_PARTS))  # type: ignore[valid-type]


class OutputMessage(_Listed):
    """A former answer, as a response contains it."""

    role: Literal["assistant"]
    content: text_or(several(OutputPart, MAX_PARTS))  # type: ignore[valid-type]


class Reasoning(Strict):
    """What another model thought before an answer; it is not shown to this one."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: several(Any, MAX_PARTS) | None = None  # type: ignore[valid-type]
    content: several(Any, MAX_PARTS) | None = None  # type: ignore[valid-type]
    encrypted_content: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def _kind(item: Any) -> str:
    return "reasoning" if isinstance(item, dict) and item.get("type") == "reasoning" else "message"


_Spoken: TypeAlias = Annotated[
    InputMessage | Instruction | OutputMessage, Field(discriminator="role")
]
Item: TypeAlias = Annotated[
    Annotated[_Spoken, Tag("message")] | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextSettings(Strict):
    format: (
        Annotated[TextFormat | JsonObject | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: None = None


class ReasoningSettings(Strict):
    """Refused unless empty."""

    context: None = None
    effort: None = None
    generate_summary: None = None
    mode: None = None
    summary: None = None


class ResponsesRequest(Asked):
    """A request of ``POST /v1/responses``."""

    input: text_or(several(Item, 2048, 1))  # type: ignore[valid-type]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextSettings | None = None
    # Accepted in their only supported form.
    previous_response_id: None = None
    background: Off | None = None
    truncation: Literal["disabled"] | None = None
    # Refused unless empty.
    context_management: Nothing = None
    conversation: None = None
    include: Nothing = None
    max_tool_calls: None = None
    prompt: None = None
    reasoning: ReasoningSettings | None = None
    stream_options: None = None
    tool_choice: Literal["none", "auto"] | None = None
    top_logprobs: None = None


def query_of(request: ResponsesRequest, recipes: Recipes, config: ServerConfig) -> Query:
    """What a request asks.

    Raises
    ------
    RequestError
        For fields that exceed the server's limits.
    """
    turns = [Turn("system", request.instructions)] if request.instructions else []
    given = request.input
    if isinstance(given, str):
        turns.append(Turn("user", given))
    else:
        said = [(n, item) for n, item in enumerate(given) if not isinstance(item, Reasoning)]
        if not said:
            raise RequestError("input has no message", param="input")
        turns += [_turn(item, f"input[{place}].content") for place, item in said]
    if request.max_output_tokens is not None:
        check_length("max_output_tokens", request.max_output_tokens, config)
    return Query(
        **settings_of(request, recipes),
        turns=turns,
        max_new_tokens=request.max_output_tokens,
        response_format=_format(request.text),
    )


def _turn(item: Any, where: str) -> Turn:
    role = "system" if item.role == "developer" else item.role
    if isinstance(item.content, str):
        return Turn(role, item.content)
    parts: list[str | Media] = []
    for place, part in enumerate(item.content):
        if isinstance(part, InputImage):
            parts.append(Media("image", part.image_url, f"{where}[{place}].image_url"))
        else:
            parts.append(part.refusal if isinstance(part, RefusalPart) else part.text)
    return Turn(role, parts or "")


def _format(text: TextSettings | None) -> dict[str, Any] | None:
    """The format of an answer as chat completions describe it."""
    if text is None or text.format is None:
        return None
    if not isinstance(text.format, SchemaFormat):
        return text.format.model_dump()
    inner = text.format.model_dump(by_alias=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": inner}


# --- objects and events --------------------------------------------------------------------------


def response(
    request: ResponsesRequest, query: Query, result: Result | None, names: Names | None = None
) -> dict[str, Any]:
    """A ``response``; one that is in progress where there is no result yet."""
    names = names or Names()
    complete = result is None or result.answer.finish_reason == "stop"
    status = "in_progress" if result is None else "completed" if complete else "incomplete"
    return {
        "id": names.response,
        "object": "response",
        "created_at": names.created,
        "status": status,
        "error": None,
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": query.model,
        "output": [] if result is None else [_message(names, result.text, status)],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "temperature": request.temperature,
        "text": {"format": {"type": (query.response_format or {"type": "text"})["type"]}},
        "tool_choice": "none",
        "tools": [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None if result is None else _usage(result, query.trace),
    }


class Names:
    """Ids of a response and of its message."""

    def __init__(self) -> None:
        self.response, self.message = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self.created = int(time.time())


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(names: Names, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {
        "id": names.message,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _usage(result: Result, trace: bool) -> dict[str, Any]:
    usage = usage_of(result, trace)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "vlmfast": usage["vlmfast"],
    }


class Events:
    """The events of a streamed response.

    Parameters
    ----------
    request : ResponsesRequest
    running : Pending
    """

    def __init__(self, request: ResponsesRequest, running: Pending) -> None:
        self._request, self._running = request, running
        self._names, self._count = Names(), 0

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return named(kind, event)

    def _response(self, result: Result | None) -> dict[str, Any]:
        return response(self._request, self._running.query, result, self._names)

    async def all(self, finished: Callable[[Result], None]) -> AsyncIterator[str]:
        """All events; ``finished`` is called with the result."""
        event, names = self._event, self._names
        place = {"item_id": names.message, "output_index": 0, "content_index": 0}
        yield event("response.created", response=self._response(None))
        yield event("response.in_progress", response=self._response(None))
        item = _message(names, None, "in_progress")
        yield event("response.output_item.added", output_index=0, item=item)
        yield event("response.content_part.added", **place, part=_part(""))
        async for piece in self._running.pieces():
            yield event("response.output_text.delta", **place, delta=piece.text, logprobs=[])
        result = await self._running.result()
        finished(result)
        whole = self._response(result)
        yield event("response.output_text.done", **place, text=result.text, logprobs=[])
        yield event("response.content_part.done", **place, part=_part(result.text))
        yield event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield event(f"response.{whole['status']}", response=whole)

    def failed(self, error: Exception) -> str:
        """The event that ends a response without an answer."""
        found = as_request_error(error)
        other = "invalid_prompt" if found.status < 500 else "server_error"
        told = {"code": found.code or other, "message": found.message}
        failure = {**self._response(None), "status": "failed", "error": told}
        return self._event("response.failed", response=failure)
