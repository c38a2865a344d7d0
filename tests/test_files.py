"""Full disks and unwritable paths: one clear error, and the old file stays."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import eval_fakes as fakes
import vlmfast
from vlmfast import Recipe, VLMFastError
from vlmfast.core import snapshot
from vlmfast.core.files import (
    make_folder,
    open_to_append,
    replace_bytes,
    replace_text,
    replacing,
)
from vlmfast.core.weights import StageWeights
from vlmfast.eval.data import read_subtitles
from vlmfast.eval.report import write_difference, write_report
from vlmfast.eval.results import write_json
from vlmfast.eval.runner import evaluate
from vlmfast.media import load_image, load_video
from vlmfast.tune.data import read as read_questions

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def torch_save(path: Path, value: int) -> None:
    with replacing(path) as file:
        torch.save({"value": torch.full((1 << 12,), value)}, file)


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "text": lambda path, value: replace_text(path, f"{value}" * 5000),
    "bytes": lambda path, value: replace_bytes(path, [b"%d" % value] * 5000),
    "json": lambda path, value: write_json(path, [value] * 5000),
    "recipe": lambda path, value: Recipe.parse(f"hired:0.{value}").save(path),
    "checkpoint": torch_save,
}
EVERY = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def refused(call: Callable[[], object], path: Path, reason: str) -> None:
    with pytest.raises(VLMFastError) as caught:
        call()
    assert str(caught.value) == f"{path} cannot be written: {reason}"


@EVERY
def test_file_is_replaced_atomically(tmp_path: Path, write) -> None:
    path = tmp_path / "file"
    write(path, 1)
    first = path.read_bytes()
    write(path, 2)
    assert path.read_bytes() != first and len(first) > 10
    write(path, 1)
    assert path.read_bytes() == first and list(tmp_path.iterdir()) == [path]


@EVERY
@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full disk", "interrupt"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, write, step, error) -> None:
    def fail(*_: object) -> None:
        raise error

    for old in (False, True):
        folder = tmp_path / str(old)
        folder.mkdir()
        path = folder / "file"
        if old:
            write(path, 1)
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            if error is FULL:
                refused(partial(write, path, 2), path, "No space left on device")
            else:
                with pytest.raises(KeyboardInterrupt):
                    write(path, 2)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@EVERY
def test_permissions_are_kept(tmp_path: Path, write) -> None:
    path = tmp_path / "file"
    umask = os.umask(0o027)
    try:
        write(path, 1)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        for mode in (0o600, 0o644, 0o660):
            path.chmod(mode)
            write(path, 2)
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(umask)


@EVERY
def test_links_are_not_followed(tmp_path: Path, write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the target nor at any name of a temporary file, even if someone knows it."""
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(secrets, "token_hex", lambda n: "known")
    for name in (".file.known.tmp", f".file.{os.getpid()}-{threading.get_ident()}.tmp"):
        (tmp_path / name).symlink_to(victim)
    refused(lambda: write(path, 1), path, "File exists")
    assert (tmp_path / ".file.known.tmp").is_symlink()  # it is not ours
    monkeypatch.undo()
    write(path, 1)
    path.unlink()
    for target in (victim, tmp_path / "nothing"):
        path.symlink_to(target)
        refused(lambda: write(path, 1), path, "Is a link, and links are not followed")
        assert path.is_symlink()
        path.unlink()
    assert victim.read_bytes() == b"precious" and not (tmp_path / "nothing").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@EVERY
def test_special_files_are_neither_replaced_nor_opened(tmp_path: Path, write) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    refused(lambda: write(path, 1), path, "Is not a regular file")
    refused(lambda: open_to_append(path), path, "Is not a regular file")
    assert stat.S_ISFIFO(path.lstat().st_mode) and list(tmp_path.iterdir()) == [path]


