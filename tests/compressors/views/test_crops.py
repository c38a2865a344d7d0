"""Crops that are not encoded: what is left equals the full model's, the rest costs nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import vlmfast
from support import tiny_families
from support.closeness import apart, close
from support.look import Look
from support.tiny_models import build_llava, build_llava_next, make_image
from support.views import looked, rows_in
from vlmfast import VLM, RecipeError
from vlmfast.compressors.views.crops import Crops, worth_encoding
from vlmfast.core.layout import Kind
from vlmfast.core.protocols import EncodeStage, ViewStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.saliency import SaliencyRequest

BUILD = {"llava_next": build_llava_next} | {
    name: getattr(tiny_families, f"build_{name}")
    for name in (
        "llava_next_video", "llava_onevision", "internvl", "idefics3", "smolvlm",
        "aya_vision",
    )
}  # fmt: skip
FEATURES = (SaliencyRequest(), SaliencyRequest("first", keys=True), SaliencyRequest(source="norm"))


def noise(seed: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


TALL, WIDE = noise(0, 40, 120), noise(1, 90, 44)  # not the same number of crops
VIDEO = {"video": [noise(i, 40, 40) for i in range(3)], "num_frames": 3}
CASES = {"image": {"images": WIDE}, "images": {"images": [TALL, WIDE]}, "video": VIDEO}


@functools.cache
def built(name: str) -> VLM:
    if name == "smolvlm":
        pytest.importorskip("num2words")  # required by its processor
    return VLM(*BUILD[name](), prefix_cache_bytes=0)


@pytest.fixture(scope="module", params=BUILD)
def vlm(request) -> VLM:
    return built(request.param)


@pytest.fixture(scope="module")
def model() -> VLM:
    return built("llava_next")


@dataclass(frozen=True)
class Drops(EncodeStage):
    """Drops tokens of the prompt after the tower, by their order."""

    name: ClassVar[str] = "test-drops"
    order: tuple[int, ...] = ()
    positions: str = "compact"

    def reduce(self, tokens, stats, request):
        kept = torch.tensor(self.order)
        return tokens.select(torch.isin(tokens.layout.order, kept))


def without(tokens, skipped: Tensor) -> Tensor:
    """Tokens whose crop was not skipped, with newlines of rows that have any: bool, (S,)."""
    layout = tokens.layout
    kept = (layout.view < 0) | ~skipped[layout.view.clamp(min=0).long()]
    for item in layout.item.unique():
        own = layout.item == item
        if bool(kept[own].all()):
            continue
        newline = layout.kind[own] == Kind.NEWLINE
        row = newline.long().cumsum(0) - newline.long()
        canvas = (kept[own] & ~newline & (layout.tile[own] > 0)).nonzero().flatten()
        kept[own] &= ~newline | torch.isin(row, row[canvas])
    return kept


# --- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "keep", "cover", "expected"),
    [
        ([1.0, 4.0, 2.0, 3.0], 0.5, 1.0, [1, 3]),
        ([1.0, 4.0, 2.0, 3.0], 1.0, 1.0, [0, 1, 2, 3]),
        ([1.0, 4.0, 2.0, 3.0], 0.0, 1.0, []),
        ([1.0, 4.0, 2.0, 3.0], 1.0, 0.7, [1, 3]),  # 0.4 + 0.3
        ([1.0, 4.0, 2.0, 3.0], 1.0, 0.71, [1, 2, 3]),
        ([1.0, 4.0, 2.0, 3.0], 0.25, 0.9, [1]),
        ([1.0, 4.0, 2.0, 3.0], 1.0, 0.0, []),
        ([1.0, 1.0, 1.0, 1.0], 0.5, 1.0, [0, 1]),  # ties
        ([0.0, 0.0, 0.0], 2 / 3, 1.0, [0, 1]),  # no content anywhere
        ([0.0, 5.0], 1.0, 0.5, [1]),
        ([2.0], 0.5, 1.0, []),  # half to even
    ],
)
def test_worth_encoding(content, keep, cover, expected) -> None:
    assert worth_encoding(torch.tensor(content).double(), keep, cover) == expected


# --- every family with crops ----------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", CASES)
def test_remaining_tokens_equal_the_full_model(vlm, case) -> None:
    media = CASES[case]
    full, before, _ = looked(vlm, asked=FEATURES, **media)
    terms = 4000
    for stage in (Crops(0.5), Crops(0.0)):
        tokens, stats, answer = looked(vlm, stage, asked=FEATURES, **media)
        skipped = stats.skipped
        if skipped is None:  # no image has crops
            assert all(item.views[1] - item.views[0] == 1 for item in stats.items)
            skipped = torch.zeros(len(stats.items), dtype=torch.bool)
        for item in stats.items:
            base, *crops = vlm.adapter.whole_first(item)
            left = int((~skipped[crops]).sum()) if crops else 0
            assert not skipped[base]
            assert left == round(stage.keep * len(crops))
        kept = without(full, skipped)
        want = full.select(kept)
        assert torch.equal(tokens.layout.order, want.layout.order)
        for name in ("kind", "item", "tile", "view", "grid", "position", "weight"):
            assert torch.equal(getattr(tokens.layout, name), getattr(want.layout, name)), name
        close(tokens.features, want.features, terms=terms)
        if len(tokens) > 1:
            apart(tokens.features, want.features.roll(1, 0), terms=terms)
        assert len(tokens) == answer.stats.visual_tokens_kept["crops"]
        for asked in FEATURES:
            for item in stats.items:
                got, expected = stats.salient(asked, item), before.salient(asked, item)
                gone = skipped[vlm.adapter.whole_first(item)]
                close(got.rows[~gone], expected.rows[~gone], terms=terms)
                assert not bool(got.rows[gone].any())
                if asked.keys:
                    close(got.keys[~gone], expected.keys[~gone], terms=terms)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["aya_vision", *sorted(BUILD.keys() - {"aya_vision"})])
def test_images_of_one_prompt_are_cached_one_by_one(name) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words")
    recipe = Crops(0.5)
    cached, fresh = VLM(*BUILD[name]()), built(name)
    cached.ask("what ?", images=[TALL, WIDE], recipe=recipe, max_new_tokens=1)
    for image in (TALL, WIDE):
        answer = cached.ask("what ?", images=image, recipe=recipe, max_new_tokens=4)
        assert answer.stats.cached_tokens > 0 or name == "llava_onevision"  # several images: whole
        assert (
            answer.token_ids
            == fresh.ask("what ?", images=image, recipe=recipe, max_new_tokens=4).token_ids
        )


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", CASES)
def test_skipped_crops_enter_neither_tower_nor_projector(vlm, case) -> None:
    for keep in (0.0, 0.5, 1.0):
        answers = []

        def ask(keep=keep, answers=answers):
            recipe = Crops(keep)
            answers.append(vlm.ask("what ?", **CASES[case], recipe=recipe, max_new_tokens=1))

        tower, projector = rows_in(vlm, ask)
        stats = answers[0].stats
        assert tower == projector == stats.views_encoded
        _, vision, _ = looked(vlm, **CASES[case])
        crops = [item.views[1] - item.views[0] - 1 for item in vision.items]
        assert stats.views == sum(crops) + len(crops)
        assert tower == len(crops) + sum(round(keep * count) for count in crops)


@pytest.mark.cases(3)
def test_keep_1_is_identity(vlm) -> None:
    for media in CASES.values():
        plain, _, answer = looked(vlm, **media)
        tokens, _, same = looked(vlm, Crops(1.0), **media)
        assert torch.equal(tokens.features, plain.features)
        assert same.token_ids == answer.token_ids
        assert same.stats.views_encoded == same.stats.views == answer.stats.views


def test_tome_in_encoded_views(vlm) -> None:
    """Merging inside the tower gives the same groups as with all views."""
    media = CASES["images"]
    tokens, _, answer = looked(vlm, Crops(0.5), stage_class("tome")(0.5), **media)
    skipped = Look.seen["stats"].skipped
    whole, _, _ = looked(vlm, stage_class("tome")(0.5), **media)
    if skipped is None:
        return
    want = whole.select(~skipped[whole.layout.view.long()])
    assert torch.equal(tokens.layout.order, want.layout.order)
    assert torch.equal(tokens.layout.weight, want.layout.weight)
    close(tokens.features, want.features, terms=4000)
    assert answer.stats.visual_tokens_kept["crops"] > answer.stats.visual_tokens_kept["tome"]


# --- other stages, sessions, batches --------------------------------------------------------------


REDUCERS = sorted(
    name
    for name in stage_names()
    if stage_class(name).protocol == "encode"
    and not stage_class(name).trained
    and not stage_class(name).other_model
)


@pytest.mark.parametrize("name", REDUCERS)
def test_reducers_follow(model, name) -> None:
    """A budget counts the tokens that are left; no token of a skipped crop comes back."""
    image = make_image(128, 128, seed=2)
    for stage in (stage_class(name)(), stage_class(name)(budget=0.5)):
        recipe = Recipe((Crops(0.5), stage))
        answer = model.ask("what ?", images=image, recipe=recipe, max_new_tokens=2)
        stats, layout = answer.stats, answer.trace.entered
        kept = stats.visual_tokens_kept
        assert 0 < len(layout) <= kept["crops"] < stats.visual_tokens_in
        assert len(layout.tile[layout.tile > 0].unique()) <= 2
        if stage.budget:
            assert stats.equivalent_tokens == pytest.approx(0.5 * kept["crops"], abs=2)


def test_hired_divides_its_budget_among_encoded_crops(model) -> None:
    image = make_image(128, 128, seed=2)
    recipe = "crops:0.25+hired:budget=0.5,alpha=0.3"
    layout = model.ask("what ?", images=image, recipe=recipe, max_new_tokens=1).trace.entered
    tiles = layout.tile.unique(return_counts=True)
    # 36 tokens are left of the whole view, one crop and 4 newlines; trunc(18 x 0.3) of 18 kept.
    assert tiles[1].tolist() == [5, 13]


def test_guard_runs_on_encoded_views_alone(model) -> None:
    image = make_image(128, 128, seed=2)
    recipe, answers = "crops:0.5+hired:budget=0.3,guard=2", []
    tower, _ = rows_in(
        model,
        lambda: answers.append(model.ask("what ?", images=image, recipe=recipe, max_new_tokens=1)),
    )
    assert tower == 3 * 3  # 1 + 2 views, 3 passes
    assert answers[0].stats.vision_passes == 3


def test_cls_tokens_belong_to_their_views(model) -> None:
    """VisionZip's CLS tokens of the remaining views are those of the full model."""

    @dataclass(frozen=True)
    class Reads(Look):
        name: ClassVar[str] = "test-reads"
        wants_cls: ClassVar[bool] = True
        asked: tuple[SaliencyRequest, ...] = (SaliencyRequest(),)

    found = []
    for stages in ((), (Crops(0.5),)):
        model.ask("what ?", **CASES["images"], recipe=Recipe((*stages, Reads())), max_new_tokens=1)
        found.append(Look.seen["stats"])
    full, own = found
    assert own.cls.shape == full.cls.shape
    close(own.cls[~own.skipped], full.cls[~own.skipped], terms=4000)
    apart(own.cls[~own.skipped], full.cls[~own.skipped].flip(0), terms=4000)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["crops:0", "crops:0.25+hired:budget=0.5", "crops+tome:0.5"])
