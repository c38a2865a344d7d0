"""The engine benchmark: its rows, and what its ratios are sensitive to."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_script import script
from tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.engine.engine import Engine
from vlmfast.engine.sequence import Sequence

pytestmark = pytest.mark.cold

engine = script("engine")
LENGTHS = (3, 9, 5, 6)
PAUSE = 0.3  # seconds


def loaded(*_: Any) -> VLM:
    """A model that generates a space from time to time, with which a piece of a stream ends."""
    vlm = VLM(*build_llava())
    (space,) = vlm.processor.tokenizer.encode(" ", add_special_tokens=False)[-1:]
    vlm.model.generation_config.sequence_bias = [[[space], 2.0]]
    return vlm


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """No collection before each repeat: it takes long in the process of the tests."""
    monkeypatch.setattr(engine.harness, "gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture
def job() -> Any:
    """Four requests with answers of different lengths."""
    vlm = loaded()
    vlm.model.generation_config.eos_token_id = None
    captions = [
        Request(
            engine.CAPTION_QUESTION,
            make_image(seed=seed),
            generation={"max_new_tokens": length, "do_sample": False},
        )
        for seed, length in enumerate(LENGTHS)
    ]
    return engine.Job(vlm, captions, [2, 4], 2, warmup=0, images=2, short=3, new_tokens=6)


class Clock:
    """A clock that only advances when it is told to."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def slow(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float) -> None:
        """Advance the clock by ``seconds`` in every call of a function."""
        function = getattr(owner, name)

        def slowed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            self.calls += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, slowed)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_reports_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "load", loaded)
    monkeypatch.setattr(engine, "RECIPES", ("none", "snapkv:0.5"))  # for short prompts
    out, threads = tmp_path / "out.json", torch.get_num_threads()
    argv = ["--quick", "--device", "cpu", "--threads", str(threads), "--out", str(out)]
    assert engine.main(argv) == 0
    report = json.loads(out.read_text())
    assert report["threads"] == threads and report["device"] == "cpu" and report["repeat"] == 1
    assert {"date", "driver", "load_average", "dtype", "captions"} <= set(report)
    assert report["command"].startswith("python benchmarks/engine.py --quick")
    rows = report["rows"]
    assert list(dict.fromkeys(row["name"] for row in rows)) == engine.NAMES
    for row in rows:
        assert row["least"] is (row["name"] in ("batching", "padded"))
        assert row["q1"] == row["median"] == row["q3"] == row["ratios"][0] > 0
        assert row["verdict"] in (("ok", "missed") if row["bound"] else ("",))
    gaps = [row["what"] for row in rows if row["name"] == "gap"]
    ends = ("`none`", "`snapkv:0.5`", "chunks of 512", "chunks of 256")
    assert all(what.endswith(end) for what, end in zip(gaps, ends, strict=True))
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if line.startswith("| `")]) == len(rows)


# --- joins, overhead -----------------------------------------------------------------------------


def test_parts_exclude_what_is_nested() -> None:
    now = Clock()
    parts = engine.Parts(now)
    with parts.inside("prefill"):
        now.now += 1
        with parts.inside("joins"):
            now.now += 2
        now.now += 4
    with parts.inside("passes"):
        now.now += 8
    now.now += 16
    parts.count()
    assert parts.spent == {"prefill": 5, "joins": 2, "passes": 8, engine.REST: 16}


def test_parts_are_complete_and_functions_restored(job: Any) -> None:
    before = [getattr(*of) for functions in engine.PARTS.values() for of in functions]
    spent = engine.parts_of(job.vlm, job.captions, 2)
    assert set(spent) == {*engine.PARTS, engine.REST} and min(spent.values()) > 0
    assert [getattr(*of) for functions in engine.PARTS.values() for of in functions] == before


