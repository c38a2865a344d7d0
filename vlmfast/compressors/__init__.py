"""Visual-token reducers and KV-cache compressors, one file per method.

What a method of another package needs can be imported from here.
"""

from __future__ import annotations

from vlmfast.core.lazy import public_names

__getattr__, __dir__, __all__ = public_names(
    __name__,
    {
        "vlmfast.core.stage": "Stage",
        "vlmfast.core.protocols": (
            "CacheStage DecodeStage EncodeStage InEncoderStage MediaStage PrefillStage Slots "
            "ViewStage"
        ),
        "vlmfast.compressors.reducer": "Reducer",
        "vlmfast.compressors.evictor": "Evictor",
        "vlmfast.core.params": (
            "budget_param param positions_param proportional_attention_param saliency_param "
            "weights_param"
        ),
        "vlmfast.core.contexts": "DecodeContext EncodeRequest PrefillContext VisionContext",
        "vlmfast.core.layout": "Kind TokenLayout VisualTokens",
        "vlmfast.core.statistics": (
            "ColumnRequest ColumnStats ItemGeometry StatRequest VisionStats"
        ),
        "vlmfast.core.saliency": "Saliency SaliencyRequest",
        "vlmfast.core.kv": "KV",
        "vlmfast.core.training": "Training",
        "vlmfast.compressors.select": "apportion best count most_alike plus_mean top",
        "vlmfast.compressors.budget": "check_layers drop_layers equivalent solve solve_counts",
        "vlmfast.core.views": "by_view covering marked merged per_token slots",
        "vlmfast.errors": "RecipeError",
    },
)
