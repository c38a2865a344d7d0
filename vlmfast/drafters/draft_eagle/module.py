"""The drafter's weights: row inputs, the layer, and the output logits.

Row t of a drafter pairs the target's hidden state at t with the embedding of the token after it,
and its output predicts the hidden state at t + 1. Throughout this module ``embeds`` are already
shifted: row t contains the embedding of token t + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.compressors.tokens.elastic.module import ElasticCompressor
from vlmfast.errors import RecipeError

from .._layer import Attend, Layer, RMSNorm

KINDS = ("eagle", "msd", "eagle3")
# Settings of `Layer`, with its defaults.
_OF_LAYER = ("eps", "theta", "stretch", "qkv_bias", "input_norm", "norm_before_residual")
AUX_STATES = 3  # layers of the target that EAGLE-3 reads


class EagleModule(nn.Module):
    """One decoder layer after ``fc``, of one of three kinds.

    - ``eagle``: rows are ``fc [e; f]``; the target's head maps outputs to logits.
    - ``msd``: the same, but an image's rows are its embeddings alone.
    - ``eagle3``: rows are ``[e; fc [low; mid; high]]`` of three layers of the target; the drafter's
      own norm and head give the logits of part of the target's vocabulary.

    Parameters
    ----------
    config : dict
        ``width`` (D) and ``heads``. Optional, with their defaults: ``kind`` ("eagle"),
        ``kv_heads`` (``heads``), ``head_width`` (D / ``heads``), ``hidden`` (units of the MLP,
        2 D), ``eps`` (1e-6), ``theta`` (1e4), ``stretch`` (1: divides rotary ids), ``bias`` (of
        ``fc``; true, for eagle3 false), ``qkv_bias`` (false), ``input_norm`` (true). For eagle3:
        ``draft_vocabulary`` (required), and, all false, ``norm_before_residual``,
        ``norm_before_fc`` (a norm over all auxiliary hidden states), ``fc_norm`` (one norm for
        each), ``norm_output`` (outputs are normalized). ``compressor``: the arguments of
        `ElasticCompressor` except the width; none without it.

    Raises
    ------
    RecipeError
        When the kind is unknown or the heads do not divide the width.
    """

    d2t: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads = config["width"], config["heads"]
        self.kind = config.get("kind", "eagle")
        if self.kind not in KINDS:
            raise RecipeError(f"draft-eagle: kind={self.kind!r}; allowed are {', '.join(KINDS)}")
        head_width = config.get("head_width") or width // heads
        kv_heads = config.get("kv_heads") or heads
        if heads % kv_heads or head_width % 2:
            raise RecipeError(
                f"draft-eagle: {heads} query heads, {kv_heads} key heads of width {head_width}: "
                "kv_heads must divide heads, and head_width must be even"
            )
        self.width = width
        # Of published weights: rows of their vocabulary, layers that they read.
        self.source_vocabulary: int | None = None
        self.source_layers: tuple[int, ...] | None = None
        own = self.kind == "eagle3"
        self.layer = Layer(
            width,
            config.get("hidden") or 2 * width,
            heads,
            kv_heads,
            head_width,
            double=own,
            **{key: config[key] for key in _OF_LAYER if key in config},
        )
        self.feature_width = AUX_STATES * width if own else width
        inputs = self.feature_width if own else 2 * width
        self.fc = nn.Linear(inputs, width, bias=config.get("bias", not own))
        self.norm_output = config.get("norm_output", False)
        self.input_norm = self.fc_norm = None
        if own:
            eps = config.get("eps", 1e-6)
            if config.get("norm_before_fc", False):
                self.input_norm = RMSNorm(inputs, eps)
            if config.get("fc_norm", False):
                self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(AUX_STATES))
            drafted = config["draft_vocabulary"]
            self.norm = RMSNorm(width, eps)
            self.lm_head = nn.Linear(width, drafted, bias=False)
            # Token i of the draft vocabulary is token i + d2t[i] of the target.
            self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
        size = config.get("compressor")
        self.compressor = None if size is None else ElasticCompressor(width, **size)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    # --- rows ------------------------------------------------------------------------------------

    def project(self, features: Tensor) -> Tensor:
        """Map auxiliary hidden states (..., 3 D) of eagle3 to (..., D); identity otherwise."""
        if self.kind != "eagle3" or features.shape[-1] == self.width:
            return features  # a drafter's own output is a hidden state already
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            aux_hidden_states = features.chunk(AUX_STATES, dim=-1)
            features = torch.cat(
                [norm(state) for norm, state in zip(self.fc_norm, aux_hidden_states, strict=True)],
                dim=-1,
            )
        return self.fc(features)

    def rows(self, embeds: Tensor, features: Tensor, image: Tensor | None = None) -> Tensor:
        """The layer's input.

        Parameters
        ----------
        embeds : Tensor, (B, S, D)
            Embedding of the token after each row.
        features : Tensor, (B, S, F)
            The target's hidden states after its last norm (F = D), for eagle3 its auxiliary hidden
            states, concatenated (F = 3 D), or the drafter's own outputs (F = D).
        image : Tensor, int64, (B, S), optional
            Image that ``embeds`` belongs to, -1 for text. Used by msd only.

        Returns
        -------
        Tensor, (B, S, D), for eagle3 (B, S, 2 D)
        """
        features = self.project(features)
        if self.kind == "eagle3":
            return torch.cat([embeds, features], dim=-1)
        rows = self.fc(torch.cat([embeds, features], dim=-1))
        if self.kind == "msd" and image is not None:
            rows = torch.where(image[..., None] >= 0, embeds, rows)
        return rows

    # --- the forward pass ------------------------------------------------------------------------

    def run(self, rows: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Outputs (B, S, D) of the result of `rows`, under any attention of `drafters._layer`.

        They predict the target's next hidden states: `output` maps them to logits, and they are the
        features of the next drafted rows. ``position``: rotary ids, int64, (B, S).
        """
        out = self.layer(rows, position, attend)
        return self.norm(out) if self.kind == "eagle3" and self.norm_output else out

    # --- logits ----------------------------------------------------------------------------------

    def output(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of outputs (..., D).

        Parameters
        ----------
        head : callable
            The target's: hidden states after the last norm to logits. Unused by eagle3.

        Returns
        -------
        Tensor, (..., V), for eagle3 (..., draft vocabulary)
        """
        if self.kind != "eagle3":
            return head(hidden)
        return self.lm_head(hidden if self.norm_output else self.norm(hidden))

    def vocabulary(self) -> Tensor | None:
        """Target ids of the tokens that have logits, int64, (draft vocabulary,); None for all."""
        if self.kind != "eagle3":
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def restrict(self, ids: Tensor) -> None:
        """Set the draft vocabulary of eagle3: ascending ids of the target, int64."""
        if len(ids) != len(self.d2t):
            raise ValueError(f"{len(ids)} ids for a draft vocabulary of {len(self.d2t)}")
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(len(ids), device=self.d2t.device))
