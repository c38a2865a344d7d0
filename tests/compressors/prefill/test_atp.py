"""ATP: its scores, thresholds and ranking, its losses, soft masks and drops through the engine."""

from __future__ import annotations

import argparse
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import tiny_models
from support.closeness import apart, close, network
from support.helpers_layout import image_arguments, prompt
from vlmfast import VLM, RecipeError
from vlmfast.compressors.budget import equivalent
from vlmfast.compressors.prefill.atp import ATP
from vlmfast.compressors.prefill.atp.module import (
    WIDTH,
    Module,
    Scores,
    budget_counts,
    cross_level,
    hard_mask,
    margin,
    ranking,
    self_level,
    soft_mask,
    spatial_score,
)
from vlmfast.compressors.prefill.atp.training import TRAINING, depth_term, target_term
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.layout import TokenLayout
from vlmfast.core.training import Outcome
from vlmfast.train.stages import Sample, inputs_of, run

HEADS, DEPTH = 4, 8
LAYERS = (1, 4, 6)  # the default fractions of the depth in eight layers


def module(seed: int | None = 0, *, learned: bool = True, layers=LAYERS) -> Module:
    """A trained-like module: random weights away from their start; ``None``: untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = ATP.build(
            {
                "layers": layers,
                "heads": HEADS,
                "head_weights": "learned" if learned else "mean",
                "grids": 3,
            }
        )
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (p for p in built.parameters() if p.requires_grad):
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
            for share, point in zip((0.4, 0.2, 0.1), built.points.values(), strict=False):
                point.share.fill_(share)
                point.theta_s.bias -= 2.2  # among the grid scores
    return built.eval()


def step_for(*images: dict, net: Module, seed: int = 0, text: int = 5) -> PrefillContext:
    """A prompt after layer 0: three text rows before each image, ``text`` after the last."""
    visual = prompt(*images)[0].layout
    n = int(visual.order[-1]) + 1 + text
    words = torch.ones(n, dtype=torch.bool).index_fill(0, visual.order, False).nonzero().flatten()
    layout = TokenLayout.cat([TokenLayout.text(words, words[None]), visual])
    layout = layout.select(layout.order.argsort())
    generator = torch.Generator().manual_seed(seed)
    context = PrefillContext(depth=DEPTH, layout=layout, trained={"atp": net})
    for layer in LAYERS:
        logits = 2 * torch.randn(HEADS, text, n, generator=generator)
        context.stats[layer - 1] = logits.softmax(-1)
        context.received[layer - 1] = 2 * torch.randn(HEADS, 1, n, generator=generator)
    return context


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [8, 24])
def test_grids_of_a_full_view(side: int) -> None:
    layout = prompt({"tiles": (0, 0), "patches": (side, side)})[0].layout
    score = spatial_score(layout, 3)
    for stride, value in ((2, 0.25), (4, 0.8125), (8, 0.953125)):
        assert int((score >= value).sum()) == (side // stride) ** 2
    assert (score[score < 0.25] == 0).all()
    assert not spatial_score(layout, 0).any()


@given(arguments=image_arguments(), grids=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_grids_are_nested_lattices_without_newlines(arguments: dict, grids: int) -> None:
    layout = prompt(arguments)[0].layout
    score = spatial_score(layout, grids)
    assert not score[~layout.patches].any()
    inside = torch.ones_like(layout.patches)
    for g in range(1, grids + 1):
        on = score >= 1 - 3 / 4**g
        assert (inside | ~on).all()
        place = layout.grid[on][:, 1:]
        assert len(place) == 0 or not ((place - place[0]) % 2**g).any()
        inside = on


def test_soft_masked_token_does_not_count() -> None:
    """Soft-masked tokens give the same scores as removed tokens."""
    soft = torch.tensor([1.0, 1e-9, 1.0, 1.0, 1e-9])
    there = soft > 0.5
    logits = torch.tensor([0.3, 2.0, -1.0, 0.8, 1.0])
    hidden = (logits + soft.log()).softmax(0)
    without = cross_level(logits[there].softmax(0), torch.ones(3))
    close(cross_level(hidden, soft)[there], without, terms=5)
    close(self_level(logits, soft)[there], self_level(logits[there], torch.ones(3)), terms=5)
    # A token's own mask does not lower its score: the attention already includes it.
    half = torch.tensor([0.5, 1.0, 1.0])
    level = cross_level((torch.zeros(3) + half.log()).softmax(0), half)
    close(level, torch.zeros(3), terms=3, scale=1)


def test_learned_score_equals_formula() -> None:
    n, generator = 9, torch.Generator().manual_seed(0)
    point = module(5).points["1"]
    for parameter in point.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention = torch.randn(HEADS, n, generator=generator).softmax(1)
    received, soft = torch.randn(HEADS, n, generator=generator), torch.rand(n, generator=generator)
    u, v = point.cross_heads.softmax(0), point.self_heads
    own, cross = (
        [sum(w[h] * x[h, i] for h in range(HEADS)) for i in range(n)]
        for w, x in ((v, received), (u, attention))
    )
    mean = sum(own[i] * soft[i] for i in range(n)) / soft.sum()
    both = [
        torch.stack([own[i] - mean, torch.log(cross[i] / soft[i] * soft.sum())]) * point.slope
        for i in range(n)
    ]
    both = [(x + point.offset).sigmoid() for x in both]
    got = point(attention, received, torch.zeros(n), soft)
    close(got.red, torch.stack([x.mean() for x in both]), terms=HEADS + n)
    means = sum(soft[i] * both[i] for i in range(n)) / soft.sum()
    for theta, layer in ((got.theta_r, point.theta_r), (got.theta_s, point.theta_s)):
        expected = layer(point.hidden(means)).sigmoid()[0]
        close(theta, expected, terms=HEADS + n + 2 + WIDTH)
    # Control: the soft mask, the attention and the logits matter.
    for other in (
        (attention.flip(1), received, soft),
        (attention, received.flip(1), soft),
        (attention, received, soft.flip(0)),
    ):
        changed = point(*other[:2], torch.zeros(n), other[2])
        apart(changed.red, got.red, terms=HEADS + n)


@given(seed=st.integers(0, 99), n=st.integers(1, 40), scale=st.floats(0, 30))
@settings(max_examples=30, deadline=None)
def test_scores_and_thresholds_are_in_range(seed: int, n: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, HEADS, n, generator=generator)
    spatial = torch.rand(n, generator=generator)
    scores = module(seed).points["4"](logits[0].softmax(-1), logits[1], spatial, torch.ones(n))
    for value in (scores.red, scores.theta_r, scores.theta_s):
        assert ((value >= 0) & (value <= 1)).all()
    for temperature in (0.1, 10.0, 1000.0):
        soft = soft_mask(scores, temperature)
        assert ((soft > 0) & (soft <= 1)).all() and soft.log().isfinite().all()


# --- masks ---------------------------------------------------------------------------------------


@st.composite
def scores(draw: st.DrawFn) -> Scores:
    n = draw(st.integers(1, 30))
    red = draw(st.lists(st.integers(0, 64), min_size=n, max_size=n))
    spatial = draw(st.lists(st.sampled_from([0.0, 0.25, 0.8125]), min_size=n, max_size=n))
    # Scores on a lattice and thresholds off it: no token is on its threshold.
    thetas = (torch.tensor((2 * draw(st.integers(0, 63)) + 1) / 128) for _ in range(2))
    return Scores(torch.tensor(red) / 64, torch.tensor(spatial), *thetas)


@given(scores=scores())
@settings(max_examples=50, deadline=None)
def test_soft_masks_harden(scores: Scores) -> None:
    hard = hard_mask(scores)
    off = [(soft_mask(scores, t) - hard.float()).abs().max() for t in (10.0, 100.0, 5000.0)]
    assert off[0] >= off[1] >= off[2]
    # Thresholds are at least 1/128 from any score: exp(-5000/128) is below float32's resolution.
    close(soft_mask(scores, 5000.0), hard.float(), scale=1)
    assert torch.equal(soft_mask(scores, 10.0) > 0.5, hard)


@given(scores=scores(), shift=st.integers(0, 64))
@settings(max_examples=50, deadline=None)
def test_margin_is_how_far_the_thresholds_may_rise(scores: Scores, shift: int) -> None:
    rise = shift / 64
    risen = Scores(scores.red, scores.spatial, scores.theta_r + rise, scores.theta_s + rise)
    assert torch.equal(margin(scores) > rise, hard_mask(risen))
    place = ranking(scores)
    assert place.sort().values.tolist() == list(range(len(place)))
    kept = hard_mask(risen)
    assert torch.equal(place < int(kept.sum()), kept)  # same set as the top k


def test_ranking_breaks_ties_by_other_score_then_index() -> None:
    """Four tokens on one grid: by their other score, then by index; then tokens on no grid."""
    theta = torch.tensor(0.9)
    spatial = torch.tensor([0.0, 0.8, 0.8, 0.8, 0.8, 0.0])
    red = torch.tensor([0.1, 0.2, 0.4, 0.4, 0.3, 0.2])
    assert ranking(Scores(red, spatial, theta, theta)).tolist() == [5, 3, 0, 1, 2, 4]


# --- the stage -----------------------------------------------------------------------------------


@given(
    images=st.lists(image_arguments((4, 4)), min_size=1, max_size=2),
    budget=st.none() | st.floats(0.01, 0.99),
    seed=st.integers(0, 20),
)
@settings(max_examples=30, deadline=None)
def test_kept_tokens_meet_thresholds_or_budget(
    images: list[dict], budget: float | None, seed: int
) -> None:
    stage, net = ATP(budget=budget), module(seed)
    step = step_for(*images, net=net, seed=seed)
    n, counts = int(step.layout.visual.sum()), []
    for layer in stage.layers(DEPTH):
        again = stage.select_tokens(step, layer)
        kept = stage.select_tokens(step, layer)
        if kept is None:
            kept = torch.arange(len(step.layout))
        else:
            assert torch.equal(kept, again)
            assert (kept[1:] > kept[:-1]).all()
            gone = torch.ones(len(step.layout), dtype=torch.bool).index_fill(0, kept, False)
            assert not (gone & ~step.layout.visual).any()
        step.select(kept)
        counts.append(int(step.layout.visual.sum()))
    if budget is not None:
        assert tuple(counts) == step.notes["atp"]["counts"]
        cost, floor = equivalent(n, LAYERS, counts, DEPTH), equivalent(n, LAYERS, (1,) * 3, DEPTH)
        assert abs(cost - max(budget * n, floor)) <= 1.5


@given(
    n=st.integers(1, 3000),
    budget=st.floats(0.01, 1),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_budgets_follow_the_trained_fractions(n: int, budget: float, shares: list[float]) -> None:
    shares.sort(reverse=True)
    counts = budget_counts(n, budget * n, (4, 14, 24), shares, 32)
    assert list(counts) == sorted(counts, reverse=True) and counts[-1] >= 1
    cost, floor = (equivalent(n, (4, 14, 24), c, 32) for c in (counts, (1, 1, 1)))
    assert abs(cost - max(budget * n, floor)) <= 1.5
    if budget == 1:
        assert counts == (n, n, n)


def test_trained_cost_gives_the_trained_fractions() -> None:
    shares, layers = (0.5, 0.25, 0.1), (4, 14, 24)
    trained = equivalent(1000, layers, (500, 250, 100), 32)
    assert budget_counts(1000, trained, layers, shares, 32) == (500, 250, 100)
    # Where the budget asks for less, all are raised to one power: squares.
    less = equivalent(1000, layers, (250, 62, 10), 32)
    assert budget_counts(1000, less, layers, shares, 32) == (250, 62, 10)
    # Untrained, and where all was kept: the same count after every drop.
    assert len(set(budget_counts(1000, 400, layers, (1.0, 1.0, 1.0), 32))) == 1


def test_newlines_are_scored_by_redundancy_only() -> None:
    net = module(None)
    step = step_for({"tiles": (2, 2), "patches": (4, 4)}, net=net)
    with torch.no_grad():
        net.points["1"].theta_s.bias.fill_(-9.0)  # every grid is above the threshold
    newline = step.layout.visual & ~step.layout.patches
    step.stats[0][..., newline] = 1e-6
    step.received[0][..., newline] = -50.0
    kept = ATP().select_tokens(step, 1)
    assert newline.any() and not newline[kept].any()
    step.received[0][..., newline] = 50.0
    step.stats[0][..., newline] = 0.2
    assert bool(newline[ATP().select_tokens(step, 1)].sum() == newline.sum())


def test_keep_returns_none_without_text_or_image() -> None:
    net = module()
    step = step_for({"tiles": (0, 0), "patches": (4, 4)}, net=net, text=0)
    assert ATP().select_tokens(step, 1) is None  # no text tokens
    step = step_for({"tiles": (0, 0), "patches": (4, 4)}, net=net)
    step.select((~step.layout.visual).nonzero().flatten())
    assert ATP().select_tokens(step, 1) is None  # no image left


def test_unknown_layers_of_the_weights_are_refused() -> None:
    step = step_for({"tiles": (0, 0), "patches": (4, 4)}, net=module(layers=(1, 6)))
    with pytest.raises(RecipeError, match=r"atp: layers=.* after 1, 4, 6 of 8 .* after 1, 6$"):
        ATP().select_tokens(step, 1)
    with pytest.raises(RecipeError, match="atp: layers"):
        ATP((9,)).layers(DEPTH)


# --- through the engine --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llava", "llava_next"])
def vlm(request) -> VLM:
    build = getattr(tiny_models, f"build_{request.param}")
    built = VLM(*build(layers=DEPTH))
    built.adapter.modules["atp", "auto", ""] = module(1)
    return built


def asked(vlm: VLM, recipe: str, **media):
    media = media or {"images": tiny_models.make_image(64, 64)}
    return vlm.ask("what?", recipe=recipe, max_new_tokens=4, **media)


def test_keep_1_is_identity(vlm: VLM) -> None:
    assert asked(vlm, "atp:1").token_ids == asked(vlm, "none").token_ids
    assert asked(vlm, "atp:1").stats.equivalent_tokens == asked(vlm, "none").stats.equivalent_tokens


def test_own_thresholds_with_images_and_videos(vlm: VLM) -> None:
    images = [tiny_models.make_image(64, 48, seed=s) for s in range(2)]
    for media in (
        {"images": images},
        {"video": [tiny_models.make_image(64, 64, seed=s) for s in range(3)], "num_frames": 3},
        {"images": tiny_models.make_image(5, 5)},
    ):
        first, second = asked(vlm, "atp", **media), asked(vlm, "atp", **media)
        assert first.token_ids == second.token_ids
        assert torch.equal(first.trace.depth, second.trace.depth)
        assert set(first.trace.depth.tolist()) <= {*LAYERS, DEPTH}
        assert first.stats.visual_tokens_kept["atp"] < first.stats.visual_tokens_in
    assert asked(vlm, "atp", images=None).stats.visual_tokens_in == 0


# --- training ------------------------------------------------------------------------------------


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    TRAINING.add_arguments(parser)
    return parser.parse_args(words)


SIZES = {"depth": 32, "heads": HEADS}


def test_loss_terms_on_a_worked_example() -> None:
    """The published layers, a half, a quarter and an eighth left."""
    shares = {4: torch.tensor(0.5), 14: torch.tensor(0.25), 24: torch.tensor(0.125)}
    # (4 * 0.5 + 14 * 0.25 + 24 * 0.125) / 32
    assert float(depth_term(shares, 32)) == 8.5 / 32  # powers of two: exact
    # 4 layers see all tokens, 10 a half, 10 a quarter, 8 an eighth: 12.5 of 32.
    assert float(target_term(shares, 32, 0.25)) == 12.5 / 32 - 0.25
    assert float(target_term(shares, 32, 0.5)) == 0.5 - 12.5 / 32
    training = TRAINING(options("--depth-weight", "0.5", "--target-weight", "2"), SIZES)
    outcome = Outcome(ATP(), torch.tensor(3.0), {"shares": shares}, 1.0)
    loss, info = training.loss(module(), [outcome], 0.0)
    assert float(loss) == 3 + 0.5 * 8.5 / 32 + 2 * (12.5 / 32 - 0.25)
    assert info["share_14"] == 0.25


def test_training_defaults_and_stored_config() -> None:
    training = TRAINING(options("--heads", "mean", "--temperature", "5", "80"), SIZES)
    assert training.config() == {"layers": [4, 14, 24], "head_weights": "mean", "grids": 3}
    stages = [training.stages(random.Random(0), progress)[0] for progress in (0.0, 0.5, 1.0)]
    for stage, temperature in zip(stages, (5.0, 20.0, 80.0), strict=True):
        close(stage.temperature, temperature, terms=3)  # a power
    assert all(stage.layers(32) == (4, 14, 24) for stage in stages)
    built = ATP.build(SIZES | training.config())
    (group,) = training.groups(built, 0.1)
    assert sum(p.numel() for p in group["params"]) < sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--target", "0.125"), "--target is 0.125"),
        (("--target", "1"), "--target is 1"),
        (("--temperature", "0", "9"), "--temperature is 0"),
        (("--layers", "0.5/x"), "layers="),
        (("--layers", "40"), "layers=40"),
        (("--grids", "9"), "grids=9"),
    ],
)
def test_invalid_options_are_named(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(RecipeError, match="atp") as caught:
        TRAINING(options(*words), SIZES)
    assert named in str(caught.value)


def passed(vlm: VLM, stage: ATP, net: Module) -> tuple[Tensor, dict]:
    """Logits of an answer's tokens, and the notes of the stage."""
    vlm.adapter.modules["atp", "auto", ""] = net
    sample = Sample({"images": tiny_models.make_image(64, 64)}, "what?", "that")
    logits, notes, _ = run(vlm, inputs_of(vlm, sample), stage)
    return logits, notes


