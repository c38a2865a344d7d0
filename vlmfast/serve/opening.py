"""Requests on their way to an engine, whichever engine it is, and what comes back.

Media are decoded and prompts prepared in a few worker threads, and the event loop is woken by the
engine. A request whose client has left is cancelled in whichever of these it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from vlmfast.api.answer import Answer
from vlmfast.engine.sampling import TokenLogprobs
from vlmfast.errors import MediaError, RequestCancelled

from .config import ServerConfig
from .errors import RequestError
from .media import RequestMedia
from .media_sources import MediaSources
from .metrics import Metrics
from .query import Media, Query, Recipes, messages_of
from .shadow import Agreement, Sample, Shadow


@dataclass(frozen=True)
class Piece:
    """Part of an answer that is being generated.

    Parameters
    ----------
    text : str
        New text, possibly empty.
    logprobs : list of TokenLogprobs
        Of the new tokens.
    """

    text: str
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True)
class Result:
    """An answer as the API returns it.

    Parameters
    ----------
    answer : Answer
    text : str
        Up to the first stop string.
    prompt : Tensor, int64, (S,)
        Ids of the prompt, placeholders included.
    ttft_s : float
        From the arrival of the request to its first token.
    """

    answer: Answer
    text: str
    prompt: Tensor
    ttft_s: float

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt before anything is dropped."""
        return len(self.prompt)

    def cost(self, trace: bool) -> dict[str, Any]:
        """The figures of vlmfast in `usage`; with ``trace`` where each token was dropped."""
        answer, stats = self.answer, self.answer.stats
        found = {
            "recipe": answer.canonical_recipe,
            "visual_tokens_in": stats.visual_tokens_in,
            "visual_tokens_kept": stats.visual_tokens_kept,
            "equivalent_tokens": stats.equivalent_tokens,
            "prompt_tokens_fed": stats.prompt_tokens,
            "kv_bytes": stats.kv_bytes,
            "kv_bytes_full": stats.kv_bytes_full,
            "ttft_s": round(self.ttft_s, 6),
            "queue_s": round(stats.queue_s, 6),
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted,
        }
        return found | ({"trace": answer.trace.to_dict()} if trace else {})


class Wakes:
    """Sets events of an event loop from other threads.

    All events of a step take one wake of the loop. Each wake is a system call, at which the engine
    would have to wait for the loop.

    Parameters
    ----------
    loop : AbstractEventLoop
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[asyncio.Event] = deque()
        self._asked = False

    def set(self, event: asyncio.Event) -> None:
        """Set an event soon; any thread may call this."""
        self._due.append(event)
        if not self._asked:
            self._asked = True
            self._loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        self._asked = False  # first: what is added from now on asks again
        while self._due:
            self._due.popleft().set()


class Pending(Protocol):
    """A request that an engine answers.

    Attributes
    ----------
    query : Query
    sample : Sample, optional
        Of a request that is to be answered again.
    counted : bool
        Whether its end is in the metrics.
    """

    query: Query
    sample: Sample | None
    counted: bool

    def start(self, wakes: Wakes) -> None:
        """Let the engine wake the event loop."""

    def cancel(self) -> None:
        """End the request at the engine's next opportunity."""

    def pieces(self) -> AsyncIterator[Piece]:
        """Yield new text as it is generated; the last piece comes when the answer is complete."""

    async def result(self) -> Result:
        """The answer, as soon as it is complete.

        Raises
        ------
        Exception
            What ended the request without an answer.
        """


_Pending = TypeVar("_Pending", bound=Pending)


