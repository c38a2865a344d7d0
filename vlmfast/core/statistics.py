"""Statistics of a model's attention for stages: requests, results, geometry."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from .saliency import Saliency, SaliencyRequest

_ROWS = ("cls", "received", "keys", "last", "text", "window", "columns")


@dataclass(frozen=True)
class StatRequest:
    """Rows of one layer's attention that a stage requests.

    Parameters
    ----------
    rows : {"cls", "received", "keys", "last", "text", "window", "columns"}
        ``cls``: the first query row of a vision tower. ``received``: of a vision tower the
        attention received by each key, mean over the rows of patches. ``keys``: of a vision tower
        only the keys. ``last``: the last query row of the prompt. ``text``: every text row
        after the last visual token. ``window``: the last ``n`` rows. ``columns``: attention
        received by each key, summed over all rows.
    n : int
        Number of rows for ``window``.
    ahead : bool
        Of the language model only: the layer's attention, computed from its own queries and keys
        before it runs, so that a drop before the same layer can be ranked by it.
    keys : bool
        Of a vision tower only: also the layer's keys, mean over heads.
    wide : bool
        With ``keys``: those of all heads concatenated, instead of their mean.
    received : bool
        Of the language model only: also the logits that each token receives from the visual rows,
        before the softmax, mean over these rows. Computed as (sum of queries) times key.
    """

    rows: str
    n: int = 0
    ahead: bool = False
    keys: bool = False
    received: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        if self.rows not in _ROWS:
            raise ValueError(f"StatRequest: rows={self.rows!r} is not a known set of rows")

    def joined(self, other: StatRequest) -> StatRequest | None:
        """A request that serves both, or ``None`` when they need different rows."""
        both = {self.rows, other.rows} - {"keys"}
        if len(both) > 1 or (self.n, self.ahead) != (other.n, other.ahead):
            return None
        if self.keys and other.keys and self.wide != other.wide:
            return None
        return replace(
            self,
            rows=both.pop() if both else "keys",
            keys=self.keys or other.keys,
            received=self.received or other.received,
            wide=self.wide or other.wide,
        )


@dataclass(frozen=True)
class ColumnRequest:
    """Statistics of one layer for a cache stage: attention received by each key.

    Parameters
    ----------
    rows : {"all", "text", "window", "probe"}
        Query rows that are summed: all of them; the text after the last visual token (the last row
        where there is none); the last ``n``; the last ``n`` and ``random`` others, drawn without
        replacement by ``seed`` and layer.
    n, random : float
        Rows; below 1 a fraction of the prompt's S rows, ``S - int((1 - n) S)`` and
        ``int(random S)``.
    seed : int
    threshold : float
        ``count`` counts the entries that reach this fraction of their row's maximum.
    want : tuple of str
        Which of the statistics are computed; others are ``None``.
    """

    rows: str = "all"
    n: float = 0
    random: float = 0
    seed: int = 0
    threshold: float = 0.0
    want: tuple[str, ...] = ("sum",)

    def __post_init__(self) -> None:
        if self.rows not in ("all", "text", "window", "probe"):
            raise ValueError(f"ColumnRequest: rows={self.rows!r} is not a known set of rows")


@dataclass(frozen=True, eq=False)
class ColumnStats:
    """Statistics of softmax attention per key, over the rows of a `ColumnRequest`; float32.

    Slots are those of the `KV` that comes with it; ``G`` query heads share each of ``H`` KV heads.

    Parameters
    ----------
    sum, sumsq, max : Tensor, (H, G, N)
        Over the rows, of each key's attention.
    entropy : Tensor, (H, G, N)
        Sum over the rows of ``-p ln(p + 1e-10)``.
    count : Tensor, int32, (H, G, N)
        Entries that reach the request's threshold; zeros without one.
    nnz : Tensor, int64, (H, N)
        Rows that could see the key.
    rows : Tensor, int64, (R,)
        The query rows, as indices into the rows that remain at this layer, ascending.
    """

    nnz: Tensor
    rows: Tensor
    sum: Tensor | None = None
    sumsq: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    count: Tensor | None = None


@dataclass(frozen=True)
class ItemGeometry:
    """How one image went through the vision tower.

    Parameters
    ----------
    size : (int, int)
        Height and width of the image in pixels.
    tiles : (int, int)
        Rows and columns of crops; (0, 0) when there is only a base view.
    views : (int, int)
        First row and one past the last row of the image in the vision batch (base first).
    patches : (int, int)
        Rows and columns of visual tokens per view, before anything was dropped.
    video : int
        Which video of the prompt the image is a frame of; -1 for an image of its own.
    frame : (int, int)
        Which frame of how many.
    digest : int
        A hash of the image's content, where a stage sets ``wants_digest``; 0 if unknown.
    grids : tuple of (int, int)
        Rows and columns of visual tokens of each view, where views differ. ``patches`` then holds
        the most rows and the most columns, and the tokens of each view are spread over these
        (`views.spread`).
    """

    size: tuple[int, int]
    tiles: tuple[int, int]
    views: tuple[int, int]
    patches: tuple[int, int]
    video: int = -1
    frame: tuple[int, int] = (0, 1)
    digest: int = field(default=0, compare=False)
    grids: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class VisionStats:
    """Statistics of the vision tower for an encode stage.

    Parameters
    ----------
    items : tuple of ItemGeometry
        One per image (or frame), by ``TokenLayout.item``.
    rows : dict of int to Tensor
        Vision layer index to softmax attention, float32, (views, heads, patches), the CLS row over
        the patches of its view; for ``columns`` requests the attention received by each patch.
    keys : dict of int to Tensor
        Vision layer index to keys, mean over heads, float32, (views, patches, head_dim); ``wide``
        ones (views, patches, heads * head_dim).
    cls : Tensor, (views, D), optional
        The CLS token of each view through the projector, where a stage sets ``wants_cls`` and the
        projector takes one.
    saliency : dict of str to tuple of Saliency
        By `SaliencyRequest.key`: of each of ``items``. Read it with `salient`.
    left_out : tuple of str
        Parts of methods that the tower does not support.
    skipped : Tensor, bool, (views,), optional
        Crops that a stage of the recipe left out: their statistics are 0, and none of their tokens
        is in the prompt.
    """

    items: tuple[ItemGeometry, ...]
    rows: dict[int, Tensor]
    keys: dict[int, Tensor] = field(default_factory=dict)
    cls: Tensor | None = None
    saliency: dict[str, tuple[Saliency, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    skipped: Tensor | None = None

    def sources(self) -> str:
        """The sources of saliency, ``cls`` for example; empty where none was requested."""
        return ", ".join(sorted({s.source for each in self.saliency.values() for s in each}))

    def salient(self, request: SaliencyRequest, item: ItemGeometry) -> Saliency:
        """The saliency of one of ``items``, as requested by `EncodeStage.saliencies`."""
        return self.saliency[request.key][self.items.index(item)]
