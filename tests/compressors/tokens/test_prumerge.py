"""PruMerge and PruMerge+: examples, properties, and a prompt against a reference tower."""

from __future__ import annotations

import torch

from support.closeness import apart, close
from support.engine.driven import Driven, answer_logits
from support.tiny_models import build_llava
from support.tiny_models import make_image as photo
from support.tower_terms import tower
from vlmfast import VLM
from vlmfast.compressors.tokens.prumerge import mixture, one_head, outliers
from vlmfast.compressors.tokens.prumerge_plus import PruMergePlus
from vlmfast.core.statistics import StatRequest


def test_one_head_equals_concatenated_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 8, generator=generator), torch.randn(9, 4, 8, generator=generator)
    heads = torch.einsum("ihd,jhd->hij", q, k) * 8**-0.5
    wide = (q.flatten(1) @ k.flatten(1).T * 32**-0.5).softmax(-1)
    ours = one_head(heads.softmax(-1)[None, :, 0, 1:])
    terms = 32 + 9  # per logit, and per row
    close(ours, wide[:, 1:], terms=terms, scale=wide[:, 1:])
    mean = heads.softmax(-1).mean(0)[:, 1:]
    apart(ours, mean, terms=terms)  # control: the mean over heads


def test_outliers_example() -> None:
    one, two = [1.0, 2, 3, 4, 5, 6, 7, 100], [1.0] * 6 + [5, 9]
    # Without an outlier, the best token.
    assert outliers([torch.tensor(one), torch.tensor(two), torch.ones(8)]) == [1, 2, 1]


def test_mixture_example(monkeypatch) -> None:
    monkeypatch.setattr("vlmfast.compressors.tokens.prumerge.NEAREST", 2)
    attention = torch.tensor([0.1, 0.2, 0.3, 0.4])
    keys = torch.tensor([[1.0, 0], [3, 1], [0, 1], [1, 1]])
    mix = mixture(attention, keys, torch.tensor([0, 2]))
    expected = [[1, 0.2, 0, 0.4], [0, 0.2, 1, 0.4], [0, 0.2, 0, 0.4]]
    assert torch.equal(mix, torch.tensor(expected))  # copied, not computed


def test_grid_between_outliers() -> None:
    attention = torch.zeros(36)
    attention[[3, 10, 30]] = 1.0  # 1/12: steps of 4
    kept, _ = PruMergePlus().chosen(attention, None, *outliers([attention]))
    assert kept.nonzero().flatten().tolist() == sorted({3, 10, 30, *range(0, 35, 4)})
    # Nine tokens: one for the rest, four outliers (the fourth is the first of a tie), four spread.
    marks, count = PruMergePlus(0.25).chosen(attention, 9, 0)
    kept = marks.nonzero().flatten().tolist()
    assert len(kept) == count == 8
    assert {0, 3, 10, 30} < set(kept)
    rest = [i for i in range(36) if i not in (0, 3, 10, 30)]
    assert set(kept) - {0, 3, 10, 30} == {rest[i] for i in (4, 12, 20, 28)}


def test_prompt_equals_reference_tower() -> None:
    """Queries and keys come from hooks on the tower's last layer, which LLaVA does not use."""
    vlm = VLM(*build_llava())
    seen = [None, None]
    run = Driven.of(vlm, "prumerge:0.4", [photo()])
    answer_logits(vlm, run, [])
    tensors = run.inputs.tensors
    attention = vlm.adapter.vision_blocks()[-1].self_attn
    hooks = [
        part.register_forward_hook(lambda module, args, out, at=at: seen.__setitem__(at, out[0]))
        for at, part in enumerate((attention.q_proj, attention.k_proj))
    ]
    with torch.no_grad():
        out = vlm.model.get_encoder(modality="image")(
            tensors["pixel_values"], output_hidden_states=True
        )
        features = vlm.model.base_model.multi_modal_projector(out.hidden_states[-2])[0, 1:]
    for hook in hooks:
        hook.remove()
    queries, keys = seen
    logits = queries[0] @ keys.T * keys.shape[1] ** -0.5
    row = logits.softmax(-1)[1:]
    kept = row.topk(round(0.4 * 16) - 1).indices.sort().values
    gone = [i for i in range(16) if i not in kept.tolist()]
    expected = mixture(row, keys[1:], kept) @ features
    layout = run.prompt.layout
    positions = torch.cat([kept, torch.tensor(gone[-1:])])
    first = int(layout.order[layout.visual][0]) - int(positions.min())
    assert torch.equal(layout.order[layout.visual] - first, positions.sort().values)
    got = run.prompt.embeds[layout.visual]
    # The engine merges before or after the projector. Attention depends on all blocks, and the
    # softmax turns the rounding of its logits, which grows with them, into that of its weights.
    expected = expected[positions.argsort()]
    scale = float(expected.abs().max()) * (1 + float(logits.abs().max()))
    close(got, expected, terms=2 * tower(vlm), scale=scale)
    unmixed = features[positions.sort().values]
    apart(got, unmixed, terms=2 * tower(vlm), scale=scale)  # control: merging changes the features


def test_conflicting_key_requests_are_not_joined() -> None:
    wide, mean = StatRequest("cls", keys=True, wide=True), StatRequest("cls", keys=True)
    assert wide.joined(mean) is None
    assert wide.joined(StatRequest("cls")) == StatRequest("cls").joined(wide) == wide
