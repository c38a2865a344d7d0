"""A sequence that a test drives manually through the engine, one forward pass after another."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.core.contexts import DecodeContext
from vlmfast.core.recipe import Recipe
from vlmfast.engine.attention import switched
from vlmfast.engine.cache import KVCache
from vlmfast.engine.decode import RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.opening import open_sequence
from vlmfast.engine.prefill import Inputs, Prompt
from vlmfast.engine.rounds import Rounds
from vlmfast.engine.stats import Stats, Trace
from vlmfast.models.base import Adapter


def harmless(code: FunctionType) -> FunctionType:
    """A hook or ``forward`` as the library's own, which changes nothing: no user's code."""
    named = {**code.__globals__, "__name__": "vlmfast.tests"}
    return FunctionType(code.__code__, named, code.__name__, code.__defaults__, code.__closure__)


class Driven:
    """One sequence: `start` prefills its prompt, and `next` feeds tokens."""

    def __init__(
        self, adapter: Adapter, inputs: Inputs, recipe: Recipe, begin: float | None = None
    ):
        self.adapter, self.inputs = adapter, inputs
        self.engine = Engine(adapter)
        # With a `Prompt` of the test's own, ids are not used.
        inputs.tensors.setdefault("input_ids", torch.zeros(1, 1, dtype=torch.int64))
        begin = time.perf_counter() if begin is None else begin
        self.sequence = open_sequence(adapter, inputs, recipe, begin=begin)

    @classmethod
    def of(
        cls,
        vlm: VLM,
        recipe: Any = (),
        images: Iterable[Any] | None = None,
        question: str = "what is here ?",
        **more: Any,
    ) -> Driven:
        """A short question about images, one by default."""
        images = [make_image(seed=0)] if images is None else list(images)
        sizes = [np.asarray(image).shape[:2] for image in images]
        tensors = vlm.inputs(question, images=images)
        return cls(vlm.adapter, Inputs(tensors, sizes, question, **more), Recipe.of(recipe))

    @property
    def recipe(self) -> Recipe:
        return self.sequence.recipe

    @property
    def stats(self) -> Stats:
        return self.sequence.stats

    @property
    def trace(self) -> Trace:
        return self.sequence.trace

    @property
    def prompt(self) -> Prompt:
        return self.sequence.prompt

    @property
    def decoder(self) -> RowGroup:
        return self.sequence.group

    @property
    def cache(self) -> KVCache:
        return self.decoder.cache

    @property
    def position(self) -> Tensor:
        return self.decoder.position

    @property
    def context(self) -> DecodeContext:
        return DecodeContext(self.cache)

    def start(self, max_new_tokens: int) -> Tensor:
        """Prefill the prompt; logits (1, V)."""
        return self._read(self.engine.prefiller.read(self.sequence, max_new_tokens=max_new_tokens))

    def _read(self, logits: Tensor) -> Tensor:
        """Read the statistics when the prompt has been prefilled, as the engine does."""
        self.sequence.stats.read()
        return logits

    def start_from(self, prompt: Prompt, max_new_tokens: int, *more: Any, **named: Any) -> Tensor:
        return self._read(
            self.engine.prefiller.prefill(self.sequence, prompt, max_new_tokens, *more, **named)
        )

    def extend(self, prompt: Prompt, **more: Any) -> Tensor:
        return self._read(self.engine.prefiller.extend(self.sequence, prompt, **more))

    def next(self, tokens: Tensor) -> Tensor:
        """Feed tokens (1, 1); logits (1, V)."""
        return self.decoder.next(tokens)

    def release(self) -> None:
        self.engine.prefiller.release(self.sequence)


# --- comparisons with a reference -----------------------------------------------------------------


@torch.no_grad()
def answer_logits(vlm: VLM, run: Driven, tokens: Sequence[int]) -> Tensor:
    """Logits (1 + len(tokens), V): after the prompt, then after each given token."""
    with switched(vlm.model):
        rows = [run.start(len(tokens))]
        rows += [run.next(torch.tensor([[token]])) for token in tokens]
    return torch.cat(rows)


def ran(vlm: VLM, recipe: Any, images: list) -> tuple[Driven, Tensor]:
    """A run of a short question about images, and its logits (V,) after the prompt."""
    run = Driven.of(vlm, recipe, images)
    return run, answer_logits(vlm, run, [])[0]


def entered(run: Driven) -> list[Tensor]:
    """Per layer the rows of the full prompt that entered it, bool (S,)."""
    visual, alive = run.adapter.visual(run.inputs.tensors["input_ids"][0]), []
    for layer in range(run.adapter.depth):
        rows = ~visual
        rows[run.trace.layout.order[run.trace.depth > layer]] = True
        alive.append(rows)
    return alive


# --- strict drafting ------------------------------------------------------------------------------


def unambiguous(logits: Tensor, dtype: torch.dtype) -> bool:
    """Whether strict drafting relies on the largest of ``logits`` (V,), computed in ``dtype``."""
    config = SimpleNamespace(temperature=None)
    sequence: Any = SimpleNamespace(
        sampling=SimpleNamespace(ranked=lambda logits: logits),
        sampler=SimpleNamespace(sampled=False, config=config),
    )
    rounds: Any = SimpleNamespace(adapter=SimpleNamespace(dtype=dtype))
    return Rounds._is_unambiguous(rounds, sequence, logits)
