"""Rows that decode together: each gives what it gives alone, whatever joins and leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import tiny_families
from support.caches import Own, frozen, started
from support.closeness import close, network
from support.engine.batched import (
    CountingPool,
    buffers_of,
    idle_caches,
    masks,
    place_of,
    whole_buffers,
)
from support.engine.cpu_graph import captured_by_stand_in
from support.engine.prompts import switched
from support.engine.storage import Batch, KVCache, RowGroup, RowSlots
from support.tiny_models import build_llava, make_image
from vlmfast import VLM
from vlmfast.core.buffers import BufferPool, capacity_class
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.kernels.quantize_kv import Segment, quantize

RECIPES = {
    "plain": (),
    "uneven": Own(),
    "evicting": "h2o:0.6",
    "streaming": "streamingllm:0.6",
    "paged": "kivi:bits=4,group=4,residual=8",
    "paged in two widths": "zipcache:page=8",
    "biased": "lookm:keep=0.8,merge=avg,proportional_attention=true",
    "renumbered": "pyramiddrop:layers=1,positions=compact",
}
IMAGES = ((0,), (1, 2), (3,))


@dataclass(eq=False)
class Row:
    """What a group must know about a sequence."""

    stages: list[Any]
    notes: dict[str, Any]
    prompt_slots: Tensor
    steps: int = 0
    aux_layers: tuple[int, ...] = ()


@dataclass
class Model:
    """A model, and a prompt of each kind and length that was prefilled once."""

    vlm: VLM = field(repr=False)
    recipes: dict[str, Any] = field(default_factory=lambda: RECIPES)
    templates: dict[tuple[str, int], RowGroup] = field(default_factory=dict, repr=False)

    def row(self, kind: str, length: int, pool: BufferPool) -> RowGroup:
        """A group of one row with buffers of ``pool``."""
        if (kind, length) not in self.templates:
            run = started(self.vlm, self.recipes[kind], IMAGES[length])
            self.templates[kind, length] = run.decoder
        template = self.templates[kind, length]
        (of,) = template.rows
        template.cache.pool = pool
        cache = template.cache.clone()
        notes, slots = copy.deepcopy(of.notes), of.prompt_slots.clone()
        row = Row(list(of.stages), notes, slots, of.steps)
        return RowGroup(self.vlm.adapter, cache, cache.position, [row])


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    """Twice the same: rows of one are decoded together, rows of the other alone."""
    first, second = (
        Model(VLM(*build_llava(layers=2, kv_heads=2, dtype=torch.float64))) for _ in range(2)
    )
    return first, second


@pytest.fixture(scope="module")
def windowed() -> tuple[Model, Model]:
    """The same for a model with layers that attend within a window, shorter than the prompts."""
    kinds = ("plain", "uneven", "evicting", "paged")
    recipes = {kind: RECIPES[kind] for kind in kinds}
    first, second = (
        Model(VLM(model.double(), processor), recipes)
        for model, processor in (tiny_families.build_gemma3(window=32) for _ in range(2))
    )
    return first, second


class Schedule:
    """Rows that join, leave and decode; after each step they are compared with rows alone."""

    def __init__(self, models: tuple[Model, Model], size: int = 1) -> None:
        self.together, self.alone = models
        self.pool, self.other = CountingPool(), CountingPool()
        self.batch = Batch(size)
        self.singles: list[RowGroup] = []
        self.seed = 0
        self.terms = network(self.together.vlm.model, 400)

    def run(self, steps: list[tuple]) -> None:
        with torch.no_grad(), switched(self.together.vlm.model), switched(self.alone.vlm.model):
            for name, *numbers in steps:
                getattr(self, name)(*numbers)
                self.check()
            while self.singles:
                self.leave(0)
        assert not self.batch.groups and not self.batch.rows
        # Buffers with captured steps wait for the next group; all others are back.
        idle = idle_caches(self.together.vlm)
        assert self.pool.out == sum(x.nbytes for cache in idle for x in buffers_of(cache))
        assert self.other.out == 0

    def check(self) -> None:
        """What is stored is what is stored alone."""
        assert len(self.batch.rows) == len(self.singles)
        for number, single in enumerate(self.singles):
            group, row = place_of(self.batch, self.batch.rows[number])
            cache, own = group.cache, single.cache
            assert torch.equal(cache.length[:, row], own.length[:, 0])
            assert cache.logical[row] == own.logical[0] == int(cache.seen[row])
            assert cache.lengths(row) == own.lengths()
            assert torch.equal(group.position[..., row, :], single.position[..., 0, :])
        held = sum(group.cache.held_bytes() for group in self.batch.groups)
        assert held == sum(single.cache.held_bytes() for single in self.singles)

    def join(self, kind: int, length: int) -> None:
        name = list(self.together.recipes)[kind % len(self.together.recipes)]
        length %= len(IMAGES)
        self.batch.join(self.together.row(name, length, self.pool))
        self.singles.append(self.alone.row(name, length, self.other))

    def leave(self, number: int) -> None:
        if self.singles:
            number %= len(self.singles)
            self.batch.leave(self.batch.rows[number])
            self.singles.pop(number).release()

    def take(self, number: int) -> None:
        """A row becomes a group of its own, takes a step and joins again."""
        if not self.singles:
            return
        number %= len(self.singles)
        single = self.singles.pop(number)
        taken = self.batch.take(self.batch.rows[number])
        assert len(taken.rows) == 1 and all(taken is not group for group in self.batch.groups)
        token = torch.tensor([[7]])
        close(taken.next(token), single.next(token), torch.float32, self.terms)
        self.batch.join(taken)
        self.singles.append(single)

    def poison(self) -> None:
        """Rows that are not in use hold anything."""
        for group in self.batch.groups:
            for buffer in buffers_of(group.cache):
                buffer[group.cache.rows :] = torch.nan if buffer.is_floating_point() else 7

    def feed(self, count: int) -> None:
        for _ in range(count if self.singles else 0):
            self.seed += 1
            tokens = torch.arange(len(self.singles))[:, None] % 5 + 5 + self.seed % 40
            self.batch.reserve(1)
            got = self.batch.next(tokens)
            for row, single in enumerate(self.singles):
                self.same(got[row], single.next(tokens[row : row + 1])[0])

    def draft(self, shape: int) -> None:
        """Trees of different sizes, of which each row accepts a path."""
        if not self.singles:
            return
        self.batch.reserve(8)
        self.batch.run_decode_stages()
        trees, paths = [], []
        for row, single in enumerate(self.singles):
            single.run_decode_stages()
            spare = self.batch.spare(row)
            assert spare == single.spare(0)
            wide = Tree.of_paths(5 + row, [[8, 9], [10 + row, 11, 12]])
            tree = wide if spare >= 3 and (shape + row) % 3 else Tree.chain([5 + row])
            accepted = [[0], [0, 1, 2], [0, 3, 4, 5], [0, 3]][(shape + row) % 4]
            trees.append(tree)
            paths.append(accepted if len(tree) > 1 else [0])
        output = self.batch.verify(trees)
        for row, single in enumerate(self.singles):
            own = single.verify([trees[row]])
            self.same(output.logits[row, : len(trees[row])], own.logits[0])
            single.accept([paths[row]])
        self.batch.accept(paths)

    def same(self, got: Tensor, expected: Tensor) -> None:
        # Norms and rotary tables are computed in float32.
        close(got, expected, torch.float32, self.terms)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@contextmanager
def capturing(vlm: VLM) -> Iterator[None]:
    """Steps are captured by the stand-in, and masks mark the filled slots, as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vlm.adapter, "decoding", "graph")
        patch.setitem(vlm.adapter.kept, "graphs", None)
        captured_by_stand_in(vlm, patch)
        yield


