"""`benchmarks/pocket/build.py` makes a folder that plain Transformers loads, of parts that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from support.tiny_pocket import (
    PATCH,
    SIZE,
    build,
    make_decoder,
    make_pocket,
    make_tokenizer,
    make_tower,
    save_parts,
)

SIDE = SIZE // PATCH


@pytest.fixture(scope="module")
def pocket() -> Any:
    return make_pocket()


def image(seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def inputs(processor: Any, question: str = "What is in the top?") -> Any:
    content = [{"type": "image", "image": image()}, {"type": "text", "text": question}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )


def test_plain_transformers_loads_the_folder(pocket: Any, tmp_path: Path) -> None:
    folder = save_parts(tmp_path / "parts")
    build.save(pocket, tmp_path / "out", {"stage": "a", "step": 3}, folder, "float32")
    model, info = LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[of] for of in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    given = inputs(processor)
    with torch.no_grad():
        logits = model(**given).logits
        assert torch.equal(logits, pocket.model(**inputs(pocket.processor)).logits)
        assert not torch.equal(logits, model(**inputs(processor, "Where?")).logits[:, -1:])
    newline = processor.tokenizer("\n", add_special_tokens=False).input_ids[0]
    assert newline in model.generation_config.eos_token_id
    assert model.generation_config.do_sample is False
    notice = (tmp_path / "out" / "NOTICE.md").read_text()
    assert notice.startswith("NOTICE.md of the decoder") and "CC-BY 4.0" in notice
    assert (tmp_path / "out" / "GEMMA_TERMS.html").exists()
    assert json.loads((tmp_path / "out" / "pocket.json").read_text())["step"] == 3
    with pytest.raises(SystemExit, match="out exists already"):
        build.save(pocket, tmp_path / "out", {}, folder, "float32")


def test_prompt_is_the_one_that_is_trained(pocket: Any) -> None:
    """Also its newlines, one of which follows a tag of the template."""
    tokens = pocket.processor.tokenizer
    ids = inputs(pocket.processor).input_ids[0].tolist()
    start = [tokens.bos_token_id] + [pocket.model.config.image_token_id] * SIDE**2
    assert ids == start + pocket.ids("\nQuestion: What is in the top?\nAnswer:")
    assert build.prompt("Why?") == "\nQuestion: Why?\nAnswer:"
    turns = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": [{"type": "text", "text": "So"}]},
        {"role": "user", "content": [{"type": "text", "text": "Oh?"}]},
    ]
    assert pocket.processor.apply_chat_template(turns) == (
        "<s>\nQuestion: Why?\nAnswer: So\n\nQuestion: Oh?\nAnswer:"
    )


def test_features_are_the_patches_without_cls(pocket: Any) -> None:
    pixels = inputs(pocket.processor).pixel_values
    assert pixels.shape == (1, 3, SIZE, SIZE)
    with torch.no_grad():
        found = pocket.model.model.get_image_features(
            pixels, vision_feature_layer=-1, vision_feature_select_strategy="default"
        )
        rows = pocket.tower(pixels, output_hidden_states=True).hidden_states[-1]
        expected = pocket.projector(rows[:, 1:])
    assert rows.shape[1] == 1 + SIDE**2
    assert torch.equal(found.pooler_output[0], expected[0])


@pytest.mark.parametrize("size", [0, 7, 20, SIZE + PATCH])
def test_sizes_that_the_tower_cannot_take_are_refused(size: int) -> None:
    with pytest.raises(SystemExit, match=rf"size={size} must be a multiple of 8 from 8 to 48"):
        build.assemble(make_tower(), make_decoder(), make_tokenizer(), size)


def test_smaller_images_have_the_positions_of_transformers() -> None:
    size = SIZE - 2 * PATCH
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = make_tower()(pixels).last_hidden_state
        small = build.resize_tower(make_tower(), size)
        assert small.config.image_size == size
        assert torch.equal(small(pixels).last_hidden_state, expected)
