"""A stage: a named, validated, printable bundle of hyper-parameters; and stages in order."""

from __future__ import annotations

import functools
import operator
import re
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_type_hints, overload

from torch import nn

from ..errors import RecipeError
from .params import (
    LARGEST,
    SIGNS,
    brief,
    describe,
    listed,
    nearest,
    parse_value,
    quoted,
    recipe_name,
    show,
)

TIERS = ("core", "baseline", "experimental")

# In texts: they join the parts of a recipe, or are no characters of one line.
_RESERVED = re.compile("[+,\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _fields(cls: type) -> tuple[Field[Any], ...]:
    """`fields` of a class that only its metaclass knows to be a dataclass."""
    return fields(cls)


@functools.cache
def _types(cls: type) -> dict[str, Any]:
    """Types of the fields of a stage, once per class: reading a recipe takes them each time."""
    return get_type_hints(cls)


def _check_parameter(cls: Any, key: str, names: list[str]) -> None:
    """Raise unless a stage has a parameter, with the nearest name and all."""
    if key not in names:
        similar = nearest(key, names) if re.fullmatch(r"[\w-]+", key) else ""
        raise RecipeError(
            f"{cls.name} has no parameter {quoted(key)}{similar}; parameters: {listed(names)}"
        )


def _check_exclusive(cls: Any, given: dict[str, Any]) -> None:
    """Raise if one of the given parameters of a stage leaves another without effect."""
    own = {f.name: f for f in fields(cls)}
    # None, and a default of 0 or an empty tuple, switch a parameter off.
    on = {
        name: show(value)
        for name, value in given.items()
        if name in own and value is not None and (value or value != own[name].default)
    }
    for name in on:
        for other in own[name].metadata.get("excludes", ()):
            if other in on:
                pair = (f"{recipe_name(own[n])}={on[n]}" for n in (other, name))
                raise RecipeError(
                    f"{cls.name}: {' and '.join(pair)} replace each other; give one of them"
                )


class _StageType(type):
    """Refuses parameters that are unknown or that replace each other, by the method's name."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if any(f.metadata.get("excludes") for f in _fields(cls)):
            named = (f.name for f in _fields(cls) if not f.kw_only)
            given = dict(zip(named, args, strict=False)) | kwargs
            if given.keys() >= {f.name for f in _fields(cls)}:  # a copy by `dataclasses.replace`
                given = {f.name: v for f in _fields(cls) if (v := given[f.name]) != f.default}
            _check_exclusive(cls, given)
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            for name in kwargs:
                _check_parameter(cls, name, [f.name for f in _fields(cls)])
            raise


@dataclass(frozen=True)
class Stage(metaclass=_StageType):
    """Base of all stages: a named, validated, printable bundle of hyper-parameters.

    Class attributes
    ----------------
    name : str
        The method's name in recipes.
    protocol : str
        One of `PROTOCOLS`.
    paper : str
        Title or venue and arXiv id.
    tier : str
        ``core`` for the methods that the project is about and those that lead a table of results,
        ``baseline`` for established methods to compare with, ``experimental`` for all others.
    lead : str or None
        The field that a bare value (``hired:0.2``) sets.
    trained : bool
        Whether the method needs weights of its own. It then has a field ``weights`` and a `build`.
    proportional_attention : bool
        Whether attention adds the logarithm of a merged token's weight to its logit (a field of
        methods that merge; the name is that of ToMe, arXiv 2210.09461).
    query_dependent : bool
        Whether the kept tokens depend on the question. A session then selects again for each one.
    other_model : bool
        Whether the method runs a model besides the VLM, downloaded on first use.
    """

    name: ClassVar[str] = ""
    protocol: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    tier: ClassVar[str] = "experimental"
    lead: ClassVar[str | None] = None
    trained: ClassVar[bool] = False
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    proportional_attention = False
    query_dependent: ClassVar[bool] = False
    other_model: ClassVar[bool] = False
    _typed: ClassVar[str] = ""

    if TYPE_CHECKING:  # the parameters of each method

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None and f.default is None:
                continue
            if isinstance(value, str) and (_RESERVED.search(value) or value != value.strip()):
                raise RecipeError(
                    f"{self.name}: {recipe_name(f)}={quoted(value)} cannot be used in a recipe: no "
                    "'+', no ',', no control characters and no blanks at the ends"
                )
            values = value if isinstance(value, tuple) else (value,)
            if any(isinstance(v, int) and abs(v) > LARGEST for v in values):
                raise RecipeError(
                    f"{self.name}: {recipe_name(f)}={brief(value)} is out of range, whole numbers "
                    f"are at most {LARGEST}"
                )
            if meta.get("choices"):
                ok = all(v in meta["choices"] for v in values)
            else:
                tests = [(getattr(operator, k), meta[k]) for k in SIGNS if k in meta]
                whole = type(f.default) is int
                try:
                    ok = not any(whole and v != int(v) for v in values) and all(
                        test(v, bound) for test, bound in tests for v in values
                    )
                except (TypeError, ValueError, OverflowError):  # text instead of a number
                    ok = False
            if not ok:
                choices = meta.get("choices") if isinstance(value, str) else None
                similar = nearest(value, list(choices)) if choices else ""
                raise RecipeError(
                    f"{self.name}: {recipe_name(f)}={brief(value)} is out of range, "
                    f"allowed is {describe(meta)}{similar}"
                )

    @classmethod
    def from_texts(cls, texts: dict[str | None, str]) -> Stage:
        """Build from text values by parameter name.

        Parameters
        ----------
        texts : dict of str to str
            The key ``None`` holds the bare value of a recipe.

        Raises
        ------
        RecipeError
            For an unknown parameter, one that is given twice or a value that cannot be read.
        """
        hints, values = _types(cls), {}
        names = {recipe_name(f): f.name for f in fields(cls)}
        for key, text in texts.items():
            if key is None:
                if cls.lead is None:
                    raise RecipeError(
                        f"{cls.name} takes no bare value ({quoted(text)}); "
                        f"parameters: {listed(names)}"
                    )
                key = next(w for w, name in names.items() if name == cls.lead)
            _check_parameter(cls, key, list(names))
            name = names[key]
            if name in values:
                raise RecipeError(f"{cls.name}: {key} is given twice")
            values[name] = parse_value(cls.name, key, text, hints[name])
        return cls(**values)

    def __str__(self) -> str:
        """Canonical text in recipes; parsing it gives an equal stage."""
        changed = {
            f.name: show(getattr(self, f.name))
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        }
        if not changed:
            return self.name
        if self.lead is not None and list(changed) == [self.lead]:
            return f"{self.name}:{changed[self.lead]}"
        names = {f.name: recipe_name(f) for f in fields(self)}
        return f"{self.name}:" + ",".join(f"{names[key]}={v}" for key, v in changed.items())

    def typed(self) -> str:
        """The text that it was read from; otherwise its canonical text."""
        return self._typed or str(self)

    def typed_as(self, text: str) -> Self:
        """This stage, after noting the text that it was read from."""
        object.__setattr__(self, "_typed", text)
        return self

    def __add__(self, other: Stage | Stages) -> Stages:
        return Stages((self,)) + other

    def floor(self, depth: int) -> float:
        """Lowest attainable fraction of the visual tokens, averaged over ``depth`` layers."""
        return 0.0

    def fitted(self, depth: int, first: int) -> Stage:
        """This method for a model of ``depth`` layers.

        Layers given as fractions of the depth move to ``first``, the first layer before which the
        model lets tokens be dropped. Whole numbers stay as they are.
        """
        return self

    def expand(self) -> tuple[Stage, ...]:
        """The single-protocol stages of this method, by default the stage itself."""
        return (self,)

    @classmethod
    def build(cls, config: dict[str, Any]) -> nn.Module:
        """The untrained module of a trained method, float32.

        Parameters
        ----------
        config : dict
            What training stored with the weights: the sizes of the model (``width``, ``depth``,
            ``heads``, ``vision_width``, ``vision_depth``, ``vision_heads``, ``patches``) and the
            entries that the method's own training added.
        """
        raise NotImplementedError(f"{cls.__name__}.build")

    def published(self, folder: Path, sizes: dict[str, Any]) -> nn.Module | None:
        """The module in a folder of the authors' own format, or ``None`` for another format.

        Parameters
        ----------
        folder : Path
        sizes : dict
            Of the model, as in `build`.
        """
        return None


S = TypeVar("S", bound=Stage)


def with_values(stage: S, **values: Any) -> S:
    """A copy of a stage with other values of fields, which its class must have."""
    return replace(stage, **values)


def at_budget(stage: S, budget: float) -> S:
    """A copy of a reducer with another budget, without the parameters that exclude one."""
    own = {f.name: f for f in fields(stage)}
    others = {*own["budget"].metadata.get("excludes", ())}
    others |= {name for name, f in own.items() if "budget" in f.metadata.get("excludes", ())}
    defaults = {name: own[name].default for name in others if name in own}
    return replace(stage, **{**defaults, "budget": budget})


class Stages(tuple[Stage, ...]):
    """Stages in pipeline order; ``a + b`` appends."""

    # Narrower than that of tuples, which joins tuples of any type.
    def __add__(self, other: Stage | tuple[Stage, ...]) -> Self:  # type: ignore[override]
        if not isinstance(other, Stage | tuple):
            return NotImplemented
        return type(self)((*self, *((other,) if isinstance(other, Stage) else other)))

    def __str__(self) -> str:
        return "+".join(str(stage) for stage in self) or "none"

    @overload
    def acting(self, protocol: type[S]) -> list[S]: ...
    @overload
    def acting(self, protocol: str) -> list[Any]: ...

    def acting(self, protocol: type[Stage] | str) -> list[Any]:
        """The expanded stages of one protocol, given as its class or by its name."""
        name = protocol if isinstance(protocol, str) else protocol.protocol
        return [s for stage in self for s in stage.expand() if s.protocol == name]


def is_own(stage: Stage) -> bool:
    """Whether a stage is one of this package: what it returns need not be checked."""
    return f"{type(stage).__module__}.".startswith("vlmfast.")
