"""The elastic visual compressor: four ways to shorten a picture, chosen by the question.

SpecVLM (arXiv 2509.11815) shortens the visual rows of a speculative drafter by random pruning, by
average pooling, by a strided convolution or by a resampler of few learned queries, and lets a gate
that sees the question choose. Here the same compressor stands between vision encoder and language
model; `module` knows nothing of that and serves a drafter's rows as well.

Modes, with N tokens of a picture (newlines counted, but never kept)::

    select    the branch with the largest gate logit      prune N/20, pool N/20, conv N/3,
                                                          resample 2, text 0 (only with text=true)
    weighted  sum of softmax(g)_i y_i over prune, pool and conv, each at the share ``conv``
    concat    prune, pool, conv and resample side by side

``rate`` and ``budget`` give every branch the same count, so that the gate chooses by quality alone:
``concat`` splits it in equal parts. A branch that cannot reach the count is closed: the resampler
where the count exceeds its learned queries, and text-only always.

What the paper leaves open, and what was decided:

- *Gate*. The mean of the visual rows attends to the prompt's token embeddings; what it reads there,
  mean and spread of the visual rows and the logarithms of the branches' costs go through two
  layers. One decision for a prompt, from all of its pictures: only then is the loss of a decision
  the loss of one pass.
- *Training of the gate*. The paper samples branches (Gumbel-softmax, straight-through). There are
  only five, so each is run and the gate gets the exact expectation, which has no variance and no
  temperature, and lets no branch starve, so that nothing has to balance their load::

      sum over i of p_i (L_i + cost_weight c_i)           p = softmax(g)

  with ``L_i`` the answer's loss under branch i, held fixed, and ``c_i`` the share of the visual
  tokens it leaves. A branch learns from its own ``L_i`` alone, however unlikely it is. Running all
  branches is costly: the first part of the training runs one learning branch per sample. On `tiny`
  the trained convolution answers best at every count, and the gate always chooses it.
- *Convolution*. Kernels of fixed size fit few grids. Its cells are those of `downsample`, any size
  and uneven ones too, and its kernel is a small network of the offset in the cell; it also weights
  patches by what they show, apart for each head, between two residual layers. It starts as the
  average and so has to beat pooling. Each view by itself: cells that joined the overview with the
  crops at the same place were worse on still pictures and no better on clips.
- *Resampler*. One cross-attention, as in the paper, over all views of a picture; but each query
  also stands at a place, and the first n queries cover the picture for every n, so that one set
  serves every count.
- *Pruning* draws as `random` does. In ``weighted`` it draws one patch from each cell, so that the
  rows which are added belong to one place.
- *Places*. A row stands where the patch nearest to the middle of its cell, or to its query, stood.
  Where branches are concatenated the next free patch is taken. ``keep`` (original ids) is the
  default: on `tiny` it is far better for merged tokens than ``compact``.
- *Weights*. A row's weight is that of its cell; a resampled row has its queries' shares of all
  patches, which add up to the patches. In ``concat`` each branch represents the whole picture.
"""

from .stage import Elastic as Elastic
