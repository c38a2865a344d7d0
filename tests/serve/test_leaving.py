"""Clients that leave: their rows are freed in every phase, and others are not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import socket
import threading
from typing import Any

import httpx2
import pytest

from support.engine.sources import sources_of
from support.engine.turns import drafting, part
from support.server_fuzz import CHAT, post
from vlmfast import VLM


def connect(served: Any, body: dict[str, Any]) -> socket.socket:
    """Send a whole request without waiting for its response."""
    return served.connect(post(CHAT, json.dumps(body).encode()))


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_media_are_read(serve: Any, stream: bool) -> None:
    served = serve()
    with served.held(served.vlm, "submit") as (reached, release):
        connection = connect(served, served.body(stream=stream, max_tokens=500))
        assert reached.wait(60)
        connection.close()
        served.until(lambda: served.metric("request_errors_total", status="499") == 1)
        steps = served.metric("engine_steps")
        release.set()
    served.until(lambda: served.idle)
    assert served.metric("engine_steps") - steps <= 2
    assert served.chat(max_tokens=1).status_code == 200


def test_leaving_between_two_images(serve: Any) -> None:
    """The others are not read, and the engine never has the request."""
    served = serve()
    sources, names = sources_of(served.server), []
    original = sources.read
    sources.read = lambda url, *rest: names.append(url) or original(url, *rest)
    parts = [{"type": "image_url", "image_url": {"url": served.image_url(n)}} for n in range(3)]
    parts.append({"type": "text", "text": "What is here?"})
    asked = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    steps = served.metric("engine_steps")
    with served.held(sources, "read") as (reached, release):
        connection = connect(served, asked)
        assert reached.wait(60)
        connection.close()
        served.until(lambda: served.metric("request_errors_total", status="499") == 1)
        release.set()
        served.until(lambda: served.idle)
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
    served.until(lambda: served.idle)
    assert served.metric("engine_steps") - steps <= 2


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_during_prefill_and_queue(serve: Any, stream: bool) -> None:
    """The first request is held in its prefill, the second one waits; both clients leave."""
    served = serve()
    with served.held(*part(served.vlm, "prompt")) as (reached, release):
        first = connect(served, served.body(stream=stream, max_tokens=500, cache_salt="a"))
        assert reached.wait(60)
        second = connect(served, served.body(stream=stream, max_tokens=500, cache_salt="b"))
        served.until(lambda: served.metric("num_requests_waiting") == 1)
        leave(served, release, first, second)
    assert served.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_during_decode(serve: Any, stream: bool) -> None:
    served = serve()
    steps = itertools.count()
    second = served.held(*part(served.vlm, "decode step"), lambda *_: next(steps) == 1)
    with second as (reached, release):
        connection = connect(served, served.body("Describe it.", stream=stream))
        assert reached.wait(60)
        assert served.metric("num_requests_decoding") == 1
        leave(served, release, connection)
    assert served.chat(max_tokens=1).status_code == 200


def test_leaving_between_chunks_of_a_prefill(serve: Any) -> None:
    """The client leaves in the second chunk of many; the later ones are not prefilled."""
    served = serve()
    engine = served.vlm.engine
    engine.prefill_chunk_size, size = 16, engine.prefill_chunk_size
    try:
        steps = served.metric("engine_steps")
        assert served.chat(max_tokens=1, cache_salt="a").status_code == 200
        assert served.metric("engine_steps") - steps > 8  # what a client that stays would take
        with served.held(*part(served.vlm, "later chunk")) as (reached, release):
            connection = connect(served, served.body(max_tokens=1, cache_salt="b"))
            assert reached.wait(60)
            assert served.metric("num_requests_running") == 1
            leave(served, release, connection)
        assert served.chat(max_tokens=1).status_code == 200
    finally:
        engine.prefill_chunk_size = size


@pytest.mark.parametrize(("recipe", "count"), [("none", 4), ("draft-ngram", 1), ("draft-ngram", 4)])
def test_leaving_one_of_several_rows(serve: Any, recipe: str, count: int) -> None:
    """Its row is free in the step after the next one, and the others get whole answers."""
    served = serve()
    steps: list[list[bool]] = []

    def is_full(batch: Any) -> bool:
        """Note whether the rows of a step have drafters."""
        steps.append(drafting(batch))
        return len(steps[-1]) == count

    with (
        served.held(*part(served.vlm, "decode step"), is_full) as (full, go_on),
        contextlib.ExitStack() as stack,
    ):
        with served.held(*part(served.vlm, "prompt")) as (reached, release):
            connections = [
                stack.enter_context(connect(served, served.body("Describe it.", n, recipe=recipe)))
                for n in range(count)
            ]
            assert reached.wait(60)
            served.until(lambda: served.metric("num_requests_waiting") == count - 1)
            release.set()
        assert full.wait(60)
        assert served.metric("num_requests_decoding") == count
        connections[0].close()
        served.until(lambda: served.metric("request_errors_total", status="499") == 1)
        before = len(steps) - 1
        go_on.set()
        for connection in connections[1:]:
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert json.loads(response.read())["choices"][0]["finish_reason"] == "stop"
        served.until(lambda: served.idle)
    drafts = recipe != "none"
    rows = range(count, max(count - 2, 0), -1)
    assert steps[before : before + 2] == [[drafts] * number for number in rows]


def test_one_that_leaves_does_not_disturb_others(serve: Any) -> None:
    served = serve()
    expected = [
        served.chat("Describe it.", n, temperature=0, max_tokens=30, cache_salt="x").json()
        for n in range(4)
    ]

    async def ask(client: httpx2.AsyncClient, number: int) -> str:
        asked = served.body("Describe it.", number, temperature=0, max_tokens=30, stream=True)
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
    served.until(lambda: served.idle)


def test_a_client_that_does_not_read_is_given_up(serve: Any) -> None:
    """However slow the machine is: its time may be over before it is answered."""
    served = serve(timeout_s=1.0, grace_s=0.5)
    connection = connect(served, served.body("Describe it.", stream=True, trace=True))
    ends = ("prompt_tokens_total", "request_errors_total")
    served.until(lambda: any(map(served.metric, ends)) or not served.idle)
    served.until(lambda: served.idle)
    connection.close()
    served.until(lambda: served.chat(max_tokens=1).status_code == 200)


def test_the_end_of_a_server_is_that_of_its_last_step(serve: Any) -> None:
    """Python cannot end while another thread computes."""
    served = serve(VLM.from_pretrained("tiny"))  # whose engine no other server runs
    server = served.server
    with served.held(*part(served.vlm, "step")) as (reached, release):
        connection = connect(served, served.body("Describe it."))
        assert reached.wait(60)
        connection.close()
        ending = threading.Thread(target=server.close)
        ending.start()
        ending.join(0.2)
        assert ending.is_alive() and not server.stopped
        release.set()
        ending.join(60)
        assert not ending.is_alive() and server.stopped


def test_an_idle_server_keeps_no_buffers(serve: Any) -> None:
    served = serve()
    pool = served.vlm.adapter.pool
    pool.clear()
    assert served.chat(max_tokens=2).status_code == 200
    served.until(lambda: served.idle and pool.idle > 0)
    with served.held(served.vlm, "submit") as (reached, release):
        connection = connect(served, served.body(max_tokens=1))
        assert reached.wait(60)
        served.server.runner.release()  # a request is there: it may use them
        assert pool.idle > 0
        release.set()
    served.until(lambda: served.idle)
    served.server.runner.release()
    assert pool.idle == 0
    connection.close()
