"""Captions of overlays."""

from __future__ import annotations

import pytest

from vlmfast.api import overlays
from vlmfast.api.overlays import _caption as caption

__all__ = ["caption", "captions"]


def captions(patch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are drawn from now on."""
    written: list[str] = []
    patch.setattr(
        overlays, "_caption", lambda image, text: written.append(text) or caption(image, text)
    )
    return written
