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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
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
from vlmfast.engine.cache import KVCache
from vlmfast.engine.compress import Compression
from vlmfast.engine.decode import RowGroup
from vlmfast.engine.engine import Engine
from vlmfast.engine.opening import open_sequence
from vlmfast.engine.prefill import Inputs, rows_of
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.stats import Stats
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


# --- one text ------------------------------------------------------------------------------------


class Prefilled:
    """A prefix that was prefilled once, and what cache stages read of each layer."""

    def __init__(self, vlm: VLM, text: Text) -> None:
        self.vlm, self.adapter, self.text = vlm, vlm.adapter, text
        with recorded() as self.layers:
            self.full, self.before = self.prefill(Recipe.parse("snapkv:1"))

    def prefill(self, recipe: Recipe) -> tuple[Sequence, Tensor]:
        """The sequence after its own prefill, and the logits (1, V) after the prefix."""
        return prefill(self.vlm, recipe, self.text.ids[: self.text.prefix], texts.ROOM)

    def compressed(self, recipe: Recipe) -> RowGroup:
        """The prefix as if it had been prefilled with a recipe, which must not change prefill."""
        adapter, prefix = self.adapter, self.text.prefix
        first = self.layers[0][0]
        windows = [layer.window for layer in first.cache.layers]
        cache = KVCache(adapter.depth, adapter.pool, windows)
        context = replace(first, cache=cache, notes={})
        compression = Compression.of(adapter, recipe, context, cache, Stats())
        assert compression is not None
        for layer, (_, query, key, value, scaling) in enumerate(self.layers):
            cache.update(key, value, layer)
            compression.after(layer, query, key, value, scaling)
        compression.finish()
        cache.freeze(texts.ROOM, prefix, base=0)
        return RowGroup(adapter, cache, rows_of(torch.tensor([[prefix]])), [self.full])

    def logits(self, group: RowGroup) -> list[Tensor]:
        """Logits before each token that is scored, by question; the cache stays as it is."""
        found = []
        for ids, count in self.text.chains():
            found.append(group.verify([Tree.chain(ids)]).logits[0, -count:])
        return found if self.text.questions else [torch.cat([self.before, found[0]])]


@contextmanager
def recorded() -> Iterator[list[tuple[Any, ...]]]:
    """Inside the block, collects the context, queries, keys and values of each layer."""
    plain, layers = Compression.after, []

    def after(self: Compression, layer: int, *given: Any) -> None:
        *tensors, scaling = given
        layers.append((self.context, *(x.clone() for x in tensors), scaling))
        plain(self, layer, *given)

    Compression.after = after  # type: ignore[method-assign]
    try:
        yield layers
    finally:
        Compression.after = plain  # type: ignore[method-assign]


# --- measuring -----------------------------------------------------------------------------------


class Run(texts.Run):
    """vlmfast's side."""

    def __init__(self, vlm: VLM, log: Log) -> None:
        super().__init__(log)
        self.vlm, self.methods = vlm, METHODS
        self.prefilled: Prefilled | None = None

    def opened(self, text: Text) -> Prefilled:
        """The prefix of a text, prefilled once."""
        if self.prefilled is None or self.prefilled.text != text:
            if self.prefilled is not None:
                self.prefilled.full.group.release()
            self.prefilled = Prefilled(self.vlm, text)
        return self.prefilled

    @torch.no_grad()
    def logits(self, text: Text, method: str, keep: float) -> tuple[list[int], list[Tensor]]:
        with switched(self.vlm.model):
            prefilled = self.opened(text)
            group = prefilled.full.group
            if method != "none":
                group = prefilled.compressed(recipe_of(method, keep, self.vlm.adapter))
            assert group is not None
            found = group.cache.lengths(), prefilled.logits(group)
        if method != "none":
            group.release()
        return found

    def prefill(self, text: Text, method: str, keep: float) -> Callable[[], tuple[list[int], int]]:
        recipe = Recipe() if method == "none" else recipe_of(method, keep, self.vlm.adapter)

        @torch.no_grad()
        def run() -> tuple[list[int], int]:
            sequence, _ = prefill(self.vlm, recipe, text.ids[: text.prefix], texts.ROOM)
            found = sequence.group.cache.lengths(), sequence.group.cache.held_bytes()
            sequence.group.release()
            return found

        return run

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
    torch.set_num_threads(args.threads)
    settings = texts.settings(args, transformers.__version__)
    log = Log(args.logs / texts.VLMFAST, settings)
    vlm, tokens = opened(args.folder)
    run = Run(vlm, log)
    run.over(tokens, args)
    read = texts.read_texts(tokens, args.documents, args.follow)
    for text in [text for text in read if text.prefix == min(args.documents)][: args.drafts]:
        run.drafts(text, args.new_tokens)
    if not args.out:
        return 0
    # Its options are those that it shares.
    shared = ("documents", "passkeys", "follow", "threads", "logs")
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
