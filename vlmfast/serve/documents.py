"""What ``/openapi.json`` says of the responses; FastAPI finds the rest."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Model(BaseModel):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    recipe: str
    root: str


class ModelList(BaseModel):
    """All names of the model."""

    object: Literal["list"]
    data: list[Model]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """What is wrong with a request."""

    error: ErrorBody


ERRORS: dict[int | str, dict[str, Any]] = {of: {"model": Error} for of in ("4XX", 503)}
_TEXT = {"type": "string"}
_EVENT = {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}},
    **ERRORS,
}
