"""Sampling: from the logits of a step to the next token of each row, for all rows at once.

Hugging Face's ``generate`` prepares a list of logits processors and one of stopping criteria for
each sequence. Where every processor of a row is a common one in Hugging Face's own order, the list
becomes a row of parameters, and the rows of a batch are processed together; on a CPU the scores
have the same bits as from Hugging Face's processors, row by row. Any other list is called for its
row alone. A step reads its tokens from the device once; lengths and end tokens are then checked on
the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from vlmfast.errors import ModelError

from .noise import gumbels

_NO_TOKEN = (
    "the model's scores of the next token are not finite, so that none can be sampled: its weights "
    "are damaged, or overflow in their dtype"
)
# What a row of parameters stands for, in the order in which Hugging Face's ``generate`` calls them:
# by processor, the field of `Parameters`, and the attribute that it is read from (none: a flag).
_KNOWN = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    InfNanRemoveLogitsProcessor: ("remove_invalid", ""),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
    TypicalLogitsWarper: ("typical_p", "mass"),
    LogitNormalization: ("normalize", ""),
}
_ORDER = list(_KNOWN)
# Processors that depend on a row of logits alone, so that they can rank drafts.
ROWWISE = {*_ORDER[1:], EpsilonLogitsWarper, EtaLogitsWarper}


@dataclass(frozen=True)
class Parameters:
    """The processors of one row as numbers; ``None`` and ``False`` mean off.

    Parameters
    ----------
    repetition_penalty : float, optional
    ignored : int
        Leading ids that the repetition penalty does not count.
    remove_invalid : bool
        Whether infinite scores and NaN become finite.
    temperature : float, optional
    top_k : int, optional
    top_p, min_p, typical_p : float, optional
    normalize : bool
        Whether the processors return log-probabilities.
    """

    repetition_penalty: float | None = None
    ignored: int = 0
    remove_invalid: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    normalize: bool = False

    @staticmethod
    def of(processors: Any) -> Parameters | None:
        """The parameters of a list of processors, or ``None`` where one is of another kind.

        Parameters
        ----------
        processors : LogitsProcessorList
        """
        if type(processors) is not LogitsProcessorList:
            return None
        found: dict[str, Any] = {}
        last = -1
        for processor in processors:
            kind = type(processor)
            index = _ORDER.index(kind) if kind in _KNOWN else -1
            read = _read(processor) if index > last else None
            if read is None:
                return None
            found |= read
            last = index
        return Parameters(**found)


def _read(processor: Any) -> dict[str, Any] | None:
    """What a processor of `_KNOWN` adds to `Parameters`; ``None`` for unusual settings."""
    if getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    # `TopKLogitsWarper` has included them in `top_k`.
    if getattr(processor, "min_tokens_to_keep", 1) != 1 and type(processor) is not TopKLogitsWarper:
        return None
    name, attribute = _KNOWN[type(processor)]
    found = {name: getattr(processor, attribute) if attribute else True}
    if name == "repetition_penalty":
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            if ignored.numel() != 1:
                return None
            ignored = int(ignored)
        found["ignored"] = ignored or 0
    return found


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token of an answer, before any logits processor.

    Parameters
    ----------
    token : int
    logprob : float
        Of this token.
    top : list of (int, float)
        The most probable tokens and their log-probabilities, in descending order.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Columns:
    """The parameters of B rows as columns (B, 1), on the device of the scores.

    A processor that no row has is left out; a row without it has a neutral value.

    Parameters
    ----------
    rows : sequence of Parameters
    device : torch.device
    """

    def __init__(self, rows: Sequence[Parameters], device: torch.device) -> None:
        # A division by a Python number is a product with its reciprocal on CUDA, and a division
        # elsewhere; a division by a tensor is one everywhere.
        self.reciprocal = device.type == "cuda"

        def column(values: Sequence[Any], off: Any, divides: bool = False) -> Tensor | None:
            if all(value is None for value in values):
                return None
            # Rounded from float64, as PyTorch does with a Python number and a float32 tensor.
            made = torch.tensor([off if value is None else value for value in values]).double()
            made = made.float()[:, None]
            return (made.reciprocal() if divides and self.reciprocal else made).to(device)

        def flags(values: Sequence[bool]) -> Tensor | None:
            return torch.tensor(values, device=device)[:, None] if any(values) else None

        self.penalty = column([row.repetition_penalty for row in rows], 1.0)
        self.unpenalty = column([row.repetition_penalty for row in rows], 1.0, divides=True)
        self.remove_invalid = flags([row.remove_invalid for row in rows])
        self.temperature = column([row.temperature for row in rows], 1.0, divides=True)
        self.top_k = [row.top_k for row in rows]
        dropped = [None if row.top_p is None else 1 - row.top_p for row in rows]
        self.dropped_p = column(dropped, -1.0)
        self.min_p = column([row.min_p for row in rows], 0.0)
        self.typical_p = column([row.typical_p for row in rows], math.inf)
        self.normalize = flags([row.normalize for row in rows])
        if any(self.top_k):
            self._last = torch.tensor([(k or 1) - 1 for k in self.top_k], device=device)[:, None]
            self._cut = torch.tensor([k is not None for k in self.top_k], device=device)[:, None]

    def _divided(self, scores: Tensor, column: Tensor) -> Tensor:
        return scores * column if self.reciprocal else scores / column

    def __call__(self, scores: Tensor, seen: Tensor | None) -> Tensor:
        """Processed scores.

        Parameters
        ----------
        scores : Tensor, float32, (B, V)
            Not modified.
        seen : Tensor, bool, (B, V)
            Ids that a repetition penalty counts; not read where no row has one.

        Returns
        -------
        Tensor, float32, (B, V)
        """
        if self.penalty is not None:
            assert self.unpenalty is not None and seen is not None
            penalized = self._divided(scores, self.unpenalty)
            penalized = torch.where(scores < 0, scores * self.penalty, penalized)
            scores = torch.where(seen, penalized, scores)
        if self.remove_invalid is not None:
            finite = InfNanRemoveLogitsProcessor()(None, scores)
            scores = torch.where(self.remove_invalid, finite, scores)
        if self.temperature is not None:
            scores = self._divided(scores, self.temperature)
        if any(self.top_k):
            scores = self._top_k(scores)
        if self.dropped_p is not None:
            scores = self._top_p(scores, self.dropped_p)
        if self.min_p is not None:
            probs = scores.softmax(-1)
            # The most probable token is never below a fraction of itself.
            low = probs < self.min_p * probs.amax(-1, keepdim=True)
            scores = scores.masked_fill(low, -math.inf)
        if self.typical_p is not None:
            scores = self._typical(scores, self.typical_p)
        if self.normalize is not None:
            scores = torch.where(self.normalize, scores.log_softmax(-1), scores)
        return scores

    def _top_k(self, scores: Tensor) -> Tensor:
        size = scores.shape[1]
        best = scores.topk(min(max(k or 1 for k in self.top_k), size)).values
        least = best.gather(1, self._last.clamp(max=size - 1))
        return scores.masked_fill(self._cut & (scores < least), -math.inf)

    def _top_p(self, scores: Tensor, dropped_p: Tensor) -> Tensor:
        ordered, index = scores.sort()
        dropped = ordered.softmax(-1).cumsum(-1) <= dropped_p
        dropped[:, -1:] = False
        return scores.masked_fill(dropped.scatter(1, index, dropped), -math.inf)

    def _typical(self, scores: Tensor, typical_p: Tensor) -> Tensor:
        normalized = scores.log_softmax(-1)
        distance, index = (-normalized - _entropy(normalized)).abs().sort()
        reached = scores.gather(1, index).softmax(-1).cumsum(-1) < typical_p
        last = reached.sum(1, keepdim=True).clamp(max=scores.shape[1] - 1)
        dropped = distance > distance.gather(1, last)
        dropped[:, :1] = False
        return scores.masked_fill(dropped.scatter(1, index, dropped), -math.inf)


class Sampler:
    """How one sequence chooses its tokens, and those it has chosen.

    Parameters
    ----------
    prompt : Tensor, int64, (1, S)
        Complete, placeholders included, because processors see the prompt.
    processors : LogitsProcessorList
    criteria : StoppingCriteriaList
    config : GenerationConfig
        As ``generate`` prepared them.
    seed : int, optional
        Sampling: the token at each position is drawn with noise that depends on the seed and the
        position alone. Without it, tokens are drawn as in Hugging Face, from torch's generator.

    Attributes
    ----------
    tokens : list of int
        Chosen so far.
    finish_reason : {"length", "stop"}
        Whether an end token or a criterion of the caller ended the answer, or its length.
    top_logprobs : int, optional
        Number of most probable tokens in each of ``logprobs``.
    logprobs : list of TokenLogprobs
        Of the chosen tokens, where ``top_logprobs`` is given.
    scores, raw : list of Tensor, float32, (1, V)
        Of each step, after and before the processors, where ``config`` requests them.
    error : Exception, optional
        What one of its processors raised; the token of this step is not meaningful.
    """

    def __init__(
        self,
        prompt: Tensor,
        processors: Any,
        criteria: Any,
        config: GenerationConfig,
        seed: int | None = None,
    ) -> None:
        self.prompt = prompt.shape[1]
        self.processors, self.config, self.seed = processors, config, seed
        self.tokens: list[int] = []
        self.finish_reason = "length"
        self.top_logprobs: int | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.scores: list[Tensor] = []
        self.raw: list[Tensor] = []
        self.error: Exception | None = None
        self.seen: Tensor | None = None  # (V,), ids that a repetition penalty counts
        self._ids = prompt
        self._known, others = [], StoppingCriteriaList()
        self._ends: set[int] = set()
        for criterion in criteria:
            kind = type(criterion)
            if kind is EosTokenCriteria:
                self._ends.update(criterion.eos_token_id.flatten().tolist())
            elif kind in (MaxLengthCriteria, MaxTimeCriteria):
                self._known.append(criterion)
            else:
                others.append(criterion)
        self._others = others

    @property
    def sampled(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def length(self) -> int:
        """Ids of prompt and answer."""
        return self.prompt + len(self.tokens)

    @property
    def ids(self) -> Tensor:
        """Prompt and answer, int64, (1, S + T)."""
        if missing := self.length - self._ids.shape[1]:
            new = self._ids.new_tensor([self.tokens[-missing:]])
            self._ids = torch.cat([self._ids, new], dim=1)
        return self._ids

    def rewind(self, count: int) -> None:
        """Forget all but the first ``count`` tokens."""
        for listed in (self.tokens, self.logprobs, self.raw, self.scores):
            del listed[count:]
        self._ids, self.seen, self.error = self._ids[:, : self.length], None, None

    def parameters(self, vocabulary: int) -> Parameters | None:
        """The row's processors as numbers; ``None`` where the list itself has to be called."""
        found = Parameters.of(self.processors)
        if found is None or found.repetition_penalty is None:
            return found
        if self.seen is None:
            ids = self._ids[:, : self.prompt]
            # How ids outside the vocabulary are treated depends on the release of transformers.
            outside = (ids < 0) | (ids >= vocabulary)
            if bool(outside.any()) or found.ignored > self.prompt:
                return None
            self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=ids.device)
            self.seen[self.ids[0, found.ignored :]] = True
        return found

    @property
    def keeps(self) -> bool:
        """Whether the scores of a step must be stored."""
        return bool(self.config.output_logits or self.config.output_scores or self._others)

    def keep(self, raw: Tensor, scores: Tensor) -> None:
        """Store what the caller of ``generate`` or a criterion needs, (1, V) each."""
        if self.config.output_logits:
            self.raw.append(raw.clone())
        if self.config.output_scores:
            self.scores.append(scores.clone())
        elif self._others:
            self.scores = [scores.clone()]

    def is_done(self) -> bool:
        """Whether the last token ends the sequence."""
        # All of them are called, as in Hugging Face: a user's own may keep state.
        stopped = bool(self.tokens) and self.tokens[-1] in self._ends
        reached = [self._is_reached(criterion) for criterion in self._known]
        if self._others:
            stopped |= bool(self._others(self.ids, tuple(self.scores)).all())
        if stopped:
            self.finish_reason = "stop"
        return stopped or any(reached)

    def _is_reached(self, criterion: Any) -> bool:
        if isinstance(criterion, MaxTimeCriteria):
            return time.time() - criterion.initial_timestamp > criterion.max_time
        positions = criterion.max_position_embeddings
        if self.length < criterion.max_length and positions is not None and self.length > positions:
            criterion(torch.empty(1, 1).expand(1, self.length), None)  # it warns
        return self.length >= criterion.max_length


