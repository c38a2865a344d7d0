"""`attach`: a model's own ``generate`` runs a recipe, until it is detached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import ModelError, RecipeError, VLMFastError
from .recipe import Recipe
from .vlm import VLM, Answer

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from .engine.decode import Turn

# Hugging Face's arguments that would need another loop, or a prompt that is no ids.
_REFUSED = (
    "assistant_model",
    "custom_generate",
    "decoder_input_ids",
    "inputs_embeds",
    "negative_prompt_ids",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "prompt_lookup_num_tokens",
)


def attach(model: nn.Module, processor: Any, recipe: Any = None) -> Attachment:
    """Let ``model.generate`` run a recipe: on this instance, until it is detached.

    ``model.generate(**processor(...), ...)`` then goes through vlmfast, with Hugging Face's
    arguments and return values; batches may be padded on either side, and each row gets the answer
    that it would get alone. Nothing else of the model changes.

    >>> with vlmfast.attach(model, processor, "hired:0.2") as attached:
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
        self.vlm, self.recipe = VLM(model, processor), Recipe.of(recipe)
        if stages := self.recipe.acting("media"):
            raise RecipeError(
                f"{stages[0].name} chooses the frames of a clip, and generate gets frames that the "
                "processor has read; use vlmfast.VLM(model, processor).ask"
            )
        for stage in self.recipe:
            if stage.trained:
                self.vlm.adapter.trained(stage)
        self.answers: list[Answer] = []
        self.attached = self._entered = False
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
        self._entered = True
        if not self.attached:
            self._attach()
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
            if of._below is None:
                del own["generate"]
            else:
                own["generate"] = of._below

    def _attach(self) -> None:
        own = vars(self.vlm.model)
        if own.get("generate") != self.generate:
            self._below = own.get("generate")
            own["generate"] = self.generate
        self.attached = True

    # --- generate --------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """``model.generate`` under the recipe.

        Parameters
        ----------
        inputs : Tensor, int64, (B, S), optional
            The ids, where they do not come as ``input_ids``.
        **kwargs
            What the processor gave, and Hugging Face's generation arguments. Sampled tokens of a
            batch are drawn row by row, so only those of a single row are the ones that Hugging Face
            draws from the same seed.

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
            below = self._below or functools.partial(type(self.vlm.model).generate, self.vlm.model)
            return below(inputs, **kwargs)
        from .engine.decode import answer_many

        batch, generation = self._sorted(inputs, kwargs)
        ids = batch["input_ids"]
        config = generation.get("generation_config") or self.vlm.model.generation_config
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
        self, inputs: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the processor gave, on the model's device, and generation arguments."""
        from transformers import GenerationConfig

        adapter, known = self.vlm.adapter, GenerationConfig().to_dict()
        given = {key: value for key, value in kwargs.items() if value is not None}
        if inputs is not None:
            if "input_ids" in given:
                raise VLMFastError("the prompt was given twice, as inputs and as input_ids")
            given["input_ids"] = inputs
        for key in _REFUSED:
            if given.get(key, False) is not False:
                raise VLMFastError(
                    f"{key} cannot be given under vlmfast.attach; detach the recipe for this call"
                )
        given.pop("tokenizer", None)  # for stop strings; the processor has one
        batch = {
            key: torch.as_tensor(given.pop(key))
            for key in list(given)
            if key not in known and (isinstance(given[key], Tensor) or key in adapter.beside)
        }
        ids = batch.get("input_ids")
        if ids is None or ids.dim() != 2 or not len(ids) or ids.is_floating_point():
            raise VLMFastError("input_ids must be whole numbers of shape (rows, tokens)")
        allowed = (*adapter.tensors, *adapter.clip_tensors, *adapter.beside)
        for key, value in batch.items():
            own = key in ("input_ids", "attention_mask", *allowed)
            if not own and value.shape != ids.shape:
                raise ModelError(
                    f"{key} is no input of a {adapter.config.model_type} model; beside the prompt "
                    f"it takes {', '.join(dict.fromkeys(allowed))}"
                )
        return {key: adapter.moved(key, value) for key, value in batch.items()}, given

    def _mask(self, batch: dict[str, Tensor], config: GenerationConfig) -> Tensor:
        """Which ids are no padding, bool (B, S)."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None:
            pad, ends = config.pad_token_id, config.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            mask = torch.ones_like(ids) if pad is None or pad in ends else ids != pad
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
        from .engine.attention import lock_of
        from .engine.decode import Run, open_turn
        from .engine.prefill import Inputs
        from .engine.stats import clock
        from .models._batch import split

        adapter, allowed = self.vlm.adapter, generation.get("prefix_allowed_tokens_fn")
        with lock_of(self.vlm.model):
            rows = split(adapter, batch, mask)
        for number, (tensors, sizes, items) in enumerate(rows):
            own = dict(generation)
            own |= _lengths(generation, config, int((~mask[number]).sum()))
            if allowed is not None:
                own["prefix_allowed_tokens_fn"] = lambda _, ids, row=number: allowed(row, ids)
            with lock_of(self.vlm.model):
                inputs = Inputs(tensors, sizes, items=items)
                run = Run(adapter, inputs, self.recipe, clock(adapter.device))
                turn = open_turn(run, self.vlm._generation(own, default=None))
            turn.number = number
            yield turn


def _lengths(generation: dict[str, Any], config: GenerationConfig, padding: int) -> dict[str, int]:
    """Lengths of prompt and answer together, for a row without its padding."""
    found = {}
    for name, instead in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        chosen = generation.get(instead, getattr(config, instead, None))
        value = generation.get(name, getattr(config, name, None))
        # Hugging Face's default of 20 counts new tokens alone.
        default = name not in generation and value in (None, 0, 20)
        if chosen is None and not default:
            found[name] = max(value - padding, 0)
    return found


def _output(ids: Tensor, turns: Sequence[Turn]) -> Any:
    """What ``generate`` returns for the prompts ``ids`` (B, S)."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    config = turns[0].config
    pad = config.pad_token_id
    if pad is None:
        ends = config.eos_token_id
        pad = (ends[0] if isinstance(ends, list) else ends) or 0
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
