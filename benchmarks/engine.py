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
``tower``     first tokens of eight prompts whose images are encoded in one pass of the vision
              tower, over those of prompts that are encoded one by one: wall time
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
token. Its images are opened and processed before that, by another thread. If the engine has
``prefill_chunk_size``, prompts are prefilled whole except in the rows that name a chunk size.

Two further properties are tested elsewhere: `tests/test_graphs.py` counts captured decode steps,
and ``python tools/against.py PATH`` compares a single `VLM.ask` with another checkout.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import ask
import torch

from vlmfast import VLM, Request
from vlmfast.api import request as request_api
from vlmfast.engine import decode
from vlmfast.engine.batches import Batches
from vlmfast.engine.decode import Batch
from vlmfast.engine.engine import Engine
from vlmfast.engine.stats import clock
from vlmfast.eval.bench import provenance, spread, turns
from vlmfast.eval.report import markdown_table
from vlmfast.eval.results import write_json
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
TOGETHER = 8  # prompts of ``tower``
TOWER_BYTES = 1 << 30  # more than their features take
WARM = 2  # first decode steps that are left out

Key = TypeVar("Key")
Result = TypeVar("Result")


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


@dataclass
class Row:
    """One line of the table.

    Parameters
    ----------
    name : str
        As in ``--only``.
    what : str
    ratios : list of float
        One for each repeat.
    bound : float, optional
    least : bool
        Whether it is a lower bound.
    wrong : bool
        Whether the tokens of what is compared differ.
    """

    name: str
    what: str
    ratios: list[float]
    bound: float | None = None
    least: bool = False
    wrong: bool = False

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "WRONG"
        if self.bound is None:
            return ""
        ratio = statistics.median(self.ratios)
        return "ok" if (ratio >= self.bound if self.least else ratio <= self.bound) else "missed"

    def report(self) -> dict[str, Any]:
        """JSON values."""
        shown = dict.fromkeys(("median", "q1", "q3")) if self.wrong else spread(self.ratios)
        return asdict(self) | shown | {"verdict": self.verdict}


def interleaved(
    job: Job, variants: dict[Key, Callable[[], Result]], warmup: int | None = None
) -> dict[Key, list[Result]]:
    """The results of all variants, which are called in `turns`.

    Parameters
    ----------
    warmup : int, optional
        Calls of each variant before the first repeat; the job's by default.
    """
    found: dict[Key, list[Result]] = {name: [] for name in variants}
    before = job.warmup if warmup is None else warmup
    for name, counts in turns(list(variants), job.repeat, warmup=before):
        gc.collect()
        result = variants[name]()
        if counts:
            found[name].append(result)
    return found


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
    found = interleaved(job, variants)
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
    processor, adapter = vlm.processor, vlm.adapter
    content = [{"type": "image"}, {"type": "text", "text": CAPTION_QUESTION}]
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    found = []
    for start in range(0, len(captions), rows):
        batch = captions[start : start + rows]
        lengths = [request.generation["max_new_tokens"] for request in batch]
        inputs = processor(
            images=[[request.images] for request in batch],
            text=[text] * len(batch),
            padding=True,
            padding_side="left",
            return_tensors="pt",
            **adapter.on_device(),
        )
        inputs = {
            key: value.to(adapter.device, adapter.dtype if value.is_floating_point() else None)
            for key, value in inputs.items()
        }
        generation = {"max_new_tokens": max(lengths), "do_sample": False}
        generation["pad_token_id"] = processor.tokenizer.pad_token_id
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
    wrong = differing(job)  # which is also the warm-up
    device = job.vlm.adapter.device
    variants = variants_of(job.vlm, job.captions, job.rows)
    times = interleaved(
        job, {name: partial(seconds, device, of) for name, of in variants.items()}, warmup=0
    )
    table = []
    for name, reference, bounds, text in (
        ("batching", "ask", BATCHING, "`ask_many` over `ask`"),
        ("padded", "padded", PADDED, "`ask_many` over padded batches of Hugging Face"),
    ):
        for rows in job.rows:
            own, other = ("ask_many", rows), (reference, 1 if reference == "ask" else rows)
            ratios = [b / a for a, b in zip(times[own], times[other], strict=True)]
            different = own in wrong or other in wrong
            ratios = [] if different else ratios
            what = f"{text}, {rows} rows"
            table.append(Row(name, what, ratios, bounds.get(rows), least=True, wrong=different))
    return table


