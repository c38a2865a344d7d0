"""What the arguments of several commands share; imports nothing heavy."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable

# For `argparse`, hence the doubled signs. tests/cli/test_cli.py compares it with the presets.
RECIPES = (
    "a preset (faithful, balanced and fast keep 33%%, 22%% and 11%% of the visual tokens), methods "
    "such as hired:0.2+snapkv:0.5, or none, the full model"
)


DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_dtype(parser: ArgumentParser) -> None:
    """Declare ``--dtype``."""
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="dtype of the weights; auto: the checkpoint's own",
    )


def examples(*commands: str) -> str:
    """The epilog of a parser with one example a line; a line may end in a comment."""
    return "\n".join(["examples:", *(f"  {command}" for command in commands)])


def within(
    kind: Callable[[str], float], low: float, high: float = math.inf, *, above: bool = False
) -> Callable[[str], float]:
    """The type of an argument that is a number from ``low``, or above it, to ``high``."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf or (above and value == low):
            what = "a whole number" if kind is int else "a number"
            least = f"above {low:g}" if above else f"of at least {low:g}"
            most = "" if high == math.inf else f" and at most {high:g}"
            raise ArgumentTypeError(f"{text!r} is not {what} {least}{most}")
        return value

    return read


count = within(int, 0, above=True)


def names(text: str) -> tuple[str, ...]:
    """The type of an argument ``NAME,NAME``."""
    found = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if not found:
        raise ArgumentTypeError("at least one name is needed")
    return found
