"""Batches, shards of a run, multiple processes, and recovery after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.engine.commands import loads
from support.eval_fakes import FakeVLM, run
from support.interrupts import interruptible
from support.paths import ROOT, TESTS
from vlmfast.errors import VLMFastError
from vlmfast.eval import workers
from vlmfast.eval.results import read
from vlmfast.eval.runner import TooManyErrors, evaluate, part_of
from vlmfast.eval.shapes import Shapes

LIMIT = 2
DOCS = 21 * LIMIT


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return evaluate(FakeVLM(), "shapes", out=tmp_path_factory.mktemp("o"), limit=LIMIT)


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5, 100])
def test_batches_give_the_same_results(tmp_path, whole, size):
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT, batch_size=size)
    assert (run.path / "samples.jsonl").read_bytes() == (whole.path / "samples.jsonl").read_bytes()
    assert run.meta["batch_size"] == size


def test_failing_sample_does_not_affect_its_batch(tmp_path):
    def fail(question):
        return question.startswith("What does the sign")

    alone, batch = (
        evaluate(FakeVLM(fail=fail), "shapes", out=tmp_path / str(n), limit=LIMIT, batch_size=n)
        for n in (1, 4)
    )
    assert sum("error" in s for s in batch.samples.values()) >= LIMIT
    assert batch.samples == alone.samples
    vlm = FakeVLM(fail=lambda _: True)
    with pytest.raises(TooManyErrors, match="2 samples failed, more than 1"):
        evaluate(vlm, "shapes", out=tmp_path / "x", limit=1, batch_size=4, max_errors=1)


@pytest.mark.parametrize(("size", "session"), [(0, False), (-1, False), (2, True)])
def test_invalid_batch_sizes_are_refused(tmp_path, size, session):
    with pytest.raises(VLMFastError, match=f"batch_size is {size}; it must be at least 1"):
        evaluate(FakeVLM(), "shapes", out=tmp_path, limit=1, batch_size=size, session=session)


# --- shards --------------------------------------------------------------------------------------


def test_shards_cover_every_question_once():
    docs = Shapes().docs(3, 0)
    for parts in (1, 2, 5):
        split = [part_of(docs, part, parts) for part in range(parts)]
        assert sorted(doc.doc_id for of in split for doc in of) == sorted(d.doc_id for d in docs)
        images = [{doc.media_id for doc in of} for of in split]
        assert sum(map(len, images)) == len(set.union(*images))
        assert min(map(len, split)) > len(docs) / parts / 2
    for part, parts in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(VLMFastError, match="is invalid; of 4 shards, the first is 0/4"):
            part_of(docs, part, parts)


def test_shards_are_read_as_one_run(tmp_path, whole):
    for part in (2, 0, 1):
        run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT, shard=(part, 3))
    assert run.samples == whole.samples
    assert set(run.timings) == set(whole.samples)
    names = {file.name for file in run.path.iterdir()}
    assert {f"samples.{part}-of-3.jsonl" for part in range(3)} < names
    assert "samples.jsonl" not in names
    assert run.meta["shard"] == "2/3"
    assert [r["shard"] for r in run.meta["resumed"]] == ["0/3", "1/3"]
    # Any later run, in any shards, asks no question again.
    for shard in (None, (0, 2), (1, 2)):
        vlm = FakeVLM()
        evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT, shard=shard)
        assert not vlm.asked
    vlm = FakeVLM()
    assert len(evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT + 1).samples) == DOCS + 21
    assert len(vlm.asked) == 21


def test_shard_with_a_torn_line(tmp_path, whole):
    for part in (0, 1):
        run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT, shard=(part, 2))
    file = run.path / "samples.0-of-2.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read(run.path).samples) == DOCS - 1
    torn = file.read_bytes()
    # Another shard ignores it; its own repairs it.
    evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT, shard=(1, 2))
    assert file.read_bytes() == torn
    run = evaluate(FakeVLM(), "shapes", out=tmp_path, limit=LIMIT, shard=(0, 2))
    assert run.samples == whole.samples


def test_shard_without_questions(tmp_path, whole):
    vlm = FakeVLM()
    run = evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT, shard=(49, 50))
    assert not vlm.asked and not run.samples
    assert evaluate(vlm, "shapes", out=tmp_path, limit=LIMIT).samples == whole.samples


@pytest.mark.parametrize("text", ["4/4", "1", "a/b", "-1/2", "1/0", "0/2/3", ""])
def test_invalid_shards_are_refused(text):
    with pytest.raises(VLMFastError, match=r"is not i/n with i below n"):
        workers.chosen(text)


def test_shard_from_launcher_environment(monkeypatch):
    assert workers.chosen(None) is None
    assert workers.chosen(" 1/4 ") == (1, 4)
    assert workers.is_first()
    for key, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(key, value)
    assert workers.chosen(None) == (2, 4)
    assert not workers.is_first()
    with pytest.raises(VLMFastError, match="cannot be used under a launcher"):
        workers.chosen("1/4")


def test_command_takes_shards_and_batch_size(tmp_path, monkeypatch, capsys):
    loads(monkeypatch, lambda *_: FakeVLM())
    for part in (0, 1):
        words = ("shapes", "--limit", 1, "--out", tmp_path, "--batch-size", 3)
        run(*words, "--shard", f"{part}/2")
        assert "| `none` |" in capsys.readouterr().out
    assert len(read(tmp_path / "shapes" / "none").samples) == 21
    with pytest.raises(VLMFastError, match="--batch-size 2 must be 1 with --session"):
        run("shapes", "--batch-size", 2, "--session")


LAUNCHED = """
import sys
import pytest
sys.path.insert(0, {tests!r})
from support.eval_fakes import FakeVLM, run
from support.engine.commands import loads
from vlmfast.cli import main
broken = "--broken" in sys.argv
vlm = FakeVLM(delay=0.01, fail=(lambda _: True) if broken else None)
loads(pytest.MonkeyPatch(), lambda *_: vlm)
sys.exit(main(["eval", "shapes", "--limit", "2", "--out", sys.argv[1], "--recipe", "random"]))
"""


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": ("accelerate.commands.launch", "--cpu", "--num_processes=2"),
}


def launch(tmp_path: Path, launcher: str, *words: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.format(tests=str(TESTS)))
    return subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(script), str(tmp_path / "o"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_eval_under_launchers(launcher, tmp_path, whole):
    done = launch(tmp_path, launcher)
    assert done.returncode == 0, done.stderr[-2000:]
    assert read(tmp_path / "o" / "shapes" / "none").samples == whole.samples
    # One process prints, and its table covers the questions of both.
    assert done.stdout.count("| `none` |") == 1
    assert len(read(tmp_path / "o" / "shapes" / "random").samples) == DOCS


@pytest.mark.slow
def test_launched_processes_stop_together(tmp_path):
    done = launch(tmp_path, "torchrun", "--broken")
    assert done.returncode != 0
    assert "samples failed, more than 10" in done.stderr


# --- interrupted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--batch-size", "3"), ("--shard", "0/1")])
def test_interrupted_command_says_so_and_resumes(tmp_path, whole, monkeypatch, more):
    """Nothing is lost that was answered; of a batch, the answers of the one that was cut short."""
    from vlmfast.cli import main

    def interrupt(question: str) -> bool:
        if len(vlm.asked) == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    vlm = FakeVLM(fail=interrupt)
    loads(monkeypatch, lambda *_: vlm)
    words = ["eval", "shapes", "--limit", str(LIMIT), "--out", str(tmp_path), *more]
    with interruptible():
        assert main(words) == 130
    kept = len(read(tmp_path / "shapes" / "none").samples)
    assert kept == (24 if "--batch-size" in more else 29)
    vlm = FakeVLM()
    assert main(words) == 0
    assert len(vlm.asked) == DOCS - kept
    assert read(tmp_path / "shapes" / "none").samples == whole.samples
