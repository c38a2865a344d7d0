"""`attach`: a model's own ``generate`` runs a recipe, until it is detached."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .engine.attention import lock_of
from .engine.decode import lasting
from .engine.prefill import Inputs
from .engine.run import Run
from .engine.stats import clock
from .engine.turn import Turn, answer_many, generate_of, open_turn
from .errors import ModelError, RecipeError, VLMFastError
from .models._batch import split
from .vlm import VLM, Answer

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Hugging Face's arguments that would need another loop, another forward pass, or a prompt that is
# no ids.
_REFUSED = (
    "assistant_early_exit",
    "assistant_model",
    "constraints",
    "custom_generate",
    "decoder_input_ids",
    "dola_layers",
    "encoder_outputs",
    "force_words_ids",
    "inputs_embeds",
    "mm_encoder_outputs",
    "negative_prompt_ids",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "penalty_alpha",
    "position_ids",
    "prompt_lookup_num_tokens",
    "token_healing",
    "use_mtp",
    "vision_aspect_ratio",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)
# What tokenizers give beside the ids, of their shape.
_ALONGSIDE = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")


def attach(model: nn.Module, processor: Any, recipe: Any = None) -> Attachment:
    """Let ``model.generate`` run a recipe: on this instance, until it is detached.

    ``model.generate(**processor(...), ...)`` then goes through vlmfast, with Hugging Face's
    arguments and return values; batches may be padded on either side, and each row gets the answer
    that it would get alone. Nothing else of the model changes. Where a processor makes pictures of
    the frames of clips (InternVL, SmolVLM), they are single pictures to the recipe too.

    >>> with vlmfast.attach(model, processor, "balanced") as attached:
    ...     ids = model.generate(**inputs, max_new_tokens=64)
    ...     print(attached.answers[0].stats)

    Parameters
    ----------
    model : transformers.PreTrainedModel
    processor : transformers.ProcessorMixin
        The processor that belongs to the model.
    recipe : str, Stage or Recipe, optional
        Nothing is dropped by default.

    Returns
    -------
    Attachment
        In force at once; as a context manager it detaches when the block ends, also by an
        exception. Attachments nest: the last one leads.

    Raises
    ------
    ModelError
        As `VLM` does.
    RecipeError
        For a recipe that cannot run on this model, or that chooses the frames of clips: the
        processor has read them before ``generate`` is called.
    """
    return Attachment(model, processor, recipe)


class Attachment:
    """A recipe in the place of a model's ``generate``; `attach` makes it.

    Attributes
    ----------
    vlm : VLM
        Around the same model.
    recipe : Recipe
    answers : list of Answer
        Of the last call, row by row: text, tokens, stats and trace. A trace has no pictures, which
        the processor kept; set ``answer.trace.images`` to draw an `overlay`.
    attached : bool
        Whether it is in force, or would be if no other one lay over it.
    """

    def __init__(self, model: nn.Module, processor: Any, recipe: Any = None) -> None:
        self.vlm = VLM(model, processor)
        self.recipe = self.vlm.recipe(recipe)
        if stages := self.recipe.acting("media"):
            raise RecipeError(
                f"{stages[0].name} chooses the frames of a clip, and generate gets frames that the "
                "processor has read; use vlmfast.VLM(model, processor).ask"
            )
        for stage in self.recipe:
            if stage.trained:
                self.vlm.adapter.trained(stage)
        self.answers: list[Answer] = []
        self.attached = self._entered = self._placed = False
        self._below: Callable | None = None
        self._attach()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"<{state} recipe {self.recipe} of {type(self.vlm.model).__name__}>"

    def __enter__(self) -> Attachment:
        if self._entered:
            raise VLMFastError(
                f"{self!r} is used twice; call vlmfast.attach again for a block inside its own"
            )
        if not self.attached:
            self._attach()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self.detach()

    def detach(self) -> None:
        """Give ``generate`` back; does nothing when that has been done."""
        self.attached = False
        own = vars(self.vlm.model)
        # One that was detached below others leaves together with the last of these.
        while isinstance(of := getattr(own.get("generate"), "__self__", None), Attachment):
            if of.attached:
                return
            of._placed = False
            if of._below is None:
                del own["generate"]
            else:
                own["generate"] = of._below

    def _attach(self) -> None:
        if self._placed:  # it would become the one below itself
            raise VLMFastError(
                f"{self!r} still lies below what has been put over it; call vlmfast.attach again"
            )
        own = vars(self.vlm.model)
        self._below = own.get("generate")
        own["generate"] = self.generate
        self.attached = self._placed = True

    # --- generate --------------------------------------------------------------------------------

    @lasting
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` under the recipe.

        Parameters
        ----------
        *args, **kwargs
            What the processor gave, and Hugging Face's generation arguments. Logits processors and
            criteria are called row by row, with the row as it came and its new tokens. Sampled
            tokens of a batch are drawn row by row, so only those of a single row are the ones that
            Hugging Face draws from the same seed.

        Returns
        -------
        Tensor, int64, (B, S + T), or GenerateDecoderOnlyOutput
            The prompts as they came, padding and placeholders included, and the new tokens; rows
            that ended early are filled with the padding token. Scores behind a row's end say that
            padding is certain.

        Raises
        ------
        VLMFastError
            For arguments that the loop cannot serve, and pixels that do not fit the prompts.
        """
        if not self.attached:  # somebody kept it, or wrapped it
            if self._below is not None:
                return self._below(*args, **kwargs)
            return generate_of(self.vlm.model)(*args, **kwargs)

        self.answers = []
        given = inspect.signature(GenerationMixin.generate).bind(None, *args, **kwargs).arguments
        batch, generation, config = self._sorted(given.pop("kwargs", {}) | given)
        ids = batch["input_ids"]
        mask = self._mask(batch, config)
        streamer = generation.get("streamer")
        if streamer is not None:
            if len(ids) > 1:
                raise VLMFastError("streamer is for one prompt, and this is a batch")
            streamer.put(ids.cpu())  # as Hugging Face: the prompt first
        turns = self._turns(batch, mask, generation, config)
        done = {turn.number: turn for turn in answer_many(self.vlm.model, turns, at_once=len(ids))}
        rows = [done[number] for number in range(len(ids))]
        self.answers = [self.vlm._said(turn) for turn in rows]
        return _output(ids, rows)

    def _sorted(
        self, given: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any], GenerationConfig]:
        """What the processor gave, on the model's device; generation arguments; what they say."""
        adapter, config = self.vlm.adapter, self._config(given)
        # None switches off what the generation config says, and else is as good as not given.
        given = {key: of for key, of in given.items() if of is not None or key in vars(config)}
        if "inputs" in given:
            if "input_ids" in given:
                raise VLMFastError("the prompt was given twice, as inputs and as input_ids")
            given["input_ids"] = given.pop("inputs")
        for key in _REFUSED:
            value = given.get(key, getattr(config, key, None))
            if value is not None and value is not False:
                raise VLMFastError(
                    f"{key} cannot be given under vlmfast.attach; detach the recipe for this call"
                )
        if config.cache_implementation in ("paged", "quantized"):
            raise VLMFastError(
                f"cache_implementation={config.cache_implementation!r} cannot be given under "
                "vlmfast.attach, whose caches are those of the recipe"
            )
        given.pop("tokenizer", None)  # for stop strings; the processor has one
        allowed = (*adapter.tensors, *adapter.clip_tensors, *adapter.beside)
        batch = {
            key: _tensor(key, given.pop(key))
            for key in list(given)
            if key not in vars(config) and (isinstance(given[key], Tensor) or key in allowed)
        }
        ids = batch.get("input_ids")
        if ids is None or ids.dim() != 2 or not len(ids) or ids.is_floating_point():
            raise VLMFastError("input_ids must be whole numbers of shape (rows, tokens)")
        for key in batch:
            if key not in (*_ALONGSIDE, *allowed):
                raise ModelError(
                    f"{key} is no input of a {adapter.config.model_type} model; beside the prompt "
                    f"it takes {', '.join(dict.fromkeys(allowed))}"
                )
        return {key: adapter.moved(key, value) for key, value in batch.items()}, given, config

    def _config(self, given: dict[str, Any]) -> GenerationConfig:
        """As Hugging Face puts it together: arguments, the config given, the model's own."""
        own = self.vlm.model.generation_config
        config = copy.deepcopy(given.get("generation_config") or own)
        for key, value in vars(own).items():
            if getattr(config, key, None) is None:
                setattr(config, key, value)
        for key in vars(config).keys() & given.keys():
            setattr(config, key, given[key])
        return config

    def _mask(self, batch: dict[str, Tensor], config: GenerationConfig) -> Tensor:
        """Which ids are no padding, bool (B, S)."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None:
            pad = config.pad_token_id
            mask = torch.ones_like(ids) if pad is None or pad in _ends(config) else ids != pad
        if mask.shape != ids.shape:
            raise VLMFastError(
                f"attention_mask has the shape {tuple(mask.shape)}, and input_ids "
                f"{tuple(ids.shape)}; they must be alike"
            )
        mask = mask.bool()
        edges = mask.int().diff(dim=1, prepend=torch.zeros_like(ids[:, :1]))
        for row, begins in enumerate((edges > 0).sum(1).tolist()):
            if begins != 1:
                what = "leaves nothing of" if not begins else "has gaps in"
                raise VLMFastError(
                    f"attention_mask {what} row {row}; a row may be padded on one side or both"
                )
        return mask

    def _turns(
        self,
        batch: dict[str, Tensor],
        mask: Tensor,
        generation: dict[str, Any],
        config: GenerationConfig,
    ) -> Iterator[Turn]:
        adapter, allowed = self.vlm.adapter, generation.get("prefix_allowed_tokens_fn")
        with lock_of(self.vlm.model):
            rows = split(adapter, batch, mask)
        generation = {**generation, "stop_strings": config.stop_strings}
        for number, (tensors, sizes, items) in enumerate(rows):
            padding = int((~mask[number]).sum())
            own = generation | _lengths(config, padding)
            if allowed is not None:
                own["prefix_allowed_tokens_fn"] = functools.partial(_of_row, allowed, number)
            if padding:
                own |= _padded(own, batch["input_ids"][number], tensors["input_ids"].shape[1])
            with lock_of(self.vlm.model):
                inputs = Inputs(tensors, sizes, items=items)
                run = Run(adapter, inputs, self.recipe, clock(adapter.device))
                turn = open_turn(run, self.vlm._generation(own, default=None))
            turn.number = number
            yield turn


def _tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (ValueError, TypeError) as error:
        raise VLMFastError(f"{key} must be a tensor, or lists of numbers of one length") from error


def _ends(config: GenerationConfig) -> list[int]:
    """The tokens that end an answer."""
    ends = config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def _lengths(config: GenerationConfig, padding: int) -> dict[str, int]:
    """Lengths of prompt and answer together, for a row without its padding."""
    found = {}
    for name, instead in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value = getattr(config, name)
        if value is not None and getattr(config, instead) is None:
            found[name] = max(value - padding, 0)
    return found


def _of_row(allowed: Callable, row: int, _: int, ids: Tensor) -> Any:
    return allowed(row, ids)


def _padded(generation: dict[str, Any], row: Tensor, prompt: int) -> dict[str, Any]:
    """The user's own callables, which are to see the ids ``row`` (S,) with their padding again."""

    def over(call: Callable, first: int) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            new = args[first][..., prompt:]
            ids = torch.cat([row.expand(*new.shape[:-1], -1), new], dim=-1)
            return call(*args[:first], ids, *args[first + 1 :], **kwargs)

        return wrapped

    found = {
        name: [over(call, 0) for call in generation[name]]
        for name in ("logits_processor", "stopping_criteria")
        if generation.get(name)
    }
    if allowed := generation.get("prefix_allowed_tokens_fn"):
        found["prefix_allowed_tokens_fn"] = over(allowed, 1)
    return found


def _output(ids: Tensor, turns: Sequence[Turn]) -> Any:
    """What ``generate`` returns for the prompts ``ids`` (B, S)."""
    config = turns[0].config
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(_ends(config)), 0)
    longest = max(turn.count for turn in turns)
    new = torch.full((len(turns), longest), pad, dtype=ids.dtype, device=ids.device)
    for row, turn in zip(new, turns, strict=True):
        row[: turn.count] = turn.ids[0, turn.prompt :]
    sequences = torch.cat([ids, new], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_steps([turn.scores for turn in turns], pad) if config.output_scores else None,
        logits=_steps([turn.raw for turn in turns], pad) if config.output_logits else None,
    )


def _steps(rows: list[list[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """Scores (1, V) of each row, step by step: (B, V) each."""
    ended = torch.full_like(rows[0][0], -torch.inf)
    ended[:, pad] = 0.0
    return tuple(
        torch.cat([row[step] if step < len(row) else ended for row in rows])
        for step in range(max(map(len, rows)))
    )
