"""vLLM's engine behind the server of `vlmfast serve`.

The engine has an event loop of its own, in the thread that loads it: what it does for one request
does not delay the server's loop. Requests reach it as prompts of ``AsyncLLM.generate``, so that
nothing of a client's body does, beside what vlmfast has read from it.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from vlmfast.api.answer import Answer
from vlmfast.api.generation import end_ids
from vlmfast.engine.sampling import TokenLogprobs
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import DeadlineExceeded, ModelError, RequestCancelled, VLMFastError
from vlmfast.serve.config import ServerConfig
from vlmfast.serve.errors import RequestError
from vlmfast.serve.grammar_compiler import OPTIONS
from vlmfast.serve.grammars import Grammars, unfollowed
from vlmfast.serve.metrics import Metrics
from vlmfast.serve.opening import Opener, Piece, Result, Wakes, tenant_of
from vlmfast.serve.query import Query, Recipes
from vlmfast.serve.shadow import Agreement, Sample
from vlmfast.serve.text import TextStream

from .frontend import Frontend, Prompt, kept
from .recipes import Plan

# Hugging Face's, where neither the request nor the checkpoint sets one.
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}
_LONG = "maximum model length"  # in vLLM's errors
_LOOK_S = 0.5  # between two looks at the engine
_SIDE = 224  # of the image that warms the engine up


@dataclass(frozen=True)
class Reduced(Result):
    """An answer of vLLM, whose prompt has only the tokens that the recipe keeps."""

    @property
    def prompt_tokens(self) -> int:
        stats = self.answer.stats
        left = list(stats.visual_tokens_kept.values())
        return len(self.prompt) + (stats.visual_tokens_in - left[-1] if left else 0)

    def cost(self, trace: bool) -> dict[str, Any]:
        told = ("recipe", "visual_tokens_in", "visual_tokens_kept", "equivalent_tokens")
        told += ("prompt_tokens_fed", "ttft_s", "queue_s")
        return {name: value for name, value in super().cost(trace).items() if name in told}


class Running:
    """A request that vLLM answers.

    Parameters
    ----------
    query : Query
    prompt : Prompt
    frontend : Frontend
    text : TextStream, optional
        Of answers that are streamed or have stop strings.
    arrived : float
        By `time.perf_counter`.
    sample : Sample, optional
        Of a request that is to be answered again.
    """

    def __init__(
        self,
        query: Query,
        prompt: Prompt,
        frontend: Frontend,
        text: TextStream | None,
        arrived: float,
        sample: Sample | None = None,
    ) -> None:
        self.query, self.text, self.counted, self.sample = query, text, False, sample
        self._prompt, self._frontend, self._arrived = prompt, frontend, arrived
        self._event, self._wakes = asyncio.Event(), None
        self._ids: list[int] = []  # of the prompt
        self.tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason, self._cached = "", 0
        self._queue_s = self._prefill_s = 0.0
        self._first = self._last = 0.0
        self._error: Exception | None = None
        self._done = False
        self.cancel: Callable[[], object] = lambda: None

    @property
    def begun(self) -> bool:
        """Whether it has a first token, or ended without one."""
        return self._done or bool(self.tokens)

    # --- in the engine's thread ------------------------------------------------------------------

    def add(self, output: Any) -> bool:
        """Take what was generated since the last call; whether the answer is complete."""
        now, begun = time.perf_counter(), self.begun
        if not begun:
            self._ids, self._first = list(output.prompt_token_ids), now
            self._cached = output.num_cached_tokens or 0
        self._last = now
        (new,) = output.outputs
        for number, token in enumerate(new.token_ids):
            self.tokens.append(token)
            if self.query.top_logprobs is not None:
                self._logprobs.append(_logprobs(token, new.logprobs[number], self.query))
            if self.text is not None:
                self.text.put(token)
                if self.text.stopped:
                    self._reason = "stop"
                    break
        if new.finish_reason and not self._reason:
            self._reason = str(new.finish_reason)
        if (times := output.metrics) is not None:
            self._queue_s = max(times.scheduled_ts - times.queued_ts, 0.0)
            self._prefill_s = max(times.first_token_ts - times.scheduled_ts, 0.0)
        if self.query.stream or not begun:
            self._wake()
        return bool(self._reason)

    def end(self, error: Exception | None = None) -> None:
        """Nothing follows; ``error`` ended the request without an answer."""
        if self.text is not None:
            self.text.end()
        self._error, self._done = error, True
        self._wake()

    @property
    def refusal(self) -> Exception | None:
        """Why an answer that ended is none."""
        if self._reason in ("stop", "length"):
            return None
        if self._reason == "error" and self.query.response_format is not None:
            return unfollowed("response_format")
        return RuntimeError(f"vLLM ended a request: {self._reason or 'without a reason'}")

    # --- in the server's thread ------------------------------------------------------------------

    def start(self, wakes: Wakes) -> None:
        self._wakes = wakes
        self._wake()

    async def begin(self) -> None:
        """Wait for the first token.

        Raises
        ------
        Exception
            What ended the request before.
        """
        while not self.begun:
            await self._changed()
        if self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncIterator[Piece]:
        assert self.text is not None
        read, done = 0, False
        while not done:
            done = self._done  # before what is read next
            new, text = self._logprobs[read:], self.text.take()
            read += len(new)
            if text or new:
                yield Piece(text, new)
            if not done:
                await self._changed()

    async def result(self) -> Result:
        while not self._done:
            await self._changed()
        if self._error is not None:
            raise self._error
        if self.text is None:
            decode = self._frontend.processor.tokenizer.decode
            text = decode(self.tokens, skip_special_tokens=True).strip()
        else:
            text = self.text.text
        answer = Answer(
            text,
            self.tokens,
            self._stats(),
            Trace(),
            self.query.recipe.text,
            self._reason,
            self._logprobs if self.query.top_logprobs is not None else None,
            str(self.query.recipe),
        )
        return Reduced(answer, text, torch.tensor(self._ids), self._first - self._arrived)

    async def _changed(self) -> None:
        await self._event.wait()
        self._event.clear()

    def _wake(self) -> None:
        if self._wakes is not None:
            self._wakes.set(self._event)

    def _stats(self) -> Stats:
        plan, layouts = self._prompt.plan, self._prompt.layouts
        left = kept(plan, layouts) if layouts else {}
        whole = sum(map(len, layouts)) if layouts else self._frontend.visual(self._ids)
        count, spent = len(self.tokens), self._last - self._first
        return Stats(
            visual_tokens_in=whole,
            visual_tokens_kept=left,
            equivalent_tokens=float([whole, *left.values()][-1]),
            cached_tokens=self._cached,
            prompt_tokens=len(self._ids) - self._cached,
            generated_tokens=count,
            tpot_s=spent / (count - 1) if count > 1 else 0.0,
            queue_s=self._queue_s,
            time_prefill_s=self._prefill_s,
        )


class VllmRunner(Opener[Running]):
    """Answers requests with vLLM's engine, which it loads.

    Parameters
    ----------
    frontend : Frontend
    config : ServerConfig
    engine : AsyncEngineArgs
    """

    def __init__(self, frontend: Frontend, config: ServerConfig, engine: AsyncEngineArgs) -> None:
        super().__init__(Recipes(frontend, config), config)
        self._frontend, self.tokenizer = frontend, frontend.processor.tokenizer
        vocabulary = frontend.config.get_text_config().vocab_size
        self._grammars = Grammars(self.tokenizer, vocabulary, end_ids(frontend.generation))
        self._unanswered: set[Running] = set()
        self._loop, self._closed = asyncio.new_event_loop(), threading.Event()
        self._engine: AsyncLLM = self._loop.run_until_complete(_started(engine))

    async def open(self, query: Query, key: str, arrived: float, end: float) -> Running:
        running = await super().open(query, key, arrived, end)
        try:
            await running.begin()  # vLLM refuses a prompt as late
        except BaseException:
            running.cancel()
            raise
        return running

    def submit(
        self,
        query: Query,
        messages: list[dict[str, Any]],
        key: str,
        arrived: float,
        end: float,
        gone: threading.Event,
    ) -> Running:
        if query.trace:
            raise RequestError(
                "vLLM does not tell which tokens are kept, so that there is no trace and no "
                "/tokenize",
                param="trace",
            )
        if query.response_format is not None:  # refused where vLLM would fail
            self._grammars.processor(query.response_format, end=end)
        params = self._params(query)
        tenant = tenant_of(key, query.cache_salt)
        prompt = self._frontend.prompt(messages, self._plan(query), tenant)
        text = None
        if query.stream or query.stops:
            text = TextStream(self.tokenizer, query.stops)
        left = replace(prompt, given={})  # without its media, which may be large
        query, sample = replace(query, turns=()), None
        if self.shadow is not None and self.shadow.takes(str(query.recipe)):
            sample = Sample(messages, partial(self._compared, query, messages, tenant))
        running = Running(query, left, self._frontend, text, arrived, sample)
        work = self._answer(running, prompt.given, params, end)
        running.cancel = asyncio.run_coroutine_threadsafe(work, self._loop).cancel
        if gone.is_set():
            running.cancel()
        return running

    def waiting(self) -> int:
        return sum(not running.begun for running in tuple(self._unanswered))

    def metrics(self) -> Metrics:
        recipes = {str(recipe) for recipe in self.recipes.by_model.values()}
        stages = {part.name for r in self.recipes.by_model.values() for part in r}
        none = [lambda: None, lambda: None, lambda: self._preparing]
        return VllmMetrics(self.config.model, *none, recipes, stages)

    def warm_up(self) -> None:
        image = Image.new("RGB", (_SIDE, _SIDE), (1, 2, 3))
        content = [{"type": "image", "image": image}, {"type": "text", "text": "?"}]
        messages = [{"role": "user", "content": content}]
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for recipe in dict.fromkeys(map(str, self.recipes.by_model.values())):
            prompt = self._frontend.prompt(messages, self._frontend.plan(recipe), "")
            self._loop.run_until_complete(self._first(prompt.given, params))

    def run(self) -> None:
        try:
            self._loop.run_until_complete(self._watched())
        finally:
            self._loop.run_until_complete(_cancelled())
            self._engine.shutdown()
            self._loop.close()

    @property
    def idle(self) -> bool:
        return not (self._preparing or self._unanswered)

    def release(self) -> bool:
        return self.idle

    def close(self) -> None:
        super().close()
        self._grammars.close()
        self._closed.set()

    # --- in the engine's thread ------------------------------------------------------------------

    async def _watched(self) -> None:
        """Wait for `close`, or for the end of the engine."""
        while not self._closed.is_set():
            if self._engine.errored:
                raise ModelError("vLLM's engine has ended; its log lines tell why")
            await asyncio.sleep(_LOOK_S)

    async def _first(self, given: dict[str, Any], params: SamplingParams) -> Any:
        """What vLLM says of a single token."""
        async for output in self._engine.generate(given, params, uuid.uuid4().hex):
            found = output.outputs[0]
        return found

    async def _generated(
        self, running: Running, given: dict[str, Any], params: SamplingParams
    ) -> None:
        outputs = self._engine.generate(given, params, uuid.uuid4().hex)
        async with aclosing(outputs):
            async for output in outputs:
                if running.add(output):
                    break

    async def _answer(
        self, running: Running, given: dict[str, Any], params: SamplingParams, end: float
    ) -> None:
        self._unanswered.add(running)
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await self._generated(running, given, params)
            running.end(running.refusal)
        except asyncio.CancelledError:
            running.end(RequestCancelled("the request was cancelled"))
            raise
        except TimeoutError:
            running.end(DeadlineExceeded("the request reached its deadline"))
        except Exception as error:
            running.end(_told(error))
        finally:
            self._unanswered.discard(running)

    # --- in the thread of `Shadow` ---------------------------------------------------------------

    def _compared(
        self, query: Query, messages: list[dict[str, Any]], tenant: str, answer: Answer
    ) -> Agreement:
        """Compare an answer with that of the full model."""
        plans = self._plan(query), self._frontend.plan("none")
        prompts = [self._frontend.prompt(messages, plan, tenant) for plan in plans]
        own, full = (self._distribution(prompt.given) for prompt in prompts)
        query, equal = replace(query, stream=False, top_logprobs=None), None
        params = self._params(query)
        if not params.temperature:
            text = TextStream(self.tokenizer, query.stops) if query.stops else None
            other = Running(query, prompts[1], self._frontend, text, time.perf_counter())
            self._waited(self._generated(other, prompts[1].given, params))
            equal = other.tokens == answer.token_ids
        return Agreement(answer.canonical_recipe, equal, float(own.minimum(full).sum()))

    def _distribution(self, given: dict[str, Any]) -> torch.Tensor:
        """Of the first token, (V,), before a format or penalties act on it."""
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=-1, flat_logprobs=True, detokenize=False
        )
        scores = self._waited(self._first(given, params)).logprobs
        found = torch.zeros(self._frontend.config.get_text_config().vocab_size)
        found[scores.token_ids] = torch.tensor(scores.logprobs).exp()
        return found

    def _waited(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of what runs in the engine's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # --- what vLLM is given ----------------------------------------------------------------------

    def _plan(self, query: Query) -> Plan:
        return self._frontend.plan(str(query.recipe))

    def _params(self, query: Query) -> SamplingParams:
        own, most = self._frontend.generation, self.config.max_new_tokens
        sampled = own.do_sample if query.temperature is None else query.temperature > 0
        found: dict[str, Any] = {"temperature": 0.0}
        if sampled:
            for name, default in _SAMPLING.items():
                given = getattr(query, name, None)
                given = getattr(own, name, None) if given is None else given
                found[name] = default if given is None else given
        if own.repetition_penalty is not None:
            found["repetition_penalty"] = own.repetition_penalty
        if query.response_format is not None:
            found["structured_outputs"] = _structured(query.response_format)
        return SamplingParams(
            **found,
            max_tokens=query.max_new_tokens or min(own.max_new_tokens or most, most),
            seed=query.seed,
            presence_penalty=query.presence_penalty,
            frequency_penalty=query.frequency_penalty,
            logprobs=query.top_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


class VllmMetrics(Metrics):
    """The metrics of `vlmfast serve`, with vLLM's own after them."""

    def text(self) -> bytes:
        return super().text() + generate_latest(REGISTRY)


async def _cancelled() -> None:
    """Cancel all tasks of this loop, and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _started(engine: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(engine)


def _logprobs(token: int, found: dict[int, Any], query: Query) -> TokenLogprobs:
    ranked = sorted(found.items(), key=lambda pair: pair[1].rank)[: query.top_logprobs]
    return TokenLogprobs(token, found[token].logprob, [(of, one.logprob) for of, one in ranked])


def _structured(response_format: dict[str, Any]) -> StructuredOutputsParams | None:
    """A format for llguidance, with the options of vlmfast's own schemas."""
    kind = response_format["type"]
    if kind == "text":
        return None
    schema = {"type": "object"}
    if kind == "json_schema":
        schema = response_format["json_schema"]["schema"]
    return StructuredOutputsParams(json={**schema, "x-guidance": OPTIONS})


def _told(error: Exception) -> Exception:
    """What a client is told of an error of vLLM; a defect is left as it is."""
    if isinstance(error, EngineDeadError):
        return RequestError("the engine has ended", 503, code="stopping", retry_after=5)
    if isinstance(error, VLMFastError) or not isinstance(error, ValueError):
        return error
    reason = str(error).strip().partition("\n")[0]
    return RequestError(reason, code="context_length_exceeded" if _LONG in reason else None)
