"""The application: its routes, and the model that answers them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from vlmfast.errors import RequestCancelled, VLMFastError
from vlmfast.version import __version__

from .config import ServerConfig
from .errors import RequestError, as_request_error

try:
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from fastapi.routing import APIRoute
    from fastapi.security import HTTPBearer
except ImportError as error:
    raise VLMFastError("the server needs FastAPI: pip install 'vlmfast[serve]'") from error

from . import chat, responses, tokens
from .documents import ERRORS, STREAMED, Model, ModelList
from .gate import Gate
from .metrics import CONTENT_TYPE, Metrics
from .opening import Opener, Pending, Result
from .query import Query
from .responses import ResponsesRequest
from .runner import Runner
from .schema import ChatRequest, read_as
from .stream import ClientGone, EventStream, error_event, unless_gone
from .tokens import TokenizeRequest

LOG = logging.getLogger("vlmfast.serve")
_T = TypeVar("_T")
_LAST_STEP_S = 10.0  # seconds that the engine has for its last step


class Server:
    """The state of a server: a model that is loaded while it already listens.

    Parameters
    ----------
    config : ServerConfig
    load : callable
        Loads the model; called in a thread.
    runner : callable
        Makes of the model and the options what answers requests.

    Attributes
    ----------
    runner : Opener, optional
        As soon as the model is loaded.
    ready : bool
        Whether a first answer was computed.
    draining : bool
        Whether new work is refused, since the server is about to stop.
    failure : Exception, optional
        Why the model could not be loaded, or the engine ended.
    bodies : Executor
        Parses the bodies of requests, outside of the event loop.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], Any],
        runner: Callable[[Any, ServerConfig], Opener] = Runner,
    ) -> None:
        self.config, self._load, self._make = config, load, runner
        self.runner: Opener | None = None
        self.metrics: Metrics | None = None
        self.logprobs: chat.Logprobs | None = None
        self.created = int(time.time())
        self.ready, self.draining = False, False
        self.failure: Exception | None = None
        # One thread: parsing keeps Python to itself, and takes several times the bytes of a body.
        self.bodies = ThreadPoolExecutor(1, "vlmfast-bodies")
        self._thread = threading.Thread(target=self.run, name="vlmfast", daemon=True)

    @property
    def stopped(self) -> bool:
        """Whether nothing is computed any more."""
        return not self._thread.is_alive()

    def start(self) -> None:
        """Call `run` in a thread."""
        self._thread.start()

    def run(self) -> None:
        """Load the model, answer a first question, and run the engine until `close`.

        One thread does all of it: each thread that has computed keeps threads of PyTorch's, which
        would take the cores of the engine's.
        """
        try:
            runner = self._make(self._load(), self.config)
            self.metrics, self.logprobs = runner.metrics(), chat.Logprobs(runner.tokenizer)
            runner.warm_up()
            runner.start_shadow(self.metrics.compared)
        except Exception as error:
            LOG.error("the model cannot be loaded: %s", error)
            self.failure = error
            return
        self.runner, self.ready = runner, True
        try:
            runner.run()
        except Exception as error:
            LOG.error("the engine ended: %s", error)
            self.failure = error

    def close(self) -> None:
        """Let `run` return, and wait for the end of its last step."""
        if self.runner is not None:
            self.runner.close()
            self._thread.join(_LAST_STEP_S)
        self.bodies.shutdown(wait=False, cancel_futures=True)

    @property
    def running(self) -> Opener:
        """The runner.

        Raises
        ------
        RequestError
            While the model is loading.
        """
        if self.runner is None:
            raise RequestError("the model is loading", 503, code="loading", retry_after=5)
        return self.runner

    async def apart(self, work: Callable[[], _T]) -> _T:
        """The result of work that would hold the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.bodies, work)

    # --- answers ---------------------------------------------------------------------------------

    async def query(self, made: Callable[..., Query], asked: Any, *more: Any) -> Query:
        """What ``made`` makes of a request; 503 while the model is loading."""
        return await self.apart(lambda: made(asked, self.running.recipes, *more))

    async def open(self, request: Request, query: Query) -> Pending:
        """Submit a query; returns when its media are read."""
        state = request.state
        state.log.update(model=query.model, recipe=str(query.recipe), stream=query.stream)
        arrived = state.end - self.config.timeout_s
        # The engine's clock has another zero than that of deadlines.
        since = time.perf_counter() - (time.monotonic() - arrived)
        return await self.running.open(query, state.key, since, state.end)

    async def answer(self, request: Request, query: Query, *, counted: bool = True) -> Result:
        """The answer to a query that is not streamed; ``counted`` by the metrics."""
        running = None

        async def whole() -> Result:
            nonlocal running
            running = await self.open(request, query)
            return await running.result()

        try:
            result = await _in_time(request, whole(), 1)
        finally:
            if running is not None:
                running.cancel()
        if counted:
            self.count(request, result, running)
        return result

    async def opened(self, request: Request, query: Query) -> Pending:
        """A query that is streamed, as soon as the engine has it."""
        return await _in_time(request, self.open(request, query))

    def stream(
        self,
        request: Request,
        running: Pending,
        events: Callable[[Callable[[Result], None]], AsyncIterator[str]],
        failed: Callable[[Exception], str] = error_event,
    ) -> EventStream:
        """The response that streams an answer.

        Parameters
        ----------
        events : callable
            Makes the events; its argument is to be called with the result.
        failed : callable
            The event for an error.
        """

        async def watched() -> AsyncIterator[str]:
            try:
                async for event in events(lambda result: self.count(request, result, running)):
                    yield event
            except Exception as error:
                running.counted = True
                self.count_error(error)
                if as_request_error(error).status >= 500:
                    LOG.exception("request %s failed", request.state.request_id)
                yield failed(error)
            finally:
                running.cancel()
                if not running.counted:
                    self.count_error(ClientGone())

        left = request.state.end - time.monotonic() + self.config.grace_s
        return EventStream(watched(), left)

    def count(self, request: Request, result: Result, running: Pending | None) -> None:
        """Count an answer, and describe it in the log."""
        assert self.metrics is not None
        if running is not None:
            running.counted = True
        total_s = time.monotonic() - request.state.end + self.config.timeout_s
        self.metrics.answered(result.answer, result.prompt_tokens, result.ttft_s, total_s)
        if running is not None and running.sample is not None:
            assert self.runner is not None and self.runner.shadow is not None
            self.runner.shadow.add(running.sample, result.answer)
        request.state.log.update(
            prompt_tokens=result.prompt_tokens,
            completion_tokens=len(result.answer.token_ids),
            ttft_s=round(result.ttft_s, 4),
        )

    def count_error(self, error: Exception) -> None:
        if self.metrics is not None:
            gone = isinstance(error, ClientGone | RequestCancelled)
            self.metrics.failed(499 if gone else as_request_error(error).status)


async def _in_time(request: Request, work: Awaitable[_T], spare_s: float = 0.0) -> _T:
    """Wait for work until the deadline of a request, while its client stays."""
    try:
        async with asyncio.timeout(request.state.end - time.monotonic() + spare_s):
            return await unless_gone(request.receive, work)
    except TimeoutError:
        raise RequestError("the request reached its deadline", 408, code="timeout") from None


def create_app(server: Server) -> Gate:
    """The ASGI application of a server.

    The model is loaded in a thread when the application starts; until then requests get 503.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        await asyncio.to_thread(server.close)

    # `Gate` checks the keys; this documents them.
    keys = [Depends(HTTPBearer(auto_error=False))] if server.config.api_keys else []
    app = FastAPI(
        title="vlmfast",
        version=__version__,
        summary="OpenAI's API for vision-language models with compression recipes",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        dependencies=keys,
    )
    app.state.server = server
    _add_routes(app, server)

    @app.exception_handler(RequestError)
    @app.exception_handler(VLMFastError)
    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        found = as_request_error(error)
        if request.method == "POST":
            server.count_error(error)
        return JSONResponse(found.body, found.status, found.headers)

    @app.exception_handler(ClientGone)
    async def forget(request: Request, error: ClientGone) -> Response:
        server.count_error(error)
        return Response(status_code=499)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> Response:
        what = "this method" if error.status_code == 405 else "this path"
        found = RequestError(f"{what} is not served", error.status_code, code="not_found")
        return JSONResponse(found.body, found.status, getattr(error, "headers", None))

    return Gate(app, server.config, lambda: server.draining)


