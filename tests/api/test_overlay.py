"""Overlays: kept patches keep their colour."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vlmfast
from support import tiny_models
from support.engine.overlays import caption, captions
from support.engine.private import MERGED, OUTLINE
from support.engine.prompts import Trace
from vlmfast.api.overlays import MAX_SIDE, MIN_SIDE, contact_sheet, overlay
from vlmfast.core.layout import Kind, TokenLayout

COLOUR = (200, 40, 90)
LAYERS = 4


def grid_layout(side: int, tile: int = 0, newlines: bool = False) -> TokenLayout:
    """``side`` x ``side`` patches of image 0 in raster order, followed by newlines."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    y, x = y.flatten(), x.flatten()
    n = len(y) + (side if newlines else 0)
    box = torch.full((n, 4), torch.nan)
    box[: len(y)] = torch.stack([x, y, x + 1, y + 1], dim=1) / side
    kind = torch.full((n,), int(Kind.NEWLINE), dtype=torch.uint8)
    kind[: len(y)] = int(Kind.IMAGE)
    tiles = torch.full((n,), -1, dtype=torch.int32)
    tiles[: len(y)] = tile
    layout = TokenLayout.text(torch.arange(n), torch.arange(n)[None])
    return layout.replace(kind=kind, item=torch.zeros(n, dtype=torch.int32), tile=tiles, box=box)


def answer(layout: TokenLayout, depth: torch.Tensor, *images: Image.Image) -> SimpleNamespace:
    trace = Trace()
    trace.begin(layout, LAYERS)
    trace.depth, trace.images = depth, list(images)
    return SimpleNamespace(trace=trace, recipe="test")


