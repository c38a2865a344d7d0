"""Checks of a family against Hugging Face's own forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmfast.api.answer import Answer, Request
from vlmfast.api.vlm import VLM
from vlmfast.errors import ModelError, VLMFastError

from .media import cases
from .report import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

_QUESTION = "what is here ?"
_SAFETY = 8.0  # roundings that a sum may be off by, as a multiple of their random walk
_APART = 30.0  # how far a control must be, in tolerances


def check_family(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    *,
    question: str = _QUESTION,
    max_new_tokens: int = 6,
) -> Report:
    """Check that vlmfast computes what Hugging Face computes on a model.

    Use a small model with random weights, in float32 or float64: its logits must be those of
    ``generate`` up to rounding. The checks are

    - *equality*: without a recipe, tokens and log-probabilities are those of ``generate``, with no
      image, one, three, a video, and both;
    - *identity*: recipes that keep everything give the same tokens;
    - *drops*: tokens dropped before or inside the language model give what Hugging Face's forward
      gives with their keys masked, or with their rows taken out where layers hold states;
    - *layout*: each visual token has its place in an image;
    - *batches* and *sessions* answer as single requests do;
    - *bad input* raises `ModelError` or `VLMFastError`.

    Parameters
    ----------
    model, processor
        As in `VLM`. The processor needs a chat template.
    question : str
    max_new_tokens : int

    Returns
    -------
    Report
        A case that the family refuses with a `VLMFastError` is listed with its reason.

    Raises
    ------
    CheckFailed
        For the first difference or unexpected exception, with the check and the case.
    ModelError
        If the family is not supported, refuses a prompt with one image, or the model is neither in
        float32 nor in float64.
    """
    return _Checks(model, processor, question, max_new_tokens).run()


class _Checks:
    """The checks of one model.

    Attributes
    ----------
    full : dict of str to Answer
        The full model's answers by case.
    """

    def __init__(
        self, model: PreTrainedModel, processor: ProcessorMixin, question: str, max_new_tokens: int
    ) -> None:
        self.vlm = VLM(model, processor)
        if self.vlm.adapter.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"check_family compares logits up to rounding, which {self.vlm.adapter.dtype} does "
                "not allow; use model.float()"
            )
        self.adapter, self.question, self.count = self.vlm.adapter, question, max_new_tokens
        self.report = Report(self.adapter.config.model_type)
        self.full: dict[str, Answer] = {}
        self.media = cases()

    def run(self) -> Report:
        self.bad_input()
        for case, media in self.media.items():
            try:
                tensors = self.vlm.inputs(self.question, **media)
            except VLMFastError as error:
                if case == "one image":
                    raise
                self.report.left_out(f"equality: {case}", str(error).partition("\n")[0])
                continue
            with self.report.during(f"equality: {case}"):
                self.equality(case, tensors)
        for case in ("three images", "a video"):
            if case in self.full:
                self.identity(case)
                self.drops(case)
                self.layout(case)
                self.session(case)
        self.batch()
        return self.report

    # --- nothing dropped -------------------------------------------------------------------------

    def ask(self, case: str, recipe: str | None = None, **generation: Any) -> Answer:
        given = {"max_new_tokens": self.count, "do_sample": False} | generation
        return self.vlm.ask(self.question, **self.media[case], recipe=recipe, **given)

    def equality(self, case: str, tensors: dict[str, Tensor]) -> None:
        name, ids = f"equality: {case}", tensors["input_ids"]
        with torch.no_grad():
            expected = self.vlm.model.generate(
                **tensors,
                max_new_tokens=self.count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = expected.sequences[0, ids.shape[1] :].tolist()
        logits = torch.cat(expected.logits)
        answer = self.full[case] = self.ask(case, top_logprobs=0)
        self.same(name, answer.token_ids, tokens)
        note = self.close(name, answer, logits, ids.shape[1])
        visual = int(self.adapter.visual(ids).sum())
        self.report.require(
            answer.stats.visual_tokens_in == visual and (visual > 0) == (case != "no image"),
            name,
            f"{answer.stats.visual_tokens_in} visual tokens for {visual} placeholders",
        )
        self.report.passed(name, note)

    def same(self, name: str, got: list[int], expected: list[int]) -> None:
        self.report.require(got == expected, name, f"{got} instead of {expected}")

    def close(self, name: str, answer: Answer, logits: Tensor, rows: int) -> str:
        """Log-probabilities of an answer's tokens are those of ``logits``, up to rounding."""
        assert answer.logprobs is not None
        count = len(logits)
        got = torch.tensor([step.logprob for step in answer.logprobs[:count]], dtype=torch.float64)
        expected = logits.double().log_softmax(-1)
        expected = expected[torch.arange(count), answer.token_ids[:count]].cpu()
        difference = float((got - expected).abs().max())
        bound = self.tolerance(logits, rows)
        self.report.require(
            difference <= bound, name, f"logits differ by {difference:.2g}, allowed is {bound:.2g}"
        )
        return f"{difference:.1e}"

    def tolerance(self, logits: Tensor, rows: int) -> float:
        """What rounding explains: a random walk over the lengths of all sums up to a logit."""
        text = self.adapter.config.get_text_config()
        layer = 3 * text.hidden_size + text.intermediate_size + rows + self.count
        terms = self.adapter.depth * layer + logits.shape[-1]
        eps = max(torch.finfo(logits.dtype).eps, torch.finfo(torch.float32).eps)
        return _SAFETY * eps * math.sqrt(terms) * max(float(logits.abs().max()), 1.0)

    def identity(self, case: str) -> None:
        first = self.first_drop()
        for recipe in ("random:1", f"fastv:1,k={first}", "snapkv:1"):
            name = f"identity: {recipe}, {case}"
            with self.report.during(name):
                try:
                    answer = self.ask(case, recipe)
                except VLMFastError as error:
                    self.report.left_out(name, str(error).partition("\n")[0])
                    continue
            self.same(name, answer.token_ids, self.full[case].token_ids)
            self.report.passed(name)

    # --- dropped tokens --------------------------------------------------------------------------

    def first_drop(self) -> int:
        """The first layer before which tokens can be dropped by the attention of the one before."""
        adapter = self.adapter
        layers = range(max(adapter.min_drop_layer, 1), adapter.depth)
        return next((k for k in layers if k - 1 not in adapter.state_layers), 1)

    def drops(self, case: str) -> None:
        """Hugging Face's forward without the dropped tokens is the reference."""
        tensors = self.vlm.inputs(self.question, **self.media[case])
        rows = tensors["input_ids"].shape[1]
        if any(window is not None and rows > window for window in self.adapter.windows):
            self.report.left_out(f"drops: {case}", "a window counts the rows that enter its layer")
            return
        for recipe in ("random:0.5", f"fastv:0.5,k={self.first_drop()}"):
            name = f"drops: {recipe}, {case}"
            with self.report.during(name):
                given = {"max_new_tokens": 1, "top_logprobs": 0}
                answer = self.ask(case, recipe, **given)
            layout, depth = answer.trace.layout, answer.trace.depth
            assert layout is not None and depth is not None
            dropped = int((depth < self.adapter.depth).sum())
            self.report.require(dropped > 0, name, "nothing was dropped")
            logits = self.without(tensors, layout.order, depth)
            note = self.close(name, answer, logits, rows)
            whole = self.without(tensors, layout.order, torch.full_like(depth, self.adapter.depth))
            control = float((whole - logits).abs().max())
            self.report.require(
                control > _APART * self.tolerance(logits, rows),
                name,
                f"dropping nothing changes the logits by {control:.2g} alone: use weights with "
                "which images matter",
            )
            self.report.passed(name, note)

    def without(self, tensors: dict[str, Tensor], order: Tensor, depth: Tensor) -> Tensor:
        """Logits (1, V) after a prompt whose tokens ``order`` entered ``depth`` layers each.

        Keys of dropped tokens are masked. That of a state cannot be masked: where layers hold
        states, the rows are taken out between the layers.
        """
        size = tensors["input_ids"].shape[1]
        entered = torch.full((size,), self.adapter.depth, device=order.device)
        entered[order.long()] = depth
        hook = _taken_out if self.adapter.state_layers else _masked
        with _eager(self.vlm.model), torch.no_grad():
            handles = [
                module.register_forward_pre_hook(hook(entered, layer), with_kwargs=True)
                for layer, module in enumerate(self.adapter.decoder.layers)
            ]
            try:
                return self.vlm.model(**tensors, use_cache=False).logits[:, -1]
            finally:
                for handle in handles:
                    handle.remove()

    def layout(self, case: str) -> None:
        name = f"layout: {case}"
        layout = self.full[case].trace.layout
        assert layout is not None
        layout = layout.select(layout.patches)
        box = layout.box
        # Those of patches that only pad the image are empty.
        inside = bool((box[:, :2] <= box[:, 2:]).all()) and box.min() >= 0 and box.max() <= 1
        reason = "boxes of tokens must lie within the image, as fractions of its width and height"
        self.report.require(inside, name, reason)
        ordered = bool((layout.item.diff() >= 0).all())
        self.report.require(ordered, name, "items must be in the order of the prompt")
        place = torch.cat([layout.item[:, None], layout.tile[:, None], layout.grid], dim=1)
        distinct = len(place.unique(dim=0)) == len(place)
        self.report.require(distinct, name, "two tokens have the same grid position")
        self.report.passed(name)

    # --- several requests ------------------------------------------------------------------------

    def session(self, case: str) -> None:
        name = f"session: {case}"
        try:
            opened = self.vlm.session(**self.media[case], history=False)
        except VLMFastError as error:
            self.report.left_out(name, str(error).partition("\n")[0])
            return
        with opened as session, self.report.during(name):
            for question in (self.question, "and the rest ?"):
                given: dict[str, Any] = {"max_new_tokens": self.count, "do_sample": False}
                # The first one has been compared; others may continue a stored prefix themselves.
                expected = self.full[case]
                if question != self.question:
                    expected = self.vlm.ask(question, **self.media[case], **given)
                got = session.ask(question, **given)
                self.same(name, got.token_ids, expected.token_ids)
            self.report.passed(name, f"reuses {session.reuses}")

    def batch(self) -> None:
        """Rows with different images and recipes, in one batch."""
        recipes = (None, "random:0.5", f"fastv:0.5,k={self.first_drop()}", "snapkv:0.5,window=4")
        chosen = [(case, recipe) for case, recipe in zip(self.full, recipes, strict=False)]
        requests = [
            Request(self.question, **self.media[case], recipe=recipe) for case, recipe in chosen
        ]
        given: dict[str, Any] = {"max_new_tokens": self.count, "do_sample": False}
        with self.report.during("batch"):
            answers = self.vlm.ask_many(requests, batch_size=len(requests), **given)
        for (case, recipe), answer in zip(chosen, answers, strict=True):
            alone = self.ask(case, recipe)
            self.same(f"batch: {recipe or 'none'}, {case}", answer.token_ids, alone.token_ids)
        self.report.passed(f"batch: {len(requests)} requests")

    # --- bad input -------------------------------------------------------------------------------

    def bad_input(self) -> None:
        vlm, report, image = self.vlm, self.report, self.media["one image"]["images"][0]
        mark, flat = f"{self.adapter.image_token()} {self.question}", image[..., 0][None, None]
        wrong: tuple[tuple[str, type[VLMFastError], Callable[[], Any]], ...] = (
            (
                "a tokenizer as processor",
                ModelError,
                lambda: VLM(vlm.model, vlm.processor.tokenizer),
            ),
            ("a placeholder without an image", VLMFastError, lambda: vlm.ask(mark)),
            ("an image without channels", VLMFastError, lambda: vlm.ask(self.question, flat)),
        )
        for what, error, call in wrong:
            report.refuses(f"bad input: {what}", error, call)


