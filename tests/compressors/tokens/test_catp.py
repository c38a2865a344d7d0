"""CATP: covering in numbers, budgets, and runs with several images against a prefill by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from support.closeness import apart, close, network
from support.engine.driven import ran
from support.reference import Before, Dense
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, RecipeError
from vlmfast.compressors.tokens.catp import CATP


def greedy(worth: torch.Tensor, k: int, value) -> list[int]:
    """``k`` columns chosen one at a time, each maximizing ``value`` of the list of columns."""
    chosen: list[int] = []
    for _ in range(k):
        rest = [j for j in range(worth.shape[1]) if j not in chosen]
        chosen.append(max(rest, key=lambda j: value([*chosen, j])))
    return chosen


@pytest.mark.cases(1)
@pytest.mark.parametrize("build", [build_llava, build_llava_next])
@pytest.mark.parametrize("positions", ["compact", "keep"])
@pytest.mark.parametrize("count", [1, 3])
def test_run_equals_a_prefill_by_hand(build, positions, count) -> None:
    vlm = VLM(*build(layers=6))
    images = [make_image(seed=i) for i in range(count)]
    tensors = vlm.inputs("what is here ?", images=images)
    run, logits = ran(vlm, f"catp:0.4,k=2,positions={positions}", images)
    layout = run.trace.layout
    visual = tensors["input_ids"][0] == vlm.adapter.image_token_id
    item = torch.full((len(visual),), -1)
    item[visual] = layout.item.long()
    sizes = [int((item == i).sum()) for i in range(count)]
    last, n = count - 1, len(visual)
    others = visual & (item != last)

    def drop(at: Before) -> torch.Tensor | None:
        layer, hidden, rows = at.layer, at.hidden, at.rows
        here = item[rows]
        left = torch.ones(len(rows), dtype=torch.bool)
        if layer == 0:
            for i in range(count):
                mine = (here == i).nonzero()[:, 0]
                end = int((here == i + 1).nonzero()[0]) if i < last else n
                text = torch.arange(int(mine[-1]) + 1, end)
                text = text[~visual[text]]
                text = text if len(text) else (~visual).nonzero()[:, 0]
                x = normalize(hidden[mine], dim=-1)
                sim = (x @ x.T + 1) / 2
                named = (cosine_similarity(hidden[mine], hidden[text].mean(0)[None]) + 1) / 2
                kept = greedy(
                    sim,
                    int(len(mine) * 0.7 + 1e-9),
                    lambda columns, sim=sim, named=named: float(
                        sim[:, columns].amax(1).sum() + 0.7 * named[columns].sum()
                    ),
                )
                left[mine] = False
                left[mine[kept]] = True
            return left
        seen.append(at.last.weights)
        if layer not in (3, 4):
            return None
        context, sample = others[rows], here == last
        pool, total = (context, sum(sizes[:-1])) if layer == 3 else (sample, sizes[-1])
        if not pool.any():
            return None
        if layer == 3 or count == 1:
            border = int(pool.nonzero().max())
            gain = seen[-1][:, -1].mean(0) - seen[-2][:, -1].mean(0)
            mean = hidden[border + 1 :].mean(0)
            score = gain.clamp(min=0) + 0.6 * cosine_similarity(hidden, mean[None])
        else:
            score = cosine_similarity(hidden, hidden[context].mean(0)[None])
        places = pool.nonzero()[:, 0]
        best = score[places].argsort(descending=True, stable=True)[: round(0.4 * total)]
        left[places] = False
        left[places[best]] = True
        # Rows of the next map are the kept ones.
        seen[-1] = at.last.of(left).weights
        return left

    seen = []
    dense = Dense(vlm, tensors)
    expected, alive = dense.dropping(drop, positions)
    whole = round(0.4 * sizes[-1]) + (round(0.4 * sum(sizes[:-1])) if last else 0)
    assert run.stats.visual_tokens_per_layer[4:] == [whole] * 2
    assert int(visual[alive[-1]].sum()) == whole
    terms = network(vlm.model, dense.size)
    close(logits, expected[0], terms=terms)
    apart(logits, dense(tokens=())[0], terms=terms)


@pytest.mark.cases(3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("budget", [0.4, 0.6, 0.9])
def test_budget_is_met(count, budget) -> None:
    vlm = VLM(*build_llava_next(layers=8))
    images = [make_image(seed=i) for i in range(count)]
    run, _ = ran(vlm, f"catp:budget={budget}", images)
    share = run.stats.equivalent_tokens / run.stats.visual_tokens_in
    assert share == pytest.approx(budget, abs=0.02)


@pytest.mark.parametrize("k", [2.5, 6, 0.9])
def test_invalid_layer_is_refused(k) -> None:
    with pytest.raises(RecipeError, match=r"catp: k=.* means layer .* of 6; it must be"):
        CATP(k=k).layer(6)
