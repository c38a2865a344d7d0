"""PVC: a picture is a clip that stands still, and every frame adds what the earlier ones left out.

Progressive visual token compression (CVPR 2025, arXiv 2412.09613) gives every frame the same small
number of tokens. A picture is repeated four times and goes the same way, so that it is not
shortened: its details are spread over the repeats. Frames of a clip are seen once.

*Progressive encoding.* In front of the last blocks of the vision tower each patch attends to the
same place in earlier frames and itself (causal), under the relative timestamp ``t`` of its frame::

    x = x + out(attention(norm(x, t)))         norm(x, t) = (1 + scale(t)) LN(x) + shift(t)

where scale and shift come from an MLP of a sinusoid of ``t`` (256 wide), so that equal frames can
say different things. A view is repeated where the first of these blocks stands: before it all
repeats are the same. The same view of consecutive frames is one sequence; views of one picture, and
clips, do not see each other.

*Adaptive compression.* Cells of ``side x side`` patches become one token for each time that the
view is repeated, by space-to-depth and an MLP under the same norm (`module.Compressor`)::

    z = sum_j a_j x_j + rest mlp(concat_j norm(x_j, t))

A token stands in the prompt at the place of one of its patches, and takes its order and position.
The four places nearest to the centre of a cell take turns along a sequence; with as many repeats as
a cell has patches all of them are taken. ``a`` is a learned softmax over the patches of the cell
that prefers the token's own place, and ``rest`` the share of the cell that it speaks for beside
its own place.

Different from the paper, or not said there, and why:

- The paper trains the tower, the projector and the language model too. Here all of them are frozen,
  so that the weights can be put on a model and taken off again. The MLP is therefore a residual on
  a mean of patches, starts at zero and works in front of the model's own projector, and the
  temporal attention starts as nothing: a training begins near plain subsampling.
- ``rest`` is not in the paper. A frozen language model wants the tokens that it knows: where
  every patch has its own token there is nothing to compress, and pictures lose least. What four
  repeats still add to a picture then is the temporal attention alone.
- The paper's projector makes the tokens and sets their number; here they are spread over the places
  that they stand for, the family's projector and packing see the grid that they expect, and one
  place of each token is kept behind them.
- On InternVL, the paper's own family, the tower makes one token of 2 x 2 patches (256 of the 1024
  of a view). Its pixel shuffle stays, and cells are made of its rows, 2 x 2 patches side by side;
  the temporal attention is of single patches. Cells of 2 x 2 rows are 4 x 4 patches: 64 tokens a
  view, as published, and four repeats of an image are as many as before. In the paper one MLP
  replaces pixel shuffle and projector. LLaVA has a token for each patch, so that cells of 2 x 2
  patches are what compares.
- The temporal attention may stand before the last blocks but one, LLaVA's feature layer being the
  last but one. On InternVL, too, the last block has none before it.
- A picture's newlines stay when it is not shortened, else they go, as those of clips do.
- Other families whose tower makes a token of several patches are refused: their projectors take
  patches, not tokens.
- A picture's letterbox may cut a cell: it has no more tokens than patches that are left.
- LLaVA-NeXT cuts a frame into a base view and crops. ``views=base`` drops the crops (the paper has
  one tile per frame). A frame as small as one view has a single crop, which repeats the base view.
- ``budget`` takes the nearest of what the weights were trained for: sides 2 and 4, views repeated
  1, 2 or 4 times, with a clip's crops or without. So counts are fixed; a picture's nearest point
  below 100 % is half. ``budget=1`` leaves the tokens as they are.
- ``positions=keep`` is the default, which the weights are trained under; the paper numbers the
  tokens that are left.
- Four repeats cost a picture four times the work in the tower's last blocks.

`published.read_config` reads the released model's configuration.
"""

from .published import read_config
from .stage import PVC

__all__ = ["PVC", "read_config"]
