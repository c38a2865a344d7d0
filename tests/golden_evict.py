"""Replays the stored cases of methods that keep slots of a prompt by their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from closeness import close
from fake_slots import FakeSlots, columns, compressed, prompt_kv
from vlmfast.compressors.cache.h2o import H2O, Answer
from vlmfast.compressors.cache.pyramidkv import PyramidKV
from vlmfast.compressors.cache.quickprefill import QuickPrefill, norms
from vlmfast.compressors.cache.snapkv import SnapKV
from vlmfast.compressors.cache.streamingllm import Slide, StreamingLLM
from vlmfast.core.kv import KV
from vlmfast.kernels.select import top_k

POOLS = {"avgpool": "avg", "maxpool": "max"}


def same_choice(kept: KV, stored: Tensor) -> None:
    """Equal sets of tokens, (H, capacity); ours ascend."""
    assert torch.equal(kept.order, stored.sort(dim=-1).values)


def sequences(data: dict) -> list[tuple[Tensor, KV]]:
    """Queries and cache of each sequence of the stored batch."""
    batch = zip(data["q"], data["k"], data["v"], strict=True)
    return [(q, prompt_kv(k, v)) for q, k, v in batch]


def snapkv(data: dict, meta: dict) -> None:
    for (query, kv), stored in zip(sequences(data), data["kept"], strict=True):
        window = int(meta["window"])
        stage = SnapKV(
            int(meta["capacity"]) / len(kv),
            window=window,
            kernel=int(meta["kernel"]),
            pool=POOLS[meta["pooling"]],
            agg=meta.get("gqa_score_agg", "mean"),
        )
        kept, _ = compressed(stage, query, kv)
        if stage.pool == "avg":
            same_choice(kept, stored)
            continue
        # A maximum makes neighbours equal: the stored choice among equals is as valid as ours.
        ranked = torch.arange(len(kv)).expand_as(kv.order) < len(kv) - window
        score = stage.score(kv, columns(query, kv.keys, stage.text_stats(1)[0]), ranked)
        score = score.masked_fill(~ranked, torch.inf)
        # The same scores throughout, so equal ones are bitwise equal.
        assert torch.equal(
            score.gather(1, kept.order).sort(1).values, score.gather(1, stored).sort(1).values
        )


def pyramidkv(data: dict, meta: dict) -> None:
    depth = int(meta["num_layers"])
    (query, kv), *_ = sequences(data)
    stage = PyramidKV(
        int(meta["capacity"]) / len(kv),
        window=int(meta["window"]),
        kernel=5,
        pool="avg",
        beta=int(meta["beta"]),
    )
    for layer, length in enumerate(data["layer_len"].tolist()):
        kept, _ = compressed(stage, query, kv, depth, layer)
        assert len(kept) == length
        same_choice(kept, data[f"kept_l{layer}"][0])


def h2o_grouped(data: dict, meta: dict) -> None:
    (query, kv), *_ = sequences(data)
    capacity = int(meta["capacity"])
    stage = H2O(capacity / len(kv), recent=int(meta["window"]) / capacity)
    same_choice(compressed(stage, query, kv)[0], data["kept"][0])


def h2o_answer(data: dict, meta: dict) -> None:
    """Eviction in the prompt and one slot per head with each further token."""
    n, recent = int(meta["prefill"]), int(meta["recent_size"])
    budget = int(meta["hh_size"]) + recent
    (query, whole), *_ = sequences(data)
    stage = H2O(budget / n, recent=recent / budget)
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


def h2o_mask(data: dict, meta: dict) -> None:
    ours = local_mask(data["logits"][0], int(meta["heavy_budget"]))
    assert torch.equal(ours, data["mask_bottom"][0])


def unmoved(keys: Tensor, delta: Tensor) -> Tensor:
    return keys


def streamingllm(data: dict, meta: dict) -> None:
    """Keys are stored without rotary ids, so rotation has no effect here."""
    start, recent = int(meta["start"]), int(meta["recent"])
    coming = int(meta["num_coming"])
    first, end = map(int, meta["range"].split(".."))
    for i, (keys, values) in enumerate(zip(data["k"], data["v"], strict=True)):
        kv = prompt_kv(keys, values)

        def kept(stage: StreamingLLM, kv: KV = kv) -> tuple[KV, FakeSlots]:
            chosen, step = compressed(stage, kv.keys, kv)
            chosen = kv.select(chosen.order)
            step.rotate = unmoved
            return chosen, FakeSlots(chosen, step, room=1)

        stage = StreamingLLM((start + recent) / len(kv), sinks=start)
        chosen, slots = kept(stage)
        assert torch.equal(chosen.keys, data["k_call"][i])
        assert torch.equal(chosen.values, data["v_call"][i])

        # Each step frees one slot; for more tokens, a smaller share.
        stage = StreamingLLM((start + recent + 1 - coming) / len(kv), sinks=start)
        chosen, slots = kept(stage)
        Slide(stage).step(slots, 0)
        assert torch.equal(torch.stack(slots.sorted("keys")), data["k_space"][i])
        assert torch.equal(torch.stack(slots.sorted("values")), data["v_space"][i])

        index = torch.arange(len(kv))
        rest = kv.select(index[(index < first) | (index >= end)])
        assert torch.equal(rest.keys, data["k_range"][i])


def quickprefill(data: dict, meta: dict) -> None:
    """Modes of the stage, and those that need more than a cache contains."""
    count, n = int(meta["top_k"]), data["k"].shape[2]
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
