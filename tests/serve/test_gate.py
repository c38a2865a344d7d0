"""What is refused before it is answered: hosts, keys, limits, bodies; and what is logged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL.PngImagePlugin import PngImageFile
from pydantic import BaseModel

from tiny_models import build_llava
from vlmfast import VLM, VLMFastError
from vlmfast.serve import commands
from vlmfast.serve.config import MediaLimits, ServerConfig
from vlmfast.serve.connections import log_shortage
from vlmfast.serve.errors import RequestError
from vlmfast.serve.responses import ResponsesRequest
from vlmfast.serve.schema import ChatRequest, read_as
from vlmfast.serve.tokens import TokenizeRequest

CHAT = "/v1/chat/completions"


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error of a response, which has OpenAI's form."""
    assert response.status_code == status, response.text
    (name,) = response.json()
    assert name == "error"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return error


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(VLMFastError, match=r"API key.*--insecure"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, insecure=True).hosts is None
    assert ServerConfig(host=host, api_keys=("k",)).hosts is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_this_machine_needs_none(host: str) -> None:
    assert host.strip("[]") in {own.strip("[]") for own in ServerConfig(host=host).hosts}
    listed = ServerConfig(host=host, allowed_hosts=("a.example",)).hosts
    assert "a.example" in listed and host.strip("[]") in {own.strip("[]") for own in listed}


@pytest.mark.parametrize(
    "options",
    [
        {"api_keys": ("",)},
        {"max_queue": 0},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"media": MediaLimits(max_images=0)},
        {"model": "a", "aliases": {"a": "none"}},
    ],
)
def test_bad_options_raise(options: dict[str, Any]) -> None:
    with pytest.raises(VLMFastError):
        ServerConfig(**options)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))


# --- hosts and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.x", ""])
def test_other_hosts_are_refused(served: Any, host: str) -> None:
    with served.client(headers={"Host": host}) as client:
        for path in ("/health", "/v1/models"):
            assert error_of(client.get(path), 400)["code"] == "invalid_host"


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"])
def test_this_machines_hosts_are_accepted(served: Any, host: str) -> None:
    with served.client(headers={"Host": host}) as client:
        assert client.get("/health").status_code == 200


KEYS = ("first-key", "second-key")


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys(serve: Callable[..., Any]) -> None:
    served = serve(api_keys=KEYS)
    wrong = ["", "Bearer", "Bearer first", "Basic first-key", "first-key", "Bearer first-keyx"]
    for header in wrong:
        headers = {"Authorization": header} if header else {}
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            with served.client(headers=headers) as client:
                response = client.get(path)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        error_of(served.chat(headers=headers), 401)
    for key in KEYS:
        assert served.chat(headers=authorized(key), max_tokens=1).status_code == 200
    with served.client() as client:
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_keys_do_not_share_the_prefix_cache(serve: Callable[..., Any]) -> None:
    served = serve(api_keys=KEYS)

    def cached(key: str, salt: str = "") -> int:
        found = served.chat("Private?", 20, headers=authorized(key), max_tokens=1, cache_salt=salt)
        return found.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("second-key") == 0
    assert cached("first-key", "pepper") == 0
    assert cached("first-key") > 0  # the control
    assert cached("first-key", "pepper") > 0


# --- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'"text"', b"[" * 10_000, b'{"a":' * 10_000, b"NaN"]
)
def test_bodies_that_are_no_request(served: Any, content: bytes) -> None:
    with served.client() as client:
        for path in (CHAT, "/v1/responses", "/tokenize"):
            headers = {"Content-Type": "application/json"}
            error_of(client.post(path, content=content, headers=headers), 400)


def test_other_content_types_are_refused(served: Any, body: Callable[..., Any]) -> None:
    with served.client() as client:
        for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
            content = json.dumps(body())
            headers = {"Content-Type": kind}
            error_of(client.post(CHAT, content=content, headers=headers), 415)
        headers = {"Content-Type": "Application/JSON; charset=utf-8"}
        found = client.post(CHAT, content=json.dumps(body(max_tokens=1)), headers=headers)
        assert found.status_code == 200


