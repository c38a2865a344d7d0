"""Write the model cards of the shipped weights: ``python tools/cards.py``.

The accuracies are those of ``docs/results/report.json``. How the weights were trained, and the
accepted lengths of drafters, stand beside them in ``stage.json``. Each card is ``README.md`` in its
folder of ``vlmfast/weights``. A test checks that the cards match.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vlmfast.core.weights import StageWeights
from vlmfast.eval.cards import accuracy_tables

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "vlmfast" / "weights"
REPORT = ROOT / "docs" / "results" / "report.json"
_MEASURED = (
    "840 questions about generated scenes outside the training seeds, 40 of each type. Accuracies "
    "are means over question types. Measured on 2026-11-22 on 2 CPU cores with torch 2.15 and "
    "transformers 5.23 by `vlmfast eval shapes --limit 40`."
)


def shipped(name: str) -> StageWeights:
    """Shipped weights with their measurements."""
    weights = StageWeights.from_pretrained(WEIGHTS / f"tiny-{name}")
    if name.startswith("draft-"):
        return weights
    return replace(weights, measured=tuple(accuracy_tables(REPORT, name, _MEASURED)))


def save(name: str, folder: Path) -> None:
    """Write shipped weights with their card."""
    recipe = name if name.startswith("draft-") else f"{name}:0.22"
    shipped(name).save_pretrained(folder, recipe)


def main() -> None:
    for folder in sorted(WEIGHTS.glob("tiny-*")):
        save(folder.name.removeprefix("tiny-"), folder)


if __name__ == "__main__":
    main()
