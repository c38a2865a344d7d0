"""Training of stages around a frozen model: the loop of ``vlmfast train atp`` and others.

A sample is a prompt with its answer. It runs through the engine as in inference, with the stage
active and with gradients. The loss is that of the answer plus the method's own terms
(`Training.loss`). Only the stage's own module is trained. A step is a function of the seed, the
step's number and the training's progress. Where progress is counted in steps, a killed run resumes
with identical results.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vlmfast.core.files import read_text, readable
from vlmfast.core.help import add_dtype, count, examples, within
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.stage import Stage
from vlmfast.core.training import Outcome, Training
from vlmfast.errors import MediaError

from .trainer import Trainer, TrainingError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vlmfast.api.vlm import VLM
    from vlmfast.engine.prefill import Inputs

LOG = logging.getLogger(__name__)

_SEEDS = 2**32  # seeds of one run; the next ``--seed`` starts after them


@dataclass
class Sample:
    """A question about ``media`` (the arguments of `VLM.ask`) with the answer to learn."""

    media: dict[str, Any]
    question: str
    answer: str


# --- options -------------------------------------------------------------------------------------


def trainable() -> list[str]:
    """Names of the methods that can be trained, except drafters."""
    known = {name: stage_class(name) for name in sorted(stage_names())}
    return [n for n, cls in known.items() if cls.trained and cls.protocol != "drafter"]


def training_class(name: str) -> type[Training]:
    """The training of a method: ``TRAINING`` in the module ``training`` of its package."""
    module = f"{stage_names()[name]}.training"
    try:
        return import_module(module).TRAINING
    except (ModuleNotFoundError, AttributeError) as error:
        raise TrainingError(f"{name} cannot be trained: {module} has no TRAINING") from error


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of ``vlmfast train NAME``."""
    parser.epilog = examples(
        f"vlmfast train {name} --steps 1000 --out runs/{name}",
        f"vlmfast train {name} --minutes 90 --device cuda   # repeat it to resume",
        f"vlmfast train {name} --model MODEL --data chats.json --media images --distill 0.5",
    )
    add_common(parser, out=f"runs/{name}", steps=1000, lr=1e-3, decay=0.01)
    about = "weight of the divergence from the full model"
    parser.add_argument("--distill", type=within(float, 0, 1), default=0.0, help=about)
    training_class(name).add_arguments(parser)


def add_common(
    parser: argparse.ArgumentParser, *, out: str, steps: int, lr: float, decay: float
) -> None:
    """Add the options that stages and drafters share, with these defaults."""
    add, some = parser.add_argument, within(float, 0)
    add("--model", default="tiny", help="tiny (shipped), a local folder or a hub id")
    add("--data", help="LLaVA-style JSON of conversations (default: drawn scenes)")
    add("--media", default=".", help="folder of the images and videos of --data")
    add("--num-frames", type=count, default=8, help="frames per video of --data")
    add("--out", default=out, help="folder of checkpoint, log and weights")
    add("--steps", type=count, default=steps, help="number of steps")
    add("--minutes", type=some, default=0.0, help="training time, instead of --steps; 0: by steps")
    about = "stop early after this step; 0: never"
    add("--stop-after", type=within(int, 0), default=0, help=about)
    add("--batch", type=count, default=8, help="samples per step, one after another")
    add("--lr", type=within(float, 0, above=True), default=lr, help="peak learning rate")
    add("--decay", type=some, default=decay, help="weight decay")
    about = "seed of samples and weights, 0 to 255"
    add("--seed", type=within(int, 0, 255), default=0, help=about)
    add("--device", default="cpu", help="cpu or cuda")
    add_dtype(parser)
    add("--save-every", type=some, default=120.0, help="seconds per checkpoint")
    add("--fresh", action="store_true", help="ignore a checkpoint in --out")


# Options that do not change the result, or name folders of one machine.
_LOCAL = {"out", "media", "answers", "device", "stop_after", "save_every", "fresh"}