def test_sessions_equal_single_requests(tmp_path, recipe) -> None:
    model = VLM(*build_llava_next())
    media = CASES["images"]
    alone = model.ask("what ?", **media, recipe=recipe, max_new_tokens=5).token_ids
    full = model.ask("what ?", **media, max_new_tokens=5).token_ids
    assert alone != full
    with model.session(**media, recipe=recipe, history=False) as session:
        assert session.ask("what ?", max_new_tokens=5).token_ids == alone
        assert session.ask("what ?", restore=True, max_new_tokens=5).token_ids == full
        session.save(tmp_path / "session")
    loaded = model.load_session(tmp_path / "session")
    assert loaded.ask("what ?", max_new_tokens=5).token_ids == alone
    assert loaded.ask("what ?", restore=True, max_new_tokens=5).token_ids == full


def test_features_are_shared_by_image() -> None:
    """Under one recipe; another one, or the full model, finds nothing."""
    from support.engine.kept import features_alone

    model, alone = VLM(*build_llava_next()), built("llava_next")
    with pytest.MonkeyPatch.context() as patch:
        features_alone(patch)
        given = {"recipe": "crops:0.5+hired:budget=0.5", "max_new_tokens": 5}
        model.ask("what ?", images=WIDE, **given)
        both = model.ask("what ?", images=[TALL, WIDE], **given)
        count = model.ask("what ?", images=TALL, max_new_tokens=1).stats.visual_tokens_in
        assert 0 < both.stats.cached_tokens < both.stats.visual_tokens_in
        assert both.stats.cached_tokens == both.stats.visual_tokens_in - count
        expected = alone.ask("what ?", images=[TALL, WIDE], **given)
        assert both.token_ids == expected.token_ids
        other = model.ask("what ?", images=WIDE, recipe="crops:0.25", max_new_tokens=1)
        assert other.stats.cached_tokens == 0