def test_large_bodies_are_refused(serve: Callable[..., Any], body: Callable[..., Any]) -> None:
    served = serve(max_body_bytes=50_000)
    assert served.chat(max_tokens=1).status_code == 200
    text = json.dumps({**body(), "user": "x" * 60_000}).encode()
    with served.client() as client:
        headers = {"Content-Type": "application/json"}
        error_of(client.post(CHAT, content=text, headers=headers), 413)
        parts = (text[i : i + 4096] for i in range(0, len(text), 4096))  # without a length
        error_of(client.post(CHAT, content=parts, headers=headers), 413)
        assert client.get("/health").status_code == 200


def test_a_stalled_upload_ends(serve: Callable[..., Any]) -> None:
    served = serve(timeout_s=0.3)
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stalled:
        stalled.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        head = stalled.recv(65536)
    assert head.startswith(b"HTTP/1.1 408")


def test_bodies_of_all_requests_are_bounded(
    serve: Callable[..., Any], body: Callable[..., Any]
) -> None:
    size = len(json.dumps(body(max_tokens=1)))
    served = serve(max_total_body_bytes=2 * size)
    assert served.chat(max_tokens=1).status_code == 200
    assert served.chat(max_tokens=1).status_code == 200  # the first one's were returned
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as holding:
        holding.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99999\r\n\r\n"
            + b" "
            * (size + size // 2)
        )
        served.until(lambda: served.chat(max_tokens=1).status_code == 429)
    served.until(lambda: served.chat(max_tokens=1).status_code == 200)


def chat_body(**fields: str) -> bytes:
    """The text of a chat completion, with fields as JSON."""
    fields = {"model": '"tiny"', "messages": '[{"role": "user", "content": "a"}]', **fields}
    return b"{%s}" % ",".join(f'"{name}": {value}' for name, value in fields.items()).encode()


MANY = 50_000
NUMBERS = f"[{'1,' * MANY}1]"
PAIRS = json.dumps({str(n): 1 for n in range(MANY)})


@pytest.mark.parametrize(
    ("param", "content"),
    {
        "messages[0]": chat_body(messages=NUMBERS),
        "messages[0].content[0]": chat_body(messages=f'[{{"role": "user", "content": {NUMBERS}}}]'),
        "stop[0]": chat_body(stop=NUMBERS),
        "modalities[0]": chat_body(modalities=NUMBERS),
        "tools": chat_body(tools=NUMBERS),
        "metadata": chat_body(metadata=PAIRS),
        "logit_bias": chat_body(logit_bias=PAIRS),
        "stream_options.0": chat_body(stream_options=PAIRS),
        "0": chat_body()[:-1] + b"," + PAIRS[1:].encode(),
        None: chat_body()[:-1] + b',"": 1,' + PAIRS[1:].encode(),
    }.items(),
)
def test_many_wrong_values_are_one_error(param: str | None, content: bytes) -> None:
    """What is made of the first one is little more than the body itself."""
    tracemalloc.start()
    with pytest.raises(RequestError) as found:
        read_as(ChatRequest, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.value.param == param
    assert peak < 12e6


def test_bodies_of_too_many_values_are_refused_unparsed(served: Any) -> None:
    content = chat_body(unknown=f"[{'[],' * 130_000}1]")
    with served.client() as client:
        headers = {"Content-Type": "application/json"}
        error = error_of(client.post(CHAT, content=content, headers=headers), 413)
    assert "commas" in error["message"] and "250000" in error["message"]
    few = chat_body(unknown=f"[{'[],' * 120_000}1]")
    with pytest.raises(RequestError) as found:
        read_as(ChatRequest, few)
    assert found.value.param == "unknown"


def test_bodies_are_parsed_outside_of_the_event_loop(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        entered.set()
        assert leave.wait(60)
        return read_as(*args)

    monkeypatch.setattr("vlmfast.serve.app.read_as", slow)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.chat, max_tokens=1)
        try:
            assert entered.wait(60)
            with served.client() as client:
                assert client.get("/health").status_code == 200
            assert not answer.done()
        finally:
            leave.set()
        assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("name", "meant"), [("max_token", "max_tokens"), ("temprature", "temperature"), ("weights", "")]
)
def test_unknown_names_get_the_nearest_known_one(name: str, meant: str) -> None:
    with pytest.raises(RequestError) as found:
        read_as(ChatRequest, chat_body(**{name: "1"}))
    assert found.value.param == name and (f"did you mean {meant!r}" in found.value.message) == bool(
        meant
    )


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}, "more": 1}, "more"),
        ({"type": "image_url", "image_url": {"url": "x", "more": 1}}, "image_url.more"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url.url"),
        ({"type": "image_url", "image_url": 3}, "image_url"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "text", "text": "x", "more": 1}, "more"),
    ],
)
def test_the_type_of_an_object_is_not_taken_for_its_field(content: Any, name: str) -> None:
    messages = json.dumps([{"role": "user", "content": [content]}])
    with pytest.raises(RequestError) as found:
        read_as(ChatRequest, chat_body(messages=messages))
    assert found.value.param == f"messages[0].content[0].{name}"


