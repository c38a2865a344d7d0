"""The elastic visual compressor: four ways to shorten an image, chosen by the question.

SpecVLM (arXiv 2509.11815) shortens the visual rows of a speculative drafter by random pruning,
average pooling, a strided convolution or a resampler with few learned queries, chosen by a gate
that sees the question. Here the same compressor runs between vision encoder and language model;
`module` is independent of that and serves a drafter's rows as well.

Modes, with N tokens of an image (newlines are counted, but never kept)::

    select    the branch with the largest gate logit      prune N/20, pool N/20, conv N/3,
                                                          resample 2, text 0 (only with text=true)
    weighted  sum of softmax(g)_i y_i over prune, pool and conv, each at the fraction ``conv``
    concat    prune, pool, conv and resample concatenated

``keep`` and ``budget`` give every branch the same count, so that the gate chooses by quality alone;
``concat`` splits it in equal parts. A branch that cannot reach the count is closed: the resampler
if the count exceeds its learned queries, and text-only always.

What the paper leaves open, and what was decided:

- *Gate*. The mean of the visual rows attends to the prompt's token embeddings; the result, mean and
  spread of the visual rows and the logarithms of the branches' costs go through two layers. One
  decision per prompt, from all of its images: only then is the loss of a decision the loss of one
  forward pass.
- *Training of the gate*. The paper samples branches (Gumbel-softmax, straight-through). With only
  five branches, each is run and the gate gets the exact expectation, which has no variance and no
  temperature. No branch is starved, so that no load balancing is needed::

      sum over i of p_i (L_i + cost_weight c_i)           p = softmax(g)

  with ``L_i`` the answer's loss under branch i, detached, and ``c_i`` the fraction of the visual
  tokens it leaves. A branch learns from its own ``L_i`` alone, however unlikely it is. Running all
  branches is costly: the first part of the training runs one trainable branch per sample. On `tiny`
  the trained convolution answers best at every count, and the gate always chooses it.
- *Convolution*. Kernels of fixed size fit few grids. Its cells are those of `downsample`, of any
  size, uneven ones included, and its kernel is a small network of the offset in the cell. It also
  weights patches by their content, per head, between two residual layers. It starts as the average
  and so has to beat pooling. Each view is compressed separately: cells that joined the overview
  with the crops at the same position were worse on images and no better on videos.
- *Resampler*. One cross-attention, as in the paper, over all views of an image. In addition each
  query has a position, and the first n queries cover the image for every n, so that one set of
  queries serves every count.
- *Pruning* draws by the seed, the index of the image and the number of its tokens. In ``weighted``
  it draws one patch from each cell, so that the rows that are summed belong to one position.
- *Positions*. A row takes the position of the patch nearest to the middle of its cell, or to its
  query. In ``concat`` the next free patch is taken. ``keep`` (original ids) is the default: on
  `tiny` it is far better for merged tokens than ``compact``.
- *Weights*. A row's weight is that of its cell. A resampled row has its query's fractions of all
  patches, which sum to the patches. In ``concat`` each branch represents the whole image.
"""

from .stage import Elastic as Elastic
