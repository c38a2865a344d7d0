"""Merging against plain loops, and the slots that LOOK-M keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import tiny_families
from support.closeness import apart, close, tolerance
from support.fake_slots import compressed, prompt_kv, prompt_step, rotate
from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.compressors.cache.lookm import LookM, sizes
from vlmfast.core.kv import KV
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError
from vlmfast.kernels.merge import merge_into


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- merging -------------------------------------------------------------------------------------


def separated(keys: Tensor, keep: list[int]) -> bool:
    """Whether each slot has one nearest pivot, for any order of summing its cosines."""
    units = torch.nn.functional.normalize(keys.double(), dim=-1)
    best = (units @ units[keep].T).topk(min(2, len(keep)), -1).values
    return bool((best[:, 0] - best[:, -1] > 1e-5).all()) or len(keep) < 2


def by_hand(
    keys: Tensor, values: Tensor, keep: list[int], mode: str, used: set[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """One head, in float64, token by token."""
    keys, values = keys.double(), values.double()
    groups: dict[int, list[tuple[int, float]]] = {c: [] for c in keep}
    for e in sorted(used):
        cosines = [float(torch.cosine_similarity(keys[e], keys[c], dim=0)) for c in keep]
        best = max(range(len(keep)), key=lambda i: (cosines[i], -i))
        groups[keep[best]].append((e, cosines[best]))
    out = []
    for x in (keys, values):
        rows = []
        for c, inside in groups.items():
            total = x[c].clone()
            for e, cosine in inside:
                total += {
                    "pivot": (x[e] + x[c]) / 2,
                    "avg": x[e],
                    "weighted": cosine * x[e],
                }[mode]
            rows.append(total / (1 + len(inside)))
        out.append(torch.stack(rows))
    return *out, torch.tensor([1.0 + len(inside) for inside in groups.values()])


@given(
    st.integers(1, 3),
    st.integers(2, 20),
    st.integers(1, 19),
    st.sampled_from(["pivot", "avg", "weighted"]),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_merging_equals_plain_loops(h: int, n: int, s: int, mode: str, seed: int) -> None:
    s = min(s, n - 1)
    keys, values = noise(h, n, 4, seed=seed), noise(h, n, 4, seed=seed + 100)
    keep = torch.stack([noise(n, seed=seed + i).topk(s).indices.sort().values for i in range(h)])
    assume(all(separated(keys[head], keep[head].tolist()) for head in range(h)))
    got = merge_into(keys, values, keep, mode)
    largest = float(torch.stack([keys, values]).abs().max())  # a mean of these may cancel
    for head in range(h):
        used = set(range(n)) - set(keep[head].tolist())
        expected = by_hand(keys[head], values[head], keep[head].tolist(), mode, used)
        for mine, right in zip(got, expected, strict=True):
            close(mine[head], right.double(), torch.float32, n + 4, scale=largest)
        other = by_hand(keys[head], values[head], keep[head].tolist(), mode, set())
        assert not torch.equal(other[2], got[2][head])  # control: slots were merged


def test_only_tokens_above_the_mean_are_averaged() -> None:
    keys, values = noise(3, 24, 4), noise(3, 24, 4, seed=1)
    keep = torch.arange(0, 24, 4).expand(3, -1)
    evicted = [e for e in range(24) if e % 4]
    units = keys / keys.norm(dim=-1, keepdim=True)
    best = (units[:, evicted] @ units[:, keep[0]].transpose(1, 2)).amax(-1)
    rules = {
        "token": best >= best.mean(1, keepdim=True),
        "slot": (best.mean(0) >= best.mean()).expand(3, -1),
        "all": torch.ones_like(best, dtype=torch.bool),
    }
    results = {}
    for rule, used in rules.items():
        results[rule] = merge_into(keys, values, keep, "avg", rule=rule)
        for head in range(3):
            chosen = {e for e, u in zip(evicted, used[head].tolist(), strict=True) if u}
            expected = by_hand(keys[head], values[head], keep[head].tolist(), "avg", chosen)
            close(results[rule][0][head], expected[0], torch.float32, 24 + 4)
    apart(results["token"][0], results["slot"][0], terms=24 + 4)
    apart(results["token"][0], results["all"][0], terms=24 + 4)
    # One head: its m-th slot is one token, and both rules are the same.
    one = [merge_into(keys[:1], values[:1], keep[:1], "avg", rule=r)[0] for r in ("token", "slot")]
    assert torch.equal(*one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32(dtype: torch.dtype) -> None:
    """Many small values would vanish in a low-precision sum."""
    n = 2000
    keys = torch.ones(1, n, 4, dtype=dtype)
    values = torch.full((1, n, 4), 0.0101).to(dtype)
    values[:, 0] = 8.0
    _, v, _ = merge_into(keys, values, torch.zeros(1, 1, dtype=torch.int64), "avg")
    assert v.dtype == dtype
    exact = float(values.double()[0, :, 0].mean())
    # The sum is in float32 and is rounded once: by half a unit in the last place, two at the most
    # next to a power of two. An eighth of the size makes the tolerance one unit.
    close(v[0, 0, 0], exact, scale=exact / 8)
    total = values[0, 0, 0].clone()
    for value in values[0, 1:, 0]:
        total += value
    apart(total / n, exact, scale=exact / 8)  # control


# --- LOOK-M --------------------------------------------------------------------------------------


def mixed(n: int, text: int, seed: int = 0) -> Tensor:
    """Which of ``n`` tokens are visual; ``text`` are not."""
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:text]
    return torch.ones(n, dtype=torch.bool).index_fill(0, chosen, False)


def read(
    stage: LookM, visual: Tensor, groups: int = 2, heads: int = 2, seed: int = 0
) -> tuple[KV, KV]:
    """A prompt before and after the stage."""
    n = len(visual)
    kv = prompt_kv(noise(heads, n, 8, seed=seed), noise(heads, n, 8, seed=seed + 1), visual)
    return kv, compressed(stage, noise(heads * groups, n, 8, seed=seed + 2), kv, visual=visual)[0]


def test_sizes_of_the_budget() -> None:
    assert sizes(640, 0.2, 0.5) == (64, 64)
    assert sizes(48, 0.4, 0.5) == (9, 9)  # each is rounded down separately
    assert sizes(301, 1.0, 0.5) == (301, 0)


@given(
    st.integers(20, 60),
    st.integers(0, 8),
    st.floats(0.4, 0.99),
    st.floats(0.0, 0.6),
    st.sampled_from(["pivot", "avg", "weighted", "none"]),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_budget_is_exact_and_text_is_kept(
    n: int, text: int, share: float, recent: float, merge: str, seed: int
) -> None:
    visual = mixed(n, text, seed)
    assume(text <= sizes(n, share, recent)[0])
    kv, kept = read(LookM(share, recent, merge), visual, seed=seed)
    if sum(sizes(n, share, recent)) < n:
        assert kept.lengths.tolist() == [sum(sizes(n, share, recent))] * 2
    rec = sizes(n, share, recent)[1]
    must = set((~visual).nonzero().flatten().tolist()) | set(range(n - rec, n))
    for head in range(2):
        order = kept.order[head].tolist()
        assert order == sorted(set(order))
        assert must <= set(order)
    assert torch.equal(kept.visual, visual[kept.order])
    assert torch.equal(kept.position, kept.order)
    if merge == "none":
        assert torch.equal(kept.keys, kv.select(kept.order).keys)


def test_text_beyond_the_budget_is_kept() -> None:
    visual = mixed(300, 90)
    _, kept = read(LookM(0.2), visual)
    text = int((~visual[:270]).sum())
    assert text > sizes(300, 0.2, 0.5)[0]
    assert kept.lengths.tolist() == [text + 30] * 2
    assert not kept.visual[:, :-30].any()
    _, kept = read(LookM(0.8), visual)  # control
    assert kept.visual[:, :-120].any()


def test_sinks_beyond_the_budget_are_kept() -> None:
    visual = mixed(40, 0)
    kept = read(LookM(0.1, text_prior=False), visual)[1]
    assert kept.order[0].tolist() == [0, 1, 2, 3, 38, 39]
    assert len(read(LookM(0.2, text_prior=False), visual)[1]) == 8
    assert len(read(LookM(0.1, text_prior=False, sinks=2), visual)[1]) == 4
    assert len(read(LookM(0.01, text_prior=False, sinks=0), visual)[1]) == 1


def test_heads_of_different_lengths_after_an_earlier_stage() -> None:
    visual = mixed(40, 6)
    whole = prompt_kv(noise(2, 40, 8), noise(2, 40, 8, seed=1), visual)
    keep = torch.ones(2, 40, dtype=torch.bool)
    gone = visual.nonzero().flatten()[3:13]
    keep[1, gone] = False
    kv = whole.select_mask(keep)
    score = noise(2, 1, 40, seed=2).exp()
    none = torch.zeros_like(score)
    stats = ColumnStats(none[:, 0].long(), torch.arange(40), score)
    stage = LookM(0.6)
    kept = stage.compress(prompt_step(40, 1), 0, kv, stats)
    assert kept.lengths.tolist() == [sum(sizes(40, 0.6, 0.5)), sum(sizes(30, 0.6, 0.5))]
    for head in range(2):
        n = int(kv.lengths[head])
        one = KV(
            *(getattr(kv, x)[head : head + 1, :n] for x in ("keys", "values", "order")),
            kv.position[head : head + 1, :n],
            kv.visual[head : head + 1, :n],
            kv.lengths[head : head + 1],
        )
        part = score[head : head + 1, :, :n]
        alone = stage.compress(prompt_step(40, 1), 0, one, replace(stats, sum=part))
        count = int(kept.lengths[head])
        assert torch.equal(kept.order[head, :count], alone.order[0])
        close(kept.keys[head, :count], alone.keys[0], terms=40 + 8)
        assert not kept.keys[head, :count].isnan().any()


def test_bias_stays_with_its_pivot_and_repair_counts_merges() -> None:
    visual = mixed(40, 6)
    kv = prompt_kv(noise(2, 40, 8), noise(2, 40, 8, seed=1), visual)
    weight = 1 + torch.arange(40).remainder(3).float().expand(2, -1)
    kv = replace(kv, bias=weight.log())
    query = noise(2, 40, 8, seed=2)
    kept, _ = compressed(LookM(0.5), query, kv, visual=visual)
    assert torch.equal(kept.bias, kv.bias.gather(1, kept.order))
    weighted, _ = compressed(LookM(0.5, proportional_attention=True), query, kv, visual=visual)
    assert torch.equal(weighted.keys, kept.keys)
    close(weighted.bias.exp().sum(1), weight.sum(1), terms=40)
    largest = float(weighted.bias.abs().max())
    assert (weighted.bias >= kept.bias - tolerance(None, 2, largest, kept.bias)).all()
    apart(kept.bias.exp().sum(1), weight.sum(1), terms=40)
    plain, _ = compressed(
        LookM(0.5, proportional_attention=True), query, replace(kv, bias=None), visual=visual
    )
    close(plain.bias.exp().sum(1), [40.0, 40.0], terms=40)


def test_rope_aware_merging_ignores_positions() -> None:
    """Keys that differ only by their rotation merge without error."""
    visual = mixed(40, 4)
    position = torch.arange(40).expand(2, -1)
    content = noise(2, 1, 8).expand(-1, 40, -1)
    kv = prompt_kv(rotate(content, position), noise(2, 40, 8, seed=1), visual)
    query = noise(2, 40, 8, seed=2)
    kept, _ = compressed(LookM(0.5, rope_aware=True), query, kv, visual=visual)
    expected = kv.keys.gather(1, kept.order[..., None].expand(-1, -1, 8))
    # Rotated to the position of its pivot, by an angle of at most 40, whose table has that error.
    scale = 40 * float(expected.abs().max())
    close(kept.keys, expected, terms=40, scale=scale)
    plain, _ = compressed(LookM(0.5), query, kv, visual=visual)
    apart(plain.keys, expected, terms=40, scale=scale)  # control: rotated keys blur


def test_rope_aware_merging_needs_one_rotary_id() -> None:
    vlm = VLM(*tiny_families.builders()["qwen2_5_vl"]())
    image, more = make_image(96, 64), {"max_new_tokens": 2}
    with pytest.raises(RecipeError, match="rope_aware=true needs one rotary id per token"):
        vlm.ask("What is here?", image, recipe="lookm:keep=0.9,rope_aware=true", **more)
    assert vlm.ask("What is here?", image, recipe="lookm:keep=0.9", **more).token_ids
