"""EAGLE: drafts from the target's own hidden states, with the elastic compressor of SpecVLM.

One decoder layer continues the target's hidden states. Row t pairs the hidden state f_t after the
target's last norm with the embedding of the token that follows it (EAGLE, arXiv 2401.15077)::

    z_t = fc [e_(t+1); f_t]        g_t = layer(z_1 .. z_t)        logits = target's head of g_t

g_t predicts f_(t+1), so a token y drafted after it is a further row ``fc [e(y); g_t]``. The tree
is that of EAGLE-2 (`drafters._grow`). SpecVLM (arXiv 2509.11815) adds a norm before attention and
shortens the drafter's visual rows. The target keeps all of its own rows, so no choice here changes
an answer.

Kinds: ``eagle`` (EAGLE-1, EAGLE-2 and SpecVLM, whose norm is used where the weights have it);
``msd`` (arXiv 2505.14260: an image's rows are its embeddings alone, without ``fc``); ``eagle3``
(arXiv 2503.01840: reads three layers of the target, has its own norm and its own head over part of
the vocabulary, and rows are twice as wide).

``visual`` selects how visual rows are shortened: ``all`` (not), ``prune`` (to 1/20, at random),
``pool`` (1/20), ``conv`` (1/3), ``resample`` (``queries`` rows), ``text`` (none). The gate chooses
one of these (``select``), adds them up (``weighted``, at 1/3), or they are concatenated
(``concat``). ``keep`` gives all the same number of rows.

What differs from the authors' code, or is left open by them:

- Rows are those that remain after the target's last layer: the embedding in row t is that of the
  next remaining token, for an image its projected patch, never that of a placeholder.
- Placeholders of images are never drafted.
- A compressed row combines its image's hidden states with the same weights as its embeddings.
  Pruned rows keep their rotary ids, others take the last ones of their image.
- The gate reads the hidden states of the prompt's text.
- Equal scores are ordered by when a node appeared, so that no node is kept without its parent.
- Where the target samples, drafts are ranked by the noise that it will use, and the shape of the
  tree follows how often the child of each rank is right. The authors rank at temperature 1 without
  the request's processors, which ignores both.
- The rule for EAGLE-3's layers gives one layer twice in a model of six layers or fewer. There the
  layers at 1/4, 1/2 and 3/4 are read.
"""

from .stage import DraftEagle as DraftEagle
