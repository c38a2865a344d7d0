"""With the kernels no attention map of a prompt is materialized, for any recipe."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.tiny_models import build_llava, make_image
from vlmfast import VLM

pytestmark = pytest.mark.cold

# Number of layers, and the recipe: dropping between layers needs more of them.
RECIPES = [
    (2, "snapkv:keep=0.7,window=4"),
    (2, "zipvl:tau=0.9"),
    *(
        pytest.param(4 if recipe in ("mustdrop", "fastv") else 2, recipe, marks=pytest.mark.slow)
        for recipe in (
            "none",
            "mustdrop",
            "fastv",
            "lookm:keep=0.8",
            "h2o:0.7",
            "pyramidkv:keep=0.8,window=4",
            "vlcache:0.7",
            "cake:keep=0.7,window=4",
            "zipcache:page=8",
            "downsample:0.3,proportional_attention=true",
        )
    ),
]
IMAGES = [make_image(seed=seed) for seed in range(5)]


class Maps(TorchDispatchMode):
    """Records float tensors that are at least ``size`` rows by ``size`` columns."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1:
                rows, columns = leaf.shape[-2:]
                if min(rows, columns) >= self.size:
                    self.found.append((str(func), tuple(leaf.shape)))
        return out


@pytest.fixture(scope="module")
def vlm(request: pytest.FixtureRequest, device: torch.device) -> VLM:
    """Of two layers, or of as many as the test names."""
    model, processor = build_llava(layers=getattr(request, "param", 2))
    # On a GPU PyTorch's own attention materializes maps in float32 with grouped heads.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return VLM(model.to(device, dtype), processor, decoding="eager")


def maps(vlm: VLM, recipe: str) -> list:
    """Tensors as large as a map created during prefill; the model is narrower than the prompt."""
    length = vlm.ask("what ?", images=IMAGES, max_new_tokens=1).stats.prompt_tokens
    assert length > 90
    with Maps(length // 2 + 20) as watch:  # some recipes halve it during prefill
        vlm.ask("what ?", images=IMAGES, recipe=recipe, max_new_tokens=2)
    # Weights and hidden states are as long, but as wide as the model.
    return [entry for entry in watch.found if entry[1][-1] not in (64, 128)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("vlm", "recipe"), RECIPES, indirect=["vlm"])
@pytest.mark.usefixtures("triton")
def test_no_attention_map_is_materialized(vlm: VLM, recipe: str) -> None:
    assert maps(vlm, recipe) == []


def test_reference_attention_map_is_detected(vlm: VLM, monkeypatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    assert maps(vlm, "lookm:keep=0.8")
