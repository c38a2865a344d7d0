"""Parse and score Video-MME's multiple-choice answers (arXiv 2405.21075)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from . import Parsed, check_mode, letters, share, vlmevalkit

# Removed from answers. Two pairs are joined, because all copies of the code miss a comma there.
# VLMEvalKit's list lacks the last two; without a capital from A to D they change no letter.
_PHRASES = (
    "The best answer is",
    "The correct answer is",
    "The answer is",
    "The answer",
    "The best option isThe correct option is",
    "Best answer:Best option:",
    "Answer:",
    "Option:",
    "The correct answer",
    "The correct option",
)


def parse_choice(response: str, options: Sequence[str] = (), mode: str = "official") -> Parsed:
    """The letter that an answer names; if none is found ``""``, for vlmevalkit ``Z``.

    Parameters
    ----------
    response : str
    options : sequence of str
        With their letters (``"A. Apples."``). vlmevalkit searches for their texts if it finds no
        letter.
    mode : {"official", "lmms-eval", "vlmevalkit"}
    """
    if check_mode(mode) == "lmms-eval":
        letter = _ranked(response, letters(4))
    else:
        letter = _first(response)
        if mode == "vlmevalkit" and not letter:
            lettered = zip(letters(len(options)), options, strict=True)
            parts = {x: option.partition(f"{x}.") for x, option in lettered}
            texts = {x: text.strip(". \n") for x, (_, mark, text) in parts.items() if mark}
            letter = vlmevalkit.match(response, texts)
    return Parsed(letter, letter not in ("", "Z"))


def _first(response: str) -> str:
    """The first capital from A to D, even within a word such as "Best"."""
    response = response.strip()
    for phrase in _PHRASES:
        response = response.replace(phrase, "")
    match = re.search("[ABCD]", response)
    return match[0] if match else ""


_LEADS = (
    "the answer is", "answer is", "the correct answer is", "correct answer is",
    "the best answer is", "best answer is", "the correct option is", "correct option is",
    "the best option is", "best option is", "the choice is", "choice is",
    "the correct choice is", "correct choice is", "i choose", "i select", "i pick",
    "my answer is", "my choice is", "옵션", "정답은", "답은", "답:", "答案是", "答案为", "选",
    "答えは",
)  # fmt: skip
_FORMS = {"({})": 6, "{}.": 5, "{}:": 4, "{})": 3, "{} ": 2}
_START, _END, _LEAD = 10, 9, 7


def _ranked(response: str, choices: Sequence[str]) -> str:
    """The occurrence of a letter with the most specific form; of several, the last one."""
    text = response.strip()
    for character in ",.!?;:'\"":
        text = text.strip(character)
    text = f" {text} "
    bare, lower = text.strip(), text.lower()
    found: list[tuple[int, int, str]] = []
    for form, rank in _FORMS.items():
        found += [(rank, text.rfind(form.format(c)), c) for c in choices if form.format(c) in text]
    for lead in _LEADS:
        if lead in lower:
            end = lower.find(lead) + len(lead)
            found += [(_LEAD, at, c) for c in choices if (at := text.find(c, end)) != -1]
    for c in choices:
        if bare.startswith(c) and not bare[1:2].isalpha():
            found.append((_START, 0, c))
    for c in choices:
        if bare.endswith(c) and not bare[-2:-1].isalpha():
            found.append((_END, len(text) - 1, c))
    found = found or [(0, text.rfind(c), c) for c in choices if c in text]
    # The first of equals, as with a stable sort.
    return max(found, key=lambda one: one[:2])[2] if found else ""


def metrics(samples: Sequence[dict[str, Any]], mode: str) -> dict[str, float]:
    """Accuracy in percent over both denominators.

    ``videomme_perception_score`` follows its mode: the authors' code only counts questions with a
    letter in the answer (``answered``), the others count all questions.
    """
    answered = [s for s in samples if s.get("answered")]
    over_all = 100 * share(s["score"] for s in samples)
    over_answered = 100 * share(s["score"] for s in answered)
    return {
        "videomme_perception_score": over_answered if mode == "official" else over_all,
        "score_over_all": over_all,
        "score_over_answered": over_answered,
        "unanswered": len(samples) - len(answered),
    }
