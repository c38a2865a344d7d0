"""Costs and tables as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """One cost of an answer.

    Parameters
    ----------
    name, value : str
    full : str
        The full model's, where it is known.
    fraction : float, optional
        Of the full model's.
    """

    name: str
    value: str
    full: str = ""
    fraction: float | None = None

    @property
    def brief(self) -> str:
        """Such as ``74 (22%)``."""
        if self.fraction is None or self.value == self.full:
            return self.value
        return f"{self.value} ({self.fraction:.0%})"

    @property
    def text(self) -> str:
        """Such as ``336 → 74 (22%)``."""
        known = self.fraction is not None and self.value != self.full
        return f"{self.full} → {self.brief}" if known else self.value

    def __str__(self) -> str:
        return f"{self.name} {self.text}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def size(value: float) -> str:
    return _scaled(value, " B", " kB", " MB", " GB")


def count(value: float) -> str:
    """A number of tokens; averages have one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def brief_count(value: float) -> str:
    """Such as 7.1B."""
    return _scaled(value, "", "K", "M", "B")


def _scaled(value: float, *units: str) -> str:
    """A number in the first unit, of those a thousand apart, in which it is below a thousand."""
    for unit in units[:-1]:
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{units[-1]}"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def shortened(text: str, most: int) -> str:
    """``text`` on one line of at most ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def text_table(rows: list[dict[str, str]], left: Iterable[str] = ()) -> str:
    """Aligned columns under their names; those of ``left`` are aligned to the left."""
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = []
    for cells in ({key: key for key in widths}, *rows):
        line = [f"{cells[k]:{'<' if k in left else '>'}{width}}" for k, width in widths.items()]
        lines.append("  ".join(line).rstrip())
    return "\n".join(lines)


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table whose numbers, all columns but the first, are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])
