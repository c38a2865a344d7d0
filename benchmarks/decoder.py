"""Measure cache methods on a decoder that others trained: ``python benchmarks/decoder.py FOLDER``.

``FOLDER`` is a text model as ``save_pretrained`` writes it, such as the one that
``benchmarks/pocket/parts.py`` makes of Gemma 3 270M. It becomes the language model of a LLaVA whose
tower is not used. Each document is text of the Python manual (``pydoc_data.topics``). Its beginning
enters as visual tokens, because recipes compress prompts with visual tokens alone; the last tokens
are text. The text that follows is then read in one forward pass over the compressed cache.

=========  =====================================================================================
``kl``     KL divergence of the next token's distribution from that of the full model, mean
``top1``   fraction of positions at which both rank the same token first
``nll``    negative log-likelihood of the text's own next token, mean
``bytes``  keys and values that are held, as a fraction of the full cache
=========  =====================================================================================
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import kv
import torch
import transformers
from texts import compared, manual
from torch import Tensor

from vlmfast import VLM
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.engine.attention import switched
from vlmfast.engine.sequence import Sequence

RECIPES = (
    "none",
    "snapkv:0.5",
    "zipvl",
    "zipvl:kv=none",
    "zipvl:dense_above=0",
    "zipvl:kv=none,rows=all",
    "zipvl:kv=none,tau=0.999",
    "zipvl:kv=none,tau=0.9999",
)
AFTER = 24  # tokens of a prompt that are text


def opened(folder: Path) -> tuple[VLM, Any]:
    """A LLaVA whose language model is the one in ``folder``."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor
    from transformers import LlavaForConditionalGeneration as Llava

    decoder = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    tokens.add_special_tokens({"additional_special_tokens": ["<unused0>"]})
    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    config = LlavaConfig(
        text_config=decoder.config,
        vision_config=tower,
        image_token_id=tokens.convert_tokens_to_ids("<unused0>"),
    )
    with torch.device("meta"):
        model = Llava(config).eval()
    model.model.language_model, model.lm_head = decoder.model, decoder.lm_head
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        part.to_empty(device="cpu").requires_grad_(False)
    edge = tower["image_size"]
    images = CLIPImageProcessor(
        size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge}
    )
    processor = LlavaProcessor(image_processor=images, tokenizer=tokens, image_token="<unused0>")
    return VLM(model, processor), tokens


def documents(tokens: Any, number: int, length: int) -> list[list[int]]:
    """Ids of ``number`` documents of ``length``, each of topics that follow one another."""
    ids = manual(tokens)
    step = len(ids) // number
    if step < length - 1:
        raise SystemExit(f"the manual has {len(ids)} tokens, too few for {number} x {length}")
    return [[tokens.bos_token_id, *ids[i * step : i * step + length - 1]] for i in range(number)]


def prefill(vlm: VLM, recipe: Recipe, ids: list[int], room: int) -> tuple[Sequence, Tensor]:
    """A sequence after its prefill, the beginning as visual tokens, and the logits (1, V)."""
    asked = kv.prompt(vlm, vlm.adapter.embed(torch.tensor(ids)), 1, len(ids) - AFTER)
    return kv.prefilled(vlm, recipe, asked, room)


@torch.inference_mode()
def read(vlm: VLM, recipe: str, ids: list[int], prefix: int) -> tuple[Tensor, int]:
    """Logits (T, V) after the prefix and each later token but the last, and bytes of the cache."""
    sequence, first = prefill(vlm, Recipe.parse(recipe), ids[:prefix], len(ids) - prefix)
    group = sequence.group
    held = group.cache.held_bytes()
    with switched(vlm.model):
        rest = group.verify([Tree.chain(ids[prefix:-1])]).logits[0]
    group.release()
    return torch.cat([first, rest]).float(), held


def measured(vlm: VLM, recipe: str, texts: list[list[int]], prefix: int, full: list) -> dict:
    """One line of the table. ``full`` is filled under ``none`` and read by all others."""
    rows: list[dict[str, float]] = []
    for number, ids in enumerate(texts):
        logits, held = read(vlm, recipe, ids, prefix)
        if recipe == "none":
            full.append((logits, held))
        wanted, whole = full[number]
        rows.append(compared(wanted, logits, ids[prefix:]) | {"bytes": held / whole})
    return {key: fmean(row[key] for row in rows) for key in rows[0]}


def main(argv: list[str]) -> int:
    parser = harness.parser(__doc__, out=None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--follow", type=int, default=256, help="tokens read after the prefix")
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    vlm, tokens = opened(args.folder)
    texts = documents(tokens, args.documents, args.prefix + args.follow)
    full: list = []
    found = {recipe: measured(vlm, recipe, texts, args.prefix, full) for recipe in RECIPES}
    print(harness.shown(found, "kl", "top1", "nll", "bytes"))
    if args.out:
        report = harness.begin("decoder.py", argv, args) | {
            "threads": torch.get_num_threads(),
            "model": vlm.model.config.get_text_config().model_type,
            "weights": vlm.adapter.depth,
            "prompts": [hashlib.sha256(str(ids).encode()).hexdigest()[:16] for ids in texts],
            "lines": [{"recipe": recipe, **line} for recipe, line in found.items()],
        }
        harness.written(args.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
