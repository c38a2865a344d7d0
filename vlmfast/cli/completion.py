"""``vlmfast completion``: a script that completes commands in a shell."""

from __future__ import annotations

import argparse
from textwrap import dedent
from typing import Any

from .arguments import module
from .parser import every_parser

_RECIPES = ("recipe", "recipes", "drafters")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for ``bash``, ``zsh`` or ``fish``.

    It completes commands, options and their choices, files, and the names of presets and methods.
    The names are those of today: create it again after an update or a new package of methods.

    Raises
    ------
    VLMFastError
        If shtab is missing.
    """
    try:
        import shtab
    except ImportError as error:
        from vlmfast.errors import VLMFastError

        raise VLMFastError("completion needs a package: pip install shtab") from error
    from vlmfast.core.recipe import PRESETS
    from vlmfast.core.registry import stage_names

    groups = module("eval.commands").GROUPS
    methods, recipes = sorted(stage_names()), [*PRESETS, *sorted(stage_names())]
    for path, command in every_parser(parser):
        for action in command._actions:
            names: list[str] = []
            if action.dest in _RECIPES:
                names = recipes + (list(groups) if path == ("eval",) else [])
            elif action.metavar == "METHOD":
                names = methods
            if names:
                action.complete = _words(action.dest, names)  # type: ignore[attr-defined]
            elif action.metavar in ("FILE", "PNG", "DATA"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in ("DIR", "DIR2", "FOLDER"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def _words(name: str, words: list[str]) -> dict[str, Any]:
    """Completion of fixed words, as shtab describes it for each shell."""
    function = f"_vlmfast_{name}_{len(words)}"
    text = " ".join(words)
    return {
        "bash": function,
        "zsh": f"({text})",
        "fish": text,
        "preamble": {
            "bash": dedent(f"""
                {function}() {{
                  compgen -W "{text}" -- $1
                }}
                """)
        },
    }
