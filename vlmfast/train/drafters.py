"""Training of drafters: the loop of ``vlmfast train drafter``.

A sample is a prompt with the target's own answer, which is generated once and stored on disk as
token ids. At every step the target prefills prompt and answer (no features are stored), and the
drafter learns the rows that predict the answer. The target is frozen. The accepted length is
measured along the way, on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.core.files import make_folder, read_text, readable, replace_text
from vlmfast.core.help import count, examples, within
from vlmfast.core.protocols import DrafterStage
from vlmfast.drafters._training import DrafterTraining, Lesson, Teacher, accepted
from vlmfast.errors import MediaError

from . import stages as loop
from .trainer import TrainingError

if TYPE_CHECKING:
    from vlmfast.api.vlm import VLM

KINDS = {"eagle": "draft-eagle", "eagle3": "draft-eagle", "vispec": "draft-vispec"}
_BLOCK = 32  # answers that are generated together and stored in one file
_HELD_OUT = 2**31  # held-out samples of drawn scenes are numbered from here on


# --- options -------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vlmfast train drafter``."""
    parser.epilog = examples(
        "vlmfast train drafter --kind eagle --steps 2000 --out runs/eagle",
        "vlmfast train drafter --kind vispec --minutes 90   # repeat it to resume",
        "vlmfast train drafter --kind eagle3 --model MODEL --data chats.json --device cuda",
    )
    add = parser.add_argument
    add("--kind", choices=tuple(KINDS), default="eagle", help="kind of drafter")
    loop.add_common(parser, out="runs/drafter", steps=2000, lr=3e-4, decay=0.0)
    add("--answers", help="folder of the target's answers, to reuse them between runs")
    about = "number of different prompts; then they repeat"
    add("--samples", type=count, default=10_000, help=about)
    about = "held-out prompts, to measure the accepted length"
    add("--held-out", type=count, default=48, help=about)
    about = "most tokens per generated answer; a drafter learns from the second token on"
    add("--answer-tokens", type=within(int, 2), default=128, help=about)
    about = "fraction of the answers sampled at temperature 1"
    add("--sampled", type=within(float, 0, 1), default=0.0, help=about)
    about = "largest norm of the gradient"
    add("--clip", type=within(float, 0, above=True), default=0.5, help=about)
    about = "uniform noise on the features, as in EAGLE"
    add("--noise", type=within(float, 0), default=0.2, help=about)
    add("--units", type=int, default=0, help="hidden units of the MLP; 0: the target's")
    add("--init", help="folder of weights to start from")
    about = "forward passes, each on the outputs of the one before"
    add("--ttt", type=count, default=3, help=about)
    about = "drafted tokens, to measure the accepted length"
    add("--depth", type=count, default=6, help=about)
    add("--eval-every", type=count, default=100, help="steps between two measurements")
    for name in dict.fromkeys(KINDS.values()):
        loop.training_class(name).add_arguments(parser)


# --- prompts and answers -------------------------------------------------------------------------

Messages = list[dict[str, Any]]  # turns in Hugging Face's chat schema; the last one is the question

_ORDINARY, _SECOND = 0.15, 0.1  # fractions of drawn scenes: questions, and second questions


def drawn(number: int) -> Messages:
    """Prompt ``number`` about a drawn scene: mostly a request to describe it, else a question.

    A second question follows a description of the same scene.
    """
    from vlmfast.scenes.captions import caption

    from .lessons import painted, question_about

    rng = random.Random(f"vlmfast-draft-{number}")
    is_video = rng.random() < 1 / 3
    scene, frames, describe = painted(rng, is_video, number)
    if is_video:
        media = {"type": "video", "video": frames, "num_frames": len(frames)}
    else:
        media = {"type": "image", "image": frames[0]}
    question = question_about(scene, rng, is_video).question
    draw = rng.random()
    if draw < _SECOND:
        return [
            _turn("user", media, describe),
            {"role": "assistant", "content": caption(scene, rng)[0]},
            _turn("user", question),
        ]
    return [_turn("user", media, question if draw < _SECOND + _ORDINARY else describe)]