@pytest.fixture(scope="module")
def own() -> VLM:
    """A separate model: training adds modules to it."""
    built = VLM(*tiny_models.build_llava_next(layers=DEPTH))
    built.model.requires_grad_(False)
    return built


@pytest.mark.parametrize("learned", [True, False])
def test_gradients_reach_every_parameter(own: VLM, learned: bool) -> None:
    net = module(2, learned=learned).train()
    logits, notes = passed(own, ATP(), net)
    for target in (logits.log_softmax(-1)[:, 7].sum(), depth_term(notes["shares"], DEPTH)):
        wanted = {name: p for name, p in net.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(target, list(wanted.values()), retain_graph=True)
        for name, gradient in zip(wanted, gradients, strict=True):
            assert gradient.abs().max() > 0, name
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert bool(frozen) != learned and all("heads" in name for name in frozen)
    shares = [share.item() for share in notes["shares"].values()]
    remembered = [point.share.item() for point in net.points.values()]
    before = [point.share.item() for point in module(2).points.values()]
    expected = [0.99 * old + 0.01 * new for old, new in zip(before, shares, strict=True)]
    close(torch.tensor(remembered), torch.tensor(expected), terms=2)
    assert 1 > shares[0] > shares[1] > shares[2] > 0  # masks multiply


def test_steep_soft_masks_equal_drops(own: VLM) -> None:
    """Training matches inference: a very steep mask gives the logits of the hard drop."""
    stage, net = ATP((4,), temperature=1000.0), module(6, layers=(4,))
    with torch.no_grad():
        dropped, _ = passed(own, stage, net)
        masked, _ = passed(own, stage, net.train())
        gentle, _ = passed(own, ATP((4,), temperature=10.0), net)
        full, _ = passed(own, ATP((4,), budget=1.0), net.eval())
    prompt = own.inputs("what?", images=tiny_models.make_image(64, 64))["input_ids"]
    terms = network(own.model, prompt.shape[1])
    close(masked, dropped, terms=terms)
    apart(full, dropped, terms=terms)
    apart(gentle, dropped, terms=terms)


def test_loss_pulls_towards_the_target(own: VLM) -> None:
    """A few steps of gradient descent on the keep-fraction loss meet a target."""
    net = module(None).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(25):
        _, notes = passed(own, ATP(), net)
        loss = target_term(notes["shares"], DEPTH, 0.25)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02
    first = passed(own, ATP(), module(None).train())[1]["shares"]
    assert target_term(first, DEPTH, 0.25).item() > 0.05


def test_module_is_built_from_sizes_and_stored_config(own: VLM) -> None:
    sizes = own.adapter.sizes()
    built = ATP.build(sizes | TRAINING(options(), sizes).config())
    assert built.layers == ATP().layers(DEPTH) == LAYERS
    assert sum(p.numel() for p in built.parameters()) < 1000
