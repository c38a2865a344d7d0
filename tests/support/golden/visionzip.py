"""Replays the stored VisionZip cases: dominant patches, merged patches, and the output rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from support.closeness import close, network
from support.golden.case import Reader
from support.golden.mustdrop import video_blocks
from support.helpers_layout import REQUEST, make_image, stats_of
from vlmfast.compressors.select import plus_mean
from vlmfast.compressors.tokens.visionzip import VisionZip, homes
from vlmfast.core.contexts import VisionContext, active
from vlmfast.core.layout import Kind, VisualTokens
from vlmfast.core.statistics import StatRequest


def zip_case(data: Reader, meta: Reader) -> None:
    """Indices and features of every view, by the pure functions and by the stage."""
    hidden = data["hidden_states"]
    keys, terms = data["metric_mean_keys"][:, 1:], hidden.shape[1]
    views_case(data, data["cls_attn"][..., 1:], keys, hidden, terms)


@torch.no_grad()
def clip_case(data: Reader, meta: Reader) -> None:
    """A tower of transformers with the stored weights; statistics in the engine's form."""
    hidden = data["embeddings_after_pre_layrnorm"]
    blocks = video_blocks(data)
    depth = len(blocks)
    layer, request = depth - 2, StatRequest("cls", keys=True)  # LLaVA's feature layer
    context = VisionContext(
        depth=depth,
        modules={id(block.self_attn): index for index, block in enumerate(blocks)},
        requests={layer: request},
    )
    with active(context):
        for block in blocks[: layer + 1]:
            hidden = block(hidden, attention_mask=None)
    attention, keys = context.stats[layer][:, :, 0, 1:], context.keys[layer][:, 1:]
    rows = hidden.shape[1]
    views_case(data, attention, keys, hidden, network(blocks[0].self_attn, rows) + rows)


def views_case(data: Reader, attention: Tensor, keys: Tensor, hidden: Tensor, terms: int) -> None:
    """
    Parameters
    ----------
    attention : Tensor, (V, H, N)
    keys : Tensor, (V, N, d)
    hidden : Tensor, (V, 1 + N, D)
        CLS first.
    terms : int
        Terms of a row of ``hidden`` and of the mean of as many rows as exist.
    """
    dominant, contextual = data.count("dominant_arg"), data.count("contextual_arg")
    stored = data["all_indices"].sort(dim=1).values  # the output rows ascend
    views, n = keys.shape[:2]
    for view in range(views):
        home = homes(attention[view].sum(0), keys[view], dominant - 1, contextual)
        rows = plus_mean(hidden[view, 1:], home)
        kept = home == torch.arange(n)
        best = stored[view, 1:] - 1  # without CLS, which comes first
        assert stored[view, 0] == 0
        assert kept[best].all()
        targets = kept.index_fill(0, best, False)
        assert int(targets.sum()) == contextual
        ours = torch.cat([hidden[view, :1], rows[best], rows[targets]])
        close(ours, data["out"][view], terms=terms)

    # The stage: the same rows, in the order of the prompt.
    side, tiles = math.isqrt(n), tiles_of(views)
    tokens, geometry = make_image(tiles, (side, side))
    layout = tokens.layout
    place = 1 + layout.grid[:, 1] * side + layout.grid[:, 2]
    place = torch.where(layout.patches, place, 0).long()
    features = hidden[layout.view.clamp(min=0).long(), place]
    stats = stats_of((geometry,), {22: attention}, {22: keys}, cls=hidden[:, 0])
    stage = VisionZip(dominant=dominant, contextual=contextual)
    zipped = stage.reduce(VisualTokens(features, layout), stats, REQUEST)
    assert len(zipped) == views * (dominant + contextual)
    close(rows_of(zipped.features), rows_of(data["out"].flatten(0, 1)), terms=terms)
    assert int((zipped.layout.kind == Kind.SPECIAL).sum()) == views

    if "next_order_row_id" in data:
        # Dominant patches of base and crops are where the authors' re-assembly puts them.
        row = data["next_order_row_id"]
        crop, number = row // (dominant + contextual), row % (dominant + contextual)
        theirs = torch.stack([crop, stored[crop, number.clamp(max=dominant - 1)] - 1], 1)
        theirs = theirs[(number > 0) & (number < dominant)]
        mine = zipped.layout.select(zipped.layout.patches)
        ours = torch.stack([mine.view, mine.grid[:, 1] * side + mine.grid[:, 2]], 1).long()
        is_theirs = (ours[:, None] == theirs[None]).all(2).any(1)
        assert torch.equal(ours[is_theirs], theirs)


def tiles_of(views: int) -> tuple[int, int]:
    """A raster of the crops beside the whole view: a square, where there is one."""
    rows = math.isqrt(views - 1)
    return (rows, rows) if rows**2 == views - 1 else (1, views - 1)


def rows_of(features: Tensor) -> Tensor:
    """Rows sorted by their first entry: equal when the sets of rows are."""
    return features[features[:, 0].argsort()]
