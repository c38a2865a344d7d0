"""ToMe on towers that merge several patches into one visual token: whole cells merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from support import tiny_families
from support.closeness import apart, close
from support.engine.prompts import Batched, Packed
from support.look import BUILD, CASES, IMAGES, VIDEO, built, family, looked, make_image
from vlmfast import VLM, RecipeError
from vlmfast.compressors.encoder.tome import ToMe, bipartite, merge
from vlmfast.core.contexts import VisionContext
from vlmfast.core.protocols import InEncoderStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest, window_order
from vlmfast.core.statistics import ItemGeometry

pytestmark = pytest.mark.cold

PACKED = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=BUILD)
def vlm(request) -> VLM:
    return built(request.param)


@pytest.fixture(params=CASES)
def media(request, vlm) -> dict:
    if family(vlm) == "smolvlm" and request.param == "both":
        pytest.skip("smolvlm reads images or one video")
    return CASES[request.param]


# --- every family ---------------------------------------------------------------------------------


@pytest.mark.cases(8)
def test_keep_half_keeps_half_of_each_view(vlm, media):
    plain, stats = looked(vlm, **media)
    tokens, _ = looked(vlm, ToMe(0.5), **media)
    before, after = (result.layout.select(result.layout.patches) for result in (plain, tokens))
    assert len(after) == len(tokens)  # newlines are dropped
    assert float(after.weight.sum()) == len(before)
    for item in stats.items:
        for view in range(*item.views):
            n = item.patches[0] * item.patches[1]
            came_in = int((before.view == view).sum())
            mine = after.select(after.view == view)
            assert float(mine.weight.sum()) == came_in
            if came_in == n:  # the letterbox may contain whole groups
                assert len(mine) == round(n / 2)
            full = before.box[before.view == view]
            edges = (full[:, :2].amin(0), full[:, 2:].amax(0))
            covered = (mine.box[:, :2].amin(0), mine.box[:, 2:].amax(0))
            for have, want in zip(covered, edges, strict=True):
                close(have, want, torch.float32, terms=4)
    # Every original token is inside the box of a kept token.
    middle = (before.box[:, :2] + before.box[:, 2:]) / 2
    inside = (middle[:, None] >= after.box[:, :2]) & (middle[:, None] <= after.box[:, 2:])
    same = before.item[:, None] == after.item
    assert bool((inside.all(-1) & same).any(1).all())


def test_r_merges_per_block(vlm):
    tokens, stats = looked(vlm, ToMe(r=1), **CASES["image"])
    (item,) = stats.items
    blocks = len(vlm.adapter.vision_blocks()) - 2
    n, views = item.patches[0] * item.patches[1], item.views[1] - item.views[0]
    if int(tokens.layout.weight.sum()) == n * views:
        assert len(tokens) == (n - blocks) * views


@pytest.mark.cases(4)
def test_images_are_independent(vlm):
    """Images of different sizes in one prompt, and images with a video."""
    alone = [looked(vlm, ToMe(0.5), images=image)[0] for image in IMAGES]
    if family(vlm) != "llava_onevision":  # it makes no crops of several images
        together, _ = looked(vlm, ToMe(0.5), images=IMAGES)
        close(together.features, torch.cat([single.features for single in alone]), terms=4000)
        apart(
            together.features, torch.cat([single.features for single in alone]).flip(0), terms=4000
        )
    if family(vlm) != "smolvlm":
        video, _ = looked(vlm, ToMe(0.5), **VIDEO)
        both, _ = looked(vlm, ToMe(0.5), **CASES["both"])
        first, rest = both.features.split([len(alone[0]), len(video)])
        close(first, alone[0].features, terms=4000)
        close(rest, video.features, terms=4000)


@pytest.mark.cases(13)
@pytest.mark.parametrize(
    "recipe",
    [
        "tome:0.5+divprune:0.5",
        "tome:0.5+visionzip:0.5",
        "tome:0.5+hired:0.5",
        "tome:0.5+flashvid:0.5",
        "tome:0.5+pyramiddrop",
        "tome:budget=0.5",
        "tome:0.5,positions=keep,proportional_attention=false",
    ],
)
def test_tome_in_recipes(vlm, media, recipe):
    answer = vlm.ask("what is here ?", **media, recipe=recipe, max_new_tokens=3)
    assert answer.token_ids
    assert answer.stats.left_out == []
    assert answer.stats.equivalent_tokens <= 0.55 * answer.stats.visual_tokens_in
    if any(method in recipe for method in ("visionzip", "hired")):
        assert answer.stats.saliency == vlm.adapter.sources()[0]


def hooks(vlm: VLM) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + ("forward" in vars(module))
        for module in vlm.model.modules()
    )


@dataclass(frozen=True)
class Fails(InEncoderStage):
    name: ClassVar[str] = "test-fails"
    cells: ClassVar[bool] = True

    def blocks(self, depth):
        return (1, 2)

    def on_block(self, step, index, hidden):
        if index == 2:
            raise ArithmeticError("in the tower")
        m = hidden.shape[1] - step.specials
        source = (torch.arange(hidden.shape[1]) - (m - 1)).clamp(min=step.specials)
        source[: step.specials] = torch.arange(step.specials)
        return hidden[:, : step.specials + 1], source.expand(len(hidden), -1)


@pytest.mark.cases(12)
def test_the_model_is_restored(vlm, media):
    plain, _ = looked(vlm, **media)
    before = hooks(vlm)  # transformers installs its own in the first forward pass
    with pytest.raises(ArithmeticError, match="in the tower"):
        vlm.ask("what ?", **media, recipe=Fails())
    assert hooks(vlm) == before
    looked(vlm, ToMe(0.5), **media)
    assert hooks(vlm) == before
    again, _ = looked(vlm, **media)
    assert torch.equal(again.features, plain.features)


# --- against references --------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, H, d) under ``bias`` (N, N): output (N, H d) and the map (H, N, N)."""
    weights = (torch.einsum("qhd,khd->hqk", q, k) * scale + bias).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1), weights