def seconds(device: torch.device, function: Callable[[], Any]) -> float:
    begin = clock(device)
    function()
    return clock(device) - begin


# --- gap -----------------------------------------------------------------------------------------


class TokenTimes:
    """A streamer that notes when each token is emitted, by `time.monotonic`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        pass


@dataclass
class StreamTimes:
    """The tokens of a stream beside another request, by `time.monotonic`.

    Parameters
    ----------
    times : list of float
        When each token was emitted.
    opened, submitted, first : float
        When the other request was opened, when it was submitted, and its first token.
    """

    times: list[float]
    opened: float
    submitted: float
    first: float

    @property
    def largest(self) -> float:
        """The largest gap in seconds that overlaps the prefill of the other request."""
        gaps = pairwise(self.times)
        return max(b - a for a, b in gaps if b > self.submitted and a < self.first)

    @property
    def median(self) -> float:
        """The median gap in seconds without the other request."""
        gaps = pairwise(self.times)
        return statistics.median(b - a for a, b in gaps if b <= self.opened or a >= self.first)


def streamed(vlm: VLM, short: Request, long: Request) -> StreamTimes:
    """Stream the answer to a short prompt, and prefill a long one meanwhile."""
    own, other = TokenTimes(), TokenTimes()
    generation = short.generation | {"max_new_tokens": STREAM, "streamer": own}
    with vlm.submit(replace(short, generation=generation)) as stream:
        count = partial(len, own.times)
        next(iter(stream))  # from now on it is decoded between the blocks of other prompts
        vlm.engine.wait(lambda: stream.done or count() >= BEFORE)
        opened = time.monotonic()
        generation = long.generation | {"streamer": other}
        handle = vlm.submit(replace(long, generation=generation))
        handle.result()
        last = count() + AFTER
        vlm.engine.wait(lambda: stream.done or count() >= last)
        if stream.done:
            stream.result()  # which raises its error
            raise SystemExit(f"gap: the stream of {count()} tokens ended before the long prefill")
    return StreamTimes(own.times, opened, handle.sequence.submitted, other.times[0])


@contextmanager
def chunked(engine: Engine, size: int | None) -> Iterator[None]:
    """Prefill in chunks of ``size`` tokens, or whole; an engine without chunks is left alone."""
    if not hasattr(engine, "prefill_chunk_size"):
        yield
        return
    before, engine.prefill_chunk_size = engine.prefill_chunk_size, size
    try:
        yield
    finally:
        engine.prefill_chunk_size = before


def gap(job: Job, recipe: str, size: int | None) -> float:
    """The ratio of one stream, while a prompt is prefilled under ``recipe``."""
    with chunked(job.vlm.engine, size):
        found = streamed(job.vlm, job.captions[0], job.long(1, recipe=recipe))
    return found.largest / found.median


def gaps(job: Job) -> list[Row]:
    """`gap`."""
    wanted: list[tuple[str, int | None]] = [(recipe, None) for recipe in RECIPES]
    if hasattr(job.vlm.engine, "prefill_chunk_size"):
        wanted += [("none", size) for size in CHUNKS]
    found = interleaved(job, {key: partial(gap, job, *key) for key in wanted})
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
    return statistics.median(times[WARM:])


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
    found = interleaved(
        job, {name: partial(step, job.vlm, rows) for name, rows in variants.items()}
    )
    samples = zip(found["together"], found["short"], found["long"], strict=True)
    ratios = [together / statistics.mean(apart) for together, *apart in samples]
    few, many = (job.vlm.inputs(r.question, r.images)["input_ids"].shape[1] for r in (short, long))
    what = f"step of {job.short} rows of {few:,} tokens and one of {many:,} over the mean apart"
    return [Row("classes", what, ratios, CLASSES)]


# --- tower ---------------------------------------------------------------------------------------


def first_tokens(vlm: VLM, asked: Many[Request], limit: int | None) -> list[list[int]]:
    """The first tokens of prompts; ``limit`` is that of the engine."""
    before, vlm.engine.tower_batch_bytes = vlm.engine.tower_batch_bytes, limit
    try:
        return [answer.token_ids for answer in vlm.ask_many(asked, batch_size=len(asked))]
    finally:
        vlm.engine.tower_batch_bytes = before


def towers(job: Job) -> list[Row]:
    """`tower`."""
    table, device = [], job.vlm.adapter.device
    wide = widened(job.vlm)
    for recipe in ("none", "hired:0.2"):
        generation = {"max_new_tokens": 1, "do_sample": False}
        asked = [replace(r, generation=generation, recipe=recipe) for r in job.captions[:TOGETHER]]
        wrong = first_tokens(wide, asked, TOWER_BYTES) != first_tokens(wide, asked, None)
        found = interleaved(
            job,
            {
                limit: partial(seconds, device, partial(first_tokens, job.vlm, asked, limit))
                for limit in (None, TOWER_BYTES)
            },
        )
        pairs = zip(found[TOWER_BYTES], found[None], strict=True)
        ratios = [] if wrong else [together / apart for together, apart in pairs]
        table.append(Row("tower", f"{len(asked)} prompts, `{recipe}`", ratios, wrong=wrong))
    return table


# --- the command ---------------------------------------------------------------------------------

MEASURED: dict[tuple[str, ...], Callable[[Job], list[Row]]] = {
    ("joins", "overhead"): overheads,
    ("batching", "padded"): throughputs,
    ("gap",): gaps,
    ("classes",): classes,
    ("tower",): towers,
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


def markdown(table: Many[Row]) -> str:
    lines = []
    for row in table:
        measured = ""
        if not row.wrong:
            measured = "{median:.3f} [{q1:.3f}, {q3:.3f}]".format(**spread(row.ratios))
        bound = "" if row.bound is None else f"{'≥' if row.least else '≤'} {row.bound:g}"
        lines.append([f"`{row.name}`", row.what, measured, bound, row.verdict])
    return markdown_table(["", "what", "measured", "bound", ""], lines)


def conditions(report: dict[str, Any]) -> str:
    """Device, threads, versions and date of a result."""
    versions = report["environment"]["packages"]
    return (
        f"{report['device']}, threads: {report['threads']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {report['date']}"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    add("--rows", nargs="+", type=int, default=[4, 16, 32], help="batch sizes (%(default)s)")
    add("--captions", type=int, default=32, help="requests for captions (%(default)s)")
    add("--repeat", type=int, default=7, help="runs of each variant (%(default)s)")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=1, help="0: PyTorch's default (default: %(default)s)")
    add("--quick", action="store_true", help="checks the script, measures nothing")
    add("--out", type=Path, help="default: benchmarks/results/engine-....json")
    args = parser.parse_args(argv)
    if args.quick:
        args.rows, args.captions, args.repeat = [4], 4, 1
    least = {"rows": min(args.rows), "captions": args.captions, "repeat": args.repeat}
    for name, value in least.items():
        if value < 1:
            parser.error(f"--{name} must be at least 1")
    args.rows = list(dict.fromkeys(args.rows))
    args.only = args.only or NAMES
    return args


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.threads:
        torch.set_num_threads(args.threads)
    report = provenance("engine.py", arguments, args.device) | {
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
    print(f"\ntiny, {args.dtype}, {conditions(report)}\n\n{markdown(table)}")
    wrong = any(row.wrong for row in table)
    if args.quick and args.out is None:
        return int(wrong)
    out = args.out or ask.RESULTS / f"engine-{args.device.partition(':')[0]}-{args.dtype}.json"
    write_json(out, report)
    print(f"\nwritten: {out}", file=sys.stderr)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
