"""Media reading: supported inputs pixel by pixel, and every rejection by its message."""

from __future__ import annotations

import base64
import io
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from support import media_fixtures as fx
from support.closeness import close
from support.engine.media import decoded_groups
from vlmfast.errors import MediaError
from vlmfast.media import (
    VideoInfo,
    kind_of,
    load_image,
    load_video,
    probe_video,
)
from vlmfast.media import loading as media

torch = pytest.importorskip("torch")
pytest.importorskip("av")


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def refused(source: object, *parts: str, **options: object) -> str:
    """Check that a source is rejected in one line that contains all of these parts."""
    loader = options.pop("loader", load_image)
    with pytest.raises(MediaError) as caught:
        loader(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def survives(loader: Callable[..., object], source: object, **options: object) -> None:
    """Check that a source is read, or rejected in one line, and that nothing else is raised."""
    message = ""
    try:
        loader(source, **options)
    except MediaError as error:
        message = str(error)
    assert "\n" not in message


# --- supported images ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 20), st.just(3))),
    st.sampled_from(["array", "PIL", "PNG", "tensor", "float"]),
)
def test_pixels_are_preserved(array: np.ndarray, way: str) -> None:
    source = {
        "array": lambda: array,
        "PIL": lambda: Image.fromarray(array),
        "PNG": lambda: fx.encoded(Image.fromarray(array), "PNG"),
        "tensor": lambda: torch.from_numpy(array).permute(2, 0, 1),
        "float": lambda: array.astype(np.float32) / 255,
    }[way]()
    assert np.array_equal(pixels(load_image(source)), array)


def test_source_types(tmp_path: Path) -> None:
    array = fx.make_image()
    data = fx.encoded(Image.fromarray(array), "PNG")
    path = tmp_path / "an image: with spaces.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    for source in (
        path,
        str(path),
        data,
        bytearray(data),
        memoryview(data),
        f"data:image/png;base64,{text}",
        f"data:image/png;base64,{text[:40]}\n {text[40:].rstrip('=')}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
    ):
        assert np.array_equal(pixels(load_image(source)), array)


def test_unreadable_metadata() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(fx.make_image(12, 20))
    data = fx.encoded(image, "JPEG", exif=exif, quality=95)
    plain = pixels(Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels(load_image(data)), np.rot90(plain, -1))
    broken = data.replace(b"Exif\0\0MM\0*", b"Exif\0\0MM\xff\xff", 1)
    assert broken != data
    assert np.array_equal(pixels(load_image(broken)), plain)


def test_cmyk() -> None:
    cmyk = np.random.default_rng(0).integers(0, 256, (10, 12, 4), np.uint8)
    image = Image.frombytes("CMYK", (12, 10), cmyk.tobytes())
    ink = cmyk.astype(float) / 255
    expected = 255 * (1 - ink[..., :3]) * (1 - ink[..., 3:])
    for source in (image, fx.encoded(image, "TIFF")):
        assert np.abs(pixels(load_image(source)) - expected).max() <= 2
    flat = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    cyan = pixels(load_image(fx.encoded(flat, "JPEG", quality=95)))
    assert np.abs(cyan.astype(int) - [0, 255, 255]).max() <= 4


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    deep = np.linspace(0, 65535, 40 * 30).astype(np.uint16).reshape(30, 40)
    expected = np.rint(deep / 257)[..., None].repeat(3, axis=2)
    sources = [
        deep,
        deep[..., None],
        deep.astype(">u2"),
        torch.from_numpy(deep),
        Image.fromarray(deep),
        Image.fromarray(deep.astype(np.int32)),
        fx.encoded(Image.fromarray(deep), "PNG"),
        fx.encoded(Image.fromarray(deep), "TIFF"),
        b"P5 40 30 65535\n" + deep.astype(">u2").tobytes(),
    ]
    for source in sources:
        assert np.array_equal(pixels(load_image(source)), expected)
    clipped = np.clip(deep, 0, 255)[..., None].repeat(3, axis=2)
    assert not np.array_equal(expected, clipped)
    colour = np.random.default_rng(0).integers(0, 65536, (5, 6, 3)).astype(np.uint16)
    assert np.array_equal(pixels(load_image(colour)), np.rint(colour / 257))


