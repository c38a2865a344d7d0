"""Fuzzing of the server: requests that are wrong in every part, and checks of its responses.

A seed and a number determine a request. `Fuzz` draws them, `send` sends one over a socket of its
own, and `violation` tells what is wrong with its response.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import http.server
import io
import json
import math
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from support import fuzz_bodies
from support import media_fixtures as fx
from support.paths import ROOT
from support.tiny_models import make_image
from vlmfast.core.methods import methods

CHAT, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/responses", "/tokenize"
KINDS = (
    *("fields", "fields", "media", "recipe", "settings", "http", "leaving"),
    *("schema", "bulk", "echo"),
)
# Of a response. No request may get one of the server's failures, 503 included.
STATUSES = {200, 400, 404, 405, 408, 413, 415, 429}
# uvicorn's answer to what is not HTTP.
NOT_HTTP = b"Invalid HTTP request received."
# What a response must not contain unless its request did.
SECRETS = (
    "Traceback",
    'File "',
    "site-packages",
    str(ROOT),
    str(Path.home()) + "/",
    tempfile.gettempdir() + "/",
)


@dataclass(frozen=True)
class Case:
    """A request as it is sent.

    Parameters
    ----------
    name : str
        How it was drawn, for messages.
    content : bytes
        All that is sent, HTTP included.
    received : int, optional
        Number of bytes of the response after which the client leaves; all if ``None``.
    ends : bool
        Whether the client closes its side after the request, as one that is cut off.
    responses : int
        How many are expected on the connection.
    """

    name: str
    content: bytes = field(repr=False)
    received: int | None = None
    ends: bool = False
    responses: int = 1


@dataclass(frozen=True)
class Reply:
    """A response: its status and headers, and all of its body; status 0 is a closed connection."""

    status: int
    kind: str = ""
    body: bytes = b""


# --- sending -------------------------------------------------------------------------------------


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A whole request."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def send(port: int, case: Case, guard: float) -> list[Reply]:
    """Send a request, and read what comes back.

    Raises
    ------
    TimeoutError
        If the server does not say anything for `guard` seconds.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=guard) as connection:
        with contextlib.suppress(ConnectionError):  # the server may answer before it has read all
            connection.sendall(case.content)
            if case.ends:
                with contextlib.suppress(OSError):  # the server has closed it
                    connection.shutdown(socket.SHUT_WR)
        if case.received is not None:
            with contextlib.suppress(ConnectionError):
                connection.recv(max(case.received, 1)) if case.received else b""
            return []
        return list(_replies(connection, case))


class _Reader(io.BufferedReader):
    """All that comes over a connection: a response may be read together with the one before."""

    def makefile(self, mode: str) -> _Reader:
        return self

    def close(self) -> None:  # as each response does at its end
        pass


def _replies(connection: socket.socket, case: Case) -> Iterator[Reply]:
    method = case.content.split(b" ", 1)[0].decode("latin-1")
    reader: Any = _Reader(socket.SocketIO(connection, "r"))
    for _ in range(case.responses):
        response = http.client.HTTPResponse(reader, method=method)
        try:
            response.begin()
            body = response.read()
        except (ConnectionError, http.client.HTTPException):
            yield Reply(0)
            return
        yield Reply(response.status, response.headers.get("content-type", ""), body)
        if response.will_close:
            return


# --- checks --------------------------------------------------------------------------------------


def violation(case: Case, reply: Reply) -> str | None:
    """What is wrong with a response; ``None`` if nothing is."""
    try:
        return _violation(case, reply)
    except ValueError as error:
        return str(error)


