"""One request: from its prepared prompt to a decoder that goes on from it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contexts import DecodeContext, PrefillContext
from ..errors import ModelError
from ..models.base import Adapter
from ..recipe import Recipe
from .cache import KVCache
from .compress import Compression
from .decode import Decoder, Row, lasting
from .prefill import Inputs, Prompt, prefill, prepare, rows_of
from .speculation import check, drafting
from .stats import Stats, Trace, clock
from .taps import Watch


@dataclass
class Run:
    """One request on its way through the engine: prompt, cache, counters."""

    adapter: Adapter
    inputs: Inputs
    recipe: Recipe
    begin: float  # when the RGB pictures were in host memory, by `clock`
    stats: Stats = field(default_factory=Stats)
    trace: Trace = field(default_factory=Trace)
    cache: KVCache | None = None
    prompt: Prompt | None = None
    decoder: Decoder | None = None
    watch: Watch | None = None
    cut: bool = False  # whether the answer may be shorter than asked, so that it fits
    most: int | None = None  # tokens of the answer at most, where it was cut

    def __post_init__(self) -> None:
        self.recipe = self.recipe.fitted(self.adapter.depth, self.adapter.min_drop_layer)
        drafters = self.recipe.acting("drafter")
        if drafters:
            check(drafters, self.adapter)
            self.watch = Watch(drafting(drafters, self.adapter), self.adapter.depth)

    @property
    def context(self) -> DecodeContext:
        return self.decoder.context

    @property
    def position(self) -> Tensor:
        return self.decoder.position

    @lasting
    def start(self, room: int) -> Tensor:
        """Prefill; ``room`` is the number of tokens that may follow. Returns logits (1, V)."""
        prompt = prepare(self.adapter, self.inputs, self.recipe, self.stats, self.trace)
        return self.start_from(prompt, room)

    @lasting
    def start_from(
        self, prompt: Prompt, room: int, limit: int | None = None, *, bounded: bool = True
    ) -> Tensor:
        """Prefill of a prompt that is already merged. Returns logits (1, V).

        Parameters
        ----------
        limit : int, optional
            As in `extend`.
        bounded : bool
            Whether no more than ``room`` tokens follow.

        Raises
        ------
        ModelError
            When prompt and answer do not fit into the model's positions or its sliding window.
        """
        self.fit(prompt.next_position, room if bounded else 1)
        self.prompt = prompt
        self.stats.prompt_tokens = len(self.prompt.layout)
        windows = self.adapter.windows
        if bounded:  # a window that holds the whole sequence is none
            most = len(prompt.layout) + room
            windows = [None if window is None or most <= window else window for window in windows]
        self.cache = KVCache(self.adapter.depth, self.adapter.pool, windows)
        logits = prefill(
            self.adapter,
            prompt,
            self.recipe,
            self.cache,
            self.stats,
            self.trace,
            limit=limit,
            watch=self.watch,
        )
        # Without a picture the cache is left alone.
        pictured = bool(prompt.layout.visual.any())
        stages = self.recipe.acting("decode") if pictured else []
        self.cache.freeze(
            room,
            self.prompt.full_length,
            track=bool(stages),
            mass=any(stage.mass for stage in stages),
        )
        self.stats.kv_bytes = self.cache.held_bytes()
        first = torch.full_like(self.prompt.layout.position[:, :1], self.prompt.next_position)
        taps = () if self.watch is None else self.watch.layers
        row = Row(stages, prompt.notes, self.cache.length[:, 0].clone(), taps=taps)
        self.decoder = Decoder(self.adapter, self.cache, rows_of(first), [row])
        return logits[:, -1]

    @lasting
    def extend(self, prompt: Prompt, *, compress: bool = False, limit: int | None = None) -> Tensor:
        """Read more of the prompt behind what has been read. Returns logits (1, V).

        Parameters
        ----------
        prompt : Prompt
            Its ``full_length`` counts only these rows, its positions continue the first ones.
        compress : bool
            Whether the recipe's cache stages work on these rows.
        limit : int, optional
            Slots of these rows that each layer may keep.
        """
        self.fit(prompt.next_position, 0)
        decoder, rows = self.decoder, len(prompt.layout)
        merging = [*self.recipe.acting("in-encoder"), *self.recipe.acting("encode")]
        context = PrefillContext(
            prompt.layout,
            depth=self.adapter.depth,
            extends=True,
            cache=self.cache,
            notes=prompt.notes,
            trained=prompt.trained,
            # As in `prefill`.
            repair=any(s.repair for s in merging) and bool((prompt.layout.weight != 1).any()),
            limit=limit,
        )
        if compress:
            Compression.of(self.adapter, self.recipe, context, self.cache, self.stats)
        position = rows_of(prompt.layout.position)
        start = clock(position.device)
        watch = self.watch
        watched = nullcontext() if watch is None else watch.over(self.adapter.decoder, context)
        biased = self.cache.biased(context.key_bias())
        with decoder.shifted(context, position), biased, watched as seen:
            hidden = self.adapter.decoder(
                inputs_embeds=prompt.embeds[None],
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
                vlmfast_context=context,
                **self.adapter.decoder_kwargs(prompt.layout, prompt.extra),
            ).last_hidden_state
        if watch is not None:
            watch.remember(context, prompt.embeds, prompt.layout.order, hidden[0], seen)
        if context.after is None:
            self.cache.advance(rows)
            self.cache.consume(prompt.full_length - rows)
        else:
            self.cache.consume(prompt.full_length)
        self.stats.time_prefill_s += clock(position.device) - start
        self.stats.prompt_tokens += rows
        decoder.position.fill_(prompt.next_position)
        decoder.rows[0].prompt = self.cache.length[:, 0].clone()
        return self.adapter.logits(hidden[:, -1])

    @lasting
    def next(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens`` (1, 1); returns the logits (1, V) behind them. No host sync."""
        return self.decoder.next(tokens)

    def release(self) -> None:
        """Give the cache back."""
        if self.decoder is not None:
            self.decoder.release()
        elif self.cache is not None:
            self.cache.release()

    def fit(self, positions: int, room: int) -> None:
        """Check that ``room`` tokens may follow ``positions``; cut the answer where that helps.

        Raises
        ------
        ModelError
            When they do not fit into the model's positions or its sliding window.
        """
        window, bound = self.adapter.window, self.adapter.max_positions
        if bound is not None and positions + room > bound:
            if not self.cut or positions >= bound:
                raise too_long(positions, room, bound)
            self.most = room = bound - positions
        if window is not None and positions + room > window:
            raise ModelError(
                f"prompt and answer take {positions + room} positions, more than the model's "
                f"sliding window of {window}; shorten one of them, or drop visual tokens with "
                "positions=compact"
            )


def too_long(positions: int, room: int, bound: int, *, least: bool = False) -> ModelError:
    """The error for a prompt of ``positions`` whose answer of ``room`` tokens does not fit.

    ``least``: there may be more of them.
    """
    ways = ["a shorter text", "fewer or smaller images or frames", "positions=compact"]
    if positions < bound:
        ways.insert(0, f"max_new_tokens={bound - positions}")
    return ModelError(
        f"the prompt takes {'at least ' if least else ''}{positions} positions and its answer up "
        f"to {room}, and the model has {bound}; use {', '.join(ways[:-1])}, or a recipe with "
        f"{ways[-1]}"
    )
