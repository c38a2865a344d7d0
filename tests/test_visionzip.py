"""VisionZip: examples, properties on random images, and a prompt against a reference."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import apart, close
from driven import Driven
from helpers_layout import DIM, REQUEST, TOWER, image_arguments, make_image, prompt, stats_of
from reference import answer_logits
from tiny_models import build_llava, build_llava_next
from tower_terms import answer, tower
from vlmfast import VLM, Recipe, RecipeError
from vlmfast.compressors.select import plus_mean
from vlmfast.compressors.tokens.visionzip import VisionZip, homes
from vlmfast.core.layout import Kind, VisualTokens
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import VisionStats
from vlmfast.engine.prefill import Inputs


def reduced(
    stage: VisionZip, *images: dict, seed: int = 0
) -> tuple[VisualTokens, VisualTokens, VisionStats]:
    tokens, stats = prompt(*images, seed=seed)
    rows = {TOWER - 2: stats.rows[TOWER - 2]}
    views, _, n = rows[TOWER - 2].shape
    # Seeded by view, so that those of an image do not depend on the others.
    drawn = [
        torch.randn(n * 4 + DIM, generator=torch.Generator().manual_seed(v)) for v in range(views)
    ]
    keys = {TOWER - 2: torch.stack([d[: n * 4].view(n, 4) for d in drawn])}
    cls = torch.stack([d[n * 4 :] for d in drawn])
    stats = stats_of(stats.items, rows, keys, cls)
    return tokens, stage.reduce(tokens, stats, REQUEST), stats


# --- rules ---------------------------------------------------------------------------------------


def test_homes_example() -> None:
    """Patches 1 and 4 are dominant; every second of 0, 2, 3, 5, 6 is a target, two in all."""
    attention = torch.tensor([0.1, 0.9, 0.2, 0.1, 0.8, 0.3, 0.1])
    keys = torch.tensor([[1, 0], [0, 1], [9, 1], [0, 1], [0, 0], [1, 2], [2, 1]]).float()
    assert homes(attention, keys, 2, 2).tolist() == [0, 1, 0, 3, 4, 3, 0]
    assert homes(attention, keys, 2, 0).tolist() == [-1, 1, -1, -1, 4, -1, -1]
    assert homes(attention, keys, 0, 7).tolist() == list(range(7))
    assert homes(attention, keys, 2, 4).tolist() == [0, 1, 2, 3, 4, 5, 2]  # step 1: the first four
    alike = torch.ones(7, 2)
    assert homes(attention, alike, 2, 2).tolist() == [0, 1, 0, 3, 4, 0, 0]  # the first of equals


def test_plus_mean_adds_target_and_group_mean() -> None:
    features = torch.tensor([[1.0], [10], [100], [4], [7]])
    home = torch.tensor([0, 0, -1, 0, 4])
    assert plus_mean(features, home)[[0, 4], 0].tolist() == [1 + (10 + 4) / 2, 7]
    half = plus_mean(features.half(), home)
    assert half.dtype == torch.float16
    assert half[0, 0] == 8


@pytest.mark.parametrize(
    ("total", "sizes", "counts"),
    [
        (64, [576], [(54, 10)]),
        (128, [576], [(108, 20)]),
        (192, [576], [(162, 30)]),
        (640, [576] * 5, [(108, 20)] * 5),
        (13, [4, 4, 0, 20], [(4 - 1, 1), (4 - 1, 1), (0, 0), (5 - 1, 1)]),
        (1, [9, 9], [(1, 0), (0, 0)]),
    ],
)
def test_counts_have_the_published_proportion(
    total: int, sizes: list[int], counts: list[tuple[int, int]]
) -> None:
    assert VisionZip().counts(total, sizes) == counts


def test_explicit_counts() -> None:
    assert VisionZip(dominant=108, contextual=20).counts(0, [576, 120, 50]) == [
        (108, 20),
        (108, 12),
        (50, 0),
    ]
    assert VisionZip(contextual=5).counts(0, [9]) == [(0, 5)]
    assert VisionZip(budget=0.5).counts(32, [64]) == [(27, 5)]


# --- properties ----------------------------------------------------------------------------------


@given(image_arguments(), st.floats(0.02, 0.98), st.sampled_from(["keep", "budget"]))
@settings(max_examples=30, deadline=None)
def test_kept_tokens(arguments: dict, share: float, name: str) -> None:
    stage = VisionZip(**{name: share})
    tokens, kept, stats = reduced(stage, arguments, arguments)
    order = kept.layout.order.tolist()
    assert order == sorted(set(order))
    for item in (0, 1):
        mine, before = kept.layout.item == item, tokens.layout.item == item
        patches = int(tokens.layout.patches[before].sum())
        assert int(mine.sum()) == min(max(1, round(share * int(before.sum()))), patches)
        # Together they represent all patches of the views that merge.
        weight = kept.layout.weight[mine & kept.layout.patches]
        assert float(weight.sum()) <= patches
        assert (kept.layout.weight[mine & ~kept.layout.patches] == 1).all()
    special = kept.layout.kind == Kind.SPECIAL
    assert (kept.layout.patches | special).all()
    assert kept.layout.box[special].isnan().all()
    assert (kept.layout.view[special] == -1).all()
    # CLS of each view replaces a patch of the same view.
    row = torch.searchsorted(tokens.layout.order, kept.layout.order[special])
    view = tokens.layout.view[row].long()
    assert torch.equal(kept.features[special], stats.cls[view])
    assert len(view.unique()) == len(view)
    alone = kept.layout.patches & (kept.layout.weight == 1)
    same = torch.isin(tokens.layout.order, kept.layout.order[alone])
    assert torch.equal(kept.features[alone], tokens.features[same])


@given(image_arguments(), st.floats(0.02, 0.98))
@settings(max_examples=20, deadline=None)
def test_images_are_independent(arguments: dict, share: float) -> None:
    alone = reduced(VisionZip(share), arguments)[1]
    both = reduced(VisionZip(share), arguments, arguments)[1]
    first = both.layout.item == 0
    assert torch.equal(both.layout.order[first], alone.layout.order)
    assert torch.equal(both.features[first], alone.features)


@pytest.mark.parametrize("stage", [VisionZip(1.0), VisionZip(budget=1.0)])
def test_budget_1_is_identity(stage: VisionZip) -> None:
    tokens, kept, _ = reduced(stage, {"tiles": (2, 2)})
    assert kept is tokens


def test_weights_protection_and_extra_features_are_kept() -> None:
    tokens, geometry = make_image((0, 0), (2, 2))
    weight, protected = torch.tensor([1.0, 2, 3, 4]), torch.tensor([False, False, True, False])
    tokens = VisualTokens(
        tokens.features,
        tokens.layout.replace(weight=weight, protected=protected),
        (torch.tensor([[1.0], [2], [4], [8]]),),
    )
    rows = {22: torch.tensor([[[0.1, 0.6, 0.2, 0.1]]])}
    keys = {22: torch.tensor([[[1.0, 0], [0, 1], [0, 1], [1, 0.1]]])}
    stats = stats_of((geometry,), rows, keys, torch.full((1, DIM), 9.0))
    kept = VisionZip(dominant=2, contextual=1).reduce(tokens, stats, REQUEST)
    # Patch 1 is dominant, 2 and 3 are merged into 0, and CLS replaces 2.
    assert kept.layout.order.tolist() == [0, 1, 2]
    assert kept.layout.kind.tolist() == [Kind.IMAGE, Kind.IMAGE, Kind.SPECIAL]
    assert kept.layout.weight.tolist() == [1 + 3 + 4, 2, 1]
    assert kept.layout.protected.tolist() == [True, False, False]
    assert kept.extra[0].flatten().tolist() == [1 + (4 + 8) / 2, 2, 0]
    assert (kept.features[2] == 9).all()


def test_recipe_parameters() -> None:
    assert VisionZip().saliencies() == (SaliencyRequest("features", keys=True),)
    assert VisionZip.wants_cls
    stage = Recipe.parse(
        "visionzip:dominant=54,contextual=10,positions=compact,proportional_attention=true"
    )
    assert stage == Recipe.parse(str(stage))
    assert stage[0].proportional_attention


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("visionzip:0", r"visionzip: keep=0 is out of range, allowed is > 0 and <= 1"),
        ("visionzip:budget=2", r"budget=2 is out of range"),
        ("visionzip:dominant=-1", r"dominant=-1 is out of range, allowed is >= 0"),
        ("visionzip:contextual=1.5", r"contextual='1.5' cannot be read as int"),
        (
            "visionzip:proportional_attention=maybe",
            r"proportional_attention='maybe' cannot be read as bool",
        ),
        ("visionzip:domina=3", r"no parameter 'domina' \(did you mean 'dominant'\?\)"),
    ],
)
def test_invalid_recipes_raise(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.parse(text)


# --- whole prompts -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[build_llava, build_llava_next])
def vlm(request) -> VLM:
    return VLM(*request.param(layers=4))


def noise(seed: int, width: int = 60, height: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@torch.no_grad()
def tower_by_hand(vlm: VLM, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CLS rows (V, N), mean keys (V, N, d) and projected features (V, 1 + N, D), by eager code."""
    blocks, seen = vlm.adapter.vision_blocks(), []
    attention = blocks[-2].self_attn
    hook = attention.k_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    vlm.model.set_attn_implementation("eager")
    try:
        tower = vlm.model.get_encoder(modality="image")
        out = tower(pixels, output_attentions=True, output_hidden_states=True)
    finally:
        hook.remove()
        vlm.model.set_attn_implementation("sdpa")
    keys = seen[0].unflatten(-1, (-1, attention.head_dim)).mean(2)[:, 1:]
    rows = out.attentions[-2][:, :, 0, 1:].sum(1)
    return rows, keys, vlm.model.base_model.multi_modal_projector(out.hidden_states[-2])


