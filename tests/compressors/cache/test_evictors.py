"""Methods that keep a fraction of the slots: common properties, each method's choice, decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.closeness import close
from support.fake_slots import FakeSlots, columns, compressed, prompt_kv, prompt_step, rotate
from vlmfast.compressors.cache.h2o import H2O, Answer
from vlmfast.compressors.cache.pyramidkv import PyramidKV, pyramid
from vlmfast.compressors.cache.quickprefill import QuickPrefill
from vlmfast.compressors.cache.snapkv import SnapKV
from vlmfast.compressors.cache.streamingllm import Slide, StreamingLLM
from vlmfast.compressors.evictor import Evictor
from vlmfast.core.kv import KV
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError

DIM = 8
QUICK = settings(max_examples=25, deadline=None)


def tensors(n: int, heads: int = 2, group: int = 2, seed: int = 0) -> tuple[Tensor, KV]:
    """Queries of a prompt, and its KV."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads * group, n, DIM, generator=generator)
    keys = torch.randn(2, heads, n, DIM, generator=generator)
    return query, prompt_kv(keys[0], keys[1])


def kept_by(stage, query: Tensor, kv: KV) -> list[list[int]]:
    """Tokens that each head keeps."""
    kept = compressed(stage, query, kv)[0]
    return [row[:n].tolist() for row, n in zip(kept.order, kept.lengths.tolist(), strict=True)]


@dataclass(frozen=True)
class Plain(Evictor):
    """Scores are the first channel of the values."""

    name = "plain"
    window: float = 0
    sinks: int = 0

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        return kv.values[..., 0]


def build(name: str, share: float):
    """Any method of this kind, at a share that its window allows at 40 slots and more."""
    return {
        "plain": Plain(share, window=3, sinks=2),
        "snapkv": SnapKV(share, window=4, kernel=3),
        "pyramidkv": PyramidKV(share, window=4, kernel=3),
        "h2o": H2O(share),
        "streamingllm": StreamingLLM(share),
    }[name]


NAMES = ("plain", "snapkv", "pyramidkv", "h2o", "streamingllm")
# The first and the last slots that each method always keeps, of ``c`` that stay.
CERTAIN = {
    "plain": lambda c: (2, 3),
    "snapkv": lambda c: (0, 4),
    "pyramidkv": lambda c: (0, 4),
    "h2o": lambda c: (0, c // 2),
    "streamingllm": lambda c: (4, c - 4),
}


# --- common properties ---------------------------------------------------------------------------


@QUICK
@given(
    name=st.sampled_from(NAMES),
    n=st.integers(40, 90),
    percent=st.integers(15, 99),
    seed=st.integers(0, 9),
)
def test_kept_counts_order_window_and_sinks(name, n, percent, seed) -> None:
    query, kv = tensors(n, seed=seed)
    count = int(percent / 100 * n)
    kept, _ = compressed(build(name, percent / 100), query, kv)
    assert len(kept) == count < n
    assert kept.lengths.tolist() == [count, count]
    assert bool((kept.order.diff(dim=1) > 0).all())
    first, last = CERTAIN[name](count)
    wanted = [*range(first), *range(n - last, n)]
    assert all(set(wanted) <= set(row) for row in kept.order.tolist())
    # Kept slots are unchanged.
    rows = kept.order[..., None].expand(-1, -1, DIM)
    assert torch.equal(kept.values, kv.values.gather(1, rows))
    if name != "streamingllm":
        assert torch.equal(kept.keys, kv.keys.gather(1, rows))


@QUICK
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 9), short=st.integers(40, 69))
def test_padding_is_never_kept(name, seed, short) -> None:
    """A head with fewer slots chooses as it would alone; the contents of padding do not matter."""
    query, kv = tensors(70, seed=seed)
    stage = build(name, 0.25)
    lengths = torch.tensor([70, short])
    ragged = replace(kv, lengths=lengths)
    ragged.values[1, short:] = 100.0
    step = prompt_step(70, 1)
    request = stage.text_stats(1).get(0)
    stats = None
    if request is not None:
        stats = columns(query, kv.keys, request)
        # Padding may contain anything: here, the largest scores.
        stats.sum[1, :, short:] = 100.0
    kept = stage.compress(step, 0, ragged, stats)
    assert kept.lengths.tolist() == [int(0.25 * 70), int(0.25 * short)]
    assert int(kept.order[1, : kept.lengths[1]].max()) == short - 1

    for head, n in enumerate(lengths.tolist()):
        alone = ragged.select(torch.arange(n))
        alone = KV(*(getattr(alone, f)[head : head + 1] for f in FIELDS))
        of_head = None
        if stats is not None:
            of_head = replace(
                stats, sum=stats.sum[head : head + 1, :, :n], nnz=stats.nnz[head : head + 1, :n]
            )
        wanted = stage.compress(prompt_step(n, 1), 0, alone, of_head)
        count = len(wanted)
        assert torch.equal(kept.order[head, :count], wanted.order[0])
        assert torch.equal(kept.keys[head, :count], wanted.keys[0])


