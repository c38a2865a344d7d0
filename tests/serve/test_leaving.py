"""Clients that leave: their rows are freed in every phase, and others are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vlmfast import VLM
from vlmfast.media import loading

CHAT = "/v1/chat/completions"


def connect(served: Any, body: dict[str, Any]) -> socket.socket:
    """Send a whole request without waiting for its response."""
    content = json.dumps(body).encode()
    port = int(served.url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content) + content
    )
    return connection


def idle(served: Any) -> bool:
    """Whether nothing of any request is left, as `/metrics` says."""
    names = ("preparing", "running", "decoding", "waiting")
    return not any(served.metric(f"num_requests_{name}") for name in names)


@contextlib.contextmanager
def held(served: Any, place: Any, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds the first call of a function until an event."""
    original, reached, release = getattr(place, name), threading.Event(), threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not reached.is_set():
            reached.set()
            assert release.wait(60)
        return original(*args, **kwargs)

    setattr(place, name, call)
    try:
        yield reached, release
    finally:
        release.set()
        if isinstance(place, type(loading)):
            setattr(place, name, original)
        else:
            delattr(place, name)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_media_are_read(
    serve: Callable[..., Any], body: Callable[..., Any], stream: bool
) -> None:
    served = serve()
    with held(served, served.vlm, "submit") as (reached, release):
        connection = connect(served, body(stream=stream, max_tokens=500))
        assert reached.wait(60)
        connection.close()
        served.until(lambda: served.metric("request_errors_total", status="499") == 1)
        steps = served.metric("engine_steps")
        release.set()
    served.until(lambda: idle(served))
    assert served.metric("engine_steps") - steps <= 2
    assert served.chat(max_tokens=1).status_code == 200


def test_leaving_between_two_images(serve: Callable[..., Any], image_url: Any) -> None:
    """The others are not read, and the engine never has the request."""
    served = serve()
    sources, names = served.server.runner._reader.sources, []
    original = sources.read
    sources.read = lambda url, *rest: names.append(url) or original(url, *rest)
    parts = [{"type": "image_url", "image_url": {"url": image_url(n)}} for n in range(3)]
    parts.append({"type": "text", "text": "What is here?"})
    asked = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    steps = served.metric("engine_steps")
    with held(served, sources, "read") as (reached, release):
        connection = connect(served, asked)
        assert reached.wait(60)
        connection.close()
        served.until(lambda: served.metric("request_errors_total", status="499") == 1)
        release.set()
        served.until(lambda: idle(served))
    assert len(names) == 1 and served.metric("engine_steps") == steps
    sources.read = lambda url, *rest: names.append(url) or original(url, *rest)
    assert served.post(CHAT, asked).status_code == 200
    assert len(names) == 4 and served.metric("engine_steps") > steps


