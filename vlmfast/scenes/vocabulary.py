"""Vocabulary of the drawn scenes."""

from __future__ import annotations

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 35),
    "orange": (242, 140, 25),
    "yellow": (240, 225, 45),
    "green": (40, 165, 55),
    "cyan": (50, 205, 215),
    "blue": (40, 70, 220),
    "purple": (130, 45, 180),
    "pink": (245, 130, 195),
}
COLOR_NAMES = tuple(COLORS)
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
WORDS = (
    "cat", "dog", "sun", "map", "key", "box", "cup", "hat", "bus", "pen", "net", "jam",
    "owl", "fox", "van", "zip", "ice", "arm", "leg", "oil", "pie", "gum", "yak", "web",
)  # fmt: skip
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

IMAGE_TYPES = (
    "color", "shape", "posq", "count", "exist", "rel",
    "where", "size", "tex", "ocr", "chart", "mc",
)  # fmt: skip
VIDEO_TYPES = ("direction", "which", "frame", "appear", "order", "before", "exist")

EVAL_SEED_START = 2**40
EVAL_SEED_STOP = 2**40 + 2**20
"""Seeds in ``[EVAL_SEED_START, EVAL_SEED_STOP)`` are for evaluation; training never draws them."""
