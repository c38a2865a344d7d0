"""Layer skipping: the model drafts for itself with half of its layers.

A residual network changes its state little in most layers, so a forward pass through a subset of
them often finds the same next token. It needs neither other weights nor another cache: the layers
in use append their keys and values to the prompt's, and the verification writes all of them again.
Self-speculative decoding (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916)::

    h_0 = e(x),   h = layer_l(h) for l in kept,   q = softmax(head(norm(h)))

A chain of such tokens is drafted until one has a probability below ``confidence``, or ``depth``
tokens are drafted.

What differs from the authors' code: they search for the set of skipped sublayers, once per model
(Draft & Verify) or during generation (SWIFT), and skip attention and MLP separately. Here whole
layers are kept at even distances, always with the first and the last, or those listed in
``layers``. Drafts are chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.tree import Tree
from vlmfast.errors import RecipeError


def kept(depth: int, skip: float) -> list[int]:
    """Layers at even distances, first and last included, when a fraction ``skip`` is skipped."""
    count = max(min(depth, 2), round(depth * (1 - skip)))
    if count == 1:
        return [0]
    return sorted({round(i * (depth - 1) / (count - 1)) for i in range(count)})


@dataclass(frozen=True)
class DraftLayerSkip(DrafterStage):
    """Drafts with a subset of the model's own layers."""

    name: ClassVar[str] = "draft-layerskip"
    paper: ClassVar[str] = "SWIFT, arXiv 2410.06916"
    lead: ClassVar[str] = "skip"
    merges: ClassVar[bool] = True

    skip: float = param(0.45, "fraction of the layers that drafting skips", ge=0, lt=1)
    layers: tuple[int, ...] = param(
        (), "layers used for drafting, instead of those at even distances", excludes=("skip",)
    )
    depth: int = param(4, "most drafted tokens", ge=1)
    confidence: float = param(0.6, "a token below this probability ends the draft", ge=0, le=1)

    def largest(self) -> tuple[int, int]:
        return 1 + self.depth, self.depth

    def draft_bytes(self, weights: int, cache: int) -> int:
        return int((1 - self.skip) * (weights + cache))

    def open(self, target: Target) -> Chain:
        layers = list(self.layers) or kept(target.depth, self.skip)
        if not all(0 <= layer < target.depth for layer in layers) or layers != sorted(set(layers)):
            raise RecipeError(
                f"{self.name}: layers={'/'.join(map(str, layers))} must be ascending, each from 0 "
                f"to {target.depth - 1}"
            )
        return Chain(self, target, layers)


class Chain:
    """Drafts one path, token by token."""

    def __init__(self, stage: DraftLayerSkip, target: Target, layers: list[int]) -> None:
        self.stage, self.target, self.layers = stage, target, layers

    def prefill(self, read: Read) -> None:
        pass

    def extend(self, done: Round) -> None:
        pass

    def propose(self, root: int, budget: Budget) -> Tree:
        assert self.target.shallow is not None
        chain = [root]
        for depth in range(1, min(budget.depth, self.stage.depth) + 1):
            logits = self.target.shallow(chain[-1], depth - 1, self.layers)
            token, probability = self.target.likeliest(logits, budget, depth)
            chain.append(token)
            if probability < self.stage.confidence:
                break
        return Tree.chain(chain)