def test_evaluation_appends_to_its_own_files_alone(tmp_path: Path) -> None:
    run = evaluate(fakes.FakeVLM(), "shapes", out=tmp_path / "out", limit=1)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("samples.jsonl", "timings.jsonl"):
        kept = (run.path / name).read_bytes()
        (run.path / name).unlink()
        (run.path / name).symlink_to(victim)
        with pytest.raises(VLMFastError, match=f"{name} cannot be written: Is a link"):
            evaluate(fakes.FakeVLM(), "shapes", out=tmp_path / "out", limit=1)
        (run.path / name).unlink()
        (run.path / name).write_bytes(kept)
    assert victim.read_bytes() == b"precious"
    evaluate(fakes.FakeVLM(), "shapes", out=tmp_path / "out", limit=1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize(
    "read",
    [
        Recipe.load,
        partial(snapshot.read, what="a session"),
        read_subtitles,
        read_questions,
        load_image,
        load_video,
    ],
)
def test_readers_refuse_files_without_an_end(tmp_path: Path, read) -> None:
    """A pipe without a writer, at which opening would wait, and a device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(VLMFastError, match=r"(?i)is not a regular file"):
            read(path)


@EVERY
def test_unwritable_paths_are_refused(tmp_path: Path, write) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(lambda: write(folder, 1), folder, "Is a directory")
    (tmp_path / "file").touch()
    with pytest.raises(VLMFastError, match=r"file.* cannot be written: (Not a dir|File exists)"):
        write(tmp_path / "file" / "x", 1)
    assert {file.name for file in tmp_path.iterdir()} == {"file", "folder"}


def test_errors_of_the_writer_are_not_wrapped(tmp_path: Path) -> None:
    for error in (RuntimeError("own"), ValueError("own")):
        with pytest.raises(type(error), match="own"), replacing(tmp_path / "file"):
            raise error
    assert not list(tmp_path.iterdir())


def test_folders_are_created_or_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    refused(lambda: make_folder(tmp_path / "file"), tmp_path / "file", "File exists")


def test_failed_write_keeps_the_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(value: float) -> None:
        module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(module.weight, value)
        weights = StageWeights("atp", {}, [0.0], {"value": value}, module.state_dict())
        weights.save_pretrained(tmp_path / "weights")

    save(1.0)
    before = {file.name: file.read_bytes() for file in (tmp_path / "weights").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(FULL))
        with pytest.raises(VLMFastError, match="cannot be written: No space left on device"):
            save(2.0)
    assert {f.name: f.read_bytes() for f in (tmp_path / "weights").iterdir()} == before
    save(2.0)
    assert (tmp_path / "weights" / "stage.json").read_bytes() != before["stage.json"]


@pytest.mark.parametrize("what", ["report", "difference"])
def test_failed_write_keeps_old_reports_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for recipe, accuracy, budget in (("none", 0.9, 1.0), ("random:budget=0.5", 0.4, 0.5)):
        fakes.write_results(tmp_path / "in", recipe, accuracy, budget, limit=2)
    out, place = tmp_path / "out", tmp_path / "in"
    report = lambda: (  # noqa: E731
        write_report(place, out) if what == "report" else write_difference(place, place, out)
    )
    report()
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    # Each of the files in turn; plotly.js is written once.
    for failing in before.keys() - {"plotly.min.js"}:
        real = os.replace

        def replace(draft, path, failing=failing, real=real) -> None:
            if Path(path).name == failing:
                raise FULL
            real(draft, path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            refused(report, out / failing, "No space left on device")
        assert set(before) == {file.name for file in out.iterdir()}
        assert all((out / name).stat().st_size for name in before)


LIMITED = """
    import resource, signal, sys
    from pathlib import Path
    import eval_fakes as fakes
    from vlmfast.errors import VLMFastError
    from vlmfast.eval.runner import evaluate

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in map(int, sys.argv[2:]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            evaluate(fakes.FakeVLM(), "shapes", out=Path(sys.argv[1]), limit=1)
        except VLMFastError as error:
            print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on the size of a file is Linux's")
def test_evaluation_on_a_full_disk_resumes_later(tmp_path: Path) -> None:
    root = Path(vlmfast.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    code = textwrap.dedent(LIMITED)
    limits = ("100", "2000")  # full at once, and in the middle of the answers
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out"), *limits],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(limits)
    for line in done.stdout.splitlines():
        assert line.endswith("cannot be written: File too large")
        assert str(tmp_path / "out") in line
    run = evaluate(fakes.FakeVLM(), "shapes", out=tmp_path / "out", limit=1)
    whole = evaluate(fakes.FakeVLM(), "shapes", out=tmp_path / "whole", limit=1)
    samples = "samples.jsonl"
    assert (run.path / samples).read_bytes() == (whole.path / samples).read_bytes() != b""
