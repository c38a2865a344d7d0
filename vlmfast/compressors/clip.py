"""Relevance of images to a question, by any OpenCLIP model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, normalize

from vlmfast.core import hub
from vlmfast.core.params import param
from vlmfast.errors import RecipeError, check_memory

if TYPE_CHECKING:
    from PIL import Image

_AT_ONCE = 16  # images per forward pass
_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")  # by default on the Hub
_WINDOWS = 4  # windows of an image, down and across, for models without patch features
_RIDGE = 1e-4  # when all remaining tokens are redundant, relevance alone decides


def model_param() -> Any:
    return param(
        "ViT-L-14-336-quickgelu",
        "OpenCLIP model: one of its model names, hf-hub:NAME or local-dir:FOLDER",
    )


def pretrained_param() -> Any:
    return param("openai", "its weights: an OpenCLIP tag or a file; not needed for hf-hub")


@dataclass(frozen=True, eq=False)
class Clip:
    """An OpenCLIP model with its tokenizer and its image preprocessing."""

    model: Any  # classes of OpenCLIP have no common one
    tokenizer: Any
    prepare: Any

    @torch.no_grad()
    def text(self, question: str) -> Tensor:
        """The question's embedding: float32, (D,), of length 1."""
        ids = self.tokenizer([question]).to(self._device)
        return normalize(self.model.encode_text(ids).float(), dim=-1)[0]

    @torch.no_grad()
    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """Embeddings of whole images: float32, (N, D), of length 1."""
        parts = [
            self.model.encode_image(self._pixels(images[i : i + _AT_ONCE]))
            for i in range(0, len(images), _AT_ONCE)
        ]
        return normalize(torch.cat(parts).float(), dim=-1)

    @property
    def dense(self) -> bool:
        """Whether patch features can be projected the way CLS is."""
        visual = self.model.visual
        plain = getattr(visual, "attn_pool", None) is None
        return plain and isinstance(getattr(visual, "proj", None), Tensor)

    @torch.no_grad()
    def relevance(self, image: Image.Image, text: Tensor) -> Tensor:
        """Relevance of each part of an image to a text: float32, (h, w).

        For a ViT, minus the cosine of its patches after the last norm and projection: with a model
        trained on CLS alone, patches are anticorrelated with the text of what they show. For other
        models, the cosine of windows of half the image's height and width.
        """
        if self.dense:
            visual = self.model.visual
            found = visual.forward_intermediates(
                self._pixels([image]), indices=1, normalize_intermediates=True
            )
            patches = found["image_intermediates"][0][0].permute(1, 2, 0) @ visual.proj
            return -(normalize(patches.float(), dim=-1) @ text)
        width, height = image.size
        starts = [(2 * i + 1) / (2 * _WINDOWS) - 0.25 for i in range(_WINDOWS)]
        starts = [min(max(start, 0.0), 0.5) for start in starts]
        windows = [
            image.crop(
                (
                    int(x * width),
                    int(y * height),
                    max(int((x + 0.5) * width), int(x * width) + 1),
                    max(int((y + 0.5) * height), int(y * height) + 1),
                )
            )
            for y in starts
            for x in starts
        ]
        return (self.images(windows) @ text).view(_WINDOWS, _WINDOWS)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _pixels(self, images: Sequence[Image.Image]) -> Tensor:
        return torch.stack([self.prepare(image) for image in images]).to(self._device)


def load(stage: str, model: str, pretrained: str) -> Clip:
    """Load an OpenCLIP model for the method ``stage``, on the GPU if one is available.

    Raises
    ------
    RecipeError
        When OpenCLIP is not installed, the model is unknown, or its weights cannot be loaded.
    """
    if not pretrained and not model.startswith(("hf-hub:", "local-dir:")):
        raise RecipeError(
            f"{stage}: pretrained is empty, and {model} has no weights of its own; give an "
            "OpenCLIP tag or a file"
        )
    try:
        if (lacking := _lacking(model, pretrained)) is not None and not hub.reachable():
            raise ConnectionError(f"{lacking} is not in the cache, and the Hub cannot be reached")
        return _opened(model, pretrained)
    except ImportError as error:
        raise RecipeError(
            f"{stage} needs OpenCLIP, which cannot be imported ({error}); "
            "pip install open_clip_torch"
        ) from None
    except Exception as error:  # its readers and the hub raise errors of many types
        check_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(
            f"{stage}: OpenCLIP cannot load model={model} with pretrained={pretrained}: {reason}; "
            "give an OpenCLIP model name and tag, or a file"
        ) from error


def _lacking(model: str, pretrained: str) -> str | None:
    """The repository of weights that would have to be downloaded from the Hub."""
    import open_clip
    from huggingface_hub import constants, try_to_load_from_cache

    if model.startswith("hf-hub:"):
        repo, file = model.removeprefix("hf-hub:"), "open_clip_config.json"
    else:
        known = open_clip.get_pretrained_cfg(model, pretrained) or {}
        repo, _, file = known.get("hf_hub", "").rpartition("/")
    if not repo or constants.HF_HUB_OFFLINE:  # offline, the client itself fails at once
        return None
    names = (file, f"{Path(file).stem}.safetensors", *_FILES)
    cached = (isinstance(try_to_load_from_cache(repo, name), str) for name in names if name)
    return None if any(cached) else repo


@lru_cache(maxsize=2)
def _opened(model: str, pretrained: str) -> Clip:
    import open_clip

    # Images are resized to the model's square, not cropped, so that no part is missing.
    found, _, prepare = open_clip.create_model_and_transforms(
        model, pretrained=pretrained or None, image_resize_mode="squash"
    )
    found = found.eval().requires_grad_(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Clip(found.to(device), open_clip.get_tokenizer(model), prepare)


def at_boxes(values: Tensor, boxes: Tensor) -> Tensor:
    """Bilinear samples of a map (h, w) of an image at the centres of ``boxes`` (N, 4): (N,)."""
    middle = boxes.view(-1, 2, 2).mean(1) * 2 - 1
    found = grid_sample(
        values[None, None], middle[None, None], padding_mode="border", align_corners=False
    )
    return found[0, 0, 0]


def conditional(similarity: Tensor, relevance: Tensor) -> Tensor:
    """The kernel of a determinantal point process conditioned on the question: float32, (N, N).

    ``L = diag(r) S diag(r)`` with the relevance scaled to [0, 1].
    """
    low, high = relevance.min(), relevance.max()
    r = (relevance - low) / (high - low + 1e-6)
    own = torch.eye(len(r), device=r.device)
    return r[:, None] * (similarity + _RIDGE * own) * r
