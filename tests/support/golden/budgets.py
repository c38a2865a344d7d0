"""Replays the stored CAKE, VL-Cache and FastKV cases: budgets of all layers, and kept slots."""

from __future__ import annotations

import torch
from torch import Tensor

from support.closeness import close
from support.fake_slots import columns, prompt_kv, prompt_step
from support.golden.case import Data, Reader, coarsest, share
from vlmfast.compressors.cache.cake import CAKE, adjust_budgets, moments
from vlmfast.compressors.cache.fastkv import FastKV
from vlmfast.compressors.cache.vlcache import VLCache, budgets, density
from vlmfast.core.kv import KV
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.col_stats import col_stats


def same_rows(ours: Tensor, stored: Tensor) -> None:
    """Equal sets of slots per head (H, M, D), in any stored order."""
    assert ours.shape == stored.shape
    for mine, theirs in zip(ours, stored, strict=True):
        assert torch.equal(mine[mine[:, 0].argsort()], theirs[theirs[:, 0].argsort()])


def same_slots(kv: KV, data: Reader, layer: int | str) -> None:
    """Keys and values, with the same choice for both."""
    same_rows(torch.cat([kv.keys, kv.values], -1), torch.cat(stored_pair(data, layer), -1))


def attended(keys: Tensor) -> int:
    """Terms of one probability over ``keys`` (H, N, D): its logit and its row."""
    return keys.shape[1] + keys.shape[2]


def stored_pair(data: Reader, layer: int | str) -> tuple[Tensor, Tensor]:
    return data[f"k_out{layer}"][0], data[f"v_out{layer}"][0]


def inputs(data: Data) -> torch.dtype:
    """In which the reference ranks: the coarsest of its inputs."""
    return coarsest(data, ("q", "k", "v"))


def cake_case(data: Reader, meta: Reader) -> None:
    """Scores and preferences of each layer, then the cascade, then the budgets and the slots."""
    depth, window, capacity = (meta.count(name) for name in ("layers", "window", "cache_size"))
    meta.flag("cascading")  # cutting layer by layer or once at the end keeps the same slots
    n = data["k0"].shape[2]
    stage = CAKE(
        keep=share(capacity, n),
        window=window,
        gamma=meta.number("gamma"),
        tau1=meta.number("tau1"),
        tau2=meta.number("tau2"),
    )
    assert stage.capacity(None, 0, n) == capacity
    step, cache = prompt_step(n, depth), []
    for layer, request in stage.text_stats(depth).items():
        kv = prompt_kv(data[f"k{layer}"][0], data[f"v{layer}"][0])
        stats = columns(data[f"q{layer}"][0], kv.keys, request)
        cache.append(stage.compress(step, layer, kv, stats))
        seen, inside = stage.seen(step)[layer], slice(0, n - window)
        terms = attended(kv.keys) + window  # and sums over the rows of the window
        stored = data[f"hh_score{layer}"][0]
        close(seen.scores[:, inside], stored, terms=terms, scale=stored)
        entropy, variance = stats.entropy[..., inside].sum(), moments(stats)[1][..., inside].sum()
        close(entropy, data[f"disp{layer}"], terms=terms + n)
        close(variance, data[f"var{layer}"], terms=terms + n)
        stored = data["pref_scores"][layer]
        # Each power multiplies the relative error of its base.
        powers = 1 / stage.tau1 + 1 / stage.tau2
        close(seen.claim, stored, torch.float32, terms + n, scale=powers * stored)
    cache = stage.finish(step, cache)
    assert step.notes["cake"]["kept"] == (data["layer_budget"] + window).tolist()
    for layer, kv in enumerate(cache):
        same_slots(kv, data, layer)


def adjust_case(data: Reader, meta: Reader) -> None:
    for i in range(sum(name.startswith("in") for name in data)):
        total, limit = data[f"tot_seq{i}"].tolist()
        ideal = data[f"in{i}"].tolist()
        assert adjust_budgets(ideal, total, [limit] * len(ideal)) == data[f"out{i}"].tolist()


