"""The KV cache: grows layer by layer during prefill, then freezes into static buffers.

Logical and physical length are two numbers: positions follow how many ids were consumed, memory and
masks follow how many keys a layer really holds, and both differ as soon as tokens are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer.

    While collecting, ``keys`` and ``values`` are (B, H, S, D) and grow. After `freeze` they are
    buffers (B, H, capacity, D) whose addresses stay; ``length`` (B, H) on the device says how many
    slots of each row and head are taken.
    """

    is_compileable = False  # True would make generate() compile the model by itself

    def __init__(self) -> None:
        super().__init__()
        self.length: Tensor | None = None
        self.logical = 0
        self.shift = 0  # how far this layer's rotary ids lie behind the running position

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def frozen(self) -> bool:
        return self.length is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append (B, H, T, D). Frozen layers write at ``length`` without advancing it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.frozen:
            if self.keys is None:
                self.keys, self.values = key_states, value_states
            else:
                self.keys = torch.cat([self.keys, key_states], dim=2)
                self.values = torch.cat([self.values, value_states], dim=2)
            return self.keys, self.values
        slots = self.length[..., None] + torch.arange(key_states.shape[2], device=self.device)
        slots = slots[..., None].expand(-1, -1, -1, key_states.shape[3])
        self.keys.scatter_(2, slots, key_states)
        self.values.scatter_(2, slots, value_states)
        return self.keys, self.values

    def freeze(self, room: int) -> None:
        """Move to static buffers with ``room`` free slots behind the tokens held."""
        b, h, n, _ = self.keys.shape
        for name in ("keys", "values"):
            held = getattr(self, name)
            # Zeros, not empty: masked slots still enter a product, and NaN * 0 is NaN.
            buffer = held.new_zeros(b, h, n + room, held.shape[3])
            buffer[:, :, :n] = held
            setattr(self, name, buffer)
        self.length = torch.full((b, h), n, dtype=torch.int64, device=self.device)

    def mask(self, query_length: int) -> Tensor:
        """Bool (B, H, T, capacity): slots that each of the next ``T`` tokens may read."""
        slots = torch.arange(self.keys.shape[2], device=self.device)
        last = self.length[..., None] + torch.arange(query_length, device=self.device)
        return slots <= last[..., None]

    def held_bytes(self) -> int:
        """Bytes of the keys and values held now (not of free slots); synchronises when frozen."""
        per_token = 2 * self.keys.shape[3] * self.keys.element_size()
        if self.frozen:
            return int(self.length.sum()) * per_token
        return self.keys.shape[0] * self.keys.shape[1] * self.keys.shape[2] * per_token

    def get_seq_length(self) -> int:
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = 0 if self.keys is None else self.keys.shape[2]
        return physical + (0 if self.frozen else query_length), 0

    def get_max_length(self) -> int:
        return self.keys.shape[2] if self.frozen else -1


class KVCache(Cache):
    """One `KVLayer` per decoder layer.

    Parameters
    ----------
    depth : int
        Number of decoder layers.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(layers=[KVLayer() for _ in range(depth)])

    def freeze(self, room: int, logical: int) -> None:
        """End of prefill: static buffers with ``room`` free slots; ``logical`` ids consumed."""
        for layer in self.layers:
            layer.freeze(room)
            layer.logical = logical

    def advance(self, tokens: int = 1) -> None:
        """Count ``tokens`` that the last pass wrote."""
        for layer in self.layers:
            layer.length.add_(tokens)
            layer.logical += tokens

    def held_bytes(self) -> int:
        """Bytes of all keys and values held now."""
        return sum(layer.held_bytes() for layer in self.layers)

    def lengths(self) -> list[int]:
        """Tokens held per layer (the longest row and head); synchronises when frozen."""
        return [
            int(layer.length.max()) if layer.frozen else layer.keys.shape[2]
            for layer in self.layers
        ]
