"""Measure the server: ``python benchmarks/serve.py``.

Starts ``vlmfast serve`` once for each of ``--recipes`` and ``transformers serve``, and sends all of
them the same requests for captions, greedy and streamed. Each request has an image that its server
has not seen before: a scene, in which one pixel has the number of the request.

==============  ================================================================================
``throughput``  answers per second of 1, 4 and 16 clients, each of which sends its next request as
                soon as it has its answer: over those of 1 client, and over those of
                ``transformers serve``; with the times to the first token, between pieces of text,
                and to the end of the answer
``memory``      resident memory of a new server after 2,000 requests over that after 200
``gap``         largest gap in a stream while a request with 8 images is read, over the stream's
                median gap without it
==============  ================================================================================

All ratios of ``throughput`` and ``gap`` are within one round. In a round each number of clients is
measured on one server after the other, and each round begins with another server. Servers that wait
for their turn are stopped by a signal, so that they take no CPU time. Reports medians with
quartiles, over rounds for ratios and throughput and over the requests of all rounds for times.

* The clients run in one process on the same machine. They read server-sent events with httpx2, and
  a piece of text has the time at which the client reads it. Servers may send several tokens in one.
* Answers end with the model's end token, or after ``--max-tokens``. Those of `none` are compared
  with those of ``transformers serve``. Near ties may go another way in half precision, since
  batches compute sums in another order; compare with ``--dtype float32``.
* ``transformers serve`` runs with ``--continuous-batching``. Where it cannot use it for a model it
  answers one request after the other, which the results say. It has no ``gap``: it reads the images
  after the stream has ended.
* ``--vllm`` adds ``vllm serve`` for each of ``--recipes``, with its plug-in where the recipe is
  not `none`, to ``throughput``. It runs in an environment of its own. ``--only images videos tiny``
  compares vLLM with and without the plug-in, see `inside_vllm.py`.
* For ``memory`` the prefix cache has 32 MiB, so that it is full after the first
  200 requests. For ``gap`` the end token is suppressed, so that the stream is long enough.

Where ``transformers serve`` cannot run, add ``--no-transformers``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import httpx2
import inside_vllm
from ask import TINY
from harness import Row
from inside_vllm import VLLM, overridden, vllm_name, vllm_spec
from PIL import Image
from servers import (
    Loads,
    Requests,
    Server,
    ServerFailed,
    Spec,
    in_rounds,
    load,
    plural,
    ratio,
    stalled,
    summary,
)

from vlmfast.core.help import count
from vlmfast.eval.bench import rotated
from vlmfast.eval.results import write_json
from vlmfast.integrations.vllm import export
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

TRANSFORMERS = "transformers serve"
TRANSFORMERS_MODULE = "transformers.cli.transformers"
SCALING = {4: 1.7, 16: 2.2}  # least ratio over one client, by clients
GROWN = 1.05  # largest ratio of `memory`
MEMORY_REQUESTS = 200, 2000  # of `memory`: requests before each look
MEMORY_CLIENTS, CACHE_BYTES = 4, 32 << 20
IMAGES = 8  # of the request of `gap`
STREAM = 2048  # most tokens of the stream of `gap`
FELL_BACK = "does not support continuous batching"


# --- servers -------------------------------------------------------------------------------------


def specs(args: argparse.Namespace, model: str, folder: str, *more: str) -> list[Spec]:
    """All servers of a run.

    Parameters
    ----------
    model : str
        The model for ``vlmfast serve``.
    folder : str
        The same for ``transformers serve``, and its name in the API.
    more : str
        Further options of ``vlmfast serve``.
    """
    common = ("--device", args.device, "--dtype", args.dtype)
    found = []
    for recipe in args.recipes:
        options = ("--recipe", recipe, *common, *more)
        command = ("-m", "vlmfast", "serve", model, "--port", "0", "--name", folder, *options)
        found.append(Spec(recipe, command, shlex.join(["vlmfast", "serve", args.model, *options])))
    if args.transformers:
        options = ("--continuous-batching", *common)
        address = ("--host", "127.0.0.1", "--port", "0")
        command = ("-m", TRANSFORMERS_MODULE, "serve", folder, *address, *options)
        shown = shlex.join(["transformers", "serve", args.model, *options])
        found.append(Spec(TRANSFORMERS, command, shown, is_own=False))
    return found


def vllm_specs(args: argparse.Namespace, exported: Path, folder: str) -> list[Spec]:
    """vLLM once for each recipe: ``none`` is vLLM itself, others need its plug-in.

    Parameters
    ----------
    exported : Path
        The model for vLLM.
    folder : str
        Its name in the API.
    """
    off = () if args.caches else ("--no-enable-prefix-caching", "--mm-processor-cache-gb", "0")
    return [
        vllm_spec(args, vllm_name(of), (*off, *overridden(of)), exported, folder, args.model)
        for of in args.recipes
    ]


@dataclass
class Job:
    """A run.

    Parameters
    ----------
    args : Namespace
    scratch : Path
        Empty folder.
    scenes : list of PIL.Image.Image
    details : dict
        What the results contain beside the rows.
    """

    args: argparse.Namespace
    scratch: Path
    scenes: list[Image.Image]
    details: dict[str, Any] = field(default_factory=lambda: {"servers": {}})

    @property
    def folder(self) -> str:
        """The model, as ``transformers serve`` names it."""
        return str(TINY) if self.args.model == "tiny" else self.args.model

    def requests(self, model: str | None = None) -> Requests:
        return Requests(self.scenes, model or self.folder)

    @contextmanager
    def started(self, spec: Spec, requests: Requests, clients: int) -> Iterator[Server]:
        """A server that has answered two requests of each client."""
        log = self.scratch / f"{re.sub(r'[^a-z0-9]', '-', spec.name)}.log"
        with closing(Server(spec, self.args.threads, log)) as server:
            load(server.url, requests.bodies(2 * clients, self.args.max_tokens), clients)
            about = self.details["servers"].setdefault(spec.name, {"command": spec.shown})
            if spec.name == TRANSFORMERS:
                about["continuous_batching"] = FELL_BACK not in server.log
            yield server

    @contextmanager
    def paused(self, specs: list[Spec], requests: Requests, clients: int) -> Iterator[list[Server]]:
        """Servers that have answered and wait for their turn."""
        with ExitStack() as stack:
            servers = []
            for spec in specs:
                servers.append(stack.enter_context(self.started(spec, requests, clients)))
                servers[-1].pause()
            yield servers


# --- throughput ----------------------------------------------------------------------------------


def measured(job: Job) -> Loads:
    """All servers, interleaved."""
    args, requests = job.args, job.requests()
    off = () if args.caches else ("--prefix-cache-bytes", "0")
    every = specs(args, args.model, job.folder, *off)
    if args.vllm is not None:
        export(args.model, job.scratch / "vllm")
        every += vllm_specs(args, job.scratch / "vllm", job.folder)

    def bodies(clients: int) -> list[bytes]:
        return requests.bodies(args.requests, args.max_tokens)

    with job.paused(every, requests, max(args.clients)) as servers:
        return in_rounds(servers, args.rounds, args.clients, bodies)


def throughput(job: Job) -> list[Row]:
    found = measured(job)
    job.details["loads"] = [summary(name, clients, of) for (name, clients), of in found.items()]
    return [*scaling(found), *against(found), *equality(found)]


def scaling(found: Loads) -> list[Row]:
    """Throughput of several clients over that of one."""
    table = []
    for (name, clients), loads in found.items():
        if clients > 1:
            bound = None if is_other(name) else SCALING.get(clients)
            what = f"answers per second, {clients} clients over 1, `{name}`"
            ratios = ratio(loads, found[name, 1])
            table.append(Row("throughput", what, ratios, bound, least=True))
    return table


def is_other(name: str) -> bool:
    """Whether a server is another project's."""
    return name.startswith((TRANSFORMERS, VLLM))


