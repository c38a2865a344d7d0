"""Prefills prompts: whole, chunk by chunk, and after a cache that is reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import PrefillContext, VisionContext, current_context
from vlmfast.core.layout import TokenLayout
from vlmfast.core.protocols import CacheStage, DecodeStage
from vlmfast.errors import ModelError
from vlmfast.models.base import Adapter

from .cache import KVCache
from .chunks import chunks, splittable
from .decode import RowGroup
from .mode import lasting
from .prefill import Inputs, Prompt, Seen, TooLarge, prefill, prepare, rows_of
from .prefix import Prefix, copied
from .prefixes import Prefixes
from .sequence import Prefill, Sequence
from .stats import Stats, Trace

_AT_ONCE = 1024  # ids of text that are prefilled at once after a cache


class Prefiller:
    """Prefills the prompts of one model's sequences.

    Parameters
    ----------
    adapter : Adapter
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.prefixes = adapter, Prefixes(adapter)

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

    def shared(self, sequence: Sequence, size: int | None = None) -> Prefill:
        """Prefill the prompt of a sequence after what the prefix cache has of it.

        Parameters
        ----------
        size : int, optional
            As in `read_chunks`; by default the prompt is prefilled at once.
        """
        inputs, ids = sequence.inputs, sequence.ids
        known = inputs.ids
        digests = tuple(image.digest.hex() for image in inputs.hashed or ())
        visual = self.adapter.visual(known).nonzero()
        scope = None
        # The rotary tables of a long prompt may differ from those of its beginning.
        if (digests or not len(visual)) and self.adapter.is_short(ids.shape[1]):
            about = digests, inputs.sizes, inputs.frames
            scope = self.prefixes.scope(sequence.recipe, *about, tenant=inputs.tenant)
        prefix = self.prefixes.resume(scope, sequence, int(visual[-1]) + 1 if len(visual) else 0)
        if prefix is not None:
            reused = len(prefix.ids)
            self.count_prompt(sequence, reused=reused)
            logits = yield from self.extend_text(sequence, ids[:, reused:], chunk=size)
        else:
            reused, inputs.tower = 0, None if scope is None else scope.weights[0]
            if size is None:
                logits = self.read(sequence)
            else:
                logits = yield from self.read_chunks(sequence, size)
        # A copy of what is there already, with another question, is not worth its bytes.
        if scope is not None and 2 * reused < ids.shape[1]:
            at_once = size is None and prefix is None
            self.prefixes.keep_copy(scope, Prefix.of(sequence, known.tolist()), at_once=at_once)
        return logits

    def read_chunks(self, sequence: Sequence, size: int) -> Prefill:
        """Prefill the prompt of a sequence in chunks of at most ``size`` rows, where possible."""
        inputs, recipe, stats = sequence.inputs, sequence.recipe, sequence.stats
        whole = prepare(self.adapter, inputs, recipe, stats, sequence.trace)
        yield True
        max_new_tokens, rows = sequence.max_new_tokens, len(whole.layout)
        if rows <= size or not splittable(self.adapter, recipe, whole, max_new_tokens):
            return self.prefill(sequence, whole, max_new_tokens)
        logits, count = None, 0
        for part in chunks(self.adapter, whole, size):
            count += 1
            rows -= len(part.layout)
            if sequence.group is None:
                logits = self.prefill(sequence, part, max_new_tokens, following=rows)
            else:
                logits = self.extend(sequence, part)
            yield True
        assert sequence.group is not None
        stats.prefill_chunks = count
        visual = whole.layout.visuals
        stats.layer_tokens([visual] * self.adapter.depth, self.adapter.config.get_text_config())
        cache = sequence.group.cache
        cache.base = [max(cache.base[0], whole.base or 0)]
        self.count_cache(sequence, whole.full_length)
        return logits

    @lasting
    def prefill(
        self,
        sequence: Sequence,
        prompt: Prompt,
        max_new_tokens: int,
        limit: int | None = None,
        *,
        bounded: bool = True,
        following: int = 0,
        noting: tuple[CacheStage, ...] = (),
    ) -> Tensor:
        """Prefill a prompt whose visual tokens are merged in. Returns the logits (1, V) after it.

        Parameters
        ----------
        limit, noting : optional
            As in `extend`.
        bounded : bool
            Whether at most ``max_new_tokens`` tokens follow the prompt.
        following : int
            Rows of the prompt after these, see `extend`.

        Raises
        ------
        ModelError
            When prompt and answer do not fit into the model's positions or its sliding window.
        """
        adapter, stats, watch = self.adapter, sequence.stats, sequence.watch
        self.fit(sequence, prompt.reach(), max_new_tokens if bounded else 1)
        sequence.prompt, sequence.notes = prompt, prompt.notes
        stats.prompt_tokens = len(prompt.layout)
        windows: Many[int | None] = adapter.windows
        if bounded:  # a window as long as the whole sequence has no effect
            total = prompt.places(following) + max_new_tokens
            windows = [None if window is None or total <= window else window for window in windows]
        cache = KVCache(adapter.depth, adapter.pool, windows, adapter.state_layers)
        notes = {name: dict(own) for name, own in prompt.notes.items()}
        trace = copied(sequence.trace, adapter.device, sequence.trace.images)
        run = partial(prefill, adapter, prompt, sequence.recipe + noting)
        given: dict[str, Any] = {"limit": limit, "watch": watch}
        try:
            try:
                logits = run(cache, stats, sequence.trace, **given, exact=False)
            except TooLarge:  # again, with the dtype that each layer needs
                cache.release()
                prompt.notes.clear()
                prompt.notes.update(notes)
                sequence.trace = trace
                cache = KVCache(adapter.depth, adapter.pool, windows, adapter.state_layers)
                logits = run(cache, stats, trace, **given)
            # Without an image the cache is left alone.
            has_image = prompt.layout.visuals > 0
            stages = sequence.recipe.acting(DecodeStage) if has_image else []
            cache.freeze(
                max_new_tokens,
                prompt.full_length,
                base=prompt.full_length if prompt.base is None else prompt.base,
                track=bool(stages),
                attention_mass=any(stage.attention_mass for stage in stages),
                position=prompt.places(following) - following,
            )
            count_bytes(stats, cache)
            position = torch.full_like(prompt.layout.position[:, :1], prompt.next_position)
            sequence.stages, sequence.prompt_slots = stages, cache.slots()
            sequence.group = RowGroup(adapter, cache, rows_of(position), [sequence])
        except BaseException:
            cache.release()
            raise
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
        group = sequence.group
        assert group is not None
        self.fit(sequence, prompt.reach(), 0)
        given = group.cache, sequence.stats, sequence.trace
        logits = prefill(
            self.adapter,
            prompt,
            sequence.recipe + noting,
            *given,
            limit=limit,
            watch=sequence.watch,
            extends=True,
            compress=compress,
        )
        sequence.prompt = prompt
        sequence.stats.prompt_tokens += len(prompt.layout)
        group.position.fill_(prompt.next_position)
        sequence.prompt_slots = group.cache.slots()
        return logits[:, -1]

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
            raise TooLong(
                f"prompt and answer take {positions + max_new_tokens} positions, more than the "
                f"model's sliding window of {window}; shorten one of them, or drop visual tokens "
                "with positions=compact"
            )

    def release(self, sequence: Sequence) -> None:
        """Return the cache buffers of a sequence."""
        if sequence.group is not None:
            sequence.group.release()
            sequence.group = None

    # --- sharing ---------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence, stats: Stats, trace: Trace) -> None:
        """Copy to a sequence the statistics of images encoded for an earlier one."""
        sequence.stats.visual_tokens_in = stats.visual_tokens_in
        sequence.stats.visual_tokens_kept = dict(stats.visual_tokens_kept)
        sequence.trace = copied(trace, self.adapter.device, sequence.trace.images)

    def count_prompt(self, sequence: Sequence, *, reused: int) -> None:
        """Record how many ids of a prompt are already cached; the others are prefilled."""
        sequence.stats.prompt_reused = sequence.stats.cached_tokens = reused
        sequence.stats.prompt_fed = sequence.prompt_length - reused

    def count_cache(self, sequence: Sequence, ids: int | None = None) -> None:
        """Record the size of the cache of a prompt of ``ids``, by default all that it consumed."""
        stats, group = sequence.stats, sequence.group
        assert group is not None
        count_bytes(stats, group.cache)
        stats.kv_tokens_per_layer = group.cache.lengths()
        consumed = group.cache.logical[0]
        stats.kv_bytes_full = self.adapter.cache_bytes(consumed if ids is None else ids)

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
        group, prompt = sequence.group, sequence.prompt
        assert group is not None and prompt is not None
        layers = group.cache.layers
        pairs = list(zip(layers, positions, strict=True))
        if any(not layer.even or old.shape[1] != layer.max_lengths[0] for layer, old in pairs):
            return None
        found = []
        for number, (layer, old) in enumerate(pairs):
            new = torch.arange(old.shape[1], device=old.device).expand(len(old), -1)
            keys = layer.keys[0, :, : old.shape[1]]
            keys.copy_(self.adapter.rotate(keys, new - old, number))
            found.append(new)
        prompt.next_position = max(group.cache.lengths())
        group.position.fill_(prompt.next_position)
        return found

    def count_block(self, sequence: Sequence, stats: Stats) -> None:
        """Add the cost of one block of a video before the language model."""
        sequence.stats.include(stats)

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
        stats, text = sequence.stats, self.adapter.config.get_text_config()
        stats.layer_tokens([visual] * self.adapter.depth, text)
        stats.flops_prefill = float(flops)
        self.count_cache(sequence, ids)

    def extend_text(
        self,
        sequence: Sequence,
        ids: Tensor,
        logits: Tensor | None = None,
        chunk: int | None = None,
    ) -> Prefill:
        """Prefill the text that ends a prompt, chunk by chunk.

        Parameters
        ----------
        ids : Tensor, int64, (1, T)
        logits : Tensor, (1, V), optional
            After the previous part; returned where no text follows.
        chunk : int, optional
            Ids per forward pass, which bounds the size of their mask.
        """
        group = sequence.group
        assert group is not None
        cache = group.cache
        positions = int(group.position.max()) + ids.shape[1]
        self.fit(sequence, positions, sequence.max_new_tokens)
        parts = ids.split(chunk or _AT_ONCE, dim=1) if ids.shape[1] else ()
        if chunk is not None:
            sequence.stats.prefill_chunks = max(len(parts), 1)
        for part in parts:
            count = torch.arange(part.shape[1], device=part.device)
            position = group.position.reshape(-1, 1) + count
            prompt = Prompt(
                self.adapter.embed_around(part)[0],
                TokenLayout.text(count + cache.logical[0], position),
                part.shape[1],
                int(position.max()) + 1,
                notes=sequence.notes,
                tensors={"input_ids": part},
            )
            logits = self.extend(sequence, prompt)
            yield True
        self.count_cache(sequence)
        assert logits is not None
        return logits


