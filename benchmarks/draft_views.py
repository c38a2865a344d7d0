"""Decode long prompts with `draft-self`: ``python benchmarks/speculation.py views``.

A language model of Qwen2-0.5B's shape with random weights (as in `kv.py`) prefills one prompt of
random embeddings and decodes copies of its cache: 32 requests of 2,900 tokens, and one request of
32,768. With random weights drafts are not accepted, so acceptance is simulated: the drafter runs
its forward passes over the view, and a number of its tokens is then set to the plain answer's.

================  =================================================================================
``recorded``      each depth accepts as often as on `tiny`, from the result of
                  ``python benchmarks/speculation.py --accepted``
``0.8``           each depth accepts with this probability
================  =================================================================================

``ratio`` is the time of plain decoding over that of drafted decoding, for all requests from their
first token to their last.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import harness
import kv
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from vlmfast import VLM
from vlmfast.core.drafting import Budget, Proposal, Target
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_self import Chain, DraftSelf
from vlmfast.engine.attention import switched
from vlmfast.engine.decode import Batch, RowGroup
from vlmfast.engine.rounds import Rounds
from vlmfast.engine.sampling import Sampler
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.speculation import Speculation
from vlmfast.engine.stats import Stats, clock
from vlmfast.eval.bench import rotated

VIEW, KEEP, STEPS = "topk", 0.1, 4
LONG = f"draft-self:view={VIEW},keep={KEEP},steps=8,confidence=0"  # whose acceptance is recorded
RECORDED, ACCEPTED = "recorded", harness.RESULTS / "speculation-accepted-tiny.json"


# --- simulated acceptance ------------------------------------------------------------------------


@dataclass
class Script:
    """The answer that all requests are known to give, and how often drafts are right."""

    answer: list[int]
    rates: list[float]  # by depth; the last one also counts for all greater depths
    number: int = 0  # of the next request

    def right(self, depth: int, draw: random.Random) -> bool:
        return draw.random() < self.rates[min(depth, len(self.rates)) - 1]


@dataclass(frozen=True)
class Rehearsed(DraftSelf):
    """`draft-self` with simulated acceptance."""

    script: ClassVar[Script] = Script([], [0.0])

    def open(self, target: Target) -> Rehearsal:
        self.script.number += 1
        return Rehearsal(self, target, self.script)


class Rehearsal(Chain):
    """Runs the forward passes of a chain; its tokens are then those of the script."""

    def __init__(self, stage: DraftSelf, target: Target, script: Script) -> None:
        super().__init__(stage, target)
        self.script, self.at = script, 1
        self.draw = random.Random(script.number)

    def extend(self, done: Any) -> None:
        super().extend(done)
        self.at += len(done.emitted)

    def propose(self, root: int, budget: Budget) -> Proposal:
        tree = yield from super().propose(root, budget)
        tokens = [root]
        for depth, truth in enumerate(self.script.answer[self.at :][: tree.depth], start=1):
            right = self.script.right(depth, self.draw)
            tokens.append(truth if right else truth - 1 if truth else 1)
        return Tree.chain(tokens)


# --- decoding ------------------------------------------------------------------------------------


@dataclass
class Prompted:
    """A prefilled prompt, of which requests are copies."""

    vlm: VLM
    sequence: Sequence
    logits: torch.Tensor

    def request(self, new_tokens: int, drafted: bool) -> Sequence:
        """A copy whose answer has ``new_tokens`` tokens, the first of which is known."""
        group = kv.cloned(self.sequence.group, new_tokens)
        (sequence,) = group.rows
        sequence.group, sequence.most, sequence.stats = group, new_tokens, Stats()
        config = GenerationConfig(max_length=1 + new_tokens, do_sample=False)
        ids = self.sequence.ids.clone()
        sequence.sampler = Sampler(ids, LogitsProcessorList(), StoppingCriteriaList(), config)
        sequence.__post_init__()
        if drafted:
            stages = [stage for stage in sequence.recipe if isinstance(stage, DraftSelf)]
            sequence.drafts = Speculation(self.vlm.adapter, sequence, stages)
        return sequence


@torch.no_grad()
def prefilled(vlm: VLM, stage: DraftSelf, tokens: int) -> Prompted:
    """One prompt, prefilled under the drafter's recipe: plain requests read the same cache."""
    asked = kv.noise(vlm, tokens)
    return Prompted(vlm, *kv.prefilled(vlm, Recipe((stage,)), asked, bounded=False))


@dataclass
class Decoded:
    """The answers of all requests, the seconds from their first token on, and their statistics."""

    answers: list[list[int]]
    seconds: float
    stats: list[Stats]


