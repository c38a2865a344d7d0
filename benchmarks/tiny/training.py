"""Train `tiny` from scratch for a given time: ``python benchmarks/tiny/training.py --out RUN``.

Matrices use Muon, the rest AdamW; weights are float32 and computed with in bfloat16. Repeating the
command resumes a run that was killed. ``RUN/model`` is the averaged model, ``RUN/log.jsonl`` has
losses and accuracies on the scenes that are trained on. ``vlmfast eval shapes --model RUN/model``
measures the accuracy on others.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import batches
import numpy as np
import torch
import torch.nn.functional as F
from architecture import build_model
from folder import export_state
from heads import DenseHeads
from network import Packed, to_tensors
from schedule import Plan, plan
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vlmfast.core.exit_codes import ExitCode
from vlmfast.train.trainer import Trainer, TrainingError

Batch = dict[str, np.ndarray]
# Weights of the losses on what attention and hidden states must know.
PARTS = {"look": 1.0, "recall": 0.5, "facts": 0.4, "compared": 1.0, "choose": 0.5}
RATE, AVERAGE, MAX_NORM, NOISE = 3e-3, 0.99, 1.0, 0.08


def optimizers(packed: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices outside embeddings and heads, AdamW for the rest."""
    named = [(n, p) for n, p in packed.named_parameters() if p.requires_grad]
    others = ("embed", "heads.", "lm_head")
    plain = [n for n, p in named if p.ndim == 2 and not any(word in n for word in others)]
    gain = "language_model.norm.weight"  # starts at 0.1 and uses a tenth of the rate
    rest = [p for n, p in named if n not in plain and not n.endswith(gain)]
    slow = [p for n, p in named if n.endswith(gain)]
    adam = [{"params": rest}, {"params": slow, "scale": 0.1}]
    return [
        torch.optim.Muon(
            [p for n, p in named if n in plain],
            lr=RATE,
            weight_decay=0.05,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(adam, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def clip(packed: nn.Module) -> float:
    """Clip gradients and return their norm.

    The dense losses of the encoder are large: clipped together with the others they would dominate.
    """
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in packed.named_parameters():
        if p.grad is not None:
            parts["vision_tower" in name or "heads." in name].append(p)
    return math.hypot(*(float(nn.utils.clip_grad_norm_(of, MAX_NORM)) for of in parts.values()))


def losses(packed: Packed, planned: Plan, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
    """The loss of one batch (0-d), and further values to log."""
    spec, device = planned.spec, packed.model.lm_head.weight.device
    t = to_tensors(batch, device)
    total: Any = 0.0
    info: dict[str, Any] = {}
    patches = None
    if "pixels" in t:
        mid, last, patches = packed.patches(t["pixels"], spec.kind)
        cut = (lambda x: x[:, ::2]) if spec.kind != "image" else (lambda x: x)
        fields, place = cut(t["fields"]).flatten(0, 1), cut(t["place"]).flatten(0, 1)
        dense, info = packed.heads.dense_loss(mid[:, 1:], fields, place)
        bits, count = cut(t["bits"]).flatten(0, 1), cut(t["count"]).flatten(0, 1)
        cls = packed.heads.cls_loss(mid[:, 0], last[:, 0], bits, count)
        total = planned.dense * (dense + cls)
        info = {"dense": dense.detach(), "cls": cls.detach(), **info}
    hidden = packed.text(t, spec.slots, None if planned.codes else patches, NOISE)
    target = t["targets"].long()
    chosen = target >= 0
    logits = (hidden[chosen] @ packed.model.lm_head.weight.T).float()
    each = F.cross_entropy(logits, target[chosen], reduction="none")
    lengths = torch.tensor(spec.slots, device=device)
    slot = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    slot = slot.expand_as(target)[chosen]
    weight = torch.ones_like(each)
    if spec.kind != "text":
        weight[slot >= batches.N_SHORT] = planned.choice
        weight[slot == len(spec.slots) - 1] = 0.25
    answer = (each * weight).sum() / weight.sum()
    # Predicting the question trains the same look-ups as answering, many times per slot.
    asked = t["asked"].long()
    known = asked >= 0
    guess = (hidden[known] @ packed.model.lm_head.weight.T).float()
    question = F.cross_entropy(guess, asked[known])
    total = total + answer + planned.question * question
    info |= {"answer": answer.detach(), "question": question.detach()}
    for name, part in PARTS.items():
        if name in packed.found:
            total = total + planned.look * part * packed.found[name]
    info |= {name: value.detach() for name, value in packed.found.items()}
    with torch.no_grad():
        row = torch.arange(len(target), device=device)[:, None].expand_as(target)[chosen]
        wrong = torch.zeros(len(target), len(spec.slots), device=device)
        wrong.index_put_((row, slot), (logits.argmax(-1) != target[chosen]).float(), True)
        info["slots"] = (wrong == 0).cpu().numpy()
    return total, info


class TinyTrainer(Trainer):
    """Model, heads and optimizers of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(
            "train tiny",
            args.out,
            steps=args.max_steps,
            minutes=0 if args.max_steps else args.minutes,
            stop_after=0,
            save_every=args.save_every,
        )
        self.args = args
        heads = DenseHeads(seed=args.seed)
        self.packed = Packed(build_model(args.seed), heads).train()
        self.packed.to(args.device)
        average = get_ema_multi_avg_fn(AVERAGE)
        self.average = AveragedModel(self.packed, multi_avg_fn=average)
        self.optimizers, self.tally = optimizers(self.packed), Tally()
        if not args.fresh:
            self.resume()

    def settings(self) -> dict[str, Any]:
        return {"seed": self.args.seed}

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.packed.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.packed.load_state_dict(state["weights"])
        self.average.load_state_dict(state["average"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)

    def export(self) -> None:
        """Write the averaged model, atomically."""
        export_state(self.average.state_dict(), self.out / "model")

    def update(self) -> None:
        planned = plan(self.step, self.progress, self.args.seed, self.args.batch)
        batch = batches.make_batch(planned.spec)
        self.last = planned, self.learn(planned, batch)
        self.tally.add(planned, batch, self.last[1])

    def learn(self, planned: Plan, batch: Batch) -> dict[str, Any]:
        """One step; a batch whose gradients are not finite changes nothing."""
        torch.manual_seed((self.args.seed << 24) + self.step * 64)
        with torch.autocast(self.args.device, torch.bfloat16):
            loss, info = losses(self.packed, planned, batch)
        loss.backward()
        info["norm"] = clip(self.packed)
        if math.isfinite(info["norm"]):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = RATE * planned.lr * group.get("scale", 1.0)
                optimizer.step()
            self.average.update_parameters(self.packed)
        self.packed.zero_grad()
        return info

    def stepped(self) -> str:
        planned, info = self.last
        if self.step % 25 == 0:
            about = {"phase": planned.phase, "lr": round(planned.lr, 4)}
            self.write(about | self.tally.flush())
        return f"{planned.phase} {float(info['answer']):.3f}"


class Tally:
    """Running means between two log lines; answers are split by type and by input."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def add(self, planned: Plan, batch: Batch, info: dict[str, Any]) -> None:
        feed = "codes" if planned.codes else "pixels"
        feed = "text" if planned.spec.kind == "text" else feed
        slots = info.pop("slots")
        for t, good in zip(batch["types"].ravel(), slots.ravel(), strict=True):
            kind = "video." if planned.spec.kind == "video" else ""
            if t >= 0:
                name = f"{feed}.{kind}{batches.TYPE_NAMES[t]}"
                self.sums.setdefault(name, []).append(float(good))
        for name, value in info.items():
            name = f"{feed}.answer" if name == "answer" else name
            self.sums.setdefault(name, []).append(float(value))

    def flush(self) -> dict[str, float]:
        found = {name: round(sum(of) / len(of), 3) for name, of in sorted(self.sums.items())}
        self.sums.clear()
        return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", default="runs/tiny", help="folder of checkpoint, log and model")
    add("--minutes", type=float, default=90.0, help="length of the training")
    add("--max-steps", type=int, default=0, help="number of steps; 0: by --minutes")
    add("--batch", type=int, default=32, help="images per step")
    add("--seed", type=int, default=0, help="seed of weights and images")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--save-every", type=float, default=180.0, help="seconds per checkpoint")
    add("--fresh", action="store_true", help="ignore a checkpoint in --out")
    args = parser.parse_args(argv)
    if not 0 < args.minutes < math.inf or not 0 < args.batch <= 128:
        parser.error("--minutes must be positive, and --batch from 1 to 128")
    if args.max_steps < 0:
        parser.error("--max-steps must be at least 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        trainer = TinyTrainer(args)
    except TrainingError as error:
        print(error, file=sys.stderr)
        return ExitCode.USER_ERROR
    trainer.train()
    done = trainer.progress
    if done < 1.0:
        print(f"stopped early, at {done:.0%}; repeat the command to resume")
        return ExitCode.CUT_SHORT
    return ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
