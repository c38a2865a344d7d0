"""A stored Llama decoder in the engine, for golden files that contain its weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from support.engine.driven import Driven
from support.engine.prompts import TEXT, Inputs, Prompt
from support.golden.case import Reader
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.models.base import Adapter


def llama(layers: int, vocab: int = 64) -> LlamaForCausalLM:
    """The shape of the stored decoders: width 64, 4 heads of 16."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        head_dim=16,
        vocab_size=vocab,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
    )
    return LlamaForCausalLM(config).eval()


def image_layout(total: int, start: int, n: int) -> TokenLayout:
    """Layout of ``total`` rows of which ``n`` from ``start`` on show an image."""
    order = torch.arange(total)
    layout = TokenLayout.text(order, order[None])
    kind = layout.kind.clone()
    kind[start : start + n] = int(Kind.IMAGE)
    return layout.replace(kind=kind)


class Decoder(Adapter):
    """A language model of its own, without a vision tower."""

    def tower(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def projector(self) -> nn.Module:
        return self.model.get_input_embeddings()


@torch.no_grad()
def decoder_run(
    data: Reader, stage: Stage, start: int, n: int, steps: Tensor
) -> tuple[Driven, Tensor]:
    """Prefill of the stored prompt under ``stage``; the run, and its last states (1, rows, D).

    ``steps`` (T, D) are embeddings that `Run.next` takes by their row number.
    """
    state = data.under("model.")
    layers = 1 + max(int(k.split(".")[1]) for k in state if k.startswith("layers."))
    model = llama(layers, vocab=state["embed_tokens.weight"].shape[0])
    missing, unexpected = model.model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    model.lm_head = torch.nn.Identity()  # so that logits are hidden states
    model.model.embed_tokens.weight[: len(steps)] = steps
    model.set_attn_implementation(TEXT)
    adapter = Decoder(model, SimpleNamespace(image_processor=True))
    total = data["inputs_embeds"].shape[1]
    prompt = Prompt(data["inputs_embeds"][0], image_layout(total, start, n), total, total)
    run = Driven(adapter, Inputs({}), Recipe.of(stage), begin=0.0)
    run.trace.begin(prompt.layout.select(prompt.layout.visual), layers)
    states: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, args, out: states.append(out))
    run.start_from(prompt, len(steps))
    hook.remove()
    return run, states[-1]
