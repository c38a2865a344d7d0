"""Measure latency and memory growth of the demo: ``python benchmarks/demo.py``.

Starts ``vlmfast demo`` and sends the requests of its page without a browser: each user has their
own page, uploads the example image and asks through Gradio's queue.

==========  ====================================================================================
``ready``   from the command until the page is served
``first``   from a click on *Ask* to the first text on the page, for the first question of a
            page: includes processor, vision tower and prefill of the full model
``whole``   from the same click to the end of both answers, including drawings and counters
``two``     ``whole`` for two concurrent users, relative to one user
``grown``   resident memory of the server after the last question, relative to the 20th
==========  ====================================================================================

Each user asks a few questions, some of them followed by *Look again at full detail*, and closes the
page. Every answer must equal the known answer of the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import secrets
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from ask import RESULTS, ROOT
from gradio_client.utils import apply_diff

from vlmfast.eval.bench import provenance, spread
from vlmfast.eval.results import write_json

IMAGE = ROOT / "examples" / "picture.png"
QUESTIONS = {
    "What is in the bottom left?": "yellow triangle",
    "What color is the circle?": "purple",
}
AIMS = {"ready_s": 20.0, "first_s": 3.0, "two_ratio": 2.5, "grown": 1.05}
START_S, ANSWER_S = 120, 120


class Server:
    """``vlmfast demo`` in its own process."""

    def __init__(self, port: int, log: Path) -> None:
        command = [sys.executable, "-m", "vlmfast", "demo", "--port", str(port)]
        begin = time.perf_counter()
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while not (found := re.search(r"http://\S+", log.read_text())):
            if self.process.poll() is not None or time.perf_counter() - begin > START_S:
                self.close()
                raise SystemExit(f"the demo did not start:\n{log.read_text()}")
            time.sleep(0.05)
        self.address = found[0]
        httpx.get(self.address).raise_for_status()
        self.ready_s = time.perf_counter() - begin

    @property
    def resident(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class Page:
    """Sends the requests of a browser for the image tab; a context manager."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=f"{address}/", timeout=ANSWER_S)
        self.session = secrets.token_hex(8)
        config = self.http.get("config").json()
        self.values = {part["id"]: part["props"].get("value") for part in config["components"]}
        self.ids = {
            name: part["id"]
            for part in config["components"]
            if (name := part["props"].get("elem_id"))
        }
        self.events = {
            target: event["id"]
            for event in config["dependencies"]
            for target, trigger in event["targets"]
            if trigger in ("click", "upload")
        }
        self.wiring = {event["id"]: event for event in config["dependencies"]}
        # Closing this stream tells the server that the page was closed.
        self.alive = self.http.stream("GET", f"gradio_api/heartbeat/{self.session}")

    def __enter__(self) -> Page:
        self.alive.__enter__()
        with IMAGE.open("rb") as file:
            (path,) = self.http.post("gradio_api/upload", files={"files": file}).json()
        file = {"path": path, "orig_name": IMAGE.name, "meta": {"_type": "gradio.FileData"}}
        event = self.events[self.ids["image-media"]]
        about = {"data": [file, 1], "fn_index": event, "session_hash": self.session}
        self.http.post("gradio_api/run/predict", json=about).raise_for_status()
        return self

    def __exit__(self, *exception: object) -> None:
        self.alive.__exit__(*exception)
        self.http.close()

    def ask(self, question: str, recipe: str = "balanced") -> tuple[float, float]:
        """Seconds to the first text and to the end of both answers."""
        self.values[self.ids["image-question"]] = question
        self.values[self.ids["recipe"]] = recipe
        return self._run("image-ask", QUESTIONS[question])

    def look_again(self, question: str) -> tuple[float, float]:
        return self._run("image-again", QUESTIONS[question])

    def _run(self, button: str, expected: str) -> tuple[float, float]:
        shown_at_once = self.events[self.ids[button]]  # in the browser, then the server is asked
        (event,) = (e for e in self.wiring.values() if e["trigger_after"] == shown_at_once)
        data = [self.values[part] for part in event["inputs"]]
        chats = [event["outputs"].index(self.ids[f"image-{side}"]) for side in ("full", "recipe")]
        about = {"data": data, "fn_index": event["id"], "session_hash": self.session}
        begin, first, shown = time.perf_counter(), None, []
        self.http.post("gradio_api/queue/join", json=about).raise_for_status()
        where = {"session_hash": self.session}
        with self.http.stream("GET", "gradio_api/queue/data", params=where) as answer:
            for line in answer.iter_lines():
                message = json.loads(line.partition(":")[2]) if line.startswith("data:") else {}
                if message.get("msg") == "process_generating":
                    new = message["output"]["data"]
                    # The first message is complete, later ones are differences.
                    shown = [
                        apply_diff(old, part) for old, part in zip(shown, new, strict=True)
                    ] if shown else new  # fmt: skip
                    if first is None and said(shown[chats[0]]):
                        first = time.perf_counter() - begin
                elif message.get("msg") == "process_completed":
                    if not message["success"]:
                        raise SystemExit(f"the demo failed: {message['output']}")
                    break
        whole = time.perf_counter() - begin
        for chat in chats:
            if expected not in said(shown[chat]):
                raise SystemExit(f"expected {expected!r}, got {shown[chat]}")
        return first, whole


