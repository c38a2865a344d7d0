"""Keeps the tokens with the largest projected features."""

from dataclasses import dataclass
from typing import ClassVar

from vlmfast.compressors import Reducer, top


@dataclass(frozen=True)
class Large(Reducer):
    """Keeps the tokens with the largest norms."""

    name: ClassVar[str] = "large"
    paper: ClassVar[str] = "ours"

    def select_tokens(self, tokens, geometry, stats, request):
        norms = tokens.features.float().norm(dim=-1)
        return top(norms, tokens.layout.patches, self.target(tokens)).nonzero().flatten()