NUMBER = st.integers(0, 23)
STEPS = st.one_of(
    st.tuples(st.just("join"), NUMBER, NUMBER),
    st.tuples(st.just("join"), st.sampled_from([0, 4]), NUMBER),  # so that some share a group
    st.tuples(st.just("leave"), NUMBER),
    st.tuples(st.just("take"), NUMBER),
    st.tuples(st.just("poison")),
    st.tuples(st.just("feed"), st.integers(1, 9)),
    st.tuples(st.just("draft"), NUMBER),
)
BEGIN = [("join", 0, 0), ("join", 0, 1), ("join", 4, 0), ("feed", 2)]


def explore(examples: int, schedule: Callable[..., None], **more: Any) -> None:
    """Run random schedules."""
    steps = st.lists(STEPS, min_size=4, max_size=10)
    settings(max_examples=examples, deadline=None)(given(steps=steps, **more)(schedule))()


def numbers(few: int, many: int) -> Any:
    """Parametrize by the number of schedules."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


@numbers(12, 80)
def test_rows_decode_as_if_alone(models, examples) -> None:
    def schedule(steps: list[tuple]) -> None:
        Schedule(models).run(BEGIN + steps)

    explore(examples, schedule)


@numbers(5, 30)
def test_rows_within_a_window_decode_as_if_alone(windowed, examples) -> None:
    def schedule(steps: list[tuple]) -> None:
        Schedule(windowed).run(BEGIN + steps)

    explore(examples, schedule)


@numbers(3, 20)
def test_captured_rows_within_a_window_decode_as_if_alone(windowed, examples) -> None:
    def schedule(steps: list[tuple]) -> None:
        with capturing(windowed[0].vlm):
            Schedule(windowed, 4).run(BEGIN + steps)

    explore(examples, schedule)


@numbers(6, 50)
def test_captured_rows_decode_as_if_alone(models, examples) -> None:
    """Captured steps run on a rounded number of rows, and on idle buffers of ended groups."""

    def schedule(steps: list[tuple], size: int) -> None:
        with capturing(models[0].vlm):
            Schedule(models, size).run(BEGIN + steps)

    explore(examples, schedule, size=st.sampled_from([1, 4]))


# --- what is written -----------------------------------------------------------------------------


def tensors(group: RowGroup) -> dict[Any, Tensor]:
    """All buffers of a group by name, with the rows first."""
    axes = {"length": 1, "position": -2, "shifts": 1}
    return {key: x.movedim(axes.get(key[0], 0), 0) for key, x in group.cache.state().items()}


def of_kind(model: Model, kind: str, lengths: list[int]) -> RowGroup:
    pool = BufferPool()
    group, *others = [model.row(kind, length, pool) for length in lengths]
    for other in others:
        assert group.fits(other)
        group.join(other)
    return group


@pytest.mark.parametrize("kind", RECIPES)
def test_a_join_writes_one_row(models, kind) -> None:
    group = of_kind(models[0], kind, [0, 1, 2])
    before = {key: (x.data_ptr(), x.clone()) for key, x in tensors(group).items()}
    assert group.cache.size == 4
    group.join(models[0].row(kind, 1, BufferPool()))
    after = tensors(group)
    assert after.keys() == before.keys()
    for key, x in after.items():
        address, old = before[key]
        assert x.data_ptr() == address and torch.equal(x[:3], old[:3])
    assert any(not torch.equal(x[3], before[key][1][3]) for key, x in after.items())


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("row", [0, 1, 3])
def test_a_leave_moves_at_most_one_row(models, kind, row) -> None:
    group = of_kind(models[0], kind, [0, 1, 2, 1])
    rows = list(group.rows)
    before = {key: (x.data_ptr(), x.clone()) for key, x in tensors(group).items()}
    group.leave(row)
    rows[row] = rows[-1]
    assert group.rows == rows[:3]
    for key, x in tensors(group).items():
        address, old = before[key]
        expected = old[:3].clone()
        if row < 3:
            expected[row] = old[3]
        assert x.data_ptr() == address and torch.equal(x[:3], expected)


def test_the_only_row_is_taken_without_a_copy(models) -> None:
    group = models[0].row("plain", 0, BufferPool())
    address = group.cache.layers[0].keys.data_ptr()
    assert group.take(0) is group and group.cache.layers[0].keys.data_ptr() == address
    # A row that shares its buffers is copied.
    group = of_kind(models[0], "plain", [0, 1])
    row, keys = group.rows[1], group.cache.layers[0].keys[1].clone()
    taken = group.take(1)
    assert taken.rows == [row] and len(group.rows) == 1 and not taken.cache.shared
    assert torch.equal(taken.cache.layers[0].keys[0], keys)


def quantized(slots: int, group: int, *, bias: bool, seed: int = 0) -> Segment:
    """Two heads of ``slots`` slots in 4 bits."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, slots, 16, generator=generator)
    order = torch.arange(slots).expand(2, -1)
    weights = torch.rand(2, slots, generator=generator) if bias else None
    lengths = torch.full((2,), slots)
    return quantize(keys, values, order, lengths, 4, key_group=group, bias=weights)


