"""From processor output to the first logits: encode, reduce, merge, prefill with drops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import EncodeRequest, PrefillContext, active
from vlmfast.core.layout import Numbering, TokenLayout, VisualTokens, next_id
from vlmfast.core.protocols import (
    EncodeStage,
    InEncoderStage,
    PrefillStage,
    ViewStage,
    tower_stages,
)
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage, is_own
from vlmfast.core.statistics import ItemGeometry, StatRequest, VisionStats
from vlmfast.errors import ModelError, RecipeError
from vlmfast.kernels.gather_rows import gather_rows, gather_rows_ref
from vlmfast.kernels.quantize_kv import fits
from vlmfast.models.base import Adapter

from .cache import KVCache
from .calls import called
from .compress import Compression
from .features import Hashed, encoded, with_digests
from .forward import Watch, capture_layer_inputs, shifted
from .stats import Stats, Trace
from .tower import only_in
from .vision import Wanted, merge_requests, place


@dataclass
class Prompt:
    """A prompt that is ready for the language model.

    Parameters
    ----------
    embeds : Tensor, (S, D)
    layout : TokenLayout, S rows
    full_length : int
        Ids of the prompt before anything was dropped.
    next_position : int
        Rotary id of the first generated token.
    extra : tuple of Tensor, each (S_visual, D)
        Deepstack levels of the visual rows.
    notes, trained : dict
        As in `PrefillContext`.
    answer : int
        Training: ids at the end that are the answer.
    full : Numbering, optional
        Rotary ids before anything was dropped; by default those of ``layout``, if complete.
    tensors : dict of str to Tensor
        What it was made from, as in `Inputs`.
    base : int, optional
        The result of `Places.countable`; the id after the prompt by default.
    """

    embeds: Tensor
    layout: TokenLayout
    full_length: int
    next_position: int
    extra: tuple[Tensor, ...] = ()
    notes: dict[str, dict] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)
    answer: int = 0
    full: Numbering | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    base: int | None = None

    def reach(self) -> int:
        """The number of rotary ids up to its largest, which may be a time of a video."""
        if len(self.layout.position) == 1:
            return self.next_position
        return max(self.next_position, int(self.layout.position.max()) + 1)

    def places(self, following: int = 0) -> int:
        """Where the token after the prompt is, as windows count (`PrefillContext.place`).

        ``following``: rows of the prompt after these.
        """
        rotary = len(self.layout.position) == 1
        return self.next_position if rotary else len(self.layout) + following

    def after(self, ids: int) -> Prompt:
        """The same as a later part of a prompt, after ``ids`` others."""
        if not ids:
            return self
        return replace(
            self,
            layout=self.layout.replace(order=self.layout.order + ids),
            full=self.full and replace(self.full, first=self.full.first + ids),
            base=None if self.base is None else self.base + ids,
        )


@dataclass
class Inputs:
    """Processor output, and what else the engine must know.

    Parameters
    ----------
    tensors : dict of str to Tensor
        ``input_ids`` (1, S) and whatever the family's vision tower takes.
    sizes : list of (int, int)
        Height and width of every image in pixels.
    question : str
        Text of the last user turn.
    frames : list of (int, int, int)
        For every image the video that it is a frame of (-1: none), its index and the number of
        frames.
    answer : int
        Training: ids at the end of the prompt that are the answer.
    offset, start : int
        Of a later part of a prompt: ids and rotary ids before it.
    items : tuple of ItemGeometry, optional
        Of the images; the result of `Adapter.items` by default.
    hashed : list of Hashed, optional
        The images by their content, see `features.hashed`; computed where it is needed by default.
    tenant : str
        Whose entries of the prefix cache may be used, see `prefix_cache.Key`.
    tower : bytes, optional
        The fingerprint of the tower, where nothing can run between it and the next `look`.
    """

    tensors: dict[str, Tensor]
    sizes: list[tuple[int, int]] = field(default_factory=list)
    question: str = ""
    frames: list[tuple] = field(default_factory=list)
    answer: int = 0
    offset: int = 0
    start: int = 0
    items: tuple[ItemGeometry, ...] | None = None
    hashed: list[Hashed] | None = None
    tenant: str = ""
    tower: bytes | None = None

    @functools.cached_property
    def ids(self) -> Tensor:
        """Tensor, int64, (S,): ``input_ids`` in host memory, read once."""
        return self.tensors["input_ids"][0].cpu()

    def wait(self) -> None:
        """Hold the pixels in host memory; `vision.encode` moves them back."""
        self.tensors = _on_host(self.tensors)
        if self.hashed is not None:
            self.hashed = [
                replace(one, part=replace(one.part, tensors=_on_host(one.part.tensors)))
                for one in self.hashed
            ]


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: value.cpu() if key.startswith("pixel_values") else value
        for key, value in tensors.items()
    }


@dataclass
class Seen:
    """Images after the vision tower and before any encode stage, shared by several questions.

    Parameters
    ----------
    tokens : VisualTokens
    vision : VisionStats
        What the recipe's encode stages requested from the tower.
    notes, trained : dict
        As in `PrefillContext`.
    """

    tokens: VisualTokens
    vision: VisionStats
    notes: dict[str, dict] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)


class TooLarge(Exception):
    """float16 cannot hold the parameters of what a forward pass has quantized."""


@dataclass(frozen=True, eq=False)
class Places:
    """Rotary ids and placeholders of a prompt in host memory, so that the device is not read.

    Parameters
    ----------
    positions : Tensor, int64, (P, S)
    visual : Tensor, bool, (S,)
    """

    positions: Tensor
    visual: Tensor

    @staticmethod
    def of(adapter: Adapter, inputs: Inputs) -> Places:
        """Those of the full prompt."""
        own = {"input_ids": inputs.ids[None]}
        for key in adapter.position_tensors:
            if (value := inputs.tensors.get(key)) is not None:
                own[key] = value.cpu()
        return Places(adapter.positions(own) + inputs.start, adapter.visual(inputs.ids))

    @property
    def next_position(self) -> int:
        """The rotary id after the prompt."""
        return next_id(self.positions)

    def position(self, device: torch.device) -> Tensor:
        """``positions`` on the device; those that only count are not copied."""
        first, rows = int(self.positions[0, 0]), self.positions.shape[1]
        count = torch.arange(first, first + rows)[None]
        if torch.equal(self.positions, count):
            return torch.arange(first, first + rows, device=device)[None]
        return self.positions.to(device)

    @property
    def run(self) -> int | None:
        """`TokenLayout.run` of the prompt, also after tokens were dropped."""
        rows = self.visual.nonzero().flatten().tolist()
        return rows[0] if rows and rows[-1] - rows[0] == len(rows) - 1 else None

    def split(self, visual: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of text and of placeholders, int64, by ``visual`` on the device."""
        rows = visual.to(torch.uint8).argsort(stable=True)
        text = len(rows) - int(self.visual.sum())
        return rows[:text], rows[text:]

    def countable(self, *, whole: bool) -> int:
        """The id from which all (unless ``whole``: all text) have a row and rotary ids count on."""
        left = torch.arange(len(self.visual), 0, -1)  # rows up to the end
        single = (self.positions == self.next_position - left).all(0)
        if not whole:  # from here on there are placeholders, some of which have no row
            single &= self.visual.flip(0).cumsum(0).flip(0) == 0
        return len(single) - int(single.flip(0).long().cumprod(0).sum())


