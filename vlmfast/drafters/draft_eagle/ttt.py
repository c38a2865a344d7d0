"""Training-time test: the drafter reads its own outputs, as it will when it drafts.

Step 0 is the ordinary forward pass. In every further step each position uses its last output as
the target's hidden state, and the tokens move ahead by one; see `drafters._layer.Unrolled` for the
attention. EAGLE-3 (arXiv 2503.01840) weights the loss of step s by 0.8^s.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .._layer import Unrolled
from .module import EagleModule


def unroll(
    module: EagleModule,
    embeds: Iterable[Tensor],
    features: Tensor,
    position: Tensor,
    mask: Tensor | None = None,
    image: Tensor | None = None,
) -> list[Tensor]:
    """Outputs of each step.

    Parameters
    ----------
    embeds : iterable of Tensor, (B, S, D)
        Embeddings of each step: those of step s are s tokens ahead of those of step 0.
    features : Tensor, (B, S, F)
        The target's hidden states, for step 0.
    position : Tensor, int64, (B, S)
        Rotary ids of step 0.
    mask, image : Tensor, optional
        As in `EagleModule.forward`; ``image`` applies to step 0, later rows are drafted tokens.

    Returns
    -------
    list of Tensor, (B, S, D)
        The output of step s at position t predicts the target's hidden state at t + s + 1.
    """
    attend, outputs = Unrolled(mask), []
    for step, level in enumerate(embeds):
        rows = module.rows(level, features, image if step == 0 else None)
        features = module.run(rows, position + step, attend)
        outputs.append(features)
    return outputs
