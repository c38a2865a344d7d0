"""A padded batch of prompts, taken apart again: which pixels belong to which row."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from vlmfast.core.statistics import ItemGeometry
from vlmfast.errors import ModelError

from ._media import Media
from .base import Adapter


def split(
    adapter: Adapter, batch: dict[str, Tensor], mask: Tensor
) -> list[tuple[dict[str, Tensor], list[tuple[int, int]], tuple[ItemGeometry, ...]]]:
    """The rows of a batch as prompts of their own, without padding.

    Parameters
    ----------
    adapter : Adapter
    batch : dict of str to Tensor
        What the family's processor gave: ``input_ids`` (B, S), pixels and what belongs to them.
    mask : Tensor, bool, (B, S)
        Which ids are no padding.

    Returns
    -------
    list of (tensors, sizes, items)
        Of each row, as in `engine.prefill.Inputs`.

    Raises
    ------
    ModelError
        When pictures and placeholders do not belong together.
    """
    shape = batch["input_ids"].shape
    ids = [row[there] for row, there in zip(batch["input_ids"], mask, strict=True)]
    pictures, clips = adapter.pictures_in(batch, ids), adapter.clips_in(batch, ids)
    waiting = iter(pictures), iter(clips)
    rows = []
    for number, of in enumerate(ids):
        media = list(_placed(adapter, of, *waiting, number))
        own = {
            key: value[number][mask[number]][None]
            for key, value in batch.items()
            if value.shape == shape and key != "attention_mask"
        }
        own |= adapter.joined([one.tensors for one in media])
        rows.append((own, [one.size for one in media], adapter.items_of(own, media)))
    left = sum(1 for some in waiting for _ in some)
    if left:
        raise ModelError(
            f"the batch has {len(pictures)} pictures and {len(clips)} clips, {left} of them "
            "without placeholders in the prompts"
        )
    return rows


def _placed(
    adapter: Adapter, ids: Tensor, pictures: Iterator[Media], clips: Iterator[Media], row: int
) -> Iterator[Media]:
    """The pictures and clips of one row, in the order of their placeholders."""
    marks, at = ids[adapter.visual(ids)], 0
    while at < len(marks):
        picture = int(marks[at]) == adapter.image_token_id
        one = next(pictures if picture else clips, None)
        kind = "picture" if picture else "clip"
        if one is None:
            raise ModelError(f"row {row} of the batch has placeholders of a {kind} too many")
        own = marks[at : at + one.tokens]
        if one.tokens < 1 or len(own) < one.tokens or bool((own != own[0]).any()):
            raise ModelError(
                f"row {row} of the batch has {int((marks == marks[at]).sum())} placeholders of "
                f"{kind}s, which do not fit pictures of {one.tokens} visual tokens; was the prompt "
                "cut off (truncation=True), or made by another processor?"
            )
        at += one.tokens
        yield one
