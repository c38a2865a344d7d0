"""Parse and score MMMU's multiple-choice and open answers (arXiv 2311.16502)."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from typing import Any

from vlmfast.errors import VLMFastError

from . import Parsed, check_mode, letters, share, vlmevalkit

DISCIPLINES = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        "Basic_Medical_Science",
        "Clinical_Medicine",
        "Diagnostics_and_Laboratory_Medicine",
        "Pharmacy",
        "Public_Health",
    ),
    "Humanities and Social Science": ("History", "Literature", "Sociology", "Psychology"),
    "Tech and Engineering": (
        "Agriculture",
        "Architecture_and_Engineering",
        "Computer_Science",
        "Electronics",
        "Energy_and_Power",
        "Materials",
        "Mechanical_Engineering",
    ),
}
SUBJECTS = {subject: name for name, subjects in DISCIPLINES.items() for subject in subjects}

# Seed of the one random stream for all guesses of each code base.
STREAM_SEEDS = {"official": 42, "lmms-eval": 0}


def parse_choice(
    response: str, options: Sequence[str], mode: str = "official", *, guess: random.Random
) -> Parsed:
    """The letter that an answer to a multiple-choice question names.

    Parameters
    ----------
    response : str
        Leading and trailing white space is significant: ``"D\\n"`` is no letter.
    options : sequence of str
    mode : {"official", "lmms-eval", "vlmevalkit"}
    guess : random.Random
        If nothing is found, the first two modes draw a letter from it. `drawn_by` a sample's id
        does not depend on the order of samples. The authors' code uses one ``random.Random(42)``
        for all samples in the order of the data set.
    """
    named = dict(zip(letters(len(options)), options, strict=True))
    if check_mode(mode) == "vlmevalkit":
        letter = vlmevalkit.match(response, named)
        return Parsed(letter, letter != "Z")
    if not named:
        raise VLMFastError("a multiple-choice question has no options")
    for character in ",.!?;:'":  # once each: of "B,." only the full stop is stripped
        response = response.strip(character)
    response = f" {response} "

    loose = mode == "lmms-eval"
    # The pattern to search for, and the different pattern that locates the last match.
    forms = [("({})", "({})"), ("{} " if loose else " {} ", " {} ")]
    forms += [("{}.", " {} ")] if loose else []
    for form, location in forms:
        found = [letter for letter in named if form.format(letter) in response]
        if found:
            return Parsed(max(found, key=lambda x: response.rfind(location.format(x))), True)
    if len(response.split()) > 5:
        lower = response.lower()
        found = [letter for letter, text in named.items() if text.lower() in lower]
        if found:
            return Parsed(max(found, key=lambda x: lower.rfind(named[x].lower())), True)
    return Parsed(guess.choice(list(named)), False)


_SIGNS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def parse_open(response: str) -> list[str | float]:
    """Every text and number that could be the answer, without duplicates, numbers first.

    Official and lmms-eval. They lower-case the text before splitting it at full stops before
    capitals and at new lines, so only new lines ever split it.
    """
    response = response.strip().strip(".").lower()
    lines = response.split("\n")
    keys = []
    for number, line in enumerate(lines, start=1):
        signs = (*_SIGNS, "=") if number == len(lines) else _SIGNS
        tail = ""
        for sign in signs:
            if sign in line:
                after = line.rpartition(sign)[2].strip()
                if not tail or len(after) < len(tail):
                    tail = after
        if tail and tail not in (":", ",", ".", "!", "?", ";", "'"):
            keys.append(tail)
    keys = keys or [response]
    texts = keys + [n for key in keys for pattern in _NUMBERS for n in pattern.findall(key)]
    values = {value for text in texts for value in normalise(text)}
    return sorted(values, key=lambda value: (isinstance(value, str), str(value)))


def normalise(text: str) -> list[str | float]:
    """A number with two decimals, else lower case; a single letter before and after a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def score_open(values: Sequence[str | float], target: str | list[str]) -> bool:
    """Whether a target is one of the numbers, or a part of one of the texts."""
    targets = [target] if isinstance(target, str) else target
    wanted = [value for one in targets for value in normalise(str(one))]
    return any(
        any(isinstance(w, str) and w in value for w in wanted)
        if isinstance(value, str)
        else value in wanted
        for value in values
    )


