"""Answers requests with vlmfast's engine: submits them, and waits for their tokens.

Answers are computed in the engine's thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList

from vlmfast.api.answer import Answer, Request
from vlmfast.api.generation import end_ids
from vlmfast.api.vlm import VLM
from vlmfast.engine.handle import Handle
from vlmfast.errors import DeadlineExceeded

from .config import ServerConfig
from .grammars import Grammars
from .metrics import Metrics
from .opening import Opener, Piece, Result, Wakes, alone, tenant_of
from .penalties import OpenAIPenalties
from .query import Query, Recipes, generation_of
from .shadow import Again, Sample
from .text import TextStream


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
        sequence, read = self.handle.sequence, 0
        done = False
        while not done:
            await self._event.wait()
            self._event.clear()
            done = self.handle.done
            new = sequence.sampler.logprobs[read : sequence.emitted]
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


class Runner(Opener[Running]):
    """Answers requests with one model.

    Parameters
    ----------
    vlm : VLM
    config : ServerConfig
    """

    def __init__(self, vlm: VLM, config: ServerConfig) -> None:
        super().__init__(Recipes(vlm, config), config)
        self.vlm, self.tokenizer = vlm, vlm.processor.tokenizer
        own = vlm.model.generation_config
        self._grammars = Grammars(self.tokenizer, vlm.adapter.vocabulary, end_ids(own))
        self._samples = bool(own.do_sample)
        # One thread: each has memory of its own that it keeps.
        self._finisher = ThreadPoolExecutor(1, "vlmfast-answers", alone)
        self._closed = False

    def metrics(self) -> Metrics:
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
        for recipe in dict.fromkeys(self.recipes.by_model.values()):
            self.vlm.warmup(recipe)

    def waiting(self) -> int:
        return self.vlm.engine.load().waiting

    def run(self) -> None:
        self.vlm.engine.serve(lambda: self._closed)

    @property
    def idle(self) -> bool:
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
        super().close()
        self._finisher.shutdown(wait=False)
        self._grammars.close()
        self._closed = True
        self.vlm.engine.notify()

    def submit(
        self,
        query: Query,
        messages: list[dict[str, Any]],
        key: str,
        arrived: float,
        end: float,
        gone: threading.Event,
    ) -> Running:
        generation = generation_of(query, self._samples)
        own = self.vlm.model.generation_config.max_new_tokens or 0
        if "max_new_tokens" not in generation and own > self.config.max_new_tokens:
            generation["max_new_tokens"] = self.config.max_new_tokens
        request = Request(
            messages=messages,
            recipe=query.recipe,
            generation=generation,
            tenant=tenant_of(key, query.cache_salt),
        )
        sample = None
        if self.shadow is not None and self.shadow.takes(str(query.recipe)):
            stateful = partial(self._again, replace(query, turns=()))
            again = Again(self.vlm, request, stateful, self.config.max_new_tokens)
            sample = Sample(messages, again.compared)
        text = self._text(query)
        request = replace(request, generation=generation | self._stateful(query, text, end))
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request reached its deadline while its media were read")
        handle = self.vlm.submit(
            request, deadline=left, default_new_tokens=self.config.max_new_tokens
        )
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
