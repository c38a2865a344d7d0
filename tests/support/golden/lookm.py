"""Replays the stored LOOK-M cases: which slots are kept, and which merge into them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support.closeness import close
from support.golden.case import Reader
from vlmfast.compressors.cache.lookm import LookM, heavy_hitters, sizes
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.col_stats import col_stats

STEP = PrefillContext(TokenLayout.text(torch.arange(1), torch.arange(1)[None]), depth=1)


def layer(keys: Tensor, values: Tensor, visual: Tensor) -> KV:
    """A layer of one prompt: (H, N, D) each, and the visual mask (N,)."""
    h, n, _ = keys.shape
    order = torch.arange(n).expand(h, -1)
    return KV(keys, values, order, order, visual.expand(h, -1), torch.full((h,), n))


def received(total: Tensor) -> ColumnStats:
    """Statistics of which only the sum, (H, G, N), is known."""
    none = total.new_zeros(total.shape)
    return ColumnStats(none[:, 0].long(), torch.arange(0), total)


def same(kept: KV, keys: Tensor, values: Tensor, terms: int) -> None:
    """``terms``: as many slots as can merge into one; half precision is for storage only."""
    for ours, stored in ((kept.keys, keys[0]), (kept.values, values[0])):
        if stored.dtype == ours.dtype:
            close(ours, stored, terms=terms)
        else:
            close(ours, stored, scale=stored.abs())


def merge_case(mode: str) -> Callable[[dict, dict], None]:
    """Without text prior: sinks, heavy hitters, recent slots, and the rest merged by ``mode``."""

    def run(data: Reader, meta: Reader) -> None:
        hh, rec = meta.number("hh_ratio"), meta.number("recent_ratio")
        q, k, v = (data[name][0] for name in "qkv")
        total = col_stats(q, k)["sum"]
        n, dim = k.shape[1:]
        # Logits, rows, columns: sums of non-negative terms.
        close(total[:, 0], data["col_sum"], terms=dim + 2 * n, scale=data["col_sum"])
        stage = LookM(hh + rec, rec / (hh + rec), mode, filter="slot", text_prior=False)
        count = sizes(k.shape[1], stage.keep, stage.recent)
        assert count == (meta.count("hh_size"), meta.count("recent_size"))
        kv = layer(k, v, torch.ones(k.shape[1], dtype=torch.bool))
        same(stage.compress(STEP, 0, kv, received(total)), data["k_out"], data["v_out"], n)

    return run


def images(positions: list[int], n: int) -> Tensor:
    """Slots of the images whose placeholders are at ``positions``, each of 576 slots."""
    mask = torch.zeros(n, dtype=torch.bool)
    for number, position in enumerate(positions):
        start = position + 575 * number
        mask[start : start + 576] = True
    return mask


def text_case(data: Reader, meta: Reader) -> None:
    """Text prior, as in the authors' code: all text stays; their averages are wrong."""
    hh, rec = meta.number("hh_ratio"), meta.number("recent_ratio")
    n = data["k"].shape[2]
    assert sizes(n, hh + rec, rec / (hh + rec)) == (
        meta.count("hh_size"),
        meta.count("recent_size"),
    )
    assert int((~data["image_mask"]).sum()) == meta.count("n_text")
    assert torch.equal(data["image_mask"], images(data["image_position"].tolist(), n))
    # Averages of the authors merge into other tokens' pivots (see REPLACED).
    data.without_effect("k_avgbug", "v_avgbug")
    kv = layer(data["k"][0].float(), data["v"][0].float(), data["image_mask"])
    for mode, merge in {"evict": "none", "pivot": "pivot", "weighted": "weighted"}.items():
        stage = LookM(hh + rec, rec / (hh + rec), merge, filter="slot")
        keys, values = data[f"k_{mode}"], data[f"v_{mode}"]
        assert keys.shape[2] == meta.count("n_kept")
        kept = stage.compress(STEP, 0, kv, received(data["col_sum"][:, None]))
        same(kept, keys, values, kv.keys.shape[1])


def gqa_case(data: Reader, meta: Reader) -> None:
    """Grouped query heads: scores are averaged over a group, and merging is per KV head.

    The stage keeps text beyond its budget, and the reference does not: then the kept slots are
    chosen here alone, and the stage merges.
    """
    q, k, v = (data[name][0] for name in "qkv")
    stage = LookM(meta.number("budget"), 0.1, "pivot" if meta.flag("merge") else "none")
    h, n, _ = k.shape
    hh, rec = sizes(n, stage.keep, stage.recent)
    assert (hh, rec) == (meta.count("hh_size"), meta.count("recent_size"))
    kv = layer(k, v, ~data["text_mask"])
    among = (torch.arange(n) < n - rec).expand(h, -1)
    score = col_stats(q, k)["sum"].mean(1)
    keep = heavy_hitters(score, stage.first(kv), among, torch.full((h,), hh)) | ~among
    if int((stage.first(kv) & among)[0].sum()) > hh:
        assert bool((stage.select_slots(kv, score) >= stage.first(kv)).all())
    else:
        assert torch.equal(stage.select_slots(kv, score), keep)
    same(stage.shrunk(STEP, kv, keep), data["k_out"], data["v_out"], n)


def textprior_case(data: Reader, meta: Reader) -> None:
    """Text first, then by score: exactly ``hh``, and with all text beyond it."""
    score, text, hh = data["score"], ~data["is_image"], data.count("hh")
    h, n = score.shape
    among = (torch.arange(n) < n - data.count("recent")).expand(h, -1)
    first = text.expand(h, -1)
    capped = heavy_hitters(score, first, among, torch.full((h,), hh)) | ~among
    assert torch.equal(capped, data["keep_capped"])
    most = torch.full((h,), max(hh, int((first & among)[0].sum())))
    assert torch.equal(heavy_hitters(score, first, among, most) | ~among, data["keep_overrun"])
