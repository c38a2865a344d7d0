"""Draw the figure of the home page: ``python tools/home_png.py docs/images``.

Both answers to the question of the quickstart, as the tokens that the language model received.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

import vlmfast

ROOT = Path(__file__).resolve().parent.parent
QUESTION, IMAGE = "What is in the bottom left?", ROOT / "examples" / "picture.png"
DTYPE = "float32"  # in bfloat16 processors differ in which of two nearly equal patches is kept
RECIPES = {"home-full.png": "none", "home-balanced.png": "balanced"}


def draw(vlm: vlmfast.VLM, recipe: str) -> tuple[vlmfast.Answer, Image.Image]:
    """The answer, and its overlay without the lines of text below: the page has a caption."""
    answer = vlm.ask(QUESTION, images=str(IMAGE), recipe=recipe)
    (drawn,) = vlmfast.overlay(answer)
    size = drawn.width // 2 - 4  # two square views with a gap of eight pixels
    return answer, drawn.crop((0, 0, drawn.width, size))


def main(folder: str) -> None:
    """Write the images."""
    vlm = vlmfast.VLM.from_pretrained("tiny", dtype=DTYPE)
    for name, recipe in RECIPES.items():
        draw(vlm, recipe)[1].save(Path(folder) / name, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
