"""Qwen3.5: as Qwen3-VL without deepstack; three of four layers have linear attention.

A layer with linear attention holds a state. Tokens that are dropped before the layer never enter
it.
"""

from __future__ import annotations

from .qwen2_5_vl import FamilyAdapter as Qwen


class FamilyAdapter(Qwen):
    processors = ("Qwen3VLProcessor",)
    blocks = False
    whole_steps = True