@pytest.mark.parametrize("mode", ["1", "L", "LAB", "HSV", "YCbCr", "RGBX", "RGBa", "La", "PA"])
def test_other_modes(mode: str) -> None:
    image = Image.new(mode, (4, 3))
    assert load_image(image).size == (4, 3)
    assert load_image(image).mode == "RGB"


def test_float_images() -> None:
    values = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    expected = np.rint(values * 255)[..., None].repeat(3, axis=2)
    for source in (
        values,
        values.astype(np.float64),
        Image.fromarray(values),
        torch.from_numpy(values)[None],
    ):
        assert np.array_equal(pixels(load_image(source)), expected)
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.from_numpy(values)[None].to(dtype)
        assert np.abs(pixels(load_image(half)) - expected).max() <= 1
    mask = values > 0.5
    assert np.array_equal(pixels(load_image(mask))[..., 0], np.where(mask, 255, 0))


def test_array_and_tensor_shapes() -> None:
    rgb = fx.make_image(10, 12)
    tensor = torch.from_numpy(rgb)
    for source in (
        tensor,
        tensor.permute(2, 0, 1),
        tensor.permute(2, 0, 1).float().div(255).requires_grad_(),
        rgb[::-1][::-1],
        np.asfortranarray(rgb),
    ):
        assert np.array_equal(pixels(load_image(source)), rgb)
    grey = rgb[..., :1]
    for source in (grey, grey[..., 0], torch.from_numpy(grey), torch.from_numpy(grey[..., 0])):
        assert np.array_equal(pixels(load_image(source)), grey.repeat(3, axis=2))
    both = fx.make_image(3, 5)[:, :3]  # 3x3x3 is channels first as a tensor, last as an array
    assert np.array_equal(pixels(load_image(both)), both)
    assert np.array_equal(pixels(load_image(torch.from_numpy(both))), both.transpose(1, 2, 0))


def test_source_is_neither_modified_nor_shared() -> None:
    array = fx.make_image()
    image = Image.fromarray(array)
    image.info["note"] = "kept"
    loaded = load_image(image)
    loaded.putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(pixels(image), array)
    assert image.info == {"note": "kept"}
    for source in (array, np.ascontiguousarray(array[..., 0])):
        before = source.copy()
        loaded = pixels(load_image(source)).copy()
        image = load_image(source)
        source[:] = 0
        assert np.array_equal(pixels(image), loaded)
        source[:] = before


# --- rejected images -----------------------------------------------------------------------------


