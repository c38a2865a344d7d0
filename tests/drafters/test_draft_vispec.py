"""`draft-vispec`: few rows per image, and text rows with its global feature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import apart, close
from support.eagle import (
    BUDGET,
    PASSES,
    PLAIN,
    SIZES,
    TERMS,
    TILED,
    WIDTH,
    layout_of,
    read_of,
    rounds,
    rows_of,
    same_state,
    target,
)
from support.engine.draws import Cache
from support.golden.eagle import vispec_outputs
from vlmfast.core.drafting import Read
from vlmfast.core.layout import TokenLayout
from vlmfast.drafters.draft_eagle.module import EagleModule
from vlmfast.drafters.draft_vispec import DraftVispec
from vlmfast.drafters.draft_vispec.module import VispecModule
from vlmfast.drafters.draft_vispec.stage import VispecDrafter
from vlmfast.errors import RecipeError


def module_of(seed: int = 0, **own) -> VispecModule:
    torch.manual_seed(seed)
    module = VispecModule(SIZES | own).double()
    with torch.no_grad():  # initially the global feature has no effect
        for weight in module.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return module.eval().requires_grad_(False)


def open_drafter(module: VispecModule, read: Read, **own) -> VispecDrafter:
    drafter = DraftVispec(top_k=3, depth=3, nodes=9).open(target(module, **own))
    drafter.prefill(read)
    return drafter


def image_of(layout: TokenLayout) -> Tensor:
    return torch.where(layout.visual, layout.item.long(), -1)


def test_image_with_fewer_rows_than_queries() -> None:
    module = module_of(queries=6)
    layout = layout_of(2, PLAIN, 3)
    thin = layout.select(torch.tensor([0, 1, 4, 9, 38, 39, 40]))
    read = read_of(thin)
    drafter = open_drafter(module, read)
    drafter.propose(4, BUDGET)
    assert drafter.cache.length == 7  # five of text and the image's two


def test_rows_that_depend_on_an_image() -> None:
    module = module_of()
    torch.manual_seed(2)
    embeds = torch.randn(9, WIDTH, dtype=torch.float64)
    given = torch.randn_like(embeds), torch.arange(9)
    image = torch.tensor([-1, 0, 0, 0, -1, -1, 1, 1, -1])
    out = vispec_outputs(module, embeds, *given, image)
    gone = torch.tensor([1, 2, 6])
    assert torch.equal(out[gone], torch.zeros(3, WIDTH, dtype=torch.float64))
    assert bool((out[[0, 3, 4, 5, 7, 8]].abs().sum(-1) > 0).all())
    # Text before an image does not depend on it, text after it does.
    other = embeds.clone()
    other[1] += 1
    changed = vispec_outputs(module, other, *given, image)
    close(changed[[0, 1, 2, 6]], out[[0, 1, 2, 6]], terms=2 * TERMS, scale=out.abs().max())
    for row in (3, 4, 5, 7, 8):
        apart(changed[row], out[row], terms=2 * TERMS)


@pytest.mark.parametrize("parts", [(5,), (5, PLAIN, 4), (2, PLAIN, TILED, 4), (1, PLAIN)])
def test_cache_after_rounds_equals_one_prefill(parts: tuple) -> None:
    module = module_of()
    layout = layout_of(*parts)
    read = read_of(layout)
    drafter = open_drafter(module, read)
    drafter.propose(4, BUDGET)
    images = sum(isinstance(part, dict) for part in parts)
    assert drafter.cache.length == len(layout) - int(layout.visual.sum()) + images
    root, whole = rounds(drafter, read, [1, 0, 3, 2])
    same_state(drafter, open_drafter(module, whole), root)


def test_parts_of_a_prompt_continue() -> None:
    """A part that begins with an image, and one without: the global feature stays."""
    module = module_of()
    layout = layout_of(3, PLAIN, 4, TILED, 3)
    read = read_of(layout)
    one, several = open_drafter(module, read), open_drafter(module, rows_of(read, 0, 3))
    for first, last in ((3, 40), (40, 43), (43, len(layout) - 1), (len(layout) - 1, len(layout))):
        several.prefill(rows_of(read, first, last))
    assert one.propose(4, BUDGET) == several.propose(4, BUDGET)
    close(one.cache.keys, several.cache.keys, terms=PASSES * TERMS)
    close(one.seen, several.seen, terms=PASSES * TERMS)
    forgetful = open_drafter(module, read)
    forgetful.seen = None
    forgetful.propose(4, BUDGET)
    apart(forgetful.cache.values, one.cache.values, terms=PASSES * TERMS)


def test_positions_cover_the_images_span() -> None:
    module = module_of()
    layout = layout_of(3, PLAIN, 4)
    read = read_of(layout)
    drafter = open_drafter(module, read)
    drafter.propose(4, BUDGET)
    image = image_of(layout)
    root = drafter.target.embed(torch.tensor([4]))
    ahead = torch.cat([read.embeds[1:], root])
    shifted = torch.cat([image[1:], torch.tensor([-1])])
    none = torch.zeros(WIDTH, dtype=torch.float64)
    rows, source, _ = module.adapted(ahead, read.features, shifted, none)
    assert source.tolist() == [0, 1, 37, 38, 39, 40, 41, 42]
    cache = Cache()
    module.run(rows[None], source[None], cache.attend())  # rotary ids are row numbers here
    close(drafter.cache.keys, cache.keys, terms=2 * TERMS)
    assert drafter.next == 43


def test_invalid_values_and_weights_are_refused() -> None:
    stage = DraftVispec(nodes=12)
    assert stage.largest() == (12, 4) and stage.features and stage.aux_hidden_state_layers(32) == ()
    with pytest.raises(RecipeError, match="draft-vispec: nodes=8 is out of range"):
        DraftVispec(top_k=2, depth=2, nodes=8)
    with pytest.raises(RecipeError, match="queries=1"):
        VispecModule(SIZES | {"queries": 1})
    with pytest.raises(RecipeError, match="draft-vispec: no weights"):
        DraftVispec().open(target(None))
    with pytest.raises(RecipeError, match="draft-vispec: no weights"):
        DraftVispec().open(target(EagleModule(SIZES)))
    with pytest.raises(RecipeError, match="width 8, this one has 16"):
        DraftVispec().open(target(module_of(), width=16))
