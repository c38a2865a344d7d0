"""The objects that the words of a question refer to (training only).

They supervise attention: at the last word of a name, one head of one layer is trained to attend to
the patches of the named objects.
"""

from __future__ import annotations

from vlmfast.scenes.drawing import Scene, quadrant
from vlmfast.scenes.vocabulary import COLOR_NAMES, DIRECTIONS, SHAPES

MAX_REFERENCES = 24


def references(scene: Scene, question: str) -> list[tuple[int, int]]:
    """Find the names in a question.

    Parameters
    ----------
    scene : Scene
        Scene of the question.
    question : str
        Its options, if any, are ignored.

    Returns
    -------
    list of (int, int)
        Index of the word that ends a name, and a bit set of its objects: bit ``1 + i`` for thing
        or bar ``i``, as in the label maps; 0 where no object has this colour and shape.
    """
    words = [w.rstrip("?,.:") for w in question.split(" (A)")[0].split(" ")]
    found: list[tuple[int, int]] = []
    for k, word in enumerate(words):
        before = words[k - 1] if k else ""
        missing = False
        if word in SHAPES and before in COLOR_NAMES:
            hits = [t.color == before and t.shape == word for t in scene.things]
            missing = not any(hits)  # named, but not in the scene
        elif word in SHAPES and before == "the":
            hits = [t.shape == word for t in scene.things]
        elif word in ("object", "objects") and k:
            if before == "many":
                hits = [True] * len(scene.things)
            else:
                hits = [before in (t.color, t.tex, t.size) for t in scene.things]
        elif word == "crosses" or (word.endswith("s") and word[:-1] in SHAPES and before == "many"):
            shape = "cross" if word == "crosses" else word[:-1]
            hits = [t.shape == shape for t in scene.things]
        elif word in ("left", "right") and before in ("top", "bottom"):
            hits = [quadrant(t, scene.canvas) == f"{before} {word}" for t in scene.things]
        elif word == "bar":
            hits = _bar(scene, before)
        elif word in ("tallest", "shortest"):
            hits = _bar(scene, word)
        else:
            continue
        bits = sum(1 << (1 + i) for i, hit in enumerate(hits) if hit)
        if bits or missing:
            found.append((k, bits))
    return found


def _bar(scene: Scene, word: str) -> list[bool]:
    tops = [b.top for b in scene.bars]
    if not tops:
        return []
    if word in ("first", "last"):
        chosen = 0 if word == "first" else len(tops) - 1
        return [i == chosen for i in range(len(tops))]
    if word in ("tallest", "shortest"):
        best = min(tops) if word == "tallest" else max(tops)
        return [top == best for top in tops]
    return [b.color == word for b in scene.bars]


FACTS = ("present", "shape", "color", "size", "tex", "x", "y", "appear", "move")
FACT_CLASSES = {"shape": len(SHAPES), "color": len(COLOR_NAMES), "size": 2, "tex": 2, "appear": 4}
FACT_CLASSES |= {"move": 1 + len(DIRECTIONS)}
UNKNOWN = -9.0


def facts(scene: Scene, bits: int) -> list[float]:
    """Facts of the single object in ``bits``, in the order of :data:`FACTS`.

    :data:`UNKNOWN` where a fact does not apply; everywhere for several objects.
    """
    out = [UNKNOWN] * len(FACTS)
    if bits == 0:
        out[0] = 0.0
    elif bits & (bits - 1) == 0:
        out[0], i, half = 1.0, bits.bit_length() - 2, scene.canvas / 2
        if scene.bars:
            bar = scene.bars[i]
            out[2] = COLOR_NAMES.index(bar.color)
            out[5:7] = [(bar.x0 + bar.x1) / 2 / half - 1, bar.top / half - 1]
        else:
            t = scene.things[i]
            out[1], out[2] = SHAPES.index(t.shape), COLOR_NAMES.index(t.color)
            out[3], out[4] = t.size == "large", t.tex == "striped"
            if scene.frames == 1:
                out[5:7] = [t.x / half - 1, t.y / half - 1]
            else:
                out[7] = t.appear - 1
                out[8] = 1 + list(DIRECTIONS).index(t.move) if t.move else 0
    return [float(v) for v in out]
