"""Logits of a whole prompt and its answer, with what is dropped masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

TOKENS = [40, 71, 33, 55, 90, 46, 63, 101]  # fed one by one after the prompt


def repeated(grouped: Tensor, heads: int) -> Tensor:
    """Keys, values or masks (H, ...) for each of ``heads`` query heads."""
    return grouped.repeat_interleave(heads // len(grouped), 0)


class Attended(NamedTuple):
    """What a layer attended with: rotated queries (Hq, T, D) and keys, values (H, N, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor  # (Hq, T, N)
    scaling: float

    @property
    def logits(self) -> Tensor:
        """Logits (Hq, T, N) without any mask."""
        return self.query @ repeated(self.key, len(self.query)).transpose(-1, -2) * self.scaling

    def of(self, rows: Tensor) -> Attended:
        """The same over ``rows`` alone; the others must be masked."""
        states = (states[:, rows] for states in self[:3])
        return Attended(*states, self.weights[:, rows][:, :, rows], self.scaling)


def attend(module, query, key, value, mask, scaling, dropout=0.0, *, call, softcap=None, **named):
    """Attention with an additive mask; a fully masked row gets zeros.

    ``call`` has the keys and values that precede the layer's own, or none, and takes `Attended`.
    """
    assert softcap is None
    query, key, value, mask = query[0], key[0], value[0], mask[0]
    past, attended = call
    if past is not None:
        key, value = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
    heads = len(query)
    weights = (query @ repeated(key, heads).transpose(-1, -2) * scaling + mask).softmax(-1)
    weights = weights.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)
    attended.append(Attended(query, key, value, weights, scaling))
    return (weights @ repeated(value, heads)).transpose(0, 1)[None], weights[None]


AttentionInterface.register("dense_reference", attend)


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """The decoder's layers call `attend`."""
    config = model.get_decoder().config
    before = config._attn_implementation
    config._attn_implementation = "dense_reference"
    try:
        yield
    finally:
        config._attn_implementation = before


def closed(position: Tensor, kind: Tensor, rows: Tensor) -> Tensor:
    """Rotary ids (P, S) after compaction; 0 for dropped rows.

    With one axis, the remaining rows are counted. With three, the ids that no row of an image or
    video has any longer are removed from each axis, and later rows move up by the shrinkage of the
    larger of rows and columns.

    Parameters
    ----------
    position : Tensor, int64, (P, S)
        Rotary ids of the full prompt.
    kind : Tensor, int64, (S,)
        Placeholder id for visual tokens, -1 for text.
    rows : Tensor, bool, (S,)
        Remaining rows.
    """
    new = torch.zeros_like(position)
    if len(position) == 1:
        new[0, rows] = torch.arange(int(rows.sum()))
        return new
    start = int(position[0, 0])
    for _, run in groupby(range(len(kind)), key=kind.tolist().__getitem__):
        run = list(run)
        left, width = [i for i in run if rows[i]], 0
        for axis, ids in enumerate(position.tolist()):
            known, present = sorted({ids[i] for i in run}), {ids[i] for i in left}
            new_ids, at = {}, start
            for value, following in pairwise([*known, known[-1] + 1]):
                if value in present:
                    new_ids[value] = at
                    at += following - value
            for i in left:
                new[axis, i] = new_ids[ids[i]]
            if axis > 0 and new_ids:
                width = max(width, max(new_ids.values()) + 1 - start)
        start += width
    return new


@torch.no_grad()
def handed(model, tensors: dict) -> dict:
    """The decoder inputs of Hugging Face's forward."""
    seen: dict = {}

    class Stop(Exception):
        pass

    def hook(module, args, kwargs):
        seen.update(kwargs)
        raise Stop

    handle = model.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        model(**tensors)
    except Stop:
        pass
    finally:
        handle.remove()
    return seen


@dataclass
class Before:
    """A prompt before a layer, over the rows (S',) that are left.

    Attributes
    ----------
    layer : int
    rows : Tensor, int64, (S',)
        Their indices in the full prompt.
    hidden : Tensor, (S', D)
        Their states, which a rule may change in place.
    last : Attended or None
        What the previous layer attended with.
    ahead : callable
        What this layer would attend with.
    """

    layer: int
    rows: Tensor
    hidden: Tensor
    last: Attended | None
    ahead: Callable[[], Attended]


# Which of the rows that are left stay, as indices or as a mask; None for all of them.
Rule = Callable[[Before], Tensor | None]
# Before a layer: hidden states, rotary ids, mask, and the rows that exist, for layers with a state.
Plan = Callable[[int, Tensor], tuple[Tensor, Tensor, Tensor, Tensor | None]]
# Of a layer: keys, values (H, N, D), the index of each slot's token, which slots exist, their bias.
Past = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | float]


