"""Golden cases that are read completely: a name that a runner does not know is a failure.

A stored case consists of tensors and of parameters. `Reader` records which of them a runner reads;
`done` names the others. An unread parameter is an option of the reference that the runner does not
replay, an unread tensor is a result that is not compared.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from support.closeness import tolerance

# Where a case comes from. Everything else changes what a reference computes or is its result.
PROVENANCE = ("source", "function", "note", "ref", "seed", "bonus_bug")
# Parameters of the generator of the inputs, which are stored themselves. ``tree`` names the file of
# the stored tree.
INPUTS = ("sharp", "boost", "tree")

Data = Mapping[str, Any]
_MISSING: Any = object()


class Reader(Mapping[str, Any]):
    """Values of a case by name, and which of them were read.

    Parameters
    ----------
    values : mapping
    kind : str
        What the values are, for messages.
    known : iterable of str, optional
        Names that describe the origin only.
    """

    def __init__(
        self, values: Mapping[str, Any], kind: str = "tensor", known: tuple[str, ...] = ()
    ) -> None:
        self._values, self._kind = dict(values), kind
        self._read = set(known)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise AssertionError(f"the case has no {self._kind} {name!r}: {self._names(self)}")
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._values else default

    def under(self, prefix: str) -> dict[str, Any]:
        """All values whose names begin with ``prefix``, without it."""
        return {name.removeprefix(prefix): self[name] for name in self if name.startswith(prefix)}

    def count(self, name: str, default: int = _MISSING) -> int:
        """A whole number."""
        return int(self._value(name, default))

    def number(self, name: str, default: float = _MISSING) -> float:
        return float(self._value(name, default))

    def flag(self, name: str, default: bool = _MISSING) -> bool:
        return self.choice(
            name, {"True": True, "1": True, "False": False, "0": False}, str(default)
        )

    def choice(self, name: str, allowed: Mapping[str, Any], default: str = _MISSING) -> Any:
        """The entry of ``allowed`` for a word."""
        value = self._value(name, default)
        word = str(value.item() if isinstance(value, Tensor) else value)
        if word not in allowed:
            raise AssertionError(
                f"{self._kind} {name}={word!r} is not replayed; known: {', '.join(allowed)}"
            )
        return allowed[word]

    def literal(self, name: str) -> Any:
        """A list or tuple, from its text or its tensor."""
        value = self[name]
        return value.tolist() if isinstance(value, Tensor) else ast.literal_eval(value)

    def without_effect(self, *names: str) -> None:
        """Mark parameters that the reference accepts and does not use."""
        self._read.update(names)

    def left(self) -> list[str]:
        """What was not read, with its kind."""
        return [f"{self._kind} {name}" for name in sorted(set(self._values) - self._read)]

    def _value(self, name: str, default: Any) -> Any:
        return self[name] if default is _MISSING or name in self else default

    @staticmethod
    def _names(names: Any) -> str:
        return ", ".join(sorted(names)) or "none"


def done(*readers: Reader) -> None:
    """Raise `AssertionError` unless everything was read."""
    left = [name for reader in readers for name in reader.left()]
    assert not left, f"the runner does not read {', '.join(left)}"


def parameters(meta: Mapping[str, str]) -> Reader:
    """The parameters of a file; those that describe its origin need no reader."""
    return Reader(meta, "parameter", PROVENANCE + INPUTS)


def chosen(
    score: Tensor,
    ours: Tensor,
    stored: Tensor,
    terms: float,
    dtype: torch.dtype,
    *,
    ties: bool = False,
) -> None:
    """Assert that both masks select entries of each row with the largest scores.

    Equal masks, where scores differ. A reference that ranks in half precision may choose otherwise
    among entries whose ``score`` differs by no more than its rounding.

    Parameters
    ----------
    score : Tensor, (..., N)
        Not negative.
    ours, stored : Tensor, bool, (..., N)
    terms : float
        Length of the sums in a score.
    dtype : torch.dtype
        In which the reference ranks.
    ties : bool
        Whether equal scores occur in float32 too: any choice among them is valid.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if not (half or ties):
        assert torch.equal(ours, stored)
        return
    assert torch.equal(ours.sum(-1), stored.sum(-1))
    score = score.double()
    for mask in (ours, stored):
        least = score.masked_fill(~mask, torch.inf).amin(-1)
        most = score.masked_fill(mask, -torch.inf).amax(-1)
        reach = tolerance(dtype, terms, least + most) if half else torch.zeros_like(most)
        inside = mask.any(-1) & ~mask.all(-1)
        assert bool((least + reach >= most)[inside].all()), "a better entry was not selected"


def share(count: int, n: int) -> float:
    """A fraction of ``n`` that means ``count`` when it is truncated."""
    return min((count + 0.5) / n, 1.0)


def marked(index: Tensor, n: int) -> Tensor:
    """Mask (..., N) of the entries that ``index`` (..., K) lists."""
    return torch.zeros(*index.shape[:-1], n, dtype=torch.bool).scatter(-1, index.long(), True)


def coarsest(data: Mapping[str, Any], prefixes: tuple[str, ...]) -> torch.dtype:
    """The coarsest floating-point type of the tensors whose names begin with ``prefixes``."""
    found = [
        data[name].dtype
        for name in data
        if name.startswith(prefixes) and data[name].is_floating_point()
    ]
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def wide(values: Tensor) -> Tensor:
    """Half precision as float32, which changes no value."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