def test_long_names_are_cut(served: Any) -> None:
    with pytest.raises(RequestError) as found:
        read_as(ChatRequest, chat_body(**{"x" * 10**6: "1"}))
    assert len(found.value.message) < 500 and len(found.value.param) < 500


# --- connections ---------------------------------------------------------------------------------


def connected(served: Any, text: bytes = b"") -> socket.socket:
    port = int(served.url.rpartition(":")[2])
    found = socket.create_connection(("127.0.0.1", port), timeout=30)
    found.sendall(text)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection; waits for it or for an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_idle_connections_give_way_to_new_ones(
    serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(max_connections=8, header_timeout_s=3600.0)
    caplog.set_level(logging.WARNING, logger="vlmfast.serve")
    partial = b"GET /health HTTP/1.1\r\nHost: "
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(connected(served, partial if n % 2 else b"")) for n in range(40)
        ]
        with served.client() as client:
            for _ in range(3):  # over one connection, which is idle between its requests
                assert client.get("/health").status_code == 200
        assert served.chat(max_tokens=1).status_code == 200
        assert all(is_closed(each) for each in idle[:30])  # those that have waited longest
    lines = [record.getMessage() for record in caplog.records if "closed" in record.getMessage()]
    assert lines[0] == "1 connections were closed: at most 8 are kept" and len(lines) < 10


def test_requests_that_are_answered_are_not_closed(serve: Callable[..., Any]) -> None:
    """Nor those whose bodies arrive; with no idle connection left, the new one is closed."""
    served = serve(max_connections=4)
    upload = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    upload += b"Content-Type: application/json\r\nContent-Length: 99\r\n"
    upload += b"Expect: 100-continue\r\n\r\n"
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connected(served, upload)) for _ in range(4)]
        for each in busy:  # until its headers are read
            assert each.recv(99).startswith(b"HTTP/1.1 100")
        with connected(served) as more:
            assert is_closed(more)
        for each in busy:
            each.sendall(b" " * 98 + b"{")
            assert each.recv(12) == b"HTTP/1.1 400"


def test_connections_without_headers_end(serve: Callable[..., Any]) -> None:
    served = serve(header_timeout_s=0.2, timeout_s=3600.0)
    for text in (b"", b"GET /health HTTP/1.1\r\nHost: "):
        with connected(served, text) as stalled:
            assert is_closed(stalled)


