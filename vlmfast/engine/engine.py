"""The engine: prefills prompts and decodes answers, one sequence or several at once.

Hugging Face's ``generate`` prepares logits processors, stopping criteria and the generation config
of each sequence; the loop here calls them in the same order and with the same ids, so that
tokens and random numbers are those of Hugging Face's sampling loop (`engine.sampling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.layout import TokenLayout
from vlmfast.core.protocols import (
    CacheStage,
    DecodeStage,
    DrafterStage,
    EncodeStage,
    InEncoderStage,
)
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.errors import ModelError, VLMFastError
from vlmfast.models.base import Adapter

from .attention import switched
from .cache import KVCache
from .compress import Compression
from .decode import Batch, Decoder, lasting
from .hidden_states import Watch, nothing_seen
from .prefill import Inputs, Prompt, Seen, prefill, prepare, rows_of
from .prefix import copied
from .sampling import Sampler, Sampling
from .sequence import Sequence
from .speculation import Speculation, check, drafting, walk
from .stats import Stats, Trace, clock

_TREE = 64  # tokens that a tree of fewer nodes may be padded to
_ULPS = 8  # near tie: within this many units in the last place of the largest logit


class Engine:
    """Runs the requests of one model.

    Parameters
    ----------
    adapter : Adapter
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter

    # --- opening ---------------------------------------------------------------------------------

    def fitted(self, recipe: Recipe) -> tuple[Recipe, Watch | None]:
        """The recipe fitted to the model, and the `Watch` that records a prompt for its drafters.

        Raises
        ------
        RecipeError
            When its drafters cannot work together, or on this model.
        """
        recipe = recipe.fitted(self.adapter.depth, self.adapter.min_drop_layer)
        drafters = recipe.acting(DrafterStage)
        if not drafters:
            return recipe, None
        check(drafters, self.adapter)
        return recipe, Watch(drafting(drafters, self.adapter), self.adapter.depth)

    def open(
        self,
        inputs: Inputs,
        recipe: Recipe,
        arguments: dict[str, Any],
        *,
        begin: float,
        streamer: Any = None,
        seed: int | None = None,
        strict: bool = False,
        cut: bool = False,
        number: int = 0,
        stats: Stats | None = None,
        images: Many[Any] = (),
    ) -> Sequence:
        """A sequence prepared by Hugging Face's ``generate``; nothing is computed yet.

        Parameters
        ----------
        arguments : dict
            For ``generate``.
        begin, streamer, strict, cut, number
            As in `Sequence`.
        seed : int, optional
            As in `Sampler`; drawn where drafts of a sampled answer need one.
        stats : Stats, optional
            The cost of the prompt so far.
        images : sequence of PIL.Image.Image
            For the trace.
        """
        recipe, watch = self.fitted(recipe)
        ids = inputs.tensors["input_ids"]
        sampler = generate_of(self.adapter.model)(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            # Given, so that families with rotary state of their own do not compute and keep it.
            position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
            custom_generate=_prepared,
            vlmfast_seed=seed,
            **arguments,
        )
        if sampler.seed is None and sampler.sampled and watch is not None:
            sampler.seed = int(torch.randint(2**62, ()))
        return Sequence(
            inputs,
            recipe,
            sampler,
            begin,
            streamer,
            strict,
            cut,
            number,
            Stats() if stats is None else stats,
            Trace(images=list(images)),
            watch,
        )

    def reading(
        self,
        inputs: Inputs,
        recipe: Recipe,
        begin: float,
        stats: Stats | None = None,
        images: Many[Any] = (),
    ) -> Sequence:
        """A sequence that is only prefilled, without settings for an answer."""
        recipe, watch = self.fitted(recipe)
        ids = inputs.tensors["input_ids"]
        config = GenerationConfig(max_length=ids.shape[1])
        sampler = Sampler(ids, LogitsProcessorList(), StoppingCriteriaList(), config)
        records = Stats() if stats is None else stats, Trace(images=list(images))
        return Sequence(inputs, recipe, sampler, begin, None, False, False, 0, *records, watch)

    # --- prefill ---------------------------------------------------------------------------------

    @lasting
    def read(
        self,
        sequence: Sequence,
        *,
        inputs: Inputs | None = None,
        seen: Seen | None = None,
        max_new_tokens: int | None = None,
        bounded: bool = True,
    ) -> Tensor:
        """Prefill the prompt of a sequence. Returns the logits (1, V) after it.

        Parameters
        ----------
        inputs : Inputs, optional
            The first part of the prompt, where only that is prefilled.
        seen : Seen, optional
            Its images, already encoded by the tower; see `adopt`.
        max_new_tokens : int, optional
            Those of the answer by default.
        bounded : bool
            As in `prefill`.
        """
        prompt = prepare(
            self.adapter,
            sequence.inputs if inputs is None else inputs,
            sequence.recipe,
            sequence.stats,
            sequence.trace,
            seen,
        )
        if max_new_tokens is None:
            max_new_tokens = sequence.max_new_tokens
        return self.prefill(sequence, prompt, max_new_tokens, bounded=bounded)

    @lasting
    def prefill(
        self,
        sequence: Sequence,
        prompt: Prompt,
        max_new_tokens: int,
        limit: int | None = None,
        *,
        bounded: bool = True,
        noting: tuple[CacheStage, ...] = (),
    ) -> Tensor:
        """Prefill a prompt whose visual tokens are merged in. Returns the logits (1, V) after it.

        Parameters
        ----------
        limit, noting : optional
            As in `extend`.
        bounded : bool
            Whether at most ``max_new_tokens`` tokens follow.

        Raises
        ------
        ModelError
            When prompt and answer do not fit into the model's positions or its sliding window.
        """
        adapter, stats, watch = self.adapter, sequence.stats, sequence.watch
        self.fit(sequence, prompt.next_position, max_new_tokens if bounded else 1)
        sequence.prompt, sequence.notes = prompt, prompt.notes
        stats.prompt_tokens = len(prompt.layout)
        windows: Many[int | None] = adapter.windows
        if bounded:  # a window as long as the whole sequence has no effect
            total = len(prompt.layout) + max_new_tokens
            windows = [None if window is None or total <= window else window for window in windows]
        cache = KVCache(adapter.depth, adapter.pool, windows)
        try:
            logits = prefill(
                adapter,
                prompt,
                sequence.recipe + noting,
                cache,
                stats,
                sequence.trace,
                limit=limit,
                watch=watch,
            )
        except BaseException:
            cache.release()
            raise
        # Without an image the cache is left alone.
        has_image = bool(prompt.layout.visual.any())
        stages = sequence.recipe.acting(DecodeStage) if has_image else []
        cache.freeze(
            max_new_tokens,
            prompt.full_length,
            track=bool(stages),
            attention_mass=any(stage.attention_mass for stage in stages),
        )
        stats.kv_bytes = cache.held_bytes()
        position = torch.full_like(prompt.layout.position[:, :1], prompt.next_position)
        sequence.stages, sequence.prompt_slots = stages, cache.length[:, 0].clone()
        sequence.decoder = Decoder(adapter, cache, rows_of(position), [sequence])
        return logits[:, -1]

    @lasting
    def extend(
        self,
        sequence: Sequence,
        prompt: Prompt,
        *,
        compress: bool = False,
        limit: int | None = None,
        noting: tuple[CacheStage, ...] = (),
    ) -> Tensor:
        """Prefill a later chunk of a prompt. Returns the logits (1, V) after it.

        Parameters
        ----------
        prompt : Prompt
            Its ``full_length`` counts only these rows, its positions continue those before.
        compress : bool
            Whether the recipe's cache stages run on these rows.
        limit : int, optional
            Slots of these rows that each layer may keep.
        noting : tuple of CacheStage
            Observers, called after the cache stages of the recipe.
        """
        adapter, decoder, watch = self.adapter, sequence.decoder, sequence.watch
        assert decoder is not None
        self.fit(sequence, prompt.next_position, 0)
        recipe, cache, rows = sequence.recipe, decoder.cache, len(prompt.layout)
        merging = [*recipe.acting(InEncoderStage), *recipe.acting(EncodeStage)]
        context = PrefillContext(
            prompt.layout,
            depth=adapter.depth,
            extends=True,
            cache=cache,
            notes=prompt.notes,
            trained=prompt.trained,
            # As in `prefill`.
            proportional_attention=any(s.proportional_attention for s in merging)
            and bool((prompt.layout.weight != 1).any()),
            limit=limit,
        )
        if compress:
            Compression.of(adapter, recipe + noting, context, cache, sequence.stats)
        position = rows_of(prompt.layout.position)
        start = clock(position.device)
        watched = nothing_seen() if watch is None else watch.over(adapter.decoder, context)
        biased = cache.biased(context.key_bias())
        with decoder.shifted(context, position), biased, watched as seen:
            hidden = adapter.decoder(
                inputs_embeds=prompt.embeds[None],
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                vlmfast_context=context,
                **adapter.decoder_kwargs(prompt.layout, prompt.extra),
            ).last_hidden_state
        if watch is not None:
            watch.remember(context, prompt.embeds, prompt.layout.order, hidden[0], seen)
        if context.after is None:
            cache.advance(rows)
            cache.consume(prompt.full_length - rows)
        else:
            cache.consume(prompt.full_length)
        sequence.prompt = prompt
        sequence.stats.time_prefill_s += clock(position.device) - start
        sequence.stats.prompt_tokens += rows
        decoder.position.fill_(prompt.next_position)
        sequence.prompt_slots = cache.length[:, 0].clone()
        return adapter.logits(hidden[:, -1])

    def fit(self, sequence: Sequence, positions: int, max_new_tokens: int) -> None:
        """Check that ``max_new_tokens`` tokens fit after ``positions``; shorten a default answer.

        Raises
        ------
        ModelError
            When they do not fit into the model's positions or its sliding window.
        """
        window, bound = self.adapter.window, self.adapter.max_positions
        if bound is not None and positions + max_new_tokens > bound:
            if not sequence.cut or positions >= bound:
                raise too_long(positions, max_new_tokens, bound)
            sequence.most = max_new_tokens = bound - positions
        if window is not None and positions + max_new_tokens > window:
            raise ModelError(
                f"prompt and answer take {positions + max_new_tokens} positions, more than the "
                f"model's sliding window of {window}; shorten one of them, or drop visual tokens "
                "with positions=compact"
            )

    def release(self, sequence: Sequence) -> None:
        """Return the cache buffers of a sequence."""
        if sequence.decoder is not None:
            sequence.decoder.release()
            sequence.decoder = None

    # --- sharing ---------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence, stats: Stats, trace: Trace) -> None:
        """Copy to a sequence the statistics of images encoded for an earlier one."""
        sequence.stats.visual_tokens_in = stats.visual_tokens_in
        sequence.stats.visual_tokens_kept = dict(stats.visual_tokens_kept)
        sequence.trace = copied(trace, self.adapter.device, sequence.trace.images)

    def count_prompt(self, sequence: Sequence, *, reused: int) -> None:
        """Record how many ids of a prompt are already cached; the others are prefilled."""
        sequence.stats.prompt_reused = reused
        sequence.stats.prompt_fed = sequence.prompt_length - reused

    def close_up(self, sequence: Sequence, positions: Many[Tensor]) -> list[Tensor] | None:
        """Renumber the cached tokens of a sequence without gaps; later tokens continue from there.

        Parameters
        ----------
        positions : sequence of Tensor, int64, (H, N)
            Rotary ids of the N slots of each layer.

        Returns
        -------
        list of Tensor, int64, (H, N), or None
            The new ids; ``None``, with nothing changed, where heads hold different slots.
        """
        decoder, prompt = sequence.decoder, sequence.prompt
        assert decoder is not None and prompt is not None
        layers = decoder.cache.layers
        pairs = list(zip(layers, positions, strict=True))
        if any(not layer.even or old.shape[1] != layer.max_lengths[0] for layer, old in pairs):
            return None
        found = []
        for layer, old in pairs:
            new = torch.arange(old.shape[1], device=old.device).expand(len(old), -1)
            keys = layer.keys[0, :, : old.shape[1]]
            keys.copy_(self.adapter.rotate(keys, new - old))
            found.append(new)
        prompt.next_position = max(decoder.cache.lengths())
        decoder.position.fill_(prompt.next_position)
        return found

    def count_block(self, sequence: Sequence, stats: Stats) -> None:
        """Add the cost of one block of a video before the language model."""
        own = sequence.stats
        own.visual_tokens_in += stats.visual_tokens_in
        own.time_vision_s += stats.time_vision_s
        own.time_reduce_s += stats.time_reduce_s
        for name, count in stats.visual_tokens_kept.items():
            own.visual_tokens_kept[name] = own.visual_tokens_kept.get(name, 0) + count

    def count_blocks(self, sequence: Sequence, ids: int, visual: int, flops: float) -> None:
        """Record the language model's cost of a prompt that was prefilled block by block.

        Parameters
        ----------
        ids : int
            Of the full prompt.
        visual : int
            Visual tokens that entered each layer.
        flops : float
        """
        stats, decoder = sequence.stats, sequence.decoder
        assert decoder is not None
        stats.layer_tokens([visual] * self.adapter.depth, self.adapter.config.get_text_config())
        stats.flops_prefill = float(flops)
        stats.kv_bytes = decoder.cache.held_bytes()
        stats.kv_bytes_full = self.adapter.cache_bytes(ids)
        stats.kv_tokens_per_layer = decoder.cache.lengths()

    def extend_text(
        self, sequence: Sequence, ids: Tensor, chunk: int, logits: Tensor | None
    ) -> Tensor:
        """Prefill the text that ends a prompt.

        Parameters
        ----------
        ids : Tensor, int64, (1, T)
        chunk : int
            Ids per forward pass.
        logits : Tensor, (1, V), optional
            After the previous part; returned where no text follows.
        """
        decoder = sequence.decoder
        assert decoder is not None
        cache = decoder.cache
        positions = int(decoder.position.max()) + ids.shape[1]
        self.fit(sequence, positions, sequence.max_new_tokens)
        for part in ids.split(chunk, dim=1) if ids.shape[1] else ():
            count = torch.arange(part.shape[1], device=part.device)
            position = decoder.position.reshape(-1, 1) + count
            prompt = Prompt(
                self.adapter.embed(part)[0],
                TokenLayout.text(count + cache.logical[0], position),
                part.shape[1],
                int(position.max()) + 1,
                notes=sequence.notes,
            )
            logits = self.extend(sequence, prompt)
        stats = sequence.stats
        stats.kv_bytes, stats.kv_tokens_per_layer = cache.held_bytes(), cache.lengths()
        stats.kv_bytes_full = self.adapter.cache_bytes(sequence.prompt_length)
        assert logits is not None
        return logits

    # --- answers ---------------------------------------------------------------------------------

    @lasting
    def answer(self, sequence: Sequence, read: Callable[[], Tensor] | None = None) -> None:
        """Decode the answer of one sequence.

        Parameters
        ----------
        read : callable, optional
            Prefills the prompt and returns the logits (1, V) after it; `read` by default.
        """
        with switched(self.adapter.model):
            logits = self.read(sequence) if read is None else read()
            token = self._take(sequence, logits)
            self._draft(sequence)
            while not sequence.done:
                assert sequence.decoder is not None
                (token,) = self._step(sequence.decoder, [sequence], [token], sequence.sampling)

    @lasting
    def answer_many(self, sequences: Iterator[Sequence], at_once: int) -> Iterator[Sequence]:
        """Yield sequences as they finish; up to ``at_once`` are decoded together.

        A prompt is prefilled as soon as a batch row is free, one at a time and without padding; a
        row that finishes leaves the batch immediately.
        """
        active: list[Sequence] = []
        batch = Batch(at_once)
        tokens: list[Tensor] = []
        sampling = Sampling([])
        with switched(self.adapter.model):
            while True:
                while len(active) < at_once and (sequence := next(sequences, None)) is not None:
                    try:
                        token = self._take(sequence, self.read(sequence))
                    except VLMFastError as error:
                        raise type(error)(f"request {sequence.number}: {error}") from error
                    if sequence.done:
                        self.release(sequence)
                        yield sequence
                        continue
                    self._draft(sequence)
                    active.append(sequence)
                    tokens.append(token)
                    assert sequence.decoder is not None
                    batch.join(sequence.decoder)
                    sequence.decoder = None
                if not active:
                    return
                drafts = [cast(Speculation, s.drafts) for s in active if s.drafts is not None]
                batch.reserve(max((_TREE, *(d.limit[0] for d in drafts))) if drafts else 1)
                sampling = sampling.of([sequence.sampler for sequence in active])
                # A batch has the methods of a group that a round calls.
                tokens = self._step(cast(Decoder, batch), active, tokens, sampling)
                alive = [row for row, sequence in enumerate(active) if not sequence.done]
                ended = [sequence for sequence in active if sequence.done]
                for sequence in ended:
                    batch.leave(sequence)
                active, tokens = [active[r] for r in alive], [tokens[r] for r in alive]
                yield from ended

    def _step(
        self,
        decoder: Decoder,
        sequences: Many[Sequence],
        tokens: Many[Tensor],
        sampling: Sampling,
    ) -> list[Tensor]:
        """One round: every sequence emits its next token, and accepted drafts.

        ``tokens``, (1,) each, are the last tokens emitted; returns the new last ones. ``sampling``
        is that of the sequences.
        """
        decoder.run_decode_stages()
        if all(sequence.drafts is None for sequence in sequences):
            logits = decoder.feed(torch.stack(list(tokens))).logits[:, -1]
            taken = sampling.take(logits)
            for sequence in sequences:
                self._emit(sequence)
            return list(taken.split(1))
        return self._round(decoder, sequences, tokens)

    def _round(
        self, decoder: Decoder, sequences: Many[Sequence], tokens: Many[Tensor]
    ) -> list[Tensor]:
        """`_step` where drafts are checked."""
        roots = [sequence.sampler.tokens[-1] for sequence in sequences]
        trees = [
            Tree.chain([root])
            if sequence.drafts is None
            else sequence.drafts.propose(decoder, row, root)
            for row, (sequence, root) in enumerate(zip(sequences, roots, strict=True))
        ]
        start = clock(decoder.position.device)
        drafted = any(len(tree) > 1 for tree in trees)
        if drafted:
            output = decoder.verify(trees)
        else:
            output = decoder.feed(torch.stack(list(tokens)))
        seconds = clock(decoder.position.device) - start
        # In a batch, drafts of a strict answer are off, and so is what they would need.
        strict = len(sequences) == 1 and sequences[0].strict
        last, paths = [], []
        for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            # A strict answer takes unambiguous tokens, or logits computed by single tokens alone.
            watched = strict and (drafted or bool(sequence.drifted))
            is_unambiguous = partial(self._is_unambiguous, sequence) if watched else None
            take = partial(self._take_one, sequence)
            path, emitted = walk(tree, output.logits[row], take, is_unambiguous)
            sequence.stats.time_verify_s += seconds
            if sequence.drafts is not None:
                sequence.drafts.learn(tree, path, emitted, output, row)
            if watched:
                sequence.drifted += len(path) if drafted else 1
            paths.append(path)
            last.append(sequence.ids[0, -1:])
        if drafted:
            decoder.accept(paths)
        sequence, path = sequences[0], paths[0]
        ambiguous = not path or sequence.sampler.tokens[-1] in trees[0].children[path[-1]]
        if strict and not sequence.done and ambiguous:
            if not drafted:
                decoder.rewind(1)
                sequence.drifted -= 1
            return [self._redecode(decoder, sequence)]
        return last

    def _redecode(self, decoder: Decoder, sequence: Sequence) -> Tensor:
        """The next token of a strict answer, from a cache written by single tokens alone."""
        fed = sequence.ids[:, -1 - sequence.drifted :]
        decoder.rewind(sequence.drifted)
        for token in fed.split(1, dim=1):
            output = decoder.feed(token)
        sequence.drifted = 0
        sequence.stats.redecoded += 1
        root = Tree.chain([int(fed[0, -1])])
        path, emitted = walk(root, output.logits[0], partial(self._take_one, sequence))
        assert sequence.drafts is not None
        sequence.drafts.learn(root, path, emitted, output, 0)
        return sequence.ids[0, -1:]

    # --- tokens ----------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, logits: Tensor) -> Tensor:
        """The next token (1,) from ``logits`` (1, V)."""
        token = sequence.sampling.take(logits)
        self._emit(sequence)
        return token

    def _take_one(self, sequence: Sequence, logits: Tensor) -> tuple[int, bool]:
        """As `_take`, from logits (V,), for a walk through a tree."""
        self._take(sequence, logits[None])
        return sequence.sampler.tokens[-1], sequence.done

    def _emit(self, sequence: Sequence) -> None:
        """Stream the token that was taken, and end the sequence when it was the last."""
        device = self.adapter.device
        if sequence.first is None:
            sequence.first = clock(device)
        if sequence.streamer is not None:
            sequence.streamer.put(torch.tensor(sequence.sampler.tokens[-1:]))
        sequence.done = sequence.sampler.is_done() or sequence.count == sequence.most
        if sequence.done:
            end = clock(device)
            sequence.stats.finish(sequence.count, sequence.begin, sequence.first, end, device)
            if sequence.streamer is not None:
                sequence.streamer.end()

    def _is_unambiguous(self, sequence: Sequence, logits: Tensor) -> bool:
        """Whether the token of ``logits`` (V,) does not depend on their last bits."""
        ulp = torch.finfo(self.adapter.dtype).eps * float(logits.float().abs().max())
        best = sequence.sampling.ranked(logits[None]).topk(2, dim=-1).values[0]
        sampler = sequence.sampler
        scale = getattr(sampler.config, "temperature", None) or 1.0 if sampler.sampled else 1.0
        return float(best[0] - best[1]) > _ULPS * ulp / scale

    def _draft(self, sequence: Sequence) -> None:
        """Start the recipe's drafters, once the prompt has been prefilled."""
        if sequence.watch is not None and not sequence.done:
            stages = sequence.recipe.acting(DrafterStage)
            sequence.drafts = Speculation(self.adapter, sequence, stages)


def generate_of(model: nn.Module) -> Callable[..., Any]:
    """Hugging Face's ``generate``; `attach` may have replaced that of the model."""
    of_class: Callable[..., Any] = getattr(type(model), "generate", GenerationMixin.generate)
    return partial(of_class, model)


def _prepared(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    vlmfast_seed: int | None = None,
    **kwargs: Any,
) -> Sampler:
    """The callable that ``generate(custom_generate=...)`` calls instead of its own loop."""
    return Sampler(input_ids, logits_processor, stopping_criteria, generation_config, vlmfast_seed)


def too_long(positions: int, max_new_tokens: int, bound: int, *, least: bool = False) -> ModelError:
    """The error for a prompt whose answer of ``max_new_tokens`` tokens does not fit.

    ``least``: ``positions`` is a lower bound.
    """
    ways = ["a shorter text", "fewer or smaller images or frames", "positions=compact"]
    if positions < bound:
        ways.insert(0, f"max_new_tokens={bound - positions}")
    return ModelError(
        f"the prompt takes {'at least ' if least else ''}{positions} positions and its answer up "
        f"to {max_new_tokens}, and the model has {bound}; use {', '.join(ways[:-1])}, or a recipe "
        f"with {ways[-1]}"
    )
