"""What a family's processor makes of a prompt, or of a batch of prompts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlmfast.errors import ModelError, one_line
from vlmfast.media.info import FrameTimes

from ._described import Described
from ._media import Frames, Items, Media, Sizes, Tensors


class Prompted(Described):
    """Of `Adapter`: prompts and their tensors."""

    tensors: ClassVar[tuple[str, ...]] = ("pixel_values",)  # what `encode` takes
    video_tensors: ClassVar[tuple[str, ...]] = ()  # the same of videos not read as images
    host_tensors: ClassVar[tuple[str, ...]] = ()  # what stays in host memory, where it is read
    fixed: ClassVar[bool] = False  # whether all views have the size that the tower takes
    nested: ClassVar[bool] = False  # whether the processor takes a list of images per prompt
    processor: Any
    processing: threading.RLock

    def frame_labels(self, index: int, seconds: float) -> tuple[str, str]:
        """Text before and after frame ``index`` (from 0) of a video that is read as images."""
        label = getattr(self.config, "vlmfast_frame_label", "")
        return label.format(i=index + 1), ""

    def image_token(self) -> str:
        """The placeholder of an image in the text of a prompt."""
        return self.processor.image_token

    def marks(self) -> tuple[str, ...]:
        """The placeholders of images, and of videos that are not read as images."""
        videos = (self.processor.video_token,) if self.video_tensors else ()
        return (self.image_token(), *videos)

    def inputs(
        self,
        text: str,
        images: list[Any],
        frames: Frames = (),
        times: Sequence[FrameTimes] = (),
    ) -> Tensors:
        """Run the family's processor; tensors on the model's device, pixels in its dtype.

        ``images`` are all images and frames, ``frames`` is as in `engine.prefill.Inputs`, and
        ``times`` has one entry for each video.
        """
        tokenizer = self.processor.tokenizer
        bos = tokenizer.bos_token
        single, videos = self.parted(images, frames)
        self.check_media(single, videos)
        try:
            batch = self._process(
                images=([single] if self.nested else single) if single else None,
                text=[text],
                return_tensors="pt",
                add_special_tokens=not (bos and text.startswith(bos)),
                **(self.of_videos(videos, times) if videos else {}),
                **(self.on_device() if images else {}),
            )
        except (ValueError, TypeError, OverflowError) as error:
            name = type(self.processor).__name__
            raise ModelError(f"{name} rejected the prompt: {one_line(error)}") from error
        wanted = (self.tensors if single else ()) + (self.video_tensors if videos else ())
        lacking = [key for key in wanted if key not in batch]
        if lacking:
            raise ModelError(
                f"{type(self.processor).__name__} made no {', '.join(lacking)}: it does not belong "
                f"to a {self.config.model_type} model"
            )
        if "attention_mask" in batch and not bool(batch["attention_mask"].all()):
            raise ModelError(
                f"{type(self.processor).__name__} padded the prompt; prompts are processed one "
                "at a time without padding: remove padding from the processor's own arguments"
            )
        for key, value in batch.items():
            if self.fixed and key.startswith("pixel_values"):
                self._fits(value)
        found = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        return {
            # A mask without padding need not be copied.
            key: torch.ones_like(value, device=self.device)
            if key == "attention_mask" and value.device.type == "cpu" and bool(value.all())
            else self.moved(key, value)
            for key, value in found.items()
        }

    def check_media(self, images: list[Any], videos: list[list[Any]]) -> None:
        """Raise for images and videos that a prompt cannot have together."""

    def _process(self, **given: Any) -> Any:
        with self.processing:
            return self.processor(**given)

    def moved(self, key: str, value: Tensor) -> Tensor:
        """Move an input to the device without blocking; pixels in the model's dtype.

        `host_tensors` stay where they are.
        """
        if key in self.host_tensors:
            return value
        dtype = self.dtype if key.startswith("pixel_values") else value.dtype
        if self.device.type == "cuda" and value.device.type == "cpu":
            return value.pin_memory().to(self.device, non_blocking=True).to(dtype)
        return value.to(self.device, dtype)

    def _fits(self, pixels: Tensor) -> None:
        expected = self.view_size()
        if expected is not None and tuple(pixels.shape[-2:]) != expected:
            height, width = pixels.shape[-2:]
            raise ModelError(
                f"{type(self.processor).__name__} makes images of {height}x{width} pixels, and the "
                f"vision tower takes {expected[0]}x{expected[1]}; set the size in the processor"
            )

    def parted(self, images: list[Any], frames: Frames) -> tuple[list[Any], list[list[Any]]]:
        """Separate images from the frames of each video that is not read as images."""
        if not self.video_tensors or not frames:
            return images, []
        single: list[Any] = []
        videos: dict[int, list[Any]] = {}
        for image, (video, *_) in zip(images, frames, strict=True):
            (single if video < 0 else videos.setdefault(video, [])).append(image)
        return single, list(videos.values())

    def of_videos(self, videos: list[list[Any]], times: Sequence[FrameTimes]) -> dict[str, Any]:
        """Arguments of the processor for videos: chosen frames and their times."""
        about = [_metadata(own) for own in times]
        return {"videos": videos, "video_metadata": about, "do_sample_frames": False}

    # --- a batch of prompts ----------------------------------------------------------------------

    def images_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        """The images of a batch in the order of its rows, whose ids are ``ids``, (S_i,) each."""
        return self._alike(batch, self.tensors[0], self.image_token_id, ids)

    def videos_in(self, batch: Tensors, ids: list[Tensor]) -> list[Media]:
        """The videos of a batch that are not read as images."""
        return []

    def _alike(self, batch: Tensors, key: str, token: int, ids: list[Tensor]) -> list[Media]:
        """Images, or videos (N, T, C, H, W), that all have the same number of tokens."""
        pixels = batch.get(key)
        if pixels is None:
            return []
        tokens = sum(int((row == token).sum()) for row in ids) // max(len(pixels), 1)
        frames = pixels.shape[1] if pixels.dim() == 5 else 0
        size = pixels.shape[-2], pixels.shape[-1]
        return [Media(tokens, {key: one}, size, frames) for one in pixels.split(1)]

    def joined(self, parts: list[Tensors]) -> Tensors:
        """Join `Media.tensors` of several images and videos into those of one prompt."""
        keys = {key: None for part in parts for key in part}
        return {key: torch.cat([part[key] for part in parts if key in part]) for key in keys}

    def items_of(self, tensors: Tensors, media: Sequence[Media]) -> Items:
        """`items` of a prompt that came in a batch."""
        sizes, frames, videos = [], [], 0
        for one in media:
            video = videos if one.frames else -1
            videos += one.frames > 0
            sizes += [one.size] * max(one.frames, 1)
            frames += [(video, i, max(one.frames, 1)) for i in range(max(one.frames, 1))]
        return self.items(tensors, sizes, frames) if media else ()

    def on_device(self) -> dict[str, Any]:
        """Arguments that let processors that can resize and normalize images on the GPU."""
        if self.device.type == "cpu":
            return {}
        backend = getattr(self.processor.image_processor, "backend", None)
        return {"device": self.device} if backend == "torchvision" else {}

    def items(self, tensors: Tensors, sizes: Sizes, frames: Frames) -> Items:
        """`geometry` of a prompt's images, with the frames of videos marked.

        The parameters are those of `engine.prefill.Inputs`. A family may join frames into one item.
        """
        items = self.views_of(tensors, sizes)
        return framed(items, frames) if frames else items

    def views_of(self, tensors: Tensors, sizes: Sizes) -> Items:
        """`geometry` for families that also need the processor's output."""
        return self.geometry(sizes)

    def geometry(self, sizes: Sizes) -> Items:
        """Views of images of ``sizes`` (height, width in pixels) in the vision batch."""
        raise NotImplementedError(f"{type(self).__name__}.geometry")


def framed(items: Items, frames: Frames) -> Items:
    """Items with the frames of videos marked."""
    return tuple(
        replace(item, video=video, frame=(index, total))
        for item, (video, index, total, *_) in zip(items, frames, strict=True)
    )


def _metadata(times: FrameTimes) -> dict[str, Any]:
    """The fields of Hugging Face's ``VideoMetadata``; processors compute ``index / fps``."""
    frames: float = times.frames
    fps, shown = times.fps, list[float](times.indices)  # a new list: processors may append to it
    if any(index / fps != at for index, at in zip(shown, times.timestamps_s, strict=True)):
        # The rate varies: counted in seconds, the times are exact.
        frames, fps, shown = frames / fps, 1.0, list(times.timestamps_s)
    return {
        "total_num_frames": frames,
        "fps": fps,
        "frames_indices": shown,
        "duration": times.duration_s,
    }
