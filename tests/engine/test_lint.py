"""A decode step on a GPU: no host synchronization, and the same shapes in every step.

No GPU is needed: every tensor becomes a fake tensor on ``cuda``, see `fake_cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from support import rope_types
from support.engine.batched import Together
from support.engine.driven import Driven
from support.engine.prompts import switched
from support.engine.turns import renewed
from support.fake_cuda import Watch, shapes, steps
from support.models import shared
from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.core.protocols import CacheStage, DecodeStage

STEPS = 10  # two pages


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """Kernels run as one operation without synchronization; their references can be watched."""
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")


@dataclass(frozen=True)
class Uneven(CacheStage):
    """Keeps a different number of slots in each head."""

    name: ClassVar[str] = "test-uneven"

    def compress(self, step, layer, kv, stats):
        keep = torch.ones(len(kv.keys), len(kv), dtype=torch.bool)
        keep[1, ::3] = False
        return kv.select_mask(keep)


@dataclass(frozen=True)
class Does(DecodeStage):
    """Changes the slots between steps."""

    name: ClassVar[str] = "test-does"
    what: Callable[[Any], None] = lambda slots: None

    def step(self, slots, layer):
        self.what(slots)


RECIPES = {
    "nothing": (),
    "visionzip": "visionzip:dominant=4,contextual=3",
    "proportional_attention": "visionzip:dominant=4,contextual=3,proportional_attention=true",
    "pyramiddrop": "pyramiddrop:layers=1",
    "pyramiddrop, renumbered": "pyramiddrop:layers=1,positions=compact",
    "snapkv": "snapkv:keep=0.8,window=4",
    "pyramidkv": "pyramidkv:keep=0.8,window=3",
    "vlcache": "vlcache:0.6",
    "fastkv": "fastkv:keep=0.7,tsp=0.9,window=3",
    "quickprefill": "quickprefill:0.4",
    "lookm": "lookm:keep=0.8",
    "lookm, repair": "lookm:keep=0.8,merge=avg,proportional_attention=true",
    "h2o": "h2o:0.6",
    "cake": "cake:keep=0.7,window=4",
    "streamingllm": "streamingllm:0.6",
    "uneven heads": Uneven(),
    "kivi": "kivi:group=4,residual=32",
    "zipcache": "zipcache",
    "zipvl": "zipvl:tau=0.9",
    "zipvl, dropping": "zipvl:tau=0.9,kv=drop,rows=all",
    "snapkv and kivi": "snapkv:keep=0.8,window=4+kivi:group=4,residual=32",
}
PAGED = {
    "kivi": "kivi:group=4,residual=4",
    "zipcache": "zipcache:page=4",
    "zipvl": "zipvl:tau=0.9,page=4",
    "snapkv and kivi": "snapkv:keep=0.8,window=4+kivi:group=4,residual=4",
}


def decoder(
    recipes: list, fed: int = 2, max_new_tokens: int = STEPS + 2, rope_type: str = "default"
) -> tuple[VLM, Together]:
    """Rows that have taken ``fed`` steps on the CPU; they are consumed by `steps`."""
    vlm = renewed(shared(rope_types.build, kind=rope_type, layers=2, kv_heads=2))
    runs = []
    with torch.no_grad(), switched(vlm.model):
        for number, recipe in enumerate(recipes):
            # Prompts of different lengths.
            images = [make_image(seed=of) for of in range(10 * number, 11 * number + 1)]
            run = Driven.of(vlm, recipe, images)
            run.start(max_new_tokens)
            runs.append(run)
        joined = Together([run.decoder for run in runs])
        for _ in range(fed):
            joined.next(torch.full((len(runs), 1), 7))
    return vlm, joined


def watched(recipes: list, count: int = 3) -> Watch:
    return steps(*decoder(recipes), count)


def changes(watch: Watch) -> list[int]:
    """Steps that differ from the previous one."""
    done = shapes(watch)
    return [i for i in range(1, len(done)) if done[i] != done[i - 1]]


def alternating(cases: dict, first: int) -> list:
    """Every second case with one or two rows in turn; the others are slow."""
    return [
        pytest.param(
            rows, case, marks=[] if (i + 2 * first + rows) % 4 == 1 else [pytest.mark.slow]
        )
        for i, case in enumerate(cases)
        for rows in (1, 2)
    ]


# Each recipe is stepped or verified in the fast run, with one row or with two.
@pytest.mark.cases(2)
@pytest.mark.parametrize(("rows", "case"), alternating(RECIPES, 0))
def test_no_step_synchronizes_with_the_host(case, rows):
    """From the second step on all are alike; alone, and with a row without decode stages."""
    watch = watched([RECIPES[case], ()][:rows])
    assert watch.complaints == []
    assert len(shapes(watch)) == 3 and len(shapes(watch)[0]) > 100
    assert changes(watch) == []


@pytest.mark.cases(2)
@pytest.mark.parametrize(("rows", "case"), alternating(RECIPES, 1))
def test_no_draft_verification_synchronizes_with_the_host(case, rows):
    """A round on the device, from the tree's tokens to the logits of its nodes."""
    watch = steps(*decoder([RECIPES[case], ()][:rows]), 3, width=4)
    assert watch.complaints == [] and changes(watch) == []
    assert len(shapes(watch)[0]) > 100


