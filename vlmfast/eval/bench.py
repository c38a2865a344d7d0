"""``vlmfast bench``: measure what recipes save on this machine.

Each recipe answers the same question about the same generated image with the same number of tokens.
Recipes are interleaved, so that thermal throttling or other load affects all of them. The first
round is a warm-up; medians are reported. The prefix cache is off. The time to the first token is
split into media (decoding and the processor), the vision tower, the recipe's stages and the
prefill. Stages inside the tower or the language model also count there.

``--audit-lossless`` does not measure times. It checks whether drafts change answers (`audit`).
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import os
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from vlmfast.api.vlm import VLM, agreement
from vlmfast.core.progress import Progress
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class
from vlmfast.core.stage import Stage
from vlmfast.errors import RecipeError, VLMFastError

if TYPE_CHECKING:
    from PIL import Image

QUESTION = "How many yellow objects are there?"
RECIPES = ("balanced", "hired:0.5+pyramiddrop")

Item = TypeVar("Item")


@dataclass
class Row:
    """Cost of one recipe, medians over the rounds.

    Parameters
    ----------
    recipe : str
    visual_tokens_in, visual_tokens : float
        Before reduction, and averaged over the language model's layers.
    ttft_s, media_s, vision_s, stages_s, prefill_s, tokens_per_s : float
    kv_bytes : int
    peak_memory_bytes : int or None
        Peak during the answer, including the model: of the GPU's allocator, or of the process on
        Linux.
    agreement : float
        Fraction of tokens that equal the full model's.
    saliency : str
        As in `Stats`.
    samples : dict of str to list
        The measured values of each round.
    """

    recipe: str
    visual_tokens_in: int
    visual_tokens: float
    ttft_s: float
    media_s: float
    vision_s: float
    stages_s: float
    prefill_s: float
    tokens_per_s: float
    kv_bytes: int
    peak_memory_bytes: int | None
    agreement: float
    saliency: str
    samples: dict[str, list[Any]]


def bench(
    vlm: VLM,
    recipes: Sequence[str | Stage | Recipe | None] = RECIPES,
    *,
    new_tokens: int = 32,
    repeats: int = 3,
    size: int | None = None,
    progress: bool = False,
) -> list[Row]:
    """Measure the full model and each recipe; the full model's row comes first.

    Parameters
    ----------
    new_tokens : int
        Length of every answer; end tokens are ignored.
    repeats : int
        Measured rounds.
    size : int, optional
        Side of the image in pixels. By default twice that of the vision tower, so that models
        with tiling use it.
    progress : bool
        Report progress on stderr.
    """
    plans = [Recipe(), *(vlm.recipe(recipe) for recipe in recipes)]
    image = drawn(size or 2 * _side(vlm.adapter.config.vision_config))
    generation: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    generation["eos_token_id"] = None
    found: list[list[tuple[Any, int | None]]] = [[] for _ in plans]
    bar = Progress("bench", (repeats + 1) * len(plans), "answers", show=progress)
    with vlm.prefix_cache.bypassed(), bar:
        for (plan, taken), counts in turns(list(zip(plans, found, strict=True)), repeats, warmup=1):
            forget_peak(vlm.model.device)
            answer = vlm.ask(QUESTION, images=image, recipe=plan, **generation)
            if counts:
                taken.append((answer, peak(vlm.model.device)))
            bar.update()
    full = found[0][0][0].token_ids
    return [_row(taken, full) for taken in found]


def _row(taken: list[tuple[Any, int | None]], full: list[int]) -> Row:
    last = taken[-1][0]
    stats = [answer.stats for answer, _ in taken]
    samples = {
        "ttft_s": [s.ttft_s for s in stats],
        "media_s": [s.time_media_s + s.time_processor_s for s in stats],
        "vision_s": [s.time_vision_s for s in stats],
        "stages_s": [s.time_reduce_s for s in stats],
        "prefill_s": [s.time_prefill_s for s in stats],
        "tokens_per_s": [s.tokens_per_s for s in stats],
        "peak_memory_bytes": [memory for _, memory in taken],
    }
    medians: dict[str, Any] = {
        key: None if None in values else statistics.median(values)
        for key, values in samples.items()
    }
    return Row(
        recipe=last.recipe,
        visual_tokens_in=last.stats.visual_tokens_in,
        visual_tokens=last.stats.equivalent_tokens,
        kv_bytes=last.stats.kv_bytes,
        agreement=agreement(last.token_ids, full),
        saliency=last.stats.saliency,
        samples=samples,
        **medians,
    )


def _side(vision: Any) -> int:
    """Side of a vision tower's input in pixels; 448 if it is not fixed."""
    side = getattr(vision, "image_size", None) or 448
    return side if isinstance(side, int) else max(side)


