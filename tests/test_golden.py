"""Golden vectors: the choices of reference implementations on stored inputs.

Files are searched below ``$VLMFAST_GOLDEN`` (default: ``golden`` next to this file). The nearest
parent folder called reducers, kv or spec and the longest known prefix of a file's name select the
runner that replays it. A file that is in no table below is a failure: none is skipped silently. So
is a tensor or a parameter of a file that its runner does not read (`golden_case.Reader`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from closeness import close
from golden_budgets import adjust_case as cake_adjust
from golden_budgets import cake_case, fastkv_case, vlcache_case
from golden_case import Reader, done, parameters
from golden_dart import choice as dart_choice
from golden_divprune import choice as divprune_choice
from golden_eagle import (
    eagle3_case,
    eagle_case,
    losses_case,
    msd_case,
    ttt_case,
    vispec_case,
)
from golden_eagle import tree_case as eagle_tree
from golden_evict import (
    h2o_answer,
    h2o_grouped,
    h2o_mask,
    pyramidkv,
    quickprefill,
    snapkv,
    streamingllm,
)
from golden_fastv import choice as fastv_choice
from golden_fastv import end_to_end as fastv_end_to_end
from golden_lookm import gqa_case as lookm_gqa
from golden_lookm import merge_case as lookm_merge
from golden_lookm import text_case as lookm_text
from golden_lookm import textprior_case as lookm_textprior
from golden_mustdrop import cache_case as mustdrop_cache
from golden_mustdrop import clip_case as mustdrop_clip
from golden_mustdrop import filter_case as mustdrop_filter
from golden_mustdrop import llm_case as mustdrop_llm
from golden_mustdrop import merge_case as mustdrop_merge
from golden_prumerge import case as prumerge_case
from golden_pyramiddrop import end_to_end as pyramiddrop_end_to_end
from golden_pyramiddrop import rank_case as pyramiddrop_rank
from golden_quant import decode as decode_mixed
from golden_quant import kivi, zipcache_mixed, zipcache_quant, zipcache_saliency
from golden_sparsevlm import choice as sparsevlm_choice
from golden_sparsevlm import cluster as sparsevlm_cluster
from golden_spec import (
    chain_rejection,
    eagle_buffers,
    exact_law,
    medusa_buffers,
    medusa_greedy,
    multiround,
    other_prompts,
    posterior_greedy,
    posterior_sample,
    posterior_vispec,
    prompt_lookup,
    ragged_batch,
    recycling,
)
from golden_stats import colstats_case
from golden_tome import case as tome_case
from golden_tome import sized_case as tome_sized
from golden_tree import tree_case
from golden_visionzip import clip_case as visionzip_clip
from golden_visionzip import zip_case as visionzip_zip
from golden_zipvl import tau_case as zipvl_tau
from helpers_layout import make_image, stats_of
from vlmfast.compressors.select import best
from vlmfast.compressors.tokens.hired import (
    HiRED,
    content_by_stripe,
    crop_budgets,
    packed,
    view_budgets,
)
from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import Kind, TokenLayout, VisualTokens

ROOT = Path(os.environ.get("VLMFAST_GOLDEN") or Path(__file__).parent / "golden").resolve()
FOLDERS = ("reducers", "kv", "spec")
NOT_DATA = ("README.md", "MANIFEST.json")

Data = dict[str, Any]  # tensors of a safetensors file, or a parsed JSON file
Meta = dict[str, str]  # parameters that some files store with their tensors
Check = Callable[[Data, Meta], None]


def load(path: Path) -> tuple[Data, Meta]:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8")), {}
    with safe_open(path, "pt") as file:
        meta = file.metadata() or {}
    return load_file(path), meta


def replay(run: Check, data: Data, meta: Meta) -> None:
    """Run a case; every tensor and every parameter must have been read."""
    tensors, words = Reader(data), parameters(meta)
    run(tensors, words)
    done(words, tensors)


# --- HiRED ---------------------------------------------------------------------------------------

PATCHES = (24, 24)
N = 576
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
REQUEST = EncodeRequest("", torch.zeros(0, 8), depth=4)


def cls_rows(attention: Tensor) -> Tensor:
    """Stored CLS rows without the column of CLS itself, in the dtype of their computation."""
    rows = attention[..., -N:]
    return rows.half() if torch.equal(rows.half().float(), rows.float()) else rows


def same_choice(ours: Tensor, stored: Tensor, scores: Tensor) -> None:
    """Equal masks; in half precision tokens with equal scores are interchangeable."""
    if scores.dtype == torch.float32:
        assert torch.equal(ours, stored)
        return
    assert torch.equal(ours.sum(-1), stored.sum(-1))
    for row, mine, theirs in zip(scores, ours, stored, strict=True):
        assert torch.equal(row[mine].sort().values, row[theirs].sort().values)


def same_budgets(ours: list[int], stored: list[int], content: Tensor, rest: int, a: float) -> None:
    """Equal counts per view; in half precision equal contents may fall into other stripes."""
    if content.dtype == torch.float32 or ours == stored:
        assert ours == stored
        return
    assert ours[0] == stored[0]
    top = best(content[None], [int(N * (1 - a))])[0]
    edge = content == content[top].min()
    stripes = torch.arange(N) * (len(ours) - 1) // N
    for crop, number in enumerate(stored[1:]):
        inside = stripes == crop
        certain, tied = int((top & ~edge & inside).sum()), int((edge & inside).sum())
        low, high = (int(c / max(int(top.sum()), 1) * rest) for c in (certain, certain + tied))
        assert min(low, N) <= number <= min(high + 1, N)


def hired_next(data: Data, meta: Meta) -> None:
    """Budgets, selection and packing of each image, then the stage."""
    rate, alpha = float(data["token_budget_rate"]), float(data["alpha"])
    content, importance = cls_rows(data["cls_attn_layer0"]), cls_rows(data["cls_attn_layer22"])
    lengths, lengths_all, chosen, everything = [], [], [], []
    first = 0
    for views, size in zip(
        data["num_partitions"].tolist(), data["image_sizes_hw"].tolist(), strict=True
    ):
        span, size = slice(first, first + views), tuple(size)
        height, width = select_best_resolution(size, PINPOINTS)
        tiles = (height // 336, width // 336)
        assert tiles[0] * tiles[1] == views - 1

        scores, whole_content = importance[span].sum(1), content[first].sum(0)
        whole, rest = view_budgets(views, N, rate, alpha)
        counts = crop_budgets(content_by_stripe(whole_content, views - 1, alpha), rest, N)
        stored = data["kept_per_partition"][span].tolist()
        same_budgets([whole, *counts], stored, whole_content, rest, alpha)
        mask = data["mask"][span].bool()
        same_choice(best(scores, stored), mask, scores)

        ids = packed(tiles, PATCHES, size, transposed=True)
        everything.append(ids)
        chosen.append(ids[mask.flatten()[ids]])
        lengths_all.append(len(ids))
        lengths.append(len(chosen[-1]))

        if scores.dtype == torch.float32:
            stage_delivers(data, rate, alpha, tiles, size, first, chosen[-1])
        first += views
    assert torch.equal(torch.cat(everything), data["packed_token_id_all"])
    assert torch.equal(torch.cat(chosen), data["packed_token_id"])
    assert lengths == data["feature_lens"].tolist()
    assert lengths_all == data["feature_lens_all"].tolist()


def stage_delivers(
    data: Data,
    rate: float,
    alpha: float,
    tiles: tuple[int, int],
    size: tuple[int, int],
    first: int,
    wanted: Tensor,
) -> None:
    """The stage, on tokens of the correct grid, keeps those of ``wanted`` that exist."""
    tokens, geometry = make_image(tiles, PATCHES, size, view=first)
    stats = stats_of(
        (geometry,),
        {0: cls_rows(data["cls_attn_layer0"]), 22: cls_rows(data["cls_attn_layer22"])},
    )
    stage = HiRED(rate, alpha, rule="code", grid_compat=True)
    if rate == 1:
        assert stage.reduce(tokens, stats, REQUEST) is tokens
        return
    kept = stage.reduce(tokens, stats, REQUEST).layout
    ours = (kept.tile * N + kept.grid[:, 1] * 24 + kept.grid[:, 2]).long()
    there = tokens.layout.select(tokens.layout.patches)
    there = (there.tile * N + there.grid[:, 1] * 24 + there.grid[:, 2]).long()
    wanted = wanted[torch.isin(wanted, there)]
    if tiles[0] != tiles[1]:  # the swapped grid also has another raster order
        ours, wanted = ours.sort().values, wanted.sort().values
    assert torch.equal(ours, wanted)


def hired_llava15(data: Data, meta: Meta) -> None:
    """CLS rows from stored queries and keys, then the choice for the first image."""
    stored = data["cls_attn_layer22"]
    batch, heads, keys = stored.shape
    q = data["q_layer22"].float().view(batch, keys, heads, -1).transpose(1, 2)
    k = data["k_layer22"].float().view(batch, keys, heads, -1).transpose(1, 2)
    logits = q[:, :, :1] @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    rows = logits.softmax(-1)[:, :, 0]
    # A logit's absolute error is its probability's relative error; half precision cannot tell the
    # smallest of them from zero.
    exact = stored.dtype == torch.float32
    least = torch.finfo(stored.dtype).smallest_normal
    size = max(float(logits.abs().max()), 1.0) * stored.double().clamp(min=least)
    close(rows, stored, terms=q.shape[-1] + keys, scale=size)

    rate = float(data["token_budget_rate"])
    scores = cls_rows(stored)[:1].sum(1)
    mask = data["mask"].bool()[None]
    same_choice(best(scores, [min(N, int(N * rate))]), mask, scores)
    assert torch.equal(mask[0].nonzero().flatten(), data["kept_index"].sort().values)

    if exact and rate < 1:
        tokens, geometry = make_image((0, 0), PATCHES, (336, 336))
        stats = stats_of((geometry,), {0: cls_rows(stored), 22: cls_rows(stored)})
        kept = HiRED(rate).select_tokens(tokens, geometry, stats, REQUEST)
        assert torch.equal(kept, data["kept_index"].sort().values)


def merged(embeds: Tensor, ids: Tensor, features: list[Tensor], image_id: int) -> VisualTokens:
    """One prompt without padding: text and images by ``order``, positions renumbered."""
    features = list(features)
    width = torch.tensor([len(features[0]) if i == image_id else 1 for i in ids.tolist()])
    starts, parts = width.cumsum(0) - width, []
    text = ids != image_id
    parts.append((embeds[text], TokenLayout.text(starts[text], starts[text][None])))
    for start in starts[~text].tolist():
        rows = features.pop(0)
        order = start + torch.arange(len(rows))
        layout = TokenLayout.text(order, order[None])
        layout = layout.replace(kind=torch.full_like(layout.kind, int(Kind.IMAGE)))
        parts.append((rows, layout))
    row = VisualTokens(
        torch.cat([part[0] for part in parts]), TokenLayout.cat([part[1] for part in parts])
    )
    row = row.select(row.layout.order.argsort())
    return VisualTokens(row.features, row.layout.replace(position=torch.arange(len(row))[None]))


def hired_merge(data: Data, meta: Meta) -> None:
    """Rows merged without padding, then padded on the left as the stored batch is."""
    image_id, features = 32000, list(data["image_features"].split(data["feature_lens"].tolist()))
    rows = []
    for ids, mask, embeds in zip(
        data["input_ids"], data["attention_mask"].bool(), data["inputs_embeds"], strict=True
    ):
        ids, embeds = ids[mask], embeds[mask]
        images = [features.pop(0) for _ in range(int((ids == image_id).sum()))]
        rows.append(merged(embeds, ids, images, image_id))
    assert not features
    batch, length = data["final_attention_mask"].shape
    assert length == max(len(row) for row in rows)
    embedding = torch.zeros_like(data["final_embedding"])
    mask = torch.zeros(batch, length, dtype=torch.int64)
    positions = torch.ones(batch, length, dtype=torch.int64)  # of padding
    for i, row in enumerate(rows):
        embedding[i, length - len(row) :] = row.features
        positions[i, length - len(row) :] = row.layout.position[0]
        mask[i, length - len(row) :] = 1
    assert torch.equal(embedding, data["final_embedding"])
    assert torch.equal(mask, data["final_attention_mask"].long())
    assert torch.equal(positions, data["final_position_ids"])


def rolled(*names: str) -> Callable[[Data], Data]:
    """Control: the same file with the last axis of ``names`` moved by one."""
    return lambda data: data | {name: data[name].roll(1, -1) for name in names}


def reordered(name: str, dim: int = 0) -> Callable[[Data], Data]:
    """Control: the same file with the rows of ``name`` reversed."""
    return lambda data: data | {name: data[name].flip(dim)}


# --- tables --------------------------------------------------------------------------------------


class Runner(NamedTuple):
    """Replays the files of one kind.

    Parameters
    ----------
    run : callable
    spoil : callable
        A small change of a file's inputs, which must be detected.
    expected : str
        Names of results; a wrong value in any of them must be detected.
    """

    run: Check
    spoil: Callable[[Data], Data]
    expected: str


# By folder and prefix.
RUNNERS: dict[str, dict[str, Runner]] = {
    "reducers": {
        "hired-next": Runner(
            hired_next,
            rolled("cls_attn_layer22"),
            "kept_per_partition mask packed_token_id packed_token_id_all feature_lens "
            "feature_lens_all",
        ),
        "hired-llava15": Runner(
            hired_llava15,
            rolled("mask"),
            "cls_attn_layer22 kept_index mask",
        ),
        "hired-merge": Runner(
            hired_merge,
            reordered("image_features"),
            "final_embedding final_attention_mask final_position_ids",
        ),
        "fastv-k": Runner(
            fastv_choice,
            rolled("attn_last_row"),
            "image_scores keep_index position_ids_after cache_position_after",
        ),
        "fastv-e2e": Runner(
            fastv_end_to_end,
            rolled("inputs_embeds"),
            "last_hidden keep_index",
        ),
        "pyramiddrop-rank": Runner(
            pyramiddrop_rank,
            rolled("k_proj"),
            "scores kept_seq_index out_features out_position_ids out_labels "
            "scores_sample0 kept_seq_index_sample0 out_attention_mask",
        ),
        "pyramiddrop-e2e": Runner(
            pyramiddrop_end_to_end,
            rolled("inputs_embeds"),
            "prefill_hidden cache_lengths kept_image_index_stage0 "
            "decode_position_per_layer decode_hidden",
        ),
        "mustdrop-spatialmerge": Runner(
            mustdrop_merge,
            rolled("hidden_states"),
            "out size source r",
        ),
        "mustdrop-clip-e2e": Runner(
            mustdrop_clip,
            rolled("embeddings_after_pre_layrnorm"),
            "num_tokens last_hidden features_select key_token_index",
        ),
        "mustdrop-dualattn": Runner(
            mustdrop_filter,
            rolled("attn_text_rows"),
            "global_score individual_score important_indices",
        ),
        "mustdrop-llm-e2e": Runner(
            mustdrop_llm,
            rolled("inputs_embeds"),
            "prefill_hidden kept_seq_index_stage0 filter_kept_stage0 cache_lengths "
            "cache_key_layer0",
        ),
        "dart-": Runner(
            dart_choice,
            reordered("hidden_after_final_norm", 1),
            "kept_sorted",
        ),
        "divprune-": Runner(
            divprune_choice,
            reordered("visual_tokens"),
            "selected_in_order kept_sorted",
        ),
        "prumerge-": Runner(
            prumerge_case,
            rolled("features_penultimate"),
            "cls_attn topk_index out",
        ),
        "sparsevlm-cluster": Runner(
            sparsevlm_cluster,
            rolled("out"),
            "out",
        ),
        "sparsevlm-topk": Runner(
            sparsevlm_choice,
            rolled("attn_text_rows"),
            "rater_score rater_index_in_text visual_score keep_mask",
        ),
        "tome-": Runner(
            tome_case,
            rolled("x"),
            "source out size unmerged out2 size2",
        ),
        "visionzip-d": Runner(
            visionzip_zip,
            reordered("metric_mean_keys", 1),
            "all_indices out",
        ),
        "visionzip-clip-e2e": Runner(
            visionzip_clip,
            rolled("embeddings_after_pre_layrnorm"),
            "all_indices out",
        ),
    },
    "kv": {
        "cake-": Runner(
            cake_case,
            rolled("q0"),
            "hh_score0 disp0 var0 pref_scores layer_budget k_out0 v_out0",
        ),
        "cake-adjust_budgets": Runner(
            cake_adjust,
            rolled("in0"),
            "out0 out2",
        ),
        "fastkv-": Runner(
            fastkv_case,
            rolled("q"),
            "kept tsp_indices k_out v_out",
        ),
        "h2o-gqa": Runner(
            h2o_grouped,
            rolled("q"),
            "kept k_out v_out",
        ),
        "h2o-localmask": Runner(
            h2o_mask,
            rolled("logits"),
            "mask_bottom",
        ),
        "h2o-realdrop": Runner(
            h2o_answer,
            rolled("q"),
            "k_after_prefill v_after_prefill score_after_prefill k_after_decode "
            "v_after_decode score_after_decode",
        ),
        "kivi-": Runner(
            kivi,
            rolled("k"),
            "k_code k_scale k_min k_dequant v_code v_scale v_min v_dequant",
        ),
        "lookm-gqa": Runner(
            lookm_gqa,
            rolled("k"),
            "k_out v_out",
        ),
        "lookm-pivot": Runner(
            lookm_merge("pivot"),
            rolled("k"),
            "col_sum k_out v_out",
        ),
        "lookm-text": Runner(
            lookm_text,
            rolled("image_mask"),
            "k_evict v_evict k_pivot v_pivot k_weighted v_weighted",
        ),
        "lookm-weighted": Runner(
            lookm_merge("weighted"),
            rolled("k"),
            "col_sum k_out v_out",
        ),
        "mustdrop-decodecache": Runner(
            mustdrop_cache,
            rolled("final_indices_0"),
            "final_indices_1 layer_len_in layer_len_out kpos_l2",
        ),
        "mustdrop-filter": Runner(
            mustdrop_filter,
            rolled("attn"),
            "keep",
        ),
        "mustdrop-merge": Runner(
            mustdrop_merge,
            rolled("x"),
            "y size",
        ),
        "oracle-colstats": Runner(
            colstats_case,
            rolled("k"),
            "lse rowmax_logit col_sum col_sumsq col_max entropy_sum nnz",
        ),
        "oracle-decode-mixed": Runner(
            decode_mixed,
            rolled("v4"),
            "out lse",
        ),
        "oracle-tau": Runner(
            zipvl_tau,
            rolled("k"),
            "mass nnz norm budget important",
        ),
        "oracle-textprior": Runner(
            lookm_textprior,
            rolled("score"),
            "keep_capped keep_overrun",
        ),
        "oracle-tree": Runner(
            tree_case,
            rolled("k_ctx"),
            "out lse parents depth",
        ),
        "pyramidkv-": Runner(
            pyramidkv,
            rolled("q"),
            "layer_len kept_l0",
        ),
        "quickprefill-": Runner(
            quickprefill,
            reordered("k", 2),
            "mask_key_norms_small mask_key_norms mask_vector_norms "
            "mask_query_attention_weights mask_query_attention_weights_by_value_norm "
            "mask_output_norms",
        ),
        "snapkv-gqa": Runner(
            snapkv,
            rolled("q"),
            "kept k_out v_out",
        ),
        "snapkv-mha": Runner(
            snapkv,
            rolled("q"),
            "kept k_out v_out",
        ),
        "streamingllm-": Runner(
            streamingllm,
            reordered("k", 2),
            "k_call v_call k_space v_space k_range",
        ),
        "tome-": Runner(
            tome_sized,
            rolled("x"),
            "y size_out source",
        ),
        "vlcache-": Runner(
            vlcache_case,
            rolled("q0"),
            "sparsity budget sorted_idx k_out0 v_out0",
        ),
        "zipcache-mixed": Runner(
            zipcache_mixed,
            reordered("important", 1),
            "k_deq k_imp_q k_imp_min k_imp_step k_un_q v_deq v_imp_q v_imp_min v_imp_step "
            "v_un_q v_chanscale",
        ),
        "zipcache-quant": Runner(
            zipcache_quant,
            rolled("v"),
            "chan2_q chan2_min chan2_step chan2_deq tok4_q tok4_deq cst8_q cst8_step "
            "cst8_deq cst2_chanscale",
        ),
        "zipcache-saliency": Runner(
            zipcache_saliency,
            rolled("k"),
            "saliency unimportant",
        ),
    },
    "spec": {
        "eagle12_": Runner(
            eagle_case,
            rolled("w.fc.weight"),
            "drafter_out draft_tokens tree_mask tree_position_ids retrieve_indices "
            "r2_draft_tokens r2_tree_mask",
        ),
        "eagle1_multiround_": Runner(
            multiround,
            rolled("tree_logits"),
            "accept_length best_candidate candidates cart_candidates_prob op_0 ss_prob "
            "sample_p tree_attn_mask tree_candidates tree_indices tree_position_ids "
            "uniforms_consumed",
        ),
        "eagle2_tree_": Runner(
            eagle_tree,
            rolled("logits_step0"),
            "draft_tokens tree_mask tree_position_ids retrieve_indices "
            "draft_call0_input_ids draft_call0_tree_mask draft_call0_position_ids",
        ),
        "eagle3_tiny_": Runner(
            eagle3_case,
            rolled("w.fc.weight"),
            "drafter_out_prenorm draft_logits draft_tokens r2_draft_tokens w.t2d",
        ),
        "eagle3_ttt_": Runner(
            ttt_case,
            rolled("w.self_attn.q_proj.weight"),
            "ttt0_hidden_out ttt3_hidden_out input_ids",
        ),
        "eagle_posterior_greedy_": Runner(
            posterior_greedy,
            rolled("tree_logits"),
            "accept_length candidates sample_p uniforms_consumed",
        ),
        "eagle_posterior_sample_": Runner(
            posterior_sample,
            rolled("tree_logits"),
            "accept_length candidates sample_p uniforms_consumed",
        ),
        "eagle_static_": Runner(
            eagle_buffers,
            rolled("tree_indices"),
            "tree_attn_mask tree_indices tree_position_ids retrieve_indices",
        ),
        "ebay_": Runner(
            ragged_batch,
            rolled("k_in_1"),
            "k_out_0 v_out_1 new_generated_ids new_padding_lengths matched_tokens_incl_bonus",
        ),
        "exact_law_": Runner(
            exact_law,
            rolled("q0"),
            "joint_first3 chain_gamma2_level_accept topk2x2_tree_level_accept "
            "multiround_root_accept_K1..4 multiround_root_law_K4",
        ),
        "hf_speculative_": Runner(
            chain_rejection,
            rolled("new_logits"),
            "n_matches next_token_distribution valid_tokens_argmax",
        ),
        "losses": Runner(
            losses_case,
            rolled("predicted_features"),
            "eagle_vloss eagle_ploss eagle_total vispec_stage2_loss vispec_stage1_vloss "
            "vispec_stage1_ploss_with_rank",
        ),
        "medusa_buffers_": Runner(
            medusa_buffers,
            rolled("tree_indices"),
            "medusa_attn_mask tree_indices medusa_position_ids retrieve_indices",
        ),
        "medusa_posterior_": Runner(
            medusa_greedy,
            rolled("medusa_logits"),
            "accept_length tree_candidates candidates",
        ),
        "msd_": Runner(
            msd_case,
            rolled("w.fc.weight"),
            "kv_k kv_v draft_tokens tree_mask",
        ),
        "prompt_lookup_": Runner(
            prompt_lookup,
            other_prompts,
            "",
        ),
        "token_recycling_": Runner(
            recycling,
            rolled("adjacency"),
            "attention_mask candi_index father_index position_ids search_path tree_input_ids",
        ),
        "vispec_posterior_": Runner(
            posterior_vispec,
            rolled("tree_logits"),
            "accept_length candidates sample_p",
        ),
        "vispec_tiny_": Runner(
            vispec_case,
            rolled("w.fc.weight"),
            "shifted_embeds drafter_out_scattered adaptor_out_for_rows_3_11_of_shifted "
            "global_feature kv_k kv_v kv_next_position draft_tokens r2_draft_tokens",
        ),
    },
}

# Files of methods that the project does not implement yet.
NOT_BUILT: dict[str, dict[str, str]] = {
    "reducers": {},
    "kv": {
        "adakv-": "not built yet: budgets that heads share out among themselves (AdaKV)",
        "gear-": "not built yet: low-rank and sparse corrections of quantization (GEAR)",
        "kvpress-": "not built yet: the scores of kvpress's own methods",
        "mergekv-": "not built yet: the merge weights of KVCache-Factory",
        "minicache-": "not built yet: merging across cache layers (MiniCache)",
        "rotatekv-": "not built yet: rotated quantization (RotateKV)",
    },
    "spec": {},
}

# Files whose rule the project does not follow on purpose.
REPLACED: dict[str, dict[str, str]] = {
    "reducers": {},
    "kv": {
        "lookm-avg": "stores a known error of the reference: averaged merging filters the list of "
        "pivots but not the rows, so tokens merge into other tokens' pivots"
    },
    "spec": {
        f"eagle1_multiround_{case}": "stores a known error of the reference: the token after a "
        "fully accepted node is drawn from raw logits instead of the warped distribution"
        for case in ("04", "05")
    }
    | {
        f"medusa_posterior_{case}": "typical acceptance changes the law of the answer"
        for case in ("02", "03", "04")
    },
}


def classify(path: Path) -> tuple[str, str] | None:
    """``(folder, longest known prefix)`` of a file, ``None`` for one that is in no table."""
    folder = next((parent.name for parent in path.parents if parent.name in FOLDERS), None)
    if folder is None or path.suffix not in (".safetensors", ".json"):
        return None
    known = {*RUNNERS[folder], *NOT_BUILT[folder], *REPLACED[folder]}
    fitting = [prefix for prefix in known if path.name.startswith(prefix)]
    return (folder, max(fitting, key=len)) if fitting else None


FILES = sorted(p for p in ROOT.rglob("*") if p.is_file() and p.name not in NOT_DATA)
RUNNABLE = [p for p in FILES if (c := classify(p)) and c[1] in RUNNERS[c[0]]]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_golden_file(path: Path) -> None:
    found = classify(path)
    assert found, f"no table of {Path(__file__).name} knows {name(path)}"
    folder, prefix = found
    for table in (NOT_BUILT, REPLACED):
        if prefix in table[folder]:
            pytest.skip(table[folder][prefix])
    replay(RUNNERS[folder][prefix].run, *load(path))


# One file of each kind, for controls.
FIRST = {found: path for path in reversed(RUNNABLE) if (found := classify(path))}


def kind(found: tuple[str, str]) -> str:
    return "/".join(found)


@pytest.fixture
def _unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of spoilt cases are no measurements."""
    monkeypatch.delenv("VLMFAST_CLOSENESS", raising=False)


