"""The decoder layers that `fused_step` serves, described by what differs between them.

All have in common: RMSNorm before attention and MLP, rotary embedding of queries and keys, and a
gated MLP. A layer counts as one of these only if each of its modules is of exactly the class that
transformers defines, without hooks: a class that only has the same names may scale a residual, or
round in another place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vlmfast.core.calls import is_of, registered
from vlmfast.kernels.norm_rope_append import WIDEST, HeadNorm
from vlmfast.kernels.swiglu import geglu_tanh, swiglu

if TYPE_CHECKING:
    from vlmfast.models.base import TextDecoder


@dataclass(frozen=True)
class LayerKind:
    """The decoder layers of a family, in transformers.

    Parameters
    ----------
    family : str
        Folder under ``transformers.models``.
    prefix : str
        What the names of its classes start with.
    decoder, mlp : str
        Names of the classes of its decoder and its MLP, if not ``prefix`` and "Model" or "MLP".
    mlp_norm : str
        Attribute of the norm before the MLP.
    attention_branch_norm, mlp_branch_norm : str, optional
        Attributes of the norms of what attention and MLP add to the residual stream.
    head_norms : bool
        Whether rows of queries and keys are normalized, by ``q_norm`` and ``k_norm``.
    eps : str
        Attribute of a norm.
    unit_offset : bool
        Whether norms multiply by ``1 + weight`` in float32, see `residual_norm`.
    activation : str
        Value of the config's ``hidden_act`` or ``hidden_activation``.
    """

    family: str
    prefix: str
    decoder: str = ""
    mlp: str = ""
    mlp_norm: str = "post_attention_layernorm"
    attention_branch_norm: str | None = None
    mlp_branch_norm: str | None = None
    head_norms: bool = False
    eps: str = "variance_epsilon"
    unit_offset: bool = False
    activation: str = "silu"

    @property
    def gated(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The kernel of the MLP's gated activation."""
        return geglu_tanh if self.gelu_tanh else swiglu

    @property
    def gelu_tanh(self) -> bool:
        """Whether that activation is the tanh approximation of GELU, not SiLU."""
        return self.activation == "gelu_pytorch_tanh"

    def eps_of(self, norm: nn.Module) -> float:
        return getattr(norm, self.eps)

    def head_norm(self, attention: Any) -> HeadNorm | None:
        """The norms of queries and keys, if there are any."""
        if not self.head_norms:
            return None
        query, key = attention.q_norm, attention.k_norm
        return HeadNorm(query.weight, key.weight, self.eps_of(query), self.unit_offset)

    def norms(self, layer: Any) -> list[nn.Module]:
        """The norms of a layer."""
        names = ["input_layernorm", self.mlp_norm]
        names += [n for n in (self.attention_branch_norm, self.mlp_branch_norm) if n is not None]
        found = [getattr(layer, name) for name in names]
        if self.head_norms:
            found += [layer.self_attn.q_norm, layer.self_attn.k_norm]
        return found


_ACTIVATIONS = {"silu": "SiLUActivation", "gelu_pytorch_tanh": "GELUTanh"}  # their modules

# By ``model_type`` of the text config. M-RoPE differs only in the rotary module, which chooses the
# sections of its tables itself.
KINDS = {
    "llama": LayerKind("llama", "Llama"),
    "mistral": LayerKind("mistral", "Mistral"),
    "qwen2": LayerKind("qwen2", "Qwen2"),
    "qwen2_5_vl_text": LayerKind("qwen2_5_vl", "Qwen2_5_VL", "Qwen2_5_VLTextModel", "Qwen2MLP"),
    "qwen3": LayerKind("qwen3", "Qwen3", head_norms=True),
    "qwen3_vl_text": LayerKind("qwen3_vl", "Qwen3VLText", head_norms=True),
    "gemma3_text": LayerKind(
        "gemma3",
        "Gemma3",
        decoder="Gemma3TextModel",
        mlp_norm="pre_feedforward_layernorm",
        attention_branch_norm="post_attention_layernorm",
        mlp_branch_norm="post_feedforward_layernorm",
        head_norms=True,
        eps="eps",
        unit_offset=True,
        activation="gelu_pytorch_tanh",
    ),
}


def kind_of(decoder: TextDecoder) -> LayerKind | None:
    """The kind of a decoder's layers, or ``None`` if the kernels do not compute what they do."""
    kind = KINDS.get(decoder.config.model_type)
    return kind if kind is not None and _matches(kind, decoder) else None


def _matches(kind: LayerKind, decoder: TextDecoder) -> bool:
    module = f"transformers.models.{kind.family}.modeling_{kind.family}"
    layers: list[Any] = list(decoder.layers)

    def own(name: str, *parts: nn.Module) -> bool:
        # Research code also puts a ``forward`` on the class.
        kinds = {type(part) for part in parts}
        return all(is_own(part, module, name) for part in parts) and all(
            is_of(kind.forward) for kind in kinds
        )

    if not (
        own(kind.decoder or f"{kind.prefix}Model", decoder)
        and own(f"{kind.prefix}DecoderLayer", *layers)
        and own(f"{kind.prefix}Attention", *(layer.self_attn for layer in layers))
        and own(kind.mlp or f"{kind.prefix}MLP", *(layer.mlp for layer in layers))
    ):
        return False
    norms: list[Any] = [decoder.norm, *(norm for layer in layers for norm in kind.norms(layer))]
    activation, head = _ACTIVATIONS[kind.activation], layers[0].self_attn.head_dim
    return (
        own(f"{kind.prefix}RMSNorm", *norms)
        and all(
            is_own(layer.mlp.act_fn, "transformers.activations", activation) for layer in layers
        )
        and len({norm.weight.dtype for norm in norms}) == 1
        and len({kind.eps_of(norm) for norm in norms}) == 1
        and norms[0].weight.shape[0] <= WIDEST
        and head % 8 == 0
        and head <= 256
    )


def is_own(part: nn.Module, module: str, name: str) -> bool:
    """Whether a part is of exactly that class, with an unchanged ``forward`` and without hooks."""
    own = type(part)
    if (own.__module__, own.__qualname__) != (module, name) or "forward" in vars(part):
        return False
    return all(is_of(hook, ("vlmfast.",)) for hook in registered(part))  # those of a prefill
