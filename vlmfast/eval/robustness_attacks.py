"""Small perturbations of an image: noise, an attack on token selection, verbose images.

All of them stay within ``eps`` of every pixel value (0 to 255) and are rounded to whole numbers, so
that the result is an image like any other. The optimized ones are projected gradient descent on the
sign of the gradient (arXiv 1706.06083), with full access to the model.

**Selection.** Attacks that know of the compression are stronger than others (CAA, arXiv
2601.12042). With ``z_i`` the logarithm of the score of token i, ``K`` the tokens that the reducer
keeps of the clean image, and ``t`` the threshold between kept and dropped tokens of the same view,
it minimizes::

    sum over i in K of w_i max(0, z_i - t + 1)  +  mean over the others of max(0, t - z_i + 1)

``w`` are the attributions of the full model's own caption, so that tokens that matter are pushed
out first. The score is the saliency by which the reducer ranks. A reducer without one (``divprune``
compares features) has a surrogate: the cosine distance of a token to the nearest other one, which
is large for tokens that diversity keeps. Scores of a guard are averaged over the same jittered
views that the reducer uses, and the gradient goes through all of them: the attack knows the guard.

**Verbose images** (arXiv 2401.11170) delay the end of the answer: they lower the margin of the end
token over the best other token, at each position of the current answer, which is decoded again
every `REFRESH` steps. The longest answer wins.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, relu

from vlmfast.api.generation import end_ids
from vlmfast.api.gradients import (
    attributions,
    image_of,
    inputs_of,
    kept_by,
    logits_of,
    pixels_of,
    seen_of,
)
from vlmfast.core.layout import VisualTokens
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import VisionStats
from vlmfast.core.views import token_saliency
from vlmfast.errors import RecipeError

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.api.vlm import VLM

QUESTION = "Describe the image."
REFRESH = 5  # steps between two decodings of a verbose image's answer
_SLACK = 1.0  # by how much the logarithm of a score is pushed beyond the threshold
_CAPTION = 64  # tokens of the caption whose attributions are used
_STEP = 2.5  # the length of all steps together, in eps


def reducer_of(recipe: Recipe) -> Stage:
    """The method of a recipe whose selection is attacked.

    Raises
    ------
    RecipeError
        Unless exactly one method reduces the tokens before the language model.
    """
    found = [s for s in recipe if any(isinstance(part, EncodeStage) for part in s.expand())]
    if len(found) != 1:
        raise RecipeError(
            f"recipe {str(recipe)!r} has {len(found)} methods that reduce tokens before the "
            "language model; robustness is measured for exactly one, such as hired:0.2"
        )
    return found[0]


def noisy(image: Image.Image, eps: int, name: str) -> Image.Image:
    """Every pixel value ``eps`` higher or lower, at random; depends on ``name`` alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {eps}".encode()))
    pixels = pixels_of(image)
    return image_of(pixels + eps * (2 * torch.randint(2, pixels.shape, generator=generator) - 1))


