"""Images and videos look as in a viewer: turned, mirrored, on white, every frame at its time."""

from __future__ import annotations

import importlib.util
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from support import media_fixtures as fx
from vlmfast.errors import MediaError
from vlmfast.media import load_image, load_video, probe_video

av = pytest.importorskip("av")
DECORD = pytest.mark.skipif(
    importlib.util.find_spec("decord") is None, reason="decord has no wheel for this platform"
)

# The corners of `fx.frame_pixels` after each orientation of the Exif standard.
SHOWN = {
    1: "RGBK",
    2: "GRKB",
    3: "KBGR",
    4: "BKRG",
    5: "RBGK",
    6: "BRKG",
    7: "KGBR",
    8: "GKRB",
}
# The same as display matrices (a, b, c, d): (x, y) is shown at (a x + c y, b x + d y).
MATRIX = {
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}
TURNED = pytest.mark.parametrize("orientation", SHOWN)


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


# --- orientation of images -----------------------------------------------------------------------


def oriented(fmt: str, orientation: int) -> bytes:
    """An image stored in landscape, in a file that states an orientation."""
    stored = Image.fromarray(fx.frame_pixels(20, 48, 80))
    exif = Image.Exif()
    exif[0x0112] = orientation
    if fmt == "XMP":
        notes = PngImagePlugin.PngInfo()
        notes.add_itxt("XML:com.adobe.xmp", f'<rdf tiff:Orientation="{orientation}"/>')
        return fx.encoded(stored, "PNG", pnginfo=notes)
    if fmt == "late PNG":  # the chunk may also follow the pixels
        body = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
        chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
        plain = fx.encoded(stored, "PNG")
        return plain[:-12] + chunk + plain[-12:]
    fmt, _, compression = fmt.partition(" ")
    options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(fmt, {})
    options |= {"compression": compression} if compression else {}
    return fx.encoded(stored, fmt, exif=exif, **options)


@TURNED
def test_orientation_of_every_image_format(orientation: int) -> None:
    formats = ["JPEG", "PNG", "late PNG", "XMP", "WEBP", "TIFF", "TIFF tiff_lzw"]
    Image.init()
    for fmt in [*formats, *({"AVIF"} & Image.SAVE.keys())]:
        data = oriented(fmt, orientation)
        once = load_image(data)
        assert fx.corners(once) == SHOWN[orientation], fmt
        assert once.size == ((80, 48) if orientation < 5 else (48, 80))
        assert np.array_equal(pixels(load_image(once)), pixels(once))  # not applied again
        assert np.array_equal(pixels(load_image(Image.open(io.BytesIO(data)))), pixels(once))


# --- orientation of videos -----------------------------------------------------------------------


