"""The memory of an engine: who may run beside whom, and what gives way when it runs short."""

from __future__ import annotations

from vlmfast.core.buffers import capacity_class
from vlmfast.errors import ModelError
from vlmfast.models.base import Adapter

from .kv_layer import FREE_SLOTS
from .memory import free_bytes, total_bytes
from .prefix_cache import prefix_cache_of
from .sequence import Sequence


class Ledger:
    """Admits sequences by the bytes of their caches.

    Parameters
    ----------
    adapter : Adapter

    Attributes
    ----------
    most_rows : int, optional
        Sequences that may run at once since memory ran short, until all that it stopped have ended.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.most_rows: int | None = None

    def most_bytes(self, bound: int | None) -> float:
        """Upper bound on the caches of all sequences: ``bound``, or what the device has."""
        return total_bytes(self.adapter.device) if bound is None else bound

    def bytes(self, sequences: list[Sequence]) -> int:
        """An upper bound on the caches of sequences, by the length that each may reach."""
        lengths = [each.prompt_length + each.max_new_tokens for each in sequences]
        return sum(map(self.adapter.cache_bytes, lengths))

    def admits(self, sequence: Sequence, running: list[Sequence], bound: int | None) -> bool:
        """Whether a waiting sequence can run beside those that run; the first one always can.

        ``bound``: on the bytes of their caches; by default what is free is theirs.
        """
        if not running:
            return True
        if self.most_rows is not None and len(running) >= self.most_rows:
            return False
        need, device = self.bytes([sequence]), self.adapter.device
        if bound is not None:
            return need + self.bytes(running) <= bound
        # The buffers of a row in a batch, where nothing is dropped; full ones gain slots.
        grown = FREE_SLOTS if sequence.max_new_tokens > FREE_SLOTS else 0
        slots = capacity_class(sequence.prompt_length + sequence.max_new_tokens + grown)
        need, pool = max(need, self.adapter.cache_bytes(slots)), self.adapter.pool
        for free in (pool.clear, prefix_cache_of(self.adapter).free, pool.free):
            if need <= free_bytes(device):
                return True
            free()
        return need <= free_bytes(device)

    def check(self, sequence: Sequence, bound: int | None) -> None:
        """Refuse a sequence whose text and answer alone need more memory than there is.

        Raises
        ------
        ModelError
        """
        ids = sequence.inputs.ids
        least = int((~self.adapter.visual(ids)).sum()) if tuple(sequence.recipe) else len(ids)
        need = self.adapter.cache_bytes(least + sequence.max_new_tokens)
        if need > (most := self.most_bytes(bound)):
            raise ModelError(
                f"the cache of prompt and answer takes at least {need:,} bytes and there are "
                f"{most:,.0f}; use a shorter prompt or a smaller max_new_tokens"
            )

    def ran_short(self, others: int) -> None:
        """Memory ran short beside so many others: what is idle is freed, and no more may run."""
        self.adapter.pool.free()
        self.most_rows = max(others, 1)
