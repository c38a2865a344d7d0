"""Training batches: packed questions after one image or video (numpy and tokenizers only).

One prefix (prompt and visual tokens) is followed by fixed slots, each with one question and its
answer. A slot attends only to the prefix and to itself, and its positions restart after the prefix,
so a slot is computed exactly as if it were the only question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from architecture import SHIPPED
from bpe import BOS_ID, IMAGE_ID, FastEncoder, image_prefix, turn, video_prefix
from labels import label_frame, views
from PIL import Image
from references import FACTS, MAX_REFERENCES, UNKNOWN, facts, references
from tokenizers import Tokenizer

from vlmfast.errors import VLMFastError
from vlmfast.scenes import questions as Q
from vlmfast.scenes.captions import CAPTION_QUESTION, VIDEO_QUESTION, caption
from vlmfast.scenes.drawing import Scene, make_image_scene, make_video_scene, paint
from vlmfast.scenes.vocabulary import (
    COLOR_NAMES,
    EVAL_SEED_START,
    IMAGE_TYPES,
    QUADRANTS,
    SHAPES,
    VIDEO_TYPES,
    WORDS,
)

SHORT, MC, CAPTION = 17, 40, 64
"""Slot lengths in tokens."""
N_SHORT, N_MC = 8, 2
TYPE_NAMES = tuple(dict.fromkeys((*IMAGE_TYPES, *VIDEO_TYPES, "caption", "hint", "option")))
SLOTS = (*((SHORT,) * N_SHORT), *((MC,) * N_MC), CAPTION)
TEXT_SLOTS = (MC,) * 3


_NAMES = tuple(f"{c} {f}" for c in COLOR_NAMES for f in SHAPES)
_NUMBERS = tuple(str(n) for n in range(100))


@dataclass(frozen=True)
class Spec:
    """Contents of one batch, which is a function of these values.

    ``kind`` is ``image`` (128 px), ``small`` (64 px), ``video`` or ``text`` (no image);
    ``keep`` the number of prefix tokens kept (0: all), foreground first where
    ``keep_foreground``; ``weights`` the relative frequency of question types; ``hint`` and
    ``reverse`` the fractions of multiple-choice slots with a text hint or a question about an
    option's letter, ``options`` the number of options; ``plain`` the fraction of relations that use
    only "left of" and "above".
    """

    kind: str
    seed: int
    size: int
    weights: tuple[tuple[str, float], ...] = ()
    hint: float = 0.0
    reverse: float = 0.0
    options: int = 4
    signs: float = 0.32
    keep: int = 0
    keep_foreground: bool = False
    pixels: bool = True
    mc_bases: tuple[str, ...] = Q.MC_BASES
    plain: float = 0.0

    @property
    def slots(self) -> tuple[int, ...]:
        return TEXT_SLOTS if self.kind == "text" else SLOTS


def _image_source(canvas: int, first_view: int) -> list[int]:
    tiles = canvas // 64
    side = 8 * tiles
    out = [first_view * 64 + i for i in range(64)]
    for row in range(side):
        for col in range(side):
            view = first_view + 1 + (row // 8) * tiles + col // 8
            out.append(view * 64 + (row % 8) * 8 + col % 8)
        out.append(-2)
    return out


@lru_cache(maxsize=4)
def make_layout(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Lay out the prefix of ``image``, ``small`` or ``video`` examples.

    Returns
    -------
    ids : numpy.ndarray
        (P,) token ids with ``<image>`` placeholders.
    source : numpy.ndarray
        (P,) index of the patch (view-major) at each position, -1 for text, -2 for a newline.
    """
    if kind == "text":
        order, text = [], image_prefix(0)
    elif kind == "video":
        per = _image_source(64, 0)
        order = [s if s < 0 else s + f * 128 for f in range(4) for s in per]
        text = video_prefix(len(per))
    else:
        order = _image_source(128 if kind == "image" else 64, 0)
        text = image_prefix(len(order))
    ids = np.array([BOS_ID, *_encoder()(text)], np.int64)
    source = np.full(len(ids), -1, np.int64)
    source[ids == IMAGE_ID] = order
    return ids, source


def _view_pixels(rgb: np.ndarray) -> list[np.ndarray]:
    canvas = rgb.shape[0]
    base = rgb
    if canvas != 64:
        base = np.asarray(Image.fromarray(rgb).resize((64, 64), Image.Resampling.BICUBIC))
    return [base, *(rgb[y : y + s, x : x + s] for y, x, s in views(canvas)[1:])]