def tower_of(vlm: VLM) -> str:
    """The vision tower of a model in words: class, blocks, width, parameters, pixels of a view."""
    adapter = vlm.adapter
    tower, sizes = adapter.tower(), adapter.sizes()
    parameters = sum(weight.numel() for weight in tower.parameters())
    size = adapter.view_size()
    facts = [
        type(tower).__name__,
        f"{sizes['vision_depth']} blocks",
        f"width {sizes['vision_width']}",
        f"{parameters / 1e6:.0f}M parameters",
    ]
    if size is not None:
        facts.append(f"{size[0]} x {size[1]} pixels")
    return ", ".join(facts)


def drawn(size: int, seed: int = 9) -> Image.Image:
    """A square image from the held-out seeds."""
    from PIL import Image

    from vlmfast.scenes.examples import EVAL_SEED_START, image_example

    image = image_example(EVAL_SEED_START + seed).image
    return image.resize((size, size), Image.Resampling.BICUBIC)


# --- whether drafts change answers ---------------------------------------------------------------

NEAR = 4.0  # largest gap of a near tie, in ulp
_FREE = ("draft-ngram+draft-recycle", "draft-layerskip", "draft-self")
_TRAINED = ("draft-eagle", "draft-vispec")

Asked = Callable[..., Any]  # (vlm, recipe, **generation) -> Answer to one fixed question


@dataclass
class Divergence:
    """The first difference between a drafted answer and the plain one.

    Parameters
    ----------
    prompt : int
        Index of the prompt.
    at : int
        Length of the common prefix in tokens.
    plain, drafted : int or None
        The next token of each; ``None`` if one answer is a prefix of the other.
    gap : float or None
        Largest logit minus the lower logit of the two tokens, after the common prefix in float32.
        Equals top 1 minus top 2 if the two tokens are these. In units in the last place (ulp) of
        the model's dtype at the largest logit.
    own_gap : float or None
        The same in the model's dtype, with the prefix decoded token by token. If this is small and
        ``gap`` is not, the model's own rounding error exceeds a near tie.
    bug : bool
        Whether rounding cannot explain the difference.
    """

    prompt: int
    at: int
    plain: int | None
    drafted: int | None
    gap: float | None
    own_gap: float | None
    bug: bool


@dataclass
class Audit:
    """Comparison of plain answers with those of one drafter.

    Parameters
    ----------
    recipe, drafter : str
    prompts, identical : int
    prefix : list of int
        Length of the common prefix for each prompt.
    lengths : list of int
        Length of the plain answer to each prompt.
    divergences : list of Divergence
        One for each answer that differs.
    drafted, accepted, rounds, redecoded : int
        As in `engine.stats.Stats`. If nothing was drafted, nothing was audited.
    speculation : str
        The drafter, or why nothing was drafted; of the last answer.
    """

    recipe: str
    drafter: str
    prompts: int = 0
    identical: int = 0
    prefix: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    redecoded: int = 0
    speculation: str = ""

    @property
    def bugs(self) -> int:
        return sum(divergence.bug for divergence in self.divergences)