def _turn(role: str, *parts: dict[str, Any] | str) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": role, "content": content}


class Answers:
    """The target's own answers to numbered prompts, stored on disk.

    They are generated in blocks of consecutive numbers, one file each, so that an answer does not
    depend on where a run was interrupted.

    Parameters
    ----------
    vlm : VLM
    prompt : callable
        Number to the turns of a prompt.
    folder : Path
    args : argparse.Namespace
        ``seed``, ``answer_tokens`` and ``sampled``, the fraction that is sampled at temperature 1.
        Answers to held-out prompts are always greedy.
    note : callable
        Called with a message for each file that cannot be read.
    """

    def __init__(
        self,
        vlm: VLM,
        prompt: Callable[[int], Messages],
        folder: Path,
        args: argparse.Namespace,
        note: Callable[[str], Any] = print,
    ) -> None:
        self.vlm, self.prompt, self.folder, self.args = vlm, prompt, folder, args
        self.note = note
        self.block = lru_cache(maxsize=None)(self._block)
        keys = ("model", "data", "num_frames", "seed", "answer_tokens", "sampled", "dtype")
        about = {key: getattr(args, key) for key in keys}
        # It determines which entries the numbers refer to.
        about |= {"held_out": args.held_out if args.data else None}
        make_folder(folder)
        file = folder / "about.json"
        if not file.exists():
            replace_text(file, json.dumps(about))
        with readable(file, TrainingError):
            found = json.loads(read_text(file))
        for key, value in about.items():
            if found.get(key) != value:
                raise TrainingError(
                    f"{folder} contains answers with {key}={found.get(key)}, not {value}: "
                    "choose another --answers"
                )

    def __getitem__(self, number: int) -> list[int]:
        """Token ids of answer ``number``, end token included; empty if its media cannot be read."""
        block, index = divmod(number, _BLOCK)
        return self.block(block)[index]

    def _block(self, block: int) -> list[list[int]]:
        file = self.folder / f"{block:08}.jsonl"
        if file.exists():
            with readable(file, TrainingError):
                lines = [json.loads(line) for line in read_text(file).splitlines()]
            if len(lines) != _BLOCK:
                raise TrainingError(f"{file} has {len(lines)} lines, not {_BLOCK}; remove it")
            return lines
        answers = self._generate(range(block * _BLOCK, (block + 1) * _BLOCK))
        replace_text(file, "".join(f"{json.dumps(ids)}\n" for ids in answers))
        return answers

    def _generate(self, numbers: range) -> list[list[int]]:
        from vlmfast.api.generation import gate
        from vlmfast.api.request import sequence_of
        from vlmfast.core.recipe import Recipe
        from vlmfast.engine.engine import engine_of

        vlm, args = self.vlm, self.args
        found: dict[int, list[int]] = {number: [] for number in numbers}

        def sequences() -> Iterator[Any]:
            for number in numbers:
                chance = random.Random(f"sampled-{args.seed}-{number}").random()
                options = {"max_new_tokens": args.answer_tokens, "do_sample": False}
                if chance < args.sampled and number < _HELD_OUT:
                    options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                try:
                    passed = gate(vlm.adapter, options)
                    prompt = self.prompt(number)
                    sequence = sequence_of(vlm.adapter, prompt, Recipe(), passed, number)
                except MediaError as error:  # one file of many
                    self.note(str(error))
                    continue
                yield sequence

        torch.manual_seed(random.Random(f"answers-{args.seed}-{numbers[0]}").getrandbits(62))
        # Each prompt is answered once: nothing is worth keeping.
        with torch.no_grad(), vlm.prefix_cache.bypassed():
            for sequence in engine_of(vlm.adapter).answer_many(sequences(), _BLOCK):
                found[sequence.number] = sequence.tokens
        return [found[number] for number in numbers]


