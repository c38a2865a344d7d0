"""The KV cache: its contents and memory, and that free slots never reach an answer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.caches import Own, frozen, own_mask, started
from support.closeness import apart, close, network
from support.engine.batched import CountingPool, Together, joined_caches
from support.engine.driven import Driven
from support.engine.prompts import prefill, prepare, switched
from support.engine.storage import KVCache, RowGroup, RowSlots, idle_buffers, whole_buffers
from support.models import shared
from support.reference import Answer, Dense, full_kv
from support.tiny_models import build_llava, make_image
from vlmfast import VLM
from vlmfast.core.buffers import BufferPool, bucket
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage
from vlmfast.core.statistics import ColumnRequest
from vlmfast.kernels.quantize_kv import Segment, quantize

pytestmark = pytest.mark.cold

TOKENS = [5, 9, 11, 7, 8, 6, 10, 12, 30, 31, 32, 33]
BUFFERS = ("keys", "values", "order", "attention_mass", "bias")
HEADS = {"heads of their own": 4, "grouped queries": 2}


@pytest.fixture(scope="module", params=HEADS)
def vlm(request) -> VLM:
    return shared(build_llava, layers=4, kv_heads=HEADS[request.param])


@pytest.fixture(scope="module")
def grouped() -> VLM:
    return shared(build_llava, layers=4, kv_heads=2)


def sums(vlm: VLM, n: int) -> int:
    """Terms of a logit: a prompt of ``n`` tokens and the tokens fed after it."""
    return network(vlm.model, n + 2 * len(TOKENS))


def fed(
    vlm: VLM, decoder: RowGroup | Together | Driven, tokens: list[int], rows: int = 1
) -> Tensor:
    """Logits (rows, T, V) after each of ``tokens``, the same tokens for all rows."""
    with torch.no_grad(), switched(vlm.model):
        logits = [decoder.next(torch.full((rows, 1), token)) for token in tokens]
    return torch.stack(logits, 1)


def masked_logits(vlm: VLM, run: Driven, keep: list[Tensor], tokens: list[int]) -> Tensor:
    """A dense decoder over the whole prompt, of which each layer sees ``keep`` (H, N)."""
    tensors = run.inputs.tensors
    answer = Answer(Dense(vlm, tensors), full_kv(vlm, tensors))
    answer.seen = list(keep)
    return answer.feed(tokens)


# --- lengths per layer and head ------------------------------------------------------------------


def test_layers_and_heads_of_different_lengths(vlm):
    run = started(vlm, Own())
    n = run.inputs.tensors["input_ids"].shape[1]
    heads = vlm.model.config.text_config.num_key_value_heads
    keep = [own_mask(layer, heads, n) for layer in range(vlm.adapter.depth)]
    counts = torch.stack([mask.sum(1) for mask in keep])
    assert len(set(counts.flatten().tolist())) > 4  # they do differ
    assert torch.equal(run.cache.length[:, 0], counts)
    assert run.cache.lengths() == counts.amax(1).tolist() == run.stats.kv_tokens_per_layer

    got = fed(vlm, run, TOKENS)[0]
    close(got, masked_logits(vlm, run, keep, TOKENS), terms=sums(vlm, n))
    # Control: one more slot in one head of one layer gives another answer.
    other = [mask.clone() for mask in keep]
    other[1][0, (~other[1][0]).nonzero()[3]] = True
    apart(got, masked_logits(vlm, run, other, TOKENS), terms=sums(vlm, n))

    # The logical length is that of the full text, the physical length that of the stored slots.
    assert run.cache.logical == [n + len(TOKENS)] == run.cache.seen.tolist()
    assert run.cache.layers[0].get_seq_length() == n + len(TOKENS)
    assert run.position.item() == n + len(TOKENS)
    assert torch.equal(run.cache.length[:, 0], counts + len(TOKENS))
    assert run.cache.lengths() == (counts.amax(1) + len(TOKENS)).tolist()


def test_statistics_follow_slots_that_an_earlier_stage_moved(grouped):
    """Also where one head keeps all its slots, and others do not."""
    seen = {}

    @dataclass(frozen=True)
    class Look(CacheStage):
        name: ClassVar[str] = "test-look"

        def text_stats(self, depth):
            want = ("sum", "sumsq", "max", "entropy", "count")
            return {1: ColumnRequest("all", threshold=0.3, want=want)}

        def compress(self, step, layer, kv, stats):
            seen[layer] = kv, stats
            return kv

    started(grouped, Look())
    full = seen[1][1]
    for whole in (False, True):
        started(grouped, (Own(whole), Look()))
        assert seen[0][1] is None  # only layer 1 requested statistics
        kv, stats = seen[1]
        assert not torch.equal(kv.lengths[:1], kv.lengths[1:])
        for head in range(2):
            at = kv.order[head, : kv.lengths[head]]
            for name in ("sum", "sumsq", "max", "entropy", "count"):
                mine, its = getattr(stats, name)[head], getattr(full, name)[head]
                assert torch.equal(mine[:, : len(at)], its[:, at])
            assert torch.equal(stats.nnz[head, : len(at)], full.nnz[head, at])
        assert torch.equal(stats.rows, full.rows)


# --- KV of a cache stage -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(heads=st.integers(1, 4), n=st.integers(1, 12), seed=st.integers(0, 99), extras=st.booleans())
def test_choosing_slots_by_head(heads, n, seed, extras):
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(50, generator=generator)[:n].sort().values] * heads)
    kv = KV(
        keys=torch.randn(heads, n, 4, generator=generator),
        values=torch.randn(heads, n, 4, generator=generator),
        order=order,
        position=order * 2,
        visual=torch.rand(heads, n, generator=generator) < 0.5,
        lengths=torch.full((heads,), n),
        bias=torch.randn(heads, n, generator=generator) if extras else None,
        attention_mass=torch.rand(heads, n, generator=generator) if extras else None,
    )
    keep = torch.rand(heads, n, generator=generator) < 0.5
    got = kv.select_mask(keep)
    assert got.lengths.tolist() == keep.sum(1).tolist()
    assert len(got) == int(keep.sum(1).max())
    assert got.valid.sum(1).tolist() == got.lengths.tolist()
    for name in ("keys", "values", "order", "position", "visual", "bias", "attention_mass"):
        of, new = getattr(kv, name), getattr(got, name)
        assert (of is None) == (new is None)
        for head in range(heads) if of is not None else ():
            assert torch.equal(new[head, : got.lengths[head]], of[head, keep[head]])
    assert torch.equal(kv.select_mask(torch.ones_like(keep)).keys, kv.keys)


# --- by hand -------------------------------------------------------------------------------------


def contents(cache: KVCache, layer: int, row: int, name: str = "keys") -> list[Tensor]:
    """The tail slots of each head of a row."""
    of, lengths = getattr(cache.layers[layer], name)[row], cache.length[layer, row]
    return [head[:n].clone() for head, n in zip(of, lengths.tolist(), strict=True)]


def write(cache: KVCache, tokens: int, seed: int = 1) -> list[Tensor]:
    """Noise as the next tokens of every row: keys (B, H, T, D) by layer; values are twice that."""
    generator, new = torch.Generator().manual_seed(seed), []
    for layer in cache.layers:
        b, h, _, d = layer.keys.shape
        new.append(torch.randn(b, h, tokens, d, generator=generator))
        layer.update(new[-1], 2 * new[-1])
    return new


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 20))
def test_bucket_is_little_larger_than_the_request(slots):
    size = bucket(slots)
    assert size >= slots
    assert size - slots < 64 or size < slots * 9 / 8
    assert bucket(size) == size


def test_number_of_buckets_is_small():
    assert len({bucket(n) for n in range(1, 1 << 14)}) < 60


def test_freezing_moves_to_buffers_with_free_slots():
    cache, stored = frozen(
        [[5, 3], [4, 4]], logical=9, max_new_tokens=70, track=True, attention_mass=True, bias=True
    )
    for at, kv in enumerate(stored):
        layer = cache.layers[at]
        assert layer.keys.shape == (1, 2, bucket(max(kv.lengths.tolist()) + 70), 8)
        for name in ("keys", "values", "order", "bias"):
            for head, got in enumerate(contents(cache, at, 0, name)):
                assert torch.equal(got, getattr(kv, name)[head, : kv.lengths[head]])
        assert layer.attention_mass.shape == layer.order.shape and not layer.attention_mass.any()
        assert layer.max_lengths == [max(kv.lengths.tolist())]
    assert [layer.even for layer in cache.layers] == [False, True]
    assert cache.logical == [9] and cache.lengths() == [5, 4]
    # Counts are views of the cache's own.
    cache.advance(2)
    assert cache.layers[0].length.tolist() == [[7, 5]]
    assert cache.layers[0].seen.tolist() == [11]


@pytest.mark.parametrize("tokens", [2, 256, 257, 300, 1100])
def test_new_tokens_follow_each_heads_last_slot(tokens):
    """In free slots, or in larger buffers."""
    pool = BufferPool()
    cache, stored = frozen(
        [[60, 31], [50, 50]],
        pool=pool,
        max_new_tokens=1,
        track=True,
        attention_mass=True,
        bias=True,
    )
    for layer in cache.layers:
        layer.attention_mass.copy_(torch.rand_like(layer.attention_mass))
        for name in ("attention_mass", "bias"):  # stale values of an earlier use
            getattr(layer, name)[:, :, max(layer.max_lengths) :] = 7.0
    before = [{name: contents(cache, at, 0, name) for name in BUFFERS} for at in range(2)]
    new = write(cache, tokens)
    assert cache.lengths() == [60, 50]  # not counted yet
    cache.advance(tokens)
    assert (pool.idle > 0) == (tokens > 2)  # the small buffers were returned
    for at, kv in enumerate(stored):
        added = {
            "keys": new[at][0],
            "values": 2 * new[at][0],
            "order": torch.arange(60, 60 + tokens).expand(2, -1),
            "attention_mass": torch.zeros(2, tokens),
            "bias": torch.zeros(2, tokens),
        }
        assert set(added) == set(BUFFERS)
        for name, more in added.items():
            for head, n in enumerate(kv.lengths.tolist()):
                got = contents(cache, at, 0, name)[head]
                assert torch.equal(got[:n], before[at][name][head])
                assert torch.equal(got[n:].to(more.dtype), more[head]), name


def paged(keys: Tensor, values: Tensor, order: Tensor, bits: int = 8, group: int = 4) -> Segment:
    lengths = torch.full((len(keys),), keys.shape[1])
    return quantize(keys, values, order, lengths, bits, key_group=group)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with a bias"])
def test_pages_of_one_row(bias):
    parts = [frozen([[n]], seed=n, track=True, bias=bias, dim=16) for n in (12, 20, 9)]
    cache = joined_caches([cache for cache, _ in parts])
    layer = cache.layers[0]
    before = {
        name: [contents(cache, 0, row, name)[0] for row in range(3)]
        for name in ("keys", "values", "order", *(["bias"] if bias else []))
    }
    slots = RowSlots(cache, 0, 1, None, {}, None)
    for start, count in ((0, 8), (8, 4)):
        order = slots.order[:, :count]
        assert order[0].tolist() == list(range(start, start + count))
        slots.quantize(count, lambda k, v, order=order: paged(k, v, order))
        assert cache.lengths(1) == [20]  # no slot of the row was dropped
    (segment,) = layer.segments
    assert layer.max_lengths == [12, 8, 9] and cache.length[0].tolist() == [[12], [8], [9]]
    assert layer.stored == [[0, 12, 0]] and segment.lengths.tolist() == [[0], [12], [0]]
    assert segment.order[1, 0, :12].tolist() == list(range(12))
    keys, values = segment.dequantize(torch.float32)
    step = segment.key_step.max()
    assert (keys[1, 0, :12] - before["keys"][1][:12]).abs().max() < step
    assert (values[1, 0, :12] - before["values"][1][:12]).abs().max() < step
    if bias:
        assert torch.equal(segment.bias[1, 0, :12], before["bias"][1][:12])
    for name, of in before.items():
        assert torch.equal(contents(cache, 0, 1, name)[0], of[1][12:])
        for row in (0, 2):
            assert torch.equal(contents(cache, 0, row, name)[0], of[row])
    # The rows' first pages have different lengths; another kind has its own segment.
    slots = RowSlots(cache, 0, 0, None, {}, None)
    slots.quantize(4, lambda k, v: paged(k, v, slots.order[:, :4]))
    slots.quantize(2, lambda k, v: paged(k, v, slots.order[:, :2], bits=4))
    assert layer.stored == [[4, 12, 0], [2, 0, 0]]
    assert [segment.lengths[:, 0].tolist() for segment in layer.segments] == layer.stored
    assert layer.segments[1].order[0, 0, :2].tolist() == [4, 5]
    assert [cache.lengths(row) for row in range(3)] == [[12], [20], [9]]
    # A row that leaves takes its kinds of segments with it.
    cache.leave(0)
    assert layer.stored == [[0, 12]] and len(layer.segments) == 1


def test_per_tensor_pages_get_separate_segments():
    cache, stored = frozen([[12]], track=True)
    slots = RowSlots(cache, 0, 0, None, {}, None)
    for _ in range(2):
        slots.quantize(4, lambda k, v: paged(k, v, slots.order[:, :4], group=0))
    layer = cache.layers[0]
    assert [segment.order[0, 0, :4].tolist() for segment in layer.segments] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert layer.stored == [[4], [4]] and cache.lengths() == [12]
    keys, _ = layer.segments[1].dequantize(torch.float32)
    step = layer.segments[1].key_step.max()
    assert (keys[0, 0, :4] - stored[0].keys[0, 4:8]).abs().max() < step


# --- crop ----------------------------------------------------------------------------------------


def test_cropping_stops_at_tokens_that_were_dropped(grouped):
    """Before the language model: every id of the text after the image has a slot."""
    run = started(grouped, "hired:0.4")
    visual = grouped.adapter.visual(run.inputs.tensors["input_ids"][0]).nonzero()
    after = run.prompt.full_length - int(visual[-1]) - 1
    fed(grouped, run, TOKENS[:3])
    with pytest.raises(ValueError, match=f"{after + 4} tokens reach into the compressed part"):
        run.cache.crop(after + 4)
    run.cache.crop(after + 3)
    assert run.cache.base == [int(visual[-1]) + 1] == run.cache.logical
    with pytest.raises(ValueError, match="1 tokens reach"):
        run.cache.crop(1)


@pytest.mark.parametrize(
    "recipe", [Own(), "snapkv:keep=0.8,window=4", "pyramiddrop", "lookm:keep=0.8"]
)
def test_cropping_into_compressed_slots_is_refused(grouped, recipe):
    run = started(grouped, recipe)
    fed(grouped, run, TOKENS[:3])
    lengths, stored = run.cache.length.clone(), run.cache.held_bytes()
    with pytest.raises(ValueError, match="4 tokens reach into the compressed part"):
        run.cache.crop(4)
    assert torch.equal(run.cache.length, lengths) and run.cache.held_bytes() == stored
    run.cache.crop(3)
    with pytest.raises(ValueError, match="1 tokens reach"):
        run.cache.crop(1)
    # In a batch each row has its own limit; that of all rows is the latest one.
    rows = [started(grouped), started(grouped, recipe)]
    batch = Together([row.decoder for row in rows])
    (cache, row), (plain, other) = batch.cache_of(1), batch.cache_of(0)
    for chosen in (None, row):
        with pytest.raises(ValueError, match="1 tokens reach"):
            cache.crop(1, chosen)
    before = cache.logical[row]
    plain.crop(1, other)
    assert plain.logical[other] == rows[0].prompt.full_length - 1
    assert cache.logical[row] == before


@pytest.mark.parametrize("recipe", ["kivi:residual=8,group=4", "zipcache:page=8"])
def test_cropping_under_pages_stops_at_the_last_one(grouped, recipe):
    run, other = started(grouped, recipe), started(grouped, recipe)
    fed(grouped, run, TOKENS[:3])
    run.cache.crop(2)
    run.position.sub_(2)
    assert torch.equal(fed(grouped, run, TOKENS[1:3]), fed(grouped, other, TOKENS[:3])[:, 1:])
    before = list(run.cache.base)
    for token in 4 * TOKENS:
        fed(grouped, run, [token])  # first the stage, then the token
        if run.cache.base != before:
            break
    with pytest.raises(ValueError, match="2 tokens reach into the compressed part"):
        run.cache.crop(2)
    run.cache.crop(1)


def test_cropping_under_attention_masses_is_refused(grouped):
    run = started(grouped, "h2o:0.6")
    fed(grouped, run, TOKENS[:3])
    with pytest.raises(ValueError, match="with attention masses cannot be cropped"):
        run.cache.crop(1)


def test_cropping_beyond_the_length_is_refused(grouped):
    run = started(grouped)
    with pytest.raises(ValueError, match="reach into"):
        run.cache.crop(run.prompt.full_length + 1)
    run.cache.clone().crop(run.prompt.full_length)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "recipe", [(), Own(), "h2o:0.6", "kivi:residual=8,group=4", "zipcache:page=8"]
)
def test_clone_shares_no_mutable_state(grouped, recipe):
    run = started(grouped, recipe)
    fed(grouped, run, TOKENS[:5])
    row = run.decoder.rows[0]
    cache = run.cache.clone()
    assert cache.held_bytes() == run.cache.held_bytes()
    assert cache.lengths() == run.cache.lengths()
    for one, another in zip(run.cache.layers, cache.layers, strict=True):
        for name in BUFFERS:
            of, twin = getattr(one, name), getattr(another, name)
            assert (of is None) == (twin is None)
            if of is not None:
                assert torch.equal(of, twin)
                assert of.untyped_storage().data_ptr() != twin.untyped_storage().data_ptr()
    other = copy.copy(row)
    other.prompt_slots = row.prompt_slots.clone()
    twin = RowGroup(grouped.adapter, cache, run.position.clone(), [other])
    # Either one continues as if it were alone, whatever the other does.
    mine = fed(grouped, run, TOKENS[::-1])
    its = fed(grouped, twin, TOKENS)
    alone = started(grouped, recipe)
    fed(grouped, alone, TOKENS[:5])
    assert torch.equal(its, fed(grouped, alone, TOKENS))
    apart(mine, its, terms=sums(grouped, run.prompt.full_length))
    cache.release()
    fed(grouped, run, TOKENS[:1])


# --- bytes ---------------------------------------------------------------------------------------


def counted(cache: KVCache) -> int:
    """Bytes of a cache's contents, slot by slot."""
    total = 0
    for layer in cache.layers:
        for row in range(cache.rows):
            for name in BUFFERS:
                if getattr(layer, name) is not None:
                    of = getattr(layer, name)[row]
                    for head, n in enumerate(layer.length[row].tolist()):
                        total += of[head, :n].nbytes
            for segment in layer.segments:
                for head, n in enumerate(segment.lengths[row].tolist()):
                    for name in ("key_codes", "value_codes", "value_step", "value_min"):
                        total += getattr(segment, name)[row, head, :n].nbytes
                    groups = range(0, n, segment.group) if segment.group else range(min(n, 1))
                    for name in ("key_step", "key_min"):
                        total += getattr(segment, name)[row, head, : len(groups)].nbytes
                    if segment.value_scale is not None and n:
                        total += segment.value_scale[row, head].nbytes
                    if segment.bias is not None:
                        total += segment.bias[row, head, :n].nbytes
    return total


