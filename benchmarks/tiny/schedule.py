"""The training schedule: each step is a function of progress, step number and seed.

========  ==========  ==============================================================
progress  phase       what is trained
========  ==========  ==============================================================
0-.33     apart       encoder on dense labels; language model on the codes of the labels
.33-.77   together    questions about pixels; occasionally a cheap step on label codes
.77-1     decay       learning rate falls to zero; random visual tokens are dropped
========  ==========  ==============================================================

Label codes give the language model exact evidence in short prefixes, so that it learns relations,
conjunctions and option letters in minutes instead of hours. Half-way through, half of the short
questions are of the hard types.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from batches import Spec

from vlmfast.scenes.questions import MC_BASES
from vlmfast.scenes.vocabulary import EVAL_SEED_START

APART, DECAY = 0.33, 0.77
SEEDS_PER_STEP = 256
SYM_KEEP = {"image": 80, "small": 60, "video": 112}


@dataclass(frozen=True)
class Plan:
    """One step: the batch, the language model's input, and the weights of the losses."""

    spec: Spec
    phase: str
    codes: bool
    dense: float
    lr: float
    question: float = 0.4
    choice: float = 2.0
    look: float = 0.5


def phase_of(progress: float) -> str:
    """Name the phase at ``progress`` in [0, 1]."""
    return "apart" if progress < APART else "together" if progress < DECAY else "decay"


def _image_weights(progress: float) -> tuple[tuple[str, float], ...]:
    hard = 1.3 if progress < 0.45 else 1.6
    late = progress > 0.7  # comparisons of two positions come last
    easy = ("shape", "posq", "size", "tex")
    return (
        ("color", 1.4),
        *((t, 0.9) for t in easy),
        ("rel", 3.2 if late else hard),
        ("where", 2.2 if late else hard),
        *((t, hard) for t in ("exist", "ocr", "count")),
        ("chart", 2.0),
    )


_VIDEO_WEIGHTS = (
    ("direction", 1.4), ("which", 1.0), ("frame", 1.0), ("appear", 1.0),
    ("order", 1.4), ("before", 2.2), ("exist", 0.8),
)  # fmt: skip


def plan(step: int, progress: float, seed: int, batch: int) -> Plan:
    """Plan step ``step``.

    Parameters
    ----------
    step : int
        Number of the step, from 0.
    progress : float
        Completed fraction of the run, in [0, 1].
    seed : int
        Seed of the run.
    batch : int
        Images per step; videos use smaller batches of about the same cost.
    """
    rng = random.Random(f"vlmfast-tiny-plan-{seed}-{step}")
    phase = phase_of(progress)
    draw = rng.random()
    if phase == "apart":
        kind = "image" if draw < 0.7 else "small" if draw < 0.8 else "video"
    else:
        kind = "image" if draw < 0.66 else "small" if draw < 0.76 else "video"
    between = (progress - APART) / (DECAY - APART)
    fraction = {"apart": 1.0, "together": 0.6 + (0.15 - 0.6) * between, "decay": 0.15}
    codes = rng.random() < fraction[phase]
    size, keep, foreground = batch, 0, True
    if codes:
        keep = SYM_KEEP[kind]
        if kind == "video":
            size = max(1, batch * 3 // 4)
    elif kind == "video":
        size = max(1, batch * 5 // 12)
        if phase == "decay":
            keep, foreground = (rng.choice((220, 340)), False) if rng.random() < 0.4 else (0, True)
        elif rng.random() < 0.6:
            keep, size = 200, max(1, batch * 5 // 8)
    elif kind == "image":
        if phase == "decay":
            if rng.random() < 0.5:
                keep, foreground = rng.choice((120, 180, 250)), False
        elif rng.random() < 0.75:
            keep = 120
    easy = progress < 0.34
    hint = reverse = 0.1 if progress < 0.6 else 0.0
    options = 2 if easy else rng.choice((2, 3, 4)) if progress < 0.42 else 4
    bases = ("color", "shape", "chart") if easy else MC_BASES
    if rng.random() < (0.3 if phase == "apart" else 0.12 if progress < DECAY else 0.0):
        # the link between letters and options needs no image, so it is taught without one
        kind, size, keep, codes = "text", min(2 * batch, SEEDS_PER_STEP), 0, True
        options = rng.choice((2, 3, 4))
    start = (seed % 128) * 2**32 + (step * SEEDS_PER_STEP) % 2**32
    spec = Spec(
        kind,
        start,
        size,
        _VIDEO_WEIGHTS if kind == "video" else _image_weights(progress),
        hint=hint,
        reverse=reverse,
        options=options,
        signs=0.4 if phase == "apart" else 0.32,
        keep=keep,
        keep_foreground=foreground,
        pixels=not codes or (kind != "text" and phase == "apart" and rng.random() < 0.5),
        mc_bases=bases,
        plain=0.85 if progress < 0.86 else 0.35 if progress < 0.92 else 0.0,
    )
    if start + size > EVAL_SEED_START:
        raise ValueError(f"step {step} would train on evaluation seeds")
    lr = min(1.0, (step + 1) / 40)
    if phase != "apart":
        lr *= 0.5
    if phase == "decay":
        lr *= max(0.0, (1.0 - progress) / (1.0 - DECAY))
    dense = {"apart": 1.0, "together": 0.4, "decay": 0.25}[phase]
    choice = 0.5 if progress < 0.5 else 2.0
    question = 0.4 if progress < DECAY else 0.2
    look = 0.5 if progress < DECAY else 0.4
    return Plan(spec, phase, codes, dense, lr, question, choice, look)
