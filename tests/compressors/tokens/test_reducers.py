"""Methods that reduce the tokens of each image after the tower: common properties, any images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.closeness import close
from support.helpers_layout import DIM, REQUEST, image_arguments, prompt, stats_of
from vlmfast.core.layout import Kind, VisualTokens
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.registry import stage_class

METHODS = (
    "divprune", "downsample", "flashvid", "grid", "hired", "mmtok", "prumerge", "prumerge-plus",
    "random", "scope", "visionzip",
)  # fmt: skip
MERGING = ("downsample", "flashvid", "prumerge", "prumerge-plus", "visionzip")
TEXT = torch.randn(3, DIM, generator=torch.Generator().manual_seed(1))


def reduced(stage: EncodeStage, *images: dict) -> tuple[VisualTokens, VisualTokens]:
    """Tokens with deeper features, before and after; what an image has depends on it alone."""
    tokens, stats = prompt(*images)
    views, _, n = stats.rows[22].shape
    drawn = [
        torch.randn(n * 4 + DIM, generator=torch.Generator().manual_seed(v)) for v in range(views)
    ]
    keys = {22: torch.stack([of[: n * 4].view(n, 4) for of in drawn])}
    cls = torch.stack([of[n * 4 :] for of in drawn])
    tokens = VisualTokens(tokens.features, tokens.layout, (2 * tokens.features,))
    stats = stats_of(stats.items, stats.rows, keys, cls)
    return tokens, stage.reduce(tokens, stats, replace(REQUEST, question_embeds=TEXT))


@pytest.mark.parametrize("name", METHODS)
@given(
    images=st.lists(image_arguments(patches=(4, 4)), min_size=1, max_size=3),
    by=st.sampled_from(["keep", "budget"]),
    share=st.floats(0.02, 0.98) | st.just(1.0),
)
@settings(max_examples=12, deadline=None)
def test_tokens_of_any_images(name: str, images: list[dict], by: str, share: float) -> None:
    stage = stage_class(name)(**{by: share})
    tokens, kept = reduced(stage, *images)
    if share == 1:
        assert kept.layout is tokens.layout
        return
    order, layout = kept.layout.order.tolist(), kept.layout
    assert order == sorted(set(order)) and set(order) <= set(tokens.layout.order.tolist())
    special = layout.kind == Kind.SPECIAL
    if name != "divprune":
        assert bool((layout.patches | special).all())  # no newlines
    assert bool(special.any()) <= (name == "visionzip")
    for item in range(len(images)):
        mine, before = layout.item == item, tokens.layout.item == item
        whole = before if name == "divprune" else before & tokens.layout.patches
        patches = int(whole.sum())
        if name not in ("downsample", "hired"):  # cells, and a rule of its own
            assert int(mine.sum()) == min(max(1, round(share * int(before.sum()))), patches)
        assert 0 < int(mine.sum()) <= float(layout.weight[mine].sum()) <= patches + special.sum()
    single = ~special & (layout.weight == 1)
    assert bool(single.all()) or name in MERGING
    if not name.startswith("prumerge"):
        same = torch.isin(tokens.layout.order, layout.order[single])
        assert torch.equal(kept.features[single], tokens.features[same])
    # Deeper features are treated alike.
    close(kept.extra[0][~special], 2 * kept.features[~special], terms=len(tokens))
    # Neither other images nor an earlier call has an effect.
    alone = reduced(stage, images[0])[1]
    assert torch.equal(alone.layout.order, layout.order[layout.item == 0])
    assert torch.equal(alone.features, kept.features[layout.item == 0])
