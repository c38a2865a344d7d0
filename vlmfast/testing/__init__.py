"""Checks of families and stages, for those of other packages as for vlmfast's own.

``check_family(model, processor)`` compares a model with Hugging Face's own ``generate``;
``check_stage(stage)`` runs a method on the model that is shipped with vlmfast. Each returns a
`Report`, and raises `CheckFailed` where something is wrong.
"""

from __future__ import annotations

from .family import check_family
from .report import Check, CheckFailed, Report
from .stage import check_stage

__all__ = ["Check", "CheckFailed", "Report", "check_family", "check_stage"]
