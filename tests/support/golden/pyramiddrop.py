"""Replays the stored PyramidDrop cases: one drop in isolation, and eight layers end to end."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from support.closeness import close, network
from support.engine.prompts import attention_rows
from support.golden.case import Reader
from support.golden.decoder import decoder_run, llama
from vlmfast.compressors.prefill.pyramiddrop import PyramidDrop, rank, stage_counts
from vlmfast.compressors.select import best


@torch.no_grad()
def scores(data: Reader, features: Tensor, position: Tensor, rows: Tensor) -> Tensor:
    """Score (S,) of every token of one unpadded sequence by the queries of ``rows``."""
    model = llama(1).model
    layer = model.layers[0]
    layer.input_layernorm.weight.copy_(data["ln_weight"])
    hidden = layer.input_layernorm(features)[None]
    heads = [
        (hidden @ data[name].T).unflatten(-1, (4, 16)).transpose(1, 2)
        for name in ("q_proj", "k_proj")
    ]
    cos, sin = model.rotary_emb(hidden, position[None])
    q, k = apply_rotary_pos_emb(*heads, cos, sin)
    return rank(attention_rows(q[0], k[0], rows, None))


def ranked(features: Tensor) -> int:
    """Terms of a score: norm, projections of queries and keys, logits of heads of 16, rows."""
    rows, width = features.shape
    return 3 * width + 16 + rows


def answer_starts(labels: Tensor) -> Tensor:
    """Rows directly before an answer: where supervision begins."""
    begins = (labels[1:] != -100) & (labels[:-1] == -100)
    return begins.nonzero().flatten()


def kept_rows(score: Tensor, start: int, n: int, keep: int) -> Tensor:
    """All text and the ``keep`` best of the ``n`` image rows from ``start`` on."""
    kept = torch.ones(len(score), dtype=torch.bool)
    kept[start : start + n] = best(score[start : start + n][None], [keep])[0]
    return kept.nonzero().flatten()


def rank_case(data: Reader, meta: Reader) -> None:
    if "image_token_posi" in data:
        batch_case(data)
    else:
        single_case(data)


def single_case(data: Reader) -> None:
    start, n = data.count("image_start"), data.count("image_tokens_current")
    features, position = data["features"][0], data["position_ids"][0]
    stage, original = data.count("stage"), data.count("image_tokens_original")
    assert len(features) == n + data.count("prompt_len")
    keep = stage_counts(original, data["ratios"][1:].tolist())[stage]
    assert keep == data.count("keep_length")
    if "labels" in data:
        rows = answer_starts(data["labels"][0])
    else:
        rows = torch.tensor([len(features) - 1])
    score = scores(data, features, position, rows)
    stored = data["scores"]
    close(score[start : start + n], stored, terms=ranked(features), scale=stored)
    kept = kept_rows(score, start, n, keep)
    image = kept[(kept >= start) & (kept < start + n)]
    assert torch.equal(image, data["kept_seq_index"])
    assert torch.equal(features[kept], data["out_features"][0])
    assert torch.equal(torch.arange(len(kept)), data["out_position_ids"][0])
    if "labels" in data:
        assert torch.equal(data["labels"][0][kept], data["out_labels"][0])


def batch_case(data: Reader) -> None:
    """Two samples, one without an image: each alone and unpadded, as the engine runs them."""
    outputs = []
    for i, start in enumerate(data["image_token_posi"].tolist()):
        valid = data["attention_mask"][i].bool()
        features, position = data["features"][i][valid], data["position_ids"][i][valid]
        kept = torch.arange(len(features))
        n = int(data["image_tokens"][i]) if start >= 0 else 0
        assert len(features) == n + int(data["prompt_len"][i])
        if start >= 0:
            score = scores(data, features, position, torch.tensor([len(features) - 1]))
            ours, stored = score[start : start + n], data[f"scores_sample{i}"]
            close(ours, stored, terms=ranked(features), scale=stored)
            stored = data[f"kept_seq_index_sample{i}"]
            kept = kept_rows(score, start, n, len(stored))
            image = kept[(kept >= start) & (kept < start + n)]
            assert torch.equal(image, stored)
        outputs.append(features[kept])
    width = data["out_features"].shape[1]
    for i, rows in enumerate(outputs):
        # The stored batch is padded on the right, and cut to its longest member.
        rows = rows[:width]
        mask = data["out_attention_mask"][i].bool()
        assert int(mask.sum()) == len(rows)
        assert torch.equal(data["out_features"][i][: len(rows)], rows)
        assert torch.equal(data["out_position_ids"][i][: len(rows)], torch.arange(len(rows)))


@torch.no_grad()
def end_to_end(data: Reader, meta: Reader) -> None:
    """The engine on the stored weights: selection, cache, hidden states, positions."""
    steps = data["decode_embeds"][0]
    published = PyramidDrop(layers_=(2, 4, 6), positions="compact")
    run, last = decoder_run(data, published, 35, 576, steps)
    terms = network(run.adapter.model, 631)
    close(last, data["prefill_hidden"], terms=terms)
    assert run.cache.lengths() == data["cache_lengths"].tolist()
    for stage, layer in enumerate((2, 4, 6)):
        alive = (run.trace.depth > layer).nonzero().flatten()
        assert torch.equal(alive, data[f"kept_image_index_stage{stage}"])
        # The stored scores are of the tokens that entered the stage.
        entered = (run.trace.depth >= layer).nonzero().flatten()
        stored = data[f"scores_stage{stage}"]
        picked = best(stored[None], [len(alive)])[0]
        assert torch.equal(entered[picked], alive)
    for i in range(len(steps)):
        positions = [int(run.position) - layer.shift[0] for layer in run.cache.layers]
        assert positions == data["decode_position_per_layer"][i].tolist()
        hidden = run.next(torch.tensor([[i]]))
        close(hidden[0], data["decode_hidden"][0, i], terms=terms)
