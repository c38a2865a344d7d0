"""Recipes of a server and of its requests, and whether vLLM can run them.

Imports nothing of vLLM.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.counting import ImageLayout, VideoLayout
from vlmfast.core.exact import exact_count, exact_counts
from vlmfast.core.layout import TokenLayout, VisualTokens
from vlmfast.core.recipe import Recipe
from vlmfast.core.saliency import SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.errors import ModelError, RecipeError

KEY = "vlmfast_recipe"  # in --hf-overrides, and in mm_processor_kwargs of a request
_LOG = logging.getLogger("vllm.vlmfast")  # below the one that vLLM prints
MAX_PLANS = 256  # recipes of requests that are kept


@dataclass(frozen=True, eq=False)
class Media:
    """The visual tokens of one image or video before any are dropped.

    Parameters
    ----------
    of : ImageLayout or VideoLayout
    runs : int
        Runs of placeholders: one, or one for each step where text stands between them.
    """

    of: ImageLayout | VideoLayout
    runs: int

    @cached_property
    def items(self) -> tuple[ItemGeometry, ...]:
        frames = self.of.frames if isinstance(self.of, VideoLayout) else (self.of,)
        return tuple(frame.geometry for frame in frames)

    @cached_property
    def layout(self) -> TokenLayout:
        """All tokens; ``order`` counts from 0."""
        frames = self.of.frames if isinstance(self.of, VideoLayout) else (self.of,)
        layout = TokenLayout.cat([frame.layout for frame in frames])
        layout = layout.replace(order=torch.arange(len(layout)))
        return layout.seen(layout.on_host)  # on a device too

    def __len__(self) -> int:
        return len(self.of)

    @cached_property
    def _copies(self) -> dict[tuple[str, torch.device], Any]:
        return {}

    def on(self, device: torch.device, name: str) -> Any:
        """A field on a device; copied once."""
        if (key := (name, device)) not in self._copies:
            self._copies[key] = getattr(self, name).to(device)
        return self._copies[key]


class Family:
    """What a plan must know of a model; its configuration is enough.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
    """

    positions = "keep"  # "compact" where vLLM counts positions itself

    def __init__(self, config: Any) -> None:
        self.config = config

    def positioned(self, recipe: Recipe) -> Recipe:
        """The recipe with the rotary ids that vLLM gives.

        Raises
        ------
        RecipeError
            If it asks for others.
        """
        raise NotImplementedError(f"{type(self).__name__}.positioned")

    def check(self, recipe: Recipe) -> None:
        """Raise `RecipeError` where the model itself is not supported."""

    def sources(self) -> tuple[str, ...]:
        """The sources of saliency that the vision tower has, the default first."""
        raise NotImplementedError(f"{type(self).__name__}.sources")

    def source(self, asked: SaliencyRequest) -> str:
        """The source that serves a request."""
        return self.sources()[0] if asked.source == "auto" else asked.source

    def built(self) -> int:
        """Blocks of the vision tower that vLLM builds."""
        raise NotImplementedError(f"{type(self).__name__}.built")

    def block(self, asked: SaliencyRequest) -> int:
        """Index of the block that a request means."""
        raise NotImplementedError(f"{type(self).__name__}.block")

    def samples(self) -> list[Media]:
        """Images for which a recipe is tried before a request names it."""
        raise NotImplementedError(f"{type(self).__name__}.samples")


class Plan:
    """A recipe on a model.

    Parameters
    ----------
    family : Family
    recipe : Recipe

    Attributes
    ----------
    text : str
        The canonical text, which is part of the keys of vLLM's caches.
    asks : bool
        Whether it reads the question.
    compact : bool
        Whether a stage renumbers tokens where it drops any.

    Raises
    ------
    RecipeError
        For a recipe that vLLM cannot run, with the reason.
    """

    def __init__(self, family: Family, recipe: Recipe) -> None:
        recipe = family.positioned(recipe)
        _check(family, recipe)
        self.family, self.recipe, self.text = family, recipe, str(recipe) or "none"
        self.stages = recipe.acting("encode")
        self.requests = {a.key: a for stage in self.stages for a in stage.saliencies()}
        self.asks = any(stage.query_dependent for stage in self.stages)
        self.compact = any(stage.positions == "compact" for stage in self.stages)
        self.digests = any(stage.wants_digest for stage in self.stages)
        for media in family.samples():
            self.count(media)

    def count(self, media: Media) -> int:
        """Tokens kept of an image or video."""
        return exact_count(self.recipe, media.of)

    def counts(self, media: Media) -> tuple[int, ...] | None:
        """Tokens kept in each run of placeholders.

        ``None`` where only their sum is exact, or where all runs are numbered together, because the
        ids of each depend on what is kept of those before it.
        """
        if media.runs == 1 or not isinstance(media.of, VideoLayout):
            return (self.count(media),)
        self.count(media)  # its error is the clearer one
        try:
            return None if self.compact else exact_counts(self.recipe, media.of)
        except RecipeError:
            return None

    def reduce(
        self, media: Media, tokens: VisualTokens, stats: VisionStats, text: Tensor, before: int
    ) -> tuple[VisualTokens, bool]:
        """The kept tokens of an image or video, and whether they are renumbered.

        The stages run on it as on the only one of a prompt, because vLLM caches its features for
        any prompt that it appears in.

        Parameters
        ----------
        media : Media
        tokens : VisualTokens
            All of its tokens.
        stats : VisionStats
        text : Tensor, (T, D)
            Embeddings of the prompt's text, where the recipe reads it.
        before : int
            How many of them stand before the first placeholder.
        """
        order = torch.arange(len(text), device=text.device) - before
        order[before:] += len(media)
        depth = self.family.config.get_text_config().num_hidden_layers
        request = EncodeRequest("", text, depth, order=order if len(text) else None)
        renumbered = False
        for stage in self.stages:
            whole = len(tokens)
            tokens = stage.reduce(tokens, stats, request)
            renumbered |= stage.positions == "compact" and len(tokens) < whole
        if len(tokens) != (expected := self.count(media)):
            raise ModelError(
                f"{self.text} kept {len(tokens)} of {len(media)} tokens, and {expected} places are "
                "reserved"
            )
        return tokens, renumbered


class Plans:
    """The plans of a server, by the text of the recipe.

    Parameters
    ----------
    family : Family
    default : str
        The server's own recipe.
    """

    def __init__(self, family: Family, default: str) -> None:
        self.family = family
        self._known: OrderedDict[str, Plan] = OrderedDict()
        self.default = self._plan(default)
        _LOG.info("%s: %s", KEY, self.default.text)

    def of(self, text: Any = None) -> Plan:
        """The plan of a request; the server's own where it names no recipe.

        Raises
        ------
        RecipeError
            For a recipe that vLLM cannot run.
        """
        if text is None or text == self.default.text:
            return self.default
        if text not in self._known:
            self._known[text] = self._plan(text)
            while len(self._known) > MAX_PLANS:
                self._known.popitem(last=False)
        self._known.move_to_end(text)
        return self._known[text]

    def _plan(self, text: Any) -> Plan:
        if not isinstance(text, str) or Recipe.reads_file(text):
            raise RecipeError(f"{KEY}={text!r} must be the text of a recipe")
        return Plan(self.family, Recipe.parse(text))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts; those of a single pass are not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def plans_of(config: Any, family: type[Family]) -> Plans | None:
    """The plans of a server; ``None`` where its configuration names no recipe, not even 'none'."""
    default = getattr(config, KEY, None)
    return None if default is None else Plans(family(config), default)


def _check(family: Family, recipe: Recipe) -> None:
    family.check(recipe)
    for part in (part for stage in recipe for part in stage.expand()):
        if part.protocol != "encode":
            raise RecipeError(
                f"{part.name} acts in the {part.protocol} step; vLLM runs stages of visual "
                "tokens alone, such as 'hired:budget=0.2'"
            )
        if part.other_model:
            raise RecipeError(f"{part.name} runs another model, which is not supported in vLLM")
        if part.proportional_attention:
            raise RecipeError(
                f"{part.name}: vLLM's attention knows no weights of merged tokens; use "
                f"'{part.name}:proportional_attention=false'"
            )
        if part.vision_stats(family.built()):
            raise RecipeError(f"{part.name} reads single vision blocks, which is not supported")
        for asked in part.saliencies():
            _check_saliency(family, part.name, asked)


def _check_saliency(family: Family, name: str, asked: SaliencyRequest) -> None:
    if asked.jitter:
        raise RecipeError(
            f"{name}: guard={asked.jitter} needs more forward passes of the vision tower, which "
            "vLLM does not run; use guard=0"
        )
    if asked.source not in ("auto", *family.sources()):
        raise RecipeError(
            f"{name}: saliency={asked.source} cannot be read from this vision tower; allowed are "
            f"auto, {', '.join(family.sources())}"
        )
    if family.source(asked) != "norm" and family.block(asked) >= family.built():
        raise RecipeError(
            f"{name} reads block {family.block(asked)} of the vision tower, and vLLM "
            f"builds only blocks 0 to {family.built() - 1}, whose output the model uses; "
            "'hired:budget=0.2' works"
        )
