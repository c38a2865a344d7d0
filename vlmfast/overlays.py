"""Pictures of what a recipe kept: dropped patches lose their colour, kept ones get an outline."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .layout import Kind

if TYPE_CHECKING:
    from .vlm import Answer

MIN_SIDE, MAX_SIDE = 448, 1024
_FRAME_SIDE = 224
_OUTLINE = (255, 176, 0)
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
_GAP, _FONT = 8, 14
# How much of a dropped patch's brightness stays, and how much of its colour.
_BRIGHTNESS, _COLOUR = 0.32, 0.12
# What no token ever showed, such as the rim that a centre crop cuts off.
_UNSEEN = 0.12


def overlay(answer: Answer, *, size: int | None = None) -> list[Image.Image]:
    """Draw what became of the visual tokens of an answer.

    A patch whose token stayed to the last layer is shown as it is, inside an outline; one dropped
    before the language model is dark and grey; one dropped between its layers lies in between, the
    darker the earlier. What no token showed is black.

    Parameters
    ----------
    answer : Answer
    size : int, optional
        Longest side of a panel in pixels; by default that of the picture, but at least 448 and at
        most 1024.

    Returns
    -------
    list of PIL.Image.Image
        One per picture or frame, with a line of text below. Where the model also looked at crops
        there are two panels: the base view and the crops.
    """
    trace = answer.trace
    if trace.layout is None:
        return []
    layout = trace.layout.to("cpu")
    tokens = _Tokens(
        item=layout.item.numpy(),
        crop=layout.tile.numpy() > 0,
        patch=layout.patches.numpy() & ~np.isnan(layout.box.numpy()).any(axis=1),
        newline=layout.kind.numpy() == int(Kind.NEWLINE),
        box=layout.box.numpy(),
        life=trace.depth.cpu().numpy() / max(trace.layers, 1),
    )
    return [
        _draw_item(picture.convert("RGB"), tokens.where(tokens.item == index), answer.recipe, size)
        for index, picture in enumerate(trace.images)
    ]


def contact_sheet(answers: list[Answer], *, size: int | None = None) -> Image.Image:
    """The overlays of several answers to one question, below each other.

    The frames of a clip stand side by side, four in a line, and are drawn smaller by default.
    """
    if size is None and max((len(answer.trace.images) for answer in answers), default=0) > 2:
        size = _FRAME_SIDE
    lines = []
    for answer in answers:
        drawn = overlay(answer, size=size)
        lines += [_stack(drawn[i : i + 4], across=True) for i in range(0, len(drawn), 4)]
    return _stack(lines, across=False)


@dataclass(frozen=True)
class _Tokens:
    """The trace as arrays of equal length, one entry per visual token."""

    item: np.ndarray
    crop: np.ndarray
    patch: np.ndarray
    newline: np.ndarray
    box: np.ndarray
    life: np.ndarray  # share of the layers that the token entered

    def where(self, mask: np.ndarray) -> _Tokens:
        return _Tokens(*(getattr(self, f.name)[mask] for f in fields(self)))


def _draw_item(picture: Image.Image, tokens: _Tokens, recipe: str, size: int | None) -> Image.Image:
    picture = _resize(picture, size)
    views = [("", tokens.where(tokens.patch))]
    if tokens.crop.any():
        views = [
            ("base view", tokens.where(tokens.patch & ~tokens.crop)),
            ("crops", tokens.where(tokens.patch & tokens.crop)),
        ]
    panels = []
    for name, view in views:
        count = f"{(view.life == 1).sum()} of {len(view.life)} patches"
        panels.append(_caption(_shade(picture, view), f"{name}: {count}" if name else count))
    total, kept = len(tokens.life), int((tokens.life == 1).sum())
    line = f"{recipe}: {kept} of {total} visual tokens"
    if tokens.newline.any():
        ends = tokens.life[tokens.newline]
        line += f" ({(ends == 1).sum()} of {len(ends)} row ends)"
    partly = (tokens.life > 0) & (tokens.life < 1)
    if partly.any():
        line += f"; {tokens.life.sum():.0f} averaged over the layers"
    return _caption(_stack(panels, across=True), line)


def _resize(picture: Image.Image, size: int | None) -> Image.Image:
    longest = max(picture.size)
    target = min(max(longest, MIN_SIDE), MAX_SIDE) if size is None else size
    scaled = tuple(max(1, round(side * target / longest)) for side in picture.size)
    return picture.resize(scaled, Image.Resampling.BICUBIC)


def _shade(picture: Image.Image, tokens: _Tokens) -> Image.Image:
    pixels = np.asarray(picture, dtype=np.float32)
    height, width = pixels.shape[:2]
    life = np.full((height, width), -1.0, dtype=np.float32)
    corners = np.round(tokens.box * [width, height, width, height]).astype(int)
    for (left, top, right, bottom), value in zip(corners, tokens.life, strict=True):
        # Boxes of neighbouring crops may share a border: the token that lived longer shows.
        patch = life[top:bottom, left:right]
        np.maximum(patch, value, out=patch)
    gone = 1 - np.clip(life, 0, 1)[..., None]
    grey = pixels @ np.float32([0.299, 0.587, 0.114])
    dim = _BRIGHTNESS * (_COLOUR * pixels + (1 - _COLOUR) * grey[..., None])
    pixels = np.where(life[..., None] < 0, _UNSEEN * pixels, pixels + gone * (dim - pixels))
    kept = life == 1
    if not kept.all():
        pixels[_rim(kept, max(1, round(max(width, height) / 300)))] = _OUTLINE
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def _rim(mask: np.ndarray, thickness: int) -> np.ndarray:
    """Pixels of ``mask`` that lie within ``thickness`` of its border (the picture's edge too)."""
    inner = np.pad(mask, 1)
    for _ in range(thickness):
        inner[1:-1, 1:-1] &= inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
    return mask & ~inner[1:-1, 1:-1]


def _caption(picture: Image.Image, text: str) -> Image.Image:
    font = ImageFont.load_default(_FONT)
    _, _, right, bottom = font.getbbox(text)
    width = max(picture.width, round(right) + 2)
    canvas = Image.new("RGB", (width, picture.height + round(bottom) + 6), _PAPER)
    canvas.paste(picture, (0, 0))
    ImageDraw.Draw(canvas).text((1, picture.height + 3), text, fill=_INK, font=font)
    return canvas


def _stack(pictures: list[Image.Image], *, across: bool) -> Image.Image:
    """Pictures in a row or a column, with a gap between them."""
    if not pictures:
        return Image.new("RGB", (1, 1), _PAPER)
    along = [p.width if across else p.height for p in pictures]
    length = sum(along) + _GAP * (len(pictures) - 1)
    depth = max(p.height if across else p.width for p in pictures)
    canvas = Image.new("RGB", (length, depth) if across else (depth, length), _PAPER)
    offset = 0
    for picture, step in zip(pictures, along, strict=True):
        canvas.paste(picture, (offset, 0) if across else (0, offset))
        offset += step + _GAP
    return canvas
