"""The KV cache: grows layer by layer during prefill, then freezes into static buffers.

Logical and physical length are two numbers: positions follow how many ids were consumed, memory and
masks follow how many keys a layer really holds, and both differ as soon as tokens are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_GROWTH = 256  # free slots that a frozen layer starts with, and gains when it is full


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer.

    While collecting, ``keys`` and ``values`` are (B, H, S, D) and grow. After `freeze` they are
    buffers (B, H, capacity, D); ``length`` (B, H) on the device says how many slots of each row and
    head are taken, and ``held`` is the same number on the host.
    """

    is_compileable = False  # True would make generate() compile the model by itself

    def __init__(self) -> None:
        super().__init__()
        self.length: Tensor | None = None
        self.held = 0
        self.logical = 0
        self.shift = 0  # how far this layer's rotary ids lie behind the running position
        self.bias: Tensor | None = None  # (S,), added to the logits of these keys; 0 for later ones

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def frozen(self) -> bool:
        return self.length is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append (B, H, T, D). Frozen layers write behind ``held`` without advancing it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.frozen:
            if self.keys is None:
                self.keys, self.values = key_states, value_states
            else:
                self.keys = torch.cat([self.keys, key_states], dim=2)
                self.values = torch.cat([self.values, value_states], dim=2)
            self.held = self.keys.shape[2]
            return self.keys, self.values
        stop = self.held + key_states.shape[2]
        if stop > self.keys.shape[2]:
            self._resize(max(stop, self.keys.shape[2] + _GROWTH))
        self.keys[:, :, self.held : stop] = key_states
        self.values[:, :, self.held : stop] = value_states
        return self.keys, self.values

    def freeze(self, room: int, length: Tensor) -> None:
        """Move to buffers with ``room`` free slots; ``length`` (B, H) is where to count."""
        self.length = length.fill_(self.held)
        self._resize(self.held + min(room, _GROWTH))

    def _resize(self, capacity: int) -> None:
        for name in ("keys", "values"):
            states = getattr(self, name)
            b, h, _, d = states.shape
            # Zeros, not empty: masked slots still enter a product, and NaN * 0 is NaN.
            buffer = states.new_zeros(b, h, capacity, d)
            buffer[:, :, : self.held] = states[:, :, : self.held]
            setattr(self, name, buffer)
        if self.bias is not None:
            bias = self.bias.new_zeros(capacity)
            bias[: len(self.bias)] = self.bias[:capacity]
            self.bias = bias

    def mask(self, query_length: int) -> Tensor:
        """Bool (B, H, T, capacity): slots that each of the next ``T`` tokens may read."""
        slots = torch.arange(self.keys.shape[2], device=self.device)
        last = self.length[..., None] + torch.arange(query_length, device=self.device)
        return slots <= last[..., None]

    def held_bytes(self) -> int:
        """Bytes of the keys and values held now, not of free slots."""
        rows = self.keys.shape[0] * self.keys.shape[1] * self.held
        return 2 * rows * self.keys.shape[3] * self.keys.element_size()

    def get_seq_length(self) -> int:
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held + query_length, 0

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """One `KVLayer` per decoder layer.

    Parameters
    ----------
    depth : int
        Number of decoder layers.
    """

    def __init__(self, depth: int) -> None:
        super().__init__(layers=[KVLayer() for _ in range(depth)])
        self.length: Tensor | None = None  # (L, B, H): the layers' own are views of it

    def freeze(self, room: int, logical: int) -> None:
        """End of prefill: buffers for about ``room`` more tokens; ``logical`` ids consumed."""
        b, h = self.layers[0].keys.shape[:2]
        shape = (len(self.layers), b, h)
        self.length = torch.zeros(shape, dtype=torch.int64, device=self.layers[0].device)
        for layer, length in zip(self.layers, self.length, strict=True):
            layer.freeze(room, length)
            layer.logical = logical

    def advance(self, tokens: int = 1) -> None:
        """Count ``tokens`` that the last pass wrote."""
        self.length.add_(tokens)
        for layer in self.layers:
            layer.held += tokens
            layer.logical += tokens

    def held_bytes(self) -> int:
        """Bytes of all keys and values held now."""
        return sum(layer.held_bytes() for layer in self.layers)

    def lengths(self) -> list[int]:
        """Tokens held per layer."""
        return [layer.held for layer in self.layers]
