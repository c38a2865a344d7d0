"""Builders of valid and broken images and videos for the tests of media reading."""

from __future__ import annotations

import contextlib
import http.server
import io
import random
import struct
import threading
import time
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image


def make_image(height: int = 30, width: int = 40, seed: int = 0) -> np.ndarray:
    """Return a uint8 HxWx3 image: a gradient, which shows orientation, with noise."""
    noise = np.random.default_rng(seed).integers(0, 40, (height, width, 3))
    ramp = np.add.outer(np.arange(height) * 3, np.arange(width) * 2)[..., None]
    return np.clip(ramp * [1.0, 0.5, 0.25] + noise, 0, 255).astype(np.uint8)


def encoded(image: Image.Image, fmt: str, **options: object) -> bytes:
    """Return the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, fmt, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG with a size but without pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def frame_pixels(index: int, height: int, width: int) -> np.ndarray:
    """Return frame `index` of the test videos: its number as brightness, and four corners.

    Upper left red, upper right green, lower left blue, lower right dark, each a quarter wide.
    """
    pixels = np.full((height, width, 3), 40 + 3 * index, np.uint8)
    h, w = height // 4, width // 4
    pixels[:h, :w] = (255, 0, 0)
    pixels[:h, -w:] = (0, 255, 0)
    pixels[-h:, :w] = (0, 0, 255)
    pixels[-h:, -w:] = 0
    return pixels


def frame_number(image: Image.Image) -> int:
    """Read the number from a frame of a test video, independent of its rotation."""
    return round((float(np.asarray(image)[image.height // 2, image.width // 2].mean()) - 40) / 3)


def corners(image: Image.Image) -> str:
    """Return the colours of a frame's corners in reading order; upright is "RGBK"."""
    pixels = np.asarray(image).astype(int)
    found = (pixels[3, 3], pixels[3, -4], pixels[-4, 3], pixels[-4, -4])
    return "".join("K" if corner.max() < 100 else "RGB"[corner.argmax()] for corner in found)


def write_video(
    path: Path,
    frames: int = 40,
    *,
    height: int = 48,
    width: int = 80,
    rate: int | Fraction = 10,
    codec: str = "libx264",
    movflags: str = "",
    container: str | None = None,
    **options: str,
) -> Path:
    """Write a video whose frame i is `frame_pixels(i)`, with B-frames and several key frames."""
    import av

    flags = {"movflags": movflags} if movflags else {}
    with av.open(str(path), "w", format=container, options=flags) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.gop_size = 12
        stream.options = {"bf": "2", "crf": "10"} | options if codec == "libx264" else options
        for index in range(frames):
            pixels = frame_pixels(index, height, width)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return path


def still(
    count: int,
    rate: int | Fraction,
    container: str = "mp4",
    *,
    periods: Sequence[int] | None = None,
) -> bytes:
    """A video that repeats one key frame of 32x32, without encoding it each time.

    `periods` are the times of the frames in periods of `rate`, by default 0, 1, 2, ...
    """
    import av

    frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 99, np.uint8), format="rgb24")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream("mpeg4", rate=rate)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        (packet, *_) = [*stream.encode(frame), *stream.encode()]
        data = bytes(packet)
        for at in range(count) if periods is None else periods:
            one = av.Packet(data)
            one.stream, one.time_base = stream, packet.time_base
            one.pts = one.dts = at
            one.duration, one.is_keyframe = 1, True
            output.mux(one)
    return buffer.getvalue()


def mangled(data: bytes, seed: str) -> bytes:
    """One of six kinds of damage, drawn by ``seed``."""
    rng, changed = random.Random(seed), bytearray(data)
    kind, at, length = rng.randrange(6), rng.randrange(len(data)), rng.randrange(1, 64)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + length :]
    if kind == 2:
        return data[:at] + rng.randbytes(length) + data[at:]
    # Flips anywhere, in the header, or at the end, where containers store their index.
    first, last = ((0, len(data)), (0, min(len(data), 1024)), (len(data) // 2, len(data)))[kind - 3]
    for _ in range(rng.choice((1, 2, 8, 32))):
        changed[rng.randrange(first, last)] = rng.choice((0, 255, rng.randrange(256)))
    return bytes(changed)


def damaged(path: Path, index: int) -> bytes:
    """Return a video with noise in the stored data of the frame shown at `index`."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        packets = [(p.pts, p.pos, p.size) for p in container.demux(stream) if p.size]
    _, position, size = sorted(packets)[index]
    data = bytearray(path.read_bytes())
    kept = size // 2
    data[position + kept : position + size] = np.random.default_rng(0).bytes(size - kept)
    return bytes(data)


def without_first_frame(path: Path, result: Path) -> Path:
    """Copy a video without the key frame on which its first frames depend."""
    import av

    with av.open(str(path)) as container, av.open(str(result), "w") as output:
        stream = output.add_stream_from_template(container.streams.video[0])
        for number, packet in enumerate(container.demux(video=0)):
            if number and packet.size:
                packet.stream = stream
                output.mux(packet)
    return result


def write_audio(path: Path, container: str | None = None) -> Path:
    """Write a second of silence: a container without a video stream."""
    import av

    with av.open(str(path), "w", format=container) as output:
        stream = output.add_stream("aac", rate=16000, layout="mono")
        silence = np.zeros((1, 16000), np.float32)
        frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
        frame.sample_rate = 16000
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def trimmed(data: bytes, *, skip_ticks: int, length_ms: int) -> bytes:
    """Return an MP4 (movie clock 1000, as FFmpeg writes) whose edit list shows only a part."""
    at = data.index(b"elst") + 12
    _, start = struct.unpack(">Ii", data[at : at + 8])
    return data[:at] + struct.pack(">Ii", length_ms, start + skip_ticks) + data[at + 8 :]


class _Handler(http.server.BaseHTTPRequestHandler):
    payload = b""

    def do_GET(self) -> None:  # the base class's name
        path = self.path.partition("?")[0]
        if path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/image")
            self.end_headers()
            return
        if path == "/missing":
            self.send_error(404)
            return
        if path == "/to":  # the location in the query
            self.send_response(302)
            self.send_header("Location", urllib.parse.unquote(self.path.partition("?")[2]))
            self.end_headers()
            return
        if path == "/slow-headers":
            with contextlib.suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\n" + 99 * b"X-Wait: a while\r\n":
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.02)
            return
        if path == "/garbage":
            self.wfile.write(b"secret words\r\n\r\n")
            return
        self.send_response(200)
        if path == "/huge":
            self.send_header("Content-Length", str(1 << 40))
        elif path == "/cut":
            self.send_header("Content-Length", str(len(self.payload) + 100))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may have disconnected
            while path == "/endless":
                self.wfile.write(bytes(1 << 16))
            for _ in range(40 if path == "/trickle" else 1):
                self.wfile.write(self.payload[:1] if path == "/trickle" else self.payload)
                time.sleep(0.05 if path == "/trickle" else 0)

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def web_server(payload: bytes) -> Iterator[str]:
    """Serve a payload on this machine, correctly and with faults; yields the address.

    Paths: /image, /moved (to it), /missing, /huge (by its header), /cut (shorter than its
    header states), /trickle and /slow-headers (a byte now and then), /to?URL (redirect to URL),
    /garbage (no HTTP), /endless.
    """
    handler = type("Handler", (_Handler,), {"payload": payload})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
