"""PVC: encode an image as a static video; every frame adds what the earlier ones left out.

Progressive visual token compression (CVPR 2025, arXiv 2412.09613) gives every frame the same small
number of tokens. An image is repeated four times and treated the same way, so that it is not
shortened: its details are spread over the repeats. Frames of a video are encoded once.

*Progressive encoding.* Before the last blocks of the vision tower each patch attends to itself and
to the same position in earlier frames (causal), under the relative timestamp ``t`` of its frame::

    x = x + out(attention(norm(x, t)))         norm(x, t) = (1 + scale(t)) LN(x) + shift(t)

where scale and shift come from an MLP of a sinusoid of ``t`` (256 wide), so that equal frames can
have different features. A view is repeated before the first of these blocks, since until there all
repeats are equal. The same view of consecutive frames is one sequence; views of one image, and
different videos, do not attend to each other.

*Adaptive compression.* Cells of ``side x side`` patches become one token for each time that the
view is repeated, by space-to-depth and an MLP under the same norm (`module.Compressor`)::

    z = sum_j a_j x_j + rest mlp(concat_j norm(x_j, t))

A token takes the order and position of one of its patches in the prompt. The four patches nearest
to the centre of a cell take turns along a sequence; with as many repeats as a cell has patches, all
of them are used. ``a`` is a learned softmax over the patches of the cell that prefers the token's
own patch, and ``rest`` the fraction of the cell that it represents in addition to its own patch.

Different from the paper, or not specified there, and why:

- The paper trains the tower, the projector and the language model too. Here all of them are frozen,
  so that the weights can be attached to a model and detached again. The MLP is therefore a residual
  on a mean of patches, is zero at initialization and runs before the model's own projector, and the
  temporal attention is initially the identity: training starts near plain subsampling.
- ``rest`` is not in the paper. A frozen language model needs the tokens that it was trained on: if
  every patch has its own token there is nothing to compress, and images degrade least. Then the
  four repeats add only the temporal attention to an image.
- The paper's projector makes the tokens and sets their number. Here they are copied to all patches
  that they represent, the family's projector and packing get the grid that they expect, and one
  copy of each token is kept after them.
- On InternVL, the paper's own family, the tower makes one token of 2 x 2 patches (256 of the 1024
  of a view). Its pixel shuffle stays, and cells are made of its rows, 2 x 2 patches concatenated;
  the temporal attention is of single patches. Cells of 2 x 2 rows are 4 x 4 patches: 64 tokens a
  view, as published, and four repeats of an image are as many as before. In the paper one MLP
  replaces pixel shuffle and projector. LLaVA has a token for each patch, so that its cells of 2 x 2
  patches are comparable.
- Temporal attention is possible before every block up to the last but one, as LLaVA's feature layer
  is the last but one. On InternVL, too, the last block has none before it.
- An image's newlines are kept if it is not shortened, otherwise dropped, as are those of videos.
- Other families whose tower makes a token of several patches are refused: their projectors take
  patches, not tokens.
- An image's letterbox may cut a cell, which then has at most as many tokens as patches left.
- LLaVA-NeXT cuts a frame into a base view and crops. ``views=base`` drops the crops (the paper has
  one tile per frame). A frame as small as one view has a single crop, which repeats the base view.
- ``budget`` takes the nearest of the settings that the weights were trained for: sides 2 and 4,
  views repeated 1, 2 or 4 times, with a video's crops or without. So counts are fixed; an image's
  nearest setting below 100 % is half. ``budget=1`` leaves the tokens unchanged.
- The weights are trained under ``positions=keep``; the paper renumbers the kept tokens, as
  ``positions=compact`` does.
- Four repeats of an image cost four times the compute in the tower's last blocks.
"""

from .stage import PVC as PVC
