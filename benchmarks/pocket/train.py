"""Train projector and adapter on drawn scenes: ``python benchmarks/pocket/train.py PARTS RUN``.

===========  ===================================================================================
patches      The vision tower encodes the layouts once; files in ``RUN`` keep its output.
stage ``a``  The projector alone. A patch shall become the decoder's embedding of the name of what
             it shows, plus a direction for its place. The decoder does not run.
stage ``b``  The projector and LoRA weights of the decoder, on answers to questions, from random
             subsets of the patches.
===========  ===================================================================================

A run that was interrupted continues when the command is repeated. ``RUN/a`` and ``RUN/b`` have the
checkpoint of each stage, and ``log.jsonl`` with loss and accuracy. ``RUN/trained.safetensors`` are
the weights, for ``build.py``. The ``check`` values of stage ``b`` are of scenes that are not
trained on, given the right beginning of each answer.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import build
import numpy as np
import objects
import torch
from build import Pocket, prompt
from patches import BACKGROUND, Patches, loader
from scenes import CELLS, GRID, KINDS, Question, questions
from torch import Tensor, nn
from torch.nn import functional as F

from vlmfast.core.help import count
from vlmfast.train.trainer import Trainer, TrainingError

IGNORED = -100  # label of tokens without loss
WARM_UP, DECAY = 40, 0.2  # steps, and the share of the steps at whose end the rate is zero


@dataclass(frozen=True)
class Settings:
    """What must not change while a run continues.

    Parameters
    ----------
    size : int
        Height and width of images in pixels.
    batch : int
        Layouts in a step of stage ``b``.
    questions : int
        Questions about each of them.
    place : float
        Length of the direction for a place, relative to the mean length of a name's embedding.
    seed : int
    """

    size: int = 224
    batch: int = 16
    questions: int = 6
    place: float = 0.3
    seed: int = 0


@dataclass
class Batch:
    """Prompts of several layouts, each with questions that do not attend to one another.

    Parameters
    ----------
    features : Tensor
        Output of the tower, (rows, patches, width).
    ids : Tensor
        Tokens after the patches, (rows, tokens).
    positions : Tensor
        Of the begin token, the patches and the tokens, (rows, length).
    segments : Tensor
        0 for the begin token and the patches, the number of a question from 1 for its tokens, and
        -1 for padding, (rows, length).
    labels : Tensor
        Tokens of the answers, -100 elsewhere, (rows, length).
    asked : list of Question
        In the order of the answers in ``labels``.
    """

    features: Tensor
    ids: Tensor
    positions: Tensor
    segments: Tensor
    labels: Tensor
    asked: list[Question]


def batch_of(
    pocket: Pocket,
    features: Sequence[np.ndarray],
    asked: Sequence[Sequence[Question]],
    kept: Sequence[np.ndarray],
    keep_positions: bool,
) -> Batch:
    """A batch of layouts.

    Parameters
    ----------
    pocket : Pocket
    features : sequence of np.ndarray
        All patches of every layout, (patches, width).
    asked : sequence of sequence of Question
    kept : sequence of np.ndarray
        Which patches enter, the same number of each layout, ascending.
    keep_positions : bool
        Whether tokens have the positions that they have in the prompt with all patches.
    """
    ids, labels, positions, segments = [], [], [], []
    for row, (patches, chosen) in enumerate(zip(features, kept, strict=True)):
        image = 1 + chosen if keep_positions else np.arange(1, 1 + len(chosen))
        start = 1 + (len(patches) if keep_positions else len(chosen))
        at, part = [0, *image.tolist()], [0] * (1 + len(chosen))
        tokens: list[int] = []
        wanted = [IGNORED] * (1 + len(chosen))
        for number, of in enumerate(asked[row], 1):
            head = pocket.ids(prompt(of.text))
            answer = pocket.ids(f" {of.answer}") + pocket.ids("\n")
            length = len(head) + len(answer)
            tokens += head + answer
            wanted += [IGNORED] * len(head) + answer
            at += range(start, start + length)
            part += [number] * length
        ids.append(tokens)
        labels.append(wanted)
        positions.append(at)
        segments.append(part)
    chosen_features = np.stack([rows[at] for rows, at in zip(features, kept, strict=True)])
    return Batch(
        torch.from_numpy(chosen_features),
        _padded(ids, 0),
        _padded(positions, 0),
        _padded(segments, -1),
        _padded(labels, IGNORED),
        [of for row in asked for of in row],
    )


def _padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def masks(batch: Batch, window: int | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Additive attention masks by the type of a layer, each (rows, 1, length, length).

    A token attends to the begin token, the patches, and earlier tokens of its own question.
    """
    segments, positions = batch.segments, batch.positions
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    shared = segments[:, None, :] == 0
    allowed = causal & (shared | (segments[:, None, :] == segments[:, :, None]))
    found = {"full_attention": allowed}
    if window is not None:
        found["sliding_attention"] = allowed & (
            positions[:, :, None] - positions[:, None, :] < window
        )
    least = torch.finfo(dtype).min
    return {
        name: torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, least)[
            :, None
        ]
        for name, mask in found.items()
    }


