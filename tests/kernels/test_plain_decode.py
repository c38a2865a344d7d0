"""What the engine hands the decode kernel: lengths, and masks only where slots need them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import tiny_families
from support.closeness import close
from support.engine.kernels import attend_with, without_ancestor_bits
from support.fake_drafters import Knows
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.core.recipe import Recipe
from vlmfast.kernels.decode_mixed import decode_mixed, decode_mixed_ref
from vlmfast.kernels.tree_verify import tree_verify_ref

pytestmark = pytest.mark.cold

MORE = {"max_new_tokens": 4, "eos_token_id": None}


class Seen:
    """The tail's argument in each call of `decode_mixed`, and the masks that layers build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        self.masks = attend_with(monkeypatch, self.decode, tree_verify_ref)

    def decode(self, query, segments, keys, values, seen, *more, **named):
        self.kinds.append("mask" if seen.dtype == torch.bool else "lengths")
        if self.kinds[-1] == "lengths":
            assert seen.shape == keys.shape[:2] and query.shape[2] == 1
        return decode_mixed_ref(query, segments, keys, values, seen, *more, **named)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava(layers=2), decoding="eager")


def ask(vlm: VLM, recipe: Any, **more: Any):
    given = {"images": make_image(seed=3), "recipe": recipe, **MORE, **more}
    return vlm.ask("what is here ?", **given)


@pytest.mark.parametrize(
    "recipe",
    [
        "none",
        "snapkv:keep=0.7,window=4",
        "h2o:0.7",
        "kivi:bits=4,group=4,residual=4",
        "lookm:keep=0.8,merge=avg,proportional_attention=true",
    ],
)
def test_single_tokens_need_no_mask(vlm: VLM, recipe: str, seen: Seen) -> None:
    ask(vlm, recipe)
    assert seen.kinds == ["lengths"] * 2 * 3 and seen.masks == []


def test_rows_of_different_kinds_need_no_mask(vlm: VLM, seen: Seen) -> None:
    recipes = ["none", "snapkv:keep=0.7,window=4", "none", "kivi:bits=4,group=4,residual=4"]
    requests = [
        Request("what ?", [make_image(seed=j) for j in range(1 + i)], recipe=r, generation=MORE)
        for i, r in enumerate(recipes)
    ]
    vlm.ask_many(requests, batch_size=4)
    assert seen.kinds and set(seen.kinds) == {"lengths"} and seen.masks == []


def test_windows_need_a_mask(seen: Seen) -> None:
    vlm = VLM(*tiny_families.build_gemma3(window=32), decoding="eager")
    ask(vlm, "none")
    full, sliding = (
        ["lengths"] * 4,
        ["lengths" if w is None else "mask" for w in vlm.adapter.windows],
    )
    assert seen.kinds == full + 2 * sliding  # the first token is the last one inside the window
    assert seen.masks == [1] * 2 * sliding.count("mask")


def test_trees_need_a_mask_without_ancestor_bits(vlm: VLM, seen: Seen, monkeypatch) -> None:
    """Control: trees of more nodes than bits."""
    wanted = ask(vlm, "none", max_new_tokens=12).token_ids
    drafts = Recipe.of("none") + Knows(answer=tuple(wanted), cycle=True)
    ask(vlm, drafts, max_new_tokens=12)
    assert set(seen.kinds) == {"lengths"} and seen.masks == []  # `tree_verify` has the others
    without_ancestor_bits(monkeypatch)
    got = ask(vlm, drafts, max_new_tokens=12)
    assert got.token_ids == wanted and got.stats.accepted > 2
    assert "mask" in seen.kinds and max(seen.masks) > 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.usefixtures("triton")
def test_lengths_equal_their_mask(heads: int, mass: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, heads, 1, 16, generator=generator).to(device)
    keys, values = torch.randn(2, 2, 2, 40, 16, generator=generator).to(device)
    lengths = torch.tensor([[1, 40], [17, 33]], device=device)
    mask = (torch.arange(40, device=device) < lengths[..., None])[:, :, None]
    for x in (keys, values):
        x.masked_fill_(~mask.squeeze(2)[..., None], torch.nan)
    given = {"tail_bias": torch.randn(2, 2, 40, generator=generator).to(device)}
    expected = decode_mixed_ref(query, [], keys, values, mask, want_attention_mass=mass, **given)
    for own in (decode_mixed, decode_mixed_ref):
        got = own(query, [], keys, values, lengths, want_attention_mass=mass, **given)
        for x, y in zip(got, expected, strict=True):
            if y is not None:
                close(x, y, torch.float32, 16 + 40)
    # Control: a slot less.
    fewer = decode_mixed(query, [], keys, values, (lengths - 1).clamp(min=1), **given)[0]
    with pytest.raises(AssertionError, match="tolerance"):
        close(fewer, expected[0], torch.float32, 16 + 40)
