"""A dense reference of a prefill with drops: dropped keys are masked instead of removed.

Written without the engine: a plain loop over the decoder's layers on the full sequence (prompt and
generated tokens in one forward pass), one additive mask per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

TOKENS = [40, 71, 33, 55, 90, 46, 63, 101]  # fed one by one after the prompt


def answer_logits(vlm, run, tokens: list[int]) -> Tensor:
    """The engine's logits (1 + len(tokens), V): after the prompt, then after each given token."""
    from vlmfast.engine.attention import switched

    with torch.no_grad(), switched(vlm.model):
        rows = [run.start(len(tokens))]
        rows += [run.next(torch.tensor([[token]])) for token in tokens]
    return torch.cat(rows)


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


def entered(vlm, run) -> list[Tensor]:
    """Per layer the rows of the full prompt that entered it."""
    visual = vlm.adapter.visual(run.inputs.tensors["input_ids"][0])
    alive = []
    for layer in range(vlm.adapter.depth):
        rows = ~visual
        rows[run.trace.layout.order[run.trace.depth > layer]] = True
        alive.append(rows)
    return alive


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
    """

    vlm: Any
    tensors: dict
    windows: bool = True
    attention: ClassVar[str] = "eager"

    def __post_init__(self) -> None:
        self.model = self.vlm.model
        self.given = handed(self.model, self.tensors)
        self.size = self.given["inputs_embeds"].shape[1]
        position = self.given.get("position_ids")
        if position is None:
            position = torch.arange(self.size)[None]
        elif position.dim() == 3:
            position = position[-3:, 0]  # after the text's own, where there are four
        if hasattr(self.model.get_decoder().rotary_emb, "mrope_section"):
            position = position.expand(3, -1)
        self.position = position

    def everything(self) -> list[Tensor]:
        layers = len(self.model.get_decoder().layers)
        return [torch.ones(self.size, dtype=torch.bool)] * layers

    def embed(self, tokens: list[int]) -> Tensor:
        return self.model.get_input_embeddings()(torch.tensor([tokens], dtype=torch.long))

    @torch.no_grad()
    def __call__(
        self,
        alive: list[Tensor] | None = None,
        tokens: list[int] = TOKENS,
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
        n, s, alive = len(tokens), self.size, alive or self.everything()
        heads = self.model.get_decoder().config.num_attention_heads
        more, masks, positions = torch.ones(n, dtype=torch.bool), [], []
        rows = [torch.cat([of, more]) for of in alive]
        for index, of in enumerate(rows):
            ids = self.ids(n, None if numbered is None else numbered[index])
            visible = self.sees(n) & self.near(index, ids[0], ids[0])
            visible &= of | torch.eye(len(of), dtype=torch.bool)
            if chosen is not None:
                visible[:s, :s] &= chosen[index]
            visible = visible.expand(heads, -1, -1).clone()
            if read is not None:
                groups = heads // len(read[index])
                visible[:, s:, :s] &= read[index].repeat_interleave(groups, 0)[:, None]
            mask = torch.zeros(visible.shape)
            mask[..., :s] += bias
            masks.append(mask.masked_fill(~visible, -torch.inf))
            positions.append(ids)
        hidden = torch.cat([self.given["inputs_embeds"], self.embed(tokens)], 1)
        return self.run(hidden, positions, masks, rows)[-n - 1 :]

    @torch.no_grad()
    def run(self, hidden, positions, masks, rows=None, past=None) -> Tensor:
        """Logits (T, V) of the rows ``hidden`` (1, T, D); masks (H, T, N) are added."""
        decoder = self.model.get_decoder()
        before = decoder.config._attn_implementation
        decoder.config._attn_implementation = self.attention
        try:
            for index, layer in enumerate(decoder.layers):
                state, position = index in self.vlm.adapter.state_layers, positions[index]
                entering = rows[index] if state else torch.ones(hidden.shape[1], dtype=torch.bool)
                output = layer(
                    hidden[:, entering],
                    attention_mask=None if state else masks[index][None],
                    position_embeddings=self.tables(hidden, position, index),
                    position_ids=position if len(position) == 1 else None,
                    **({} if past is None else {"past_key_values": past[index]}),
                )
                hidden = hidden.clone()
                hidden[:, entering] = output[0] if isinstance(output, tuple) else output
                deep = self.given.get("deepstack_visual_embeds") or []
                if index < len(deep):
                    where = self.given["visual_pos_masks"][0].nonzero().flatten()
                    hidden[0, where] += deep[index]
            return self.model.get_output_embeddings()(self.vlm.adapter.norm()(hidden))[0]
        finally:
            decoder.config._attn_implementation = before

    def sees(self, n: int) -> Tensor:
        """Bool (S + n, S + n): what each row attends to while nothing is dropped."""
        visible = torch.ones(self.size + n, self.size + n, dtype=torch.bool).tril()
        if self.vlm.adapter.prefix_lm:
            visible[: self.size, : self.size] = True
        if "token_type_ids" in self.tensors:
            here = self.tensors["token_type_ids"][0] == 1
            edge = here & ~torch.cat([torch.zeros(1, dtype=torch.bool), here[:-1]])
            block = torch.where(here, edge.cumsum(0), -torch.arange(self.size))
            visible[: self.size, : self.size] |= block[:, None] == block
        return visible

    def near(self, layer: int, rows: Tensor, keys: Tensor) -> Tensor:
        """Which ``keys`` are in the window of each of ``rows``, by their rotary ids in a layer."""
        config = self.model.get_decoder().config
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
        decoder = self.model.get_decoder()
        position = position if len(position) == 1 else position[:, None]
        if decoder.config.model_type == "gemma3_text":
            return decoder.rotary_emb(hidden, position, decoder.config.layer_types[layer])
        return decoder.rotary_emb(hidden, position)
