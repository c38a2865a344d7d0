"""A model on a running server: the methods of `vlmfast.VLM` that conversations use.

Answers come from ``POST /v1/chat/completions`` of `vlmfast.serve`, through OpenAI's client. Their
statistics and traces are rebuilt from ``usage.vlmfast``.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from PIL import Image

from vlmfast.api.answer import Answer, Request
from vlmfast.core.files import read_bytes
from vlmfast.core.layout import TokenLayout
from vlmfast.core.recipe import Recipe
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import DeadlineExceeded, RecipeError, VLMFastError
from vlmfast.media import load_video

_CONNECT_S, _TIMEOUT_S = 10.0, 120.0
BLANK = (96, 96, 96)  # the color of frames that the server has chosen
# Fields of `Stats` and of ``usage.vlmfast``.
_SAME = (
    *("visual_tokens_in", "visual_tokens_kept", "equivalent_tokens"),
    *("kv_bytes", "kv_bytes_full", "ttft_s", "queue_s"),
)


class RemoteVLM:
    """A model on a server.

    Parameters
    ----------
    url : str
        Such as ``http://127.0.0.1:8000``, with or without ``/v1``.
    api_key : str, optional

    Attributes
    ----------
    url : str
        Without ``/v1``.
    name : str
        Of the model, in the API.
    client : openai.OpenAI

    Raises
    ------
    VLMFastError
        If the server cannot be reached, refuses the key or is another one than vlmfast's.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise VLMFastError(f"server {url!r} must be a URL such as http://127.0.0.1:8000")
        try:
            from openai import OpenAI, Timeout
        except ImportError as error:
            raise VLMFastError("--server needs openai: pip install 'vlmfast[demo]'") from error
        with _told(self.url):
            self.client = OpenAI(
                base_url=f"{self.url}/v1",
                api_key=api_key or "none",  # the client needs one, and a server without keys none
                timeout=Timeout(_TIMEOUT_S, connect=_CONNECT_S),
                max_retries=0,
            )
            found = getattr(self.client.models.list(), "data", None) or []
        names = [model.id for model in found if getattr(model, "owned_by", "") == "vlmfast"]
        if not names:
            raise VLMFastError(f"{self.url} is no vlmfast server: start one with `vlmfast serve`")
        self.name: str = names[0]
        self.recipe("none")  # raises while the model is loading

    def close(self) -> None:
        """Close all connections."""
        self.client.close()

    def recipe(self, text: str) -> Recipe:
        """Parse a recipe as the server does for its model.

        Raises
        ------
        RecipeError
            If the server refuses it.
        """
        messages = [{"role": "user", "content": "?"}]
        asked = {"model": self.name, "messages": messages, "recipe": text}
        with _told(self.url):
            found: Any = self.client.post(f"{self.url}/tokenize", body=asked, cast_to=object)
        return Recipe.parse(found["vlmfast"]["recipe"])

    def submit(self, request: Request) -> closing[Generator[str | Answer, None, None]]:
        """Ask one question; as a context manager, the pieces of the answer and finally the answer.

        When the block ends early, the connection is closed and the server cancels the request.
        """
        session = self.session(
            # The page passes an image, or the path of a video.
            cast("Image.Image | None", request.images),
            cast("str | None", request.video),
            num_frames=request.num_frames,
            recipe=Recipe.of(request.recipe),
            history=False,
            tenant=request.tenant,
        )
        return closing(session.stream(request.question or "", **request.generation))

    def session(
        self,
        images: Image.Image | None = None,
        video: str | None = None,
        *,
        num_frames: int | None = None,
        recipe: Recipe,
        history: bool,
        tenant: str,
    ) -> RemoteSession:
        """Questions about the same media; the server finds them in its prefix cache."""
        return RemoteSession(self, RemoteMedia(images, video, num_frames), recipe, history, tenant)


