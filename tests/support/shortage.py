"""Memory that runs short at a chosen allocation of the thread inside a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def allocates(func: Any) -> bool:
    """Whether an operation returns new memory: no view, and not one of its arguments."""
    returned = func._schema.returns
    return bool(returned) and all(
        of.alias_info is None and isinstance(of.type, torch.TensorType) for of in returned
    )


class Allocations(TorchDispatchMode):
    """Counts the allocations of the thread; one of them fails.

    Parameters
    ----------
    fails : int, optional
        Which one, from 0; none by default.
    lasts : int
        How many in a row fail: a single one succeeds when it is tried again.
    of : str, optional
        Count the operations of this name alone.
    """

    def __init__(self, fails: int | None = None, lasts: int = 1, of: str | None = None) -> None:
        super().__init__()
        self.failing = range(0) if fails is None else range(fails, fails + lasts)
        self.of, self.count, self.failed = of, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if allocates(func) and self.of in (None, name):
            self.count += 1
            if self.count - 1 in self.failing:
                self.failed += 1
                raise torch.OutOfMemoryError(f"stand-in: no memory for {name}")
        return func(*args, **(kwargs or {}))
