"""Compare speculative with plain decoding: ``python benchmarks/speculation.py``.

==============  ===================================================================================
tiny            the shipped model. ``captions`` of generated images; in a session, after a caption,
                a short ``second question``
qwen2-0.5b      LLaVA-1.5 on Qwen2-0.5B's shape, 576 visual tokens, random weights
llava-1.5-7b    LLaVA-1.5 on Vicuna-7B's shape, random weights created on the device; for a GPU
tiny-shape      a small LLaVA-NeXT: checks the script on any machine
==============  ===================================================================================

With random weights drafts are never accepted, so acceptance is simulated: the plain answer is
drafted again, and each position is correct with probability ``--rates``, fixed per position.
``recorded`` drafts a chain at no cost, like a lookup. ``+ layer`` drafts a tree of the size of
`draft-eagle`'s, while an untrained EAGLE layer of the model's shape runs and its trees are
discarded: it has the cost of a trained drafter.

Every pair is one question, answered plainly and with drafts in alternating order. Answers are
greedy and must be equal: exactly in float32, except for near ties in half precision
(`vlmfast.eval.bench.Referee`). Otherwise no ratio is reported. With random weights near ties are
frequent in half precision, so the answers are compared once; during the measurement one logits
processor forces both along the plain answer.

================  =================================================================================
``accepted``      accepted drafted tokens per round; ``emitted`` also counts the model's own token
``calls``         forward passes of the model after the prompt, with drafts and without (``plain``)
``draft`` ...     seconds per answer: drafters with their own prefill (``draft``), forward passes of
                  the model (``verify``), and the rest of the decode time (``host``)
``decode``        plain time over drafted time, from the first token on
``wall``          the same from RGB image to the last token, with processor, tower and prefill;
                  in a session only for the last question
================  =================================================================================

Ratios are of sums over all pairs, with the 95 % interval of a bootstrap over pairs.

Every part, a drafter under a recipe, is written as soon as it is finished. The script ends before
``--minutes`` are over, with exit code 3 if parts are missing; the same command resumes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, ClassVar

import end_to_end
import harness
import torch
from torch import Tensor

from vlmfast import VLM
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_auto import DraftAuto
from vlmfast.drafters.draft_eagle.drafter import EagleDrafter
from vlmfast.drafters.draft_eagle.module import EagleModule
from vlmfast.engine.stats import Stats, clock
from vlmfast.eval.bench import NEAR, Referee, numerics, rotated
from vlmfast.scenes.examples import CAPTION_QUESTION, EVAL_SEED_START, image_example

TINY = "tiny"
SHAPES = ("qwen2-0.5b", "llava-1.5-7b", "tiny-shape")
RECIPES = ("none", "hired:0.2", "pyramiddrop")
WORKLOADS = ("captions", "second question")
DRAFTERS = (
    "draft-ngram+draft-recycle",
    "draft-layerskip",
    "draft-self",
    "draft-eagle",
    "draft-eagle:visual=select",
    "draft-vispec",
    "draft-auto",
)
LAYER, AUTO = " + layer", "draft-auto over "
DEPTH = 4  # of simulated drafts
# Number of pairs, and maximum length of an answer.
USUAL = {TINY: (20, 64), "tiny-shape": (2, 12), "llava-1.5-7b": (5, 128), "qwen2-0.5b": (5, 64)}


# --- questions -----------------------------------------------------------------------------------


@dataclass
class Said:
    """Tokens of every answer of a dialogue; time and stats of the last one."""

    tokens: list[list[int]]
    seconds: float
    stats: Stats

    @property
    def calls(self) -> int:
        """Forward passes of the model after the prompt."""
        return self.stats.rounds if self.stats.speculation else self.stats.generated_tokens - 1


@dataclass(frozen=True)
class Dialogue:
    """An image and the questions about it; the last one is measured."""

    image: Any
    questions: tuple[str, ...]
    generation: dict[str, Any]

    def __call__(self, vlm: VLM, recipe: Recipe, **special: Any) -> Said:
        """Ask all questions; ``special`` are generation arguments for the last one."""
        *before, last = self.questions
        more = self.generation | special
        if not before:
            begin = clock(vlm.adapter.device)
            answers = [vlm.ask(last, images=self.image, recipe=recipe, **more)]
            return said(answers, clock(vlm.adapter.device) - begin)
        with vlm.session(images=self.image, recipe=recipe) as session:
            answers = [session.ask(question, **self.generation) for question in before]
            begin = clock(vlm.adapter.device)
            answers.append(session.ask(last, **more))
            return said(answers, clock(vlm.adapter.device) - begin)


def said(answers: list[Any], seconds: float) -> Said:
    return Said([answer.token_ids for answer in answers], seconds, answers[-1].stats)


def dialogues(job: Job, workload: str, count: int, first: int = 0) -> list[Dialogue]:
    if job.shape != TINY:
        return [Dialogue(job.image, (end_to_end.QUESTION,), job.generation)] * count
    found = []
    for number in range(first, first + count):
        example = image_example(EVAL_SEED_START + number)
        second = example.qa[number % len(example.qa)].question
        questions = (CAPTION_QUESTION, *([second] if workload == "second question" else ()))
        found.append(Dialogue(example.image, questions, job.generation))
    return found


# --- recorded acceptance -------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded(DrafterStage):
    """Drafts a known answer with errors at some positions."""

    name: ClassVar[str] = "recorded"

    answer: tuple[int, ...] = param((), "the answer, including its first token")
    rate: float = param(0.8, "probability of a correct draft at each position", ge=0, le=1)
    depth: int = param(4, "drafted tokens on a path", ge=1)
    nodes: int = param(26, "nodes of the layer's trees", ge=2)
    layer: str = param("", "which of `LAYERS` also runs")
    seed: int = param(0, "seed of the positions")

    def __str__(self) -> str:
        """The same for all answers, so that `draft-auto` shares its statistics."""
        return f"recorded:rate={self.rate:g}" + (",layer" if self.layer else "")

    @property
    def features(self) -> bool:
        return bool(self.layer)

    def largest(self) -> tuple[int, int]:
        return (self.nodes if self.layer else 1 + self.depth), self.depth

    def open(self, target: Target) -> Playing:
        layer = LAYERS[self.layer] if self.layer else None
        return Playing(self, target, layer)

    def right(self, at: int) -> bool:
        return random.Random(f"{self.seed} {at}").random() < self.rate


LAYERS: dict[str, EagleModule] = {}


class Playing:
    """The drafter of one request."""

    def __init__(self, stage: Recorded, target: Target, layer: EagleModule | None) -> None:
        self.stage, self.target, self.at = stage, target, 1
        self.inner = None
        if layer is not None:
            top_k = max(1, min(8, stage.nodes // 3))  # of `draft-eagle`'s 26 nodes its 8
            self.inner = EagleDrafter(target, layer, top_k, stage.depth, stage.nodes)

    def prefill(self, read: Read) -> None:
        if self.inner is not None:
            self.inner.prefill(read)

    def extend(self, done: Round) -> None:
        self.at += len(done.emitted)
        if self.inner is not None:
            self.inner.extend(done)

    def propose(self, root: int, budget: Budget) -> Tree:
        stage = self.stage
        depth = min(stage.depth, budget.depth)
        nodes = 1 + depth
        if self.inner is not None:
            self.inner.propose(root, budget)
            nodes = max(min(stage.nodes, budget.nodes), nodes)
        if stage.answer[self.at - 1 : self.at] != (root,):
            return Tree.chain([root])  # the answer differs from the recorded one
        return self.filled(root, nodes, depth)

    def filled(self, root: int, nodes: int, depth: int) -> Tree:
        """A chain of ``depth``; wrong siblings of its first draft fill the tree to ``nodes``."""
        truths = self.stage.answer[self.at : self.at + depth]
        drafts = [
            truth if self.stage.right(self.at + level) else self.wrong(truth, 1)[0]
            for level, truth in enumerate(truths)
        ]
        siblings = nodes - 1 - len(drafts) if drafts else 0
        others = self.wrong(truths[0], 1 + siblings)[1:] if siblings else []
        parents = [*range(-1, len(drafts)), *[0] * siblings]
        return Tree((root, *drafts, *others), tuple(parents))

    def wrong(self, truth: int, count: int) -> list[int]:
        """Tokens other than ``truth``."""
        never = {truth, *self.target.banned}
        others = (token for token in range(self.target.vocabulary) if token not in never)
        return list(islice(others, count))


def layer_of(vlm: VLM) -> EagleModule:
    """An untrained EAGLE layer of the model's width."""
    text = vlm.model.config.get_text_config()
    torch.manual_seed(0)
    module = EagleModule(
        {
            "width": text.hidden_size,
            "heads": text.num_attention_heads,
            "kv_heads": text.num_key_value_heads,
            "hidden": text.intermediate_size,
        }
    )
    return module.to(vlm.adapter.device, vlm.adapter.dtype).eval().requires_grad_(False)


