"""The elastic compressor: its branches, its gate, its modes, its training, through the engine."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vlmfast
from support import tiny_models
from support.closeness import apart, close
from support.helpers_layout import DIM, REQUEST, image_arguments, prompt
from vlmfast.cli import main
from vlmfast.compressors.select import count
from vlmfast.compressors.tokens.downsample import Downsample
from vlmfast.compressors.tokens.elastic import Elastic
from vlmfast.compressors.tokens.elastic.module import BRANCHES, Gate, anchors, separate
from vlmfast.compressors.tokens.elastic.training import TRAINING, expected
from vlmfast.compressors.tokens.random import Random, shuffled
from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.layout import VisualTokens
from vlmfast.core.training import Outcome
from vlmfast.core.weights import SHIPPED
from vlmfast.errors import RecipeError
from vlmfast.scenes.examples import EVAL_SEED_START, image_example, video_example

QUERIES = 9
PLAIN = {"tiles": (2, 2), "patches": (4, 4)}
LETTERBOX = {"tiles": (2, 2), "patches": (4, 4), "size": (30, 80)}
# Terms for an image of 80 patches and 8 newlines: its mean, then layers of width 8 and 16.
TERMS = 88 + 3 * DIM + 16
GATE = 88 + 7 * DIM + 5 + 16  # mean and spread, norm, query, key and text, then two layers


def module(seed: int | None = None, queries: int = QUERIES, text: bool = True) -> nn.Module:
    """As built; with a ``seed`` as if trained: every weight away from zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = Elastic.build({"width": DIM, "hidden": 16, "queries": queries, "text": text})
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in built.parameters():
                weight += 0.5 * torch.randn(weight.shape, generator=generator)
    return built.eval()


def asked(net: nn.Module, seed: int = 0):
    question = torch.randn(5, DIM, generator=torch.Generator().manual_seed(seed))
    return replace(REQUEST, question_embeds=question, trained={"elastic": net}, notes={})


def reduced(stage: Elastic, net: nn.Module, *images: dict, question: int = 0):
    tokens, stats = prompt(*images)
    request = asked(net, question)
    with torch.no_grad():
        return tokens, stage.reduce(tokens, stats, request), request.notes.get("elastic")


def same(a: VisualTokens, b: VisualTokens) -> bool:
    return torch.equal(a.layout.order, b.layout.order) and torch.equal(a.features, b.features)


def prefer(net: nn.Module, *names: str) -> nn.Module:
    """A gate that prefers the branches in this order, for any input."""
    with torch.no_grad():
        net.gate.outer.weight.zero_()
        for rank, name in enumerate(reversed(names)):
            net.gate.outer.bias[BRANCHES.index(name)] = 5.0 * (rank + 1)
    return net


# --- branches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("branch", ["pool", "conv"])
@given(arguments=image_arguments(), rate=st.floats(0.01, 0.99))
@settings(max_examples=15, deadline=None)
def test_untrained_convolution_equals_downsampling(
    branch: str, arguments: dict, rate: float
) -> None:
    tokens, stats = prompt(arguments)
    expected = Downsample(rate).reduce(tokens, stats, REQUEST)
    _, kept, _ = reduced(Elastic(rate, branch=branch), module(), arguments)
    close(kept.features, expected.features, terms=TERMS)
    for name in ("kind", "tile", "view", "grid", "box", "order", "weight", "protected"):
        assert torch.equal(getattr(kept.layout, name), getattr(expected.layout, name)), name
    # Control: a trained convolution differs, pooling never does.
    _, other, _ = reduced(Elastic(rate, branch=branch), module(1), arguments)
    check = apart if branch == "conv" else close
    check(other.features, expected.features, terms=TERMS)


