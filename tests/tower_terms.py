"""How many numbers are summed on the way from pixels to a feature, for `closeness`."""

from __future__ import annotations

from types import SimpleNamespace

from closeness import network
from vlmfast import VLM


def tower(vlm: VLM) -> int:
    """``terms`` of a feature that the language model gets: a patch, the blocks, the projector."""
    config = vlm.model.config.vision_config
    rows = (config.image_size // config.patch_size) ** 2 + 1
    blocks = network(SimpleNamespace(config=config), rows)
    width = vlm.model.config.get_text_config().hidden_size
    return 3 * config.patch_size**2 + blocks + config.hidden_size + width


def answer(vlm: VLM, rows: int) -> int:
    """``terms`` of a logit over ``rows`` rows behind pictures."""
    return tower(vlm) + network(vlm.model, rows)