def start(vlm: VLM, recipe: str, images: list[np.ndarray]) -> tuple[Driven, Tensor]:
    tensors = vlm.inputs("what is here ?", images=images)
    sizes = [p.shape[:2] for p in images]
    run = Driven(
        vlm.adapter, Inputs(tensors, sizes, "q"), Recipe.parse(recipe), time.perf_counter()
    )
    return run, answer_logits(vlm, run, [])


def test_prompt_equals_reference_tower(vlm: VLM) -> None:
    images = [noise(0), noise(1, 30, 70)]
    run, _ = start(vlm, "visionzip:0.5", images)
    full, layout, embeds = run.trace.layout, run.prompt.layout, run.prompt.embeds

    tensors, geometries = run.inputs.tensors, vlm.adapter.geometry(run.inputs.sizes)
    pixels = tensors["pixel_values"]
    if pixels.dim() == 5:
        views = [g.views[1] - g.views[0] for g in geometries]
        pixels = torch.cat([p[:n] for p, n in zip(pixels, views, strict=True)])
    rows, keys, features = tower_by_hand(vlm, pixels)
    stands = taken = 0
    terms, scale = tower(vlm) + features.shape[1], features.abs().max()  # and a mean
    for item, geometry in enumerate(geometries):
        of_view = [full.select(full.view == v) for v in range(*geometry.views)]
        total = round(0.5 * int((full.item == item).sum()))
        counts = VisionZip().counts(total, [len(here) for here in of_view])
        for view, here, (d, c) in zip(range(*geometry.views), of_view, counts, strict=True):
            patch = (here.grid[:, 1] * 4 + here.grid[:, 2]).long()
            home = homes(rows[view, patch], keys[view, patch], d - 1, c)
            stays = home == torch.arange(len(home))
            cls = int((~stays).nonzero()[0])
            row = torch.searchsorted(layout.order, here.order[stays])
            assert torch.equal(layout.order[row], here.order[stays])
            alone = features[view, 1 + patch]
            expected = plus_mean(alone, home)[stays]
            close(embeds[row], expected, terms=terms, scale=scale)
            row = torch.searchsorted(layout.order, here.order[cls])
            assert layout.kind[row] == Kind.SPECIAL
            close(embeds[row], features[view, 0], terms=terms, scale=scale)
            stands += d + c
            # Control: tokens that others were merged into have changed.
            took = torch.isin(torch.arange(len(home)), home[~stays & (home >= 0)])
            for now, before in zip(expected[took[stays]], alone[took], strict=True):
                apart(now, before, terms=terms, scale=scale)
            taken += int(took.sum())
    assert stands == int(layout.visual.sum())
    assert taken > 1


def test_repair_uses_the_weights(vlm: VLM) -> None:
    (run, weighted), (_, plain) = (
        start(vlm, recipe, [noise(0)])
        for recipe in ("visionzip:0.4,proportional_attention=true", "visionzip:0.4")
    )
    apart(weighted, plain, terms=answer(vlm, run.prompt.full_length))
