"""How a thread's turn to run steps, and a sequence, end."""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field

from vlmfast.errors import DeadlineExceeded, RequestCancelled, VLMFastError

from .handle import Handle
from .restore import Changes
from .rounds import fail
from .sequence import Sequence


@dataclass(eq=False)
class Running:
    """One thread's turn to run steps.

    Attributes
    ----------
    changes : Changes
        To the model and to the thread.
    ended : bool
        Whether it has not begun, or ended between two steps.
    error : Exception, optional
        Why it ended elsewhere; an interrupt without one.
    """

    thread: int
    changes: Changes = field(default_factory=Changes)
    ended: bool = True
    error: Exception | None = None


def any_done(handles: Many[Handle]) -> bool:
    return any(handle.done for handle in handles)


def all_done_or_failed(handles: Many[Handle], keep_errors: bool) -> bool:
    """Whether all have ended, or one has failed and errors are not kept."""
    done = [handle.sequence for handle in handles if handle.done]
    failed = not keep_errors and any(sequence.error is not None for sequence in done)
    return len(done) == len(handles) or failed


def call_on_end(sequence: Sequence) -> None:
    on_end, sequence.on_end = sequence.on_end, None  # an interrupt does not repeat it
    if on_end is not None:
        try:
            on_end(sequence)
        except Exception as problem:
            fail(sequence, problem)


def call_listener(sequence: Sequence) -> None:
    if sequence.listener is not None:
        with suppress(Exception):  # its event loop may be closed; the result is in the handle
            sequence.listener()


def stopped(sequence: Sequence) -> VLMFastError:
    """Why a sequence that must end ends."""
    after = f"after {sequence.count} tokens of its answer"
    if sequence.cancelled:
        return RequestCancelled(f"the request was cancelled {after}")
    return DeadlineExceeded(f"the request reached its deadline {after}")


def interrupted() -> VLMFastError:
    return VLMFastError("the thread that ran the engine was interrupted; ask again")


def numbered(sequence: Sequence) -> Exception:
    """The error of a sequence, with the number of its request."""
    error = sequence.error
    assert error is not None
    if not isinstance(error, VLMFastError):  # of the caller's own code
        error.add_note(f"request {sequence.number}")
        return error
    named = type(error)(f"request {sequence.number}: {error}")
    named.__cause__ = error
    return named
