"""Opens sequences; nothing is computed yet.

Logits processors, stopping criteria and the generation config of each sequence are those that
Hugging Face's ``generate`` prepares; the engine calls them in the same order and with the same ids,
so that tokens and random numbers are those of Hugging Face's sampling loop (`engine.sampling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.models.base import Adapter

from .forward import Watch
from .prefill import Inputs
from .sampling import Sampler
from .sequence import Sequence
from .speculation import check, drafting
from .stats import Stats, Trace

_GENERATE = GenerationMixin.generate
# Its arguments that are no settings.
_APART = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
# Settings whose processors compare the ids of the end on the device.
_OF_END = (
    "min_length", "min_new_tokens", "exponential_decay_length_penalty", "forced_eos_token_id",
)  # fmt: skip


def fitted(adapter: Adapter, recipe: Recipe) -> tuple[Recipe, Watch | None]:
    """The recipe fitted to the model, and the `Watch` that records a prompt for its drafters.

    Raises
    ------
    RecipeError
        When its drafters cannot work together, or on this model.
    """
    recipe = recipe.fitted(adapter.depth, adapter.min_drop_layer)
    drafters = recipe.acting(DrafterStage)
    if not drafters:
        return recipe, None
    for stage in drafters:
        stage.check_recipe(recipe)
    check(drafters, adapter)
    return recipe, Watch(drafting(drafters, adapter), adapter.depth)


def open_sequence(
    adapter: Adapter,
    inputs: Inputs,
    recipe: Recipe,
    arguments: dict[str, Any] | None = None,
    *,
    seed: int | None = None,
    top_logprobs: int | None = None,
    stats: Stats | None = None,
    images: Many[Any] = (),
    **more: Any,
) -> Sequence:
    """A sequence prepared by Hugging Face's ``generate``; nothing is computed yet.

    Parameters
    ----------
    arguments : dict, optional
        For ``generate``. Without them the prompt is only prefilled.
    top_logprobs : int, optional
        As in `Sampler`.
    seed : int, optional
        As in `Sampler`; drawn later where drafts of a sampled answer need one.
    stats : Stats, optional
        The cost of the prompt so far.
    images : sequence of PIL.Image.Image
        For the trace.
    **more
        As in `Sequence`.
    """
    recipe, watch = fitted(adapter, recipe)
    ids = inputs.tensors["input_ids"]
    if arguments is None:
        config = GenerationConfig(max_length=ids.shape[1])
        sampler = Sampler(ids, LogitsProcessorList(), StoppingCriteriaList(), config)
    else:
        sampler = sampler_of(adapter.model, ids, arguments, seed)
        sampler.top_logprobs = top_logprobs
    stats, trace = stats or Stats(), Trace(images=list(images))
    return Sequence(inputs, recipe, sampler, stats=stats, trace=trace, watch=watch, **more)


def generate_of(model: nn.Module) -> Callable[..., Any]:
    """Hugging Face's ``generate``; `attach` may have replaced that of the model."""
    of_class: Callable[..., Any] = getattr(type(model), "generate", GenerationMixin.generate)
    return partial(of_class, model)


def sampler_of(
    model: Any, ids: Tensor, arguments: Mapping[str, Any], seed: int | None = None
) -> Sampler:
    """What Hugging Face's ``generate`` prepares for the prompt ``ids``, int64, (1, S).

    The methods of the model are called that ``generate`` calls for a decoding loop of the caller's.
    What it does to inputs and cache, which the engine has prepared, takes most of its time. A class
    with a ``generate`` of its own is asked for all of it.
    """
    if getattr(type(model), "generate", _GENERATE) is not _GENERATE:
        return generate_of(model)(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            # Given, so that families with rotary state of their own do not compute and keep it.
            position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
            custom_generate=_prepared,
            vlmfast_seed=seed,
            **arguments,
        )
    given = dict(arguments)
    config, processors, criteria, allowed = (given.pop(name, None) for name in _APART)
    before = [own for own in (config, model.generation_config) if own is not None]
    unset = {
        f"has_default_{name}": all(getattr(own, name) is None for own in before)
        and given.get(name) is None
        for name in ("max_length", "min_length")
    }
    config, others = model._prepare_generation_config(config, **given)
    if others:
        model._validate_model_kwargs(others)
    model._validate_generation_mode(config.get_generation_mode(), config, {})
    # On the host where only the host compares them, so that the device is not waited for.
    of_end = any(getattr(config, name, None) for name in _OF_END)
    device = ids.device if of_end else torch.device("cpu")
    model._prepare_special_tokens(config, True, device=device, batch_size=len(ids))
    length = ids.shape[1]
    config = model._prepare_generated_length(
        generation_config=config,
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=length,
        **unset,
    )
    model._validate_generated_length(config, length, unset["has_default_max_length"])
    penalty, size = config.encoder_repetition_penalty, config.encoder_no_repeat_ngram_size
    of_prompt = penalty not in (None, 1.0) or bool(size)  # else the ids are only checked
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=length,
        encoder_input_ids=ids if of_prompt else None,
        prefix_allowed_tokens_fn=allowed,
        logits_processor=LogitsProcessorList() if processors is None else processors,
        device=ids.device,
        model_kwargs=others,
    )
    criteria = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList() if criteria is None else criteria,
    )
    return Sampler(ids, processors, criteria, config, seed)


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
