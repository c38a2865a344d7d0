"""ATP: learned thresholds drop visual tokens between layers, adapted to the input.

ATP-LLaVA (arXiv 2412.00447) puts a small module after a few layers of the language model, by
default after 4, 14 and 24 of 32. It gives each visual token i two scores, with ``g`` the logits of
the layer before the softmax and ``A`` its attention::

    S_self[i]    = from the mean over visual rows v of g[v, i]       importance to the image
    S_cross[i]   = from the mean over text rows t of A[t, i]         importance to the question
    S_red        = (S_self + S_cross) / 2
    S_spatial[i] = 1 - lambda_s R   of the sparsest uniform grid that contains i, with a fraction R
                                    of the patches; 0 if none does; lambda_s = 3
    z            = W [mean S_self, mean S_cross]
    theta_r      = sigmoid(w_r z)         theta_s = sigmoid(w_s z)

At inference a token is kept if ``S_red > theta_r or S_spatial > theta_s``, so the number of kept
tokens depends on the input and the layer. In training nothing is dropped. Later layers see the
token through a soft mask m (its logarithm is added to the logits of its key), and the masks of
successive modules multiply::

    m    = max(sigmoid(T (S_red - theta_r)), sigmoid(T (S_spatial - theta_s)))
    loss = answer + lambda_atp sum over l of (n_l / n) (l / L) + lambda_target |n' / n - target|

The sum is over the modules: ``l`` layers of ``L`` run before a module, and of ``n`` tokens ``n_l``,
the sum of the masks, are left after it. ``n'`` is the average over all L layers, which is also the
cost that ``budget`` sets.

``budget`` sets counts instead of thresholds. If both thresholds rise together, a token is dropped
at ``max(S_red - theta_r, S_spatial - theta_s)``, and 0 is the rule above. This margin ranks the
tokens, and the best ``n p_l^gamma`` are kept after module l: ``p_l`` is the fraction that training
left there, on average, and gamma is solved so that the average over the layers is met. Equal
margins (a whole grid) are ordered by S_red, then by index. On `tiny` powers ``n lambda^s`` after
drop s, as other methods have them, were as good on images and seemed worse on videos.

The authors have no public code; the equations are reconstructed from the paper's abstract and from
what others wrote about it. What these leave open, and what was decided:

- *Normalisation.* Logits are unbounded and attention fractions shrink with the number of tokens,
  but both meet a threshold in (0, 1). Both are expressed in nats relative to the other visual
  tokens, where 0 is the average::

      x_self = g[i] - mean over j of g[j]      x_cross = log(n A[i])      S = sigmoid(a x + b)

  Attention is ``exp(logit)`` up to a factor, so both have one unit on every model, and with a = 1,
  b = 0 the second is ``r / (1 + r)``, r being the attention relative to a uniform one. a and b are
  learned, separately for each score and module.
- *Received or given.* S_self is what a token receives from the visual rows, as in the paper's
  prose. It needs no map: a mean of products is the product with the mean query. It is not causal:
  all visual rows attend to all visual tokens.
- *Heads.* The paper averages them. Here their weights are learned and start at the average
  (``--heads mean`` keeps it): convex weights for attention, which is a fraction, free ones for
  logits, as some heads have queries that point away from important tokens.
- *Grids.* Several nested ones, so that theta_s chooses a density: every 2nd, 4th, 8th row and
  column, with scores 0.25, 0.81 and 0.95. They share their middle and are separate for each view. A
  token on no grid is never kept by S_spatial. ``grids=0`` uses the redundancy score alone.
- *Newlines* cost as much as other tokens. They are on no grid; S_red decides.
- *Thresholds* start at 0.5 and at 0.9, between two grids: if theta_s starts below a grid, its soft
  mask is flat, training does not raise it again, and the grid is kept for good.
- *Temperature.* The paper's 10 gives masks of one third and two thirds for scores that are 0.07
  off their threshold, unlike any drop. It rises during training from 10 to 40.
- *Loss.* In fractions of the tokens and of the depth, so that its weights fit every model.
- *Several images* are ranked together, by the text after the last one.
- *Positions.* Original ids are kept.

Not done: the paper trains the language model too and gives visual tokens a two-dimensional rotary
embedding. Here the user's model and its rotary embedding are frozen; a variant with a frozen model
is reported to lose 2 to 3 points.
"""

from .stage import ATP as ATP
