"""Tiny models of every ``rope_type`` that transformers has."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.tiny_models import build_llava

ORIGINAL = 64  # positions of a short sequence
_HALF = 8  # of a head's width
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "long_factor": [2.0 + at for at in range(_HALF)],
        "short_factor": [1.0 + at / 10 for at in range(_HALF)],
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}
TYPES = {kind: of for kind, of in TYPES.items() if kind == "default" or kind in ROPE_INIT_FUNCTIONS}


def build(kind: str, **more: Any) -> tuple[nn.Module, Any]:
    """As `build_llava`, with positions up to four times `ORIGINAL`."""
    model, processor = build_llava(**more)
    decoder: Any = model.get_decoder()
    config = decoder.config
    config.max_position_embeddings = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, **TYPES[kind]}
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(model.dtype)
    return model.eval(), processor
