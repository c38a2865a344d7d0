"""Imports, but offers nothing that vlmfast can use under these names."""

from dataclasses import dataclass
from typing import ClassVar

from vlmfast.compressors import Reducer


@dataclass(frozen=True)
class HiRED(Reducer):
    """Would replace a method of vlmfast."""

    name: ClassVar[str] = "hired"
    paper: ClassVar[str] = "ours"