FIELDS = ("keys", "values", "order", "position", "visual", "lengths")


def test_ragged_heads_within_budget_are_unchanged() -> None:
    query, kv = tensors(50)
    ragged = replace(kv, lengths=torch.tensor([50, 20]))
    assert compressed(Plain(1.0), query, ragged)[0] is ragged


def test_ties_go_to_the_lower_index() -> None:
    query, kv = tensors(20)
    kv.values[:] = 0.0
    assert kept_by(Plain(0.3), query, kv) == [[0, 1, 2, 3, 4, 5]] * 2
    kv.values[:, 9] = 1.0
    assert kept_by(Plain(0.3), query, kv) == [[0, 1, 2, 3, 4, 9]] * 2


@pytest.mark.parametrize(
    ("stage", "kept"),
    [
        (SnapKV(0.01), 32 + 1),
        (SnapKV(0.01, window=0.5), 2 + 1),
        (PyramidKV(0.02), 8 + 1),
        (StreamingLLM(0.01), 4 + 1),
        (H2O(0.001), 1),
        (Plain(0.01, window=2, sinks=2), 2 + 2 + 1),
    ],
)
def test_window_and_sinks_beyond_the_budget_are_kept(stage, kept) -> None:
    query, kv = tensors(300)
    short = compressed(stage, query, kv)[0]
    assert short.lengths.tolist() == [kept] * len(short.keys)
    window = stage.last(kept)
    assert short.order[0, kept - window :].tolist() == list(range(300 - window, 300))
    assert short.order[0, : stage.sinks].tolist() == list(range(stage.sinks))


def test_prompt_shorter_than_the_window_is_unchanged() -> None:
    query, kv = tensors(20)
    for keep in (0.01, 0.5, 1.0):
        assert compressed(SnapKV(keep), query, kv)[0] is kv
    assert len(compressed(SnapKV(0.5, window=4), query, kv)[0]) == 10  # control


def test_pyramid_counts() -> None:
    """The worked case of 8 layers; the average is about the requested budget."""
    assert pyramid(200, 40, 8, 8, 20) == [71, 63, 55, 47, 39, 31, 23, 15]
    for n, capacity, window, depth in ((2928, 585, 8, 32), (300, 60, 8, 6), (100, 30, 4, 4)):
        counts = pyramid(n, capacity, window, depth, 20)
        assert counts == sorted(counts, reverse=True)
        assert counts[0] <= n
        assert counts[-1] > window
        assert capacity <= sum(counts) / depth < capacity + depth
    assert pyramid(96, 64, 8, 6, 10) == [64] * 6  # too large a budget for a pyramid
    assert pyramid(50, 50, 8, 6, 20) == [50] * 6
    assert pyramid(200, 40, 8, 1, 20) == [40]
    assert min(pyramid(200, 12, 8, 2, 20)) == 9


# --- H2O -----------------------------------------------------------------------------------------


def test_h2o_without_decode_counts_nothing() -> None:
    query, kv = tensors(40)
    assert compressed(H2O(0.5, decode=False), query, kv)[0].attention_mass is None
    kept, _ = compressed(H2O(0.5), query, kv)
    stats = columns(query, kv.keys, H2O().text_stats(1)[0])
    assert torch.equal(kept.attention_mass, stats.sum.mean(1).gather(1, kept.order))


def test_h2o_with_heads_of_different_lengths() -> None:
    """Each head keeps its own size and its own last slots."""
    query, kv = tensors(72, seed=5)
    n, stage = 40, H2O(0.5)
    whole = kv.select(torch.arange(n))
    ragged = replace(whole, lengths=torch.tensor([40, 24]))
    stats = columns(query[:, :n], whole.keys, stage.text_stats(1)[0])
    step = prompt_step(n, 1)
    slots = FakeSlots(stage.compress(step, 0, ragged, stats), step, room=32)
    for t in range(n, 72):
        Answer(stage).step(slots, 0)
        slots.write(kv.keys[:, t], kv.values[:, t])
        slots.attend(query[:, t])
    assert slots.length.tolist() == [21, 13]
    for row, last in zip(slots.sorted("order"), (10, 6), strict=True):
        assert row[-last:].tolist() == list(range(72 - last, 72))


# --- StreamingLLM --------------------------------------------------------------------------------


def baked(query: Tensor, kv: KV, start: int = 0) -> tuple[Tensor, KV]:
    """The same under rotary ids that count up from ``start``."""
    ids = start + torch.arange(len(kv))
    turned = replace(
        kv, keys=rotate(kv.keys, ids.expand(len(kv.keys), -1)), position=ids + kv.order * 0
    )
    return rotate(query, ids.expand(len(query), -1)), turned


