"""``recipe="auto"``: the last choice of `vlmfast tune` for a model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vlmfast.core.files import make_folder
from vlmfast.core.recipe import Recipe
from vlmfast.errors import RecipeError

from .identity import identity

if TYPE_CHECKING:
    from vlmfast.models.base import Adapter

AUTO = "auto"


def home() -> Path:
    """The user's folder for choices: ``VLMFAST_HOME``, or else one in the user's cache folder."""
    if folder := os.environ.get("VLMFAST_HOME"):
        return Path(folder).expanduser()
    # An empty or relative value is to be ignored, by the XDG specification.
    folder = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(folder) if Path(folder).is_absolute() else Path(os.path.expanduser("~/.cache"))
    return base / "vlmfast"


def recipe_path(adapter: Adapter) -> Path:
    """The file of a model's choice; it need not exist.

    Models are distinguished by their sizes, their dtype and samples of every weight, not by their
    name.
    """
    key = hashlib.sha256(json.dumps(identity(adapter), sort_keys=True).encode()).hexdigest()
    return home() / "recipes" / f"{key[:32]}.yaml"


def store_recipe(adapter: Adapter, recipe: Recipe) -> Path:
    """Store a model's choice, which ``auto`` then means, and return the file.

    Raises
    ------
    VLMFastError
        If the file cannot be written.
    """
    path = recipe_path(adapter)
    make_folder(path.parent)
    recipe.save(path)
    return path


def stored_recipe(adapter: Adapter) -> Recipe:
    """The recipe that ``auto`` means.

    Raises
    ------
    RecipeError
        If there is none for this model, or it cannot be read.
    """
    path = recipe_path(adapter)
    if not path.exists():
        raise RecipeError(
            "recipe='auto' needs a choice for this model, and none is stored in "
            f"{path.parent}; run `vlmfast tune --model MODEL --data FILE --out DIR` first"
        )
    return Recipe.load(path)
