"""A stage: a named, validated, printable bundle of hyper-parameters; and stages in order."""

from __future__ import annotations

import operator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_type_hints, overload

from torch import nn

from ..errors import RecipeError
from .params import SIGNS, describe, listed, nearest, parse_value, show, word_of


@dataclass(frozen=True)
class Stage:
    """Base of all stages: a named, validated, printable bundle of hyper-parameters.

    Class attributes
    ----------------
    name : str
        The recipe word.
    protocol : str
        One of `PROTOCOLS`.
    paper : str
        Title or venue and arXiv id.
    lead : str or None
        The field that a bare value (``hired:0.2``) sets.
    trained : bool
        Whether the method needs weights of its own; it then has a field ``weights`` and a `build`.
    repair : bool
        Whether attention is told how many tokens a merged one stands for (a field of methods that
        merge).
    asks_question : bool
        Whether what stays depends on the question; a session then chooses anew with each.
    other_model : bool
        Whether it runs a model of its own beside the VLM, downloaded when it is first used.
    """

    name: ClassVar[str] = ""
    protocol: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    lead: ClassVar[str | None] = None
    trained: ClassVar[bool] = False
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    repair = False
    asks_question: ClassVar[bool] = False
    other_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None and f.default is None:
                continue
            if isinstance(value, str) and (set(value) & set("+,") or value != value.strip()):
                raise RecipeError(
                    f"{self.name}: {word_of(f)}={value!r} cannot stand in a recipe: no '+', no ',' "
                    "and no blanks at the ends"
                )
            values = value if isinstance(value, tuple) else (value,)
            if meta.get("choices"):
                ok = all(v in meta["choices"] for v in values)
            else:
                tests = [(getattr(operator, k), meta[k]) for k in SIGNS if k in meta]
                whole = type(f.default) is int
                try:
                    ok = not any(whole and v != int(v) for v in values) and all(
                        test(v, bound) for test, bound in tests for v in values
                    )
                except (TypeError, ValueError, OverflowError):  # a text where a number belongs
                    ok = False
            if not ok:
                raise RecipeError(
                    f"{self.name}: {word_of(f)}={show(value)} is out of range, "
                    f"allowed is {describe(meta)}"
                )

    @classmethod
    def from_words(cls, words: dict[str | None, str]) -> Stage:
        """Build from text values; the key ``None`` stands for the bare value."""
        hints, values = get_type_hints(cls), {}
        names = {word_of(f): f.name for f in fields(cls)}
        for key, word in words.items():
            if key is None:
                if cls.lead is None:
                    raise RecipeError(
                        f"{cls.name} takes no bare value ({word!r}); parameters: {listed(names)}"
                    )
                key = next(w for w, name in names.items() if name == cls.lead)
            if key not in names:
                raise RecipeError(
                    f"{cls.name} has no parameter {key!r}{nearest(key, list(names))}; "
                    f"parameters: {listed(names)}"
                )
            if names[key] in values:
                raise RecipeError(f"{cls.name}: {key} is given twice")
            values[names[key]] = parse_value(cls.name, key, word, hints[names[key]])
        return cls(**values)

    def __str__(self) -> str:
        """Canonical recipe word; parsing it gives an equal stage."""
        changed = {
            f.name: show(getattr(self, f.name))
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        }
        if not changed:
            return self.name
        if list(changed) == [self.lead]:
            return f"{self.name}:{changed[self.lead]}"
        words = {f.name: word_of(f) for f in fields(self)}
        return f"{self.name}:" + ",".join(f"{words[key]}={v}" for key, v in changed.items())

    def __add__(self, other: Stage | Stages) -> Stages:
        return Stages((self,)) + other

    def floor(self, depth: int) -> float:
        """Lowest share of the visual tokens, averaged over ``depth`` layers, that is attainable."""
        return 0.0

    def fitted(self, depth: int, first: int) -> Stage:
        """This method for a model of ``depth`` layers.

        Layers that were given as shares of the depth move to ``first``, the first layer before
        which the model lets tokens be dropped; whole numbers stay as they are.
        """
        return self

    def expand(self) -> tuple[Stage, ...]:
        """The single-protocol stages that this word stands for; usually itself."""
        return (self,)

    @classmethod
    def build(cls, config: dict[str, Any]) -> nn.Module:
        """The untrained module of a trained method, float32.

        Parameters
        ----------
        config : dict
            What its training stored beside the weights: the sizes of the model (``width``,
            ``depth``, ``heads``, ``vision_width``, ``vision_depth``, ``vision_heads``,
            ``patches``) and whatever the method's own training added.
        """
        raise NotImplementedError(f"{cls.__name__}.build")

    def published(self, folder: Path, sizes: dict[str, Any]) -> nn.Module | None:
        """The module that a folder in the authors' own format holds; ``None`` for another one.

        Parameters
        ----------
        folder : Path
        sizes : dict
            Of the model, as in `build`.
        """
        return None


S = TypeVar("S", bound=Stage)


class Stages(tuple[Stage, ...]):
    """Stages in pipeline order; ``a + b`` appends."""

    def __add__(self, other: Stage | tuple[Stage, ...]) -> Self:
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
