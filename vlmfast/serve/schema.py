"""Requests of OpenAI's chat completions API, with vlmfast's own fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError, from_json

from vlmfast.core.params import nearest

from .errors import RequestError

_Model = TypeVar("_Model", bound=BaseModel)

MAX_PARTS = 1024  # of a message
_MAX_PAIRS = 16  # of metadata, as in OpenAI's API
# Of a body: each value but the first is preceded by one. Parsed, a value takes up to 200 bytes.
_MAX_MARKS = 250_000
_SHOWN = 300  # characters of a request in a message


class Strict(BaseModel):
    """Refuses unknown fields and other types; numbers are finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: Any) -> Any:
        """Stop at the first unknown name: pydantic would report each of them."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                about = {"name": name[:_SHOWN], "meant": nearest(name, sorted(known))}
                raise PydanticCustomError("unknown", "unknown", about)
        return value


def _exactly(only: Any) -> BeforeValidator:
    """Refuse what only Python takes for the allowed value, as true for 1 and 0 for false."""

    def check(value: Any) -> Any:
        if type(value) is not type(only):
            raise PydanticKnownError("literal_error", {"expected": repr(only)})
        return value

    return BeforeValidator(check)


def _at_most(count: int) -> BeforeValidator:
    """Refuse larger objects before their values are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            about = {"field_type": "Object", "max_length": count, "actual_length": len(value)}
            raise PydanticKnownError("too_long", about)
        return value

    return BeforeValidator(check)


def several(item: Any, most: int, least: int = 0) -> Any:
    """A list, of which only the first error is reported."""
    return Annotated[list[item], Field(min_length=least, max_length=most, fail_fast=True)]


Nothing: TypeAlias = Annotated[list[Any], Field(max_length=0)] | None
Metadata: TypeAlias = Annotated[dict[str, str], Field(max_length=_MAX_PAIRS), _at_most(_MAX_PAIRS)]
One: TypeAlias = Annotated[Literal[1], _exactly(1)]
Off: TypeAlias = Annotated[Literal[False], _exactly(False)]


# --- messages ------------------------------------------------------------------------------------


class TextPart(Strict):
    type: Literal["text"]
    text: str


Url: TypeAlias = Annotated[
    str, Field(description="a data: URL, or a URL where the server allows it", min_length=1)
]
Detail: TypeAlias = Annotated[
    Literal["auto", "low", "high"] | None,
    Field(description="without effect: `recipe` sets the number of visual tokens"),
]


class ImageUrl(Strict):
    url: Url
    detail: Detail = "auto"


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(Strict):
    url: Url


class VideoPart(Strict):
    type: Literal["video_url"]
    video_url: VideoUrl


Part: TypeAlias = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


def _form(value: Any) -> str:
    return "text" if isinstance(value, str) else "parts"


def text_or(parts: Any) -> Any:
    text = Annotated[str, Tag("text")]
    return Annotated[text | Annotated[parts, Tag("parts")], Discriminator(_form)]


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: text_or(several(TextPart, MAX_PARTS))  # type: ignore[valid-type]
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: text_or(several(Part, MAX_PARTS, 1))  # type: ignore[valid-type]
    name: str | None = None


Said: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class AssistantMessage(Strict):
    """A former answer, as a client received it; it has no images, and tools are not supported."""

    role: Literal["assistant"]
    content: text_or(several(Said, MAX_PARTS)) | None = None  # type: ignore[valid-type]
    name: str | None = None
    refusal: str | None = None
    # Of OpenAI's client, which reads `content` as a class.
    parsed: Any = Field(None, description="without effect")
    # Refused unless empty.
    annotations: Nothing = None
    audio: None = None
    tool_calls: Nothing = None
    function_call: None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")
]


# --- settings ------------------------------------------------------------------------------------


class TextFormat(Strict):
    type: Literal["text"]


class JsonObject(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObject | JsonSchemaFormat, Field(discriminator="type")
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="without effect")


