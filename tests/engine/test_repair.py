"""Proportional attention of merged tokens, and the statistics that methods may request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from support.closeness import apart, close, network, tower
from support.engine.driven import Driven, answer_logits
from support.engine.prompts import attention_rows, received_logits, switched, text_attention
from support.engine.storage import KVCache
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM
from vlmfast.core.contexts import DecodeContext, PrefillContext
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.params import proportional_attention_param
from vlmfast.core.protocols import EncodeStage, PrefillStage
from vlmfast.core.statistics import StatRequest
from vlmfast.train import stages as training

TOKENS = [17, 40, 99, 7]
FAMILIES = {"llava": build_llava, "llava-next": build_llava_next}


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request) -> VLM:
    return VLM(*FAMILIES[request.param]())


def sums(vlm: VLM) -> int:
    """Number of summed terms of a logit, for a prompt with one image and `TOKENS`."""
    prompt = vlm.inputs("what is here ?", [make_image()])["input_ids"].shape[1]
    return tower(vlm.model) + network(vlm.model, prompt + len(TOKENS))


# --- log-weight bias -----------------------------------------------------------------------------


SUMS = 16 + 15  # a logit over the head dimension, then the values over the keys


class Layer:
    """The attention module as the registered attention function uses it."""

    layer_idx, num_key_value_groups, training, is_causal = 0, 2, False, True


def states(rows: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Queries and grouped keys and values of 12 tokens, gathered by ``rows``."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, heads, 12, 16, generator=generator) for heads in (4, 2, 2)]
    return [s[:, :, rows] for s in made]


def attend(
    rows: torch.Tensor, weight: torch.Tensor, proportional_attention: bool
) -> tuple[torch.Tensor, KVCache]:
    layout = TokenLayout.text(torch.arange(len(rows)), torch.arange(len(rows))[None])
    cache = KVCache(1)
    context = PrefillContext(
        layout=layout.replace(weight=weight),
        cache=cache,
        proportional_attention=proportional_attention,
    )
    query, key, value = states(rows, 0)
    cache.layers[0].update(key, value)
    out, _ = text_attention(Layer(), query, key, value, None, scaling=0.25, vlmfast_context=context)
    return out, cache


def test_weighted_token_equals_its_duplicates() -> None:
    """In prefill, in decoding, and for several tokens at once."""
    twice = torch.tensor([0, 1, 2, 3, 3, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11])
    once = torch.arange(12)
    weight = torch.ones(12)
    weight[3], weight[6] = 3, 2
    expected, full = attend(twice, torch.ones(len(twice)), proportional_attention=False)
    got, merged = attend(once, weight, proportional_attention=True)
    control, plain = attend(once, weight, proportional_attention=False)
    # The last duplicate attends to the same keys as the merged token.
    last = torch.tensor([0, 1, 2, 5, 6, 7, 9, 10, 11, 12, 13, 14])
    close(got, expected[:, last], terms=SUMS)
    apart(control, expected[:, last], terms=SUMS)

    for length in (1, 3):
        outputs = []
        for cache in (full, merged, plain):
            if not cache.layers[0].frozen:
                cache.freeze(8, 12)
            query, key, value = (s[:, :, :length] for s in states(once, 1))
            context = DecodeContext(cache)
            kv = cache.layers[0].update(key, value)
            out, _ = text_attention(
                Layer(), query, *kv, None, scaling=0.25, vlmfast_context=context
            )
            outputs.append(out)
        close(outputs[1], outputs[0], terms=SUMS)
        apart(outputs[2], outputs[0], terms=SUMS)


def test_attention_statistics_include_weights() -> None:
    query, key, _ = states(torch.arange(12), 0)
    weight = torch.ones(12)
    weight[3] = 2.0
    rows = torch.tensor([11])
    once = attention_rows(query[0], key[0], rows, 0.25, bias=weight.log())
    twice = torch.tensor([0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    q, k, _ = states(twice, 0)
    expected = attention_rows(q[0], k[0], torch.tensor([12]), 0.25)
    close(once[..., 3], expected[..., 3] + expected[..., 4], terms=SUMS)
    close(once[..., 4:], expected[..., 5:], terms=SUMS)


@dataclass(frozen=True)
class Weigh(EncodeStage):
    """Sets the weight of an image's first token to ``weight``."""

    name: ClassVar[str] = "test-weigh"
    weight: float = 1.0
    proportional_attention: bool = proportional_attention_param(True)

    def reduce(self, tokens, stats, request):
        weight = tokens.layout.weight.clone()
        weight[0] = self.weight
        return VisualTokens(tokens.features, tokens.layout.replace(weight=weight), tokens.extra)


