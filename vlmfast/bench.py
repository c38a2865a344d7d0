"""``vlmfast bench``: what recipes save on this machine, in less than a minute for a small model.

Each recipe answers the same question about the same drawn picture with the same number of tokens.
Recipes take turns, so that a machine that gets warm or busy slows all of them; the first turn is
not counted, and what is reported are medians.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .recipe import Recipe
from .vlm import agreement

if TYPE_CHECKING:
    from PIL import Image

    from .vlm import VLM

QUESTION = "How many yellow objects are there?"
RECIPES = ("hired:0.2", "hired:0.2+pyramiddrop+zipvl")


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
    plans = [Recipe(), *(Recipe.of(recipe) for recipe in recipes)]
    picture = drawn(size or 2 * vlm.adapter.config.vision_config.image_size)
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
        samples=samples,
        **middle,
    )


def drawn(size: int, seed: int = 9) -> Image.Image:
    """A square picture from the range of seeds that no training has seen."""
    from PIL import Image

    from .models.tiny.scenes import EVAL_SEED_START, image_example

    picture = image_example(EVAL_SEED_START + seed).image
    return picture.resize((size, size), Image.Resampling.BICUBIC)


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
    from .env import environment

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