def _scaffold(qa: Q.QA, spec: Spec, rng: random.Random) -> Q.QA:
    """Make a multiple-choice question of the training easier, according to ``spec``.

    ``hint`` gives the right option in the text, ``option`` asks for the option of a letter: both
    teach the link between letters and options without the image. ``options`` limits their number.
    """
    at = qa.question.index(" (A)")
    stem, listed = qa.question[:at], qa.question[at:]
    options = [part.split(") ", 1)[1] for part in listed.split(" (")[1:]]
    answer = options["ABCD".index(qa.answer)]
    wrong = [o for o in options if o != answer]
    if len(wrong) + 1 > spec.options:
        qa = Q.multiple_choice(stem, answer, rng.sample(wrong, spec.options - 1), rng)
        listed = qa.question[len(stem) :]
    draw = rng.random()
    if draw < spec.hint:
        return Q.QA("hint", f"Which option says {answer}?{listed}", qa.answer)
    if draw < spec.hint + spec.reverse:
        return Q.QA("option", f"Which says {qa.answer}?{listed}", answer)
    return qa


def _text_choice(spec: Spec, rng: random.Random) -> Q.QA:
    """A multiple-choice question about its own text only."""
    pool = rng.choice((COLOR_NAMES, SHAPES, QUADRANTS, WORDS, _NAMES, _NUMBERS))
    count = min(spec.options, len(pool))
    options = rng.sample(pool, count)
    listed = " ".join(f"({letter}) {o}" for letter, o in zip("ABCD", options, strict=False))
    k = rng.randrange(count)
    if rng.random() < 0.5:
        return Q.QA("hint", f"Which option says {options[k]}? {listed}", "ABCD"[k])
    return Q.QA("option", f"Which says {'ABCD'[k]}? {listed}", options[k])


def _plain(qa: Q.QA) -> Q.QA:
    """Rewrite "right of" as "left of" and "below" as "above", with the objects swapped.

    With two relations the answer is a single bit; with four it is a parity, which is learned far
    more easily after the bit.
    """
    for word, plain in ((" right of ", " left of "), (" below ", " above ")):
        if word in qa.question:
            a, b = qa.question.removeprefix("Is ").removesuffix("?").split(word)
            return replace(qa, question=f"Is {b}{plain}{a}?")
    return qa


def _pick(scene: Scene, spec: Spec, rng: random.Random) -> list[Q.QA | None]:
    """Choose the questions of a training example: short slots, then multiple choice."""
    names, weights = zip(*spec.weights, strict=True)
    short: list[Q.QA] = []
    for _ in range(4 * N_SHORT):
        qa = Q.ask(scene, rng.choices(names, weights)[0], rng)
        if qa is not None and qa.type == "rel" and rng.random() < spec.plain:
            qa = _plain(qa)
        if qa is not None and all(qa.question != o.question for o in short):
            short.append(qa)
            if len(short) == N_SHORT:
                break
    out: list[Q.QA | None] = [*short, *([None] * (N_SHORT - len(short)))]
    for _ in range(N_MC):
        qa = None if scene.frames > 1 else Q._ask_mc(scene, rng, spec.mc_bases)
        out.append(None if qa is None else _scaffold(qa, spec, rng))
    return out


@lru_cache(maxsize=1)
def _encoder() -> FastEncoder:
    return FastEncoder(Tokenizer.from_file(str(SHIPPED / "tokenizer.json")))


def _example(spec: Spec, index: int) -> tuple[Scene, list[Q.QA | None], str, random.Random]:
    seed = spec.seed + index
    if seed >= EVAL_SEED_START:
        raise VLMFastError(f"training seed {seed} is in the range reserved for evaluation")
    rng = random.Random(f"vlmfast-tiny-train-{spec.kind}-{seed}")
    if spec.kind == "video":
        scene = make_video_scene(rng)
    else:
        scene = make_image_scene(rng, 128 if spec.kind == "image" else 64, spec.signs)
    return scene, _pick(scene, spec, rng), caption(scene, rng)[0], rng


