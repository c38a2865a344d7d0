"""The state of one request in the engine."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlmfast.core.protocols import DecodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.errors import DeadlineExceeded, RequestCancelled, VLMFastError, is_out_of_memory

from .decode import RowGroup
from .forward import Watch
from .mode import Mode
from .prefill import Inputs, Prompt
from .sampling import Sampler, Sampling
from .stats import Stats, Trace

if TYPE_CHECKING:
    from .speculation import Speculation


class Phase(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


# Prefills a prompt chunk by chunk. It yields after each chunk whether there was anything to do, and
# returns the logits (1, V) after the prompt, or ``None`` where no answer follows.
Prefill = Generator[bool, None, Tensor | None]


@dataclass(eq=False)
class Sequence:
    """The state of one request; `engine` alone writes it.

    Parameters
    ----------
    inputs : Inputs
        Ids and pixels of the prompt.
    recipe : Recipe
        Fitted to the model.
    sampler : Sampler
        Ids of prompt and answer, and how tokens are chosen.
    begin : float
        When the RGB images were in host memory, by `time.perf_counter`.
    streamer : object, optional
        Receives each token.
    strict : bool
        Whether near ties are resolved by the single-token path.
    cut : bool
        Whether the answer may be shorter than requested, to fit the model's positions.
    number : int
        Which request of a batch it is.
    prefill : callable, optional
        Makes the generator that prefills the prompt of the sequence, see `Prefill`. By default it
        is prefilled at once, or in chunks of ``prefill_chunk_size``.
    keeps_cache : bool
        Whether its cache is left in ``group`` when it has ended.
    listener : callable, optional
        Called without arguments in the thread that runs the engine, after each token and when the
        sequence has ended.
    on_end : callable, optional
        Called with the sequence when it has ended, in the thread that runs the engine; ``phase``
        is the one in which it ended.

    Attributes
    ----------
    phase : Phase
    priority : int
        Lower values are answered first.
    deadline : float
        When it is given up, by `time.monotonic`.
    arrived : int
        Number of requests that were submitted before it.
    submitted : float
        When it was submitted, by `time.monotonic`.
    streamed : bool
        Whether its tokens are read while they are generated; prompts of others then make way.
    cancelled : bool
        Set by any thread.
    error : Exception, optional
        Why it ended without a complete answer.
    mode : Mode, optional
        In which it is computed.
    bypassed : bool
        Whether it was submitted inside a block of `PrefixCache.bypassed`.
    stats, trace
        Its cost, and the dropped tokens.
    watch : Watch, optional
        Records what its drafters read of the prompt.
    prompt : Prompt, optional
        The part that was prefilled last.
    group : RowGroup, optional
        Its row, as long as it is in no batch.
    stages : list of DecodeStage
        Applied to its cache during decoding.
    notes : dict
        As in `PrefillContext`.
    prompt_slots : Tensor, int64, (L, H), optional
        Slots of its cache when decoding began.
    steps : int
        Tokens that have been fed since.
    drafts : Speculation, optional
    drifted : int
        Of a strict answer: how many of the last cached tokens depend on trees.
    most : int, optional
        Maximum tokens of the answer, where it was shortened.
    first : float, optional
        When the first token was on the host.
    done : bool
    emitted : int
        Tokens that its reader has.
    short : bool
        Whether it is done because memory ran short.
    ran_short_alone : bool
        Whether memory ran short the last time though no other sequence ran.
    sampling : Sampling
        Of this row alone.
    """

    inputs: Inputs
    recipe: Recipe
    sampler: Sampler
    begin: float
    streamer: Any = None
    strict: bool = False
    cut: bool = False
    number: int = 0
    prefill: Callable[[Sequence], Prefill] | None = None
    keeps_cache: bool = False
    listener: Callable[[], None] | None = None
    on_end: Callable[[Sequence], None] | None = None
    stats: Stats = field(default_factory=Stats)
    trace: Trace = field(default_factory=Trace)
    watch: Watch | None = None
    prompt: Prompt | None = None
    group: RowGroup | None = None
    stages: list[DecodeStage] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompt_slots: Tensor | None = None
    steps: int = 0
    drafts: Speculation | None = None
    drifted: int = 0
    most: int | None = None
    first: float | None = None
    done: bool = False
    emitted: int = 0
    short: bool = False
    ran_short_alone: bool = False
    phase: Phase = Phase.WAITING
    priority: int = 0
    deadline: float = math.inf
    arrived: int = 0
    submitted: float = 0.0
    streamed: bool = False
    cancelled: bool = False
    error: Exception | None = None
    mode: Mode | None = None
    bypassed: bool = False
    sampling: Sampling = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = Sampling([self.sampler])

    def let_go(self) -> None:
        """Forget what only its computation needs: pixels, embeddings, what drafters read."""
        self.inputs, self.notes, self.stages = Inputs({}), {}, []
        self.prompt = self.prompt_slots = self.watch = self.drafts = self.prefill = None
        if self.error is not None and is_out_of_memory(self.error):  # its frames have tensors
            traceback.clear_frames(self.error.__traceback__)

    def fail(self, error: Exception) -> None:
        """End by an error; the first one counts."""
        self.done = True
        if self.error is None:
            self.error = error

    def fall_short(self, error: Exception) -> None:
        """As `fail`; where memory ran short, it may also start again."""
        if not self.done:
            self.short = is_out_of_memory(error)
        self.fail(error)

    def restart(self) -> None:
        """Forget all that was computed, but not what was emitted: its memory is others' now."""
        assert self.error is not None
        traceback.clear_frames(self.error.__traceback__)  # its frames have tensors
        self.sampler.rewind(self.emitted)
        self.stats.restart()
        self.sampling, self.trace = Sampling([self.sampler]), Trace(images=self.trace.images)
        if self.watch is not None:
            self.watch.reads = []
        self.prompt = self.prompt_slots = self.drafts = self.error = None
        self.notes, self.stages, self.steps, self.drifted = {}, [], 0, 0
        self.done, self.short, self.phase = False, False, Phase.WAITING

    def call_on_end(self) -> None:
        on_end, self.on_end = self.on_end, None  # an interrupt does not repeat it
        if on_end is not None:
            try:
                on_end(self)
            except Exception as problem:
                self.fail(problem)

    def call_listener(self) -> None:
        if self.listener is not None:
            with suppress(Exception):  # its event loop may be closed; the result is in the handle
                self.listener()

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def must_end(self) -> bool:
        """Whether it was cancelled, or is past its deadline."""
        return self.cancelled or time.monotonic() > self.deadline

    @property
    def stopped(self) -> VLMFastError:
        """Why it ends where it `must_end`."""
        after = f"after {self.count} tokens of its answer"
        if self.cancelled:
            return RequestCancelled(f"the request was cancelled {after}")
        return DeadlineExceeded(f"the request reached its deadline {after}")

    @property
    def numbered(self) -> Exception:
        """Its error, with the number of the request."""
        error = self.error
        assert error is not None
        if not isinstance(error, VLMFastError):  # of the caller's own code
            error.add_note(f"request {self.number}")
            return error
        named = type(error)(f"request {self.number}: {error}")
        named.__cause__ = error
        return named

    @property
    def ids(self) -> Tensor:
        """Prompt and answer, int64, (1, S + T), placeholders included."""
        return self.sampler.ids

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return list(self.sampler.tokens)

    @property
    def prompt_length(self) -> int:
        """Ids of the prompt, placeholders included."""
        return self.sampler.prompt

    @property
    def count(self) -> int:
        """Tokens that have been generated."""
        return len(self.sampler.tokens)

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of the answer."""
        requested = self.sampler.config.max_length - self.prompt_length
        return requested if self.most is None else min(requested, self.most)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input its drafters read."""
        return () if self.watch is None else self.watch.layers
