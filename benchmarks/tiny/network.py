"""The packed training forward pass over the stock modules of `tiny`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from architecture import vision_core
from batches import Batch, FastEncoder, Layout, make_layout
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


@dataclass
class Frame:
    """Constants of one layout on the device: prefix ids, sources, slot offsets, mask."""

    ids: Tensor
    source: Tensor
    views: int
    offsets: Tensor
    mask: Tensor
    prefix: int
    slots: tuple[int, ...]


def packed_mask(prefix: int, slots: tuple[int, ...]) -> Tensor:
    """Additive mask (L, L): the prefix is causal, a slot sees the prefix and its own past."""
    n = prefix + sum(slots)
    owner = torch.zeros(n, dtype=torch.long)
    owner[prefix:] = torch.repeat_interleave(torch.arange(1, len(slots) + 1), torch.tensor(slots))
    past = torch.ones(n, n, dtype=torch.bool).tril()
    allowed = past & ((owner[None] == 0) | (owner[None] == owner[:, None]))
    # a finite floor: softmax over a row must never see only -inf
    return torch.where(allowed, 0.0, -1e4)


class Packed(nn.Module):
    """Runs batches of `batches.make_batch` through the model."""

    def __init__(
        self, model: LlavaNextForConditionalGeneration, heads: DenseHeads, encode: FastEncoder
    ) -> None:
        super().__init__()
        self.model, self.heads = model, heads
        self._encode = encode
        self.look: Tensor | None = None
        self.choose: Tensor | None = None
        self.recall: Tensor | None = None
        self.facts: Tensor | None = None
        self.compared: Tensor | None = None
        self.names: Tensor | None = None  # hidden states of the names after `LOOK_LAYER`
        self._frames: dict = {}
        self._layouts: dict[str, Layout] = {}
        model.set_attn_implementation({"text_config": ATTENTION, "vision_config": ATTENTION})

    def forget(self) -> None:
        """Leave the losses of an earlier batch."""
        self.look = self.choose = self.recall = self.facts = self.compared = self.names = None

    def frame(self, kind: str, slots: tuple[int, ...], keep: int) -> Frame:
        key = (kind, slots, keep)
        if key not in self._frames:
            if kind not in self._layouts:
                self._layouts[kind] = make_layout(kind, self._encode)
            layout = self._layouts[kind]
            weight = self.model.lm_head.weight
            full = len(layout.ids)
            offsets = torch.cat([torch.arange(n) for n in slots]) + full
            prefix = keep or full
            self._frames[key] = Frame(
                torch.from_numpy(layout.ids).to(weight.device),
                torch.from_numpy(layout.source).to(weight.device),
                layout.views,
                offsets.to(weight.device),
                packed_mask(prefix, slots).to(weight.device),
                prefix,
                slots,
            )
        return self._frames[key]

    def vision(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """``pixels (N, 64, 64, 3) uint8`` to ``hidden[-2]`` and ``hidden[-1]``, (N, 65, 192)."""
        core = vision_core(self.model)
        x = (pixels.permute(0, 3, 1, 2).float() / 127.5 - 1.0).to(core.pre_layrnorm.weight.dtype)
        hidden = core.pre_layrnorm(core.embeddings(x))
        mid = hidden
        for layer in core.encoder.layers:
            mid = hidden
            hidden = layer(hidden, None)
            if isinstance(hidden, tuple):
                hidden = hidden[0]
        return mid, hidden

    @staticmethod
    def _at(x: Tensor, at: Tensor, frame: Frame) -> Tensor:
        """Rows of ``x (B, L, width)`` at slot tokens ``at (B, n)``."""
        return torch.take_along_dim(x, (frame.prefix + at.clamp(min=0))[..., None], 1)

    def _look(self, batch: dict, frame: Frame, source: Tensor, q: Tensor, k: Tensor) -> None:
        """Set ``self.look``: minus the log of the attention of names to their objects."""
        at, bits = batch["named_at"].long(), batch["named"].long()
        index = (frame.prefix + at.clamp(min=0))[:, None, :, None]
        words = torch.take_along_dim(q[:, 0], index, 2).float()  # (B, G, R, D)
        keys = k[:, 0, : frame.prefix].float()
        score = torch.einsum("bgrd,bpd->bgrp", words, keys) * q.shape[-1] ** -0.5
        seen = source >= 0
        owner = torch.take_along_dim(batch["owner"].flatten(1).long(), source.clamp(min=0), 1)
        meant = (bits[:, :, None] >> owner[:, None]) & 1 & seen[:, None].long()
        meant = meant.bool()[:, None].expand(-1, q.shape[2], -1, -1)
        if frame.views == TILED_VIEWS:
            # One head attends to the overview, whose positions cover the whole image, the other to
            # the tiles, which are sharper; an average over both would not be a position.
            overview = (source // 64 == 0)[:, None]
            meant = meant & torch.stack([overview, ~overview], 1)
        floor = torch.finfo(score.dtype).min
        every = score.masked_fill(~seen[:, None, None], floor).logsumexp(-1)
        right = score.masked_fill(~meant, floor).logsumexp(-1)
        counts = (at >= 0)[:, None] & meant.any(-1)
        self.look = (every - right)[counts].sum() / counts.sum().clamp(min=1)

    def _recall(self, recall: Tensor, frame: Frame, q: Tensor, k: Tensor) -> None:
        """Set ``self.recall``: loss of attention from the answer to the question's names."""
        b, n, _ = recall.shape
        at, names = recall[..., 0], recall[..., 1:].transpose(1, 2)  # (B, n), (B, 2, n)
        index = (frame.prefix + at.clamp(min=0))[:, None, :, None]
        asking = torch.take_along_dim(q[:, 0], index, 2).float()  # (B, G, n, D)
        score = torch.einsum("bgnd,bld->bgnl", asking, k[:, 0].float()) * q.shape[-1] ** -0.5
        slot = torch.repeat_interleave(
            torch.arange(n, device=q.device), torch.tensor(frame.slots, device=q.device)
        )
        token = torch.arange(slot.numel(), device=q.device)
        own = (slot == slot[at.clamp(min=0)][..., None]) & (token <= at[..., None])  # (B, n, S)
        seen = torch.cat([own.new_ones(b, n, frame.prefix), own], -1)
        score = score.masked_fill(~seen[:, None], -1e4).flatten(0, 2)
        live = (at >= 0)[:, None].expand(names.shape).flatten().float()
        loss = F.cross_entropy(
            score, (frame.prefix + names.clamp(min=0)).flatten(), reduction="none"
        )
        self.recall = (loss * live).sum() / live.sum().clamp(min=1)

    def _choose(self, choice: Tensor, frame: Frame, index: int, q: Tensor, k: Tensor) -> None:
        """Add to ``self.choose``: loss of attention, options to letters or answer to option."""
        b, n, _ = choice.shape
        letters, words, last = choice[..., :4], choice[..., 4:8], choice[..., 8:]

        def rows(x: Tensor, at: Tensor) -> Tensor:
            token = (frame.prefix + at.clamp(min=0)).view(b, *([1] * (x.ndim - 3)), -1, 1)
            return torch.take_along_dim(x, token, x.ndim - 2).float().unflatten(-2, (n, -1))

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
        self.choose = loss if self.choose is None else self.choose + loss

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
        self, batch: dict, frame: Frame, source: Tensor, index: int
    ) -> Callable[[Tensor, Tensor], None] | None:
        """What reads the queries and keys of a layer."""
        if index == LOOK_LAYER and "named" in batch:
            return partial(self._look, batch, frame, source)
        if index == RECALL_LAYER and "recall" in batch:
            return partial(self._recall, batch["recall"].long(), frame)
        if index in (LETTER_LAYER, CHOICE_LAYER) and "choice" in batch:
            return partial(self._choose, batch["choice"].long(), frame, index)
        return None

    def _supervise(self, batch: dict, frame: Frame, index: int, x: Tensor) -> None:
        """Set ``self.facts`` and ``self.compared`` after the layers that must know them."""
        recall = batch["recall"].long()
        if index == LOOK_LAYER:
            self.names = self._at(x, recall[..., 1:].flatten(1), frame)
        elif index in (RECALL_LAYER, CHOICE_LAYER):
            answers = self._at(x, recall[..., 0], frame)
            if index == CHOICE_LAYER:
                self.compared = self.heads.relation_loss(answers, batch["facts"])
            else:
                names = self.names.unflatten(1, (-1, 2))
                self.facts = self.heads.fact_loss(names, answers, batch["facts"])

    def text(
        self, batch: dict[str, Tensor], frame: Frame, patches: Tensor | None, noise: float
    ) -> Tensor:
        """Hidden states of the slots, (B, S, 256).

        ``patches (B, V * 64, 192)`` come from the encoder; None feeds the codes of the labels.
        """
        base = self.model.model
        lm = base.language_model
        b = batch["ids"].shape[0]
        table = lm.embed_tokens.weight
        if "keep" in batch:
            positions = batch["keep"].long()
        else:
            positions = torch.arange(len(frame.ids), device=table.device).expand(b, -1)
        source = frame.source[positions]
        pick = source.clamp(min=0)
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
        words = F.embedding(frame.ids[positions], table)
        newline = base.image_newline.to(table.dtype)
        prefix = torch.where((source == -2)[..., None], newline, words)
        if feats is not None:
            prefix = torch.where((source >= 0)[..., None], feats, prefix)
        x = torch.cat([prefix, F.embedding(batch["ids"].long(), table)], 1)
        position = torch.cat([positions, frame.offsets.expand(b, -1)], 1)
        cos, sin = lm.rotary_emb(x, position_ids=position)
        for index, layer in enumerate(lm.layers):
            peek = self._peek(batch, frame, source, index) if self.training else None
            x = layer(x, attention_mask=frame.mask, position_embeddings=(cos, sin), peek=peek)
            x = x[0] if isinstance(x, tuple) else x
            if self.training and "recall" in batch:
                self._supervise(batch, frame, index, x)
        return lm.norm(x[:, frame.prefix :])


def to_tensors(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Move the arrays of a batch to ``device``."""
    out = {}
    for name, array in batch.arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            tensor = tensor.pin_memory().to(device, non_blocking=True)
        out[name] = tensor
    return out
