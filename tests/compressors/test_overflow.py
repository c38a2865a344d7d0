"""Features that overflowed, as in half precision, end no process: every method answers or refuses.

An index outside of a tensor is an error on a CPU, and stops all work on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from support.tiny_models import make_image
from vlmfast import VLM
from vlmfast.core.recipe import PRESETS
from vlmfast.core.registry import stage_names
from vlmfast.errors import VLMFastError
from vlmfast.kernels.diversity import density_peaks, euclidean

NEEDS = ("clip-relevance", "frames-clip")  # another model
NAMES = [name for name in (*stage_names(), *PRESETS) if name not in NEEDS]
VALUES = {"all NaN": torch.nan, "some NaN": torch.nan, "some infinite": torch.inf}


@pytest.fixture(scope="module", params=VALUES)
def overflowing(request: pytest.FixtureRequest) -> Iterator[VLM]:
    """The shipped model, of whose visual features all or some are not finite."""
    vlm = VLM.from_pretrained("tiny", device="cpu", dtype="float32")
    inner = vlm.model.model
    if request.param.startswith("all"):  # and whose tower has no finite attention
        norm = inner.get_submodule("vision_tower.encoder.layers.0.layer_norm1")
        with torch.no_grad():
            norm.weight[3] = VALUES[request.param]
        yield vlm
        return

    def poison(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        features = inputs[0].clone()
        features.view(-1, features.shape[-1])[3:9] = VALUES[request.param]
        return (features,)

    hook = inner.multi_modal_projector.register_forward_pre_hook(poison)
    yield vlm
    hook.remove()


@pytest.mark.cases(40)
@pytest.mark.parametrize("recipe", NAMES)
def test_features_that_overflowed_are_answered_or_refused(overflowing: VLM, recipe: str) -> None:
    frames = [make_image(48, 48, seed=seed) for seed in range(4)]
    for media in ({"images": make_image(64, 48, seed=1)}, {"video": frames}):
        with contextlib.suppress(VLMFastError):
            found = overflowing.ask("What is here?", recipe=recipe, max_new_tokens=2, **media)
            assert 0 < len(found.token_ids) <= 2


def test_distances_of_rows_that_overflowed_are_finite() -> None:
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected = (rows[:, None] - rows).square().mean(-1).sqrt()
    torch.testing.assert_close(euclidean(rows), expected)
    rows[1], rows[2, 0], rows[3] = torch.nan, torch.inf, -1e38
    distance = euclidean(rows)
    assert distance.isfinite().all()
    centres, label = density_peaks(distance, 3, 2)
    assert len(set(centres.tolist())) == 3 and set(label.tolist()) == {0, 1, 2}
    wrong = torch.cdist(rows, rows)  # control
    assert density_peaks(wrong, 3, 2)[1].max() == 3
