"""A stage that selects the frames of a video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from support.tiny_models import build_llava
from vlmfast import VLM, VLMFastError
from vlmfast.core.protocols import MediaStage


@dataclass(frozen=True)
class Last(MediaStage):
    """Reads the last frames only."""

    name: ClassVar[str] = "test-last"
    n: int = 2

    def frames(self, video, question):
        assert question == "what happens ?"
        return list(range(video.frames - self.n, video.frames))


def test_only_frames_selected_by_the_stage_are_read():
    vlm = VLM(*build_llava())
    rng = np.random.default_rng(0)
    video = [rng.integers(0, 256, (40, 40, 3), dtype=np.uint8) for _ in range(5)]
    chosen = vlm.ask("what happens ?", video=video, recipe=Last(), max_new_tokens=4)
    assert len(chosen.trace.images) == 2
    expected = vlm.ask("what happens ?", video=video[-2:], max_new_tokens=4)
    assert chosen.token_ids == expected.token_ids
    first = vlm.ask("what happens ?", video=video[:2], max_new_tokens=4)
    assert first.token_ids != expected.token_ids
    with pytest.raises(VLMFastError, match="chooses the frames"):
        vlm.ask("what happens ?", video=video, num_frames=2, recipe=Last())
