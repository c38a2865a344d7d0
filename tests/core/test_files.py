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

from support import eval_fakes as fakes
from vlmfast import Recipe, VLMFastError
from vlmfast.api.session_file import read_content, write_content
from vlmfast.core.files import (
    make_folder,
    open_to_append,
    replace_bytes,
    replace_text,
    replacing,
)
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
    "session": lambda path, value: write_content(path, {}, {"pixels": torch.tensor([value])}),
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


def test_failed_folder_sync_keeps_the_new_file(tmp_path: Path, monkeypatch) -> None:
    sync = os.fsync

    def full(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise FULL
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: replace_text(tmp_path / "a", "new"), tmp_path / "a", "No space left on device")
    assert (tmp_path / "a").read_text() == "new"


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from vlmfast.core import files

    path, whole, lines = Path(sys.argv[1]), {}, 0

    def write(name):
        files.replace_bytes(path, [name * (1 << 14)] * 4)

    def counted(last):
        def trace(frame, event, argument):
            global lines
            if frame.f_code.co_filename != files.__file__:
                return None
            lines += event == "line"
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        return trace

    for name in (b"b", b"a"):
        lines = 0
        sys.settrace(counted(None))
        write(name)
        sys.settrace(None)
        whole[path.read_bytes()] = name.decode()
    seen, torn = [], 0
    for last in range(1, lines + 1):
        if (child := os.fork()) == 0:
            lines = 0
            sys.settrace(counted(last))
            write(b"b")
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        seen.append(whole[path.read_bytes()])
        for draft in path.parent.glob(".*.tmp"):
            torn += draft.read_bytes() not in whole
            draft.unlink()
        if seen[-1] == "b":
            write(b"a")
    print("".join(seen), torn)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_killed_write_leaves_old_or_new_file(tmp_path: Path) -> None:
    """The process is killed before every line that it runs."""
    code = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "file")]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, torn = done.stdout.split()
    # The old file, then the new one from some line on; some runs left a partial temporary file.
    assert set(seen) == {"a", "b"} and seen == "".join(sorted(seen)) and int(torn) > 0


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
        read_content,
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