def against(found: Loads) -> list[Row]:
    """Throughput over that of ``transformers serve``, and of vLLM with the same recipe."""
    table = []
    for (name, clients), loads in found.items():
        if is_other(name):
            continue
        for rival in (TRANSFORMERS, vllm_name(name)):
            other = found.get((rival, clients))
            if other is None:
                continue
            what = f"answers per second, `{name}` over `{rival}`, {plural(clients)}"
            bound = 1.0 if rival == TRANSFORMERS else None
            table.append(Row("throughput", what, ratio(loads, other), bound, least=True))
    return table


def equality(found: Loads) -> list[Row]:
    """The share of answers equal to those of other servers under the same recipe."""
    table = []
    for (name, clients), loads in found.items():
        rivals = [] if is_other(name) else [vllm_name(name)]
        for rival in [TRANSFORMERS, *rivals] if name == "none" else rivals:
            other = found.get((rival, clients))
            if other is None:
                continue
            shares = [
                statistics.mean(a.text == b.text for a, b in zip(x.answers, y.answers, strict=True))
                for x, y in zip(loads, other, strict=True)
            ]
            what = f"share of answers equal to those of `{rival}`, {plural(clients)}"
            table.append(Row("throughput", what, shares))
    return table


# --- memory, gap ---------------------------------------------------------------------------------


def memory(job: Job) -> list[Row]:
    """Resident memory after many requests over that after few."""
    args, table = job.args, []
    few, many = MEMORY_REQUESTS
    sizes = job.details["memory"] = []
    cache = ("--prefix-cache-bytes", str(CACHE_BYTES))
    for spec in specs(args, args.model, job.folder, *cache):
        requests, after = job.requests(), []
        with job.started(spec, requests, MEMORY_CLIENTS) as server:
            sent = 0
            for count in (few, many):
                while sent < count:  # in parts, so that not all images are kept
                    part = min(few, count - sent)
                    bodies = requests.bodies(part, args.max_tokens)
                    load(server.url, bodies, MEMORY_CLIENTS)
                    sent += part
                after.append(server.resident)
        sizes.append({"server": spec.name, "requests": [few, many], "bytes": after})
        what = f"resident memory after {many:,} requests over that after {few:,}, `{spec.name}`"
        bound = GROWN if spec.is_own else None
        table.append(Row("memory", what, [after[1] / after[0]], bound))
        print(f"memory: {spec.name}: {after}", file=sys.stderr)
    return table


