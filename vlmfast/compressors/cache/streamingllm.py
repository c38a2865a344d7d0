"""StreamingLLM: keep the first few slots and the last ones, numbered as if adjacent.

Models attend to the first tokens when they need no other. StreamingLLM (ICLR 2024, arXiv
2309.17453) keeps these sinks and a window that slides over the rest, however long a text becomes,
and numbers the cache by slots: with n slots, the key in slot i is seen at the rotary distance
``n - 1 - i`` of the last one, no matter how far apart the tokens were. Of N slots of the prompt,
the first ``sinks`` and the last ``int(keep N) - sinks`` are kept; every token of the answer evicts
the oldest slot that is not a sink.

The authors cache keys without rotary ids and rotate all of them by slot at each step. Here keys are
cached with their ids, and only those that move are rotated. Rotary attention depends on differences
of ids alone: where the query of the next token, id ``p + 1``, meets a key of id ``q``, the logit
depends on ``p + 1 - q``. Nor does it depend on the order of its keys. So slot i of n may have any
id, as long as its distance is that of its slot::

    q_i = p - (n - 1 - i)               p: id of the last token, which is kept

The window's tokens are consecutive; they have these ids already. Only the sinks, whose own ids
differ, are rotated: once to meet the window, then by one more with each token of the answer. They
are rotated from a float32 copy of the prompt's keys each time, so that rounding does not add up.

Different from the authors' code, and why:

- Rotation as above. The logits are the same, without processing all keys in each step.
- The window is a fraction of the prompt, not a fixed number of slots, and it includes the new token
  too: what the authors call evicting for space.
- In a layer with a window (Gemma 3) the first slots are those of the window at the end of the
  prompt. They are masked out once they are outside the window.
- Models whose tokens have three rotary ids (M-RoPE) are refused, since the next slot has no defined
  position in an image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import DecodeStage, Slots
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnStats
from vlmfast.errors import RecipeError

from ..evictor import Evictor
from ..part import Part


def moves(position: Tensor, lengths: Tensor) -> Tensor:
    """Offsets that make the ids consecutive, ending at the unchanged id of the last slot.

    Parameters
    ----------
    position : Tensor, int64, (H, N)
    lengths : Tensor, int64, (H,)
        Valid slots; offsets of the others are undefined.
    """
    last = position.gather(1, lengths[:, None] - 1)
    distance = lengths[:, None] - 1 - torch.arange(position.shape[1], device=position.device)
    return last - distance - position


def oldest(order: Tensor, length: Tensor, sinks: int) -> Tensor:
    """The slot of each head, ``order`` (H, N), with the oldest token after the first ``sinks``."""
    slots = torch.arange(order.shape[1], device=order.device)
    fixed = (slots < sinks) | (slots >= length[:, None])
    return order.masked_fill(fixed, torch.iinfo(order.dtype).max).argmin(1)


@dataclass(frozen=True)
class StreamingLLM(Evictor):
    """Keeps the first few slots and a window of the last ones that slides with the answer."""

    name: ClassVar[str] = "streamingllm"
    paper: ClassVar[str] = "ICLR 2024, arXiv 2309.17453"
    tier: ClassVar[str] = "baseline"

    sinks: int = param(4, "first slots, which are always kept", ge=0)

    def expand(self) -> tuple[Stage, ...]:
        return (self, Slide(self))

    def score(self, kv: KV, stats: ColumnStats | None, ranked: Tensor) -> Tensor:
        return torch.arange(len(kv), device=kv.keys.device).expand(len(kv.keys), -1)

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        kept = super().compress(context, layer, kv, stats)
        if kept is kv or context.rotate is None:  # only the selection is wanted
            return kept
        if len(context.layout.position) > 1:
            raise RecipeError(
                f"{self.name}: the model gives each token {len(context.layout.position)} rotary "
                "ids; slots can be numbered in models with one; 'snapkv:0.5' works on this model"
            )
        delta = moves(kept.position, kept.lengths)
        context.notes.setdefault(self.name, {})[layer] = Sinks(
            kept.keys[:, : self.sinks].to(torch.float32, copy=True),
            delta[:, : self.sinks] - kept.order.gather(1, kept.lengths[:, None] - 1),
            len(kept),
        )
        keys = context.rotate(kept.keys, delta)
        return replace(kept, keys=keys, position=kept.position + delta)


@dataclass(frozen=True)
class Sinks:
    """State of one layer after its prompt.

    Parameters
    ----------
    keys : Tensor, float32, (H, sinks, D)
        Under their own rotary ids.
    delta : Tensor, int64, (H, sinks)
        Offset of these ids, less the order of the last token.
    budget : int
        Number of kept slots.
    """

    keys: Tensor
    delta: Tensor
    budget: int


@dataclass(frozen=True)
class Slide(Part, DecodeStage):
    """Evicts the oldest slot that is not a sink, and rotates the sinks."""

    name: ClassVar[str] = StreamingLLM.name

    def step(self, slots: Slots, layer: int) -> None:
        note, length = slots.notes.get(self.name, {}).get(layer), slots.max_length
        if note is None:  # the whole prompt was kept
            return
        if length < note.budget:  # the first slots may no longer be the sinks
            raise RecipeError(
                f"{self.name} must be the last method of a recipe that changes the cache: of "
                f"its {note.budget} slots in layer {layer}, {length} are left"
            )
        sinks = self.of.sinks
        for evicted in range(length + 1 - note.budget):
            slots.evict(oldest(slots.order[:, : length - evicted], slots.length, sinks))
        # The next token, number ``seen``, is the last one.
        keys = slots.rotate(note.keys, note.delta + slots.seen)
        slots.keys[:, :sinks] = keys.to(slots.keys.dtype)