def test_parameters_of_different_dtypes_are_not_converted() -> None:
    """A row whose keys exceed half precision has a segment of its own."""
    caches = []
    for scale in (1.0, 1e6):
        cache, _ = frozen([[16, 16]], dim=16, track=True)
        layer = cache.layers[0]
        slots = RowSlots(cache, 0, 0, None, {}, None)
        layer.keys.mul_(scale)

        def make(keys: Tensor, values: Tensor, order: Tensor = slots.order[:, :8]) -> Segment:
            return quantize(keys, values, order, torch.full((2,), 8), 4, key_group=4)

        slots.quantize(8, make)
        cache.start(torch.tensor([[16]]))
        caches.append(cache)
    first, second = caches
    expected = [cache.layers[0].segments[0].dequantize(torch.float32)[0][0] for cache in caches]
    first.join(second)
    one, another = first.layers[0].segments
    assert {one.key_step.dtype, another.key_step.dtype} == {torch.float16, torch.float32}
    assert first.layers[0].stored == [[8, 0], [0, 8]]
    for row, segment in enumerate((one, another)):
        keys = segment.dequantize(torch.float32)[0][row, :, :8]
        assert torch.equal(keys, expected[row][:, :8])
    assert expected[1].abs().max() > 6e4  # infinite in half precision


