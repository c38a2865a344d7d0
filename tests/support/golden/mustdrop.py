"""Replays the stored MustDrop cases: merging, key set, filter and cache, alone and in models."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlamaForCausalLM

from support.closeness import close, network
from support.engine.driven import Driven
from support.engine.prompts import TEXT, VISION, Inputs, Prompt, representatives
from support.golden.case import Reader
from support.golden.decoder import Decoder
from support.helpers_layout import REQUEST, make_image, stats_of
from vlmfast.compressors.encoder.mustdrop import (
    MustDrop,
    dual_attention,
    dual_attention_rank,
    spatial_merge,
    text_attention,
    window_members,
    window_similarity,
)
from vlmfast.core.contexts import PrefillContext, VisionContext, active
from vlmfast.core.kv import KV
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.recipe import Recipe
from vlmfast.core.statistics import ItemGeometry, StatRequest


def of_grid(side: int) -> ItemGeometry:
    return ItemGeometry((side, side), (0, 0), (0, 1), (side, side))


def merge_case(data: Reader, meta: Reader) -> None:
    """Merged hidden states, where each row went, and how many rows a token represents."""
    if "x" in data:  # the kv folder's format
        window = tuple(meta.literal("window"))
        hidden, out, threshold = data["x"], data["y"], meta.number("threshold")
    else:
        window = tuple(data.literal("window"))
        hidden, out, threshold = data["hidden_states"], data["out"], data.number("threshold")
    side = math.isqrt(hidden.shape[1] - 1)
    members = window_members((side, side), window)
    similarity = window_similarity(hidden[:, 1 + members])
    counts = (similarity >= threshold).sum(1)
    counts = counts.min().expand_as(counts)
    if "r" in data:
        assert int(counts[0]) == int(data["r"])
    merged, source, lengths = spatial_merge(hidden, members, similarity, counts)
    assert lengths.unique().tolist() == [out.shape[1]]
    close(merged, out, terms=window[0] * window[1])  # means over windows
    sizes = torch.zeros(out.shape[:2], dtype=torch.int64)
    sizes = sizes.scatter_add(1, source, torch.ones_like(source))
    assert torch.equal(sizes, data["size"][..., 0].long())
    if "source" in data:
        ours = torch.nn.functional.one_hot(source, out.shape[1]).transpose(1, 2)
        assert torch.equal(ours, data["source"].long())

    if window[0] == window[1]:  # expressible in a recipe
        stage = MustDrop(window[0], threshold, merge="call").expand()[0]
        by_stage, rows = stage.on_block(
            VisionContext(items=(of_grid(side),), specials=1), 1, hidden
        )
        assert torch.equal(by_stage, merged)
        assert torch.equal(rows, source) if int(counts[0]) else rows is None


def video_blocks(data: Reader) -> nn.ModuleList:
    """Blocks of a tower of transformers with the stored weights."""
    hidden, prefix = data["embeddings_after_pre_layrnorm"], "clip.vision_model.encoder.layers."
    # The case starts after the embeddings and ends before the last norm.
    data.without_effect(
        *(name for name in data if name.startswith("clip.") and not name.startswith(prefix))
    )
    side = math.isqrt(hidden.shape[1] - 1)
    depth = sum(name.startswith(prefix) and name.endswith("mlp.fc1.bias") for name in data)
    tower = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=hidden.shape[2],
            intermediate_size=len(data[f"{prefix}0.mlp.fc1.bias"]),
            num_hidden_layers=depth,
            num_attention_heads=4,
            image_size=14 * side,
            patch_size=14,
        )
    ).eval()
    tower.config._attn_implementation = VISION
    blocks = getattr(tower, "vision_model", tower).encoder.layers
    blocks.load_state_dict(data.under(prefix))
    return blocks


@torch.no_grad()
def clip_case(data: Reader, meta: Reader) -> None:
    """A tower merged by the stage; then the key set."""
    hidden, blocks = data["embeddings_after_pre_layrnorm"], video_blocks(data)
    views, side, depth = hidden.shape[0], math.isqrt(hidden.shape[1] - 1), len(blocks)
    merge, key_set, *_ = MustDrop(merge="call").expand()
    modules = {id(block.self_attn): index for index, block in enumerate(blocks)}
    requests = {depth - 1: StatRequest("cls")}
    context = VisionContext(
        depth=depth, items=(of_grid(side),), modules=modules, requests=requests, specials=1
    )
    states = [hidden]
    with active(context):
        for index, block in enumerate(blocks):
            if index in merge.blocks(depth):
                hidden, context.merged = merge.on_block(context, index, hidden)
                states[-1] = hidden
            hidden = block(hidden, attention_mask=None)
            states.append(hidden)
    assert [state.shape[1] for state in states] == data["num_tokens"].tolist()
    terms = network(blocks[0].self_attn, 1 + side * side)
    close(hidden, data["last_hidden"], terms=terms)
    stored = data["features_select"]
    close(states[-2][:, -stored.shape[1] :], stored, terms=terms)

    # The stored indices count the rows after CLS; ours mark tokens of the prompt.
    if context.merged is None:
        context.merged = torch.arange(1 + side * side).expand(views, -1)
    attention = context.stats[depth - 1][:, :, 0, 1:]
    for view, stored in enumerate(data["key_token_index"]):
        tokens, geometry = make_image((0, 0), (side, side))
        rows = context.merged[view : view + 1, 1:] - 1
        tokens = representatives(tokens, rows, [side])
        stats = stats_of((geometry,), {depth - 1: attention[view : view + 1]})
        layout = key_set.reduce(tokens, stats, REQUEST).layout
        place = layout.grid[layout.protected, 1:].long()
        ours = rows[0, place[:, 0] * side + place[:, 1]]
        assert torch.equal(ours.sort().values, stored.sort().values)


def filter_case(data: Reader, meta: Reader) -> None:
    """Scores, and the tokens kept by the thresholds and by rank."""
    if "attn" in data:  # the kv folder's format: whole maps
        start, n = meta.count("v_token_start"), meta.count("img_seq")
        thresholds = meta.number("global_thr"), meta.number("individual_thr")
        attention, stored = data["attn"][0, :, start + n :], data["keep"]
        attention = attention[:, : meta.count("text_seq")]
    else:
        start, n = data.count("sys_len"), data.count("img_len")
        thresholds = data.number("global_thr"), data.number("individual_thr")
        attention, stored = data["attn_text_rows"][0], data["important_indices"]
        assert attention.shape[1] == data.count("text_len")
    g, m = text_attention(attention[:, :, start : start + n])
    if "global_score" in data:
        terms = attention.shape[0] + attention.shape[1]  # heads, then rows
        for ours, theirs in ((g, data["global_score"]), (m, data["individual_score"])):
            close(ours, theirs, terms=terms, scale=theirs)
    kept = dual_attention(g, m, *thresholds)
    assert torch.equal(kept.nonzero().flatten(), stored)
    if min(thresholds) > 0:
        assert torch.equal(dual_attention_rank(g, m, *thresholds) >= 1, kept)


def slots(tokens: Tensor, keys: Tensor) -> KV:
    """Slots of ``tokens`` (N,) of a prompt, with ``keys`` (H, N, D)."""
    order = tokens.expand(len(keys), -1)
    lengths = torch.full((len(keys),), len(tokens))
    return KV(keys, keys, order, order, torch.ones_like(order, dtype=torch.bool), lengths)


def cache_case(data: Reader, meta: Reader) -> None:
    """The slots of each layer's cache after the prefill."""
    filters = meta.literal("pruning_layers")
    # Tokens of the prompt in each layer: the stored indices count those left by the filter.
    held, tokens = [], torch.arange(int(data["layer_len_in"][0]))
    for layer, length in enumerate(data["layer_len_in"].tolist()):
        if layer - 1 in filters:
            tokens = tokens[data[f"final_indices_{filters.index(layer - 1)}"]]
        assert len(tokens) == length
        held.append(tokens)
    cache = [slots(tokens, torch.zeros(1, len(tokens), 8)) for tokens in held]
    stage = MustDrop(layers=tuple(layer + 1 for layer in filters)).expand()[-1]
    context = PrefillContext(depth=len(held), layout=TokenLayout.text(tokens, tokens[None]))
    kept = stage.finish(context, cache)
    assert [len(kv) for kv in kept] == data["layer_len_out"].tolist()
    for layer, (before, after) in enumerate(zip(held, kept, strict=True)):
        places = torch.isin(before, after.order[0]).nonzero().flatten()
        assert torch.equal(before[places], after.order[0])
        if f"kpos_l{layer}" in data:
            assert torch.equal(places, data[f"kpos_l{layer}"])


