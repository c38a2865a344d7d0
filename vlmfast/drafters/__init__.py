"""Drafters for speculative decoding, one file per method.

What a drafter of another package needs can be imported from here.
"""

from __future__ import annotations

from vlmfast.core.lazy import public_names

__getattr__, __dir__, __all__ = public_names(
    __name__,
    {
        "vlmfast.core.protocols": "DrafterStage",
        "vlmfast.core.drafting": "Budget Drafter Read Round Target",
        "vlmfast.core.tree": "Tree",
        "vlmfast.core.layout": "TokenLayout",
        "vlmfast.core.params": "param weights_param",
        "vlmfast.errors": "RecipeError",
    },
)
