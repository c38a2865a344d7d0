"""`attach` makes a model's own ``generate`` run a recipe."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from vlmfast.core.protocols import MediaStage
from vlmfast.engine.engine import engine_of
from vlmfast.engine.mode import lasting
from vlmfast.engine.opening import generate_of
from vlmfast.engine.prefill import Inputs
from vlmfast.engine.sequence import Sequence
from vlmfast.errors import ModelError, RecipeError, VLMFastError, check_memory, one_line
from vlmfast.models._batch import split
from vlmfast.models.base import Adapter

from .generation import Generation, end_ids, gate, is_argument
from .request import answer_of, opened
from .vlm import VLM

if TYPE_CHECKING:
    from transformers import GenerationConfig, ProcessorMixin

    from vlmfast.core.recipe import Recipe
    from vlmfast.core.stage import Stage

    from .answer import Answer

_LARGEST = 2**24  # upper bound on a size in pixels or patches
# Outputs of tokenizers that have the shape of the ids.
_ALONGSIDE = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")


def attach(
    model: PreTrainedModel, processor: ProcessorMixin, recipe: str | Stage | Recipe | None = None
) -> Attachment:
    """Make ``model.generate`` run a recipe, on this instance, until it is detached.

    ``model.generate(**processor(...), ...)`` then goes through vlmfast, with Hugging Face's
    arguments and return values. Batches may be padded on either side, and each row gets the same
    answer as on its own. Nothing else in the model changes; copies and pickles of it are without
    the recipe. If the processor turns the frames of a video into images (InternVL, SmolVLM), the
    recipe treats them as single images too.

    >>> with vlmfast.attach(model, processor, "balanced") as attached:
    ...     ids = model.generate(**inputs, max_new_tokens=64)
    ...     print(attached.answers[0].stats)

    Parameters
    ----------
    model : transformers.PreTrainedModel
    processor : transformers.ProcessorMixin
        The processor that belongs to the model.
    recipe : str, Stage or Recipe, optional
        No tokens are dropped by default.

    Returns
    -------
    Attachment
        Active at once. As a context manager it detaches when the block ends, even after an
        exception. Attachments nest: the latest one is active.

    Raises
    ------
    ModelError
        As `VLM`.
    RecipeError
        For a recipe that cannot run on this model, or that chooses the frames of videos: the
        processor reads them before ``generate`` is called.
    """
    return Attachment(model, processor, recipe)


class Attachment:
    """A recipe that replaces a model's ``generate``; created by `attach`.

    Attributes
    ----------
    vlm : VLM
        Wraps the same model.
    recipe : Recipe
    answers : list of Answer
        Answers of the last call, row by row: text, tokens, stats and trace. Traces have no images,
        since only the processor sees them; set ``answer.trace.images`` to draw an `overlay`.
    attached : bool
        Whether it is active, or would be without the attachments made after it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        recipe: str | Stage | Recipe | None = None,
    ) -> None:
        self.vlm = VLM(model, processor)
        self.recipe = self.vlm.recipe(recipe)
        if stages := self.recipe.acting(MediaStage):
            raise RecipeError(
                f"{stages[0].name} chooses the frames of a video, and generate gets frames that "
                "the processor has read; use vlmfast.VLM(model, processor).ask"
            )
        for stage in self.recipe:
            if stage.trained:
                self.vlm.adapter.trained(stage)
        self.answers: list[Answer] = []
        self.attached = self._entered = self._installed = False
        self._below: Callable | None = None
        self._attach()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"<{state} recipe {self.recipe.text} of {type(self.vlm.model).__name__}>"

    def __enter__(self) -> Attachment:
        if self._entered:
            raise VLMFastError(
                f"{self!r} is used twice; call vlmfast.attach again for a nested block"
            )
        if not self.attached:
            self._attach()
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self.detach()

    def detach(self) -> None:
        """Restore the original ``generate``; does nothing if already detached."""
        self.attached = False
        own = vars(self.vlm.model)
        # Attachments that were detached under others are removed together with the last of these.
        while isinstance(top := getattr(own.get("generate"), "__self__", None), Attachment):
            if top.attached:
                return
            top._installed = False
            if top._below is None:
                del own["generate"]
            else:
                own["generate"] = top._below
        own.pop("__getstate__", None)

    def _attach(self) -> None:
        if self._installed:  # it would be nested inside itself
            raise VLMFastError(
                f"{self!r} is still under a later attachment; call vlmfast.attach again"
            )
        own = vars(self.vlm.model)
        self._below = own.get("generate")
        own["generate"] = self.generate
        own["__getstate__"] = self._state_of_copies
        self.attached = self._installed = True

    def _state_of_copies(self) -> dict[str, Any]:
        """What copies and pickles of the model contain: its own ``generate``."""
        state = dict(vars(self.vlm.model))
        del state["__getstate__"]
        generate = state.pop("generate")
        while isinstance(attachment := getattr(generate, "__self__", None), Attachment):
            generate = attachment._below
        return state if generate is None else state | {"generate": generate}

    # --- generate --------------------------------------------------------------------------------

    @lasting
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` under the recipe.

        Parameters
        ----------
        *args, **kwargs
            The processor's output, and Hugging Face's generation arguments. Logits processors and
            stopping criteria are called row by row, with the original row and its new tokens.
            Sampled tokens are drawn row by row, so they equal those of Hugging Face with the same
            seed only for a single row.

        Returns
        -------
        Tensor, int64, (B, S + T), or GenerateDecoderOnlyOutput
            The original prompts, padding and placeholders included, followed by the new tokens.
            Rows that ended early are filled with the padding token. After the end of a row its
            scores give the padding token probability 1.

        Raises
        ------
        VLMFastError
            For unsupported arguments, and pixels that do not fit the prompts.
        """
        if not self.attached:  # called through a reference that was kept or wrapped
            if self._below is not None:
                return self._below(*args, **kwargs)
            return generate_of(self.vlm.model)(*args, **kwargs)

        self.answers = []
        given = inspect.signature(GenerationMixin.generate).bind(None, *args, **kwargs).arguments
        batch, generation = self._sorted(given.pop("kwargs", {}) | given)
        ids = batch["input_ids"]
        mask = self._mask(batch, generation.config)
        if generation.streamer is not None:
            if len(ids) > 1:
                raise VLMFastError("streamer is for one prompt, and this is a batch")
            generation.streamer.put(ids.cpu())  # as Hugging Face: the prompt first
        adapter, waiting = self.vlm.adapter, self._sequences(batch, mask, generation)
        done = {s.number: s for s in engine_of(adapter).answer_many(waiting, at_once=len(ids))}
        rows = [done[number] for number in range(len(ids))]
        self.answers = [answer_of(adapter, sequence) for sequence in rows]
        return _output(ids, rows)

    def _sorted(self, given: dict[str, Any]) -> tuple[dict[str, Tensor], Generation]:
        """Separate the processor's output, on the model's device, from generation arguments."""
        adapter = self.vlm.adapter
        if given.get("inputs") is not None:
            if given.get("input_ids") is not None:
                raise VLMFastError("the prompt was given twice, as inputs and as input_ids")
            given["input_ids"] = given.pop("inputs")
        allowed = (*adapter.tensors, *adapter.video_tensors, *adapter.beside)
        tensors = {
            key: given.pop(key)
            for key in list(given)
            if key in (*_ALONGSIDE, *allowed)
            or (isinstance(given[key], Tensor) and not is_argument(adapter, key))
        }
        instead = "; detach the recipe for this call"
        generation = gate(adapter, given, names=allowed, default=None, instead=instead)
        batch = {key: _tensor(key, value) for key, value in tensors.items() if value is not None}
        for key in batch:
            if key not in (*_ALONGSIDE, *allowed):
                raise ModelError(
                    f"{key} is no input of a {adapter.config.model_type} model; in addition to the "
                    f"prompt it takes {', '.join(dict.fromkeys(allowed))}"
                )
        batch["input_ids"] = _checked_ids(adapter, batch.get("input_ids", torch.zeros(0)))
        _check_media(adapter, batch)
        return {key: adapter.moved(key, value) for key, value in batch.items()}, generation

    def _mask(self, batch: dict[str, Tensor], config: GenerationConfig) -> Tensor:
        """Which ids are no padding, bool (B, S)."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is None:
            pad = config.pad_token_id
            mask = torch.ones_like(ids) if pad is None or pad in end_ids(config) else ids != pad
        if mask.shape != ids.shape:
            raise VLMFastError(
                f"attention_mask has the shape {tuple(mask.shape)}, and input_ids "
                f"{tuple(ids.shape)}; they must be equal"
            )
        mask = mask.bool()
        edges = mask.int().diff(dim=1, prepend=torch.zeros_like(ids[:, :1]))
        for row, begins in enumerate((edges > 0).sum(1).tolist()):
            if begins != 1:
                what = "masks all of" if not begins else "has gaps in"
                raise VLMFastError(
                    f"attention_mask {what} row {row}; a row may be padded on one side or both"
                )
        return mask

    def _sequences(
        self, batch: dict[str, Tensor], mask: Tensor, generation: Generation
    ) -> Iterator[Sequence]:
        adapter, config = self.vlm.adapter, generation.config
        allowed = generation.arguments.get("prefix_allowed_tokens_fn")
        try:
            rows = split(adapter, batch, mask)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            check_memory(error)
            if isinstance(error, VLMFastError):
                raise
            raise ModelError(
                f"the tensors of this batch do not belong together: {one_line(error)}"
            ) from error
        for number, (tensors, sizes, items) in enumerate(rows):
            padding = int((~mask[number]).sum())
            own = generation.arguments | _lengths(config, padding)
            if allowed is not None:
                own["prefix_allowed_tokens_fn"] = functools.partial(_of_row, allowed, number)
            if padding:
                own |= _padded(own, batch["input_ids"][number], tensors["input_ids"].shape[1])
            inputs = Inputs(tensors, sizes, items=items)
            begin = time.perf_counter()
            row = generation.changed(**own)
            yield opened(adapter, inputs, self.recipe, begin, row, number=number)


def _tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        check_memory(error)
        raise VLMFastError(f"{key} must be a tensor, or lists of numbers of one length") from error


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _check_shape(
    key: str, value: Tensor, shape: Iterable[int | str], *, whole: bool = False
) -> None:
    """Raise unless a tensor has a shape, in which names stand for any number above 0."""
    wanted = tuple(shape)
    fits = len(wanted) == value.dim() and all(
        own > 0 if isinstance(n, str) else own == n
        for n, own in zip(wanted, value.shape, strict=True)
    )
    if not fits or (whole and not _whole(value)):
        text = ", ".join(map(str, wanted)) + "," * (len(wanted) == 1)
        kind = "whole numbers" if whole else "numbers"
        raise VLMFastError(f"{key} must be {kind} of shape ({text}), not {_shape(value)}")


def _check_multiples(key: str, grids: Tensor, of: int) -> None:
    if bool((grids % of).any()):
        raise VLMFastError(f"{key} must have rows and columns that are multiples of {of}")


def _checked_ids(adapter: Adapter, ids: Tensor) -> Tensor:
    """Token ids as int64: of the vocabulary, or placeholders."""
    _check_shape("input_ids", ids, ("rows", "tokens"), whole=True)
    ids, rows = ids.long(), adapter.model.get_input_embeddings().weight.shape[0]
    wrong = ((ids < 0) | (ids >= rows)) & ~adapter.visual(ids)
    if bool(wrong.any()):
        raise VLMFastError(
            f"input_ids contains {int(ids[wrong][0])}; the vocabulary has ids from 0 to {rows - 1}"
        )
    return ids


# Tensors with the sizes of images and videos, and the numbers per item.
_SIZES = {"image_sizes": 2, "spatial_shapes": 2, "image_grid_thw": 3, "video_grid_thw": 3}


def _check_media(adapter: Adapter, batch: dict[str, Tensor]) -> None:
    """Check dtypes, shapes and values of pixels and of the tensors that belong to them."""
    for key, value in batch.items():
        if key.startswith("pixel_values"):
            if value.is_complex() or value.dtype == torch.bool or not value.numel():
                raise VLMFastError(f"{key} must be numbers, not {_shape(value)}")
            if not bool(torch.isfinite(value).all()):
                raise VLMFastError(f"{key} contains numbers that are not finite")
        elif key in _SIZES:
            _check_shape(key, value, ("items", _SIZES[key]), whole=True)
            if bool(((value < 1) | (value > _LARGEST)).any()):
                raise VLMFastError(f"{key} must be from 1 to {_LARGEST}")
        elif key in adapter.beside and (
            value.is_complex() or not bool(torch.isfinite(value).all())
        ):
            raise VLMFastError(f"{key} must be finite numbers, not {_shape(value)}")
    for keys in (adapter.tensors, adapter.video_tensors):
        found = [key for key in keys if key in batch]
        if found and len(found) < len(keys):
            lacking = ", ".join(key for key in keys if key not in batch)
            raise VLMFastError(f"{', '.join(found)} was given without {lacking}")
        if found:
            _check_pixels(adapter, batch, *keys)
    mask = batch.get("pixel_attention_mask")
    if mask is not None and "pixel_values" in batch and adapter.pixel_dims > 3:
        *views, _, height, width = batch["pixel_values"].shape
        _check_shape("pixel_attention_mask", mask, (*views, height, width))
    counts = batch.get("batch_num_images")
    images = batch.get(adapter.tensors[0])
    if counts is not None and images is not None:
        _check_shape("batch_num_images", counts, ("prompts",), whole=True)
        if int(counts.sum()) != len(images) or bool((counts < 0).any()):
            raise VLMFastError(
                f"batch_num_images counts {int(counts.sum())} images and {adapter.tensors[0]} has "
                f"{len(images)}"
            )


def _check_pixels(adapter: Adapter, batch: dict[str, Tensor], key: str, *others: str) -> None:
    """Check pixels against the sizes of images that come with them."""
    vision, pixels = adapter.config.vision_config, batch[key]
    if adapter.packed:  # patches of all images (P, D), and grids (N, 3)
        grids = batch[others[0]]
        depth = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        width = depth * vision.temporal_patch_size * vision.patch_size**2
        _check_shape(key, pixels, (int(grids.prod(-1).sum()), width))
        _check_multiples(others[0], grids[:, 1:], vision.spatial_merge_size)
    elif adapter.pixel_dims == 3:  # patches (N, P, D) of each image, grids (N, 2) and masks (N, P)
        grids, width = batch[others[0]], vision.num_channels * vision.patch_size**2
        _check_shape(key, pixels, ("items", "patches", width))
        _check_shape(others[0], grids, (len(pixels), 2))
        _check_shape(others[1], batch[others[1]], pixels.shape[:2])
        _check_multiples(others[0], grids, adapter.config.downsample_factor)
        if pixels.shape[1] < (most := int(grids.prod(-1).max())):
            raise VLMFastError(f"{key} has {pixels.shape[1]} patches, and {others[0]} {most}")
    else:
        _check_views(adapter, key, pixels)
        for name in others:
            if len(batch[name]) != len(pixels):
                raise VLMFastError(
                    f"{name} has {len(batch[name])} items and {key} {len(pixels)}; both must "
                    "have one for each image"
                )


def _check_views(adapter: Adapter, key: str, pixels: Tensor) -> None:
    """Check views (..., C, H, W) against the input shape of the tower."""
    vision = adapter.config.vision_config
    # Where the tower runs for each size of images, this is only the largest side.
    side = None if adapter.by_size else adapter.view_size()
    if side is None and not adapter.by_size:
        crop = getattr(adapter.processor.image_processor, "crop_size", None)
        side = None if crop is None else (crop["height"], crop["width"])
    channels = getattr(vision, "num_channels", 3)
    dims = adapter.pixel_dims if key in adapter.tensors else 5
    before = ("items",) if dims == 4 else ("items", "views")
    _check_shape(key, pixels, (*before, channels, *(side or ("height", "width"))))


def _lengths(config: GenerationConfig, padding: int) -> dict[str, int]:
    """Total lengths of prompt and answer, for a row without its padding."""
    found = {}
    for name, instead in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value = getattr(config, name)
        if value is not None and getattr(config, instead) is None:
            found[name] = max(value - padding, 0)
    return found


def _of_row(allowed: Callable, row: int, _: int, ids: Tensor) -> Any:
    return allowed(row, ids)


def _padded(generation: dict[str, Any], row: Tensor, prompt: int) -> dict[str, Any]:
    """Wrap the user's callables so that they see the ids ``row`` (S,) with padding again."""

    def over(call: Callable, first: int) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            new = args[first][..., prompt:]
            ids = torch.cat([row.expand(*new.shape[:-1], -1), new], dim=-1)
            return call(*args[:first], ids, *args[first + 1 :], **kwargs)

        return wrapped

    found: dict[str, Any] = {
        name: [over(call, 0) for call in generation[name]]
        for name in ("logits_processor", "stopping_criteria")
        if generation.get(name)
    }
    if allowed := generation.get("prefix_allowed_tokens_fn"):
        found["prefix_allowed_tokens_fn"] = over(allowed, 1)
    return found


def _output(ids: Tensor, sequences: Many[Sequence]) -> Any:
    """The return value of ``generate`` for the prompts ``ids`` (B, S)."""
    samplers = [sequence.sampler for sequence in sequences]
    config = samplers[0].config
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(end_ids(config)), 0)
    longest = max(len(sampler.tokens) for sampler in samplers)
    new = torch.full((len(samplers), longest), pad, dtype=ids.dtype, device=ids.device)
    for row, sampler in zip(new, samplers, strict=True):
        row[: len(sampler.tokens)] = sampler.ids[0, sampler.prompt :]
    whole = torch.cat([ids, new], dim=1)
    if not config.return_dict_in_generate:
        return whole
    # A dict, since Hugging Face annotates these tuples as `tuple[Tensor]`, of length 1.
    output: dict[str, Any] = {
        "sequences": whole,
        "scores": _steps([s.scores for s in samplers], pad) if config.output_scores else None,
        "logits": _steps([s.raw for s in samplers], pad) if config.output_logits else None,
    }
    return GenerateDecoderOnlyOutput(**output)


def _steps(rows: list[list[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """Stack the scores (1, V) of all rows by step: (B, V) each."""
    ended = torch.full_like(rows[0][0], -torch.inf)
    if 0 <= pad < ended.shape[1]:  # padding may be any other number too
        ended[:, pad] = 0.0
    return tuple(
        torch.cat([row[step] if step < len(row) else ended for row in rows])
        for step in range(max(map(len, rows)))
    )
