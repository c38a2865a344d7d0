"""Captions of scenes, and their score by slots."""

from __future__ import annotations

import random
import re
from collections import Counter

from .drawing import Scene, quadrant
from .vocabulary import QUADRANTS

CAPTION_QUESTION = "Describe the image."
VIDEO_QUESTION = "Describe the clip."
_HEADS = ("There are", "The image shows")


def _number(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def caption(scene: Scene, rng: random.Random) -> tuple[str, dict[str, str]]:
    """Describe a scene.

    Only the head of the first sentence is random (70 / 30); all else follows a fixed order. The
    text is predictable enough for draft models to be of use.

    Returns
    -------
    text : str
        The caption.
    slots : dict of str to str
        Slot name (``count``, ``top left/0``, ``sign`` …) to the phrase that it must contain.
    """
    if scene.bars:
        return _chart_caption(scene)
    if scene.frames > 1:
        return _video_caption(scene)
    n = len(scene.things)
    slots = {"count": _number(n, "object")}
    head = _HEADS[0] if rng.random() < 0.7 else _HEADS[1]
    if head == "There are" and n == 1:
        head = "There is"
    sentences = [f"{head} {slots['count']}."]
    places: dict[str, list[str]] = {}
    for t in sorted(scene.things, key=lambda t: t.x):
        place = quadrant(t, scene.canvas) or "middle"
        places.setdefault(place, []).append(f"{t.size} {t.name}")
    for place in (*QUADRANTS, "middle"):
        for k, phrase in enumerate(places.get(place, [])):
            slots[f"{place}/{k}"] = phrase
        if place in places:
            sentences.append(f"{place.capitalize()}: {', '.join(places[place])}.")
    if scene.sign is not None:
        slots["sign"] = f"says {scene.sign.text}"
        sentences.append(f"The sign says {scene.sign.text}.")
    return " ".join(sentences), slots


def _chart_caption(scene: Scene) -> tuple[str, dict[str, str]]:
    order = sorted(scene.bars, key=lambda b: b.top)
    slots = {"count": _number(len(scene.bars), "bar")}
    slots |= {f"bars/{k}": b.color for k, b in enumerate(scene.bars)}
    slots |= {"tallest": f"tallest is {order[0].color}"}
    slots |= {"shortest": f"shortest is {order[-1].color}"}
    listed = ", ".join(b.color for b in scene.bars)
    text = (
        f"The chart shows {slots['count']}. Bars: {listed}. "
        f"The {slots['tallest']}. The {slots['shortest']}."
    )
    return text, slots


def _video_caption(scene: Scene) -> tuple[str, dict[str, str]]:
    slots = {"count": _number(len(scene.things), "object")}
    sentences = [f"The clip shows {slots['count']}."]
    for k, t in enumerate(sorted(scene.things, key=lambda t: (t.appear, t.name))):
        if t.move:
            what = f"{t.name} moves {t.move}"
        elif t.appear > 1:
            what = f"{t.name} appears in frame {t.appear}"
        else:
            what = f"{t.name} stays"
        slots[f"event/{k}"] = what
        sentences.append(f"The {what}.")
    return " ".join(sentences), slots


def score_caption(text: str, slots: dict[str, str]) -> float:
    """Score a caption by its slots.

    Parameters
    ----------
    text : str
        Caption by a model.
    slots : dict of str to str
        ``caption_slots`` of the example.

    Returns
    -------
    float
        Fraction of correct slots. Objects that do not exist count as extra slots, so that naming
        everything everywhere does not pay.
    """
    sentences = [s.strip() for s in re.split(r"[.\n]", text) if s.strip()]
    right = 0
    groups: dict[str, list[str]] = {}
    for name, phrase in slots.items():
        if "/" in name and not name.startswith("event"):
            groups.setdefault(name.split("/")[0], []).append(phrase)
        else:
            pattern = rf"\b{re.escape(phrase)}\b"
            right += any(re.search(pattern, s) is not None for s in sentences)
    extra = 0
    labelled: dict[str, list[str]] = {}
    for s in sentences:
        place, colon, rest = s.partition(":")
        if colon:
            labelled.setdefault(place.strip().lower(), []).extend(
                p.strip() for p in rest.split(",") if p.strip()
            )
    for place in {*groups, *labelled}:
        want, found = groups.get(place, []), labelled.get(place, [])
        if place == "bars":  # the order of the bars counts
            hits = sum(a == b for a, b in zip(want, found, strict=False))
        else:
            hits = sum((Counter(want) & Counter(found)).values())
        right += hits
        extra += max(0, len(found) - len(want))
    return right / (len(slots) + extra)
