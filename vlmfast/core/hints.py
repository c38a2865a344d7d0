"""What a recipe that cannot be read was probably meant to be.

Suggestions are guesses: `Recipe.parse` shows one only if it is a valid recipe.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import Field, fields

from .params import recipe_name
from .registry import stage_class, stage_names
from .stage import Stage

# A method name and its values, with any of the separators that users write: hired 0.2, hired(0.2).
_ITEM = re.compile(r"([A-Za-z][\w-]*)\s*[\s:=(\[@]\s*(.*?)\s*[)\]]?")
_LONGEST = 300  # characters; longer texts are not guessed


def corrections(item: str, presets: tuple[str, ...]) -> Iterator[str]:
    """Texts that ``item``, one entry of a recipe, may have been meant to be; the likeliest first.

    Parameters
    ----------
    item : str
    presets : tuple of str
        Their names.
    """
    if len(item) > _LONGEST:
        return
    known = [*stage_names(), *presets]
    if re.fullmatch(r"[\w-]+", item) and (name := _nearest(item, known)):
        yield name
    listed = [_nearest(word, list(stage_names())) for word in re.split(r"[\s,;|&>]+", item)]
    if len(listed) > 1 and all(listed):
        yield "+".join(listed)
    match = _ITEM.fullmatch(item)
    name = _nearest(match[1], known) if match else ""
    if match is None or not name:
        return
    if name in presets:
        yield name
        return
    cls, rest = stage_class(name), match[2]
    if re.fullmatch(r"\d+,\d+", rest):  # a decimal comma
        yield f"{name}:{rest.replace(',', '.')}"
    parts = _parts(rest, {recipe_name(f) for f in fields(cls)})
    yield f"{name}:{','.join(parts)}".rstrip(":")
    yield f"{name}:{','.join(_fractions(parts, cls))}".rstrip(":")


def _nearest(word: str, names: list[str]) -> str:
    """The name that ``word`` resembles, or an empty text."""
    word = word.strip().lower().replace("_", "-")
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.75)), "")


def _parts(text: str, names: set[str]) -> list[str]:
    """``keep:0.2 alpha 0.5`` as ``["keep=0.2", "alpha=0.5"]``."""
    found: list[str] = []
    for word in re.split(r"[,;\s]+", re.sub(r"\s*[:=]\s*", "=", text)):
        if found and found[-1] in names:
            found[-1] += f"={word}"
        elif word:
            found.append(word)
    return found


def _fractions(parts: list[str], cls: type[Stage]) -> Iterator[str]:
    """Parts whose values are in percent, with fractions."""
    by_name = {recipe_name(f): f for f in fields(cls)} | {"": _lead(cls)}
    for part in parts:
        name, equals, value = part.rpartition("=")
        number = re.fullmatch(r"(\d+(?:\.\d+)?)%?", value)
        field = by_name.get(name)
        if number and field is not None and _is_fraction(field) and float(number[1]) > 1:
            value = f"{float(number[1]) / 100:.6g}"
        yield name + equals + value


def _lead(cls: type[Stage]) -> Field | None:
    return next((f for f in fields(cls) if f.name == cls.lead), None)


def _is_fraction(field: Field) -> bool:
    return field.metadata.get("le", field.metadata.get("lt")) == 1
