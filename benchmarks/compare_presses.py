"""Compare cache methods with kvpress on a decoder: ``python benchmarks/compare_presses.py FOLDER``.

``FOLDER`` is Gemma 3 270M, made by ``benchmarks/pocket/parts.py``. Prefixes of 1,000 to 8,000
tokens of the Python manual are compressed by the methods of vlmfast here, and by those of kvpress
in ``presses.py``, which ``--kvpress`` runs with the Python of ``make kvpress``. The
tokens that follow are read in one forward pass over the compressed cache.

============  ==================================================================================
``kl``        KL divergence of the next token's distribution from that of the full model, mean
``top1``      fraction of positions at which both rank the same token first
``nll``       negative log-likelihood of the text's own next token, mean
``slots``     slots that are held in the layers without a window, as a fraction of all
``passkeys``  fraction of ten passkeys, at ten depths of a prefix, that are answered. They are asked
              for after the compression
============  ==================================================================================

Both sides compress the layers without a sliding window alone, as kvpress does for Gemma 3, and keep
equally many slots. ``all layers`` compresses the others too, which is what vlmfast does by default.
Positions of the text after the prefix continue.
Drafters continue prefixes greedily. Rows are logged in ``--logs`` and not measured again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import harness
import texts
import torch
import transformers
from decoder import opened, prefill
from texts import Log, Text
from torch import Tensor

from vlmfast import VLM
from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.protocols import CacheStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnRequest, ColumnStats
from vlmfast.core.tree import Tree
from vlmfast.engine.attention import switched
from vlmfast.engine.engine import Engine
from vlmfast.engine.opening import open_sequence
from vlmfast.engine.prefill import Inputs
from vlmfast.engine.sequence import Sequence
from vlmfast.models.base import Adapter

ALL = ", all layers"
METHODS = (
    "snapkv",
    "snapkv:window=64,kernel=5,pool=avg",
    "pyramidkv",
    texts.PYRAMID,
    "streamingllm",
    "h2o:decode=false",
    "h2o:decode=false,recent=0",
    "h2o:decode=false,recent=0,average=true",
    "cake",
    "vlcache",
    "lookm",
    f"snapkv{ALL}",
)
DRAFTERS = ("draft-ngram", "draft-recycle", "draft-layerskip", "draft-self")


# --- methods -------------------------------------------------------------------------------------


def wide_only(stage: Stage, adapter: Adapter) -> Stage:
    """A stage that compresses the layers without a window alone."""
    kind: Any = type(stage)
    wide = [layer for layer, window in enumerate(adapter.windows) if window is None]

    def text_stats(self: Any, depth: int) -> dict[int, ColumnRequest]:
        wanted = kind.text_stats(self, depth)
        return {layer: request for layer, request in wanted.items() if layer in wide}

    def compress(
        self: Any, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        if layer not in wide:
            return kv
        return kind.compress(self, context, layer, kv, stats)

    def finish(self: Any, context: PrefillContext, cache: list[KV]) -> list[KV]:
        found = kind.finish(self, context, [cache[layer] for layer in wide])
        by = dict(zip(wide, found, strict=True))
        return [by.get(layer, kv) for layer, kv in enumerate(cache)]

    own: dict[str, Any] = {"text_stats": text_stats, "compress": compress}
    if kind.finish is not CacheStage.finish:
        own["finish"] = finish
    made = type(kind)(kind.__name__, (kind,), own)
    return made(**{f.name: getattr(stage, f.name) for f in fields(kind)})


def recipe_of(method: str, keep: float, adapter: Adapter) -> Recipe:
    """The recipe of an entry of `METHODS`."""
    text = method.removesuffix(ALL)
    name, _, given = text.partition(":")
    recipe = Recipe.parse(f"{name}:{','.join(filter(None, (f'keep={keep}', given)))}")
    if method.endswith(ALL):
        return recipe
    return Recipe(tuple(wide_only(stage, adapter) for stage in recipe))


# --- measuring -----------------------------------------------------------------------------------


class Run(texts.Run):
    """vlmfast's side."""

    def __init__(self, vlm: VLM, log: Log) -> None:
        super().__init__(log)
        self.vlm, self.methods = vlm, METHODS

    @torch.no_grad()
    def prefill(self, text: Text, method: str, keep: float) -> tuple[Sequence, Tensor]:
        recipe = Recipe() if method == "none" else recipe_of(method, keep, self.vlm.adapter)
        return prefill(self.vlm, recipe, text.ids[: text.prefix], texts.ROOM)

    def size(self, cache: tuple[Sequence, Tensor]) -> tuple[list[int], int]:
        held = cache[0].group.cache
        return held.lengths(), held.held_bytes()

    @torch.no_grad()
    def logits(self, text: Text, cache: tuple[Sequence, Tensor]) -> list[Tensor]:
        (sequence, before), found = cache, []
        with switched(self.vlm.model):
            for ids, count in text.chains():
                found.append(sequence.group.verify([Tree.chain(ids)]).logits[0, -count:])
        return found if text.questions else [torch.cat([before, found[0]])]

    def drafts(self, text: Text, new_tokens: int) -> None:
        """Log accepted tokens and decode time of greedy answers, without and with drafters."""
        key, every = {"part": "drafts", "prompt": text.digest, "keep": 1}, ("none", *DRAFTERS)
        missing = [method for method in every if self.log.missing(**key, method=method)]
        plain = None
        for method in dict.fromkeys([*every[: bool(missing)], *missing]):
            done = self._generated(text, Recipe.parse(method), new_tokens)
            stats, tokens = done.stats, done.tokens
            plain = plain or tokens
            if method in missing:
                self.log.add(
                    **key,
                    method=method,
                    prefix=text.prefix,
                    tokens=len(tokens),
                    rounds=stats.rounds if method != "none" else len(tokens) - 1,
                    accepted=stats.accepted,
                    drafted=stats.drafted,
                    wall=stats.time_total_s - stats.ttft_s,
                    same=tokens == plain,
                )

    def _generated(self, text: Text, recipe: Recipe, new_tokens: int) -> Sequence:
        ids = torch.tensor([text.ids[: text.prefix]])
        arguments = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
        sequence = open_sequence(
            self.vlm.adapter,
            Inputs({"input_ids": ids}),
            recipe,
            arguments,
            begin=time.perf_counter(),
        )
        return Engine(self.vlm.adapter).submit(sequence, lambda done: done).result()


