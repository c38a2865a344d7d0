"""Replays stored attention over trees."""

from __future__ import annotations

import torch

from support.closeness import close
from support.golden.case import Reader
from vlmfast.kernels.tree_verify import tree_verify


def tree_case(data: Reader, meta: Reader) -> None:
    """Output and log-sum-exp, for any contents of free slots."""
    keys, values, lengths = data["k_ctx"].float(), data["v_ctx"].float(), data["len_ctx"]
    gone = torch.arange(keys.shape[2]) >= lengths[..., None]
    inputs = (data["k_tree"].float(), data["v_tree"].float(), data["ancestor_bits"])
    for garbage in (0.0, torch.nan):
        out, lse = tree_verify(
            data["q"].float(),
            keys.masked_fill(gone[..., None], garbage),
            values.masked_fill(gone[..., None], garbage),
            lengths,
            *inputs,
        )
        terms = keys.shape[3] + keys.shape[2] + data["k_tree"].shape[2]  # logits, then rows
        close(out, data["out"], terms=terms)
        close(lse, data["lse"], terms=terms)
    for node, parent in enumerate(data["parents"].tolist()):  # the bits are those of the tree
        assert -1 <= parent < node
        seen = int(data["ancestor_bits"][node])
        above = int(data["ancestor_bits"][parent]) if parent >= 0 else 0
        assert seen == above | 1 << node
        assert seen.bit_count() == int(data["depth"][node]) + 1
