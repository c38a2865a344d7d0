"""PVC on InternVL, whose tower merges 2 x 2 patches into one visual token."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from torch import Tensor

from support import tiny_families
from support.closeness import apart, close
from vlmfast import VLM, RecipeError
from vlmfast.cli import main
from vlmfast.compressors.encoder.pvc import PVC
from vlmfast.compressors.encoder.pvc.module import ProgressiveEncoder, ranks, to_cells
from vlmfast.compressors.encoder.pvc.plan import Choice, tokens_in, tokens_out
from vlmfast.compressors.encoder.pvc.training import TRAINING
from vlmfast.core.statistics import ItemGeometry
from vlmfast.core.weights import StageWeights, load_weights

TRAINED = {"blocks": [1, 2], "sides": [2, 4], "repeats": [1, 2, 4], "hidden": 16, "time_width": 8}
TERMS = 8 * 512


def make_image(seed: int, width: int = 90, height: int = 44) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def video(frames: list[np.ndarray]) -> dict:
    return {"video": frames, "num_frames": len(frames)}


IMAGE = {"images": make_image(0)}
FRAMES = [make_image(i, 40, 40) for i in range(5)]
CASES = {
    "image": IMAGE,
    "images": {"images": [make_image(0), make_image(1, 40, 60)]},
    "video": video(FRAMES),
    "both": {**IMAGE, **video(FRAMES)},
}


@pytest.fixture(scope="module")
def vlm() -> VLM:
    """A view has 4 x 4 patches and 2 x 2 tokens."""
    return VLM(*tiny_families.build_internvl())


def module_of(vlm: VLM, randomized: bool) -> ProgressiveEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = PVC.build(vlm.adapter.sizes() | TRAINED).eval()
        with torch.no_grad():
            for weight in module.parameters() if randomized else ():
                weight += 0.2 * torch.randn(weight.shape)
    return module


@pytest.fixture(scope="module")
def weights(vlm, tmp_path_factory):
    """A folder of random weights, as after training: no parameter is zero."""
    folder = tmp_path_factory.mktemp("pvc")
    config = vlm.adapter.sizes() | TRAINED
    state = module_of(vlm, True).state_dict()
    StageWeights("pvc", config, vlm.adapter.signature(), {}, state).save_pretrained(folder)
    return folder


def projected(vlm: VLM, recipe, **media) -> tuple[Tensor, object]:
    """The input of the projector, and the answer."""
    into = []

    def hook(module: torch.nn.Module, args: tuple, output: Tensor) -> None:
        into.append(args[0].clone())

    handle = vlm.adapter.projector().register_forward_hook(hook)
    try:
        answer = vlm.ask("what ?", **media, recipe=recipe, max_new_tokens=2)
    finally:
        handle.remove()
    (rows,) = into
    return rows, answer


def use(vlm: VLM, module: ProgressiveEncoder) -> None:
    vlm.adapter.modules["pvc", "auto", ""] = module


@pytest.mark.parametrize("case", CASES)
def test_counts_and_weights(vlm, weights, case):
    """An image costs as many tokens as before, a frame a quarter: one per 4 x 4 patches."""
    full = vlm.ask("what ?", **CASES[case], max_new_tokens=2)
    layout = full.trace.entered
    frames = int((layout.kind == 2).sum())
    images = len(layout) - frames
    for recipe, tokens in {
        "pvc:": images + frames // 4,
        "pvc:image_repeat=1,video_repeat=2,": images // 4 + frames // 2,
        "pvc:0.25,": len(layout) // 4,
        "pvc:side=4,image_repeat=2,": images // 2 + frames // 4,  # a cell is a whole view
        "pvc:1,": len(layout),
    }.items():
        trained = f"{recipe}weights={weights}"
        answer = vlm.ask("what ?", **CASES[case], recipe=trained, max_new_tokens=2)
        kept = answer.trace.entered
        assert len(kept) == tokens, recipe
        assert float(kept.weight.sum()) == len(layout)
        assert answer.stats.visual_tokens_in == len(layout)
        assert torch.equal(kept.order, kept.order.sort().values)
    assert answer.token_ids == full.token_ids  # at budget 1


@torch.no_grad()
def tower_by_hand(
    vlm: VLM, module: ProgressiveEncoder, pixels: Tensor, temporal: bool = True
) -> Tensor:
    """Projector inputs of each frame of a video, (T, D), by the formulas."""
    base = vlm.model.base_model
    vlm.model.set_attn_implementation("eager")
    try:
        hidden = base.vision_tower.embeddings(pixels)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        frames = len(hidden)
        time = module.time(torch.linspace(0, 1, frames))
        for index, block in enumerate(base.vision_tower.encoder.layer):
            if index in module.blocks and temporal:
                layer, seen = module.temporal[str(index)], []
                for t in range(frames):  # itself and the same row before
                    past = layer.norm(hidden[: t + 1], time[: t + 1, None])
                    q, k, v = layer.qkv(past).unflatten(-1, (3, layer.heads, -1)).unbind(2)
                    logits = torch.einsum("nhd,tnhd->nht", q[t], k) * q.shape[-1] ** -0.5
                    value = torch.einsum("nht,tnhd->nhd", logits.softmax(-1), v)
                    seen.append(hidden[t] + layer.out(value.flatten(1)))
                hidden = torch.stack(seen)
            hidden = block(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        hidden = base.vision_tower.layernorm(hidden)[:, 1:]
        rows = base.pixel_shuffle(hidden.view(frames, 4, 4, -1), 0.5).flatten(1, 2)
        found = []
        for t, cell in enumerate(to_cells(rows, (2, 2), 2)[:, 0]):
            layer = module.compress["2"]
            y = layer.norm(cell, time[t])
            home = ranks(2)[t % 4] == 0
            logits = layer.score(y)[:, 0] + layer.home * home + layer.share
            found.append(logits.softmax(0) @ cell + layer.mlp(y.flatten()))
        return torch.stack(found)
    finally:
        vlm.model.set_attn_implementation("sdpa")


def test_video_equals_formulas(vlm):
    module = module_of(vlm, True)
    use(vlm, module)
    into, answer = projected(vlm, PVC(), **video(FRAMES))
    pixels = vlm.inputs("what ?", **video(FRAMES))["pixel_values"]
    want = tower_by_hand(vlm, module, pixels)
    assert into.shape == (5, 4, 4 * 32)
    for slot in range(4):  # all positions of a cell contain its token
        close(into[:, slot], want, terms=TERMS)
    apart(into[:, 0], tower_by_hand(vlm, module, pixels, temporal=False), terms=TERMS)
    # The position of the token within its cell alternates from frame to frame.
    grid = answer.trace.entered.grid
    assert (grid[:, 1] * 2 + grid[:, 2]).tolist() == [0, 3, 1, 2, 0]
    close(answer.trace.entered.weight, torch.full((5,), 4.0))


def test_an_image_in_the_same_prompt_changes_no_video(vlm):
    use(vlm, module_of(vlm, True))
    plain, _ = projected(vlm, PVC(), **video(FRAMES))
    both, _ = projected(vlm, PVC(), **IMAGE, **video(FRAMES))
    close(both[-5:], plain, terms=TERMS)


def test_repeated_image_equals_static_video(vlm):
    """Four equal frames give the same result as four repeats of one view."""
    use(vlm, module_of(vlm, True))
    still = make_image(3, 40, 40)
    seen = []

    def hook(module: torch.nn.Module, args: tuple) -> None:
        seen.append(args[0].clone())

    handle = vlm.adapter.modules["pvc", "auto", ""].compress["2"].register_forward_pre_hook(hook)
    try:
        image, _ = projected(vlm, PVC(image_repeat=4), images=still)
        frames, _ = projected(vlm, PVC(), **video([still] * 4))
    finally:
        handle.remove()
    assert (len(image), len(frames)) == (1, 4)
    repeats, cells = seen
    close(repeats, cells, terms=TERMS)
    apart(cells[0], cells[3], terms=TERMS)  # control: repeats differ
    apart(image[0, 0], image[0, 3], terms=TERMS)


def test_weights_of_another_model_are_rejected(vlm, weights):
    stage = PVC(weights=str(weights))
    module = load_weights(stage, vlm.adapter.sizes(), vlm.adapter.signature())
    assert (module.width, module.token_width, module.patches) == (32, 128, 4)
    with pytest.raises(RecipeError, match="trained for another model"):
        load_weights(stage, vlm.adapter.sizes() | {"token_width": 512}, vlm.adapter.signature())
    with pytest.raises(RecipeError, match="there are no weights for this internvl model"):
        VLM(*tiny_families.build_internvl(1)).ask("what ?", **IMAGE, recipe="pvc")


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3"])
def test_unsupported_towers_raise(name):
    other = VLM(*getattr(tiny_families, f"build_{name}")())
    with pytest.raises(RecipeError, match="pvc works inside the vision tower, which needs one"):
        other.ask("what ?", **IMAGE, recipe="pvc")


def test_token_counts_without_canvas():
    item = ItemGeometry((44, 90), (1, 2), (0, 3), (16, 16))
    assert tokens_in(item, stitched=False) == 3 * 256
    assert tokens_out(item, Choice(2, 1), stitched=False) == 3 * 64
    assert tokens_out(item, Choice(2, 4), stitched=False) == 3 * 256
    assert tokens_in(item) != 3 * 256  # control: LLaVA-NeXT's newlines and letterbox


def test_training_config_matches_the_tower(vlm):
    options = argparse.Namespace(last=2, hidden=0, time_width=8, positions="keep")
    config = vlm.adapter.sizes() | TRAINING(options, vlm.adapter.sizes()).config()
    assert config["blocks"] == [1, 2]
    assert config["token_width"] == 4 * config["vision_width"]
    assert PVC.build(config).compress["2"].mlp[0].in_features == 4 * 4 * 32


@pytest.mark.slow
def test_training_on_a_folder(vlm, tmp_path):
    """The weights that ``vlmfast train pvc --model FOLDER`` writes can be used."""
    vlm.model.save_pretrained(tmp_path / "model")
    vlm.processor.save_pretrained(tmp_path / "model")
    flags = ["--steps", "2", "--batch", "1", "--hidden", "16", "--time-width", "8"]
    flags += ["--device", "cpu", "--dtype", "float32", "--out", str(tmp_path / "out")]
    assert main(["train", "pvc", "--model", str(tmp_path / "model"), *flags]) in (0, None)
    loaded = VLM.from_pretrained(tmp_path / "model", device="cpu", dtype="float32")
    answer = loaded.ask(
        "what ?", **video(FRAMES), recipe=f"pvc:weights={tmp_path / 'out'}", max_new_tokens=2
    )
    assert len(answer.trace.entered) == 5
