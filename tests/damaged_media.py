"""Images and videos with flipped, cut and inserted bytes; as a script, a test of decord on them.

decord is native code that may crash the process, so its cases run in a separate one:
``python tests/damaged_media.py FROM TO`` prints how many were read and rejected.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, features

import media_fixtures as fx
from vlmfast.errors import MediaError
from vlmfast.media import load_video

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
BY_DECORD = ("end.mp4", "front.mp4", "fragments.mp4", "video.mkv", "video.webm")


def videos(folder: Path) -> dict[str, bytes]:
    """Small videos, one per container for which an encoder is available."""
    import av

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


def damaged(data: bytes, seed: str) -> bytes:
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


def main(first: int, last: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = videos(Path(folder))
    read, refused = 0, 0
    for seed in range(first, last):
        name = BY_DECORD[seed % len(BY_DECORD)]
        if name not in whole:
            continue
        try:
            load_video(damaged(whole[name], f"{name} {seed}"), num_frames=4, decoder="decord")
            read += 1
        except MediaError:
            refused += 1
    print(read, refused)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