def command_of(words: list[str], args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """A command with the options that differ from their defaults; of paths only the name."""
    for key, default in vars(parser.parse_args([])).items():
        value = getattr(args, key, default)
        if key in _LOCAL or value == default:
            continue
        if key in ("model", "data", "init"):
            value = _public(value)
        words = [*words, f"--{key.replace('_', '-')}"]
        if value is not True:
            words += map(str, value if isinstance(value, list | tuple) else [value])
    return shlex.join(words)


def _public(value: str) -> str:
    """A hub id or the name of a shipped model; of a path of this machine only its last part."""
    return Path(value).resolve().name if Path(value).exists() else value


# --- samples -------------------------------------------------------------------------------------


def drawn(modalities: tuple[str, ...]) -> Callable[[int], Sample]:
    """Drawn scenes: sample number n is a function of n."""
    from .lessons import lesson

    def sample(number: int) -> Sample:
        modality = modalities[number % len(modalities)]
        drawn = lesson(modality, number)
        if modality == "image":
            return Sample({"images": drawn.frames[0]}, drawn.question, drawn.answer)
        media = {"video": drawn.frames, "num_frames": len(drawn.frames)}
        return Sample(media, drawn.question, drawn.answer)

    return sample


def conversations(
    path: str | Path,
    media: str | Path,
    modalities: tuple[str, ...],
    num_frames: int,
    part: slice = slice(None),
) -> Callable[[int], Sample]:
    """Samples from a LLaVA-style JSON file, shuffled for each epoch.

    The file is a list of ``{"image" or "video": file, "conversations": [{"from": "human", "value":
    ...}, {"from": "gpt", "value": ...}, ...]}``. A sample is one random turn of an entry, as if it
    were the first. Entries without media are skipped, and of the others those outside ``part``.
    """
    with readable(f"--data {path}", TrainingError):
        entries = json.loads(read_text(path))
    kinds = list(dict.fromkeys(modalities))
    found: list[tuple[str, str, list[tuple[str, str]]]] = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        kind = next((m for m in kinds if isinstance(entry.get(m), str)), None)
        turns = entry.get("conversations")
        turns = turns if isinstance(turns, list) else []
        pairs = [
            (question, answer)
            for a, b in zip(turns[::2], turns[1::2], strict=False)
            if (question := _turn_text(a, "human")) and (answer := _turn_text(b, "gpt"))
        ]
        if kind is not None and pairs:
            found.append((kind, entry[kind], pairs))
    if not found:
        keys = " or ".join(f'"{kind}"' for kind in kinds)
        raise TrainingError(
            f"--data {path} has no conversation with {keys}; it must be a "
            'list of {"image": file, "conversations": [{"from": "human", "value": ...}, '
            '{"from": "gpt", "value": ...}]}'
        )
    total, found = len(found), found[part]
    if not found:
        raise TrainingError(f"--data {path} has too few conversations: {total}")
    first = [Path(media) / file for _, file, _ in found[:100]]
    if not any(file.exists() for file in first):
        raise TrainingError(
            f"--media {media} contains none of the first {len(first)} files of --data; "
            f"{first[0]} does not exist"
        )

    @lru_cache(maxsize=1)
    def shuffled(epoch: int) -> list[int]:
        order = list(range(len(found)))
        random.Random(f"epoch-{epoch}").shuffle(order)
        return order

    def sample(number: int) -> Sample:
        epoch, index = divmod(number, len(found))
        kind, file, pairs = found[shuffled(epoch)[index]]
        question, answer = random.Random(f"turn-{number}").choice(pairs)
        file = str(Path(media) / file)
        shown = {"images": file} if kind == "image" else {"video": file, "num_frames": num_frames}
        return Sample(shown, question, answer)

    return sample


def _turn_text(turn: Any, role: str) -> str:
    """Text of a turn of ``role``, without placeholders; empty for anything else."""
    if not isinstance(turn, dict) or turn.get("from") != role:
        return ""
    text = turn.get("value")
    if not isinstance(text, str):
        return ""
    return text.replace("<image>", "").replace("<video>", "").strip()


def inputs_of(vlm: VLM, sample: Sample) -> Inputs:
    """The prompt of a sample followed by its answer, as engine inputs."""
    from vlmfast.api.conversation import answer_ids
    from vlmfast.api.gradients import inputs_with
    from vlmfast.api.request import messages_of, render, tensors_of
    from vlmfast.core.recipe import Recipe

    prompt = render(vlm.adapter, messages_of(sample.question, **sample.media), Recipe())
    answer = answer_ids(vlm.adapter, prompt.text, sample.answer, end=True)
    return inputs_with(prompt, tensors_of(vlm.adapter, prompt), answer)


# --- forward passes ------------------------------------------------------------------------------


def run(vlm: VLM, inputs: Inputs, stage: Stage | None) -> tuple[Tensor, dict[str, Any], float]:
    """One forward pass with gradients.

    Returns
    -------
    logits : Tensor, float32, (A, V)
        One row for each token of the answer.
    notes : dict
        Notes of ``stage``.
    tokens : float
        See `Outcome`.
    """
    from vlmfast.api.gradients import forward
    from vlmfast.core.recipe import Recipe
    from vlmfast.engine.stats import Stats, Trace

    stats, recipe = Stats(), Recipe(() if stage is None else (stage,))
    prompt, logits = forward(vlm, inputs, recipe, stats, Trace())
    notes = {} if stage is None else prompt.notes.get(stage.name, {})
    return logits[0, :-1].float(), notes, stats.equivalent_tokens / stats.visual_tokens_in


def answer_loss(logits: Tensor, targets: Tensor, teacher: Tensor | None, distill: float) -> Tensor:
    """``(1 - distill) CE + distill KL``: of the answer, and from the full model's logits."""
    from torch.nn.functional import cross_entropy, kl_div

    loss = cross_entropy(logits, targets)
    if teacher is None:
        return loss
    divergence = kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True
    )
    return (1 - distill) * loss + distill * divergence


