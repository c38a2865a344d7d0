"""Captured decode steps, recorded and replayed on the CPU by `cpu_graph`.

A replay runs the recorded operations on the recorded memory, without Python. It refuses to run when
a tensor of the step has moved, and what Python would have computed again is stale.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vlmfast
from support.engine.batched import buffers_of
from support.engine.cpu_graph import captured_by_stand_in
from support.engine.steps import (
    Graphs,
    captured_sizes,
    compile_steps,
    graphs_of,
    idle,
    rounded,
    sizes_of_steps,
    small_buffers,
)
from support.engine.storage import KVCache
from support.fake_drafters import Knows
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request, VLMFastError
from vlmfast.core.recipe import Recipe

pytestmark = pytest.mark.cold

RECIPES = ["none", "pyramiddrop", "h2o:0.7", "kivi:bits=4,group=4,residual=8", "streamingllm:0.7"]


@pytest.fixture(scope="module")
def plain() -> VLM:
    return VLM(*build_llava())


@pytest.fixture
def vlm(monkeypatch) -> VLM:
    """A model whose steps are captured by the stand-in."""
    return captured_by_stand_in(VLM(*build_llava()), monkeypatch)


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_steps_give_the_same_tokens(plain: VLM, vlm: VLM, recipe: str) -> None:
    for seed in (0, 1):
        given = {"images": make_image(seed=seed), "recipe": recipe, "max_new_tokens": 40}
        wanted = plain.ask("what is here ?", **given, eos_token_id=None).token_ids
        assert vlm.ask("what is here ?", **given, eos_token_id=None).token_ids == wanted
        assert len(wanted) == 40


def test_a_step_belongs_to_the_choice_of_kernels(vlm: VLM, monkeypatch) -> None:
    given = {"images": make_image(), "max_new_tokens": 3, "eos_token_id": None}
    graphs, captured = graphs_of(vlm), []
    for choice in ("torch", "torch", "-swiglu"):
        monkeypatch.setenv("VLMFAST_KERNELS", choice)
        vlm.ask("what is here ?", **given)
        captured.append(graphs.captured)
    assert captured == [1, 1, 2]


def test_outputs_have_as_many_rows_as_the_batch(vlm: VLM, monkeypatch) -> None:
    """A step is captured for a rounded number of rows."""
    rows = sizes_of_steps(monkeypatch)
    requests = [Request("what is here ?", make_image(seed=seed)) for seed in range(3)]
    vlm.ask_many(requests, batch_size=3, max_new_tokens=4, eos_token_id=None)
    assert rounded(3) > 3
    assert (3, 3, 3, 3) in rows and all(len(set(sizes)) == 1 for sizes in rows)


def test_second_request_reuses_the_step(plain: VLM, vlm: VLM) -> None:
    graphs = graphs_of(vlm)
    for number in range(3):
        vlm.ask("what is here ?", images=make_image(seed=number), max_new_tokens=6)
        assert (graphs.captured, graphs.reused) == (1, number)
    # Another capacity class is another step; a longer prompt of the same class is not.
    for images, captured in ((4, 1), (20, 2)):
        images = [make_image(seed=s) for s in range(images)]
        vlm.ask("what is here ?", images=images, max_new_tokens=6)
        assert graphs.captured == captured


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", ["none", "pyramiddrop", "kivi:bits=4,group=4,residual=8"])
def test_trees_are_captured_by_their_width(plain: VLM, vlm: VLM, recipe: str) -> None:
    """Single tokens and trees of several widths alternate in the same buffers."""
    given = {"images": make_image(seed=0), "max_new_tokens": 40, "eos_token_id": None}
    wanted = plain.ask("what is here ?", recipe=recipe, **given).token_ids
    for beside in (2, 2, 6):
        knows = Knows(answer=tuple(wanted), cycle=True, beside=beside)
        got = vlm.ask("what is here ?", recipe=Recipe.of(recipe) + knows, **given)
        assert got.token_ids == wanted and got.stats.accepted > 10
    widths = {width for _, width in captured_sizes(vlm)}
    assert widths <= {1, 2, 4, 8, 16, 32} and {16, 32} < widths


def test_growing_beyond_the_buffers_recaptures(plain: VLM, vlm: VLM, monkeypatch) -> None:
    small_buffers(monkeypatch)
    given = {"images": make_image(seed=0), "max_new_tokens": 120, "eos_token_id": None}
    first = vlm.ask("what is here ?", **given).token_ids
    assert first == plain.ask("what is here ?", **given).token_ids
    graphs = graphs_of(vlm)
    assert graphs.captured > 1
    before = graphs.captured
    assert vlm.ask("what is here ?", **given).token_ids == first
    assert graphs.captured == before


def test_captured_batches_and_sessions(plain: VLM, vlm: VLM) -> None:
    requests = [
        Request("what ?", make_image(seed=i), recipe=r, generation={"max_new_tokens": 5 + 7 * i})
        for i, r in enumerate(["none", "h2o:0.7", "pyramiddrop", "none"])
    ]
    wanted = [a.token_ids for a in plain.ask_many(requests, batch_size=3)]
    for _ in range(2):
        assert [a.token_ids for a in vlm.ask_many(requests, batch_size=3)] == wanted
    answers = []
    for model in (plain, vlm):
        with model.session(images=make_image(seed=3), recipe="h2o:0.8") as session:
            answers.append(
                [session.ask(q, max_new_tokens=9).token_ids for q in ("what ?", "and ?", "so ?")]
            )
    assert answers[0] == answers[1]


def ragged(count: int, recipes: list[str]) -> list[Request]:
    """Requests of different lengths, of prompts and of answers."""
    return [
        Request(
            "what is here ?",
            [make_image(seed=i + j) for j in range(1 + i % 3)],
            recipe=recipes[i % len(recipes)],
            generation={"max_new_tokens": 5 + 3 * (i * 7 % 5), "eos_token_id": None},
        )
        for i in range(count)
    ]


KINDS = ["none", "h2o:0.7", "streamingllm:0.7"]
SLOW = pytest.mark.slow


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [15, pytest.param(48, marks=SLOW)])
@pytest.mark.parametrize(
    ("recipes", "kinds"),
    [
        (["none"], 1),
        pytest.param(["h2o:0.7"], 1, marks=SLOW),
        (["kivi:bits=4,group=4,residual=8"], 1),
        (KINDS, 3),
    ],
    ids=["none", "h2o", "kivi", "mixed"],
)
def test_ragged_requests_capture_few_steps(plain: VLM, vlm: VLM, recipes, kinds, count) -> None:
    """Rows that join and leave change no address: a capture for 4, 2 and 1 rows of each kind."""
    graphs, requests = graphs_of(vlm), ragged(12, recipes)
    wanted = [answer.token_ids for answer in plain.ask_many(requests, batch_size=4)]
    answers = vlm.ask_many(requests, batch_size=4)
    assert [answer.token_ids for answer in answers] == wanted
    captured = graphs.captured
    assert captured <= 3 * kinds
    if kinds == 1:
        assert captured == 3
    # In another order, other rows meet.
    vlm.ask_many(ragged(count, recipes)[::-1], batch_size=4)
    assert graphs.captured <= 3 * kinds
    if kinds == 1:
        assert graphs.captured == captured
        return
    before = graphs.captured
    vlm.ask_many(ragged(count, recipes), batch_size=4)
    assert graphs.captured == before


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch_size", [3, 5])
def test_batch_size_need_not_be_a_power_of_two(plain: VLM, vlm: VLM, batch_size: int) -> None:
    requests = ragged(2 * batch_size, ["none"])
    wanted = [answer.token_ids for answer in plain.ask_many(requests, batch_size=batch_size)]
    answers = vlm.ask_many(requests, batch_size=batch_size)
    assert [answer.token_ids for answer in answers] == wanted
    assert max(rows for rows, _ in captured_sizes(vlm)) == {3: 4, 5: 8}[batch_size]


def test_new_buffers_take_at_most_half_of_the_free_memory(vlm: VLM, monkeypatch) -> None:
    """With a stand-in for the memory of a GPU."""
    vlm.ask("what is here ?", images=make_image(seed=0), max_new_tokens=6)
    (graph,) = idle(graphs_of(vlm))

    class OnCuda:
        layers, seen = graph.cache.layers, SimpleNamespace(is_cuda=True, device=None)
        row_bytes = staticmethod(lambda: 100)

    for free, size in ((10_000, 32), (6_400, 32), (6_399, 16), (1_000, 4), (10, 4)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        assert Graphs().size(OnCuda(), 3, 30) == size
    assert graph.cache.layers[0].size == 1 and graph.cache.row_bytes() == sum(
        x.nbytes for x in buffers_of(graph.cache)
    )


def test_idle_steps_are_bounded() -> None:
    class Fake:
        def __init__(self, number: int) -> None:
            self.nbytes, self.number, self.cache = 10, number, KVCache(0)
            self.cache.seen = torch.zeros(1)

    graphs = Graphs(limit=25)
    for number in range(4):
        graphs.put(Fake(number))
    assert [each.number for each in idle(graphs)] == [2, 3]


def test_idle_steps_are_freed_where_memory_is_exhausted(vlm: VLM, monkeypatch) -> None:
    vlm.ask("what is here ?", images=make_image(seed=0), max_new_tokens=6)
    graphs, pool, allocate = graphs_of(vlm), vlm.adapter.pool, torch.zeros
    assert idle(graphs) and pool.idle
    failures = []

    def exhausted(shape, **given):
        if idle(graphs) or pool.idle:
            failures.append(shape)
            raise torch.OutOfMemoryError("stand-in")
        return allocate(shape, **given)

    monkeypatch.setattr(torch, "zeros", exhausted)
    buffer = pool.take((3, 7), torch.float32, torch.device("cpu"))
    assert buffer.shape == (3, 7) and len(failures) == 1
    assert not idle(graphs) and not pool.idle
    # Control: an allocation that still fails raises.
    monkeypatch.setattr(
        torch, "zeros", lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError)
    )
    with pytest.raises(torch.OutOfMemoryError):
        pool.take((3, 9), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("layers", "count", "dynamic"), [(2, 2, True), pytest.param(4, 3, None, marks=SLOW)]
)
def test_compiled_steps_give_the_same_tokens(layers: int, count: int, dynamic: Any) -> None:
    """With ``dynamic``, steps of other sizes are not compiled again."""
    plain = VLM(*build_llava(layers=layers))
    vlm = VLM(*build_llava(layers=layers), decoding="compile")
    compile_steps(vlm, dynamic)
    # Several groups of rows, and the last row alone.
    requests = ragged(count, ["h2o:0.7", "none"])
    wanted = [answer.token_ids for answer in plain.ask_many(requests, batch_size=3)]
    assert [answer.token_ids for answer in vlm.ask_many(requests, batch_size=3)] == wanted
    given = {"images": make_image(seed=0), "max_new_tokens": 6, "eos_token_id": None}
    wanted = plain.ask("what is here ?", **given).token_ids
    assert vlm.ask("what is here ?", **given).token_ids == wanted


def test_invalid_choices_are_refused() -> None:
    model, processor = build_llava()
    with pytest.raises(VLMFastError, match="decoding='fast' must be one of auto, graph"):
        VLM(model, processor, decoding="fast")
    with pytest.raises(VLMFastError, match="needs a CUDA device"):
        VLM(model, processor, decoding="graph")
    assert vlmfast.VLM(model, processor).adapter.decoding == "auto"


# --- controls ------------------------------------------------------------------------------------


def replaced(vlm: VLM) -> None:
    """Other memory for a weight, with other values."""
    weight = vlm.adapter.decoder.layers[0].mlp.up_proj.weight
    weight.data = -weight.data


# --- changes of the model ------------------------------------------------------------------------


def test_replaced_weights_are_captured_again(plain: VLM, vlm: VLM) -> None:
    given = {"images": make_image(seed=0), "max_new_tokens": 12, "eos_token_id": None}
    before = vlm.ask("what is here ?", **given).token_ids
    other = VLM(*build_llava())
    for model in (vlm, other):
        replaced(model)
    wanted = other.ask("what is here ?", **given).token_ids
    assert vlm.ask("what is here ?", **given).token_ids == wanted != before
    graphs = graphs_of(vlm)
    assert (graphs.captured, graphs.reused) == (2, 0) and len(idle(graphs)) == 1
    # Control: a change in place keeps the captured step, which reads the new values.
    with torch.no_grad():
        vlm.adapter.decoder.layers[0].mlp.up_proj.weight.neg_()
    assert vlm.ask("what is here ?", **given).token_ids == before
    assert (graphs.captured, graphs.reused) == (2, 1)


def test_hooks_of_the_user_are_captured_again(vlm: VLM) -> None:
    given = {"images": make_image(seed=0), "max_new_tokens": 12, "eos_token_id": None}
    before = vlm.ask("what is here ?", **given).token_ids
    layer = vlm.adapter.decoder.layers[1].mlp
    handle = layer.register_forward_hook(lambda module, args, output: -output)
    other = vlm.ask("what is here ?", **given).token_ids
    handle.remove()
    assert vlm.ask("what is here ?", **given).token_ids == before != other
