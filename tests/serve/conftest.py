"""Servers of the shipped model, in threads of the test process.

``VLMFAST_SERVE_ENGINE=vllm`` runs the tests of clients with vLLM, which must be installed with the
plug-in, but for those in `DIFFERENT`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

import httpx2
import uvicorn

from support.tiny_models import make_image
from vlmfast import VLM, Recipe
from vlmfast.eval.axes import with_field
from vlmfast.serve.app import Server
from vlmfast.serve.config import ServerConfig
from vlmfast.serve.server import options_of

CHAT = "/v1/chat/completions"
GUARD = 60.0  # seconds; only a test that fails waits as long
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # reads no certificates, as each client would
ENGINE = os.environ.get("VLMFAST_SERVE_ENGINE", "vlmfast")
RECIPES = {"tiny": "balanced", "full": "none", "fast": "hired:0.1"}
# Tests of clients that differ on vLLM, and the entry of `vlmfast_vllm.options.DIFFERENT` why.
DIFFERENT = {
    "test_answers_are_those_of_the_library[tiny]": "ties",
    "test_names_have_their_own_recipes": "recipes",
    "test_models": "positions",
    "test_usage_adds_up": "usage",
    "test_trace_has_the_boxes_of_kept_tokens": "trace",
    "test_trace_has_the_boxes_of_merged_tokens": "trace",
    "test_tokenize": "trace",
    "test_video": "trace",
    "test_empty_fields_of_messages_are_unset[/tokenize]": "trace",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what does not ask the shared server, where that is vLLM's, and what differs."""
    if ENGINE == "vlmfast":
        return
    from vlmfast_vllm.options import DIFFERENT as known

    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        fixtures = {*getattr(item, "fixturenames", ())}
        if not fixtures & {"served", "shadowed"} or "serve" in fixtures:
            item.add_marker(pytest.mark.skip("asks no server, or starts one of its own"))
        for name in {item.name, getattr(item, "originalname", "")} & DIFFERENT.keys():
            item.add_marker(pytest.mark.skip(known[DIFFERENT[name]]))


