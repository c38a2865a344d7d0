"""The images and videos of a session: as the processor gives them, and after the tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlmfast.core.recipe import Recipe
from vlmfast.engine.prefill import Inputs, Seen
from vlmfast.engine.stats import Stats, Trace
from vlmfast.media import FrameTimes
from vlmfast.models.base import Adapter

from .conversation import before, split, tail_ids, turns
from .request import Rendered, render, tensors_of


def is_pixels(name: str) -> bool:
    """Whether a tensor of the processor depends on more than the sizes of the images."""
    return name.startswith("pixel_values")


@dataclass
class Media:
    """The media in the first turn of a conversation, before the tower.

    Parameters
    ----------
    content : list of dict
        That turn without its question, as chat templates take it.
    head : str
        The prompt's text up to its last image.
    prefix : list of int
        Its ids.
    tail : list of int
        Ids of a question after it that nobody asks.
    sizes, frames : list
        As in `engine.prefill.Inputs`.
    times : list of FrameTimes
        Of each video.
    tensors : dict of str to Tensor
        Outputs of the processor other than ids.
    images : list of PIL.Image.Image
        For overlays.
    """

    content: list[dict]
    head: str
    prefix: list[int]
    tail: list[int]
    sizes: list[tuple[int, int]]
    frames: list[tuple]
    times: list[FrameTimes]
    tensors: dict[str, Tensor]
    images: list[Any]

    @staticmethod
    def of(adapter: Adapter, content: list[dict], prompt: Rendered) -> Media:
        """``content`` after the processor; ``prompt`` has its images."""
        prompt.text = render(adapter, turns(content, [], "?"), Recipe()).text
        tensors = tensors_of(adapter, prompt)
        head, tail = split(prompt.text, adapter.marks())
        ids = tensors.pop("input_ids")[0].tolist()
        tensors.pop("attention_mask", None)
        return Media(
            content,
            head,
            before(adapter, ids, tail),
            tail_ids(adapter, tail),
            prompt.sizes,
            prompt.frames,
            prompt.times,
            tensors,
            prompt.images,
        )

    def inputs(self, adapter: Adapter, ids: Tensor, *, pixels: bool, **more: Any) -> Inputs:
        """The prompt ``ids`` (1, S) about them; ``more`` is as in `Inputs`.

        Parameters
        ----------
        pixels : bool
            Whether the tower will read them.
        """
        tensors = {
            key: adapter.moved(key, value)
            for key, value in self.tensors.items()
            if pixels or not is_pixels(key)
        }
        return Inputs({**tensors, "input_ids": ids}, self.sizes, frames=self.frames, **more)


@dataclass
class Images(Media):
    """A session's images and their features; tensors in host memory.

    Parameters
    ----------
    seen : Seen
    stats, trace
        State after the tower.
    digests : tuple of str
        Of their content, see `engine.features.Hashed`.
    """

    seen: Seen
    stats: Stats
    trace: Trace
    digests: tuple[str, ...]
