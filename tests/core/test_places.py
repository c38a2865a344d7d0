"""The box of a visual token is where its pixels are: crops, pooled and merged patches, frames.

Without the output of attention, each patch of a vision tower depends on its own pixels alone. A
change of a few pixels must then reach the tokens whose boxes contain them, in each view of the
image, and no others.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support import tiny_families
from support.engine.driven import Driven
from support.engine.prompts import Inputs
from vlmfast import VLM
from vlmfast.api.request import messages_of, render, tensors_of
from vlmfast.core.layout import TokenLayout
from vlmfast.core.recipe import Recipe

pytestmark = pytest.mark.cold

BUILD = tiny_families.builders()
FAST = ("ovis2", "mistral3", "glm4v")
# A convolutional tower has no patches.
EACH = [
    pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in BUILD if n != "fast_vlm"
]
# Width and height of an image, and a place in it as fractions of both; the last one is not shown
# by towers that take a square from the center.
PLACES = [(96, 64, 0.3, 0.3), (64, 128, 0.7, 0.6), (60, 44, 0.55, 0.4), (200, 60, 0.9, 0.2)]
RADIUS = 3  # pixels around the place that change
# Frames of a video, and the one that changes. Pairs of frames are one item in some families.
FRAMES, CHANGED = 4, 2
OUTPUTS = ("out_proj", "proj", "o_proj", "projection_layer", "dense")


@pytest.fixture(scope="module", params=EACH)
def vlm(request: pytest.FixtureRequest) -> VLM:
    if request.param == "smolvlm":
        pytest.importorskip("num2words")  # needed by its processor
    vlm = VLM(*BUILD[request.param]())
    for block in vlm.adapter.vision_blocks():
        found = [
            module
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
            and name.rpartition(".")[2] in OUTPUTS
            and "mlp" not in name
        ]
        assert len(found) == 1
        for weight in found[0].parameters():
            weight.data.zero_()
    return vlm


@torch.no_grad()
def encoded(vlm: VLM, **media) -> tuple[TokenLayout, Tensor]:
    """Layout and features (N, D) of the visual tokens of a prompt."""
    prompt = render(vlm.adapter, messages_of("what ?", **media), Recipe())
    tensors = tensors_of(vlm.adapter, prompt)
    run = Driven(vlm.adapter, Inputs(tensors, prompt.sizes, "q", prompt.frames), Recipe())
    run.start(1)
    layout = run.prompt.layout
    return layout.select(layout.patches), run.prompt.embeds[layout.patches]


def changed(before: tuple[TokenLayout, Tensor], after: tuple[TokenLayout, Tensor]) -> Tensor:
    """Change of each token, relative to the largest, (N,); zero where nothing has changed."""
    assert torch.equal(before[0].order, after[0].order)
    change = (before[1] - after[1]).abs().amax(-1)
    return change / change.max().clamp(min=1e-4)


def image(width: int, height: int, x: float, y: float, seed: int = 0) -> list[np.ndarray]:
    """An image, and the same one with a few other pixels around (x, y)."""
    one = np.random.default_rng(seed).integers(60, 190, (height, width, 3), dtype=np.uint8)
    other, row, column = one.copy(), int(y * height), int(x * width)
    part = (slice(row - RADIUS, row + RADIUS), slice(column - RADIUS, column + RADIUS))
    other[part] = 255 - other[part] // 4
    return [one, other]


@pytest.mark.parametrize(("width", "height", "x", "y"), PLACES)
def test_boxes_of_images(vlm: VLM, width: int, height: int, x: float, y: float) -> None:
    name = vlm.adapter.config.model_type
    if name == "llava_onevision" and max(width, height) < 100:
        pytest.skip("its tokens are interpolated between patches, and their boxes have gaps")
    before, after = (encoded(vlm, images=[one]) for one in image(width, height, x, y))
    layout, change = before[0], changed(before, after)
    inside, reached = around(layout, x, y), around(layout, x, y, RADIUS / width, RADIUS / height)
    if name == "llava" and not inside.any():
        assert not change.any()  # outside of the square that is shown
        return
    # In the whole image, and in the crop that shows the place.
    for view in (layout.tile == 0, layout.tile > 0):
        assert not view.any() or change[inside & view].max() > 0.1
    assert change[inside].min() > 0.1 and not change[~reached].any()


def around(layout: TokenLayout, x: float, y: float, *radius: float) -> Tensor:
    """Tokens (N,) whose boxes contain a place, or with a radius those that it may reach.

    Resizing spreads a pixel over its neighbors, at most to the next token.
    """
    place, low, high = torch.tensor([x, y]), layout.box[:, :2], layout.box[:, 2:]
    slack = torch.tensor(radius) + high - low if radius else 0.0
    return ((low - slack <= place) & (place <= high + slack)).all(1)


def test_frames_of_videos(vlm: VLM) -> None:
    frames = [np.full((40, 40, 3), 20 * i, dtype=np.uint8) for i in range(FRAMES)]
    videos = [[*frames[:CHANGED], of, *frames[CHANGED + 1 :]] for of in image(40, 40, 0.3, 0.6)]
    before, after = (encoded(vlm, video=video, num_frames=FRAMES) for video in videos)
    layout, change = before[0], changed(before, after)
    (item,) = layout.item[change > 0].unique()
    items = layout.item.unique()
    assert (items == item).nonzero().item() == CHANGED * len(items) // FRAMES
    assert change[around(layout, 0.3, 0.6) & (layout.item == item)].min() > 0.1