def vlcache_case(data: Reader, meta: Reader) -> None:
    """Sparsity, budgets, ranking and slots."""
    depth, rows = len(data["sparsity"]), meta.count("tau")
    n = data["k0"].shape[2]
    stage = VLCache(
        keep=meta.number("alpha"),
        head_adaptive=meta.flag("head_adaptive"),
        layer_adaptive=meta.flag("layer_adaptive", True),
        layer_windows=meta.flag("different_window_per_layer", False),
    )
    step, cache = prompt_step(n, depth), []
    for layer, request in stage.text_stats(depth).items():
        kv = prompt_kv(data[f"k{layer}"][0], data[f"v{layer}"][0])
        stats = question_stats(data[f"q{layer}"][0], kv.keys, rows, request.threshold)
        cache.append(stage.compress(step, layer, kv, stats))
        # A fraction of whole numbers: only the authors' division in float32 rounds.
        sparsity = 1 - float(density(stats.count, stats.nnz))
        close(sparsity, data["sparsity"][layer].double(), torch.float32, scale=1)
        ranked = stage.score(kv, stats, None)
        order = data["sorted_idx"][layer].reshape(-1, n).expand(len(ranked), -1)
        # Scores in the stored order fall, up to rounding.
        ranked = ranked.gather(1, order)
        terms = attended(kv.keys) + rows
        close(ranked, ranked.cummin(1).values, inputs(data), terms=terms, scale=ranked)
    claims = [of.claim for of in stage.seen(step).values()]
    inside = 0.0 if stage.layer_windows else stage.recent
    ours = torch.tensor(budgets(claims, stage.keep, inside))
    close(ours, data["budget"], terms=depth, scale=data["budget"])
    for layer, kv in enumerate(stage.finish(step, cache)):
        same_slots(kv, data, layer)


def question_stats(query: Tensor, key: Tensor, rows: int, threshold: float) -> ColumnStats:
    """Statistics of the last ``rows`` rows, whose queries (Hq, rows, D) alone are stored."""
    n = key.shape[1]
    index = torch.arange(n - rows, n)
    whole = query.new_zeros(len(query), n, query.shape[2]).index_copy(1, index, query)
    out = col_stats(whole, key, index, threshold=threshold)
    return ColumnStats(**out | {"nnz": out["nnz"].expand(len(key), -1)}, rows=index)


def fastkv_case(data: Reader, meta: Reader) -> None:
    """Both choices of the TSP layer: propagated rows and kept slots."""
    query, key, value = (data[name][0] for name in ("q", "k", "v"))
    n, window = key.shape[1], meta.count("window")
    capacity, left = meta.count("max_capacity"), meta.count("tsp_length")
    shares = {"keep": ("retain_rate", capacity), "tsp": ("tsp_rate", left)}
    if meta.choice("mode", {"proportional": True, "constant": False}):
        shares = {ours: meta.number(theirs) for ours, (theirs, _) in shares.items()}
    else:
        for theirs, _ in shares.values():
            meta.choice(theirs, {"None": None}, "None")
        shares = {ours: share(count, n) for ours, (_, count) in shares.items()}
    stage = FastKV(window=window, kernel=meta.count("kernel"), **shares)
    depth, cut = 8, 4
    visual = torch.arange(n) < n - window  # candidates for dropping in the reference
    step = prompt_step(n, depth, visual)
    tsp, cache = stage.expand()
    assert tsp.layers(depth) == (cut,)
    stats = columns(query, key, cache.text_stats(depth)[cut - 1])
    kv = cache.compress(step, cut - 1, prompt_kv(key, value, visual), stats)
    same_slots(kv, data, "")
    for mine, theirs in zip(kv.order, data["kept"][0], strict=True):
        assert torch.equal(mine, theirs.sort().values)

    ((layer, request),) = tsp.text_stats(depth).items()
    step.stats[layer] = window_attention(query, key, request.n)
    rows = tsp.select_tokens(step, cut)
    assert torch.equal(rows, data["tsp_indices"][0])
    # After the TSP layer as many slots stay, of fewer.
    assert cache.capacity(step, cut, len(rows)) == capacity


def window_attention(query: Tensor, key: Tensor, rows: int) -> Tensor:
    """The last rows of causal attention: (Hq, rows, N)."""
    n = key.shape[1]
    key = key.repeat_interleave(len(query) // len(key), 0)
    logits = query[:, n - rows :] @ key.transpose(1, 2) * key.shape[-1] ** -0.5
    later = torch.arange(n) > torch.arange(n - rows, n)[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1)