def items_of(adapter: Adapter, inputs: Inputs) -> tuple[ItemGeometry, ...]:
    """The geometry of the images of a prompt."""
    if inputs.items is not None:
        return inputs.items
    return adapter.items(inputs.tensors, inputs.sizes, inputs.frames)


def look(
    adapter: Adapter,
    inputs: Inputs,
    recipe: Recipe,
    stats: Stats,
    trace: Trace,
    position: Tensor | None = None,
) -> Seen:
    """Encode the images of a prompt.

    ``position`` (P, S) are its rotary ids, the family's own by default.
    """
    device = inputs.tensors["input_ids"].device
    places = Places.of(adapter, inputs)
    position = places.position(device) if position is None else position
    visual = places.split(adapter.visual(inputs.tensors["input_ids"][0]))[1]
    items = items_of(adapter, inputs)
    outside, views = recipe.acting(EncodeStage), recipe.acting(ViewStage)
    wanted = Wanted.of(adapter, items, recipe.acting(InEncoderStage), outside, views)
    # Not before: the tower may not serve the recipe.
    trained = {stage.name: adapter.trained(stage) for stage in recipe if stage.trained}
    with stats.timed("time_vision_s", device):
        tower, inputs.tower = inputs.tower, None
        given = inputs.tensors, items, inputs.hashed, wanted, inputs.tenant, stats, trained
        images = encoded(adapter, *given, tower)
        where = visual, position.index_select(1, visual)
        tokens = place(adapter, images, wanted, *where, stats, trace)
    vision = images.encoded.stats
    if any(stage.wants_digest for stage in recipe.acting(EncodeStage)):
        vision = replace(vision, items=with_digests(adapter, inputs.tensors, vision.items))
    return Seen(tokens, vision, images.notes, trained)


