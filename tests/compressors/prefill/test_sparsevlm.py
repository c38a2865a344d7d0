"""SparseVLM: raters, counts and clusters on examples, and prompts against a reference prefill."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close, network
from support.engine.driven import ran
from support.reference import Before, Dense, Rule
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM
from vlmfast.compressors.prefill.sparsevlm import (
    PUBLISHED,
    Drop,
    clusters,
    raters,
    recycled,
    split,
)
from vlmfast.compressors.select import count
from vlmfast.core.contexts import PrefillContext

DROPS = {2: 40, 3: 20}  # percent of tokens left after each drop


@pytest.fixture(scope="module", params=[build_llava, build_llava_next])
def vlm(request) -> VLM:
    return VLM(*request.param(layers=6))


def test_raters_example() -> None:
    visual = torch.tensor([[2.0, 0], [2, 0], [0, 1]])
    text = torch.tensor([[1.0, 0], [-1, 0], [0, 1]])
    rate, score = raters(visual, text)
    e = torch.tensor([[2.0, -2, 0], [2, -2, 0], [0, 0, 1]]).softmax(1).mean(0)
    close(score, e, terms=6)
    assert rate.tolist() == [True, False, False]
    assert raters(visual, text[:1])[0].tolist() == [True]  # the only text token
    assert raters(visual, text[[0, 0]])[0].tolist() == [True, True]


def test_recycled_counts() -> None:
    assert recycled(276) == (83, 9)
    assert recycled(109) == (33, 4)
    assert recycled(1) == (1, 1)
    assert recycled(0) == (0, 0)
    for n in (5, 40, 577):
        for total in range(1, n + 1):
            kept, groups = split(n, total)
            assert kept + groups == total
            assert groups == recycled(n - kept)[1] or kept == 0


def test_clusters_example() -> None:
    rows = torch.tensor([[0.0, 0], [0.1, 0], [9, 9], [9, 9.1], [0, 0.1]])
    means, centres, label = clusters(rows, 2)
    assert label[[0, 1, 4]].unique().numel() == label[[2, 3]].unique().numel() == 1
    assert label[0] != label[2]
    for group in (0, 1):
        close(means[group], rows[label == group].mean(0), terms=3)
        assert label[centres[group]] == group


def rule(dense: Dense, recycle: bool) -> Rule:
    """The paper's rule on full attention maps."""
    visual, embeds = dense.vlm.adapter.visual(dense.tensors["input_ids"][0]), dense.embeds
    text_start = int(visual.nonzero().max()) + 1
    s = (embeds[visual] @ embeds[text_start:].T).softmax(-1).mean(0)
    rating = text_start + (s > s.mean()).nonzero()[:, 0]
    n0 = int(visual.sum())

    def drop(at: Before) -> Tensor | None:
        if at.layer not in DROPS:
            return None
        rows = at.rows
        total = max(1, round(DROPS[at.layer] / 100 * n0))
        score = at.last.weights[:, torch.isin(rows, rating)].mean(0).mean(0)
        order = [i for i in score.argsort(descending=True, stable=True).tolist() if visual[rows[i]]]
        kept = total
        while recycle and kept + (int((int(0.3 * (len(order) - kept)) + 1) / 10) + 1) > total:
            kept -= 1
        stays = order[:kept]
        if recycle:
            candidates = torch.tensor(
                sorted(order[kept : kept + int(0.3 * (len(order) - kept)) + 1])
            )
            means, centres, _ = clusters(at.hidden[candidates], total - kept)
            at.hidden[candidates[centres]] = means
            stays = stays + candidates[centres].tolist()
        left = ~visual[rows]
        left[stays] = True
        return left

    return drop


def recipe_text(recycle: bool, positions: str) -> str:
    return f"sparsevlm:layers=2/3,budget=0.5,recycle={str(recycle).lower()},positions={positions}"


@pytest.mark.cases(7)
@pytest.mark.parametrize("positions", ["compact", "keep"])
@pytest.mark.parametrize("recycle", [True, False])
@pytest.mark.parametrize("num_images", [1, 2])
def test_prompt_equals_reference_prefill(vlm, positions, recycle, num_images, monkeypatch) -> None:
    images = [make_image(seed=i) for i in range(num_images)]
    dense = Dense(vlm, vlm.inputs("what is here ?", images=images))
    n0 = int(vlm.adapter.visual(dense.tensors["input_ids"]).sum())
    totals = tuple(max(1, round(share / 100 * n0)) for share in DROPS.values())
    monkeypatch.setattr("vlmfast.compressors.prefill.sparsevlm.solve_counts", lambda *args: totals)
    run, logits = ran(vlm, recipe_text(recycle, positions), images)
    expected, _ = dense.dropping(rule(dense, recycle), positions)
    assert run.stats.visual_tokens_per_layer == [n0] * 2 + [totals[0]] + [totals[1]] * 3
    terms = network(vlm.model, dense.size)
    close(logits, expected[0], terms=terms)
    # Controls: recycling, and dropping, change the result.
    other, _ = dense.dropping(rule(dense, not recycle), positions)
    apart(logits, other[0], terms=terms)
    apart(logits, dense(tokens=())[0], terms=terms)


def test_recycled_token_weights_are_used(vlm, monkeypatch) -> None:
    largest, select = [], Drop.select_tokens

    def noted(self: Drop, step: PrefillContext, layer: int) -> Tensor | None:
        rows = select(self, step, layer)
        largest.append(float(step.layout.select(rows).weight.max()))
        return rows

    monkeypatch.setattr(Drop, "select_tokens", noted)
    images = [make_image(seed=i) for i in range(3)]
    run, plain = ran(vlm, recipe_text(True, "keep"), images)
    _, weighted = ran(vlm, recipe_text(True, "keep") + ",proportional_attention=true", images)
    assert max(largest) > 1
    apart(plain, weighted, terms=network(vlm.model, run.prompt.full_length))


def test_published_average_counts() -> None:
    """Including recycled tokens, averaged as by the authors over 2, 4, 9 and 17 of 32 layers."""
    for name, expected in (("192", 192.0), ("128", 128.6), ("96", 96.9), ("64", 64.8)):
        n, counts = 576, []
        for kept in PUBLISHED[name]:
            n = kept + recycled(n - kept)[1]
            counts.append(n)
        average = (2 * 576 + 4 * counts[0] + 9 * counts[1] + 17 * counts[2]) / 32
        assert average == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("layers", "drops"),
    [(4, {1: 1, 2: 2}), (5, {1: 1, 2: 2}), (6, {1: 1, 3: 2}), (8, {1: 0, 2: 1, 4: 2})],
)
def test_published_counts_move_to_shallow_models(layers: int, drops: dict[int, int]) -> None:
    """Of drops that meet, the last one counts: all layers after it have its tokens."""
    vlm = VLM(*build_llava(layers=layers))
    images = [make_image(seed=i) for i in range(4)]
    answer = vlm.ask("what ?", images=images, recipe="sparsevlm:recycle=false", max_new_tokens=1)
    n = answer.stats.visual_tokens_in
    left, expected = n, []
    for layer in range(layers):
        if layer in drops:
            left = count(PUBLISHED["192"][drops[layer]] / 576, n)
        expected.append(left)
    assert answer.stats.visual_tokens_per_layer == expected
