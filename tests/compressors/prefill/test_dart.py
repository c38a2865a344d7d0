"""DART: pivots in numbers, and runs against a prefill by hand."""

from __future__ import annotations

import pytest
import torch

from support.closeness import apart, close, network
from support.engine.driven import ran
from support.reference import Before, Dense
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM, RecipeError
from vlmfast.compressors.prefill.dart import DART


@pytest.mark.parametrize("positions", ["keep", "compact"])
@pytest.mark.parametrize("case", [(build_llava, 1, 1), (build_llava_next, 4, 2)])
def test_run_equals_a_prefill_by_hand(case, positions) -> None:
    build, kv_heads, count = case
    vlm = VLM(*build(layers=4, kv_heads=kv_heads))
    images = [make_image(seed=i) for i in range(count)]
    tensors = vlm.inputs("what is here ?", images=images)
    dense = Dense(vlm, tensors)
    visual = tensors["input_ids"][0] == vlm.adapter.image_token_id
    after = torch.arange(len(visual)) > visual.nonzero().max()
    decoder, total = vlm.model.get_decoder(), round(0.6 * int(visual.sum()))

    def drop(at: Before) -> torch.Tensor | None:
        if at.layer != 2:
            return None
        norm = at.last.key.abs().sum((0, 2))

        def largest(among):
            found = [i for i in norm.argsort(descending=True).tolist() if among[i]]
            return found[:4]

        chosen, states = set(largest(visual)), decoder.norm(at.hidden)
        pivots = sorted([*chosen, *largest(after)])
        assert len(pivots) == 8
        each, more = divmod(total - 4, 8)
        for number, pivot in enumerate(pivots):
            cos = torch.nn.functional.cosine_similarity(states, states[pivot][None])
            left = [i for i in cos.argsort().tolist() if visual[i] and i not in chosen]
            chosen |= set(left[: each + (number < more)])
        left = ~visual
        left[list(chosen)] = True
        return left

    run, logits = ran(vlm, f"dart:0.6,positions={positions}", images)
    expected, _ = dense.dropping(drop, positions)
    assert run.stats.visual_tokens_per_layer[2:] == [total] * 2
    terms = network(vlm.model, dense.size)
    close(logits, expected[0], terms=terms)
    apart(logits, dense(tokens=())[0], terms=terms)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.33, 0.8])
def test_kept_count_equals_the_announced_count(random_vlm, rate) -> None:
    run, _ = ran(random_vlm, f"dart:{rate}", [make_image()])
    n = run.stats.visual_tokens_in
    assert run.stats.visual_tokens_per_layer[-1] == max(1, round(rate * n))


def test_works_after_another_stage(random_vlm) -> None:
    """Rows that another stage dropped after the keys were seen."""
    run, _ = ran(random_vlm, "fastv:0.7,k=2+dart:0.3,k=2", [make_image()])
    n = run.stats.visual_tokens_in
    assert run.stats.visual_tokens_per_layer[-1] == round(0.3 * round(0.7 * n))


def test_layers() -> None:
    assert DART(k=5).layers(32) == (5,)
    assert DART(k=5).attends(32) == (4,)
    with pytest.raises(RecipeError, match=r"dart: k=4 must be below the model's 4 layers"):
        DART(k=4).layers(4)
