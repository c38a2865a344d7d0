"""A 5 x 7 dot font for the signs.

The font is part of the generator, so that a seed draws the same image on every machine, which
system fonts and other versions of FreeType do not guarantee.
"""

from __future__ import annotations

import numpy as np

CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# Five column bytes per character, lowest bit at the top.
_COLUMN_TEXT = """
3E5149453E 00427F4000 4261514946 2141454B31 1814127F10 2745454539 3C4A494930 0171090503
3649494936 064949291E 7E1111117E 7F49494936 3E41414122 7F4141221C 7F49494941 7F09090901
3E4149497A 7F0808087F 00417F4100 2040413F01 7F08142241 7F40404040 7F020C027F 7F0408107F
3E4141413E 7F09090906 3E4151215E 7F09192946 4649494931 01017F0101 3F4040403F 1F2040201F
3F4038403F 6314081463 0708700807 6151494543
"""
_COLUMNS = _COLUMN_TEXT.split()


def _bitmap(columns: str) -> np.ndarray:
    data = np.frombuffer(bytes.fromhex(columns), dtype=np.uint8)
    return ((data[None, :] >> np.arange(7)[:, None]) & 1).astype(bool)


GLYPHS: dict[str, np.ndarray] = {c: _bitmap(h) for c, h in zip(CHARS, _COLUMNS, strict=True)}


def glyph(char: str, height: int) -> np.ndarray:
    """Return the mask of one character.

    Parameters
    ----------
    char : str
        One of :data:`CHARS`.
    height : int
        Height in pixels; the width follows at 5 : 7.

    Returns
    -------
    numpy.ndarray
        Bool, shape ``(height, round(height * 5 / 7))``.
    """
    width = max(5, round(height * 5 / 7))
    rows = np.arange(height) * 7 // height
    cols = np.arange(width) * 5 // width
    return GLYPHS[char][rows[:, None], cols[None, :]]