def _masked(entered: Tensor, layer: int) -> Callable[..., tuple[tuple, dict]]:
    """A hook that masks the keys of rows that entered no more than ``layer`` layers."""
    gone = (entered <= layer).nonzero().flatten()

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        mask = kwargs["attention_mask"].clone()
        mask[..., gone] = torch.finfo(mask.dtype).min
        mask[..., gone, gone] = 0.0  # so that each row sees one key
        return args, {**kwargs, "attention_mask": mask}

    return hook


def _taken_out(entered: Tensor, layer: int) -> Callable[..., tuple[tuple, dict]]:
    """A hook that takes rows out of the input that entered no more than ``layer`` layers."""
    left = (entered > layer).nonzero().flatten()
    before = entered > layer - 1 if layer else torch.ones_like(entered, dtype=torch.bool)
    own = (before.cumsum(0) - 1)[left]  # among the rows that the last layer has returned

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        tables = tuple(table[..., left, :] for table in kwargs["position_embeddings"])
        mask = kwargs["attention_mask"]
        if mask is not None:
            mask = mask[..., left, :][..., left] if mask.dim() == 4 else mask[..., left]
        changed = {"position_embeddings": tables, "attention_mask": mask, "position_ids": None}
        return (args[0][:, own], *args[1:]), {**kwargs, **changed}

    return hook


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """The language model's masks are complete under Hugging Face's eager attention."""
    text = model.config.get_text_config()
    before = text._attn_implementation
    key = next(k for k in ("text_config", "") if not k or getattr(model.config, k, None) is text)
    model.set_attn_implementation({key: "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({key: before})
