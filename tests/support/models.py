"""Models that the tests of a session share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vlmfast import VLM


@functools.cache
def shared(build: Callable[..., tuple[Any, Any]], **options: Any) -> VLM:
    """The model that ``build(**options)`` makes, once in a process.

    For tests that leave the model as it is. One that patches it, counts what its caches hold or
    changes its settings builds its own.
    """
    return VLM(*build(**options))
