"""Servers with OpenAI's API in their own processes, and clients that measure their answers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from harness import ROOT
from PIL import Image, ImageChops

from vlmfast.eval.bench import rotated, spread
from vlmfast.scenes.examples import CAPTION_QUESTION
from vlmfast.scenes.files import lossless_video

BEFORE, AFTER = 24, 8  # parts of the stream of `stalled` before and after the other request
START_S, ANSWER_S, STOP_S = 300, 600, 60
ADDRESS = re.compile(r"(?:served at|running on|vLLM server on) (http://[^\s/]+)")


class ServerFailed(Exception):
    """A server did not start, or did not answer a request."""


# --- requests ------------------------------------------------------------------------------------


class Requests:
    """Makes requests for captions, no two of them with the same image.

    Parameters
    ----------
    scenes : list of PIL.Image.Image
    model : str
        Name of the model in the API.
    frames : int
        Of videos, in which the scenes move; 0 for images.
    fields
        Further fields of the body.
    """

    def __init__(
        self, scenes: list[Image.Image], model: str, frames: int = 0, **fields: Any
    ) -> None:
        self.scenes, self.model, self.frames, self.fields = scenes, model, frames, fields
        self._count = 0

    def bodies(self, count: int, max_tokens: int, images: int = 1) -> list[bytes]:
        """JSON of ``count`` requests; the same scenes in each call, with other pixels."""
        return [
            self._body([n * images + k for k in range(images)], max_tokens) for n in range(count)
        ]

    def _body(self, scenes: list[int], max_tokens: int) -> bytes:
        parts = [self._part(number) for number in scenes]
        content = [*parts, {"type": "text", "text": CAPTION_QUESTION}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return json.dumps(body).encode()

    def _part(self, scene: int) -> dict[str, Any]:
        image = self.scenes[scene % len(self.scenes)].copy()
        image.putpixel((0, 0), tuple(self._count.to_bytes(3, "big")))
        self._count += 1
        if self.frames:
            moved = [ImageChops.offset(image, 4 * number, 0) for number in range(self.frames)]
            kind, form, data = "video_url", "video/mp4", lossless_video(moved)
        else:
            file = io.BytesIO()
            image.save(file, "PNG")
            kind, form, data = "image_url", "image/png", file.getvalue()
        return {"type": kind, kind: {"url": f"data:{form};base64,{b64encode(data).decode()}"}}


# --- the client ----------------------------------------------------------------------------------


@dataclass
class Answer:
    """A streamed answer; times in seconds, by `time.perf_counter`.

    Parameters
    ----------
    begin, end : float
        When the request was sent, and when the stream ended.
    times : list of float
        Of the pieces of text.
    text : str
    tokens, prompt : int
        Of the answer and of the prompt, by the server's usage.
    """

    begin: float
    times: list[float]
    end: float
    text: str
    tokens: int
    prompt: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begin

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @property
    def total(self) -> float:
        return self.end - self.begin


Parts = list[tuple[float, bytes]]  # of a response, each with the time at which it was read


def events(parts: Parts) -> Iterator[tuple[float, dict[str, Any]]]:
    """The chunks of a streamed chat completion, each with the time at which it was complete.

    Raises
    ------
    ServerFailed
        For an error in the stream.
    """
    rest = b""
    for at, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                event = json.loads(data)
                if "error" in event:
                    text = data.decode(errors="replace")
                    raise ServerFailed(f"an error in a stream: {text[:300]}")
                yield at, event


def answer_of(begin: float, end: float, parts: Parts) -> Answer:
    """The answer in a response.

    Raises
    ------
    ServerFailed
        For an error in the stream, or an answer without text or usage.
    """
    times, texts, usage = [], [], None
    for at, event in events(parts):
        if text := piece(event):
            times.append(at)
            texts.append(text)
        usage = event.get("usage") or usage
    if usage is None or not texts:
        raise ServerFailed("an answer without text or usage")
    counts = usage["completion_tokens"], usage["prompt_tokens"]
    return Answer(begin, times, end, "".join(texts).strip(), *counts)


async def parts_of(
    client: httpx2.AsyncClient, body: bytes
) -> AsyncGenerator[tuple[float, bytes], None]:
    """Send a request; the parts of the response, each with the time at which it was read.

    Raises
    ------
    ServerFailed
        For a refused request.
    """
    headers = {"Content-Type": "application/json"}
    url = "/v1/chat/completions"
    async with client.stream("POST", url, content=body, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise ServerFailed(f"status {response.status_code}: {text[:300]}")
        async for part in response.aiter_raw():
            yield time.perf_counter(), part


def piece(event: dict[str, Any]) -> str:
    """Text of a chunk, possibly empty."""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def received(client: httpx2.AsyncClient, body: bytes) -> tuple[float, float, Parts]:
    """Send a request and read the response, which is parsed later: clients share the cores."""
    begin = time.perf_counter()
    found = [part async for part in parts_of(client, body)]
    return begin, time.perf_counter(), found


def client_of(url: str) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits, trust_env=False)


@dataclass
class Load:
    """The answers to the requests of several clients.

    Parameters
    ----------
    seconds : float
        From the first request to the last answer.
    answers : list of Answer
        In the order of the requests.
    """

    seconds: float
    answers: list[Answer]

    @property
    def per_second(self) -> float:
        """Answers per second."""
        return len(self.answers) / self.seconds

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


def load(url: str, bodies: Many[bytes], clients: int) -> Load:
    """Send requests; each client sends its next one as soon as it has its answer."""

    async def run() -> tuple[float, list[tuple[float, float, Parts]]]:
        waiting = iter(enumerate(bodies))
        found: dict[int, tuple[float, float, Parts]] = {}

        async def one(client: httpx2.AsyncClient) -> None:
            for place, body in waiting:
                found[place] = await received(client, body)

        async with client_of(url) as client:
            begin = time.perf_counter()
            await asyncio.gather(*(one(client) for _ in range(clients)))
            seconds = time.perf_counter() - begin
        return seconds, [found[place] for place in sorted(found)]

    seconds, responses = asyncio.run(run())
    return Load(seconds, [answer_of(*response) for response in responses])


Loads = dict[tuple[str, int], list[Load]]  # by server and clients, one for each round


def in_rounds(
    servers: list[Server], rounds: int, clients: list[int], bodies: Callable[[int], list[bytes]]
) -> Loads:
    """Loads of paused servers, interleaved; ``bodies`` makes requests for a number of clients."""
    found: Loads = {}
    for number in range(rounds):
        for many in clients:
            asked = bodies(many)
            for server in rotated(servers, number):
                try:
                    with server.awake():
                        sample = load(server.url, asked, many)
                except ServerFailed as error:
                    failed = f"{server.spec.name}, {plural(many)}: {error}"
                    raise ServerFailed(f"{failed}; its output: {server.last_line}") from error
                found.setdefault((server.spec.name, many), []).append(sample)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return found


def gap_ratio(times: Many[float], begin: float, end: float) -> float:
    """Largest gap that overlaps the time from ``begin`` to ``end``, over the median of the others.

    Parameters
    ----------
    times : sequence of float
        Of the tokens of a stream.
    begin, end : float
        When another request was sent, and when its first token came.
    """
    gaps = list(pairwise(times))
    within = [b - a for a, b in gaps if b > begin and a < end]
    others = [b - a for a, b in gaps if b <= begin or a >= end]
    return max(within) / statistics.median(others)


def stalled(url: str, stream: bytes, other: bytes) -> float:
    """`gap_ratio` of a stream, during which another request is sent."""

    async def run() -> float:
        async with client_of(url) as client, aclosing(parts_of(client, stream)) as response:
            found: Parts = []
            sent, left = None, AFTER
            async for part in response:
                found.append(part)
                if sent is None and len(found) == BEFORE:
                    sent = asyncio.create_task(received(client, other))
                left -= sent is not None and sent.done()
                if not left:
                    break
            if sent is None or not sent.done():
                raise ServerFailed(f"a stream of {len(found)} parts ended before the other answer")
            inserted = answer_of(*sent.result())
        times = [at for at, event in events(found) if piece(event)]
        return gap_ratio(times, inserted.begin, inserted.times[0])

    return asyncio.run(run())


# --- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A server that can be started.

    Parameters
    ----------
    name : str
        A recipe, or `TRANSFORMERS`.
    command : tuple of str
        Arguments of Python.
    shown : str
        What a user would type, without the folders of this machine.
    is_own : bool
        Whether it is this project's server.
    python : str
        The interpreter of its environment.
    variables : dict of str to str
        Further environment variables.
    binds_threads : bool
        Whether it binds its threads to cores itself. A number of threads from outside would let
        several of them wait for each other on one core.
    """

    name: str
    command: tuple[str, ...]
    shown: str
    is_own: bool = True
    python: str = sys.executable
    variables: dict[str, str] = field(default_factory=dict)
    binds_threads: bool = False