def answer_loss(pocket: Pocket, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the answers.

    Returns
    -------
    loss : Tensor
        Mean over the tokens of answers.
    right : Tensor
        Whether the most likely token is right at all tokens of an answer, bool, one for each
        question.
    """
    model, config = pocket.model, pocket.decoder.config
    device = model.get_input_embeddings().weight.device
    batch = Batch(
        *(getattr(batch, name).to(device) for name in Batch.__annotations__ if name != "asked"),
        batch.asked,
    )
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    # Autocast keeps its casts of trainable weights while it is open: one around the whole loop
    # would train against the first weights.
    with torch.autocast(device.type, torch.bfloat16):
        image = pocket.projector(batch.features.float())
        table = model.get_input_embeddings()
        begin = torch.full((len(image), 1), pocket.processor.tokenizer.bos_token_id, device=device)
        embeds = [table(begin), image.to(table.weight.dtype), table(batch.ids)]
        joined = torch.cat(embeds, 1)
        mask = masks(batch, config.sliding_window if sliding else None, joined.dtype)
        hidden = pocket.decoder(
            inputs_embeds=joined,
            attention_mask=mask if sliding else mask["full_attention"],
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        wanted = batch.labels[:, 1:] != IGNORED
        logits = model.lm_head(hidden[:, :-1][wanted]).float()
    labels = batch.labels[:, 1:][wanted]
    # Answers follow one another in a row: a number for each.
    rows = torch.arange(len(image), device=device)[:, None] * (1 + int(batch.segments.max()))
    numbers = (rows + batch.segments)[:, 1:][wanted].unique(return_inverse=True)[1]
    hits = (logits.argmax(-1) == labels).int()
    right = torch.ones(len(batch.asked), dtype=torch.int, device=device)
    right = right.scatter_reduce(0, numbers, hits, "amin").bool()
    return F.cross_entropy(logits, labels), right


class Stage(Trainer):
    """What both stages do at a step.

    Parameters
    ----------
    pocket : Pocket
    patches, check : Patches
        To train on, and for accuracies meanwhile.
    settings : Settings
    run : Path
        Folder of checkpoints and weights.
    steps : int
    workers : int
        Processes that prepare batches of stage ``b``.
    fresh : bool
        Ignore a checkpoint.
    stop_after : int
        As of `Trainer`.
    """

    name: ClassVar[str]
    log: ClassVar[int]  # steps from one line of the curve to the next
    check_each: ClassVar[int] = 50  # and from one check to the next
    rates: ClassVar[tuple[float, ...]]

    def __init__(
        self,
        pocket: Pocket,
        patches: Patches,
        check: Patches,
        settings: Settings,
        run: Path,
        steps: int,
        *,
        workers: int = 0,
        fresh: bool = False,
        stop_after: int = 0,
    ) -> None:
        super().__init__(
            f"stage {self.name}",
            run / self.name,
            steps=steps,
            minutes=0,
            stop_after=stop_after,
            save_every=60,
        )
        self.run, self.pocket, self.options, self.workers = run, pocket, settings, workers
        self.recent: list[dict[str, float]] = []
        groups = self.prepare(patches, check)
        self.trained = [of for group in groups for of in group]
        for of in self.trained:
            of.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            [{"params": of, "lr": lr} for of, lr in zip(groups, self.rates, strict=True)],
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        if not fresh:
            self.resume()

    def prepare(self, patches: Patches, check: Patches) -> list[list[nn.Parameter]]:
        """Set up what is trained on; returns the parameters that each of `rates` is for."""
        raise NotImplementedError

    def batches(self, steps: Sequence[int]) -> Iterator[Any]:
        """What `loss` takes at each of these steps."""
        raise NotImplementedError

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, float]]:
        """The loss, and values to log."""
        raise NotImplementedError

    def check(self) -> dict[str, float]:
        """Accuracies on scenes that are not trained on."""
        return {}

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The trained weights of each part."""
        return {"projector": self.pocket.projector.state_dict()}

    def settings(self) -> dict[str, Any]:
        return asdict(self.options)

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), **self.weights()}

    def restore(self, state: dict[str, Any]) -> None:
        self.pocket.projector.load_state_dict(state["projector"])
        self.optimizer.load_state_dict(state["optimizer"])

    def export(self) -> None:
        build.save_weights(self.run, self.weights(), self.step, self.settings())

    def random(self, step: int) -> np.random.Generator:
        """Numbers of a step, the same whether the training was interrupted or not."""
        return np.random.default_rng([self.options.seed, ord(self.name), step])

    def train(self) -> None:
        self.made = self.batches(range(self.step, self.steps))
        super().train()

    def update(self) -> None:
        loss, metrics = self.loss(next(self.made))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        for group, lr in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = lr * rate(self.step, self.steps)
        self.optimizer.step()
        self.recent.append({"loss": float(loss.detach()), **metrics})

    def stepped(self) -> str:
        loss = f"loss {self.recent[-1]['loss']:.3f}"
        if self.step % self.log == 0:
            names = self.recent[0]
            found = {of: sum(x[of] for x in self.recent) / len(self.recent) for of in names}
            self.recent.clear()
            if self.step % self.check_each == 0:
                found |= self.check()
            self.write({name: round(value, 4) for name, value in found.items()})
        return loss


