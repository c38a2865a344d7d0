"""Scenes of drawn objects, rendered words and short videos, with questions about them.

A `Layout` is a function of its seed: what is where. `draw` makes the images of a layout, and
`question` asks about it, so that every answer follows from the layout alone. Training and test
draw from ranges of seeds that have no number in common (`seed_of`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from objects import Objects
from PIL import Image, ImageDraw, ImageFont

CELLS = (
    *("top left", "top", "top right"),
    *("left", "center", "right"),
    *("bottom left", "bottom", "bottom right"),
)
GRID = 3  # cells in a row and in a column
MOST = 4  # objects in a scene
FRAMES = 4  # of a video
EMPTY = "nothing"
_WRITTEN = """
open close start stop left right north south hello world water fire music paper stone light green
black white brown silver gold happy quiet simple strong bread sugar summer winter river island city
village garden kitchen window table chair school market doctor teacher friend morning night today
never always little great young first second number letter story question answer welcome danger
private office
"""
WORDS = tuple(_WRITTEN.split())
# Direction of a video to the cells through which its object moves, in three lines.
_LINES = {
    "right": ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    "left": ((2, 1, 0), (5, 4, 3), (8, 7, 6)),
    "down": ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    "up": ((6, 3, 0), (7, 4, 1), (8, 5, 2)),
}
# Types of questions of every kind of layout, with the share of each in the training.
TYPES: dict[str, dict[str, float]] = {
    "scene": {"what": 0.45, "where": 0.25, "list": 0.15, "count": 0.1, "empty": 0.05},
    "word": {"read": 0.5, "what": 0.3, "where": 0.2},
    "video": {"way": 0.4, "moves": 0.4, "count": 0.2},
}
KINDS = tuple(TYPES)
_SEEDS = 2**28  # of one kind in one part
PARTS = ("train", "check", "test")  # "check" is for the curve of the training
_WORD = 255  # owner of the pixels of a word


@dataclass(frozen=True)
class Placed:
    """An object in a frame: its drawing, its cell, and the box of the drawing in pixels."""

    name: str
    style: str
    cell: int
    x: int
    y: int
    side: int


@dataclass(frozen=True)
class Layout:
    """What is where.

    Parameters
    ----------
    seed : int
    size : int
        Height and width of the images in pixels.
    frames : tuple of tuple of Placed
        The objects of every frame, in raster order of their cells in the first one; the objects of
        a frame are those of the others. One frame but for videos.
    word : str
        The written word, or an empty string.
    row : int
        Row of cells that holds the word.
    way : str
        Direction in which the first object of `moving` moves, or an empty string.
    moving : str
        Name of the object that moves, or an empty string.
    """

    seed: int
    size: int
    frames: tuple[tuple[Placed, ...], ...]
    word: str = ""
    row: int = 0
    way: str = ""
    moving: str = ""

    @property
    def kind(self) -> str:
        return "word" if self.word else "video" if self.moving else "scene"

    @property
    def cells(self) -> dict[int, str]:
        """Cell to name of its object, in the first frame, in raster order."""
        return {of.cell: of.name for of in self.frames[0]}


@dataclass(frozen=True)
class Question:
    type: str
    text: str
    answer: str


def seed_of(part: str, kind: str, number: int) -> int:
    """Seed of a layout; no two arguments share one.

    Parameters
    ----------
    part : {"train", "check", "test"}
    kind : {"scene", "word", "video"}
    number : int
        Below 2**28.
    """
    return (PARTS.index(part) * len(KINDS) + KINDS.index(kind)) * _SEEDS + number


def layout(seed: int, kind: str, drawings: Mapping[str, Sequence[str]], size: int = 224) -> Layout:
    """The layout of a seed.

    Parameters
    ----------
    seed : int
    kind : {"scene", "word", "video"}
    drawings : mapping of str to sequence of str
        Names of the objects that may occur, and the styles in which they may be drawn.
    size : int
    """
    rng = np.random.default_rng([seed, 0])
    names = list(drawings)
    if kind == "video":
        return _video(rng, seed, names, drawings, size)
    row = int(rng.integers(GRID))
    free = [c for c in range(GRID**2) if kind == "scene" or c // GRID != row]
    count = int(rng.integers(1, MOST + 1 if kind == "scene" else 3))
    cells = sorted(int(c) for c in rng.choice(free, count, replace=False))
    chosen = [names[i] for i in rng.choice(len(names), count, replace=False)]
    frame = tuple(
        _placed(rng, name, drawings[name], cell, size)
        for name, cell in zip(chosen, cells, strict=True)
    )
    if kind == "scene":
        return Layout(seed, size, (frame,))
    return Layout(seed, size, (frame,), word=WORDS[rng.integers(len(WORDS))], row=row)


def _placed(
    rng: np.random.Generator, name: str, styles: Sequence[str], cell: int, size: int
) -> Placed:
    edge = size / GRID
    side = int(edge * rng.uniform(0.75, 1.05))
    x, y = (
        int((at + 0.5) * edge - side / 2 + rng.uniform(-0.06, 0.06) * size)
        for at in (cell % GRID, cell // GRID)
    )
    return Placed(name, styles[rng.integers(len(styles))], cell, x, y, side)


def _video(
    rng: np.random.Generator,
    seed: int,
    names: Sequence[str],
    drawings: Mapping[str, Sequence[str]],
    size: int,
) -> Layout:
    """One object moves through three cells; up to two others stay where they are."""
    way = list(_LINES)[rng.integers(len(_LINES))]
    line = _LINES[way][rng.integers(GRID)]
    free = [c for c in range(GRID**2) if c not in line]
    count = int(rng.integers(0, 3))
    chosen = [names[i] for i in rng.choice(len(names), count + 1, replace=False)]
    cells = [line[0], *(int(c) for c in rng.choice(free, count, replace=False))]
    start = [
        _placed(rng, name, drawings[name], cell, size)
        for name, cell in zip(chosen, cells, strict=True)
    ]
    frames = []
    for k in range(FRAMES):
        done = k / (FRAMES - 1)
        mover = start[0]
        step = (GRID - 1) * size / GRID * done
        x = mover.x + int(step * {"right": 1, "left": -1}.get(way, 0))
        y = mover.y + int(step * {"down": 1, "up": -1}.get(way, 0))
        cell = line[round(done * (GRID - 1))]
        moved = Placed(mover.name, mover.style, cell, x, y, mover.side)
        frames.append((moved, *start[1:]))
    order = sorted(range(count + 1), key=lambda i: frames[0][i].cell)
    raster = tuple(tuple(frame[i] for i in order) for frame in frames)
    return Layout(seed, size, raster, way=way, moving=chosen[0])


def question(of: Layout, type_: str, rng: random.Random) -> Question:
    """A question of one of the `TYPES` of a layout's kind, drawn from those that it answers."""
    cells = of.cells
    cell = rng.choice(list(cells))
    if type_ == "what":
        text, answer = f"What is in the {CELLS[cell]}?", cells[cell]
    elif type_ == "empty":
        other = rng.choice([c for c in range(GRID**2) if c not in cells])
        text, answer = f"What is in the {CELLS[other]}?", EMPTY
    elif type_ == "where":
        text, answer = f"Where is the {cells[cell]}?", CELLS[cell]
    elif type_ == "count":
        text, answer = "How many objects are there?", str(len(cells))
    elif type_ == "list":
        text, answer = "List the objects.", ", ".join(cells.values())
    elif type_ == "read":
        text, answer = "Which word is written?", of.word
    elif type_ == "moves":
        text, answer = "What moves?", of.moving
    else:
        text, answer = f"Which way does the {of.moving} move?", of.way
    return Question(type_, text, answer)