def _violation(case: Case, reply: Reply) -> str | None:
    if reply.status == 0:
        return None if case.name.startswith("http") else "the connection was closed"
    text = reply.body.decode("utf-8", "replace")
    sent = case.content.decode("utf-8", "replace")
    shown = [secret for secret in SECRETS if secret in text and secret not in sent]
    if shown:
        return f"{shown} in {text[:300]}"
    if reply.status not in STATUSES:
        return f"status {reply.status}: {text[:300]}"
    if reply.status == 200:
        return None if case.content.startswith(b"HEAD ") else _wrong_answer(reply, text)
    if case.name.startswith("http") and (not text or reply.body == NOT_HTTP):
        return None  # to HEAD, and to what is not HTTP
    if reply.kind != "application/json":
        return f"an error of type {reply.kind!r}: {text[:300]}"
    return wrong_error(text)


def _wrong_answer(reply: Reply, text: str) -> str | None:
    if reply.kind.startswith("application/json"):
        json.loads(text, parse_constant=_refuse)
    elif reply.kind.startswith("text/event-stream"):
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events:
            return "a stream without events"
        for event in events:
            if event == "[DONE]":
                continue
            found = json.loads(event, parse_constant=_refuse)
            error = found.get("error") or (found.get("response") or {}).get("error")
            if error and error["code"] in ("internal_error", "server_error"):
                return f"a stream with {error}"
    return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def wrong_error(text: str) -> str | None:
    """Where an error does not have OpenAI's form."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error object: {text[:300]}"
    if error.keys() != {"message", "type", "param", "code"} or not error["type"]:
        return f"another form: {error}"
    message = error["message"]
    if not message or not all(char.isprintable() for char in message) or len(message) > 2000:
        return f"the message is not a line: {message[:300]!r}"
    return None


@dataclass
class Report:
    """What came of many requests.

    Attributes
    ----------
    statuses : Counter
        By kind of request and status.
    violations : list of str
    slowest : tuple of (float, str)
        Seconds of the slowest request for each of its responses, and its name.
    stalled : float
        Seconds of `Stalls`.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    stalled: float = 0.0

    def add(self, other: Report) -> None:
        self.statuses += other.statuses
        self.violations += other.violations
        self.slowest = max(self.slowest, other.slowest)
        self.stalled += other.stalled

    @property
    def by_status(self) -> dict[int, int]:
        """Number of responses by status; 0 is a closed connection."""
        found: Counter[int] = Counter()
        for (_, status), number in self.statuses.items():
            found[status] += number
        return dict(sorted(found.items()))

    def count(self, status: int, kind: str = "") -> int:
        return sum(n for (name, of), n in self.statuses.items() if of == status and kind in name)


class Stalls:
    """Seconds in which this process could not run, as on a machine that has stopped.

    Attributes
    ----------
    total : float
    """

    _PERIOD, _LEAST = 0.05, 0.2

    def __init__(self) -> None:
        self.total, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._PERIOD):
            now = time.monotonic()
            lost = now - before - self._PERIOD
            self.total += lost if lost > self._LEAST else 0.0
            before = now

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def run(
    port: int, cases: Iterable[Case], connections: int, guard: float, limit: float = math.inf
) -> Report:
    """Send requests over several connections at a time.

    Parameters
    ----------
    guard : float
        Seconds of silence after which a request is given up.
    limit : float
        Most seconds from a request to the end of its response, without `Stalls`.
    """
    report = Report()

    def one(case: Case) -> None:
        start, lost = time.monotonic(), stalls.total
        try:
            replies = send(port, case, guard)
            found = [violation(case, reply) for reply in replies]
        except Exception as error:
            replies, found = [], [f"{type(error).__name__}: {error}"]
        seconds = (time.monotonic() - start - (stalls.total - lost)) / case.responses
        report.slowest = max(report.slowest, (seconds, case.name))
        if seconds > limit:
            found.append(f"took {seconds:.1f} s, and must end within {limit:g} s")
        for reply in replies:
            report.statuses[case.name.split(" ")[0], reply.status] += 1
        report.violations += [f"{case.name}: {text}" for text in found if text]

    with Stalls() as stalls, ThreadPoolExecutor(connections) as pool:
        list(pool.map(one, cases))
    report.stalled = stalls.total
    return report


