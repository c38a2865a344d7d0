"""The packed training forward pass over the stock modules of `tiny`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlavaNextForConditionalGeneration

from vlmfast.models.tiny.build import vision_core

from . import blocks
from .data import Batch, FastEncoder, Layout, make_layout
from .heads import DenseHeads

TILED_VIEWS = 5
ATTENTION = "vlmfast_tiny_train"
LETTER_LAYER, LOOK_LAYER, RECALL_LAYER, CHOICE_LAYER = 1, 2, 3, 4


class _Attend(torch.autograd.Function):
    """Explicit ``softmax(q k' + mask) v``.

    On CPU in bf16 this is several times faster in the backward than the fused kernel at the short
    lengths trained here.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:  # q (N, G, Q, D); k, v (N, K, D)
        n, g, lq, d = q.shape
        q = (q * scale).reshape(n, g * lq, d)
        scores = torch.bmm(q, k.transpose(1, 2)).view(n, g, lq, -1)
        if mask is not None:
            scores += mask
        p = torch.softmax(scores, -1).view(n, g * lq, -1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.shape = scale, (n, g, lq, d)
        return torch.bmm(p, v).view(n, g, lq, d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        n, g, lq, d = ctx.shape
        grad = grad.reshape(n, g * lq, d)
        gv = torch.bmm(p.transpose(1, 2), grad)
        gp = torch.bmm(grad, v.transpose(1, 2))
        gs = (
            blocks.OPS["softmax_grad"](p, gp)
            if p.dtype == torch.bfloat16
            else (torch._softmax_backward_data(gp, p, -1, p.dtype))
        )
        gq = torch.bmm(gs, k).view(ctx.shape) * ctx.scale
        gk = torch.bmm(gs.transpose(1, 2), q)
        return gq, gk, gv, None, None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    b, h, lq, d = query.shape
    kv = key.shape[1]
    scale = scaling if scaling is not None else d**-0.5
    if query.device.type == "cuda":
        out = F.scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scale, enable_gqa=h != kv
        )
        return out.transpose(1, 2), None
    out = _Attend.apply(
        query.reshape(b * kv, h // kv, lq, d),
        key.reshape(b * kv, -1, d),
        value.reshape(b * kv, -1, d),
        attention_mask,
        scale,
    )
    return out.view(b, h, lq, d).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass
class Frame:
    """Constants of one layout on the device: prefix ids, sources, slot offsets, masks."""

    ids: Tensor
    source: Tensor
    views: int
    offsets: Tensor
    masks: tuple[Tensor, ...]
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
    """Runs batches of :func:`vlmfast.train.tiny.data.make_batch` through the model."""

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
        self._frames: dict = {}
        self._layouts: dict[str, Layout] = {}
        model.set_attn_implementation({"text_config": ATTENTION, "vision_config": ATTENTION})

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
                self._masks(prefix, slots),
                prefix,
                slots,
            )
        return self._frames[key]

    def _masks(self, prefix: int, slots: tuple[int, ...]) -> tuple[Tensor, ...]:
        weight = self.model.lm_head.weight
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            return blocks.causal_mask(prefix), blocks.own_mask(slots)
        return (packed_mask(prefix, slots).to(weight),)

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
        if len(frame.masks) == 2:
            rope = cos[:, :, None], sin[:, :, None]
            for index, layer in enumerate(lm.layers):
                peek = None
                if self.training and index == LOOK_LAYER and "named" in batch:
                    peek = partial(self._look, batch, frame, source)
                elif self.training and index == RECALL_LAYER and "recall" in batch:
                    peek = partial(self._recall, batch["recall"].long(), frame)
                elif self.training and index in (LETTER_LAYER, CHOICE_LAYER) and "choice" in batch:
                    peek = partial(self._choose, batch["choice"].long(), frame, index)
                x = blocks.language_block(
                    layer, x, rope, frame.prefix, frame.slots, frame.masks, peek
                )
                if self.training and "recall" in batch:
                    if index == LOOK_LAYER:
                        names = self._at(x, batch["recall"].long()[..., 1:].flatten(1), frame)
                    elif index == RECALL_LAYER:
                        answers = self._at(x, batch["recall"].long()[..., 0], frame)
                        self.facts = self.heads.fact_loss(
                            names.unflatten(1, (-1, 2)), answers, batch["facts"]
                        )
                    elif index == CHOICE_LAYER:
                        answers = self._at(x, batch["recall"].long()[..., 0], frame)
                        self.compared = self.heads.relation_loss(answers, batch["facts"])
        else:
            for layer in lm.layers:
                x = layer(x, attention_mask=frame.masks[0], position_embeddings=(cos, sin))
                x = x[0] if isinstance(x, tuple) else x
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
