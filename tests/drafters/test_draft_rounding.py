"""In bfloat16 on a CPU, the attention of a drafted answer rounds as that of a plain one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from support.paths import ROOT
from vlmfast import VLM

DRAFTERS = (
    "draft-ngram+draft-recycle",
    "draft-eagle",
    "draft-layerskip",
    "draft-self",
    "draft-vispec",
    "draft-auto",
)
RECIPES = ("none", "snapkv:0.5", "hired:0.2", "tome:budget=0.5", "pyramiddrop", "lookm:0.5")
QUESTION = "Describe the image."
IMAGE = ROOT / "examples" / "picture.png"


class Rowwise(TorchFunctionMode):
    """Multiply the rows of a tree one by one: some processors round products by their shape."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        x, kwargs = args[0] if args else None, kwargs or {}
        if function is not linear or x.dim() != 3 or not 1 < x.shape[1] <= 64:
            return function(*args, **kwargs)
        rows = [function(row, *args[1:], **kwargs) for row in x.split(1, 1)]
        return torch.cat(rows, 1)


@pytest.fixture(scope="module")
def tiny() -> Iterator[VLM]:
    with Rowwise():
        yield VLM.from_pretrained("tiny")


def answers(vlm: VLM, recipe: str, drafter: str, turns: int) -> tuple[list[int], list[int]]:
    """Tokens of the plain answer and of the drafted one."""
    image = Image.open(IMAGE).convert("RGB").rotate(90 * turns)
    given = {"images": image, "max_new_tokens": 40}
    with_drafter = drafter if recipe == "none" else f"{recipe}+{drafter}"
    plain, drafted = (vlm.ask(QUESTION, recipe=r, **given) for r in (recipe, with_drafter))
    assert drafter == "draft-auto" or drafted.stats.accepted > 0
    return plain.token_ids, drafted.token_ids


@pytest.mark.cases(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("turns", range(2))
def test_drafted_answers_equal_plain_ones(tiny: VLM, turns: int, recipe: str, drafter: str) -> None:
    plain, drafted = answers(tiny, recipe, drafter, turns)
    assert drafted == plain
