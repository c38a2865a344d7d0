"""ToMe: matching, schedule, and a reference tower with proportional attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import apart, close
from support.engine.driven import Driven, answer_logits
from support.tiny_models import build_llava, build_llava_next, make_image
from support.tower_terms import answer, tower
from vlmfast import VLM, Recipe
from vlmfast.compressors.encoder.tome import ToMe, bipartite, merge, schedule
from vlmfast.core.statistics import StatRequest


def test_blocks_and_their_statistics() -> None:
    stage = ToMe(0.5).expand()[0]
    assert stage.blocks(24) == tuple(range(1, 23))
    assert stage.vision_stats(24) == dict.fromkeys(range(22), StatRequest("keys", keys=True))
    for whole in (ToMe(1.0), ToMe(budget=1.0)):
        assert whole.expand()[0].blocks(24) == ()


def test_matching_example() -> None:
    # A: rows 0, 2, 4; B: rows 1, 3. Row 4 is most similar to 3, row 2 to 1, row 0 to none.
    metric = torch.tensor([[[-1.0, 0], [1, 0.2], [1, 0], [0, 1], [0, 2]]])
    assert bipartite(metric, 1, False).tolist() == [[0, 2, 1, 3, 3]]
    assert bipartite(metric, 2, False).tolist() == [[0, 1, 1, 2, 2]]
    assert bipartite(metric, 9, False).tolist() == [[0, 1, 1, 2, 2]]  # half of them
    alike = torch.ones(1, 5, 2)
    assert bipartite(alike, 1, False).tolist() == [[2, 2, 0, 3, 1]]  # the first of equals
    assert bipartite(alike, 2, True).tolist() == [[0, 1, 1, 2, 1]]  # CLS stays


def test_means_are_weighted() -> None:
    rows, size = torch.tensor([[[1.0], [4], [10]]]), torch.tensor([[1.0, 2, 5]])
    out, total = merge(rows, size, torch.tensor([[1, 1, 0]]))
    assert out.flatten().tolist() == [10, 3]
    assert total.tolist() == [[5, 3]]


@given(st.integers(2, 600), st.data(), st.integers(1, 24))
def test_schedule_reaches_the_target(n: int, data: st.DataObject, blocks: int) -> None:
    left = data.draw(st.integers(max(1, -(-n // 2**blocks)), n))
    steps = schedule(n, left, blocks)
    assert len(steps) == blocks
    assert n - sum(steps) == left
    used = [s for s in steps if s]
    assert used == steps[: len(used)]


def test_schedule_examples() -> None:
    assert schedule(576, 192, 22) == [18] * 21 + [6]
    assert schedule(576, 64, 22) == [24] * 21 + [8]
    assert schedule(197, 1, 3, r=16) == [16] * 3
    assert schedule(16, 1, 4) == [8, 4, 2, 1]  # at most half of the rest
    assert schedule(10, 1, 3, r=6) == [5, 2, 1]


@torch.no_grad()
def tower_by_hand(vlm: VLM, pixels: Tensor, stage: ToMe) -> tuple[Tensor, Tensor]:
    """Output rows of the tower, (V, M, D), and the row of each patch, (V, 1 + N)."""
    tower = vlm.model.get_encoder(modality="image")
    vlm.model.set_attn_implementation("eager")
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))
    views, n, _ = hidden.shape
    where, size = torch.arange(n).expand(views, -1), torch.ones(views, n)
    blocks = vlm.adapter.vision_blocks()
    counts, keys = stage.steps(n - 1, len(blocks) - 2), None
    for index, block in enumerate(blocks[:-1]):
        if index:
            source = bipartite(keys, counts[index - 1], True)
            if counts[index - 1]:
                hidden, size = merge(hidden, size, source)
                where = source.gather(1, where)
        wide = block.self_attn.k_proj(block.layer_norm1(hidden))
        keys = wide.unflatten(-1, (-1, block.self_attn.head_dim)).mean(2)
        bias = size.log()[:, None, None].expand(-1, -1, hidden.shape[1], -1)
        hidden = block(hidden, attention_mask=bias if stage.proportional_attention else None)
    vlm.model.set_attn_implementation("sdpa")
    return hidden, where


@pytest.mark.cases(3)
@pytest.mark.parametrize("build", [build_llava, build_llava_next])
@pytest.mark.parametrize("text", ["tome:0.4", "tome:0.4,proportional_attention=false", "tome:r=3"])
def test_prompt_equals_reference_tower(build, text) -> None:
    vlm, image = VLM(*build()), make_image()
    recipe = Recipe.parse(text)
    (stage,) = recipe
    run = Driven.of(vlm, recipe, [image])
    logits = answer_logits(vlm, run, [])
    tensors = run.inputs.tensors
    full, layout = run.trace.layout, run.prompt.layout.select(run.prompt.layout.visual)

    hidden, where = tower_by_hand(vlm, tensors["pixel_values"].flatten(0, -4), stage)
    rows = vlm.model.base_model.multi_modal_projector(hidden)
    assert bool(layout.patches.all())  # newlines are dropped
    patch = (layout.grid[:, 1] * 4 + layout.grid[:, 2]).long() + 1
    group = where[layout.view.long(), patch]
    got = run.prompt.embeds[run.prompt.layout.visual]
    close(got, rows[layout.view.long(), group], terms=tower(vlm))
    # One token per group, weighted by the number of its patches.
    seen = {(v, int(where[v, 1 + p])) for v in range(len(where)) for p in range(16)}
    ours = set(zip(layout.view.tolist(), group.tolist(), strict=True))
    assert ours == seen
    assert len(layout) == len(ours) == sum(int(w.max()) for w in where)
    assert layout.weight.sum() == int(full.patches.sum())
    # Control: another treatment of sizes gives another result.
    other = Recipe.parse(
        text + ("" if "proportional_attention" in text else ",proportional_attention=false")
    )
    if other != recipe:
        run = Driven.of(vlm, other, [image])
        control = answer_logits(vlm, run, [])
        apart(control, logits, terms=answer(vlm, run.prompt.full_length))
