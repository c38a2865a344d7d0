"""Random selection: the baseline that every method must beat.

Keeps ``keep`` of an image's tokens, drawn without replacement from its patches. Newlines are
dropped. The draw depends on ``seed``, the content of the image, its index in the prompt and its
number of tokens, not on the global random state: every image has a draw of its own, and the same
prompt always has the same one. With the same seed, a smaller rate keeps a subset of what a larger
one keeps.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param
from vlmfast.core.statistics import ItemGeometry, VisionStats

from ..reducer import Reducer


def shuffled(n: int, *key: int) -> Tensor:
    """A permutation of ``n`` that depends on ``key`` alone: int64, (n,), on the host."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.randperm(n, generator=generator)


@dataclass(frozen=True)
class Random(Reducer):
    """Keeps patches drawn at random."""

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "control"
    tier: ClassVar[str] = "baseline"
    exact: ClassVar[bool] = True
    wants_digest = True

    seed: int = param(0, "seed of the draw", ge=0)

    def select_tokens(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor:
        """Rows kept of one image."""
        patches = tokens.layout.patch_rows()
        key = (self.seed, int(tokens.layout.on_host[1, 0]), len(tokens), geometry.digest)
        draw = shuffled(len(patches), *key)
        draw = draw[: self.target(tokens)].sort().values
        return patches[draw.to(patches.device)]
