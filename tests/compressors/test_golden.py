"""Golden vectors: the choices of reference implementations on stored inputs.

Files are searched below ``$VLMFAST_GOLDEN`` (default: ``tests/data/golden``). The nearest
parent folder called reducers, kv or spec and the longest known prefix of a file's name select the
runner that replays it. A file that is in no table below is a failure: none is skipped silently. So
is a tensor or a parameter of a file that its runner does not read (`case.Reader`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from support.closeness import close
from support.golden import (
    budgets,
    dart,
    divprune,
    eagle,
    evict,
    fastv,
    lookm,
    mustdrop,
    prumerge,
    pyramiddrop,
    quant,
    sparsevlm,
    spec,
    tome,
    tree,
    visionzip,
    zipvl,
)
from support.golden import stats as golden_stats
from support.golden.case import Reader, done, parameters
from support.helpers_layout import make_image, stats_of
from support.paths import DATA
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

ROOT = Path(os.environ.get("VLMFAST_GOLDEN") or DATA / "golden").resolve()
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


# --- tables --------------------------------------------------------------------------------------


# By folder and prefix.
RUNNERS: dict[str, dict[str, Check]] = {
    "reducers": {
        "hired-next": hired_next,
        "hired-llava15": hired_llava15,
        "hired-merge": hired_merge,
        "fastv-k": fastv.choice,
        "fastv-e2e": fastv.end_to_end,
        "pyramiddrop-rank": pyramiddrop.rank_case,
        "pyramiddrop-e2e": pyramiddrop.end_to_end,
        "mustdrop-spatialmerge": mustdrop.merge_case,
        "mustdrop-clip-e2e": mustdrop.clip_case,
        "mustdrop-dualattn": mustdrop.filter_case,
        "mustdrop-llm-e2e": mustdrop.llm_case,
        "dart-": dart.choice,
        "divprune-": divprune.choice,
        "prumerge-": prumerge.case,
        "sparsevlm-cluster": sparsevlm.cluster,
        "sparsevlm-topk": sparsevlm.choice,
        "tome-": tome.case,
        "visionzip-d": visionzip.zip_case,
        "visionzip-clip-e2e": visionzip.clip_case,
    },
    "kv": {
        "cake-": budgets.cake_case,
        "cake-adjust_budgets": budgets.adjust_case,
        "fastkv-": budgets.fastkv_case,
        "h2o-gqa": evict.h2o_grouped,
        "h2o-localmask": evict.h2o_mask,
        "h2o-realdrop": evict.h2o_answer,
        "kivi-": quant.kivi,
        "lookm-gqa": lookm.gqa_case,
        "lookm-pivot": lookm.merge_case("pivot"),
        "lookm-text": lookm.text_case,
        "lookm-weighted": lookm.merge_case("weighted"),
        "mustdrop-decodecache": mustdrop.cache_case,
        "mustdrop-filter": mustdrop.filter_case,
        "mustdrop-merge": mustdrop.merge_case,
        "oracle-colstats": golden_stats.colstats_case,
        "oracle-decode-mixed": quant.decode,
        "oracle-tau": zipvl.tau_case,
        "oracle-textprior": lookm.textprior_case,
        "oracle-tree": tree.tree_case,
        "pyramidkv-": evict.pyramidkv,
        "quickprefill-": evict.quickprefill,
        "snapkv-gqa": evict.snapkv,
        "snapkv-mha": evict.snapkv,
        "streamingllm-": evict.streamingllm,
        "tome-": tome.sized_case,
        "vlcache-": budgets.vlcache_case,
        "zipcache-mixed": quant.zipcache_mixed,
        "zipcache-quant": quant.zipcache_quant,
        "zipcache-saliency": quant.zipcache_saliency,
    },
    "spec": {
        "eagle12_": eagle.eagle_case,
        "eagle1_multiround_": spec.multiround,
        "eagle2_tree_": eagle.tree_case,
        "eagle3_tiny_": eagle.eagle3_case,
        "eagle3_ttt_": eagle.ttt_case,
        "eagle_posterior_greedy_": spec.posterior_greedy,
        "eagle_posterior_sample_": spec.posterior_sample,
        "eagle_static_": spec.eagle_buffers,
        "ebay_": spec.ragged_batch,
        "exact_law_": spec.exact_law,
        "hf_speculative_": spec.chain_rejection,
        "losses": eagle.losses_case,
        "medusa_buffers_": spec.medusa_buffers,
        "medusa_posterior_": spec.medusa_greedy,
        "msd_": eagle.msd_case,
        "prompt_lookup_": spec.prompt_lookup,
        "token_recycling_": spec.recycling,
        "vispec_posterior_": spec.posterior_vispec,
        "vispec_tiny_": eagle.vispec_case,
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
    replay(RUNNERS[folder][prefix], *load(path))


# One file of each kind.
FIRST = {found: path for path in reversed(RUNNABLE) if (found := classify(path))}


def kind(found: tuple[str, str]) -> str:
    return "/".join(found)


@pytest.mark.parametrize("found", FIRST, ids=kind)
def test_golden_names_unknown_keys(found: tuple[str, str]) -> None:
    """A parameter and a tensor that the runner does not know, each by its name."""
    run = RUNNERS[found[0]][found[1]]
    data, meta = load(FIRST[found])
    with pytest.raises(AssertionError, match=r"no_such_option.*no_such_tensor"):
        replay(run, data | {"no_such_tensor": torch.zeros(1)}, meta | {"no_such_option": "1"})


def test_golden_files_exist() -> None:
    assert ROOT.is_dir(), f"no golden files: {ROOT} is not a folder"
    assert RUNNABLE, f"no golden file below {ROOT} has a runner"
