"""The images of a session, and the parts of a file of a session once they are checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from vlmfast.core.recipe import Recipe
from vlmfast.engine.prefill import Seen
from vlmfast.engine.prefix import Prefix
from vlmfast.engine.stats import Stats, Trace
from vlmfast.media import FrameTimes
from vlmfast.models.base import Adapter

from . import session_checks, session_file
from .conversation import Consumed, before, split, turns
from .request import render

_MOST = 8  # caches of a file


@dataclass
class Images:
    """A session's images and their features; tensors in host memory.

    Parameters
    ----------
    media : list of dict
        The first user turn without its question, as chat templates take it.
    head : str
        The prompt's text up to its last image.
    prefix : list of int
        Its ids.
    sizes, frames : list
        As in `engine.prefill.Inputs`.
    tensors : dict of str to Tensor
        Outputs of the processor other than ids and pixels.
    pixels : dict of str to Tensor
        The pixels, if the recipe works inside the tower and full features must be recomputed.
    seen : Seen
    stats, trace
        State after the tower.
    images : list of PIL.Image.Image
        For overlays.
    digests : tuple of str
        Of their content, see `engine.features.Hashed`.
    times : list of FrameTimes
        Of each video.
    """

    media: list[dict]
    head: str
    prefix: list[int]
    sizes: list[tuple[int, int]]
    frames: list[tuple]
    tensors: dict[str, Tensor]
    pixels: dict[str, Tensor]
    seen: Seen
    stats: Stats
    trace: Trace
    images: list[Any] = field(default_factory=list)
    digests: tuple[str, ...] = ()
    times: list[FrameTimes] = field(default_factory=list)


def checked(
    adapter: Adapter, recipe: Recipe, state: dict[str, Any]
) -> tuple[Images | None, list[Prefix]]:
    """Images and caches of a file, after checking that all of it is consistent.

    Raises
    ------
    ValueError
        For the first part that is not.
    """
    keys = ("history", "messages", "consumed", "stats", "pictures", "caches")
    session_checks.need(state.keys() == set(keys), "its parts are others")
    known, caches = state["pictures"], state["caches"]
    session_checks.need(isinstance(state["stats"], Stats), "stats are none")
    session_checks.check_messages(state["messages"], state["history"])
    top = -1
    if known is not None:
        session_checks.need(isinstance(known, Images), "its images are none")
        session_checks.check_images(known, adapter)
        tensors, length = _blank_prompt(adapter, known, state["messages"])
        session_checks.check_seen(known, adapter, recipe, tensors, length)
        top = int(adapter.positions(tensors)[:, :length].max())
        trained = {s.name: adapter.trained(s) for s in recipe if s.trained}
        known.seen = replace(known.seen, trained=trained)
    if (consumed := state["consumed"]) is not None:
        session_checks.need(isinstance(consumed, Consumed), "its conversation is none")
        session_checks.check_consumed(consumed, known, adapter)
    session_checks.need(isinstance(caches, list) and len(caches) <= _MOST, "it has many caches")
    wanted = {"ids", "stats", "trace", *session_file.OF_CACHE}
    for cache in caches:
        fine = isinstance(cache, dict) and cache.keys() == wanted
        session_checks.need(fine, "its cache lacks parts")
        fine = isinstance(cache["stats"], Stats) and isinstance(cache["trace"], Trace)
        session_checks.need(fine, "its cache has no stats or no trace")
        session_checks.check_cache(cache, adapter, recipe, known, top)
    return known, [session_file.thawed(adapter, recipe, cache) for cache in caches]


def _blank_prompt(
    adapter: Adapter, known: Images, messages: list[dict]
) -> tuple[dict[str, Tensor], int]:
    """The processor's output for blank images of the same sizes.

    Returns its tensors, and the number of ids before the question.
    """
    from PIL import Image

    # The conversation too: a placeholder in it would be mistaken for one of the images.
    for said in (messages, []):
        text = render(adapter, turns(known.media, said, "?"), Recipe()).text
        head, tail = split(text, adapter.marks())
        session_checks.need(head == known.head, "its images stand in another prompt")
    blanks = [Image.new("RGB", (width, height)) for height, width in known.sizes]
    tensors = adapter.inputs(text, blanks, known.frames, known.times)
    return tensors, len(before(adapter, tensors["input_ids"][0].tolist(), tail))
