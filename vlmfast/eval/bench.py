"""``vlmfast bench``: what recipes save on this machine, in less than a minute for a small model.

Each recipe answers the same question about the same drawn picture with the same number of tokens.
Recipes take turns, so that a machine that gets warm or busy slows all of them; the first turn is
not counted, and what is reported are medians.

``--audit-lossless`` takes no times: it looks for answers that drafts have changed (`audit`).
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmfast.api.vlm import VLM, agreement
from vlmfast.core.protocols import DrafterStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class
from vlmfast.errors import RecipeError, VLMFastError

if TYPE_CHECKING:
    from PIL import Image

QUESTION = "How many yellow objects are there?"
RECIPES = ("balanced", "hired:0.5+pyramiddrop")


@dataclass
class Row:
    """What one recipe took, medians over the turns.

    Parameters
    ----------
    recipe : str
    visual_tokens_in, visual_tokens : float
        Before anything was dropped, and averaged over the language model's layers.
    ttft_s, prefill_s, tokens_per_s : float
    kv_bytes : int
    peak_memory_bytes : int or None
        Of the GPU's allocator, or of the process on Linux; while answering, the model included.
    agreement : float
        Share of tokens that are the full model's.
    saliency : str
        As in `Stats`.
    samples : dict of str to list
        What the medians are taken from.
    """

    recipe: str
    visual_tokens_in: int
    visual_tokens: float
    ttft_s: float
    prefill_s: float
    tokens_per_s: float
    kv_bytes: int
    peak_memory_bytes: int | None
    agreement: float
    saliency: str
    samples: dict[str, list[Any]]


def bench(
    vlm: VLM,
    recipes: Sequence[Any] = RECIPES,
    *,
    new_tokens: int = 32,
    repeats: int = 3,
    size: int | None = None,
) -> list[Row]:
    """The full model first, then each recipe.

    Parameters
    ----------
    new_tokens : int
        Tokens that every answer has, whatever the model would like.
    repeats : int
        Turns that are counted.
    size : int, optional
        Edge of the picture; by default twice that of the vision tower, so that models which cut
        pictures into tiles do.
    """
    plans = [Recipe(), *(vlm.recipe(recipe) for recipe in recipes)]
    picture = drawn(size or 2 * _side(vlm.adapter.config.vision_config))
    generation = {"max_new_tokens": new_tokens, "do_sample": False}
    found: list[list[tuple[Any, int | None]]] = [[] for _ in plans]
    with _endless(vlm.model.generation_config):
        for turn in range(repeats + 1):
            for plan, taken in zip(plans, found, strict=True):
                forget_peak(vlm.model.device)
                answer = vlm.ask(QUESTION, images=picture, recipe=plan, **generation)
                if turn:
                    taken.append((answer, peak(vlm.model.device)))
    full = found[0][0][0].token_ids
    return [_row(taken, full) for taken in found]


@contextlib.contextmanager
def _endless(config: Any) -> Iterator[None]:
    """Without an end token every answer has the same length.

    The model's own config, because ``generate`` takes from it what another one leaves open.
    """
    before, config.eos_token_id = config.eos_token_id, None
    try:
        yield
    finally:
        config.eos_token_id = before


def _row(taken: list[tuple[Any, int | None]], full: list[int]) -> Row:
    last = taken[-1][0]
    stats = [answer.stats for answer, _ in taken]
    samples = {
        "ttft_s": [s.ttft_s for s in stats],
        "prefill_s": [s.time_prefill_s for s in stats],
        "tokens_per_s": [s.tokens_per_s for s in stats],
        "peak_memory_bytes": [memory for _, memory in taken],
    }
    middle = {
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
        **middle,
    )


def _side(vision: Any) -> int:
    """Pixels that a tower takes on a side; 448 where it takes any number."""
    side = getattr(vision, "image_size", None) or 448
    return side if isinstance(side, int) else max(side)


def drawn(size: int, seed: int = 9) -> Image.Image:
    """A square picture from the range of seeds that no training has seen."""
    from PIL import Image

    from vlmfast.scenes.examples import EVAL_SEED_START, image_example

    picture = image_example(EVAL_SEED_START + seed).image
    return picture.resize((size, size), Image.Resampling.BICUBIC)


# --- whether drafts change answers ---------------------------------------------------------------

NEAR = 4.0  # ulp: what a near tie is at most
_FREE = ("draft-ngram+draft-recycle", "draft-layerskip")
_TRAINED = ("draft-eagle", "draft-vispec")

Asked = Callable[..., Any]  # (vlm, recipe, **generation): the question that the two answers are to


@dataclass
class Divergence:
    """Where a drafted answer leaves the plain one.

    Parameters
    ----------
    prompt : int
        Number of the prompt.
    at : int
        Tokens that both answers begin with.
    plain, drafted : int or None
        The next token of each; ``None`` where an answer is the beginning of the other.
    gap : float or None
        How far the lower of the two lies below the largest logit when the common beginning is read
        in float32: top 1 less top 2 where they are these two. In units in the last place (ulp) that
        the model's own type has there.
    own_gap : float or None
        The same when the model itself reads the beginning, token by token: where this is small and
        ``gap`` is not, the model's own rounding is larger than a near tie.
    bug : bool
        Whether rounding cannot be why.
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
    """Plain answers beside those of one drafter.

    Parameters
    ----------
    recipe, drafter : str
    prompts, identical : int
    prefix : list of int
        Tokens that both answers to each prompt begin with.
    lengths : list of int
        Tokens of the plain answers.
    divergences : list of Divergence
        The first one of each answer that has any.
    drafted, accepted, rounds, redecoded : int
        As in `engine.stats.Stats`. Where nothing was drafted, nothing was audited.
    speculation : str
        Who drafted, or why nobody did; of the last answer.
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
        return sum(of.bug for of in self.divergences)


class Referee:
    """Tells rounding from bugs.

    A tree and a single token go through products of other shapes, whose last bits may differ; two
    tokens that are nearly tied may then change places. Anything else is a bug.

    Parameters
    ----------
    vlm : VLM
    near : float
        Ulp of the model's type up to which two logits are nearly tied.
    strict : bool
        Whether near ties are bugs as well.
    """

    def __init__(self, vlm: VLM, *, near: float = NEAR, strict: bool = False) -> None:
        self.vlm, self.near, self.strict = vlm, near, strict
        self._wide: VLM | None = None

    @property
    def wide(self) -> VLM:
        """The model in float32 (or better); a copy that is made when it is first needed."""
        if self._wide is None:
            dtype = torch.promote_types(self.vlm.adapter.dtype, torch.float32)
            model = self.vlm.model
            if dtype != self.vlm.adapter.dtype:
                model = copy.deepcopy(model).to(dtype)
            self._wide = VLM(model, self.vlm.processor, decoding="eager")
        return self._wide

    def judge(
        self, asked: Asked, recipe: Recipe, plain: list[int], drafted: list[int], prompt: int = 0
    ) -> Divergence | None:
        """Compare two answers.

        Parameters
        ----------
        asked : callable
            ``asked(vlm, recipe, **generation)`` has a model answer the same question.
        recipe : Recipe
            Of the plain answer. Where it chooses among visual tokens, it does so in float32 anew.
        plain, drafted : list of int
        prompt : int
            Its number.

        Returns
        -------
        Divergence or None
            ``None`` for equal answers.
        """
        if plain == drafted:
            return None
        at = common(plain, drafted)
        pair = [tokens[at] if at < len(tokens) else None for tokens in (plain, drafted)]
        if None in pair:
            return Divergence(prompt, at, *pair, None, None, bug=True)
        gaps = [
            self._gap(_scores(vlm, asked, recipe, plain[:at]), pair)
            for vlm in (self.wide, self.vlm)
        ]
        return Divergence(prompt, at, *pair, *gaps, bug=self.strict or not gaps[0] <= self.near)

    def _gap(self, scores: Tensor, pair: list[int]) -> float:
        best, lower = float(scores.max()), float(scores[pair].min())
        finfo = torch.finfo(self.vlm.adapter.dtype)
        ulp = finfo.eps * 2.0 ** math.floor(math.log2(max(abs(best), finfo.tiny)))
        return (best - lower) / ulp


class _Given:
    """A logits processor that has given tokens chosen, and keeps the scores of the one behind."""

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
    """Processed logits (V,), float32, behind an answer that begins with ``tokens``."""
    probe = _Given(tokens)
    asked(vlm, recipe, logits_processor=[probe], max_new_tokens=len(tokens) + 1, do_sample=False)
    if probe.scores is None:
        raise VLMFastError(f"the answer ended before the {len(tokens)} tokens that were given")
    return probe.scores


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def prompts(count: int) -> list[tuple[Image.Image, str]]:
    """Drawn pictures that no training has seen; a caption and a question about them take turns."""
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
) -> list[Audit]:
    """Greedy answers with drafts beside those without, in the model's own type.

    Parameters
    ----------
    recipes : sequence
        What is dropped, without drafters.
    drafters : sequence, optional
        By default those that need no weights, and those whose weights there are.
    count : int
        Prompts.
    new_tokens : int
        Of an answer, at most.
    strict : bool
        Whether drafted answers are ``strict``; every difference is then a bug.
    near : float
        As in `Referee`.

    Raises
    ------
    RecipeError
        For a recipe with a drafter, or a drafter that is none.
    """
    if drafters is None:
        ships = vlm.adapter.ships
        drafters = [*_FREE, *(name for name in _TRAINED if ships(stage_class(name)()))]
    plans, drafting = ([vlm.recipe(of) for of in each] for each in (recipes, drafters))
    for plan in plans:
        if plan.acting(DrafterStage):
            raise RecipeError(f"recipe {plan}: drafters are named by drafters=, apart from recipes")
    for drafter in drafting:
        if not drafter or len(drafter.acting(DrafterStage)) != len(drafter):
            raise RecipeError(f"drafter {drafter}: it must hold drafters, and nothing else")
    referee, found = Referee(vlm, near=near, strict=strict), []
    generation = {"max_new_tokens": new_tokens, "do_sample": False}
    asked = [_asking(*prompt) for prompt in prompts(count)]
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
                if gone := referee.judge(ask, plan, wanted, got.token_ids, number):
                    row.divergences.append(gone)
            found.append(row)
    return found


def _asking(picture: Image.Image, question: str) -> Asked:
    def ask(vlm: VLM, recipe: Recipe, **generation: Any) -> Any:
        return vlm.ask(question, images=picture, recipe=recipe, **generation)

    return ask


def numerics(vlm: VLM) -> dict[str, str]:
    """What decides about last bits."""
    return {
        "device": str(vlm.adapter.device),
        "dtype": str(vlm.adapter.dtype).removeprefix("torch."),
        "attention": vlm.model.config.get_text_config()._attn_implementation,
        "decoding": vlm.adapter.decoding,
        "torch": torch.__version__,
    }


# --- memory --------------------------------------------------------------------------------------


def forget_peak(device: torch.device) -> None:
    """Measure peaks from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # only Linux can
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(device: torch.device) -> int | None:
    """Bytes since `forget_peak`; ``None`` where the system does not tell them from earlier ones."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


# --- what a result says of how it came about -----------------------------------------------------


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


def driver() -> str | None:
    """Version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return told.stdout.strip().partition("\n")[0] or None
    return None
