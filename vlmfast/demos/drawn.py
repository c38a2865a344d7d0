"""Examples that the project draws, from the seeds that are kept for evaluation."""

from __future__ import annotations

from pathlib import Path

from vlmfast.scenes.captions import CAPTION_QUESTION, CLIP_QUESTION
from vlmfast.scenes.examples import EVAL_SEED_START, image_example, video_example

# Seed and question: one of those that belong to the scene, or a text.
_PICTURES = ((9, 2), (4, CAPTION_QUESTION), (2, 1), (1, 1))
_CLIPS = ((12, 0), (3, 1), (3, CLIP_QUESTION))
_RATE = 2


def write_examples(folder: Path) -> dict[str, list[list[str]]]:
    """Draw the examples into a folder; rows of path and question, by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[list[str]]] = {"image": [], "video": []}
    for seed, asked in _PICTURES:
        example, path = image_example(EVAL_SEED_START + seed), folder / f"picture-{seed}.png"
        example.image.save(path)
        rows["image"].append([str(path), _question(example, asked)])
    for seed, asked in _CLIPS:
        example, path = video_example(EVAL_SEED_START + seed), folder / f"clip-{seed}.mp4"
        _write_clip(path, example.frames)
        rows["video"].append([str(path), _question(example, asked)])
    return rows


def _question(example, asked: int | str) -> str:
    return asked if isinstance(asked, str) else example.qa[asked].question


def _write_clip(path: Path, frames: list) -> None:
    """H.264 with half the colour resolution: what every browser plays."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_RATE, options={"crf": "4"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
