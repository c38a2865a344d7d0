"""Scenes, their pixels and their label maps (numpy only).

Everything is drawn without anti-aliasing: a tile then has hard edges and the downscaled overview
soft ones, which lets the encoder distinguish the two scales of a LLaVA-NeXT image.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from .glyphs import CHARS, glyph
from .vocabulary import COLOR_NAMES, COLORS, DIRECTIONS, QUADRANTS, SHAPES, WORDS

FRAMES = 4


@dataclass
class Thing:
    """One drawn object; ``appear`` is the first frame (1-based) that shows it."""

    shape: str
    color: str
    size: str
    tex: str
    x: float
    y: float
    r: float
    appear: int = 1
    move: str | None = None
    step: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    def at(self, frame: int) -> tuple[float, float]:
        """Centre in frame ``frame`` (0-based)."""
        if self.move is None:
            return self.x, self.y
        dx, dy = DIRECTIONS[self.move]
        return self.x + dx * self.step * frame, self.y + dy * self.step * frame


@dataclass
class Sign:
    text: str
    x0: int
    y0: int
    width: int
    height: int
    glyph_height: int


@dataclass
class Bar:
    color: str
    x0: int
    x1: int
    top: int
    bottom: int


@dataclass
class Scene:
    """Contents of an image (one frame) or a video (``frames`` frames)."""

    canvas: int
    things: list[Thing] = field(default_factory=list)
    sign: Sign | None = None
    bars: list[Bar] = field(default_factory=list)
    frames: int = 1
    paint_seed: int = 0


@dataclass
class Raster:
    """One drawn frame: ``rgb (H, W, 3) uint8``, ``ids`` and ``chars`` ``(H, W) uint8``.

    ``ids`` is 0 for background, ``1 + i`` for thing (or bar) ``i`` and 15 for the sign;
    ``chars`` is 1 + the index into ``CHARS`` inside a character's box.
    """

    rgb: np.ndarray
    ids: np.ndarray
    chars: np.ndarray


SIGN_ID = 15


def quadrant(thing: Thing, canvas: int, frame: int = 0) -> str | None:
    """Name the quadrant that contains the whole object, None where it straddles two."""
    x, y = thing.at(frame)
    half = canvas / 2
    if abs(x - half) < thing.r or abs(y - half) < thing.r:
        return None
    return QUADRANTS[2 * int(y > half) + int(x > half)]


def _new_thing(rng: random.Random, canvas: int, video: bool) -> Thing:
    size = "small" if rng.random() < 0.5 else "large"
    if video:
        r = rng.uniform(4.5, 6.0) if size == "small" else rng.uniform(7.0, 9.0)
    else:
        r = rng.uniform(5.0, 6.5) if size == "small" else rng.uniform(9.0, 12.0)
    tex = "striped" if rng.random() < 0.5 else "solid"
    return Thing(rng.choice(SHAPES), rng.choice(COLOR_NAMES), size, tex, 0.0, 0.0, r)


def _place(rng: random.Random, scene: Scene, thing: Thing, straddle: float) -> bool:
    """Find a free spot for ``thing``; False where none was found."""
    half, c, r = scene.canvas / 2, scene.canvas, thing.r
    may_straddle = rng.random() < straddle
    for _ in range(30):
        thing.x, thing.y = rng.uniform(r + 1, c - r - 1), rng.uniform(r + 1, c - r - 1)
        if not may_straddle and (abs(thing.x - half) < r + 1 or abs(thing.y - half) < r + 1):
            continue
        if any(
            (thing.x - o.x) ** 2 + (thing.y - o.y) ** 2 < (r + o.r + 3) ** 2 for o in scene.things
        ):
            continue
        s = scene.sign
        if s is not None:
            dx = max(s.x0 - thing.x, 0, thing.x - s.x0 - s.width)
            dy = max(s.y0 - thing.y, 0, thing.y - s.y0 - s.height)
            if dx * dx + dy * dy < (r + 3) ** 2:
                continue
        return True
    return False


def _fill(rng: random.Random, scene: Scene, count: int) -> None:
    """Add up to ``count`` objects; two fifths of the scenes group one colour or shape."""
    group = rng.random()
    shared_color, shared_shape = rng.choice(COLOR_NAMES), rng.choice(SHAPES)
    for _ in range(count):
        thing = _new_thing(rng, scene.canvas, video=False)
        if group < 0.2 and rng.random() < 0.7:
            thing.color = shared_color
        elif group < 0.4 and rng.random() < 0.7:
            thing.shape = shared_shape
        if _place(rng, scene, thing, straddle=0.07):
            scene.things.append(thing)


def make_sign(rng: random.Random, canvas: int) -> Sign:
    text = str(rng.randint(10, 99)) if rng.random() < 0.5 else rng.choice(WORDS)
    h = rng.randint(13, 17)
    w = len(text) * (max(5, round(h * 5 / 7)) + 2) - 2 + 6
    height, half = h + 6, canvas // 2
    for _ in range(20):
        x0, y0 = rng.randint(1, canvas - w - 1), rng.randint(1, canvas - height - 1)
        if canvas <= 64 or rng.random() < 0.07:
            break
        if (x0 + w <= half or x0 >= half) and (y0 + height <= half or y0 >= half):
            break
    return Sign(text, x0, y0, w, height, h)


def make_chart(rng: random.Random, canvas: int) -> list[Bar]:
    n = rng.randint(2, 5)
    pitch = (canvas - 16) // n
    width = min(pitch - 3, rng.randint(canvas // 10, canvas // 6))
    gap = canvas // 16
    levels = rng.sample(range(1, (canvas - 24) // gap), n)
    bottom = canvas - rng.randint(4, 9)
    x, bars = rng.randint(4, 12), []
    for color, level in zip(rng.sample(COLOR_NAMES, n), levels, strict=True):
        bars.append(Bar(color, x, x + width, bottom - 4 - level * gap, bottom))
        x += pitch
    return bars


def make_image_scene(rng: random.Random, canvas: int = 128, signs: float = 0.32) -> Scene:
    """Draw the contents of one image; ``signs`` is the fraction of scenes with a sign."""
    scene = Scene(canvas, paint_seed=rng.getrandbits(62))
    kind = rng.random()
    if kind < 0.18 and canvas >= 128:
        scene.bars = make_chart(rng, canvas)
    elif kind < 0.18 + signs:
        scene.sign = make_sign(rng, canvas)
        _fill(rng, scene, rng.randint(0, 4 if canvas >= 128 else 1))
    else:
        _fill(rng, scene, rng.randint(1, 6 if canvas >= 128 else 4))
    return scene


def make_video_scene(rng: random.Random, canvas: int = 64) -> Scene:
    """Draw the contents of one video: a mover, objects that appear, or both; names are unique."""
    scene = Scene(canvas, frames=FRAMES, paint_seed=rng.getrandbits(62))
    moving = rng.random() < 0.6
    for i in range(rng.randint(1, 3)):
        for _ in range(20):
            t = _new_thing(rng, canvas, video=True)
            if any(t.name == o.name for o in scene.things):
                continue
            if moving and i == 0:
                t.move, t.step = rng.choice(list(DIRECTIONS)), rng.uniform(7.0, 11.0)
                dx, dy = DIRECTIONS[t.move]
                travel = t.step * (FRAMES - 1)
                low, high = t.r + 1, canvas - t.r - 1
                x_low, x_high = low + max(0, -dx) * travel, high - max(0, dx) * travel
                y_low, y_high = low + max(0, -dy) * travel, high - max(0, dy) * travel
                t.x, t.y = rng.uniform(x_low, x_high), rng.uniform(y_low, y_high)
            else:
                t.x = rng.uniform(t.r + 1, canvas - t.r - 1)
                t.y = rng.uniform(t.r + 1, canvas - t.r - 1)
                if rng.random() < 0.7:
                    t.appear = rng.randint(1, FRAMES)
            if _clear(scene, t):
                scene.things.append(t)
                break
    rng.shuffle(scene.things)
    return scene


def _clear(scene: Scene, thing: Thing) -> bool:
    for f in range(scene.frames):
        x, y = thing.at(f)
        for o in scene.things:
            ox, oy = o.at(f)
            if (x - ox) ** 2 + (y - oy) ** 2 < (thing.r + o.r + 2) ** 2:
                return False
    return True


def shape_mask(shape: str, dx: np.ndarray, dy: np.ndarray, r: float) -> np.ndarray:
    """Evaluate a shape at offsets ``dx (1, w)``, ``dy (h, 1)`` from its centre; bool ``(h, w)``."""
    if shape == "circle":
        return dx * dx + dy * dy <= r * r
    if shape == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) <= 0.86 * r
    if shape == "triangle":
        return (dy <= 0.75 * r) & (np.abs(dx) <= (dy + r) * 0.6)
    if shape == "cross":
        ax, ay = np.abs(dx), np.abs(dy)
        return (np.maximum(ax, ay) <= r) & (np.minimum(ax, ay) <= 0.33 * r)
    d2 = dx * dx + dy * dy
    if shape == "ring":
        return (d2 <= r * r) & (d2 >= (0.55 * r) ** 2)
    if shape == "star":
        turn = (np.arctan2(dx, -dy) / (2 * np.pi) * 5) % 1.0
        spike = np.abs(turn - 0.5) * 2  # 1 at a tip, 0 in a notch
        return np.sqrt(d2) <= 1.1 * r * (0.38 + 0.62 * spike**1.5)
    raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")


def _background(rng: np.random.Generator, c: int) -> np.ndarray:
    base = rng.uniform(85, 200) + rng.uniform(-14, 14, 3)
    kind = int(rng.integers(4))
    img = np.empty((c, c, 3), np.float32)
    img[:] = base
    if kind == 1:
        a, b = rng.uniform(-28, 28, 2)
        ramp = np.linspace(-1, 1, c, dtype=np.float32)
        img += (a * ramp[:, None] + b * ramp[None, :])[:, :, None]
    elif kind == 2:
        img += rng.normal(0, 9, (c, c, 1)).astype(np.float32)
    elif kind == 3:
        step = int(rng.integers(6, 20))
        k = np.arange(c) // step
        img += (((k[:, None] + k[None, :]) & 1) * 2 - 1)[:, :, None] * float(rng.uniform(5, 14))
    if rng.random() < 0.4:
        t = np.linspace(0, 1, 2 * c)
        for _ in range(int(rng.integers(1, 4))):
            x0, y0, x1, y1 = rng.uniform(0, c - 1, 4)
            img[(y0 + (y1 - y0) * t).astype(int), (x0 + (x1 - x0) * t).astype(int)] += rng.uniform(
                -26, 26
            )
    return img


def paint(scene: Scene) -> list[Raster]:
    """Draw all frames of a scene; the same scene always gives the same pixels."""
    rng = np.random.default_rng(scene.paint_seed)
    c = scene.canvas
    back = _background(rng, c)
    inks = []
    for color in [t.color for t in scene.things] + [bar.color for bar in scene.bars]:
        ink = np.clip(np.array(COLORS[color]) + rng.uniform(-16, 16, 3), 0, 255)
        inks.append((ink, rng.uniform(0.3, 0.5), int(rng.integers(3)), int(rng.integers(4, 6))))
    dark = bool(rng.integers(2))
    out = []
    for f in range(scene.frames):
        rgb, ids, chars = back.copy(), np.zeros((c, c), np.uint8), np.zeros((c, c), np.uint8)
        for i, bar in enumerate(scene.bars):
            rgb[bar.top : bar.bottom, bar.x0 : bar.x1] = inks[i][0]
            ids[bar.top : bar.bottom, bar.x0 : bar.x1] = 1 + i
        for i, t in enumerate(scene.things):
            if f + 1 >= t.appear:
                _paint_thing(rgb, ids, t, t.at(f), 1 + i, *inks[i])
        if scene.sign is not None:
            _paint_sign(rgb, ids, chars, scene.sign, dark)
        out.append(Raster(np.clip(rgb, 0, 255).astype(np.uint8), ids, chars))
    return out


def _paint_thing(
    rgb: np.ndarray,
    ids: np.ndarray,
    t: Thing,
    centre: tuple[float, float],
    number: int,
    ink: np.ndarray,
    shade: float,
    slant: int,
    period: int,
) -> None:
    c = rgb.shape[0]
    cx, cy = centre
    reach = t.r * 1.15 + 1
    x0, x1 = max(0, int(cx - reach)), min(c, int(cx + reach) + 2)
    y0, y1 = max(0, int(cy - reach)), min(c, int(cy + reach) + 2)
    xs, ys = np.arange(x0, x1)[None, :], np.arange(y0, y1)[:, None]
    mask = shape_mask(t.shape, xs + 0.5 - cx, ys + 0.5 - cy, t.r)
    rgb[y0:y1, x0:x1][mask] = ink
    ids[y0:y1, x0:x1][mask] = number
    if t.tex == "striped":
        k = (xs + 0 * ys, ys + 0 * xs, xs + ys)[slant]
        rgb[y0:y1, x0:x1][mask & (k % period < period // 2)] = ink * shade


def _paint_sign(
    rgb: np.ndarray, ids: np.ndarray, chars: np.ndarray, sign: Sign, dark: bool
) -> None:
    paper, letters = (30, 235) if dark else (240, 25)
    rows, cols = slice(sign.y0, sign.y0 + sign.height), slice(sign.x0, sign.x0 + sign.width)
    rgb[rows, cols] = paper
    ids[rows, cols] = SIGN_ID
    x, y = sign.x0 + 3, sign.y0 + 3
    for char in sign.text.upper():
        mask = glyph(char, sign.glyph_height)
        h, w = mask.shape
        rgb[y : y + h, x : x + w][mask] = letters
        chars[y : y + h, x : x + w] = 1 + CHARS.index(char)
        x += w + 2
