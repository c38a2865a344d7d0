"""The configuration of the released model (OpenGVLab/PVC-InternVL2-8B) in terms of this method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmfast.errors import RecipeError

from .stage import PVC


@dataclass(frozen=True)
class Published:
    """Settings of a released configuration.

    Parameters
    ----------
    stage : PVC
        Side of the cells and repeats.
    temporal : bool
        Whether frames attend to earlier ones; otherwise a module has no ``blocks``.
    select_layer : int
        Vision layer whose output is compressed, as in the list of hidden states. A wrapped model
        has its own (``vision_feature_layer``), which is used here.
    """

    stage: PVC
    temporal: bool
    select_layer: int


def read_config(config: Mapping[str, Any]) -> Published:
    """Read the published fields; others are ignored, missing ones have the released values.

    ``use_temporal``
        Whether temporal attention and timesteps are used; both values are supported.
    ``downsample_ratio``
        Side of the compressed grid over that of the patches: 0.5 is cells of 2 x 2. One over a
        whole number.
    ``image_repeat_time``, ``video_repeat_time``
        Number of repeats of an image and of a frame.
    ``ps_version``
        Order of the cells in space-to-depth. ``v2`` is raster order, which is supported; ``v1``
        leaves rows and columns swapped (inferred from InternVL, which has the same field).
    ``select_layer``
        See `Published`.
    ``tile_repeat_way``
        The order of an image's tiles and repeats in the prompt (inferred). Here tokens take the
        positions of source tokens, so their order is fixed: any text is accepted.
    ``mlp_add_ops``
        Additions to the compressing MLP (inferred; its values are not published). Here it is one
        MLP under the timestep's norm: any text, or list of texts, is accepted.

    Raises
    ------
    RecipeError
        For a value that is not supported; the message names the field.
    """
    ratio = config.get("downsample_ratio", 0.5)
    side = round(1 / ratio) if _number(ratio) and 0 < ratio <= 0.5 else 0
    _check(side > 1 and abs(side * ratio - 1) < 1e-6, config, "downsample_ratio", "1/2, 1/3, 1/4")
    repeats = {}
    for key, usual in (("image_repeat_time", 4), ("video_repeat_time", 1)):
        repeats[key] = config.get(key, usual)
        fits = _number(repeats[key], whole=True) and 1 <= repeats[key] <= side**2
        _check(fits, config, key, f"1 to {side**2}")
    temporal = config.get("use_temporal", True)
    _check(isinstance(temporal, bool), config, "use_temporal", "true, false")
    _check(config.get("ps_version", "v2") == "v2", config, "ps_version", "v2")
    layer = config.get("select_layer", -1)
    _check(_number(layer, whole=True), config, "select_layer", "whole numbers")
    _check(_texts(config.get("tile_repeat_way")), config, "tile_repeat_way", "texts")
    _check(_texts(config.get("mlp_add_ops")), config, "mlp_add_ops", "texts")
    stage = PVC(
        side=side,
        image_repeat=repeats["image_repeat_time"],
        video_repeat=repeats["video_repeat_time"],
    )
    return Published(stage, temporal, layer)


def _number(value: Any, whole: bool = False) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return all(isinstance(v, str) for v in values)


def _check(fits: bool, config: Mapping[str, Any], key: str, allowed: str) -> None:
    if not fits:
        raise RecipeError(f"pvc: {key}={config[key]!r} is not supported; allowed are {allowed}")
