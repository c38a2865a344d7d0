"""Muon for matrices, AdamW for the rest, fp32 masters of bf16 weights, and a weight average."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of ``g (N, rows, cols)`` towards 1."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.775 * a + 2.0315 * (a @ a)) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Optimizer:
    """Optimizer over named parameters, with an exponential average of the weights.

    Parameters
    ----------
    named : dict of str to torch.nn.Parameter
        Trained parameters. Matrices outside embeddings and heads use Muon, the rest AdamW.
    lr : float
        Peak learning rate of both optimizers.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        lr: float = 3e-3,
        momentum: float = 0.95,
        decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.98),
        average: float = 0.99,
    ) -> None:
        self.named, self.lr, self.momentum, self.decay = named, lr, momentum, decay
        self.betas, self.average, self.steps = betas, average, 0
        self.master = {n: p.detach().float().clone() for n, p in named.items()}
        self.ema = {n: m.clone() for n, m in self.master.items()}
        self.groups: dict[tuple[int, ...], list[str]] = {}
        self.adam: list[str] = []
        for name, p in named.items():
            plain = p.ndim == 2 and not any(w in name for w in ("embed", "heads.", "lm_head"))
            if plain:
                self.groups.setdefault(tuple(p.shape), []).append(name)
            else:
                self.adam.append(name)
        # gains that start at 0.1 use a tenth of the rate
        self.rates = {n: 0.1 for n in named if n.endswith("language_model.norm.weight")}
        self.first = {n: torch.zeros_like(m) for n, m in self.master.items()}
        self.second = {n: torch.zeros_like(self.master[n]) for n in self.adam}

    @torch.no_grad()
    def step(self, scale: float, max_norm: float = 1.0) -> float:
        """Apply the gradients at ``scale`` times the peak rate; return the gradient norm."""
        self.steps += 1
        live = {n: p.grad.float() for n, p in self.named.items() if p.grad is not None}
        norms = {n: float(g.norm()) for n, g in live.items()}
        norm = math.hypot(*norms.values())
        if not math.isfinite(norm):  # one bad batch must not corrupt the momenta
            for p in self.named.values():
                p.grad = None
            return float("nan")
        # The encoder's dense losses have large gradients: clipped together, they would dominate.
        factor: dict[str, float] = {}
        for vision in (True, False):
            part = [n for n in norms if ("vision_tower" in n or "heads." in n) == vision]
            size = math.hypot(*(norms[n] for n in part)) if part else 0.0
            factor |= dict.fromkeys(part, min(1.0, max_norm / (size + 1e-6)))
        lr = self.lr * scale
        for shape, names in self.groups.items():
            names = [n for n in names if n in live]
            if not names:
                continue
            g = torch.stack([live[n] * factor[n] for n in names])
            m = torch.stack([self.first[n] for n in names])
            m.mul_(self.momentum).add_(g)
            update = newton_schulz(g + self.momentum * m) * (0.2 * max(shape) ** 0.5)
            for k, n in enumerate(names):
                self.first[n].copy_(m[k])
                self.master[n].mul_(1 - lr * self.decay).add_(update[k], alpha=-lr)
        b1, b2 = self.betas
        for n in self.adam:
            if n not in live:
                continue
            g = live[n] * factor[n]
            self.first[n].lerp_(g, 1 - b1)
            self.second[n].lerp_(g * g, 1 - b2)
            c1, c2 = 1 - b1**self.steps, 1 - b2**self.steps
            self.master[n].addcdiv_(
                self.first[n],
                (self.second[n] / c2).sqrt_().add_(1e-8),
                value=-lr * self.rates.get(n, 1.0) / c1,
            )
        keep = min(self.average, (1 + self.steps) / (10 + self.steps))
        for n, p in self.named.items():
            p.copy_(self.master[n])
            p.grad = None
            self.ema[n].lerp_(self.master[n], 1 - keep)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "master": self.master,
            "ema": self.ema,
            "first": self.first,
            "second": self.second,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for part in ("master", "ema", "first", "second"):
            mine = getattr(self, part)
            for n, value in state[part].items():
                mine[n].copy_(value)
        for n, p in self.named.items():
            p.copy_(self.master[n])
