"""Recipes: the stages that run, written as a short string.

``hired:0.2+pyramiddrop`` names the stages in pipeline order. The grammar
is ``name[:value]`` or ``name:[value,]key=value[,key=value...]``, joined by ``+``.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from vlmfast.errors import RecipeError

from .files import read_text, readable, replace_text
from .params import check_keys, quoted
from .protocols import PROTOCOLS
from .registry import method_name, stage_class, stage_names, unknown_method
from .stage import Stage, Stages

# Pooling leaves no place of an image out, and the selection drops what is left of the background.
# On images of `pocket` and `tiny` the pair is near the best method at every budget
# (docs/pocket.md). Each value is the fraction of its stage; the products are 0.33, 0.22 and 0.11.
_SHARES = {"faithful": (0.6, 0.55), "balanced": (0.5, 0.44), "fast": (0.33, 0.33)}
PRESETS = {
    "none": "",
    **{
        name: f"downsample:budget={pooled}+scope:budget={selected}"
        for name, (pooled, selected) in _SHARES.items()
    },
}
# What at most one stage of a recipe may do: an attribute of its parts, the value, and its meaning.
_ALONE = (
    ("protocol", "media", "choose the frames"),
    ("chooses_crops", True, "choose the crops"),
    ("reuses_frames", True, "reuse frames"),
    ("protocol", "in-encoder", "modify the rows between the blocks of the vision tower"),
    ("protocol", "decode", "modify the cache between decode steps"),
)


class Recipe(Stages):
    """An ordered tuple of stages; immutable, hashable, equal when its stages are.

    Examples
    --------
    >>> recipe = Recipe.parse("hired:0.2")
    >>> recipe.text, str(recipe)
    ('hired:0.2', 'hired')
    >>> Recipe.parse("none") == Recipe()
    True
    """

    _text = ""

    def __new__(cls, stages: tuple[Stage, ...] = ()) -> Recipe:
        recipe = super().__new__(cls, stages)
        recipe._validate()
        return recipe

    def _validate(self) -> None:
        for stage in self:
            if not isinstance(stage, Stage):
                raise RecipeError(f"a recipe holds stages, not {type(stage).__name__}: {stage!r}")
        text, names = self.text, [stage.name for stage in self]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"{name} appears twice in the recipe {text}")
        for key, value, what in _ALONE:
            acting = [s.name for s in self if any(getattr(p, key, 0) == value for p in s.expand())]
            if len(acting) > 1:
                raise RecipeError(
                    f"recipe {text} has {' and '.join(acting)}, which both {what}; only one may"
                )
        parts = [p for s in self for p in s.expand() if p.protocol == "cache"]
        for first, second in pairwise(parts):
            if first.quantizes:
                raise RecipeError(
                    f"recipe {text}: {first.name} quantizes the cache, so {second.name} cannot "
                    "follow it"
                )
        for part in (part for stage in self for part in stage.expand()):
            if part.protocol not in PROTOCOLS:
                raise RecipeError(
                    f"{part.name} is a {part.protocol} stage, an unknown protocol; known are "
                    + ", ".join(PROTOCOLS)
                )
        ranks = [PROTOCOLS.index(stage.expand()[0].protocol) for stage in self]
        if ranks != sorted(ranks):
            order = sorted(self, key=lambda s: PROTOCOLS.index(s.expand()[0].protocol))
            ordered = "+".join(stage.typed() for stage in order)
            raise RecipeError(f"recipe {text} is not in pipeline order; write {ordered}")

    @property
    def text(self) -> str:
        """The text that was parsed, e.g. ``hired:0.2``; otherwise the canonical text.

        ``str(recipe)`` is the canonical text: without default values, and with presets expanded.
        It has no influence on equality.
        """
        return self._text or "+".join(stage.typed() for stage in self) or "none"

    def _given_as(self, text: str) -> Recipe:
        self._text = text
        return self

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Parse a recipe or the name of a preset.

        Parameters
        ----------
        text : str

        Raises
        ------
        RecipeError
            For an unknown method or parameter, parameters that replace each other, a value out of
            range or stages in the wrong order.
        """
        given = " ".join(text.split())
        text = PRESETS[given] if given in PRESETS else text.strip()
        if not text:
            return cls()
        items = [part.strip() for part in text.split("+")]
        if "" in items:
            raise RecipeError(f"recipe {quoted(text)} has an empty method name")
        for preset in items if len(items) > 1 else ():
            if preset in PRESETS:
                text = PRESETS[preset]
                raise RecipeError(
                    f"preset {preset!r} must be the whole recipe, not joined with methods; "
                    + (f"write {text} in its place" if text else "leave it out")
                )
        recipe = cls(tuple(_stage(item) for item in items))
        names = [item.partition(":")[0].strip() for item in items]
        spelled = given in PRESETS or names == [stage.name for stage in recipe]
        return recipe._given_as(given if spelled else recipe.text)

    @classmethod
    def of(cls, recipe: str | Stage | tuple[Stage, ...] | None) -> Recipe:
        """The recipe of any value that users may pass as ``recipe=``."""
        if recipe is None:
            return cls()
        if isinstance(recipe, cls):
            return recipe
        if isinstance(recipe, str):
            return cls.parse(recipe)
        if isinstance(recipe, Stage):
            return cls((recipe,))
        if isinstance(recipe, tuple | list):
            return cls(tuple(recipe))
        raise RecipeError(f"recipe must be a str, a stage or a Recipe, not {type(recipe).__name__}")

    def fitted(self, depth: int, first: int) -> Recipe:
        """`Stage.fitted` of every stage."""
        recipe = type(self)(tuple(stage.fitted(depth, first) for stage in self))
        return recipe._given_as(self._text)

    @staticmethod
    def reads_file(text: str) -> bool:
        """Whether `parse` may open a file that the text names; strangers' texts must not."""
        return ".yaml" in text

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Read a YAML file written by `save`."""
        import yaml

        with readable(f"recipe file {path}", RecipeError, (yaml.YAMLError,)):
            data = yaml.safe_load(read_text(path))
        if not isinstance(data, dict) or not isinstance(data.get("recipe"), str):
            raise RecipeError(f"recipe file {path} has no text entry 'recipe'")
        check_keys(f"recipe file {path}", data, ("recipe",), RecipeError)
        return cls.parse(data["recipe"])

    def save(self, path: str | Path) -> None:
        """Write the canonical text as YAML; an existing file is replaced atomically.

        Raises
        ------
        VLMFastError
            With the path and the reason, where it cannot be written. An existing file then stays.
        """
        import yaml

        replace_text(path, yaml.safe_dump({"recipe": str(self)}))


def _stage(item: str) -> Stage:
    """The stage of one entry of a recipe."""
    name, colon, rest = item.partition(":")
    name = name.strip()
    if name in PRESETS:
        raise RecipeError(f"preset {name!r} has no parameters")
    if method_name(name) not in stage_names():
        raise unknown_method(name, tuple(PRESETS))
    if colon and not rest.strip():
        raise RecipeError(f"{quoted(item)} ends in ':' without a value")
    cls = stage_class(name)
    values: dict[str | None, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        where = key.strip() if equals else None
        value = value.strip() if equals else key.strip()
        if not value or where in values:
            raise RecipeError(
                f"cannot read {quoted(part)} in {quoted(item)}: write {name}:key=value,key=value"
            )
        values[where] = value
    typed = " ".join(item.split()).replace(name, cls.name, 1)
    return cls.from_texts(values).typed_as(typed)