def prepare(
    adapter: Adapter,
    inputs: Inputs,
    recipe: Recipe,
    stats: Stats,
    trace: Trace,
    seen: Seen | None = None,
) -> Prompt:
    """Encode the images, reduce their tokens and merge them into the prompt.

    Parameters
    ----------
    seen : Seen, optional
        The same images at the same position of a prompt, already encoded under this recipe.
    """
    ids = inputs.tensors["input_ids"]
    places = Places.of(adapter, inputs)
    position = places.position(ids.device)
    is_visual = adapter.visual(ids[0])
    spoken, visual = places.split(is_visual)
    text_layout = TokenLayout.text(spoken, position.index_select(1, spoken))
    # Placeholder ids may lie outside the vocabulary, so only text is embedded.
    text = adapter.embed_around(ids.index_select(1, spoken))[0]
    next_position = places.next_position
    if not inputs.sizes and seen is None:
        if len(visual):
            raise ModelError("the prompt has image placeholders, but no image was given")
        return Prompt(
            text,
            text_layout,
            ids.shape[1],
            next_position,
            answer=inputs.answer,
            tensors=inputs.tensors,
            base=places.countable(whole=True),
        ).after(inputs.offset)

    stages = recipe.acting(EncodeStage)
    if seen is None:
        seen = look(adapter, inputs, recipe, stats, trace, position)
    tokens, vision = seen.tokens, seen.vision
    stats.saliency = trace.saliency = vision.sources()
    stats.left_out = list(vision.left_out)
    merged = len(tokens) < ids.shape[1] - len(text)
    closed = merged and any(_compacts(stage) for stage in tower_stages(recipe))
    # Notes of encode stages belong to this question, those of the tower to all questions.
    notes = {name: dict(noted) for name, noted in seen.notes.items()}

    with stats.timed("time_reduce_s", ids.device):
        question_embeds = text[: len(text) - inputs.answer]
        request = EncodeRequest(
            inputs.question,
            question_embeds,
            adapter.depth,
            notes,
            seen.trained,
            order=text_layout.order[: len(question_embeds)],
            images=trace.images,
        )
        tower = len(adapter.vision_blocks())
        for stage in stages:
            # Only what this stage requested: another one may have requested other layers.
            wanted = stage.vision_stats(tower)
            rows = {layer: vision.rows[layer] for layer, r in wanted.items() if r.rows != "keys"}
            keys = {layer: vision.keys[layer] for layer, r in wanted.items() if r.keys}
            before = len(tokens)
            tokens = stage.reduce(tokens, replace(vision, rows=rows, keys=keys), request)
            closed = closed or (_compacts(stage) and len(tokens) < before)
            trace.drop_before(0, tokens.layout, stage.name)
            stats.visual_tokens_kept[stage.name] = len(tokens)
        layout = TokenLayout.cat([text_layout, tokens.layout])
        rank = layout.order.argsort(stable=True)
        layout = layout.select(rank).counted(len(tokens), places.run)
        full = Numbering.of(position, torch.where(is_visual, ids[0], -1))
        if closed:
            layout = layout.replace(position=adapter.compact(full, layout.order))
            plain = type(adapter).compact is Adapter.compact
            first = int(places.positions[0, 0])
            next_position = first + len(layout) if plain else next_id(layout.position)
        embeds = torch.cat([text, tokens.features.to(text.dtype)]).index_select(0, rank)
    return Prompt(
        embeds,
        layout,
        ids.shape[1],
        next_position,
        tokens.extra,
        notes,
        seen.trained,
        inputs.answer,
        full,
        inputs.tensors,
        places.countable(whole=len(layout) == ids.shape[1]),
    ).after(inputs.offset)


def _compacts(stage: Stage) -> bool:
    return getattr(stage, "positions", "keep") == "compact"