def questions(of: Layout, rng: random.Random, number: int) -> list[Question]:
    """``number`` questions whose types follow the shares of the training."""
    types = TYPES[of.kind]
    drawn = rng.choices(list(types), list(types.values()), k=number)
    return [question(of, type_, rng) for type_ in drawn]


def draw(of: Layout, objects: Objects) -> tuple[list[Image.Image], np.ndarray]:
    """The images of a layout.

    Parameters
    ----------
    of : Layout
    objects : Objects

    Returns
    -------
    images : list of Image
        One for each frame, RGB.
    owners : np.ndarray
        uint8, shape (frames, size, size): 0 for the background, ``k + 1`` for the object ``k`` of
        the frame, 255 for the word and its plate.
    """
    rng = np.random.default_rng([of.seed, 1])
    background = _background(rng, of.size)
    word = _word(rng, of) if of.word else None
    images, owners = [], np.zeros((len(of.frames), of.size, of.size), np.uint8)
    for frame, owner in zip(of.frames, owners, strict=True):
        image = background.copy()
        layers = [
            (_layer(objects.drawing(at.name, at.style), at, of.size), k + 1)
            for k, at in enumerate(frame)
        ]
        layers += [(word, _WORD)] if word is not None else []
        for layer, number in layers:
            image.paste(layer, (0, 0), layer)
            owner[np.asarray(layer)[..., 3] > 128] = number
        images.append(image)
    return images, owners


