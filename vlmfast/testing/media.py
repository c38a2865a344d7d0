"""Images and videos of noise, whose patches all differ."""

from __future__ import annotations

from typing import Any

import numpy as np


def noise(seed: int, width: int, height: int) -> np.ndarray:
    """An image, uint8, (H, W, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def cases() -> dict[str, dict[str, Any]]:
    """Arguments of `VLM.ask` by the name of a case."""
    return {
        "no image": {},
        "one image": {"images": [noise(0, 60, 44)]},
        "three images": {"images": [noise(0, 60, 44), noise(1, 30, 70), noise(2, 90, 33)]},
        "a video": {"video": [noise(i, 40, 40) for i in range(5)], "num_frames": 5},
        "an image and a video": {
            "images": [noise(0, 60, 44)],
            "video": [noise(i, 40, 40) for i in range(4)],
            "num_frames": 4,
        },
    }