def test_non_image_files_are_rejected(tmp_path: Path) -> None:
    def file(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    refused(tmp_path / "absent.png", "absent.png", "no such file")
    refused(tmp_path, tmp_path.name, "is a directory")
    refused(file("nothing.png", b""), "nothing.png", "is empty")
    refused(file("notes.png", b"Dear diary,\n" * 9), "notes.png", "is not an image", "is text")
    refused(file("umlaut.png", "Süß. ".encode() * 400), "umlaut.png", "is text")
    refused(file("noise.jpg", bytes(range(1, 256))), "noise.jpg", "has no known format")
    refused(file("bmw.bmp", b"BMW is a make of car"), "bmw.bmp", "cannot be read as BMP")
    refused("", "no such file")
    refused("a\0b.png", "a?b.png", "not a path")
    refused("x" * 5000, "...", "File name too long")
    refused(fx.write_video(tmp_path / "clip.png", 2, container="mp4"), "clip.png", "is a video")
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    refused(pipe, "pipe.png", "not a regular file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all files")
def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(b"x")
    path.chmod(0)
    refused(path, "secret.png", "Permission denied")


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {}),
        ("PPM", {}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # from Pillow, for a truncated TIFF directory
def test_truncated_images_are_rejected(tmp_path: Path, fmt: str, options: dict) -> None:
    data = fx.encoded(Image.fromarray(fx.make_image()), fmt, **options)
    whole = load_image(data).tobytes()
    refusals = 0
    for length in range(1, len(data), max(1, len(data) // 60)):
        try:
            assert load_image(data[:length]).tobytes() == whole
        except MediaError:
            refusals += 1
    assert refusals > 50  # the rest may still be complete: trailing bytes contain no pixels
    path = tmp_path / f"half.{fmt.lower()}"
    path.write_bytes(data[: len(data) // 2])
    message = refused(path, path.name)
    assert re.search(r"is truncated or damaged|cannot be read as", message)


def test_frames_of_a_list_have_the_size_of_its_first(tmp_path: Path) -> None:
    small, large = Image.new("RGB", (8, 8)), Image.new("RGB", (40, 40))
    with pytest.raises(MediaError, match="frame 2 of 3: is 40x40, the first is 8x8"):
        load_video([small, large, large], select=lambda info: [1, 2])
    with pytest.raises(MediaError, match="frame 1 of 3: "):
        probe_video([tmp_path / "missing.png", small, small])


def test_oversized_images_are_rejected_before_decoding(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(fx.png_header(50_000, 50_000))
    # These files contain no pixels: any attempt to decode them would report "truncated" instead.
    refused(bomb, "bomb.png", "too large", "50000x50000", str(media.MAX_PIXELS))
    refused(fx.png_header(20_000, 20), "too narrow", "20000x20", "above 100:1")
    refused(fx.png_header(20_000, 20), "truncated", max_aspect=None)
    refused(fx.make_image(9, 9), "too large", max_pixels=80)
    assert load_image(fx.make_image(9, 9), max_pixels=81).size == (9, 9)
    refused(np.broadcast_to(np.uint8(0), (20_000, 20_000)), "NumPy array", "too large")
    for wrong in ({"max_pixels": 0}, {"max_aspect": 0.5}, {"max_aspect": math.nan}):
        refused(fx.make_image(), f"{next(iter(wrong))}=", "at least 1", **wrong)


def test_pillow_pixel_limit_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fx.encoded(Image.fromarray(fx.make_image(30, 40)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))
    assert load_image(data).size == (40, 30)


def test_aspect_ratio() -> None:
    assert load_image(np.zeros((1, 100), np.uint8)).size == (100, 1)
    assert load_image(np.zeros((1, 1), np.uint8)).size == (1, 1)
    refused(np.zeros((1, 101), np.uint8), "too narrow", "100:1")
    refused(np.zeros((101, 1), np.uint8), "too narrow", "100:1")
    strip = fx.encoded(Image.new("RGB", (20_000, 20)), "PNG")
    refused(strip, "bytes (", "too narrow")
    assert load_image(strip, max_aspect=None).size == (20_000, 20)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((0, 5, 3), np.uint8), "has no pixels"),
        (np.zeros((5, 0), np.uint8), "has no pixels"),
        (np.zeros(5, np.uint8), "must be HxW"),
        (np.zeros((2, 5, 5, 3), np.uint8), "pass list(array)"),
        (np.zeros((5, 5, 2), np.uint8), "must be HxW"),
        (np.zeros((3, 5, 7), np.uint8), "transpose(1, 2, 0)"),
        (np.zeros((5, 5, 3), np.int64), "must be uint8, uint16, bool or floats"),
        (np.zeros((5, 5), np.complex64), "must be uint8"),
        (np.zeros((5, 5), object), "must be uint8"),
        (np.full((5, 5), np.nan, np.float32), "NaN"),
        (np.full((5, 5), np.inf, np.float32), "infinite"),
        (np.full((5, 5), 255.0), "floats must be in [0, 1]"),
        (np.full((5, 5), -0.5), "from -0.5 to -0.5"),
    ],
)
def test_invalid_arrays_are_rejected(array: np.ndarray, reason: str) -> None:
    refused(array, f"NumPy array {array.shape} {array.dtype}", reason)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(5, 6, 7), "must be CxHxW or HxWxC"),
        (torch.zeros(1, 3, 6, 7), "pass list(array)"),
        (torch.zeros(3, 0, 7), "has no pixels"),
        (torch.zeros(3, 6, 7, dtype=torch.int64), "must be uint8"),
        (torch.full((3, 6, 7), math.nan), "NaN"),
        (torch.zeros(3, 6, 7, device="meta"), "cannot be read"),
        (torch.eye(6).to_sparse(), "cannot be read"),
    ],
)
def test_invalid_tensors_are_rejected(tensor: torch.Tensor, reason: str) -> None:
    refused(tensor, f"torch tensor {tuple(tensor.shape)}", reason)