@dataclass
class Watch:
    """What ``/health`` answered.

    Attributes
    ----------
    seconds : list of float
        Of each answer.
    violations : list of str
    """

    seconds: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.seconds)


@contextlib.contextmanager
def watched(port: int, guard: float, period: float = 0.05) -> Iterator[Watch]:
    """Ask whether the server is alive, again and again, until the block ends."""
    found, ended = Watch(), threading.Event()
    case = Case("health", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def ask() -> None:
        while True:
            start = time.monotonic()
            try:
                (reply,) = send(port, case, guard)
                if reply.status != 200 or json.loads(reply.body) != {"status": "ok"}:
                    found.violations.append(f"/health: {reply}")
            except Exception as error:
                found.violations.append(f"/health: {type(error).__name__}: {error}")
            found.seconds.append(time.monotonic() - start)
            if ended.wait(period):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def idle(port: int, count: int, period: float = 0.2) -> Iterator[None]:
    """Hold connections that ask nothing, and open others for those that are closed."""
    ended, held = threading.Event(), [socket.socket() for _ in range(count)]

    def hold() -> None:
        while not ended.wait(period):
            for number, one in enumerate(held):
                try:
                    alive = bool(one.recv(100))
                except BlockingIOError:
                    alive = True
                except OSError:
                    alive = False
                if alive:
                    continue
                one.close()
                held[number] = socket.socket()
                with contextlib.suppress(OSError):
                    held[number].settimeout(period)
                    held[number].connect(("127.0.0.1", port))
                    held[number].sendall(b"GET /health HTTP/1.1\r\nHost: "[: number % 30])
                    held[number].setblocking(False)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for one in held:
            one.close()


# --- what must not be reached --------------------------------------------------------------------


@dataclass
class Canary:
    """An HTTP server that counts who connects.

    Attributes
    ----------
    url : str
        Of its first address.
    hosts : list of str
        The addresses on which it listens.
    count : int
    """

    url: str
    hosts: list[str]
    count: int = 0


@contextlib.contextmanager
def canary(*hosts: str, answer: Callable[[str], str | None] | None = None) -> Iterator[Canary]:
    """Listen on addresses at the same port; on this machine's, IPv6 included, if none is given.

    Parameters
    ----------
    hosts : str
        IPv6 addresses are left out where there is no IPv6.
    answer : callable, optional
        Maps a path to the URL of a redirect.
    """

    class Server(http.server.ThreadingHTTPServer):
        def verify_request(self, request: Any, address: Any) -> bool:
            found.count += 1
            return True

    class Server6(Server):
        address_family = socket.AF_INET6

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            target = answer(self.path) if answer else ""
            if target:
                self.send_response(302)
                self.send_header("Location", target)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(IMAGE)))
            self.end_headers()
            self.wfile.write(IMAGE)

        def log_message(self, *args: object) -> None:
            pass

    first, *others = hosts or ("127.0.0.1", "::1")
    with contextlib.ExitStack() as stack:

        def listen(kind: type[Server], host: str, port: int) -> int:
            server = stack.enter_context(kind((host, port), Handler))
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.server_port

        port = listen(Server, first, 0)
        found = Canary(f"http://{first}:{port}", [first])
        for host in others:
            with contextlib.suppress(OSError):
                listen(Server6 if ":" in host else Server, host, port)
                found.hosts.append(host)
        yield found


# --- drawing -------------------------------------------------------------------------------------


@functools.cache
def _png(width: int = 48, height: int = 48, seed: int = 0) -> bytes:
    file = io.BytesIO()
    make_image(width, height, seed=seed).save(file, "PNG")
    return file.getvalue()


IMAGE = _png()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _deep(depth: int, of: Any = None) -> Any:
    for number in range(depth):
        of = {"a": of} if number % 2 else [of]
    return of


