"""Models of one config, which have the same parts, are examined once in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vlmfast.models import _composed

_FOUND: dict[tuple, Any] = {}


@contextmanager
def examined_once() -> Iterator[None]:
    """`VLM` takes the parts of tower and language model from the first model of their configs.

    For tests that leave the code of both as it is. A LLaVA is otherwise run once without weights,
    which takes longer than to build it and to ask it.
    """

    def once(examine: Callable[..., Any]) -> Callable[..., Any]:
        def known(of: Any, config: Any, *more: Any) -> Any:
            kind = of if isinstance(of, str) else type(of)
            key = examine, kind, type(config), repr(config.to_dict()), more
            if key not in _FOUND:
                _FOUND[key] = examine(of, config, *more)
            return _FOUND[key]

        return known

    with pytest.MonkeyPatch.context() as patch:
        for name in ("tower_parts", "decoder_parts"):
            patch.setattr(_composed, name, once(getattr(_composed, name)))
        yield
