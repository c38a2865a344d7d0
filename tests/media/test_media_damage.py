"""Damaged and forged files are read, or rejected in one line that names them."""

from __future__ import annotations

import errno
from collections import Counter

import numpy as np
import pytest
from PIL import Image, features

from support import media_fixtures as fx
from support.engine.media import believe_headers, fail_while_decoding
from vlmfast import errors
from vlmfast.errors import MediaError, OutOfMemory, VLMFastError, is_out_of_memory
from vlmfast.media import decoders, load_image, load_video, probe_video

av = pytest.importorskip("av")

# Codec and encoder options.
_VIDEOS = {
    "end.mp4": ("libx264", {}),
    "front.mp4": ("libx264", {"movflags": "+faststart"}),
    "fragments.mp4": ("libx264", {"movflags": "frag_keyframe+empty_moov"}),
    "video.mkv": ("libx264", {}),
    "video.webm": ("libvpx", {"deadline": "realtime"}),
    "video.avi": ("mpeg4", {}),
    "video.ts": ("libx264", {}),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Small videos, one per container for which an encoder is available."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        name: fx.write_video(
            folder / name, 10, height=32, width=48, codec=codec, **options
        ).read_bytes()
        for name, (codec, options) in _VIDEOS.items()
        if codec in av.codecs_available
    }


def images() -> dict[str, bytes]:
    """Small images: one per format, an animation, 16 bits, and CMYK."""
    plain, *others = (Image.fromarray(fx.make_image(20, 24, seed)) for seed in range(3))
    deep = Image.fromarray(np.asarray(plain)[..., 0].astype(np.uint16) * 257)
    found = {fmt: fx.encoded(plain, fmt) for fmt in ("PNG", "JPEG", "BMP", "TIFF", "PPM")}
    for fmt in ("GIF", "WEBP", "PNG"):
        found[f"moving {fmt}"] = fx.encoded(plain, fmt, save_all=True, append_images=others)
    found["deep PNG"] = fx.encoded(deep, "PNG")
    found["inks"] = fx.encoded(plain.convert("CMYK"), "JPEG")
    found["inks TIFF"] = fx.encoded(plain.convert("CMYK"), "TIFF")
    if features.check("avif"):
        found["AVIF"] = fx.encoded(plain, "AVIF")
    if features.check("jpg_2000"):
        found["JPEG2000"] = fx.encoded(plain, "JPEG2000")
    return found


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
    for name, data in images().items():
        assert outcome(load_image, data) == "read"
        for seed in seeds:
            seen[outcome(load_image, fx.mangled(data, f"{name} {seed}"))] += 1
    assert min(seen["read"], seen["refused"]) > len(seeds)  # both happen


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 1000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_damaged_videos_are_read_or_rejected(whole: dict[str, bytes], seeds: range) -> None:
    seen = Counter()
    for name, data in whole.items():
        assert outcome(load_video, data) == "read"
        for seed in seeds:
            bad = fx.mangled(data, f"{name} {seed}")
            seen[outcome(load_video, bad, num_frames=4)] += 1
    assert min(seen["read"], seen["refused"]) > len(seeds)


def patched(data: bytes, box: bytes, at: int, value: bytes) -> bytes:
    """``value`` in the payload of the first ``box`` of an MP4."""
    start = data.index(box) + 4 + at
    return data[:start] + value + data[start + len(value) :]


@pytest.mark.parametrize(
    ("name", "box", "at", "value"),
    [
        ("front.mp4", b"stsz", 12, b"\x00\xff\xff\xff"),  # size of the first frame
        ("front.mp4", b"stco", 8, b"\x00\xff\xff\xff"),  # its offset
        ("fragments.mp4", b"trun", 8, b"\x0f\xff\xff\xff"),
        ("fragments.mp4", b"trun", 16, b"\x0f\xff\xff\xff"),
    ],
)
def test_index_outside_the_file_is_rejected(whole, name, box, at, value) -> None:
    bad = patched(whole[name], box, at, value)
    with pytest.raises(MediaError, match="is damaged: its index points outside the file"):
        load_video(bad)
    assert outcome(load_video, whole[name]) == "read"