# --- the loop ------------------------------------------------------------------------------------


class StageTrainer(Trainer):
    """Model, module and optimizer of one run."""

    # Options that must not change when a run resumes, and those stored with the weights.
    fixed: ClassVar[tuple[str, ...]] = (
        "model", "data", "seed", "batch", "lr", "decay", "distill", "dtype", "num_frames",
    )  # fmt: skip
    told: ClassVar[tuple[str, ...]] = ("batch", "lr", "distill", "seed")
    max_grad_norm = 1.0  # largest norm of a step's gradient

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import torch

        from vlmfast.api.vlm import VLM
        from vlmfast.core.placement import usable

        given = ("steps", "minutes", "stop_after", "save_every")
        super().__init__(f"train {name}", args.out, **{key: getattr(args, key) for key in given})
        self.name, self.args = name, args
        self.device = usable(args.device)
        self.vlm = VLM.from_pretrained(args.model, device=self.device, dtype=args.dtype)
        self.vlm.model.requires_grad_(False).eval()
        sizes = self.sizes()
        self.training = training_class(name)(args, sizes)
        self.config = sizes | self.training.config()
        torch.manual_seed(args.seed)
        self.module: nn.Module = stage_class(name).build(self.config).float().to(self.device)
        self.module.train()
        self.optimizer = torch.optim.AdamW(
            self.training.groups(self.module, args.lr), betas=(0.9, 0.95), weight_decay=args.decay
        )
        for group in self.optimizer.param_groups:
            group["peak"] = group["lr"]
        self.sample = self.samples()
        self.sums: dict[str, list[float]] = {}  # of what is logged, with how many
        self.curve: list[dict[str, Any]] = []  # what was measured at some steps
        if not args.fresh:
            self.resume()

    def sizes(self) -> dict[str, Any]:
        """Sizes of the model that the module is built for."""
        return self.vlm.adapter.sizes()

    def samples(self) -> Callable[[int], Sample]:
        """The training samples, by number."""
        args, modalities = self.args, self.training.modalities
        if args.data:
            return conversations(args.data, args.media, modalities, args.num_frames)
        return drawn(modalities)

    def settings(self) -> dict[str, Any]:
        """Settings that must not change when a run resumes; plain values."""
        own = {key: getattr(self.args, key) for key in self.fixed} | self.training.about()
        return json.loads(json.dumps({"name": self.name, **own, "config": self.config}))

    def state(self) -> dict[str, Any]:
        module, optimizer = self.module.state_dict(), self.optimizer.state_dict()
        return {"curve": self.curve, "module": module, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curve = state["curve"]

    def export(self) -> None:
        """Write the weights, atomically."""
        from vlmfast.core.weights import StageWeights

        about: dict[str, Any] = {"model": _public(self.args.model), "command": self.command()}
        about |= {"steps": self.step, "minutes": round(self.elapsed / 60, 1)}
        about |= {key: getattr(self.args, key) for key in self.told}
        about |= self.training.about()
        about["data"] = Path(self.args.data).name if self.args.data else "drawn scenes"
        signature = self.vlm.adapter.signature()
        state, measured = self.module.state_dict(), tuple(self.tables())
        weights = StageWeights(self.name, self.config, signature, about, state, measured)
        weights.save_pretrained(self.out / "weights")
        LOG.info("%s: saved after %d steps", self.out, self.step)

    def tables(self) -> list[dict[str, Any]]:
        """Tables of what was measured during the training, see `StageWeights`."""
        return []

    def command(self) -> str:
        """The command of this training, without options that only concern this machine."""
        parser = argparse.ArgumentParser()
        add_arguments(parser, self.name)
        return command_of(["vlmfast", "train", self.name], self.args, parser)

    def rate(self) -> float:
        """Fraction of the peak learning rate: linear warm-up, then cosine decay to zero."""
        rise = min(1.0, (self.step + 1) / 20)
        return rise * 0.5 * (1 + math.cos(math.pi * self.progress))

    def sample_loss(self, number: int) -> tuple[Tensor, dict[str, float]]:
        """Loss of sample ``number`` of this run, and further values to log."""
        import torch

        rng = random.Random(f"sample-{self.args.seed}-{number}")
        torch.manual_seed(rng.getrandbits(62))
        inputs = inputs_of(self.vlm, self.sample(self.args.seed * _SEEDS + number))
        targets = inputs.tensors["input_ids"][0, -inputs.answer :]
        teacher, modules = None, self.vlm.adapter.modules
        if self.args.distill:
            with torch.no_grad():
                teacher, _, _ = run(self.vlm, inputs, None)
        outcomes = []
        for stage in self.training.stages(rng, self.progress):
            modules[stage.name, stage.weights, getattr(stage, "kind", "")] = self.module
            logits, notes, tokens = run(self.vlm, inputs, stage)
            loss = answer_loss(logits, targets, teacher, self.args.distill)
            outcomes.append(Outcome(stage, loss, notes, tokens))
        total, info = self.training.loss(self.module, outcomes, self.progress)
        answer = sum(float(o.answer.detach()) for o in outcomes) / len(outcomes)
        tokens = sum(o.tokens for o in outcomes) / len(outcomes)
        return total, {"loss": float(total.detach()), "answer": answer, "tokens": tokens, **info}

    def losses(self) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Parts of this step's loss, one after another; the loss is their sum."""
        for i in range(self.args.batch):
            try:
                loss, info = self.sample_loss(self.step * self.args.batch + i)
            except MediaError as error:  # one file of many
                self.write({"left_out": str(error)})
                continue
            yield loss / self.args.batch, info

    def update(self) -> None:
        import torch

        for loss, info in self.losses():
            loss.backward()
            for key, value in info.items():
                pair = self.sums.setdefault(key, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + value, pair[1] + 1
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * self.rate()
        if math.isfinite(float(norm)):  # one bad batch must not corrupt the momenta
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def stepped(self) -> str:
        if self.step % 10 == 0:
            self.write({key: round(a / n, 4) for key, (a, n) in self.sums.items()})
            self.sums.clear()
        return ""
