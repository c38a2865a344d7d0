"""The captured vision tower. Without a GPU, replays rerun the forward pass in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from support.engine.cpu_graph import Recording
from support.engine.steps import (
    SHAPES,
    Towers,
    capture_towers,
    captured_tower,
    kept_passes,
)
from support.tiny_families import builders
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM

RECIPES = ["none", "hired:0.4", "visionzip:dominant=4,contextual=3", "grid:0.5", "pyramiddrop"]


def repeated(run):
    """Imitates a graph: every replay overwrites the same output tensors."""
    made = run()

    def tensors(value) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]

    def replay() -> None:
        for mine, new in zip(tensors(made), tensors(run()), strict=True):
            mine.copy_(new)

    return made, replay


def recorded(run):
    """Replays the operations of a forward pass, and refuses those that a capture refuses."""
    run()  # libraries and caches
    with Recording() as recording:
        made = run()
    return made, recording.replay


@pytest.fixture(params=[build_llava, build_llava_next], ids=["llava", "llava-next"])
def pair(request) -> tuple[VLM, VLM, Towers]:
    """A model, and the same with a captured tower."""
    # Without the prefix cache, every prompt runs the tower.
    plain, vlm = (VLM(*request.param(), prefix_cache_bytes=0) for _ in range(2))
    return plain, vlm, captured_tower(vlm, repeated)


@pytest.fixture(autouse=True)
def captures(monkeypatch) -> None:
    capture_towers(monkeypatch)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_tower_gives_the_same_answers(pair, recipe: str) -> None:
    plain, vlm, towers = pair
    for seed in range(4):
        given = {"images": make_image(seed=seed), "recipe": recipe, "max_new_tokens": 5}
        wanted = plain.ask("what ?", **given)
        got = vlm.ask("what ?", **given)
        assert got.token_ids == wanted.token_ids
        assert torch.equal(got.trace.depth, wanted.trace.depth)
        assert towers.replayed == seed  # the first forward pass is not captured
    assert "forward" not in vars(vlm.adapter.tower())


@pytest.mark.parametrize("recipe", ["crops:0.5", "crops:0.25+visionzip:dominant=4,contextual=3"])
def test_passes_over_chosen_views_are_captured(recipe: str) -> None:
    """One graph for the base view, one for the crops."""
    plain, vlm = (VLM(*build_llava_next(), prefix_cache_bytes=0) for _ in range(2))
    towers = captured_tower(vlm, repeated)
    for seed in range(3):
        given = {"images": make_image(seed=seed), "recipe": recipe, "max_new_tokens": 5}
        wanted = plain.ask("what ?", **given)
        got = vlm.ask("what ?", **given)
        assert got.token_ids == wanted.token_ids
        assert torch.equal(got.trace.depth, wanted.trace.depth)
        # A single crop has the shape of the base view, whose graph it shares.
        assert towers.replayed == 2 * seed + ("0.25" in recipe)


PACKED = ["qwen2_5_vl", "qwen3_vl", "glm4v", "qwen2_vl", "qwen3_5"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PACKED)
def test_packed_towers_are_captured_by_the_sizes_of_images(name: str) -> None:
    """Two images of other sizes than a third, with statistics of each."""
    plain, vlm = (VLM(*builders()[name](), prefix_cache_bytes=0) for _ in range(2))
    towers = captured_tower(vlm, recorded)
    for recipe in ("none", "hired:0.4,saliency=received"):
        towers.replayed = 0
        for seed in range(3):
            images = [make_image(64, 48, seed), make_image(48, 64, seed + 9)]
            for number, media in enumerate((images, images[:1])):
                given = {"images": media, "recipe": recipe, "max_new_tokens": 5}
                wanted, got = (model.ask("what ?", **given) for model in (plain, vlm))
                assert got.token_ids == wanted.token_ids
                assert torch.equal(got.trace.depth, wanted.trace.depth)
                assert towers.replayed == 2 * seed - (1 - number) * (seed > 0)
    replayed = towers.replayed
    for _ in range(3):  # the norm of what enters the projector, inside the tower
        given = {"images": make_image(64, 48), "recipe": "hired:0.4,saliency=norm"}
        wanted, got = (model.ask("what ?", max_new_tokens=5, **given) for model in (plain, vlm))
        assert torch.equal(got.trace.depth, wanted.trace.depth)
    assert towers.replayed == replayed
    assert "forward" not in vars(vlm.adapter.tower())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", PACKED)
def test_videos_are_captured_once(name: str) -> None:
    plain, vlm = (VLM(*builders()[name](), prefix_cache_bytes=0) for _ in range(2))
    captures = []
    towers = captured_tower(vlm, lambda run: captures.append(0) or recorded(run))
    for seed in range(4):
        video = [make_image(48, 48, 4 * seed + i) for i in range(4)]
        given = {"video": video, "num_frames": 4, "max_new_tokens": 3}
        wanted, got = (model.ask("what ?", **given) for model in (plain, vlm))
        assert got.token_ids == wanted.token_ids and towers.replayed == seed
    assert len(captures) == 1


def test_large_packed_images_are_not_captured(monkeypatch) -> None:
    capture_towers(monkeypatch, patches=31)
    vlm = VLM(*builders()["qwen2_5_vl"](), prefix_cache_bytes=0)
    towers = captured_tower(vlm, repeated)
    for size, replays in (((64, 48), 0), ((32, 48), 2)):  # 48 and 24 patches
        for seed in range(3):
            vlm.ask("what ?", images=make_image(*size, seed), max_new_tokens=1)
        assert towers.replayed == replays


@pytest.mark.cases(1)
def test_graphs_are_keyed_by_shape_and_statistics(pair) -> None:
    plain, vlm, towers = pair
    for images in ([make_image(seed=0)], [make_image(seed=1), make_image(seed=2)]):
        for recipe in ("none", "hired:0.4"):
            for _ in range(3):
                given = {"images": images, "recipe": recipe, "max_new_tokens": 3}
                assert (
                    vlm.ask("what ?", **given).token_ids == plain.ask("what ?", **given).token_ids
                )
    assert kept_passes(towers) == 4 and towers.replayed == 8


def test_graphs_belong_to_weights_and_autocast(pair) -> None:
    """They read addresses and casts of the pass that was captured."""
    plain, vlm, towers = pair
    ask = {"images": make_image(seed=3), "max_new_tokens": 3}
    for _ in range(3):
        wanted, got = (model.ask("what ?", **ask).token_ids for model in (plain, vlm))
        assert got == wanted
    replayed, kept = towers.replayed, kept_passes(towers)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vlm.ask("what ?", **ask)
    assert towers.replayed == replayed
    for model in (plain, vlm):
        for weight in model.adapter.tower().parameters():
            weight.data = weight.data * 0.5
    wanted, got = (model.ask("what ?", **ask).token_ids for model in (plain, vlm))
    assert got == wanted and (towers.replayed, kept_passes(towers)) == (replayed, kept)
    # A graph contains attributes of modules as constants.
    for _ in range(3):
        vlm.ask("what ?", **ask)
    replayed, kept = towers.replayed, kept_passes(towers)
    for model in (plain, vlm):
        model.adapter.vision_blocks()[0].layer_norm1.eps = 0.5
    wanted, got = (model.ask("what ?", **ask).token_ids for model in (plain, vlm))
    assert got == wanted and (towers.replayed, kept_passes(towers)) == (replayed, kept)


@pytest.mark.cases(1)
def test_replay_does_not_overwrite_earlier_outputs(pair) -> None:
    """Two sessions contain the images of two replays."""
    plain, vlm, _ = pair
    for seed in range(2):
        vlm.ask("what ?", images=make_image(seed=seed), max_new_tokens=1)
    answers = []
    for model in (plain, vlm):
        one = model.session(images=make_image(seed=5), recipe="hired:0.4")
        other = model.session(images=make_image(seed=6), recipe="hired:0.4")
        answers.append([s.ask("what ?", max_new_tokens=4).token_ids for s in (one, other, one)])
    assert answers[0] == answers[1]


def test_in_encoder_stages_are_not_captured(pair) -> None:
    _, vlm, towers = pair
    for seed in range(3):
        vlm.ask("what ?", images=make_image(seed=seed), recipe="mustdrop", max_new_tokens=2)
    assert towers.replayed == 0


def test_kept_graphs_are_bounded() -> None:
    from vlmfast.core.contexts import VisionContext

    towers = Towers(record=lambda run: (run(), lambda: None))
    for size in range(1, SHAPES + 4):
        for _ in range(2):
            pixels = torch.zeros(1, 3, size, size)
            towers.pass_of(lambda pixels: pixels, pixels, {}, VisionContext(), [], 0, ())
    assert kept_passes(towers) == SHAPES
