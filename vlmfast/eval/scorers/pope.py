"""POPE's yes and no (arXiv 2305.10355)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from . import Parsed, check_mode, share

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def parse(response: str, mode: str = "official") -> Parsed:
    """``yes`` or ``no``; another text where the mode finds neither.

    The authors' code looks for "No", "no" or "not" among the words of the first sentence, and takes
    everything else for a yes. lmms-eval has the answer as it is, in lower case; VLMEvalKit one of
    the two words and not the other.
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
    """Without punctuation: gone beside a space, else a space itself."""
    numbers = re.search(r"\d,\d", text) is not None
    plain = text
    for mark in _PUNCTUATION:
        beside = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if beside or numbers else " ")
    # A full stop goes where no digit follows it, of the first 32 there are: the flag that was meant
    # stands where the number of replacements does.
    return re.sub(r"\.(?!\d)", "", plain, count=int(re.UNICODE))


def metrics(samples: Sequence[dict[str, Any]], mode: str) -> dict[str, float]:
    """Accuracy, precision, recall, F1 and the share of yes, as shares.

    ``pope_yes_ratio`` is over answers. lmms-eval has it over targets, where it says nothing about a
    model, and its recall leaves out answers that are neither yes nor no.
    """
    lmms = check_mode(mode) == "lmms-eval"
    pairs = [(_said(s), s["target"].strip().lower()) for s in samples]
    said, is_yes = ([pair[i] == "yes" for pair in pairs] for i in (0, 1))
    hits = sum(a and b for a, b in zip(said, is_yes, strict=True))
    missed = sum(b == "yes" and (a == "no" if lmms else a != "yes") for a, b in pairs)
    precision = hits / sum(said) if any(said) else 0.0
    recall = hits / (hits + missed) if hits + missed else 0.0
    both = precision + recall
    return {
        "pope_accuracy": share(s["score"] for s in samples),
        "pope_precision": precision,
        "pope_recall": recall,
        "pope_f1_score": 2 * precision * recall / both if both else 0.0,
        "pope_yes_ratio": share(is_yes if lmms else said),
        "unanswered": sum(not s.get("answered") for s in samples),
    }


def _said(sample: dict[str, Any]) -> str:
    return sample["filtered_resps"][0] if sample["filtered_resps"] else ""