def test_attached_models_leave_crops_out() -> None:
    network, processor = build_llava_next()
    images = [make_image(128, 128, seed=2), make_image(60, 128, seed=3)]
    processor.tokenizer.padding_side = "left"
    prompts = ["USER: <image> what ? ASSISTANT:", "USER: <image> and here ? ASSISTANT:"]
    batch = processor(images=images, text=prompts, return_tensors="pt", padding=True)
    given = {"max_new_tokens": 5, "do_sample": False}
    full = network.generate(**batch, **given)
    found = []
    vlm = VLM(network, processor)

    def attached() -> None:
        with vlmfast.attach(network, processor, "crops:0.5"):
            found.append(network.generate(**batch, **given))

    tower, projector = rows_in(vlm, attached)
    (found,) = found
    assert tower == projector == 2 * (1 + 2)
    assert not torch.equal(found, full)
    for row, image in enumerate(images):
        single = processor(images=image, text=prompts[row], return_tensors="pt")
        with vlmfast.attach(network, processor, "crops:0.5"):
            alone = network.generate(**single, **given)
        assert found[row, batch["input_ids"].shape[1] :].tolist() == (
            alone[0, single["input_ids"].shape[1] :].tolist()
        )


def test_model_is_restored_after_an_error(model) -> None:
    tower, projector = model.adapter.tower(), model.adapter.projector()

    def state() -> tuple:
        return "forward" in vars(tower), len(projector._forward_hooks)

    @dataclass(frozen=True)
    class Fails(Crops):
        name: ClassVar[str] = "test-fails"

        def crops(self, geometry, saliency):
            raise ArithmeticError("in the middle")

    before = state()
    with pytest.raises(ArithmeticError, match="in the middle"):
        model.ask("what ?", **CASES["image"], recipe=Fails())
    assert state() == before