def test_the_log_of_a_shortage_is_short(caplog: pytest.LogCaptureFixture) -> None:
    """The event loop reports each connection that it cannot accept, with a traceback."""
    caplog.set_level(logging.INFO)
    loop = asyncio.new_event_loop()
    log_shortage(loop)
    for _ in range(5000):
        context = {"message": "socket.accept() out of system resource"}
        loop.call_exception_handler({**context, "exception": OSError(errno.EMFILE, "too many")})
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is None
    loop.call_exception_handler({"message": "another", "exception": KeyError("a")})
    assert len(caplog.records) == 2 and caplog.records[1].exc_info
    loop.close()


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 5}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages[0]", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0]", {"messages": [{"content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}),
    (
        "messages[0].content[0]",
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                }
            ]
        },
    ),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 2.5}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -1}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("max_tokens", {"max_tokens": 5000}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("max_completion_tokens", {"max_completion_tokens": 1.5}),
    ("seed", {"seed": 10**30}),
    ("stop", {"stop": ["a"] * 200}),
    ("stop", {"stop": ""}),
    ("stop[0]", {"stop": [3]}),
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("recipe", {"recipe": "hired:9"}),
    ("recipe", {"recipe": "nothing-known"}),
    ("recipe", {"recipe": 5}),
    ("recipe", {"recipe": "elastic:weights=/etc"}),
    ("recipe", {"recipe": "draft-eagle:weights=../x"}),
    ("recipe", {"recipe": "frames-clip:4"}),
    ("recipe", {"recipe": "clip-relevance:model=local-dir:/etc"}),
    ("fps", {"num_frames": 4, "fps": 1}),
    ("num_frames", {"num_frames": 0}),
    ("unknown", {"unknown": 1}),
    ("cache_salt", {"cache_salt": "x" * 1000}),
]


@pytest.mark.parametrize(
    ("param", "more"), WRONG, ids=[f"{p}-{n}" for n, (p, _) in enumerate(WRONG)]
)
def test_wrong_fields_are_named(
    served: Any, body: Callable[..., Any], param: str, more: dict[str, Any]
) -> None:
    error = error_of(served.post(CHAT, {**body(), **more}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": 5}]}]},
        {"max_output_tokens": -1},
        {"max_output_tokens": 5000},
        {"text": {"format": {"type": "xml"}}},
        {"tools": [{"type": "web_search"}]},
        {"background": True},
    ],
)
def test_wrong_fields_of_responses(served: Any, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 2}
    assert served.post("/v1/responses", body).status_code == 200
    error = error_of(served.post("/v1/responses", {**body, **more}), 400)
    (name,) = more
    assert (error["param"] or "").startswith(name)


KINDS: tuple[Any, ...] = (None, True, 5, 0.5, "text", [], [5], {}, {"a": 1}, [[]], "x" * 2000)
SMALLEST = {
    ChatRequest: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    ResponsesRequest: {"model": "tiny", "input": "hello"},
    TokenizeRequest: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
}


def refusal(model: type[BaseModel], body: dict[str, Any]) -> RequestError | None:
    try:
        read_as(model, json.dumps(body).encode())
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("model", SMALLEST)
def test_each_field_refuses_other_types(model: type[BaseModel]) -> None:
    """By an error that names the field."""
    assert refusal(model, SMALLEST[model]) is None
    for name in model.model_fields:
        found = [refusal(model, {**SMALLEST[model], name: value}) for value in KINDS]
        errors = [error for error in found if error is not None]
        assert len(errors) >= 5, name
        assert all(error.status == 400 for error in errors)
        assert all((error.param or "").startswith(name) for error in errors), errors


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "fps", "presence_penalty", "max_tokens"])
def test_numbers_that_are_not_finite_are_refused(served: Any, field: str, number: str) -> None:
    text = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]})
    content = f'{text[:-1]}, "{field}": {number}}}'
    with served.client() as client:
        response = client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize(
    "roles",
    [
        ["user", "user"],
        ["assistant", "user"],
        ["user", "assistant", "assistant", "user"],
        ["user", "assistant"],
        ["assistant"],
    ],
    ids="-".join,
)
def test_repeated_roles_are_answered_as_by_the_library(served: Any, roles: list[str]) -> None:
    messages = [{"role": role, "content": f"What is {n}?"} for n, role in enumerate(roles)]
    response = served.post(CHAT, {"model": "full", "messages": messages, "max_tokens": 4})
    with contextlib.suppress(VLMFastError):
        expected = served.vlm.chat(messages, max_new_tokens=4)
        assert response.json()["choices"][0]["message"]["content"] == expected.text
        return
    error_of(response, 400)


