"""The decode loop, run inside Hugging Face's ``generate`` through ``custom_generate``.

``generate`` prepares logits processors, stopping criteria and the generation config; this loop asks
them in the same order and with the same ids as Hugging Face's sampling loop, so that tokens and
random numbers are the same. In a batch every sequence has its own of them, which see its own ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from ..drafters.tree import Tree
from ..errors import ModelError, VLMFastError
from ..kernels.tree_verify import WORD
from ..models.base import Adapter
from ..recipe import Recipe
from ..stages import DecodeStage, Phase, Step
from .attention import switched
from .cache import KVCache, RowSlots
from .compress import Compression
from .fused import fusable, fused_step
from .graphs import Graphs, StepGraph
from .noise import gumbel
from .prefill import Inputs, Prompt, prefill, prepare, rows_of
from .speculation import Speculation, check, drafting, walk
from .stats import Stats, Trace, clock
from .taps import Watch, tapped

_WIDTHS = (2, 4, 8, 16, 32, 48, 64)  # nodes of a captured tree
_ULPS = 8  # near tie: so many units in the last place of the largest logit


def lasting(function: Callable) -> Callable:
    """Without gradients, and outside of inference mode, whose tensors nobody can write to later."""
    return torch.inference_mode(False)(torch.no_grad()(function))


@dataclass
class Output:
    """What a pass over T new tokens of each row gives.

    Parameters
    ----------
    logits : Tensor, (B, T, V)
    hidden : Tensor, (B, T, D)
        Behind the last norm.
    taps : Tensor, (B, T, K, D), optional
        What went into the layers `Decoder.taps`.
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None = None


@dataclass
class Row:
    """What a decoder knows of one of its sequences.

    Parameters
    ----------
    stages : list of DecodeStage
    notes : dict
        As in `Step`.
    prompt : Tensor, int64, (L, H)
        Slots of the tail when decoding began.
    steps : int
        Tokens that have been fed since.
    taps : tuple of int
        Layers whose input the row's drafter reads.
    """

    stages: list[DecodeStage]
    notes: dict[str, dict]
    prompt: Tensor
    steps: int = 0
    taps: tuple[int, ...] = ()


