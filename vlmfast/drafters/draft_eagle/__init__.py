"""EAGLE: drafts from the target's own hidden states, with the elastic compressor of SpecVLM.

One decoder layer continues the target's hidden states. Row t pairs the hidden state f_t behind the
target's last norm with the embedding of the token that came of it (EAGLE, arXiv 2401.15077)::

    z_t = fc [e_(t+1); f_t]        g_t = layer(z_1 .. z_t)        logits = target's head of g_t

g_t stands for f_(t+1), so a drafted token y behind it is a further row ``fc [e(y); g_t]``. The tree
is that of EAGLE-2 (`drafters._grow`). SpecVLM (arXiv 2509.11815) adds a norm in front of attention
and shortens the drafter's visual rows; the model that is drafted for sees all of its own, so that
no choice here changes an answer.

Kinds: ``eagle`` (EAGLE-1, EAGLE-2 and SpecVLM, whose norm is there where the weights have it);
``msd`` (arXiv 2505.14260: a picture's rows are its embeddings alone, in front of no ``fc``);
``eagle3`` (arXiv 2503.01840: three layers of the target are read, the drafter has a norm and a head
of its own over some of the vocabulary, and rows are twice as wide).

``visual`` says what becomes of visual rows: ``all`` stay; ``prune`` (to 1/20, at random), ``pool``
(1/20), ``conv`` (1/3), ``resample`` (``queries`` rows), ``text`` (none); or the gate chooses one of
these (``select``), they are added up (``weighted``, at 1/3) or stand side by side (``concat``).
``share`` gives all the same number of rows.

What differs from the authors' code, or is left open by them:

- Rows are those that are left behind the target's last layer: the embedding in row t is that of
  the next token that survived, of a picture its projected patch, never that of a placeholder.
- Placeholders of pictures are never drafted.
- A compressed row takes its picture's hidden states by the weights by which it took its embeddings.
  Pruned rows keep their rotary ids, others take the last ones of their picture.
- The gate reads the hidden states of the prompt's text.
- Equal scores are ordered by when a node appeared, so that no node loses its parent.
- Where the target samples, drafts are ranked by the noise that it will use, and the shape of the
  tree follows how often the child of each rank is right; temperature 1 without the request's
  processors, as the authors rank, ignores both.
- The rule for EAGLE-3's layers names one twice in a model of six layers or fewer, where those at
  1/4, 1/2 and 3/4 are read.
"""

from .stage import DraftEagle as DraftEagle
