"""decord, where a caller names it: the frames and times of PyAV, or one clear error."""

from __future__ import annotations

import importlib.util
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from support import media_fixtures as fx
from vlmfast.errors import MediaError
from vlmfast.media import VideoFrames, load_video, probe_video

# Not imported: PyAV must be the first, since both bring a libvpx.
if importlib.util.find_spec("decord") is None:
    pytest.skip("decord has no wheel for this platform", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    fx.write_video(folder / "clip.mp4")
    fx.write_video(folder / "front.mp4", movflags="+faststart")
    fx.write_video(folder / "clip.mkv")
    fx.write_video(folder / "narrow.mp4", height=64, width=24)  # decord pads the rows
    fx.write_video(folder / "concat:a.mp4")  # a protocol of FFmpeg
    return folder


def read(source: object, **options: object) -> VideoFrames:
    return load_video(source, decoder="decord", **options)


def numbers(video: VideoFrames) -> list[int]:
    return [fx.frame_number(frame) for frame in video.frames]


def refused(source: object, reason: str, **options: object) -> None:
    with pytest.raises(MediaError, match=reason) as caught:
        read(source, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["clip.mp4", "front.mp4", "clip.mkv", "narrow.mp4"])
def test_frames_and_times_are_those_of_pyav(folder: Path, name: str) -> None:
    first, second = read(folder / name, num_frames=99), load_video(folder / name, num_frames=99)
    assert first.times == second.times and first.info == second.info
    assert first.indices == list(range(40)) == numbers(first)

    def distance(a: object, b: object) -> int:
        return np.abs(np.asarray(a).astype(int) - np.asarray(b)).max()

    assert max(map(distance, first.frames, second.frames)) <= 2
    assert min(map(distance, first.frames, second.frames[2:])) > 2  # the control
    assert probe_video(folder / name, decoder="decord") == first.info


def test_sources_and_choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    data = Path("clip.mp4").read_bytes()
    for source in ("clip.mp4", data, "concat:a.mp4"):
        assert numbers(read(source, num_frames=3)) == [0, 19, 39]
        assert numbers(read(source, fps=2.5)) == list(range(0, 40, 4))
        assert numbers(read(source, select=lambda info: [3, 14, 15, 38])) == [3, 14, 15, 38]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: numbers(read(data, num_frames=2)), range(4)))
    assert found == [[0, 39]] * 4


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
@pytest.mark.parametrize("count", [29, 30, 31, 32])
def test_open_gops(tmp_path: Path, codec: str, count: int) -> None:
    # Short last groups, and frames shown before the key frame that they are stored after.
    params = {f"{codec[3:]}-params": "open-gop=1:bframes=2:keyint=9:scenecut=0:log-level=none"}
    path = fx.write_video(tmp_path / "open.mp4", count, codec=codec, **params)
    for indices in (
        [count - 1],
        [count - 2],
        [0, count - 1],
        [count - 3, count - 1],
        [7, 8, 9, 10],
    ):
        assert numbers(read(path, select=lambda info, chosen=indices: chosen)) == indices


def test_files_that_it_reads_incorrectly_are_rejected(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "clip.mp4").read_bytes()
    for skip, length in ((0, 2000), (15 * 1024, 2500)):
        part = fx.trimmed(whole, skip_ticks=skip, length_ms=length)
        refused(part, r"edit list .*; use PyAV, decoder='av'")
    assert numbers(read(fx.trimmed(whole, skip_ticks=0, length_ms=4000), num_frames=2)) == [0, 39]
    refused(fx.write_video(tmp_path / "clip.ts"), "clip.ts: decord .* mpegts files")
    refused(fx.write_video(tmp_path / "clip.avi", codec="mpeg4"), "clip.avi: decord .* avi files")


def test_forged_lengths_do_not_allocate_memory(folder: Path) -> None:
    """decord ends the process if it cannot reserve memory for all frames that are stated."""
    long = bytearray((folder / "clip.mkv").read_bytes())
    at = long.index(b"\x44\x89\x88") + 3
    long[at : at + 8] = struct.pack(">d", 1e13)
    refused(bytes(long), "above 11 days; use PyAV")
    assert load_video(bytes(long)).info.duration_s == 4.0
    many = bytearray((folder / "front.mp4").read_bytes())
    at = many.index(b"stts") + 12
    many[at : at + 4] = b"\x9d\0\0\0"
    refused(bytes(many), "use PyAV|cannot be decoded")


def test_frames_are_not_filled_in(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scratched = bytearray((folder / "front.mp4").read_bytes())
    middle = (scratched.index(b"mdat") + len(scratched)) // 2
    scratched[middle : middle + 400] = b"\xff" * 400
    refused(bytes(scratched), "cannot be decoded", num_frames=40)
    path = fx.without_first_frame(folder / "clip.mkv", tmp_path / "headless.mkv")
    capfd.readouterr()
    refused(path, "headless.mkv: ", num_frames=40)
    assert capfd.readouterr() == ("", "")
    found = numbers(load_video(path, num_frames=40))
    assert found == list(range(found[0], 40))  # PyAV skips those that cannot be decoded