TEXTS = (
    "",
    " ",
    "\0",
    "\n\r\t\x1b[31m\x7f\x9b",
    "\u2028\u202e\ufeff\ufffe",
    "\ud800",
    "\udfff\ud800",
    "\U0001f600" * 50,
    "<image>",
    "<image>" * 40,
    "<video>",
    "</s><s>",
    "<pad><unk>",
    "<0x00>",
    "USER: <image>\nASSISTANT:",
    "{{ 1/0 }}",
    "%s%n{0}",
    "x" * 400,
    "x" * 100_000,
    "a b " * 3000,
    "../../etc/passwd",
    "'; DROP TABLE",
    "NaN",
    "1",
)
NUMBERS = (
    *(0, -1, 1, 2, 7, 0.5, -0.5, 1.0, 1e-300, 1e308, -1e308, 10**30, -(10**30), 2**31, 2**63),
    *(2**63 - 1, -(2**63), 2**64, float("nan"), float("inf"), -float("inf"), 4097, 10**400),
)
OTHERS = (None, True, False, [], {}, [[]], [None], {"": ""}, {"a": 1}, [1, "a", None])

QUESTIONS = ("What is here?", "Which color is the circle?", "Describe it.", "How many?")

ADDRESSES = (
    "127.0.0.1",
    "localhost",
    "LOCALHOST.",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[64:ff9b::127.0.0.1]",
    "[2002:7f00:1::]",
    "0",
    "0.0.0.0",
    "127.1",
    "0x7f.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "127.0.0.1%00.example",
    "user:pass@127.0.0.1",
    "127.0.0.1#@example.com",
    "example.com@127.0.0.1",
    "\uff11\uff12\uff17.0.0.1",
    "127\u30020\u30020\u30021",
    "169.254.169.254",
    "[fd00:ec2::254]",
    "metadata.google.internal",
    "10.0.0.1",
    "loopback.test",  # resolved to it
    "both.test",  # to a public address and to it
    "nowhere.test",
    "[",
    "",
    "x" * 300 + ".test",
    "a..b",
)


