"""The decode loop, run inside Hugging Face's ``generate`` through ``custom_generate``.

``generate`` prepares logits processors, stopping criteria and the generation config; this loop asks
them in the same order and with the same ids as Hugging Face's sampling loop, so that tokens and
random numbers are the same. In a batch every sequence has its own of them, which see its own ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from ..drafters.tree import Tree
from ..errors import VLMFastError
from .attention import switched
from .decode import Decoder, lasting
from .noise import gumbel
from .run import Run
from .speculation import Speculation, walk
from .stats import clock

_ULPS = 8  # near tie: so many units in the last place of the largest logit


@dataclass
class Turn:
    """The answer of one run, token by token, as ``generate`` set it up.

    Parameters
    ----------
    run : Run
    ids : Tensor, int64, (1, S)
        Full prompt, placeholders included, because logits processors see the prompt; then what has
        been generated.
    processor, criteria, config
        Hugging Face's logits processors, stopping criteria and generation config.
    streamer : object, optional
        Gets each token.
    number : int
        Which request of a batch it is.
    seed : int, optional
        Sampling: the token at each place is drawn with noise that depends on the seed and the place
        alone. Without it, as Hugging Face draws, from torch's generator; drafts need it, and draw
        it from there.
    strict : bool
        Whether near ties are taken from the single-token path.
    """

    run: Run
    ids: Tensor
    processor: Any
    criteria: Any
    config: Any
    streamer: Any = None
    number: int = 0
    seed: int | None = None
    strict: bool = False
    speculation: Speculation | None = None
    drifted: int = 0  # strict: tokens in the cache, the last ones, that trees had a part in
    scores: list[Tensor] = field(default_factory=list)
    raw: list[Tensor] = field(default_factory=list)
    first: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.prompt = self.ids.shape[1]
        if self.seed is None and self.sampled and self.run.watch is not None:
            self.seed = int(torch.randint(2**62, ()))

    @property
    def sampled(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def count(self) -> int:
        """Tokens that have been generated."""
        return self.ids.shape[1] - self.prompt

    @property
    def room(self) -> int:
        room = self.config.max_length - self.prompt
        return room if self.run.most is None else min(room, self.run.most)

    @property
    def generated(self) -> list[int]:
        return self.ids[0, self.prompt :].tolist()

    def take(self, logits: Tensor) -> Tensor:
        """The next token (1,) from ``logits`` (1, V); sets ``done`` when it was the last."""
        config = self.config
        if not config.output_scores:
            self.scores.clear()
        if not config.output_logits:
            self.raw.clear()
        # A copy in float32, as Hugging Face makes it: processors may write into it.
        logits = logits.to(copy=True, dtype=torch.float32)
        processed = self.processor(self.ids, logits)
        self.scores.append(processed)
        self.raw.append(logits)
        if self.sampled and self.seed is None:
            tokens = torch.multinomial(processed.softmax(-1), num_samples=1).squeeze(1)
        else:
            tokens = self.perturbed(processed).argmax(-1)
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        if self.first is None:
            self.first = clock(self.ids.device)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        ended = bool(self.criteria(self.ids, tuple(self.scores)).all())
        self.done = ended or self.count == self.run.most
        if self.done:
            self._finish()
        return tokens

    def draft(self) -> None:
        """Let the recipe's drafters begin, where the prompt has been read."""
        if self.run.watch is not None and not self.done:
            stages = self.run.recipe.acting("drafter")
            self.speculation = Speculation(self, stages, self.run.watch.reads)

    def perturbed(self, processed: Tensor) -> Tensor:
        """Scores (1, V) whose largest is the next token."""
        if not self.sampled:
            return processed
        noise = gumbel(self.seed, self.ids.shape[1], processed.shape[1], processed.device)
        return processed.double() + noise

    def sure(self, logits: Tensor) -> bool:
        """Whether the token behind ``logits`` (V,) is the same whatever their last bits are."""
        logits = logits[None].to(copy=True, dtype=torch.float32)
        ulp = torch.finfo(self.run.adapter.dtype).eps * float(logits.abs().max())
        processed = self.processor(self.ids, logits)
        best = self.perturbed(processed).topk(2, dim=-1).values[0]
        scale = getattr(self.config, "temperature", None) or 1.0 if self.sampled else 1.0
        return float(best[0] - best[1]) > _ULPS * ulp / scale

    def one(self, logits: Tensor) -> tuple[int, bool]:
        """`take`, for a walk through a tree."""
        return int(self.take(logits[None])), self.done

    def _finish(self) -> None:
        device = self.ids.device
        count = self.ids.shape[1] - self.prompt
        self.run.stats.finish(count, self.run.begin, self.first, clock(device), device)
        if self.streamer is not None:
            self.streamer.end()

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` returns."""
        config = self.config
        if not config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=tuple(self.scores) if config.output_scores else None,
            logits=tuple(self.raw) if config.output_logits else None,
        )


def generate_of(model: nn.Module) -> Callable:
    """Hugging Face's ``generate``: the model's own may be one that leads here, see `attach`."""
    of_class = getattr(type(model), "generate", GenerationMixin.generate)
    return partial(of_class, model)


def open_turn(run: Run, generation: dict[str, Any]) -> Turn:
    """Hugging Face's ``generate`` up to where its loop would begin."""
    ids = run.inputs.tensors["input_ids"]
    return generate_of(run.adapter.model)(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        # Given, so that families with rotary state of their own do not compute and keep it.
        position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
        custom_generate=_turn,
        vlmfast_run=run,
        **generation,
    )


def _turn(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    vlmfast_run: Run | None = None,
    vlmfast_streamer: Any = None,
    vlmfast_seed: int | None = None,
    vlmfast_strict: bool = False,
    **kwargs: Any,
) -> Turn:
    """The callable that ``generate(custom_generate=...)`` calls.

    Parameters that Hugging Face's own loop does not have are how the run gets in.
    """
    return Turn(
        vlmfast_run,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        vlmfast_streamer,
        seed=vlmfast_seed,
        strict=vlmfast_strict,
    )


def advance(decoder: Decoder, turns: Sequence[Turn], tokens: Sequence[Tensor]) -> list[Tensor]:
    """One round: every sequence emits its next token, and those that were drafted right.

    ``tokens`` (1,) each were emitted last; returns those that are now.
    """
    decoder.rework()
    if all(turn.speculation is None for turn in turns):
        logits = decoder.feed(torch.stack(list(tokens))).logits[:, -1]
        return [turn.take(row[None]) for turn, row in zip(turns, logits, strict=True)]
    trees = [
        Tree.chain([int(token)])
        if turn.speculation is None
        else turn.speculation.propose(decoder, row, int(token))
        for row, (turn, token) in enumerate(zip(turns, tokens, strict=True))
    ]
    start = clock(decoder.position.device)
    drafted = any(len(tree) > 1 for tree in trees)
    if drafted:
        output = decoder.verify(trees)
    else:
        output = decoder.feed(torch.stack(list(tokens)))
    seconds = clock(decoder.position.device) - start
    last, paths = [], []
    for row, (turn, tree) in enumerate(zip(turns, trees, strict=True)):
        # Of a strict answer a token is sure, or its logits are those of single tokens alone.
        watched = turn.strict and (drafted or turn.drifted)
        path, emitted = walk(tree, output.logits[row], turn.one, turn.sure if watched else None)
        turn.run.stats.time_verify_s += seconds
        if turn.speculation is not None:
            turn.speculation.learn(tree, path, emitted, output, row)
        if watched:
            turn.drifted += len(path) if drafted else 1
        paths.append(path)
        last.append(turn.ids[0, -1:])
    if drafted:
        decoder.accept(paths)
    (turn, *others), path = turns, paths[0]
    if turn.strict and not turn.done and (not path or int(last[0]) in trees[0].children[path[-1]]):
        assert not others  # drafts of a strict answer have no company
        if not drafted:
            decoder.rewind(1)
            turn.drifted -= 1
        return [_anew(decoder, turn)]
    return last


def _anew(decoder: Decoder, turn: Turn) -> Tensor:
    """The next token of a strict answer, from a cache that single tokens have written alone."""
    fed = turn.ids[:, -1 - turn.drifted :]
    decoder.rewind(turn.drifted)
    for token in fed.split(1, dim=1):
        output = decoder.feed(token)
    turn.drifted = 0
    turn.run.stats.redecoded += 1
    root = Tree.chain([int(fed[0, -1])])
    path, emitted = walk(root, output.logits[0], turn.one)
    turn.speculation.learn(root, path, emitted, output, 0)
    return turn.ids[0, -1:]


@lasting
def answer(turn: Turn, start: Callable[[], Tensor] | None = None) -> list[int]:
    """The ids that one turn generates.

    Parameters
    ----------
    start : callable, optional
        Reads the prompt and returns the logits (1, V) behind it; by default the run's prefill.
    """
    with switched(turn.run.adapter.model):
        logits = turn.run.start(turn.room) if start is None else start()
        token = turn.take(logits)
        turn.draft()
        while not turn.done:
            (token,) = advance(turn.run.decoder, [turn], [token])
        return turn.generated


@lasting
def answer_many(model: nn.Module, turns: Iterator[Turn], at_once: int) -> Iterator[Turn]:
    """Turns as they end; up to ``at_once`` are decoded together.

    A prompt is read as soon as a row is free, one at a time and without padding; a row that ends
    leaves the batch at once.
    """
    active: list[Turn] = []
    decoder: Decoder | None = None
    tokens: list[Tensor] = []
    with switched(model):
        while True:
            while len(active) < at_once and (turn := next(turns, None)) is not None:
                try:
                    token = turn.take(turn.run.start(turn.room))
                except VLMFastError as error:
                    raise type(error)(f"request {turn.number}: {error}") from error
                if turn.done:
                    turn.run.release()
                    yield turn
                    continue
                turn.draft()
                active.append(turn)
                tokens.append(token)
                joined = [turn.run.decoder] if decoder is None else [decoder, turn.run.decoder]
                decoder = Decoder.join(joined)
                turn.run.cache = turn.run.decoder = None
            if not active:
                return
            tokens = advance(decoder, active, tokens)
            alive = [row for row, turn in enumerate(active) if not turn.done]
            ended = [turn for turn in active if turn.done]
            if ended:
                if alive:
                    decoder = decoder.select(alive)
                else:
                    decoder.release()
                    decoder = None
                active, tokens = [active[r] for r in alive], [tokens[r] for r in alive]
            yield from ended
