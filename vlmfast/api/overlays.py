"""Overlays that show which patches a recipe kept: dropped ones turn grey, kept ones are outlined.

Patches that were merged into one token stay in color, inside an outline of another color.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vlmfast.core.layout import Kind

if TYPE_CHECKING:
    from vlmfast.core.layout import TokenLayout
    from vlmfast.engine.stats import Trace

    from .answer import Answer

MIN_SIDE, MAX_SIDE = 448, 1024
_FRAME_SIDE = 224
_OUTLINE, _MERGED = (255, 176, 0), (0, 160, 255)
_PAPER, _INK = (255, 255, 255), (40, 40, 40)
_GAP, _FONT = 8, 14
_LEGEND = (
    "orange: around patches kept to the last layer; blue: around patches merged into one token; "
    "the darker a patch, the earlier it was dropped"
)
# Fractions of a dropped patch's brightness and color that remain.
_BRIGHTNESS, _COLOR = 0.32, 0.12
# Brightness of pixels that no token shows, such as those outside a center crop.
_UNSEEN = 0.12


def overlay(answer: Answer, *, size: int | None = None) -> list[Image.Image]:
    """Draw which visual tokens of an answer were kept, merged and dropped.

    Patches whose token reached the last layer are shown unchanged inside an outline. Patches
    dropped before the language model are dark and grey. Patches dropped between its layers are in
    between, darker if dropped earlier. Areas that no token shows are almost black. Patches merged
    into one token are drawn like it, inside a blue outline; if they are scattered, only the
    token's own patch is.

    Parameters
    ----------
    answer : Answer
    size : int, optional
        Longest side of a panel in pixels; by default that of the image, clamped to 448 to 1024.

    Returns
    -------
    list of PIL.Image.Image
        One per image or frame, with a line of text below. If the model also encoded crops, it has
        two panels: the base view and the crops.
    """
    trace = answer.trace
    if trace.layout is None:
        return []
    tokens = tokens_of(trace)
    return [
        _draw_item(image.convert("RGB"), tokens.where(tokens.item == index), answer.recipe, size)
        for index, image in enumerate(trace.images)
    ]


def contact_sheet(answers: Sequence[Answer], *, size: int | None = None) -> Image.Image:
    """Stack the overlays of several answers to one question.

    The frames of a video are drawn four per line, and smaller by default.
    """
    if size is None and max((len(answer.trace.images) for answer in answers), default=0) > 2:
        size = _FRAME_SIDE
    lines = []
    for answer in answers:
        drawn = overlay(answer, size=size)
        lines += [_stack(drawn[i : i + 4], across=True) for i in range(0, len(drawn), 4)]
    sheet = _stack(lines, across=False)
    return _caption(sheet, _LEGEND) if lines else sheet


@dataclass(frozen=True)
class Tokens:
    """The trace as arrays of equal length, one entry per visual token before anything was dropped.

    Parameters
    ----------
    item, tile : int
    patch, newline : bool
        Whether the token showed a patch or a newline.
    box : float, (N, 4)
        Bounding box of the patch.
    life : float
        Fraction of the layers that the token entered.
    shown : float
        The same for the token that shows the patch in the end.
    weight : float
        Number of tokens merged into it when it entered the language model.
    area : float, (N, 4)
        Bounding box of these.
    special : bool
        Whether a token that shows no part of the image replaced it.
    """

    item: np.ndarray
    tile: np.ndarray
    patch: np.ndarray
    newline: np.ndarray
    box: np.ndarray
    life: np.ndarray
    shown: np.ndarray
    weight: np.ndarray
    area: np.ndarray
    special: np.ndarray

    @property
    def merged(self) -> np.ndarray:
        """Kept patches that others were merged into."""
        return (self.weight > 1) & self.patch & ~self.special & (self.life == 1)

    def where(self, mask: np.ndarray) -> Tokens:
        return Tokens(*(getattr(self, f.name)[mask] for f in fields(self)))


def tokens_of(trace: Trace) -> Tokens:
    """The visual tokens of an answer, in the order of its prompt."""
    assert trace.layout is not None and trace.entered is not None and trace.depth is not None
    before, entered = trace.layout.to("cpu"), trace.entered.to("cpu")
    life = trace.depth.cpu().numpy() / max(trace.layers, 1)
    row = np.searchsorted(before.order.numpy(), entered.order.numpy())
    weight, area = np.zeros_like(life), before.box.numpy().copy()
    weight[row], area[row] = entered.weight.numpy(), entered.box.numpy()
    patch, special = _placed(before), np.zeros(len(before), dtype=bool)
    special[row] = ~_placed(entered)
    tokens = Tokens(
        item=before.item.numpy(),
        tile=before.tile.numpy(),
        patch=patch,
        newline=before.kind.numpy() == int(Kind.NEWLINE),
        box=before.box.numpy(),
        life=life,
        shown=np.where(special, 0, life),
        weight=weight,
        area=area,
        special=special & patch,
    )
    # Patches whose center is in the box of a merged token were merged into it.
    for m in np.flatnonzero((weight > 1) & patch & ~special):
        mine = patch & (tokens.item == tokens.item[m]) & (tokens.tile == tokens.tile[m])
        middle = (tokens.box[:, :2] + tokens.box[:, 2:]) / 2
        mine &= ((middle > area[m, :2]) & (middle < area[m, 2:])).all(axis=1)
        tokens.shown[mine] = np.maximum(tokens.shown[mine], life[m])
    return tokens


def _placed(layout: TokenLayout) -> np.ndarray:
    """Tokens that show a part of the image with a known position."""
    return layout.patches.numpy() & ~layout.box.isnan().any(dim=1).numpy()


def _draw_item(image: Image.Image, tokens: Tokens, recipe: str, size: int | None) -> Image.Image:
    image = resized(image, size)
    panels = []
    for name, view in _views(tokens):
        count = f"{(view.shown == 1).sum()} of {len(view.shown)} patches"
        shown_by = ((view.life == 1) & ~view.special).sum()
        if shown_by != (view.shown == 1).sum():
            count += f" in {shown_by} tokens"
        panels.append(_caption(_shade(image, view), f"{name}: {count}" if name else count))
    return _caption(_stack(panels, across=True), f"{recipe}: {described(tokens)}")


def described(tokens: Tokens) -> str:
    """How many visual tokens reached the last layer, and what became of others."""
    stayed, ends = tokens.life == 1, tokens.newline
    text = f"{stayed.sum()} of {len(stayed)} visual tokens kept"
    if ends.any():
        text += f" (row ends: {(stayed & ends).sum()} of {ends.sum()})"
    if ((tokens.life > 0) & ~stayed).any():
        text += f"; {tokens.life.sum():.0f} averaged over the layers"
    if tokens.merged.any():
        sources = tokens.weight[tokens.merged].sum()
        text += f"; {tokens.merged.sum()} merged from {sources:.0f} (blue)"
    if (tokens.special & stayed).any():
        text += f"; {(tokens.special & stayed).sum()} show a whole view"
    return text


def _views(tokens: Tokens) -> list[tuple[str, Tokens]]:
    """The patches of one image: all, or those of the base view and those of its crops."""
    crop = tokens.tile > 0
    if not crop.any():
        return [("", tokens.where(tokens.patch))]
    return [
        ("base view", tokens.where(tokens.patch & ~crop)),
        ("crops", tokens.where(tokens.patch & crop)),
    ]


def resized(image: Image.Image, size: int | None) -> Image.Image:
    """The image with a longer side of ``size``; by default in `MIN_SIDE` to `MAX_SIDE`."""
    longest = max(image.size)
    target = min(max(longest, MIN_SIDE), MAX_SIDE) if size is None else size
    width, height = (max(1, round(side * target / longest)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _shade(image: Image.Image, tokens: Tokens) -> Image.Image:
    pixels = np.asarray(image, dtype=np.float32)
    width, height = image.size
    life, scale = lives(image, tokens), [width, height, width, height]
    gone = 1 - np.clip(life, 0, 1)[..., None]
    grey = pixels @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    dim = _BRIGHTNESS * (_COLOR * pixels + (1 - _COLOR) * grey[..., None])
    pixels = np.where(life[..., None] < 0, _UNSEEN * pixels, pixels + gone * (dim - pixels))
    kept, thickness = life == 1, max(1, round(max(width, height) / 300))
    if not kept.all():
        pixels[_rim(kept, thickness)] = _OUTLINE
    for left, top, right, bottom in np.round(tokens.area[tokens.merged] * scale).astype(int):
        group = pixels[top:bottom, left:right]
        group[_rim(np.ones(group.shape[:2], dtype=bool), thickness)] = _MERGED
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def lives(image: Image.Image, tokens: Tokens) -> np.ndarray:
    """Fraction of the layers that shows each pixel, float32, (H, W); -1 where no token does."""
    width, height = image.size
    life = np.full((height, width), -1.0, dtype=np.float32)
    corners = np.round(tokens.box * [width, height, width, height]).astype(int)
    for (left, top, right, bottom), value in zip(corners, tokens.shown, strict=True):
        # Boxes of neighbouring crops may overlap at the border: the later drop wins.
        patch = life[top:bottom, left:right]
        np.maximum(patch, value, out=patch)
    return life


def _rim(mask: np.ndarray, thickness: int) -> np.ndarray:
    """Pixels of ``mask`` within ``thickness`` of its border, the image's edge included."""
    inner = np.pad(mask, 1)
    for _ in range(thickness):
        inner[1:-1, 1:-1] &= inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
    return mask & ~inner[1:-1, 1:-1]