def judge(
    response: str,
    options: Sequence[str],
    target: str,
    kind: str,
    mode: str = "official",
    *,
    guess: random.Random,
) -> tuple[Parsed, float]:
    """Parse an answer and score it.

    Parameters
    ----------
    target : str
        As in the data set: a letter or a text, or the ``repr`` of a list of accepted ones.
        lmms-eval treats such a list as a text.
    kind : {"multiple-choice", "open"}
    """
    wanted = target if mode == "lmms-eval" else answers(target)
    if kind == "multiple-choice":
        parsed = parse_choice(response, options, mode, guess=guess)
        right = parsed.answer in ([wanted] if isinstance(wanted, str) else wanted)
        return parsed, float(right)
    if check_mode(mode) == "vlmevalkit":
        letter = vlmevalkit.match(response, {"A": target, "B": "Other Answers"})
        return Parsed(letter, letter != "Z"), float(letter == "A")
    values = parse_open(response)
    return Parsed(values, bool(response.strip())), float(score_open(values, wanted))


def answers(target: str) -> str | list[str]:
    """Parse a target that is the ``repr`` of a list."""
    if not target.lstrip().startswith("["):
        return target
    try:
        value = ast.literal_eval(target.strip())
    except (ValueError, SyntaxError):
        return target
    return [str(one) for one in value] if isinstance(value, list) else target


def metrics(samples: Sequence[dict[str, Any]], mode: str) -> dict[str, float]:
    """Accuracy over all questions, and the effect of guessing.

    ``mmmu_acc`` has as many decimals as its code base prints. ``fallbacks`` counts the questions
    with a guessed letter. ``mmmu_acc_expected`` scores each of them with the probability of a right
    guess. ``mmmu_acc_stream`` guesses them from one random stream in the order of the data set, as
    the code base does.
    """
    decimals = {"official": 3, "lmms-eval": 5}.get(mode)
    accuracy = share(s["score"] for s in samples)
    found = {"mmmu_acc": accuracy if decimals is None else round(accuracy, decimals)}
    drawn = [s for s in samples if s.get("choices") and not s.get("answered") and "error" not in s]
    found["fallbacks"] = len(drawn)
    if mode in STREAM_SEEDS:
        chosen = {s["doc_id"]: 1 / s["choices"] for s in drawn}
        found["mmmu_acc_expected"] = share(chosen.get(s["doc_id"], s["score"]) for s in samples)
        stream = random.Random(STREAM_SEEDS[mode])
        for s in sorted(drawn, key=lambda s: place(s["doc_id"])):
            letter = stream.choice(letters(s["choices"]))
            wanted = s["target"] if mode == "lmms-eval" else answers(s["target"])
            chosen[s["doc_id"]] = float(letter in ([wanted] if isinstance(wanted, str) else wanted))
        found["mmmu_acc_stream"] = share(chosen.get(s["doc_id"], s["score"]) for s in samples)
    return found


def subject_of(doc_id: str) -> str:
    """``Art_Theory`` of ``validation_Art_Theory_7``.

    Raises
    ------
    VLMFastError
        For another format.
    """
    match = re.fullmatch(r"[^_]+_(.+?)_\d+", doc_id)
    if match is None:
        raise VLMFastError(f"id {doc_id!r} is not of the form validation_Art_Theory_7")
    return match[1]


def place(doc_id: str) -> tuple[str, int]:
    """Sort key for the order of the data set: by subject, then by number."""
    return subject_of(doc_id), int(doc_id.rpartition("_")[2])