def prefill(
    adapter: Adapter,
    prompt: Prompt,
    recipe: Recipe,
    cache: KVCache,
    stats: Stats,
    trace: Trace,
    *,
    limit: int | None = None,
    watch: Watch | None = None,
    make: Callable[..., PrefillContext] = PrefillContext,
    exact: bool = True,
    extends: bool = False,
    compress: bool = True,
) -> Tensor:
    """Run the prompt through the decoder, filling ``cache``; ``limit`` is as in `PrefillContext`.

    Parameters
    ----------
    watch : Watch, optional
        Records what drafters read.
    make : callable
        Builds the context of the forward pass.
    exact : bool
        Whether the dtype of what is quantized is read layer by layer; otherwise it is assumed.
    extends, compress : bool
        Whether this is a later chunk of a prompt, after what ``cache`` has of it, and whether the
        recipe's cache stages run on it.

    Returns
    -------
    Tensor, (1, 1 + answer, V)
        Logits after the last token of the prompt, or from there on to the end of its answer.

    Raises
    ------
    TooLarge
        Where the assumed dtype cannot hold what was quantized.
    """
    stages = [] if extends else recipe.acting(PrefillStage)
    merging = [*recipe.acting(InEncoderStage), *recipe.acting(EncodeStage), *stages]
    context = make(
        prompt.layout,
        depth=adapter.depth,
        cache=cache,
        mask_rule=_mask_rule(adapter, prompt.answer),
        notes=prompt.notes,
        trained=prompt.trained,
        norm=adapter.normalizer(),
        # Where nothing was merged, no bias is needed and attention is the model's own.
        proportional_attention=any(stage.proportional_attention for stage in merging)
        and bool((prompt.layout.weight != 1).any()),
        limit=limit,
        extends=extends,
    )
    context.largest = None if exact else []
    assert context.answer == prompt.answer  # a prompt with one needs a `TrainingContext`
    if not prompt.layout.visuals:
        stages = []  # nothing to drop
    attending: dict[int, PrefillStage] = {}
    for stage in stages:
        _in_attention(adapter, stage.attends(adapter.depth), stage)
        for layer in stage.attends(adapter.depth):
            if attending.setdefault(layer, stage) is not stage:
                raise RecipeError(
                    f"{stage.name} and {attending[layer].name} both compute the attention of "
                    f"layer {layer}; only one may"
                )
    context.attend.update({layer: stage.attend for layer, stage in attending.items()})
    compression = Compression.of(adapter, recipe, context, cache, stats) if compress else None
    ahead: dict[int, StatRequest] = {}
    for stage in stages:
        wanted = stage.text_stats(adapter.depth)
        for requests, early in ((context.requests, False), (ahead, True)):
            chosen = {layer: r for layer, r in wanted.items() if r.ahead is early}
            _in_attention(adapter, chosen, stage)
            merge_requests(requests, chosen, stage.name)
    drops = Drops(adapter, prompt, stages, ahead, context, stats, trace)
    position = rows_of(prompt.layout.position)
    given = {"position_ids": position, adapter.cache_name: cache}
    inside = [active(context), drops.installed()]
    if extends:
        inside += [shifted(adapter, context, position), cache.biased(context.key_bias())]
    layers = () if watch is None else watch.layers

    def run() -> Tensor:
        return adapter.decoder(
            inputs_embeds=prompt.embeds[None],
            use_cache=True,
            **given,
            **adapter.decoder_kwargs(prompt.layout, prompt.extra),
        ).last_hidden_state.to(prompt.embeds.device)

    # The stages' own work included.
    with stats.timed("time_prefill_s", prompt.embeds.device):
        with ExitStack() as entered:
            for manager in inside:
                entered.enter_context(manager)
            seen = entered.enter_context(capture_layer_inputs(adapter.decoder, layers, context))
            hidden, logits = called(adapter, run, prompt.tensors | given, 1 + prompt.answer)
        if compression is not None:
            compression.finish()
    if context.largest and not fits(context.largest):
        raise TooLarge
    if watch is not None:
        watch.remember(context, prompt.embeds, prompt.layout.order, hidden[0], seen)
    if extends:
        if compression is None:
            cache.advance(len(prompt.layout))
            cache.consume(prompt.full_length - len(prompt.layout))
        else:  # it has counted the slots that it keeps
            cache.consume(prompt.full_length)
        return logits
    stats.layer_tokens(drops.visual_per_layer, adapter.config.get_text_config())
    stats.kv_bytes_full = adapter.cache_bytes(prompt.full_length)
    stats.kv_tokens_per_layer = cache.lengths()
    return logits


