"""A request that the engine is answering."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from .sequence import Sequence

if TYPE_CHECKING:
    from .engine import Engine

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """A request that was submitted; several threads may use it.

    A thread that waits for it runs the engine, or waits for the thread that does. As a context
    manager it cancels the request when the block ends before the answer.

    Iterate over it for the pieces of the text as they are generated, and finally the answer.

    Attributes
    ----------
    sequence : Sequence
        The state of the request, to be read only.
    """

    def __init__(
        self, engine: Engine, sequence: Sequence, finish: Callable[[Sequence], Result]
    ) -> None:
        self._engine, self.sequence, self._finish = engine, sequence, finish
        self._result: Result | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended: with an answer, an error, or because it was cancelled."""
        return self.sequence.finished

    def cancel(self) -> None:
        """End the request at the next opportunity; `result` then raises `RequestCancelled`."""
        self.sequence.cancelled = True

    def listen(self, callback: Callable[[], None], *, streamed: bool = False) -> None:
        """Call a function after each new token and at the end, instead of waiting in a thread.

        It is also called once before this returns. The engine runs in the background from now on,
        and calls the function in its own thread: it must return at once.

        >>> handle.listen(lambda: loop.call_soon_threadsafe(event.set))

        Parameters
        ----------
        callback : callable
            Without arguments. What it raises ends the request.
        streamed : bool
            Whether tokens are read while they are generated: prompts of other requests then make
            way for them.
        """
        self.sequence.streamed |= streamed
        self.sequence.listener = callback
        self._engine.start()
        callback()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the answer.

        Parameters
        ----------
        timeout : float, optional
            Seconds; waits as long as it takes by default.

        Raises
        ------
        TimeoutError
            The request goes on.
        RequestCancelled, DeadlineExceeded
            When it was ended before its answer was complete.
        Exception
            What went wrong.
        """
        engine, sequence = self._engine, self.sequence
        end = math.inf if timeout is None else time.monotonic() + timeout
        if not engine.run(lambda: sequence.finished, end):
            raise TimeoutError(f"the answer is not complete after {timeout:g} s")
        engine.settle()
        if sequence.error is not None:
            raise sequence.error
        if self._result is None:
            self._result = self._finish(sequence)
        return self._result

    def close(self) -> None:
        """Cancel the request, unless it has ended, and wait until it has left the engine."""
        sequence = self.sequence
        if not sequence.finished:
            self.cancel()
            self._engine.run(lambda: sequence.finished)
        self._engine.settle()

    def __enter__(self) -> Handle[Result]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str | Result]:
        from transformers import TextIteratorStreamer

        engine, sequence = self._engine, self.sequence
        streamer = TextIteratorStreamer(
            engine.adapter.processor.tokenizer, skip_special_tokens=True
        )
        sequence.streamed = True
        engine.start()
        tokens, read = sequence.sampler.tokens, 0
        while True:
            engine.wait(partial(_more, sequence, read))
            ended = sequence.finished
            if sequence.error is None:
                for token in tokens[read : sequence.emitted]:
                    streamer.put(torch.tensor([token]))
                    read += 1
                if ended:
                    streamer.end()
            while not streamer.text_queue.empty():
                if piece := streamer.text_queue.get():
                    yield piece
            if ended:
                break
        yield self.result()


def result_of(submit: Callable[[], Handle[Result]]) -> Result:
    """Submit a request and wait for its result; it is cancelled however this ends before.

    ``with submit()`` would leave it in the engine where an interrupt comes before the block.
    """
    handle = None
    try:
        handle = submit()
        return handle.result()
    finally:
        if handle is not None:
            handle.close()


def pieces_of(submit: Callable[[], Handle[Result]]) -> Generator[str | Result, None, None]:
    """Like `result_of`, but yield the pieces of the text before the result."""
    handle = None
    try:
        handle = submit()
        yield from handle
    finally:
        if handle is not None:
            handle.close()


def _more(sequence: Sequence, read: int) -> bool:
    """Whether a sequence has more than ``read`` tokens, or has ended."""
    return sequence.emitted > read or sequence.finished
