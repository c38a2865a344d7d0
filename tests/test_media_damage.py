"""Damaged and forged files are read, or rejected in one line that names them."""

from __future__ import annotations

import errno
import importlib.util
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import damaged_media as dm
import media_fixtures as fx
import vlmfast
from vlmfast import errors
from vlmfast.errors import MediaError, OutOfMemory, VLMFastError, is_out_of_memory
from vlmfast.media import containers, decoders, load_image, load_video, probe_video

pytest.importorskip("av")

DECORD = pytest.mark.skipif(
    importlib.util.find_spec("decord") is None, reason="decord has no wheel for this platform"
)
BOTH = pytest.mark.parametrize("decoder", [pytest.param("decord", marks=DECORD), "av"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return dm.videos(tmp_path_factory.mktemp("whole"))


def outcome(loader, data: bytes, **options) -> str:
    """Return whether the file was read or rejected; any other exception propagates."""
    try:
        loader(data, **options)
    except MediaError as error:
        message = str(error)
        assert "\n" not in message
        assert message.startswith(f"bytes ({len(data)})")  # the source
        return "refused"
    return "read"


@pytest.mark.filterwarnings("ignore::UserWarning")  # from Pillow, for broken metadata
@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_images_are_read_or_rejected(seeds: range) -> None:
    seen = Counter()
    for name, data in dm.images().items():
        assert outcome(load_image, data) == "read"
        for seed in seeds:
            seen[outcome(load_image, dm.damaged(data, f"{name} {seed}"))] += 1
    assert min(seen["read"], seen["refused"]) > len(seeds)  # both happen


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_videos_are_read_or_rejected(whole: dict[str, bytes], seeds: range) -> None:
    seen = Counter()
    for name, data in whole.items():
        assert outcome(load_video, data, decoder="av") == "read"
        for seed in seeds:
            bad = dm.damaged(data, f"{name} {seed}")
            seen[outcome(load_video, bad, num_frames=4, decoder="av")] += 1
    assert min(seen["read"], seen["refused"]) > len(seeds)


@DECORD
@pytest.mark.parametrize(
    "cases",
    [(0, 150), pytest.param((150, 3000), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_damaged_videos_do_not_crash_the_process(cases: tuple[int, int]) -> None:
    script, root = Path(dm.__file__), str(Path(vlmfast.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script), *map(str, cases)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, str(script.parent)])},
        capture_output=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read, refused = map(int, done.stdout.split())
    assert read + refused == cases[1] - cases[0] and min(read, refused) > 10


def patched(data: bytes, box: bytes, at: int, value: bytes) -> bytes:
    """``value`` in the payload of the first ``box`` of an MP4."""
    start = data.index(box) + 4 + at
    return data[:start] + value + data[start + len(value) :]


@BOTH
@pytest.mark.parametrize(
    ("name", "box", "at", "value"),
    [
        ("front.mp4", b"stsz", 8, b"\xff\xff\xff\xff"),  # number of frames
        ("front.mp4", b"stsz", 12, b"\x00\xff\xff\xff"),  # size of the first frame
        ("front.mp4", b"stco", 8, b"\x00\xff\xff\xff"),  # its offset
        ("front.mp4", b"stsc", 8, b"\x00\x00\x00\x00"),  # chunks are counted from 1
        ("front.mp4", b"stsc", 12, b"\x00\x00\x00\x00"),  # chunks of no frames
        ("fragments.mp4", b"trun", 4, b"\x00\xff\xff\xff"),
        ("fragments.mp4", b"trun", 8, b"\x0f\xff\xff\xff"),
        ("fragments.mp4", b"trun", 16, b"\x0f\xff\xff\xff"),
    ],
)
def test_index_outside_the_file_is_rejected(whole, decoder, name, box, at, value) -> None:
    bad = patched(whole[name], box, at, value)
    assert bad != whole[name]
    with pytest.raises(MediaError, match="is damaged: its index points outside the file"):
        load_video(bad, decoder=decoder)
    assert outcome(load_video, whole[name], decoder=decoder) == "read"


@DECORD
def test_forged_durations_do_not_allocate_memory(whole) -> None:
    at = whole["video.mkv"].index(b"\x44\x89\x88") + 3
    long = bytearray(whole["video.mkv"])
    long[at : at + 8] = struct.pack(">d", 1e13)
    late = patched(whole["fragments.mp4"], b"tfdt", 6, b"\xff")
    many = patched(whole["front.mp4"], b"stts", 8, b"\x9d")
    for bad in (bytes(long), late, many):
        with pytest.raises(MediaError, match="; use PyAV"):
            load_video(bad, decoder="decord")
    assert load_video(bytes(long), decoder="av").info.duration_s == 1.0


def test_stated_durations(whole, tmp_path) -> None:
    for name, container, seconds in (
        ("video.mkv", "Matroska", 1.0),
        ("front.mp4", "MP4", 1.0),
        ("fragments.mp4", "MP4", 0.0),
        ("video.avi", "AVI", 0.0),
    ):
        (tmp_path / name).write_bytes(whole[name])
        with open(tmp_path / name, "rb") as file:
            assert containers.stated_seconds(file, container) == seconds


def test_unsupported_codec_is_rejected(whole) -> None:
    bad = whole["front.mp4"].replace(b"avc1", b"xyz1")
    for call in (load_video, probe_video):
        with pytest.raises(MediaError, match="a video stream that no installed decoder reads"):
            call(bad, decoder="av")


@BOTH
def test_oversized_frames_are_rejected(whole, monkeypatch, decoder) -> None:
    monkeypatch.setattr(decoders, "MAX_PIXELS", 32 * 48)
    assert outcome(load_video, whole["front.mp4"], decoder=decoder) == "read"
    monkeypatch.setattr(decoders, "MAX_PIXELS", 32 * 48 - 1)
    with pytest.raises(MediaError, match=r"frames of 48x32, the limit is 1535 pixels"):
        load_video(whole["front.mp4"], decoder=decoder)


def test_frames_larger_than_the_header_states_are_rejected(whole, monkeypatch) -> None:
    """FFmpeg itself receives the limit: a frame may be larger than its stream claims."""
    monkeypatch.setattr(decoders, "MAX_PIXELS", 32 * 24 - 1)
    monkeypatch.setattr(decoders.AvReader, "_check_size", lambda *size: None)
    with pytest.raises(MediaError, match=r"cannot be decoded: .*max_pixels"):
        load_video(whole["front.mp4"], decoder="av")


@pytest.mark.parametrize("step", ["demux", "decode"])
def test_decoder_exceptions_become_media_errors(whole, monkeypatch, step) -> None:
    class Broken(decoders.AvReader):
        def _packets(self):
            if step == "demux":
                raise KeyError("two\nlines")
            return super()._packets()

        def _image(self, frame):
            raise ZeroDivisionError("in the converter")

    monkeypatch.setattr(decoders, "AvReader", Broken)
    with pytest.raises(MediaError, match=r"^bytes \(\d+\): cannot be decoded: ") as caught:
        load_video(whole["front.mp4"], decoder="av")
    assert "\n" not in str(caught.value)


def test_enormous_images_are_rejected() -> None:
    bomb = fx.png_header(2**31 - 1, 2**31 - 1)
    with pytest.raises(MediaError, match="is too large: 2147483647x2147483647"):
        load_image(bomb)


@pytest.mark.timeout(8)
def test_a_session_description_opens_no_sockets() -> None:
    """It passes as MPEG-TS; FFmpeg reads it as SDP, opens sockets and waits 10 s for packets."""
    lines = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\n"
    text = bytearray(b"G=0\n" + lines + b"m=video 45004 RTP/AVP 96\na=rtpmap:96 H264/90000\n")
    text += b"a=x:" + b"y" * 600 + b"\n"
    text[188] = text[376] = ord("G")
    with pytest.raises(MediaError):
        load_video(bytes(text))


@pytest.mark.parametrize("step", ["_open", "load", "convert", "getexif"])
@pytest.mark.parametrize("error", [MemoryError(), OSError("out of memory error when reading")])
def test_exhausted_memory_is_no_fault_of_an_image(monkeypatch, step, error) -> None:
    from PIL import Image, PngImagePlugin

    def full(*args: object, **kwargs: object) -> None:
        raise error

    data = fx.encoded(Image.new("LA", (4, 4)), "PNG")
    kind = PngImagePlugin.PngImageFile if step in ("load", "_open") else Image.Image
    with monkeypatch.context() as patch:
        patch.setattr(kind, step, full)
        with pytest.raises(OutOfMemory, match="the memory is too small: ") as caught:
            load_image(data)
    assert not isinstance(caught.value, VLMFastError)
    assert load_image(data).size == (4, 4)


def test_exhausted_memory_is_no_fault_of_a_video(whole, monkeypatch) -> None:
    import av

    class Broken(decoders.AvReader):
        def _image(self, frame):
            raise av.error.MemoryError(12, "Cannot allocate memory")

    def full(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(decoders, "AvReader", Broken)
    with pytest.raises(MediaError, match="Cannot allocate memory"):  # more than there ever is
        load_video(whole["front.mp4"], decoder="av")
    monkeypatch.setattr(errors.mmap, "mmap", full)
    with pytest.raises(OutOfMemory):
        load_video(whole["front.mp4"], decoder="av")
    for other in (RuntimeError("own"), OSError("out of"), OSError(2, "out of memory"), KeyError()):
        assert not is_out_of_memory(other)
    assert is_out_of_memory(OSError(errno.ENOMEM, "no"))