def descend(start: Tensor, eps: int, steps: int, loss: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The pixels with the lowest loss that projected gradient descent finds near ``start``.

    Parameters
    ----------
    start : Tensor, float32, (3, H, W)
        Whole numbers of 0 to 255.
    loss : callable
        ``(pixels, step) -> scalar``.

    Returns
    -------
    Tensor, float32, (3, H, W)
        Rounded, within ``eps`` of ``start``.
    """
    low, high = (start - eps).clamp(min=0), (start + eps).clamp(max=255)
    best, least, pixels = start, torch.inf, start
    for step in range(steps + 1):
        pixels = pixels.detach().requires_grad_()
        value = loss(pixels, step)
        if (now := value.item()) < least:
            best, least = pixels.detach(), now
        if step < steps:
            (gradient,) = torch.autograd.grad(value, pixels)
            pixels = pixels - _STEP * eps / steps * gradient.sign()
            pixels = torch.minimum(torch.maximum(pixels, low), high)
    return best.round()


# --- selection -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """Scores of the visual tokens of one image.

    Parameters
    ----------
    z : Tensor, float32, (N,)
        Logarithms of the scores.
    patches : Tensor, bool, (N,)
        Tokens that show a part of the image.
    view : Tensor, int32, (N,)
    """

    z: Tensor
    patches: Tensor
    view: Tensor


class SelectionAttack:
    """Perturbs images so that a reducer drops the tokens that it keeps of the clean ones.

    Parameters
    ----------
    vlm : VLM
    recipe : Recipe
        With exactly one reducer; other methods of it are not attacked.
    """

    def __init__(self, vlm: VLM, recipe: Recipe) -> None:
        self.vlm, self.stage = vlm, reducer_of(recipe)
        self.recipe = Recipe((self.stage,))
        self._clean: dict[bytes, tuple[Tensor, Tensor]] = {}

    def scored(self, pixels: Tensor) -> Scored:
        """Scores, with gradients to the pixels."""
        seen = seen_of(self.vlm, inputs_of(self.vlm, pixels, QUESTION), self.recipe)
        z = self._scores(seen.tokens, seen.vision).clamp(min=1e-9).log()
        return Scored(z, seen.tokens.layout.patches, seen.tokens.layout.view)

    def kept(self, pixels: Tensor) -> Tensor:
        """The patches that are kept, or represent merged ones: bool, (N,)."""
        inputs = inputs_of(self.vlm, pixels, QUESTION)
        with torch.no_grad():
            seen = seen_of(self.vlm, inputs, self.recipe)
        return kept_by(self.vlm, inputs, self.recipe, seen) & seen.tokens.layout.patches

    def _scores(self, tokens: VisualTokens, stats: VisionStats) -> Tensor:
        parts = [part for part in self.stage.expand() if isinstance(part, EncodeStage)]
        if asked := [request for part in parts for request in part.saliencies()]:
            return token_saliency(tokens, stats, asked[-1])
        units = normalize(tokens.features.float(), dim=-1)
        own = torch.eye(len(units), dtype=torch.bool, device=units.device)
        own |= ~tokens.layout.patches
        return 1 - (units @ units.T).masked_fill(own, -1.0).amax(1)

    def _of_clean(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        """Of a clean image: the patches that are kept, bool, (N,), and `_weights`."""
        key = image.tobytes()
        if key not in self._clean:
            pixels = pixels_of(image)
            kept = self.kept(pixels)
            self._clean[key] = kept, self._weights(pixels, kept)
        return self._clean[key]

    def _weights(self, pixels: Tensor, kept: Tensor) -> Tensor:
        """Weights of the kept tokens: float32, (N,), their sum is 1."""
        with self.vlm.prefix_cache.bypassed():
            answer = self.vlm.ask(
                QUESTION, images=image_of(pixels), do_sample=False, max_new_tokens=_CAPTION
            )
        weight = attributions(self.vlm, pixels, QUESTION, answer.token_ids) * kept
        return weight / weight.sum() if bool(weight.sum() > 0) else kept / kept.sum()

    def __call__(self, image: Image.Image, eps: int, steps: int) -> Image.Image:
        kept, weight = self._of_clean(image)

        def loss(pixels: Tensor, step: int) -> Tensor:
            return margin_loss(self.scored(pixels), kept, weight)

        return image_of(descend(pixels_of(image), eps, steps, loss))

    def changed(self, clean: Image.Image, image: Image.Image) -> float:
        """Fraction of the tokens kept of the clean image that are not kept of the other."""
        before, after = (self.kept(pixels_of(of)) for of in (clean, image))
        return 1 - float((before & after).sum() / before.sum())


def margin_loss(found: Scored, kept: Tensor, weight: Tensor) -> Tensor:
    """The loss of the module's docstring; views that keep all or none have no threshold.

    Parameters
    ----------
    kept : Tensor, bool, (N,)
        Of the clean image.
    weight : Tensor, float32, (N,)
    """
    total = found.z.sum() * 0
    for view in found.view[found.patches].unique():
        own = found.patches & (found.view == view)
        inside, outside = own & kept, own & ~kept
        k = int(inside.sum())
        if k == 0 or not bool(outside.any()):
            continue
        ranked = found.z[own].detach().sort(descending=True).values
        threshold = (ranked[k - 1] + ranked[k]) / 2
        total = total + (weight[inside] * relu(found.z[inside] - threshold + _SLACK)).sum()
        share = weight[inside].sum()
        total = total + share * relu(threshold - found.z[outside] + _SLACK).mean()
    return total


# --- verbose images ------------------------------------------------------------------------------


@dataclass
class VerboseAttack:
    """Perturbs images so that the full model's answers become long.

    Parameters
    ----------
    vlm : VLM
    max_new_tokens : int
        Longest answer that is decoded.
    question : str
    """

    vlm: VLM
    max_new_tokens: int
    question: str = QUESTION
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = end_ids(self.vlm.model.generation_config)

    def answer(self, pixels: Tensor) -> list[int]:
        """The greedy answer to the rounded image, without its end token."""
        with self.vlm.prefix_cache.bypassed():
            found: Any = self.vlm.ask(
                self.question,
                images=image_of(pixels),
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
            ).token_ids
        return [token for token in found if token not in self.ends]

    def loss(self, pixels: Tensor, answer: list[int]) -> Tensor:
        """Margin of the end token, summed over the positions of an answer."""
        logits = logits_of(self.vlm, inputs_of(self.vlm, pixels, self.question, answer))
        end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        end[self.ends] = True
        margin = logits[:, end].amax(-1) - logits.masked_fill(end, -torch.inf).amax(-1)
        return relu(margin + _SLACK).sum()

    def __call__(self, image: Image.Image, eps: int, steps: int) -> Image.Image:
        start = pixels_of(image)
        answer: list[int] = []
        longest, best = -1, start

        def loss(pixels: Tensor, step: int) -> Tensor:
            nonlocal answer, longest, best
            if step % REFRESH == 0 or step == steps:
                answer = self.answer(pixels)
                if len(answer) > longest:
                    longest, best = len(answer), pixels.detach().round()
            return self.loss(pixels, answer)

        descend(start, eps, steps, loss)
        return image_of(best)
