"""Splits a padded batch into prompts: assigns pixels to rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from vlmfast.errors import ModelError

from ._media import Items, Media, Tensors
from .base import Adapter


def split(
    adapter: Adapter, batch: Tensors, mask: Tensor
) -> list[tuple[Tensors, list[tuple[int, int]], Items]]:
    """Split a batch into its rows, as single prompts without padding.

    Parameters
    ----------
    adapter : Adapter
    batch : dict of str to Tensor
        The processor's output: ``input_ids`` (B, S), pixels and the tensors that belong to them.
    mask : Tensor, bool, (B, S)
        False for padding.

    Returns
    -------
    list of (tensors, sizes, items)
        For each row, as in `engine.prefill.Inputs`.

    Raises
    ------
    ModelError
        If images and placeholders do not match.
    """
    shape = batch["input_ids"].shape
    ids = [row[real] for row, real in zip(batch["input_ids"], mask, strict=True)]
    images, videos = adapter.images_in(batch, ids), adapter.videos_in(batch, ids)
    waiting = iter(images), iter(videos)
    rows = []
    for number, row_ids in enumerate(ids):
        media = list(_media_of(adapter, row_ids, *waiting, number))
        own = {
            key: value[number][mask[number]][None]
            for key, value in batch.items()
            if value.shape == shape and key != "attention_mask"
        }
        own |= adapter.joined([one.tensors for one in media])
        rows.append((own, [one.size for one in media], adapter.items_of(own, media)))
    left = sum(1 for media in waiting for _ in media)
    if left:
        raise ModelError(
            f"the batch has {len(images)} images and {len(videos)} videos, {left} of them "
            "without placeholders in the prompts"
        )
    return rows


def _media_of(
    adapter: Adapter, ids: Tensor, images: Iterator[Media], videos: Iterator[Media], row: int
) -> Iterator[Media]:
    """The images and videos of one row, in the order of their placeholders."""
    here, at = adapter.visual(ids), 0
    marks, modalities = ids[here], adapter.modalities(ids)[here].tolist()
    while at < len(marks):
        is_image = modalities[at] == 1
        one = next(images if is_image else videos, None)
        kind = "image" if is_image else "video"
        if one is None:
            raise ModelError(f"row {row} of the batch has placeholders of one {kind} too many")
        own = marks[at : at + one.tokens]
        if one.tokens < 1 or len(own) < one.tokens or bool((own != own[0]).any()):
            raise ModelError(
                f"row {row} of the batch has {int((marks == marks[at]).sum())} placeholders of "
                f"{kind}s, which do not fit {kind}s of {one.tokens} visual tokens; was the prompt "
                "cut off (truncation=True), or made by another processor?"
            )
        at += one.tokens
        yield one
