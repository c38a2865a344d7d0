"""A small target of drafters, prompts that it has read, and rounds without an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from support.closeness import close
from support.helpers_layout import make_image
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.layout import TokenLayout
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_eagle.drafter import EagleDrafter
from vlmfast.drafters.draft_eagle.module import EagleModule

WIDTH, VOCABULARY = 8, 40
SIZES = {"width": WIDTH, "heads": 2, "hidden": 16}
# Of an output row of the layer: `fc` over up to four widths, projections, the MLP, attention.
TERMS = (4 + 5) * WIDTH + SIZES["hidden"] + 100
PASSES = 8  # forward passes in sequence for a tree and its next draft, at most


def target(module: EagleModule | None = None, dtype: torch.dtype = torch.float64, **own) -> Target:
    generator = torch.Generator().manual_seed(5)
    embed = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    options = {"width": WIDTH, "depth": 12, "vocabulary": VOCABULARY, "trained": module} | own
    return Target(lambda ids: embed[ids], lambda x: x @ head.T, **options)


def text_layout(n: int, first: int = 0) -> TokenLayout:
    at = torch.arange(first, first + n)
    return TokenLayout.text(at, at[None])


def layout_of(*parts: int | dict) -> TokenLayout:
    """Text of some length, and images (arguments of `image`), in the order of a prompt."""
    layouts, first, items = [], 0, 0
    for part in parts:
        if isinstance(part, int):
            layouts.append(text_layout(part, first))
        else:
            layouts.append(make_image(**part, item=items, order=first)[0].layout)
            items += 1
        first += len(layouts[-1])
    return TokenLayout.cat(layouts)


TILED = {"tiles": (1, 2), "patches": (4, 4)}
PLAIN = {"tiles": (0, 0), "patches": (6, 6)}


def read_of(layout: TokenLayout, seed: int = 1, aux_hidden_states: bool = False, **own) -> Read:
    """Random embeddings and hidden states for a layout."""
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(len(layout), *shape, generator=generator, dtype=torch.float64)

    values = {
        "embeds": rows(WIDTH),
        "features": rows(WIDTH),
        "aux_hidden_states": rows(3, WIDTH),
    } | own
    unused = "features" if aux_hidden_states else "aux_hidden_states"
    return Read([7] * len(layout), layout, **(values | {unused: None}))


def rows_of(read: Read, start: int, stop: int) -> Read:
    index = torch.arange(start, stop)
    return Read(
        read.ids[start:stop],
        read.layout.select(index),
        read.embeds[start:stop],
        None if read.features is None else read.features[start:stop],
        None if read.aux_hidden_states is None else read.aux_hidden_states[start:stop],
    )


def answered(drafter: EagleDrafter, tree: Tree, path: list[int], bonus: int, seed: int) -> Round:
    """A round that accepts ``path`` of ``tree``, with random hidden states."""
    generator = torch.Generator().manual_seed(seed)
    own = drafter.module.kind == "eagle3"
    shape = (len(tree), 3, WIDTH) if own else (len(tree), WIDTH)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    emitted = [*(tree.tokens[node] for node in path[1:]), bonus]
    logits = torch.zeros(len(tree), VOCABULARY)
    done = Round(tree, path, emitted, logits, None if own else rows, rows if own else None)
    drafter.extend(done)
    return done


BUDGET = Budget(26, 4)


def rounds(drafter: EagleDrafter, read: Read, accepts: list[int]) -> tuple[int, Read]:
    """Rounds that accept so many drafted tokens: the next root, and all rows as one prompt."""
    root, third = 4, read.features is None
    embeds, states = [read.embeds], [read.aux_hidden_states if third else read.features]
    for number, accepted in enumerate(accepts):
        tree = drafter.propose(root, BUDGET)
        assert 1 < len(tree) <= 9
        assert drafter.propose(root, BUDGET) == tree  # a second call changes nothing
        leaf = max(range(len(tree)), key=lambda node: tree.depths[node])
        path = tree.path(leaf)[: accepted + 1]
        done = answered(drafter, tree, path, (root + number) % VOCABULARY, number)
        embeds.append(drafter.target.embed(torch.tensor([tree.tokens[node] for node in path])))
        states.append((done.aux_hidden_states if third else done.features)[path])
        root = done.emitted[-1]
    long, found = torch.cat(embeds), torch.cat(states)
    more = text_layout(len(long) - len(read.layout), len(read.layout))
    layout = TokenLayout.cat([read.layout, more])
    both = (None, found) if third else (found, None)
    return root, Read([7] * len(long), layout, long, *both)


def same_state(drafter: EagleDrafter, fresh: EagleDrafter, root: int) -> None:
    """The same tree from the same cache."""
    assert fresh.propose(root, BUDGET) == drafter.propose(root, BUDGET)
    assert fresh.cache.length == drafter.cache.length
    close(fresh.cache.keys, drafter.cache.keys, terms=PASSES * TERMS)
    close(fresh.cache.values, drafter.cache.values, terms=PASSES * TERMS)


def states(module: EagleModule, n: int) -> tuple[Tensor | None, Tensor | None]:
    """Hidden states and aux hidden states of n nodes; the first node's are always the same."""
    torch.manual_seed(21)
    first = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    rows = torch.cat([first, torch.randn(n - 1, 3, WIDTH, dtype=torch.float64)])
    return (None, rows) if module.kind == "eagle3" else (rows[:, 0], None)
