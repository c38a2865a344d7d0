"""Images that LFM2-VL splits into tiles; the whole image has another grid than these."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vlmfast
from support import tiny_families
from support.closeness import apart, close
from support.engine.prompts import Stats, Wanted, encode, switched
from support.tiny_models import make_image
from vlmfast import VLM, ModelError
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.registry import stage_class
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.views import token_saliency
from vlmfast.testing import check_family

WIDE, TALL, SMALL = make_image(300, 100), make_image(130, 250, seed=1), make_image(40, 40, seed=2)
CASES = {"one": [WIDE], "two": [TALL, WIDE], "with a small one": [WIDE, SMALL, TALL]}


def built() -> VLM:
    return VLM(*tiny_families.build_lfm2_vl(splits=True))


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return built()


def generated(vlm: VLM, images: list[Any]) -> list[int]:
    inputs = vlm.inputs("what ?", images=images)
    ids = vlm.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_hugging_faces(vlm, case) -> None:
    images = CASES[case]
    vlm.prefix_cache.clear()
    answer = vlm.ask("what ?", images=images, max_new_tokens=8)
    assert answer.token_ids == generated(vlm, images) != generated(vlm, [SMALL])
    shown = len(vlm.inputs("what ?", images=images)["spatial_shapes"])
    assert answer.stats.views == shown > len(images)
    # Each image is found again, whichever others are beside it.
    for image in images:
        alone = vlm.ask("what ?", images=image, max_new_tokens=8)
        assert alone.stats.cached_tokens == alone.stats.visual_tokens_in
        assert alone.token_ids == generated(vlm, [image])


@pytest.mark.parametrize("recipe", ["none", "hired:budget=0.3", "divprune:budget=0.22"])
def test_entry_points_agree(vlm, recipe) -> None:
    images, given = CASES["two"], {"recipe": recipe, "max_new_tokens": 6}
    answer = vlm.ask("what ?", images=images, **given)
    kept = answer.stats.visual_tokens_kept
    if recipe != "none":
        share = float(recipe.partition("=")[2])
        total = answer.stats.visual_tokens_in
        assert sum(kept.values()) == pytest.approx(share * total, abs=2)
        assert answer.token_ids != vlm.ask("what ?", images=images, max_new_tokens=6).token_ids
    assert vlm.session(images, recipe=recipe).ask("what ?", max_new_tokens=6).token_ids == (
        answer.token_ids
    )
    prompts = [vlm.inputs("what ?", images=each) for each in (images, [SMALL], [WIDE])]
    wanted = [
        vlm.ask("what ?", images=each, **given).token_ids for each in (images, [SMALL], [WIDE])
    ]
    width = max(prompt["input_ids"].shape[1] for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        count = prompt["input_ids"].shape[1]
        ids[row, -count:], mask[row, -count:] = prompt["input_ids"][0], 1
    keys = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
    batch = {key: torch.cat([prompt[key] for prompt in prompts]) for key in keys}
    with vlmfast.attach(vlm.model, vlm.processor, recipe) as attached:
        vlm.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, **batch)
    assert [each.token_ids for each in attached.answers] == wanted


def test_boxes_show_where_tokens_are(vlm) -> None:
    """The tiles cover the image once, and so does the whole image in fewer pixels."""
    layout = vlm.ask("what ?", images=WIDE, max_new_tokens=1).trace.layout
    width, height = (layout.box[:, 2:] - layout.box[:, :2]).unbind(1)
    for tiles in (layout.tile > 0, layout.tile == 0):
        assert float((width * height)[tiles].sum()) == pytest.approx(1)
    place = torch.cat([layout.tile[:, None], layout.grid], 1)
    assert len(place.unique(dim=0)) == len(layout)
    assert len(layout.tile.unique()) == len(layout.view.unique()) == 4  # 1 x 3 tiles


REQUESTS = (SaliencyRequest(), SaliencyRequest("first", keys=True), SaliencyRequest(source="norm"))


@pytest.mark.parametrize("asked", REQUESTS)
def test_saliency_is_that_of_each_view_alone(vlm, asked) -> None:
    adapter = vlm.adapter
    prompt = vlm.inputs("what ?", images=[WIDE, TALL])
    sizes = [(100, 300), (250, 130)]
    views = len(prompt["spatial_shapes"])

    class Reads(stage_class("hired")):
        def saliencies(self) -> tuple[SaliencyRequest, ...]:
            return (asked,)

    found = []
    for shown in (sizes, [(64, 64)] * views):
        items = adapter.views_of(prompt, shown)
        wanted = Wanted.of(adapter, items, [], [Reads()])
        with torch.no_grad(), switched(vlm.model):
            made = encode(adapter, prompt, items, wanted, Stats(), {}).encoded
        tokens = VisualTokens(torch.cat(made.features), TokenLayout.cat(made.layouts), ())
        found.append((tokens.features, token_saliency(tokens, made.stats, asked), items))
    (features, saliency, items), (alone, expected, single) = found
    assert len(items) == 2 and len(single) == views and all(item.grids for item in items)
    assert torch.equal(features, alone)
    close(saliency, expected, terms=4000)
    apart(saliency, expected.roll(1), terms=4000)


def test_norms_are_those_of_the_patches(vlm) -> None:
    adapter, rows = vlm.adapter, []
    prompt, asked = vlm.inputs("what ?", images=SMALL), REQUESTS[-1]
    items = adapter.views_of(prompt, [(40, 40)])
    tower = adapter.tower()
    with tower.register_forward_hook(lambda module, args, out: rows.append(out.last_hidden_state)):
        wanted = Wanted.of(adapter, items, [], [stage_class("hired")(saliency="norm")])
        with torch.no_grad(), switched(vlm.model):
            stats = encode(adapter, prompt, items, wanted, Stats(), {}).encoded.stats
    down, across = prompt["spatial_shapes"][0].tolist()
    norms = rows[0][0, : down * across].float().norm(dim=-1)
    expected = norms.view(down // 2, 2, across // 2, 2).mean((1, 3)).flatten()
    (saliency,) = stats.saliency[asked.key]
    close(saliency.rows[0, 0], expected, terms=4000)
    apart(saliency.rows[0, 0], expected.roll(1), terms=4000)


def test_saved_sessions_have_them(vlm, tmp_path) -> None:
    given = {"max_new_tokens": 6}
    with vlm.session([TALL, WIDE], recipe="hired:budget=0.5") as session:
        session.save(tmp_path / "session")
        wanted = session.ask("what ?", **given).token_ids
    loaded = vlm.load_session(tmp_path / "session")
    assert loaded.ask("what ?", **given).token_ids == wanted


@pytest.mark.slow
def test_the_family_passes_its_checks_with_tiles() -> None:
    model, processor = tiny_families.build_lfm2_vl(splits=True)
    images = processor.image_processor
    images.tile_size, images.min_image_tokens, images.max_image_tokens = 32, 1, 4
    assert check_family(model, processor)


def test_keep_counts_tokens_of_views(vlm) -> None:
    answer = vlm.ask("what ?", images=WIDE, recipe="hired:0.25", max_new_tokens=1)
    assert answer.stats.visual_tokens_kept["hired"] == 14  # of 16 + 16 + 16 + 12


def test_tiles_without_the_whole_image_are_refused() -> None:
    vlm = built()
    vlm.processor.image_processor.use_thumbnail = False
    with pytest.raises(ModelError, match="need use_thumbnail=True"):
        vlm.ask("what ?", images=WIDE, max_new_tokens=1)
