"""Parsers of the command line: filled on use, with examples and defaults in their help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any, Self

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_VARIABLE = "VLMFAST_LOG"


class Help(argparse.HelpFormatter):
    """Adds the default of each option, and keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", shown_default(action)
        if default is None or "default: " in text:
            return text
        return f"{text} (default: {default.replace('%', '%%')})"


def shown_default(action: argparse.Action) -> str | None:
    """The default of an option as its help shows it; None for switches and absent defaults."""
    value = action.default
    switch = action.nargs == 0
    if switch or not action.option_strings or value in (None, argparse.SUPPRESS, "", [], ()):
        return None
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)


class Command(argparse.ArgumentParser):
    """A parser that adds its arguments on use, since their modules may be slow to import."""

    fill: Callable[[argparse.ArgumentParser], None] | None = None
    passed_on: str | None = None  # destination of the words after ``--``; by default positionals

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, **kwargs})

    def filled(self) -> Self:
        """This parser with its arguments."""
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
            add_logging(self, hidden=True)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.filled()
        passed: list[str] = []
        if self.passed_on is not None and "--" in (args or ()):
            at = args.index("--")
            args, passed = args[:at], args[at + 1 :]
        found, rest = super().parse_known_args(args, namespace)
        if self.passed_on is not None:
            setattr(found, self.passed_on, passed)
        for word in rest:
            if word.startswith("--"):
                from vlmfast.core.params import nearest  # imports torch

                name = word.partition("=")[0]
                known = [o for o in self._option_string_actions if o.startswith("--")]
                self.error(f"unrecognized argument {name}{nearest(name, known)}")
        return found, rest


def add_logging(parser: argparse.ArgumentParser, *, hidden: bool = False) -> None:
    """The options of every command.

    They are also allowed after the command. There they are hidden, and their defaults suppressed:
    those would undo an option before the command.
    """

    def default(value: Any) -> Any:
        return argparse.SUPPRESS if hidden else value

    def about(text: str) -> str:
        return argparse.SUPPRESS if hidden else text

    parser.add_argument(
        "--debug",
        action="store_true",
        default=default(False),
        help=about("show tracebacks, warnings and all log lines"),
    )
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=default(None),
        metavar="LEVEL",
        help=about(
            f"log lines on stderr: {', '.join(LOG_LEVELS)} (default: {LOG_VARIABLE}, or warning)"
        ),
    )


def every_parser(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """A parser and those of its commands, filled, each with the words that select it."""
    if isinstance(parser, Command):
        parser.filled()
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from every_parser(command, (*path, name))


def log_level(chosen: str | None) -> str:
    """The level of ``--log-level``, else of the environment, else ``warning``.

    Raises
    ------
    VLMFastError
        If the environment has another value.
    """
    from vlmfast.errors import VLMFastError

    level = chosen or os.environ.get(LOG_VARIABLE, "").strip().lower() or "warning"
    if level not in LOG_LEVELS:
        raise VLMFastError(f"{LOG_VARIABLE}={level!r} must be one of {', '.join(LOG_LEVELS)}")
    return level
