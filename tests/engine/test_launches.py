"""Launches per decoder layer of a decode step, on a fake GPU, see `fake_cuda`.

They are what a step of a model with one layer more launches in addition. Each dispatched operation
counts as one if it is no view, and each launch of a Triton kernel: a lower bound, since an
operation of PyTorch may launch several kernels.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from support.engine.batched import Together, unfuse
from support.engine.driven import Driven
from support.engine.prompts import switched
from support.fake_cuda import launches
from support.paths import ROOT
from support.tiny_families import builders
from vlmfast import VLM

pytest.importorskip("triton")

MOST = 16
FULL = "Gemma 3, in a layer whose window is full"
PAGE = ROOT / "docs" / "gpu.md"
# Name: builder and its arguments. The second layer of Gemma 3 has a window.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LLaVA (Llama)": ("llava", {}),
    "Qwen2.5-VL": ("qwen2_5_vl", {}),
    "Qwen3-VL": ("qwen3_vl", {}),
    "Gemma 3": ("gemma3", {}),
    FULL: ("gemma3", {"window": 24}),
    "InternVL (Qwen2)": ("internvl", {}),
    "Idefics3, SmolVLM": ("idefics3", {}),
}


def steps(model: Any, processor: Any, layers: int) -> list[Counter[str]]:
    """Kernels of a decode step after an image, fused and through the model's modules.

    ``layers``: how many of its decoder layers the model keeps.
    """
    decoder = model.get_decoder()
    del decoder.layers[layers:]
    decoder.config.num_hidden_layers = layers
    if getattr(decoder.config, "layer_types", None) is not None:
        decoder.config.layer_types = decoder.config.layer_types[:layers]
    vlm = VLM(model, processor)
    with torch.no_grad(), switched(model):
        run = Driven.of(vlm)
        run.start(8)
        batch = Together([run.decoder])
        for _ in range(2):  # a prompt leaves space for one token in a window
            batch.next(torch.full((1, 1), 7))
    found = launches(vlm, batch, lambda: None, lambda: unfuse(vlm))
    return [Counter(names) for names in found]


@pytest.fixture(scope="module")
def counts() -> dict[str, tuple[list[Counter[str]], list[int]]]:
    """By family: kernels of one layer, and how many a step launches apart from its layers."""
    found = {}
    for family, (name, given) in FAMILIES.items():
        model, processor = builders()[name](**given)
        more, fewer = (steps(model.to(torch.bfloat16), processor, layers) for layers in (2, 1))
        layer = [b - a for a, b in zip(fewer, more, strict=True)]
        assert not any(a - b for a, b in zip(fewer, more, strict=True))
        rest = [a.total() - b.total() for a, b in zip(fewer, layer, strict=True)]
        found[family] = layer, rest
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_launch_few_kernels(family: str, counts) -> None:
    (fused, modules), (fused_rest, modules_rest) = counts[family]
    assert fused.total() <= MOST
    assert fused["_norm"] == 2 and fused["_rotate"] == fused["_gated"] == 1
    assert fused["_linears"] == 3 and not fused["mm"] + fused["addmm"]
    # Controls: the modules launch more, and the norms of the model itself belong to no layer.
    assert modules.total() > MOST and not modules["_norm"] and modules["mm"] + modules["addmm"] == 7
    assert 0 < fused_rest < modules_rest


def test_counts_in_the_docs(counts) -> None:
    totals = {}
    for family, ((fused, modules), rest) in counts.items():
        each = ", ".join(f"{name} {n}" for name, n in sorted(fused.items()))
        print(f"{family}: {each}; apart from the layers {rest[0]} fused, {rest[1]} by modules")
        totals[family] = fused.total(), modules.total()
    more = "{} instead of {}".format(*totals.pop(FULL))
    (fused,), modules = {n for n, _ in totals.values()}, [n for _, n in totals.values()]
    found = f"launches {fused} operations instead of {min(modules)} to {max(modules)} ({more} in a"
    assert f"{found} layer of Gemma 3" in " ".join(PAGE.read_text(encoding="utf-8").split())
