"""Options of references that no stored file has, through the same runners."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from support.golden import made
from support.golden.case import Reader, done, parameters
from support.golden.evict import h2o_grouped, snapkv
from support.golden.prumerge import case as prumerge_case

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


# The reference of the adaptive grid fails for more than one view.
COUNTS = [
    given
    for given in options(adaptive=(True, False), plus=(True, False), views=(1, 2))
    if given.id != "True-True-2"
]


@pytest.mark.parametrize("given", COUNTS)
def test_prumerge_counts(given: dict[str, Any]) -> None:
    replay(prumerge_case, made.prumerge(**given))