@torch.no_grad()
def decoded(prompted: Prompted, requests: int, new_tokens: int, drafted: bool) -> Decoded:
    adapter = prompted.vlm.adapter
    rounds, batch = Rounds(adapter), Batch(requests)
    with switched(prompted.vlm.model):
        rows = [prompted.request(new_tokens, drafted) for _ in range(requests)]
        for row in rows:
            rounds.first(row, prompted.logits)
            batch.join(row.group)
            row.group = None
        begin = clock(adapter.device)
        while batch.rows:
            rounds.run([batch])
            for row in [row for row in batch.rows if row.done]:
                if row.error is not None:
                    raise row.error
                batch.leave(row)
        seconds = clock(adapter.device) - begin
    return Decoded([row.tokens for row in rows], seconds, [row.stats for row in rows])


def measured(prompted: Prompted, requests: int, rates: list[float], args: Any) -> dict[str, Any]:
    """Pairs of plain and drafted decoding with one acceptance."""
    found: dict[str, Any] = {"wall": [], "identical": 0, "pairs": args.pairs}
    rounds = drafted_tokens = emitted = 0
    for number in range(args.pairs):
        pair: dict[bool, Decoded] = {}
        for drafted in rotated((False, True), number):
            script = Rehearsed.script
            script.rates, script.number = rates, 1000 * number
            pair[drafted] = decoded(prompted, requests, args.new_tokens, drafted)
            gc.collect()
        found["identical"] += pair[True].answers == pair[False].answers
        found["wall"].append([pair[False].seconds, pair[True].seconds])
        rounds += sum(stats.rounds for stats in pair[True].stats)
        drafted_tokens += sum(stats.drafted for stats in pair[True].stats)
        emitted += sum(len(answer) - 1 for answer in pair[True].answers)
    same = found["identical"] == args.pairs
    return found | {
        "rates": rates,
        "emitted_per_round": emitted / rounds,
        "drafted_per_round": drafted_tokens / rounds,
        "ratio": harness.ratio(found["wall"]) if same else None,
        "step_s": sum(a for a, _ in found["wall"]) / args.pairs / (args.new_tokens - 1),
    }


def case(vlm: VLM, requests: int, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """All acceptances of one number of requests of one length."""
    stage = Rehearsed(view=VIEW, keep=KEEP, steps=STEPS, confidence=0.0)
    begin = clock(vlm.adapter.device)
    prompted = prefilled(vlm, stage, tokens)
    print(
        f"{tokens:,} tokens prefilled in {clock(vlm.adapter.device) - begin:.0f} s", file=sys.stderr
    )
    plain = decoded(prompted, 1, args.new_tokens, drafted=False)
    Rehearsed.script.answer = plain.answers[0]
    decoded(prompted, requests, min(args.new_tokens, 6), drafted=True)  # warm-up
    rows = {}
    for name in args.rates:
        rates = recorded() if name == RECORDED else [float(name)]
        rows[name] = measured(prompted, requests, rates, args)
        print(f"{requests} x {tokens:,}, {name}: {rows[name]['ratio']}", file=sys.stderr)
    about = {"requests": requests, "tokens": tokens, "layers": vlm.adapter.depth}
    return about | {"view": VIEW, "keep": KEEP, "steps": STEPS, "rows": rows}


def recorded() -> list[float]:
    """By depth, how often `tiny` accepts a draft after those before it; from a result file."""
    row = json.loads(ACCEPTED.read_text(encoding="utf-8"))["parts"][f"captions | none | {LONG}"]
    pairs = zip(row["accepted_at_depth"], row["drafted_at_depth"], strict=True)
    return [took / of for took, of in pairs if of]


# --- the command ---------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, pairs=2, new_tokens=48, layers=24, device=harness.DEVICE, threads=0, out=None
    )
    parser.prog = "speculation.py views"
    add = parser.add_argument
    add("--cases", default="32x2900,1x32768", help="requests x tokens (%(default)s)")
    add("--rates", default=f"{RECORDED},0.8,1", help="acceptances (%(default)s)")
    args = parser.parse_args(argv, argparse.Namespace(dtype="float32"))
    args.cases = [tuple(map(int, one.split("x"))) for one in args.cases.split(",")]
    args.rates = args.rates.split(",")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    report = harness.begin("speculation.py", ["views", *argv], args)
    report |= {"threads": torch.get_num_threads(), "cases": []}
    vlm = kv.load(args, args.layers)
    for requests, tokens in args.cases:
        text = vlm.model.config.get_text_config()
        text.max_position_embeddings = max(text.max_position_embeddings, tokens + args.new_tokens)
        found = case(vlm, requests, tokens, args)
        report["cases"].append(found)
        print(f"{requests} x {tokens:,} tokens, {found['layers']} layers")
        print(harness.shown(found["rows"], "emitted_per_round", "ratio", "identical", "pairs"))
        # After each case, since one may take long.
        harness.written(harness.path_of(args, "speculation", "views", args.device), report)
        gc.collect()
    return int(any(row["ratio"] is None for of in report["cases"] for row in of["rows"].values()))
