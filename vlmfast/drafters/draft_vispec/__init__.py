"""ViSpec: a drafter that sees each image as one row and a global feature.

ViSpec (arXiv 2509.15235) finds that a shallow drafter cannot use hundreds of visual rows. An
adaptor, learned queries in one cross-attention over an image's embeddings, compresses them to n
vectors (2 by default). All but the last replace the image in the drafter's sequence, at the last
rotary ids of its span, and enter the layer unchanged. The last, g, is the global feature::

    text row t    fc [e_(t+1); img_fc [f_t; g]]

with g = 0 before the first image and the latest image's g after it, also in the answer. The rest
is EAGLE-2: see `draft_eagle`.

What differs from the authors' code:

- Every image is adapted by its own rows. The authors reuse the first one's row count, and stop
  with an error at the second image. Adjacent images without text between them are two images here.
- The authors' verifier draws uniform numbers in half precision, by which a token of probability 0
  can be accepted. It is not used: answers are the model's own.
- Rotary ids are those of the target's rows, also where rows were dropped before the drafter.
"""

from .stage import DraftVispec as DraftVispec
