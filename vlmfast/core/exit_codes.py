"""Exit codes of the commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended; scripts may rely on these numbers."""

    FINISHED = 0
    CHECK_FAILED = 1  # `check`, `bench --audit-lossless`, and values that `reproduce` does not find
    USER_ERROR = 2  # also usage errors, as in argparse
    CUT_SHORT = 3  # finished early: what is printed or saved is a part of what was requested
    INTERRUPTED = 130  # Ctrl+C: 128 + the signal, as in shells
    BROKEN_PIPE = 141  # the reader of the output has closed it