def count_bytes(stats: Stats, cache: KVCache) -> None:
    """Record the size of a cache, as it is when ``stats`` are read: before it is decoded."""
    stats.later(lambda: setattr(stats, "kv_bytes", cache.held_bytes()))


class TooLong(ModelError):
    """A prompt and its answer do not fit into the model's context."""


def too_long(positions: int, max_new_tokens: int, bound: int, *, least: bool = False) -> TooLong:
    """The error for a prompt whose answer of ``max_new_tokens`` tokens does not fit.

    ``least``: ``positions`` is a lower bound.
    """
    ways = ["a shorter text", "fewer or smaller images or frames", "positions=compact"]
    if positions < bound:
        ways.insert(0, f"max_new_tokens={bound - positions}")
    return TooLong(
        f"the prompt takes {'at least ' if least else ''}{positions} positions and its answer up "
        f"to {max_new_tokens}, and the model has {bound}; use {', '.join(ways[:-1])}, or a recipe "
        f"with {ways[-1]}"
    )


@contextmanager
def interleaved(adapter: Adapter, between: Callable[[], None]) -> Iterator[None]:
    """Call ``between`` before each block of tower and language model, in passes over a prompt.

    A long prompt occupies the model for many times as long as a decode step. Its forward pass
    cannot be split by tokens under every recipe, and the vision tower runs on all images at once.
    Between its blocks, requests can be cancelled and other sequences can be decoded.

    Parameters
    ----------
    between : callable
        May run decode steps, and raise to end the forward pass.
    """
    device = adapter.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        context = kwargs.get("vlmfast_context") or current_context.get()
        if not isinstance(context, PrefillContext | VisionContext):
            return  # a decode step that `between` runs
        if stream is not None and torch.cuda.current_stream(device) != stream:
            return  # a forward pass that is being captured
        token = current_context.set(None)
        try:
            between()
        finally:
            current_context.reset(token)

    with ExitStack() as hooks:
        for block in (*adapter.vision_blocks(), *adapter.decoder.layers):
            hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        yield
