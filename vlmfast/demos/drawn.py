"""Generated examples, from the seeds that are reserved for evaluation."""

from __future__ import annotations

from pathlib import Path

from vlmfast.media import load_image, load_video
from vlmfast.scenes.captions import CAPTION_QUESTION, VIDEO_QUESTION
from vlmfast.scenes.examples import (
    EVAL_SEED_START,
    ImageExample,
    VideoExample,
    image_example,
    video_example,
)
from vlmfast.scenes.files import encoded

# Seed and question: the index of one of the scene's questions, or a text.
_IMAGES = ((9, 2), (4, CAPTION_QUESTION), (2, 1), (1, 1))
_VIDEOS = ((12, 0), (3, 1), (3, VIDEO_QUESTION))
_THUMBNAIL = 96  # pixels


def write_examples(folder: Path) -> dict[str, list[list[str]]]:
    """Write the examples to a folder and return rows of path and question, by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[list[str]]] = {"image": [], "video": []}
    for seed, question in _IMAGES:
        example, path = image_example(EVAL_SEED_START + seed), folder / f"image-{seed}.png"
        example.image.save(path)
        rows["image"].append([str(path), _question(example, question)])
    for seed, question in _VIDEOS:
        video, path = video_example(EVAL_SEED_START + seed), folder / f"video-{seed}.mp4"
        # 4:2:0 chroma subsampling, which every browser plays.
        path.write_bytes(encoded(video.frames, "libx264", "yuv420p", crf="4"))
        rows["video"].append([str(path), _question(video, question)])
    return rows


def thumbnails(rows: dict[str, list[list[str]]]) -> dict[str, list[str]]:
    """Write a small image beside each example and return their paths, by kind."""
    found: dict[str, list[str]] = {}
    for kind, examples in rows.items():
        for path, _ in examples:
            if kind == "image":
                image = load_image(path)
            else:
                *_, image = load_video(path, num_frames=2).frames
            small = Path(path).with_suffix(".thumbnail.png")
            image.resize((_THUMBNAIL, _THUMBNAIL)).save(small)
            found.setdefault(kind, []).append(str(small))
    return found


def _question(example: ImageExample | VideoExample, question: int | str) -> str:
    return question if isinstance(question, str) else example.qa[question].question
