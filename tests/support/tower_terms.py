"""Numbers of summed terms from pixels to a feature, for `closeness`."""

from __future__ import annotations

from types import SimpleNamespace

from support.closeness import network
from vlmfast import VLM


def tower(vlm: VLM) -> int:
    """``terms`` of an input feature of the language model: a patch, the blocks, the projector."""
    config = vlm.model.config.vision_config
    rows = (config.image_size // config.patch_size) ** 2 + 1
    blocks = network(SimpleNamespace(config=config), rows)
    width = vlm.model.config.get_text_config().hidden_size
    return 3 * config.patch_size**2 + blocks + config.hidden_size + width


def answer(vlm: VLM, rows: int) -> int:
    """``terms`` of a logit over ``rows`` rows after images."""
    return tower(vlm) + network(vlm.model, rows)
