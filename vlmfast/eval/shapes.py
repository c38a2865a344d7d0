"""The task ``shapes``: questions about generated scenes like those that `tiny` was trained on.

Images and videos come from the held-out seeds, in ascending order. All of their questions are used
until each type has enough, so a larger limit includes the questions of a smaller one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from vlmfast.errors import VLMFastError
from vlmfast.scenes.examples import (
    CAPTION_QUESTION,
    EVAL_SEED_START,
    EVAL_SEED_STOP,
    IMAGE_TYPES,
    VIDEO_QUESTION,
    VIDEO_TYPES,
    image_example,
    score_caption,
    video_example,
)

from .scores import normalise
from .tasks import Doc, grey

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

_EXAMPLES = {"image": image_example, "video": video_example}
_TYPES = {"image": IMAGE_TYPES, "video": VIDEO_TYPES}
_CAPTIONS = {"image": CAPTION_QUESTION, "video": VIDEO_QUESTION}
# Number of seeds with disjoint scenes that the held-out range allows.
_SEEDS = 16
_STRIDE = (EVAL_SEED_STOP - EVAL_SEED_START) // _SEEDS
_LIMIT = 100


@lru_cache(maxsize=4)
def _example(modality: str, seed: int) -> Any:
    """Cached, because the questions about one scene are consecutive."""
    return _EXAMPLES[modality](seed)


class Shapes:
    """Twelve types of questions about images, seven about videos, and a caption of each."""

    name = "shapes"
    version = "1"
    controls = ("question-only", "background-only")
    generation: ClassVar[dict[str, dict[str, Any]]] = {
        "question": {"do_sample": False, "max_new_tokens": 16},
        "caption": {"do_sample": False, "max_new_tokens": 128},
    }

    options: ClassVar[dict[str, Any]] = {}

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        """``limit`` questions of each type, by default 100."""
        limit = _LIMIT if limit is None else limit
        if limit < 1:
            raise VLMFastError(f"limit is {limit}; it must be at least 1 question per type")
        if not 0 <= seed < _SEEDS:
            raise VLMFastError(f"seed is {seed}; the task shapes has seeds 0 to {_SEEDS - 1}")
        start = EVAL_SEED_START + seed * _STRIDE
        return [doc for modality in _TYPES for doc in self._walk(modality, start, limit)]

    def _walk(self, modality: str, start: int, limit: int) -> list[Doc]:
        caption = f"{modality}-caption"
        left = dict.fromkeys((*_TYPES[modality], caption), limit)
        docs = []
        for number in range(start, start + _STRIDE):
            example, scene = _example(modality, number), f"{modality}-{number}"
            asked = [(qa.type, qa.question, qa.answer, "question") for qa in example.qa]
            asked.append((caption, _CAPTIONS[modality], example.caption, "caption"))
            for type_, question, target, kind in asked:
                if left[type_]:
                    left[type_] -= 1
                    name = f"{scene}-{type_.removeprefix(f'{modality}-')}"
                    docs.append(Doc(name, type_, modality, scene, question, target, kind, number))
            if not any(left.values()):
                return docs
        raise VLMFastError(
            f"limit is {limit}; the held-out scenes of one seed have fewer questions of type "
            + ", ".join(type_ for type_, n in left.items() if n)
        )

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        """The image or the four frames, or their replacement under a control."""
        example = _example(doc.modality, doc.seed)
        single = doc.modality == "image"
        frames = [example.image] if single else example.frames
        if control == "question-only":
            frames = [grey(frame) for frame in frames]
        elif control == "background-only":
            masks = example.foreground[None] if single else example.foreground
            frames = [
                without_foreground(frame, mask, doc.seed)
                for frame, mask in zip(frames, masks, strict=True)
            ]
        return {"images": frames[0]} if single else {"video": frames, "num_frames": len(frames)}

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        answer = self.filter(doc, text)
        return {"filtered_resps": [answer], "score": self.score(doc, answer)}

    def filter(self, doc: Doc, text: str) -> str:
        """Captions unchanged, other answers normalised."""
        return text.strip() if doc.kind == "caption" else normalise(text)

    def score(self, doc: Doc, answer: str) -> float:
        """Fraction of the correct slots of a caption; other answers are 1 (right) or 0."""
        if doc.kind == "caption":
            return score_caption(answer, _example(doc.modality, doc.seed).caption_slots)
        return float(answer == normalise(doc.target))


def without_foreground(frame: Image.Image, mask: np.ndarray, seed: int) -> Image.Image:
    """Paint the background over the ``mask`` (H, W) of a frame.

    Every masked pixel becomes the background's mean colour at that position (a plane fitted to its
    pixels) plus the deviation of a random background pixel. The mean alone would leave outlines on
    gradients and grain, and outlines reveal half of the answers; this leaves outlines only on
    checkered backgrounds.
    """
    import numpy as np
    from PIL import Image

    pixels = np.asarray(frame, dtype=np.float64)
    if mask.all() or not mask.any():
        return grey(frame) if mask.any() else frame
    rows, columns = np.indices(mask.shape) / max(mask.shape)
    positions = np.stack([np.ones(mask.shape), rows, columns], axis=-1)
    plane = np.linalg.lstsq(positions[~mask], pixels[~mask], rcond=None)[0]
    grain = pixels[~mask] - positions[~mask] @ plane
    drawn = np.random.default_rng(seed).integers(len(grain), size=int(mask.sum()))
    pixels[mask] = positions[mask] @ plane + grain[drawn]
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
