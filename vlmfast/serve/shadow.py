"""Shadow mode: a share of requests is answered again by the full model, and agreement is counted.

A request is answered again only while no client waits, and no client sees of it. What is kept for
it, its images above all, is bounded; where more comes, requests are left out and counted.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList

from vlmfast.api.answer import Answer, Request
from vlmfast.api.vlm import VLM

LOG = logging.getLogger("vlmfast.serve")
PRIORITY = 1 << 20  # after all requests of clients
MOST, MOST_BYTES = 16, 256 << 20  # requests that wait to be answered again, and their media
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Agreement:
    """What the answer under a recipe and that of the full model have in common.

    Parameters
    ----------
    recipe : str
        Canonical text.
    equal : bool, optional
        Whether all tokens are equal; ``None`` where they were sampled.
    overlap : float
        Of the distributions of the first token: 1 minus their total variation distance.
    """

    recipe: str
    equal: bool | None
    overlap: float


@dataclass(frozen=True)
class Sample:
    """A request that was answered, to be answered again.

    Parameters
    ----------
    messages : list of dict
        As of `VLM.chat`.
    compared : callable
        Compares an answer to it with that of the full model.
    """

    messages: list[dict[str, Any]]
    compared: Callable[[Answer], Agreement]

    @property
    def bytes(self) -> int:
        """Of its media: decoded images, and videos as they were sent."""
        contents = (message["content"] for message in self.messages)
        entries = (entry for content in contents if isinstance(content, list) for entry in content)
        media = (entry[key] for entry in entries for key in ("image", "video") if key in entry)
        return sum(
            len(one) if isinstance(one, bytes) else one.width * one.height * len(one.getbands())
            for one in media
        )


class FirstToken:
    """A logits processor that changes nothing, and keeps the distribution of the first token."""

    def __init__(self) -> None:
        self.probabilities: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.probabilities is None:
            self.probabilities = scores[0].float().softmax(-1).cpu()
        return scores


@dataclass(frozen=True)
class Again:
    """Answers a request of vlmfast's engine again.

    Parameters
    ----------
    vlm : VLM
    request : Request
        Without what counts tokens, such as a grammar: that is made for each answer.
    stateful : callable
        Makes these generation arguments.
    default_new_tokens : int
        As for `VLM.submit`.
    """

    vlm: VLM
    request: Request
    stateful: Callable[[], dict[str, Any]]
    default_new_tokens: int

    def compared(self, answer: Answer) -> Agreement:
        """Compare an answer to the request with that of the full model."""
        sampled = bool(self.request.generation["do_sample"])
        own, _ = self._answer(self.request.recipe, max_new_tokens=1)
        full, other = self._answer("none", **({"max_new_tokens": 1} if sampled else {}))
        equal = None if sampled else other.token_ids == answer.token_ids
        return Agreement(answer.canonical_recipe, equal, float(own.minimum(full).sum()))

    def _answer(self, recipe: Any, **more: Any) -> tuple[Tensor, Answer]:
        """The distribution of the first token, and the answer."""
        first, generation = FirstToken(), self.request.generation | self.stateful() | more
        processors = [*generation.pop("logits_processor", ()), first]
        generation["logits_processor"] = LogitsProcessorList(processors)
        handle = self.vlm.submit(
            replace(self.request, recipe=recipe, generation=generation),
            priority=PRIORITY,
            default_new_tokens=self.default_new_tokens,
        )
        answer = handle.result()
        assert first.probabilities is not None
        return first.probabilities, answer


class Shadow:
    """Answers a share of requests again, in a thread of its own, while nothing else runs.

    Parameters
    ----------
    share : float
        Of the requests with another recipe than ``none``.
    idle : callable
        Whether no request of a client is prepared or answered.
    found : callable
        Called with each `Agreement`, and with ``None`` for a request that was left out.
    """

    def __init__(
        self, share: float, idle: Callable[[], bool], found: Callable[[Agreement | None], None]
    ) -> None:
        self._share, self._idle, self._found = share, idle, found
        self._waiting: deque[tuple[Sample, Answer]] = deque()
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="vlmfast-shadow", daemon=True)
        self._thread.start()

    def takes(self, recipe: str) -> bool:
        """Whether a request with a recipe is one of the share."""
        return recipe != "none" and random.random() < self._share

    def add(self, sample: Sample, answer: Answer) -> None:
        """Answer a request again, later."""
        with self._changed:
            kept = sum(one.bytes for one, _ in self._waiting)
            fits = len(self._waiting) < MOST and kept + sample.bytes <= MOST_BYTES
            if fits and not self._closed.is_set():
                self._waiting.append((sample, answer))
                self._changed.notify()
                return
        self._found(None)

    def close(self) -> None:
        """Forget what waits."""
        with self._changed:
            self._closed.set()
            self._waiting.clear()
            self._changed.notify()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
            while not self._idle() and not self._closed.wait(_PAUSE_S):
                pass
            with self._changed:
                if not self._waiting:
                    continue
                sample, answer = self._waiting.popleft()
            try:
                self._found(sample.compared(answer))
            except Exception:
                if self._closed.is_set():
                    return
                LOG.exception("a request cannot be answered again")
                self._found(None)