class _Route(APIRoute):
    """Parses a body outside of the event loop, up to its first error; FastAPI does neither."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        model: Any = self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            content = await request.body()
            asked = await request.app.state.server.apart(lambda: read_as(model, content))
            return await self.endpoint(request, asked)

        return handle


def _add_routes(app: FastAPI, server: Server) -> None:
    app.router.route_class = _Route

    @app.get("/health", tags=["state"])
    async def health() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "ok"}

    @app.get("/ready", tags=["state"], responses=ERRORS)
    async def ready() -> dict[str, str]:
        """Whether the model is loaded and warm, and new requests are answered."""
        if not server.ready or server.draining:
            raise RequestError("not ready", 503, code="not_ready", retry_after=5)
        return {"status": "ready"}

    @app.get("/metrics", tags=["state"], response_class=PlainTextResponse, responses=ERRORS)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        server.running  # noqa: B018
        assert server.metrics is not None
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models", tags=["models"])
    async def models() -> ModelList:
        """The model, once for each of its recipes."""
        return ModelList(object="list", data=[model_of(name) for name in server.config.recipes])

    @app.get("/v1/models/{name:path}", tags=["models"], responses=ERRORS)
    async def model(name: str) -> Model:
        """One name of the model."""
        if name not in server.config.recipes:
            raise RequestError("this model does not exist", 404, code="model_not_found")
        return model_of(name)

    def model_of(name: str) -> Model:
        return Model(
            id=name,
            object="model",
            created=server.created,
            owned_by="vlmfast",
            recipe=server.config.recipes[name],
            root=server.config.model,
        )

    @app.post("/v1/chat/completions", tags=["answers"], responses=STREAMED)
    async def completions(request: Request, asked: ChatRequest) -> Response:
        """Answer the last message of a conversation about images and videos."""
        query = await server.query(chat.query_of, asked, server.config)
        logprobs = server.logprobs
        assert logprobs is not None
        if not query.stream:
            result = await server.answer(request, query)
            return JSONResponse(chat.completion(result, query, logprobs))
        running = await server.opened(request, query)
        options = asked.stream_options
        include_usage = bool(options and options.include_usage)
        return server.stream(
            request,
            running,
            lambda finished: chat.chunks(running, include_usage, logprobs, finished),
        )

    @app.post("/tokenize", tags=["models"], responses=ERRORS)
    async def tokenize(request: Request, asked: TokenizeRequest) -> Response:
        """The ids of a request, and those that its recipe leaves."""
        query = await server.query(tokens.query_of, asked)
        runner, result = server.running, await server.answer(request, query, counted=False)
        assert isinstance(runner, Runner)  # others refuse queries with a trace
        return JSONResponse(tokens.tokenized(result, runner.vlm))

    @app.post("/v1/responses", tags=["answers"], responses=STREAMED)
    async def respond(request: Request, asked: ResponsesRequest) -> Response:
        """Answer texts and images, in the objects of OpenAI's newer API."""
        query = await server.query(responses.query_of, asked, server.config)
        if not query.stream:
            result = await server.answer(request, query)
            return JSONResponse(responses.response(asked, query, result))
        running = await server.opened(request, query)
        events = responses.Events(asked, running)
        return server.stream(request, running, events.all, events.failed)
