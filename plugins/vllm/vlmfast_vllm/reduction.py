"""Runs the stages of a recipe on the features that vLLM computed. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.errors import ModelError

from .recipes import Plan, block_of, built_blocks, sources


@dataclass
class Seen:
    """What was recorded while the vision tower ran, for all views of a batch.

    Parameters
    ----------
    projections : dict of int to Tensor
        Block index to its queries, keys and values, (V, S, 3 D).
    inputs : list of Tensor
        Inputs of the projector.
    output : list of Tensor
        Output of the block that feeds it, (V, S, D).
    """

    projections: dict[int, Tensor] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)


class Reduction:
    """The stages of a recipe inside a model of vLLM.

    Parameters
    ----------
    plan : Plan
    tower, projector : Module
        Of the model.
    ranks : int
        Over how many devices the heads of the tower are split.

    Raises
    ------
    ModelError
        If they are split.
    """

    def __init__(self, plan: Plan, tower: nn.Module, projector: nn.Module, ranks: int) -> None:
        if ranks > 1:
            raise ModelError(
                "vlmfast_recipe: tensor parallelism splits the heads that rank visual tokens, "
                "which is not supported; use tensor_parallel_size=1"
            )
        self.plan, self.projector = plan, projector
        self.blocks = list(tower.vision_model.encoder.layers)
        self.requests: dict[str, SaliencyRequest] = {
            asked.key: asked for stage in plan.stages for asked in stage.saliencies()
        }
        self.cls = sources(plan.config)[0] == "cls"
        self.wants_cls = self.cls and any(
            stage.wants_cls and all(self.source(a) == "cls" for a in stage.saliencies())
            for stage in plan.stages
        )

    def source(self, asked: SaliencyRequest) -> str:
        """The source that serves a request."""
        return sources(self.plan.config)[0] if asked.source == "auto" else asked.source

    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """Record what the stages read from the tower."""
        seen, handles = Seen(), []

        def projected(block: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                seen.projections[block] = output[0] if isinstance(output, tuple) else output

            return hook

        asked = [a for a in self.requests.values() if self.source(a) != "norm"]
        for block in {block_of(self.plan.config, a.block) for a in asked}:
            module = self.blocks[block].self_attn.qkv_proj
            handles.append(module.register_forward_hook(projected(block)))
        if any(self.source(a) == "norm" for a in self.requests.values()):
            handles.append(
                self.projector.register_forward_pre_hook(
                    lambda module, args: seen.inputs.append(args[0])
                )
            )
        if self.wants_cls:
            handles.append(
                self.blocks[built_blocks(self.plan.config) - 1].register_forward_hook(
                    lambda module, args, output: seen.output.append(
                        output[0] if isinstance(output, tuple) else output
                    )
                )
            )
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def reduced(
        self,
        features: Sequence[Tensor],
        seen: Seen,
        views: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        pixels: Callable[[int], dict[str, Tensor]],
    ) -> list[Tensor]:
        """The kept features (K, D) of each image.

        Every image is reduced as the only one of a prompt, because vLLM caches its features for
        any prompt that it appears in.

        Parameters
        ----------
        features : sequence of Tensor, each (N, D)
        seen : Seen
            Of the forward pass that computed them.
        views : sequence of int
            Rows of the tower of each image, those that only pad it included.
        sizes : sequence of (int, int)
            Height and width of each image.
        pixels : callable
            The tensors of one image by its index, as its processor made them.
        """
        found, start = [], 0
        for index, (rows, size) in enumerate(zip(features, sizes, strict=True)):
            image = self.plan.image(size)
            if len(image) != len(rows):
                raise ModelError(
                    f"vLLM made {len(rows)} tokens of an image of {size[0]}x{size[1]} pixels, "
                    f"vlmfast counts {len(image)}; these versions do not fit"
                )
            item = image.geometry
            span = slice(start, start + item.views[1] - item.views[0])
            tokens = VisualTokens(rows, image.layout.to(rows.device))
            stats = self._stats(seen, span, item)
            if any(stage.wants_digest for stage in self.plan.stages):
                stats = self._digested(stats, pixels(index))
            request = EncodeRequest(
                "", rows[:0], self.plan.config.get_text_config().num_hidden_layers
            )
            for stage in self.plan.stages:
                tokens = stage.reduce(tokens, stats, request)
            if len(tokens) != (expected := self.plan.count(size)):
                raise ModelError(
                    f"{self.plan.recipe} kept {len(tokens)} tokens of an image of "
                    f"{size[0]}x{size[1]} pixels, and {expected} places are reserved"
                )
            found.append(tokens.features)
            start += views[index]
        return found

    def _stats(self, seen: Seen, span: slice, item: ItemGeometry) -> VisionStats:
        saliency = {key: (self._saliency(seen, span, a),) for key, a in self.requests.items()}
        cls = None
        if self.wants_cls:
            # The module's own call would run the hooks of whoever watches the projector.
            cls = self.projector.forward(torch.cat(seen.output)[span, :1])[:, 0]
        return VisionStats((item,), {}, cls=cls, saliency=saliency)

    def _saliency(self, seen: Seen, span: slice, asked: SaliencyRequest) -> Saliency:
        source = self.source(asked)
        if source == "norm":
            rows = torch.cat([x.flatten(0, -3) for x in seen.inputs])[span].float()
            return Saliency(source, rows.norm(dim=-1)[:, None], rows if asked.keys else None)
        block = block_of(self.plan.config, asked.block)
        attention = self.blocks[block].self_attn
        heads, special = attention.num_heads_per_partition, int(self.cls)
        query, key, _ = seen.projections[block][span].chunk(3, dim=-1)
        query, key = (x.unflatten(-1, (heads, -1)).transpose(1, 2).float() for x in (query, key))
        query = query[:, :, :1] if source == "cls" else query[:, :, special:]
        rows = (query @ key.transpose(-1, -2) * attention.scale).softmax(-1)
        rows = rows.mean(2)[:, :, special:]  # over the query rows; CLS is a single one
        keys = None
        if asked.keys:
            patches = key[:, :, special:]
            keys = patches.transpose(1, 2).flatten(2) if asked.wide else patches.mean(1)
        return Saliency(source, rows, keys)

    def _digested(self, stats: VisionStats, tensors: dict[str, Tensor]) -> VisionStats:
        from vlmfast.engine.features import with_digests

        return replace(stats, items=with_digests(self.plan.adapter, tensors, stats.items))