def _mask_rule(adapter: Adapter, answer: int) -> Callable[[TokenLayout], Tensor] | None:
    """`Adapter.mask_rule`; the last ``answer`` rows of a prompt see, and are seen, causally."""
    rule = adapter.mask_rule
    if rule is None or not (adapter.prefix_lm and answer):
        return rule

    def causal(layout: TokenLayout) -> Tensor:
        mask, first = rule(layout), len(layout) - answer
        mask[:, first:] = mask.new_ones(len(layout), answer).tril(-first)
        return mask

    return causal


def _in_attention(adapter: Adapter, layers: Iterable[int], stage: Stage) -> None:
    """Check that ``layers``, whose attention a stage uses, are layers with attention."""
    if states := sorted(adapter.state_layers.intersection(layers)):
        rest = sorted(set(range(adapter.depth)) - adapter.state_layers)
        raise RecipeError(
            f"{stage.name} uses the attention of layer {states[0]}, which holds a state in "
            f"{adapter.config.model_type} and has none; layers with attention are "
            f"{', '.join(map(str, rest))}"
        )


def rows_of(position: Tensor) -> Tensor:
    """Rotary ids (P, S) as a decoder takes them: (1, S), or (3, 1, S) for M-RoPE."""
    return position if position.shape[0] == 1 else position[:, None]


