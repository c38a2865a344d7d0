"""How far text moves after an image or video whose content decides how many rotary ids it takes.

With ``positions=compact`` tokens are renumbered without the gaps that dropped ones leave. How many
ids an image takes is then known only after it was encoded, and vLLM numbers a prompt before that,
and decoded tokens from its length alone. So rows after such images get the number of a *chain* in
the high bits of their rotary ids: the images before them. `Shifts.apply` replaces it by what is
known of the chain when the model runs. Imports nothing of vLLM.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

import torch
from torch import Tensor

BITS = 20  # of a rotary id
CHAINS = 1 << 11  # vLLM may hold ids and their offsets in int32
_KNOWN = 1 << 18  # images that are remembered: a KV cache has fewer blocks


class Chain:
    """Images before a row.

    Parameters
    ----------
    number : int
        Its place in the table; 0 where it has none any longer.
    before : Chain, optional
        Without the last image.
    tag : int
        Of the last image.
    """

    def __init__(self, number: int, before: Chain | None, tag: int) -> None:
        self.number, self.before, self.tag = number, before, tag
        self.shift = 0  # of the last image
        self.after: weakref.WeakSet[Chain] = weakref.WeakSet()
        if before is not None:
            before.after.add(self)

    def total(self) -> int:
        """By how much its images take fewer ids than their sizes say."""
        found, chain = 0, self
        while chain is not None:
            found, chain = found + chain.shift, chain.before
        return found


class Shifts:
    """What a worker knows of images.

    Parameters
    ----------
    device : torch.device
        On which the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(CHAINS, dtype=torch.int64, device=device)  # at one address
        self._seen = torch.zeros_like(self.table)  # the last pass in which a row had the number
        self._pass = self.table.new_zeros(())
        self._free = list(range(1, CHAINS))
        self._chains: dict[tuple[Chain | None, int], Chain] = {}
        self._known: OrderedDict[int, int] = OrderedDict()
        self._ends: dict[int, weakref.WeakSet[Chain]] = {}

    def known(self, tag: int) -> int | None:
        """By how much an image takes fewer ids than its size says; ``None`` until it is encoded."""
        if tag in self._known:
            self._known.move_to_end(tag)
        return self._known.get(tag)

    def chain(self, before: Chain | None, tag: int) -> Chain:
        """The chain of ``before`` and an image that is not known."""
        found = self._chains.get((before, tag))
        if found is None:
            if not self._free:
                self._release()
            found = Chain(self._free.pop(), before, tag)
            self._chains[before, tag] = found
            self._ends.setdefault(tag, weakref.WeakSet()).add(found)
            self._write([found])
        self._seen[found.number] = self._pass
        return found

    def _release(self) -> None:
        """Free the numbers that no row has had for longest: more than a batch has requests."""
        oldest = set((self._seen[1:].argsort()[: CHAINS // 4] + 1).tolist())
        for key, chain in [*self._chains.items()]:
            if chain.number in oldest:
                del self._chains[key]
                chain.number = 0
        self._free += oldest
        self._ends = {tag: ends for tag, ends in self._ends.items() if ends}

    def know(self, tag: int, shift: int) -> None:
        """Note by how much an image takes fewer ids than its size says."""
        self._known[tag] = shift
        self._known.move_to_end(tag)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        changed = list(self._ends.pop(tag, ()))
        for chain in changed:
            chain.shift = shift
        self._write(changed)

    def _write(self, chains: list[Chain]) -> None:
        """Update the table for chains and all that continue them."""
        found: list[Chain] = []
        while chains:
            found += [chain for chain in chains if chain.number]
            chains = [after for chain in chains for after in chain.after]
        if found:
            numbers, totals = [c.number for c in found], [c.total() for c in found]
            device = self.table.device
            self.table[torch.tensor(numbers, device=device)] = torch.tensor(totals, device=device)

    def apply(self, positions: Tensor) -> None:
        """Replace the numbers of chains in rotary ids (P, S), in place and without a host read."""
        numbers = positions >> BITS
        self._seen[numbers] = self._pass.add_(1)
        positions.bitwise_and_((1 << BITS) - 1).sub_(self.table[numbers])