class RemoteSession:
    """Questions to a server about the same media, as `vlmfast.api.session.Session`.

    Attributes
    ----------
    messages : list of dict
        The conversation so far, without the media; empty without ``history``.
    """

    def __init__(
        self, vlm: RemoteVLM, media: RemoteMedia, recipe: Recipe, history: bool, tenant: str
    ) -> None:
        self._vlm, self._media, self._recipe = vlm, media, recipe
        self._history, self._tenant = history, tenant
        self.messages: list[dict[str, Any]] = []

    def stream(
        self,
        question: str,
        *,
        restore: bool = False,
        max_new_tokens: int,
        max_time: float = _TIMEOUT_S,
        **generation: Any,
    ) -> Generator[str | Answer, None, None]:
        """Yield the pieces of an answer and finally the answer.

        Parameters
        ----------
        question : str
        restore : bool
            Ask the full model.
        max_new_tokens : int
        max_time : float
            Seconds.
        **generation
            Not used: answers are greedy.

        Raises
        ------
        DeadlineExceeded
            After ``max_time`` seconds.
        VLMFastError
            With the server's message.
        """
        media, recipe = self._media, Recipe() if restore else self._recipe
        own: dict[str, Any] = {"recipe": str(recipe), "trace": True, "cache_salt": self._tenant}
        if media.num_frames is not None:
            own["num_frames"] = media.num_frames
        reading = _Reading(media, max_time)
        with (
            _told(self._vlm.url),
            self._vlm.client.chat.completions.create(
                model=self._vlm.name,
                messages=cast(Any, media.before(self.messages, question)),
                max_tokens=max_new_tokens,
                temperature=0,
                logprobs=True,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=own,
            ) as chunks,
        ):
            for chunk in chunks:
                if text := reading.add(chunk):
                    yield text
        answer = reading.answer()
        if self._history:
            self.messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer.text},
            ]
        yield answer

    def close(self) -> None:
        """Nothing is kept on this side; the server's cache drops what is not used."""


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Raise the library's errors for those of the client, with the server's own messages."""
    import httpx2
    import openai

    try:
        yield
    except openai.APITimeoutError as error:
        raise DeadlineExceeded(f"the server {url} did not answer in time") from error
    except (openai.APIConnectionError, httpx2.InvalidURL) as error:
        reason = error.__cause__ or error
        raise VLMFastError(f"cannot reach the server {url}: {reason}") from error
    except openai.APIError as error:
        kind = RecipeError if error.param == "recipe" else VLMFastError
        own = error.body.get("message") if isinstance(error.body, dict) else None
        status = getattr(error, "status_code", 200)
        raise kind(own or f"the server answered with status {status}") from error


@dataclass(frozen=True)
class RemoteMedia:
    """An image, or a video and the number of frames; without one the recipe chooses them."""

    image: Image.Image | None
    video: str | None
    num_frames: int | None

    def before(self, earlier: list[dict[str, Any]], question: str) -> list[dict[str, Any]]:
        """The messages of a conversation; the first one contains the media."""
        first, *rest = [*earlier, {"role": "user", "content": question}]
        text = {"type": "text", "text": first["content"]}
        return [{"role": "user", "content": [self._part(), text]}, *rest]

    def _part(self) -> dict[str, Any]:
        if self.video is not None:
            data = read_bytes(self.video)
            return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", data)}}
        assert self.image is not None
        file = io.BytesIO()
        self.image.save(file, "PNG", compress_level=1)
        return {"type": "image_url", "image_url": {"url": _data_url("image/png", file.getvalue())}}

    def images(self, count: int) -> list[Image.Image]:
        """The images that a trace is drawn on.

        The server does not report which frames a recipe has chosen; these are blank.
        """
        if self.image is not None:
            return [self.image]
        assert self.video is not None
        frames = load_video(self.video, num_frames=self.num_frames or 1).frames
        if self.num_frames is None:
            return [Image.new("RGB", frames[0].size, BLANK)] * count
        return list(frames)


class _Reading:
    """An answer whose chunks arrive; times by this machine's clock."""

    def __init__(self, media: RemoteMedia, seconds: float) -> None:
        self._media, self._seconds = media, seconds
        self._start, self._first = time.perf_counter(), 0.0
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._reason, self._usage = "stop", cast(Any, None)

    def add(self, chunk: Any) -> str:
        """Take a chunk; returns its new text."""
        self._usage, text = chunk.usage or self._usage, ""
        for choice in chunk.choices:
            text += choice.delta.content or ""
            self._reason = choice.finish_reason or self._reason
            for token in (choice.logprobs and choice.logprobs.content) or ():
                self._first = self._first or time.perf_counter()
                self._tokens.append(int.from_bytes(b"\1" + token.token.encode(), "big"))
        self._texts.append(text)
        if time.perf_counter() - self._start > self._seconds:
            raise DeadlineExceeded(f"the answer was not complete after {self._seconds:g} s")
        return text

    def answer(self) -> Answer:
        """The answer, after the last chunk.

        The API returns the texts of tokens and not their ids: ``token_ids`` are numbers of the
        texts, equal where these are.
        """
        if self._usage is None:
            raise VLMFastError("the server closed the connection before the answer was complete")
        usage = self._usage.to_dict()
        own = usage["vlmfast"]
        trace = _trace(own["trace"])
        if trace.layout is not None:
            trace.images = self._media.images(int(trace.layout.item.max()) + 1)
        text, stats = "".join(self._texts), self._stats(usage)
        return Answer(text, self._tokens, stats, trace, own["recipe"], self._reason)

    def _stats(self, usage: dict[str, Any]) -> Stats:
        own, end = usage["vlmfast"], time.perf_counter()
        cached, count = usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
        stats = Stats(
            **{name: own[name] for name in _SAME},
            cached_tokens=cached,
            prompt_tokens=own["prompt_tokens_fed"],
            prompt_reused=cached,
            prompt_fed=usage["prompt_tokens"] - cached,
            generated_tokens=count,
            drafted=own["drafted_tokens"],
            accepted=own["accepted_tokens"],
            time_total_s=end - self._start,
        )
        if count > 1 and self._first:
            stats.tpot_s = (end - self._first) / (count - 1)
            stats.tokens_per_s = 1 / stats.tpot_s
        return stats


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _trace(found: dict[str, Any]) -> Trace:
    """The inverse of `Trace.to_dict`."""
    stages = [(stage["name"], stage["layer"]) for stage in found["stages"]]
    tokens, layers = found["tokens"], found["layers"]
    if not tokens:
        return Trace(layers=layers, stages=stages)
    kind, item, tile, depth = (
        torch.tensor([token[key] for token in tokens]) for key in ("kind", "item", "tile", "depth")
    )
    box = torch.tensor([token["box"] for token in tokens], dtype=torch.float32)
    count = len(tokens)
    blank = TokenLayout.text(torch.arange(count), torch.zeros((1, count), dtype=torch.int64))
    layout = blank.replace(
        kind=kind.to(torch.uint8),
        item=item.to(torch.int32),
        tile=tile.to(torch.int32),
        box=box.where(box >= 0, torch.nan),
    )
    frames = [
        (-1 if item["video"] is None else item["video"], item["frame"], item["frames"])
        for item in found["items"]
    ]
    entered = _with_merged(layout, found["merged"]).select(depth > 0)
    return Trace(layout, entered, depth, layers, stages, frames=frames, saliency=found["saliency"])


def _with_merged(layout: TokenLayout, merged: list[dict[str, Any]]) -> TokenLayout:
    """The visual tokens with what became of some of them before the language model."""
    if not merged:
        return layout
    token = torch.tensor([one["token"] for one in merged])
    changed = {
        name: getattr(layout, name).index_copy(
            0, token, torch.tensor([one[name] for one in merged], dtype=getattr(layout, name).dtype)
        )
        for name in ("kind", "box", "weight")
    }
    box = changed["box"]
    return layout.replace(**{**changed, "box": box.where(box >= 0, torch.nan)})
