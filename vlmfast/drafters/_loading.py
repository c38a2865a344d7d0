"""Load published drafters: a folder with ``config.json`` and weights.

Supported layouts are those of EAGLE-1 and 2 and their derivatives (MSD, SpecVLM), of ViSpec, and of
EAGLE-3 by its authors, by speculators and by SpecForge. They differ only in names::

    layers.0.*  midlayer.*      our ``layer.*``
    embed_tokens.weight         not read: it is the target's, and may be absent
    t2d                         not read: it follows from d2t
    *.rotary_emb.inv_freq       not read: it follows from the config

Every other key must be present with its shape, and no key may be left over. An unrecognised key
would leave random weights in the module, and a drafter with random weights still gives correct
answers, only slowly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from vlmfast.core.drafting import Target
from vlmfast.core.files import read_text
from vlmfast.core.protocols import DrafterStage
from vlmfast.errors import RecipeError, check_memory

if TYPE_CHECKING:
    from .draft_eagle.module import EagleModule

CONFIG = "config.json"
FILES = ("model.safetensors", "pytorch_model.bin")
PADDING = 1024  # rows by which a vocabulary may be padded
_PLAIN = ("default", "mrope", "dynamic")  # unscaled rotary ids, for text and up to the longest


Module = TypeVar("Module", bound="EagleModule")


def published(folder: str | Path) -> bool:
    """Whether a folder contains a published drafter rather than weights of `vlmfast train`."""
    folder = Path(folder)
    own = (folder / "stage.json").exists() or (folder / "weights" / "stage.json").exists()
    return (folder / CONFIG).exists() and not own


def load_published(stage: DrafterStage, folder: str | Path, sizes: dict[str, Any]) -> nn.Module:
    """The module of a published drafter.

    Parameters
    ----------
    stage : DrafterStage
        ``draft-eagle``, whose ``kind`` tells MSD's weights from EAGLE's, which share a layout; or
        ``draft-vispec``.
    sizes : dict
        Sizes of the target, see `Stage.build`; ``width`` is read.

    Returns
    -------
    Module
        On the host, float32, for inference.

    Raises
    ------
    RecipeError
        When the folder cannot be read, or its weights are for another kind or another model, or
        do not match their config key by key.
    """
    folder = Path(folder)
    config, state = _read(stage.name, folder)
    state = {_renamed(key): value for key, value in state.items() if "rotary_emb" not in key}
    embed, marks = state.pop("embed_tokens.weight", None), state.pop("t2d", None)
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    width = layer.get("hidden_size")
    for key in ("hidden_size", "num_attention_heads", "intermediate_size"):
        if not isinstance(layer.get(key), int):
            raise RecipeError(f"{stage.name}: {folder / CONFIG} lacks {key}")
    if width != sizes["width"]:
        raise RecipeError(
            f"{stage.name}: the drafter in {folder} is for models of width {width}, this one has "
            f"{sizes['width']}"
        )
    target_width = config.get("target_hidden_size") or width
    if target_width != width:
        raise RecipeError(
            f"{stage.name}: the drafter in {folder} has width {width}, its model has width "
            f"{target_width}; drafters with embeddings of their own are not supported"
        )
    if (act := layer.get("hidden_act", "silu")) != "silu":
        raise RecipeError(f"{stage.name}: {folder} has hidden_act={act}; only silu is supported")
    if (depth := layer.get("num_hidden_layers", 1)) != 1:
        raise RecipeError(f"{stage.name}: {folder} has {depth} layers; only one is supported")
    # Of a class of drafters, with the attributes that are set here.
    built: Any = stage.build(_config(stage, folder, config, layer, state))
    if built.kind == "eagle3" and "d2t" not in state:
        if len(built.d2t) != layer.get("vocab_size"):
            raise RecipeError(f"{stage.name}: {folder} lacks d2t, the ids of its vocabulary")
        state["d2t"] = torch.zeros_like(built.d2t)
    _match(stage.name, folder, built, state)
    built.load_state_dict(state)
    built.source_vocabulary = layer.get("vocab_size") if embed is None else len(embed)
    if embed is not None and embed.shape[1] != width:
        raise RecipeError(
            f"{stage.name}: {folder}: embed_tokens.weight has shape {tuple(embed.shape)}, its "
            f"width must be {width}"
        )
    if marks is not None and built.kind == "eagle3":
        ids = built.vocabulary()
        # A drafter of the full vocabulary needs no maps, and folders may have them unset.
        unset = len(ids) == layer.get("vocab_size") and not bool(marks.any() or built.d2t.any())
        if unset:
            marks = torch.ones(len(ids), dtype=torch.bool)
        if int(ids.max()) >= len(marks) or not _marked(ids, marks):
            raise RecipeError(f"{stage.name}: {folder}: t2d and d2t select different tokens")
    ids = _flag(config, "eagle_aux_hidden_state_layer_ids", None)
    built.source_layers = None if ids is None else tuple(ids)
    return built.float().eval().requires_grad_(False)


def _marked(ids: Tensor, marks: Tensor) -> bool:
    return torch.equal(ids.sort().values, marks.bool().nonzero().flatten())


def _read(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads(read_text(folder / CONFIG))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise RecipeError(f"{name}: {folder / CONFIG} cannot be read: {error}") from error
    file = next((folder / file for file in FILES if (folder / file).exists()), None)
    if file is None:
        raise RecipeError(f"{name}: {folder} contains neither {' nor '.join(FILES)}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return config, load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        check_memory(error)
        raise RecipeError(f"{name}: {file} cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise RecipeError(f"{name}: {file} is not a dict of tensors")
    return config, state


def _renamed(key: str) -> str:
    for prefix in ("layers.0.", "midlayer."):
        if key.startswith(prefix):
            return "layer." + key.removeprefix(prefix)
    return key


def _flag(config: dict[str, Any], name: str, default: Any) -> Any:
    nested = config.get("eagle_config") or {}
    return config.get(name, nested.get(name, default))


def _config(
    stage: DrafterStage,
    folder: Path,
    config: dict[str, Any],
    layer: dict[str, Any],
    state: dict[str, Tensor],
) -> dict[str, Any]:
    """The config for `Stage.build`."""
    own, vispec = "layer.hidden_norm.weight" in state, "imadpt.q" in state
    found = "vispec" if vispec else "eagle3" if own else "eagle or msd"
    wanted = "vispec" if stage.name == "draft-vispec" else stage.kind
    if wanted not in found.split(" or "):
        recipes = {"vispec": "draft-vispec", "eagle3": "draft-eagle:kind=eagle3"}
        use = recipes.get(found, "draft-eagle with kind=eagle or kind=msd")
        raise RecipeError(f"{stage.name}: the weights in {folder} are of kind {found}; use {use}")
    theta, stretch = _rotary(stage.name, folder, layer)
    built = {
        "kind": "eagle" if vispec else wanted,
        "width": layer["hidden_size"],
        "heads": layer["num_attention_heads"],
        "kv_heads": layer.get("num_key_value_heads"),
        "head_width": layer.get("head_dim"),
        "hidden": layer["intermediate_size"],
        "eps": layer.get("rms_norm_eps", 1e-6),
        "theta": theta,
        "stretch": stretch,
        "bias": config.get("bias", "fc.bias" in state),
        "qkv_bias": layer.get("qkv_bias", "layer.self_attn.q_proj.bias" in state),
        "input_norm": own or "layer.input_layernorm.weight" in state,
    }
    if vispec:
        built["queries"] = len(state["imadpt.q"])
    if own:
        head = state.get("lm_head.weight")
        rows = None if head is None else len(head)
        built["draft_vocabulary"] = config.get("draft_vocab_size") or rows or layer["vocab_size"]
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            built[flag] = bool(_flag(config, flag, False))
    return built


def _rotary(name: str, folder: Path, layer: dict[str, Any]) -> tuple[float, float]:
    """Rotary base, and the divisor of the rotary ids."""
    rules = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rules.get("rope_type", rules.get("type", "default"))
    theta = float(layer.get("rope_theta") or rules.get("rope_theta") or 10000.0)
    if kind == "linear":
        if not isinstance(factor := rules.get("factor"), int | float):
            raise RecipeError(f"{name}: {folder} scales its rotary ids without a factor")
        return theta, float(factor)
    if kind not in _PLAIN:
        raise RecipeError(
            f"{name}: {folder} scales its rotary ids by {kind!r}; supported are "
            f"{', '.join(_PLAIN)} and linear"
        )
    return theta, 1.0


def _match(name: str, folder: Path, module: nn.Module, state: dict[str, Tensor]) -> None:
    wanted = module.state_dict()
    missing = sorted(wanted.keys() - state.keys())
    unexpected = sorted(state.keys() - wanted.keys())
    wrong = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in state and state[key].shape != value.shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "wrong shape": wrong}
    if faults := [f"{what}: {', '.join(keys)}" for what, keys in found.items() if keys]:
        raise RecipeError(f"{name}: the weights in {folder} do not fit; {'; '.join(faults)}")


# --- checks against a target ---------------------------------------------------------------------


def fitting(stage: DrafterStage, target: Target, kind: type[Module]) -> Module:
    """The drafter's module, checked against ``target``.

    Raises
    ------
    RecipeError
        When it is missing, or its width, vocabulary or layers do not match the target.
    """
    module = target.trained
    if not isinstance(module, kind):
        raise RecipeError(f"{stage.name}: no weights for this model")
    if module.width != target.width:
        raise RecipeError(
            f"{stage.name}: the weights are for models of width {module.width}, this one has "
            f"{target.width}"
        )
    known = module.source_vocabulary
    if known is not None and not known <= target.vocabulary < known + PADDING:
        raise RecipeError(
            f"{stage.name}: the weights are for a vocabulary of {known}, this model has "
            f"{target.vocabulary}"
        )
    ids = module.vocabulary()
    if ids is not None and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocabulary:
        raise RecipeError(
            f"{stage.name}: the weights draft tokens up to {int(ids.max())}, this model has "
            f"{target.vocabulary}"
        )
    layers = module.source_layers
    if (
        layers is not None
        and module.kind == "eagle3"
        and layers != stage.aux_hidden_state_layers(target.depth)
    ):
        raise RecipeError(
            f"{stage.name}: the weights read layers {layers}; in a model of {target.depth} layers "
            f"they must be {stage.aux_hidden_state_layers(target.depth)}"
        )
    return module
