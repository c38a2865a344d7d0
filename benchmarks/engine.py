"""Measure the engine: ``python benchmarks/engine.py``.

The shipped `tiny` answers requests on one CPU thread in bfloat16 by default. Every figure is a
ratio of times of the same run, and what is compared is measured in turn, so that other load affects
both. Reports medians with quartiles, and whether they meet their bounds.

============  ==================================================================================
``joins``     time in which rows join and leave the batch, over the bare forward passes of the
              same `VLM.ask_many`, with the largest number of ``--rows``
``overhead``  the part of `VLM.ask_many` that is neither prefill nor bare forward pass, for each
              number of ``--rows``
``batching``  tokens per second of `VLM.ask_many` over those of `VLM.ask`
``padded``    tokens per second of `VLM.ask_many` over those of Hugging Face's ``generate`` on
              batches of the same size, padded on the left
``gap``       largest gap between two tokens of a stream while a prompt with 8 images is
              prefilled, over the stream's median gap without that prompt
``classes``   a decode step of seven short rows and a long one, over the mean of the decode steps
              of eight short rows and of the long row alone
============  ==================================================================================

The first four answer 32 requests for captions. Each ends after the number of tokens of its caption,
14 to 40. A batch of Hugging Face runs until its longest caption ends, and only the tokens of the
captions count. All variants therefore generate the same number of tokens, and a ratio of tokens per
second is one of times. The tokens must be equal in the run's dtype, or where batches change the
last bits of sums in a wider one. Otherwise no ratio is reported and the exit code is 1.

``joins`` and ``overhead`` are CPU time, on a GPU wall time. Parts exclude what is nested in them:

* `prefill`: `Engine._read`, from the vision tower to the first token, without joins.
* `bare forward pass`: `decode.run_step`, from the embedding to the logits of a
  decode step, without sampling. Buffers that grow in a step are part of it.
* `before submission`: opening and processing of the images, chat template, checks of the
  arguments and ``generate``'s set-up.
* `after submission`: everything else, such as scheduling, joins and leaves, sampling of all tokens
  but the first, and the text of the answers.

``overhead`` is the sum of the last two over the whole call. Each of the two also has a row. The
bound is for the part after submission, since the part before it is the same for every engine.

A gap of ``gap`` counts if it overlaps the time from the submission of the long prompt to its first
token. Its images are opened and processed before that, by another thread. Prompts are
prefilled whole except in the rows that name a chunk size.

Two further properties are tested elsewhere: `tests/test_graphs.py` counts captured decode steps,
and ``python tools/against.py PATH`` compares a single `VLM.ask` with another checkout.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import Any
from unittest import mock

import harness
import torch
from ask import Times
from harness import Row

from vlmfast import VLM, Request
from vlmfast.api import request as request_api
from vlmfast.core.help import count
from vlmfast.engine import decode
from vlmfast.engine.batches import Batches
from vlmfast.engine.decode import Batch
from vlmfast.engine.engine import Engine
from vlmfast.engine.stats import clock
from vlmfast.scenes.examples import CAPTION_QUESTION, EVAL_SEED_START, image_example

# The functions whose time is that of a part, with the module or class in which callers find them.
# If the engine decodes or joins through other functions, only this table changes.
PARTS = {
    "before submission": [(request_api, "sequence_of_request")],
    "prefill": [(Engine, "_read")],
    "joins": [(Batches, "join"), (Batches, "leave"), (Batch, "reserve")],
    "passes": [(decode, "run_step")],
}
REST = "rest"
JOINS, OVERHEAD = 0.03, 0.04
BATCHING = {4: 1.9, 16: 2.5, 32: 2.5}  # by rows
PADDED = {4: 1.3, 16: 1.3, 32: 1.15}
RECIPES = ("none", "pyramiddrop", "mustdrop", "zipvl", "snapkv:0.5", "hired:0.3+lookm:0.7")
CHUNKS = (512, 256)
GAP, CHUNKED_GAP, CLASSES = 15, 6, 1.3
LONGEST = 40  # tokens of a caption
STREAM = 1024  # most tokens of a stream
BEFORE, AFTER = 24, 8  # tokens of a stream before and after the long prompt
WARM = 2  # first decode steps that are left out


@dataclass
class Job:
    """A model, its requests and the settings of a run.

    Parameters
    ----------
    captions : list of Request
        Each has one image and ends after the number of tokens of its caption.
    rows : list of int
        Batch sizes.
    images : int
        Of a long prompt.
    short : int
        Rows that are decoded together with a long one.
    new_tokens : int
        Of the rows of ``classes``.
    """

    vlm: VLM
    captions: list[Request]
    rows: list[int]
    repeat: int
    warmup: int = 1
    images: int = 8
    short: int = 7
    new_tokens: int = 24

    def long(self, max_new_tokens: int, **more: Any) -> Request:
        """A request with many images."""
        images = [image_example(EVAL_SEED_START + number).image for number in range(self.images)]
        generation = {"max_new_tokens": max_new_tokens, "do_sample": False}
        return Request(CAPTION_QUESTION, images, generation=generation, **more)

    def turns(self, variants: dict[Any, Callable[[], Any]]) -> dict[Any, list[Any]]:
        return harness.interleaved(variants, self.repeat, warmup=self.warmup)

    def seconds(self, variants: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
        """Wall times of all variants."""
        device = self.vlm.adapter.device
        return self.turns({name: partial(seconds, device, of) for name, of in variants.items()})


# --- joins, overhead -----------------------------------------------------------------------------


class Parts:
    """The time of a thread, by part; a part excludes what is nested in it.

    Parameters
    ----------
    now : callable
        Returns seconds.

    Attributes
    ----------
    spent : Counter
        Seconds by part; `REST` is outside of all parts.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.spent = now, Counter()
        self._inside, self._since = [REST], now()

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        self.count()
        self._inside.append(part)
        try:
            yield
        finally:
            self.count()
            self._inside.pop()

    def count(self) -> None:
        """Add the time up to now to the innermost part."""
        now = self.now()
        self.spent[self._inside[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable) -> Callable:
        """``function``, whose time belongs to ``part``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part):
                return function(*args, **kwargs)

        return call


def cpu_clock(vlm: VLM) -> Callable[[], float]:
    """CPU seconds of the process; on a GPU wall time, after waiting for its work."""
    device = vlm.adapter.device
    return partial(clock, device) if device.type == "cuda" else time.process_time


def parts_of(vlm: VLM, captions: Many[Request], rows: int) -> Counter:
    """Seconds of `PARTS` and `REST` of an `ask_many`, all of which runs in this thread."""
    parts = Parts(cpu_clock(vlm))
    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                timed = parts.timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
        parts.count()
        parts.spent.clear()  # the set-up above
        vlm.ask_many(captions, batch_size=rows)
        parts.count()
    return parts.spent


def overheads(job: Job) -> list[Row]:
    """`joins` and `overhead`."""
    variants = {rows: partial(parts_of, job.vlm, job.captions, rows) for rows in job.rows}
    found = job.turns(variants)
    largest = max(job.rows)
    ratios = [spent["joins"] / spent["passes"] for spent in found[largest]]
    what = f"joins and leaves over bare forward passes, {largest} rows"
    table = [Row("joins", what, ratios, JOINS)]
    for rows, samples in found.items():
        totals = [sum(spent.values()) for spent in samples]
        pairs = list(zip(samples, totals, strict=True))
        before = [spent["before submission"] / total for spent, total in pairs]
        outside = [1 - (spent["prefill"] + spent["passes"]) / total for spent, total in pairs]
        after = [both - one for both, one in zip(outside, before, strict=True)]
        what = f"time outside prefill and bare forward passes, {rows} rows"
        table += [
            Row("overhead", what, outside),
            Row("overhead", f"before submission, {rows} rows", before),
            Row("overhead", f"after submission, {rows} rows", after, OVERHEAD),
        ]
    return table


# --- batching, padded ----------------------------------------------------------------------------

Tokens = list[list[int]]  # of each request


def one_by_one(vlm: VLM, captions: Many[Request]) -> Tokens:
    return [vlm.ask(r.question, r.images, **r.generation).token_ids for r in captions]


def batched(vlm: VLM, captions: Many[Request], rows: int) -> Tokens:
    return [answer.token_ids for answer in vlm.ask_many(captions, batch_size=rows)]


def padded(vlm: VLM, captions: Many[Request], rows: int) -> Tokens:
    """Hugging Face's ``generate`` on padded batches; of each row only the tokens of its caption."""
    found = []
    for start in range(0, len(captions), rows):
        batch = captions[start : start + rows]
        lengths = [request.generation["max_new_tokens"] for request in batch]
        inputs = harness.padded(vlm, CAPTION_QUESTION, [request.images for request in batch])
        generation = {"max_new_tokens": max(lengths), "do_sample": False}
        generation["pad_token_id"] = vlm.processor.tokenizer.pad_token_id
        ids = vlm.model.generate(**inputs, **generation)
        new = ids[:, inputs["input_ids"].shape[1] :].tolist()
        found += [row[:length] for row, length in zip(new, lengths, strict=True)]
    return found


def variants_of(
    vlm: VLM, captions: Many[Request], rows: Many[int]
) -> dict[tuple[str, int], Callable[[], Tokens]]:
    """The three ways to answer, by name and batch size."""
    found: dict[tuple[str, int], Callable[[], Tokens]] = {
        ("ask", 1): partial(one_by_one, vlm, captions)
    }
    for number in rows:
        found["ask_many", number] = partial(batched, vlm, captions, number)
        found["padded", number] = partial(padded, vlm, captions, number)
    return found


def differing(job: Job) -> list[tuple[str, int]]:
    """Variants whose tokens are not those of `ask`, in the model's dtype and in a wider one.

    Batches compute sums in another order, so that near ties may go another way in half precision.
    """
    found = _differing(variants_of(job.vlm, job.captions, job.rows))
    if not found:
        return []
    compared = variants_of(widened(job.vlm), job.captions, job.rows)
    return _differing({name: compared[name] for name in [("ask", 1), *found]})


def widened(vlm: VLM) -> VLM:
    """The same model in a wider dtype."""
    dtype = torch.float32 if vlm.adapter.dtype.itemsize == 2 else torch.float64
    return VLM(copy.deepcopy(vlm.model).to(dtype), vlm.processor, prefix_cache_bytes=0)


def _differing(variants: dict[tuple[str, int], Callable[[], Tokens]]) -> list[tuple[str, int]]:
    wanted, *others = ((name, answer()) for name, answer in variants.items())
    return [name for name, tokens in others if tokens != wanted[1]]


def throughputs(job: Job) -> list[Row]:
    """`batching` and `padded`; all variants generate the same number of tokens."""
    wrong = differing(job)
    times = job.seconds(variants_of(job.vlm, job.captions, job.rows))
    table = []
    for name, reference, bounds, text in (
        ("batching", "ask", BATCHING, "`ask_many` over `ask`"),
        ("padded", "padded", PADDED, "`ask_many` over padded batches of Hugging Face"),
    ):
        for rows in job.rows:
            own, other = ("ask_many", rows), (reference, 1 if reference == "ask" else rows)
            ratios = [b / a for a, b in zip(times[own], times[other], strict=True)]
            bad = own in wrong or other in wrong
            what, bound = f"{text}, {rows} rows", bounds.get(rows)
            table.append(Row(name, what, [] if bad else ratios, bound, least=True, wrong=bad))
    return table


def seconds(device: torch.device, function: Callable[[], Any]) -> float:
    begin = clock(device)
    function()
    return clock(device) - begin


# --- gap -----------------------------------------------------------------------------------------


def streamed(vlm: VLM, short: Request, long: Request) -> float:
    """`harness.gap_ratio` of the stream of a short prompt, while a long one is prefilled."""
    own, other = Times(time.monotonic), Times(time.monotonic)
    generation = short.generation | {"max_new_tokens": STREAM, "streamer": own}
    with vlm.submit(replace(short, generation=generation)) as stream:
        length = partial(len, own.times)
        next(iter(stream))  # from now on it is decoded between the blocks of other prompts
        vlm.engine.wait(lambda: stream.done or length() >= BEFORE)
        opened = time.monotonic()
        generation = long.generation | {"streamer": other}
        handle = vlm.submit(replace(long, generation=generation))
        handle.result()
        last = length() + AFTER
        vlm.engine.wait(lambda: stream.done or length() >= last)
        if stream.done:
            stream.result()  # which raises its error
            raise SystemExit(f"gap: the stream of {length()} tokens ended before the long prefill")
    return harness.gap_ratio(own.times, handle.sequence.submitted, other.times[0], opened)


def gap(job: Job, recipe: str, size: int | None) -> float:
    """The ratio of one stream, while a prompt is prefilled under ``recipe`` in chunks or whole."""
    with mock.patch.object(job.vlm.engine, "prefill_chunk_size", size):
        return streamed(job.vlm, job.captions[0], job.long(1, recipe=recipe))


def gaps(job: Job) -> list[Row]:
    """`gap`."""
    wanted = [*((recipe, None) for recipe in RECIPES), *(("none", size) for size in CHUNKS)]
    found = job.turns({key: partial(gap, job, *key) for key in wanted})
    table = []
    for (recipe, size), ratios in found.items():
        what = f"largest gap over median gap, {job.images} images, `{recipe}`"
        what += "" if size is None else f", chunks of {size}"
        table.append(Row("gap", what, ratios, GAP if size is None else CHUNKED_GAP))
    return table


# --- classes -------------------------------------------------------------------------------------


def step(vlm: VLM, together: Many[Request]) -> float:
    """Median seconds of a decode step of all requests together."""
    times: list[float] = []
    decode, device = Engine._decode, vlm.adapter.device

    def timed(engine: Engine) -> None:
        complete = len(engine._scheduler.active) == len(together)
        spent = seconds(device, partial(decode, engine))
        if complete:
            times.append(spent)

    with mock.patch.object(Engine, "_decode", timed):
        vlm.ask_many(together, batch_size=len(together))
    return median(times[WARM:])


def classes(job: Job) -> list[Row]:
    """`classes`."""
    generation = {"max_new_tokens": job.new_tokens, "do_sample": False}
    short = replace(job.captions[0], generation=generation)
    long = job.long(job.new_tokens)
    variants = {
        "together": [short] * job.short + [long],
        "short": [short] * (job.short + 1),
        "long": [long],
    }
    found = job.turns({name: partial(step, job.vlm, rows) for name, rows in variants.items()})
    samples = zip(found["together"], found["short"], found["long"], strict=True)
    ratios = [together / mean(apart) for together, *apart in samples]
    few, many = (job.vlm.inputs(r.question, r.images)["input_ids"].shape[1] for r in (short, long))
    what = f"step of {job.short} rows of {few:,} tokens and one of {many:,} over the mean apart"
    return [Row("classes", what, ratios, CLASSES)]


# --- the command ---------------------------------------------------------------------------------

MEASURED: dict[tuple[str, ...], Callable[[Job], list[Row]]] = {
    ("joins", "overhead"): overheads,
    ("batching", "padded"): throughputs,
    ("gap",): gaps,
    ("classes",): classes,
}
NAMES = [name for names in MEASURED for name in names]


def load(args: argparse.Namespace) -> VLM:
    return VLM.from_pretrained(
        "tiny", device=args.device, dtype=getattr(torch, args.dtype), prefix_cache_bytes=0
    )


def captions_of(vlm: VLM, count: int) -> list[Request]:
    """Requests for captions, each limited to the tokens of its caption, with the end token."""
    found = []
    for number in range(count):
        image = image_example(EVAL_SEED_START + number).image
        asked = {"max_new_tokens": LONGEST, "do_sample": False}
        length = len(vlm.ask(CAPTION_QUESTION, image, **asked).token_ids)
        found.append(
            Request(CAPTION_QUESTION, image, generation=asked | {"max_new_tokens": length})
        )
    return found


def prepared(args: argparse.Namespace) -> Job:
    vlm = load(args)
    captions = captions_of(vlm, args.captions)
    # From now on every variant generates the same number of tokens.
    vlm.model.generation_config.eos_token_id = None
    job = Job(vlm, captions, args.rows, args.repeat)
    return replace(job, warmup=0, images=2, short=3, new_tokens=6) if args.quick else job


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, repeat=7, dtype="bfloat16", device=harness.DEVICE, threads=1, quick=False, out=None
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    add("--rows", nargs="+", type=count, default=[4, 16, 32], help="batch sizes (%(default)s)")
    add("--captions", type=count, default=32, help="requests for captions (%(default)s)")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.captions, args.repeat = [4], 4, 1
    args.rows = list(dict.fromkeys(args.rows))
    args.only = args.only or NAMES
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    report = harness.begin("engine.py", argv, args) | {
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "repeat": args.repeat,
        "captions": args.captions,
    }
    job, table = prepared(args), []
    for names, measure in MEASURED.items():
        if not set(names) & set(args.only):
            continue
        table += [row for row in measure(job) if row.name in args.only]
        print(f"{', '.join(names)}: done", file=sys.stderr)
    report["rows"] = [row.report() for row in table]
    print(f"\ntiny, {args.dtype}, {harness.conditions(report)}\n\n{harness.table(table)}")
    if args.out or not args.quick:
        harness.written(harness.path_of(args, "engine", args.device, args.dtype), report)
    return int(any(row.wrong for row in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