# --- bad input ------------------------------------------------------------------------------------


def test_image_with_one_view_is_left_alone() -> None:
    vlm = built("internvl")
    image = noise(0, 16, 16)
    full, vision, _ = looked(vlm, images=image)
    assert vision.items[0].tiles == (0, 0)
    tokens, _, answer = looked(vlm, Crops(0.0), images=image)
    assert torch.equal(tokens.features, full.features)
    assert answer.stats.views_encoded == 1
    # Beside an image with several views, it and the view of that whole image are encoded.
    stats = vlm.ask("what ?", [image, WIDE], recipe="crops:0", max_new_tokens=1).stats
    assert (stats.views_encoded, stats.views > 2) == (2, True)


def test_prompt_without_images(model) -> None:
    plain = model.ask("what ?", max_new_tokens=4).token_ids
    assert model.ask("what ?", recipe="crops:0", max_new_tokens=4).token_ids == plain


def test_families_without_crops_are_refused() -> None:
    vlm = VLM(*build_llava())
    message = r"crops leaves out crops of images, and llava encodes each image as one view; on this"
    with pytest.raises(RecipeError, match=message + r" model 'divprune:0.2' works"):
        vlm.ask("what ?", images=make_image(), recipe="crops:0.5")
    for build in (tiny_families.build_ovis2, tiny_families.build_cohere2_vision):
        with pytest.raises(RecipeError, match="needs all views again after its vision"):
            VLM(*build()).ask("what ?", images=WIDE, recipe="crops:0.5")


def test_saliency_the_tower_lacks_raises() -> None:
    vlm = built("idefics3")
    message = "crops: saliency=cls cannot be read from idefics3: its vision tower has no CLS token"
    with pytest.raises(RecipeError, match=message):
        vlm.ask("what ?", images=WIDE, recipe="crops:0.5,saliency=cls")


def test_stages_over_all_views_are_refused() -> None:
    vlm = VLM.from_pretrained("tiny", device="cpu")
    with pytest.raises(RecipeError, match=r"pvc works on the views of a prompt together .* crops"):
        vlm.ask("what ?", images=WIDE, recipe="crops:0.5+pvc")


@pytest.mark.parametrize("crops", [[0, 0], [1, 0], [4], [-1]])
def test_invalid_choice_of_a_stage_raises(model, crops) -> None:
    @dataclass(frozen=True)
    class Chooses(ViewStage):
        name: ClassVar[str] = "test-chooses"
        chooses_crops: ClassVar[bool] = True

        def crops(self, geometry, saliency):
            return crops

    image = make_image(128, 128)
    with pytest.raises(RecipeError, match=r"test-chooses chose the crops .* image with 4"):
        model.ask("what ?", images=image, recipe=Chooses())
    with pytest.raises(RecipeError, match="which both choose the crops; only one may"):
        Recipe((Chooses(), Crops()))