@contextlib.contextmanager
def held(
    place: Any, name: str, when: Callable[..., bool] = lambda *_: True
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold the first call of a method ``when`` it is to be: an event tells, one releases it."""
    original, reached, release = getattr(place, name), threading.Event(), threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        if when(*args) and not reached.is_set():
            reached.set()
            assert release.wait(GUARD)
        return original(*args, **kwargs)

    setattr(place, name, call)
    try:
        yield reached, release
    finally:
        release.set()
        delattr(place, name)


def data_url(seed: int = 0, width: int = 64, height: int = 64) -> str:
    file = io.BytesIO()
    make_image(width, height, seed=seed).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(text: str = "What is here?", image: int | None = 0, **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": data_url(image)}})
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}


@dataclass
class Served:
    """A server that is listening.

    Parameters
    ----------
    url : str
    server : Server
    vlm : VLM
    """

    url: str
    server: Server
    vlm: VLM
    body = staticmethod(ask)
    image_url = staticmethod(data_url)
    held = staticmethod(held)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **more: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=GUARD, verify=NO_TLS, **more)

    def get(self, path: str, **headers: str) -> httpx2.Response:
        with self.client(headers=headers) as client:
            return client.get(path)

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **more)

    def send(self, content: Any, path: str = CHAT, kind: str = "application/json") -> Any:
        """The response to a body as it is."""
        with self.client(headers={"Content-Type": kind}) as client:
            return client.post(path, content=content)

    def connect(self, content: bytes = b"") -> socket.socket:
        """A connection over which something was sent."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout=GUARD)
        found.sendall(content)
        return found

    def chat(self, text: str = "What is here?", image: int | None = 0, **more: Any) -> Any:
        """A chat completion of a drawn image; the response."""
        headers = more.pop("headers", None)
        return self.post(CHAT, ask(text, image, **more), headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels; 0 where it has none yet."""
        lines = self.get("/metrics", **self.headers).text.splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"vlmfast:{name}{{") and all(part in line for part in wanted)
        ]
        assert found or f"# TYPE vlmfast:{name} counter" in lines, f"no metric {name}"
        return sum(found)

    @property
    def idle(self) -> bool:
        """Whether nothing of any request is left, as `/metrics` says."""
        names = ("preparing", "running", "decoding", "waiting")
        return not any(self.metric(f"num_requests_{name}") for name in names)

    @property
    def headers(self) -> dict[str, str]:
        keys = self.server.config.api_keys
        return {"Authorization": f"Bearer {keys[0]}"} if keys else {}

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition."""
        end = time.monotonic() + GUARD
        while not condition():
            assert time.monotonic() < end, "the condition was not met"
            time.sleep(0.005)


@pytest.fixture(scope="session", autouse=True)
def _own_process() -> Iterator[None]:
    """No server passes over all that the tests have loaded: it is one of many in a process."""
    kept = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlmfast.serve.server.gc", kept)
        yield


def serving(vlm: VLM, config: ServerConfig) -> contextlib.AbstractContextManager[Served]:
    return listening(Server(config, lambda: vlm), vlm)


@contextlib.contextmanager
def listening(server: Server, vlm: VLM, guard: float = GUARD) -> Iterator[Served]:
    """A server that is ready within ``guard`` seconds."""
    running = uvicorn.Server(options_of(server, server.config.max_connections))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    end = time.monotonic() + guard
    while not (running.started and server.ready):
        assert server.failure is None, server.failure
        assert time.monotonic() < end and thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", server, vlm)
    finally:
        running.should_exit = True
        thread.join(GUARD)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serving_by_vllm(vlm: VLM, config: ServerConfig) -> Iterator[Served]:
    from vlmfast_vllm.serving import prepared

    from vlmfast.cli.commands import build_parser

    words = ["serve", "tiny", "--engine", "vllm", "--dtype", "float32"]
    words += ["--max-cache-bytes", str(1 << 30), "--shadow", str(config.shadow)]
    words += ["--", "--enforce-eager", "--max-model-len", "2048"]
    with contextlib.ExitStack() as stack:
        frontend, runner = stack.enter_context(prepared(build_parser().parse_args(words), config))
        server = Server(config, lambda: frontend, runner)
        yield stack.enter_context(listening(server, vlm, 500))


def serving_shared(vlm: VLM, **options: Any) -> contextlib.AbstractContextManager[Served]:
    """A server of `RECIPES` by the engine that is tested."""
    recipes = dict(RECIPES)
    if ENGINE == "vllm":  # LLaVAs have no other positions there, and counts follow from sizes
        recipes["fast"] = "hired:budget=0.1"
        recipes = {
            name: str(with_field(Recipe.parse(text), "positions", "compact"))
            for name, text in recipes.items()
        }
    config = ServerConfig(recipe=recipes.pop("tiny"), aliases=recipes, **options)
    return (serving_by_vllm if ENGINE == "vllm" else serving)(vlm, config)


@pytest.fixture(scope="session")
def shipped() -> VLM:
    # In half precision, near ties may be resolved in another way in company.
    return VLM.from_pretrained("tiny", dtype="float32")


@pytest.fixture(scope="session")
def vlm() -> VLM:
    """One that no server runs."""
    return VLM.from_pretrained("tiny", device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def served(shipped: VLM) -> Iterator[Served]:
    """A server without keys, shared by tests that leave it as it is."""
    with serving_shared(shipped) as found:
        yield found


@pytest.fixture(scope="module")
def shadowed(shipped: VLM) -> Iterator[Served]:
    """A server that answers all requests again."""
    with serving_shared(shipped, shadow=1.0) as found:
        yield found


@pytest.fixture
def serve(shipped: VLM) -> Iterator[Callable[..., Served]]:
    """Starts a server of its own: options of `ServerConfig`, and optionally another model."""
    with contextlib.ExitStack() as stack:

        def start(vlm: VLM | None = None, **options: Any) -> Served:
            config = replace(ServerConfig(), **options)
            return stack.enter_context(serving(vlm or shipped, config))

        yield start


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    """OpenAI's client of the shared server."""
    import openai

    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