def test_invalid_pil_images_are_rejected(tmp_path: Path) -> None:
    refused(Image.new("RGB", (0, 5)), "PIL image 0x5 RGB", "has no pixels")
    refused(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "mode I", "0 to 65535")
    refused(Image.fromarray(np.full((4, 4), -1, np.int32)), "from -1 to -1")
    refused(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "NaN")
    path = tmp_path / "closed.png"
    path.write_bytes(fx.encoded(Image.fromarray(fx.make_image()), "PNG"))
    with Image.open(path) as image:
        pass
    refused(image, "closed.png", "truncated or damaged")


def test_unsupported_mode_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("conversion not supported")

    image = Image.new("CMYK", (4, 3))
    monkeypatch.setattr(Image.Image, "convert", fail)
    refused(image, "PIL image 4x3 CMYK", "mode CMYK is not supported")


@pytest.mark.parametrize("source", [None, 7, object(), {"bytes": b""}, {1, 2}])
def test_unknown_source_types_are_rejected(source: object) -> None:
    refused(source, type(source).__name__, "not a supported source")


def test_formats_that_run_programs_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "is text")
    if "HEIF" not in Image.OPEN:
        heif = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
        refused(heif, "is HEIF, which this Pillow does not read")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,@@@", "not valid base64"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "is empty"),
        ("data:text/plain,hello", "is text"),
        ("data:image/png;base64,äöü", "base64"),
    ],
)
def test_invalid_data_urls_are_rejected(url: str, reason: str) -> None:
    refused(url, "data: URL", reason)


def test_texts_that_are_no_paths_are_named(tmp_path: Path) -> None:
    data = fx.encoded(Image.fromarray(fx.make_image()), "PNG")
    text = base64.b64encode(data).decode()
    for loader in (load_image, load_video):
        for source, reason in (
            (text, "is PNG in base64, not a path; write 'data:;base64,' before it"),
            (base64.encodebytes(data).decode(), "is PNG in base64, not a path"),
            ("file:///a/b%20c.png", "is a file: URL; pass its path, '/a/b c.png'"),
            ("FILE:/a/b.png", "is a file: URL; pass its path, '/a/b.png'"),
            ("file://localhost/a", "is a file: URL; pass its path, '/a'"),
            ("s3://bucket/a.png", "is a URL that is not fetched"),
            (text.encode(), "its content is PNG in base64"),
        ):
            with pytest.raises(MediaError, match=re.escape(reason)) as caught:
                loader(source)
            assert len(str(caught.value)) < 500
    assert load_image(f"data:;base64,{text}").size == (40, 30)
    (tmp_path / "iVBORw0KGgo=").write_bytes(data)  # a file of this name is a file
    assert load_image(str(tmp_path / "iVBORw0KGgo=")).size == (40, 30)


MAGIC = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\0", b"MM\0*"]
MAGIC += [b"P6 4 4 255\n", b"RIFF\x40\0\0\0WEBPVP8 ", b"\0\0\0\x18ftypavif", b"\0\0\1\0\1\0"]
MAGIC += [b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # from Pillow, for broken metadata
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MAGIC), st.binary(max_size=200))
def test_random_image_bytes_raise_only_media_errors(magic: bytes, rest: bytes) -> None:
    survives(load_image, magic + rest)


