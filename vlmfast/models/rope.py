"""Rotary tables that depend on the length of a sequence, without a read by the host.

Two of Hugging Face's ``rope_type`` compute their frequencies from the number of tokens so far:
``dynamic`` (NTK scaling beyond ``max_position_embeddings``) and ``longrope`` (other factors beyond
``original_max_position_embeddings``). Their modules read the largest rotary id of the batch on the
host, which cannot be captured in a CUDA graph, let one row of a batch change the tables of another
one, and keep the length of earlier sequences as state.

`LengthRotary` computes the same tables on the device, for each token from its own length: all
tokens of a prompt have that of the whole prompt, each later one that up to itself. This is what
``generate`` computes for a single sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

_BY_LENGTH = {"dynamic", "longrope"}


class LengthRotary(nn.Module):
    """Stands in for the rotary module of a decoder, see `rotary_by_length`.

    Parameters
    ----------
    rotary : Module
        The decoder's own, which computes the tables from the frequencies given to it.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.train(rotary.training)
        self.rotary = rotary
        for layer_type, kind in _kinds(rotary).items():
            name = _prefixed("long_inv_freq", layer_type)
            # Under Hugging Face's own name, as a buffer: captured steps read its address.
            if kind == "longrope" and name not in rotary._buffers:
                vars(rotary).pop(name, None)
                rotary.register_buffer(name, _long(rotary, layer_type), persistent=False)

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tables of tokens.

        Parameters
        ----------
        x : Tensor
            Of the dtype and device of the tables.
        position_ids : Tensor, int64, (B, S), or (3, B, S) for M-RoPE
        layer_type : str, optional
            Where layers differ.

        Returns
        -------
        cos, sin : Tensor
            As the decoder's own module returns them.
        """
        named = () if layer_type is None else (layer_type,)
        if (own := next(self.rotary.buffers(), x)).device != x.device:
            x, position_ids = x.to(own.device), position_ids.to(own.device)
        kinds = _kinds(self.rotary)
        if kinds[layer_type] not in _BY_LENGTH:
            return self.rotary(x, position_ids, *named)
        # A copy, so that no other thread sees the frequencies of single tokens.
        fixed = copy.copy(self.rotary)
        if "_hf_hook" in vars(fixed):  # accelerate's `forward` is that of the original
            for name in ("forward", "_hf_hook", "_old_forward"):
                vars(fixed).pop(name, None)
        fixed._buffers = dict(fixed._buffers)
        fixed.rope_type = "default" if None in kinds else dict.fromkeys(kinds, "default")
        frequencies = self._frequencies(position_ids, layer_type)
        name = _prefixed("inv_freq", layer_type)

        def token(own: Tensor, position: Tensor) -> tuple[Tensor, ...]:
            tables = functional_call(fixed, {name: own}, (x, position[..., None, None], *named))
            return tuple(table.flatten(-3) for table in tables)

        tables = vmap(token, in_dims=(0, -1), out_dims=-2)(
            frequencies.flatten(0, 1), position_ids.flatten(-2)
        )
        cos, sin = (table.unflatten(-2, position_ids.shape[-2:]) for table in tables)
        return cos, sin

    def _frequencies(self, position_ids: Tensor, layer_type: str | None) -> Tensor:
        """Inverse frequencies of each token, float32, (B, S, D / 2)."""
        rotary, config = self.rotary, self.rotary.config
        last = position_ids if position_ids.dim() == 2 else position_ids.amax(0)
        # Rotary ids of a prompt begin at 0.
        length = torch.where(last[:, :1] == 0, last.amax(1, keepdim=True), last)[..., None] + 1
        original = getattr(rotary, _prefixed("original_inv_freq", layer_type))
        parameters = _parameters(config, layer_type)
        if _kinds(rotary)[layer_type] == "longrope":
            most = parameters["original_max_position_embeddings"]
            long = getattr(rotary, _prefixed("long_inv_freq", layer_type))
            return torch.where(length > most, long, original)
        # As `_compute_dynamic_ntk_parameters` of transformers.modeling_rope_utils.
        most, factor, dim = config.max_position_embeddings, parameters["factor"], 2 * len(original)
        base = (factor * length.clamp(min=most) / most) - (factor - 1)
        # With gaps, so that the CPU computes each power alone, as that of Hugging Face's scalar:
        # its vectorized ones differ in the last bit.
        base = torch.stack([base, base], -1)[..., 0] ** (dim / (dim - 2))
        exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=length.device).float() / dim
        grown = 1.0 / ((parameters["rope_theta"] * base) ** exponent)
        return torch.where(length > most, grown, original)


@contextmanager
def rotary_by_length(decoder: Any) -> Iterator[None]:
    """Inside the block, a decoder whose tables depend on lengths has a `LengthRotary`."""
    own = decoder.rotary_emb
    if not isinstance(own, LengthRotary) and not _BY_LENGTH.isdisjoint(_kinds(own).values()):
        decoder.rotary_emb = LengthRotary(own)
    try:
        yield
    finally:
        decoder.rotary_emb = own


def attention_scaling(rotary: Any, layer_type: str | None) -> float:
    """The factor that the tables of a type of layer contain."""
    own = rotary.rotary if isinstance(rotary, LengthRotary) else rotary
    return getattr(own, _prefixed("attention_scaling", layer_type), 1.0)


def short(config: Any) -> int | None:
    """Up to how many tokens the tables of a text config are those of a short sequence.

    ``None`` where they always are.
    """
    found = []
    for parameters in _by_type(getattr(config, "rope_parameters", None)).values():
        if parameters.get("rope_type") == "dynamic":
            found.append(config.max_position_embeddings)
        elif parameters.get("rope_type") == "longrope":
            found.append(parameters["original_max_position_embeddings"])
    return min(found, default=None)


def longest(config: Any) -> int | None:
    """Maximum of positions of a text config, if it sets one.

    ``dynamic`` stretches ``max_position_embeddings`` by its factor.
    """
    most = getattr(config, "max_position_embeddings", None)
    kinds = _by_type(getattr(config, "rope_parameters", None)).values()
    if most is None or not kinds or any(of.get("rope_type") != "dynamic" for of in kinds):
        return most
    return int(most * min(parameters["factor"] for parameters in kinds))


def _by_type(parameters: dict[str, Any] | None) -> dict[str | None, dict[str, Any]]:
    """Rotary parameters by type of layer; by ``None`` where all layers have the same."""
    if not parameters:
        return {}
    if all(isinstance(of, dict) or of is None for of in parameters.values()):
        return {kind: of for kind, of in parameters.items() if of is not None}
    return {None: parameters}


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    return _by_type(config.rope_parameters)[layer_type]


def _kinds(rotary: Any) -> dict[str | None, str]:
    """``rope_type`` by type of layer; by ``None`` where all layers have the same."""
    kinds = getattr(rotary, "rope_type", "default")
    return dict(kinds) if isinstance(kinds, dict) else {None: kinds}


def _prefixed(name: str, layer_type: str | None) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


def _long(rotary: Any, layer_type: str | None) -> Tensor:
    """Inverse frequencies of ``longrope`` for long sequences."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, device = rotary.config, getattr(rotary, _prefixed("inv_freq", layer_type)).device
    most = _parameters(config, layer_type)["original_max_position_embeddings"]
    named = {} if layer_type is None else {"layer_type": layer_type}
    compute: Any = ROPE_INIT_FUNCTIONS["longrope"]
    return compute(config, device, seq_len=most + 1, **named)[0]