class Referee:
    """Distinguishes rounding errors from bugs.

    Matrix products of a draft tree and of a single token have different shapes, so their last bits
    may differ and swap two nearly tied tokens. Any other difference is a bug.

    Parameters
    ----------
    vlm : VLM
    near : float
        Largest gap of a near tie, in ulp of the model's dtype.
    strict : bool
        Whether near ties count as bugs.
    """

    def __init__(self, vlm: VLM, *, near: float = NEAR, strict: bool = False) -> None:
        self.vlm, self.near, self.strict = vlm, near, strict
        self._wide: VLM | None = None

    @property
    def wide(self) -> VLM:
        """A copy of the model in float32 (or wider), created at first use."""
        if self._wide is None:
            dtype = torch.promote_types(self.vlm.adapter.dtype, torch.float32)
            model = self.vlm.model
            if dtype != self.vlm.adapter.dtype:
                model = copy.deepcopy(model)
                model.to(dtype)  # type: ignore[arg-type]  # its wrapper hides self
            self._wide = VLM(model, self.vlm.processor, decoding="eager")
        return self._wide

    def judge(
        self, asked: Asked, recipe: Recipe, plain: list[int], drafted: list[int], prompt: int = 0
    ) -> Divergence | None:
        """Compare two answers.

        Parameters
        ----------
        asked : callable
            ``asked(vlm, recipe, **generation)`` answers the question with a model.
        recipe : Recipe
            Of the plain answer. It selects visual tokens again in float32.
        plain, drafted : list of int
        prompt : int
            Index of the prompt.

        Returns
        -------
        Divergence or None
            ``None`` for equal answers.
        """
        if plain == drafted:
            return None
        at = common(plain, drafted)
        one, other = (tokens[at] if at < len(tokens) else None for tokens in (plain, drafted))
        if one is None or other is None:
            return Divergence(prompt, at, one, other, None, None, bug=True)
        gap, own_gap = (
            self._gap(_scores(vlm, asked, recipe, plain[:at]), [one, other])
            for vlm in (self.wide, self.vlm)
        )
        bug = self.strict or not gap <= self.near
        return Divergence(prompt, at, one, other, gap, own_gap, bug)

    def _gap(self, scores: Tensor, pair: list[int]) -> float:
        best, lower = float(scores.max()), float(scores[pair].min())
        finfo = torch.finfo(self.vlm.adapter.dtype)
        ulp = finfo.eps * 2.0 ** math.floor(math.log2(max(abs(best), finfo.tiny)))
        return (best - lower) / ulp


