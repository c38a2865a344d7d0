"""Block sizes of the kernels by architecture."""

from __future__ import annotations

import pytest
import torch

from support.engine.kernels import TABLE, Blocks, architecture, blocks
from vlmfast.kernels.compile import SHARED

ROWS = [row for rows in TABLE.values() for row in rows.values()]


def test_architectures_override_their_row() -> None:
    row = Blocks({"BLOCK_M": 64, "BLOCK_N": 32}, 8, 3, {90: {"BLOCK_N": 64, "warps": 4}})
    assert row.on(80) == Blocks({"BLOCK_M": 64, "BLOCK_N": 32}, 8, 3)
    assert row.on(90) == Blocks({"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3)
    assert row.on(90).options() == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    assert row.on(80).resized(BLOCK_N=16).sizes == {"BLOCK_M": 64, "BLOCK_N": 16}


def test_unknown_architectures_use_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a CPU, on which kernels are interpreted."""
    assert architecture(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert architecture(torch.device("cuda")) == 120
    for arch in (0, 86, 120):
        assert blocks("biased_attention", "128 rows", arch).sizes["BLOCK_N"] == 32
    assert blocks("biased_attention", "128 rows", 90).sizes["BLOCK_N"] == 64


def test_table_names_known_architectures_and_sizes() -> None:
    """A misspelled size or architecture would never be used, or break a launch there."""
    assert ROWS
    for row in ROWS:
        assert row.by_arch.keys() <= SHARED.keys()
        for own in row.by_arch.values():
            assert own.keys() <= row.sizes.keys() | {"warps", "stages"}