def _caption(image: Image.Image, text: str) -> Image.Image:
    """Draw ``text`` below an image, wrapped to its width."""
    font, lines = ImageFont.load_default(_FONT), [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > image.width - 2:
            lines.append(word)
        else:
            lines[-1] = longer
    width = max(image.width, *(round(font.getlength(line)) + 2 for line in lines))
    step = round(font.getbbox("Ag")[3]) + 3
    canvas = Image.new("RGB", (width, image.height + step * len(lines) + 3), _PAPER)
    canvas.paste(image, (0, 0))
    for number, line in enumerate(lines):
        corner = (1, image.height + 3 + step * number)
        ImageDraw.Draw(canvas).text(corner, line, fill=_INK, font=font)
    return canvas


def _stack(images: list[Image.Image], *, across: bool) -> Image.Image:
    """Stack images in a row or a column, with gaps."""
    if not images:
        return Image.new("RGB", (1, 1), _PAPER)
    along = [p.width if across else p.height for p in images]
    length = sum(along) + _GAP * (len(images) - 1)
    depth = max(p.height if across else p.width for p in images)
    canvas = Image.new("RGB", (length, depth) if across else (depth, length), _PAPER)
    offset = 0
    for image, step in zip(images, along, strict=True):
        canvas.paste(image, (offset, 0) if across else (0, offset))
        offset += step + _GAP
    return canvas
