"""The weights of `draft-vispec`: an adaptor for images and a global feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from vlmfast.errors import RecipeError

from ..draft_eagle.module import EagleModule


class Adaptor(nn.Module):
    """Learned queries attend to an image's rows: (N, D) to (n, D).

    Without norm, positions or residual.
    """

    def __init__(self, width: int, heads: int, head_width: int, queries: int, bias: bool) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(queries, heads, head_width) * head_width**-0.5)
        self.k_proj = nn.Linear(width, heads * head_width, bias=bias)
        self.v_proj = nn.Linear(width, heads * head_width, bias=bias)
        self.o_proj = nn.Linear(heads * head_width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        shape = (len(rows), *self.q.shape[1:])
        k, v = (p(rows).view(shape).transpose(0, 1) for p in (self.k_proj, self.v_proj))
        out = scaled_dot_product_attention(self.q.transpose(0, 1)[None], k[None], v[None])
        return self.o_proj(out[0].transpose(0, 1).flatten(1))


class VispecModule(EagleModule):
    """An EAGLE-2 layer that sees an image as few rows, and text rows with its global feature.

    With n queries: the adaptor's first n - 1 outputs replace an image's rows, its last one is the
    global feature g of all text after it::

        text row t    fc [e_t; img_fc [f_t; g]]        g = 0 before the first image

    Parameters
    ----------
    config : dict
        As in `EagleModule`, without ``kind``; and ``queries`` (n; default 2).

    Raises
    ------
    RecipeError
        When ``queries`` is below 2.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({**config, "kind": "eagle", "compressor": None})
        width, heads = config["width"], config["heads"]
        queries = config.get("queries", 2)
        if queries < 2:
            raise RecipeError(f"draft-vispec: queries={queries}; the last is global, so at least 2")
        head_width = config.get("head_width") or width // heads
        bias = config.get("qkv_bias", False)
        self.imadpt = Adaptor(width, heads, head_width, queries, bias)
        self.img_fc = nn.Linear(2 * width, width)
        with torch.no_grad():  # at the start text rows are EAGLE's
            self.img_fc.weight.copy_(torch.eye(width, 2 * width))
            self.img_fc.bias.zero_()

    def text_rows(self, embeds: Tensor, features: Tensor, seen: Tensor) -> Tensor:
        """The layer's input for text rows; ``seen`` is their global feature; each (..., D)."""
        return self.rows(embeds, self.img_fc(torch.cat([features, seen], dim=-1)))

    def adapted(
        self, embeds: Tensor, features: Tensor, image: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one prompt, or of a part of one, with the rows of each image compressed.

        Parameters
        ----------
        embeds, features : Tensor, (S, D)
            As in `EagleModule.rows`.
        image : Tensor, int64, (S,)
            Image that a row's embedding belongs to, -1 for text. Adjacent rows of one image are
            one run.
        seen : Tensor, (D,)
            Global feature of the rows before; zeros without an image.

        Returns
        -------
        rows : Tensor, (R, D)
            The layer's input.
        source : Tensor, int64, (R,)
            The row that each replaces: of an image, its last n - 1 (fewer where it has fewer).
        seen : Tensor, (D,)
            Global feature of the rows that follow.
        """
        runs, lengths = image.unique_consecutive(return_counts=True)
        rows, source, first = [], [], 0
        index = torch.arange(len(image), device=image.device)
        for item, length in zip(runs.tolist(), lengths.tolist(), strict=True):
            span = slice(first, first + length)
            if item < 0:
                rows.append(self.text_rows(embeds[span], features[span], seen.expand(length, -1)))
                source.append(index[span])
            else:
                few = self.imadpt(embeds[span])
                few, seen = few[:-1][:length], few[-1]
                rows.append(few)
                source.append(index[span][length - len(few) :])
            first += length
        return torch.cat(rows), torch.cat(source), seen
