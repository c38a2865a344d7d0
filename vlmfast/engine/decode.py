"""The decode loop, run inside Hugging Face's ``generate`` through ``custom_generate``.

``generate`` prepares logits processors, stopping criteria and the generation config; this loop asks
them in the same order and with the same ids as Hugging Face's sampling loop, so that tokens and
random numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..errors import ModelError, RecipeError, VLMFastError
from ..models.base import Adapter
from ..recipe import Recipe
from ..stages import Phase, Step
from .attention import switched
from .cache import KVCache
from .prefill import Inputs, Prompt, prefill, prepare, rows_of
from .stats import Stats, Trace, clock

_SERVED = ("media", "in-encoder", "encode", "prefill")


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
    step: Step | None = None
    position: Tensor | None = None

    def __post_init__(self) -> None:
        for stage in (part for word in self.recipe for part in word.expand()):
            if stage.protocol not in _SERVED:
                raise RecipeError(
                    f"{stage.name} is a {stage.protocol} stage, which the engine does not run; "
                    f"it runs {', '.join(_SERVED)}"
                )

    @torch.no_grad()
    def start(self, room: int) -> Tensor:
        """Prefill; ``room`` is the number of tokens that may follow. Returns logits (1, V)."""
        prompt = prepare(self.adapter, self.inputs, self.recipe, self.stats, self.trace)
        return self.start_from(prompt, room)

    @torch.no_grad()
    def start_from(self, prompt: Prompt, room: int) -> Tensor:
        """Prefill of a prompt that is already merged. Returns logits (1, V).

        Raises
        ------
        ModelError
            When prompt and answer do not fit into the model's sliding window.
        """
        window = self.adapter.window
        if window is not None and prompt.next_position + room > window:
            raise ModelError(
                f"{prompt.next_position} prompt positions and {room} new tokens exceed the model's "
                f"sliding window of {window}; shorten one of them, or drop visual tokens with "
                "positions=compact"
            )
        self.prompt = prompt
        self.stats.prompt_tokens = len(self.prompt.layout)
        self.cache = KVCache(self.adapter.depth)
        logits = prefill(self.adapter, self.prompt, self.recipe, self.cache, self.stats, self.trace)
        self.cache.freeze(room, self.prompt.full_length)
        self.step = Step(Phase.DECODE, cache=self.cache)
        first = torch.full_like(self.prompt.layout.position[:, :1], self.prompt.next_position)
        self.position = rows_of(first)
        return logits[:, -1]

    @torch.no_grad()
    def next(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens`` (1, 1); returns the logits (1, V) behind them. No host sync."""
        with self._shifted():
            hidden = self.adapter.decoder(
                inputs_embeds=self.adapter.embed(tokens),
                position_ids=self.position,
                past_key_values=self.cache,
                use_cache=True,
                vlmfast_step=self.step,
            ).last_hidden_state
        self.cache.advance()
        self.position.add_(1)
        return self.adapter.logits(hidden[:, -1])

    @contextmanager
    def _shifted(self) -> Iterator[None]:
        """Layers whose rows were renumbered in prefill rotate by their own positions."""
        tables: dict[int, tuple[Tensor, ...]] = {}

        def hook(shift: int):
            def rotate(module: nn.Module, args: tuple, kwargs: dict):
                if kwargs.get("vlmfast_step") is not self.step:
                    return None
                if shift not in tables:
                    rotary = self.adapter.decoder.rotary_emb
                    tables[shift] = tuple(rotary(args[0], self.position - shift))
                return args, {**kwargs, "position_embeddings": tables[shift]}

            return rotate

        handles = [
            layer.register_forward_pre_hook(hook(held.shift), with_kwargs=True)
            for layer, held in zip(self.adapter.decoder.layers, self.cache.layers, strict=True)
            if held.shift
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def generate(run: Run, generation: dict[str, Any]) -> list[int]:
    """Hugging Face's ``generate`` around `loop`; returns the generated ids."""
    ids = run.inputs.tensors["input_ids"]
    output = run.adapter.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        # Given, so that families with rotary state of their own do not compute and keep it.
        position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
        custom_generate=loop,
        vlmfast_run=run,
        **generation,
    )
    sequences = getattr(output, "sequences", output)
    return sequences[0, ids.shape[1] :].tolist()


def loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    vlmfast_run: Run | None = None,
    vlmfast_streamer: Any = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The callable that ``generate(custom_generate=...)`` calls.

    ``input_ids`` (1, S) are the full prompt, placeholders included, because logits processors see
    the prompt. Parameters that Hugging Face's own loop does not have are how the run gets in.
    """
    run, device, prompt_length = vlmfast_run, input_ids.device, input_ids.shape[1]
    if generation_config.num_beams > 1 or generation_config.num_return_sequences > 1:
        raise VLMFastError(
            "num_beams and num_return_sequences must be 1: vlmfast decodes greedily or by sampling"
        )
    if generation_config.guidance_scale not in (None, 1):
        raise VLMFastError("guidance_scale is not supported: it would need a second prompt")
    scores: list[Tensor] = []
    raw: list[Tensor] = []
    first = None
    with switched(model):
        logits = run.start(generation_config.max_length - prompt_length)
        while True:
            # A copy in float32, as Hugging Face makes it: processors may write into it.
            logits = logits.to(copy=True, dtype=torch.float32)
            processed = logits_processor(input_ids, logits)
            scores.append(processed)
            raw.append(logits)
            if generation_config.do_sample:
                tokens = torch.multinomial(processed.softmax(-1), num_samples=1).squeeze(1)
            else:
                tokens = processed.argmax(-1)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            if first is None:
                first = clock(device)
            if vlmfast_streamer is not None:
                vlmfast_streamer.put(tokens.cpu())
            if bool(stopping_criteria(input_ids, tuple(scores)).all()):
                break
            if not generation_config.output_scores:
                scores.clear()
            if not generation_config.output_logits:
                raw.clear()
            logits = run.next(tokens[:, None])
    generated = input_ids.shape[1] - prompt_length
    run.stats.finish(generated, run.begin, first, clock(device), device)
    if vlmfast_streamer is not None:
        vlmfast_streamer.end()
    if not generation_config.return_dict_in_generate:
        return input_ids
    return GenerateDecoderOnlyOutput(
        sequences=input_ids,
        scores=tuple(scores) if generation_config.output_scores else None,
        logits=tuple(raw) if generation_config.output_logits else None,
    )
