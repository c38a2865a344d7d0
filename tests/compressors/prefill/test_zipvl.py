"""ZipVL: selection of important tokens, attention among them, and the mixed-precision cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import apart, close
from support.fake_slots import prompt_kv, prompt_step
from vlmfast.compressors.prefill.zipvl import ZipVL, important, probe_rows, sparse_attention
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(heads: int, kv_heads: int, n: int, d: int = 16, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values with a batch axis; some keys get much more attention than others."""
    q, k, v = (noise(1, h, n, d, seed=seed + i) for i, h in enumerate((heads, kv_heads, kv_heads)))
    return [2 * q, 2 * k, v]


def maps(q: Tensor, k: Tensor, allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention, float64, (Hq, S, S)."""
    k = k[0].double().repeat_interleave(q.shape[1] // k.shape[1], 0)
    logits = q[0].double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias.double()
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)


# --- probes and importance -----------------------------------------------------------------------


@given(st.integers(1, 80), st.integers(1, 40), st.integers(0, 40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_probe_rows(n: int, recent: int, random: int, seed: int) -> None:
    rows = probe_rows(n, recent, random, seed).tolist()
    assert rows == sorted(set(rows))
    assert len(rows) == min(n, recent) + min(random, max(n - recent, 0))
    assert rows[-min(n, recent) :] == list(range(max(n - recent, 0), n))
    assert rows == probe_rows(n, recent, random, seed).tolist()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tau", [0.3, 0.8, 0.97])
def test_importance_equals_reference(kv_heads: int, tau: float) -> None:
    n = 60
    q, k, _ = qkv(4, kv_heads, n)
    rows = probe_rows(n, 10, 10, 0)
    received = maps(q, k, torch.ones(n, n, dtype=torch.bool).tril())[:, rows].mean(0).sum(0)
    total, count = 0.0, 0
    for mass in sorted(received.tolist(), reverse=True):
        total, count = total + mass, count + 1
        if total >= tau * len(rows):
            break
    seen = [sum(int(r) >= j for r in rows) for j in range(n)]
    score = [float(received[j]) / seen[j] for j in range(n)]
    expected = sorted(sorted(range(n), key=lambda j: -score[j])[:count])
    got = important(q[0], k[0], rows, tau)
    assert got.tolist() == expected
    assert 1 < count < n
    raw = sorted(sorted(range(n), key=lambda j: -float(received[j]))[:count])
    assert got.tolist() != raw  # control: selection by the raw sums differs


def test_bias_makes_a_token_important() -> None:
    q, k, _ = qkv(4, 2, 60)
    rows = probe_rows(60, 10, 10, 0)
    least = next(j for j in range(50) if j not in important(q[0], k[0], rows, 0.5).tolist())
    bias = torch.zeros(60).index_fill(0, torch.tensor([least]), 6.0)
    assert least in important(q[0], k[0], rows, 0.5, bias=bias).tolist()


# --- attention -----------------------------------------------------------------------------------

FLOAT = torch.float32  # the reference maps are float64
SUMS = 16 + 40  # a logit over the head dimension, then the values over the keys


@pytest.mark.parametrize("every_row", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_attention_equals_a_masked_dense_softmax(
    kv_heads: int, biased: bool, every_row: bool
) -> None:
    n = 40
    q, k, v = qkv(6, kv_heads, n)
    chosen = torch.tensor([3, 4, 9, 17, 18, 30, 39])
    bias = noise(n, seed=9) if biased else None
    got = sparse_attention(q, k, v, chosen, every_row=every_row, bias=bias)
    columns = torch.zeros(n, dtype=torch.bool).index_fill(0, chosen, True)
    rows = torch.ones_like(columns) if every_row else columns
    allowed = torch.ones(n, n, dtype=torch.bool).tril() & columns
    p = maps(q, k, allowed, bias) * rows[:, None]
    expected = p @ v[0].double().repeat_interleave(6 // kv_heads, 0)
    close(got[0], expected, FLOAT, SUMS)
    silent = torch.arange(n) < 3 if every_row else ~columns
    assert bool((got[0, :, silent] == 0).all())
    assert bool((got[0, :, ~silent] != 0).any(-1).all())
    if biased:  # control
        plain = sparse_attention(q, k, v, chosen, every_row=every_row)
        apart(plain, got, terms=SUMS)


def test_attention_with_custom_mask() -> None:
    """For models that are not plainly causal: here the first half attends to itself."""
    n = 20
    q, k, v = qkv(4, 2, n)
    chosen = torch.tensor([1, 4, 8, 12, 19])
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    allowed[:10, :10] = True
    got = sparse_attention(q, k, v, chosen, allowed=allowed)
    columns = torch.zeros(n, dtype=torch.bool).index_fill(0, chosen, True)
    expected = maps(q, k, allowed & columns) @ v[0].double().repeat_interleave(2, 0)
    close(got[0, :, chosen], expected[:, chosen], FLOAT, SUMS)
    apart(got, sparse_attention(q, k, v, chosen), terms=SUMS)


# --- prefill part --------------------------------------------------------------------------------


def attended(
    stage: ZipVL, n: int = 200, seed: int = 0
) -> tuple[Tensor | None, PrefillContext, list[Tensor]]:
    q, k, v = qkv(4, 2, n, seed=seed)
    step = prompt_step(n, 3)
    return stage.expand()[0].attend(step, 1, q, k, v, None), step, [q, k, v]


def test_recent_rows_are_always_chosen() -> None:
    for seed in range(5):
        for last in (1, 7):
            stage = ZipVL(0.1, force_recent=last)
            out, step, _ = attended(stage, seed=seed)
            chosen = step.notes["zipvl"][1]
            assert set(range(200 - last, 200)) <= set(chosen.tolist())
            assert bool((out[0, :, chosen] != 0).any(-1).all())
            others = ~torch.isin(torch.arange(200), chosen)
            assert int(others.sum()) > 0
            assert bool((out[0, :, others] == 0).all())


def test_dense_attention_above_threshold() -> None:
    share = len(attended(ZipVL(0.6))[1].notes["zipvl"][1]) / 200
    assert 0.1 < share < 0.9
    out, step, _ = attended(ZipVL(0.6, dense_above=share - 0.01))
    assert out is None
    assert len(step.notes["zipvl"][1]) == round(share * 200)  # the cache still uses the selection
    assert attended(ZipVL(0.6, dense_above=share + 0.01))[0] is not None
    assert ZipVL(1.0).expand()[0].attends(3) == ()
    assert ZipVL(0.9).expand()[0].attends(3) == (0, 1, 2)


def test_answer_rows_are_kept_and_are_not_probes() -> None:
    q, k, v = qkv(4, 2, 120)
    step = prompt_step(120, 3)
    step.answer = 20
    stage = ZipVL(0.3, recent=8, random=8).expand()[0]
    out = stage.attend(step, 0, q, k, v, None)
    chosen = step.notes["zipvl"][0]
    assert set(range(99, 120)) < set(chosen.tolist())
    alone = prompt_step(100, 3)
    stage.attend(alone, 0, *(x[:, :, :100] for x in (q, k, v)), None)
    assert torch.equal(alone.notes["zipvl"][0], chosen[:-20])
    assert bool((out[0, :, 100:] != 0).any(-1).all())
    # Other queries in the answer give the same selection.
    q = torch.cat([q[:, :, :100], noise(1, 4, 20, 16, seed=7)], 2)
    stage.attend(step, 1, q, k, v, None)
    stage.attend(step, 0, q, k, v, None)
    assert torch.equal(step.notes["zipvl"][0], chosen)
    assert not torch.equal(step.notes["zipvl"][1], chosen)


# --- cache parts ---------------------------------------------------------------------------------


def layer_of(n: int = 90, seed: int = 0) -> tuple[KV, PrefillContext, Tensor]:
    """A prompt's layer, a context in which a third of it is important, and these tokens."""
    kv = prompt_kv(noise(2, n, 16, seed=seed), noise(2, n, 16, seed=seed + 1))
    step = prompt_step(n, 3)
    chosen = torch.arange(0, n, 3)
    step.notes["zipvl"] = {1: chosen}
    return kv, step, chosen


def test_drop_keeps_the_important_tokens() -> None:
    kv, step, chosen = layer_of()
    part = ZipVL(0.9, kv="drop").expand()[1]
    kept = part.compress(step, 1, kv, None)
    assert torch.equal(kept.order, chosen.expand(2, -1))
    assert torch.equal(kept.keys, kv.keys[:, chosen])
    assert part.compress(step, 0, kv, None) is kv  # a layer that attended densely


def test_all_important_tokens_make_one_segment() -> None:
    kv, step, _ = layer_of()
    (segment,) = ZipVL(1.0).expand()[1].compress(step, 0, kv, None).segments
    assert (segment.bits, len(segment)) == (4, 90)


def test_ragged_heads() -> None:
    kv, step, chosen = layer_of()
    keep = torch.ones(2, 90, dtype=torch.bool)
    keep[0, :30] = False
    kv = kv.select_mask(keep)
    first, second = ZipVL().expand()[1].compress(step, 1, kv, None).segments
    assert (first.bits, second.bits) == (4, 2)
    assert first.lengths.tolist() == [20, 30]
    assert second.lengths.tolist() == [40, 60]
    assert first.order[0, :20].tolist() == chosen[10:].tolist()
    assert first.order[1].tolist() == chosen.tolist()
