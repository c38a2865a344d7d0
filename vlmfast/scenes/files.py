"""The example image and video of this project, as files.

Both use seeds that are reserved for evaluation, so the shipped model was not trained on them. The
video is stored losslessly: decoding returns the exact frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .examples import EVAL_SEED_START, image_example, video_example

if TYPE_CHECKING:
    from .examples import ImageExample, VideoExample

IMAGE_SEED = EVAL_SEED_START + 9
VIDEO_SEED = EVAL_SEED_START + 12


def write_examples(folder: Path) -> dict[Path, ImageExample | VideoExample]:
    """Write ``picture.png`` and ``clip.mp4`` to a folder, which is created if needed.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    dict
        Each file with its scene, questions and answers.

    Raises
    ------
    OSError
        If a file cannot be written.
    """
    image, video = image_example(IMAGE_SEED), video_example(VIDEO_SEED)
    picture, clip = folder / "picture.png", folder / "clip.mp4"
    folder.mkdir(parents=True, exist_ok=True)
    image.image.save(picture, optimize=True)
    write_video(clip, video.frames)
    return {picture: image, clip: video}


def write_video(path: Path, frames: list, rate: int = 2) -> None:
    """Write RGB frames as lossless H.264 in MP4."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264rgb", rate=rate, options={"crf": "0"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "rgb24"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
