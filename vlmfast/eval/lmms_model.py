"""The models of lmms-eval that `lmms` declares; they need the package ``lmms-eval``."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from vlmfast.errors import MediaError, VLMFastError
from vlmfast.media import kind_of

from .likelihood import likelihoods
from .lmms_generation import cut, generation_of, unread

LOG = logging.getLogger(__name__)

# The messages of a round, or None after the last one; the earlier answers, which a task may change;
# and the task's notes for the next round.
Round = tuple[list[dict] | None, list[str], Any]


class _Model(lmms):
    """What both interfaces of lmms-eval 0.7 share.

    Parameters
    ----------
    pretrained : str
        ``tiny``, a local folder, or a hub id.
    recipe : str
        With ``;`` instead of ``,``, because lmms-eval splits arguments at commas:
        ``hired:0.2;positions=compact``.
    device, dtype, revision : str, optional
    num_frames : int
        Frames of each video.
    batch_size : int
        Requests that are decoded together.

    Raises
    ------
    VLMFastError
        For an unknown argument, and as `VLM.from_pretrained` and `Recipe.parse` do.
    """

    def __init__(
        self,
        pretrained: str = "tiny",
        recipe: str = "none",
        device: str | None = None,
        dtype: str = "auto",
        revision: str | None = None,
        num_frames: int = 32,
        batch_size: int | str = 1,
        **unknown: Any,
    ) -> None:
        from vlmfast.api.vlm import VLM

        super().__init__()
        # lmms-eval passes these to every model.
        unknown = {k: v for k, v in unknown.items() if k != "max_batch_size" or v is not None}
        if unknown:
            raise VLMFastError(
                f"vlmfast has no model_args {', '.join(unknown)}; it has pretrained, recipe, "
                "device, dtype, revision, num_frames and batch_size"
            )
        self.batch_size = _whole("batch_size", batch_size)
        self.num_frames = _whole("num_frames", num_frames)
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        if self._world_size > 1 and self.accelerator.device.type == "cuda":
            device = str(self.accelerator.device)
        kwargs: dict[str, Any] = {} if revision is None else {"revision": revision}
        self.vlm = VLM.from_pretrained(pretrained, device=device, dtype=dtype, **kwargs)
        self.recipe = self.vlm.recipe(str(recipe).replace(";", ","))
        self._unread: set[str] = set()  # arguments of tasks that were named in the log

    @property
    def model(self) -> Any:
        return self.vlm.model

    @property
    def tokenizer(self) -> Any:
        return self.vlm.processor.tokenizer

    @property
    def device(self) -> Any:
        return self.vlm.model.device

    @abstractmethod
    def _asked(self, request: Instance) -> tuple[list[dict], dict[str, Any]]:
        """The messages of a request as `VLM.chat` takes them, and its generation arguments."""

    @abstractmethod
    def _rounds(self, request: Instance) -> tuple[Callable[..., Round], dict[str, Any]]:
        """Make the messages of each round, from its number, earlier answers and the task's notes.

        Also returns the generation arguments.
        """

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """Answers in the order of the requests."""
        start = time.perf_counter()
        with self.vlm.prefix_cache.bypassed():  # times are reported
            answers = self._answers(map(self._asked, requests), len(requests))
        results = []
        for request, (answer, text) in zip(requests, answers, strict=True):
            counts = TokenCounts(answer.stats.prompt_tokens, len(answer.token_ids))
            results.append(GenerationResult(text, counts))
            self.cache_hook.add_partial("generate_until", _key(request), text)
        self._log([answer for answer, _ in answers], time.perf_counter() - start)
        return results

    def _answers(
        self, prompts: Iterator[tuple[list[dict], dict[str, Any]]], number: int
    ) -> list[tuple[Any, str]]:
        """Answers to conversations, and their texts up to the stop strings."""
        from vlmfast.api.vlm import Request

        untils: list[list[str]] = []

        def asked() -> Iterator[Request]:
            bar = tqdm(prompts, total=number, disable=self.rank != 0, desc="vlmfast")
            for messages, arguments in bar:
                generation, until = generation_of(arguments)
                if new := [name for name in unread(arguments) if name not in self._unread]:
                    LOG.warning("generation arguments without effect: %s", ", ".join(new))
                    self._unread.update(new)
                untils.append(until)
                yield Request(messages=messages, recipe=self.recipe, generation=generation)

        answers = self.vlm.ask_many(asked(), batch_size=self.batch_size)
        texts = [cut(answer.text, until) for answer, until in zip(answers, untils, strict=True)]
        return list(zip(answers, texts, strict=True))

    def _log(self, answers: list[Any], seconds: float) -> None:
        if not answers:
            return

        def mean(name: str) -> float:
            return sum(getattr(answer.stats, name) for answer in answers) / len(answers)

        tokens = sum(len(answer.token_ids) for answer in answers)
        own = ("visual_tokens_in", "equivalent_tokens", "ttft_s", "kv_bytes", "flops_prefill")
        log_metrics(
            total_elapsed_time=seconds,
            total_gen_tokens=tokens,
            avg_speed=tokens / seconds,
            additional_metrics={"recipe": str(self.recipe)} | {name: mean(name) for name in own},
        )

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        """How unlikely each continuation is, and whether greedy decoding would generate it.

        lmms-eval 0.7 chooses the option with the smallest value, since all its models return a
        loss. The value is therefore the negative sum of the log-probabilities (`likelihoods`).

        Returns
        -------
        list of GenerationResult
            Each with a tuple of float and bool as its text: lmms-eval 0.7.3 converts a bare tuple
            to a string, with which its scoring of multiple-choice tasks fails.
        """

        def prompts() -> Iterator[tuple[list[dict], str]]:
            bar = tqdm(requests, disable=self.rank != 0, desc="vlmfast")
            for request in bar:
                context, continuation, doc_to_visual, *place = request.args
                doc = self._doc(*place)
                text = continuation(doc) if callable(continuation) else continuation
                yield self._turn(doc_to_visual(doc), context), str(text)

        found = likelihoods(self.vlm, prompts(), self.recipe, self.batch_size)
        results = [(-one.logprob, one.greedy) for one in found]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", _key(request), result)
        return [GenerationResult(result) for result in results]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        """The answers of all rounds of each request.

        A task makes the messages of each round from the earlier answers. Each round of all
        requests is answered in batches.
        """
        tasks = [self._rounds(request) for request in requests]
        found: list[list[str]] = [[] for _ in requests]
        notes: list[Any] = [None] * len(requests)
        left, number = list(range(len(requests))), 0
        while left:
            prompts = []
            for index in left:
                make, arguments = tasks[index]
                messages, earlier, notes[index] = make(number, list(found[index]), notes[index])
                found[index] = list(earlier)
                if messages is not None:
                    prompts.append((index, (messages, arguments)))
            answers = self._answers(iter([prompt for _, prompt in prompts]), len(prompts))
            left = [index for index, _ in prompts]
            for index, (_, text) in zip(left, answers, strict=True):
                found[index].append(text)
            number += 1
        for request, texts in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until_multi_round", _key(request), texts)
        return found

    def _doc(self, doc_id: int, task: str, split: str) -> Any:
        return self.task_dict[task][split][doc_id]

    def _turn(self, visuals: Any, text: str) -> list[dict]:
        """A question after its images and videos."""
        content = [content_of(visual, self.num_frames) for visual in visuals or ()]
        return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]

    def _chat(self, messages: list[dict]) -> list[dict]:
        return chat_of(ChatMessages(messages=messages), self.num_frames)


class VLMFast(_Model):
    """The chat interface: tasks give messages with images at their position in the text."""

    is_simple = False

    def _asked(self, request: Instance) -> tuple[list[dict], dict[str, Any]]:
        _, doc_to_messages, arguments, *place = request.args
        return self._chat(doc_to_messages(self._doc(*place))), arguments

    def _rounds(self, request: Instance) -> tuple[Callable[..., Round], dict[str, Any]]:
        _, doc_to_messages, arguments, *place = request.args
        doc = self._doc(*place)

        def make(number: int, answers: list[str], notes: Any) -> Round:
            if not number:
                return self._chat(doc_to_messages(doc)), answers, None
            found = doc_to_messages(
                doc, round_idx=number, previous_output=answers, previous_round_info=notes
            )
            # A task without rounds gives the messages of the first one again.
            if not isinstance(found, tuple) or len(found) != 4:
                return None, answers, None
            messages, ended, answers, notes = found
            return (None if ended else self._chat(messages)), answers, notes

        return make, arguments


class VLMFastSimple(_Model):
    """The interface of ``--force_simple``: tasks give a text and the images and videos before it.

    lmms-eval has multiple-choice tasks, which need log-likelihoods, in this interface only.
    """

    is_simple = True

    def _asked(self, request: Instance) -> tuple[list[dict], dict[str, Any]]:
        context, arguments, doc_to_visual, *place = request.args
        return self._turn(doc_to_visual(self._doc(*place)), context), arguments

    def _rounds(self, request: Instance) -> tuple[Callable[..., Round], dict[str, Any]]:
        context, arguments, doc_to_visual, doc_to_text, *place = request.args
        doc = self._doc(*place)

        def make(number: int, answers: list[str], notes: Any) -> Round:
            if not number:
                return self._turn(doc_to_visual(doc), context), answers, None
            visuals, text, ended, answers, notes = doc_to_text(
                doc, round_idx=number, previous_output=answers, previous_round_info=notes
            )
            return (None if ended else self._turn(visuals, text)), answers, notes

        return make, arguments


def _key(request: Instance) -> tuple[Any, Any]:
    """The two arguments by which lmms-eval finds a request in its cache."""
    first, second, third = request.args[:3]
    return first, third if callable(second) else second


def _whole(name: str, value: Any) -> int:
    """A whole number of at least 1, also as a text."""
    if not str(value).isdecimal() or int(value) < 1:
        raise VLMFastError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return int(value)


def content_of(visual: Any, num_frames: int) -> dict[str, Any]:
    """Convert an image or the path of a video for `VLM.chat`.

    Raises
    ------
    MediaError
        For audio and for files that are neither images nor videos.
    """
    if isinstance(visual, dict):
        raise MediaError(
            f"an input is a dict of {', '.join(map(str, visual))}; supported are images and the "
            "paths of images and videos"
        )
    if isinstance(visual, str | Path) and kind_of(visual) == "video":
        return {"type": "video", "video": visual, "num_frames": num_frames}
    return {"type": "image", "image": visual}


def chat_of(messages: ChatMessages, num_frames: int) -> list[dict[str, Any]]:
    """Convert lmms-eval's messages for `VLM.chat`, with images at their position in the text.

    Raises
    ------
    MediaError
        For audio.
    """
    chat = []
    for message in messages.messages:
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if part.type == "text":
                parts.append({"type": "text", "text": part.text})
            elif part.type == "image":
                parts.append({"type": "image", "image": part.url})
            elif part.type == "video":
                parts.append({"type": "video", "video": part.url, "num_frames": num_frames})
            else:
                raise MediaError(f"a message has {part.type}; supported are images and videos")
        chat.append({"role": message.role, "content": parts})
    return chat
