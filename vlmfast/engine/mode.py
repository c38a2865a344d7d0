"""The state of a thread that changes what forward passes compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mode:
    """Device and autocast of a request, as they were when it was submitted.

    Gradients are never needed: the engine runs without them, whatever the caller's mode is.

    Parameters
    ----------
    device : torch.device
    autocast : torch.dtype, optional
        ``None`` where autocast is off.
    """

    device: torch.device
    autocast: torch.dtype | None

    @staticmethod
    def current(device: torch.device) -> Mode:
        """The mode of the calling thread, for a model on ``device``."""
        kind = device.type
        on = torch.is_autocast_enabled(kind)
        return Mode(device, torch.get_autocast_dtype(kind) if on else None)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compute in this mode inside the block."""
        if Mode.current(self.device) == self:
            yield
            return
        with torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            yield


def lasting(function: Callable) -> Callable:
    """Run without gradients, and outside of inference mode, whose tensors become read-only."""
    return torch.inference_mode(False)(torch.no_grad()(function))
