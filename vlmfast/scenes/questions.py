"""Questions with their answers, derived from a scene rather than from its pixels.

Each ``_ask_*`` function returns a :class:`QA`, or None where its type does not apply. Answers are
balanced within a type wherever the scene allows it, so that a model that ignores the image stays at
chance.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .drawing import Scene, Thing, quadrant
from .vocabulary import COLOR_NAMES, IMAGE_TYPES, QUADRANTS, SHAPES, VIDEO_TYPES, WORDS


@dataclass(frozen=True)
class QA:
    """One question: its type, its text and the one right answer."""

    type: str
    question: str
    answer: str


def _unique(things: list[Thing]) -> list[Thing]:
    names = Counter(t.name for t in things)
    return [t for t in things if names[t.name] == 1]


def _attribute(type_: str, of: str, text: str) -> Callable[[Scene, random.Random], QA | None]:
    """Ask for an attribute of the only object with another one, ``of``."""

    def ask(s: Scene, rng: random.Random) -> QA | None:
        counts = Counter(getattr(t, of) for t in s.things)
        fit = [t for t in s.things if counts[getattr(t, of)] == 1]
        t = rng.choice(fit) if fit else None
        if t is None:
            return None
        return QA(type_, text.format(getattr(t, of)), getattr(t, type_))

    return ask


def _ask_posq(s: Scene, rng: random.Random) -> QA | None:
    half = s.canvas / 2
    touching: dict[str, list[Thing]] = {q: [] for q in QUADRANTS}
    for t in s.things:
        for i, q in enumerate(QUADRANTS):
            right, low = i % 2, i // 2
            if (t.x + t.r > half if right else t.x - t.r < half) and (
                t.y + t.r > half if low else t.y - t.r < half
            ):
                touching[q].append(t)
    fit = [q for q in QUADRANTS if len(touching[q]) == 1 and quadrant(touching[q][0], s.canvas)]
    if not fit:
        return None
    q = rng.choice(fit)
    return QA("posq", f"What is in the {q}?", touching[q][0].name)


def _ask_count(s: Scene, rng: random.Random) -> QA | None:
    if s.bars or (not s.things and s.sign is None):
        return None
    if rng.random() < 0.4:
        return QA("count", "How many objects are there?", str(len(s.things)))
    options: dict[int, list[str]] = {}
    for color in COLOR_NAMES:
        n = sum(t.color == color for t in s.things)
        options.setdefault(n, []).append(f"{color} objects")
    for shape in SHAPES:
        n = sum(t.shape == shape for t in s.things)
        options.setdefault(n, []).append(f"{shape}s" if shape != "cross" else "crosses")
    for tex in ("striped", "small", "large"):
        n = sum(tex in (t.tex, t.size) for t in s.things)
        options.setdefault(n, []).append(f"{tex} objects")
    if len(options) > 1 and rng.random() < 0.6:
        options.pop(0, None)  # nothing is red in most scenes: zero would be a safe guess
    n = rng.choice(sorted(options))
    return QA("count", f"How many {rng.choice(options[n])} are there?", str(n))


def _is_there(name: str) -> str:
    return f"Is there {'an' if name.startswith('orange') else 'a'} {name}?"


def _ask_exist(s: Scene, rng: random.Random) -> QA | None:
    if not s.things:
        return None
    names = {t.name for t in s.things}
    if rng.random() < 0.5:
        return QA("exist", _is_there(rng.choice(s.things).name), "yes")
    pairs = [f"{a.color} {b.shape}" for a in s.things for b in s.things]
    hard = sorted({p for p in pairs if p not in names})
    if hard and rng.random() < 0.85:
        return QA("exist", _is_there(rng.choice(hard)), "no")
    while True:
        t = rng.choice(s.things)
        name = (
            f"{rng.choice(COLOR_NAMES)} {t.shape}"
            if rng.random() < 0.5
            else f"{t.color} {rng.choice(SHAPES)}"
        )
        if name not in names:
            return QA("exist", _is_there(name), "no")


def _ask_rel(s: Scene, rng: random.Random) -> QA | None:
    things = _unique(s.things)
    margin = s.canvas * 0.12
    fit = []
    for a in things:
        for b in things:
            if a is not b and b.x - a.x > margin:
                fit.append((a, b, "left of", "right of"))
            if a is not b and b.y - a.y > margin:
                fit.append((a, b, "above", "below"))
    if not fit:
        return None
    a, b, true, false = rng.choice(fit)
    if rng.random() < 0.5:  # state the same fact with the objects swapped
        a, b, true, false = b, a, false, true
    yes = rng.random() < 0.5
    word = true if yes else false
    return QA("rel", f"Is the {a.name} {word} the {b.name}?", "yes" if yes else "no")


def _ask_where(s: Scene, rng: random.Random) -> QA | None:
    by_place: dict[str, list[Thing]] = {}
    for t in _unique(s.things):
        place = quadrant(t, s.canvas)
        if place is not None:
            by_place.setdefault(place, []).append(t)
    if not by_place:
        return None
    place = rng.choice([q for q in QUADRANTS if q in by_place])
    return QA("where", f"Where is the {rng.choice(by_place[place]).name}?", place)


def _two_way(
    type_: str, attr: str, words: tuple[str, str]
) -> Callable[[Scene, random.Random], QA | None]:
    def ask(s: Scene, rng: random.Random) -> QA | None:
        fit = _unique(s.things)
        if not fit:
            return None
        want = rng.choice(words)
        t = rng.choice([t for t in fit if getattr(t, attr) == want] or fit)
        question = f"Is the {t.name} {words[0]} or {words[1]}?"
        return QA(type_, question, getattr(t, attr))

    return ask


def _ask_ocr(s: Scene, rng: random.Random) -> QA | None:
    return None if s.sign is None else QA("ocr", "What does the sign say?", s.sign.text)


def _ask_chart(s: Scene, rng: random.Random) -> QA | None:
    if not s.bars:
        return None
    order = sorted(s.bars, key=lambda b: b.top)
    asked = [
        ("Which bar is the tallest?", order[0].color),
        ("Which bar is the shortest?", order[-1].color),
        ("How many bars are there?", str(len(s.bars))),
        ("What color is the first bar?", s.bars[0].color),
        ("What color is the last bar?", s.bars[-1].color),
    ]
    kind = rng.randrange(6)
    if kind < len(asked):
        return QA("chart", *asked[kind])
    a, b = rng.sample(s.bars, 2)
    question = f"Is the {a.color} bar taller than the {b.color} bar?"
    return QA("chart", question, "yes" if a.top < b.top else "no")


def _mc_options(s: Scene, base: QA, rng: random.Random) -> list[str] | None:
    """Three wrong options, preferably from the same image."""
    near: list[str] = []
    if base.type == "color" or (base.type == "chart" and base.answer in COLOR_NAMES):
        near, far = (
            [*(t.color for t in s.things), *(bar.color for bar in s.bars)],
            list(COLOR_NAMES),
        )
    elif base.type == "shape":
        near, far = [t.shape for t in s.things], list(SHAPES)
    elif base.type == "posq":
        near = [t.name for t in s.things]
        far = [f"{c} {f}" for c in COLOR_NAMES for f in SHAPES]
    elif base.type == "where":
        far = list(QUADRANTS)
    elif base.type in ("count", "chart"):
        if base.answer in ("yes", "no"):
            return None
        n = int(base.answer)
        far = [str(k) for k in range(max(0, n - 3), n + 4)]
    elif base.type == "ocr":
        number = base.answer.isdigit()
        far = [str(k) for k in range(10, 100)] if number else list(WORDS)
    else:
        return None
    near = sorted(set(near) - {base.answer})
    far = sorted(set(far) - {base.answer} - set(near))
    rng.shuffle(near)
    rng.shuffle(far)
    return (near + far)[:3]


MC_BASES = ("color", "shape", "posq", "where", "count", "ocr", "chart")


def multiple_choice(question: str, answer: str, wrong: list[str], rng: random.Random) -> QA:
    """Put the answer and three wrong options under random letters."""
    options = [answer, *wrong]
    rng.shuffle(options)
    listed = " ".join(f"({letter}) {o}" for letter, o in zip("ABCD", options, strict=False))
    return QA("mc", f"{question} {listed}", "ABCD"[options.index(answer)])


def _ask_mc(s: Scene, rng: random.Random, bases: tuple[str, ...] = MC_BASES) -> QA | None:
    for type_ in rng.sample(bases, len(bases)):
        base = ask(s, type_, rng)
        wrong = None if base is None else _mc_options(s, base, rng)
        if base is not None and wrong is not None:
            return multiple_choice(base.question, base.answer, wrong, rng)
    return None


def _mover(type_: str, text: str, of: str) -> Callable[[Scene, random.Random], QA | None]:
    def ask(s: Scene, rng: random.Random) -> QA | None:
        t = next((t for t in s.things if t.move), None)
        return None if t is None else QA(type_, text.format(t.name), getattr(t, of))

    return ask


def _ask_frame(s: Scene, rng: random.Random) -> QA | None:
    fit = [t for t in s.things if t.appear > 1]
    if not fit:
        return None
    t = rng.choice(fit)
    return QA("frame", f"In which frame does the {t.name} appear?", str(t.appear))


def _ask_appear(s: Scene, rng: random.Random) -> QA | None:
    # After the first frame, each alone in its frame.
    counts = Counter(t.appear for t in s.things)
    fit = [t for t in s.things if t.appear > 1 and counts[t.appear] == 1]
    if not fit:
        return None
    t = rng.choice(fit)
    return QA("appear", f"What appears in frame {t.appear}?", t.name)


def _pair(s: Scene, rng: random.Random) -> tuple[Thing, Thing] | None:
    fit = [(a, b) for a in s.things for b in s.things if a.appear < b.appear]
    return rng.choice(fit) if fit else None


def _ask_order(s: Scene, rng: random.Random) -> QA | None:
    pair = _pair(s, rng)
    if pair is None:
        return None
    first = rng.random() < 0.5
    a, b = rng.sample(pair, 2)
    word = "first" if first else "last"
    answer = pair[0].name if first else pair[1].name
    return QA("order", f"Which comes {word}, the {a.name} or the {b.name}?", answer)


def _ask_before(s: Scene, rng: random.Random) -> QA | None:
    pair = _pair(s, rng)
    if pair is None:
        return None
    yes = rng.random() < 0.5
    a, b = pair if yes else pair[::-1]
    return QA("before", f"Is the {a.name} before the {b.name}?", "yes" if yes else "no")


_ASK = {
    "color": _attribute("color", "shape", "What color is the {}?"),
    "shape": _attribute("shape", "color", "What shape is the {} object?"),
    "posq": _ask_posq,
    "count": _ask_count,
    "exist": _ask_exist,
    "rel": _ask_rel,
    "where": _ask_where,
    "size": _two_way("size", "size", ("small", "large")),
    "tex": _two_way("tex", "tex", ("striped", "solid")),
    "ocr": _ask_ocr,
    "chart": _ask_chart,
    "mc": _ask_mc,
    "direction": _mover("direction", "Which way does the {} move?", "move"),
    "which": _mover("which", "Which object moves?", "name"),
    "frame": _ask_frame,
    "appear": _ask_appear,
    "order": _ask_order,
    "before": _ask_before,
}


def ask(scene: Scene, type_: str, rng: random.Random) -> QA | None:
    """Ask one question of type ``type_``; None where the scene does not allow it."""
    return _ASK[type_](scene, rng)


def ask_all(scene: Scene, rng: random.Random) -> list[QA]:
    """Ask one question of every type that applies."""
    types = VIDEO_TYPES if scene.frames > 1 else IMAGE_TYPES
    found = (ask(scene, t, rng) for t in types)
    return [qa for qa in found if qa is not None]