# --- the teacher ---------------------------------------------------------------------------------


@torch.no_grad()
def teach(vlm: VLM, messages: Messages, answer: list[int], readers: list[DrafterStage]) -> Lesson:
    """Prefill prompt and answer with the target, through the engine as in inference.

    ``readers`` determine which features and auxiliary hidden states are kept.
    """
    from vlmfast.api.gradients import forward, inputs_with
    from vlmfast.api.request import render, tensors_of
    from vlmfast.core.recipe import Recipe
    from vlmfast.engine.forward import Watch
    from vlmfast.engine.stats import Stats, Trace

    adapter, watch = vlm.adapter, Watch(readers, vlm.adapter.depth)
    asked = render(adapter, messages, Recipe())
    inputs = inputs_with(asked, tensors_of(adapter, asked), answer)
    _, logits = forward(vlm, inputs, Recipe(), Stats(), Trace(), watch=watch)
    read = watch.reads[0]
    assert read.features is not None  # a reader asks for them
    return Lesson(
        embeds=read.embeds.float(),
        features=read.features.float(),
        aux_hidden_states=None
        if read.aux_hidden_states is None
        else read.aux_hidden_states.float(),
        layout=read.layout,
        answer=inputs.tensors["input_ids"][0, -len(answer) :],
        logits=logits[0, 1:-1].float(),
    )


# --- the loop ------------------------------------------------------------------------------------


