"""Reusable buffers: a cache takes them at the end of prefill and returns them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vlmfast.errors import is_out_of_memory

_SMALLEST = 256  # slots of the smallest capacity class
_SPARE = 1 << 26  # bytes that may be idle in any case


def bucket(slots: int) -> int:
    """The capacity for ``slots``, rounded up to few sizes so that buffers can be reused.

    Exceeds ``slots`` by less than 64, or by less than 1/8.
    """
    step = max(64, 1 << max(slots.bit_length() - 4, 0))
    return -(-slots // step) * step


def capacity_class(slots: int) -> int:
    """The capacity of a row with ``slots`` in a group of rows: classes double from 256.

    Rows of one class share buffers, so the longest of them is at most twice as long as another,
    or fits into the smallest class.
    """
    return max(_SMALLEST, 1 << (slots - 1).bit_length())


@contextmanager
def caught_shortage() -> Iterator[list[Exception]]:
    """Catch the error of an allocation that fails inside the block, and add it to the list."""
    found: list[Exception] = []
    try:
        yield found
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found.append(error)


class BufferPool:
    """Tensors by shape, dtype and device; several threads may use it.

    Parameters
    ----------
    limit : int
        Maximum bytes of idle buffers. They also never exceed what was in use at one time, or
        64 MiB: a server that sees ever new shapes would else keep one of each. The buffers of the
        least recently used shape are freed first.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit, self.idle = limit, 0
        self._used = self._most_used = 0  # bytes
        self._free: OrderedDict[tuple, list[Tensor]] = OrderedDict()
        self._others: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def take(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        clear: bool = True,
    ) -> Tensor:
        """A tensor of zeros. Not empty: masked slots still enter a product, and NaN * 0 is NaN.

        ``clear``: ``False`` where the caller writes or clears every slot before it is read; the
        tensor may then hold anything.

        Where memory is exhausted, everything idle is freed before a second attempt.

        Raises
        ------
        torch.OutOfMemoryError
            When the buffer does not fit either way.
        """
        with self._lock:
            free = self._free.get((shape, dtype, device))
            buffer = free.pop() if free else None
            if buffer is not None:
                self.idle -= buffer.nbytes
                self._count(buffer.nbytes)
        if buffer is not None:
            return buffer.zero_() if clear else buffer
        with caught_shortage() as short:
            buffer = torch.zeros(shape, dtype=dtype, device=device)
        if short:
            self.free()
            buffer = torch.zeros(shape, dtype=dtype, device=device)
        assert buffer is not None
        with self._lock:
            self._count(buffer.nbytes)
        return buffer

    @contextmanager
    def all_or_none(self) -> Iterator[Callable[..., Tensor]]:
        """A `take` for several buffers, which are returned if the block raises."""
        taken: list[Tensor] = []

        def take(*given: Any, **more: Any) -> Tensor:
            taken.append(self.take(*given, **more))
            return taken[-1]

        try:
            yield take
        except BaseException:
            for buffer in taken:
                self.give(buffer)
            raise

    def give(self, buffer: Tensor | None) -> None:
        """Return ``buffer``; no other reference to it or a view of it may exist."""
        if buffer is None:
            return
        key = (tuple(buffer.shape), buffer.dtype, buffer.device)
        with self._lock:
            self._count(-buffer.nbytes)
            self._free.setdefault(key, []).append(buffer)
            self._free.move_to_end(key)
            self.idle += buffer.nbytes
            while self.idle > min(self.limit, max(_SPARE, self._most_used)):
                oldest = next(iter(self._free))
                if self._free[oldest]:
                    self.idle -= self._free[oldest].pop(0).nbytes
                else:
                    del self._free[oldest]

    def _count(self, nbytes: int) -> None:
        self._used += nbytes
        self._most_used = max(self._most_used, self._used)

    def clear(self) -> None:
        """Free all idle buffers."""
        with self._lock:
            self._free.clear()
            self.idle = 0

    def free(self) -> None:
        """Free all that is idle, here and elsewhere, see `frees`."""
        for release in self._others:  # first: some return their buffers to this pool
            release()
        self.clear()

    def frees(self, release: Callable[[], None]) -> None:
        """Call ``release`` too where memory is exhausted: it frees what else is idle."""
        if release not in self._others:
            self._others.append(release)
