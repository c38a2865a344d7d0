"""GLM-4.5V: as GLM-4.1V, with experts."""

from __future__ import annotations

from .glm4v import FamilyAdapter

__all__ = ["FamilyAdapter"]