def test_pages_that_cannot_be_written_are_refused() -> None:
    page = quantized(8, 4, bias=False)
    store = Segment.empty(page.unsqueeze(), 2).resized(2, 64)
    with pytest.raises(ValueError, match="6 slots in groups of 4 cannot grow"):
        store.write(0, 6, page)
    with pytest.raises(ValueError, match="different kinds"):
        store.write(0, 0, quantized(8, 2, bias=False))
    whole = quantized(8, 0, bias=False)
    with pytest.raises(ValueError, match="8 slots in groups of all cannot grow"):
        Segment.empty(whole.unsqueeze(), 2).resized(2, 64).write(0, 8, whole)


# --- which rows share a group --------------------------------------------------------------------


def test_rows_of_different_kinds_do_not_share(models) -> None:
    """A row never pays for what another one needs."""
    batch = Batch()
    for _ in range(2):
        for kind in RECIPES:
            batch.join(models[0].row(kind, 0, BufferPool()))
    # Heads of different lengths cost nothing: the same group as plain rows.
    assert len(batch.groups) == len(RECIPES) - 1
    for group in batch.groups:
        layer = group.cache.layers[0]
        needs = [layer.order, layer.attention_mass, layer.bias]
        plain = not group.rows[0].stages and not group.cache.offsets
        if plain and layer.bias is None:
            assert needs == [None, None, None] and not layer.segments
            assert len(group.rows) == 4


def test_a_join_of_another_kind_is_refused(models) -> None:
    plain, evicting = (models[0].row(kind, 0, BufferPool()) for kind in ("plain", "evicting"))
    assert not plain.fits(evicting)
    with pytest.raises(ValueError, match="different kinds"):
        plain.join(evicting)
    assert len(plain.rows) == 1 and plain.cache.rows == 1


def test_settings_of_a_method_that_share(models) -> None:
    pool = BufferPool()
    paged, other = (models[0].row("paged", 0, pool) for _ in range(2))
    assert paged.fits(other)
    other.rows[0].stages = [replace(other.rows[0].stages[0], of=None)]
    assert not paged.fits(other)


def test_short_rows_do_not_share_with_a_long_one(models) -> None:
    def cache(slots: int) -> KVCache:
        made, _ = frozen([[slots, slots]], logical=slots, max_new_tokens=256)
        made.start(torch.tensor([[slots]]))
        return made

    short, long = cache(351), cache(2710)
    assert short.holds(cache(400)) and not short.holds(long) and not long.holds(short)
    short.join(cache(400))
    assert short.layers[0].capacity == capacity_class(400 + 256) == 1024
    assert [capacity_class(n) for n in (1, 256, 257, 1024, 1025)] == [256, 256, 512, 1024, 2048]


