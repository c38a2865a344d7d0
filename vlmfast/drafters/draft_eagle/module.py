"""The drafter's weights: what becomes of a row, the layer, and the way back to logits.

Row t of a drafter pairs the target's hidden state at t with the embedding of the token behind it,
and its output stands for the hidden state at t + 1. In all of this module ``embeds`` are shifted
already: row t holds the embedding of token t + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.compressors.tokens.elastic.module import ElasticCompressor
from vlmfast.errors import RecipeError

from .._layer import Attend, Layer, RMSNorm, causal

KINDS = ("eagle", "msd", "eagle3")
TAPS = 3  # layers of the target that EAGLE-3 reads


class EagleModule(nn.Module):
    """One decoder layer behind ``fc``, of one of three kinds.

    - ``eagle``: rows are ``fc [e; f]``; logits are the target's own of the output.
    - ``msd``: the same, but an image's rows are its embeddings alone.
    - ``eagle3``: rows are ``e`` beside ``fc [low; mid; high]`` of three layers of the target; a
      norm and a head of its own give the logits of some of the target's tokens.

    Parameters
    ----------
    config : dict
        ``width`` (D), ``heads``, and where they differ from the defaults: ``kind`` ("eagle"),
        ``kv_heads`` (``heads``), ``head_width`` (D / ``heads``), ``hidden`` (units of the MLP,
        2 D), ``eps`` (1e-6), ``theta`` (1e4) and ``stretch`` (1: divides rotary ids), ``bias`` (of
        ``fc``; true, of eagle3 false), ``qkv_bias`` (false), ``input_norm`` (true). Of eagle3:
        ``draft_vocabulary`` (needed), ``norm_before_residual``, ``norm_before_fc`` (a norm over
        all taps), ``fc_norm`` (one for each tap), ``norm_output`` (outputs are behind the norm),
        all false. ``compressor``: the arguments of `ElasticCompressor` beside the width, or absent
        for no compressor.

    Raises
    ------
    RecipeError
        When the kind is unknown or the heads do not divide the width.
    """

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
                f"draft-eagle: {heads} heads, {kv_heads} of them with keys, of width {head_width}: "
                "the one number must divide the other, and the width be even"
            )
        self.width = width
        # Of weights that came from elsewhere: rows of their vocabulary, layers that they read.
        self.source_vocabulary: int | None = None
        self.source_layers: tuple[int, ...] | None = None
        own = self.kind == "eagle3"
        eps = config.get("eps", 1e-6)
        self.layer = Layer(
            width,
            config.get("hidden") or 2 * width,
            heads,
            kv_heads,
            head_width,
            eps=eps,
            theta=config.get("theta", 10000.0),
            stretch=config.get("stretch", 1.0),
            qkv_bias=config.get("qkv_bias", False),
            input_norm=config.get("input_norm", True),
            double=own,
            norm_before_residual=config.get("norm_before_residual", False),
        )
        self.feature_width = TAPS * width if own else width
        inputs = self.feature_width if own else 2 * width
        self.fc = nn.Linear(inputs, width, bias=config.get("bias", not own))
        self.norm_output = config.get("norm_output", False)
        self.input_norm = self.fc_norm = None
        if own:
            if config.get("norm_before_fc", False):
                self.input_norm = RMSNorm(inputs, eps)
            if config.get("fc_norm", False):
                self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(TAPS))
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
        """Of eagle3: taps (..., 3 D) to hidden states (..., D); anything else stays as it is."""
        if self.kind != "eagle3" or features.shape[-1] == self.width:
            return features  # a drafter's own output is a hidden state already
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            taps = features.chunk(TAPS, dim=-1)
            features = torch.cat(
                [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1
            )
        return self.fc(features)

    def rows(self, embeds: Tensor, features: Tensor, image: Tensor | None = None) -> Tensor:
        """What enters the layer.

        Parameters
        ----------
        embeds : Tensor, (B, S, D)
            Of the token behind each row.
        features : Tensor, (B, S, F)
            The target's hidden states behind its last norm, D wide; of eagle3 its taps side by
            side, 3 D wide; or the drafter's own outputs, D wide.
        image : Tensor, int64, (B, S), optional
            Picture that ``embeds`` belongs to, -1 for text. Read by msd alone.

        Returns
        -------
        Tensor, (B, S, D), of eagle3 (B, S, 2 D)
        """
        features = self.project(features)
        if self.kind == "eagle3":
            return torch.cat([embeds, features], dim=-1)
        rows = self.fc(torch.cat([embeds, features], dim=-1))
        if self.kind == "msd" and image is not None:
            rows = torch.where(image[..., None] >= 0, embeds, rows)
        return rows

    # --- the pass --------------------------------------------------------------------------------

    def forward(
        self,
        embeds: Tensor,
        features: Tensor,
        position: Tensor,
        mask: Tensor | None = None,
        image: Tensor | None = None,
    ) -> Tensor:
        """Outputs of whole sequences, each row with the rows before it.

        Parameters
        ----------
        embeds, features, image : Tensor
            As in `rows`.
        position : Tensor, int64, (B, S)
            Rotary ids.
        mask : Tensor, bool, (B, S), optional
            Rows that exist.

        Returns
        -------
        Tensor, (B, S, D)
            What stands for the target's next hidden state: `output` makes logits of it, and it is
            the feature of the next drafted row.
        """
        return self.run(self.rows(embeds, features, image), position, causal(mask))

    def run(self, rows: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """Outputs (B, S, D) of what `rows` gave, under any attention of `drafters._layer`."""
        out = self.layer(rows, position, attend)
        return self.norm(out) if self.kind == "eagle3" and self.norm_output else out

    # --- logits ----------------------------------------------------------------------------------

    def output(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of outputs (..., D).

        Parameters
        ----------
        head : callable
            The target's: hidden states behind the last norm to logits. Unused by eagle3.

        Returns
        -------
        Tensor, (..., V), of eagle3 (..., draft vocabulary)
        """
        if self.kind != "eagle3":
            return head(hidden)
        return self.lm_head(hidden if self.norm_output else self.norm(hidden))

    def vocabulary(self) -> Tensor | None:
        """Target's ids of the tokens that have logits, int64, (draft vocabulary,); None for all."""
        if self.kind != "eagle3":
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def restrict(self, ids: Tensor) -> None:
        """Set the draft vocabulary of eagle3: ascending ids of the target, int64."""
        if len(ids) != len(self.d2t):
            raise ValueError(f"{len(ids)} ids for a draft vocabulary of {len(self.d2t)}")
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(len(ids), device=self.d2t.device))