# --- the command ---------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    parser = texts.parser(__doc__)
    parser.add_argument("--kvpress", type=Path, default=Path(".venv-presses/bin/python"))
    parser.add_argument("--drafts", type=int, default=10, help="documents that drafters continue")
    parser.add_argument("--new-tokens", type=int, default=64, help="of drafters' answers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv, argparse.Namespace(device="cpu"))
    torch.set_num_threads(1)
    settings = texts.settings(args, transformers.__version__)
    log = Log(args.logs / texts.VLMFAST, settings)
    vlm, tokens = opened(args.folder)
    run = Run(vlm, log)
    run.over(tokens, args)
    read = texts.read_texts(tokens, args.documents)
    for text in [text for text in read if text.prefix == min(args.documents)][: args.drafts]:
        run.drafts(text, args.new_tokens)
    if not args.out:
        return 0
    # Its options are those that it shares.
    shared = ("documents", "passkeys", "logs")
    options = [f"--{name}={_text(getattr(args, name))}" for name in shared]
    options += ["--cost", *map(str, args.cost)]
    script = Path(__file__).with_name("presses.py")
    subprocess.run([args.kvpress, script, args.folder, *options], check=True)
    every = [*read, *texts.passkey_texts(tokens, args.passkeys)]
    report = {
        **harness.begin("compare_presses.py", argv, args),
        "model": vlm.model.config.get_text_config().model_type,
        **texts.joined(
            *(texts.read_log(args.logs / n) for n in (texts.VLMFAST, texts.KVPRESS)), every
        ),
    }
    harness.written(args.out, report)
    return 0


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{prefix}:{count}" for prefix, count in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
