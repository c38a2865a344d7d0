"""What is refused before it is answered: hosts, keys, limits, bodies; and what is logged."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL.PngImagePlugin import PngImageFile

from support.engine.sources import keys_of
from support.server_fuzz import CHAT, RESPONSES, TOKENIZE, post, wrong_error
from support.tiny_models import build_llava
from vlmfast import VLM, VLMFastError
from vlmfast.serve.config import MediaLimits, ServerConfig
from vlmfast.serve.connections import log_shortage
from vlmfast.serve.errors import RequestError
from vlmfast.serve.schema import ChatRequest, read_as


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error of a response, which has OpenAI's form."""
    assert response.status_code == status, response.text
    assert wrong_error(response.text) is None
    return response.json()["error"]


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(VLMFastError, match=r"API key.*--insecure"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, insecure=True).hosts is None
    assert ServerConfig(host=host, api_keys=("k",)).hosts is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_this_machine_needs_none(host: str) -> None:
    for more in ((), ("a.example",)):
        hosts = ServerConfig(host=host, allowed_hosts=more).hosts
        assert {*more, host.strip("[]")} <= {own.strip("[]") for own in hosts}


BAD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"api_keys": ("",)},
    {"max_queue": 0},
    {"max_stops": -1},
    {"timeout_s": -1.0},
    {"timeout_s": float("nan")},
    {"media": MediaLimits(max_images=0)},
    {"model": "a", "aliases": {"a": "none"}},
)


def test_bad_options_raise() -> None:
    for options in BAD_OPTIONS:
        with pytest.raises(VLMFastError, match=r"empty key|at least|name of the model itself"):
            ServerConfig(**options)
    assert "secret" not in repr(ServerConfig(api_keys=("secret",), max_stops=0))


# --- hosts and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.x", ""])
def test_other_hosts_are_refused(served: Any, host: str) -> None:
    for path in ("/health", "/v1/models"):
        assert error_of(served.get(path, Host=host), 400)["code"] == "invalid_host"


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"])
def test_this_machines_hosts_are_accepted(served: Any, host: str) -> None:
    assert served.get("/health", Host=host).status_code == 200