class Sampling:
    """The rows of one step, whose tokens are chosen together.

    Parameters
    ----------
    rows : sequence of Sampler
        None of them has ended. Their settings are read once.
    """

    def __init__(self, rows: Sequence[Sampler]) -> None:
        self.rows = list(rows)
        self._ready = False
        self._columns: Columns | None = None
        self._apart: list[int] = []  # rows whose list of processors is called for them alone
        self._seen: Tensor | None = None
        self._views: list[Tensor | None] = []  # its rows, which the samplers hold

    def of(self, rows: Sequence[Sampler]) -> Sampling:
        """The sampling of ``rows``: this object if they are the same."""
        changed = len(rows) != len(self.rows) or any(map(is_not, rows, self.rows))
        return Sampling(rows) if changed else self

    def take(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row, and append it to the row's tokens.

        The host waits for the device once; PyTorch's ``multinomial`` may add another wait where
        rows are drawn without a seed.

        Parameters
        ----------
        logits : Tensor, floating, (B, V)
            Not modified.

        Returns
        -------
        Tensor, int64, (B,)
            On the device of ``logits``; -1 where a row cannot be sampled, whose error is set.
        """
        raw = self._raw(logits)
        asked = [number for number, row in enumerate(self.rows) if row.top_logprobs is not None]
        # Before processors, which may modify the logits in place.
        logprobs = raw[asked].log_softmax(-1) if asked else raw[:0]
        blocks = self._scores(raw)
        if any(row.keeps for row in self.rows):
            scores = [score for block in blocks for score in block.split(1)]
            for row, before, after in zip(self.rows, raw.split(1), scores, strict=True):
                row.keep(before, after)
        if len(blocks) == 1:
            tokens = _choose(blocks[0], self.rows)
        else:
            alone = zip(blocks, self.rows, strict=True)
            tokens = torch.cat([_choose(block, [row]) for block, row in alone])
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            if token < 0 and row.error is None:
                row.error = ModelError(_NO_TOKEN)
            row.tokens.append(max(token, 0))
        if self._seen is not None:
            self._seen.scatter_(1, tokens.clamp(min=0)[:, None], True)
        self._keep_logprobs([self.rows[number] for number in asked], logprobs)
        return tokens

    @staticmethod
    def _keep_logprobs(rows: Sequence[Sampler], logprobs: Tensor) -> None:
        """Store the log-probabilities (B, V) at the last tokens of ``rows``."""
        if not rows:
            return
        size = min(max(row.top_logprobs or 0 for row in rows), logprobs.shape[1])
        tokens = torch.tensor([row.tokens[-1] for row in rows], device=logprobs.device)
        own = logprobs.gather(1, tokens[:, None]).flatten().tolist()
        best = logprobs.topk(size)
        for row, value, *top in zip(
            rows, own, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            pairs = list(zip(*top, strict=True))[: row.top_logprobs]
            row.logprobs.append(TokenLogprobs(row.tokens[-1], value, pairs))

    def ranked(self, logits: Tensor) -> Tensor:
        """Scores whose largest is the next token, (1, V), of one greedy or seeded row.

        Parameters
        ----------
        logits : Tensor, floating, (1, V)
        """
        (scores,) = self._scores(self._raw(logits))
        return _ranked(scores, self.rows)

    def _raw(self, logits: Tensor) -> Tensor:
        """In float32, as in Hugging Face; copied where processors may modify their scores."""
        if not self._ready:
            self._prepare(logits)
        return logits.to(torch.float32, copy=bool(self._apart))

    def _prepare(self, logits: Tensor) -> None:
        rows = [row.parameters(logits.shape[1]) for row in self.rows]
        self._apart = [number for number, row in enumerate(rows) if row is None]
        known = [Parameters() if row is None else row for row in rows]
        if any(row != Parameters() for row in known):
            self._columns = Columns(known, logits.device)
        self._ready = True

    def _scores(self, raw: Tensor) -> list[Tensor]:
        """Processed scores: (B, V) once, or (1, V) of each row where they cannot be joined."""
        scores = raw
        if self._columns is not None:
            scores = self._columns(raw, self._counted(raw))
        if not self._apart:
            return [scores]
        blocks = list(scores.split(1))
        for number in self._apart:
            row = self.rows[number]
            try:
                blocks[number] = row.processors(row.ids, raw[number : number + 1])
            except Exception as error:  # of the caller's own code; other rows go on
                row.error = error
        # A processor of the caller's own may have changed the dtype.
        alike = len({(block.dtype, block.shape, block.device) for block in blocks}) == 1
        return [torch.cat(blocks)] if alike else blocks

    def _counted(self, raw: Tensor) -> Tensor | None:
        """Ids that repetition penalties count, bool, (B, V); samplers hold views of its rows."""
        if self._columns is None or self._columns.penalty is None:
            return None
        current = [row.seen for row in self.rows]
        if len(self._views) != len(current) or any(map(is_not, current, self._views)):
            nothing = torch.zeros(raw.shape[1], dtype=torch.bool, device=raw.device)
            self._seen = torch.stack([nothing if seen is None else seen for seen in current])
            for row, view in zip(self.rows, self._seen.unbind(), strict=True):
                row.seen = None if row.seen is None else view
            self._views = [row.seen for row in self.rows]
        return self._seen


def _entropy(normalized: Tensor) -> Tensor:
    """Of each row of log-probabilities (B, V): (B, 1)."""
    # Row by row: PyTorch splits the sum of a single long row across threads, but not of several.
    terms = (normalized * normalized.exp()).split(1)
    return -torch.cat([term.nansum(-1, keepdim=True) for term in terms])


def _choose(scores: Tensor, rows: Sequence[Sampler]) -> Tensor:
    """The next tokens (B,) of ``rows`` from their processed scores (B, V), -1 where none is drawn.

    A greedy row of which a score is NaN has a token, as in Hugging Face's ``generate``.
    """
    drawn = [number for number, row in enumerate(rows) if row.sampled and row.seed is None]
    if not drawn:
        return _first(scores, rows)
    # One call draws the same tokens as one call per row in this order.
    probs = (scores if len(drawn) == len(rows) else scores[drawn]).softmax(-1)
    # On a GPU, `multinomial` of NaN ends the process.
    valid = probs.isfinite().all(-1)
    tokens = torch.multinomial(probs.where(valid[:, None], 1.0), num_samples=1).squeeze(1)
    tokens = tokens.where(valid, -1)
    others = [number for number in range(len(rows)) if number not in drawn]
    if not others:
        return tokens
    found = tokens.new_empty(len(rows))
    found[drawn] = tokens
    found[others] = _first(scores[others], [rows[number] for number in others])
    return found


def _first(scores: Tensor, rows: Sequence[Sampler]) -> Tensor:
    """The next tokens (B,) of greedy and seeded rows."""
    ranked = _ranked(scores, rows)
    tokens = ranked.argmax(-1)
    if not any(row.sampled for row in rows):
        return tokens
    sampled = torch.tensor([row.sampled for row in rows], device=scores.device)
    best = ranked.gather(1, tokens[:, None]).squeeze(1)  # NaN if one of them is NaN
    return tokens.where(best.isfinite() | ~sampled, -1)


def _ranked(scores: Tensor, rows: Sequence[Sampler]) -> Tensor:
    """Scores (B, V) whose largest is the next token of a greedy or seeded row."""
    seeded = [number for number, row in enumerate(rows) if row.sampled]
    if not seeded:
        return scores
    seeds, places = zip(
        *((rows[number].seed, rows[number].length) for number in seeded), strict=True
    )
    noise = gumbels(seeds, places, scores.shape[1], scores.device)
    ranked = scores.double()
    if len(seeded) == len(rows):
        return ranked + noise
    ranked[seeded] += noise
    return ranked