def remuxed(data: bytes, container: str, bitstream: str | None = None) -> bytes:
    """The same packets in another container, and optionally through a bitstream filter."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(out, "w", format=container) as output:
        track = source.streams.video[0]
        stream = output.add_stream_from_template(track)
        filtered = bitstream and av.bitstream.BitStreamFilterContext(bitstream, track)
        for packet in source.demux(track):
            for part in filtered.filter(packet) if filtered else [packet]:
                if part.size:
                    part.stream = stream
                    output.mux(part)
    return out.getvalue()


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("shown") / "plain.mp4"
    # Without B-frames, so that packets are in order in every container.
    return fx.write_video(path, 4, height=48, width=80, bf="0").read_bytes()


def matrixed(data: bytes, *matrix: float) -> bytes:
    a, b, c, d = (round(65536 * value) for value in matrix)
    at = data.index(b"tkhd") + 4 + 40
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


@TURNED
def test_display_matrix_of_a_video(video: bytes, orientation: int) -> None:
    data = matrixed(video, *MATRIX[orientation])
    scaled = matrixed(video, *(1.5 * value for value in MATRIX[orientation]))
    for source in (data, scaled, remuxed(data, "matroska")):
        found = load_video(source)
        assert {fx.corners(frame) for frame in found.frames} == {SHOWN[orientation]}
        size = (80, 48) if orientation < 5 else (48, 80)
        assert {frame.size for frame in found.frames} == {size}
        assert (found.info.width, found.info.height) == size


def test_orientation_in_the_codec_is_that_of_all_frames(video: bytes) -> None:
    """The message is in the first packet alone."""
    for message, orientation in (
        ("rotate=90", 8),
        ("rotate=0:flip=horizontal", 2),
        ("rotate=0:flip=vertical", 4),
    ):
        form = f"h264_metadata=display_orientation=insert:{message}"
        found = load_video(remuxed(video, "mp4", form))
        assert {fx.corners(frame) for frame in found.frames} == {SHOWN[orientation]}


def test_matrices_that_players_ignore(video: bytes) -> None:
    half = 0.5**0.5
    for matrix in ((half, half, -half, half), (0, 0, 0, 0), (1, 1, 1, 1), (1, 0.001, -0.001, 1)):
        found = load_video(matrixed(video, *matrix), num_frames=1)
        assert fx.corners(found.frames[0]) == "RGBK"


@DECORD
def test_decord_shows_frames_upright_or_rejects_them(video: bytes) -> None:
    for orientation, matrix in MATRIX.items():
        data = matrixed(video, *matrix)
        sources = [
            (data, orientation in (1, 3, 6, 8)),
            (remuxed(data, "matroska"), matrix == (1, 0, 0, 1)),
        ]
        for source, accepted in sources:
            if accepted:
                found = load_video(source, decoder="decord")
                assert {fx.corners(frame) for frame in found.frames} == {SHOWN[orientation]}
            else:
                with pytest.raises(MediaError, match=r"decord does not show .* use PyAV"):
                    load_video(source, decoder="decord")


# --- transparency --------------------------------------------------------------------------------


def png(depth: int, colour: int, row: bytes, width: int, key: bytes) -> bytes:
    """A PNG of one row, with a ``tRNS`` chunk and, for colour type 3, four greys."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))]
    if colour == 3:
        chunks.append((b"PLTE", bytes(value for grey in (10, 20, 30, 40) for value in 3 * [grey])))
    chunks += [(b"tRNS", key)] if key else []
    chunks += [(b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


WHITE = 255
DEEP = struct.pack(">9H", 0x102, 0x203, 0x304, 0x102, 0x203, 0x305, 0x400, 0x500, 0x600)
# Depth, colour type, one row, its width, the ``tRNS`` chunk, and what is shown: greys or colours.
KEYED = {
    "1 bit": (1, 0, b"\x50", 4, b"\0\0", [WHITE, 255, WHITE, 255]),
    "2 bits": (2, 0, b"\x1b", 4, b"\0\1", [0, WHITE, 170, 255]),
    "4 bits": (4, 0, b"\x05\xaf", 4, b"\0\5", [0, WHITE, 170, 255]),
    "8 bits": (8, 0, bytes([0, 5, 85, 255]), 4, b"\0\5", [0, WHITE, 85, 255]),
    "16 bits": (16, 0, b"\x12\x34\x12\x35\0\0\0\1", 4, b"\x12\x34", [WHITE, 18, 0, 0]),
    "8-bit colours": (8, 2, bytes([1, 2, 3, 1, 2, 4]), 2, b"\0\1\0\2\0\3", [WHITE, (1, 2, 4)]),
    "16-bit colours": (16, 2, DEEP, 3, DEEP[:6], [WHITE, (1, 2, 3), (4, 5, 6)]),
    "palette, 1 bit": (1, 3, b"\x40", 2, b"\0", [WHITE, 20]),
    "palette, 2 bits": (2, 3, b"\x1b", 4, bytes([255, 0, 128]), [10, WHITE, 142, 40]),
    "palette, index": (8, 3, bytes([0, 1, 2, 3]), 4, bytes([255, 0]), [10, WHITE, 30, 40]),
    "grey and alpha": (8, 4, bytes([10, 0, 10, 255, 10, 128]), 3, b"", [WHITE, 10, 132]),
    "16-bit alpha": (
        16,
        6,
        b"\x10" + bytes(7) + b"\x10" + bytes(5) + b"\xff\xff",
        2,
        b"",
        [WHITE, (16, 0, 0)],
    ),
}


@pytest.mark.parametrize("case", KEYED.values(), ids=KEYED)
def test_transparency_of_every_depth_is_on_white(case: tuple) -> None:
    *form, shown = case
    expected = np.array([np.broadcast_to(colour, 3) for colour in shown])
    data = png(*form)
    image = Image.open(io.BytesIO(data))
    for source in (data, image, image):  # reading it does not change it
        assert np.array_equal(pixels(load_image(source))[0], expected)
    if form[4]:
        opaque = pixels(load_image(png(*form[:4], b"")))
        assert not np.array_equal(opaque[0], expected)


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_transparent_modes_are_on_white(mode: str) -> None:
    if mode == "PA":
        image = Image.new("PA", (2, 1))
        image.putpalette(3 * [40])
        image.putpixel((1, 0), (0, 255))
    else:
        image = Image.fromarray(np.array([[[40, 40, 40, 0], [40, 40, 40, 255]]], np.uint8))
        image = image.convert("LA").convert("La") if mode == "La" else image.convert(mode)
    assert pixels(load_image(image)).tolist() == [[[255] * 3, [40] * 3]]


@pytest.mark.parametrize(
    ("codec", "form"), [("png", "rgba"), ("qtrle", "argb"), ("prores_ks", "yuva444p10le")]
)
def test_transparent_videos_are_on_white(codec: str, form: str) -> None:
    frame = np.zeros((48, 80, 4), np.uint8)
    frame[..., 0] = 255
    frame[:, 40:, 3] = 255
    out = io.BytesIO()
    with av.open(out, "w", format="mov") as output:
        stream = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 80, 48, form
        for _ in range(2):
            drawn = av.VideoFrame.from_ndarray(frame, format="rgba").reformat(format=form)
            output.mux(stream.encode(drawn))
        output.mux(stream.encode())
    for image in load_video(out.getvalue()).frames:
        assert (pixels(image)[20, 10] == 255).all()
        assert np.abs(pixels(image)[20, 70].astype(int) - [255, 0, 0]).max() < 4


@pytest.mark.parametrize("codec", ["libvpx", "libvpx-vp9"])
def test_the_transparency_of_webm_is_on_white(codec: str) -> None:
    """Which is a second video in the packets of the first; frames are found after a seek too."""
    out = io.BytesIO()
    with av.open(out, "w", format="webm") as output:
        stream = output.add_stream(codec, rate=10, options={"auto-alt-ref": "0", "g": "3"})
        stream.width, stream.height, stream.pix_fmt = 80, 48, "yuva420p"
        for shade in (250, 200, 150, 100, 50):
            drawn = np.full((48, 80, 4), shade, np.uint8)
            drawn[:24, :, 3], drawn[24:, :, 3] = 255, 0
            whole = av.VideoFrame.from_ndarray(drawn, format="rgba")
            output.mux(stream.encode(whole.reformat(format="yuva420p")))
        output.mux(stream.encode())
    for chosen in ([0, 1, 2, 3, 4], [1, 4]):
        video = load_video(out.getvalue(), select=lambda _, chosen=chosen: chosen)
        for index, image in zip(chosen, video.frames, strict=True):
            assert (pixels(image)[28:] == 255).all()
            assert np.abs(pixels(image)[:20].astype(int) - (250 - 50 * index)).max() < 9
    if importlib.util.find_spec("decord"):
        with pytest.raises(MediaError, match=r"decord ignores the transparency .* use PyAV"):
            load_video(out.getvalue(), decoder="decord")


# --- animations ----------------------------------------------------------------------------------


def animation(fmt: str, durations: list[int]) -> bytes:
    """A bar that moves over a transparent ground, a pixel in each frame."""
    frames = []
    for at in range(len(durations)):
        frames.append(Image.new("RGBA", (12, 8)))
        frames[-1].paste((200, 0, 0, 255), (at, 0, at + 2, 8))
    replaced = {"GIF": {"disposal": 2}, "PNG": {"disposal": 1}, "WEBP": {"lossless": True}}[fmt]
    return fx.encoded(
        frames[0], fmt, save_all=True, append_images=frames[1:], duration=durations, **replaced
    )


@pytest.mark.parametrize("fmt", ["GIF", "PNG", "WEBP"])
def test_animated_images_are_videos(fmt: str, tmp_path: Path) -> None:
    data = animation(fmt, [100, 200, 0, 60])
    (tmp_path / "file").write_bytes(data)
    found = load_video(tmp_path / "file")
    assert found.timestamps_s == [0.0, 0.1, 0.3, 0.4]  # nothing is shown for 0 s
    assert (found.info.frames, found.info.duration_s) == (4, 0.46)
    assert found.info.fps == pytest.approx(4 / 0.46)
    for at, frame in enumerate(found.frames):
        expected = np.full((8, 12, 3), 255)
        expected[:, at : at + 2] = (200, 0, 0)
        assert np.array_equal(pixels(frame), expected)
    assert load_video(data, fps=10).indices == [0, 1, 2, 3]
    assert load_video(data, fps=5).indices == [0, 1, 3]
    assert load_video(data, select=lambda info: [1, 3]).timestamps_s == [0.1, 0.4]
    assert probe_video(data) == found.info
    # As an image, its first frame.
    assert np.array_equal(pixels(load_image(data)), pixels(found.frames[0]))


def test_images_without_frames_are_no_videos() -> None:
    image = Image.new("RGB", (9, 7))
    other = Image.new("RGB", (9, 7), "red")
    pages = fx.encoded(image, "TIFF", save_all=True, append_images=[other])
    assert load_image(pages) == image
    for data in (pages, fx.encoded(image, "GIF"), fx.encoded(image, "PNG")):
        with pytest.raises(MediaError, match=r"is an image \((TIFF|GIF|PNG)\), not a video"):
            load_video(data)
    with pytest.raises(MediaError, match="cannot be decoded"):
        load_video(animation("GIF", [100, 100, 100])[:-40])
