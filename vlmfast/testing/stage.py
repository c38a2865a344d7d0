"""Checks of a method on a model, by default the one that is shipped with vlmfast."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from functools import partial
from types import EllipsisType
from typing import Any

import torch

from vlmfast.api.answer import Answer, Request
from vlmfast.api.vlm import VLM
from vlmfast.core.params import recipe_name
from vlmfast.core.protocols import PROTOCOLS
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage, with_values
from vlmfast.errors import RecipeError

from .media import noise
from .report import Report

_QUESTION = "what is here ?"
# Log-probabilities that are nearer than this may change places by rounding alone: float32, and
# logits up to this size in the model's dtype.
_TIE, _LOGIT = 1e-4, 16


def check_stage(stage: Stage | str, vlm: VLM | None = None, *, max_new_tokens: int = 8) -> Report:
    """Check that a method keeps the rules of its protocol.

    - *declaration*: a frozen dataclass with a name, a docstring and a source, whose recipe text
      gives an equal stage;
    - *bad input*: values out of the bounds of a parameter raise `RecipeError`;
    - *media*: images of any size, several of them, and videos are answered; prompts without an
      image are left alone;
    - *effect*: it drops tokens, leaves views out, shrinks the cache, chooses fewer frames or drafts
      tokens;
    - *identity*: with ``keep=1``, or ``budget=1`` where there is no ``keep``, tokens are those of
      the full model; those of a drafter always;
    - *equality*: the same request gives the same answer again, in a batch and in a session.

    Parameters
    ----------
    stage : Stage or str
        With parameters under which it drops something on prompts of some hundred tokens. A trained
        method needs weights for the model.
    vlm : VLM, optional
        By default ``VLM.from_pretrained("tiny", device="cpu")``.
    max_new_tokens : int

    Returns
    -------
    Report

    Raises
    ------
    CheckFailed
        For the first rule that is broken, or the first unexpected exception.
    """
    vlm = VLM.from_pretrained("tiny", device="cpu") if vlm is None else vlm
    if isinstance(stage, str):
        stages = list(Recipe.parse(stage))
        if len(stages) != 1:
            raise RecipeError(f"stage={stage!r} must be one method, not {len(stages)}")
        (stage,) = stages
    return _Checks(stage, vlm, max_new_tokens).run()


class _Checks:
    def __init__(self, stage: Stage, vlm: VLM, max_new_tokens: int) -> None:
        self.stage, self.vlm, self.count = stage, vlm, max_new_tokens
        self.report = Report(str(stage))
        parts = (stage, *stage.expand())
        self.drafts = any(part.protocol == "drafter" for part in parts)
        self.chooses = any(part.protocol == "media" for part in parts)
        still = 2 if any(getattr(part, "reuses_frames", False) for part in parts) else 1
        video: dict[str, Any] = {"video": [noise(i // still, 64, 64) for i in range(4)]}
        if not self.chooses:  # otherwise the stage chooses the frames
            video["num_frames"] = 4
        images: dict[str, dict[str, Any]] = {
            "one pixel": {"images": noise(0, 1, 1)},
            "a strip": {"images": noise(1, 120, 20)},
            "two images": {"images": [noise(2, 64, 64), noise(3, 128, 128)]},
        }
        self.media: dict[str, dict[str, Any]] = {} if self.chooses else images
        self.media["a video"] = video

    def run(self) -> Report:
        self.declaration()
        self.bounds()
        if not self.chooses:
            self.text_only()
        answers = {case: self.answered(case) for case in self.media}
        self.effect(answers)
        if self.drafts:
            for case, answer in answers.items():
                self.same(f"identity: {case}", answer, self.ask(case, None))
        else:
            self.identity()
        case = "a video" if self.chooses else "two images"
        self.same("equality: the same request again", self.ask(case), answers[case])
        self.batch(answers)
        self.session(case, answers[case])
        return self.report

    def ask(self, case: str, recipe: Stage | EllipsisType | None = ...) -> Answer:
        recipe = self.stage if isinstance(recipe, EllipsisType) else recipe
        given: dict[str, Any] = {"max_new_tokens": self.count, "do_sample": False}
        given["top_logprobs"] = 2
        if self.drafts:  # near ties are otherwise resolved by other sums
            given["strict"] = True
        return self.vlm.ask(_QUESTION, **self.media[case], recipe=recipe, **given)

    def _given(self) -> dict[str, Any]:
        return {"max_new_tokens": self.count, "do_sample": False, "strict": self.drafts}

    def same(self, name: str, got: Answer, expected: Answer) -> None:
        """The same tokens, up to one whose log-probability in ``expected`` ties with another."""
        one, other = got.token_ids, expected.token_ids
        differs = [i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
        tied = False
        if differs and expected.logprobs is not None:
            (_, first), (_, second) = expected.logprobs[differs[0]].top[:2]
            rounding = _LOGIT * torch.finfo(self.vlm.adapter.dtype).eps
            tied = first - second <= max(_TIE, rounding)
        self.report.require(one == other or tied, name, f"{one} instead of {other}")
        self.report.passed(name, f"a tie at token {differs[0]}" if tied else "")

    # --- the declaration -------------------------------------------------------------------------

    def declaration(self) -> None:
        stage, cls, name = self.stage, type(self.stage), "declaration"
        need = self.report.require
        frozen = getattr(cls, "__dataclass_params__", None)
        need(frozen is not None and frozen.frozen, name, "not a frozen dataclass")
        need(stage.name and stage.name == stage.name.lower(), name, "its name must be lower case")
        known = {part.protocol for part in stage.expand()}
        need(known <= set(PROTOCOLS), name, f"its protocol must be one of {', '.join(PROTOCOLS)}")
        own = (cls.__doc__ or "").strip()  # `dataclass` writes the fields where there is none
        need(own and not own.startswith(f"{cls.__name__}("), name, "it has no docstring")
        need(stage.paper, name, "`paper` names no source")
        need(hash(stage) == hash(replace(stage)), name, "equal stages have different hashes")
        need(self.read(str(stage)) == stage, name, f"{str(stage)!r} gives another stage")
        for f in fields(cls):
            need(f.default is not MISSING, name, f"{f.name} has no default")
            need(f.metadata.get("doc"), name, f"{f.name} is not declared with `param`")
        self.report.passed(name)

    def read(self, text: str) -> Stage:
        """The stage of a recipe; it need not be registered."""
        _, _, values = text.partition(":")
        texts: dict[str | None, str] = {}
        for value in filter(None, values.split(",")):
            key, equals, given = value.partition("=")
            texts[key if equals else None] = given if equals else key
        return type(self.stage).from_texts(texts)

    def bounds(self) -> None:
        cls = type(self.stage)
        for f in fields(cls):
            outside = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
            wrong = [f.metadata[key] + step for key, step in outside.items() if key in f.metadata]
            if f.metadata.get("choices"):
                wrong = ["no choice"]
            for value in wrong[:2]:
                what = f"bad input: {recipe_name(f)}={value}"
                self.report.refuses(what, RecipeError, partial(cls, **{f.name: value}))
        unknown = partial(cls.from_texts, {"no-such-parameter": "1"})
        self.report.refuses("bad input: an unknown parameter", RecipeError, unknown)

    # --- answers ---------------------------------------------------------------------------------

    def text_only(self) -> None:
        given = self._given()
        full = self.vlm.ask("what is two and two ?", top_logprobs=2, **given)
        with self.report.during("media: no image"):
            got = self.vlm.ask("what is two and two ?", recipe=self.stage, **given)
        self.same("media: no image", got, full)

    def answered(self, case: str) -> Answer:
        name = f"media: {case}"
        with self.report.during(name):
            answer = self.ask(case)
        stats = answer.stats
        self.report.require(answer.token_ids, name, "no token was generated")
        kept, full = stats.equivalent_tokens, stats.visual_tokens_in
        self.report.require(0 < kept <= full, name, f"{kept:g} of {full} visual tokens")
        kept, full = stats.kv_bytes, stats.kv_bytes_full
        self.report.require(0 < kept <= full, name, f"{kept} bytes of cache, of {full}")
        self.report.passed(name)
        return answer

    def effect(self, answers: dict[str, Answer]) -> None:
        for case, answer in answers.items():
            stats = answer.stats
            fewer = stats.equivalent_tokens < stats.visual_tokens_in
            smaller = stats.kv_bytes < stats.kv_bytes_full
            smaller |= stats.views_encoded < stats.views
            if self.chooses:
                smaller |= stats.visual_tokens_in < self.ask(case, None).stats.visual_tokens_in
            if fewer or smaller or (self.drafts and stats.rounds > 0):
                self.report.passed("effect")
                return
        self.report.require(False, "effect", "it changes nothing; check it with smaller parameters")

    def identity(self) -> None:
        names = [f.name for f in fields(self.stage) if f.name in ("keep", "budget")]
        if not names:
            self.report.left_out("identity", "it has neither keep nor budget")
            return
        key = "keep" if "keep" in names else "budget"
        stage = with_values(self.stage, **(dict.fromkeys(names) | {key: 1.0}))
        for case in self.media:
            name = f"identity: {key}=1, {case}"
            with self.report.during(name):
                answer = self.ask(case, stage)
            self.same(name, answer, self.ask(case, None))

    def batch(self, answers: dict[str, Answer]) -> None:
        requests = [
            Request(_QUESTION, **self.media[case], recipe=recipe)
            for case in self.media
            for recipe in (self.stage, None)
        ]
        given = self._given()
        with self.report.during("equality: in a batch"):
            found = self.vlm.ask_many(requests, batch_size=len(requests), **given)
        for case, got in zip(self.media, found[::2], strict=True):
            self.same(f"equality: in a batch, {case}", got, answers[case])

    def session(self, case: str, expected: Answer) -> None:
        name = "equality: in a session"
        given = self._given()
        try:
            opened = self.vlm.session(**self.media[case], recipe=self.stage, history=False)
        except RecipeError as error:  # a session reads its images before any question
            self.report.require(self.stage.query_dependent, name, str(error))
            self.report.left_out(name, str(error).partition("\n")[0])
            return
        with opened as session, self.report.during(name):
            got = session.ask(_QUESTION, **given)
            if session.reuses == "kv" and not self.drafts:
                # Images are compressed without the question: another answer is legitimate.
                self.same(name, session.ask(_QUESTION, **given), got)
            else:
                self.same(name, got, expected)