class Fuzz:
    """Draws requests.

    Parameters
    ----------
    seed : str
    models : sequence of str
        Names of the served model.
    canary : str
        URL of a server that must not be reached.
    redirects : str
        URL of one that answers every path with a redirect to the URL in it.
    folder : Path, optional
        From which the server may read files.
    """

    def __init__(
        self,
        seed: str,
        models: tuple[str, ...],
        canary: str = "http://127.0.0.1:9",
        redirects: str = "",
        folder: Path | None = None,
    ) -> None:
        self._seed, self._models = seed, models
        self._port = canary.rpartition(":")[2]
        self._redirects, self._folder = redirects, folder
        self._methods = methods()
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "a.mp4"
            self._video = fx.write_video(path, 6, height=32, width=48).read_bytes()
        self._long = fx.still(100_000, 1000)
        image = Image.fromarray(fx.make_image(20, 24))
        self._images = [fx.encoded(image, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP")]

    def case(self, number: int, kind: str = "") -> Case:
        """Request ``number``."""
        rng = random.Random(f"{self._seed}/{number}")
        kind = kind or rng.choice(KINDS)
        case: Case = getattr(self, f"_{kind}")(rng)
        what = case.name or case.content[-200:].decode("utf-8", "replace")
        name = f"{kind} #{number} {what}"
        return Case(name, case.content, case.received, case.ends, case.responses)

    # --- valid ---

    def valid(
        self,
        rng: random.Random,
        paths: tuple[str, ...] = (CHAT, CHAT, CHAT, RESPONSES, TOKENIZE),
    ) -> tuple[str, dict[str, Any]]:
        """A request that is answered, with few tokens."""
        path = rng.choice(paths)
        image = data_url(_png(rng.choice((32, 48, 90)), 48, rng.randrange(40)))
        text, length = rng.choice(QUESTIONS), rng.randrange(1, 6)
        body: dict[str, Any] = {"model": rng.choice(self._models)}
        if path == RESPONSES:
            content = [
                {"type": "input_image", "image_url": image},
                {"type": "input_text", "text": text},
            ]
            body["input"] = [{"role": "user", "content": content}]
            body["max_output_tokens"] = length
        else:
            parts: list[Any] = [
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "text", "text": text},
            ]
            if rng.random() < 0.1:
                url = data_url(self._video, "video/mp4")
                parts[0] = {"type": "video_url", "video_url": {"url": url}}
                body["num_frames"] = 2
            body["messages"] = [{"role": "user", "content": parts}]
            if rng.random() < 0.2:
                said = {"role": "assistant", "content": "a circle"}
                body["messages"] += [said, {"role": "user", "content": text}]
        if path == CHAT:
            body["max_tokens"] = length
            more = {
                "temperature": rng.choice((0, 1, 0.7)),
                "seed": 3,
                "stop": ["e"],
                "logprobs": True,
                "presence_penalty": 0.5,
                "top_p": 0.9,
                "user": "u",
            }
            body |= {key: more[key] for key in rng.sample(sorted(more), rng.randrange(4))}
        if path != TOKENIZE and rng.random() < 0.4:
            body["stream"] = True
        return path, body

    # --- wrong fields ---

    def _fields(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            self._change(rng, body)
        content = self._written(rng, body)
        if rng.random() < 0.15:
            content = fx.mangled(content, str(rng.random()))
        shown = content if len(content) < 300 else content[:80] + b"..." + content[-200:]
        return Case(repr(shown), post(path, content))

    def _change(self, rng: random.Random, body: dict[str, Any]) -> None:
        """Change one place, fields of the top level as often as all others."""
        holder: Any = body
        while isinstance(holder, dict | list) and holder:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = rng.choice(keys)
            if isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.7:
                holder = holder[key]
                continue
            break
        else:
            return
        match rng.randrange(6):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                name = rng.choice((*TEXTS[:16], "tools", "n", "store", "weights", "__proto__"))
                holder[name] = deepcopy(self._value(rng))
            case 2 if isinstance(holder, list):
                holder += [deepcopy(holder[key]) for _ in range(rng.choice((1, 9, 3000)))]
            case 3:
                holder[key] = [holder[key]]
            case _:
                holder[key] = deepcopy(self._value(rng))

    def _value(self, rng: random.Random) -> Any:
        odd = rng.choice((TEXTS, NUMBERS, OTHERS, None))
        return rng.choice(odd) if odd else _deep(rng.choice((3, 100, 190, 400)))

    def _written(self, rng: random.Random, body: Any) -> bytes:
        plain = rng.random() < 0.5
        text = json.dumps(body, ensure_ascii=plain)
        if rng.random() < 0.05:
            text = text[:-1] + ',"model":"tiny","messages":[]}'  # repeated fields
        return text.encode("utf-8", "surrogatepass")

    # --- media ---

    def _media(self, rng: random.Random) -> Case:
        kind = rng.choice(("image", "image", "video"))
        url = self._odd_url(rng, kind)
        part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
        path = rng.choice((CHAT, TOKENIZE, RESPONSES))
        body: dict[str, Any] = {"model": self._models[0]}
        if path == RESPONSES:
            parts = [
                {"type": "input_image", "image_url": url},
                {"type": "input_text", "text": QUESTIONS[0]},
            ]
            body |= {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2}
        else:
            parts = [part, {"type": "text", "text": QUESTIONS[0]}]
            body["messages"] = [{"role": "user", "content": parts}]
            if rng.random() < 0.3:
                frames = {"num_frames": (1, 3, 64, 65, 10**9, 2**62), "fps": (1e-9, 2, 1e9, 1e308)}
                name = rng.choice(sorted(frames))
                body[name] = rng.choice(frames[name])
        if path == CHAT:
            body |= {"max_tokens": 2, "stream": rng.random() < 0.3}
        return Case(url[:120], post(path, json.dumps(body).encode()))

    def _odd_url(self, rng: random.Random, kind: str) -> str:
        if rng.random() < 0.45:
            return self._address(rng)
        types = ("image/png", "image/gif", "video/mp4", "text/html", "", "image/" + "x" * 100)
        declared = rng.choice((f"{kind}/png", rng.choice(types)))
        data = self._content(rng)
        url = data_url(data, declared)
        match rng.randrange(8):
            case 0:
                return url[: rng.randrange(len(url))]
            case 1:
                at = rng.randrange(len(url))
                return url[:at] + rng.choice(("\n", "%", "\0", "é", "=", ",")) + url[at:]
            case 2:
                return f"data:{declared}," + "%41" * rng.choice((0, 3, 400_000))
            case _:
                return url

    def _content(self, rng: random.Random) -> bytes:
        valid = rng.choice((*self._images, self._video, self._long))
        odd = (
            b"",
            b"\0" * 200,
            b"GIF89a",
            b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
            b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:" + self._port.encode() + b"/a.ts\n",
            b"ffconcat version 1.0\nfile '/etc/passwd'\n",
            fx.png_header(20_000, 15_000),
            fx.png_header(2**31 - 1, 2**31 - 1),
            fx.png_header(0, 0),
            _gif_bomb(60_000, 1),
            _gif_bomb(3000, 400),
            rng.randbytes(rng.choice((1, 30, 5000))),
        )
        match rng.randrange(3):
            case 0:
                return rng.choice(odd)
            case 1:
                return fx.mangled(valid, str(rng.random()))
            case _:
                return valid

    def _address(self, rng: random.Random) -> str:
        scheme = rng.choice(("http", "http", "https", "HTTP", "ftp", "gopher", "file", "data", ""))
        if scheme in ("file", ""):
            return self._file(rng, scheme)
        url = f"{scheme}://{rng.choice(ADDRESSES)}:{self._port}/image.png"
        if self._redirects and rng.random() < 0.3:
            return f"{self._redirects}/{url}"
        return url

    def _file(self, rng: random.Random, scheme: str) -> str:
        names = ["/etc/passwd", "/proc/self/environ", "/dev/zero", "a.png", "../a.png", "", "%00"]
        if self._folder is not None:
            inside = (
                "a.png",
                "out.png",
                "deep/../../secret.png",
                "missing",
                "pipe",
                "",
                "a.png%00",
            )
            names += [f"{self._folder}/{name}" for name in inside]
        name = rng.choice(names)
        return f"{scheme}://{name}" if scheme else name

    # --- recipes ---

    def _recipe(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        recipe = "+".join(self._stage(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        if rng.random() < 0.1:
            recipe = fx.mangled(recipe.encode("utf-8", "replace"), str(rng.random())).decode(
                "latin-1"
            )
        body["recipe"] = recipe
        return Case(recipe[:200], post(path, json.dumps(body).encode()))

    def _stage(self, rng: random.Random) -> str:
        if rng.random() < 0.1:
            odd = (
                *(
                    "balanced",
                    "none",
                    "fast",
                    "hirde:0.2",
                    "hired:",
                    ":",
                    "+",
                    "hired:9",
                    "a" * 900,
                ),
                *("snapkv:window=1000000000", "draft-ngram:n=100000", "draft-ngram:tokens=100000"),
                *("elastic:weights=/etc/passwd", "draft-eagle:weights=http://127.0.0.1/"),
            )
            return rng.choice((*odd, *TEXTS[:12]))
        method = rng.choice(self._methods)
        parameters = method["parameters"]
        chosen = rng.sample(parameters, rng.randrange(min(4, len(parameters) + 1)))
        settings = [f"{p['name']}={self._setting(rng, p)}" for p in chosen]
        return method["name"] + (f":{','.join(settings)}" if settings else "")

    def _setting(self, rng: random.Random, parameter: dict[str, Any]) -> str:
        if rng.random() < 0.15:
            values = ("", "nan", "-1", "0", "1e308", "9" * 30, "/etc", "true", "a/b", "0x10")
            return rng.choice(values)
        kind = parameter["type"]
        if choices := parameter.get("choices"):
            return str(rng.choice(choices))
        if "tuple" in kind:
            return "/".join(str(round(rng.random(), 3)) for _ in range(rng.randrange(1, 6)))
        if "float" in kind:
            return str(rng.choice((0.01, 0.1, 0.25, 0.5, 0.9, 1, 1.5, 32, 1e6)))
        if "int" in kind:
            return str(rng.choice((0, 1, 2, 3, 4, 5, 8, 16, 64, 1000, 10**5, 10**9)))
        if "bool" in kind:
            return rng.choice(("true", "false"))
        return rng.choice(("auto", "openai", "/etc/passwd", "../x", "hub/id"))

    # --- settings ---

    def _settings(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        schema = fuzz_bodies.schema(rng)
        if path == CHAT:
            formats = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            more = {
                "stop": rng.choice((["a"] * 200, [""], "x" * 257, ["\0"], ["e", "ee", " "], [])),
                "max_tokens": rng.choice((0, -1, 1, 40, 4096, 4097, 2**63, 10**30)),
                "temperature": rng.choice((0, 1e-30, 1e-5, 2, 2.1, -0.0)),
                "top_p": rng.choice((1e-30, 1e-9, 1, 0)),
                "top_k": rng.choice((0, 1, 10**6, 2**31, 2**63, 10**30)),
                "seed": rng.choice((-(2**63), 2**63 - 1, 2**63, -1)),
                "presence_penalty": rng.choice((-2, 2, 2.5)),
                "frequency_penalty": rng.choice((-2, 2, -1e-300)),
                "logprobs": rng.choice((True, False)),
                "top_logprobs": rng.choice((0, 20, 21)),
                "response_format": rng.choice((formats, formats, {"type": "json_object"})),
                "cache_salt": rng.choice(("\0", "x" * 256, "x" * 257)),
                "trace": True,
            }
            body |= {key: more[key] for key in rng.sample(sorted(more), rng.randrange(1, 6))}
        elif path == RESPONSES:
            body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
            body["max_output_tokens"] = rng.choice((1, 10, 40, 4097, 10**30))
        else:
            body["trace"] = True
        shown = {key: value for key, value in body.items() if key not in ("messages", "input")}
        return Case(repr(shown)[:300], post(path, json.dumps(body).encode()))

    # --- schemas, bulk, former answers ---

    def _schema(self, rng: random.Random) -> Case:
        path, body = self.valid(rng, (CHAT, RESPONSES))
        schema = fuzz_bodies.schema(rng)
        if path == CHAT:
            inner = {"name": "a", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": inner}
        else:
            body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        return Case(repr(schema)[:300], post(path, json.dumps(body).encode()))

    def _bulk(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        fuzz_bodies.bulk(rng, body)
        content = json.dumps(body).encode()
        return Case(f"{len(content)} bytes", post(path, content))

    def _echo(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        fuzz_bodies.echo(rng, body)
        return Case(repr(body)[-300:], post(path, json.dumps(body).encode()))

    # --- HTTP ---

    def _http(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        content = json.dumps(body).encode()
        whole = post(path, content)
        head, _, _ = whole.partition(b"\r\n\r\n")
        bare = b"\r\n".join(line for line in head.split(b"\r\n") if b"Length" not in line)
        chunked = bare + b"\r\nTransfer-Encoding: chunked"
        length, get = bare + b"\r\nContent-Length: ", b"GET /health HTTP/%s\r\nHost: localhost\r\n"
        websocket = ("Connection: upgrade", "Upgrade: websocket")
        method, place = rng.choice(METHODS), rng.choice(TARGETS)
        requests = {
            "cut": whole[: rng.randrange(1, len(whole))],
            "cut head": whole[: rng.randrange(20, len(head))],
            "stalls": whole[: rng.randrange(len(head) + 4, len(whole))],
            "longer": post(path, content + b"xx" * 50),
            "pipelined": whole + whole,
            "pipelined with noise": whole + b"\0\1\2 \r\n\r\n",
            "negative length": length + b"-5\r\n\r\n" + content,
            "long length": length + b"9" * 19 + b"\r\n\r\n" + content,
            "longest length": length + b"9" * 5000 + b"\r\n\r\n" + content,
            "two lengths": length + b"5\r\nContent-Length: 6\r\n\r\n" + content,
            "two encodings": chunked + b"\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
            "chunks": chunked + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content),
            "bad chunks": chunked + b"\r\n\r\nzz\r\n" + content,
            "bad later chunk": chunked + b"\r\n\r\n1\r\n{\r\nzz\r\n" + content,
            "huge chunk": chunked + b"\r\n\r\n" + b"f" * 16 + b"\r\n" + bytes(9_000_000),
            "other encoding": bare + b"\r\nTransfer-Encoding: gzip\r\n\r\n" + content,
            "gzip": post(path, content, "Content-Encoding: gzip"),
            "expects": post(path, content, "Expect: 100-continue"),
            "upgrade": post(path, content, *websocket),
            "HTTP/0.9": b"GET /health\r\n\r\n",
            "HTTP/1.0": get % b"1.0" + b"\r\n",
            "HTTP/9.9": get % b"9.9" + b"\r\n",
            "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n" + rng.randbytes(80),
            "noise": rng.randbytes(rng.choice((1, 50, 5000))) + b"\r\n\r\n",
            "nothing": b"\r\n\r\n",
            "long head": get % b"1.1" + b"X: " + b"a" * 200_000,
            "many headers": head + b"".join(b"\r\nX-%d: a" % n for n in range(2000)),
            "no type": whole.replace(b"application/json", b""),
            "odd type": whole.replace(b"application/json", b"\xff;\xfe"),
            "no host": whole.replace(b"Host: localhost\r\n", b""),
            "two hosts": whole.replace(b"localhost", b"localhost\r\nHost: localhost"),
            "other host": whole.replace(b"localhost", b"\xe9vil.example:1:2"),
            "odd header": post(path, content, "X-Request-Id: \x7f{}", "A B: c"),
            "odd key": post(path, content, "Authorization: Bearer \u00e9\u00e9"),
            f"{method} {place}": self._plain(method, place),
        }
        rest = [name for name in requests if name != f"{method} {place}"]
        name = rng.choice(rest) if rng.random() < 0.6 else f"{method} {place}"
        ends = name in ("cut", "cut head", "many headers", "nothing", "long head", "noise", "TLS")
        count = 2 if name.startswith("pipelined") else 1
        return Case(name, requests[name], ends=ends, responses=count)

    def _plain(self, method: str, target: str) -> bytes:
        text = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n"
        return text.encode() + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"

    # --- clients that leave ---

    def _leaving(self, rng: random.Random) -> Case:
        path, body = self.valid(rng)
        if path == CHAT:
            body |= {"max_tokens": rng.choice((1, 40)), "stream": rng.random() < 0.7}
        received = rng.choice((0, 0, 1, 200, 1000))
        content = post(path, json.dumps(body).encode())
        if rng.random() < 0.2:
            content = content[: rng.randrange(1, len(content))]
            received = 0
        return Case(f"after {received}", content, received)


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "BREW")
TARGETS = (
    *(CHAT, RESPONSES, TOKENIZE, "/health", "/ready", "/metrics", "/v1/models", "/openapi.json"),
    *(
        "/",
        "*",
        "//",
        "/../../etc/passwd",
        "/v1/models/%00%ff%2e%2e/x",
        "/v1/models/",
        "/%",
        "/docs",
    ),
    *("/v1/models/" + "a" * 3000, "http://127.0.0.1/health", "/health?a=%ff&a[]=1#x", "health"),
    "/v1/chat/completions/",
)


def _gif_bomb(side: int, count: int) -> bytes:
    """Frames of a stated size in a few bytes each."""
    size = side.to_bytes(2, "little") * 2
    head = b"GIF89a" + size + b"\x80\x00\x00" + bytes(6)
    return head + count * (b"," + bytes(4) + size + b"\x00\x02\x02\x44\x01\x00") + b";"