def test_a_row_that_outgrows_its_group_moves_alone(models) -> None:
    batch = Batch()
    for length in (0, 1, 2):
        batch.join(models[0].row("plain", length, BufferPool()))
    (group,) = batch.groups
    assert group.cache.size == 4  # space for rows doubles
    address = group.cache.layers[0].keys.data_ptr()
    lengths = list(group.cache.layers[0].max_lengths)
    longest, capacity = lengths.index(max(lengths)), group.cache.layers[0].capacity
    tokens = capacity - max(lengths) + 1
    assert group.outgrown(tokens) == [longest] and not group.outgrown(tokens - 1)
    with pytest.raises(RuntimeError, match="must leave their group"):
        group.reserve(tokens)
    rows = list(batch.rows)
    batch.reserve(tokens)
    assert batch.rows == rows and len(batch.groups) == 2
    assert group.cache.layers[0].keys.data_ptr() == address and len(group.rows) == 2
    moved, _ = place_of(batch, rows[longest])
    assert moved is not group and not moved.outgrown(tokens)


@pytest.mark.parametrize("takes", [0, 1, 2, 3])
def test_a_failed_join_leaves_the_group_as_it_was(models, monkeypatch, takes) -> None:
    """Memory is exhausted while the buffers of a full group grow."""
    schedule = Schedule(models)
    with torch.no_grad(), switched(models[0].vlm.model), switched(models[1].vlm.model):
        for length in (0, 1):
            schedule.join(0, length)
        schedule.feed(2)
        (group,), other = schedule.batch.groups, models[0].row("plain", 2, BufferPool())
        assert group.cache.size == 2
        left, take = [takes], schedule.pool.take

        def exhausted(*given: Any, **more: Any) -> Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("stand-in")
            return take(*given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(schedule.pool, "take", exhausted)
            with pytest.raises(torch.OutOfMemoryError):
                group.join(other)
        schedule.check()
        schedule.feed(2)
        group.leave(1)  # and a later join succeeds
        group.join(other)
        assert group.cache.rows == len(group.rows) == 2


def test_products_with_weights_run_once_for_all_groups(models) -> None:
    vlm, batch, calls = models[0].vlm, Batch(), []
    for kind in ("plain", "evicting", "paged"):
        batch.join(models[0].row(kind, 0, BufferPool()))
    projection = vlm.adapter.decoder.layers[0].self_attn.q_proj
    handle = projection.register_forward_hook(lambda module, args, out: calls.append(out.shape[0]))
    try:
        with torch.no_grad(), switched(vlm.model):
            batch.next(torch.full((3, 1), 7))
    finally:
        handle.remove()
    assert len(batch.groups) == 3 and calls == [3]


def test_one_row_is_rewound(models) -> None:
    """The other rows of the group keep their tokens."""
    schedule = Schedule(models)
    with torch.no_grad(), switched(models[0].vlm.model), switched(models[1].vlm.model):
        for length in (0, 1):
            schedule.join(0, length)
        schedule.feed(4)
        schedule.batch.rewind(2, 1)
        schedule.singles[1].rewind(2)
        schedule.check()
        schedule.feed(2)
        # Control: without the rewind the row differs.
        schedule.singles[1].rewind(1)
        with pytest.raises(AssertionError):
            schedule.feed(1)


# --- chunks of a prompt --------------------------------------------------------------------------


@pytest.mark.cold
@pytest.mark.parametrize("kind", ["uneven", "paged"])
def test_masks_of_chunks_end_at_the_slots_in_use(models, kind) -> None:
    """Also where a decode step reads whole buffers, as on CUDA."""
    vlm = models[0].vlm
    question = "what is in this image, and what is around it, and why is it there and not here ? "

    def answers() -> list[list[int]]:
        with vlm.session(images=make_image(seed=0), recipe=Recipe.of(RECIPES[kind])) as session:
            return [session.ask(question, max_new_tokens=4).token_ids for _ in range(2)]

    expected = answers()
    with whole_buffers(), masks() as found:
        assert answers() == expected
    chunks = [mask for mask in found if mask.tokens > 64]
    assert chunks and all(mask.slots == mask.longest + mask.tokens for mask in chunks)
    assert all(mask.slots < mask.capacity for mask in chunks)
    # Control: single tokens read all slots.
    assert all(mask.slots == mask.capacity for mask in found if mask.tokens == 1)