class Groups:
    """Merging cells as lists, without the engine except for ToMe's matching and mean."""

    def __init__(self, cells: int) -> None:
        self.members = [[cell] for cell in range(cells)]

    def merged(self, units: Tensor, keys: Tensor, r: int, ordered: bool) -> Tensor:
        """Units (M, D) after one merge of ``r``; ``ordered`` by their first members."""
        if not r:
            return units
        size = torch.tensor([[float(len(group)) for group in self.members]])
        source = bipartite(keys[None], r, False)
        rows = merge(units[None], size, source)[0][0]
        members = [[] for _ in rows]
        for old, new in enumerate(source[0].tolist()):
            members[new] += self.members[old]
        order = sorted(range(len(rows)), key=lambda i: min(members[i])) if ordered else None
        order = order or range(len(rows))
        self.members = [sorted(members[i]) for i in order]
        return rows[list(order)]

    def group_of(self, cells: int) -> Tensor:
        found = torch.empty(cells, dtype=torch.int64)
        for number, members in enumerate(self.members):
            found[members] = number
        return found


def entering(vlm: VLM, **media) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Inputs of the tower's first block: rows, and rotary tables if any."""
    seen = {}

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.update(hidden=args[0].clone(), tables=kwargs.get("position_embeddings"))

    handle = vlm.adapter.vision_blocks()[0].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        looked(vlm, **media)
    finally:
        handle.remove()
    return seen["hidden"], seen["tables"]