class Opener(ABC, Generic[_Pending]):
    """Opens requests: reads their media, and gives them to an engine.

    Parameters
    ----------
    recipes : Recipes
    config : ServerConfig

    Attributes
    ----------
    tokenizer : PreTrainedTokenizer
    shadow : Shadow, optional
        Answers requests again.
    """

    tokenizer: Any
    shadow: Shadow | None = None

    def __init__(self, recipes: Recipes, config: ServerConfig) -> None:
        self.recipes, self.config = recipes, config
        self._sources = MediaSources(config.media)
        self._threads = ThreadPoolExecutor(config.media_threads, "vlmfast-media", alone)
        self._wakes: Wakes | None = None
        self._preparing = 0

    # --- of an engine ----------------------------------------------------------------------------

    @abstractmethod
    def submit(
        self,
        query: Query,
        messages: list[dict[str, Any]],
        key: str,
        arrived: float,
        end: float,
        gone: threading.Event,
    ) -> _Pending:
        """Prepare the prompt, and submit it; called in a worker thread.

        Parameters
        ----------
        messages : list of dict
            As of `VLM.chat`, with decoded images and the bytes of videos.
        gone : Event
            Whether the client has left.
        """

    @abstractmethod
    def waiting(self) -> int:
        """Requests that wait for the engine."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """Metrics of this model, not counted yet."""

    @abstractmethod
    def warm_up(self) -> None:
        """Answer one question under each recipe of the configuration."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no request of a client is left."""

    @abstractmethod
    def run(self) -> None:
        """Run the engine in this thread until `close`."""

    @abstractmethod
    def release(self) -> bool:
        """Free what only idle engines can; whether no request is left."""

    def close(self) -> None:
        """Let no more requests in, and forget those whose media have not been read."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.shadow is not None:
            self.shadow.close()

    # --- of all engines --------------------------------------------------------------------------

    def start_shadow(self, found: Callable[[Agreement | None], None]) -> None:
        """Answer the configured share of requests again; ``found`` is as in `Shadow`."""
        if self.config.shadow:
            self.shadow = Shadow(self.config.shadow, lambda: self.idle, found)

    async def open(self, query: Query, key: str, arrived: float, end: float) -> _Pending:
        """Read the media of a request, and submit it.

        Parameters
        ----------
        query : Query
        key : str
            The API key of the client.
        arrived : float
            By `time.perf_counter`.
        end : float
            When the request is given up, by `time.monotonic`.

        Raises
        ------
        RequestError, VLMFastError
            For a request that cannot be answered.
        """
        self._check_queue()
        gone = threading.Event()
        self._preparing += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._threads, self._opened, query, key, arrived, end, gone
        )
        work.add_done_callback(self._prepared)
        try:
            running = await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            work.add_done_callback(_abandon)
            raise
        if self._wakes is None:
            self._wakes = Wakes(asyncio.get_running_loop())
        running.start(self._wakes)
        return running

    def _check_queue(self) -> None:
        waiting = self._preparing + self.waiting()
        if waiting >= self.config.max_queue:
            raise RequestError(
                f"{waiting} requests are waiting already; try later",
                429,
                code="queue_full",
                retry_after=1,
            )

    def _prepared(self, work: asyncio.Future[_Pending]) -> None:
        self._preparing -= 1

    def _opened(
        self, query: Query, key: str, arrived: float, end: float, gone: threading.Event
    ) -> _Pending:
        """In a worker thread: decode the media, prepare the prompt, and submit it."""
        reader = RequestMedia(self._sources, end)
        messages = _messages(query, reader, gone)
        _check_present(gone)
        try:
            return self.submit(query, messages, key, arrived, end, gone)
        except MediaError as error:
            raise reader.as_request_error(error) from error


def alone() -> None:
    """Compute in this thread alone.

    Threads of OpenMP that belong to it would take the cores of the engine's, and, since there are
    more of them than cores, make libgomp put threads to sleep between any two operations.
    """
    torch.get_num_threads()  # otherwise PyTorch's first operation sets it
    threadpool_limits(1, "openmp")


def tenant_of(key: str, salt: str) -> str:
    """Requests share the prefix cache where key and salt are the same; it does not hold the key."""
    digest = hashlib.sha256(key.encode()).hexdigest() if key else ""
    return f"{digest}/{salt}"


def _messages(query: Query, reader: RequestMedia, gone: threading.Event) -> list[dict[str, Any]]:
    def image(media: Media) -> Any:
        _check_present(gone)
        return reader.image(media.url, param=media.param)

    def video(media: Media) -> Any:
        _check_present(gone)
        return reader.video(
            media.url, param=media.param, num_frames=query.num_frames, fps=query.fps
        )

    return messages_of(query.turns, image, video, query.num_frames, query.fps)


def _check_present(gone: threading.Event) -> None:
    if gone.is_set():
        raise RequestCancelled("the client has left")


def _abandon(work: asyncio.Future[Any]) -> None:
    """Cancel a request whose client left while its media were read."""
    if not work.cancelled() and work.exception() is None:
        work.result().cancel()
