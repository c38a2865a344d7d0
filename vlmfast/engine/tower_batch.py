"""One forward pass of the vision tower over the images of several prompts that wait.

The tower runs prompt by prompt, so the first prompt never waits for the images of another one. On a
device that one prompt leaves idle, more images take hardly more time: then all prompts of a burst
have their first token earlier, except the first one. Which of the two is better depends on device
and load, so the engine has a setting for it, ``tower_batch_bytes``.

Features do not depend on the other images, apart from rounding. Stages that look at all images of a
prompt inside the tower keep their prompts apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import islice

from vlmfast.core import snapshot
from vlmfast.core.statistics import ItemGeometry
from vlmfast.models.base import Adapter

from .features import Ahead, separated, stored
from .prefill import Inputs, items_of
from .sequence import Sequence
from .stats import Stats, clock
from .vision import Wanted, encode


def chosen(
    adapter: Adapter, first: Sequence, waiting: Iterable[Sequence], limit: int
) -> list[Sequence]:
    """The prompts whose images are encoded with those of ``first``, itself included.

    Parameters
    ----------
    waiting : iterable of Sequence
        In the order in which they will be prefilled.
    limit : int
        Most bytes of features.

    Returns
    -------
    list of Sequence
        Empty where ``first`` is encoded alone.
    """
    if (asked := _asked(adapter, first)) is None:
        return []
    found, left = [first], limit - feature_bytes(adapter, first.inputs)
    images = _digests(first.inputs)
    for other in waiting:
        if (other.recipe, other.mode) != (first.recipe, first.mode):
            continue
        # The same image is encoded once, and found afterwards.
        if images & _digests(other.inputs) or _asked(adapter, other) != asked:
            continue
        left -= feature_bytes(adapter, other.inputs)
        if left < 0:
            break
        found.append(other)
        images |= _digests(other.inputs)
    return found if len(found) > 1 else []


def encode_ahead(adapter: Adapter, sequences: Many[Sequence]) -> None:
    """Encode the images of several prompts in one pass; `prefill.look` takes them from there."""
    prompts = [sequence.inputs for sequence in sequences]
    own_items = [items_of(adapter, inputs) for inputs in prompts]
    tensors = adapter.joined(
        [  # pixels of requests that wait are in host memory
            snapshot.moved(part.tensors, adapter.device)
            for inputs, items in zip(prompts, own_items, strict=True)
            for part in adapter.parts(inputs.tensors, items) or ()
        ]
    )
    wanted = Wanted.by(sequences[0].recipe, adapter, own_items[0])
    start = clock(adapter.device)
    images = encode(adapter, tensors, _listed(own_items), wanted, Stats(), {}, capture=False)
    seconds = clock(adapter.device) - start
    everything = iter(separated(images.encoded))
    total = sum(map(len, images.encoded.features))
    for inputs, items in zip(prompts, own_items, strict=True):
        own = tuple(islice(everything, len(items)))
        share = sum(len(item.features) for item in own) / total
        inputs.ahead = Ahead(wanted, own, images.notes, seconds * share)


def feature_bytes(adapter: Adapter, inputs: Inputs) -> int:
    """Bytes of the features of a prompt's images."""
    tokens = int(adapter.visual(inputs.tensors["input_ids"]).sum())
    return tokens * adapter.width * adapter.dtype.itemsize


def _asked(adapter: Adapter, sequence: Sequence) -> tuple[Wanted, frozenset[str]] | None:
    """What the tower is asked for, and the names of the tensors that it takes.

    ``None`` where a prompt does not need the tower, or needs it alone.
    """
    inputs = sequence.inputs
    if sequence.prefill is not None or not inputs.sizes or inputs.ahead is not None:
        return None
    items = items_of(adapter, inputs)
    wanted = Wanted.by(sequence.recipe, adapter, items)
    parts = None if wanted.joint else adapter.parts(inputs.tensors, items)
    if not parts or any(part.tensors.keys() != parts[0].tensors.keys() for part in parts):
        return None  # images and videos take turns in the tower
    known = inputs.hashed
    if known is not None and stored(adapter, items, known, wanted, inputs.tenant):
        return None
    return wanted, frozenset(parts[0].tensors)


def _digests(inputs: Inputs) -> set[bytes]:
    return {image.digest for image in inputs.hashed or ()}


def _listed(prompts: Many[tuple[ItemGeometry, ...]]) -> tuple[ItemGeometry, ...]:
    """The images of several prompts, as those of one."""
    found: list[ItemGeometry] = []
    views = videos = 0
    for items in prompts:
        for item in items:
            first, stop = item.views
            video = item.video if item.video < 0 else item.video + videos
            found.append(replace(item, views=(first + views, stop + views), video=video))
        views += max(item.views[1] for item in items)
        videos += 1 + max(item.video for item in items)
    return tuple(found)
