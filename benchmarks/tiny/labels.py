"""Per-patch labels of a drawn frame, for the dense heads (numpy only).

A view is one 64 x 64 input of the vision encoder: 8 x 8 patches of 8 pixels. The overview covers
the whole image, a tile one quarter of a 128-pixel one.
"""

from __future__ import annotations

import numpy as np

from vlmfast.scenes.drawing import SIGN_ID, Raster, Scene
from vlmfast.scenes.vocabulary import COLOR_NAMES, SHAPES

GRID = 8
FIELDS: dict[str, int] = {
    "shape": len(SHAPES) + 3,  # none, shapes, sign, bar
    "color": len(COLOR_NAMES) + 1,
    "size": 3,
    "tex": 3,
    "char": 37,
    "centre": 2,
    "row": GRID,
    "col": GRID,
    "view": 3,  # tile, overview, both at once (a 64-pixel frame)
}
CLS_BITS = len(COLOR_NAMES) + len(SHAPES) + len(COLOR_NAMES) * len(SHAPES) + 2
CLS_COUNTS = 7


def views(canvas: int) -> list[tuple[int, int, int]]:
    """Views of an image as ``(y, x, side)`` in canvas pixels: overview first, tiles by row."""
    steps = range(0, canvas, 64)
    return [(0, 0, canvas), *((y, x, 64) for y in steps for x in steps)]


def _majority(values: np.ndarray, classes: int, least: float) -> np.ndarray:
    """Most frequent non-zero value per patch, 0 where it covers less than ``least``; (64,)."""
    p = values.shape[0] // GRID
    cells = values.reshape(GRID, p, GRID, p).transpose(0, 2, 1, 3).reshape(GRID * GRID, p * p)
    flat = (cells.astype(np.int64) + np.arange(GRID * GRID)[:, None] * classes).ravel()
    counts = np.bincount(flat, minlength=GRID * GRID * classes).reshape(GRID * GRID, classes)
    counts[:, 0] = 0
    best = counts.argmax(1)
    return np.where(counts[np.arange(GRID * GRID), best] >= least * p * p, best, 0)


_ROWS, _COLS = np.divmod(np.arange(GRID * GRID), GRID)


def label_frame(scene: Scene, raster: Raster, frame: int = 0) -> dict[str, np.ndarray]:
    """Label all views of one frame.

    Returns
    -------
    dict
        ``fields (V, 64, 9) uint8`` in the order of :data:`FIELDS`; ``place (V, 64, 2) float32``,
        the centre (x, y) of the patch's object in the view, in [-1, 1] (bars: their top), the
        patch's own centre on background; ``bits (V, CLS_BITS) uint8`` and ``count (V,) uint8``
        for the CLS heads; ``owner (V, 64) uint8``, the number of the object in a patch.
    """
    table = np.zeros((16, 4), np.uint8)
    centre = np.zeros((16, 2), np.float32)
    for i, t in enumerate(scene.things):
        table[1 + i] = (
            1 + SHAPES.index(t.shape),
            1 + COLOR_NAMES.index(t.color),
            1 + (t.size == "large"),
            1 + (t.tex == "striped"),
        )
        centre[1 + i] = t.at(frame)
    for i, b in enumerate(scene.bars):
        table[1 + i] = (len(SHAPES) + 2, 1 + COLOR_NAMES.index(b.color), 0, 0)
        centre[1 + i] = ((b.x0 + b.x1) / 2, b.top)
    if scene.sign is not None:
        s = scene.sign
        table[SIGN_ID] = (len(SHAPES) + 1, 0, 0, 0)
        centre[SIGN_ID] = (s.x0 + s.width / 2, s.y0 + s.height / 2)
    boxes = views(scene.canvas)
    fields = np.zeros((len(boxes), GRID * GRID, len(FIELDS)), np.uint8)
    place = np.zeros((len(boxes), GRID * GRID, 2), np.float32)
    bits = np.zeros((len(boxes), CLS_BITS), np.uint8)
    count = np.zeros(len(boxes), np.uint8)
    owner = np.zeros((len(boxes), GRID * GRID), np.uint8)
    visible = [t for t in scene.things if frame + 1 >= t.appear]
    for v, (y0, x0, side) in enumerate(boxes):
        crop = raster.ids[y0 : y0 + side, x0 : x0 + side]
        ids = _majority(crop, 16, 0.07)
        fields[v, :, :4] = table[ids]
        owner[v] = ids
        fields[v, :, 4] = _majority(raster.chars[y0 : y0 + side, x0 : x0 + side], 37, 0.2)
        relative = (centre - (x0, y0)) / side * 2 - 1
        own = np.stack([(_COLS + 0.5) / 4 - 1, (_ROWS + 0.5) / 4 - 1], 1)
        place[v] = np.where(ids[:, None] > 0, np.clip(relative, -1.3, 1.3)[ids], own)
        for i, t in enumerate(scene.things):
            cx, cy = ((relative[1 + i] + 1) * 4).astype(int)
            if t in visible and 0 <= cx < GRID and 0 <= cy < GRID:
                patch = cy * GRID + cx
                owner[v, patch] = 1 + i
                fields[v, patch, :4] = table[1 + i]  # a centre belongs to its object
                place[v, patch] = relative[1 + i]
                fields[v, patch, 5] = 1
                count[v] = min(count[v] + 1, CLS_COUNTS - 1)
        fields[v, :, 6], fields[v, :, 7] = _ROWS, _COLS
        fields[v, :, 8] = 2 if scene.canvas == 64 else int(v == 0)
        _cls_bits(bits[v], table, np.flatnonzero(np.bincount(crop.ravel(), minlength=16) >= 12))
    return {"fields": fields, "place": place, "bits": bits, "count": count, "owner": owner}


def _cls_bits(bits: np.ndarray, table: np.ndarray, present: np.ndarray) -> None:
    nc, ns = len(COLOR_NAMES), len(SHAPES)
    for i in present:
        shape, color = int(table[i, 0]), int(table[i, 1])
        if i == 0 or shape == 0:
            continue
        if shape > ns:
            bits[-2 if shape == ns + 1 else -1] = 1
        if color:
            bits[color - 1] = 1
        if 1 <= shape <= ns:
            bits[nc + shape - 1] = 1
            bits[nc + ns + (color - 1) * ns + shape - 1] = 1
