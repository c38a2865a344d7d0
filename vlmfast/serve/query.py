"""What a request asks, whichever route it came by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from vlmfast.api.stored_recipe import AUTO
from vlmfast.core.protocols import DrafterStage, MediaStage
from vlmfast.core.recipe import Recipe
from vlmfast.errors import RecipeError

from .config import ServerConfig
from .errors import RequestError

# Of a request's recipe: buffers of the whole batch are allocated for the largest tree.
_MAX_NODES = 256


@dataclass(frozen=True)
class Media:
    """An image or a video of a request.

    Parameters
    ----------
    kind : {"image", "video"}
    url : str
    param : str
        Where it stands in the request.
    """

    kind: Literal["image", "video"]
    url: str = field(repr=False)
    param: str


@dataclass(frozen=True)
class Turn:
    """One message: a role, and a text, or texts and media in order."""

    role: str
    parts: str | Sequence[str | Media]


@dataclass(frozen=True)
class Query:
    """A request to answer.

    Parameters
    ----------
    model : str
        Its name in the API.
    recipe : Recipe
    turns : sequence of Turn
    max_new_tokens : int, optional
    temperature, top_p, top_k, seed : optional
        As the API defines them; those of the checkpoint where ``None``.
    presence_penalty, frequency_penalty : float
    stops : tuple of str
        The answer ends before the first of them.
    top_logprobs : int, optional
    response_format : dict, optional
    num_frames, fps : optional
    trace : bool
    cache_salt : str
    stream : bool
        Whether the answer is read while it is generated.
    """

    model: str
    recipe: Recipe
    turns: Sequence[Turn] = field(repr=False)
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = field(default=None, repr=False)
    num_frames: int | None = None
    fps: float | None = None
    trace: bool = False
    cache_salt: str = field(default="", repr=False)
    stream: bool = False


class Names(Protocol):
    """Fields that every kind of request has."""

    model: str
    recipe: str | None


class Parses(Protocol):
    """What parses recipes for a model, as `VLM.recipe`."""

    def recipe(self, recipe: str) -> Recipe: ...


class Recipes:
    """The recipes that requests run under.

    Parameters
    ----------
    vlm : VLM
        Or what else parses recipes for a model.
    config : ServerConfig

    Raises
    ------
    RecipeError
        When a recipe of the configuration cannot be used.
    """

    def __init__(self, vlm: Parses, config: ServerConfig) -> None:
        self._vlm, self._max_frames = vlm, config.media.max_frames
        self.by_model = {name: vlm.recipe(text) for name, text in config.recipes.items()}
        self._known = {stage.name for recipe in self.by_model.values() for stage in recipe}

    def of(self, request: Names) -> Recipe:
        """The recipe of a request.

        Raises
        ------
        RequestError
            For an unknown model, or a recipe that cannot be used or names files or other models.
        """
        if request.model not in self.by_model:
            names = ", ".join(self.by_model)
            raise RequestError(
                f"model {request.model[:80]!r} does not exist; this server has {names}",
                404,
                param="model",
                code="model_not_found",
            )
        if request.recipe is None:
            return self.by_model[request.model]
        if request.recipe.strip() == AUTO:
            raise _refused("a request cannot name 'auto'; it is for the server's own recipes")
        if Recipe.reads_file(request.recipe):
            raise _refused("a request cannot name a recipe file")
        try:
            recipe = self._vlm.recipe(request.recipe)
        except RecipeError as error:
            raise _refused(str(error)) from error
        for stage in recipe:
            self._check(stage)
        return recipe

    def _check(self, stage: Any) -> None:
        if stage.other_model and stage.name not in self._known:
            raise _refused(
                f"{stage.name} needs another model, which only the server's own recipes may load"
            )
        for f in fields(stage):
            value, about = getattr(stage, f.name), f"{stage.name}: {f.name}"
            # A text without choices names a file, a folder or a checkpoint.
            if isinstance(value, str) and not f.metadata.get("choices") and value != f.default:
                raise _refused(f"{about} cannot be set by a request; leave it out")
            frames = isinstance(stage, MediaStage) and isinstance(value, int)
            if frames and value > self._max_frames:
                raise _refused(f"{about}={value} must be at most {self._max_frames}")
        if isinstance(stage, DrafterStage) and (nodes := stage.largest()[0]) > _MAX_NODES:
            raise _refused(
                f"{stage.name} verifies {nodes} tokens in a forward pass; it must be at most "
                f"{_MAX_NODES}"
            )


def _refused(why: str) -> RequestError:
    return RequestError(f"recipe: {why}", param="recipe")


def generation_of(query: Query, do_sample: bool) -> dict[str, Any]:
    """Generation arguments of `VLM.submit` for the settings of a request.

    Parameters
    ----------
    query : Query
    do_sample : bool
        Whether the checkpoint samples by default.
    """
    found: dict[str, Any] = {}
    if query.max_new_tokens is not None:
        found["max_new_tokens"] = query.max_new_tokens
    sampled = do_sample if query.temperature is None else query.temperature > 0
    found["do_sample"] = sampled
    if sampled:
        values = {"temperature": query.temperature, "top_p": query.top_p, "top_k": query.top_k}
        found |= {name: value for name, value in values.items() if value is not None}
    if query.seed is not None:
        found["seed"] = query.seed
    if query.top_logprobs is not None:
        found["top_logprobs"] = query.top_logprobs
    return found


def messages_of(
    turns: Sequence[Turn],
    image: Callable[[Media], Any],
    video: Callable[[Media], Any],
    num_frames: int | None,
    fps: float | None,
) -> list[dict[str, Any]]:
    """Messages of `VLM.chat`, with decoded images and the bytes of videos.

    Parameters
    ----------
    image, video : callable
        Read the media of a request.
    """
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn.parts, str):
            messages.append({"role": turn.role, "content": turn.parts})
            continue
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif part.kind == "image":
                content.append({"type": "image", "image": image(part)})
            else:
                frames = {"num_frames": num_frames, "fps": fps}
                content.append({"type": "video", "video": video(part), **frames})
        messages.append({"role": turn.role, "content": content})
    return messages
