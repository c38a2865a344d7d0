"""Work out a deployment on paper: ``python benchmarks/scaling.py --rate 1000``.

Reads the result of ``benchmarks/serve.py`` and multiplies what one server did there: requests per
second, times and lengths. The bytes of a request, of the features of its image and of its KV cache
are counted with the shipped model. Nothing is measured here.

============================  =================================================================
servers                       rate over the answers per second of one server
requests in flight            rate times the seconds of one answer (Little's law)
KV caches                     requests in flight times the bytes of one cache
bytes into the servers        rate times the bytes of a request
============================  =================================================================

Results of another model and machine are read with ``--results``.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmfast import VLM, Recipe
from vlmfast.api.encoding import check_encodable, encode_image
from vlmfast.errors import RecipeError
from vlmfast.eval.report import markdown_table
from vlmfast.eval.results import write_json
from vlmfast.scenes.examples import CAPTION_QUESTION, EVAL_SEED_START, image_example

RESULTS = Path(__file__).parent / "results" / "serve-cpu-bfloat16.json"


@dataclass(frozen=True)
class Bytes:
    """Bytes of one request with one image.

    Parameters
    ----------
    request : float
        Its body, with the image as a data URL.
    features : float or None
        Of the kept tokens, where features carry the recipe.
    cache : float
        Keys and values of the prompt and the answer.
    """

    request: float
    features: float | None
    cache: float


@dataclass(frozen=True)
class Plan:
    """What a rate needs.

    Parameters
    ----------
    servers : int
    in_flight : float
        Requests that are being answered at one time.
    cache_bytes, request_bytes_s, feature_bytes_s : float
        Of all requests in flight, and per second.
    """

    servers: int
    in_flight: float
    cache_bytes: float
    request_bytes_s: float
    feature_bytes_s: float | None


def plan(rate: float, answers_per_s: float, answer_s: float, of: Bytes) -> Plan:
    """Multiply one server up to ``rate`` requests per second."""
    in_flight = rate * answer_s
    features = None if of.features is None else rate * of.features
    return Plan(
        math.ceil(rate / answers_per_s),
        in_flight,
        in_flight * of.cache,
        rate * of.request,
        features,
    )


def bytes_of(vlm: VLM, recipe: str, images: int, new_tokens: int) -> Bytes:
    """Means over scenes; the cache is that of the prompt and ``new_tokens`` more."""
    requests, features, caches = [], [], []
    parsed: Recipe = vlm.recipe(recipe)
    try:
        check_encodable(parsed)
        encodable = True
    except RecipeError:
        encodable = False
    for number in range(images):
        image = image_example(EVAL_SEED_START + number).image.convert("RGB")
        file = io.BytesIO()
        image.save(file, "PNG")
        requests.append(len(base64.b64encode(file.getvalue())) + len(CAPTION_QUESTION) + 300)
        if encodable:
            features.append(encode_image(vlm.adapter, image, parsed).features.nbytes)
        stats = vlm.ask(CAPTION_QUESTION, images=image, recipe=parsed, max_new_tokens=1).stats
        caches.append(stats.kv_bytes + new_tokens * vlm.adapter.bytes_per_token())
    return Bytes(
        statistics.mean(requests),
        statistics.mean(features) if features else None,
        statistics.mean(caches),
    )


def load_of(report: dict[str, Any], server: str, clients: int) -> dict[str, Any]:
    """The measured load of a server at a number of clients."""
    for of in report["loads"]:
        if (of["server"], of["clients"]) == (server, clients):
            return of
    known = sorted({f"{of['server']} at {of['clients']}" for of in report["loads"]})
    raise SystemExit(f"no results of {server} at {clients} clients; there are {', '.join(known)}")


def mib(size: float | None) -> str:
    return "–" if size is None else f"{size / 2**20:,.1f} MiB"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rate", type=float, default=1000, help="requests per second (%(default)s)")
    add("--clients", type=int, default=16, help="of each server (%(default)s)")
    add("--recipes", nargs="+", default=["none", "balanced"], help="(%(default)s)")
    add("--model", default="tiny", help="whose bytes are counted (%(default)s)")
    add("--images", type=int, default=16, help="that are counted (%(default)s)")
    add("--results", type=Path, default=RESULTS, help="of benchmarks/serve.py")
    add("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args(argv)
    if args.rate <= 0 or args.images < 1:
        parser.error("--rate and --images must be above 0")
    report = json.loads(args.results.read_text(encoding="utf-8"))
    vlm = VLM.from_pretrained(args.model, device="cpu", dtype=report["dtype"])
    about, found, rows = report["environment"], {}, []
    print(
        f"measured: {report['date']}, {report['dtype']}, {about['cpu']}, {about['cores']} cores, "
        f"torch {about['packages']['torch']}, {report['command']}\n"
    )
    print(f"{args.rate:,.0f} requests per second, {args.clients} clients on each server\n")
    for recipe in args.recipes:
        of = load_of(report, recipe, args.clients)
        answers = of["answers_per_s"]["median"]
        seconds = of["total_ms"]["p50"] / 1e3
        tokens = sum(r["tokens"] for r in of["rounds"]) / sum(r["answers"] for r in of["rounds"])
        own = bytes_of(vlm, recipe, args.images, round(tokens))
        needed = plan(args.rate, answers, seconds, own)
        found[recipe] = {"one": asdict(own), "plan": asdict(needed)}
        cells = [
            f"`{recipe}`",
            f"{answers:.2f}",
            f"{seconds:.2f} s",
            f"{needed.servers:,}",
            f"{needed.in_flight:,.0f}",
            mib(needed.cache_bytes),
            mib(needed.request_bytes_s),
            mib(needed.feature_bytes_s),
        ]
        rows.append(cells)
    head = ["recipe", "answers/s of one", "p50 of an answer", "servers", "in flight", "KV caches"]
    print(markdown_table([*head, "requests, per s", "or features, per s"], rows))
    if args.json is not None:
        write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