def wrong(value: Any) -> Any:
    """A tensor with one entry changed."""
    flat = value.flatten().clone()
    if value.dtype == torch.bool:
        flat[0] = ~flat[0]
    elif value.is_floating_point():
        at = flat.abs().nan_to_num(0.0, 0.0, 0.0).argmax()
        flat[at] = flat[at] * 1.5 + (flat[at] == 0)
    else:
        flat[flat.argmin()] += 1
    return flat.view_as(value)


def passes(run: Check, data: Data, meta: Meta) -> bool:
    try:
        replay(run, data, meta)
    except AssertionError:
        return False
    return True


@pytest.mark.usefixtures("_unrecorded")
@pytest.mark.parametrize("found", FIRST, ids=kind)
def test_golden_detects_other_inputs(found: tuple[str, str]) -> None:
    runner = RUNNERS[found[0]][found[1]]
    data, meta = load(FIRST[found])
    with pytest.raises(AssertionError):
        replay(runner.run, runner.spoil(data), meta)


@pytest.mark.usefixtures("_unrecorded")
@pytest.mark.parametrize(
    "found",
    [pytest.param(found, marks=[pytest.mark.slow] * ("e2e" in found[1])) for found in FIRST],
    ids=kind,
)
def test_golden_detects_wrong_results(found: tuple[str, str]) -> None:
    """Every result that a file of this kind has."""
    runner = RUNNERS[found[0]][found[1]]
    data, meta = load(FIRST[found])
    names = [name for name in runner.expected.split() if name in data]
    assert names or found == ("spec", "prompt_lookup_")  # whose results are within its cases
    missed = [name for name in names if passes(runner.run, data | {name: wrong(data[name])}, meta)]
    assert not missed


