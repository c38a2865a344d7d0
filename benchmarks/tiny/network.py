"""The packed training forward pass over the stock modules of `tiny`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from architecture import vision_core
from heads import DenseHeads
from torch import Tensor, nn
from transformers import AttentionInterface, LlavaNextForConditionalGeneration

TILED_VIEWS = 5
ATTENTION = "vlmfast_tiny_train"
LETTER_LAYER, LOOK_LAYER, RECALL_LAYER, CHOICE_LAYER = 1, 2, 3, 4


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    peek: Callable[[Tensor, Tensor], None] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """``peek`` is called with the queries (B, KV, G, L, D) and the keys (B, KV, L, D)."""
    if peek is not None:
        peek(query.unflatten(1, (key.shape[1], -1)), key)
    mask = None if attention_mask is None else attention_mask.to(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@lru_cache(maxsize=32)
def packed_mask(prefix: int, slots: tuple[int, ...], device: torch.device) -> Tensor:
    """Additive mask (L, L): the prefix is causal, a slot sees the prefix and its own past."""
    n = prefix + sum(slots)
    owner = torch.zeros(n, dtype=torch.long)
    owner[prefix:] = torch.repeat_interleave(torch.arange(1, len(slots) + 1), torch.tensor(slots))
    past = torch.ones(n, n, dtype=torch.bool).tril()
    allowed = past & ((owner[None] == 0) | (owner[None] == owner[:, None]))
    # a finite floor: softmax over a row must never see only -inf
    return torch.where(allowed, 0.0, -1e4).to(device)


class Packed(nn.Module):
    """Runs batches of `batches.make_batch` through the model."""

    def __init__(self, model: LlavaNextForConditionalGeneration, heads: DenseHeads) -> None:
        super().__init__()
        self.model, self.heads = model, heads
        self.found: dict[str, Tensor] = {}  # further losses of the last batch
        self.names: Tensor | None = None  # hidden states of the names after `LOOK_LAYER`
        model.set_attn_implementation({"text_config": ATTENTION, "vision_config": ATTENTION})

    def vision(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """``pixels (N, 64, 64, 3) uint8`` to ``hidden[-2]`` and ``hidden[-1]``, (N, 65, 192)."""
        core = vision_core(self.model)
        x = (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0).to(core.pre_layrnorm.weight.dtype)
        hidden = core.pre_layrnorm(core.embeddings(x))
        mid = hidden
        for layer in core.encoder.layers:
            mid = hidden
            hidden = layer(hidden, None)
        return mid, hidden

    @staticmethod
    def _at(x: Tensor, at: Tensor, prefix: int) -> Tensor:
        """Rows of ``x (B, ..., L, width)`` at slot tokens ``at (B, n)``."""
        index = (prefix + at.clamp(min=0)).view(len(at), *([1] * (x.ndim - 3)), -1, 1)
        return torch.take_along_dim(x, index, x.ndim - 2)

    def _look(self, batch: dict[str, Tensor], q: Tensor, k: Tensor) -> None:
        """Find ``look``: minus the log of the attention of names to their objects."""
        at, bits, source = batch["named_at"].long(), batch["named"].long(), batch["source"]
        prefix = source.shape[1]
        words = self._at(q[:, 0], at, prefix).float()  # (B, G, R, D)
        keys = k[:, 0, :prefix].float()
        score = torch.einsum("bgrd,bpd->bgrp", words, keys) * q.shape[-1] ** -0.5
        seen = source >= 0
        owner = torch.take_along_dim(batch["owner"].flatten(1).long(), source.clamp(min=0), 1)
        meant = (bits[:, :, None] >> owner[:, None]) & 1 & seen[:, None].long()
        meant = meant.bool()[:, None].expand(-1, q.shape[2], -1, -1)
        if batch["owner"].shape[1] == TILED_VIEWS:
            # One head attends to the overview, whose positions cover the whole image, the other to
            # the tiles, which are sharper; an average over both would not be a position.
            overview = (source // 64 == 0)[:, None]
            meant = meant & torch.stack([overview, ~overview], 1)
        floor = torch.finfo(score.dtype).min
        every = score.masked_fill(~seen[:, None, None], floor).logsumexp(-1)
        right = score.masked_fill(~meant, floor).logsumexp(-1)
        counts = (at >= 0)[:, None] & meant.any(-1)
        self.found["look"] = (every - right)[counts].sum() / counts.sum().clamp(min=1)

    def _recall(
        self, recall: Tensor, prefix: int, slots: tuple[int, ...], q: Tensor, k: Tensor
    ) -> None:
        """Find ``recall``: loss of attention from the answer to the question's names."""
        b, n, _ = recall.shape
        at, names = recall[..., 0], recall[..., 1:].transpose(1, 2)  # (B, n), (B, 2, n)
        asking = self._at(q[:, 0], at, prefix).float()  # (B, G, n, D)
        score = torch.einsum("bgnd,bld->bgnl", asking, k[:, 0].float()) * q.shape[-1] ** -0.5
        slot = torch.repeat_interleave(
            torch.arange(n, device=q.device), torch.tensor(slots, device=q.device)
        )
        token = torch.arange(slot.numel(), device=q.device)
        own = (slot == slot[at.clamp(min=0)][..., None]) & (token <= at[..., None])  # (B, n, S)
        seen = torch.cat([own.new_ones(b, n, prefix), own], -1)
        score = score.masked_fill(~seen[:, None], -1e4).flatten(0, 2)
        live = (at >= 0)[:, None].expand(names.shape).flatten().float()
        wanted = (prefix + names.clamp(min=0)).flatten()
        loss = F.cross_entropy(score, wanted, reduction="none")
        self.found["recall"] = (loss * live).sum() / live.sum().clamp(min=1)

    def _choose(self, choice: Tensor, prefix: int, index: int, q: Tensor, k: Tensor) -> None:
        """Add to ``choose``: loss of attention, options to letters or answer to option."""
        letters, words, last = choice[..., :4], choice[..., 4:8], choice[..., 8:]

        def rows(x: Tensor, at: Tensor) -> Tensor:
            found = self._at(x, at.flatten(1), prefix).float()
            return found.unflatten(-2, (choice.shape[1], -1))

        if index == LETTER_LAYER:  # (B, G, n, 4, D) against (B, n, 4, D)
            score = torch.einsum("bgnwd,bnld->bgnwl", rows(q[:, 1], words), rows(k[:, 1], letters))
            target = torch.arange(4, device=q.device).expand(score.shape[:-1])
            live = (words >= 0)[:, None].expand(score.shape[:-1])
            exists = (letters >= 0)[:, None, :, None]
        else:
            asking = rows(q[:, 0], last)[..., 0, :]
            score = torch.einsum("bgnd,bnwd->bgnw", asking, rows(k[:, 0], words))
            target = torch.zeros(score.shape[:-1], dtype=torch.long, device=q.device)
            live = (last[..., 0] >= 0)[:, None].expand(score.shape[:-1])
            exists = (words >= 0)[:, None]
        score = (score * q.shape[-1] ** -0.5).masked_fill(~exists, -1e4)
        loss = F.cross_entropy(score.flatten(0, -2), target.flatten(), reduction="none")
        weight = live.flatten().float()
        loss = (loss * weight).sum() / weight.sum().clamp(min=1)
        self.found["choose"] = self.found.get("choose", 0) + loss

    def patches(self, pixels: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Encode ``pixels (B, V, 64, 64, 3)``.

        Returns ``hidden[-2]`` and ``hidden[-1]`` of the distinct views, (N, 65, 192), and the
        patches of all views, (B, V * 64, 192). In a 64-pixel image overview and tile are the
        same pixels, so one of them is encoded for both.
        """
        b, v = pixels.shape[:2]
        single = kind != "image"
        distinct = pixels[:, ::2] if single else pixels
        mid, last = self.vision(distinct.flatten(0, 1))
        patches = mid[:, 1:].unflatten(0, (b, -1))
        if single:
            patches = patches.repeat_interleave(2, 1)
        return mid, last, patches.reshape(b, v * 64, -1)

    def _peek(
        self, batch: dict[str, Tensor], slots: tuple[int, ...], index: int
    ) -> Callable[[Tensor, Tensor], None] | None:
        """What reads the queries and keys of a layer."""
        prefix = batch["source"].shape[1]
        if index == LOOK_LAYER and "named" in batch:
            return partial(self._look, batch)
        if index == RECALL_LAYER and "recall" in batch:
            return partial(self._recall, batch["recall"].long(), prefix, slots)
        if index in (LETTER_LAYER, CHOICE_LAYER) and "choice" in batch:
            return partial(self._choose, batch["choice"].long(), prefix, index)
        return None

    def _supervise(self, batch: dict[str, Tensor], index: int, x: Tensor) -> None:
        """Find ``facts`` and ``compared`` after the layers that must know them."""
        recall, prefix = batch["recall"].long(), batch["source"].shape[1]
        if index == LOOK_LAYER:
            self.names = self._at(x, recall[..., 1:].flatten(1), prefix)
        elif index in (RECALL_LAYER, CHOICE_LAYER):
            answers = self._at(x, recall[..., 0], prefix)
            if index == CHOICE_LAYER:
                self.found["compared"] = self.heads.relation_loss(answers, batch["facts"])
            else:
                names = self.names.unflatten(1, (-1, 2))
                self.found["facts"] = self.heads.fact_loss(names, answers, batch["facts"])

    def text(
        self,
        batch: dict[str, Tensor],
        slots: tuple[int, ...],
        patches: Tensor | None,
        noise: float,
    ) -> Tensor:
        """Hidden states of the slots, (B, S, 256).

        ``patches (B, V * 64, 192)`` come from the encoder; None feeds the codes of the labels.
        """
        self.found.clear()
        base = self.model.model
        lm = base.language_model
        table, source = lm.embed_tokens.weight, batch["source"]
        prefix, pick = source.shape[1], source.clamp(min=0)
        if "fields" not in batch:
            feats = None
        elif patches is None:
            f, p = batch["fields"].flatten(1, 2), batch["place"].flatten(1, 2)
            seen = torch.take_along_dim(f, pick[..., None], 1)
            with torch.no_grad():
                at = torch.take_along_dim(p, pick[..., None], 1)
                codes = self.heads.encode(seen, at)
                codes = codes + noise * torch.randn_like(codes)
            feats = base.multi_modal_projector(codes.to(table.dtype))
        else:
            feats = base.multi_modal_projector(patches)
            feats = torch.take_along_dim(feats, pick[..., None], 1)
        words = F.embedding(batch["prefix"], table)
        newline = base.image_newline.to(table.dtype)
        x = torch.where((source == -2)[..., None], newline, words)
        if feats is not None:
            x = torch.where((source >= 0)[..., None], feats, x)
        x = torch.cat([x, F.embedding(batch["ids"].long(), table)], 1)
        cos, sin = lm.rotary_emb(x, position_ids=batch["positions"])
        mask = packed_mask(prefix, slots, x.device)
        for index, layer in enumerate(lm.layers):
            peek = self._peek(batch, slots, index) if self.training else None
            x = layer(x, attention_mask=mask, position_embeddings=(cos, sin), peek=peek)
            if self.training and "recall" in batch:
                self._supervise(batch, index, x)
        return lm.norm(x[:, prefix:])


def to_tensors(batch: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Move the arrays of a batch to ``device``."""
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
