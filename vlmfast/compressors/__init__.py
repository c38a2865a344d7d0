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
        "vlmfast.core.params": (
            "budget_param param positions_param proportional_attention_param saliency_param "
            "weights_param"
        ),
        "vlmfast.core.contexts": "DecodeContext EncodeRequest PrefillContext VisionContext",
        "vlmfast.core.layout": "Kind TokenLayout VisualTokens marked_rows",
        "vlmfast.core.statistics": (
            "ColumnRequest ColumnStats ItemGeometry StatRequest VisionStats"
        ),
        "vlmfast.core.saliency": "Saliency SaliencyRequest",
        "vlmfast.core.counting": "ImageLayout TokenCount VideoLayout existing inexact newlines",
        "vlmfast.core.kv": "KV",
        "vlmfast.core.training": "Outcome Training",
        "vlmfast.core.views": (
            "by_view covering marked merged open_rows per_token slots token_saliency"
        ),
        "vlmfast.compressors.budget": (
            "check_layers drop_layers equivalent moved_layers solve solve_counts"
        ),
        "vlmfast.compressors.cells": "Cells grouped occupied resolution",
        "vlmfast.compressors.evictor": "Evictor per_kv_head pooled",
        "vlmfast.compressors.groups": "together",
        "vlmfast.compressors.guard": "Guarded GuardedRanking",
        "vlmfast.compressors.layered": "Layered Scored",
        "vlmfast.compressors.part": "Part",
        "vlmfast.compressors.reducer": "Reducer",
        "vlmfast.compressors.select": "apportion best count most_alike plus_mean top",
        "vlmfast.kernels.col_stats": "col_stats",
        "vlmfast.kernels.diversity": "cosine density_peaks dpp euclidean max_min",
        "vlmfast.kernels.merge": "merge_into",
        "vlmfast.kernels.pool": "cell_average cell_mix resample",
        "vlmfast.kernels.quantize_kv": "Segment channel_scale parameter_dtype quantize",
        "vlmfast.kernels.select": "mass_count ranked top_k",
        "vlmfast.errors": "RecipeError",
    },
)
