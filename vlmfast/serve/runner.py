"""Between the event loop and the engine: opens requests, and waits for their tokens.

Media are decoded and prompts prepared in a few worker threads, answers are computed in the engine's
thread, and the event loop is woken by it. A request whose client has left is cancelled in whichever
of these it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from transformers import LogitsProcessorList

from vlmfast.api.answer import Answer, Request
from vlmfast.api.generation import end_ids
from vlmfast.api.vlm import VLM
from vlmfast.engine.handle import Handle
from vlmfast.engine.sampling import TokenLogprobs
from vlmfast.errors import DeadlineExceeded, MediaError, RequestCancelled

from .config import ServerConfig
from .errors import RequestError
from .grammars import Grammars
from .media import MediaReader
from .metrics import Metrics
from .penalties import OpenAIPenalties
from .query import Media, Query, Recipes, generation_of, messages_of
from .shadow import Agreement, Sample, Shadow
from .text import TextStream


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
        return len(self.prompt)


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


@dataclass
class Running:
    """A request that the engine answers.

    Parameters
    ----------
    query : Query
    handle : Handle
    text : TextStream, optional
        Of answers that are streamed or have stop strings.
    arrived : float
        By `time.perf_counter`.
    finisher : Executor
        Makes the answer from what the engine has computed.
    sample : Sample, optional
        Of a request that is to be answered again.

    Attributes
    ----------
    counted : bool
        Whether its end is in the metrics.
    """

    query: Query
    handle: Handle[Answer]
    text: TextStream | None
    arrived: float
    finisher: Executor
    sample: Sample | None = None
    counted: bool = False
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, wakes: Wakes) -> None:
        """Let the engine wake the event loop."""
        stream = self.query.stream

        def wake() -> None:
            if stream or self.handle.done:
                wakes.set(self._event)

        self.handle.listen(wake, streamed=stream)

    def cancel(self) -> None:
        """End the request at the engine's next opportunity."""
        self.handle.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield new text as it is generated; the last piece comes when the answer is complete."""
        assert self.text is not None
        logprobs, read = self.handle.sequence.sampler.logprobs, 0
        done = False
        while not done:
            await self._event.wait()
            self._event.clear()
            done = self.handle.done
            new = logprobs[read:]
            read += len(new)
            text = self.text.take()
            if text or new:
                yield Piece(text, new)

    async def result(self) -> Result:
        """The answer, as soon as it is complete.

        Raises
        ------
        Exception
            What ended the request without an answer.
        """
        while not self.handle.done:
            await self._event.wait()
            self._event.clear()
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self.finisher, self.handle.result)
        sequence = self.handle.sequence
        assert sequence.first is not None
        text = answer.text if self.text is None else self.text.text
        prompt = sequence.ids[0, : sequence.prompt_length]
        return Result(answer, text, prompt, sequence.first - self.arrived)


class Runner:
    """Answers requests with one model.

    Parameters
    ----------
    vlm : VLM
    config : ServerConfig
    """

    def __init__(self, vlm: VLM, config: ServerConfig) -> None:
        self.vlm, self.config = vlm, config
        self.recipes = Recipes(vlm, config)
        self._reader = MediaReader(config.media)
        tokenizer = vlm.processor.tokenizer
        own = vlm.model.generation_config
        self._grammars = Grammars(tokenizer, vlm.adapter.vocabulary, end_ids(own))
        self._samples = bool(own.do_sample)
        self._threads = ThreadPoolExecutor(config.media_threads, "vlmfast-media", _alone)
        # One thread: each has memory of its own that it keeps.
        self._finisher = ThreadPoolExecutor(1, "vlmfast-answers", _alone)
        self._wakes: Wakes | None = None
        self._closed = False
        self._preparing = 0
        self.shadow: Shadow | None = None

    def metrics(self) -> Metrics:
        """Metrics of this model, not counted yet."""
        recipes = {str(recipe) for recipe in self.recipes.by_model.values()}
        stages = {part.name for r in self.recipes.by_model.values() for part in r}
        return Metrics(
            self.config.model,
            self.vlm.engine.load,
            self.vlm.prefix_cache.stats,
            lambda: self._preparing,
            recipes,
            stages,
        )

    def warm_up(self) -> None:
        """Answer one question under each recipe of the configuration."""
        for recipe in dict.fromkeys(self.recipes.by_model.values()):
            self.vlm.warmup(recipe)

    async def open(self, query: Query, key: str, arrived: float, end: float) -> Running:
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

    def run(self) -> None:
        """Run the engine in this thread until `close`."""
        self.vlm.engine.serve(lambda: self._closed)

    def start_shadow(self, found: Callable[[Agreement | None], None]) -> None:
        """Answer the configured share of requests again; ``found`` is as in `Shadow`."""
        if self.config.shadow:
            self.shadow = Shadow(self.vlm, self.config.shadow, lambda: self.idle, found)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        load = self.vlm.engine.load()
        return not (self._preparing or load.waiting or load.prefilling or load.decoding)

    def release(self) -> bool:
        """Free the idle buffers of caches where no request is left: they only save allocations.

        Returns
        -------
        bool
            Whether no request is left.
        """
        if idle := self.idle:
            self.vlm.adapter.pool.clear()
        return idle

    def close(self) -> None:
        """Let no more requests in, and forget those whose media have not been read."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finisher.shutdown(wait=False)
        if self.shadow is not None:
            self.shadow.close()
        self._grammars.close()
        self._closed = True
        self.vlm.engine.notify()

    def _check_queue(self) -> None:
        waiting = self._preparing + self.vlm.engine.load().waiting
        if waiting >= self.config.max_queue:
            raise RequestError(
                f"{waiting} requests are waiting already; try later",
                429,
                code="queue_full",
                retry_after=1,
            )

    def _prepared(self, work: asyncio.Future[Running]) -> None:
        self._preparing -= 1

    def _opened(
        self, query: Query, key: str, arrived: float, end: float, gone: threading.Event
    ) -> Running:
        """In a worker thread: decode the media, prepare the prompt, and submit it."""
        reader = self._reader.request(end)

        def image(media: Media) -> Any:
            _check_present(gone)
            return reader.image(media.url, param=media.param)

        def video(media: Media) -> Any:
            _check_present(gone)
            return reader.video(
                media.url, param=media.param, num_frames=query.num_frames, fps=query.fps
            )

        messages = messages_of(query.turns, image, video, query.num_frames, query.fps)
        _check_present(gone)
        generation = generation_of(query, self._samples)
        own = self.vlm.model.generation_config.max_new_tokens or 0
        if "max_new_tokens" not in generation and own > self.config.max_new_tokens:
            generation["max_new_tokens"] = self.config.max_new_tokens
        request = Request(
            messages=messages,
            recipe=query.recipe,
            generation=generation,
            tenant=_tenant(key, query.cache_salt),
        )
        sample = None
        if self.shadow is not None and self.shadow.takes(str(query.recipe)):
            sample = Sample(
                request, partial(self._again, replace(query, turns=())), self.config.max_new_tokens
            )
        text = self._text(query)
        request = replace(request, generation=generation | self._stateful(query, text, end))
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request reached its deadline while its media were read")
        try:
            handle = self.vlm.submit(
                request, deadline=left, default_new_tokens=self.config.max_new_tokens
            )
        except MediaError as error:
            raise reader.as_request_error(error) from error
        if gone.is_set():  # before the engine has done much of it
            handle.cancel()
        # Without its messages, whose media may be large.
        return Running(replace(query, turns=()), handle, text, arrived, self._finisher, sample)

    def _stateful(self, query: Query, text: TextStream | None, end: float) -> dict[str, Any]:
        """Generation arguments that follow the tokens of one answer."""
        found: dict[str, Any] = {}
        if text is not None:
            found["streamer"] = text
            if query.stops:
                found["stopping_criteria"] = [text]
        if processors := self._processors(query, end):
            found["logits_processor"] = LogitsProcessorList(processors)
        return found

    def _again(self, query: Query) -> dict[str, Any]:
        """`_stateful` of another answer, which nobody reads as it is generated."""
        text = self._text(replace(query, stream=False))
        return self._stateful(query, text, time.monotonic() + self.config.timeout_s)

    def _text(self, query: Query) -> TextStream | None:
        if not query.stream and not query.stops:
            return None
        return TextStream(self.vlm.processor.tokenizer, query.stops)

    def _processors(self, query: Query, end: float) -> list[Callable[[Tensor, Tensor], Tensor]]:
        found: list[Callable[[Tensor, Tensor], Tensor]] = []
        if query.presence_penalty or query.frequency_penalty:
            found.append(OpenAIPenalties(query.presence_penalty, query.frequency_penalty))
        if query.response_format is not None:
            grammar = self._grammars.processor(query.response_format, end=end)
            found += [] if grammar is None else [grammar]
        return found


def _alone() -> None:
    """Compute in this thread alone.

    Threads of OpenMP that belong to it would take the cores of the engine's, and, since there are
    more of them than cores, make libgomp put threads to sleep between any two operations.
    """
    torch.get_num_threads()  # otherwise PyTorch's first operation sets it
    threadpool_limits(1, "openmp")


def _check_present(gone: threading.Event) -> None:
    if gone.is_set():
        raise RequestCancelled("the client has left")


def _tenant(key: str, salt: str) -> str:
    """Requests share the prefix cache where key and salt are the same; it does not hold the key."""
    digest = hashlib.sha256(key.encode()).hexdigest() if key else ""
    return f"{digest}/{salt}"


def _abandon(work: asyncio.Future[Running]) -> None:
    """Cancel a request whose client left while its media were read."""
    if not work.cancelled() and work.exception() is None:
        work.result().cancel()
