"""Drafting with a trained layer: its own cache, and the tree that it grows.

Row t pairs the target's hidden state at t with the token after it, so the target's last row waits
for its token: the next one of the prompt, or the emitted one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.layout import TokenLayout, next_id
from vlmfast.core.tree import Tree

from .._grow import grow
from .._layer import Cache
from .module import EagleModule
from .visual import Choice, Visual, shortened


class EagleDrafter:
    """Drafts of one request.

    The layer first runs when the first tree is requested.

    Parameters
    ----------
    target : Target
    module : EagleModule
        On the target's device.
    top_k, depth, nodes : int
        As in `drafters._grow.grow`.
    visual : Visual
        How visual rows are shortened.
    """

    def __init__(
        self,
        target: Target,
        module: EagleModule,
        top_k: int,
        depth: int,
        nodes: int,
        visual: Visual | None = None,
    ) -> None:
        self.target, self.module, self.visual = target, module, visual or Visual()
        self.top_k, self.depth, self.nodes = top_k, depth, nodes
        self.cache = Cache()
        self.next = 0  # rotary id of the token that the target reads next
        self.choice: Choice | None = None
        self._waiting: tuple[Tensor, Tensor] | None = None  # hidden state and id of the last row
        self._queue: list[tuple[Tensor, Tensor]] = []  # rows that the layer has not processed yet
        self._question: Tensor | None = None
        self._hidden: Tensor | None = None  # output of the last row, (1, D)
        self._dtype = module.dtype  # of the target
        self._banned: Tensor | None = None

    # --- results of the target -------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, read: Read) -> None:
        """Add a prompt, or its next chunk."""
        if not len(read.layout):
            return
        features, position = self._features(read), read.layout.position[0]
        embeds, layout = read.embeds, read.layout
        earlier, at = features[:-1], position[:-1]
        if self._waiting is None:
            embeds, layout = embeds[1:], layout.select(torch.arange(1, len(layout)).to(at.device))
        else:
            earlier = torch.cat([self._waiting[0], earlier])
            at = torch.cat([self._waiting[1], at])
        text = features[~read.layout.visual]
        if self._question is None or len(text):
            self._question = text if len(text) else torch.zeros_like(features[:1])
        if len(layout):
            self._queue.append(self.prompt_rows(self._cast(embeds), earlier, at, layout))
        self._waiting = features[-1:], position[-1:]
        self.next = next_id(read.layout.position)

    @torch.no_grad()
    def extend(self, done: Round) -> None:
        """Add the tokens that the target accepted of a tree."""
        if self._waiting is not None:
            self._complete(done.tree.tokens[0])
        features, path = self._features(done), done.path
        features = features.index_select(0, torch.tensor(path, device=features.device))
        at = self.next + torch.arange(len(path), device=features.device)
        if len(path) > 1:
            tokens = torch.tensor(done.emitted[: len(path) - 1], device=features.device)
            self._queue.append((self.answer_rows(self._embed(tokens), features[:-1]), at[:-1]))
        self._waiting = features[-1:], at[-1:]
        self.next += len(path)

    def _features(self, source: Read | Round) -> Tensor:
        """Hidden states (S, D) in the module's dtype."""
        features = source.features if self.module.kind != "eagle3" else source.aux_hidden_states
        if features is None:
            what = "hidden states" if self.module.kind != "eagle3" else "auxiliary hidden states"
            raise ValueError(f"the drafter needs the target's {what}; none were passed")
        return self.module.project(self._cast(features.flatten(1)))

    def _complete(self, token: int) -> None:
        """Pair the waiting row with the token after it."""
        assert self._waiting is not None
        features, at = self._waiting
        ids = torch.tensor([token], device=features.device)
        self._queue.append((self.answer_rows(self._embed(ids), features), at))
        self._waiting = None

    # --- inputs of the layer ---------------------------------------------------------------------

    def prompt_rows(
        self, embeds: Tensor, features: Tensor, position: Tensor, layout: TokenLayout
    ) -> tuple[Tensor, Tensor]:
        """The layer's input for S rows of a prompt, and its rotary ids.

        ``layout`` has the rows of ``embeds``, shifted by one from ``features`` and ``position``.
        """
        assert self._question is not None  # `prefill` sets it
        rows, self.choice = shortened(
            self.visual,
            self.module.compressor,
            embeds,
            features,
            position,
            layout,
            self._question,
        )
        return self.module.rows(rows.embeds, rows.features, rows.image), rows.position

    def answer_rows(self, embeds: Tensor, features: Tensor) -> Tensor:
        """The layer's input for rows of an answer, whose features may be outputs."""
        return self.module.rows(embeds, features)

    def _cast(self, rows: Tensor) -> Tensor:
        self._dtype = rows.dtype
        return rows.to(self.module.dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.module.dtype)

    # --- drafting --------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(self, root: int, budget: Budget) -> Tree:
        """A tree below ``root``."""
        nodes, depth = min(self.nodes, budget.nodes), min(self.depth, budget.depth)
        if nodes <= 1 or depth < 1:
            return Tree((root,), (-1,))
        if self._waiting is not None:
            self._complete(root)
        if self._queue:
            rows, position = (torch.cat(parts) for parts in zip(*self._queue, strict=True))
            self._queue.clear()
            out = self.module.run(rows[None], position[None], self.cache.attend())
            self._hidden = out[0, -1:]
        if self._hidden is None:
            raise ValueError("propose needs a prompt: call prefill first")
        stable, state = self.cache.length, self._hidden

        def step(tokens: Tensor, origin: Tensor, mask: Tensor, level: int) -> Tensor:
            nonlocal state
            rows = self.answer_rows(self._embed(tokens), state.index_select(0, origin))
            position = torch.full_like(tokens, self.next + level)
            state = self.module.run(rows[None], position[None], self.cache.attend(mask))[0]
            return self.logits(state)

        try:
            return grow(
                root,
                self.logits(state),
                step,
                budget.rank,
                top_k=self.top_k,
                depth=depth,
                nodes=nodes,
                shared_noise=budget.noise is not None,
            )
        finally:
            self.cache.crop(stable)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (F, V) over the target's vocabulary; minus infinity for banned tokens."""
        if self.module.kind == "eagle3":
            own = self.module.output(hidden, self.target.logits).float()
            logits = own.new_full((len(own), self.target.vocabulary), -torch.inf)
            logits[:, self.module.vocabulary()] = own
        else:
            logits = self.module.output(hidden.to(self._dtype), self.target.logits).float()
        if self._banned is None:
            banned = [token for token in self.target.banned if token < logits.shape[-1]]
            self._banned = torch.tensor(banned, dtype=torch.int64, device=logits.device)
        return logits.index_fill(1, self._banned, -torch.inf)
