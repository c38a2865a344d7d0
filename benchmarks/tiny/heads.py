"""Dense supervision of the vision encoder, used in training only.

Every label has a fixed code, orthogonal to all others, in the space of ``hidden[-2]``. A patch is
trained to represent the sum of the codes of its labels. The same sums can be fed to the language
model instead of encoded patches: encoder and language model learn in parallel and then fit
together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from labels import CLS_BITS, CLS_COUNTS, FIELDS
from references import FACT_CLASSES, FACTS, UNKNOWN
from torch import Tensor, nn

LANGUAGE_WIDTH = 256
CODE_NORM = 3.0
PLACE_NORM = 4.0
FIELD_WEIGHT = {
    "shape": 1.0,
    "color": 1.0,
    "size": 0.5,
    "tex": 0.5,
    "char": 3.0,
    "centre": 0.5,
    "row": 0.25,
    "col": 0.25,
    "view": 0.25,
}


COMPARED = {"x": 0.1, "y": 0.1, "appear": 0.5}
"""Facts compared between two named objects, and the least difference that counts."""


class DenseHeads(nn.Module):
    """Tied label codes for patches, and linear heads for the class token."""

    codes: Tensor
    starts: Tensor

    def __init__(self, width: int = 192, seed: int = 0) -> None:
        super().__init__()
        n = sum(FIELDS.values()) + 2
        generator = torch.Generator().manual_seed(seed)
        basis, _ = torch.linalg.qr(torch.randn(width, n, generator=generator))
        codes = basis.T.contiguous()
        codes[:-2] *= CODE_NORM
        codes[-2:] *= PLACE_NORM
        self.register_buffer("codes", codes)  # (n, width); the last two are x and y
        self.scale = nn.Parameter(torch.full((len(FIELDS),), 6.0))
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.cls_mid = nn.Linear(width, CLS_BITS + CLS_COUNTS)
            self.cls_last = nn.Linear(width, CLS_BITS + CLS_COUNTS)
            for head in (self.cls_mid, self.cls_last):
                nn.init.normal_(head.weight, std=0.02)
                nn.init.zeros_(head.bias)
            outputs = 3 + sum(FACT_CLASSES.values())
            self.name_facts = nn.Linear(LANGUAGE_WIDTH, outputs)
            self.answer_facts = nn.Linear(LANGUAGE_WIDTH, 2 * outputs)
            self.relations = nn.Linear(LANGUAGE_WIDTH, len(COMPARED))
        starts, start = [], 0
        for classes in FIELDS.values():
            starts.append(start)
            start += classes
        self.register_buffer("starts", torch.tensor(starts))

    def encode(self, fields: Tensor, place: Tensor) -> Tensor:
        """Sum the codes of labels: ``fields (..., 9)``, ``place (..., 2)`` to ``(..., width)``."""
        index = fields.long() + self.starts
        table = self.codes[:-2]
        out = place.to(table) @ self.codes[-2:]
        for k in range(index.shape[-1]):
            out = out + F.embedding(index[..., k], table)
        return out

    def dense_loss(self, hidden: Tensor, fields: Tensor, place: Tensor) -> tuple[Tensor, dict]:
        """Loss of patches.

        Parameters
        ----------
        hidden : torch.Tensor
            ``hidden[-2]`` without the class token, shape (N, 64, width).
        fields, place
            Labels, shapes (N, 64, 9) and (N, 64, 2).

        Returns
        -------
        torch.Tensor
            The weighted loss.
        dict
            Foreground accuracy per field (0-d tensors).
        """
        hidden = hidden.float()
        read = hidden @ self.codes.T / CODE_NORM**2
        shown = (fields[..., 0] > 0).float()
        weight = shown + 0.1
        weight = weight / weight.sum()
        total, info = hidden.new_zeros(()), {}
        start = 0
        for k, (name, classes) in enumerate(FIELDS.items()):
            logits = read[..., start : start + classes] * self.scale[k]
            label = fields[..., k].long()
            loss = F.cross_entropy(logits.flatten(0, -2), label.flatten(), reduction="none")
            w = weight
            if name == "char":
                w = (label > 0).float() + 0.02
                w = w / w.sum()
            elif name in ("centre", "view"):  # an empty patch does not show its scale
                w = shown / shown.sum().clamp(min=1)
            total = total + FIELD_WEIGHT[name] * (loss.view_as(w) * w).sum()
            with torch.no_grad():
                mask = label > 0 if name == "char" else shown > 0
                right = (logits.argmax(-1) == label) & mask
                info[name] = right.sum() / mask.sum().clamp(min=1)
            start += classes
        target = self.encode(fields, place)
        error = ((hidden - target) ** 2).mean(-1)
        total = total + 2.0 * (error * weight).sum()
        where = hidden @ self.codes[-2:].T / PLACE_NORM**2
        gap = (where - place.float()).abs().sum(-1)
        total = total + 2.0 * (gap * weight).sum()
        info["place"] = (gap.detach() * shown).sum() / shown.sum().clamp(min=1) / 2
        info["fit"] = (error.detach() * weight).sum()
        return total, info

    def cls_loss(self, mid: Tensor, last: Tensor, bits: Tensor, count: Tensor) -> Tensor:
        """Loss of the class token at ``hidden[-2]`` and at the last block, both (N, width)."""
        total = mid.new_zeros((), dtype=torch.float32)
        for head, hidden in ((self.cls_mid, mid), (self.cls_last, last)):
            out = head(hidden.float())
            bit = F.binary_cross_entropy_with_logits(out[:, :CLS_BITS], bits.float())
            total = total + 8.0 * bit + 0.5 * F.cross_entropy(out[:, CLS_BITS:], count.long())
        return total

    def fact_loss(self, names: Tensor, answers: Tensor, known: Tensor) -> Tensor:
        """Loss of the facts of named objects.

        Parameters
        ----------
        names : torch.Tensor
            Hidden states at the names, (B, S, 2, width).
        answers : torch.Tensor
            Hidden states at the answering positions, (B, S, width).
        known : torch.Tensor
            (B, S, 2, 9), see `references.facts`.
        """

        def even(x: Tensor) -> Tensor:
            return F.rms_norm(x.float(), x.shape[-1:])

        output = torch.stack(
            [
                self.name_facts(even(names)),
                self.answer_facts(even(answers)).unflatten(-1, (2, -1)),
            ]
        ).flatten(1, 3)
        known = known.flatten(0, 2).expand(2, -1, -1)
        total = output.new_zeros(())
        at = 0
        for k, name in enumerate(FACTS):
            want = known[..., k]
            live = want > UNKNOWN + 1
            classes = FACT_CLASSES.get(name, 1)
            got = output[..., at : at + classes]
            at += classes
            if not live.any():
                continue
            if name in FACT_CLASSES:
                total = total + F.cross_entropy(got[live], want[live].long())
            elif name == "present":
                total = total + F.binary_cross_entropy_with_logits(got[live][:, 0], want[live])
            else:
                total = total + 2.0 * F.smooth_l1_loss(got[live][:, 0], want[live], beta=0.1)
        return total

    def relation_loss(self, answers: Tensor, known: Tensor) -> Tensor:
        """Loss of which of two named objects is further left, higher and earlier.

        ``answers (B, S, width)`` and ``known (B, S, 2, 9)`` as in :meth:`fact_loss`.
        """
        output = self.relations(F.rms_norm(answers.float(), answers.shape[-1:]))
        total = output.new_zeros(())
        for k, (name, least) in enumerate(COMPARED.items()):
            first, last = known[..., FACTS.index(name)].unbind(-1)
            gap = last - first
            live = (first > UNKNOWN + 1) & (last > UNKNOWN + 1) & (gap.abs() > least)
            if live.any():
                total = total + F.binary_cross_entropy_with_logits(
                    output[..., k][live], (gap[live] > 0).float()
                )
        return total