# --- supported videos ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    fx.write_video(folder / "clip.mp4")
    fx.write_video(folder / "front.mp4", movflags="+faststart")
    fx.write_video(folder / "clip.mkv")
    return folder


@pytest.fixture
def video_path(video_folder: Path) -> Path:
    return video_folder / "clip.mp4"


def numbers(frames: media.VideoFrames) -> list[int]:
    return [fx.frame_number(frame) for frame in frames.frames]


def test_default_frames_are_evenly_spaced(video_path: Path) -> None:
    assert probe_video(video_path) == VideoInfo(40, 10.0, 4.0, 80, 48)
    video = load_video(video_path)
    assert video.indices == np.linspace(0, 39, 8, dtype=int).tolist() == numbers(video)
    wanted = torch.tensor(video.indices) / 10
    close(torch.tensor(video.timestamps_s), wanted, torch.float32, 2)
    assert video.info == probe_video(video_path)
    assert len(video) == 8
    for index, frame in zip(video.indices, video.frames, strict=True):
        difference = np.abs(pixels(frame).astype(int) - fx.frame_pixels(index, 48, 80))
        assert difference.mean() < 4


def test_bytes_equal_file(video_path: Path) -> None:
    by_path = load_video(video_path, num_frames=5)
    by_bytes = load_video(video_path.read_bytes(), num_frames=5)
    assert by_bytes == by_path
    assert by_bytes != load_video(video_path, num_frames=4)


def test_path_that_looks_like_a_protocol(
    video_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("concat:a.mp4").write_bytes(video_path.read_bytes())
    assert numbers(load_video("concat:a.mp4", num_frames=2)) == [0, 39]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 13, 39, 40, 41, 1000])
def test_num_frames(video_path: Path, count: int) -> None:
    video = load_video(video_path, num_frames=count)
    assert video.indices == np.linspace(0, 39, min(count, 40), dtype=int).tolist()
    assert numbers(video) == video.indices
    assert len(set(video.indices)) == min(count, 40)


@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        (10, range(40)),
        (1000, range(40)),
        (1e308, range(40)),
        (Fraction(10, 2), range(0, 40, 2)),
        (5, range(0, 40, 2)),
        (1, range(0, 40, 10)),
        (4, [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30, 32, 35, 37]),
        (0.4, [0, 25]),
        (1e-9, [0]),
    ],
)
def test_fps(video_path: Path, fps: float, expected: object) -> None:
    video = load_video(video_path, fps=fps)
    assert numbers(video) == video.indices == list(expected)


def test_fps_of_a_fast_video() -> None:
    """Whose frames are shorter than the rounding of other containers."""
    assert load_video(fx.still(9, 2000), fps=1000.0).indices == [0, 2, 4, 6, 8]


def test_fractional_rates_and_rounded_timestamps(tmp_path: Path) -> None:
    rate = Fraction(30000, 1001)
    for name in ("ntsc.mp4", "ntsc.mkv"):  # Matroska rounds to milliseconds
        path = fx.write_video(tmp_path / name, 30, rate=rate)
        video = load_video(path, fps=float(rate))
        assert video.indices == list(range(30)) == numbers(video)
        assert load_video(path, fps=float(rate) / 2).indices == video.indices[::2]
        assert video.info.fps == pytest.approx(float(rate), rel=1e-3)


