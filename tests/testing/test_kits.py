"""The kits find what is wrong with a family or a method, and say which check found it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from support import tiny_models
from vlmfast import VLM
from vlmfast.compressors import (
    EncodeStage,
    MediaStage,
    Reducer,
    budget_param,
    param,
    positions_param,
)
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.models import llava
from vlmfast.testing import CheckFailed, check_family, check_stage

Llava = llava.FamilyAdapter

# --- families ------------------------------------------------------------------------------------


class Stretched(Llava):
    def positions(self, inputs):
        return 2 * super().positions(inputs)


class Reversed(Llava):
    def encode(self, inputs, context):
        found = super().encode(inputs, context)
        found.features = [one.flip(0) for one in found.features]
        return found


class Writes(Llava):
    """Changes a weight with each forward pass of the tower."""

    def encode(self, inputs, context):
        found = super().encode(inputs, context)
        self.projector().linear_2.bias.data.mul_(-3)
        return found


class CountsRows(Llava):
    """Rotary ids are counted, whichever rows are left of the prompt."""

    def decoder_kwargs(self, layout, extra):
        count = torch.arange(layout.position.shape[-1])
        layout.position.copy_(layout.position[:, :1] + count)
        return super().decoder_kwargs(layout, extra)


class BeginsAlways(Llava):
    """Text is embedded where it begins a prompt, not where it follows images of a session."""

    def embed_around(self, ids):
        found = super().embed_around(ids)
        return found if ids[0, 0] == tiny_models.BOS_ID else torch.zeros_like(found)


class FirstRow(Llava):
    """All rows of a batch continue with the token of the first one."""

    def embed(self, ids):
        return super().embed(ids[:1].expand_as(ids))


class InOneRow(Llava):
    def view_layout(self, tile, y, x, kind, item, geometry):
        return super().view_layout(tile, torch.zeros_like(y), x, kind, item, geometry)


class InPixels(Llava):
    def view_layout(self, tile, y, x, kind, item, geometry):
        layout = super().view_layout(tile, y, x, kind, item, geometry)
        return layout.replace(box=layout.box * 32)


class Fails(Llava):
    def geometry(self, sizes):
        return () if len(sizes) == 3 else super().geometry(sizes)


class FailsOnBadInput(Llava):
    def __init__(self, model, processor):
        self.image_size = processor.image_processor.size
        super().__init__(model, processor)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (Stretched, r"equality: no image: "),
        (Reversed, r"equality: one image: "),
        (Fails, r"equality: three images: raised \w+: "),
        (Writes, r"identity: random:1, three images: \[.*\] instead of "),
        (CountsRows, r"drops: random:0\.5, three images: logits differ by "),
        (BeginsAlways, r"session: three images: \[.*\] instead of "),
        (FirstRow, r"batch: .*, .*: \[.*\] instead of "),
        (InOneRow, r"layout: three images: two tokens have the same grid position"),
        (InPixels, r"layout: three images: boxes of tokens must lie within the image"),
        (FailsOnBadInput, r"bad input: a tokenizer as processor: raised AttributeError"),
    ],
)
def test_broken_adapters(broken: type, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llava, "FamilyAdapter", broken)
    with pytest.raises(CheckFailed, match=f"llava: {check}"):
        check_family(*tiny_models.build_llava())


# --- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class First(Reducer):
    """Keeps the first tokens."""

    name: ClassVar[str] = "first"
    paper: ClassVar[str] = "ours"

    def select_tokens(self, tokens, geometry, stats, request):
        return tokens.layout.patches.nonzero().flatten()[: self.target(tokens)]


@dataclass(frozen=True)
class Undescribed(First):
    pass


@dataclass(frozen=True)
class Unsourced(First):
    """Keeps the first tokens."""

    paper: ClassVar[str] = ""


@dataclass(frozen=True)
class Undeclared(First):
    """Keeps the first tokens."""

    width: int = field(default=3)


@dataclass(frozen=True)
class Unbounded(First):
    """Keeps the first tokens."""

    width: int = param(3, "unused", ge=1)

    def __post_init__(self):
        """Does not check its bounds."""


@dataclass(frozen=True)
class FailsOnVideos(First):
    """Keeps the first tokens."""

    def select_tokens(self, tokens, geometry, stats, request):
        if geometry.video >= 0:
            raise IndexError("no tokens")
        return super().select_tokens(tokens, geometry, stats, request)


@dataclass(frozen=True)
class DropsNothing(First):
    """Keeps all tokens."""

    def select_tokens(self, tokens, geometry, stats, request):
        return None


@dataclass(frozen=True)
class DropsAtBudget1(EncodeStage):
    """Keeps half of the tokens; it has no ``keep``, and a budget that it does not read."""

    name: ClassVar[str] = "drops-at-budget-1"
    paper: ClassVar[str] = "ours"
    positions: str = positions_param()
    budget: float | None = budget_param()

    def select_tokens(self, tokens, geometry, stats, request):
        return tokens.layout.patches.nonzero().flatten()[::2]


@dataclass(frozen=True)
class ChoosesAll(MediaStage):
    """Chooses all frames."""

    name: ClassVar[str] = "chooses-all"
    paper: ClassVar[str] = "ours"

    def frames(self, video, question):
        return list(range(video.frames))


@dataclass(frozen=True)
class DropsAlways(First):
    """Keeps half of the tokens, whatever it was told."""

    def reduce(self, tokens, stats, request):
        return EncodeStage.reduce(self, tokens, stats, request)

    def select_tokens(self, tokens, geometry, stats, request):
        return tokens.layout.patches.nonzero().flatten()[::2]


CALLS: list[int] = []


@dataclass(frozen=True)
class Forgets(First):
    """Keeps other tokens each time."""

    def select_tokens(self, tokens, geometry, stats, request):
        CALLS.append(1)
        left = tokens.layout.patches.nonzero().flatten().roll(29 * len(CALLS))
        return left[: self.target(tokens)].sort().values


@pytest.mark.cases(2)
@pytest.mark.cold
@pytest.mark.parametrize(
    ("stage", "check"),
    [
        (Undescribed, r"declaration: it has no docstring"),
        (Unsourced, r"declaration: `paper` names no source"),
        (Undeclared, r"declaration: width is not declared with `param`"),
        (Unbounded, r"bad input: keep=0.0: raised nothing, not RecipeError"),
        (FailsOnVideos, r"media: a video: raised IndexError: no tokens"),
        (DropsNothing, r"effect: it changes nothing"),
        (ChoosesAll, r"effect: it changes nothing"),
        (DropsAlways, r"identity: keep=1, "),
        (DropsAtBudget1, r"identity: budget=1, "),
        (Forgets, r"equality: "),
    ],
)
def test_broken_stages(stage: Callable[..., Any], check: str, tiny: VLM) -> None:
    with pytest.raises(CheckFailed, match=check):
        check_stage(stage(), tiny)


def of_short_prompts(name: str) -> Any:
    """A method of vlmfast; the defaults of cache methods are for longer prompts."""
    stage = stage_class(name)()
    if all(part.protocol not in ("cache", "media") for part in stage.expand()):
        return stage
    keeps = {"keep": 0.8, "tsp": 0.9, "residual": 32, "n": 2}
    return replace(stage, **{f.name: keeps[f.name] for f in fields(stage) if f.name in keeps})


WITHOUT_KEEP = {"frames-clip", "kivi", "static-frames", "zipcache", "zipvl"}


def passes(stage: Any, tiny: VLM) -> None:
    report = check_stage(stage, tiny, max_new_tokens=4)
    assert {"declaration", "effect", "equality: the same request again"} < report.names()
    assert ("identity" in report.names(ran=False)) == (stage.name in WITHOUT_KEEP)
    ran = any(name.startswith("identity: ") for name in report.names())
    assert ran == (stage.name not in WITHOUT_KEEP)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "name", [name for name in sorted(stage_names()) if not stage_class(name).other_model]
)
def test_methods_pass_the_kit(name: str, tiny: VLM) -> None:
    passes(of_short_prompts(name), tiny)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in sorted(stage_names()) if stage_class(name).other_model]
)
def test_methods_with_another_model_pass_the_kit(name: str, tiny: VLM, tmp_path: Path) -> None:
    """With a tiny OpenCLIP model."""
    from support import tiny_clip

    model, pretrained = tiny_clip.build(tmp_path)
    passes(replace(of_short_prompts(name), model=model, pretrained=pretrained), tiny)