COSTS = {
    "none": (),
    "uneven": Own(),
    "evicted": "snapkv:keep=0.8,window=4",
    "tracked": "h2o:0.6",
    "biased": "lookm:keep=0.8,merge=avg,proportional_attention=true",
    "2 bits": "kivi:residual=8,group=4",
    "4 and 2 bits": "zipcache:page=8",
    "dropped in layers": "pyramiddrop",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", COSTS)
def test_bytes_equal_those_of_the_contents(grouped, case):
    run = started(grouped, COSTS[case])
    assert run.cache.held_bytes() == counted(run.cache) == run.stats.kv_bytes
    full = run.prompt.full_length * 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dim, float
    assert (
        run.stats.kv_bytes_full
        == full
        == grouped.adapter.bytes_per_token() * len(run.inputs.tensors["input_ids"][0])
    )
    assert (run.stats.kv_bytes == full) == (case == "none")
    fed(grouped, run, TOKENS)
    assert run.cache.held_bytes() == counted(run.cache)
    rows = [started(grouped, recipe, (i,)).decoder for i, recipe in enumerate(COSTS.values())]
    batch = Together(rows)
    fed(grouped, batch, TOKENS, len(rows))
    for cache in batch.caches:
        assert cache.held_bytes() == counted(cache)


def test_memory_falls_layer_by_layer(grouped):
    """During the prefill, at most one layer is uncompressed."""

    def stored(recipe) -> list[int]:
        run, sizes = Driven.of(grouped, recipe, [make_image(seed=seed) for seed in range(12)]), []
        cache = KVCache(grouped.adapter.depth)
        hooks = [
            layer.register_forward_hook(lambda *args: sizes.append(cache.held_bytes()))
            for layer in grouped.adapter.decoder.layers
        ]
        try:
            with torch.no_grad(), switched(grouped.model):
                given = run.recipe, run.stats, run.trace
                prompt = prepare(grouped.adapter, run.inputs, *given)
                prefill(grouped.adapter, prompt, run.recipe, cache, run.stats, run.trace)
        finally:
            for hook in hooks:
                hook.remove()
        return sizes

    full, small = stored(()), stored("lookm:0.3")
    one = full[0]
    assert full == [one, 2 * one, 3 * one, 4 * one]
    for layer, size in enumerate(small):
        assert 0.25 * one * (layer + 1) < size <= 0.3 * one * (layer + 1)


# --- free slots ----------------------------------------------------------------------------------


def poison(cache: KVCache) -> None:
    """Writes NaN to every free slot."""
    for layer in cache.layers:
        slots = torch.arange(layer.keys.shape[2])
        free = slots >= layer.length[..., None]
        layer.keys[free], layer.values[free] = torch.nan, torch.nan


@pytest.mark.parametrize(
    "recipe", [(), "snapkv:keep=0.8,window=4", "h2o:0.6", "kivi:residual=8,group=4", "zipcache"]
)
def test_single_row_never_reads_free_slots(grouped, recipe):
    run = started(grouped, recipe)
    poison(run.cache)
    assert torch.equal(fed(grouped, run, TOKENS), fed(grouped, started(grouped, recipe), TOKENS))


@pytest.fixture
def pool(grouped, monkeypatch) -> CountingPool:
    pool = CountingPool()
    monkeypatch.setattr(grouped.adapter, "pool", pool)
    return pool


UNEVEN = ((), Own(), "snapkv:keep=0.8,window=4")


def uneven_rows(vlm: VLM) -> RowGroup:
    """Rows that use masked attention."""
    rows = [started(vlm, r, (i,)).decoder for i, r in enumerate(UNEVEN)]
    return Together(rows).as_group()


def test_free_slots_of_a_batch_are_finite(grouped, pool):
    """Masks alone do not help here, so a buffer that returns from another request is zeroed."""
    decoder = uneven_rows(grouped)
    expected = fed(grouped, decoder, TOKENS, 3)
    decoder = uneven_rows(grouped)
    poison(decoder.cache)
    assert fed(grouped, decoder, TOKENS, 3).isnan().any()  # hence the zeroing

    for _ in range(2):
        decoder.cache.release()
        for buffer in idle_buffers(pool):
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)
        decoder, new = uneven_rows(grouped), pool.new
        for layer in decoder.cache.layers:
            slots = (
                torch.arange(layer.keys.shape[2]) >= torch.tensor(layer.max_lengths)[:, None, None]
            )
            assert not layer.keys[slots.expand(layer.keys.shape[:3])].any()
            assert not layer.values[slots.expand(layer.keys.shape[:3])].any()
        assert torch.equal(fed(grouped, decoder, TOKENS, 3), expected)
        assert pool.new == new


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["h2o:0.6", "streamingllm:0.6", "kivi:residual=8,group=4"])
def test_freed_slots_stay_finite(grouped, pool, recipe):
    """Evicting, paging, cropping and growing leave finite values, which masks can hide."""
    recipes = (recipe, (), recipe, recipe)
    batch = Together([started(grouped, r, (i,)).decoder for i, r in enumerate(recipes)])
    for tokens in (TOKENS * 25)[:300:10]:
        batch.reserve(10)
        fed(grouped, batch, [tokens] * 10, 4)
    batch.only([1, 2, 3])
    fed(grouped, batch, TOKENS, 3)
    for layer in (layer for cache in batch.caches for layer in cache.layers):
        for of in whole_buffers(layer, BUFFERS).values():
            assert of is None or bool(of.isfinite().all())


