"""PVC: cells, plans and layers on examples, then whole prompts through the engine."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.closeness import apart, close
from support.engine.prompts import Inputs, prepared
from support.tiny_models import build_llava, build_llava_next
from support.tiny_models import make_image as noise_image
from support.tower_terms import tower
from vlmfast import VLM, Recipe, RecipeError
from vlmfast.api.request import render
from vlmfast.compressors.encoder.pvc import PVC
from vlmfast.compressors.encoder.pvc.module import (
    FRAMES,
    PRIOR,
    AdaptiveNorm,
    Compressor,
    ProgressiveEncoder,
    TemporalAttention,
    places,
    ranks,
    sinusoid,
    temporal_attention,
    to_cells,
    to_patches,
)
from vlmfast.compressors.encoder.pvc.plan import (
    Choice,
    make_plan,
    nearest,
    scenes,
    tokens_in,
    tokens_out,
)
from vlmfast.core.contexts import VisionContext
from vlmfast.core.layout import Kind
from vlmfast.core.statistics import ItemGeometry

# Lengths of the sums in the tested layers, of width 8 and 6:
# norm, its time, projection, a head, frames, projection;
TEMPORAL = 8 + 4 + 8 + 4 + (FRAMES + 1) + 8
COMPRESS = 6 + 3 + 6 + 4 + 4 * 6 + 5  # norm, its time, score, cell, both layers of the MLP
TRAINED = {"blocks": [1, 2], "sides": [2, 4], "repeats": [1, 2, 4], "hidden": 16, "time_width": 8}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomized(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random weights, as after training: no parameter is zero."""
    with torch.no_grad():
        for number, weight in enumerate(module.parameters()):
            weight += 0.2 * noise(*weight.shape, seed=1000 * seed + number)
    return module.eval()


def encoder(vlm: VLM, **config) -> ProgressiveEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PVC.build(vlm.adapter.sizes() | TRAINED | config).eval()


# --- cells ---------------------------------------------------------------------------------------


