"""MMTok: coverage, greedy selection against a reference, and whole prompts."""

from __future__ import annotations

import torch
from torch.nn.functional import cosine_similarity

from support.closeness import close
from support.engine.driven import ran
from support.helpers_layout import DIM, make_image
from support.reference import Dense
from support.tiny_models import build_llava
from support.tiny_models import make_image as photo
from vlmfast import VLM
from vlmfast.compressors.tokens.mmtok import MMTok, coverage
from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.statistics import VisionStats


def by_hand(x: torch.Tensor, text: torch.Tensor, k: int) -> list[int]:
    """The paper's greedy selection, in plain loops."""
    p = torch.stack([(cosine_similarity(t[None], x) / 0.02).softmax(0) for t in text])
    q = torch.stack([(cosine_similarity(v[None], x) / 0.2).softmax(0) for v in x])

    def value(chosen: list[int]) -> float:
        covered = p[:, chosen].amax(1).mean() + 0.5 * q[:, chosen].amax(1).mean()
        return float(covered)

    chosen: list[int] = []
    for _ in range(k):
        rest = [j for j in range(len(x)) if j not in chosen]
        chosen.append(max(rest, key=lambda j: value([*chosen, j])))
    return sorted(chosen)


def request(text: torch.Tensor, order: torch.Tensor | None = None) -> EncodeRequest:
    return EncodeRequest("what ?", text, depth=4, order=order)


def test_coverage_sums_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(9, 4, generator=generator), torch.randn(3, 4, generator=generator)
    worth = coverage(x, text, 0.02, 0.2, 0.5)
    assert worth.shape == (12, 9)
    terms = 4 + 9 + worth.numel()  # per cosine, per row, over all
    close(worth[:3].sum(), torch.tensor(1.0), terms=terms)
    close(worth[3:].sum(), torch.tensor(0.5), terms=terms)


def test_selection_equals_greedy_reference() -> None:
    tokens, geometry = make_image((0, 0), (4, 5), seed=1)
    stats = VisionStats((geometry,), {})
    generator = torch.Generator().manual_seed(3)
    text, other = (torch.randn(4, DIM, generator=generator) for _ in range(2))
    kept = MMTok(0.3).reduce(tokens, stats, request(text))
    assert kept.layout.order.tolist() == by_hand(tokens.features, text, 6)
    kept = MMTok(0.3).reduce(tokens, stats, request(other))
    assert kept.layout.order.tolist() == by_hand(tokens.features, other, 6)
    assert by_hand(tokens.features, text, 6) != by_hand(tokens.features, other, 6)
    nothing = MMTok(0.3).reduce(tokens, stats, request(text[:0]))
    assert len(nothing) == 6


def test_text_before_the_image_is_ignored() -> None:
    tokens, geometry = make_image((0, 0), (4, 5), order=3)
    text = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([0, 1, 2, 23, 24])
    stats = VisionStats((geometry,), {})
    kept = MMTok(0.4).reduce(tokens, stats, request(text, order))
    assert (kept.layout.order - 3).tolist() == by_hand(tokens.features, text[3:], 8)
    assert by_hand(tokens.features, text[3:], 8) != by_hand(tokens.features, text, 8)
    # If all text precedes the image, all of it counts.
    kept = MMTok(0.4).reduce(tokens, stats, request(text[:3], order[:3]))
    assert (kept.layout.order - 3).tolist() == by_hand(tokens.features, text[:3], 8)


def test_prompt_equals_greedy_reference() -> None:
    vlm, image = VLM(*build_llava()), photo()
    dense = Dense(vlm, tensors := vlm.inputs("what is here ?", images=[image]))
    visual = (tensors["input_ids"][0] == vlm.adapter.image_token_id).nonzero()[:, 0]
    run, _ = ran(vlm, "mmtok:0.4", [image])
    chosen = by_hand(
        dense.embeds[visual], dense.embeds[int(visual[-1]) + 1 :], round(0.4 * len(visual))
    )
    layout = run.prompt.layout
    assert torch.equal(layout.order[layout.visual], visual[chosen])
