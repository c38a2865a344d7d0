"""The decode loop, run inside Hugging Face's ``generate`` through ``custom_generate``.

``generate`` prepares logits processors, stopping criteria and the generation config; this loop asks
them in the same order and with the same ids as Hugging Face's sampling loop, so that tokens and
random numbers are the same (`engine.sampling`). In a batch every sequence has its own of them,
which see its own ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from ..drafters.tree import Tree
from ..errors import VLMFastError
from .attention import switched
from .decode import Decoder, lasting
from .run import Run
from .sampling import Sampler, Sampling
from .speculation import Speculation, walk
from .stats import clock

_ULPS = 8  # near tie: so many units in the last place of the largest logit


@dataclass
class Turn:
    """The answer of one run, token by token, as ``generate`` set it up.

    Parameters
    ----------
    run : Run
    sampler : Sampler
        Prompt and tokens, and how these are chosen.
    streamer : object, optional
        Gets each token.
    number : int
        Which request of a batch it is.
    strict : bool
        Whether near ties are taken from the single-token path.
    """

    run: Run
    sampler: Sampler
    streamer: Any = None
    number: int = 0
    strict: bool = False
    speculation: Speculation | None = None
    drifted: int = 0  # strict: tokens in the cache, the last ones, that trees had a part in
    first: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        sampler, config = self.sampler, self.config
        if config.num_beams > 1 or config.num_return_sequences > 1:
            raise VLMFastError(
                "num_beams and num_return_sequences must be 1: vlmfast decodes greedily or by "
                "sampling"
            )
        if config.guidance_scale not in (None, 1):
            raise VLMFastError("guidance_scale is not supported: it would need a second prompt")
        seed = sampler.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise VLMFastError(f"seed={seed!r} must be a whole number, or None")
        if seed is None and sampler.sampled and self.run.watch is not None:
            sampler.seed = int(torch.randint(2**62, ()))  # drafts need one
        self.alone = Sampling([sampler])

    @property
    def config(self) -> Any:
        return self.sampler.config

    @property
    def ids(self) -> Tensor:
        return self.sampler.ids

    @property
    def prompt(self) -> int:
        return self.sampler.prompt

    @property
    def scores(self) -> list[Tensor]:
        return self.sampler.scores

    @property
    def raw(self) -> list[Tensor]:
        return self.sampler.raw

    @property
    def count(self) -> int:
        """Tokens that have been generated."""
        return len(self.sampler.tokens)

    @property
    def room(self) -> int:
        return self.config.max_length - self.prompt

    @property
    def generated(self) -> list[int]:
        return list(self.sampler.tokens)

    def take(self, logits: Tensor) -> Tensor:
        """The next token (1,) from ``logits`` (1, V); sets ``done`` when it was the last."""
        token = self.alone.take(logits)
        self.taken()
        return token

    def taken(self) -> None:
        """A token was taken: hand it on, and set ``done`` when it was the last."""
        if self.first is None:
            self.first = clock(self.run.adapter.device)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(self.sampler.tokens[-1:]))
        self.done = self.sampler.is_done()
        if self.done:
            self._finish()

    def draft(self) -> None:
        """Let the recipe's drafters begin, where the prompt has been read."""
        if self.run.watch is not None and not self.done:
            stages = self.run.recipe.acting("drafter")
            self.speculation = Speculation(self, stages, self.run.watch.reads)

    def sure(self, logits: Tensor) -> bool:
        """Whether the token behind ``logits`` (V,) is the same whatever their last bits are."""
        ulp = torch.finfo(self.run.adapter.dtype).eps * float(logits.float().abs().max())
        best = self.alone.ranked(logits[None]).topk(2, dim=-1).values[0]
        sampled = self.sampler.sampled
        scale = getattr(self.config, "temperature", None) or 1.0 if sampled else 1.0
        return float(best[0] - best[1]) > _ULPS * ulp / scale

    def one(self, logits: Tensor) -> tuple[int, bool]:
        """`take`, for a walk through a tree."""
        self.take(logits[None])
        return self.sampler.tokens[-1], self.done

    def _finish(self) -> None:
        device = self.run.adapter.device
        self.run.stats.finish(self.count, self.run.begin, self.first, clock(device), device)
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
    sampler = Sampler(
        input_ids, logits_processor, stopping_criteria, generation_config, vlmfast_seed
    )
    return Turn(vlmfast_run, sampler, vlmfast_streamer, strict=vlmfast_strict)


def advance(
    decoder: Decoder, turns: Sequence[Turn], tokens: Sequence[Tensor], sampling: Sampling
) -> list[Tensor]:
    """One round: every sequence emits its next token, and those that were drafted right.

    ``tokens`` (1,) each were emitted last; returns those that are now. ``sampling`` is that of the
    turns.
    """
    decoder.rework()
    if all(turn.speculation is None for turn in turns):
        logits = decoder.feed(torch.stack(list(tokens))).logits[:, -1]
        taken = sampling.take(logits)
        for turn in turns:
            turn.taken()
        return list(taken.split(1))
    trees = [
        Tree.chain(turn.sampler.tokens[-1:])
        if turn.speculation is None
        else turn.speculation.propose(decoder, row, turn.sampler.tokens[-1])
        for row, turn in enumerate(turns)
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
    unsure = not path or turn.sampler.tokens[-1] in trees[0].children[path[-1]]
    if turn.strict and not turn.done and unsure:
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
            (token,) = advance(turn.run.decoder, [turn], [token], turn.alone)
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
    sampling = Sampling([])
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
            sampling = sampling.of([turn.sampler for turn in active])
            tokens = advance(decoder, active, tokens, sampling)
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