@pytest.mark.usefixtures("_unrecorded")
@pytest.mark.parametrize("found", FIRST, ids=kind)
def test_golden_names_unknown_keys(found: tuple[str, str]) -> None:
    """A parameter and a tensor that the runner does not know, each by its name."""
    run = RUNNERS[found[0]][found[1]].run
    data, meta = load(FIRST[found])
    with pytest.raises(AssertionError, match=r"no_such_option.*no_such_tensor"):
        replay(run, data | {"no_such_tensor": torch.zeros(1)}, meta | {"no_such_option": "1"})


def test_golden_files_exist() -> None:
    assert ROOT.is_dir(), f"no golden files: {ROOT} is not a folder"
    assert RUNNABLE, f"no golden file below {ROOT} has a runner"


def test_tables_do_not_overlap() -> None:
    for folder in FOLDERS:
        words = [*RUNNERS[folder], *NOT_BUILT[folder], *REPLACED[folder]]
        assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("reducers/hired-next-x.safetensors", ("reducers", "hired-next")),
        ("kv/spec/losses.json", ("spec", "losses")),
        ("spec/more/eagle1_multiround_04.safetensors", ("spec", "eagle1_multiround_04")),
        ("spec/eagle1_multiround_00.safetensors", ("spec", "eagle1_multiround_")),
        ("kv/hired-next-x.safetensors", None),
        ("reducers/hired-next-x.npz", None),
        ("reducers/unheard-of.safetensors", None),
        ("losses.safetensors", None),
    ],
)
def test_classify(path: str, found: tuple[str, str] | None) -> None:
    assert classify(Path("/golden") / path) == found
