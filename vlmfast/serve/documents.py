"""What ``/openapi.json`` says of the routes."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from .responses import ResponsesRequest
from .schema import ChatRequest
from .tokens import TokenizeRequest

_SCHEMAS = "#/components/schemas/"
_BAD = (400, 401, 404, 408, 413, 415, 429, 503)
_ABOUT = {
    400: "The request cannot be answered",
    401: "No key of this server",
    404: "Unknown model",
    408: "The deadline has passed",
    413: "Larger than the server allows",
    415: "Another content type",
    429: "Too many requests",
    503: "Loading, stopping, or out of memory",
}


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


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The documentation of errors, for a route."""
    return {status: {"model": Error, "description": _ABOUT[status]} for status in statuses}


METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    **errors(401, 503),
}


def posted(model: type[BaseModel]) -> dict[str, Any]:
    """The arguments of a route whose body is parsed as ``model``."""
    schema = {"$ref": f"{_SCHEMAS}{model.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    text = {"type": "string"}
    event = {"type": "object", "required": ["data"], "properties": {"event": text, "data": text}}
    event_stream = {"text/event-stream": {"itemSchema": event}}
    whole = {"application/json": {"schema": {"type": "object"}}}
    streamed = whole | event_stream if model is not TokenizeRequest else whole
    return {
        "openapi_extra": {"requestBody": body},
        "responses": {200: {"content": streamed}, **errors(*_BAD)},
    }


def describe(app: FastAPI, *, needs_key: bool) -> None:
    """Let ``/openapi.json`` contain the bodies that the routes parse themselves."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, needs_key)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for model in (ChatRequest, ResponsesRequest, TokenizeRequest):
        schema = model.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    if needs_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found