class Steered:
    """A logits processor that forces the tokens of a known answer; for one answer."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.start = tokens, None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.start = ids.shape[1] if self.start is None else self.start
        scores[:, self.tokens[ids.shape[1] - self.start]] += 1e4
        return scores


# --- variants ------------------------------------------------------------------------------------

Answer = Callable[[Dialogue, int], Said]  # the dialogue and the number of the pair


@dataclass
class Job(end_to_end.Job):
    """A model and the settings of its answers."""

    shape: str = TINY
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return self.model.dtype in (torch.float32, torch.float64)


def prepared(args: argparse.Namespace) -> Job:
    dtype = getattr(torch, args.dtype)
    own = {"shape": args.shape, "generation": {"max_new_tokens": args.new_tokens}}
    own["generation"]["do_sample"] = False
    if args.shape != TINY:
        made = end_to_end.prepared(args.shape, torch.device(args.device), dtype, args)
        return Job(**vars(made), **own)
    vlm = VLM.from_pretrained(TINY, device=args.device, dtype=dtype, prefix_cache_bytes=0)
    return Job(vlm.model, vlm.processor, None, "", args.decoding, **own)


def plainly(vlm: VLM, plan: Recipe) -> Answer:
    return lambda dialogue, number: dialogue(vlm, plan)


def recorded(
    vlm: VLM, plan: Recipe, name: str, answer: list[int], args: argparse.Namespace
) -> Answer:
    """Answer with drafts of a known answer; ``name`` as in `named`."""
    rate = float(name.removeprefix(AUTO).removesuffix(LAYER).split()[1])
    layer = ""
    if name.endswith(LAYER):
        layer = str(vlm.adapter.dtype)
        LAYERS[layer] = layer_of(vlm)
    auto = (DraftAuto(),) if name.startswith(AUTO) else ()

    def answered(dialogue: Dialogue, number: int, **more: Any) -> Said:
        stage = Recorded(tuple(answer), rate, DEPTH, args.nodes, layer, seed=number)
        return dialogue(vlm, plan + Recipe((*auto, stage)), **more)

    return answered


# --- a part --------------------------------------------------------------------------------------


@dataclass
class Pairs:
    """Plain and drafted answers to the same questions."""

    plain: list[Said] = field(default_factory=list)
    drafted: list[Said] = field(default_factory=list)
    divergences: list[dict[str, Any]] = field(default_factory=list)

    def compare(self, referee: Referee, dialogue: Dialogue, plan: Recipe, number: int) -> None:
        """Judge the last pair, answer by answer up to the first difference."""
        answers = zip(self.plain[-1].tokens, self.drafted[-1].tokens, strict=True)
        for at, (wanted, got) in enumerate(answers, start=1):
            asked = dataclasses.replace(dialogue, questions=dialogue.questions[:at])
            if divergence := referee.judge(asked, plan, wanted, got, number):
                self.divergences.append(vars(divergence))
                return


def part(job: Job, workload: str, recipe: str, name: str, args: argparse.Namespace) -> dict:
    """Run one drafter under one recipe: warm-up answers, then measured pairs."""
    plan, vlm = Recipe.of(recipe), job.vlm()
    # No near ties in float32.
    referee = Referee(job.vlm(), strict=job.exact)
    plain, found, checked = plainly(job.vlm(), plan), Pairs(), Pairs()
    asked = dialogues(job, workload, args.pairs)
    warm = dialogues(job, workload, 2 if job.shape == TINY else 1, first=10_000)
    if "recorded" in name:
        wanted = plain(asked[0], 0).tokens[0]
        drafted = recorded(vlm, plan, name, wanted, args)
        if not job.exact:
            checked.plain.append(plain(asked[0], 0))
            checked.drafted.append(drafted(asked[0], 0))
            checked.compare(referee, asked[0], plan, 0)
            steer = lambda: {"logits_processor": [Steered(wanted)]}  # noqa: E731
            free, other = drafted, job.vlm()
            plain = lambda dialogue, number: dialogue(other, plan, **steer())  # noqa: E731
            drafted = lambda dialogue, number: free(dialogue, number, **steer())  # noqa: E731
    else:
        drafted = plainly(vlm, plan + Recipe.parse(name))
    for number, dialogue in enumerate([*warm, *asked], start=-len(warm)):
        pair: dict[str, Said] = {}
        for which in rotated(("drafted", "plain"), number):
            pair[which] = (plain if which == "plain" else drafted)(dialogue, number)
        if number >= 0:
            found.plain.append(pair["plain"])
            found.drafted.append(pair["drafted"])
            found.compare(referee, dialogue, plan, number)
    found.divergences += checked.divergences
    return numbers(found)


def numbers(pairs: Pairs) -> dict[str, Any]:
    """JSON values; no ratio if an answer was wrong."""
    bugs = sum(divergence["bug"] for divergence in pairs.divergences)
    stats = [said.stats for said in pairs.drafted]
    both = list(zip(pairs.plain, pairs.drafted, strict=True))
    samples = {
        "wall": [[a.seconds, b.seconds] for a, b in both],
        "decode": [[_decode(a.stats), _decode(b.stats)] for a, b in both],
    }
    draft, verify = sum(s.time_draft_s for s in stats), sum(s.time_verify_s for s in stats)
    return {
        "pairs": len(both),
        "identical": sum(a.tokens == b.tokens for a, b in both),
        "divergences": pairs.divergences,
        "bugs": bugs,
        # An answer that repeats one token would hide errors of the cache.
        "distinct": max(len(set(said.tokens[-1])) for said in pairs.plain),
        "calls": sum(said.calls for said in pairs.drafted),
        "plain_calls": sum(said.calls for said in pairs.plain),
        "samples": samples,
        **{part: None if bugs else harness.ratio(of) for part, of in samples.items()},
        **rounds_of(stats),
        "draft_s": draft / len(stats),
        "verify_s": verify / len(stats),
        "host_s": (sum(b for _, b in samples["decode"]) - draft - verify) / len(stats),
        "speculation": stats[-1].speculation,
    }


def rounds_of(stats: list[Any]) -> dict[str, Any]:
    """Rounds of drafted answers, with drafted and accepted tokens, in all and by depth."""
    rounds = sum(s.rounds for s in stats)
    found: dict[str, Any] = {"rounds": rounds}
    for name in ("drafted", "accepted"):
        by_depth = [getattr(s, f"{name}_at_depth") for s in stats]
        found[name] = sum(getattr(s, name) for s in stats)
        found[f"{name}_at_depth"] = [sum(of) for of in zip_longest(*by_depth, fillvalue=0)]
    found["mean_accepted"] = found["accepted"] / rounds if rounds else 0.0
    emitted = sum(s.generated_tokens - 1 for s in stats)
    return found | {"mean_emitted": emitted / rounds if rounds else 0.0}


def _decode(stats: Stats) -> float:
    return stats.time_total_s - stats.ttft_s


def wrong_of(parts: harness.Parts) -> int:
    """The number of parts that failed or had a wrong answer; says which."""
    wrong = 0
    for key, row in parts.rows.items():
        for divergence in row.get("divergences", ()):
            print(f"{'WRONG' if divergence['bug'] else 'near tie'}: {key}: {divergence}")
        if why := row.get("failed") or row.get("bugs"):
            wrong += 1
            print(f"WRONG: {key}: {why}")
    return wrong


# --- the command ---------------------------------------------------------------------------------


def named(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """All parts: workload, recipe, drafter."""
    if args.shape == TINY:
        return [(w, r, d) for w in args.workloads for r in args.recipes for d in args.drafters]
    plays = [f"recorded {rate:g}" for rate in args.rates]
    every = [of for play in plays for of in (play, play + LAYER, AUTO + play + LAYER)]
    return [("question", r, d) for r in args.recipes for d in args.drafters or every]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__, recipe=None, pairs=None, new_tokens=None, layers=0, decoding="auto", dtype=None,
        device=harness.DEVICE, minutes=9.0, again=False, fresh=False, out=None,
    )  # fmt: skip
    add = parser.add_argument
    add("--shape", default=TINY, choices=(TINY, *SHAPES))
    add("--workload", action="append", dest="workloads", choices=WORKLOADS, help="for tiny (all)")
    add("--drafter", action="append", dest="drafters", help="default: all")
    add("--rates", default="0.6,0.8", help="simulated acceptance (%(default)s)")
    add("--nodes", type=int, default=26, help="nodes of trees with a layer (%(default)s)")
    args = parser.parse_args(argv)
    pairs, tokens = USUAL[args.shape]
    args.pairs, args.new_tokens = args.pairs or pairs, args.new_tokens or tokens
    args.rates = [float(rate) for rate in args.rates.split(",")]
    args.recipes = args.recipes or list(RECIPES)
    args.workloads = args.workloads or list(WORKLOADS)
    args.drafters = args.drafters or (list(DRAFTERS) if args.shape == TINY else [])
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


def main(argv: list[str]) -> int:
    args, start = parse(argv), time.perf_counter()
    about = harness.begin("speculation.py", argv, args)
    keys = ("shape", "dtype", "pairs", "new_tokens", "nodes", "layers", "decoding")
    parts = harness.Parts(
        harness.path_of(args, "speculation", args.shape, about["device"]),
        about,
        {key: getattr(args, key) for key in keys} | {"depth": DEPTH},
        args.fresh,
    )
    wanted = [" | ".join(of) for of in named(args)]
    missing = wanted if args.again else parts.missing(wanted)
    if missing:
        job = prepared(args)
        parts.report |= {"near": NEAR, "numerics": numerics(job.vlm())}
        parts.report["threads"] = torch.get_num_threads()

    end = start + 60 * args.minutes
    left = parts.measure(missing, lambda key: part(job, *key.split(" | "), args), end)
    print(f"\n{args.shape}, {args.dtype}, {about['device']}\n")
    columns = ("mean_accepted", "mean_emitted", "calls", "plain_calls", "draft_s", "verify_s")
    more = ("host_s", "decode", "wall", "identical", "pairs")
    print(harness.shown(parts.rows, *columns, *more))
    return parts.ended(left, wrong_of(parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