@torch.no_grad()
def packed_by_hand(
    vlm: VLM, hidden: Tensor, tables: tuple, grid: tuple[int, int], stage: ToMe, wrong: str = ""
) -> tuple[list[Tensor], Tensor, Tensor]:
    """A Qwen tower over one image with merging cells, windows as a mask over all rows.

    Returns the tokens of every cell in the tower's order, of the merger and of each deepstack
    merger, the group of each cell, and the attention each cell receives in the last block, (H, C).
    """
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    visual, m = vlm.model.base_model.visual, 4
    cells = len(hidden) // m
    vision = (
        vlm.config.vision_config if hasattr(vlm, "config") else vlm.adapter.config.vision_config
    )
    everywhere = getattr(vision, "fullatt_block_indexes", None)
    window_of = torch.zeros(cells, dtype=torch.int64)
    if everywhere is not None:
        order = window_order(*grid, 2)
        window_of = order // grid[1] // 2 * grid[1] + order % grid[1] // 2
    groups, keys, deep = Groups(cells), None, []
    counts = stage.steps(cells, len(visual.blocks) - 2)
    for index, block in enumerate(visual.blocks):
        if 1 <= index < len(visual.blocks) - 1:
            units = groups.merged(
                hidden.unflatten(0, (-1, m)).flatten(1), keys, counts[index - 1], True
            )
            hidden = units.unflatten(1, (m, -1)).flatten(0, 1)
        first = torch.tensor([min(group) for group in groups.members])
        if wrong == "place":  # the last member instead
            first = torch.tensor([max(group) for group in groups.members])
        rows = (first[:, None] * m + torch.arange(m)).flatten()
        size = torch.tensor([float(len(group)) for group in groups.members]).repeat_interleave(m)
        if not stage.proportional_attention:
            size = torch.ones_like(size)
        window = window_of[first].repeat_interleave(m)
        if everywhere is None or index in everywhere or wrong == "windows":
            window = torch.zeros_like(window)
        bias = size.log().expand(len(rows), -1)
        bias = bias.masked_fill(window[:, None] != window, -torch.inf)
        qkv = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, block.attn.num_heads, -1))
        q, k, v = qkv.unbind(1)
        q, k = apply_rotary_pos_emb_vision(q, k, *(table[rows] for table in tables))
        out, weights = attended(q, k, v, block.attn.scaling, bias)
        hidden = hidden + block.attn.proj(out)
        hidden = hidden + block.mlp(block.norm2(hidden))
        keys = k.mean(1).unflatten(0, (-1, m)).flatten(1)
        group = groups.group_of(cells)
        spread = (group[:, None] * m + torch.arange(m)).flatten()
        if index in getattr(vision, "deepstack_visual_indexes", ()):
            which = vision.deepstack_visual_indexes.index(index)
            deep.append(visual.deepstack_merger_list[which](hidden[spread]))
    received = weights.mean(1)[:, spread].unflatten(1, (-1, m)).sum(-1)
    return [visual.merger(hidden[spread]), *deep], group, received


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("text", ["tome:0.5", "tome:0.3", "tome:0.5,proportional_attention=false"])
def test_packed_towers_equal_reference(name, text):
    vlm, image = built(name), make_image(2, 64, 48)
    (stage,) = Recipe.parse(text)
    hidden, tables = entering(vlm, images=image)
    tokens, stats = looked(vlm, stage, asked=(SaliencyRequest(),), images=image)
    (item,) = stats.items
    assert item.patches == (3, 4)  # four windows, the lower ones of two cells
    order = vlm.adapter.cells(item)[:, 0] // 4
    cell = order[(tokens.layout.grid[:, 1] * item.patches[1] + tokens.layout.grid[:, 2]).long()]
    levels, group, received = packed_by_hand(vlm, hidden, tables, item.patches, stage)
    ours = [tokens.features, *tokens.extra]
    assert len(levels) == len(ours) == (1 if name == "qwen2_5_vl" else 3)
    for got, want in zip(ours, levels, strict=True):
        close(got, want[cell], terms=4 * 512)
    rows = stats.salient(SaliencyRequest(), item).rows[0]
    close(rows, received[:, order], terms=64 * len(hidden))
    # One token represents each group.
    assert sorted(group[cell].tolist()) == list(range(int(group.max()) + 1))
    assert tokens.layout.weight.tolist() == group.bincount()[group[cell]].tolist()
    # Controls: other rotary positions, windows and sizes.
    wrongs = ["place"] + (["windows"] if name == "qwen2_5_vl" else [])
    for wrong in wrongs:
        other, _, _ = packed_by_hand(vlm, hidden, tables, item.patches, stage, wrong)
        apart(ours[0], other[0][cell], terms=4 * 512)
    other = ToMe(stage.keep, proportional_attention=not stage.proportional_attention)
    other, _, _ = packed_by_hand(vlm, hidden, tables, item.patches, other)
    apart(ours[0], other[0][cell], terms=4 * 512)