def test_unknown_models_and_paths(served: Any) -> None:
    error = error_of(served.chat(model="gpt-4o"), 404)
    assert error["code"] == "model_not_found" and "tiny, full, fast" in error["message"]
    error_of(served.post("/v1/embeddings", {}), 404)
    with served.client() as client:
        error_of(client.get(CHAT), 405)
        error_of(client.get("/docs"), 404)


def test_messages_that_the_model_refuses(served: Any) -> None:
    """The shipped model's template has no system role."""
    error = error_of(
        served.post(
            CHAT,
            {
                "model": "tiny",
                "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": "hello"},
                ],
            },
        ),
        400,
    )
    assert "template" in error["message"]


def test_refused_requests_are_counted(serve: Any) -> None:
    served = serve()
    assert served.chat(model="other").status_code == 404
    assert served.chat(recipe="hired:2").status_code == 400
    assert served.post(CHAT, {"model": "tiny"}).status_code == 400
    assert served.metric("request_errors_total", status="404") == 1
    assert served.metric("request_errors_total", status="400") == 2


def test_a_recipe_that_only_the_server_may_use(served: Any) -> None:
    error = error_of(served.chat(recipe="auto"), 400)
    assert "cannot name 'auto'" in error["message"] and "/" not in error["message"]


def test_an_answer_is_no_longer_than_the_server_allows(serve: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.model.generation_config.max_new_tokens = 40
    vlm.model.generation_config.eos_token_id = None
    served = serve(vlm, max_new_tokens=6)
    usage = served.chat().json()["usage"]
    assert usage["completion_tokens"] == 6


@pytest.mark.parametrize(("text", "keys"), [("a, b", {"a", "b"}), ("a, ,", {"a"})])
def test_keys_have_no_blanks(monkeypatch: Any, tmp_path: Path, text: str, keys: set[str]) -> None:
    monkeypatch.setenv("VLMFAST_API_KEY", text)
    args = SimpleNamespace(api_key=[" c "], api_key_file=None)
    assert set(commands._keys(args)) == {*keys, "c"}
    args.api_key_file = tmp_path / "keys"
    args.api_key_file.write_text("\n \n")
    with pytest.raises(VLMFastError, match="has no key"):
        commands._keys(args)


def test_prompts_beyond_the_model_are_refused(served: Any) -> None:
    error = error_of(served.chat("x " * 50_000, None), 400)
    assert error["code"] == "context_length_exceeded"


# --- limits --------------------------------------------------------------------------------------


def test_requests_of_a_key_are_bounded(serve: Callable[..., Any]) -> None:
    served = serve(max_requests_per_key=1, api_keys=KEYS)
    holding = threading.Event()
    release = threading.Event()

    def submit(*args: Any, **kwargs: Any) -> Any:
        holding.set()
        assert release.wait(60)
        return original(*args, **kwargs)

    original = served.vlm.submit
    served.vlm.submit = submit
    first = threading.Thread(
        target=lambda: served.chat(max_tokens=1, headers=authorized("first-key"))
    )
    try:
        first.start()
        assert holding.wait(60)
        response = served.chat(max_tokens=1, headers=authorized("first-key"))
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        del served.vlm.submit
        assert served.chat(max_tokens=1, headers=authorized("second-key")).status_code == 200
    finally:
        served.vlm.__dict__.pop("submit", None)
        release.set()
        first.join(60)
    assert served.chat(max_tokens=1, headers=authorized("first-key")).status_code == 200


def test_the_queue_is_bounded(serve: Callable[..., Any]) -> None:
    served = serve(max_queue=1, media_threads=1)
    holding, release = threading.Event(), threading.Event()
    original = served.vlm.submit

    def submit(*args: Any, **kwargs: Any) -> Any:
        holding.set()
        assert release.wait(60)
        return original(*args, **kwargs)

    served.vlm.submit = submit
    first = threading.Thread(target=lambda: served.chat(max_tokens=1))
    try:
        first.start()
        assert holding.wait(60)
        response = served.chat(max_tokens=1)
        assert error_of(response, 429)["code"] == "queue_full"
        assert "retry-after" in response.headers
    finally:
        del served.vlm.submit
        release.set()
        first.join(60)
    assert served.chat(max_tokens=1).status_code == 200


def test_deadline(serve: Callable[..., Any]) -> None:
    served = serve(timeout_s=0.05)
    found = served.chat("Describe it.", max_tokens=200, stop=["never"], image=30)
    error_of(found, 408)
    served.until(lambda: served.vlm.engine.load().decoding == 0)


def test_stopping_and_loading_servers_refuse(serve: Callable[..., Any]) -> None:
    served = serve()
    served.server.draining = True
    response = served.chat()
    assert error_of(response, 503)["code"] == "stopping"
    assert "retry-after" in response.headers
    with served.client() as client:
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    served.server.draining = False
    runner, served.server.runner = served.server.runner, None
    assert error_of(served.chat(), 503)["code"] == "loading"
    served.server.runner = runner
    assert served.chat(max_tokens=1).status_code == 200


def test_defects_tell_nothing(serve: Callable[..., Any], caplog: Any) -> None:
    served = serve()

    def submit(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret /srv/weights")

    served.vlm.submit = submit
    try:
        with caplog.at_level(logging.INFO, "vlmfast.serve"):
            response = served.chat()
            error = error_of(response, 500)
            served.until(lambda: "secret" in caplog.text)  # for the operator
    finally:
        del served.vlm.submit
    assert "secret" not in response.text and error["code"] == "internal_error"
    assert served.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("place", ["engine", "GPU", "CPU", "image", "decoder"])
def test_memory_errors_are_temporary(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    served = serve()

    def full(*args: Any, **kwargs: Any) -> Any:
        if place == "CPU":
            torch.empty(1 << 50)
        if place == "decoder":  # Pillow's words for a code of its library
            raise OSError("out of memory error when reading image file")
        raise torch.OutOfMemoryError("full") if place == "GPU" else MemoryError

    with monkeypatch.context() as patch:
        if place in ("image", "decoder"):
            patch.setattr(PngImageFile, "load", full)
        else:
            patch.setattr(served.vlm, "submit", full, raising=False)
        response = served.chat()
        error = error_of(response, 503)
    assert (error["code"], error["param"]) == ("out_of_memory", None)
    assert int(response.headers["Retry-After"]) > 0
    assert served.chat(max_tokens=1).status_code == 200


# --- log -----------------------------------------------------------------------------------------


def test_log_has_one_line_a_request_and_no_secrets(serve: Callable[..., Any], caplog: Any) -> None:
    served = serve(api_keys=("top-secret-key",))
    with caplog.at_level(logging.INFO, "vlmfast.serve"):
        headers = {**authorized("top-secret-key"), "X-Request-Id": "my-id-1"}
        found = served.chat("hidden prompt", 5, max_tokens=2, headers=headers, user="hidden user")
        end = time.monotonic() + 30
        while len(caplog.records) < 1 and time.monotonic() < end:
            time.sleep(0.01)
    assert found.headers["x-request-id"] == "my-id-1"
    (line,) = [record.fields for record in caplog.records]
    assert line["request_id"] == "my-id-1" and line["status"] == 200
    assert line["path"] == CHAT and line["completion_tokens"] == 2
    for secret in ("top-secret-key", "hidden", "data:", "base64"):
        assert secret not in caplog.text + json.dumps(line)


def test_bad_request_ids_are_replaced(served: Any) -> None:
    with served.client(headers={"X-Request-Id": 'a"{}' * 9}) as client:
        found = client.get("/health").headers["x-request-id"]
    assert len(found) == 32 and found.isalnum()
