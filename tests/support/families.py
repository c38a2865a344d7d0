"""Prompts of all kinds of media for every family, and a stage that drops in two layers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from support import closeness, tiny_families
from support.engine.driven import Driven
from support.engine.prompts import Inputs
from support.reference import TOKENS
from vlmfast import VLM
from vlmfast.api.request import messages_of, render, tensors_of
from vlmfast.core.params import positions_param
from vlmfast.core.protocols import PrefillStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import StatRequest

BUILD = tiny_families.builders()


def make_image(seed: int, width: int = 60, height: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


CASES = {
    "no image": {},
    "one image": {"images": [make_image(0)]},
    "three images": {"images": [make_image(0), make_image(1, 30, 70), make_image(2, 90, 33)]},
    "a video": {"video": [make_image(i, 40, 40) for i in range(5)], "num_frames": 5},
    "an image and a video": {
        "images": [make_image(0)],
        "video": [make_image(i, 40, 40) for i in range(4)],
        "num_frames": 4,
    },
}


def built(name: str) -> VLM:
    return VLM(*BUILD[name]())


def start(vlm: VLM, recipe=(), **media) -> Driven:
    prompt = render(vlm.adapter, messages_of("what is here ?", **media), Recipe())
    inputs = Inputs(tensors_of(vlm.adapter, prompt), prompt.sizes, "q", prompt.frames)
    return Driven(vlm.adapter, inputs, Recipe.of(recipe), time.perf_counter())


def sums(vlm: VLM, run: Driven) -> int:
    """Terms of a logit of ``run``, over its prompt and `TOKENS`."""
    return closeness.network(vlm.model, run.inputs.tensors["input_ids"].shape[1] + len(TOKENS))


@dataclass(frozen=True)
class Rank(PrefillStage):
    """Keeps, twice, the half of the visual tokens that the last row attends to most."""

    name: ClassVar[str] = "test-rank"
    at: tuple[int, ...] = (1, 3)
    positions: str = positions_param()

    def layers(self, depth):
        return self.at

    def text_stats(self, depth):
        return {layer - 1: StatRequest("last") for layer in self.at}

    def select_tokens(self, step, layer):
        visual = step.layout.visual.nonzero().flatten()
        score = step.stats[layer - 1].mean(dim=(0, 1))[visual]
        best = visual[score.argsort(descending=True)[: len(visual) // 2]]
        text = (~step.layout.visual).nonzero().flatten()
        return torch.cat([text, best]).sort().values
