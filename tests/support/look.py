"""What a stage sees of a prompt: tokens and statistics, on one family of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from support import tiny_families
from vlmfast import VLM
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest

BUILD = tiny_families.first()
del BUILD["fast_vlm"]


def make_image(seed: int, width: int = 60, height: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


IMAGES = [make_image(0, 90, 44), make_image(1, 40, 60)]
VIDEO = {"video": [make_image(i, 40, 40) for i in range(5)], "num_frames": 5}
CASES = {
    "image": {"images": IMAGES[0]},
    "images": {"images": IMAGES},
    "video": VIDEO,
    "both": {"images": IMAGES[0], **VIDEO},
}


def built(name: str) -> VLM:
    if name == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    return VLM(*BUILD[name]())


def family(vlm: VLM) -> str:
    return vlm.adapter.config.model_type


@dataclass(frozen=True)
class Look(EncodeStage):
    """Records its inputs and keeps everything."""

    name: ClassVar[str] = "test-look"
    asked: tuple[SaliencyRequest, ...] = ()
    seen: ClassVar[dict] = {}

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        return self.asked

    def reduce(self, tokens, stats, request):
        self.seen.update(tokens=tokens, stats=stats)
        return tokens


def looked(vlm: VLM, *stages, asked=(), **media) -> tuple:
    """Tokens and statistics of a prompt after ``stages``."""
    vlm.ask("what ?", **media, recipe=Recipe((*stages, Look(asked))), max_new_tokens=1)
    return Look.seen["tokens"], Look.seen["stats"]