class DrafterTrainer(loop.StageTrainer):
    """Target, drafter, answers, optimizer and clock of one run."""

    training: DrafterTraining

    fixed = (
        "kind", "model", "data", "seed", "samples", "held_out", "answer_tokens", "sampled", "init",
        "batch", "lr", "decay", "clip", "noise", "ttt", "dtype", "num_frames",
    )  # fmt: skip
    told = ("kind", "seed", "samples", "sampled", "batch", "lr", "noise", "ttt")

    def __init__(self, args: argparse.Namespace) -> None:
        self.max_grad_norm = args.clip
        self.measured: dict[str, float] = {}
        super().__init__(KINDS[args.kind], args)
        folder = Path(args.answers) if args.answers else self.out / "answers"
        self.answers = Answers(self.vlm, self.prompt, folder, args, self.leave_out)
        self.teacher = Teacher(self.vlm.adapter)
        if not self.step:
            if args.init:
                self._start_from(Path(args.init))
            self.training.begin(self.module, self.answers.__getitem__)

    def sizes(self) -> dict[str, Any]:
        """The sizes of every trained stage, and those of the target's layers."""
        text = self.vlm.adapter.config.get_text_config()
        heads = text.num_attention_heads
        rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
        return super().sizes() | {
            "kv_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_width": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "hidden": self.args.units or text.intermediate_size,
            "eps": getattr(text, "rms_norm_eps", 1e-6),
            "theta": float(rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0),
            "qkv_bias": bool(getattr(text, "attention_bias", text.model_type.startswith("qwen2"))),
            "vocabulary": text.vocab_size,
        }

    def samples(self) -> Callable[[int], Any]:
        """The prompts by number. Answers in a file are unused: the target generates its own."""
        args = self.args
        if not args.data:
            self.prompt = lambda number: drawn(args.seed * loop._SEEDS + number)
            return self.prompt
        read = (args.data, args.media, self.training.modalities, args.num_frames)
        learned = loop.conversations(*read, slice(None, -args.held_out))
        held_out = loop.conversations(*read, slice(-args.held_out, None))

        from vlmfast.api.request import messages_of

        def prompt(number: int) -> Messages:
            sample = (
                held_out(number - _HELD_OUT)
                if number >= _HELD_OUT
                else learned(args.seed * loop._SEEDS + number)
            )
            return messages_of(sample.question, **sample.media)

        self.prompt = prompt
        return prompt

    def _start_from(self, folder: Path) -> None:
        """Load the weights of another training; parts that it lacks keep their initialization."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"--init {folder} cannot be read: {error}") from error
        own, training = self.module.state_dict(), self.training
        state = {key: value for key, value in state.items() if not key.startswith(training.unused)}
        kept = {key: value for key, value in own.items() if key.startswith(training.later)}
        try:
            self.module.load_state_dict(kept | state)
        except RuntimeError as error:
            raise TrainingError(f"--init {folder} contains another drafter: {error}") from error

    def number(self, index: int) -> int:
        """Number of the training sample at ``index``: each epoch has another order."""
        epoch, position = divmod(index, self.args.samples)
        # The first epoch is in ascending order, since answers are generated during it.
        return position if epoch == 0 else self._order(epoch)[position]

    @lru_cache(maxsize=2)  # noqa: B019, one trainer a process
    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.args.samples))
        random.Random(f"epoch-{self.args.seed}-{epoch}").shuffle(order)
        return order

    def losses(self) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Parts of this step's loss; every predicted token of the batch has the same weight."""
        args = self.args
        indices = range(self.step * args.batch, (self.step + 1) * args.batch)
        numbers = [self.number(index) for index in indices]
        rows = sum(max(len(self.answers[number]) - 1, 0) for number in numbers)
        for index, number in zip(indices, numbers, strict=True):
            answer = self.answers[number]
            if len(answer) < 2:  # nothing to draft
                continue
            try:
                lesson = teach(self.vlm, self.prompt(number), answer, self.training.readers())
            except MediaError as error:  # one file of many
                self.leave_out(str(error))
                continue
            rng = random.Random(f"sample-{args.seed}-{index}")
            torch.manual_seed(rng.getrandbits(62))
            loss, info = self.training.learn(self.module, lesson, self.teacher, rng, self.progress)
            yield loss / rows, {"loss": float(loss.detach()) / (len(answer) - 1), **info}

    def leave_out(self, reason: str) -> None:
        self.write({"left_out": reason})

    def stepped(self) -> str:
        super().stepped()
        if self.step % self.args.eval_every == 0 or self.progress >= 1:
            self.measured = self.measure()
            rounded = {view: round(length, 4) for view, length in self.measured.items()}
            samples = self.step * self.args.batch
            self.write({"samples": samples, "accepted": rounded})
            self.curve.append({"steps": self.step, "samples": samples, **rounded})
        return " ".join(f"{view} {length:.2f}" for view, length in self.measured.items())

    def tables(self) -> list[dict[str, Any]]:
        """The accepted length at each measured step."""
        if not self.curve:
            return []
        columns = list(self.curve[-1])
        rows = [[point.get(column) for column in columns] for point in self.curve]
        note = (
            f"Greedy chains of {self.args.depth} tokens on {self.args.held_out} held-out prompts, "
            "measured during the training."
        )
        title = "Accepted tokens per round"
        return [{"title": title, "columns": columns, "rows": rows, "note": note}]

    def command(self) -> str:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        words = ["vlmfast", "train", "drafter", "--kind", self.args.kind]
        parser.set_defaults(kind=self.args.kind)
        return loop.command_of(words, self.args, parser)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Mean accepted length of greedy chains on the held-out prompts, per view."""
        views, args = self.training.views(), self.args
        rounds, total = dict.fromkeys(views, 0), dict.fromkeys(views, 0)
        self.module.eval()
        for number in range(_HELD_OUT, _HELD_OUT + args.held_out):
            answer = self.answers[number]
            if len(answer) < 2:
                continue
            lesson = teach(self.vlm, self.prompt(number), answer, self.training.readers())
            for view in views:
                drafts = self.training.draft(self.module, lesson, self.teacher, args.depth, view)
                more = accepted(drafts, lesson.answer)
                rounds[view], total[view] = rounds[view] + more[0], total[view] + more[1]
        self.module.train()
        return {view: total[view] / max(rounds[view], 1) for view in views}