class _Given:
    """A logits processor that forces the given tokens and records the scores of the next one."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.seen = tokens, 0
        self.scores: Tensor | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        number, self.seen = self.seen, self.seen + 1
        if number >= len(self.tokens):
            self.scores = scores[0].clone()
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.tokens[number]] = 0.0
        return chosen


def _scores(vlm: VLM, asked: Asked, recipe: Recipe, tokens: list[int]) -> Tensor:
    """Processed logits (V,), float32, after an answer prefix of ``tokens``."""
    probe = _Given(tokens)
    asked(vlm, recipe, logits_processor=[probe], max_new_tokens=len(tokens) + 1, do_sample=False)
    if probe.scores is None:
        raise VLMFastError(f"the answer ended before the {len(tokens)} given tokens")
    return probe.scores


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def prompts(count: int) -> list[tuple[Image.Image, str]]:
    """Held-out generated images, alternately with a caption request and a question."""
    from vlmfast.scenes.examples import CAPTION_QUESTION, EVAL_SEED_START, image_example

    found = []
    for number in range(count):
        example = image_example(EVAL_SEED_START + number)
        asked = example.qa[number // 2 % len(example.qa)].question
        found.append((example.image, asked if number % 2 else CAPTION_QUESTION))
    return found


def audit(
    vlm: VLM,
    recipes: Sequence[Any] = ("none",),
    drafters: Sequence[Any] | None = None,
    *,
    count: int = 24,
    new_tokens: int = 32,
    strict: bool = False,
    near: float = NEAR,
    progress: bool = False,
) -> list[Audit]:
    """Compare greedy answers with and without drafts, in the model's own dtype.

    Parameters
    ----------
    recipes : sequence
        Recipes without drafters.
    drafters : sequence, optional
        By default those without weights and those whose weights are shipped.
    count : int
        Number of prompts.
    new_tokens : int
        Maximum length of an answer.
    strict : bool
        Decode drafted answers with ``strict=True``; every difference is then a bug.
    near : float
        As in `Referee`.
    progress : bool
        Report progress on stderr.

    Raises
    ------
    RecipeError
        If a recipe contains a drafter, or a drafter contains another stage.
    """
    if drafters is None:
        ships = vlm.adapter.ships
        drafters = [*_FREE, *(name for name in _TRAINED if ships(stage_class(name)()))]
    plans, drafting = ([vlm.recipe(text) for text in each] for each in (recipes, drafters))
    for plan in plans:
        if plan.acting(DrafterStage):
            raise RecipeError(f"recipe {plan}: pass drafters as drafters=, not in recipes")
    for drafter in drafting:
        if not drafter or len(drafter.acting(DrafterStage)) != len(drafter):
            raise RecipeError(f"drafter {drafter}: it must contain drafters only")
    referee, found = Referee(vlm, near=near, strict=strict), []
    generation = {"max_new_tokens": new_tokens, "do_sample": False}
    asked = [_asking(*prompt) for prompt in prompts(count)]
    bar = Progress("audit", len(plans) * len(drafting) * count, "answers", show=progress)
    for plan in plans:
        plain = [ask(vlm, plan, **generation).token_ids for ask in asked]
        for drafter in drafting:
            row = Audit(str(plan), str(drafter))
            for number, (ask, wanted) in enumerate(zip(asked, plain, strict=True)):
                got = ask(vlm, plan + drafter, **generation, strict=strict)
                row.prompts += 1
                row.lengths.append(len(wanted))
                row.prefix.append(common(wanted, got.token_ids))
                row.identical += wanted == got.token_ids
                for name in ("drafted", "accepted", "rounds", "redecoded"):
                    setattr(row, name, getattr(row, name) + getattr(got.stats, name))
                row.speculation = got.stats.speculation
                if divergence := referee.judge(ask, plan, wanted, got.token_ids, number):
                    row.divergences.append(divergence)
                bar.update()
            found.append(row)
    bar.close()
    return found


def _asking(image: Image.Image, question: str) -> Asked:
    def ask(vlm: VLM, recipe: Recipe, **generation: Any) -> Any:
        return vlm.ask(question, images=image, recipe=recipe, **generation)

    return ask


def numerics(vlm: VLM) -> dict[str, str]:
    """Settings that affect the last bits of the results."""
    return {
        "device": str(vlm.adapter.device),
        "dtype": str(vlm.adapter.dtype).removeprefix("torch."),
        "attention": vlm.model.config.get_text_config()._attn_implementation,
        "decoding": vlm.adapter.decoding,
        "torch": torch.__version__,
    }


# --- rounds --------------------------------------------------------------------------------------


def turns(
    variants: Sequence[Item], repeats: int, *, warmup: int = 0
) -> Iterator[tuple[Item, bool]]:
    """Interleave variants, so that other load affects all of them.

    Each measured round begins with another variant.

    Yields
    ------
    variant, bool
        The bool is whether the round is measured; the first ``warmup`` rounds are not.
    """
    for number in range(-warmup, repeats):
        for variant in rotated(variants, max(number, 0)):
            yield variant, number >= 0


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """``items``, beginning with the one at ``number`` modulo their count."""
    at = number % len(items)
    return [*items[at:], *items[:at]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return dict.fromkeys(("median", "q1", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


# --- memory --------------------------------------------------------------------------------------


def forget_peak(device: torch.device) -> None:
    """Reset the peak memory statistics."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: torch.device) -> int | None:
    """Peak memory in bytes since `forget_peak`; ``None`` if the system does not support it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


# --- provenance of a result ----------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """Date, versions, hardware and the GPU's driver."""
    from vlmfast.core.env import environment

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "driver": driver() if cuda else None,
        "environment": environment(),
    }


def provenance(script: str, arguments: Sequence[str], device: str) -> dict[str, Any]:
    """`facts` with the command of a script in ``benchmarks`` and the load of the machine.

    Parameters
    ----------
    script : str
        Its file name.
    device : str
        Where it runs, as PyTorch names it. The result has the name of a GPU.
    """
    about = facts()
    return about | {
        "command": shlex.join(["python", f"benchmarks/{script}", *arguments]),
        "device": about["device"] if device.startswith("cuda") else device,
        "load_average": load_average(),
    }


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes."""
    return list(os.getloadavg())


def driver() -> str | None:
    """Version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip().partition("\n")[0] or None
    return None