def test_merged_tokens_count_in_the_average() -> None:
    tokens, stats = prompt(PLAIN)
    weight = torch.randint(1, 5, (len(tokens),)).float()
    tokens = VisualTokens(tokens.features, tokens.layout.replace(weight=weight))
    expected = Downsample(0.2).reduce(tokens, stats, REQUEST)
    for branch in ("pool", "conv"):
        kept = Elastic(0.2, branch=branch).reduce(tokens, stats, asked(module()))
        close(kept.features, expected.features, terms=TERMS)
        assert torch.equal(kept.layout.weight, expected.layout.weight)


def test_pruning_draws_by_seed_and_index() -> None:
    tokens, stats = prompt(PLAIN, LETTERBOX)
    drawn = []
    for seed in (0, 3):
        _, kept, _ = reduced(Elastic(0.3, branch="prune", seed=seed), module(), PLAIN, LETTERBOX)
        # As many as the control keeps, which draws by content as well.
        control = Random(0.3, seed=seed).reduce(tokens, stats, REQUEST)
        assert torch.equal(kept.layout.item, control.layout.item)
        rows = []
        for item, index in tokens.items():
            patches = index[tokens.layout.patches[index]]
            draw = shuffled(len(patches), seed, item, len(index))[: count(0.3, len(index))]
            rows.append(patches[draw.sort().values])
        drawn.append(torch.cat(rows))
        assert same(kept, tokens.select(drawn[-1]))
    assert not torch.equal(*drawn)


