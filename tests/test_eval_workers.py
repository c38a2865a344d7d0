"""Batches, shards of a run, multiple processes, and recovery after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval_data import MMMU, write_rows
from eval_fakes import FakeVLM
from interrupts import interruptible
from vlmfast.errors import VLMFastError
from vlmfast.eval import workers
from vlmfast.eval.commands import add_eval, run_eval
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


def test_batches_on_the_shipped_model(tmp_path, tiny):
    """With tokens kept, dropped at random or evicted: a row does not depend on its neighbours."""

    class Few(Shapes):
        def docs(self, limit, seed):
            return [doc for doc in super().docs(limit, seed) if doc.kind == "question"][::6]

    for recipe in ("none", "random:budget=0.4", "snapkv:0.5"):
        alone, batch = (
            evaluate(tiny, Few(), recipe, tmp_path / str(n), 1, batch_size=n) for n in (1, 4)
        )
        for doc, sample in alone.samples.items():
            assert batch.samples[doc] == sample


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
    from argparse import ArgumentParser

    from vlmfast.eval import commands

    monkeypatch.setattr(commands, "_load", lambda *_: FakeVLM())
    parser = ArgumentParser()
    add_eval(parser)
    for part in (0, 1):
        words = ["shapes", "--limit", "1", "--out", str(tmp_path), "--batch-size", "3"]
        run_eval(parser.parse_args([*words, "--shard", f"{part}/2"]))
        assert "| `none` |" in capsys.readouterr().out
    assert len(read(tmp_path / "shapes" / "none").samples) == 21
    with pytest.raises(VLMFastError, match="--batch-size 2 must be at least 1, and 1 with --sess"):
        run_eval(parser.parse_args(["shapes", "--batch-size", "2", "--session"]))


LAUNCHED = """
import sys
sys.path.insert(0, {tests!r})
from eval_fakes import FakeVLM
from vlmfast.eval import commands
from vlmfast.cli import main
broken = "--broken" in sys.argv
commands._load = lambda *_: FakeVLM(delay=0.01, fail=(lambda _: True) if broken else None)
sys.exit(main(["eval", "shapes", "--limit", "2", "--out", sys.argv[1], "--recipe", "random"]))
"""


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": ("accelerate.commands.launch", "--cpu", "--num_processes=2"),
}


def launch(tmp_path: Path, launcher: str, *words: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.format(tests=str(Path(__file__).parent)))
    return subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(script), str(tmp_path / "o"), *words],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"},
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
    theirs = json.loads((tmp_path / "o" / "shapes" / "random" / "results.json").read_text())
    assert theirs["n-samples"]["shapes"]["effective"] == DOCS


@pytest.mark.slow
def test_launched_processes_stop_together(tmp_path):
    done = launch(tmp_path, "torchrun", "--broken")
    assert done.returncode != 0
    assert "samples failed, more than 10" in done.stderr


SHARD = """
import signal, sys
sys.path.insert(0, {tests!r})
from eval_fakes import FakeVLM
from vlmfast.eval import commands
from vlmfast.cli import main
vlm, last = FakeVLM(delay=0.01), int(sys.argv[3])
vlm.fail = lambda question: len(vlm.asked) == last and signal.pause()
commands._load = lambda *_: vlm
commands._refused = lambda *_: {{}}
out, shard = sys.argv[1:3]
words = ["eval", "shapes", "--limit", "2", "--out", out, "--recipe", "random:seed=1"]
sys.exit(main([*words, "--shard", shard]))
"""


@pytest.mark.slow
def test_two_shards_one_killed_and_repeated_give_the_bytes_of_a_whole_run(tmp_path, capsys):
    """Answers byte for byte, and the report too where the times are the same."""
    from vlmfast.cli import main

    (tmp_path / "script.py").write_text(SHARD.format(tests=str(Path(__file__).parent)))
    sharded, alone = tmp_path / "sharded", tmp_path / "alone"

    def start(shard: str, last: int) -> subprocess.Popen:
        """The command for one shard; it never finishes its question number ``last``."""
        words = [tmp_path / "script.py", sharded, shard, last]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.Popen([sys.executable, *map(str, words)], env=env)

    first, second = start("0/2", 0), start("1/2", 9)
    file = sharded / "shapes" / "none" / "samples.1-of-2.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < 8:
        assert second.poll() is None, "the shard has ended"
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert first.wait() == 0
    assert start("1/2", 0).wait() == 0

    runs = {}
    for recipe in ("none", "random:seed=1"):
        run = evaluate(FakeVLM(), "shapes", recipe, alone, limit=2, model="tiny")
        own = [*(sharded / "shapes" / run.path.name).glob("samples.*-of-2.jsonl")]
        assert len(own) == 2
        lines = sorted(line for path in own for line in path.read_bytes().splitlines())
        assert lines == sorted((run.path / "samples.jsonl").read_bytes().splitlines())
        runs[run.path.name] = run

    # Times are measured, and differ. With those of the whole run, the report is the same.
    for name, run in runs.items():
        lines = (run.path / "timings.jsonl").read_bytes().splitlines(keepends=True)
        for path in (sharded / "shapes" / name).glob("timings.*-of-2.jsonl"):
            ids = {json.loads(line)["doc_id"] for line in path.read_bytes().splitlines()}
            path.write_bytes(b"".join(x for x in lines if json.loads(x)["doc_id"] in ids))
    written = []
    for folder in (sharded, alone):
        assert main(["report", str(folder), "--out", str(tmp_path / f"{folder.name}-report")]) == 0
        report = tmp_path / f"{folder.name}-report"
        written.append([(report / name).read_bytes() for name in ("report.md", "report.json")])
    capsys.readouterr()
    assert written[0] == written[1]
    # A shard that is missing changes both.
    file.unlink()
    main(["report", str(sharded), "--out", str(tmp_path / "half")])
    assert (tmp_path / "half" / "report.json").read_bytes() != written[1][1]


# --- interrupted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--batch-size", "3"), ("--shard", "0/1")])
def test_interrupted_command_says_so_and_resumes(tmp_path, whole, monkeypatch, more):
    """Nothing is lost that was answered; of a batch, the answers of the one that was cut short."""
    from vlmfast.cli import main
    from vlmfast.eval import commands

    def interrupt(question: str) -> bool:
        if len(vlm.asked) == 30:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    vlm = FakeVLM(fail=interrupt)
    monkeypatch.setattr(commands, "_load", lambda *_: vlm)
    words = ["eval", "shapes", "--limit", str(LIMIT), "--out", str(tmp_path), *more]
    with interruptible():
        assert main(words) == 130
    kept = len(read(tmp_path / "shapes" / "none").samples)
    assert kept == (24 if "--batch-size" in more else 29)
    vlm = FakeVLM()
    assert main(words) == 0
    assert len(vlm.asked) == DOCS - kept
    assert read(tmp_path / "shapes" / "none").samples == whole.samples


# --- killed --------------------------------------------------------------------------------------

KILLED = """
import signal, sys
sys.path.insert(0, {tests!r})
from eval_fakes import FakeVLM
from vlmfast.eval.runner import evaluate
from vlmfast.eval.tasks import find_task
task = find_task("mmmu", data=sys.argv[2])
vlm, last = FakeVLM(delay=float(sys.argv[3])), int(sys.argv[4])
vlm.fail = lambda question: len(vlm.asked) == last and signal.pause()
evaluate(vlm, task, "random", out=sys.argv[1])
"""


@pytest.mark.slow  # kills at moments that are waited for are among the tests of the runner
def test_run_killed_at_random_equals_an_undisturbed_one(tmp_path):
    """Before the first sample, between samples and in the middle of one."""
    kills = 10
    rows = [
        row | {"id": f"{row['id'].rpartition('_')[0]}_{number}"}
        for number, row in enumerate(MMMU * 12)
    ]
    data = write_rows(tmp_path / "validation.parquet", rows)
    (tmp_path / "script.py").write_text(KILLED.format(tests=str(Path(__file__).parent)))
    file = tmp_path / "b" / "mmmu" / "random" / "samples.jsonl"

    def start(out: str, delay: float, last: int = 0) -> subprocess.Popen:
        """A separate run that never finishes its question number ``last``."""
        words = [tmp_path / "script.py", tmp_path / out, data, delay, last]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.Popen([sys.executable, *map(str, words)], env=env)

    undisturbed = start("a", 0)
    draw, done, moments = random.Random(0), 0, []
    for _ in range(kills):
        # However late the kill comes, the last answer is never written before it.
        process = start("b", 0.02, last=len(rows) - done)
        # Wait until it writes, or less; then for a random time.
        waits = done + 1 < len(rows) and (not moments or draw.random() < 2 / 3)
        while waits and process.poll() is None:
            if file.exists() and file.read_bytes().count(b"\n") > done:
                break
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 1.2 / kills if waits else 2.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = file.read_bytes().count(b"\n") if file.exists() else 0
        moments.append(done)
    assert moments == sorted(moments)
    assert 0 < done < len(rows), moments
    assert start("b", 0).wait() == 0
    assert undisturbed.wait() == 0
    whole = tmp_path / "a" / "mmmu" / "random" / "samples.jsonl"

    def by_id(path: Path) -> list[bytes]:
        return sorted(path.read_bytes().splitlines(), key=lambda line: json.loads(line)["doc_id"])

    assert len(by_id(whole)) == len(rows)
    assert by_id(file) == by_id(whole)
    assert file.read_bytes() == whole.read_bytes()
    timings = read(file.parent).timings
    assert set(timings) == {json.loads(line)["doc_id"] for line in by_id(whole)}
