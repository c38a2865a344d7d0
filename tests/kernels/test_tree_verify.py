"""Attention of a tree of drafted tokens: kernel against reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import close
from support.engine.kernels import INTERPRETED
from support.kernel_memory import each_tensor
from vlmfast.kernels import decode_mixed as shared
from vlmfast.kernels.quantize_kv import Segment, quantize
from vlmfast.kernels.tree_verify import tree_verify, tree_verify_ref

pytestmark = pytest.mark.usefixtures("triton")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tree(nodes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random tree: words of ancestors (T, words), and the same as bool (T, T)."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[int(torch.randint(0, node, (), generator=generator))]
    words = []
    for start in range(0, nodes, 64):
        bits = [
            sum(1 << j for j, on in enumerate(row[start : start + 64].tolist()) if on)
            for row in seen
        ]
        words.append([x - (1 << 64) if x >> 63 else x for x in bits])
    return torch.tensor(words).T.contiguous(), seen


def case(
    batch, heads, groups, nodes, dim, slots, dtype=torch.float32, device="cpu", **more
) -> dict:
    """Arguments of `tree_verify`; the context is ragged, with NaN after its lengths."""
    keys, values = (noise(batch, heads, slots, dim, seed=s).to(dtype) for s in (1, 2))
    lengths = torch.arange(batch * heads).view(batch, heads) * 13 % (slots + 1)
    masked = (torch.arange(slots) >= lengths[..., None])[..., None]
    own = [noise(batch, heads, nodes, dim, seed=s).to(device, dtype) for s in (3, 4)]
    return {
        "query": noise(batch, heads * groups, nodes, dim, seed=5).to(device, dtype),
        "keys": keys.masked_fill(masked, torch.nan).to(device),
        "values": values.masked_fill(masked, torch.nan).to(device),
        "lengths": lengths.to(device),
        "tree_keys": own[0],
        "tree_values": own[1],
        "ancestors": tree(nodes)[0].to(device),
        **more,
    }


def segment(batch: int, heads: int, n: int, dim: int, device, **more) -> Segment:
    with pytest.MonkeyPatch.context() as patch:  # not under test here
        patch.setenv("VLMFAST_KERNELS", "torch")
        made = quantize(
            noise(batch, heads, n, dim, seed=8),
            noise(batch, heads, n, dim, seed=9),
            torch.arange(n).expand(batch, heads, -1),
            (torch.arange(batch * heads).view(batch, heads) * 7 + 5) % (n + 1),
            **more,
        )
    return each_tensor(made, lambda x: x.to(device))


def sums(given: dict) -> int:
    """Terms of the sums: a logit over the head dimension, then the values over slots and nodes."""
    slots = given["keys"].shape[2] + given["tree_keys"].shape[2]
    return given["query"].shape[-1] + slots + sum(map(len, given.get("segments", ())))


def seen(lse: Tensor) -> Tensor:
    """Normalizers, with -inf for rows that see nothing."""
    return lse.masked_fill(lse == -1e30, -torch.inf)


def check(given: dict) -> None:
    out, lse = tree_verify(**given)
    expected = tree_verify_ref(**given)
    assert out.dtype == given["query"].dtype and expected[0].isfinite().all()
    # In half precision the result and the operands of the tensor cores are rounded.
    wide = out.dtype == torch.float32
    close(out, expected[0], out.dtype, sums(given) if wide else 2)
    inner = (torch.float32, sums(given)) if wide or INTERPRETED else (out.dtype, 2)
    close(seen(lse), seen(expected[1]), *inner)


@pytest.mark.cases(1)
@pytest.mark.parametrize("nodes", [1, 2, 7, 20])
@pytest.mark.parametrize("groups", [1, 3])
def test_matches_reference(nodes, groups, device):
    check(case(2, 2, groups, nodes, 32, 40, device=device))


def test_more_than_64_nodes(device):
    for nodes in (64, 70):
        given = case(1, 1, 1, nodes, 16, 10, device=device)
        assert given["ancestors"].shape == (nodes, -(-nodes // 64))
        check(given)
    assert bool(given["ancestors"][63, 0] < 0)  # the highest bit of a word is used


def test_one_tree_per_batch_row(device):
    given = case(2, 1, 2, 5, 16, 20, device=device)
    words = torch.stack([tree(5, seed)[0] for seed in (1, 2)]).to(device)
    check(given | {"ancestors": words})
    both = tree_verify(**given | {"ancestors": words})[0]
    for row in range(2):
        one = tree_verify(**given | {"ancestors": words[row]})[0]
        assert torch.equal(both[row], one[row])  # bit for bit: each program reads its own row
        assert not torch.equal(both[1 - row], one[1 - row])
    one_word = tree_verify(**given | {"ancestors": words[0, :, 0]})[0]
    assert torch.equal(one_word, tree_verify(**given | {"ancestors": words[0]})[0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("groups", [1, 2])
def test_quantized_segments_and_bias_match_reference(groups, device, monkeypatch):
    given = case(2, 2, groups, 5, 32, 40, device=device)
    given["segments"] = [
        segment(2, 2, 33, 32, device, bits=4, scaled=True),
        segment(2, 2, 24, 32, device, bits=2, key_group=8, value_group=8),
    ]
    given["bias"] = noise(2, 2, 40, seed=7).to(device)
    check(given)
    monkeypatch.setattr(shared, "MIN_SLOTS", 8)  # as many programs as tiles
    check(given)


def test_empty_context(device):
    given = case(1, 2, 1, 4, 16, 20, device=device)
    empty = {"keys": given["keys"][:, :, :0], "values": given["values"][:, :, :0]}
    check(given | empty | {"lengths": torch.zeros_like(given["lengths"])})
    no_ancestors = {"ancestors": torch.zeros(4, dtype=torch.int64, device=device)}
    out, lse = tree_verify(**given | no_ancestors)
    assert not given["lengths"][0, 0] and not out[0, 0].any() and (lse[0, 0] == -1e30).all()
    check(given | no_ancestors)
