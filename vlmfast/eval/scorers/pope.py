"""Parse and score POPE's yes-or-no answers (arXiv 2305.10355)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from . import Parsed, check_mode, share

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def parse(response: str, mode: str = "official") -> Parsed:
    """``yes`` or ``no``; another text if the mode finds neither.

    The authors' code searches the first sentence for the words "No", "no" or "not" and treats
    everything else as yes. lmms-eval uses the lower-case answer; VLMEvalKit requires exactly one
    of the two words.
    """
    if check_mode(mode) == "lmms-eval":
        answer = response.lower().strip()
        return Parsed(answer, answer in ("yes", "no"))
    if mode == "official":
        words = response.partition(".")[0].replace(",", "").split(" ")
        no = any(word in words for word in ("No", "not", "no"))
        return Parsed("no" if no else "yes", bool(response.strip()))
    words = _plain(response.lower()).split()
    if ("yes" in words) == ("no" in words):
        return Parsed("unknown", False)
    return Parsed("yes" if "yes" in words else "no", True)


def _plain(text: str) -> str:
    """Remove punctuation next to a space, and replace other punctuation by a space."""
    numbers = re.search(r"\d,\d", text) is not None
    plain = text
    for mark in _PUNCTUATION:
        near_space = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if near_space or numbers else " ")
    # Removes at most 32 full stops without a digit after them: the original passes the flag
    # re.UNICODE as the number of replacements.
    return re.sub(r"\.(?!\d)", "", plain, count=int(re.UNICODE))


def metrics(samples: Sequence[dict[str, Any]], mode: str) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and the ratio of yes, as fractions.

    ``pope_yes_ratio`` is over answers. In lmms-eval it is over targets, so that it does not depend
    on the model, and its recall leaves out answers that are neither yes nor no.
    """
    lmms = check_mode(mode) == "lmms-eval"
    pairs = [(_answer(s), s["target"].strip().lower()) for s in samples]
    answered_yes, is_yes = ([pair[i] == "yes" for pair in pairs] for i in (0, 1))
    hits = sum(a and b for a, b in zip(answered_yes, is_yes, strict=True))
    missed = sum(b == "yes" and (a == "no" if lmms else a != "yes") for a, b in pairs)
    precision = hits / sum(answered_yes) if any(answered_yes) else 0.0
    recall = hits / (hits + missed) if hits + missed else 0.0
    both = precision + recall
    return {
        "pope_accuracy": share(s["score"] for s in samples),
        "pope_precision": precision,
        "pope_recall": recall,
        "pope_f1_score": 2 * precision * recall / both if both else 0.0,
        "pope_yes_ratio": share(is_yes if lmms else answered_yes),
        "unanswered": sum(not s.get("answered") for s in samples),
    }


def _answer(sample: dict[str, Any]) -> str:
    return sample["filtered_resps"][0] if sample["filtered_resps"] else ""
