"""The example image and video of this project, as files.

Both use seeds that are reserved for evaluation, so the shipped model was not trained on them. The
video is stored losslessly: decoding returns the exact frames.
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from .examples import EVAL_SEED_START, ImageExample, VideoExample, image_example, video_example

IMAGE_SEED = EVAL_SEED_START + 9
VIDEO_SEED = EVAL_SEED_START + 12


def image() -> tuple[bytes, ImageExample]:
    """A PNG, and its scene with questions and answers."""
    example, file = image_example(IMAGE_SEED), io.BytesIO()
    example.image.save(file, "PNG", optimize=True)
    return file.getvalue(), example


def video() -> tuple[bytes, VideoExample]:
    """An MP4, and its scene with questions and answers."""
    example = video_example(VIDEO_SEED)
    return lossless_video(example.frames), example


def lossless_video(frames: list[Image.Image], rate: int = 2) -> bytes:
    """RGB frames as lossless H.264 in MP4."""
    return encoded(frames, "libx264rgb", "rgb24", crf="0", rate=rate)


def encoded(
    frames: list[Image.Image], codec: str, pixels: str, *, crf: str, rate: int = 2
) -> bytes:
    """RGB frames as H.264 in MP4, with a pixel format and a quality."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=rate, options={"crf": crf})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = pixels
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return file.getvalue()