def test_streaming_closes_gaps_in_the_window() -> None:
    """Where earlier stages left gaps between ids, slot indices count."""
    query, kv = tensors(40)
    ids = torch.arange(40) * 3
    kv = replace(kv, position=ids.expand(2, -1))
    kept, _ = compressed(StreamingLLM(0.25), query, kv)
    assert kept.position[0].tolist() == list(range(108, 118))
    wanted = rotate(kv.keys[:, 34:], (torch.arange(112, 118) - ids[34:]).expand(2, -1))
    close(kept.keys[:, 4:], wanted, terms=2)


def test_streaming_in_half_precision_does_not_drift() -> None:
    """Sinks are rotated from float32 each time: many steps add one rounding, not many."""
    query, kv = baked(*tensors(40))
    half = replace(kv, keys=kv.keys.bfloat16(), values=kv.values.bfloat16())
    stage, part = StreamingLLM(0.25), None
    kept, step = compressed(stage, query, half)
    slots, part = FakeSlots(kept, step, room=1), Slide(stage)
    again = kept.keys[:, :4].clone()
    for _ in range(200):
        part.step(slots, 0)
        again = rotate(again, torch.ones(2, 4))
        slots.write(half.keys[:, -1], half.values[:, -1])
    # The last step evicted one slot for the new token: 200 tokens in all.
    exact = rotate(half.keys[:, :4].float(), torch.full((2, 4), 30 + 200))
    error = (slots.keys[:, :4].float() - exact).abs().max()
    assert error < 2 * (exact.bfloat16().float() - exact).abs().max()
    assert (again.float() - exact).abs().max() > 3 * error


def test_streaming_refuses_three_rotary_ids() -> None:
    query, kv = tensors(40)
    with pytest.raises(RecipeError, match=r"streamingllm: .* 3 rotary ids"):
        compressed(StreamingLLM(0.5), query, kv, ids=3)


def test_streaming_must_be_the_last_to_evict() -> None:
    query, kv = baked(*tensors(60))
    stage = StreamingLLM(0.5)
    kept, step = compressed(stage, query, kv)
    Slide(stage).step(FakeSlots(kept, step, room=1), 0)
    fewer = FakeSlots(kept.select(torch.arange(2, 30)), step, room=1)
    with pytest.raises(RecipeError, match="streamingllm must be the last"):
        Slide(stage).step(fewer, 0)


# --- QuickPrefill --------------------------------------------------------------------------------


def video_block(n: int = 30, text: tuple[int, ...] = (0, 1, 15)) -> tuple[Tensor, KV, Tensor]:
    """A block whose visual keys have norms that grow from slot to slot."""
    query, kv = tensors(n)
    visual = torch.ones(n, dtype=torch.bool)
    visual[list(text)] = False
    keys = torch.nn.functional.normalize(kv.keys, dim=-1) * torch.arange(1.0, n + 1)[:, None]
    return query, replace(kv, keys=keys, visual=visual.expand(2, -1)), visual


def test_quickprefill_keeps_text_and_small_keys() -> None:
    query, kv, visual = video_block()
    kept, _ = compressed(QuickPrefill(0.2), query, kv, visual=visual)
    assert kept.order.tolist() == [[0, 1, 2, 3, 4, 5, 6, 15]] * 2  # 5 of 27
    kept, _ = compressed(QuickPrefill(0.2, score="key-norm"), query, kv, visual=visual)
    assert kept.order.tolist() == [[0, 1, 15, 25, 26, 27, 28, 29]] * 2
    kept, _ = compressed(QuickPrefill(top_k=2), query, kv, visual=visual)
    assert kept.order.tolist() == [[0, 1, 2, 3, 15]] * 2


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 30])
def test_quickprefill_respects_the_limit_of_a_block(limit) -> None:
    """Visual slots are evicted first, then text."""
    _, kv, visual = video_block()
    step = prompt_step(30, 1, visual)
    step.limit = limit
    kept = QuickPrefill(0.2).compress(step, 0, kv, None)
    assert len(kept) == min(limit, 8)
    is_text = ~kept.visual[0]
    assert int(is_text.sum()) == min(3, limit)


def test_quickprefill_no_op_and_minimum() -> None:
    query, kv, visual = video_block()
    assert compressed(QuickPrefill(1.0), query, kv, visual=visual)[0] is kv
    assert compressed(QuickPrefill(top_k=40), query, kv, visual=visual)[0] is kv
    assert len(compressed(QuickPrefill(0.01), query, kv, visual=visual)[0]) == 4
    _, words = tensors(10)
    assert compressed(QuickPrefill(0.1), query, words)[0] is words


def test_quickprefill_needs_the_same_tokens_in_all_heads() -> None:
    query, kv, _ = video_block()
    index = torch.stack([torch.arange(20), torch.arange(20) + 5])
    with pytest.raises(RecipeError, match="quickprefill must come before"):
        compressed(QuickPrefill(), query, kv.select(index))
