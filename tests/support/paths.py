"""Where the files of the repository are."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DATA = TESTS / "data"
ROOT = TESTS.parent