def image_rows(total: int, kept: Tensor, images: Tensor) -> tuple[int, int]:
    """First image row and number of image rows, from the rows kept of ``total``.

    ``images`` are the kept ones counted from the first image row.
    """
    for start in (35, *range(len(kept) - len(images) + 1)):  # 35: the authors' system prompt
        after = len(kept) - start - len(images)
        text = torch.arange(start), torch.arange(total - after, total)
        n = total - start - after
        if n > int(images[-1]) and torch.equal(torch.cat([text[0], start + images, text[1]]), kept):
            return start, n
    raise AssertionError("the kept rows are no text with images inside")


@torch.no_grad()
def llm_case(data: Reader, meta: Reader) -> None:
    """The engine on the stored weights: selections, hidden states, remaining keys.

    The decoded token of the file is left out: the authors rotate it by other ids than its layers'.
    """
    data.without_effect("decode_embeds", "decode_hidden", "decode_position_per_layer")
    depth, heads = len(data["cache_lengths"]), data["cache_key_layer0"].shape[1]
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=data["inputs_embeds"].shape[2],
            intermediate_size=len(data["model.layers.0.mlp.up_proj.weight"]),
            num_hidden_layers=depth,
            num_attention_heads=heads,
            vocab_size=len(data["model.embed_tokens.weight"]),
        )
    ).eval()
    model.model.load_state_dict(data.under("model."))
    model.lm_head = torch.nn.Identity()  # so that logits are hidden states
    model.set_attn_implementation(TEXT)
    adapter = Decoder(model, SimpleNamespace(image_processor=True))

    total, layers = data["inputs_embeds"].shape[1], (2, 6, 10, 14)
    key = data["key_set"]
    first = torch.cat([data["filter_kept_stage0"], key]).unique()
    start, n = image_rows(total, data["kept_seq_index_stage0"], first)
    order = torch.arange(total)
    layout = TokenLayout.text(order, order[None])
    kind, protected = layout.kind.clone(), layout.protected.clone()
    kind[start : start + n] = int(Kind.IMAGE)
    protected[start + key] = True
    layout = layout.replace(kind=kind, protected=protected)

    whole = MustDrop(
        layers=tuple(layer + 1 for layer in layers),
        global_thr=data.number("global_thr"),
        individual_thr=data.number("individual_thr"),
        positions="compact",
    )
    recipe = Recipe((whole.expand()[2],))
    run = Driven(adapter, Inputs({}), recipe, begin=0.0)
    run.trace.begin(layout.select(layout.visual), depth)
    states = []
    hook = model.model.norm.register_forward_hook(lambda module, args, out: states.append(out))
    run.start_from(Prompt(data["inputs_embeds"][0], layout, total, total), 1)
    hook.remove()
    terms = network(model, total)
    close(states[0], data["prefill_hidden"], terms=terms)

    alive, left_by = order, {}
    for stage, layer in enumerate(layers):
        gone = start + (run.trace.depth <= layer + 1).nonzero().flatten()
        left = alive[~torch.isin(alive, gone)]
        stored = data[f"kept_seq_index_stage{stage}"]  # of the rows that entered the stage
        # The filter's own choice, counted from the first image row, and the key set beside it.
        passed = data[f"filter_kept_stage{stage}"]
        assert bool(torch.isin(start + passed, stored).all())
        assert torch.equal(torch.isin(alive, left).nonzero().flatten(), stored)
        alive = left_by[layer] = left
    held = [
        next((left_by[at] for at in reversed(layers) if at < layer), order)
        for layer in range(depth)
    ]
    assert run.cache.lengths() == [len(tokens) for tokens in held]
    cache = [
        slots(tokens, run.cache.layers[layer].keys[0, :, : len(tokens)])
        for layer, tokens in enumerate(held)
    ]
    context = PrefillContext(depth=depth, layout=layout.select(alive))
    kept = whole.expand()[3].finish(context, cache)
    assert [len(kv) for kv in kept] == data["cache_lengths"].tolist()
    for layer in range(depth):
        if f"cache_key_layer{layer}" in data:
            close(kept[layer].keys[None], data[f"cache_key_layer{layer}"], terms=terms)