# --- buffers -------------------------------------------------------------------------------------


def test_reused_buffers_are_zeroed():
    pool, device = BufferPool(limit=1000), torch.device("cpu")
    one = pool.take((2, 5), torch.float32, device)
    assert not one.any()
    one.fill_(torch.nan)
    pool.give(one)
    assert pool.idle == 40
    assert pool.take((2, 5), torch.float64, device) is not one
    assert pool.take((5, 2), torch.float32, device) is not one
    assert pool.idle == 40
    again = pool.take((2, 5), torch.float32, device)
    assert again is one and not again.any() and pool.idle == 0
    assert pool.take((2, 5), torch.float32, device) is not one  # it is in use
    pool.give(None)


def test_pool_keeps_at_most_its_limit():
    pool, device = BufferPool(limit=1000), torch.device("cpu")
    buffers = [pool.take((100,), torch.float32, device) for _ in range(4)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.idle == 800
    again = [pool.take((100,), torch.float32, device) for _ in range(3)]
    assert {id(b) for b in again[:2]} <= {id(b) for b in buffers} and pool.idle == 0
    nothing = BufferPool(0)
    nothing.give(buffers[3])
    assert nothing.idle == 0
    assert nothing.take((100,), torch.float32, device) is not buffers[3]


def test_pool_frees_shapes_that_were_not_used_for_long():
    """What is idle never exceeds what was in use at one time, however many shapes there were."""
    pool, nbytes = BufferPool(), 1 << 26

    def take(rows: int) -> torch.Tensor:
        return pool.take((rows, nbytes // 4 // rows), torch.float32, torch.device("cpu"))

    for rows in (1, 2, 4, 8, 16):
        buffer = take(rows)
        pool.give(buffer)
    assert pool.idle == nbytes
    assert take(16) is buffer
    others = [take(1), take(1)]
    for used in (*others, buffer):
        pool.give(used)
    assert pool.idle == 3 * nbytes  # control: all of them were in use
    pool.give(take(2))
    assert pool.idle == 3 * nbytes
    assert take(16) is buffer
    assert take(1) is others[1]
    assert take(1) is not others[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe", [None, "snapkv:keep=0.8,window=4", "h2o:0.6", "kivi:residual=8,group=4"]
)
def test_second_request_of_the_same_size_allocates_nothing(grouped, pool, recipe):
    first = grouped.ask("what ?", make_image(seed=0), recipe=recipe, max_new_tokens=20)
    new = pool.new
    assert new > 0 and pool.out == 0 and pool.idle > 0
    second = grouped.ask("what ?", make_image(seed=0), recipe=recipe, max_new_tokens=20)
    assert pool.new == new and pool.out == 0
    assert second.token_ids == first.token_ids
    grouped.ask("what ?", make_image(seed=0), recipe=recipe, max_new_tokens=100)
    assert pool.new > new  # control: another size allocates
