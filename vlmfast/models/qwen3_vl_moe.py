"""Qwen3-VL with experts: as Qwen3-VL."""

from __future__ import annotations

from .qwen3_vl import FamilyAdapter

__all__ = ["FamilyAdapter"]
