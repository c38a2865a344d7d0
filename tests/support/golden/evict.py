"""Replays the stored cases of methods that keep slots of a prompt by their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from support.closeness import close
from support.fake_slots import FakeSlots, columns, compressed, prompt_kv
from support.golden.case import Reader, chosen, coarsest, marked, share
from vlmfast.compressors.cache.h2o import H2O, Answer
from vlmfast.compressors.cache.pyramidkv import PyramidKV
from vlmfast.compressors.cache.quickprefill import QuickPrefill, norms
from vlmfast.compressors.cache.snapkv import SnapKV
from vlmfast.compressors.cache.streamingllm import Slide, StreamingLLM
from vlmfast.core.kv import KV
from vlmfast.kernels.select import top_k

POOLS = {"avgpool": "avg", "maxpool": "max"}
AGGREGATES = {name: name for name in ("mean", "max", "sum")}


def same_choice(
    stage: H2O | SnapKV, query: Tensor, kv: KV, kept: KV, stored: Tensor, data: Reader
) -> None:
    """Equal sets of tokens (H, capacity), in any stored order."""
    n, (heads, count) = len(kv), stored.shape
    assert kept.order.shape == (heads, count)
    last = stage.last(count)
    ranked = (torch.arange(n) < n - last).expand(heads, -1)
    score = stage.score(kv, columns(query, kv.keys, stage.text_stats(1)[0]), ranked)
    ours, theirs = marked(kept.order, n), marked(stored, n)
    assert bool((ours & theirs)[~ranked].all())
    ours, theirs, score = (of[:, : n - last] for of in (ours, theirs, score))
    # Logits, rows, and the sums of columns, of a group and of neighbours.
    terms = kv.keys.shape[2] + 2 * n + len(query) // heads
    # A maximum makes neighbours equal.
    ties = getattr(stage, "pool", "avg") == "max"
    chosen(score, ours, theirs, terms, coarsest(data, ("q", "k")), ties=ties)


def same_slots(stage: H2O | SnapKV, query: Tensor, kv: KV, data: Reader, at: int) -> None:
    """One sequence's choice, and the stored cache, which is that choice of the stored inputs."""
    kept, _ = compressed(stage, query, kv)
    stored = data["kept"][at]
    same_choice(stage, query, kv, kept, stored, data)
    index = stored[..., None].expand(-1, -1, kv.keys.shape[2])
    for name, source, ours in (("k", kv.keys, kept.keys), ("v", kv.values, kept.values)):
        assert torch.equal(source.gather(1, index), data[f"{name}_out"][at])
        own = kept.order[..., None].expand_as(ours)
        assert torch.equal(ours, source.gather(1, own))


def sequences(data: Reader) -> list[tuple[Tensor, KV]]:
    """Queries and cache of each sequence of the stored batch."""
    batch = zip(data["q"], data["k"], data["v"], strict=True)
    return [(q, prompt_kv(k, v)) for q, k, v in batch]


def snapkv(data: Reader, meta: Reader) -> None:
    window = meta.count("window")
    for at, (query, kv) in enumerate(sequences(data)):
        stage = SnapKV(
            share(meta.count("capacity"), len(kv)),
            window=window,
            kernel=meta.count("kernel"),
            pool=meta.choice("pooling", POOLS),
            agg=meta.choice("gqa_score_agg", AGGREGATES, "mean"),
        )
        same_slots(stage, query, kv, data, at)


def pyramidkv(data: Reader, meta: Reader) -> None:
    depth = meta.count("num_layers")
    assert meta.literal("layer_len") == data["layer_len"].tolist()
    for at, (query, kv) in enumerate(sequences(data)):
        stage = PyramidKV(
            share(meta.count("capacity"), len(kv)),
            window=meta.count("window"),
            kernel=meta.count("kernel", 5),  # the defaults of the reference's class
            pool=meta.choice("pooling", POOLS, "avgpool"),
            agg=meta.choice("gqa_score_agg", AGGREGATES, "mean"),
            beta=meta.count("beta"),
        )
        for layer, length in enumerate(data["layer_len"].tolist()):
            kept, _ = compressed(stage, query, kv, depth, layer)
            assert len(kept) == length
            same_choice(stage, query, kv, kept, data[f"kept_l{layer}"][at], data)


def h2o_grouped(data: Reader, meta: Reader) -> None:
    """Ranking by the prompt alone. The class has SnapKV's arguments, but pools nothing."""
    meta.without_effect("kernel", "pooling")
    capacity, window = meta.count("capacity"), meta.count("window")
    for at, (query, kv) in enumerate(sequences(data)):
        stage = H2O(
            share(capacity, len(kv)),
            recent=share(window, capacity),
            agg=meta.choice("gqa_score_agg", AGGREGATES, "mean"),
            decode=False,
        )
        same_slots(stage, query, kv, data, at)


