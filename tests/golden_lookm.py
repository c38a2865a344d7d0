"""Replays the stored LOOK-M cases: which slots are kept, and which merge into them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from closeness import close
from vlmfast.compressors.cache.lookm import LookM, heavy_hitters, sizes
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.layout import TokenLayout
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError
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

    def run(data: dict, meta: dict) -> None:
        hh, rec = float(meta["hh_ratio"]), float(meta["recent_ratio"])
        q, k, v = (data[name][0] for name in "qkv")
        total = col_stats(q, k)["sum"]
        n, dim = k.shape[1:]
        # Logits, rows, columns: sums of non-negative terms.
        close(total[:, 0], data["col_sum"], terms=dim + 2 * n, scale=data["col_sum"])
        stage = LookM(hh + rec, rec / (hh + rec), mode, filter="slot", text_prior=False)
        count = sizes(k.shape[1], stage.keep, stage.recent)
        assert count == (int(meta["hh_size"]), int(meta["recent_size"]))
        kv = layer(k, v, torch.ones(k.shape[1], dtype=torch.bool))
        same(stage.compress(STEP, 0, kv, received(total)), data["k_out"], data["v_out"], n)

    return run


def text_case(data: dict, meta: dict) -> None:
    """Text prior, as in the authors' code: all text stays; their averages are wrong."""
    hh, rec = float(meta["hh_ratio"]), float(meta["recent_ratio"])
    kv = layer(data["k"][0].float(), data["v"][0].float(), data["image_mask"])
    for mode, merge in {"evict": "none", "pivot": "pivot", "weighted": "weighted"}.items():
        stage = LookM(hh + rec, rec / (hh + rec), merge, filter="slot", overrun=True)
        keys, values = data[f"k_{mode}"], data[f"v_{mode}"]
        assert keys.shape[2] == int(meta["n_kept"])
        kept = stage.compress(STEP, 0, kv, received(data["col_sum"][:, None]))
        same(kept, keys, values, kv.keys.shape[1])


def gqa_case(data: dict, meta: dict) -> None:
    """Grouped query heads: scores are averaged over a group, and merging is per KV head.

    The budgets of these files are smaller than the text, which the stage refuses; so the kept slots
    are chosen here, and the stage merges.
    """
    q, k, v = (data[name][0] for name in "qkv")
    stage = LookM(float(meta["budget"]), 0.1, "pivot" if meta["merge"] == "True" else "none")
    h, n, _ = k.shape
    hh, rec = sizes(n, stage.keep, stage.recent)
    assert (hh, rec) == (int(meta["hh_size"]), int(meta["recent_size"]))
    kv = layer(k, v, ~data["text_mask"])
    with pytest.raises(RecipeError, match="lookm: keep="):
        stage.select_slots(kv, kv.keys[..., 0])
    among = (torch.arange(n) < n - rec).expand(h, -1)
    score = col_stats(q, k)["sum"].mean(1)
    keep = heavy_hitters(score, stage.first(kv), among, torch.full((h,), hh)) | ~among
    same(stage.shrunk(STEP, kv, keep), data["k_out"], data["v_out"], n)


def textprior_case(data: dict, meta: dict) -> None:
    """Text first, then by score: exactly ``hh``, and with all text beyond it."""
    score, text, hh = data["score"], ~data["is_image"], int(data["hh"])
    h, n = score.shape
    among = (torch.arange(n) < n - int(data["recent"])).expand(h, -1)
    first = text.expand(h, -1)
    capped = heavy_hitters(score, first, among, torch.full((h,), hh)) | ~among
    assert torch.equal(capped, data["keep_capped"])
    most = torch.full((h,), max(hh, int((first & among)[0].sum())))
    assert torch.equal(heavy_hitters(score, first, among, most) | ~among, data["keep_overrun"])
