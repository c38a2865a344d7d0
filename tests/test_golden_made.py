"""Options of references that no stored file has, through the same runners."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import golden_made as made
from golden_budgets import vlcache_case
from golden_case import Reader, done, parameters
from golden_evict import h2o_grouped, snapkv
from golden_fastv import choice as fastv_choice
from golden_prumerge import case as prumerge_case
from golden_quant import kivi
from golden_visionzip import zip_case as visionzip_zip
from vlmfast.compressors.cache.h2o import H2O
from vlmfast.errors import RecipeError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
AGGREGATES = ("mean", "max", "sum")


def options(**values: Any) -> list[Any]:
    """Every combination, with its name."""
    rows = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    return [pytest.param(row, id="-".join(map(str, row.values()))) for row in rows]


def replay(run: Any, case: made.Case) -> None:
    data, meta = Reader(case[0]), parameters(case[1])
    run(data, meta)
    done(meta, data)


@pytest.mark.parametrize("given", options(agg=AGGREGATES, pooling=("avgpool",), dtype=DTYPES))
def test_h2o_aggregates_over_a_group(given: dict[str, Any]) -> None:
    replay(h2o_grouped, made.evicted("h2o", **given, batch=2))


@pytest.mark.parametrize(
    "given", options(agg=AGGREGATES, pooling=("avgpool", "maxpool"), dtype=DTYPES)
)
def test_snapkv_aggregates_and_pools(given: dict[str, Any]) -> None:
    replay(snapkv, made.evicted("snapkv", **given, batch=2))


def test_h2o_takes_the_maximum_of_a_group_in_the_prompt_alone() -> None:
    with pytest.raises(RecipeError, match="h2o: agg=max ranks the prompt alone"):
        H2O(agg="max")
    assert len(H2O(agg="max", decode=False).expand()) == 1
    assert len(H2O(agg="sum").expand()) == 2


FLAGS = dict.fromkeys(("head_adaptive", "layer_adaptive", "layer_windows"), (True, False))


@pytest.mark.parametrize("given", options(**FLAGS))
def test_vlcache_windows_and_budgets(given: dict[str, Any]) -> None:
    replay(vlcache_case, made.vlcache(**given, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_vlcache_in_half_precision(dtype: torch.dtype) -> None:
    case = made.vlcache(head_adaptive=True, layer_adaptive=True, layer_windows=True, dtype=dtype)
    replay(vlcache_case, case)


# The reference of the adaptive grid fails for more than one view.
COUNTS = [
    given
    for given in options(adaptive=(True, False), plus=(True, False), views=(1, 2))
    if given.id != "True-True-2"
]


@pytest.mark.parametrize("given", COUNTS)
def test_prumerge_counts(given: dict[str, Any]) -> None:
    replay(prumerge_case, made.prumerge(**given))


@pytest.mark.parametrize("given", options(views=(1, 2, 3, 5), dominant=(9,), contextual=(1, 4)))
def test_visionzip_on_crops(given: dict[str, Any]) -> None:
    replay(visionzip_zip, made.visionzip(**given))


@pytest.mark.parametrize("given", options(k=(1, 2, 5), share=(0.3, 0.75), dtype=DTYPES))
def test_fastv_layers_and_shares(given: dict[str, Any]) -> None:
    replay(fastv_choice, made.fastv(**given))


@pytest.mark.parametrize("given", options(bits=(2, 4, 8), group=(32, 64), dtype=DTYPES))
def test_kivi_bits_and_groups(given: dict[str, Any]) -> None:
    replay(kivi, made.kivi(**given))