def h2o_answer(data: Reader, meta: Reader) -> None:
    """Eviction in the prompt and one slot per head with each further token."""
    n, recent = meta.count("prefill"), meta.count("recent_size")
    budget = meta.count("hh_size") + recent
    (query, whole), *_ = sequences(data)
    assert len(whole) == n + meta.count("decode_steps")
    stage = H2O(share(budget, n), recent=share(recent, budget))
    answer = Answer(stage)
    kept, step = compressed(stage, query[:, :n], whole.select(torch.arange(n)))
    assert torch.equal(kept.keys, data["k_after_prefill"][0])  # slots are moved, not computed
    assert torch.equal(kept.values, data["v_after_prefill"][0])
    # Logits over a head's width, rows over all keys, columns over all rows: nothing cancels.
    terms = whole.keys.shape[2] + 2 * len(whole)
    close(
        kept.attention_mass,
        data["score_after_prefill"],
        terms=terms,
        scale=data["score_after_prefill"],
    )

    slots = FakeSlots(kept, step, room=1)
    for t in range(n, len(whole)):
        answer.step(slots, 0)
        slots.write(whole.keys[:, t], whole.values[:, t])
        slots.attend(query[:, t])
    answer.step(slots, 0)
    assert torch.equal(torch.stack(slots.sorted("keys")), data["k_after_decode"][0])
    assert torch.equal(torch.stack(slots.sorted("values")), data["v_after_decode"][0])
    mass, stored = torch.stack(slots.sorted("attention_mass")), data["score_after_decode"]
    close(mass, stored, terms=terms, scale=stored)


def local_mask(logits: Tensor, budget: int) -> Tensor:
    """Which keys a cache of heavy hitters alone would contain at each row: bool (H, N, N).

    The authors' tool for scoring whole texts: nothing is evicted, keys are hidden from rows. Row
    ``t`` sees itself and the ``budget - 1`` keys with the largest sums so far; sums of other keys
    are forgotten.
    """
    n = logits.shape[-1]
    p = logits.float().softmax(-1)
    # The first rows count together; only the causal mask, which the caller adds, hides keys there.
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[:, :budget, :budget] = True
    acc = p[:, :budget].sum(1)
    acc[:, budget:] = 0
    for t in range(budget, n):
        mask[:, t].scatter_(1, top_k(acc[:, :t], budget - 1), True)
        mask[:, t, t] = True
        acc = (acc + p[:, t]) * mask[:, t]
    return mask


def h2o_mask(data: Reader, meta: Reader) -> None:
    ours = local_mask(data["logits"][0], meta.count("heavy_budget"))
    assert torch.equal(ours, data["mask_bottom"][0])


def unmoved(keys: Tensor, delta: Tensor) -> Tensor:
    return keys


def streamingllm(data: Reader, meta: Reader) -> None:
    """Keys are stored without rotary ids, so rotation has no effect here."""
    start, recent = meta.count("start"), meta.count("recent")
    coming = meta.count("num_coming")
    first, end = map(int, meta["range"].split(".."))
    for i, (keys, values) in enumerate(zip(data["k"], data["v"], strict=True)):
        kv = prompt_kv(keys, values)

        def kept(stage: StreamingLLM, kv: KV = kv) -> tuple[KV, FakeSlots]:
            chosen, step = compressed(stage, kv.keys, kv)
            chosen = kv.select(chosen.order)
            step.rotate = unmoved
            return chosen, FakeSlots(chosen, step, room=1)

        stage = StreamingLLM(share(start + recent, len(kv)), sinks=start)
        chosen, slots = kept(stage)
        assert torch.equal(chosen.keys, data["k_call"][i])
        assert torch.equal(chosen.values, data["v_call"][i])

        # Each step frees one slot; for more tokens, a smaller share.
        stage = StreamingLLM(share(start + recent + 1 - coming, len(kv)), sinks=start)
        chosen, slots = kept(stage)
        Slide(stage).step(slots, 0)
        assert torch.equal(torch.stack(slots.sorted("keys")), data["k_space"][i])
        assert torch.equal(torch.stack(slots.sorted("values")), data["v_space"][i])

        index = torch.arange(len(kv))
        rest = kv.select(index[(index < first) | (index >= end)])
        assert torch.equal(rest.keys, data["k_range"][i])


def quickprefill(data: Reader, meta: Reader) -> None:
    """Modes of the stage, and those that need more than a cache contains."""
    count, n = meta.count("top_k"), data["k"].shape[2]
    everything = torch.ones(n, dtype=torch.bool)
    kv = prompt_kv(data["k"][0], data["v"][0], everything)
    stored = {name.removeprefix("mask_"): data[name][0] for name in data if "mask_" in name}

    def mask(index: Tensor) -> Tensor:
        return torch.zeros(n, dtype=torch.bool).index_fill(0, index, True)

    ours = {
        "key_norms_small": "key-norm-small",
        "key_norms": "key-norm",
        "vector_norms": "value-norm",
    }
    for name, score in ours.items():
        stage = QuickPrefill(top_k=count, score=score)
        kept, _ = compressed(stage, kv.keys, kv, visual=everything)
        assert torch.equal(mask(kept.order[0]), stored.pop(name))
    attention = data["attn"][0]
    scores = {
        "query_attention_weights": attention,
        "query_attention_weights_by_value_norm": attention * norms(kv.values),
        "output_norms": norms(data["out"][:1]),
    }
    for name, score in scores.items():
        assert torch.equal(mask(top_k(score, count)), stored.pop(name))
    assert not stored
