"""Every prefill method against a dense reference.

The reference uses neither stages nor engine: it removes nothing, masks the tokens that a rule in
this file drops, and gives the rule the full attention maps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close, network
from support.engine.driven import Driven, answer_logits
from support.reference import Before, Dense, Rule
from support.tiny_models import build_llava, build_llava_next, make_image
from vlmfast import VLM
from vlmfast.compressors.encoder.mustdrop import MustDrop
from vlmfast.compressors.prefill.atp import ATP
from vlmfast.compressors.prefill.atp.module import Module
from vlmfast.compressors.prefill.fastv import FastV
from vlmfast.compressors.prefill.pyramiddrop import PyramidDrop

STAGES = (2, 3, 5)  # layers before which PyramidDrop drops
TOKENS = [17, 40, 99, 7, 123, 60, 200, 31]
MODELS = {
    "llava-1.5": (build_llava, 4),
    "llava-next": (build_llava_next, 4),
    "grouped queries": (build_llava, 1),
}


@pytest.fixture(scope="module", params=MODELS)
def vlm(request) -> VLM:
    build, kv_heads = MODELS[request.param]
    return VLM(*build(layers=6, kv_heads=kv_heads))


def top(at: Before, visual: Tensor, score: Tensor, k: int) -> Tensor:
    """All text, and the ``k`` visual rows of the largest score."""
    inside = visual[at.rows]
    candidates = inside.nonzero().flatten()
    left = ~inside
    left[candidates[score[candidates].argsort(descending=True, stable=True)[:k]]] = True
    return left


def text_rows(at: Before, visual: Tensor) -> Tensor:
    """The rows after the last image."""
    return at.rows > visual.nonzero().max()


# Each makes the rule of a method, given the visual and the protected rows of a prompt.


def fastv_rule(visual: Tensor, protected: Tensor) -> Rule:
    def drop(at: Before) -> Tensor | None:
        if at.layer != 2:
            return None
        return top(at, visual, at.last.weights[:, -1].mean(0), round(int(visual.sum()) * 0.4))

    return drop


def pyramid_rule(rule: str) -> Callable[[Tensor, Tensor], Rule]:
    def make(visual: Tensor, protected: Tensor) -> Rule:
        def drop(at: Before) -> Tensor | None:
            if at.layer not in STAGES:
                return None
            score = (at.ahead() if rule == "next" else at.last).weights[:, -1].mean(0)
            power = 1 + STAGES.index(at.layer)
            return top(at, visual, score, int(int(visual.sum()) * 0.6**power))

        return drop

    return make


def mustdrop_rule(visual: Tensor, protected: Tensor) -> Rule:
    def drop(at: Before) -> Tensor | None:
        if at.layer not in (1, 3):
            return None
        text = at.last.weights[:, text_rows(at, visual)].mean(0)
        inside, total = visual[at.rows], text.sum(0)
        low = (total < 0.05 * total[inside].sum()) & (text.amax(0) < 0.3)
        return ~(inside & low & ~protected[at.rows])

    return drop


def trained_atp(vlm: VLM) -> Module:
    """A module as after training: no parameter has its initial value."""
    module = Module((2, 4), vlm.adapter.sizes()["heads"], learned=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        for point in module.points.values():
            point.theta_r.bias.fill_(0.0)
    return module.eval().requires_grad_(False)


def atp_rule(vlm: VLM) -> Callable[[Tensor, Tensor], Rule]:
    """ATP's equations on full attention maps."""
    module = trained_atp(vlm)

    def make(visual: Tensor, protected: Tensor) -> Rule:
        def drop(at: Before) -> Tensor | None:
            if at.layer not in (2, 4):
                return None
            p = module.points[str(at.layer)]
            inside = visual[at.rows].nonzero().flatten()
            a = at.last.weights[:, text_rows(at, visual)][..., inside].mean(1)
            a = (p.cross_heads.softmax(0)[:, None] * a).sum(0)
            g = at.last.logits[:, inside][..., inside].mean(1)
            g = (p.self_heads[:, None] * g).sum(0)
            levels = torch.stack([g - g.mean(), (len(inside) * a).log()])
            both = torch.sigmoid(p.slope[:, None] * levels + p.offset[:, None])
            z = p.hidden(both.mean(1))
            left = ~visual[at.rows]
            left[inside] = both.mean(0) > p.theta_r(z).sigmoid()
            return left

        return drop

    return make


METHODS = {
    "fastv": (FastV(keep=0.4), fastv_rule),
    "fastv compact": (FastV(keep=0.4, positions="compact"), fastv_rule),
    "pyramiddrop": (PyramidDrop(0.6, layers_=STAGES), pyramid_rule("next")),
    "pyramiddrop keep": (
        PyramidDrop(0.6, layers_=STAGES, positions="keep"),
        pyramid_rule("next"),
    ),
    "pyramiddrop last": (PyramidDrop(0.6, layers_=STAGES, rule="last"), pyramid_rule("last")),
    "mustdrop": (
        MustDrop(window=1, layers=(1, 3), global_thr=0.05, individual_thr=0.3, cache=False),
        mustdrop_rule,
    ),
    "atp": (ATP((2, 4), grids=0), None),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_images", [1, 2])
def test_prefill_methods_equal_dense_reference(vlm, method, num_images) -> None:
    stage, rule = METHODS[method]
    images = [make_image(seed=i) for i in range(num_images)]
    if stage.trained:
        vlm.adapter.modules[stage.name, stage.weights, ""] = trained_atp(vlm)
        rule = atp_rule(vlm)
    run = Driven.of(vlm, stage, images)
    got = answer_logits(vlm, run, TOKENS)
    tensors = run.inputs.tensors
    visual = tensors["input_ids"][0] == vlm.adapter.image_token_id
    dense = Dense(vlm, tensors)
    drop = rule(visual, run.prompt.layout.protected)
    expected, alive = dense.dropping(drop, stage.positions, TOKENS)
    assert [int((rows & visual).sum()) for rows in alive] == run.stats.visual_tokens_per_layer
    assert alive[-1].sum() < len(visual)
    terms = network(vlm.model, len(visual) + len(TOKENS))
    close(got, expected, terms=terms)
    # Control: with nothing dropped the logits differ.
    apart(got, dense(tokens=TOKENS), terms=terms)
