"""Train `tiny` from scratch for a given time, on a CPU or a GPU; resumes a killed run.

Run as ``vlmfast train tiny`` or ``python -m vlmfast.train.tiny.training``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import signal
import sys
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.files import make_folder, open_to_append, replace_text, replacing
from vlmfast.core.help import examples
from vlmfast.core.progress import Progress
from vlmfast.errors import VLMFastError, check_memory

from . import data
from .parallel import Group, join, launch
from .schedule import SEEDS_PER_STEP, Plan, plan


class TrainingError(VLMFastError):
    """The training cannot start or resume with these options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vlmfast train tiny``."""
    parser.epilog = examples(
        "vlmfast train tiny --minutes 90 --out runs/tiny   # repeat it to resume",
        "vlmfast train tiny --smoke --out runs/smoke",
    )
    parser.add_argument("--out", default="runs/tiny", help="folder of checkpoint, log and model")
    parser.add_argument("--minutes", type=float, default=90.0, help="length of the training")
    parser.add_argument("--max-steps", type=int, default=0, help="number of steps; 0: by --minutes")
    parser.add_argument(
        "--stop-after", type=int, default=0, help="stop early after this step; 0: never"
    )
    parser.add_argument("--batch", type=int, default=32, help="images per step and process")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and images")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--processes", type=int, default=1, help="data-parallel processes (CPU only)"
    )
    parser.add_argument(
        "--workers", type=int, default=-1, help="processes that draw batches; 0: inline; -1: auto"
    )
    parser.add_argument("--save-every", type=float, default=180.0, help="seconds per checkpoint")
    parser.add_argument("--eval-every", type=float, default=600.0, help="seconds per evaluation")
    parser.add_argument("--compile", action="store_true", help="compile pointwise operations")
    parser.add_argument("--fresh", action="store_true", help="ignore a checkpoint in --out")
    parser.add_argument("--smoke", action="store_true", help="a few small steps of every phase")


class _Feed:
    """Prepares a few batches ahead of the training, in worker processes."""

    def __init__(self, workers: int, tokenizer: str) -> None:
        self.tokenizer = tokenizer
        self.queue: deque[tuple[Plan, Future | None]] = deque()
        self.pool: ProcessPoolExecutor | None = None
        if workers:
            # spawn: a forked child of a threaded torch process may hang
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(workers, mp_context=context)
        self.ahead = 2 * workers + 1 if workers else 1

    def submit(self, planned: Plan) -> None:
        future = None
        if self.pool is not None:
            future = self.pool.submit(data.make_batch, planned.spec, self.tokenizer)
        self.queue.append((planned, future))

    def get(self) -> tuple[Plan, data.Batch]:
        planned, future = self.queue.popleft()
        if future is None:
            return planned, data.make_batch(planned.spec, self.tokenizer)
        return planned, future.result()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


class Trainer:
    """Model, heads, optimizer and clock of one run."""

    def __init__(self, args: argparse.Namespace, group: Group | None = None) -> None:
        import torch

        from vlmfast.models.tiny.build import build_model
        from vlmfast.models.tiny.tokenizer import FastEncoder, build_tokenizer

        from . import blocks
        from .heads import DenseHeads
        from .network import Packed
        from .optim import Optimizer

        self.args = args
        self.group = group or Group()
        self.out = Path(args.out)
        make_folder(self.out)
        try:
            self.device = torch.device(args.device)
        except RuntimeError as error:
            raise TrainingError(f"--device {args.device} is not cpu or cuda") from error
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise TrainingError("--device cuda: torch finds no CUDA device")
        tokenizer = build_tokenizer()
        self.tokenizer = str(self.out / "tokenizer.json")
        if self.group.rank == 0:
            replace_text(self.tokenizer, tokenizer.to_str(pretty=True))
        model = build_model(args.seed)
        model.to(self.device, torch.bfloat16)  # type: ignore[arg-type]  # its wrapper hides self
        heads = DenseHeads(seed=args.seed).to(self.device)
        self.packed = Packed(model, heads, FastEncoder(tokenizer)).train()
        named = {n: p for n, p in self.packed.named_parameters() if p.requires_grad}
        self.optimizer = Optimizer(named)
        if args.compile:
            blocks.compile_ops()
        self.step, self.elapsed, self.saved_at, self.evaluated_at = 0, 0.0, 0.0, 0.0
        self.log = self.out / "log.jsonl"
        if self.checkpoint.exists() and not args.fresh:
            self.load()

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def load(self) -> None:
        import torch

        try:
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            seed = state["seed"]
            if seed == self.args.seed:
                self.optimizer.load_state_dict(state["optimizer"])
                self.step, self.elapsed = state["step"], state["elapsed"]
                self.saved_at, self.evaluated_at = self.elapsed, state["evaluated_at"]
        except Exception as error:  # any other file may raise anything
            check_memory(error)
            raise TrainingError(
                f"{self.checkpoint} is no checkpoint of this training ({type(error).__name__}); "
                "choose another --out, or start again with --fresh"
            ) from error
        if seed != self.args.seed:
            raise TrainingError(
                f"{self.checkpoint} was trained with seed {seed}, not "
                f"{self.args.seed}: use the same seed, or start again with --fresh"
            )

    def save(self) -> None:
        """Write the checkpoint and the averaged model, each atomically."""
        import torch

        from .export import export_state

        state = {
            "step": self.step,
            "elapsed": self.elapsed,
            "evaluated_at": self.evaluated_at,
            "seed": self.args.seed,
            "optimizer": self.optimizer.state_dict(),
        }
        with replacing(self.checkpoint) as file:
            torch.save(state, file)
        export_state(self.optimizer.ema, self.tokenizer, self.out / "model")
        self.saved_at = self.elapsed

    def progress(self, step: int) -> float:
        if self.args.max_steps:
            return min(1.0, step / self.args.max_steps)
        return min(1.0, self.elapsed / (60.0 * self.args.minutes))

    def plan(self, step: int, progress: float) -> Plan:
        """Plan a step; every process draws its own images."""
        planned = plan(step, progress, self.args.seed, self.args.batch)
        apart = self.group.rank * (SEEDS_PER_STEP // self.group.size)
        return replace(planned, spec=replace(planned.spec, seed=planned.spec.seed + apart))

    def loss(self, planned: Plan, batch: data.Batch) -> tuple[Any, dict[str, Any]]:
        """Compute the loss of one batch (0-d tensor), and further values to log."""
        import torch
        import torch.nn.functional as F

        from .network import to_tensors

        spec = planned.spec
        t = to_tensors(batch, self.device)
        packed = self.packed
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
        frame = packed.frame(spec.kind, spec.slots, spec.keep)
        packed.look = packed.choose = packed.recall = packed.facts = None
        hidden = packed.text(t, frame, None if planned.codes else patches, 0.08)
        target = t["targets"].long()
        chosen = target >= 0
        logits = (hidden[chosen] @ packed.model.lm_head.weight.T).float()
        each = F.cross_entropy(logits, target[chosen], reduction="none")
        slot = torch.repeat_interleave(
            torch.arange(len(spec.slots), device=self.device),
            torch.tensor(spec.slots, device=self.device),
        ).expand_as(target)[chosen]
        weight = torch.ones_like(each)
        if spec.kind != "text":
            weight[slot >= data.N_SHORT] = planned.choice
            weight[slot == len(spec.slots) - 1] = 0.25
        answer = (each * weight).sum() / weight.sum()
        info["answer"] = answer.detach()
        # Predicting the question trains the same look-ups as answering, many times per slot.
        asked = t["asked"].long()
        known = asked >= 0
        guess = (hidden[known] @ packed.model.lm_head.weight.T).float()
        question = F.cross_entropy(guess, asked[known])
        info["question"] = question.detach()
        total = total + planned.question * question
        if packed.look is not None:
            info["look"], info["recall"] = packed.look.detach(), packed.recall.detach()
            total = total + planned.look * (packed.look + 0.5 * packed.recall)
            info["facts"] = packed.facts.detach()
            info["compared"] = packed.compared.detach()
            total = total + planned.look * (0.4 * packed.facts + packed.compared)
        if packed.choose is not None:
            info["choose"] = packed.choose.detach()
            total = total + 0.5 * planned.look * packed.choose
        with torch.no_grad():
            right = (logits.argmax(-1) == target[chosen]).float()
            row = torch.arange(target.shape[0], device=self.device)[:, None].expand_as(target)
            cell = row[chosen] * len(spec.slots) + slot
            wrong = torch.zeros(target.shape[0] * len(spec.slots), device=self.device)
            wrong.index_add_(0, cell, 1 - right)
            info["slots"] = (wrong == 0).view(target.shape[0], -1).cpu().numpy()
        return total + answer, info

    def evaluate(self, images: int = 160, videos: int = 64) -> dict[str, dict[str, float]]:
        """Evaluate the averaged weights, then restore the trained ones."""
        import torch

        from .evaluation import evaluate

        with torch.no_grad():
            for n, p in self.optimizer.named.items():
                p.copy_(self.optimizer.ema[n])
            try:
                return evaluate(self.packed, self.tokenizer, images, videos)
            finally:
                for n, p in self.optimizer.named.items():
                    p.copy_(self.optimizer.master[n])

    def write(self, **line: Any) -> None:
        line = {"step": self.step, "minutes": round(self.elapsed / 60, 2), **line}
        with open_to_append(self.log) as f:
            f.write(json.dumps(line).encode() + b"\n")

    def train(self) -> None:
        """Train for the given time or number of steps."""
        import torch

        args, feed = self.args, _Feed(self.args.workers, self.tokenizer)
        is_main = self.group.rank == 0
        stop: list[int] = []
        old = signal.getsignal(signal.SIGTERM)
        if is_main:
            signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
        goal = args.max_steps or round(args.minutes * 60)
        bar = Progress(
            "train tiny",
            goal,
            "steps" if args.max_steps else "s",
            done=self.step if args.max_steps else round(self.elapsed),
            show=is_main,
        )
        submitted, tally = self.step, _Tally()
        clock = time.monotonic()
        try:
            while True:
                progress, stopped = self.group.agree(self.progress(self.step), bool(stop))
                if progress >= 1.0 or stopped:
                    break
                while submitted < self.step + feed.ahead:
                    ahead = self.progress(submitted) if args.max_steps else progress
                    feed.submit(self.plan(submitted, ahead))
                    submitted += 1
                planned, batch = feed.get()
                torch.manual_seed((args.seed << 24) + self.step * 64 + self.group.rank)
                loss, info = self.loss(planned, batch)
                loss.backward()
                self.group.average(self.optimizer.named)
                info["norm"] = self.optimizer.step(planned.lr)
                self.step += 1
                now = time.monotonic()
                self.elapsed, clock = self.elapsed + now - clock, now
                if args.stop_after and self.step >= args.stop_after:
                    break
                if not is_main:
                    continue
                tally.add(planned, batch, info)
                note = f"{planned.phase} {float(info['answer']):.3f}"
                bar.update(self.step if args.max_steps else round(self.elapsed), note)
                if self.step % 25 == 0:
                    self.write(phase=planned.phase, lr=round(planned.lr, 4), **tally.flush())
                if self.elapsed - self.evaluated_at > args.eval_every:
                    self.evaluated_at = self.elapsed
                    self.write(eval=_rounded(self.evaluate()))
                if self.elapsed - self.saved_at > args.save_every:
                    self.save()
        finally:
            bar.close()
            feed.close()
            signal.signal(signal.SIGTERM, old)
        if is_main:
            self.save()


def _rounded(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {k: {t: round(v, 3) for t, v in row.items()} for k, row in table.items()}


class _Tally:
    """Running means between two log lines; answers are split by type and by input."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def put(self, name: str, value: float) -> None:
        pair = self.sums.setdefault(name, [0.0, 0.0])
        pair[0] += value
        pair[1] += 1

    def add(self, planned: Plan, batch: data.Batch, info: dict[str, Any]) -> None:
        feed = "codes" if planned.codes else "pixels"
        feed = "text" if planned.spec.kind == "text" else feed
        slots = info.pop("slots")
        for t, good in zip(batch.arrays["types"].ravel(), slots.ravel(), strict=True):
            if t >= 0:
                kind = "video." if planned.spec.kind == "video" else ""
                self.put(f"{feed}.{kind}{data.TYPE_NAMES[t]}", float(good))
        for name, value in info.items():
            self.put(f"{feed}.answer" if name == "answer" else name, float(value))

    def flush(self) -> dict[str, float]:
        out = {n: round(a / b, 3) for n, (a, b) in sorted(self.sums.items())}
        self.sums.clear()
        return out


