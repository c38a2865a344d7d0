"""Draw the visual tokens that a recipe kept: the input, and a mask over what was dropped.

Kept patches are the pixels of the input. The page dims the mask, so no new image is needed.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlmfast.api import overlays
from vlmfast.api.answer import Answer

_FRAME_SIDE = 320  # pixels of the longest side
_QUALITY = 90


@dataclass(frozen=True)
class View:
    """One panel: an image and which of its visual tokens were kept.

    Parameters
    ----------
    image : PIL.Image.Image
    dropped : float32, (H, W)
        How early each pixel was dropped: 0 if it reached the last layer, 1 if it was dropped before
        the language model or no token shows it.
    merged : float, (G, 4)
        Bounding boxes of merged groups, as fractions of the image.
    name : str
        Empty if the image has only one panel.
    kept, total : int
        Number of visual tokens.
    """

    image: Image.Image
    dropped: np.ndarray
    merged: np.ndarray
    name: str
    kept: int
    total: int

    @property
    def caption(self) -> str:
        count = f"{self.kept} of {self.total} tokens"
        return f"{self.name}: {count}" if self.name else count


def views(answer: Answer, *, size: int | None = None) -> list[View]:
    """The panels of an answer.

    An image has one, or one for its crops and one for its base view. A frame of a video has one: a
    patch of it is kept if it is in the crops or in the base view.

    Parameters
    ----------
    answer : Answer
    size : int, optional
        Longest side of a panel in pixels.
    """
    trace, found = answer.trace, []
    if trace.layout is None:
        return []
    tokens = overlays.tokens_of(trace)
    frames = len(trace.images) > 1
    for index, image in enumerate(trace.images):
        mine = tokens.where(tokens.item == index)
        crop, small = mine.tile > 0, overlays.resized(image.convert("RGB"), size)
        if frames:
            parts = [(f"Frame {index + 1}", mine)]
        elif crop.any():
            parts = [("Crops", mine.where(crop)), ("Base view", mine.where(~crop))]
        else:
            parts = [("", mine)]
        found += [_view(small, part, name) for name, part in parts if part.patch.any()]
    return found


def summary(answer: Answer) -> str:
    """How many visual tokens reached the last layer, with those that no panel counts."""
    trace = answer.trace
    if trace.layout is None:
        return ""
    return overlays.described(overlays.tokens_of(trace))


def kept_html(answer: Answer) -> str:
    """The panels of an answer as HTML."""
    frames = len(answer.trace.images) > 1
    drawn = views(answer, size=_FRAME_SIDE if frames else None)
    figures = [_figure(v.image, v.dropped, v.merged, v.caption) for v in drawn]
    return _figures(figures, frames, html.escape(summary(answer)))


def plain_html(images: Sequence[Image.Image]) -> str:
    """Images without tokens, such as during an answer."""
    size = _FRAME_SIDE if len(images) > 1 else None
    small = [overlays.resized(image.convert("RGB"), size) for image in images]
    figures = [_figure(image, None, np.zeros((0, 4)), "") for image in small]
    return _figures(figures, len(images) > 1, "")


def _figures(figures: Sequence[str], frames: bool, below: str) -> str:
    kind = "frames" if frames else "image"
    line = f'<p class="kept-summary">{below or "&nbsp;"}</p>'
    return f'<div class="views {kind}">{"".join(figures)}</div>{line}'


def _view(image: Image.Image, tokens: overlays.Tokens, name: str) -> View:
    patches, counted = tokens.where(tokens.patch), tokens.where(~tokens.newline)
    life = overlays.lives(image, patches)
    kept = int((counted.life == 1).sum())
    merged = patches.area[patches.merged]
    return View(image, 1 - life.clip(0, 1), merged, name, kept, len(counted.life))


# --- HTML ----------------------------------------------------------------------------------------


def _figure(
    image: Image.Image, dropped: np.ndarray | None, merged: np.ndarray, caption: str
) -> str:
    width, height = image.size
    layers = f'<img src="{_jpeg(image)}" alt="{html.escape(caption or "Input")}">'
    if dropped is not None:
        layers += f'<img class="mask" src="{_mask(dropped)}" alt="">'
    if len(merged):
        layers += _outlines(merged)
    below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    shape = f"--ratio: {width / height:.4f}"
    return f'<figure style="{shape}"><div class="layers">{layers}</div>{below}</figure>'


def _outlines(boxes: np.ndarray) -> str:
    lines = "".join(
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" '
        f'height="{bottom - top:.2f}"/>'
        for left, top, right, bottom in boxes * 100
    )
    return (
        '<svg class="merged" viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'aria-hidden="true">{lines}</svg>'
    )


def _jpeg(image: Image.Image) -> str:
    return _url(image, "JPEG", quality=_QUALITY)


def _mask(dropped: np.ndarray) -> str:
    """Black, as opaque as the pixels were dropped early."""
    alpha = (dropped * 255).round().astype(np.uint8)
    return _url(Image.fromarray(np.stack([np.zeros_like(alpha), alpha], axis=-1), "LA"), "PNG")


def _url(image: Image.Image, kind: str, **options: int) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
