"""Saliency of visual tokens on every vision tower, and its alignment with the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support import look, tiny_families
from support.closeness import apart, close
from support.look import family, make_image
from vlmfast import VLM, RecipeError, VLMFastError
from vlmfast.core.saliency import SaliencyRequest, to_tokens, window_order

BUILD = tiny_families.first()
SOURCES = {
    "llava": "cls",
    "llava_next": "cls",
    "llava_next_video": "cls",
    "internvl": "cls",
    "llava_onevision": "received",
    "qwen2_5_vl": "received",
    "qwen3_vl": "received",
    "idefics3": "received",
    "smolvlm": "received",
    "gemma3": "received",
    "fast_vlm": "norm",
}
RECIPES = (
    "hired:0.2",
    "visionzip:0.2",
    "mustdrop",
    "pyramiddrop",
    "divprune:0.2",
    "scope:0.2",
    "flashvid:0.2",
    "prumerge:0.2",
    "prumerge-plus:0.2",
    "faithful",
    "balanced",
    "fast",
    "hired:0.5+pyramiddrop",
)


IMAGE = {"images": make_image(0, 90, 44)}
VIDEO = {"video": [make_image(i, 40, 40) for i in range(5)], "num_frames": 5}
BOTH = {"images": make_image(0, 90, 44), **VIDEO}
CASES = {"image": IMAGE, "video": VIDEO, "both": BOTH}


@pytest.fixture(scope="module", params=BUILD)
def vlm(request) -> VLM:
    if request.param == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    return VLM(*BUILD[request.param]())


def looked(vlm: VLM, *asked: SaliencyRequest, **media) -> tuple:
    """Tokens and statistics of a prompt."""
    return look.looked(vlm, asked=asked or (SaliencyRequest(),), **media)


# --- documented recipes run on every family ------------------------------------------------------


# Every two of family, recipe and medium meet; the other half is slow.
@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("vlm", "recipe", "case"),
    [
        pytest.param(name, recipe, case, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
        for i, name in enumerate(BUILD)
        for j, recipe in enumerate(RECIPES)
        for k, case in enumerate(["image", "video"])
    ],
    indirect=["vlm"],
)
def test_documented_recipes_run_on_every_family(vlm, recipe, case):
    answer = vlm.ask("what is here ?", **CASES[case], recipe=recipe, max_new_tokens=3)
    stats = answer.stats
    assert answer.token_ids
    ranked = {"divprune", "pyramiddrop"}.isdisjoint({s.name for s in vlm.recipe(recipe)})
    expected = SOURCES[family(vlm)] if ranked or "hired" in answer.canonical_recipe else ""
    assert stats.saliency == answer.trace.saliency == expected
    assert answer.trace.to_dict()["saliency"] == expected
    if recipe != "mustdrop":  # its thresholds are absolute
        assert stats.equivalent_tokens < stats.visual_tokens_in


@pytest.mark.cases(13)
@pytest.mark.parametrize("recipe", ["hired:0.3", "visionzip:0.3", "scope:0.3", "flashvid:0.3"])
def test_images_and_videos_in_one_prompt(vlm, recipe):
    media = VIDEO if family(vlm) == "smolvlm" else BOTH
    answer = vlm.ask("what is here ?", **media, recipe=recipe, max_new_tokens=3)
    assert 0 < answer.stats.equivalent_tokens < 0.5 * answer.stats.visual_tokens_in


@pytest.mark.cases(10)
@pytest.mark.parametrize("shape", [(20, 2000, 3), (2000, 20, 3)])
def test_long_narrow_images(vlm, shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for recipe in ("hired:0.2", "flashvid:0.2"):
        try:
            answer = vlm.ask("what ?", pixels, recipe=recipe, max_new_tokens=1)
        except VLMFastError:  # Hugging Face's processor rejects it too
            with pytest.raises(VLMFastError):
                vlm.ask("what ?", pixels, max_new_tokens=1)
        else:
            assert answer.stats.saliency == SOURCES[family(vlm)]


# --- source, block and tokens of the saliency ----------------------------------------------------


def test_saliency_sources(vlm):
    usual = SOURCES[family(vlm)]
    assert vlm.adapter.sources()[0] == usual
    for source in vlm.adapter.sources():
        _, stats = looked(vlm, SaliencyRequest(source=source, keys=True), **IMAGE)
        assert stats.sources() == source
        for item in stats.items:
            salient = stats.salient(SaliencyRequest(source=source, keys=True), item)
            views, n = item.views[1] - item.views[0], item.patches[0] * item.patches[1]
            assert (salient.rows.shape[0], salient.rows.shape[2]) == (views, n)
            assert salient.keys.shape[:2] == (views, n)
            assert salient.rows.dtype == torch.float32
            assert bool((salient.rows >= 0).all())
            if source == "received":  # each row of patches sums to 1, less the weight of CLS
                total = salient.rows.sum(-1)
                assert bool((total <= 1 + 1e-5).all())
                if not vlm.adapter.specials():
                    close(total, torch.ones_like(total), terms=16 * n)
    for source in {"cls", "received", "norm"} - set(vlm.adapter.sources()):
        name = family(vlm)
        message = rf"saliency={source} cannot be read from {name}: its vision tower .* allowed"
        with pytest.raises(RecipeError, match=message):
            vlm.ask("what ?", **IMAGE, recipe=f"hired:saliency={source}")


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", ["image", "video", "both"])
def test_saliency_is_aligned_with_patches(vlm, case):
    """Changing a patch before the projector changes the tokens that receive its saliency."""
    if family(vlm) == "smolvlm" and case == "both":
        pytest.skip("smolvlm reads images or one video")
    if family(vlm) == "fast_vlm":
        pytest.skip("its features are not those of single patches in front of the projector alone")
    adapter = vlm.adapter
    block = adapter.vision_blocks()[adapter.feature_blocks()[-1]]
    tokens, stats = looked(vlm, **CASES[case])
    plain = tokens.features.clone()
    rng = np.random.default_rng(0)
    # The calls of the tower and their numbers of rows.
    shapes: list[tuple[int, ...]] = []
    handle = block.register_forward_hook(
        lambda m, a, out: shapes.append((out[0] if isinstance(out, tuple) else out).shape)
    )
    looked(vlm, **CASES[case])
    handle.remove()
    for _ in range(6):
        call = int(rng.integers(len(shapes)))
        rows = shapes[call][-2] - adapter.specials()
        view = int(rng.integers(shapes[call][0])) if len(shapes[call]) == 3 else 0
        patch = int(rng.integers(rows))
        count = iter(range(len(shapes)))

        def disturbed(module, args, out, call=call, view=view, patch=patch, count=count):
            hidden = (out[0] if isinstance(out, tuple) else out).clone()
            if next(count) == call:
                where = (view,) if hidden.dim() == 3 else ()
                hidden[(*where, adapter.specials() + patch)] += 3 * torch.randn(hidden.shape[-1])
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        handle = block.register_forward_hook(disturbed, prepend=True)
        try:
            changed, _ = looked(vlm, **CASES[case])
        finally:
            handle.remove()
        moved = (changed.features - plain).abs().amax(1) > 1e-4
        assert set(moved.nonzero().flatten().tolist()) == marked(
            vlm, tokens, stats.items, shapes, call, view, patch
        )


def marked(vlm, tokens, items, shapes, call, view, patch) -> set[int]:
    """Tokens to which `Adapter.to_tokens` assigns a patch of the tower."""
    adapter = vlm.adapter
    if adapter.packed:  # all images of a call form one row
        order = sorted(range(len(items)), key=lambda i: items[i].video >= 0)
        row = sum(shape[-2] for shape in shapes[:call]) + patch
        for number in order:
            n = items[number].patches[0] * items[number].patches[1]
            n *= adapter.config.vision_config.spatial_merge_size**2
            if row < n:
                break
            row -= n
        one = torch.zeros(1, n)
        one[0, row] = 1
    else:
        view += sum(shape[0] for shape in shapes[:call])
        number = next(
            (i for i, entry in enumerate(items) if entry.views[0] <= view < entry.views[1]), None
        )
        if number is None:  # a padded view
            return set()
        views = adapter.whole_first(items[number])
        one = torch.zeros(len(views), shapes[call][-2] - adapter.specials())
        one[views.index(view), patch] = 1
    item = items[number]
    spread = adapter.to_tokens(one, item)
    layout = tokens.layout
    mine = (layout.item == number) & layout.patches
    slot = (layout.grid[:, 1] * item.patches[1] + layout.grid[:, 2]).long()
    index = mine.nonzero().flatten()
    here = spread[layout.tile[index].long(), slot[index]] > 0
    return set(index[here].tolist())


def test_received_attention_equals_eager_maps(vlm):
    """For towers whose attention maps Hugging Face returns."""
    if vlm.adapter.packed or family(vlm) in ("fast_vlm", "internvl"):
        pytest.skip("its tower hands out no attention maps")
    request = SaliencyRequest(source="received")
    _, stats = looked(vlm, request, **IMAGE)
    inputs = vlm.inputs("what ?", **IMAGE)
    pixels, specials = inputs["pixel_values"].flatten(0, -4), vlm.adapter.specials()
    tower = vlm.model.get_encoder(modality="image")
    vlm.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps = tower(pixels, output_attentions=True).attentions
    finally:
        vlm.model.set_attn_implementation("sdpa")
    layer = vlm.adapter.salient_block("features")
    expected = maps[layer][:, :, specials:].mean(2)[..., specials:]
    (item,) = stats.items
    expected = expected[vlm.adapter.whole_first(item)]
    n = item.patches[0] * item.patches[1]
    tokens_of = vlm.adapter.to_tokens(expected, item) * (expected.shape[-1] / n)
    rows = stats.salient(request, item).rows
    close(rows, tokens_of, terms=64 * expected.shape[-1])
    wrong = vlm.adapter.to_tokens(maps[layer - 1][:, :, specials:].mean(2)[..., specials:], item)
    apart(rows, wrong[vlm.adapter.whole_first(item)], terms=64 * expected.shape[-1])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["lfm2_vl", "mistral3", "qwen2_5_vl"])
def test_saliency_of_an_image_does_not_depend_on_the_others(name):
    """Images of one size pass through the tower together, out of their order."""
    vlm = VLM(*tiny_families.builders()[name]())
    asked = tuple(SaliencyRequest(source=source, keys=True) for source in ("received", "norm"))
    images = [make_image(0), make_image(1, 40, 64), make_image(2)]
    _, stats = looked(vlm, *asked, images=images)
    for number, image in enumerate(images):
        _, alone = looked(vlm, *asked, images=image)
        for request in asked:
            got = stats.salient(request, stats.items[number])
            want = alone.salient(request, alone.items[0])
            for one, other in ((got.rows, want.rows), (got.keys, want.keys)):
                close(one, other, terms=4 * 512)
            if number != 1:  # another image of this size
                control = stats.salient(request, stats.items[2 - number])
                apart(got.rows, control.rows, terms=4 * 512)
                apart(got.keys, control.keys, terms=4 * 512)


def test_windowed_tower_has_no_received_attention():
    vlm = VLM(*BUILD["qwen2_5_vl"]())
    assert vlm.adapter.global_blocks() == [1, 3]
    blocks = [vlm.adapter.salient_block(block) for block in ("first", "features", "last")]
    assert blocks == [1, 3, 3]
    vlm.model.config.vision_config.fullatt_block_indexes = []
    assert vlm.adapter.sources() == ("norm",)
    with pytest.raises(RecipeError, match="all blocks of its vision tower attend within windows"):
        vlm.ask("what ?", **IMAGE, recipe="hired:saliency=received")
    assert vlm.ask("what ?", **IMAGE, recipe="hired", max_new_tokens=1).stats.saliency == "norm"


# --- arithmetic -----------------------------------------------------------------------------------


def test_to_tokens_averages_patches():
    patches = torch.arange(16.0).view(1, 16)
    assert to_tokens(patches, (4, 4)) is patches
    assert to_tokens(patches, (2, 2)).tolist() == [[2.5, 4.5, 10.5, 12.5]]
    assert to_tokens(torch.ones(3, 2, 25), (3, 3)).shape == (3, 2, 9)
    assert to_tokens(torch.ones(3, 2, 25), (3, 3)).unique().tolist() == [1.0]


def test_window_order():
    assert window_order(2, 3, 2).tolist() == [0, 1, 3, 4, 2, 5]
    assert window_order(3, 3, 2).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    for rows, columns, window in [(5, 7, 3), (4, 4, 2), (1, 9, 4)]:
        order = window_order(rows, columns, window)
        assert order.sort().values.tolist() == list(range(rows * columns))


def test_invalid_requests_raise():
    for wrong in ({"block": "middle"}, {"source": "attention"}):
        with pytest.raises(ValueError, match="SaliencyRequest"):
            SaliencyRequest(**wrong)
    assert SaliencyRequest().key != SaliencyRequest(keys=True).key
    assert SaliencyRequest(keys=True).key != SaliencyRequest(keys=True, wide=True).key


# --- choice of the source ------------------------------------------------------------------------


def test_sources_of_a_tower_with_cls(random_vlm):
    answers = {
        source: random_vlm.ask(
            "what ?", make_image(0), recipe=f"hired:0.3,saliency={source}", max_new_tokens=2
        )
        for source in ("auto", "cls", "received", "norm")
    }
    kept = {source: answer.trace.entered.order.tolist() for source, answer in answers.items()}
    assert kept["auto"] == kept["cls"]
    assert len({tuple(order) for order in kept.values()}) == 3
    named = {source: answer.stats.saliency for source, answer in answers.items()}
    assert named == {"auto": "cls", "cls": "cls", "received": "received", "norm": "norm"}


# --- unsupported parts of methods ----------------------------------------------------------------


def test_mustdrop_reports_skipped_parts(vlm):
    answer = vlm.ask("what ?", **IMAGE, recipe="mustdrop:budget=0.8", max_new_tokens=1)
    left_out = [] if family(vlm) != "fast_vlm" else ["mustdrop: its part inside the vision tower"]
    assert answer.stats.left_out == left_out
    assert answer.stats.equivalent_tokens < answer.stats.visual_tokens_in


def test_method_without_supported_parts_raises(vlm):
    if family(vlm) != "fast_vlm":
        return
    with pytest.raises(
        RecipeError, match=r"inside the vision tower, .* on this model '\w+:.*' works"
    ):
        vlm.ask("what ?", **IMAGE, recipe="mustdrop:global_thr=0", max_new_tokens=1)


def test_session_reports_the_source(random_vlm):
    with random_vlm.session(images=make_image(0), recipe="hired:0.5", history=False) as session:
        for question in ("what ?", "and here ?"):
            assert session.ask(question, max_new_tokens=2).stats.saliency == "cls"