def _follow(args: argparse.Namespace, rank: int, meeting: str) -> None:
    """Entry point of the other processes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the first process decides when to stop
    group = join(rank, args.processes, meeting)
    Trainer(args, group).train()
    group.close()


def run(args: argparse.Namespace) -> int:
    """Train with the options ``args``; return the exit code."""
    if args.smoke:
        args.max_steps = args.max_steps or 10
        args.batch, args.workers = min(args.batch, 2), 0
    if not 0 < args.minutes < math.inf or args.batch < 1 or args.processes < 1:
        raise TrainingError("--minutes, --batch and --processes must be positive")
    if args.max_steps < 0 or args.stop_after < 0:
        raise TrainingError("--max-steps and --stop-after must be at least 0")
    if args.batch * args.processes > SEEDS_PER_STEP:
        raise TrainingError(f"a step takes at most {SEEDS_PER_STEP} images over all processes")
    if args.processes > 1 and args.device != "cpu":
        raise TrainingError("--processes above 1 needs --device cpu; a GPU uses one process")
    if args.processes > 1 and args.workers > 0:
        raise TrainingError(
            "--workers cannot be combined with --processes: each process draws its own images"
        )
    if args.workers < 0:
        args.workers = 0 if args.processes > 1 else 8 if args.device != "cpu" else 1
    group = launch(args.processes, _follow, args)
    trainer = Trainer(args, group)
    trainer.train()
    group.close()
    if trainer.progress(trainer.step) < 1.0:
        print(
            f"stopped early, at {trainer.progress(trainer.step):.0%}; repeat the command to resume"
        )
        return ExitCode.CUT_SHORT
    sizes = (4, 2) if args.smoke else (512, 256)
    table = _rounded(trainer.evaluate(*sizes))
    trainer.write(final=table)
    print(json.dumps(table, indent=1))
    return ExitCode.FINISHED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