class Decoder:
    """Sequences that are decoded together, one token each per step.

    Parameters
    ----------
    adapter : Adapter
    cache : KVCache
        Frozen.
    position : Tensor, int64, (B, 1), or (3, B, 1) for M-RoPE
        Rotary ids of the tokens that come next; used up.
    rows : list of Row
    """

    def __init__(self, adapter: Adapter, cache: KVCache, position: Tensor, rows: list[Row]) -> None:
        self.adapter, self.cache, self.position, self.rows = adapter, cache, position, rows
        self.step = Step(Phase.DECODE, cache=cache)
        self.graph: StepGraph | None = None
        self.taps = tuple(sorted({layer for row in rows for layer in row.taps}))
        # Layers whose rows were renumbered in prefill, and by how much; on the device once.
        shifts = {index: tuple(held.shift) for index, held in enumerate(cache.layers)}
        self._shifts = {index: shift for index, shift in shifts.items() if any(shift)}
        self._offsets = {
            shift: torch.tensor(shift, device=position.device)[:, None]
            for shift in set(self._shifts.values())
        }

    @staticmethod
    def join(decoders: Sequence[Decoder]) -> Decoder:
        """One decoder for the sequences of all, which are used up."""
        if len(decoders) == 1:
            return decoders[0]
        position = torch.cat([decoder.position for decoder in decoders], dim=-2)
        cache = KVCache.cat([decoder.cache for decoder in decoders])
        for decoder in decoders:
            decoder.retire()
        rows = [row for decoder in decoders for row in decoder.rows]
        return Decoder(decoders[0].adapter, cache, position, rows)

    def select(self, rows: Sequence[int]) -> Decoder:
        """Only ``rows`` go on; this decoder is used up."""
        self.cache.select(rows)
        index = torch.tensor(list(rows), device=self.position.device)
        position = self.position.index_select(-2, index)
        self.retire()
        return Decoder(self.adapter, self.cache, position, [self.rows[row] for row in rows])

    def next(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens`` (B, 1); returns the logits (B, V) behind them. No host sync."""
        self.rework()
        return self.feed(tokens).logits[:, -1]

    def feed(self, tokens: Tensor) -> Output:
        """The same without the decode stages' work."""
        self.cache.reserve(1)
        output = self.captured(tokens) if self.captures else self.forward(tokens)
        self.cache.advance_host()
        return output

    def verify(self, trees: Sequence[Tree]) -> Output:
        """Read one tree of each row behind what it holds; nothing is counted before `accept`."""
        width = max(len(tree) for tree in trees)
        if self.captures:  # few widths, so that few steps are captured
            width = next(w for w in _WIDTHS if w >= width) if width <= _WIDTHS[-1] else width
        tokens = torch.zeros(len(trees), width, dtype=torch.int64)
        offset, mask = torch.zeros_like(tokens), torch.eye(width, dtype=torch.bool)
        mask = mask.repeat(len(trees), 1, 1)
        for row, tree in enumerate(trees):
            n = len(tree)
            tokens[row] = tree.tokens[0]  # padding: any token, which nobody sees
            tokens[row, :n] = torch.tensor(tree.tokens)
            offset[row, :n] = torch.tensor(tree.depths)
            mask[row, :n, :n] = tree.mask()
            if self.cache.mass:  # padding must not count as a reader
                mask[row, n:] = False
        given = tuple(of.to(self.position.device) for of in (tokens, offset, mask))
        self.cache.reserve(width)
        return self.captured(*given) if self.captures else self.forward(*given)

    def accept(self, paths: Sequence[Sequence[int]]) -> None:
        """Count the nodes of ``paths``, root first, of the trees that `verify` has read."""
        counts = [len(path) for path in paths]
        longest = max(max(counts), 1)
        device = self.position.device
        index = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
        moves = any(list(path) != list(range(len(path))) for path in paths)
        self.cache.accept(index.to(device), counts, moves=moves)
        self.position.add_(torch.tensor(counts, device=device)[:, None])
        for row, count in zip(self.rows, counts, strict=True):
            row.steps += count - 1  # `rework` has counted the root

    def rewind(self, tokens: int) -> None:
        """Forget the last ``tokens`` of every row."""
        self.cache.crop(tokens)
        self.position.sub_(tokens)

    def spare(self, number: int) -> int:
        """How many drafted tokens a row may take before a decode stage has work to do."""
        row, spare = self.rows[number], 1 << 30
        if any(stage.mass for stage in row.stages):  # what rejected tokens attend to would count
            return 0
        for stage in row.stages:
            gap = -row.steps % stage.every
            quiet = min(
                stage.quiet(self._slots(number, layer, prompt), layer)
                for layer, prompt in enumerate(row.prompt)
            )
            spare = min(spare, max(gap, quiet, 0))
        return spare

    @property
    def captures(self) -> bool:
        """Whether steps are captured: on CUDA, unless the user chose otherwise."""
        mode = self.adapter.decoding
        return mode == "graph" or (mode == "auto" and self.position.is_cuda)

    @property
    def graphs(self) -> Graphs:
        return self.adapter.kept.setdefault("graphs", Graphs())

    def captured(self, *given: Tensor) -> Output:
        """A step through a graph; one is captured where none fits. Arguments as in `forward`."""
        if self.graph is None or not self.graph.serves(self):
            if self.graph is not None:
                # Some buffers may still be the old step's: copied before others use them.
                own = self.graph.state
                self.load(
                    {k: of.clone() if own.get(k) is of else of for k, of in self.state().items()}
                )
                self.retire()
            self.graph = self.graphs.get(self)
            self.cache.lend(True)
        return self.graph.replay(self, *given)

    def retire(self) -> None:
        """Let the captured step serve others; nothing of this decoder is in its buffers now."""
        if self.graph is not None:
            self.graphs.put(self.graph)
            self.graph = None
            self.cache.lend(False)

    def release(self) -> None:
        """Give everything back; the decoder is not used again."""
        self.cache.release()
        self.retire()

    def forward(
        self, tokens: Tensor, offset: Tensor | None = None, tree: Tensor | None = None
    ) -> Output:
        """The step itself, from embedding to logits: the device's part, which can be captured.

        Parameters
        ----------
        tokens : Tensor, int64, (B, T)
        offset : Tensor, int64, (B, T), optional
            How far behind the next position each token stands. Without it, T is 1 and the token is
            counted.
        tree : Tensor, bool, (B, T, T), optional
            Which of the tokens see each other.
        """
        position = self.position if offset is None else self.position + offset
        self.step.tree, self.step.ancestors = tree, None
        self.step.phase = Phase.DECODE if tree is None else Phase.VERIFY
        if tree is not None and tree.shape[1] <= WORD:
            places = torch.arange(tree.shape[1], device=tree.device)
            self.step.ancestors = (tree.long() << places).sum(-1, keepdim=True)
        embeds, compiles = self.adapter.embed(tokens), self.adapter.decoding == "compile"
        if not compiles and fusable(self.adapter):
            offsets = {layer: self._offsets[shift] for layer, shift in self._shifts.items()}
            hidden, seen = fused_step(
                self.adapter, embeds, position, self.cache, self.step, offsets, self.taps
            )
        else:
            hidden, seen = self._modules(embeds, position)
        taps = torch.stack([seen[layer] for layer in self.taps], 2) if self.taps else None
        if tree is not None:
            return Output(self.adapter.logits(hidden), hidden, taps)
        self.cache.advance_device()
        self.position.add_(1)
        return Output(self.adapter.logits(hidden[:, -1])[:, None], hidden, taps)

    def _modules(self, embeds: Tensor, position: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """`fused_step` through the model's own modules."""
        decoder = self.adapter.decoder
        with self.shifted(self.step, position), tapped(decoder, self.taps, self.step) as seen:
            if self.adapter.decoding == "compile":
                decoder = self.adapter.kept.setdefault("compiled", torch.compile(decoder))
            hidden = decoder(
                inputs_embeds=embeds,
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
                vlmfast_step=self.step,
            ).last_hidden_state
        return hidden, seen

    def shallow(self, number: int, token: int, behind: int, layers: Sequence[int]) -> Tensor:
        """Logits (V,) behind ``token`` of one row by only some of the layers.

        Parameters
        ----------
        behind : int
            Tokens that were passed in this way before it; nothing is counted.
        layers : sequence of int
        """
        decoder, cache = self.adapter.decoder, self.cache
        tokens = torch.full((len(self.rows), 1), token, device=self.position.device)
        cache.advance(behind)
        cache.reserve(1)
        position = self.position + behind
        self.step.tree, self.step.phase = None, Phase.DECODE
        if cache.mass:  # what is drafted must not count as a reader of other rows
            self.step.tree = torch.zeros(len(self.rows), 1, 1, dtype=torch.bool)
            self.step.tree[number] = True
            self.step.tree = self.step.tree.to(position.device)
        try:
            with self.shifted(self.step, position):
                hidden = self.adapter.embed(tokens)
                for index in layers:
                    hidden = decoder.layers[index](
                        hidden,
                        attention_mask=None,
                        position_ids=position,
                        past_key_values=cache,
                        use_cache=True,
                        position_embeddings=self.adapter.tables(hidden, position, index),
                        vlmfast_step=self.step,
                    )
            return self.adapter.logits(decoder.norm(hidden)[number, -1])
        finally:
            cache.advance(-behind)

    def state(self) -> dict[tuple, Tensor]:
        """Every tensor that a step reads or writes beside the weights, by its place."""
        shifts = {("shift", *shift): of for shift, of in self._offsets.items()}
        return {("position",): self.position, **shifts, **self.cache.state()}

    def load(self, state: dict[tuple, Tensor]) -> None:
        """Go on in the tensors of ``state``, which hold the same."""
        self.position = state["position",]
        self._offsets = {shift: state["shift", *shift] for shift in self._offsets}
        self.cache.load(state)

    def rework(self) -> None:
        """Let the decode stages of each row work on what it holds."""
        for number, row in enumerate(self.rows):
            for stage in row.stages:
                if row.steps % stage.every == 0:
                    for layer, prompt in enumerate(row.prompt):
                        stage.step(self._slots(number, layer, prompt), layer)
            row.steps += 1

    def _slots(self, number: int, layer: int, prompt: Tensor) -> RowSlots:
        notes = self.rows[number].notes
        return RowSlots(self.cache, layer, number, prompt, notes, self.adapter.rotate)

    @contextmanager
    def shifted(self, step: Step, position: Tensor) -> Iterator[None]:
        """Layers whose rows were renumbered in prefill rotate by their own positions."""
        tables: dict[tuple, tuple[Tensor, ...]] = {}

        def hook(index: int, shift: tuple[int, ...]):
            key = shift, self.adapter.rotary(index)

            def rotate(module: nn.Module, args: tuple, kwargs: dict):
                if kwargs.get("vlmfast_step") is not step:
                    return None
                if key not in tables:
                    own = position - self._offsets[shift]
                    tables[key] = self.adapter.tables(args[0], own, index)
                return args, {**kwargs, "position_embeddings": tables[key]}

            return rotate

        handles = [
            self.adapter.decoder.layers[index].register_forward_pre_hook(
                hook(index, shift), with_kwargs=True
            )
            for index, shift in self._shifts.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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

    def __post_init__(self) -> None:
        drafters = self.recipe.acting("drafter")
        if drafters:
            check(drafters, self.adapter)
            self.watch = Watch(drafting(drafters, self.adapter), self.adapter.depth)

    @property
    def step(self) -> Step:
        return self.decoder.step

    @property
    def position(self) -> Tensor:
        return self.decoder.position

    @lasting
    def start(self, room: int) -> Tensor:
        """Prefill; ``room`` is the number of tokens that may follow. Returns logits (1, V)."""
        prompt = prepare(self.adapter, self.inputs, self.recipe, self.stats, self.trace)
        return self.start_from(prompt, room)

    @lasting
    def start_from(self, prompt: Prompt, room: int, limit: int | None = None) -> Tensor:
        """Prefill of a prompt that is already merged. Returns logits (1, V).

        ``limit`` is as in `extend`.

        Raises
        ------
        ModelError
            When prompt and answer do not fit into the model's sliding window.
        """
        self._fits(prompt.next_position + room)
        self.prompt = prompt
        self.stats.prompt_tokens = len(self.prompt.layout)
        self.cache = KVCache(self.adapter.depth, self.adapter.pool)
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
        self._fits(prompt.next_position)
        decoder, rows = self.decoder, len(prompt.layout)
        merging = [*self.recipe.acting("in-encoder"), *self.recipe.acting("encode")]
        step = Step(
            Phase.EXTEND,
            depth=self.adapter.depth,
            layout=prompt.layout,
            cache=self.cache,
            notes=prompt.notes,
            trained=prompt.trained,
            # As in `prefill`.
            repair=any(s.repair for s in merging) and bool((prompt.layout.weight != 1).any()),
            limit=limit,
        )
        if compress:
            Compression.of(self.adapter, self.recipe, step, self.cache, self.stats)
        position = rows_of(prompt.layout.position)
        start = clock(position.device)
        watch = self.watch
        watched = nullcontext() if watch is None else watch.over(self.adapter.decoder, step)
        biased = self.cache.biased(step.key_bias())
        with decoder.shifted(step, position), biased, watched as seen:
            hidden = self.adapter.decoder(
                inputs_embeds=prompt.embeds[None],
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
                vlmfast_step=step,
                **self.adapter.decoder_kwargs(prompt.layout, prompt.extra),
            ).last_hidden_state
        if watch is not None:
            watch.remember(step, prompt.embeds, prompt.layout.order, hidden[0], seen)
        if step.after is None:
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

    def _fits(self, positions: int) -> None:
        window = self.adapter.window
        if window is not None and positions > window:
            raise ModelError(
                f"prompt and answer take {positions} positions, more than the model's sliding "
                f"window of {window}; shorten one of them, or drop visual tokens with "
                "positions=compact"
            )


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
        if self.config.num_beams > 1 or self.config.num_return_sequences > 1:
            raise VLMFastError(
                "num_beams and num_return_sequences must be 1: vlmfast decodes greedily or by "
                "sampling"
            )
        if self.config.guidance_scale not in (None, 1):
            raise VLMFastError("guidance_scale is not supported: it would need a second prompt")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise VLMFastError(f"seed={self.seed!r} must be a whole number, or None")
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
        return self.config.max_length - self.prompt

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
        self.done = bool(self.criteria(self.ids, tuple(self.scores)).all())
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