def leave(served: Any, release: threading.Event, *connections: Any) -> None:
    """Clients leave while a step is held; the step after it may still have their rows."""
    for connection in connections:
        connection.close()
    served.until(lambda: served.metric("request_errors_total", status="499") == len(connections))
    steps = served.metric("engine_steps")
    release.set()
    served.until(lambda: idle(served))
    assert served.metric("engine_steps") - steps <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_during_prefill_and_queue(
    serve: Callable[..., Any], body: Callable[..., Any], stream: bool
) -> None:
    """The first request is held in its prefill, the second one waits; both clients leave."""
    served = serve()
    prefiller = served.vlm.engine.prefiller
    with held(served, prefiller, "shared") as (reached, release):
        first = connect(served, body(stream=stream, max_tokens=500, cache_salt="a"))
        assert reached.wait(60)
        second = connect(served, body(stream=stream, max_tokens=500, cache_salt="b"))
        served.until(lambda: served.metric("num_requests_waiting") == 1)
        leave(served, release, first, second)
    assert served.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_during_decode(
    serve: Callable[..., Any], body: Callable[..., Any], stream: bool
) -> None:
    served = serve()
    rounds = served.vlm.engine._rounds
    original, count, reached = rounds.run, [0], threading.Event()
    gate = threading.Event()

    def run(batches: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            reached.set()
            assert gate.wait(60)
        original(batches)

    rounds.run = run
    try:
        connection = connect(served, body("Describe it.", stream=stream))
        assert reached.wait(60)
        assert served.metric("num_requests_decoding") == 1
        leave(served, gate, connection)
    finally:
        del rounds.run
        gate.set()
    assert served.chat(max_tokens=1).status_code == 200


def test_leaving_between_chunks_of_a_prefill(
    serve: Callable[..., Any], body: Callable[..., Any]
) -> None:
    """The client leaves in the second chunk of many; the later ones are not prefilled."""
    served = serve()
    engine = served.vlm.engine
    engine.prefill_chunk_size, size = 16, engine.prefill_chunk_size
    try:
        steps = served.metric("engine_steps")
        assert served.chat(max_tokens=1, cache_salt="a").status_code == 200
        assert served.metric("engine_steps") - steps > 8  # what a client that stays would take
        with held(served, engine.prefiller, "extend") as (reached, release):
            connection = connect(served, body(max_tokens=1, cache_salt="b"))
            assert reached.wait(60)
            assert served.metric("num_requests_running") == 1
            leave(served, release, connection)
        assert served.chat(max_tokens=1).status_code == 200
    finally:
        engine.prefill_chunk_size = size


class SingleSteps:
    """Decode steps of an engine, each of which waits until it is allowed, from ``rows`` rows on.

    Attributes
    ----------
    rows : list of list of bool
        For each step that was reached, whether its rows have drafters.
    """

    def __init__(self, rounds: Any, rows: int) -> None:
        self.rows: list[list[bool]] = []
        self._rounds, self._least, self._run = rounds, rows, rounds.run
        self._reached, self._allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._opened = False

    def __enter__(self) -> SingleSteps:
        self._rounds.run = self._wait
        return self

    def __exit__(self, *error: object) -> None:
        self.open()
        del self._rounds.run

    def _wait(self, batches: Any) -> None:
        found = [row.drafts is not None for batch in batches for row in batch.rows]
        if not self._opened and (self.rows or len(found) >= self._least):
            self.rows.append(found)
            self._reached.release()
            assert self._allowed.acquire(timeout=60)
        self._run(batches)

    def reach(self) -> None:
        """Wait until a step is about to be computed."""
        assert self._reached.acquire(timeout=60)

    def allow(self) -> None:
        """Let it be computed."""
        self._allowed.release()

    def open(self) -> None:
        """Let all later ones be computed, too."""
        self._opened = True
        self._allowed.release()


@pytest.mark.parametrize(("recipe", "count"), [("none", 4), ("draft-ngram", 1), ("draft-ngram", 4)])
def test_leaving_one_of_several_rows(
    serve: Callable[..., Any], body: Callable[..., Any], recipe: str, count: int
) -> None:
    """Its row is free in the step after the next one, and the others get whole answers."""
    served = serve()
    engine = served.vlm.engine
    with SingleSteps(engine._rounds, count) as steps, contextlib.ExitStack() as stack:
        with held(served, engine.prefiller, "shared") as (reached, release):
            connections = [
                stack.enter_context(connect(served, body("Describe it.", n, recipe=recipe)))
                for n in range(count)
            ]
            assert reached.wait(60)
            served.until(lambda: served.metric("num_requests_waiting") == count - 1)
            release.set()
        steps.reach()
        assert served.metric("num_requests_decoding") == count
        connections[0].close()
        served.until(lambda: served.metric("request_errors_total", status="499") == 1)
        before = served.metric("engine_steps")
        steps.allow()
        if count > 1:
            steps.reach()
        else:
            served.until(lambda: idle(served))
        assert served.metric("num_requests_decoding") == count - 1
        assert served.metric("engine_steps") - before <= 2
        drafts = recipe != "none"
        assert steps.rows == [[drafts] * rows for rows in range(count, max(count - 2, 0), -1)]
        steps.open()
        for connection in connections[1:]:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert json.loads(response.read())["choices"][0]["finish_reason"] == "stop"
    served.until(lambda: idle(served))


def test_one_that_leaves_does_not_disturb_others(
    serve: Callable[..., Any], body: Callable[..., Any]
) -> None:
    import httpx2

    served = serve()
    expected = [
        served.chat("Describe it.", n, temperature=0, max_tokens=30, cache_salt="x").json()
        for n in range(4)
    ]

    async def ask(client: httpx2.AsyncClient, number: int) -> str:
        asked = body("Describe it.", number, temperature=0, max_tokens=30, stream=True)
        found = ""
        async with client.stream("POST", CHAT, json=asked) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    found += choice["delta"].get("content") or ""
                    if number >= 4 and found:
                        return found  # leaves
        return found

    async def all_of_them() -> list[str]:
        async with httpx2.AsyncClient(base_url=served.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(8)))

    found = asyncio.run(all_of_them())
    texts = [answer["choices"][0]["message"]["content"] for answer in expected]
    assert found[:4] == texts
    served.until(lambda: idle(served))


def test_a_client_that_does_not_read_is_given_up(
    serve: Callable[..., Any], body: Callable[..., Any]
) -> None:
    """However slow the machine is: its time may be over before it is answered."""
    served = serve(timeout_s=1.0, grace_s=0.5)

    def ended() -> bool:
        with served.client() as client:
            return "request_errors_total{" in client.get("/metrics").text

    connection = connect(served, body("Describe it.", stream=True, trace=True))
    served.until(lambda: served.metric("prompt_tokens_total") or ended() or not idle(served))
    served.until(lambda: idle(served))
    connection.close()
    served.until(lambda: served.chat(max_tokens=1).status_code == 200)


def test_the_end_of_a_server_is_that_of_its_last_step(
    serve: Callable[..., Any], body: Callable[..., Any]
) -> None:
    """Python cannot end while another thread computes."""
    served = serve(VLM.from_pretrained("tiny"))  # whose engine no other server runs
    server = served.server
    with held(served, served.vlm.engine, "step") as (reached, release):
        connection = connect(served, body("Describe it."))
        assert reached.wait(60)
        connection.close()
        ending = threading.Thread(target=server.close)
        ending.start()
        ending.join(0.2)
        assert ending.is_alive() and not server.stopped
        release.set()
        ending.join(60)
        assert not ending.is_alive() and server.stopped


def test_an_idle_server_keeps_no_buffers(
    serve: Callable[..., Any], body: Callable[..., Any]
) -> None:
    served = serve()
    pool = served.vlm.adapter.pool
    pool.clear()
    assert served.chat(max_tokens=2).status_code == 200
    served.until(lambda: idle(served) and pool.idle > 0)
    with held(served, served.vlm, "submit") as (reached, release):
        connection = connect(served, body(max_tokens=1))
        assert reached.wait(60)
        served.server.runner.release()  # a request is there: it may use them
        assert pool.idle > 0
        release.set()
    served.until(lambda: idle(served))
    served.server.runner.release()
    assert pool.idle == 0
    connection.close()