class Server:
    """A server in its own process.

    Parameters
    ----------
    spec : Spec
    threads : int
        Of PyTorch; 0 for its default.
    log : Path
        File for its output.

    Raises
    ------
    ServerFailed
        If it does not listen in time.
    """

    def __init__(self, spec: Spec, threads: int, log: Path) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        variables["HF_HUB_OFFLINE"] = "1"  # which also keeps transformers from looking for updates
        if threads and not spec.binds_threads:
            variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        self.spec, self.log_file = spec, log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [spec.python, *spec.command],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | variables | spec.variables,
                start_new_session=True,  # with the processes that it starts
            )
        try:
            self.url = self._address()
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            # Some servers name their address before they listen.
            if found := ADDRESS.search(self.log):
                host, _, port = found[1].removeprefix("http://").rpartition(":")
                with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                    return found[1]
            if (code := self.process.poll()) is not None:
                raise ServerFailed(f"{self.spec.shown} ended with code {code}: {self.last_line}")
            time.sleep(0.05)
        raise ServerFailed(f"{self.spec.shown} was not ready after {START_S} seconds")

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        """The last line of the output that names an error, or the last, without local folders."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
        line = (errors or lines or ["no output"])[-1]
        for path, name in ((sys.executable, "python"), (sys.prefix, "."), (str(ROOT), ".")):
            line = line.replace(path, name)
        return line[:300]

    @property
    def resident(self) -> int:
        """Resident memory in bytes; Linux only."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def pause(self) -> None:
        """Stop the server; it takes no CPU time until `resume`.

        All of its processes: those of vLLM's engine poll while they wait.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of its processes have ended
            os.killpg(self.process.pid, number)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let a paused server run meanwhile."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def close(self) -> None:
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._signal(signal.SIGKILL)


# --- statistics ----------------------------------------------------------------------------------

PERCENTILES = (25, 50, 75, 95, 99)


def plural(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients} clients"


def ratio(loads: list[Load], others: list[Load]) -> list[float]:
    """Of answers per second, for each round."""
    return [a.per_second / b.per_second for a, b in zip(loads, others, strict=True)]


def summary(name: str, clients: int, loads: list[Load]) -> dict[str, Any]:
    """JSON values of the rounds of a server at a number of clients; times in milliseconds."""
    answers = [answer for load in loads for answer in load.answers]
    times = {
        "ttft_ms": [answer.ttft for answer in answers],
        "gap_ms": [gap for answer in answers for gap in answer.gaps],
        "total_ms": [answer.total for answer in answers],
    }
    return {
        "server": name,
        "clients": clients,
        "rounds": [
            {"seconds": of.seconds, "answers": len(of.answers), "tokens": of.tokens} for of in loads
        ],
        "answers_per_s": spread([of.per_second for of in loads]),
        "tokens_per_s": spread([of.tokens / of.seconds for of in loads]),
        **{key: percentiles(values) for key, values in times.items()},
    }


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """`PERCENTILES` in milliseconds; ``None`` without any values."""
    if not seconds:
        return None
    found = 1e3 * np.percentile(seconds, PERCENTILES)
    return {f"p{p}": value for p, value in zip(PERCENTILES, found.tolist(), strict=True)}