def said(card: Any) -> str:
    """The last answer in the HTML of a side, else an empty text."""
    found = re.findall(r'<p class="answer">(.*?)</p>', card) if isinstance(card, str) else []
    return found[-1].strip("… ") if found else ""


def visit(address: str, questions: int) -> list[tuple[float, float]]:
    """One user with a few questions; every third one is *Look again at full detail*."""
    times, asked = [], list(QUESTIONS)
    with Page(address) as page:
        for number in range(questions):
            question = asked[number // 3 % len(asked)]
            again = number % 3 == 2
            times.append(page.look_again(question) if again else page.ask(question))
    return times


def first_questions(address: str) -> tuple[float, float]:
    """The first question of a new page."""
    with Page(address) as page:
        return page.ask(next(iter(QUESTIONS)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.port, Path(folder) / "log")
        try:
            return _measured(server, args)
        finally:
            server.close()


def _measured(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    cold, _ = first_questions(server.address)
    alone, together = [], []
    with ThreadPoolExecutor(2) as users:
        for _ in range(args.repeats):  # interleaved, so that other load affects both
            alone.append(first_questions(server.address))
            asking = [users.submit(first_questions, server.address) for _ in range(2)]
            together += [user.result() for user in asking]
    asked, resident = 1 + 3 * args.repeats, {}
    while asked < args.questions:
        count = min(args.visit, 20 - asked % 20)
        visit(server.address, count)
        asked += count
        if asked % 20 == 0:
            resident[asked] = server.resident
            print(f"{asked} questions: {resident[asked] / 1e6:.1f} MB", file=sys.stderr)
    runs = (("one", alone), ("two", together))
    whole = {name: spread([t for _, t in times]) for name, times in runs}
    return {
        "ready_s": server.ready_s,
        "cold_first_s": cold,
        "first_s": spread([first for first, _ in alone]),
        "whole_s": whole,
        "two_ratio": whole["two"]["median"] / whole["one"]["median"],
        "two_worst_ratio": max(t for _, t in together) / whole["one"]["median"],
        "resident_bytes": resident,
        "grown": resident[max(resident)] / resident[20],
    }


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=6, help="runs per number of users, 1 to 6")
    parser.add_argument("--questions", type=int, default=200, help="in total, a multiple of 20")
    parser.add_argument("--visit", type=int, default=9, help="questions per user")
    parser.add_argument("--port", type=int, default=7918)
    parser.add_argument("--out", type=Path, default=RESULTS / "demo-tiny-cpu.json")
    args = parser.parse_args(arguments)
    if not 1 <= args.repeats <= 6 or args.questions < 40 or args.questions % 20:
        parser.error("--repeats must be 1 to 6; --questions a multiple of 20, at least 40")
    result = measure(args)
    found = {
        "ready_s": result["ready_s"],
        "first_s": result["first_s"]["median"],
        "two_ratio": result["two_ratio"],
        "grown": result["grown"],
    }
    report = provenance("demo.py", arguments, "cpu") | {
        "gradio": importlib.metadata.version("gradio"),
        **result,
        "aims": AIMS,
    }
    write_json(args.out, report)
    for name, value in found.items():
        print(f"{name:<10} {value:6.3f}  (at most {AIMS[name]:g})")
    print(f"first, of the server  {result['cold_first_s']:.3f} s")
    print(f"one user, a question  {result['whole_s']['one']['median']:.3f} s")
    print(f"two users, the same   {result['whole_s']['two']['median']:.3f} s")
    return int(any(value > AIMS[name] for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
