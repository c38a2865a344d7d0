"""ZipVL: attention among each layer's important tokens, which are also stored in more bits.

ZipVL (arXiv 2410.08584) determines in every layer how many tokens are important there. *Probe* rows
``r``, the last ones of the prompt and random others, sum by their causal attention ``A`` (mean over
heads) what each token ``j`` receives::

    a_j = sum over r of A[r, j]              n_j = number of probe rows that may see j
    b   = least number of tokens, largest a_j first, whose a_j add up to tau R      (R probe rows)
    T   = the b tokens of largest a_j / n_j

``b`` counts attention mass. ``T`` is chosen by the mean over the rows that see a token, since early
tokens are seen by more rows. ``T`` is one set for all heads. Then:

- *Prefill.* The layer's attention runs among ``T`` alone, causal in the order of the prompt. Other
  rows skip it through the residual connection (``rows="important"``); with ``rows="all"`` every row
  attends, but to ``T`` only.
- *Cache.* ``kv="mixed"``, the paper's first version: ``T`` in ``bits_high`` bits, the rest in
  ``bits_low``; keys per channel, values per token with a scale for each channel (ZipCache, arXiv
  2405.14256). ``kv="drop"``, its second version: the rest is dropped. ``kv="none"``: the cache is
  unchanged.
- *Decode* (``mixed``). New keys and values are stored in full until there are ``page`` of them,
  which then become a page of ``bits_high`` bits.

No code was published. What the paper leaves open, and what differs:

- 64 last and 64 random rows probe, the random ones drawn again in each layer; heads are averaged.
  The last ``force_recent`` tokens are always in ``T``, since the next token is predicted from the
  last one.
- Quantization parameters belong to one KV head each. ZipCache folds the heads of a token together,
  which couples the heads to save a few bytes.
- Quantized tokens are never quantized again. The paper reads and writes the whole cache every 100
  tokens, which adds an error each time; here a page is written once, with the channel scales of the
  prompt's ``T``.
- With ``rows="all"``, a row before the first token of ``T`` sees nothing and receives nothing.
- ``dense_above``: a layer in which a larger fraction of the tokens is important attends densely.
  This changes the function for the better: nothing is left out, for about the time that gathering
  so many rows takes. The cache still uses ``T``. By default no layer does so.
- Rows that skip attention in many layers change the answer on some trained models far more than the
  attention that is left out. `pocket`, whose decoder is Gemma 3 270M, answers 42 % instead of 97 %
  of the questions right (2026-11-27). With ``rows="all"`` or ``dense_above=0`` no row skips it.
- ``tau=1`` leaves the prefill to the model: all tokens are important.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.params import param
from vlmfast.core.protocols import CacheStage, DecodeStage, PrefillStage, Slots
from vlmfast.core.stage import Stage
from vlmfast.core.statistics import ColumnStats
from vlmfast.kernels.col_stats import col_stats
from vlmfast.kernels.select import mass_count, top_k

from ..coded import check_bits, coded, dtype_of, paged
from ..part import Part


def probe_rows(n: int, recent: int, random: int, seed: int) -> Tensor:
    """The last ``recent`` of ``n`` rows and ``random`` others: int64, (R,), ascending."""
    before = max(n - recent, 0)
    drawn = torch.randperm(before, generator=torch.Generator().manual_seed(seed))[:random]
    return torch.cat([drawn.sort().values, torch.arange(before, n)])


def important(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    tau: float,
    scaling: float | None = None,
    *,
    bias: Tensor | None = None,
    forced: Tensor | None = None,
    least: int | None = None,
    window: int | None = None,
    place: Tensor | None = None,
) -> Tensor:
    """The important tokens of a layer.

    Parameters
    ----------
    query : Tensor, (Hq, S, D)
    key : Tensor, (Hk, S, D)
    rows : Tensor, int64, (R,)
        Probe rows; the last row of the prompt is one of them.
    bias : Tensor, float32, (S,), optional
        Added to the logits of each key.
    forced : Tensor, bool, (S,), optional
        Tokens that are always important; they count among the ``b``.
    least : int, optional
        How many these are; read by default.
    window : int, optional
        Number of places that a row sees, its own included.
    place : Tensor, int64, (S,), optional
        What the window counts, see `PrefillContext.place`; by default rows.

    Returns
    -------
    Tensor, int64, (b,)
        Ascending.
    """
    if window is None:
        stats = col_stats(query, key, rows, scaling, bias=bias, want=("sum", "nnz"))
        attention_mass, nnz = stats["sum"].mean((0, 1)), stats["nnz"]
    else:
        attention_mass, nnz = within(query, key, rows, scaling, bias, window, place)
    count = int(mass_count(attention_mass, tau * len(rows)))
    if forced is not None:
        count = max(count, int(forced.sum()) if least is None else least)
    return top_k(attention_mass / nnz, count, forced)


def within(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    scaling: float | None,
    bias: Tensor | None,
    window: int,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention received within a window, mean over heads, and the rows that see a token: (S,).

    A token that no row sees has received 0 from one row.
    """
    slot = torch.arange(key.shape[1], device=key.device)
    place = slot if place is None else place
    seen = (slot <= rows[:, None]) & (place > place[rows][:, None] - window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query.index_select(1, rows).float().unflatten(0, (len(key), -1)) * scale
    logits = q @ key.float().transpose(-1, -2)[:, None]
    logits = logits if bias is None else logits + bias
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return p.sum(2).mean((0, 1)), seen.sum(0).clamp(min=1)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chosen: Tensor,
    scaling: float | None = None,
    *,
    every_row: bool = False,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention among the tokens ``chosen``; zeros for other rows.

    Parameters
    ----------
    query : Tensor, (1, Hq, S, D)
    key, value : Tensor, (1, Hk, S, D)
    chosen : Tensor, int64, (n,)
        Ascending.
    every_row : bool
        Whether all rows attend to the chosen tokens.
    allowed : Tensor, bool, (S, S), optional
        What each row may see; causal by default.
    bias : Tensor, float32, (S,), optional
        Added to the logits of each key.

    Returns
    -------
    Tensor, (1, Hq, S, D)
    """
    s = query.shape[2]
    rows = torch.arange(s, device=query.device) if every_row else chosen
    grouped = query.shape[1] != key.shape[1]
    q, k, v = (x.index_select(2, i) for x, i in ((query, rows), (key, chosen), (value, chosen)))
    if not every_row and allowed is None and bias is None:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    else:
        seen = chosen <= rows[:, None] if allowed is None else allowed[rows][:, chosen]
        blind = ~seen.any(1, keepdim=True)
        mask = seen | blind  # a row that sees nothing would be NaN; it is set to zero below
        if bias is not None:
            mask = torch.where(mask, bias[chosen], -torch.inf).to(q.dtype)
        out = scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=grouped)
        out = out.masked_fill(blind, 0.0)
    return (
        out if every_row else out.new_zeros(*query.shape[:3], v.shape[3]).index_copy(2, rows, out)
    )


@dataclass(frozen=True)
class ZipVL(Stage):
    """Attends among each layer's important tokens, and stores the others in fewer bits."""

    name: ClassVar[str] = "zipvl"
    protocol: ClassVar[str] = "prefill"
    paper: ClassVar[str] = "arXiv 2410.08584"
    tier: ClassVar[str] = "core"
    lead: ClassVar[str | None] = "tau"
    query_dependent: ClassVar[bool] = True
    positions = "keep"  # read by the parts; no row is dropped

    tau: float = param(
        0.975, "fraction of the probe rows' attention that important tokens receive", gt=0.0, le=1.0
    )
    kv: str = param(
        "mixed",
        "cache: two precisions, important tokens alone, or unchanged",
        choices=("mixed", "drop", "none"),
    )
    rows: str = param(
        "important",
        "rows that attend to the important tokens: these alone, or all",
        choices=("important", "all"),
    )
    bits_high: int = param(4, "bits of important tokens, and of the answer: 2, 4 or 8", ge=2, le=8)
    bits_low: int = param(2, "bits of the other tokens: 2, 4 or 8", ge=2, le=8)
    page: int = param(128, "tokens of the answer that are quantized together", ge=1)
    recent: int = param(64, "probe rows at the end of the prompt", ge=1)
    random: int = param(64, "random probe rows before these", ge=0)
    seed: int = param(0, "seed of the random probe rows", ge=0)
    force_recent: int = param(1, "last tokens that are always important", ge=1)
    dense_above: float = param(
        1.0, "fraction of important tokens above which a layer attends densely", ge=0.0, le=1.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self, "bits_high", "bits_low")

    def expand(self) -> tuple[Stage, ...]:
        cache = {"mixed": (Mixed(self), Pages(self)), "drop": (Drop(self),), "none": ()}
        return (Sparse(self), *cache[self.kv])

    def important(
        self, context: PrefillContext, layer: int, kv: KV
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Slots of a layer whose tokens are important: bool, (H, N); how many, where it is known.

        The number of each head is known where none of them has lost a token.
        """
        order = context.notes.get(self.name, {}).pop(layer, None)
        if order is None:
            return kv.valid, kv.counts
        at = torch.searchsorted(order, kv.order.contiguous()).clamp(max=len(order) - 1)
        whole = kv.layout is context.layout
        return (order[at] == kv.order) & kv.valid, (len(order),) * len(at) if whole else None


@dataclass(frozen=True)
class Sparse(Part, PrefillStage):
    """Attention among the important tokens; the cache part finds them in the notes."""

    name: ClassVar[str] = ZipVL.name
    query_dependent: ClassVar[bool] = True

    def layers(self, depth: int) -> tuple[int, ...]:
        return ()

    def attends(self, depth: int) -> tuple[int, ...]:
        return tuple(range(depth)) if self.of.tau < 1 else ()

    def _probes(self, context: PrefillContext, n: int, device: torch.device) -> Tensor:
        """Probe rows of each layer among the first ``n``, copied to the device at once: (L, R)."""
        method, notes = self.of, context.notes.setdefault(self.name, {})
        if ("probes", n, device) not in notes:
            seeds = range(method.seed * context.depth, (method.seed + 1) * context.depth)
            drawn = [probe_rows(n, method.recent, method.random, seed) for seed in seeds]
            notes["probes", n, device] = torch.stack(drawn).to(device)
        return notes["probes", n, device]

    def attend(
        self,
        context: PrefillContext,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
    ) -> Tensor | None:
        method, s, bias = self.of, query.shape[2], context.key_bias()
        n = s - context.answer  # rows of an answer represent decode steps, which drop nothing
        rows = self._probes(context, n, query.device)[layer]
        every = torch.arange(s, device=query.device)
        chosen = important(
            query[0, :, :n],
            key[0, :, :n],
            rows,
            method.tau,
            scaling,
            bias=None if bias is None else bias[:n],
            forced=every[:n] >= n - method.force_recent,
            least=min(method.force_recent, n),
            window=context.window(layer),
            place=context.place[:n],
        )
        chosen = torch.cat([chosen, every[n:]])
        context.notes.setdefault(self.name, {})[layer] = context.layout.order[chosen]
        if len(chosen) == s or len(chosen) > method.dense_above * s:
            return None
        return sparse_attention(
            query,
            key,
            value,
            chosen,
            scaling,
            every_row=method.rows == "all",
            allowed=context.visible(layer),
            bias=bias,
        )


@dataclass(frozen=True)
class Drop(Part, CacheStage):
    """Keeps the important tokens of each layer."""

    name: ClassVar[str] = ZipVL.name

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        keep, counts = self.of.important(context, layer, kv)
        return kv if counts == kv.counts else kv.select_mask(keep, counts)


@dataclass(frozen=True)
class Mixed(Part, CacheStage):
    """Quantizes each layer, important tokens in more bits than the others."""

    name: ClassVar[str] = ZipVL.name
    quantizes: ClassVar[bool] = True

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        high, highs = self.of.important(context, layer, kv)
        lows = None
        if highs is not None:
            lows = [n - count for n, count in zip(kv.counts, highs, strict=True)]
        parts = [
            (self.of.bits_high, kv.select_mask(high, highs)),
            (self.of.bits_low, kv.select_mask(kv.valid & ~high, lows)),
        ]
        made = coded(kv, parts, True, dtype_of(context, kv))
        scale = made.segments[len(kv.segments)].value_scale
        context.notes.setdefault(self.name, {})["scale", layer] = scale
        return made


@dataclass(frozen=True)
class Pages(Part, DecodeStage):
    """Quantizes the answer, a page at a time."""

    name: ClassVar[str] = ZipVL.name

    def step(self, slots: Slots, layer: int) -> None:
        page = self.of.page
        if slots.max_length < page:
            return
        # The prompt's scale and dtype: all pages have one kind, without synchronizing the device.
        scale = slots.notes[self.name]["scale", layer]
        order, bits = slots.order[:, :page].clone(), self.of.bits_high
        slots.quantize(page, lambda k, v: paged(k, v, order, bits, page, scale))

    def quiet(self, slots: Slots, layer: int) -> int:
        return self.of.page - 1 - slots.max_length
