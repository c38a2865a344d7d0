"""The stage: counts for each image, one decision per prompt, the module's branches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import param, positions_param, proportional_attention_param, weights_param
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.errors import RecipeError

from ...reducer import Reducer
from ...select import apportion, count
from .module import BRANCHES, MODES, ElasticCompressor, fractions, summarise

_CHOICES = ("gate", *BRANCHES)

_SAME = ("keep", "budget")  # the same fraction under every branch


@dataclass(frozen=True)
class Elastic(Reducer):
    """Prunes, pools, convolves or resamples an image, chosen by a gate from the question."""

    name: ClassVar[str] = "elastic"
    paper: ClassVar[str] = "SpecVLM, arXiv 2509.11815"
    tier: ClassVar[str] = "core"
    trained: ClassVar[bool] = True

    keep: float | None = param(  # type: ignore[assignment]  # none: each branch has its own
        None,
        "fraction of the visual tokens kept, the same for every branch",
        gt=0.0,
        le=1.0,
    )
    mode: str = param("select", "one branch, a weighted sum, or all concatenated", choices=MODES)
    branch: str = param("gate", "chosen by the gate, or always this one", choices=_CHOICES)
    prune: float = param(0.05, "fraction that random pruning keeps", gt=0.0, le=1.0, excludes=_SAME)
    pool: float = param(0.05, "fraction that pooling keeps", gt=0.0, le=1.0, excludes=_SAME)
    conv: float = param(
        1 / 3, "fraction that the convolution keeps", gt=0.0, le=1.0, excludes=_SAME
    )
    queries: int = param(2, "tokens of the resampler for each image", ge=1, excludes=_SAME)
    text: bool = param(False, "the gate may also drop the image")
    seed: int = param(0, "seed of random pruning", ge=0)
    positions: str = positions_param()
    proportional_attention: bool = proportional_attention_param(False)
    weights: str = weights_param()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "select" and (self.branch != "gate" or self.text):
            raise RecipeError(
                f"elastic: mode={self.mode} uses its branches together; branch and text are for "
                "mode=select only"
            )
        if self.fraction is not None and (self.branch == "text" or self.text):
            raise RecipeError(
                f"elastic: {self._asked} cannot be combined with text=true or branch=text, which "
                "drop the whole image"
            )

    @property
    def query_dependent(self) -> bool:  # type: ignore[override]  # by its settings
        """Whether the gate, which sees the question, affects the result."""
        return self.branch == "gate" and self.mode != "concat"

    @property
    def _asked(self) -> str:
        name = "keep" if self.budget is None else "budget"
        return f"{name}={self.fraction:g}"

    @classmethod
    def build(cls, config: dict[str, Any]) -> nn.Module:
        """The untrained module, from ``width``, ``hidden``, ``queries`` and ``text``."""
        values = (config[key] for key in ("width", "hidden", "queries", "text"))
        return ElasticCompressor(*values)

    def counts(self, total: int, queries: int, text: bool) -> list[int | None]:
        """Tokens that each of `BRANCHES` leaves of ``total``; ``None`` if it is closed.

        ``queries`` are those of the weights; ``text`` opens the branch of this name.
        """
        if self.fraction is None:
            shares = (self.prune, self.pool, self.conv)
            left = [count(share, total) for share in shares]
            return [*left, self.queries, 0 if text else None]
        same = count(self.fraction, total)
        return [same, same, same, same if same <= queries else None, None]

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        """One decision for all images, then each image separately."""
        if self.fraction == 1 or not len(patches := tokens.layout.patch_rows()):
            return tokens
        module = cast(ElasticCompressor, request.trained[self.name])
        if self.queries > module.queries:
            raise RecipeError(
                f"elastic: queries={self.queries} is out of range, the weights have "
                f"{module.queries} learned queries"
            )
        if self.text and not module.text:
            raise RecipeError(
                "elastic: text=true needs a gate trained with `vlmfast train elastic --text`; the "
                "gate of these weights was not"
            )
        counts = [self._counts(len(index), module) for _, index in tokens.items()]
        shares = fractions(counts, len(tokens))
        forced = self.branch != "gate"
        # In training, a branch whose count exceeds its queries uses all of them.
        if forced and shares[BRANCHES.index(self.branch)] is None and not module.training:
            raise RecipeError(
                f"elastic: {self._asked} needs more tokens of an image than branch={self.branch} "
                f"can give, at most {module.queries}"
            )
        summary = summarise(tokens.features.index_select(0, patches))
        logits = module.gate(request.question_embeds.float(), summary, shares)
        chosen = self.branch if forced else BRANCHES[int(logits.argmax())]
        request.notes[self.name] = {"logits": logits, "branch": chosen}  # of mode=select
        return super().reduce(tokens, stats, request)

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens:
        """One image under the chosen branch, or under all of them."""
        module = cast(ElasticCompressor, request.trained[self.name])
        counts = self._counts(len(tokens), module)
        return self.shortened(module, tokens, geometry, counts, **request.notes[self.name])

    def shortened(
        self,
        module: ElasticCompressor,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        counts: list[int | None],
        logits: Tensor | None,
        branch: str,
    ) -> VisualTokens:
        """The patches of one image under ``branch``, or under the mode that uses several."""
        patches = tokens.patches()
        if not len(patches):
            return patches
        key = (self.seed, int(patches.layout.on_host[1, 0]), len(tokens))
        if self.mode == "weighted":
            assert logits is not None and counts[2] is not None
            return module.weighted(patches, geometry, counts[2], logits[:3].softmax(0), key)
        if self.mode == "concat":
            return module.concat(patches, geometry, self.parts(module, len(patches), counts), key)
        own = counts[BRANCHES.index(branch)]
        return module.branch(branch, patches, geometry, module.queries if own is None else own, key)

    def parts(
        self, module: ElasticCompressor, patches: int, counts: list[int | None]
    ) -> dict[str, int]:
        """Tokens of each branch in ``concat``; a given fraction is split among them."""
        if self.fraction is not None:
            assert counts[0] is not None
            counts = [*apportion(counts[0], (1, 1, 1, 1), (*(patches,) * 3, module.queries))]
        return {name: n for name, n in zip(BRANCHES, counts, strict=False) if n}

    def _counts(self, total: int, module: ElasticCompressor) -> list[int | None]:
        return self.counts(total, module.queries, self.text or self.branch == "text")
