"""Block sizes, warps and pipeline stages of the kernels for each GPU architecture, in one table.

Architectures are compute capabilities times ten. A row holds for every architecture but those with
an entry of their own, so that it must suit the smallest: registers spill on 8.0 and 8.9 where they
do not on 9.0, and 8.6, 8.9 and 12.0 have 99 KiB of shared memory. ``python -m
vlmfast.kernels.compile`` checks the table. Only the sizes of `few_rows` were tuned, on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ._triton import Variant


@dataclass(frozen=True)
class Blocks:
    """Compile-time sizes of a kernel, and how it is launched.

    Parameters
    ----------
    sizes : dict of str to int or tuple of int
        By the name of the kernel's parameter.
    warps, stages : int
    by_arch : dict of int to dict
        Sizes, ``warps`` and ``stages`` that differ on one architecture.
    """

    sizes: dict[str, Any]
    warps: int = 4
    stages: int = 2
    by_arch: dict[int, dict[str, int]] = field(default_factory=dict)

    def on(self, arch: int) -> Blocks:
        """The blocks for an architecture; those of the row if it has no entry."""
        own = dict(self.by_arch.get(arch, {}))
        warps, stages = own.pop("warps", self.warps), own.pop("stages", self.stages)
        return Blocks(self.sizes | own, warps, stages)

    def resized(self, **sizes: int) -> Blocks:
        """With other or further sizes."""
        return replace(self, sizes=self.sizes | sizes)

    def variant(
        self, kernel: Any, types: Mapping[str, str | tuple[str, ...]], constants: Mapping[str, Any]
    ) -> Variant:
        """What a launch with these blocks compiles."""
        return Variant(kernel, types, {**constants, **self.sizes}, self.warps, self.stages)

    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {**self.sizes, "num_warps": self.warps, "num_stages": self.stages}


# Kernel file, and condition (see the file) to blocks.
TABLE = {
    "biased_attention": {
        "16 rows": Blocks({"BLOCK_M": 16, "BLOCK_N": 64}),
        "32 rows": Blocks({"BLOCK_M": 32, "BLOCK_N": 64}),
        "64 rows": Blocks({"BLOCK_M": 64, "BLOCK_N": 64}, 8, by_arch={90: {"warps": 4}}),
        "128 rows": Blocks({"BLOCK_M": 128, "BLOCK_N": 32}, 8, by_arch={90: {"BLOCK_N": 64}}),
        "16 rows, D > 128": Blocks({"BLOCK_M": 16, "BLOCK_N": 32}),
        "32 rows, D > 128": Blocks({"BLOCK_M": 32, "BLOCK_N": 32}),
        "64 rows, D > 128": Blocks({"BLOCK_M": 64, "BLOCK_N": 32}, 8),
        "16 rows, float32": Blocks({"BLOCK_M": 16, "BLOCK_N": 32}),
        "32 rows, float32": Blocks({"BLOCK_M": 32, "BLOCK_N": 32}, 8, by_arch={90: {"warps": 4}}),
        "16 rows, D > 128, float32": Blocks({"BLOCK_M": 16, "BLOCK_N": 16}),
        "32 rows, D > 128, float32": Blocks({"BLOCK_M": 32, "BLOCK_N": 16}, 8),
    },
    "col_stats": {
        "16 rows": Blocks({"BLOCK_R": 16, "BLOCK_N": 64}),
        "many rows": Blocks({"BLOCK_R": 64, "BLOCK_N": 64}),
        "float32": Blocks({"BLOCK_R": 16, "BLOCK_N": 16}),
        "join": Blocks({"BLOCK_N": 128}),
    },
    "coverage": {  # few columns: all multiprocessors share one matrix
        "step": Blocks({"BLOCK_N": 8, "BLOCK_R": 256}),
    },
    "decode_mixed": {  # `_configure` fits tiles to key groups and to bytes
        "one row": Blocks({"bytes": 2048, "slots": 128}),
        "16 rows, floats": Blocks({"BLOCK_M": 16, "BLOCK_N": 64}),
        "64 rows, floats": Blocks({"BLOCK_M": 64, "BLOCK_N": 64}, 8),
        "16 rows, codes": Blocks({"BLOCK_M": 16, "BLOCK_N": 64}, stages=3),
        "64 rows, codes": Blocks(
            {"BLOCK_M": 64, "BLOCK_N": 32},
            8,
            by_arch={80: {"stages": 3}, 90: {"BLOCK_N": 64, "stages": 3}},
        ),
        "16 rows, narrow": Blocks({"BLOCK_M": 16, "BLOCK_N": 32}, by_arch={90: {"stages": 3}}),
        "64 rows, narrow": Blocks({"BLOCK_M": 64, "BLOCK_N": 32}, 8),
        "join": Blocks({"entries": 2048}),
        "attention mass": Blocks({"BLOCK_M": 8, "BLOCK_N": 128}),
    },
    "decode_slots": {
        "wide": Blocks({"BLOCK_M": 16, "BLOCK_N": 64}),
        "narrow": Blocks({"BLOCK_M": 16, "BLOCK_N": 32}),
    },
    "few_rows": {
        "one row": Blocks({"BLOCK_M": 1, "BLOCK_N": 4, "BLOCK_K": 512}),
        "narrow": Blocks({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256}, stages=4),
        "wide": Blocks({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}, stages=4),
        "float32": Blocks({"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}, stages=4),
    },
    "gather_rows": {  # at most; 4,096 entries of 2 bytes are eight 16-byte loads in 128 threads
        "tile": Blocks({"rows": 256, "columns": 256, "entries": 4096}),
    },
    "pool": {  # BLOCK_M: at most
        "average": Blocks({"BLOCK_M": 16, "BLOCK_D": 256}, by_arch={80: {"BLOCK_D": 128}}),
        "mix": Blocks({"BLOCK_M": 16, "BLOCK_D": 256}),
        "read": Blocks({"BLOCK_Q": 16, "BLOCK_N": 32, "BLOCK_F": 128}),
        "share": Blocks({"BLOCK_Q": 16, "BLOCK_N": 64}),
    },
    "quantize_kv": {  # BLOCK_D: at most
        "extent": Blocks({"BLOCK_N": 64, "BLOCK_D": 128}),
        "finish": Blocks({"BLOCK_N": 16, "BLOCK_D": 128}),
        "values": Blocks({"BLOCK_N": 32, "BLOCK_D": 256}),
        "pack": Blocks({"BLOCK_N": 32, "BLOCK_D": 64}, by_arch={80: {"BLOCK_N": 16}}),
    },
}


def blocks(file: str, condition: str, arch: int) -> Blocks:
    """The blocks of a kernel on an architecture."""
    return TABLE[file][condition].on(arch)


def architecture(device: torch.device) -> int:
    """Compute capability of a GPU times ten; 0, an unknown architecture, of other devices."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
