"""VLMEvalKit's exact matching of an answer with named options."""

from __future__ import annotations

_REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_FAILED = "Failed to obtain answer via API"
_LAST = 4  # a letter counts only among the last words


def match(answer: str, options: dict[str, str]) -> str:
    """The letter of the option that an answer names or quotes; ``Z`` if there is none.

    Exactly one letter must be a separate word near the end. Otherwise the answer must contain the
    text of exactly one option and must not be much longer than all options together.
    """
    return _letter(answer, options) or _text(answer, options) or "Z"


def _letter(answer: str, options: dict[str, str]) -> str:
    if _FAILED in answer:
        return ""
    if any(refusal in answer for refusal in _REFUSALS):
        return "Z"
    words = answer.translate(dict.fromkeys(map(ord, ".()[],:;!*#{}"), " ")).split()
    named = [letter for letter in options if letter in words]
    if len(named) == 1:
        return named[0] if words.index(named[0]) > len(words) - _LAST - 1 else ""
    return "Z" if not named and "Z" in words else ""


def _text(answer: str, options: dict[str, str]) -> str:
    answer = answer.lower()
    if len(answer) > 2 * sum(map(len, options.values())):
        return ""
    named = [letter for letter, text in options.items() if text.lower() in answer]
    return named[0] if len(named) == 1 else ""