KEYS = ("first-key", "second-key")


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys(serve: Any) -> None:
    served = serve(api_keys=KEYS)
    wrong = ["Bearer", "Bearer first", "Basic first-key", "first-key", "Bearer first-keyx"]
    for headers in ({}, *({"Authorization": header} for header in wrong)):
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            response = served.get(path, **headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        error_of(served.chat(headers=headers), 401)
    for key in KEYS:
        assert served.chat(headers=authorized(key), max_tokens=1).status_code == 200
    described = served.get("/openapi.json", **authorized(KEYS[0])).json()
    assert "bearer" in str(described["components"]["securitySchemes"])
    assert served.get("/health").status_code == served.get("/ready").status_code == 200


def test_keys_do_not_share_the_prefix_cache(serve: Any) -> None:
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
    for path in (CHAT, RESPONSES, TOKENIZE):
        error_of(served.send(content, path), 400)


def test_other_content_types_are_refused(served: Any) -> None:
    content = json.dumps(served.body(max_tokens=1))
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        error_of(served.send(content, kind=kind), 415)
    assert served.send(content, kind="Application/JSON; charset=utf-8").status_code == 200


def test_large_bodies_are_refused(serve: Any) -> None:
    served = serve(max_body_bytes=50_000)
    assert served.chat(max_tokens=1).status_code == 200
    text = json.dumps({**served.body(), "user": "x" * 60_000}).encode()
    error_of(served.send(text), 413)
    parts = (text[i : i + 4096] for i in range(0, len(text), 4096))
    error_of(served.send(parts), 413)  # without a length
    assert served.get("/health").status_code == 200


def test_a_stalled_upload_ends(serve: Any) -> None:
    with serve(timeout_s=0.3).connect(post(CHAT, b"{" * 1000)[:-999]) as stalled:
        assert stalled.recv(65536).startswith(b"HTTP/1.1 408")


def test_bodies_of_all_requests_are_bounded(serve: Any, served: Any) -> None:
    size = len(json.dumps(served.body(max_tokens=1)))
    own = serve(max_total_body_bytes=2 * size)
    assert own.chat(max_tokens=1).status_code == 200
    assert own.chat(max_tokens=1).status_code == 200  # the first one's were returned
    with own.connect(post(CHAT, b" " * 2 * size)[: -size // 2]):
        own.until(lambda: own.chat(max_tokens=1).status_code == 429)
    own.until(lambda: own.chat(max_tokens=1).status_code == 200)


def chat_body(**fields: str) -> bytes:
    """The text of a chat completion, with fields as JSON."""
    fields = {"model": '"tiny"', "messages": '[{"role": "user", "content": "a"}]', **fields}
    return b"{%s}" % ",".join(f'"{name}": {value}' for name, value in fields.items()).encode()


def refusal(content: bytes) -> RequestError:
    with pytest.raises(RequestError) as found:
        read_as(ChatRequest, content)
    return found.value


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
    found = refusal(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.param == param
    assert peak < 12e6


def test_bodies_of_too_many_values_are_refused_unparsed(served: Any) -> None:
    error = error_of(served.send(chat_body(unknown=f"[{'[],' * 130_000}1]")), 413)
    assert "commas" in error["message"] and "250000" in error["message"]
    assert refusal(chat_body(unknown=f"[{'[],' * 120_000}1]")).param == "unknown"


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
            assert served.get("/health").status_code == 200
            assert not answer.done()
        finally:
            leave.set()
        assert answer.result().status_code == 200


def test_unknown_names_get_the_nearest_known_one() -> None:
    for name, meant in (("max_token", "max_tokens"), ("temprature", "temperature")):
        found = refusal(chat_body(**{name: "1"}))
        assert found.param == name and f"did you mean {meant!r}" in found.message
    assert "did you mean" not in refusal(chat_body(weights="1")).message
    long = refusal(chat_body(**{"x" * 10**6: "1"}))
    assert len(long.message) < 500 and len(long.param) < 500


def test_the_type_of_an_object_is_not_taken_for_its_field() -> None:
    for content, name in (
        ({"type": "image_url", "image_url": {"url": "x"}, "more": 1}, "more"),
        ({"type": "image_url", "image_url": {"url": "x", "more": 1}}, "image_url.more"),
        ({"type": "image_url", "image_url": {"url": 3}}, "image_url.url"),
        ({"type": "image_url", "image_url": 3}, "image_url"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "text", "text": "x", "more": 1}, "more"),
    ):
        messages = json.dumps([{"role": "user", "content": [content]}])
        found = refusal(chat_body(messages=messages))
        assert found.param == f"messages[0].content[0].{name}"
    text = '[{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]'
    message = refusal(chat_body(messages=text)).message
    assert message.endswith('image_url must be an object such as {"url": "..."}')


# --- connections ---------------------------------------------------------------------------------


def is_closed(connection: Any) -> bool:
    """Whether the other side has closed a connection; waits for it or for an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


PARTIAL = b"GET /health HTTP/1.1\r\nHost: "


def test_idle_connections_give_way_to_new_ones(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(max_connections=8, header_timeout_s=3600.0)
    caplog.set_level(logging.WARNING, logger="vlmfast.serve")
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(served.connect((n % 2) * PARTIAL)) for n in range(40)]
        with served.client() as client:
            for _ in range(3):  # over one connection, which is idle between its requests
                assert client.get("/health").status_code == 200
        assert served.chat(max_tokens=1).status_code == 200
        assert all(is_closed(each) for each in idle[:30])  # those that have waited longest
    lines = [record.getMessage() for record in caplog.records if "closed" in record.getMessage()]
    assert lines[0] == "1 connections were closed: at most 8 are kept" and len(lines) < 10


def test_requests_that_are_answered_are_not_closed(serve: Any) -> None:
    """Nor those whose bodies arrive; with no idle connection left, the new one is closed."""
    served = serve(max_connections=4)
    upload = post(CHAT, b"{" * 99, "Expect: 100-continue")[:-99]
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(served.connect(upload)) for _ in range(4)]
        for each in busy:  # until its headers are read
            assert each.recv(99).startswith(b"HTTP/1.1 100")
        with served.connect() as more:
            assert is_closed(more)
        for each in busy:
            each.sendall(b" " * 98 + b"{")
            assert each.recv(12) == b"HTTP/1.1 400"


def test_connections_without_headers_end(serve: Any) -> None:
    served = serve(header_timeout_s=0.2, timeout_s=3600.0)
    for text in (b"", PARTIAL):
        with served.connect(text) as stalled:
            assert is_closed(stalled)
    # Also on a connection that has carried a request already.
    with served.connect(PARTIAL + b"localhost\r\n\r\n") as stalled:
        assert stalled.recv(65536).startswith(b"HTTP/1.1 200")
        stalled.sendall(PARTIAL)
        while not is_closed(stalled):  # the rest of the response
            pass


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


# --- fields --------------------------------------------------------------------------------------

# Values that are refused of each field, beside those of wrong types (test_wrong_types.py).
WRONG_VALUES: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "model": ["x" * 300],
        "messages": [[]],
        "temperature": [-1, 2.5],
        "top_p": [0],
        "top_k": [-1],
        "max_tokens": [-1, 0, 10**30, 5000],
        "seed": [10**30],
        "stop": [["a"] * 200, ""],
        "n": [2],
        "top_logprobs": [2],
        "stream_options": [{"include_usage": True}],
        "presence_penalty": [3],
        "tools": [[{"type": "function"}]],
        "response_format": [{"type": "xml"}],
        "recipe": [
            *("x" * 2000, "hired:9", "nothing-known", "frames-clip:4", "elastic:weights=/etc"),
            *("draft-eagle:weights=../x", "clip-relevance:model=local-dir:/etc", "auto"),
            *(f"{name}:window=inf" for name in ("snapkv", "cake", "fastkv", "pyramidkv")),
        ],
        "num_frames": [0],
        "unknown": [1],
        "cache_salt": ["x" * 1000],
    },
    RESPONSES: {
        "store": [True],
        "previous_response_id": ["resp_1"],
        "input": [[]],
        "max_output_tokens": [-1, 5000],
        "text.format": [{"format": {"type": "xml"}}],
        "tools": [[{"type": "web_search"}]],
        "background": [True],
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
WRONG_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("messages[0]", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0]", {"messages": [{"content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
    ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}),
    ("messages[0].content[0]", {"messages": [{"role": "assistant", "content": [IMAGE]}]}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("fps", {"num_frames": 4, "fps": 1}),
]


@pytest.mark.parametrize("path", WRONG_VALUES)
def test_wrong_fields_are_named(served: Any, path: str) -> None:
    valid = served.body() if path == CHAT else {"model": "tiny", "input": "hello"}
    assert served.post(path, valid).status_code == 200
    wrong = [
        (param, {param.partition(".")[0]: value})
        for param, values in WRONG_VALUES[path].items()
        for value in values
    ]
    for param, more in [*wrong, *(WRONG_TOGETHER if path == CHAT else ())]:
        error = error_of(served.post(path, {**valid, **more}), 400)
        assert error["param"] == param, (more, error)
        assert error["type"] == "invalid_request_error"
        assert param.partition("[")[0] in error["message"]
    if path == CHAT:
        error = error_of(served.chat(recipe="auto"), 400)
        assert "cannot name 'auto'" in error["message"] and "/" not in error["message"]


@pytest.mark.parametrize("field", ["temperature", "top_p", "fps", "presence_penalty", "max_tokens"])
def test_numbers_that_are_not_finite_are_refused(served: Any, field: str) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
        error_of(served.send(chat_body(**{field: number})), 400)


@pytest.mark.parametrize(
    "roles",
    [
        ["user", "user"],
        ["assistant", "user"],
        ["user", "assistant", "assistant", "user"],
        ["user", "assistant"],
        ["assistant"],
        ["system", "user"],  # the shipped model's template has none
    ],
    ids="-".join,
)
def test_roles_are_answered_as_by_the_library(served: Any, roles: list[str]) -> None:
    messages = [{"role": role, "content": f"What is {n}?"} for n, role in enumerate(roles)]
    response = served.post(CHAT, {"model": "full", "messages": messages, "max_tokens": 4})
    with contextlib.suppress(VLMFastError):
        expected = served.vlm.chat(messages, max_new_tokens=4)
        assert response.json()["choices"][0]["message"]["content"] == expected.text
        return
    error = error_of(response, 400)
    assert "template" in error["message"] or "system" not in roles


def test_unknown_models_and_paths(served: Any) -> None:
    error = error_of(served.chat(model="gpt-4o"), 404)
    assert error["code"] == "model_not_found" and "tiny, full, fast" in error["message"]
    error_of(served.post("/v1/embeddings", {}), 404)
    error_of(served.get(CHAT), 405)
    for path in ("/docs", "/health/", "/v1/models/tiny/"):  # paths are not redirected
        error_of(served.get(path), 404)


def test_refused_requests_are_counted(serve: Any) -> None:
    served = serve()
    assert served.chat(model="other").status_code == 404
    assert served.chat(recipe="hired:2").status_code == 400
    assert served.post(CHAT, {"model": "tiny"}).status_code == 400
    assert served.metric("request_errors_total", status="404") == 1
    assert served.metric("request_errors_total", status="400") == 2


def test_an_answer_is_no_longer_than_the_server_allows(serve: Any) -> None:
    vlm = VLM(*build_llava())
    vlm.model.generation_config.max_new_tokens = 40
    vlm.model.generation_config.eos_token_id = None
    usage = serve(vlm, max_new_tokens=6).chat().json()["usage"]
    assert usage["completion_tokens"] == 6


@pytest.mark.parametrize(("text", "keys"), [("a, b", {"a", "b"}), ("a, ,", {"a"})])
def test_keys_have_no_blanks(monkeypatch: Any, tmp_path: Path, text: str, keys: set[str]) -> None:
    monkeypatch.setenv("VLMFAST_API_KEY", text)
    args = SimpleNamespace(api_key=[" c "], api_key_file=None)
    assert set(keys_of(args)) == {*keys, "c"}
    args.api_key_file = tmp_path / "keys"
    args.api_key_file.write_text("\n \n")
    with pytest.raises(VLMFastError, match="has no key"):
        keys_of(args)


def test_prompts_beyond_the_model_are_refused(served: Any) -> None:
    error = error_of(served.chat("x " * 50_000, None), 400)
    assert error["code"] == "context_length_exceeded"


# --- limits --------------------------------------------------------------------------------------


def answered_twice(served: Any, **headers: str) -> Any:
    """The response to a request while another one is held; it is answered afterwards."""
    with ThreadPoolExecutor(1) as pool, served.held(served.vlm, "submit") as (reached, _):
        pool.submit(served.chat, max_tokens=1, headers=headers)
        assert reached.wait(60)
        response = served.chat(max_tokens=1, headers=headers)
        if headers:
            assert served.chat(max_tokens=1, headers=authorized("second-key")).status_code == 200
    assert served.chat(max_tokens=1, headers=headers).status_code == 200
    return response


def test_requests_of_a_key_are_bounded(serve: Any) -> None:
    served = serve(max_requests_per_key=1, api_keys=KEYS)
    response = answered_twice(served, **authorized("first-key"))
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    assert int(response.headers["retry-after"]) >= 1


def test_the_queue_is_bounded(serve: Any) -> None:
    response = answered_twice(serve(max_queue=1, media_threads=1))
    assert error_of(response, 429)["code"] == "queue_full"
    assert "retry-after" in response.headers


def test_deadline(serve: Any) -> None:
    served = serve(timeout_s=0.05)
    found = served.chat("Describe it.", max_tokens=200, stop=["never"], image=30)
    error_of(found, 408)
    served.until(lambda: served.vlm.engine.load().decoding == 0)


def test_stopping_and_loading_servers_refuse(serve: Any) -> None:
    served = serve()
    served.server.draining = True
    response = served.chat()
    assert error_of(response, 503)["code"] == "stopping"
    assert "retry-after" in response.headers
    error_of(served.get("/ready"), 503)
    assert served.get("/health").status_code == 200
    served.server.draining = False
    runner, served.server.runner = served.server.runner, None
    assert error_of(served.chat(), 503)["code"] == "loading"
    served.server.runner = runner
    assert served.chat(max_tokens=1).status_code == 200


def test_defects_tell_nothing(serve: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()

    def submit(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret /srv/weights")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "vlmfast.serve"):
        patch.setattr(served.vlm, "submit", submit, raising=False)
        response = served.chat()
        error = error_of(response, 500)
        served.until(lambda: "secret" in caplog.text)  # for the operator
    assert "secret" not in response.text and error["code"] == "internal_error"
    assert served.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("place", ["engine", "GPU", "CPU", "image", "decoder"])
def test_memory_errors_are_temporary(
    serve: Any, monkeypatch: pytest.MonkeyPatch, place: str
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


def test_log_has_one_line_a_request_and_no_secrets(serve: Any, caplog: Any) -> None:
    served = serve(api_keys=("top-secret-key",))
    with caplog.at_level(logging.INFO, "vlmfast.serve"):
        headers = {**authorized("top-secret-key"), "X-Request-Id": "my-id-1"}
        found = served.chat("hidden prompt", 5, max_tokens=2, headers=headers, user="hidden user")
        served.until(lambda: bool(caplog.records))
    assert found.headers["x-request-id"] == "my-id-1"
    (line,) = [record.fields for record in caplog.records]
    assert line["request_id"] == "my-id-1" and line["status"] == 200
    assert line["path"] == CHAT and line["completion_tokens"] == 2
    for secret in ("top-secret-key", "hidden", "data:", "base64"):
        assert secret not in caplog.text + json.dumps(line)


def test_bad_request_ids_are_replaced(served: Any) -> None:
    found = served.get("/health", **{"X-Request-Id": 'a"{}' * 9}).headers["x-request-id"]
    assert len(found) == 32 and found.isalnum()
