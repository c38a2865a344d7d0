"""Write the model cards of the shipped weights: ``python tools/cards.py``.

The accuracies are those of ``docs/results/report.json``, the accepted lengths of drafters those
that their training recorded. Each card is ``README.md`` in its folder of ``vlmfast/weights``.
A test checks that the cards match.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vlmfast.core.weights import StageWeights
from vlmfast.eval.cards import accuracy_tables

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = ROOT / "vlmfast" / "weights"
REPORT = ROOT / "docs" / "results" / "report.json"
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


def shipped(name: str) -> StageWeights:
    """Shipped weights with their command and measurements."""
    weights = StageWeights.from_pretrained(WEIGHTS / f"tiny-{name}")
    note = {"note": NOTES[name]} if name in NOTES else {}
    rest = {k: v for k, v in weights.training.items() if k not in ("model", "command", "note")}
    training = {"model": "tiny", "command": COMMANDS[name], **note, **rest}
    drafter = name.startswith("draft-")
    measured = weights.measured if drafter else tuple(accuracy_tables(REPORT, name, _MEASURED))
    return replace(weights, training=training, measured=measured, license="apache-2.0")


def save(name: str, folder: Path) -> None:
    """Write shipped weights with their card."""
    recipe = name if name.startswith("draft-") else f"{name}:0.22"
    shipped(name).save_pretrained(folder, recipe)


def main() -> None:
    for name in COMMANDS:
        save(name, WEIGHTS / f"tiny-{name}")


if __name__ == "__main__":
    main()