class Own(Strict):
    """The model, and fields of vlmfast beside OpenAI's."""

    model: str = Field(max_length=256)
    recipe: str | None = Field(
        None, max_length=1000, description="which tokens are dropped; by default the model's"
    )
    num_frames: int | None = Field(None, ge=1, description="frames read from each video")
    fps: float | None = Field(None, gt=0, description="frames read per second of a video")
    top_k: int | None = Field(None, ge=0, description="0 keeps all tokens")
    trace: bool = Field(False, description="add the boxes of visual tokens to `usage`")
    cache_salt: str = Field(
        "", max_length=256, description="requests share the prefix cache if theirs are equal"
    )


class Asked(Own):
    """Fields of both of OpenAI's APIs."""

    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 decodes greedily")
    top_p: float | None = Field(None, gt=0, le=1)
    # Accepted in its only supported form: answers are not stored.
    store: Off | None = None
    # Accepted without effect.
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    # Refused unless empty.
    moderation: None = None
    tools: Nothing = None


class ChatRequest(Asked):
    """A request of ``POST /v1/chat/completions``."""

    messages: several(Message, 2048, 1)  # type: ignore[valid-type]
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: text_or(several(str, 1024)) | None = None  # type: ignore[valid-type]
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    # Accepted in their only supported form.
    n: One | None = None
    modalities: several(Literal["text"], 1) | None = None  # type: ignore[valid-type]
    # Refused unless empty.
    audio: None = None
    function_call: None = None
    functions: None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0), _at_most(0)] | None = None
    prediction: None = None
    reasoning_effort: None = None
    tool_choice: Literal["none"] | None = None
    verbosity: None = None
    web_search_options: None = None


# --- reading -------------------------------------------------------------------------------------


def read_as(model: type[_Model], body: bytes) -> _Model:
    """Parse the body of a request.

    Raises
    ------
    RequestError
        For a body that is not JSON, too long or nested too deeply, and the first wrong field.
    """
    marks = sum(map(body.count, (b",", b"[", b"{")))
    if marks > _MAX_MARKS:
        raise RequestError(
            f"the body has {marks} commas and opening brackets, those in strings included, and may "
            f"have {_MAX_MARKS}",
            413,
        )
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {_excerpt(str(error))}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        loc, context = first["loc"], first.get("ctx", {})
        param = _param((*loc, context["name"]) if "name" in context else loc, data, first["type"])
        raise RequestError(_message(param, first), param=param or None) from None


def _param(loc: tuple[int | str, ...], data: Any, kind: str) -> str:
    """A location as ``messages[0].content``, without the names of the alternatives of a type."""
    found, value = "", data
    tags: list[Any] = []  # by which an object chooses the alternative, which may be names of fields
    for place, key in enumerate(loc):
        if key in tags and place < len(loc) - 1:
            tags.remove(key)
        elif isinstance(key, int) and isinstance(value, list) and key < len(value):
            found, value = f"{found}[{key}]", value[key]
            tags = _tags(value)
        elif isinstance(value, dict) and key in value:
            found, value = f"{found}.{key}", value[key]
            tags = _tags(value)
        elif place == len(loc) - 1 and kind in ("missing", "unknown"):
            found = f"{found}.{key}"
    return _excerpt(found.removeprefix("."))


def _tags(value: Any) -> list[Any]:
    return [value.get("type"), value.get("role")] if isinstance(value, dict) else []


def _message(param: str, error: Any) -> str:
    text = _excerpt(error["msg"])
    match error["type"]:
        case "missing":
            return f"{param} is required"
        case "unknown":
            return f"{param or 'an empty name'} is not supported{error['ctx']['meant']}"
        case "none_required":
            return f"{param} is not supported: leave it out"
        case "model_type" | "model_attributes_type":
            shape = ' such as {"url": "..."}' if param.endswith("_url") else ""
            return f"{param or 'the body'} must be an object{shape}"
        case "union_tag_not_found":
            return f"{param} needs {'a role' if 'role' in text else 'a type'}"
        case "union_tag_invalid":
            return f"{param}: {text}"
        case _:
            return f"{param}: {text[:1].lower()}{text[1:]}" if param else text


def _excerpt(text: str) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in text[:_SHOWN])
    return shown if len(text) <= _SHOWN else f"{shown}..."
