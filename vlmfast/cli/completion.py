"""``vlmfast completion``: a script that completes commands in a shell."""

from __future__ import annotations

import argparse

from .arguments import module
from .parser import every_parser

_RECIPES = ("recipe", "recipes", "drafters")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for ``bash``, ``zsh`` or ``fish``.

    It completes commands, options and their choices, files, and the names of presets and methods.
    The names are those of today: create it again after an update or a new package of methods.
    """
    import shtab

    from vlmfast.core.recipe import PRESETS
    from vlmfast.core.registry import stage_names

    groups = module("eval.commands").GROUPS
    methods, recipes = sorted(stage_names()), [*PRESETS, *sorted(stage_names())]
    for path, command in every_parser(parser):
        for action in command._actions:
            if action.dest in _RECIPES:  # the parser of this script alone has choices of them
                action.choices = recipes + (list(groups) if path == ("eval",) else [])
            elif action.metavar == "METHOD":
                action.choices = methods
            elif action.metavar in ("FILE", "PNG", "DATA"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in ("DIR", "DIR2", "FOLDER"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)
