"""Forward passes over a prompt with its answer, also with gradients to the pixels of an image.

The pixels go through the model's own image processor and the engine, so that an optimized image has
the same effect in `VLM.ask`, up to the rounding of pixels. The processor must compute with torch:
Hugging Face's do, except those with the PIL backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.core.recipe import Recipe
from vlmfast.core.training import TrainingContext
from vlmfast.engine.attention import switched
from vlmfast.engine.cache import KVCache
from vlmfast.engine.prefill import Inputs, Prompt, Seen, look, prefill, prepare
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import ModelError

from .request import Rendered, messages_of, render

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.engine.forward import Watch

    from .vlm import VLM


def pixels_of(image: Image.Image) -> Tensor:
    """Pixels of an RGB image: float32, (3, H, W), 0 to 255."""
    import numpy as np

    return torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1)


def image_of(pixels: Tensor) -> Image.Image:
    """The inverse of `pixels_of`, with pixels rounded to whole numbers of 0 to 255."""
    from PIL import Image

    rounded = pixels.detach().round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(rounded.permute(1, 2, 0).contiguous().cpu().numpy())


def inputs_of(vlm: VLM, pixels: Tensor, question: str, answer: Sequence[int] = ()) -> Inputs:
    """Engine inputs of a question about one image, with gradients to its pixels.

    Parameters
    ----------
    pixels : Tensor, float32, (3, H, W)
        0 to 255.
    answer : sequence of int
        Token ids that follow the prompt.

    Raises
    ------
    ModelError
        If the image processor does not compute with torch.
    """
    adapter = vlm.adapter
    prompt = render(adapter, messages_of(question, images=image_of(pixels)), Recipe())
    try:
        tensors = adapter.inputs(prompt.text, [pixels])
        passed = any(t.requires_grad for k, t in tensors.items() if k.startswith("pixel_values"))
    except RuntimeError:  # a conversion to NumPy
        passed = False
    if pixels.requires_grad and not passed:
        kind = type(adapter.processor.image_processor).__name__
        raise ModelError(
            f"{kind} has no gradients: it does not compute with torch; load the processor with "
            "backend='torchvision'"
        )
    return inputs_with(prompt, tensors, answer)


def inputs_with(prompt: Rendered, tensors: dict[str, Tensor], answer: Sequence[int]) -> Inputs:
    """Engine inputs of a prompt that is followed by an answer.

    Parameters
    ----------
    tensors : dict of str to Tensor
        The processor's output for the prompt.
    answer : sequence of int
        Token ids.
    """
    ids = tensors["input_ids"]
    ids = torch.cat([ids, ids.new_tensor(list(answer))[None]], dim=1)
    more = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in tensors else {}
    tensors = {**tensors, "input_ids": ids, **more}
    return Inputs(tensors, prompt.sizes, prompt.question, prompt.frames, answer=len(answer))


def forward(
    vlm: VLM,
    inputs: Inputs,
    recipe: Recipe,
    stats: Stats,
    trace: Trace,
    *,
    seen: Seen | None = None,
    watch: Watch | None = None,
) -> tuple[Prompt, Tensor]:
    """One forward pass over a prompt and its answer, as in inference.

    Parameters
    ----------
    stats, trace, seen, watch
        As `engine.prefill.prepare` and `engine.prefill.prefill` take them.

    Returns
    -------
    Prompt
    Tensor, (1, A + 1, V)
        Logits before each token of the answer and after the last.
    """
    adapter = vlm.adapter
    with switched(vlm.model):
        prompt = prepare(adapter, inputs, recipe, stats, trace, seen=seen)
        cache = KVCache(adapter.depth, None, adapter.windows, adapter.state_layers)
        make = partial(TrainingContext, answer=prompt.answer)
        more: dict[str, Any] = {"watch": watch, "make": make}
        return prompt, prefill(adapter, prompt, recipe, cache, stats, trace, **more)


def seen_of(vlm: VLM, inputs: Inputs, recipe: Recipe) -> Seen:
    """The image after the vision tower, with the statistics that ``recipe`` requests."""
    with switched(vlm.model):
        return look(vlm.adapter, inputs, recipe, Stats(), Trace())


def kept_by(vlm: VLM, inputs: Inputs, recipe: Recipe, seen: Seen) -> Tensor:
    """Tokens of ``seen`` that enter the language model, or represent merged ones: bool, (N,)."""
    stats, trace = _after(vlm, seen)
    with torch.no_grad(), switched(vlm.model):
        prompt = prepare(vlm.adapter, inputs, recipe, stats, trace, seen=seen)
    order = prompt.layout.order[prompt.layout.visual]
    return torch.isin(seen.tokens.layout.order, order)


def logits_of(vlm: VLM, inputs: Inputs, seen: Seen | None = None) -> Tensor:
    """Logits of the full model before each token of the answer and after the last: (A + 1, V).

    Parameters
    ----------
    seen : Seen, optional
        The image after the tower, under the empty recipe.
    """
    stats, trace = (Stats(), Trace()) if seen is None else _after(vlm, seen)
    return forward(vlm, inputs, Recipe(), stats, trace, seen=seen)[1][0].float()


def _after(vlm: VLM, seen: Seen) -> tuple[Stats, Trace]:
    """Stats and trace of a prompt whose image is encoded."""
    trace = Trace()
    trace.begin(seen.tokens.layout, vlm.adapter.depth, seen.vision.items)
    return Stats(visual_tokens_in=len(seen.tokens)), trace


def attributions(vlm: VLM, pixels: Tensor, question: str, answer: Sequence[int]) -> Tensor:
    """How much each visual token contributes to an answer: float32, (N,), not negative.

    The absolute value of gradient times input, for the log-probability of the answer under the full
    model.
    """
    from torch.nn.functional import cross_entropy

    inputs = inputs_of(vlm, pixels.detach(), question, answer)
    with torch.no_grad():
        seen = seen_of(vlm, inputs, Recipe())
    features = seen.tokens.features.detach().requires_grad_()
    seen = replace(seen, tokens=replace(seen.tokens, features=features))
    logits = logits_of(vlm, inputs, seen)
    targets = inputs.tensors["input_ids"][0, -len(answer) :]
    (gradient,) = torch.autograd.grad(cross_entropy(logits[:-1], targets), features)
    return (gradient.float() * features.detach().float()).sum(-1).abs()
