"""Runs recipes on features of vLLM's LLaVAs and InternVL. Imports nothing of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.layout import VisualTokens
from vlmfast.core.saliency import Saliency, SaliencyRequest
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.errors import ModelError

from .crops import Renumbered
from .recipes import Media, Plan, joined


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
    """The vision tower of a model of vLLM, as the stages of recipes read it.

    Parameters
    ----------
    family : Renumbered
    tower, projector : Module
        Of the model.
    gather : callable
        Tensors of the heads (V, H, ...) of this rank, as those of all ranks.
    """

    def __init__(
        self,
        family: Renumbered,
        tower: nn.Module,
        projector: nn.Module,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self.family, self.projector, self.gather = family, projector, gather
        self.blocks = self.blocks_of(tower)
        self.cls = family.sources()[0] == "cls"

    @staticmethod
    def blocks_of(tower: Any) -> list[Any]:
        return list(tower.vision_model.encoder.layers)

    def attention(self, block: int) -> tuple[Any, int]:
        """A module with a ``scale``, and the number of its heads."""
        found = self.blocks[block].self_attn
        return found, found.num_heads_per_partition

    def projected(self, block: int, seen: Seen) -> Any:
        """Record queries, keys and values of a block; returns the handle of the hook."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.projections[block] = output[0] if isinstance(output, tuple) else output

        return self.blocks[block].self_attn.qkv_proj.register_forward_hook(hook)

    def wants_cls(self, plan: Plan) -> bool:
        """Whether a stage reads the projected CLS token."""
        return self.cls and any(
            stage.wants_cls and all(self.family.source(a) == "cls" for a in stage.saliencies())
            for stage in plan.stages
        )

    @contextmanager
    def watching(self, plans: Sequence[Plan]) -> Iterator[Seen]:
        """Record what the stages of some plans read from the tower."""
        seen, family = Seen(), self.family
        asked = [a for plan in plans for a in plan.requests.values()]

        with ExitStack() as hooks:
            for block in {family.block(a) for a in asked if family.source(a) != "norm"}:
                hooks.callback(self.projected(block, seen).remove)
            if any(family.source(a) == "norm" for a in asked):
                handle = self.projector.register_forward_pre_hook(
                    lambda module, args: seen.inputs.append(args[0])
                )
                hooks.callback(handle.remove)
            if any(map(self.wants_cls, plans)):
                handle = self.blocks[family.built() - 1].register_forward_hook(
                    lambda module, args, output: seen.output.append(
                        output[0] if isinstance(output, tuple) else output
                    )
                )
                hooks.callback(handle.remove)
            yield seen

    def reduced(
        self,
        plan: Plan,
        media: Media,
        features: Tensor,
        seen: Seen,
        first: int,
        pixels: Callable[[], dict[str, Tensor]],
        text: Tensor,
        before: int,
    ) -> Tensor:
        """The kept features (K, D) of an image.

        Parameters
        ----------
        plan : Plan
        media : Media
        features : Tensor, (N, D)
        seen : Seen
            Of the forward pass that computed them.
        first : int
            Its first row of the tower.
        pixels : callable
            Its tensors, as its processor made them.
        text, before
            As of `Plan.reduce`.
        """
        (item,) = media.items
        if len(media) != len(features):
            height, width = item.size
            raise ModelError(
                f"vLLM made {len(features)} tokens of an image of {height}x{width} pixels, "
                f"vlmfast counts {len(media)}; these versions do not fit"
            )
        stats = self._stats(plan, seen, slice(first, first + item.views[1] - item.views[0]), item)
        if plan.digests:
            from vlmfast.engine.features import with_digests

            stats = replace(stats, items=with_digests(self.family.adapter, pixels(), stats.items))
        tokens = VisualTokens(features, media.on(features.device, "layout"))
        kept, _ = plan.reduce(media, tokens, stats, text, before)
        return kept.features

    def _stats(self, plan: Plan, seen: Seen, span: slice, item: ItemGeometry) -> VisionStats:
        saliency = {
            key: (self._of_tokens(self._saliency(seen, span, asked), item),)
            for key, asked in plan.requests.items()
        }
        cls = None
        if self.wants_cls(plan):
            # The module's own call would run the hooks of whoever watches the projector.
            cls = self.projector.forward(joined(seen.output)[span, :1])[:, 0]
        return VisionStats((item,), {}, cls=cls, saliency=saliency)

    def _of_tokens(self, patches: Saliency, item: ItemGeometry) -> Saliency:
        """Of tokens instead of patches, the whole image first."""
        adapter, views = self.family.adapter, self.family.adapter.whole_first(item)
        rows, keys = patches.rows[views], patches.keys
        many = 1 if patches.source == "norm" else rows.shape[-1] / math.prod(item.patches)
        if keys is not None:
            keys = adapter.to_tokens(keys[views].transpose(1, 2), item).transpose(1, 2)
        return Saliency(patches.source, adapter.to_tokens(rows, item) * many, keys)

    def _saliency(self, seen: Seen, span: slice, asked: SaliencyRequest) -> Saliency:
        source = self.family.source(asked)
        if source == "norm":
            rows = joined([x.flatten(0, -3) for x in seen.inputs])[span].float()
            return Saliency(source, rows.norm(dim=-1)[:, None], rows if asked.keys else None)
        block = self.family.block(asked)
        (attention, heads), special = self.attention(block), int(self.cls)
        query, key, _ = seen.projections[block][span].chunk(3, dim=-1)
        query, key = (x.unflatten(-1, (heads, -1)).transpose(1, 2).float() for x in (query, key))
        query = query[:, :, :1] if source == "cls" else query[:, :, special:]
        rows = (query @ key.transpose(-1, -2) * attention.scale).softmax(-1)
        # Over the query rows; CLS is a single one.
        rows, keys = self.gather(rows.mean(2)[:, :, special:]), None
        if asked.keys:
            patches = self.gather(key[:, :, special:])
            keys = patches.transpose(1, 2).flatten(2) if asked.wide else patches.mean(1)
        return Saliency(source, rows, keys)


class Tiled(Reduction):
    """Of InternVL, whose vision tower is not split: each rank has all heads."""

    @staticmethod
    def blocks_of(tower: Any) -> list[Any]:
        return list(tower.encoder.layer)

    def attention(self, block: int) -> tuple[Any, int]:
        found = self.blocks[block].attention
        return found, found.num_heads

    def projected(self, block: int, seen: Seen) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            seen.projections[block] = torch.cat(args, dim=-1)

        return self.blocks[block].attention.attn.register_forward_pre_hook(hook)

    def wants_cls(self, plan: Plan) -> bool:
        return False  # the projector takes four patches at a time