@given(
    images=st.lists(image_arguments((4, 4)), min_size=1, max_size=2),
    branch=st.sampled_from(BRANCHES[:-1]),
    rate=st.floats(0.01, 0.99),
    as_budget=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_counts_order_and_weights(
    images: list[dict], branch: str, rate: float, as_budget: bool
) -> None:
    stage = Elastic(branch=branch, **{"budget" if as_budget else "keep": rate})
    net = module(2, queries=200)
    tokens, kept, _ = reduced(stage, net, *images)
    order = kept.layout.order.tolist()
    assert order == sorted(set(order))
    assert set(order) <= set(tokens.layout.order.tolist())
    assert kept.layout.patches.all()  # newlines are dropped
    assert kept.features.isfinite().all()
    assert same(reduced(stage, net, *images)[1], kept)
    for item, index in tokens.items():
        part, mine = tokens.select(index), kept.select(kept.layout.item == item)
        patches = int(part.layout.patches.sum())
        wanted = min(count(rate, len(part)), patches)
        if branch in ("prune", "resample"):
            assert len(mine) == wanted
        else:
            like = Downsample(rate).reduce(*prompt(*images), REQUEST)
            assert len(mine) == int((like.layout.item == item).sum())
        stands_for = len(mine) if branch == "prune" else patches
        close(mine.layout.weight.sum(), torch.tensor(float(stands_for)), terms=2 * patches)
        box = mine.layout.box
        assert ((box[:, :2] < box[:, 2:]).all(1)).all()


def test_query_positions_are_nested_and_spread() -> None:
    assert torch.equal(anchors(64)[:10], anchors(10))
    for n in (4, 16, 64):
        apart_by = torch.cdist(anchors(n), anchors(n)) + torch.eye(n)
        assert apart_by.min() > 0.4 / n**0.5  # no two queries at one position
    assert separate([3, 3, 3, 0, 9], 10) == [3, 4, 2, 0, 9]
    assert sorted(separate([1] * 6, 6)) == list(range(6))


def test_untrained_queries_average_their_neighbourhood() -> None:
    tokens, kept, _ = reduced(Elastic(0.06, branch="resample"), module(), PLAIN)
    assert len(kept) == 5
    patches = tokens.select(tokens.layout.patches)
    box = patches.layout.box
    at = torch.stack([box[:, 1] + box[:, 3], box[:, 0] + box[:, 2]], 1) / 2
    share = (-2 * 5 * torch.cdist(anchors(5), at).square()).softmax(1)
    made = sorted((share @ patches.features).tolist())
    # Small rounding does not move a row: their first numbers are far apart.
    close(torch.tensor(sorted(kept.features.tolist())), torch.tensor(made), terms=TERMS)
    # The first queries do not depend on the number requested; their attention narrows.
    fewer = reduced(Elastic(branch="resample"), module(), PLAIN)[1]
    assert len(fewer) == 2


@pytest.mark.parametrize("branch", BRANCHES[:-1])
def test_dtype_and_deeper_levels(branch: str) -> None:
    tokens, stats = prompt(PLAIN)
    deep = VisualTokens(
        tokens.features.bfloat16(), tokens.layout, (tokens.features, tokens.features)
    )
    kept = Elastic(0.1, branch=branch).reduce(deep, stats, asked(module()))
    assert kept.features.dtype == torch.bfloat16
    for level in kept.extra:  # an untrained branch treats all levels alike
        assert level.dtype == torch.float32
        close(kept.features, level, terms=3, scale=tokens.features.abs().max())  # in, out


# --- the gate ------------------------------------------------------------------------------------


def test_closed_branches_are_never_chosen() -> None:
    net = prefer(module(), "resample", "text", "conv", "pool", "prune")
    few, many = 8 / 88, 20 / 88  # of 88 tokens; there are 9 queries
    chosen = {rate: reduced(Elastic(rate), net, PLAIN)[2]["branch"] for rate in (few, many)}
    assert chosen == {few: "resample", many: "conv"}
    # One image that is too large closes the branch for the whole prompt.
    small = {"tiles": (0, 0), "patches": (4, 4)}
    assert reduced(Elastic(many), net, small)[2]["branch"] == "resample"
    assert reduced(Elastic(many), net, small, PLAIN)[2]["branch"] == "conv"
    # Images are dropped only where that is allowed, and never under a budget.
    net = prefer(module(), "text", "pool")
    assert reduced(Elastic(), net, PLAIN)[2]["branch"] == "pool"
    _, kept, notes = reduced(Elastic(text=True), net, PLAIN)
    assert notes["branch"] == "text" and len(kept) == 0
    assert reduced(Elastic(budget=0.05), net, PLAIN)[2]["branch"] == "pool"


def test_gate_depends_only_on_question_image_and_cost() -> None:
    net, stage = module(3), Elastic(0.09)
    tokens, stats = prompt(PLAIN)

    def logits(tokens=tokens, stage=stage, words: int = 0, **other) -> torch.Tensor:
        request = replace(asked(net, words), **other)
        stage.reduce(tokens, stats, request)
        return request.notes["elastic"]["logits"].detach()

    first = logits()
    apart(logits(words=1)[:4], first[:4], terms=GATE)
    shifted = VisualTokens(tokens.features + torch.arange(DIM), tokens.layout)
    apart(logits(shifted)[:4], first[:4], terms=GATE)
    apart(logits(stage=Elastic(0.05))[:4], first[:4], terms=GATE)
    assert torch.equal(logits(question="Something else?", depth=9), first)
    newlines = torch.where(tokens.layout.patches[:, None], tokens.features, 7.0)
    assert torch.equal(logits(VisualTokens(newlines, tokens.layout)), first)
    assert torch.equal(logits(stage=replace(stage, seed=5)), first)
    assert first[4] == -torch.inf


def test_costs_of_branches_are_logarithms_of_their_fractions() -> None:
    """The more a branch drops, the larger; 0.001 at the least, and 0 where it is closed."""
    gate, seen = Gate(8, 4, 4), []
    gate.inner.register_forward_pre_hook(lambda module, given: seen.append(given[0][-5:]))
    shares = [1.0, 0.5, 0.1, 1e-6, None]
    gate(torch.ones(3, 8), torch.ones(2, 8), shares)
    wanted = torch.tensor([0.0, math.log(2), math.log(10), math.log(1000), 0.0])
    torch.testing.assert_close(seen[0], wanted)


def test_cost_moves_the_gate_to_the_cheap_branch() -> None:
    """Losses (0.5, 0.4) at costs (0.05, 1/3): the break-even weight is 0.1 / (1/3 - 0.05)."""
    losses, costs = torch.tensor([0.5, 0.4]), torch.tensor([0.05, 1 / 3])
    even = torch.zeros(2)
    close(expected(even, losses, 0 * costs)[0], torch.tensor(0.45), terms=4)
    for weight, best in ((0.0, 1), (0.34, 1), (0.36, 0), (2.0, 0)):
        logits = torch.zeros(2, requires_grad=True)
        for _ in range(300):
            (gradient,) = torch.autograd.grad(expected(logits, losses, weight * costs)[0], logits)
            logits = (logits - 50 * gradient).detach().requires_grad_()
        assert int(logits.argmax()) == best, weight
    # A closed branch has no effect, whatever its cost.
    closed = torch.tensor([0.0, -torch.inf])
    close(expected(closed, losses, costs)[0], torch.tensor(0.55), terms=4)


def test_one_decision_for_all_images() -> None:
    net = module(4)
    _, kept, notes = reduced(Elastic(0.09), net, PLAIN, LETTERBOX)
    alone = Elastic(0.09, branch=notes["branch"])
    for item, arguments in enumerate((PLAIN, LETTERBOX)):
        mine = kept.select(kept.layout.item == item)
        tokens, stats = prompt(PLAIN, LETTERBOX)
        part = tokens.select(tokens.layout.item == item)
        with torch.no_grad():
            assert same(alone.reduce(part, stats, asked(net)), mine), arguments


# --- modes ---------------------------------------------------------------------------------------


def test_weighted_equals_the_sum_of_its_branches() -> None:
    net, rate = module(5), 0.2
    _, kept, notes = reduced(Elastic(rate, mode="weighted"), net, PLAIN)
    gates = notes["logits"][:3].softmax(0)
    tokens, pool, _ = reduced(Elastic(rate, branch="pool"), net, PLAIN)
    _, conv, _ = reduced(Elastic(rate, branch="conv"), net, PLAIN)
    assert torch.equal(kept.layout.order, pool.layout.order)
    assert torch.equal(kept.layout.weight, pool.layout.weight)
    pruned = (kept.features - gates[1] * pool.features - gates[2] * conv.features) / gates[0]
    nearest = torch.cdist(pruned.double(), tokens.features.double()).min(1)
    summed = kept.features.abs() + gates[1] * pool.features.abs() + gates[2] * conv.features.abs()
    scale = summed.max() / gates[0]
    close(pruned, tokens.features[nearest.indices], terms=TERMS, scale=scale)  # one patch each
    assert nearest.indices.unique().numel() == len(kept)  # no patch twice
    default = reduced(Elastic(mode="weighted"), net, PLAIN)[1]
    assert len(default) == len(reduced(Elastic(1 / 3, branch="pool"), net, PLAIN)[1])


def test_concat_contains_all_of_its_branches() -> None:
    net = module(6)
    _, kept, _ = reduced(Elastic(mode="concat"), net, PLAIN)
    own = [reduced(Elastic(branch=name), net, PLAIN)[1] for name in BRANCHES[:-1]]
    assert len(kept) == sum(map(len, own))
    rows = {tuple(row) for row in kept.features.tolist()}
    assert all(tuple(row) in rows for part in own for row in part.features.tolist())
    order = kept.layout.order.tolist()
    assert order == sorted(set(order))
    tokens, kept, _ = reduced(Elastic(0.2, mode="concat"), net, PLAIN)
    assert abs(len(kept) - count(0.2, len(tokens))) <= 4


@pytest.mark.parametrize("mode", ["select", "weighted", "concat"])
@pytest.mark.parametrize("share", [{"keep": 1.0}, {"budget": 1}])
def test_keep_1_is_identity(mode: str, share: dict) -> None:
    tokens, stats = prompt(PLAIN, PLAIN)
    assert Elastic(mode=mode, **share).reduce(tokens, stats, REQUEST) is tokens  # without weights


def test_unsupported_modes_of_the_weights_are_named() -> None:
    with pytest.raises(RecipeError, match=r"elastic: queries=10 .* 9"):
        reduced(Elastic(queries=10), module(), PLAIN)
    with pytest.raises(RecipeError, match=r"elastic: keep=0.5 .*branch=resample .* 9"):
        reduced(Elastic(0.5, branch="resample"), module(), PLAIN)
    with pytest.raises(RecipeError, match=r"elastic: text=true .*--text"):
        reduced(Elastic(text=True), module(text=False), PLAIN)
    with pytest.raises(RecipeError, match="width of 12"):
        Elastic.build({"width": 12, "hidden": 16, "queries": 2, "text": False})


def test_branches_with_more_rows_than_the_image_leave_it_unchanged() -> None:
    before, after, _ = reduced(Elastic(mode="concat", conv=1.0), module(), PLAIN)
    patches = before.select(before.layout.patches)
    assert same(after, patches)
    _, after, _ = reduced(Elastic(0.3, mode="concat"), module(), PLAIN)  # control
    assert 0 < len(after) < len(patches)


# --- training ------------------------------------------------------------------------------------


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    TRAINING.add_arguments(parser)
    return parser.parse_args(words)


def outcomes(net: nn.Module, names: tuple[str, ...], rate: float | None = 0.09) -> list[Outcome]:
    """The mean of the squared rows replaces the answer's loss."""
    made = []
    for name in names:
        stage = Elastic(rate, branch=name)
        tokens, stats = prompt(PLAIN)
        request = asked(net)
        kept = stage.reduce(tokens, stats, request)
        loss = kept.features.square().mean()
        made.append(Outcome(stage, loss, request.notes["elastic"], len(kept) / len(tokens)))
    return made


def test_gradients_reach_every_parameter() -> None:
    net = module(8).train()
    training = TRAINING(options(), {"width": DIM})
    loss, info = training.loss(net, outcomes(net, BRANCHES[:-1]), 0.9)
    loss.backward()
    without = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert {"p_prune", "loss_conv", "gate"} <= set(info)
    grouped = [id(p) for group in training.groups(net, 1e-3) for p in group["params"]]
    assert sorted(grouped) == sorted(map(id, net.parameters()))


def test_branch_learns_from_its_answer_and_gate_from_all() -> None:
    training = TRAINING(options("--cost-weight", "0"), {"width": DIM})

    def gradients(names: tuple[str, ...], likely: str) -> dict[str, torch.Tensor]:
        net = prefer(module(9), likely).train()
        training.loss(net, outcomes(net, names), 0.9)[0].backward()
        return {name: p.grad for name, p in net.named_parameters()}

    # The gate's probability of a branch does not change the branch.
    one, other = (gradients(BRANCHES[:-1], likely) for likely in ("conv", "prune"))
    for name in one:
        if not name.startswith("gate"):
            close(one[name], other[name], terms=2 * TERMS)  # forward and backward
    apart(one["gate.outer.bias"], other["gate.outer.bias"], terms=2 * TERMS)
    # Alone, a branch updates only itself.
    alone = gradients(("conv",), "conv")
    assert all((grad is None) == (not name.startswith("conv")) for name, grad in alone.items())


def test_branch_is_trained_where_it_is_open() -> None:
    net = module(10).train()
    (outcome,) = outcomes(net, ("resample",), rate=0.5)
    assert outcome.tokens == QUERIES / 88
    names = BRANCHES[:-1]
    made = outcomes(net, names, rate=0.5)
    loss, info = TRAINING(options(), {"width": DIM}).loss(net, made, 0.9)
    assert info["p_resample"] == 0 and loss.isfinite()


def test_forward_passes_of_a_sample() -> None:
    training = TRAINING(options("--text"), {"width": DIM})
    early = [training.stages(random.Random(i), 0.1) for i in range(30)]
    assert all(len(stages) == 1 for stages in early)
    assert {stages[0].branch for stages in early} == {"conv", "resample"}
    assert len({stages[0].keep for stages in early}) == 30
    late = [training.stages(random.Random(i), 0.9) for i in range(30)]
    for stages in late:
        own = stages[0].keep is None
        assert [s.branch for s in stages] == list(BRANCHES if own else BRANCHES[:-1])
        assert len({s.keep for s in stages}) == 1
    assert {stages[0].keep is None for stages in late} == {True, False}
    one = TRAINING(options("--mode", "weighted"), {}).stages(random.Random(0), 0.9)
    assert [stage.mode for stage in one] == ["weighted"]
    assert Elastic.build({"width": DIM} | training.config()).queries == 80


# --- through the engine --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llava", "llava_next"])
def vlm(request) -> vlmfast.VLM:
    build = {"llava": tiny_models.build_llava, "llava_next": tiny_models.build_llava_next}
    vlm = vlmfast.VLM(*build[request.param]())
    torch.manual_seed(0)
    config = vlm.adapter.sizes() | {"hidden": 16, "queries": QUERIES, "text": False}
    vlm.adapter.modules["elastic", "auto", ""] = Elastic.build(config).eval()
    return vlm


def ask(vlm: vlmfast.VLM, recipe: str, count: int = 1) -> vlmfast.Answer:
    images = [tiny_models.make_image(64, 64, seed) for seed in range(count)]
    return vlm.ask("what is here ?", images, recipe=recipe, max_new_tokens=4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [1, 2])
def test_elastic_through_the_engine(vlm: vlmfast.VLM, count: int) -> None:
    full = ask(vlm, "none", count)
    assert ask(vlm, "elastic:1", count).token_ids == full.token_ids
    total = full.stats.visual_tokens_in
    for branch in BRANCHES:
        answer = ask(vlm, f"elastic:branch={branch}", count)
        kept = answer.stats.visual_tokens_kept["elastic"]
        assert (kept == 0) == (branch == "text")
        assert kept < total and len(answer.token_ids) == 4
    for share in (0.1, 0.3):
        mean = ask(vlm, f"downsample:{share}", count)
        for branch in ("pool", "conv"):
            pooled = ask(vlm, f"elastic:{share},branch={branch}", count)
            assert pooled.token_ids == mean.token_ids
            assert pooled.stats.equivalent_tokens == mean.stats.equivalent_tokens
    for mode in ("weighted", "concat"):
        for value in ("true", "false"):
            ask(
                vlm,
                f"elastic:0.3,mode={mode},proportional_attention={value},positions=compact",
                count,
            )


@pytest.mark.parametrize("queries", ["0", "1"])
def test_too_few_queries_are_refused(tmp_path, capsys, queries: str) -> None:
    command = ["train", "elastic", "--queries", queries, "--steps", "1", "--batch", "1"]
    assert main([*command, "--out", str(tmp_path)]) == ExitCode.USER_ERROR
    assert f"--queries is {queries}; it must be at least 2" in capsys.readouterr().err


# --- shipped weights -----------------------------------------------------------------------------


def test_shipped_weights_beat_pooling(tiny: vlmfast.VLM) -> None:
    folder = SHIPPED / "tiny-elastic"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000
    asked: list[tuple[str, dict, str]] = []
    for seed in range(EVAL_SEED_START + 70, EVAL_SEED_START + 73):
        for scene in (image_example(seed), video_example(seed)):
            still = hasattr(scene, "image")
            media = {"images": scene.image} if still else {"video": scene.frames, "num_frames": 4}
            asked += [(qa.question, media, qa.answer) for qa in scene.qa[:4]]
    assert len(asked) == 19
    right = {}
    for name in ("elastic", "downsample"):
        recipe = f"{name}:budget=0.05"
        requests = [vlmfast.Request(q, **media, recipe=recipe) for q, media, _ in asked]
        answers = tiny.ask_many(requests, batch_size=len(asked), max_new_tokens=8)
        pairs = zip(answers, asked, strict=True)
        right[name] = sum(answer.text.strip() == wanted for answer, (*_, wanted) in pairs)
    assert right["elastic"] >= 0.75 * len(asked), right
    assert right["elastic"] >= right["downsample"] + 4, right