@dataclass
class Dense:
    """Logits over a prompt and an answer in one forward pass; dropped tokens are masked.

    Takes the decoder inputs of Hugging Face's own forward (embeddings, rotary ids, deepstack
    features) and runs the decoder's layers on them. Layers that hold a state run without the
    dropped tokens, which cannot be masked there.

    Parameters
    ----------
    vlm : VLM
    tensors : dict
        The processor's output for the prompt.
    windows : bool
        Whether local layers attend within their window; False in controls.

    Attributes
    ----------
    attended : list of Attended or None
        Of each layer in the last forward pass; None for layers that hold a state.
    """

    vlm: Any
    tensors: dict
    windows: bool = True

    def __post_init__(self) -> None:
        self.model = self.vlm.model
        self.decoder = self.model.get_decoder()
        self.heads = self.decoder.config.num_attention_heads
        self.attended: list[Attended | None] = []
        self.given = handed(self.model, self.tensors)
        self.size = self.given["inputs_embeds"].shape[1]
        position = self.given.get("position_ids")
        if position is None:
            position = torch.arange(self.size)[None]
        elif position.dim() == 3:
            position = position[-3:, 0]  # after the text's own, where there are four
        if hasattr(self.decoder.rotary_emb, "mrope_section"):
            position = position.expand(3, -1)
        self.position = position

    @property
    def embeds(self) -> Tensor:
        """Input embeddings (S, D) of the prompt, merged by Hugging Face."""
        return self.given["inputs_embeds"][0]

    def everything(self) -> list[Tensor]:
        return [torch.ones(self.size, dtype=torch.bool)] * len(self.decoder.layers)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor([tokens], dtype=torch.long))

    def __call__(
        self,
        alive: list[Tensor] | None = None,
        tokens: Sequence[int] = TOKENS,
        numbered: list[Tensor | None] | None = None,
        read: list[Tensor] | None = None,
        chosen: list[Tensor] | None = None,
        bias: Tensor | float = 0.0,
    ) -> Tensor:
        """Logits (1 + len(tokens), V): after the prompt, then after each token.

        Parameters
        ----------
        alive : list of Tensor, bool, (S,), optional
            Per layer the rows of the prompt that exist there; all by default.
        numbered : list of Tensor, bool, (S,), optional
            Per layer the rows that count in rotary ids; the family's own ids by default.
        read : list of Tensor, bool, (H, S), optional
            Per layer the prompt slots that the answer's tokens see, by head.
        chosen : list of Tensor, bool, (S,) or (S, S), optional
            Per layer the prompt slots that the prompt's rows see.
        bias : Tensor, (S,), optional
            Added to the logits of each key of the prompt.
        """
        s, alive = self.size, alive or self.everything()

        def plan(layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            ids = self.ids(len(tokens), None if numbered is None else numbered[layer])
            visible, rows = self.sees(layer, ids, alive[layer])
            if chosen is not None:
                visible[:s, :s] &= chosen[layer]
            visible = visible.expand(self.heads, -1, -1).clone()
            if read is not None:
                visible[:, s:, :s] &= repeated(read[layer], self.heads)[:, None]
            mask = torch.zeros(visible.shape)
            mask[..., :s] += bias
            return hidden, ids, mask.masked_fill(~visible, -torch.inf), rows

        return self.run(self.prompt(tokens), plan)[-len(tokens) - 1 :]

    def dropping(
        self, rule: Rule, policy: str = "keep", tokens: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits (1 + len(tokens), V), and per layer the rows (S,) of the prompt that are left.

        ``rule`` is called before every layer; with the ``policy`` "compact" the rows that it
        leaves are renumbered.
        """
        left: list[Tensor] = []

        def through(layer: int, alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            ids = self.ids(len(tokens), alive if policy == "compact" else None)
            visible, rows = self.sees(layer, ids, alive)
            return ids, torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None], rows

        def plan(layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            alive = left[-1] if left else torch.ones(self.size, dtype=torch.bool)
            rows = alive.nonzero().flatten()

            def ahead() -> Attended:
                return self.layer(layer, hidden, *through(layer, alive))[1].of(rows)

            last = self.attended[-1].of(rows) if layer else None
            at = Before(layer, rows, hidden[0, rows], last, ahead)
            if (stays := rule(at)) is not None:
                alive = torch.zeros(self.size, dtype=torch.bool)
                alive[rows[stays]] = True
            left.append(alive)
            return hidden.index_copy(1, rows, at.hidden[None]), *through(layer, alive)

        return self.run(self.prompt(tokens), plan)[-len(tokens) - 1 :], left

    def feed(self, tokens: Sequence[int], past: list[Past], first: int | list[int]) -> Tensor:
        """Logits (T, V) after each of ``tokens``, which follow the slots of ``past``.

        ``first`` is the rotary id of the first of them, of each layer where they differ.
        """
        t = len(tokens)
        first = [first] * len(past) if isinstance(first, int) else first

        def plan(layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
            _, _, order, valid, bias = past[layer]
            ids = torch.arange(first[layer], first[layer] + t)
            seen = valid[:, None] & self.near(layer, ids, order)
            bias = bias[:, None] if isinstance(bias, Tensor) else torch.zeros(())
            own = self.near(layer, ids, ids) & torch.ones(t, t, dtype=torch.bool).tril()
            own = torch.zeros(t, t).masked_fill(~own, -torch.inf).expand(len(seen), -1, -1)
            mask = torch.cat([torch.where(seen, bias, -torch.inf), own], -1)
            return hidden, ids.expand(len(self.position), -1), repeated(mask, self.heads), None

        return self.run(self.embed(tokens), plan, past)

    def prompt(self, tokens: Sequence[int]) -> Tensor:
        return torch.cat([self.given["inputs_embeds"], self.embed(tokens)], 1)

    @torch.no_grad()
    def run(self, hidden: Tensor, plan: Plan, past: list[Past] | None = None) -> Tensor:
        """Logits (T, V) of the rows ``hidden`` (1, T, D)."""
        self.attended = []
        deep = (self.given.get("deepstack_visual_embeds") or []) if past is None else []
        with attending(self.model):
            for index in range(len(self.decoder.layers)):
                hidden, *how = plan(index, hidden)
                before = None if past is None else past[index][:2]
                hidden, attended = self.layer(index, hidden, *how, before)
                self.attended.append(attended)
                if index < len(deep):
                    where = self.given["visual_pos_masks"][0].nonzero().flatten()
                    hidden[0, where] += deep[index]
        return self.model.get_output_embeddings()(self.vlm.adapter.norm()(hidden))[0]

    def layer(
        self,
        index: int,
        hidden: Tensor,
        ids: Tensor,
        mask: Tensor,
        rows: Tensor | None,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Attended | None]:
        """States after a layer, and what it attended with."""
        attended: list[Attended] = []
        state = index in self.vlm.adapter.state_layers
        entering = rows if state else torch.ones(hidden.shape[1], dtype=torch.bool)
        output = self.decoder.layers[index](
            hidden[:, entering],
            attention_mask=None if state else mask[None],
            position_embeddings=self.tables(hidden, ids, index),
            position_ids=ids if len(ids) == 1 else None,
            **({} if state else {"call": (past, attended)}),
        )
        hidden = hidden.clone()
        hidden[:, entering] = output[0] if isinstance(output, tuple) else output
        return hidden, None if state else attended[0]

    def sees(self, layer: int, ids: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Bool (S + n, S + n): what each row attends to in a layer; and the rows that exist."""
        s, total = self.size, ids.shape[1]
        visible = torch.ones(total, total, dtype=torch.bool).tril()
        if self.vlm.adapter.prefix_lm:
            visible[:s, :s] = True
        if "token_type_ids" in self.tensors:
            here = self.tensors["token_type_ids"][0] == 1
            edge = here & ~torch.cat([torch.zeros(1, dtype=torch.bool), here[:-1]])
            block = torch.where(here, edge.cumsum(0), -torch.arange(s))
            visible[:s, :s] |= block[:, None] == block
        rows = torch.cat([alive, torch.ones(total - s, dtype=torch.bool)])
        return visible & self.near(layer, ids[0], ids[0]) & rows, rows

    def near(self, layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Which ``keys`` are in the window of each of ``rows``, by their rotary ids in a layer."""
        config = self.decoder.config
        kinds = getattr(config, "layer_types", None)
        local = self.windows and kinds and kinds[layer] == "sliding_attention"
        return keys[..., None, :] > rows[:, None] - (config.sliding_window if local else 1 << 40)

    def ids(self, n: int, numbered: Tensor | None) -> Tensor:
        """Rotary ids (P, S + n)."""
        position = self.position
        if numbered is not None and not bool(numbered.all()):
            of = self.tensors["input_ids"][0]
            position = closed(position, of.where(self.vlm.adapter.visual(of), -1), numbered)
        # After the rows and columns of a video, not after its times.
        answer = int(position[-2:].max()) + 1 + torch.arange(n)
        return torch.cat([position, answer.expand(len(position), -1)], 1)

    def tables(self, hidden, position, layer):
        decoder = self.decoder
        position = position if len(position) == 1 else position[:, None]
        if decoder.config.model_type == "gemma3_text":
            return decoder.rotary_emb(hidden, position, decoder.config.layer_types[layer])
        return decoder.rotary_emb(hidden, position)