def test_forged_counts_are_rejected_before_memory_is_reserved(whole, tmp_path, monkeypatch) -> None:
    """FFmpeg takes a gigabyte for them."""
    sound = fx.write_audio(tmp_path / "sound.mp4").read_bytes()
    forged = [
        patched(whole["front.mp4"], b"stsz", 8, b"\xff\xff\xff\xff"),
        patched(whole["front.mp4"], b"stsz", 4, b"\0\0\0\1\5\0\0\0"),  # of one byte each
        patched(whole["fragments.mp4"], b"trun", 4, b"\x00\xff\xff\xff"),
        patched(sound, b"stsz", 8, b"\5\0\0\0"),
    ]
    monkeypatch.setattr(av, "open", None)
    for bad in forged:
        with pytest.raises(MediaError, match="is damaged: its index points outside the file"):
            load_video(bad)


def test_unsupported_codec_is_rejected(whole) -> None:
    bad = whole["front.mp4"].replace(b"avc1", b"xyz1")
    for call in (load_video, probe_video):
        with pytest.raises(MediaError, match="a video stream that no installed decoder reads"):
            call(bad)


def test_oversized_frames_are_rejected(whole, monkeypatch) -> None:
    monkeypatch.setattr(decoders, "MAX_PIXELS", 32 * 48)
    assert outcome(load_video, whole["front.mp4"]) == "read"
    monkeypatch.setattr(decoders, "MAX_PIXELS", 32 * 48 - 1)
    with pytest.raises(MediaError, match=r"frames of 48x32, the limit is 1535 pixels"):
        load_video(whole["front.mp4"])


def test_frames_larger_than_the_header_states_are_rejected(whole, monkeypatch) -> None:
    """FFmpeg itself receives the limit: a frame may be larger than its stream claims."""
    monkeypatch.setattr(decoders, "MAX_PIXELS", 32 * 24 - 1)
    believe_headers(monkeypatch)
    with pytest.raises(MediaError, match=r"cannot be decoded: .*max_pixels"):
        load_video(whole["front.mp4"])


@pytest.mark.parametrize("step", ["demux", "decode"])
def test_decoder_exceptions_become_media_errors(whole, monkeypatch, step) -> None:
    demux = KeyError("two\nlines") if step == "demux" else None
    fail_while_decoding(monkeypatch, ZeroDivisionError("in the converter"), demux)
    with pytest.raises(MediaError, match=r"^bytes \(\d+\): cannot be decoded: ") as caught:
        load_video(whole["front.mp4"])
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(8)
def test_a_session_description_opens_no_sockets() -> None:
    """It passes as MPEG-TS; FFmpeg reads it as SDP, opens sockets and waits 10 s for packets."""
    lines = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=a\nc=IN IP4 127.0.0.1\nt=0 0\n"
    text = bytearray(b"G=0\n" + lines + b"m=video 45004 RTP/AVP 96\na=rtpmap:96 H264/90000\n")
    text += b"a=x:" + b"y" * 600 + b"\n"
    text[188] = text[376] = ord("G")
    with pytest.raises(MediaError):
        load_video(bytes(text))


@pytest.mark.parametrize("step", ["__init__", "load", "convert", "getexif"])
@pytest.mark.parametrize("error", [MemoryError(), OSError("out of memory error when reading")])
def test_exhausted_memory_is_no_fault_of_an_image(monkeypatch, step, error) -> None:
    from PIL import Image, PngImagePlugin

    def full(*args: object, **kwargs: object) -> None:
        raise error

    data = fx.encoded(Image.new("LA", (4, 4)), "PNG")
    kind = PngImagePlugin.PngImageFile if step in ("load", "__init__") else Image.Image
    with monkeypatch.context() as patch:
        patch.setattr(kind, step, full)
        with pytest.raises(OutOfMemory, match="the memory is too small: ") as caught:
            load_image(data)
    assert not isinstance(caught.value, VLMFastError)
    assert load_image(data).size == (4, 4)


def test_exhausted_memory_is_no_fault_of_a_video(whole, monkeypatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    fail_while_decoding(monkeypatch, av.error.MemoryError(12, "Cannot allocate memory"))
    with pytest.raises(MediaError, match="Cannot allocate memory"):  # more than there ever is
        load_video(whole["front.mp4"])
    monkeypatch.setattr(errors.mmap, "mmap", full)
    with pytest.raises(OutOfMemory):
        load_video(whole["front.mp4"])
    for other in (RuntimeError("own"), OSError("out of"), OSError(2, "out of memory"), KeyError()):
        assert not is_out_of_memory(other)
    assert is_out_of_memory(OSError(errno.ENOMEM, "no"))
