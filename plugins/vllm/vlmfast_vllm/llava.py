"""LLaVA-1.5 of vLLM with recipes between projector and language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
    _build_llava_or_pixtral_hf_info,
    _build_llava_or_pixtral_hf_processor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from .crops import Crops
from .processing import Counted, Informed, note_key
from .recipes import KEY, Family, Media, plans_of
from .reduction import Reduction
from .travel import Note, batches


class CropsInfo(Informed):
    family = Crops


class CropsProcessor(Counted):
    """Of the LLaVAs' processors."""

    reduced = ("image",)

    def about(self, modality: str, item: Mapping[str, Any]) -> Media:
        height, width = item["image_sizes"].tolist()
        return self.info.plans.family.media((height, width))

    def items(self, modality: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        sizes = data.get("image_sizes", ()) if "pixel_values" in data else ()
        return [{"image_sizes": torch.as_tensor(size)} for size in sizes]


class Reduced:
    """Of the LLaVAs' models: images become the tokens that the recipe of their request keeps."""

    family: type[Family] = Crops
    reducer = Reduction

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Before any weights are allocated.
        plans = plans_of(vllm_config.model_config.hf_config, self.family)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.plans, self._notes = plans, []
        self.reduction = plans and self.reducer(
            plans.family, self.vision_tower, self.multi_modal_projector, self._of_all_ranks
        )
        scheduled = vllm_config.scheduler_config
        self._tokens = min(scheduled.max_num_encoder_input_tokens, scheduled.encoder_cache_size)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        # Beside what vLLM's own code parses and passes on to `_process_image_input`.
        notes = [Note.of(row) for row in kwargs.pop(note_key("image"), ())]
        if not notes:
            return super().embed_multimodal(**kwargs)
        # In passes no longer than those that vLLM profiled: it counts kept tokens.
        found: list[Tensor] = []
        for items in batches(self._lengths(kwargs), self._tokens):
            self._notes = notes[items]
            found += super().embed_multimodal(**self._part(kwargs, items))
        return found

    def _lengths(self, kwargs: Mapping[str, Any]) -> list[int]:
        """Patches of each image."""
        side = self.config.vision_config.image_size // self.config.vision_config.patch_size
        return [side**2 * (1 if of.ndim == 3 else len(of)) for of in kwargs["pixel_values"]]

    def _part(self, kwargs: Mapping[str, Any], items: slice) -> dict[str, Any]:
        """The arguments of some images."""
        return {key: of[items] for key, of in kwargs.items()}

    @staticmethod
    def _of_all_ranks(heads: Tensor) -> Tensor:
        """Each rank has a part of the heads (V, H, ...); all must choose the same tokens."""
        return tensor_model_parallel_all_gather(heads.contiguous(), dim=1)

    def _process_image_input(self, image_input: Any) -> Any:
        return self._reduced(image_input, super()._process_image_input)

    def _reduced(self, image_input: Any, process: Callable[[Any], Any]) -> Any:
        """What ``process`` makes of images, reduced."""
        notes, self._notes = self._notes, []
        if not notes or image_input["type"] == "image_embeds":
            return process(image_input)
        plans = [self.plans.of(note.recipe) for note in notes]
        with self.reduction.watching(plans) as seen:
            features = process(image_input)
        views, sizes = self._views(image_input)
        found, first = [], 0
        for i, (note, plan, rows) in enumerate(zip(notes, plans, features, strict=True)):
            if plan.stages:
                media, text = self.plans.family.media(sizes[i]), self._text(note, rows)
                pixels = self._pixels(image_input, i, slice(first, first + views[i]))
                rows = self.reduction.reduced(
                    plan,
                    media,
                    rows,
                    seen,
                    first,
                    lambda pixels=pixels, size=sizes[i]: self._tensors(pixels, size),
                    text,
                    note.before,
                )
            found.append(rows)
            first += views[i]
        return found

    def _text(self, note: Note, rows: Tensor) -> Tensor:
        if not note.text:
            return rows[:0]
        return self.language_model.embed_input_ids(torch.tensor(note.text, device=rows.device))

    def _pixels(self, image_input: Any, index: int, views: slice) -> Tensor:
        """Of an image, by its number or its rows of the tower."""
        return image_input["pixel_values"][index]

    def _views(self, image_input: Any) -> tuple[list[int], list[tuple[int, ...]]]:
        """Rows of the tower, and what decides the tokens, of each image."""
        sizes = [(int(height), int(width)) for height, width in image_input["image_sizes"]]
        return [len(values) for values in image_input["pixel_values"]], sizes

    def _tensors(self, values: Tensor, size: tuple[int, ...]) -> dict[str, Tensor]:
        """One image as vlmfast's processor output."""
        return {"pixel_values": values[None], "image_sizes": torch.tensor([size])}


class Info(CropsInfo, LlavaProcessingInfo):
    pass


class Processor(CropsProcessor, LlavaMultiModalProcessor):
    """Every image has one view, whatever its size."""

    def about(self, modality: str, item: Mapping[str, Any]) -> Media:
        side = self.info.get_hf_config().vision_config.image_size
        return self.info.plans.family.media((side, side))

    def items(self, modality: str, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{} for _ in data.get("pixel_values", ())]


def build_info(ctx: Any) -> Any:
    """vLLM's own choice; Pixtral shares the architecture and is left alone."""
    info = _build_llava_or_pixtral_hf_info(ctx)
    if type(info) is LlavaProcessingInfo:
        return Info(ctx)
    if getattr(info.get_hf_config(), KEY, None) is not None:
        plans_of(info.get_hf_config(), Crops)  # raises with the reason
    return info


def build_processor(info: Any, dummy_inputs: Any) -> Any:
    if isinstance(info, Info):
        return Processor(info, dummy_inputs)
    return _build_llava_or_pixtral_hf_processor(info, dummy_inputs)


@MULTIMODAL_REGISTRY.register_processor(
    build_processor, info=build_info, dummy_inputs=LlavaDummyInputsBuilder
)
class ReducedLlava(Reduced, LlavaForConditionalGeneration):
    """LLaVA-1.5 under ``vlmfast_recipe``; without it, vLLM's own model."""

    def _views(self, image_input: Any) -> tuple[list[int], list[tuple[int, ...]]]:
        side, count = self.config.vision_config.image_size, len(image_input["pixel_values"])
        return [1] * count, [(side, side)] * count

    def _tensors(self, values: Tensor, size: tuple[int, ...]) -> dict[str, Tensor]:
        return {"pixel_values": values[None]}