def make_batch(spec: Spec) -> dict[str, np.ndarray]:
    """Draw and pack one batch.

    Returns
    -------
    dict
        ``pixels (B, V, 64, 64, 3) uint8`` (absent without ``spec.pixels``), ``fields``, ``place``,
        ``bits``, ``count`` as in :func:`label_frame`; ``ids (B, S) int16`` slot tokens;
        ``targets (B, S) int16`` the next token where it is part of an answer, else -1;
        ``asked`` the same for the tokens of the questions;
        ``named_at (B, R) int16`` slot tokens that end a name (-1: none) and ``named (B, R) int32``
        their objects, as bits of ``owner``; ``recall (B, slots, 3) int16`` the answering position,
        the first and the last name before it; ``facts (B, slots, 2, 9) float32`` the facts of these
        two; ``choice (B, 3, 9) int16``, see :func:`_option_positions`; ``types (B, slots) int8``
        index into :data:`TYPE_NAMES` or -1; ``prefix`` and ``source (B, P) int64`` the ids and
        sources of the prefix that is kept, see :func:`make_layout`; ``positions (B, P + S) int64``
        those of prefix and slot tokens.
    """
    rows = [_row(spec, number) for number in range(spec.size)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _row(spec: Spec, number: int) -> dict[str, np.ndarray]:
    """One example of `make_batch`."""
    ids, source = make_layout(spec.kind)
    positions = np.arange(len(ids))
    if spec.kind == "text":
        rng = random.Random(f"vlmfast-tiny-train-text-{spec.seed + number}")
        row = _asked(None, [_text_choice(spec, rng) for _ in spec.slots], spec.slots)
    else:
        scene, qas, text, rng = _example(spec, number)
        question = VIDEO_QUESTION if spec.kind == "video" else CAPTION_QUESTION
        row = _asked(scene, [*qas, Q.QA("caption", question, text)], spec.slots)
        rasters = paint(scene)
        labels = [label_frame(scene, raster, frame) for frame, raster in enumerate(rasters)]
        row |= {name: np.concatenate([of[name] for of in labels]) for name in labels[0]}
        if spec.pixels:
            row["pixels"] = np.stack([v for raster in rasters for v in _view_pixels(raster.rgb)])
        if spec.keep:
            positions = _keep(source, row["fields"][..., 0].ravel() > 0, spec, rng)
    offsets = np.concatenate([np.arange(length) for length in spec.slots]) + len(ids)
    row |= {"prefix": ids[positions], "source": source[positions]}
    return row | {"positions": np.concatenate([positions, offsets])}


def _asked(
    scene: Scene | None, asks: list[Q.QA | None], slots: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Questions and answers in their slots, and the names in questions about a scene."""
    encode, total = _encoder(), sum(slots)
    ids = np.zeros(total, np.int16)
    targets, asks_next = np.full((2, total), -1, np.int16)
    types = np.full(len(slots), -1, np.int8)
    choice = np.full((3, 9), -1, np.int16)
    known = np.full((len(slots), 2, len(FACTS)), UNKNOWN, np.float32)
    recall = np.full((len(slots), 3), -1, np.int16)
    named_at = np.full(MAX_REFERENCES, -1, np.int16)
    named = np.zeros(MAX_REFERENCES, np.int32)
    start = names = choices = 0
    for k, (length, qa) in enumerate(zip(slots, asks, strict=True)):
        if qa is not None:
            asked, full = encode(turn(qa.question)), encode(turn(qa.question, qa.answer))
            if len(full) > length:
                raise VLMFastError(f"{len(full)} tokens do not fit a slot of {length}: {qa}")
            ids[start : start + len(full)] = full
            asks_next[start : start + len(asked) - 1] = asked[1:]
            targets[start + len(asked) - 1 : start + len(full) - 1] = full[len(asked) :]
            first = names
            for word, bits in references(scene, qa.question) if scene is not None else ():
                if names < MAX_REFERENCES:
                    words = " ".join(qa.question.split(" ")[: word + 1]).rstrip("?,.:")
                    named_at[names] = start + len(encode(words)) - 1
                    named[names] = bits
                    names += 1
            if names > first:
                recall[k] = start + len(asked) - 1, named_at[first], named_at[names - 1]
                known[k] = [facts(scene, int(named[i])) for i in (first, names - 1)]
            if " (A) " in qa.question:
                choice[choices] = _option_positions(qa, encode, start)
                choices += 1
            types[k] = TYPE_NAMES.index(qa.type)
        start += length
    row = {"ids": ids, "targets": targets, "asked": asks_next, "types": types, "choice": choice}
    if scene is not None:
        row |= {"named_at": named_at, "named": named, "recall": recall, "facts": known}
    return row


def _option_positions(qa: Q.QA, encode: FastEncoder, start: int) -> np.ndarray:
    """Positions of the options of a multiple-choice question among the slot tokens; (9,).

    The letters of up to four options, their last words, and the answering position; -1 where
    missing. The right option comes first.
    """
    out = np.full(9, -1, np.int16)
    parts = qa.question.split(" (")
    order = list(range(len(parts) - 1))
    options = [p.split(") ", 1)[1] for p in parts[1:]]
    right = "ABCD".index(qa.answer) if qa.answer in "ABCD" else options.index(qa.answer)
    order.insert(0, order.pop(right))
    for rank, i in enumerate(order):
        out[rank] = start + len(encode(" (".join(parts[: i + 1]) + " ("))
        out[4 + rank] = start + len(encode(" (".join(parts[: i + 2]))) - 1
    out[8] = start + len(encode(turn(qa.question))) - 1
    return out


def _keep(source: np.ndarray, shown: np.ndarray, spec: Spec, rng: random.Random) -> np.ndarray:
    """Choose ``spec.keep`` prefix positions; text is always kept."""
    noise = np.random.default_rng(rng.getrandbits(60)).random(len(source))
    rank = np.where(source == -1, 3.0, noise)
    if spec.keep_foreground:
        rank += np.where(source >= 0, shown[source], False) * 1.0
    return np.sort(np.argsort(-rank, kind="stable")[: spec.keep])