def _rows(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows ``index`` of tensors (..., S, D), in one launch."""
    take = gather_rows_ref if torch.is_grad_enabled() else gather_rows
    flat = take(index, *(x.flatten(0, -3) for x in tensors), dim=1)
    return tuple(rows.unflatten(0, x.shape[:-2]) for rows, x in zip(flat, tensors, strict=True))


@dataclass(eq=False)
class Drops:
    """Shortens the sequence between decoder layers during one prefill.

    A forward pre-hook on every layer from the first drop on: the decoder passes the same rotary
    tables and position ids to each layer, so all later layers need the shortened ones.
    """

    adapter: Adapter
    prompt: Prompt
    stages: list[PrefillStage]
    ahead: dict[int, StatRequest]
    context: PrefillContext
    stats: Stats
    trace: Trace

    def __post_init__(self) -> None:
        adapter, self.layers = self.adapter, self.adapter.decoder.layers
        self.schedule: dict[int, list[PrefillStage]] = {}
        for stage in self.stages:
            for layer in stage.layers(adapter.depth):
                first = 0 if stage.observes else adapter.min_drop_layer
                if not first <= layer < adapter.depth:
                    raise RecipeError(
                        f"{stage.name}: layer {layer} is out of range, this model can drop before "
                        f"layers {first} to {adapter.depth - 1}"
                    )
                self.schedule.setdefault(layer, []).append(stage)
        self.kept: Tensor | None = None  # remaining rows of the prompt
        self.tables: tuple[Tensor, ...] = ()  # rotary tables of these rows
        self.source: tuple[Tensor, ...] | None = None  # the full tables that they are rows of
        # Where rows were renumbered: tables of the new ids, by kind of layer.
        self.numbered: dict[str, tuple[Tensor, ...]] | None = None
        self.visual_per_layer = [self.context.layout.visuals] * adapter.depth

    @contextmanager
    def installed(self) -> Iterator[None]:
        first = min([*self.schedule, *self.ahead], default=len(self.layers))
        with ExitStack() as hooks:
            for index in range(first, len(self.layers)):
                hook = self.layers[index].register_forward_pre_hook
                hooks.enter_context(hook(self._hook(index), with_kwargs=True))
            yield

    def _hook(self, index: int) -> Callable[..., tuple[tuple, dict] | None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            hidden, home = args[0], self.context.layout.device
            if index in self.ahead or index in self.schedule:  # rows are dropped on one device
                hidden = hidden.to(home)
            tables = kwargs["position_embeddings"]
            if any(table.device != home for table in tables):
                tables = tuple(table.to(home) for table in tables)
                kwargs = {**kwargs, "position_embeddings": tables}
            if index in self.ahead:
                with self.stats.timed("time_reduce_s", hidden.device):
                    self._probe(index, hidden, kwargs)
            for stage in self.schedule.get(index, ()):
                with self.stats.timed("time_reduce_s", hidden.device):
                    self.context.hidden = rows = hidden[0]
                    keep = stage.select_tokens(self.context, index)
                    if self.context.hidden is not rows:
                        hidden = self.context.hidden[None]
                    if keep is not None:
                        hidden = self._drop(stage, index, hidden, keep, kwargs)
            self.context.hidden = None
            if self.kept is None and hidden is args[0]:
                return None
            return (hidden, *args[1:]), {**kwargs, **self._positions(index, kwargs)}

        return only_in(self.context, hook)

    def _positions(self, index: int, kwargs: dict) -> dict:
        """Rotary tables and ids of the remaining rows."""
        if self.kept is None:
            return {key: kwargs[key] for key in ("position_embeddings", "position_ids")}
        tables, given = self.tables, kwargs["position_embeddings"]
        position = rows_of(self.context.layout.position)
        if self.numbered is not None:
            kind = self.adapter.rotary(index)
            if kind not in self.numbered:
                self.numbered[kind] = self.adapter.tables(given[0], position, index)
            tables = self.numbered[kind]
        elif self.source is not given:  # another kind of layer
            tables = _rows(self.kept, *given)
        return {"position_embeddings": tables, "position_ids": position}

    def _probe(self, index: int, hidden: Tensor, kwargs: dict) -> None:
        """Statistics of layer ``index`` before it runs, from its queries and keys alone."""
        probe = replace(
            self.context, probe=True, requests={index: self.ahead[index]}, stats={}, received={}
        )
        with active(probe):
            self.adapter.text_attention(index)(
                hidden_states=self.adapter.attention_norm(index)(hidden),
                attention_mask=None,
                **{self.adapter.cache_name: None},
                **self._positions(index, kwargs),
            )
        self.context.stats |= probe.stats
        self.context.received |= probe.received

    def _drop(
        self, stage: PrefillStage, index: int, hidden: Tensor, keep: Tensor, kwargs: dict
    ) -> Tensor:
        layout = self.context.layout
        if not is_own(stage):
            self._check(stage, keep)
        left = layout.visuals - (len(layout) - len(keep))
        if len(keep) < len(layout):
            hidden = self._select(stage, index, hidden, keep, kwargs)
        remaining = self.context.layout.counted(left, layout.run)
        visual = remaining.select(remaining.visual_rows()).counted(left, 0)
        self.visual_per_layer[index:] = [len(visual)] * (len(self.layers) - index)
        self.trace.drop_before(index, visual, stage.name)
        self.stats.visual_tokens_kept[stage.name] = len(visual)
        return hidden

    def _check(self, stage: PrefillStage, keep: Tensor) -> None:
        """Check the rows that a stage of another package keeps, which the host waits for."""
        layout = self.context.layout
        dropped = torch.ones_like(layout.visual).index_fill(0, keep, False)
        wrong = (keep[1:] <= keep[:-1]).any() | (dropped & ~layout.visual).any()
        if bool(wrong):
            raise RecipeError(f"{stage.name} must keep every text token, in ascending order")

    def _select(
        self, stage: PrefillStage, index: int, hidden: Tensor, keep: Tensor, kwargs: dict
    ) -> Tensor:
        """Rows ``keep`` of the hidden states, the layout, statistics and rotary tables."""
        given, renumbered = kwargs["position_embeddings"], self.numbered is not None
        tables: tuple[Tensor, ...] = ()
        if not _compacts(stage) and not renumbered:
            tables = self._positions(index, kwargs)["position_embeddings"]
        hidden, *tables_left = _rows(keep, hidden, *tables)
        self.context.select(keep)
        self.kept = keep if self.kept is None else self.kept.index_select(0, keep)
        if _compacts(stage):
            self._renumber(index)
        elif renumbered:
            self.numbered = {}
        else:
            self.tables, self.source = tuple(tables_left), given
        return hidden

    def _renumber(self, index: int) -> None:
        """Renumber rows without gaps from layer ``index`` on; decoding continues these ids."""
        layout, whole, full = self.context.layout, self.prompt.layout, self.prompt.full
        if full is None:
            full = Numbering.of(whole.position, whole.kind)
        position = self.adapter.compact(full, layout.order - full.first)
        self.context.layout = layout.replace(position=position)
        shift = self.prompt.next_position - next_id(position)
        for layer in self.context.cache.layers[index:]:
            layer.shift = [shift]
        self.numbered = {}
