"""What the kernels refuse: shapes, dtypes and options that do not fit together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmfast.errors import VLMFastError
from vlmfast.kernels.biased_attention import biased_attention
from vlmfast.kernels.calls import Shape
from vlmfast.kernels.catalogue import CASES, Case
from vlmfast.kernels.col_stats import col_stats, row_lse
from vlmfast.kernels.coverage import cover
from vlmfast.kernels.decode_mixed import decode_mixed
from vlmfast.kernels.decode_slots import decode_slots
from vlmfast.kernels.diversity import density_peaks, dpp, max_min
from vlmfast.kernels.few_rows import gated_linear, linears
from vlmfast.kernels.gather_rows import gather_rows
from vlmfast.kernels.merge import merge_into
from vlmfast.kernels.norm_rope_append import HeadNorm, residual_norm, rotate_append
from vlmfast.kernels.pool import cell_average, cell_mix, resample
from vlmfast.kernels.quantize_kv import quantize_keys, quantize_values
from vlmfast.kernels.select import top_k
from vlmfast.kernels.swiglu import geglu_tanh, swiglu
from vlmfast.kernels.tree_verify import tree_verify

pytestmark = pytest.mark.usefixtures("triton")

Refusals = list[tuple[str, Any]]  # parts of messages, and calls as `partial`
LONG = torch.int64


def of_attention(x: Tensor) -> Refusals:
    """``x``: zeros (2, 3, 9, 16)."""
    of, listed = partial(partial, biased_attention), x[..., 0, :4].long()
    counts, bias = listed[..., 0], x[0, 0, :8, 0]
    given = {"query": x[:, :, :1], "keys": x, "values": x, "slots": listed, "counts": counts}
    slots = partial(partial, decode_slots, **given, start=counts, end=counts, newest=1)
    return [
        (r"key \(2, 2, 9, 16\)", of(x, x[:, :2], x[:, :2])),
        (r"value \(2, 3, 8, 16\)", of(x, x, x[:, :, 1:])),
        (r"key \(2, 3, 9, 8\)", of(x, x[..., :8], x[..., :8])),
        ("no query row or no key", of(x, x[:, :, :0], x[:, :, :0])),
        ("9 causal rows over 8 keys; it takes at most 8", of(x, x[:, :, 1:], x[:, :, 1:])),
        (r"float32, torch\.float16, torch\.float32", of(x, x.half(), x)),
        (r"bias of shape \(8,\); it takes \(9,\) to \(2, 3, 9\)", of(x, x, x, bias)),
        (r"lengths of shape \(3,\); it takes \(2,\)", of(x, x, x, lengths=counts[0])),
        ("it takes one token per row", slots(query=x)),
        (r"it takes \(2, 3, slots, 16\)", slots(values=x[:, :, 1:])),
        ("it takes int64", slots(counts=counts.int())),
        (r"it takes int64, \(2, 3, any\)", slots(start=counts[:, :1])),
    ]


def of_trees(x: Tensor) -> Refusals:
    """``x``: zeros (2, 3, 9, 16)."""
    words = torch.ones(9, 1, dtype=LONG, device=x.device)
    own = dict.fromkeys(("query", "keys", "values", "tree_keys", "tree_values"), x)
    tree = partial(partial, tree_verify, **own, lengths=words[:6, 0].view(2, 3))
    many = dict.fromkeys(("query", "tree_keys", "tree_values"), x.repeat(1, 1, 8, 1))
    return [
        (r"9 nodes take int64 \(9, 1\)", tree(ancestors=words[:4])),
        (r"9 nodes take int64 \(9, 1\)", tree(ancestors=words.int())),
        (r"9 nodes take int64 \(9, 1\)", tree(ancestors=words[None, None])),
        (r"72 nodes take int64 \(72, 2\)", tree(**many, ancestors=words.repeat(8, 1))),
    ]


def of_statistics(x: Tensor) -> Refusals:
    """``x``: zeros (2, 9, 16)."""
    refused: Refusals = [
        (r"want=\['mean'\] must be among sum", partial(col_stats, x, x, want=["mean"])),
        ("per='token' must be one of head, group, all", partial(col_stats, x, x, per="token")),
        ("k is a tensor without a width", partial(top_k, x, x[..., 0].long())),
        (r"k of shape \(2,\) for scores", partial(top_k, x, x[:, 0, 0].long(), width=2)),
    ]
    for of in (partial(partial, run) for run in (col_stats, row_lse)):
        refused += [
            ("no query row or no key", of(x[:, :0], x[:, :0])),
            ("queries in torch.float32, keys in torch.float16", of(x, x.half())),
            (r"queries \(2, 9, 16\) and keys \(2, 9, 8\)", of(x, x[..., :8])),
            (r"keys \(2, 8, 16\)", of(x, x[:, :8])),
            ("a divisor of Hq", of(x, torch.cat([x, x[:1]]))),
            ("no query row", of(x, x, x[0, :0, 0].long())),
            ("rows of torch.bool; it takes int64", of(x, x, x[0, :, 0].bool())),
            (r"bias of shape \(2, 9\); it takes \(9,\)", of(x, x, bias=x[..., 0])),
        ]
    return refused


def of_matrices(x: Tensor) -> Refusals:
    """``x``: zeros (5, 5)."""
    refused: Refusals = [
        (r"worth \(5,\); it takes \(R, N\)", partial(cover, x[0], 1)),
        (r"worth \(1, 5, 5\); it takes \(R, N\)", partial(cover, x[None], 1)),
        ("k=-1 of 5 columns; it takes 0 to all", partial(cover, x, -1)),
        ("k=6 of 5 columns; it takes 0 to all", partial(cover, x, 6)),
        ("0 neighbours among 5", partial(density_peaks, x, 2, 0)),
        ("6 neighbours among 5", partial(density_peaks, x, 2, 6)),
    ]
    for of in (partial(max_min), partial(dpp), partial(density_peaks, neighbours=2)):
        for wrong in (x[:4], x[0], x.half()):
            refused.append((r"matrix .*; it takes \(\.\.\., N, N", partial(of, wrong, 2)))
        refused += [(f"{k} of 5 rows; it takes 1 to 5", partial(of, x, k)) for k in (0, 6)]
    return refused


def of_slots(x: Tensor) -> Refusals:
    """``x``: zeros (2, 9, 16)."""
    keep, gather = x[:, :3, 0].long(), partial(partial, gather_rows)
    merge, half = partial(partial, merge_into, x), torch.float16
    return [
        (r"\(2, 3\) of torch.int32; it takes int64", gather(keep.int(), x)),
        ("dim=2 with an index of 2 axes", gather(keep, x, dim=2)),
        (r"tensor \(1, 9, 16\) for rows \(2, 3\) .* must agree", gather(keep, x, x[:1])),
        (r"tensor \(9,\) for rows", gather(keep, x[0, :, 0])),
        ("along axis -2", gather(keep[0], x, dim=-2)),
        (r"\(2, 0, 16\) has no row to take", gather(keep, x[:, :0])),
        (r"counts \(3,\) for an index \(2, 3\)", gather(keep, x, counts=keep[0])),
        (r"keys \(2, 9, 16\), values \(2, 8, 16\)", merge(x[:, 1:], keep)),
        (r"kept slots \(1, 3\)", merge(x, keep[:1])),
        ("0 kept of 9 slots; it takes at least one", merge(x, keep[:, :0])),
        ("keys in torch.float32, values in torch.float16", merge(x.half(), keep)),
        ("mode='mean' must be one of pivot, avg, weighted", merge(x, keep, "mean")),
        ("rule='head' must be one of all, token, slot", merge(x, keep, rule="head")),
        ("bits=3 cannot be packed", partial(quantize_keys, x, 3, dtype=half)),
        ("groups of 5 channels", partial(quantize_values, x, 4, 5, dtype=half)),
    ]


def of_rows(x: Tensor) -> Refusals:
    """``x``: zeros (2, 8)."""
    norm, w = partial(partial, residual_norm, x), x[0]
    heads, length = x.new_zeros(2, 2, 1, 16), torch.ones(2, 1, dtype=LONG, device=x.device)
    given = dict.fromkeys(("keys", "values"), x.new_zeros(2, 1, 12, 16)) | {"query": heads}
    given |= dict.fromkeys(("cos", "sin"), heads[:, 0])
    given |= dict.fromkeys(("key", "value"), heads[:, :1])
    rotate = partial(partial, rotate_append, **given | {"length": length})
    layers = partial(partial, linears, x)
    refused: Refusals = [
        (r"shapes \(2, 8\), \(4,\); it takes", norm(w[:4], 1e-6)),
        (r"tensors in torch\.float32, torch\.float16", norm(w.half(), 1e-6)),
        ("branch_weight without residual", norm(w, 1e-6, None, w)),
        (r"shapes .*, \(4,\); it takes", norm(w, 1e-6, x, w[:4])),
        (r"key \(2, 1, 1, 8\)", rotate(key=heads[:, :1, :, :8])),
        (r"length \(2, 2\)", rotate(length=length.expand(2, 2))),
        (r"cos \(2, 1, 8\)", rotate(cos=heads[:, 0, :, :8])),
        ("tensors in torch.float32, torch.float16", rotate(key=heads[:, :1].half())),
        ("tables in torch.float16 and torch.float32", rotate(cos=heads[:, 0].half())),
        (r"weights of a norm \(8,\) in torch.float32", rotate(norm=HeadNorm(w, w, 1e-6))),
        ("0 weights and 0 biases; it takes 1 to 3", layers([], [])),
        ("4 weights", layers([x] * 4, [None] * 4)),
        (r"weights \(2, 7\).* it takes \(..., K\)", layers([x[:, :7]], [None])),
        (r"biases \(3,\)", layers([x], [w[:3]])),
        ("several dtypes", layers([x.half()], [None])),
        (r"\(2, 8\) and \(1, 8\); it takes one shape", partial(gated_linear, x, (x, x[:1]))),
    ]
    for run in (swiglu, geglu_tanh):
        for other in (x[:1], x.half()):
            refused.append((r"gate \(2, 8\) in torch.float32, up \(", partial(run, x, other)))
    return refused


def of_cells(x: Tensor) -> Refusals:
    """``x``: zeros (9, 8)."""
    table, score = x[:4, :3].long(), x[:, :2]
    there, mix = table == 0, partial(partial, cell_mix)
    average = partial(partial, cell_average, x)
    sizes = (2, 2, 8), (5, 2, 8), (5, 8), (5,), (2, 2), (5, 2), (2,)
    given = [x.new_zeros(size) for size in sizes]
    wrong = [[y[:1] if i == at else y for i, y in enumerate(given)] for at in range(1, 7)]
    return [
        (r"rows \(9, 8\), table .* it takes \(N", average(score[:, 0], table, there[:, :2])),
        (r"9 rows and weights \(9, 2\); it takes", average(score, table, there)),
        (r"rows \(9, 8\) and scores \(9, 3\); it takes", mix(x, x[:, :3], table, there)),
        ("tensors in .*float16.*; it takes float32", mix(x.half(), score, table, there)),
        *((r"query \(2, 2, 8\), .* H a divisor of D", partial(resample, *of)) for of in wrong),
        (
            "tensors in .*float16.*; it takes float32",
            partial(resample, given[0].half(), *given[1:]),
        ),
    ]


@pytest.mark.parametrize("choice", ["triton", "torch"])
@pytest.mark.parametrize(
    ("refusals", "shape"),
    [
        (of_attention, (2, 3, 9, 16)),
        (of_trees, (2, 3, 9, 16)),
        (of_statistics, (2, 9, 16)),
        (of_matrices, (5, 5)),
        (of_slots, (2, 9, 16)),
        (of_rows, (2, 8)),
        (of_cells, (9, 8)),
    ],
)
def test_kernels_and_references_refuse(choice: str, refusals, shape, device, monkeypatch) -> None:
    monkeypatch.setenv("VLMFAST_KERNELS", choice)
    for message, call in refusals(torch.zeros(shape, device=device)):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        if isinstance(caught.value, VLMFastError):
            assert str(caught.value).startswith(f"{call.func.__name__.removesuffix('_into')}: ")


def test_kernels_refuse(device: torch.device) -> None:
    """What the references take."""
    x, wide = torch.zeros(2, 4, 9, 16, device=device), torch.ones(1, 20000, device=device)
    few, one, half, mask = x[:, :2], x[:, :, :1], x[:, :2].half(), x[:, :2, :1, :9].bool()
    lengths, table = x[:, :2, 0, 0].long(), one[:, 0]
    own = dict.fromkeys(("keys", "values", "tree_keys", "tree_values"), few)
    own |= {"query": x, "ancestors": x[0, 0, :, :1].long(), "lengths": lengths}
    tree, mixed = partial(partial, tree_verify, **own), partial(partial, decode_mixed)
    gaps = torch.zeros(2, 1, 12, 32, device=device)[..., ::2]
    rotated = one, one[:, :1], one[:, :1], table, table, gaps, gaps, lengths[:, :1]
    there = torch.ones(2, 9, device="meta")
    for message, call in (
        ("one of float32, float16", mixed(one, [], half, half, mask)),
        ("cannot share", mixed(one[:, :3], [], few, few, mask)),
        ("tree_verify: queries, keys and values in", tree(tree_keys=half)),
        (r"slots, 16\) in all pieces", tree(keys=few[:, :1])),
        ("tree_verify: tensors on", tree(lengths=lengths.to("meta"))),
        ("tensors on", partial(quantize_keys, few[0], 4, 0, there, dtype=torch.float16)),
        ("rotate_append: buffers whose last axis", partial(rotate_append, *rotated)),
        ("rows of 20000; it takes 1 to 16384", partial(residual_norm, wide, wide[0], 1e-6)),
    ):
        with pytest.raises(VLMFastError, match=message):
            call()


HEADS = (
    "biased_attention", "col_stats", "decode_mixed", "decode_slots", "merge", "norm_rope_append",
    "quantize_kv", "tree_verify",
)  # fmt: skip


@pytest.mark.parametrize("dim", [20, 264])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name)
        for case in CASES
        if case.kernel in HEADS and not case.name.startswith("residual_norm")
    ],
)
def test_other_head_dimensions_are_refused(case: Case, dim: int, device: torch.device) -> None:
    call = case.call(Shape(1, 1, dim, 3, 8, 8, device=device))
    with pytest.raises(VLMFastError, match=f": head dimension {dim}; it takes multiples of 8 up"):
        call.run()
