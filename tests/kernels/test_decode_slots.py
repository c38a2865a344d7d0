"""Attention over lists of slots: kernel against reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.closeness import close
from support.engine.kernels import INTERPRETED, launches
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Request
from vlmfast.kernels import decode_slots as module
from vlmfast.kernels.decode_slots import decode_slots, decode_slots_ref

pytestmark = pytest.mark.usefixtures("triton")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(given: dict) -> Tensor:
    """Bool (B, H, N): the slots that each head reads."""
    batch, heads, total = given["keys"].shape[:3]
    at = torch.arange(total)
    start, end = (given[name].cpu()[..., None] for name in ("start", "end"))
    mask = (at >= start) & (at < end)
    for b in range(batch):
        for h in range(heads):
            mask[b, h, given["slots"][b, h, : int(given["counts"][b, h])].cpu()] = True
    return mask


def case(
    batch, heads, groups, dim, listed, newest, dtype=torch.float32, device="cpu", **more
) -> dict:
    """Arguments of `decode_slots`: lists in random order, of different lengths; NaN elsewhere."""
    total = listed * 2 + newest + 5
    order = noise(batch, heads, total - newest, seed=3).argsort(-1)
    counts = torch.arange(batch * heads).view(batch, heads) * 13 % (listed + 1)
    counts[-1, -1] = listed
    start = torch.full((batch, heads), total - newest)
    given = {
        "query": noise(batch, heads * groups, 1, dim, seed=5).to(dtype),
        "keys": noise(batch, heads, total, dim, seed=1).to(dtype),
        "values": noise(batch, heads, total, dim, seed=2).to(dtype),
        "slots": order[..., :listed].contiguous(),
        "counts": counts,
        "start": start,
        "end": start + torch.arange(batch * heads).view(batch, heads).flip(0) % (newest + 1),
        "newest": newest,
        **more,
    }
    # Padding of the lists points to slots that hold NaN, or to none.
    unread = ~read(given)
    for name in ("keys", "values"):
        given[name] = given[name].masked_fill(unread[..., None], torch.nan)
    beyond = torch.arange(listed) >= counts[..., None]
    given["slots"] = given["slots"].masked_fill(beyond, 1 << 40)
    return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in given.items()}


def check(given: dict) -> None:
    out, lse = decode_slots(**given)
    expected = decode_slots_ref(**given)
    assert out.dtype == given["query"].dtype and expected[0].isfinite().all()
    wide = out.dtype == torch.float32
    terms = given["query"].shape[-1] + given["slots"].shape[2] + given["newest"]
    close(out, expected[0], out.dtype, terms if wide else 2)
    inner = (torch.float32, terms) if wide or INTERPRETED else (out.dtype, 2)
    empty = [x.masked_fill(x == -1e30, -torch.inf) for x in (lse, expected[1])]
    close(*empty, *inner)


@pytest.mark.cases(4)
@pytest.mark.parametrize("groups", [1, 3, 17])
@pytest.mark.parametrize(("listed", "newest"), [(1, 1), (37, 4), (65, 0), (0, 3)])
def test_matches_reference(groups, listed, newest, device):
    check(case(2, 2, groups, 32, listed, newest, device=device))


def test_several_splits_bias_and_views(device):
    given = case(1, 2, 2, 16, 700, 9, device=device)
    wide = torch.cat([given["keys"], given["values"]], -1)
    given["keys"], given["values"] = wide[..., :16], wide[..., 16:]
    bias = noise(1, 2, wide.shape[2], seed=4).to(device)
    check({**given, "bias": bias, "scaling": 0.3})


def test_a_head_that_reads_nothing_is_zero(device):
    given = case(1, 2, 1, 16, 6, 1, device=device)
    given["counts"], given["end"] = given["counts"] * 0, given["start"]
    out, lse = decode_slots(**given)
    assert not out.any() and (lse == -1e30).all()


def test_drafts_of_a_model(device, monkeypatch) -> None:
    """The drafts of `draft-self` with the kernel are those without; so are the answers."""
    model, processor = build_llava(layers=2)
    vlm = VLM(model.to(device), processor, decoding="eager")
    launched = launches(monkeypatch, module)
    requests = [
        Request("what ?" * n, make_image(seed=n), recipe=f"draft-self:keep={0.3 * n},confidence=0")
        for n in (1, 2)
    ]
    more = {"max_new_tokens": 3, "eos_token_id": None}
    got = vlm.ask_many(requests, **more)
    assert launched
    launched.clear()
    monkeypatch.setenv("VLMFAST_KERNELS", "torch")
    expected = vlm.ask_many(requests, **more)
    assert not launched
    plain = vlm.ask_many([Request(r.question, r.images) for r in requests], **more)
    assert [a.token_ids for a in got] == [a.token_ids for a in expected]
    assert [a.token_ids for a in got] == [a.token_ids for a in plain]
    assert [a.stats.accepted for a in got] == [a.stats.accepted for a in expected]
