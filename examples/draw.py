"""Generate the image and the video of this folder: ``python examples/draw.py``.

Both use seeds that are reserved for evaluation, so the shipped model was not trained on them. The
video is stored losslessly: decoding returns the exact frames.
"""

from __future__ import annotations

from pathlib import Path

from vlmfast.scenes.examples import EVAL_SEED_START, image_example, video_example

IMAGE_SEED = EVAL_SEED_START + 9
VIDEO_SEED = EVAL_SEED_START + 12
FOLDER = Path(__file__).parent


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


def main() -> None:
    image, video = image_example(IMAGE_SEED), video_example(VIDEO_SEED)
    image.image.save(FOLDER / "picture.png", optimize=True)
    write_video(FOLDER / "clip.mp4", video.frames)
    for name, example in (("picture.png", image), ("clip.mp4", video)):
        print(f"{name}: {example.caption}")
        for qa in example.qa:
            print(f"  {qa.question}  {qa.answer}")


if __name__ == "__main__":
    main()