@given(st.integers(1, 7), st.integers(1, 7), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_cells_contain_their_patches(h: int, w: int, side: int) -> None:
    patches = torch.arange(1.0, h * w + 1).view(1, -1, 1)
    cells = to_cells(patches, (h, w), side)
    across = -(-w // side)
    assert cells.shape == (1, -(-h // side) * across, side * side, 1)
    for y in range(h):
        for x in range(w):
            cell, slot = y // side * across + x // side, y % side * side + x % side
            assert cells[0, cell, slot] == y * w + x + 1
    assert int((cells == 0).sum()) == cells.numel() - h * w
    assert torch.equal(to_patches(cells, (h, w), side), patches)


def test_positions_cycle() -> None:
    assert places(2) == [0, 3, 1, 2]
    assert places(4)[:4] == [5, 10, 6, 9]
    assert places(3)[0] == 4
    for side in (2, 3, 4):
        rank = ranks(side)
        assert torch.equal(rank.sort(1).values, torch.arange(side * side).expand(4, -1))
        assert rank.argmin(1).tolist() == places(side)[:4]
        assert rank[1].argsort()[:4].tolist() == [*places(side)[1:4], places(side)[0]]


# --- plans ---------------------------------------------------------------------------------------


def geometry(tiles=(0, 0), first=0, video=-1, frame=(0, 1), patches=(4, 4)) -> ItemGeometry:
    views = (first, first + 1 + tiles[0] * tiles[1])
    return ItemGeometry((64, 64), tiles, views, patches, video, frame)


def video_items(
    number: int, frames: int, tiles=(1, 1), first: int = 0, **kwargs
) -> list[ItemGeometry]:
    per = 1 + tiles[0] * tiles[1]
    return [geometry(tiles, first + i * per, number, (i, frames), **kwargs) for i in range(frames)]


def test_plan_of_an_image_and_two_videos() -> None:
    items = [geometry((1, 2)), *video_items(0, 3, first=3), *video_items(1, 2, first=9)]
    choices = {-1: Choice(2, 4), 0: Choice(2, 1), 1: Choice(4, 2, crops=False)}
    plan = make_plan(items, lambda scene: choices[scene[0].video])
    assert scenes(items) == [[0], [1, 2, 3], [4, 5]]
    assert plan.source[:13].tolist() == list(range(13))
    assert Counter(plan.source[13:].tolist()) == {0: 3, 1: 3, 2: 3, 9: 1, 11: 1}
    shown = {tuple(plan.source[s].tolist()) for rows in plan.sequences for s in rows}
    image = {(v,) * 4 for v in range(3)}
    assert shown == image | {(3, 5, 7), (4, 6, 8), (9, 9, 11, 11)}
    for rows in plan.sequences:
        expected = torch.linspace(0, 1, rows.shape[1]).expand(rows.shape)
        close(plan.time[rows], expected, scale=1)
    assert plan.whole.tolist() == [True, *[False] * 5]
    by_shape = {(c.side, c.rows.shape[1]): c for c in plan.cells}
    assert by_shape[2, 1].views.tolist() == [3, 5, 7, 4, 6, 8]
    assert by_shape[2, 1].turn.tolist() == [0, 1, 2, 0, 1, 2]
    assert by_shape[4, 2].views.tolist() == [9, 11]  # crops 10 and 12 are dropped
    assert by_shape[4, 2].turn.tolist() == [0, 2]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([(0, 0), (1, 1), (2, 1)])), min_size=1),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_each_row_is_in_exactly_one_sequence(
    parts: list[tuple[int, tuple[int, int]]], repeats: int, crops: bool
) -> None:
    """``parts`` are numbers of video frames, or 0 for an image."""
    items: list[ItemGeometry] = []
    for number, (frames, tiles) in enumerate(parts):
        first = items[-1].views[1] if items else 0
        items += video_items(number, frames, tiles, first) if frames else [geometry(tiles, first)]
    plan = make_plan(items, lambda scene: Choice(2, repeats, crops or scene[0].video < 0))
    rows = torch.cat([rows.flatten() for rows in plan.sequences])
    assert len(rows.unique()) == len(rows)
    seen = [
        v for item in items for v in range(*item.views)[: None if crops or item.video < 0 else 1]
    ]
    assert Counter(plan.source[rows].tolist()) == dict.fromkeys(seen, repeats)
    video_of_row = torch.tensor([i for i, item in enumerate(items) for _ in range(*item.views)])
    for sequence in (s for rows in plan.sequences for s in rows):
        shown = video_of_row[plan.source[sequence]].tolist()
        assert len({(items[i].video, i if items[i].video < 0 else -1) for i in shown}) == 1


def test_budgets_attained_on_the_shipped_model() -> None:
    """136 tokens per frame: base view and one crop of 8 x 8 patches, 8 newlines."""
    frames = video_items(0, 4, patches=(8, 8))
    image = [geometry((2, 2), patches=(8, 8))]
    assert tokens_in(frames[0]) == 136
    assert tokens_in(image[0]) == 336
    wanted = {0.01: 4, 0.05: 8, 0.11: 16, 0.22: 32, 0.5: 64, 0.99: 136}
    for share, count in wanted.items():
        choice = nearest(frames, share, (2, 4), (1, 2, 4))
        assert tokens_out(frames[0], choice) == count, share
    # A crop of the same content is worth less than a repeat.
    assert nearest(frames, 0.22, (2, 4), (1, 2, 4)) == Choice(2, 2, crops=False)
    assert nearest(video_items(0, 4, (2, 2)), 0.25, (2, 4), (1, 2, 4)).crops
    wanted = {0.01: 20, 0.11: 40, 0.22: 80, 0.5: 160, 0.9: 336}
    for share, count in wanted.items():
        choice = nearest(image, share, (2, 4), (1, 2, 4))
        assert choice.crops
        assert tokens_out(image[0], choice) == count, share


# --- layers --------------------------------------------------------------------------------------


def test_adaptive_norm_equals_formula() -> None:
    norm, x, time = AdaptiveNorm(6, 3), noise(2, 5, 6), noise(2, 1, 3)
    plain = torch.nn.functional.layer_norm(x, (6,))
    close(norm(x, time), plain, terms=6)
    randomized(norm)
    scale, shift = (time @ norm.modulation.weight.T + norm.modulation.bias).split(6, -1)
    close(norm(x, time), (1 + scale) * plain + shift, terms=6 + 3)
    apart(norm(x, time), plain, terms=6 + 3)


def test_timestamps_differ() -> None:
    waves = sinusoid(torch.linspace(0, 1, 96))
    assert waves.shape == (96, 256)
    assert waves[0].tolist() == [0.0] * 128 + [1.0] * 128
    assert float(torch.pdist(waves).min()) > 0.1


@pytest.mark.parametrize("frames", [4, FRAMES + 1])
def test_temporal_attention_equals_loops(frames: int) -> None:
    layer = randomized(TemporalAttention(8, 2, 4))
    x, time = noise(3, frames, 2, 8), noise(frames, 4, seed=1)
    got = layer(x, time)
    qkv = layer.qkv(layer.norm(x, time[:, None]))
    for s in range(3):
        for n in range(2):
            for t in range(frames):
                heads = []
                for h in range(2):
                    at = slice(4 * h, 4 * h + 4)
                    q, k, v = (part[..., at] for part in qkv[s, :, n].split(8, -1))
                    weights = (q[t] @ k[: t + 1].T / 2).softmax(-1)
                    heads.append(weights @ v[: t + 1])
                expected = x[s, t, n] + layer.out(torch.cat(heads))
                close(got[s, t, n], expected, terms=TEMPORAL, scale=got.detach().abs().max())


@pytest.mark.parametrize("frames", [FRAMES, FRAMES + 1])
def test_logits_of_many_frames_are_not_materialized(frames: int) -> None:
    class Maps(TorchDispatchMode):
        found = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            shapes = (x.shape[-2:] for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            self.found |= (frames, frames) in shapes
            return out

    with torch.no_grad(), Maps() as maps:
        temporal_attention(*noise(3, 1, frames, 3, 2, 8))
    assert maps.found == (frames == FRAMES)  # few frames are the control


def test_untrained_temporal_attention_is_identity() -> None:
    x = noise(2, 3, 4, 8)
    assert torch.equal(TemporalAttention(8, 2, 4)(x, noise(3, 4)), x)


@pytest.mark.parametrize("rest", [1.0, 2 / 3, 0.0])
def test_compressor_equals_formula(rest: float) -> None:
    compress = Compressor(6, 2, 5, 3)
    cells, time = noise(2, 7, 4, 6), noise(2, 3, seed=1)
    home = torch.tensor([[True, False, False, False], [False, True, False, False]])
    share = torch.tensor([[True, False, True, False], [False, True, False, True]])
    there = torch.ones(7, 4, dtype=torch.bool)
    there[3, 0] = False
    for _ in range(2):
        got = compress(cells, time, home, share, there, rest)
        for r in range(2):
            for c in range(7):
                y = compress.norm(cells[r, c], time[r])
                logits = rest * compress.score(y)[:, 0]
                logits = logits + compress.home * home[r] + compress.share * share[r]
                logits[~there[c]] = -torch.inf
                more = compress.mlp((y * there[c][:, None]).flatten())
                expected = logits.softmax(0) @ cells[r, c] + rest * more
                close(got[r, c], expected, terms=COMPRESS, scale=got.detach().abs().max())
        randomized(compress)
    with torch.no_grad():  # apart from the priors, learned parameters are scaled by `rest`
        compress.home.fill_(PRIOR)
        compress.share.fill_(PRIOR)
    learned = compress(cells, time, home, share, there, rest)
    fresh = Compressor(6, 2, 5, 3)(cells, time, home, share, there, rest)
    if rest == 0:
        close(fresh, learned, terms=COMPRESS)
    else:
        apart(fresh, learned, terms=COMPRESS)


# --- through the engine --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[build_llava, build_llava_next], ids=["llava", "next"])
def vlm(request) -> VLM:
    return VLM(*request.param())


@pytest.fixture(scope="module")
def next_vlm() -> VLM:
    return VLM(*build_llava_next())


def frames(n: int, seed: int = 0, size: int = 32) -> list:
    return [noise_image(size, size, seed=seed + i) for i in range(n)]


def content(*media) -> list[dict]:
    """A turn with images and lists of frames."""
    parts = [
        {"type": "video", "video": m, "num_frames": len(m)}
        if isinstance(m, list)
        else {"type": "image", "image": m}
        for m in media
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def inputs_of(vlm: VLM, *media) -> Inputs:
    prompt = render(vlm.adapter, content(*media), Recipe())
    tensors = vlm.adapter.inputs(prompt.text, prompt.images)
    return Inputs(tensors, prompt.sizes, "What is it?", prompt.frames)


@torch.no_grad()
def visual(vlm: VLM, module: ProgressiveEncoder, stage: PVC | None, *media):
    """Layout and features of the visual tokens that reach the language model, and the stats."""
    vlm.adapter.modules["pvc", "auto", ""] = module
    recipe = Recipe(() if stage is None else (stage,))
    prompt, stats = prepared(vlm, inputs_of(vlm, *media), recipe)
    rows = prompt.layout.visual
    return prompt.layout.select(rows), prompt.embeds[rows], stats


def test_untrained_tokens_are_local_means(vlm: VLM) -> None:
    """The documented initial state: softmax of the priors over the patches before the projector."""
    found = []
    handle = vlm.adapter.projector().register_forward_pre_hook(
        lambda _, args: found.append(args[0])
    )
    try:
        visual(vlm, encoder(vlm), None, noise_image(64, 64))
    finally:
        handle.remove()
    patches = found[0]
    for repeats in (1, 2, 4):
        stage = PVC(image_repeat=repeats)
        layout, features, _ = visual(vlm, encoder(vlm), stage, noise_image(64, 64))
        here = layout.view >= 0
        for token, feature in zip(here.nonzero().flatten(), features[here], strict=True):
            v, (y, x) = int(layout.view[token]), layout.grid[token, 1:].tolist()
            order = [0, 3, 1, 2]
            own = order.index(y % 2 * 2 + x % 2)
            assert own < repeats
            logits = torch.tensor(
                [PRIOR * (rank == own) + PRIOR * (rank % repeats == own) for rank in range(4)]
            )
            cell = [(y // 2 * 2 + p // 2) * 4 + x // 2 * 2 + p % 2 for p in order]
            expected = logits.softmax(0) @ patches[v, cell]
            expected = vlm.adapter.projector()(expected)
            close(feature, expected, terms=tower(vlm), scale=features.abs().max())


def test_budget_1_is_identity(vlm: VLM) -> None:
    module = randomized(encoder(vlm))
    media = (noise_image(64, 64), frames(2, seed=5))
    _, full, _ = visual(vlm, module, None, *media)
    layout, same, _ = visual(vlm, module, PVC(budget=1.0), *media)
    assert torch.equal(full, same)
    assert (layout.weight == 1).all()
    whole = PVC(video_repeat=4, views="all")  # as many tokens, different features
    _, changed, _ = visual(vlm, module, whole, *media)
    assert changed.shape == full.shape
    apart(changed, full, terms=tower(vlm))


@pytest.mark.parametrize("views", ["base", "all"])
@pytest.mark.parametrize(("side", "image", "video"), [(2, 4, 1), (2, 2, 4), (4, 1, 2), (4, 4, 4)])
def test_counts_order_and_weights(vlm: VLM, side: int, image: int, video: int, views: str) -> None:
    """A letterboxed image, a video and a square image."""
    stage = PVC(side=side, image_repeat=image, video_repeat=video, views=views)
    media = (noise_image(64, 40), frames(3, seed=5), noise_image(64, 64, seed=9))
    came, _, _ = visual(vlm, encoder(vlm), None, *media)
    layout, _, stats = visual(vlm, randomized(encoder(vlm)), stage, *media)
    assert (layout.order.diff() > 0).all()
    assert torch.isin(layout.order, came.order).all()
    assert stats.visual_tokens_kept["pvc"] == len(layout)
    for item in range(5):
        before = came.select(came.item == item)
        after = layout.select(layout.item == item)
        repeats, frame = (video, True) if 0 < item < 4 else (image, False)
        if frame and views == "base":
            before = before.select(before.tile <= 0)
        patches = before.select(before.patches)
        cells = Counter(
            zip(
                patches.view.tolist(),
                (patches.grid[:, 1] // side).tolist(),
                (patches.grid[:, 2] // side).tolist(),
                strict=True,
            )
        )
        # A cell has at most as many tokens as patches. If fewer patches are left than positions,
        # some of its tokens may represent none of them.
        most = sum(min(repeats, n) for n in cells.values())
        full = sum(repeats for n in cells.values() if n == side * side)
        assert full <= int(after.patches.sum()) <= most
        assert after.weight[after.patches].sum() == len(patches)
        whole = repeats == side * side and not (frame and views == "base")
        newlines = int((before.kind == Kind.NEWLINE).sum())
        assert int((after.kind == Kind.NEWLINE).sum()) == (newlines if whole else 0)
        if whole:
            assert len(after) == len(before)
        boxes = after.box[after.patches]
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        # The boxes of a view cover the same area as its patches.
        for corner, how in ((slice(0, 2), torch.amin), (slice(2, 4), torch.amax)):
            for view in patches.view.unique():
                a = how(boxes[after.view[after.patches] == view][:, corner], 0)
                b = how(patches.box[patches.view == view][:, corner], 0)
                close(a, b, terms=2)


@pytest.mark.parametrize("stage", [PVC(), PVC(side=4, video_repeat=2, views="all")])
def test_videos_and_images_are_independent(vlm: VLM, stage: PVC) -> None:
    """Within a video, frames attend to the past only."""
    module = randomized(encoder(vlm))
    one, two, alone = frames(3), frames(3, seed=20), noise_image(64, 64, seed=40)
    layout, features, _ = visual(vlm, module, stage, one, alone, two)

    terms = 2 * tower(vlm)  # the encoder's layers are no wider than the tower's

    def changed(items: set[int], *media) -> None:
        got = visual(vlm, module, stage, *media)[1]
        for i in range(7):
            rows = layout.item == i
            (apart if i in items else close)(got[rows], features[rows], terms=terms)

    other = noise_image(32, 32, seed=77)
    changed(set(), one, alone, two)
    changed({3}, one, noise_image(64, 64, seed=41), two)
    changed({0, 1, 2}, [other, *one[1:]], alone, two)
    changed({2}, [*one[:2], other], alone, two)
    changed({5, 6}, one, alone, [two[0], other, two[2]])


def test_grids_not_divisible_by_cells(next_vlm: VLM) -> None:
    module = randomized(encoder(next_vlm, sides=[3]))
    layout, features, _ = visual(next_vlm, module, PVC(side=3, image_repeat=2), noise_image())
    # Cells of 3x3, 3x1, 1x3 and 1x1 patches in each of five views; a cell has up to two tokens.
    cells = Counter(zip(layout.view.tolist(), *(layout.grid[:, 1:] // 3).T.tolist(), strict=True))
    assert len(cells) == 20
    assert all(1 <= n <= 2 for n in cells.values())
    assert all(n == 2 for (_, y, x), n in cells.items() if y == x == 0)
    assert features.isfinite().all()


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_budgets_are_met_to_the_nearest_count(next_vlm: VLM, share: float) -> None:
    """The frames' crops keep their letterbox."""
    media = (noise_image(64, 64), frames(3, seed=5), noise_image(90, 32))
    came, _, _ = visual(next_vlm, encoder(next_vlm), None, *media)
    layout, _, _ = visual(next_vlm, randomized(encoder(next_vlm)), PVC(budget=share), *media)
    items = list(next_vlm.adapter.geometry([(64, 64), *[(32, 32)] * 3, (32, 90)]))
    items[1:4] = [replace(item, video=0) for item in items[1:4]]
    for number, item in enumerate(items):
        assert int((came.item == number).sum()) == tokens_in(item)
        choice = nearest([item], share, (2, 4), (1, 2, 4))
        assert int((layout.item == number).sum()) == pytest.approx(tokens_out(item, choice), abs=4)
    assert tokens_in(items[1]) == 16 + 4 * 5


# --- training ------------------------------------------------------------------------------------


def options(**values) -> argparse.Namespace:
    usual = {"last": 2, "hidden": 16, "time_width": 8, "positions": "keep"}
    return argparse.Namespace(**usual | values)


def test_gradients_reach_every_weight(next_vlm: VLM) -> None:
    """After a first step, because zero-initialized layers block gradients to earlier ones."""
    module = randomized(encoder(next_vlm)).train()
    next_vlm.adapter.modules["pvc", "auto", ""] = module
    next_vlm.model.requires_grad_(False)
    for stage in (PVC(), PVC(side=4, image_repeat=2)):
        inputs = inputs_of(next_vlm, noise_image(64, 64), frames(3))
        prompt, _ = prepared(next_vlm, inputs, Recipe((stage,)))
        prompt.embeds.square().sum().backward()
    for name, weight in module.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name
    module.eval()


def test_training_draws_from_its_config(next_vlm: VLM) -> None:
    from vlmfast.compressors.encoder.pvc.training import TRAINING

    training = TRAINING(options(), next_vlm.adapter.sizes())
    config = training.config()
    assert config["blocks"] == [1, 2]
    stages = [training.stages(random.Random(i), 0.0)[0] for i in range(200)]
    assert {s.side for s in stages} == set(config["sides"])
    for key in ("image_repeat", "video_repeat"):
        assert {getattr(s, key) for s in stages} == set(config["repeats"])
    assert {s.views for s in stages} == {"base", "all"}
    assert stages[:20] == [training.stages(random.Random(i), 0.5)[0] for i in range(20)]
    with pytest.raises(RecipeError, match="--last is 3"):
        TRAINING(options(last=3), next_vlm.adapter.sizes())
    with pytest.raises(RecipeError, match="--time-width is 0"):
        TRAINING(options(time_width=0), next_vlm.adapter.sizes())


# --- the shipped weights -------------------------------------------------------------------------


def test_shipped_counts(tiny: VLM) -> None:
    frames = [noise_image(64, 64, seed=i) for i in range(4)]
    answer = tiny.ask("Which object moves?", video=frames, num_frames=4, recipe="pvc")
    assert answer.stats.visual_tokens_kept["pvc"] == 64


# --- recipes and configurations ------------------------------------------------------------------


def test_mismatched_module_raises(next_vlm: VLM) -> None:
    module = encoder(next_vlm)
    with pytest.raises(RecipeError, match="side=3"):
        visual(next_vlm, module, PVC(side=3), noise_image())
    context = VisionContext(depth=4, items=(geometry(),), trained={"pvc": module})
    inside = PVC().expand()[0]
    with pytest.raises(RecipeError, match="16 patches"):
        inside.on_block(context, 1, noise(1, 12, 64))
    with pytest.raises(RecipeError, match="width 64"):
        inside.on_output(context, noise(1, 16, 128))
    context.merged = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(RecipeError, match="merges"):
        inside.on_block(context, 1, noise(1, 17, 64))