def gap(job: Job) -> list[Row]:
    """Largest gap over median gap, in each round."""
    args = job.args
    folder = str(endless(Path(job.folder), job.scratch / "endless"))
    requests = job.requests(folder)
    own = [spec for spec in specs(args, folder, folder) if spec.is_own]
    found: dict[str, list[float]] = {spec.name: [] for spec in own}
    with job.paused(own, requests, 1) as servers:
        for number in range(args.rounds):
            (stream,) = requests.bodies(1, STREAM)
            (other,) = requests.bodies(1, 1, IMAGES)
            for server in rotated(servers, number):
                with server.awake():
                    found[server.spec.name].append(stalled(server.url, stream, other))
    return [
        Row("gap", f"largest gap over median gap, {IMAGES} images, `{name}`", ratios)
        for name, ratios in found.items()
    ]


def endless(folder: Path, new: Path) -> Path:
    """A model that does not generate its end tokens: links to its files, with other settings."""
    name = "generation_config.json"
    new.mkdir()
    for file in folder.iterdir():
        if file.name != name:
            (new / file.name).symlink_to(file.resolve())
    settings = json.loads((folder / name).read_text(encoding="utf-8"))
    ends = settings["eos_token_id"]
    settings["suppress_tokens"] = ends if isinstance(ends, list) else [ends]
    (new / name).write_text(json.dumps(settings), encoding="utf-8")
    return new


# --- the command ---------------------------------------------------------------------------------

MEASURED: dict[str, Callable[[Job], list[Row]]] = {
    "throughput": throughput,
    "memory": memory,
    "gap": gap,
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, dtype="bfloat16", device=harness.DEVICE, threads=2, fresh=False, out=None
    )
    add, every = parser.add_argument, (*MEASURED, *inside_vllm.NAMES)
    add("--only", nargs="+", choices=every, metavar="NAME", help=f"of {', '.join(every)}")
    add("--model", default="tiny", help="tiny, a folder or a hub id (%(default)s)")
    add("--recipes", nargs="+", default=["none", "balanced"], help="a server each (%(default)s)")
    add("--clients", nargs="+", type=count, default=[1, 4, 16], help="1 among them (%(default)s)")
    add("--requests", type=count, default=96, help="for each number of clients (%(default)s)")
    add("--rounds", type=count, default=3, help="(%(default)s)")
    add("--max-tokens", type=count, default=64, help="of an answer (%(default)s)")
    add("--transformers", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--vllm",
        type=Path,
        metavar="PYTHON",
        help="also vLLM: the Python of an environment in which vllm serve starts, with the plug-in",
    )
    add(
        "--caches",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefix caches, and vLLM's of processed images",
    )
    args = parser.parse_args(argv)
    if 1 not in args.clients:
        parser.error("--clients must have 1 among them")
    args.clients, args.recipes = sorted(set(args.clients)), list(dict.fromkeys(args.recipes))
    args.only = args.only or tuple(MEASURED)
    inside = set(args.only) & set(inside_vllm.NAMES)
    if inside and (inside < set(args.only) or args.vllm is None):
        parser.error(f"{', '.join(inside_vllm.NAMES)} need --vllm, and a run of their own")
    if "gap" in args.only and args.model != "tiny" and not Path(args.model).is_dir():
        parser.error("gap needs the folder of a model: choose others with --only")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.vllm is not None and not args.vllm.is_file():
        raise SystemExit(f"--vllm {args.vllm} is no Python interpreter")
    if args.only[0] in inside_vllm.NAMES:
        return inside_vllm.run(args, argv)
    # The threads are those of the servers.
    report = harness.begin("serve.py", argv, argparse.Namespace(device=args.device)) | {
        "dtype": args.dtype,
        "threads": args.threads,
        "rounds": args.rounds,
        "requests": args.requests,
    }
    out = harness.path_of(args, "serve", args.device, args.dtype)
    scenes = [image_example(EVAL_SEED_START + number).image for number in range(args.requests)]
    table: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(args, Path(scratch), scenes)
        for name, measure in MEASURED.items():
            if name not in args.only:
                continue
            try:
                table += measure(job)
            except (ServerFailed, httpx2.HTTPError) as error:
                raise SystemExit(f"{name}: {type(error).__name__}: {error}") from error
            print(f"{name}: done", file=sys.stderr)
            report |= job.details | {"rows": [row.report() for row in table]}
            write_json(out, report)
    print(f"\n{args.model}, {args.dtype}, {report['device']}\n")
    if "loads" in job.details:
        loads = {f"{of['server']}, {plural(of['clients'])}": of for of in job.details["loads"]}
        columns = ("answers_per_s", "tokens_per_s", "ttft_ms.p50", "gap_ms.p50", "total_ms.p50")
        print(harness.shown(loads, *columns) + "\n")
    print(harness.table(table))
    print(f"\nwritten: {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