class StageA(Stage):
    """The projector, from patches to embeddings of names."""

    name, log = "a", 20
    rates = (3e-3,)
    batch = 2048
    background = 12  # patches of each layout without an object

    def prepare(self, patches: Patches, check: Patches) -> list[list[nn.Parameter]]:
        self.names = self.pocket.words([*patches.classes, "."])
        places = self.pocket.words(list(CELLS))
        places = F.normalize(places - places.mean(0), dim=-1)
        self.scale = float(self.names.norm(dim=-1).mean())
        self.places = places * self.scale * self.options.place
        self.seen = self._gathered(patches)
        some = self.seen[0][:: 1 + len(self.seen[0]) // 2**20].float()
        self.spread = some.std(0)
        first = self.pocket.projector.linear_1
        with torch.no_grad():  # fold mean and spread of the features into the first layer
            first.weight.div_(self.spread.clamp_min(1e-4))
            first.bias.sub_(first.weight @ some.mean(0))
        return [list(self.pocket.projector.parameters())]

    def _gathered(self, patches: Patches) -> tuple[Tensor, Tensor, Tensor]:
        """Features float16 (n, width), classes and cells (n,) of objects and of some background."""
        rng = np.random.default_rng(self.options.seed)
        side = self.pocket.side
        row, column = np.divmod(np.arange(side**2), side)
        cell = row * GRID // side * GRID + column * GRID // side
        found: tuple[list, list, list] = ([], [], [])
        for kind in KINDS:
            for number in range(patches.count(kind)):
                labels = patches.labels(kind, number)
                empty = np.flatnonzero(labels == BACKGROUND)
                some = rng.permutation(empty)[: self.background]
                at = np.concatenate([np.flatnonzero(labels != BACKGROUND), some])
                of = labels[at].astype(np.int64)
                of[of == BACKGROUND] = len(patches.classes)
                for rows, value in zip(
                    found,
                    (patches.features(kind, number)[at], of, cell[at % side**2]),
                    strict=True,
                ):
                    rows.append(value)
        if not found[0]:
            raise TrainingError(f"{patches.folder} has no patches")
        features, classes, cells = (
            torch.from_numpy(np.concatenate(rows)).to(self.names.device) for rows in found
        )
        return features, classes, cells

    def batches(self, steps: Sequence[int]) -> Iterator[np.random.Generator]:
        return map(self.random, steps)

    def loss(self, batch: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        features, classes, cells = self.seen
        device = features.device
        at = torch.from_numpy(batch.integers(len(features), size=self.batch)).to(device)
        draws = torch.Generator(device).manual_seed(int(batch.integers(2**63)))
        noise = torch.randn(self.batch, features.shape[1], generator=draws, device=device)
        noisy = features[at].float() + 0.1 * self.spread * noise
        out, wanted = self.pocket.projector(noisy) - self.places[cells[at]], classes[at]
        # Logits are half the squared distances to the names, but for a constant. Cosines instead
        # would tell the names apart too, with vectors of lengths that the decoder cannot read.
        logits = (out @ self.names.T - self.names.pow(2).sum(-1) / 2) / (self.scale**2 / 20)
        error = (out - self.names[wanted]).pow(2).sum(-1).mean() / self.scale**2
        right = (logits.argmax(-1) == wanted).float().mean()
        loss = F.cross_entropy(logits, wanted) + 4 * error
        return loss, {"right": float(right), "error": float(error.detach())}


class StageB(Stage):
    """The projector and LoRA weights of the decoder, on answers."""

    name, log = "b", 5
    rates = (1e-4, 3e-4)
    shares = ((0.25, 0.6), (0.5, 0.3), (1.0, 0.1))  # of an image's patches, with probabilities
    kinds = (("scene", 0.8), ("word", 0.1), ("video", 0.1))

    def prepare(self, patches: Patches, check: Patches) -> list[list[nn.Parameter]]:
        self.patches = patches
        torch.manual_seed(self.options.seed)
        self.adapted = build.add_adapter(self.pocket)
        adapter = [of for of in self.adapted.parameters() if of.requires_grad]
        self.unseen = list(self._checks(check))
        return [list(self.pocket.projector.parameters()), adapter]

    def _checks(self, check: Patches) -> Iterator[Batch]:
        for kind in KINDS:
            rng = np.random.default_rng(self.options.seed)
            numbers = list(range(check.count(kind)))
            for start in range(0, len(numbers), self.options.batch):
                some = numbers[start : start + self.options.batch]
                yield self._batch(check, kind, some, 0.25, True, rng)

    def _batch(
        self,
        patches: Patches,
        kind: str,
        numbers: Sequence[int],
        share: float,
        keep_positions: bool,
        rng: np.random.Generator,
    ) -> Batch:
        features = [patches.features(kind, number) for number in numbers]
        size = max(1, round(share * self.pocket.side**2))
        kept = [np.sort(rng.permutation(len(rows))[:size]) for rows in features]
        draws = random.Random(int(rng.integers(2**32)))
        asked = [
            questions(patches.layout(kind, number), draws, self.options.questions)
            for number in numbers
        ]
        return batch_of(self.pocket, features, asked, kept, keep_positions)

    def batches(self, steps: Sequence[int]) -> Iterator[Batch]:
        return iter(loader(self.batch, steps, self.workers))

    def batch(self, step: int) -> Batch:
        """Layouts of one kind, one share of their patches."""
        rng = self.random(step)
        kinds = [(kind, weight) for kind, weight in self.kinds if self.patches.count(kind)]
        weights = np.array([weight for _, weight in kinds])
        kind = kinds[rng.choice(len(kinds), p=weights / weights.sum())][0]
        numbers = rng.integers(self.patches.count(kind), size=self.options.batch).tolist()
        share = self.shares[rng.choice(len(self.shares), p=[p for _, p in self.shares])][0]
        return self._batch(self.patches, kind, numbers, share, bool(rng.integers(2)), rng)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        loss, right = answer_loss(self.pocket, batch)
        return loss, {"right": float(right.float().mean())}

    def check(self) -> dict[str, float]:
        right, total = Counter[str](), Counter[str]()
        for batch in self.unseen:
            with torch.no_grad():
                hits = answer_loss(self.pocket, batch)[1].tolist()
            for of, hit in zip(batch.asked, hits, strict=True):
                right[of.type] += hit
                total[of.type] += 1
        return {f"check_{type_}": right[type_] / total[type_] for type_ in sorted(total)}

    def weights(self) -> dict[str, dict[str, Tensor]]:
        from peft import get_peft_model_state_dict

        return {**super().weights(), "adapter": get_peft_model_state_dict(self.adapted)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        build.load_adapter(self.adapted, state["adapter"])


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate: warm-up, constant, and a linear decay over the last steps."""
    left = (steps - step) / max(1, DECAY * steps)
    return max(0.0, min(1.0, (step + 1) / WARM_UP, left))


def train(args: argparse.Namespace, settings: Settings) -> None:
    """Encode patches and run the stages."""
    torch.manual_seed(settings.seed)
    pocket = build.read(args.parts, settings.size, torch.bfloat16)
    pocket.model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    drawn = objects.read(args.parts / "objects", pocket.processor.tokenizer)
    parts = {}
    for part, most in (("train", 2**28), ("check", 32)):
        parts[part] = Patches(args.run / "patches" / part, part, pocket, drawn)
        for kind in KINDS:
            parts[part].fill(kind, min(getattr(args, f"{kind}s"), most), args.workers)
            print(f"{part}: {parts[part].count(kind)} {kind}s encoded", flush=True)
    given = pocket, parts["train"], parts["check"], settings, args.run
    for made, steps in ((StageA, args.steps_a), (StageB, args.steps_b)):
        stage = made(*given, steps, workers=args.workers, fresh=args.fresh)
        if stage.progress < 1:
            stage.train()
        print(f"stage {stage.name}: {stage.step} of {steps} steps", flush=True)
        if stage.progress < 1:
            print("stopped early; repeat the command to continue")
            return


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train projector and adapter on drawn scenes.")
    parser.add_argument("parts", type=Path, help="folder of parts.py and objects.py")
    parser.add_argument("run", type=Path, help="folder of checkpoints, continued if it exists")
    parser.add_argument("--steps-a", type=count, default=1500)
    parser.add_argument("--steps-b", type=count, default=3000)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda if there is one")
    parser.add_argument("--scenes", type=int, default=6000, help="layouts to encode")
    parser.add_argument("--words", type=int, default=800, help="layouts with a word")
    parser.add_argument("--videos", type=int, default=320)
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that draw and prepare batches"
    )
    parser.add_argument("--fresh", action="store_true", help="ignore the checkpoints in RUN")
    standard = asdict(Settings())
    for name, value in standard.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args(argv)
    try:
        train(args, Settings(**{name: getattr(args, name) for name in standard}))
    except TrainingError as error:
        raise SystemExit(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