@pytest.mark.parametrize("slow", [0.0, 5.0])
def test_slow_join_is_in_the_ratio(job: Any, monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
    now, joins, passes = Clock(), Clock(), Clock()
    monkeypatch.setattr(engine, "cpu_clock", lambda vlm: lambda: now() + joins() + passes())
    for clock, part, seconds in ((joins, "joins", slow), (passes, "passes", 1.0)):
        for owner, name in engine.PARTS[part]:
            clock.slow(monkeypatch, owner, name, seconds)
    now.slow(monkeypatch, *engine.PARTS["before submission"][0], 2.0)
    job.rows, job.repeat = [4], 1
    join, overhead, before, after = engine.overheads(job)
    assert joins.calls >= 2 * len(LENGTHS) and passes.calls >= max(LENGTHS) - 1
    assert join.ratios == [joins() / passes()]
    assert (join.verdict == "missed") == (slow > 0)
    total = now() + joins() + passes()
    assert overhead.ratios == pytest.approx([(now() + joins()) / total])
    assert before.ratios == [8 / total] and after.ratios == pytest.approx([joins() / total])


# --- batching, padded ----------------------------------------------------------------------------


def test_variants_generate_the_same_tokens(job: Any) -> None:
    variants = engine.variants_of(job.vlm, job.captions, job.rows)
    names = [("ask", 1), ("ask_many", 2), ("padded", 2), ("ask_many", 4), ("padded", 4)]
    assert list(variants) == names
    for answer in variants.values():
        assert [len(tokens) for tokens in answer()] == list(LENGTHS)
    assert engine.differing(job) == []


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_other_tokens_are_wrong(job: Any, monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """Other tokens in the model's dtype are near ties if they are equal in a wider one."""
    padded = engine.padded

    def differs(vlm: VLM, captions: Any, rows: int) -> Any:
        found = padded(vlm, captions, rows)
        if rows == 4 and not (exact and vlm is not job.vlm):
            found[1][-1] += 1
        return found

    monkeypatch.setattr(engine, "padded", differs)
    table = engine.throughputs(job)
    wrong = {(row.name, row.what[-6:]) for row in table if row.wrong}
    assert wrong == (set() if exact else {("padded", "4 rows")})
    for row in table:
        assert len(row.ratios) == (0 if row.wrong else job.repeat)
        assert row.report()["verdict"] == ("WRONG" if row.wrong else row.verdict)
    assert engine.harness.table(table).count("WRONG") == len(wrong)


def test_captions_end_where_the_model_ends_them(tiny: VLM) -> None:
    (first, second) = engine.captions_of(tiny, 2)
    for request in (first, second):
        length = request.generation["max_new_tokens"]
        answer = tiny.ask(request.question, request.images, max_new_tokens=64, do_sample=False)
        assert length == min(len(answer.token_ids), engine.LONGEST) > 10
    assert first.images != second.images


# --- gap -----------------------------------------------------------------------------------------


def test_pause_in_prefill_is_a_gap(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, paused, seen = Engine._read, [], []

    def pausing(self: Engine, sequence: Sequence) -> bool:
        if sequence.max_new_tokens == 1 and not paused:
            paused.append(sequence)
            time.sleep(PAUSE)
        return read(self, sequence)

    monkeypatch.setattr(Engine, "_read", pausing)
    monkeypatch.setattr(engine.harness, "gap_ratio", lambda *given: seen.extend(given) or 9.0)
    assert engine.streamed(job.vlm, job.captions[0], job.long(1)) == 9.0
    times, submitted, first, opened = seen
    within = [b - a for a, b in pairwise(times) if b > submitted and a < first]
    assert paused and max(within) >= PAUSE
    assert times[0] < opened < submitted < first < times[-1] and times == sorted(times)
    assert engine.BEFORE + engine.AFTER <= len(times) < engine.STREAM
    assert not job.vlm.engine._unfinished


def test_short_stream_is_an_error(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STREAM", engine.BEFORE)
    with pytest.raises(SystemExit, match="ended before the long prefill"):
        engine.streamed(job.vlm, job.captions[0], job.long(1))
    assert not job.vlm.engine._unfinished


def test_chunk_size_is_restored(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int | None] = []
    monkeypatch.setattr(
        engine, "streamed", lambda vlm, *_: used.append(vlm.engine.prefill_chunk_size) or 2.0
    )
    before = job.vlm.engine.prefill_chunk_size
    assert engine.gap(job, "none", 512) == 2.0
    assert used == [512] and job.vlm.engine.prefill_chunk_size == before


# --- classes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "ratio"), [(0.0, 1.0), (14.0, 8.0)])
def test_ratio_of_classes(
    job: Any, monkeypatch: pytest.MonkeyPatch, slow: float, ratio: float
) -> None:
    """A step takes a second, and more where prompts of different lengths are decoded together."""
    now, decode = Clock(), Engine._decode

    def slowed(self: Engine) -> None:
        lengths = {sequence.prompt_length for sequence in self._scheduler.active}
        now.now += 2.0 + (slow if len(lengths) > 1 else 0.0)
        decode(self)

    monkeypatch.setattr(engine, "clock", lambda device: now())
    monkeypatch.setattr(Engine, "_decode", slowed)
    (row,) = engine.classes(job)
    assert row.ratios == [ratio] * job.repeat
    assert row.verdict == ("missed" if slow else "ok") and "3 rows of " in row.what
