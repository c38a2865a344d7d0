"""ViSpec: a drafter that sees each picture as one row and a global feature.

ViSpec (arXiv 2509.15235) finds that a shallow drafter cannot use hundreds of visual rows. An
adaptor, learned queries in one cross-attention over a picture's embeddings, makes n vectors of them
(2 by default): all but the last take the picture's place in the drafter's sequence, at the last
rotary ids of its span, and enter the layer as they are; the last, g, is the global feature::

    text row t    fc [e_(t+1); img_fc [f_t; g]]

with g = 0 before the first picture and the latest picture's behind it, in the answer too. The rest
is EAGLE-2: see `draft_eagle`.

What differs from the authors' code:

- Every picture is adapted by its own rows. The authors reuse the first one's row count, and stop
  with an error at the second picture; neighbours without text between them are two pictures here.
- Uniform numbers of half precision, by which a token of probability 0 can be accepted, are gone
  with their verifier: answers are the model's own.
- Rotary ids are those of the target's rows, where rows were dropped in front of the drafter too.
"""

from .stage import DraftVispec as DraftVispec
