"""Teacher-forced evaluation on held-out seeds, all questions of an image in one forward pass."""

from __future__ import annotations

import torch

from vlmfast.scenes.vocabulary import EVAL_SEED_START

from .data import TYPE_NAMES, Spec, make_batch
from .network import Packed, to_tensors


@torch.no_grad()
def evaluate(
    packed: Packed,
    tokenizer_path: str,
    images: int = 160,
    videos: int = 64,
    start: int = EVAL_SEED_START,
    batch: int = 16,
) -> dict[str, dict[str, float]]:
    """Measure per-type accuracy.

    An answer is correct where each of its tokens is the most likely one, which is equivalent to
    greedy decoding returning exactly this answer. Captions are scored by token.

    Returns
    -------
    dict
        ``image`` and ``video`` tables: accuracy per type, and ``mean`` over the question types.
    """
    was = packed.training
    packed.eval()
    device = packed.model.lm_head.weight.device
    out: dict[str, dict[str, float]] = {}
    for kind, total in (("image", images), ("video", videos)):
        right: dict[str, float] = {}
        seen: dict[str, float] = {}
        for first in range(0, total, batch):
            spec = Spec(kind, start + first, min(batch, total - first), evaluation=True)
            made = make_batch(spec, tokenizer_path)
            tensors = to_tensors(made, device)
            frame = packed.frame(kind, spec.slots, 0)
            patches = packed.patches(tensors["pixels"], kind)[2]
            hidden = packed.text(tensors, frame, patches, 0.0)
            guess = (hidden @ packed.model.lm_head.weight.T).argmax(-1)
            target = tensors["targets"].long()
            ok = (guess == target) | (target < 0)
            at = 0
            for k, length in enumerate(spec.slots):
                part, wanted = ok[:, at : at + length], target[:, at : at + length] >= 0
                for b, t in enumerate(made.arrays["types"][:, k]):
                    if t < 0:
                        continue
                    name = TYPE_NAMES[t]
                    if name == "caption":
                        n = float(wanted[b].sum())
                        hit = float((part[b] & wanted[b]).sum())
                    else:
                        n, hit = 1.0, float(part[b].all())
                    right[name] = right.get(name, 0.0) + hit
                    seen[name] = seen.get(name, 0.0) + n
                at += length
        table = {t: right[t] / seen[t] for t in TYPE_NAMES if t in seen}
        types = [v for t, v in table.items() if t != "caption"]
        out[kind] = {**table, "mean": sum(types) / max(1, len(types))}
    packed.train(was)
    return out
