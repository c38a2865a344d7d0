"""Private names of other packages that a test needs."""

from __future__ import annotations

from vlmfast.api.overlays import _MERGED as MERGED
from vlmfast.api.overlays import _OUTLINE as OUTLINE
from vlmfast.core.methods import _method as method
from vlmfast.models import _loading as loading
from vlmfast.models import _own as own
from vlmfast.models._media import runs, tiling
from vlmfast.models._parts import decoder_parts, tower_parts

__all__ = [
    "MERGED",
    "OUTLINE",
    "decoder_parts",
    "loading",
    "method",
    "own",
    "runs",
    "tiling",
    "tower_parts",
]