def painted(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """Mask of the pixels of a panel with exactly this colour, (MIN_SIDE, MIN_SIDE)."""
    return (np.asarray(image)[:MIN_SIDE, :MIN_SIDE] == colour).all(axis=-1)


def plain(width: int = 64, height: int = 64) -> Image.Image:
    return Image.new("RGB", (width, height), COLOUR)


def middles(image: Image.Image, side: int, width: int, height: int, left: int = 0) -> np.ndarray:
    """Colours (side, side, 3) at the centre of every cell of a panel."""
    pixels = np.asarray(image)
    ys = ((np.arange(side) + 0.5) * height / side).astype(int)
    xs = left + ((np.arange(side) + 0.5) * width / side).astype(int)
    return pixels[np.ix_(ys, xs)].astype(int)


def test_dropped_patches_are_darkened() -> None:
    depth = torch.full((16,), LAYERS)
    depth[[0, 5, 10]] = 0
    (image,) = overlay(answer(grid_layout(4), depth, plain()))
    cells = middles(image, 4, MIN_SIDE, MIN_SIDE).reshape(16, 3)
    dropped = np.zeros(16, dtype=bool)
    dropped[[0, 5, 10]] = True
    assert (cells[~dropped] == COLOUR).all()
    assert (cells[dropped].max(axis=1) < 0.5 * max(COLOUR)).all()
    spread = cells[dropped].max(axis=1) - cells[dropped].min(axis=1)
    assert (spread < 0.2 * (max(COLOUR) - min(COLOUR))).all()


def test_earlier_drops_are_darker() -> None:
    depth = torch.tensor([0, 1, 3, LAYERS])
    (image,) = overlay(answer(grid_layout(2), depth, plain()))
    brightness = middles(image, 2, MIN_SIDE, MIN_SIDE).sum(axis=-1).flatten().tolist()
    assert brightness == sorted(brightness)
    assert len(set(brightness)) == 4


def test_kept_regions_are_outlined() -> None:
    depth = torch.zeros(16, dtype=torch.int64)
    depth[5] = LAYERS
    (image,) = overlay(answer(grid_layout(4), depth, plain()), size=400)
    pixels = np.asarray(image).astype(int)
    corner = pixels[100, 100]
    assert (corner != COLOUR).any()
    assert (corner == pixels[199, 199]).all()
    assert (pixels[110, 110] == COLOUR).all()


def test_nothing_dropped_leaves_the_image_unchanged() -> None:
    source = tiny_models.make_image(MIN_SIDE, MIN_SIDE)
    (image,) = overlay(answer(grid_layout(4), torch.full((16,), LAYERS), source))
    assert np.array_equal(np.asarray(image)[:MIN_SIDE, :MIN_SIDE], np.asarray(source))


def test_crops_have_their_own_panel() -> None:
    layout = TokenLayout.cat([grid_layout(2), grid_layout(4, tile=1, newlines=True)])
    depth = torch.full((len(layout),), LAYERS)
    depth[:4] = 0
    (image,) = overlay(answer(layout, depth, plain()))
    assert image.width > 2 * MIN_SIDE
    base = middles(image, 2, MIN_SIDE, MIN_SIDE)
    crops = middles(image, 4, MIN_SIDE, MIN_SIDE, left=image.width - MIN_SIDE)
    assert (base.max(axis=-1) < 0.5 * max(COLOUR)).all()
    assert (crops == COLOUR).all()


def test_regions_without_tokens_are_black() -> None:
    layout = grid_layout(2)
    layout = layout.replace(box=layout.box * torch.tensor([0.5, 1.0, 0.5, 1.0]))
    (image,) = overlay(answer(layout, torch.full((4,), LAYERS), plain()))
    pixels = np.asarray(image).astype(int)
    assert (pixels[MIN_SIDE // 2, MIN_SIDE // 4] == COLOUR).all()
    assert pixels[MIN_SIDE // 2, MIN_SIDE * 3 // 4].max() < 30


@pytest.mark.parametrize(
    ("shape", "longest"),
    [((10, 5), MIN_SIDE), ((600, 500), 600), ((4000, 1000), MAX_SIDE), ((2000, 20), MAX_SIDE)],
)
def test_size_option(shape: tuple[int, int], longest: int) -> None:
    depth = torch.full((16,), LAYERS)
    depth[3] = 0
    made = answer(grid_layout(4), depth, plain(*shape))
    assert overlay(made)[0].width == max(longest, overlay(made)[0].width)
    (image,) = overlay(made, size=300)
    assert image.width >= 300
    assert image.height > 300 * shape[1] // shape[0]


def merged_answer(side: int, rows: list[int], boxes: list[tuple], kinds=(Kind.IMAGE,)):
    """An answer that keeps ``rows`` of ``side`` x ``side`` patches; they cover ``boxes``."""
    layout, index = grid_layout(side), torch.tensor(rows)
    depth = torch.zeros(side * side, dtype=torch.int64).index_fill(0, index, LAYERS)
    made = answer(layout, depth, plain())
    box = torch.tensor(boxes, dtype=torch.float32)
    area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) * side * side
    left = layout.select(index).replace(box=box, weight=area.nan_to_num(1.0))
    kind = torch.tensor([int(k) for k in kinds], dtype=torch.uint8).expand(len(rows))
    made.trace.entered = left.replace(kind=kind.contiguous())
    return made


def test_patches_of_a_merged_token_keep_their_colour() -> None:
    quarter = [(0, 0, 0.5, 0.5)]
    made = merged_answer(4, [5], quarter)
    (image,) = overlay(made)
    cells = middles(image, 4, MIN_SIDE, MIN_SIDE)
    assert (cells[:2, :2] == COLOUR).all()
    assert (cells[2:].max(axis=-1) < 0.5 * max(COLOUR)).all()
    assert (cells[:, 2:].max(axis=-1) < 0.5 * max(COLOUR)).all()
    blue = painted(image, MERGED)
    half = MIN_SIDE // 2
    assert blue[0, :half].all()
    assert blue[:half, half - 1].all()
    assert not blue[half:].any()
    # Control: the same patches without merging.
    made.trace.entered = made.trace.layout
    (image,) = overlay(made)
    assert not painted(image, MERGED).any()
    assert (middles(image, 4, MIN_SIDE, MIN_SIDE)[0, 0] != COLOUR).any()


def test_merged_tokens_are_outlined() -> None:
    boxes = [(x, y, x + 0.5, y + 0.5) for y in (0, 0.5) for x in (0, 0.5)]
    (image,) = overlay(merged_answer(4, [0, 2, 8, 10], boxes))
    assert (middles(image, 4, MIN_SIDE, MIN_SIDE) == COLOUR).all()
    blue, half = painted(image, MERGED), MIN_SIDE // 2
    assert blue[half].all()
    assert blue[half - 1].all()
    assert blue[:, half].all()
    assert not painted(image, OUTLINE).any()  # nothing was dropped


def test_merged_patches_are_dropped_with_their_token() -> None:
    made = merged_answer(2, [0, 1], [(0, 0, 0.5, 1), (0.5, 0, 1, 1)])
    made.trace.depth = torch.tensor([2, LAYERS, 0, 0])
    (image,) = overlay(made)
    cells = middles(image, 2, MIN_SIDE, MIN_SIDE)
    assert (cells[:, 1] == COLOUR).all()
    assert np.array_equal(cells[0, 0], cells[1, 0])
    assert cells[0, 0].sum() < sum(COLOUR)
    assert not painted(image, MERGED)[:, : MIN_SIDE // 2].any()


def test_patch_replaced_by_cls_is_not_shown_as_kept() -> None:
    none = (float("nan"),) * 4
    made = merged_answer(2, [0, 3], [none, (0.5, 0.5, 1, 1)], (Kind.SPECIAL, Kind.IMAGE))
    (image,) = overlay(made)
    cells = middles(image, 2, MIN_SIDE, MIN_SIDE)
    assert (cells[1, 1] == COLOUR).all()
    assert cells[0, 0].max() < 0.5 * max(COLOUR)


def test_captions_report_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    written = captions(monkeypatch)
    overlay(merged_answer(4, [5, 15], [(0, 0, 0.5, 0.5), (0.75, 0.75, 1, 1)]))
    assert written == [
        "5 of 16 patches in 2 tokens",
        "test: 2 of 16 visual tokens kept; 1 merged from 4 (blue)",
    ]
    written.clear()
    none = (float("nan"),) * 4
    made = merged_answer(2, [0, 3], [none, (0.5, 0.5, 1, 1)], (Kind.SPECIAL, Kind.IMAGE))
    contact_sheet([made, made])
    assert written[:2] == ["1 of 4 patches", "test: 2 of 4 visual tokens kept; 1 show a whole view"]
    assert sum("orange" in text for text in written) == 1


def test_captions_wrap_at_the_image_width() -> None:
    image = plain(200, 20)
    short, long = caption(image, "a b"), caption(image, "word " * 30)
    assert short.width == long.width == 200
    assert long.height > 3 * (short.height - 20)
    assert caption(image, "w" * 99).width > 200  # a word is never broken


def test_text_only_prompt_has_no_overlay() -> None:
    empty = SimpleNamespace(trace=Trace(layers=4), recipe="none")
    assert overlay(empty) == []
    assert contact_sheet([empty]).size == (1, 1)


def test_overlays_of_generated_answers(random_vlm: vlmfast.VLM) -> None:
    images = [tiny_models.make_image(80, 60), tiny_models.make_image(40, 90, seed=1)]
    recipes = ["hired:0.3", "grid", "downsample:0.3", "mustdrop:0.4", "visionzip:0.3"]
    rows = random_vlm.compare("what?", images, recipes=recipes, max_new_tokens=2)
    for row in rows:
        drawn = vlmfast.overlay(row.answer)
        assert len(drawn) == 2
        blue = [(np.asarray(image) == MERGED).all(axis=-1).any() for image in drawn]
        if "mustdrop" not in row.recipe:  # its windows may all differ
            assert any(blue) == ("downsample" in row.recipe or "visionzip" in row.recipe)
        kept = (row.answer.trace.depth == row.answer.trace.layers).sum()
        assert (row.recipe == "none") == (int(kept) == row.answer.stats.visual_tokens_in)
    sheet = contact_sheet([row.answer for row in rows])
    assert sheet.width > MIN_SIDE
    assert sheet.height > 6 * MIN_SIDE


def test_video_frames_are_side_by_side(random_vlm: vlmfast.VLM) -> None:
    frames = [tiny_models.make_image(32, 32, seed=i) for i in range(5)]
    made = random_vlm.ask("what?", video=frames, recipe="random:0.4", max_new_tokens=2)
    assert len(vlmfast.overlay(made)) == 5
    sheet = contact_sheet([made])
    assert sheet.width > 4 * 200
    assert sheet.height > 2 * 200
