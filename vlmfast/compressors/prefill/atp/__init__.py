"""ATP: learned thresholds drop visual tokens between layers, as many as the input bears.

ATP-LLaVA (arXiv 2412.00447) puts a small module behind a few layers of the language model, by
default behind 4, 14 and 24 of 32. Two scores say how much a visual token i is worth there, with
``g`` the logits of the layer before the softmax and ``A`` its attention::

    S_self[i]    = from the mean over visual rows v of g[v, i]       what it is to the picture
    S_cross[i]   = from the mean over text rows t of A[t, i]         what it is to the question
    S_red        = (S_self + S_cross) / 2
    S_spatial[i] = 1 - lambda_s R   of the sparsest uniform grid, with a share R of the patches,
                                    that i lies on, else 0; lambda_s = 3
    z            = W [mean S_self, mean S_cross]
    theta_r      = sigmoid(w_r z)         theta_s = sigmoid(w_s z)

At inference a token stays if ``S_red > theta_r or S_spatial > theta_s``; how many stay is thus the
input's own, layer by layer. In training nothing is dropped. Later layers see the token through a
soft mask m (its logarithm is added to the logits of its key), and the masks of successive modules
multiply::

    m    = max(sigmoid(T (S_red - theta_r)), sigmoid(T (S_spatial - theta_s)))
    loss = answer + lambda_atp sum over l of (n_l / n) (l / L) + lambda_target |n' / n - target|

The sum is over the modules: ``l`` layers of ``L`` are in front of one, of ``n`` tokens ``n_l``, the
sum of the masks, are left behind it. ``n'`` is the average over all L layers, the cost that
``budget`` means too.

``budget`` gives counts instead of thresholds. Let both thresholds rise together: a token falls at
``max(S_red - theta_r, S_spatial - theta_s)``, and 0 is the rule above. This margin ranks the
tokens, and the best ``n p_l^gamma`` stay behind module l: ``p_l`` is the share that training left
there, on average, and gamma is solved so that the average over the layers is met. Equal margins (a
whole grid) are ordered by S_red, then by index. On `tiny` powers ``n lambda^s`` behind drop s, as
other methods have them, were as good on pictures and seemed worse on clips.

There is no public code of the authors; the equations are put together from the paper's abstract and
from what others wrote about it. What these leave open, and what was decided:

- *Normalisation.* Logits have no bounds, shares of attention shrink with the number of tokens, and
  both meet a threshold in (0, 1). Both are brought to nats against the other visual tokens, where
  0 is the average::

      x_self = g[i] - mean over j of g[j]      x_cross = log(n A[i])      S = sigmoid(a x + b)

  Attention is ``exp(logit)`` up to a factor, so both have one unit on every model, and with a = 1,
  b = 0 the second is ``r / (1 + r)``, r being the share in units of an equal share. a and b are
  learned, apart for each score and module.
- *Received or given.* S_self is what a token receives from the visual rows, as the paper's prose
  has it. It needs no map: a mean of products is the product with the mean query. It is not causal:
  all visual rows look at all visual tokens.
- *Heads.* The paper averages them. Here their weights are learned and start at the average
  (``--heads mean`` keeps it there): convex ones for attention, which is a share, free ones for
  logits, as there are heads whose queries turn away from what matters.
- *Grids.* Several nested ones, so that theta_s chooses a density: every 2nd, 4th, 8th row and
  column, with scores 0.25, 0.81 and 0.95. They share their middle and lie in each view apart. A
  token on no grid is never kept by S_spatial. ``grids=0`` leaves the redundancy score alone.
- *Newlines* cost what other tokens cost. They lie on no grid; S_red decides.
- *Thresholds* start at 0.5 and at 0.9, between two grids: where theta_s starts below a grid its
  soft mask is flat, training does not raise it again, and the grid stays for good.
- *Temperature.* The paper's 10 leaves masks of one third and two thirds for scores that are 0.07
  off their threshold, which no drop is like. It rises in the training from 10 to 40.
- *Loss.* In shares of the tokens and of the depth, so that its weights fit every model.
- *Several pictures* are ranked together, by the text behind the last one.
- *Positions.* Original ids are kept.

Not done: the paper trains the language model too and gives visual tokens a two-dimensional rotary
embedding. Here the model is frozen, as it belongs to the user, and its rotary embedding with it;
a variant with a frozen model is reported to lose 2 to 3 points.
"""

from .stage import ATP as ATP
