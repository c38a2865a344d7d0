"""Images of one pixel, of less than a patch, and of one row or column of visual tokens."""

from __future__ import annotations

import pytest
import torch

from support import tiny_families
from support.closeness import apart, close
from support.tiny_models import make_image
from vlmfast import VLM, VLMFastError

BUILD = tiny_families.builders()
SIZES = [(1, 1), (2, 2), (7, 7), (8, 8), (16, 16), (17, 9), (3, 60), (60, 3)]
OTHER = make_image(60, 44, seed=5)


def generated(vlm: VLM, images: list) -> list[int]:
    inputs = vlm.inputs("what ?", images=images)
    ids = vlm.model.generate(**inputs, max_new_tokens=4, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", sorted(BUILD))
def test_small_images_are_answered(family) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    vlm = VLM(*BUILD[family]())
    for size in SIZES:
        image = make_image(*size, seed=1)
        for images in ([image], [image, OTHER]):
            try:
                wanted = generated(vlm, images)
            except VLMFastError:  # the processor's
                continue
            except RuntimeError:  # Mistral 3 takes one token for none
                assert family == "mistral3" and len(images) == 1
                wanted = []
            answer = vlm.ask("what ?", images=images, max_new_tokens=4)
            assert answer.token_ids == wanted or not wanted


def test_the_only_token_of_an_image() -> None:
    """Mistral 3 in Hugging Face fails on it alone, and has its features beside another image."""
    vlm = VLM(*BUILD["mistral3"]())
    image = make_image(8, 8, seed=1)
    inputs = [vlm.inputs("what ?", images=images) for images in ([image], [image, OTHER])]
    with pytest.raises(RuntimeError, match="split"):
        vlm.model.generate(**inputs[0], max_new_tokens=1)
    base = vlm.model.base_model
    with torch.no_grad():
        one, *_ = base.get_image_features(
            inputs[1]["pixel_values"], inputs[1]["image_sizes"]
        ).pooler_output
        (own,) = vlm.adapter.features({key: inputs[0][key] for key in vlm.adapter.tensors})
    assert one.shape == own.shape == (1, 64)
    close(own, one, terms=4000)
    apart(own, one.roll(1, 1), terms=4000)
    for recipe in (None, "divprune:0.5", "hired:budget=1", "random:1"):
        assert vlm.ask("what ?", image, recipe=recipe, max_new_tokens=4).token_ids
    assert not vlm.adapter.projector()._forward_hooks
