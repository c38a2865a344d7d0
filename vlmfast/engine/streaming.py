"""Streaming of answers: generation in a thread, text through a queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from transformers import StoppingCriteria, TextIteratorStreamer

from .sampling import HostCriterion


class _Cancelled(HostCriterion):
    """Stops generation at the next token, once the reader has closed the stream."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def is_done(self) -> bool:
        return self.event.is_set()


def stream(
    tokenizer: Any, answer: Callable[[TextIteratorStreamer, StoppingCriteria], Any]
) -> Iterator[Any]:
    """Yield text pieces, then what ``answer(streamer, cancelled)`` returned.

    An exception of the call is raised here; closing the iterator stops the generation.
    """
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    cancelled, outcome = _Cancelled(), {}

    def work() -> None:
        try:
            outcome["answer"] = answer(streamer, cancelled)
        except BaseException as error:
            outcome["error"] = error
            streamer.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        for piece in streamer:
            if piece:
                yield piece
    finally:
        cancelled.event.set()
        thread.join()
    if "error" in outcome:
        raise outcome["error"]
    yield outcome["answer"]