def test_no_synchronization_with_rows_of_all_kinds():
    recipes = [
        RECIPES[case] for case in ("h2o", "kivi", "nothing", "streamingllm", "lookm, repair")
    ]
    watch = watched(recipes)
    assert watch.complaints == [] and changes(watch) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(("rows", "case"), alternating(PAGED, 1))
def test_pages_change_shapes_without_synchronization(case, rows):
    """In between, steps are alike."""
    vlm, joined = decoder([PAGED[case], ()][:rows])
    sizes = []
    watch = steps(
        vlm, joined, STEPS, lambda: sizes.append(joined.groups[0].cache.layers[0].max_lengths[0])
    )
    assert watch.complaints == []
    flushed = [i for i in range(1, STEPS) if sizes[i] < sizes[i - 1]]
    assert len(flushed) >= 2
    # A step with a page differs; later ones have a longer segment.
    assert set(flushed) <= set(changes(watch)) <= {i for at in flushed for i in (at, at + 1)}


def test_growing_does_not_synchronize():
    vlm, joined = decoder([Uneven()], fed=0, max_new_tokens=1)
    (layer, _), sizes = joined.groups[0].cache.layers, []
    with torch.no_grad(), switched(vlm.model):
        while layer.max_lengths[0] < layer.keys.shape[2] - 2:
            joined.next(torch.tensor([[7]]))
    watch = steps(vlm, joined, 5, lambda: sizes.append(layer.keys.shape[2]))
    (at,) = [i for i in range(1, 5) if sizes[i] > sizes[i - 1]]
    assert watch.complaints == []
    assert changes(watch) == [at, at + 1]


@pytest.mark.cases(2)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("rope_type", rope_types.TYPES)
def test_rotary_tables_do_not_synchronize(rope_type, width):
    """Also tables that depend on the length of the sequence."""
    watch = steps(*decoder([(), ()], rope_type=rope_type), 2, width=width)
    assert watch.complaints == [] and changes(watch) == []
    assert len(shapes(watch)[0]) > 100


# --- controls ------------------------------------------------------------------------------------


COMPLAINS = {
    "to the host": lambda slots: slots.keys.cpu(),
    "from the host": lambda slots: slots.keys.add_(torch.ones(1).to(slots.keys.device)),
    "a list": lambda slots: torch.tensor([1, 2], device=slots.keys.device),
    "a tensor on the CPU": lambda slots: torch.arange(3) + 1,
    "a scalar on the CPU": lambda slots: slots.keys * torch.tensor(2.0),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("case", COMPLAINS)
def test_host_tensors_are_detected(case):
    assert watched([(Uneven(), Does(COMPLAINS[case]))], 2).complaints
