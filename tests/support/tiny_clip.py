"""Tiny OpenCLIP models with random weights, saved to a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch

SIDE, PATCH, WIDTH = 32, 8, 24
VISION = {
    "vit": {"layers": 2, "width": 32, "head_width": 16, "patch_size": PATCH},
    "resnet": {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
}


def build(folder: Path, kind: str = "vit") -> tuple[str, str]:
    """Name and weights of a model, for ``create_model_and_transforms``."""
    import open_clip

    name = f"vlmfast-test-{kind}"
    config = {
        "embed_dim": WIDTH,
        "vision_cfg": {"image_size": SIDE, **VISION[kind]},
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": 32,
            "heads": 2,
            "layers": 1,
        },
    }
    (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    open_clip.add_model_config(folder / f"{name}.json")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = open_clip.create_model(name)
    torch.save(model.state_dict(), folder / f"{name}.pt")
    return name, str(folder / f"{name}.pt")