def test_repair_changes_answers_only_with_weights(vlm) -> None:
    """Weights of 1 change nothing; others do, in prefill and decoding, unless switched off."""
    full = answer_logits(vlm, Driven.of(vlm, (), [make_image()]), TOKENS)
    same = answer_logits(vlm, Driven.of(vlm, Weigh(1.0), [make_image()]), TOKENS)
    terms = sums(vlm)
    close(same, full, terms=terms)
    heavy = answer_logits(vlm, Driven.of(vlm, Weigh(50.0), [make_image()]), TOKENS)
    for row, other in zip(heavy, full, strict=True):
        apart(row, other, terms=terms)
    off = answer_logits(
        vlm, Driven.of(vlm, Weigh(50.0, proportional_attention=False), [make_image()]), TOKENS
    )
    assert torch.equal(off, full)


def test_repair_bias_follows_rows_through_drops(vlm) -> None:
    """After a drop that follows a merge, each layer has the bias of its remaining rows."""

    @dataclass(frozen=True)
    class DropSecond(PrefillStage):
        name: ClassVar[str] = "test-drop"

        def layers(self, depth):
            return (2,)

        def select_tokens(self, step, layer):
            second = int(step.layout.visual.nonzero()[1])
            return torch.tensor([i for i in range(len(step.layout)) if i != second])

    run = Driven.of(vlm, (Weigh(9.0), DropSecond()), [make_image()])
    with torch.no_grad(), switched(vlm.model):
        run.start(2)
    first = int(run.prompt.layout.visual.nonzero()[0])
    for layer in run.cache.layers:
        assert [row.nonzero().tolist() for row in layer.bias[0]] == [[[first]]] * 2
        close(layer.bias[0, 0, first].exp(), 9.0, terms=2)
        assert layer.bias.shape[2] == layer.keys.shape[2]


# --- statistics for methods ----------------------------------------------------------------------


def test_received_logits_are_the_mean_attention_logits() -> None:
    query, key, _ = states(torch.arange(12), 0)
    rows = torch.tensor([2, 3, 7])
    logits = query[0] @ key[0].repeat_interleave(2, 0).transpose(-1, -2) * 0.25
    got = received_logits(query[0], key[0], rows, 0.25)
    close(got, logits[:, rows].mean(1, keepdim=True), terms=SUMS)
    apart(got, logits.mean(1, keepdim=True), terms=SUMS)


def test_received_logits_and_text_rows_from_one_layer(vlm) -> None:
    seen = {}

    @dataclass(frozen=True)
    class Look(PrefillStage):
        name: ClassVar[str] = "test-look"

        def layers(self, depth):
            return (2,)

        def text_stats(self, depth):
            return {1: StatRequest("text", received=True)}

        def select_tokens(self, step, layer):
            seen["text"], seen["received"] = step.stats[1], step.received[1]
            step.select(torch.arange(len(step.layout) - 1))
            assert step.received[1].shape[-1] == seen["received"].shape[-1] - 1

    run = Driven.of(vlm, Look(), [make_image()], answer=3)
    with torch.no_grad():
        training.run(vlm, run.inputs, Look())
    n = run.inputs.tensors["input_ids"].shape[1]
    visual = run.inputs.tensors["input_ids"][0] == vlm.adapter.image_token_id
    text_after = n - 1 - int(visual.nonzero().max())
    assert seen["received"].shape == (4, 1, n)
    # In training, answer rows do not contribute.
    assert seen["text"].shape == (4, text_after - 3, n)


def test_requests_of_two_stages_are_joined() -> None:
    a, b = StatRequest("cls"), StatRequest("cls", keys=True)
    assert a.joined(b) == b.joined(a) == b
    assert a.joined(StatRequest("columns")) is None
    assert StatRequest("text").joined(StatRequest("text", received=True)).received


def test_soft_mask_equals_drop_in_the_limit(vlm) -> None:
    """Training: a row of weight near 0 acts like a dropped one."""

    @dataclass(frozen=True)
    class Soft(PrefillStage):
        name: ClassVar[str] = "test-soft"
        left: float = 1.0

        def layers(self, depth):
            return (1,)

        def select_tokens(self, step, layer):
            visual = step.layout.visual
            if self.left:
                step.soft = torch.where(visual, self.left, 1.0)
                return None
            return (~visual).nonzero().flatten()

    def taught(stage: Soft | None) -> torch.Tensor:
        inputs = Driven.of(vlm, (), [make_image()], answer=1).inputs
        with torch.no_grad():
            return training.run(vlm, inputs, stage)[0]

    full, one = taught(None), taught(Soft(1.0))
    terms = sums(vlm)
    close(one, full, terms=terms)
    gone, hardly = taught(Soft(0.0)), taught(Soft(1e-9))
    # A weight of 1e-9 is far below the rounding error.
    close(hardly, gone, terms=terms)
    apart(gone, full, terms=terms)
