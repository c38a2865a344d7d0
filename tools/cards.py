"""Write the model cards of the shipped weights: ``python tools/cards.py``.

The accuracies are those of ``docs/results/report.json``, the accepted lengths those of the table in
``docs/drafters-training.md``. Each card is ``README.md`` in its folder of ``vlmfast/weights``; that
of ``tiny`` is a copy of ``vlmfast/models/tiny/CARD.md``. A test checks that the cards match.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmfast.core.weights import StageWeights
from vlmfast.eval.cards import accuracy_tables

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "vlmfast" / "weights"
REPORT = ROOT / "docs" / "results" / "report.json"
DRAFTERS = ROOT / "docs" / "drafters-training.md"
COMMANDS = {
    "atp": "vlmfast train atp --steps 120 --batch 8 --lr 0.002 --target 0.22 --distill 0.5",
    "pvc": "vlmfast train pvc --minutes 30 --batch 8 --dtype float32 --seed 2",
    "elastic": "vlmfast train elastic --minutes 45 --gate-from 0.7 --batch 8 --lr 1e-3",
    "draft-eagle": "vlmfast train drafter --compressor --gate-from 0.8 --feature 0.1 --soft 1 "
    "--ttt 4 --lr 1e-3 --samples 8000 --sampled 0.25 --held-out 96 --eval-every 50 --steps 720",
    "draft-vispec": "vlmfast train drafter --kind vispec --init vlmfast/weights/tiny-draft-eagle "
    "--ttt 4 --lr 1e-3 --samples 8000 --sampled 0.25 --held-out 96 --minutes 59",
}
NOTES = {
    "atp": "With a `budget`, the effect of the training is within the confidence interval: the "
    "gain over random selection comes from the scores.",
    "draft-eagle": "The run was stopped and resumed three times. Its length was reduced from 2,000 "
    "steps to 720, after steps 469 and 640, so the learning rate decayed faster at the end than "
    "with the command alone.",
    "draft-vispec": "The machine was shared with other work, so that the run has few steps. It was "
    "stopped and resumed once, when its length was changed from 45 to 59 minutes.",
}
_MEASURED = (
    "840 questions about generated scenes outside the training seeds, 40 of each type. Accuracies "
    "are means over question types. Measured on 2026-11-22 on 2 CPU cores with torch 2.15 and "
    "transformers 5.23 by `vlmfast eval shapes --limit 40`."
)
# Heading of the table in the documentation, and its note.
_ACCEPTED = {
    "draft-eagle": (
        "## How long to train",
        "Greedy chains of six tokens on 96 held-out prompts, with full images and with the branch "
        "selected by the gate, which is trained from step 576.",
    ),
    "draft-vispec": (
        "### ViSpec",
        "Greedy chains of six tokens on 96 held-out prompts.",
    ),
}


def accepted_lengths(page: str, name: str) -> dict[str, Any]:
    """The table of accepted lengths in the documentation."""
    heading, note = _ACCEPTED[name]
    section = page.partition(f"\n{heading}\n")[2]
    table = re.search(r"(^\|.*\n)+", section, re.MULTILINE)
    assert table is not None, heading
    lines = [line.strip("| ").split("|") for line in table[0].splitlines()]
    columns, _, *rows = [[cell.strip() for cell in line] for line in lines]
    title = "Accepted tokens per round"
    return {"title": title, "columns": columns, "rows": rows, "note": note}


def shipped(name: str) -> StageWeights:
    """Shipped weights with their command, measurements and card."""
    weights = StageWeights.from_pretrained(WEIGHTS / f"tiny-{name}")
    note = {"note": NOTES[name]} if name in NOTES else {}
    rest = {k: v for k, v in weights.training.items() if k not in ("model", "command", "note")}
    training = {"model": "tiny", "command": COMMANDS[name], **note, **rest}
    if name in _ACCEPTED:
        measured = [accepted_lengths(DRAFTERS.read_text(encoding="utf-8"), name)]
    else:
        measured = accuracy_tables(REPORT, name, _MEASURED)
    weights = replace(
        weights, training=training, measured=tuple(measured), license="apache-2.0", card=None
    )
    recipe = name if name in _ACCEPTED else f"{name}:0.22"
    return replace(weights, card=weights.model_card(recipe))


def main() -> None:
    for name in COMMANDS:
        shipped(name).save_pretrained(WEIGHTS / f"tiny-{name}")
    card = ROOT / "vlmfast" / "models" / "tiny" / "CARD.md"
    (WEIGHTS / "tiny" / "README.md").write_bytes(card.read_bytes())


if __name__ == "__main__":
    main()