def test_select(video_path: Path) -> None:
    seen = []

    def select(info: VideoInfo) -> list[int]:
        seen.append(info)
        return np.array([3, 14, 15, 38])  # NumPy's integers, too

    video = load_video(video_path, select=select)
    assert seen == [probe_video(video_path)]
    assert video.indices == [3, 14, 15, 38] == numbers(video)
    assert all(type(index) is int for index in video.indices)
    for wrong in ([], [40], [-1, 3], [3, 3], [5, 4]):
        refused(
            video_path,
            "clip.mp4",
            "select",
            "from 0 to 39",
            loader=load_video,
            select=lambda i, w=wrong: w,
        )
    refused(video_path, "select must return whole", loader=load_video, select=lambda info: [0.5])
    with pytest.raises(ZeroDivisionError):  # exceptions of user functions propagate
        load_video(video_path, select=lambda info: 1 / 0)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("open.mp4", "libx264", {"x264-params": "open-gop=1:bframes=3"}),
        ("plain.mp4", "mpeg4", {}),
        ("fragments.mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
        ("hevc.mp4", "libx265", {"x265-params": "log-level=none:open-gop=1:bframes=3"}),
        ("clip.ts", "libx264", {}),
        ("clip.flv", "libx264", {}),
        ("clip.avi", "libx264", {}),
        ("plain.avi", "mpeg4", {"bf": "2"}),
        ("clip.mpg", "mpeg2video", {}),
        ("vp8.webm", "libvpx", {"deadline": "realtime", "auto-alt-ref": "1"}),
        ("vp9.webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    ],
)
def test_containers_and_random_access(
    tmp_path: Path, name: str, codec: str, options: dict[str, str]
) -> None:
    import av

    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    path = fx.write_video(tmp_path / name, codec=codec, rate=25, **options)
    every = load_video(path, num_frames=40)
    assert every.indices == list(range(40))
    with av.open(str(path)) as container:
        sequence = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(sequence) == 40
    for frame, expected in zip(every.frames, sequence, strict=True):
        assert np.abs(pixels(frame).astype(int) - expected).max() <= 2
    assert every.timestamps_s == pytest.approx(np.arange(40) / 25, abs=2e-3)
    for seed in range(5):
        chosen = sorted(random.Random(seed).sample(range(40), 5))
        subset = load_video(path, select=lambda info, chosen=chosen: chosen)
        assert subset.frames == [every.frames[index] for index in chosen]


def test_edit_list_trims_frames(video_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "trimmed.mp4"
    for skip, length, expected in ((0, 2000, range(20)), (15 * 1024, 2500, range(15, 40))):
        path.write_bytes(fx.trimmed(video_path.read_bytes(), skip_ticks=skip, length_ms=length))
        video = load_video(path, num_frames=99)
        assert numbers(video) == list(expected)
        assert video.info.frames == len(expected)
        assert video.timestamps_s[:2] == [0.0, 0.1]
        subset = load_video(path, num_frames=4)
        assert subset.frames == [video.frames[index] for index in subset.indices]


def test_lists_of_frames() -> None:
    frames = [fx.frame_pixels(index, 48, 80) for index in range(12)]
    video = load_video(frames)  # already chosen by the caller: all are kept
    assert numbers(video) == video.indices == list(range(12))
    assert video.info == probe_video(frames) == VideoInfo(12, 1.0, 12.0, 80, 48)
    assert video.timestamps_s == [float(index) for index in range(12)]
    mixed = (frames[0], Image.fromarray(frames[1]), torch.from_numpy(frames[2]).permute(2, 0, 1))
    assert numbers(load_video(mixed)) == [0, 1, 2]
    assert numbers(load_video(frames, num_frames=3)) == [0, 5, 11]
    assert numbers(load_video(frames, select=lambda info: [1, info.frames - 1])) == [1, 11]


def test_kind_is_detected_from_content(video_path: Path, tmp_path: Path) -> None:
    data = fx.encoded(Image.fromarray(fx.make_image()), "PNG")
    path = tmp_path / "image.mp4"
    path.write_bytes(data)
    disguised = tmp_path / "clip.jpg"
    disguised.write_bytes(video_path.read_bytes())
    assert kind_of(path) == kind_of(data) == kind_of(fx.make_image()) == "image"
    assert kind_of(Image.fromarray(fx.make_image())) == kind_of(torch.zeros(3, 4, 4)) == "image"
    assert kind_of("https://example.org/x.mp4") == "image"  # only images are fetched
    assert kind_of(disguised) == kind_of(disguised.read_bytes()) == kind_of([data]) == "video"
    (tmp_path / "notes.mp4").write_text("words")
    refused(tmp_path / "notes.mp4", "notes.mp4", "an image or a video", "text", loader=kind_of)


def test_videos_load_in_several_threads(video_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: numbers(load_video(video_path, num_frames=6)), range(4)))
    assert found == [np.linspace(0, 39, 6, dtype=int).tolist()] * 4


# --- rejected videos -----------------------------------------------------------------------------


def _broken(folder: Path, video_folder: Path) -> dict[str, tuple[Path, str]]:
    whole, front = (
        (video_folder / "clip.mp4").read_bytes(),
        (video_folder / "front.mp4").read_bytes(),
    )
    matroska = (video_folder / "clip.mkv").read_bytes()
    index = whole.index(b"moov") - 4
    data = front.index(b"mdat")
    scrambled = bytearray(front)
    scrambled[data + 8 :] = bytes(0xAA for _ in scrambled[data + 8 :])
    made = {
        "empty.mp4": (b"", "is empty"),
        "cut before index.mp4": (whole[: index // 2], "is truncated"),
        "without index.mp4": (whole[:index], "no index ('moov' part)"),
        "cut in index.mp4": (whole[: index + 200], "is truncated: its 'moov' part"),
        "cut in data.mp4": (front[: (data + len(front)) // 2], "is truncated: its 'mdat' part"),
        "without data.mp4": (front[: data - 4], "is truncated"),
        "scrambled.mp4": (bytes(scrambled), "decoded"),
        "cut.mkv": (matroska[: len(matroska) // 2], "is truncated: its header states"),
        "words.mp4": (b"not a video\n" * 50, "is not a video: its content is text"),
        "playlist.mp4": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hosts\n", "its content is text"),
        "noise.mp4": (random.Random(0).randbytes(999), "has no known format"),
        "image.mp4": (fx.encoded(Image.fromarray(fx.make_image()), "PNG"), "is an image (PNG)"),
        "animation.mp4": (fx.encoded(Image.fromarray(fx.make_image()), "GIF"), "is an image (GIF)"),
    }
    for name, (content, _) in made.items():
        (folder / name).write_bytes(content)
    avi = fx.write_video(folder / "clip.avi", codec="mpeg4").read_bytes()
    (folder / "cut.avi").write_bytes(avi[: len(avi) // 2])
    fx.write_audio(folder / "sound.mp4")
    fx.write_audio(folder / "sound.mkv", "matroska")
    broken = {name: (folder / name, reason) for name, (_, reason) in made.items()}
    broken["cut.avi"] = folder / "cut.avi", "is truncated: its header states"
    broken["absent.mp4"] = folder / "absent.mp4", "no such file"
    broken["sound.mp4"] = folder / "sound.mp4", "has no video stream"
    broken["sound.mkv"] = folder / "sound.mkv", "has no video stream"
    return broken


def test_broken_videos_are_rejected(
    video_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = _broken(tmp_path, video_folder)
    capfd.readouterr()
    for name, (path, reason) in broken.items():
        for loader in (load_video, probe_video):
            refused(path, name, reason, loader=loader)
        if path.exists():
            content = path.read_bytes()
            refused(content, f"bytes ({len(content)})", reason, loader=load_video)
    assert capfd.readouterr() == ("", "")  # the decoders print nothing either


def test_undecodable_frames_are_rejected(
    video_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = bytearray((video_folder / "front.mp4").read_bytes())
    start = data.index(b"mdat") + 4
    middle = (start + len(data)) // 2
    data[middle : middle + 400] = b"\xff" * 400
    path = tmp_path / "scratched.mp4"
    path.write_bytes(data)
    options = {"loader": load_video, "num_frames": 40}
    refused(path, "scratched.mp4", "cannot be decoded", **options)
    assert capfd.readouterr() == ("", "")


def test_only_damaged_frames_are_rejected(video_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "scratched.mkv"
    for index in (18, 20, 26):
        path.write_bytes(fx.damaged(video_folder / "clip.mkv", index))
        chosen = [0, index]
        options = {"loader": load_video, "select": lambda info, c=chosen: c}
        refused(path, "scratched.mkv", f"frame {index} of 40 is damaged", **options)
        assert numbers(load_video(path, num_frames=2)) == [0, 39]


def test_only_requested_gops_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fx.write_video(tmp_path / "clip.mp4", **{"x264-params": "scenecut=0"})
    starts = decoded_groups(monkeypatch)
    assert numbers(load_video(path, select=lambda info: [2, 5, 23, 39])) == [2, 5, 23, 39]
    assert starts == [None, 0, 12, 36]  # the first for the rotation, then one per group


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_frames": 0}, ["num_frames=0", "above 0"]),
        ({"num_frames": -3}, ["num_frames=-3", "whole number above 0"]),
        ({"num_frames": -(10**5000)}, ["num_frames=a number of very many digits"]),
        ({"num_frames": 2.5}, ["num_frames=2.5", "whole number"]),
        ({"num_frames": True}, ["num_frames=True"]),
        ({"num_frames": "8"}, ["num_frames='8'"]),
        ({"fps": 0}, ["fps=0", "above 0"]),
        ({"fps": -1.0}, ["fps=-1.0"]),
        ({"fps": math.inf}, ["fps=inf", "finite"]),
        ({"fps": math.nan}, ["fps=nan"]),
        ({"fps": "fast"}, ["fps='fast'"]),
        ({"fps": 10**400}, ["fps=1000", "finite"]),
        ({"num_frames": 4, "fps": 1}, ["num_frames and fps", "only one"]),
        ({"num_frames": 4, "select": len}, ["num_frames and select", "only one"]),
        ({"select": [1, 2]}, ["select", "function"]),
        ({"decoder": "opencv"}, ["decoder='opencv'", "'av' or 'decord'"]),
        ({"max_pixels": 100}, ["clip.mp4", "8 frames of 80x48", "read fewer"]),
    ],
)
def test_invalid_arguments_are_rejected(video_path: Path, options: dict, parts: list[str]) -> None:
    refused(video_path, *parts, loader=load_video, **options)


def test_invalid_video_sources_are_rejected() -> None:
    frame = fx.frame_pixels(0, 48, 80)
    refused([], "list of frames", "is empty", loader=load_video)
    refused([], "list of frames", "is empty", loader=probe_video)
    refused([frame, b"words"], "frame 2 of 2", "text", loader=load_video)
    refused([frame, frame[:-2]], "frame 2 of 2", "80x46", "of one size", loader=load_video)
    refused([frame] * 9, "9 frames", "read fewer", loader=load_video, max_pixels=9)
    refused(np.stack([frame] * 2), "ndarray", "pass list(array)", loader=load_video)
    refused(torch.zeros(2, 3, 4, 4), "Tensor", "pass list(array)", loader=load_video)
    refused("https://a.org/b.mp4?key=1", "https://a.org/b.mp4: ", "URLs", loader=load_video)
    refused(None, "NoneType", "not a supported source", loader=load_video)


def test_decoders_are_not_replaced(video_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import av

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("out of order")

    with monkeypatch.context() as broken:
        broken.setattr(av, "open", fail)
        refused(video_path, "clip.mp4", "cannot be decoded: out of order", loader=load_video)
    monkeypatch.setitem(sys.modules, "decord", None)  # as if it were not installed
    assert probe_video(video_path).frames == 40
    for missing in ("decord", "av"):
        monkeypatch.setitem(sys.modules, missing, None)
        reason = f"{missing} must be installed: pip install {missing}"
        refused(video_path, "clip.mp4", reason, loader=probe_video, decoder=missing)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        [
            b"\0\0\0\x18ftypisom",
            b"\x1a\x45\xdf\xa3",
            b"RIFF\0\0\0\0AVI ",
            b"OggS",
            b"FLV\1",
            b"\0\0\1\xba",
        ]
    ),
    st.binary(max_size=300),
)
def test_random_video_bytes_raise_only_media_errors(magic: bytes, rest: bytes) -> None:
    with pytest.raises(MediaError):
        probe_video(magic + rest)
