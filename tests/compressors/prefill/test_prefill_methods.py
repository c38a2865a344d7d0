"""Every prefill method against a dense reference.

The reference uses neither stages nor engine: it runs the decoder's layers one by one on the whole
prompt with eager attention, removes nothing, masks the tokens that a rule in this file drops, and
computes the rule's scores from the full attention maps.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close, network
from support.driven import Driven
from support.reference import Dense, answer_logits
from support.short_prefill import embeds_of
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


@torch.no_grad()
def by_hand(vlm: VLM, embeds: Tensor, drop: Callable, policy: str) -> list[Tensor]:
    """Rows that remain at each layer (S,).

    ``drop(layer, before, ahead, rows)`` returns the remaining rows. ``before`` contains the
    attention map (H, S, S) of the previous layer and its logits without mask and softmax.
    ``ahead()`` returns those of the layer itself over ``rows``.
    """
    decoder, n = vlm.model.get_decoder(), embeds.shape[0]
    rows, causal = torch.ones(n, dtype=torch.bool), torch.ones(n, n, dtype=torch.bool).tril()
    ids, hidden, before = torch.arange(n), embeds[None], None
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    alive = []
    decoder.config._attn_implementation = "eager"

    def attend(layer) -> tuple[tuple[Tensor, Tensor], Tensor]:
        visible = (causal & rows[None]) | torch.eye(n, dtype=torch.bool)
        mask = torch.zeros(n, n).masked_fill(~visible, -torch.inf)[None, None]
        tables = decoder.rotary_emb(hidden, ids[None])
        normed = layer.input_layernorm(hidden)
        _, weights = layer.self_attn(
            normed, attention_mask=mask, position_embeddings=tables, position_ids=ids[None]
        )
        attention = layer.self_attn
        query, key = (
            proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *tables)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = (query @ key.transpose(-1, -2))[0] * attention.head_dim**-0.5
        following = layer(
            hidden, attention_mask=mask, position_embeddings=tables, position_ids=ids[None]
        )
        return (weights[0], logits), following

    try:
        for index, layer in enumerate(decoder.layers):
            left = drop(index, before, lambda layer=layer: attend(layer)[0], rows)
            if not torch.equal(left, rows):
                rows = left
                if policy == "compact":
                    ids = (rows.cumsum(0) - 1).clamp(min=0)
            before, hidden = attend(layer)
            alive.append(rows)
    finally:
        decoder.config._attn_implementation = "sdpa"
    return alive


def top(rows: Tensor, visual: Tensor, score: Tensor, k: int) -> Tensor:
    candidates = (rows & visual).nonzero().flatten()
    order = score[candidates].argsort(descending=True, stable=True)[:k]
    left = rows & ~visual
    left[candidates[order]] = True
    return left


def fastv_rule(visual: Tensor, protected: Tensor) -> Callable:
    def drop(layer, before, ahead, rows):
        if layer != 2:
            return rows
        return top(rows, visual, before[0][:, -1].mean(0), round(int(visual.sum()) * 0.4))

    return drop


def pyramid_rule(rule: str) -> Callable:
    def make(visual: Tensor, protected: Tensor) -> Callable:
        def drop(layer, before, ahead, rows):
            if layer not in STAGES:
                return rows
            score = (ahead() if rule == "next" else before)[0][:, -1].mean(0)
            power = 1 + STAGES.index(layer)
            return top(rows, visual, score, int(int(visual.sum()) * 0.6**power))

        return drop

    return make


def mustdrop_rule(visual: Tensor, protected: Tensor) -> Callable:
    def drop(layer, before, ahead, rows):
        if layer not in (1, 3):
            return rows
        text = before[0][:, int(visual.nonzero().max()) + 1 :].mean(0)
        inside = rows & visual
        total = text.sum(0)
        low = (total < 0.05 * total[inside].sum()) & (text.amax(0) < 0.3)
        return rows & ~(inside & low & ~protected)

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


def atp_rule(vlm: VLM) -> Callable:
    """ATP's equations on full attention maps."""
    module = trained_atp(vlm)

    def make(visual: Tensor, protected: Tensor) -> Callable:
        def drop(layer, before, ahead, rows):
            if layer not in (2, 4):
                return rows
            p = module.points[str(layer)]
            inside = (rows & visual).nonzero().flatten()
            attention, logits = before
            a = attention[:, int(visual.nonzero().max()) + 1 :][..., inside].mean(1)
            a = (p.cross_heads.softmax(0)[:, None] * a).sum(0)
            g = logits[:, inside][..., inside].mean(1)
            g = (p.self_heads[:, None] * g).sum(0)
            levels = torch.stack([g - g.mean(), (len(inside) * a).log()])
            both = torch.sigmoid(p.slope[:, None] * levels + p.offset[:, None])
            z = p.hidden(both.mean(1))
            kept = both.mean(0) > p.theta_r(z).sigmoid()
            left = rows.clone()
            left[inside] = kept
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
    embeds = embeds_of(vlm, tensors)
    visual = tensors["input_ids"][0] == vlm.adapter.image_token_id
    drop = rule(visual, run.prompt.layout.protected)
    alive = by_hand(vlm, embeds, drop, stage.positions)
    assert [int((rows & visual).sum()) for rows in alive] == run.stats.visual_tokens_per_layer
    assert alive[-1].sum() < len(visual)
    dense = Dense(vlm, tensors)
    expected = dense(alive, TOKENS, alive if stage.positions == "compact" else None)
    terms = network(vlm.model, len(visual) + len(TOKENS))
    close(got, expected, terms=terms)
    # Control: with nothing dropped the logits differ.
    apart(got, dense(tokens=TOKENS), terms=terms)