@torch.no_grad()
def internvl_by_hand(vlm: VLM, hidden: Tensor, stage: ToMe) -> tuple[Tensor, Tensor]:
    """Tokens (N, D) of one view, (1 + P, D) before the first block, and their groups."""
    base, m, side = vlm.model.base_model, 4, int((len(hidden) - 1) ** 0.5)
    tower = base.vision_tower
    raster = torch.arange(side * side).view(side // 2, 2, side // 2, 2)
    cells = raster.transpose(1, 2).flatten(2).flatten(0, 1)
    cls, units = hidden[:1], hidden[1:][cells].flatten(1)
    groups, keys = Groups(len(cells)), None
    counts = stage.steps(len(cells), len(tower.encoder.layer) - 2)
    for index, block in enumerate(tower.encoder.layer):
        if 1 <= index < len(tower.encoder.layer) - 1:
            # With CLS before the cells, the alternating split starts at CLS.
            r, size = counts[index - 1], [float(len(group)) for group in groups.members]
            if r:
                source = bipartite(keys[None], r, True)
                rows = merge(
                    torch.cat([cls.repeat(1, m), units])[None], torch.tensor([[1.0, *size]]), source
                )[0][0]
                members = [[] for _ in rows]
                for old, new in enumerate(source[0, 1:].tolist()):
                    members[new] += groups.members[old]
                groups.members, units = members[1:], rows[1:]
        rows = torch.cat([cls, units.unflatten(1, (m, -1)).flatten(0, 1)])
        size = torch.tensor([float(len(group)) for group in groups.members]).repeat_interleave(m)
        bias = torch.cat([torch.ones(1), size]).log() * float(stage.proportional_attention)
        normed, attention = block.layernorm_before(rows), block.attention
        q, k, v = (
            p(normed).unflatten(-1, (attention.num_heads, -1))
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out, _ = attended(q, k, v, attention.scale, bias.expand(len(rows), -1))
        rows = rows + block.lambda_1 * attention.projection_layer(out)
        rows = rows + block.lambda_2 * block.mlp(block.layernorm_after(rows))
        cls, units = rows[:1], rows[1:].unflatten(0, (-1, m)).flatten(1)
        keys = k.mean(1)
        keys = torch.cat([keys[:1].repeat(1, m), keys[1:].unflatten(0, (-1, m)).flatten(1)])
    group = groups.group_of(len(cells))
    patches = torch.empty(side * side, rows.shape[1])
    patches[cells] = units[group].unflatten(1, (m, -1))
    patches = tower.layernorm(patches).view(1, side, side, -1)
    shuffled = base.pixel_shuffle(patches, 0.5).flatten(1, 2)
    return base.multi_modal_projector(shuffled)[0], group


@pytest.mark.parametrize("text", ["tome:0.5", "tome:r=1", "tome:0.5,proportional_attention=false"])
def test_internvl_equals_reference(text):
    vlm, image = built("internvl"), make_image(0, 90, 44)
    (stage,) = Recipe.parse(text)
    hidden, _ = entering(vlm, images=image)
    tokens, stats = looked(vlm, stage, images=image)
    (item,) = stats.items
    for view in range(*item.views):
        here = (tokens.layout.view == view).nonzero().flatten()
        slot = (tokens.layout.grid[here, 1] * 2 + tokens.layout.grid[here, 2]).long()
        want, group = internvl_by_hand(vlm, hidden[view], stage)
        close(tokens.features[here], want[slot], terms=4 * 512)
        assert sorted(group[slot].tolist()) == list(range(int(group.max()) + 1))
        other, _ = internvl_by_hand(vlm, hidden[view], ToMe(1.0))  # control
        apart(tokens.features[here], other[slot], terms=4 * 512)


# --- arguments of blocks -------------------------------------------------------------------------


def test_packed_block_arguments_after_merging():
    """Boundaries of empty windows are removed, and the maximum length is recomputed."""
    adapter = built("qwen2_5_vl").adapter
    item = ItemGeometry((48, 64), (0, 0), (0, 1), (3, 4))  # windows of 4, 4, 2 and 2 cells
    context = VisionContext(depth=4, items=(item,), chunks={}, proportional_attention=True)
    tower = Packed(adapter, context)
    hidden = torch.arange(48.0)[:, None]
    tower.begin(hidden)
    cu, table = torch.tensor([0, 16, 32, 40, 48], dtype=torch.int32), torch.arange(48)[:, None]
    kwargs = {"cu_seqlens": cu, "max_seqlen": 16, "position_embeddings": (table, -table)}
    assert tower.given((hidden,), kwargs) == ((hidden,), kwargs)  # nothing has merged

    @dataclass(frozen=True)
    class Joins(InEncoderStage):
        """Merges the last six cells into cells 0, 1, 2, 5, 5 and 5."""

        name: ClassVar[str] = "test-joins"
        cells: ClassVar[bool] = True

        def on_block(self, step, index, hidden):
            assert hidden.shape == (1, 12, 4)
            source = torch.tensor([[5, 4, 3, 2, 1, 0, 5, 4, 3, 0, 0, 0]])  # in another order
            return hidden[:, [5, 4, 3, 2, 1, 0]], source

    left = tower.ask(Joins(), 1, hidden)
    assert left.flatten().tolist() == list(range(24))  # by their first members
    _, given = tower.given((left,), kwargs)
    assert given["cu_seqlens"].tolist() == [0, 16, 24]
    assert given["cu_seqlens"].dtype == torch.int32
    assert given["max_seqlen"] == 16 and type(given["max_seqlen"]) is int
    assert given["position_embeddings"][1].flatten().tolist() == [-i for i in range(24)]
    sizes = [2, 2, 2, 1, 1, 4]
    assert context.sizes.tolist() == [float(size) for size in sizes for _ in range(4)]
    assert tower.spread(left).flatten().tolist() == [
        4 * cell + slot for cell in [0, 1, 2, 3, 4, 5, 0, 1, 2, 5, 5, 5] for slot in range(4)
    ]


def test_masks_after_merging():
    """A mask that hides nothing is removed; padded views are rejected."""
    adapter = built("idefics3").adapter
    item = ItemGeometry((44, 60), (0, 0), (0, 1), (2, 2))
    context = VisionContext(depth=4, items=(item,))
    tower = Batched(adapter, context)
    tower.begin(torch.zeros(1, 16, 3))
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    hidden = torch.zeros(1, 8, 3)
    assert tower.given((hidden, mask), {})[0][1] is mask
    context.merged = torch.zeros(1, 16, dtype=torch.int64)
    args, kwargs = tower.given((hidden, mask), {"attention_mask": 0.0 * mask, "other": 3})
    assert args == (hidden, None) and kwargs == {"attention_mask": None, "other": 3}
    mask[..., 12:] = False
    with pytest.raises(RecipeError, match="cannot merge in padded views"):
        tower.given((hidden, mask), {})


# --- unsupported towers --------------------------------------------------------------------------


def test_tower_without_attention_raises():
    vlm = VLM(*tiny_families.build_fast_vlm())
    message = r"tome merges .* fast_vlm does not support here: its vision tower ends in "
    why = r"convolutions, not in attention; on this model '.*"
    for media in (CASES["image"], VIDEO):
        with pytest.raises(RecipeError, match=message + why):
            vlm.ask("what ?", **media, recipe="tome:0.5")


def test_frames_not_divisible_into_cells_raise(monkeypatch):
    """LLaVA-OneVision pools 5 x 5 patches to 3 x 3 tokens by interpolation."""
    small, side = tiny_families.open_clip_models, 5 * tiny_families.PATCH
    monkeypatch.setattr(
        tiny_families, "open_clip_models", lambda **more: small(**{**more, "image_size": side})
    )
    model, processor = tiny_families.build_llava_onevision()
    processor.num_image_tokens = 25
    for part in (processor.image_processor, processor.video_processor):
        part.size = {"height": side, "width": side}
    vlm = VLM(model, processor)
    assert vlm.ask("what ?", **VIDEO, max_new_tokens=1).stats.visual_tokens_in == 5 * 9 + 1
    message = r"the 5 x 5 patches of its vision tower do not divide into 3 x 3 visual tokens"
    with pytest.raises(RecipeError, match=message):
        vlm.ask("what ?", **VIDEO, recipe="tome:0.5")
