"""What a run of the engine changes of the model and of its thread, put back however it ends.

An interrupt (Ctrl-C) may come between any two steps of Python, also inside of the code that ends a
``with`` block: that block then restores nothing. What was changed is therefore listed here, and
`Changes.undo` can be called again where an interrupt has ended it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Changes:
    """Changes that are undone in reverse order.

    Attributes
    ----------
    interrupted : bool
        Whether blocks inside may have ended without restoring anything.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._undo: list[Callable[[], object]] = []

    def add(self, undo: Callable[[], object]) -> None:
        """List how a change is undone, before it is made. ``undo`` may be called twice."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all changes that are not undone yet; then raise the first error of these, if any."""
        failed: list[Exception] = []
        while self._undo:
            try:
                self._undo[-1]()
            except Exception as error:
                failed.append(error)
            self._undo.pop()
        if failed:
            raise failed[0]

    # --- kinds of changes ------------------------------------------------------------------------

    def hold(self, locks: list[AbstractContextManager]) -> None:
        """Take locks, one after the other."""
        for lock in locks:
            holding = _holding(lock)
            self.add(holding.close)
            next(holding)

    def enter(self, block: AbstractContextManager) -> None:
        """Enter a block whose exit may be called twice."""
        self.add(lambda: block.__exit__(None, None, None))
        block.__enter__()

    def note_thread(self, kind: str) -> None:
        """Gradients, and autocast on a kind of device, will be as they are now."""
        grad = torch.is_grad_enabled()
        autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

        def undo() -> None:
            torch.set_grad_enabled(grad)
            torch.set_autocast_enabled(kind, autocast)
            torch.set_autocast_dtype(kind, dtype)

        self.add(undo)

    def note_modules(self, states: list[dict[str, Any]]) -> None:
        """After an interrupt, forwards of modules and their hooks will be those of now.

        Parameters
        ----------
        states : list of dict
            The attributes of the modules.
        """
        forwards = {n: own["forward"] for n, own in enumerate(states) if "forward" in own}
        first = RemovableHandle.next_id  # of the hooks that follow; numbers only grow

        def undo() -> None:
            for n, own in enumerate(states) if self.interrupted else ():
                if n in forwards:
                    own["forward"] = forwards[n]
                else:
                    own.pop("forward", None)
                for name in _HOOKS:
                    hooks = own.get(name) or {}
                    for number in [number for number in hooks if number >= first]:
                        del hooks[number]

        self.add(undo)


def _holding(lock: AbstractContextManager) -> Generator[None, None, None]:
    with lock:  # no step of Python lies between the lock and this block
        yield