def _layer(drawing: Image.Image, at: Placed, size: int) -> Image.Image:
    layer = Image.new("RGBA", (size, size))
    layer.paste(drawing.resize((at.side, at.side), Image.Resampling.BICUBIC), (at.x, at.y))
    return layer


def _background(rng: np.random.Generator, size: int) -> Image.Image:
    """A colour, a gradient, blobs or stripes, with noise."""
    style = rng.integers(4)
    if style == 3:  # stripes
        one, other = rng.integers(0, 256, (2, 3))
        slope, width = rng.uniform(-1, 1), rng.uniform(8, 40)
        rows, columns = np.mgrid[:size, :size]
        striped = ((columns + slope * rows) // width) % 2
        pixels = np.where(striped[..., None] > 0, one, other).astype(float)
    else:  # one colour, a gradient, blobs
        points = (1, 2, 6)[style]
        colours = rng.integers(0, 256, (points, points, 3)).astype(np.uint8)
        smooth = Image.fromarray(colours).resize((size, size), Image.Resampling.BICUBIC)
        pixels = np.asarray(smooth).astype(float)
        if points > 2:
            pixels = pixels / 2 + 64
    pixels = pixels + rng.normal(0, rng.uniform(0, 12), (size, size, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _word(rng: np.random.Generator, of: Layout) -> Image.Image:
    """A layer with the word on a plate in its row."""
    layer = Image.new("RGBA", (of.size, of.size))
    pen, fonts = ImageDraw.Draw(layer), _fonts()
    edge = of.size / GRID
    path = fonts[rng.integers(len(fonts))]
    height = edge * rng.uniform(0.5, 0.8)
    font = ImageFont.truetype(path, int(height))
    width = font.getlength(of.word)
    if width > 0.9 * of.size:
        font = ImageFont.truetype(path, int(height * 0.9 * of.size / width))
    middle = (of.size / 2, (of.row + 0.5) * edge)
    dark = bool(rng.integers(2))
    ink, plate = ((0, 0, 0, 255), (255, 255, 255, 255))[:: 1 if dark else -1]
    left, top, right, bottom = pen.textbbox(middle, of.word, font=font, anchor="mm")
    pen.rectangle((left - 4, top - 4, right + 4, bottom + 4), fill=plate)
    pen.text(middle, of.word, font=font, fill=ink, anchor="mm")
    return layer


@functools.cache
def _fonts() -> tuple[Path, ...]:
    """Fonts that matplotlib ships."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # Those named "Display" have mathematical symbols alone.
    return tuple(sorted(p for p in folder.glob("DejaVu*.ttf") if "Display" not in p.stem))
