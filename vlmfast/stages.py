"""The stage protocols: what a method may ask for and what it hands on.

A method is a frozen dataclass that derives from one of the protocol classes below. Its fields are
its hyper-parameters, declared with `param`, which also documents and bounds them; recipes, the
command line and ``vlmfast methods`` read that declaration. Nothing here knows a method by name:
`stage_class` finds ``name`` in ``vlmfast/compressors/name.py`` (or ``vlmfast/drafters``), and in
the entry points ``vlmfast.stages`` of other packages.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import operator
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, get_args, get_type_hints

import torch
from torch import Tensor, nn

from .errors import RecipeError
from .kv import KV
from .layout import TokenLayout, VisualTokens
from .saliency import SOURCES, Saliency, SaliencyRequest

if TYPE_CHECKING:
    from .drafters.tree import Tree
    from .kernels.quantize_kv import Segment

PROTOCOLS = ("media", "in-encoder", "encode", "prefill", "cache", "decode", "drafter")


# --- hyper-parameters --------------------------------------------------------------------------


def param(
    default: Any = MISSING,
    doc: str = "",
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] | None = None,
    word: str | None = None,
) -> Any:
    """A documented and bounded dataclass field of a `Stage`.

    ``word`` is its name in recipes, where that is taken by a method of the protocol.
    """
    bounds = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    limits = {key: value for key, value in bounds.items() if value is not None}
    return field(default=default, metadata={"doc": doc, "choices": choices, "word": word, **limits})


def word_of(f: Field) -> str:
    """A field's name in recipes."""
    return f.metadata.get("word") or f.name


def positions_param(default: str) -> Any:
    """The position policy that every reducer offers; its paper's own is the default."""
    return param(
        default,
        "rotary ids of the kept tokens: keep the original ones, or compact (renumbered)",
        choices=("keep", "compact"),
    )


def budget_param() -> Any:
    """The common cost axis that every reducer offers."""
    return param(
        None,
        "visual tokens kept, averaged over the LLM's layers, as a share of those that came in; "
        "replaces the method's own parameters",
        gt=0.0,
        le=1.0,
    )


def repair_param(default: bool = False) -> Any:
    """Offered by every method that merges; its paper's own is the default."""
    return param(default, "attention adds log(weight): a merged token counts for all it stands for")


def saliency_param() -> Any:
    """Offered by every method that ranks tokens by their saliency in the vision tower."""
    return param(
        "auto",
        "source of saliency: attention of CLS, attention received, feature norm; "
        "auto: the first of these that the vision tower has",
        choices=("auto", *SOURCES),
    )


def weights_param() -> Any:
    """Offered by every trained method."""
    return param("auto", "folder of trained weights; auto: those that are shipped for the model")


# Names of comparisons in `operator`. All are false for NaN, which is thus out of every range.
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _describe(metadata: dict[str, Any]) -> str:
    if metadata.get("choices"):
        return "one of " + ", ".join(metadata["choices"])
    return " and ".join(f"{sign} {metadata[k]:g}" for k, sign in _SIGNS.items() if k in metadata)


@dataclass(frozen=True)
class Stage:
    """Base of all stages: a named, validated, printable bundle of hyper-parameters.

    Class attributes
    ----------------
    name : str
        The recipe word.
    protocol : str
        One of `PROTOCOLS`.
    paper : str
        Title or venue and arXiv id.
    lead : str or None
        The field that a bare value (``hired:0.2``) sets.
    trained : bool
        Whether the method needs weights of its own; it then has a field ``weights`` and a `build`.
    repair : bool
        Whether attention is told how many tokens a merged one stands for (a field of methods that
        merge).
    asks_question : bool
        Whether what stays depends on the question; a session then chooses anew with each.
    other_model : bool
        Whether it runs a model of its own beside the VLM, downloaded when it is first used.
    """

    name: ClassVar[str] = ""
    protocol: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    lead: ClassVar[str | None] = None
    trained: ClassVar[bool] = False
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    repair = False
    asks_question: ClassVar[bool] = False
    other_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if value is None and f.default is None:
                continue
            if isinstance(value, str) and (set(value) & set("+,") or value != value.strip()):
                raise RecipeError(
                    f"{self.name}: {word_of(f)}={value!r} cannot stand in a recipe: no '+', no ',' "
                    "and no blanks at the ends"
                )
            values = value if isinstance(value, tuple) else (value,)
            if meta.get("choices"):
                ok = all(v in meta["choices"] for v in values)
            else:
                tests = [(getattr(operator, k), meta[k]) for k in _SIGNS if k in meta]
                whole = type(f.default) is int
                try:
                    ok = not any(whole and v != int(v) for v in values) and all(
                        test(v, bound) for test, bound in tests for v in values
                    )
                except (TypeError, ValueError, OverflowError):  # a text where a number belongs
                    ok = False
            if not ok:
                raise RecipeError(
                    f"{self.name}: {word_of(f)}={_show(value)} is out of range, "
                    f"allowed is {_describe(meta)}"
                )

    @classmethod
    def from_words(cls, words: dict[str | None, str]) -> Stage:
        """Build from text values; the key ``None`` stands for the bare value."""
        hints, values = get_type_hints(cls), {}
        names = {word_of(f): f.name for f in fields(cls)}
        for key, word in words.items():
            if key is None:
                if cls.lead is None:
                    raise RecipeError(
                        f"{cls.name} takes no bare value ({word!r}); parameters: {_list(names)}"
                    )
                key = next(w for w, name in names.items() if name == cls.lead)
            if key not in names:
                raise RecipeError(
                    f"{cls.name} has no parameter {key!r}{nearest(key, list(names))}; "
                    f"parameters: {_list(names)}"
                )
            if names[key] in values:
                raise RecipeError(f"{cls.name}: {key} is given twice")
            values[names[key]] = _parse(cls.name, key, word, hints[names[key]])
        return cls(**values)

    def __str__(self) -> str:
        """Canonical recipe word; parsing it gives an equal stage."""
        changed = {
            f.name: _show(getattr(self, f.name))
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        }
        if not changed:
            return self.name
        if list(changed) == [self.lead]:
            return f"{self.name}:{changed[self.lead]}"
        words = {f.name: word_of(f) for f in fields(self)}
        return f"{self.name}:" + ",".join(f"{words[key]}={v}" for key, v in changed.items())

    def __add__(self, other: Stage | Stages) -> Stages:
        return Stages((self,)) + other

    def floor(self, depth: int) -> float:
        """Lowest share of the visual tokens, averaged over ``depth`` layers, that is attainable."""
        return 0.0

    def fitted(self, depth: int, first: int) -> Stage:
        """This method for a model of ``depth`` layers.

        Layers that were given as shares of the depth move to ``first``, the first layer before
        which the model lets tokens be dropped; whole numbers stay as they are.
        """
        return self

    def expand(self) -> tuple[Stage, ...]:
        """The single-protocol stages that this word stands for; usually itself."""
        return (self,)

    @classmethod
    def build(cls, config: dict[str, Any]) -> nn.Module:
        """The untrained module of a trained method, float32.

        Parameters
        ----------
        config : dict
            What its training stored beside the weights: the sizes of the model (``width``,
            ``depth``, ``heads``, ``vision_width``, ``vision_depth``, ``vision_heads``,
            ``patches``) and whatever the method's own training added.
        """
        raise NotImplementedError(f"{cls.__name__}.build")

    def published(self, folder: Path, sizes: dict[str, Any]) -> nn.Module | None:
        """The module that a folder in the authors' own format holds; ``None`` for another one.

        Parameters
        ----------
        folder : Path
        sizes : dict
            Of the model, as in `build`.
        """
        return None


class Stages(tuple):
    """Stages in pipeline order; ``a + b`` appends."""

    def __add__(self, other: Stage | tuple[Stage, ...]) -> Stages:
        if not isinstance(other, Stage | tuple):
            return NotImplemented
        return type(self)((*self, *((other,) if isinstance(other, Stage) else other)))

    def __str__(self) -> str:
        return "+".join(str(stage) for stage in self) or "none"

    def acting(self, protocol: str) -> list[Stage]:
        """The expanded stages of one protocol."""
        return [s for stage in self for s in stage.expand() if s.protocol == protocol]


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(_show(v) for v in value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    text = str(value)
    return text.replace("e+", "e") if isinstance(value, float) else text  # '+' joins recipe words


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) if names else "none"


def _parse(stage: str, key: str, word: str, hint: Any) -> Any:
    """``word`` as the type that the field declares."""
    options = [a for a in get_args(hint) if a is not NoneType] if NoneType in get_args(hint) else []
    kind = options[0] if options else hint
    if options and word.lower() == "none":
        return None
    try:
        if getattr(kind, "__origin__", None) is tuple:
            return tuple(get_args(kind)[0](part) for part in word.split("/"))
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                word.lower()
            ]
        return kind(word)
    except (ValueError, KeyError):
        what = getattr(kind, "__name__", str(kind))
        raise RecipeError(f"{stage}: {key}={word!r} cannot be read as {what}") from None


# --- what a forward pass carries -----------------------------------------------------------------


_ROWS = ("cls", "received", "keys", "last", "text", "window", "columns")


@dataclass(frozen=True)
class StatRequest:
    """Rows of one layer's attention that a stage wants to see.

    Parameters
    ----------
    rows : {"cls", "received", "keys", "last", "text", "window", "columns"}
        ``cls``: the first query row of a vision tower. ``received``: of a vision tower the
        attention received by each key, mean over the rows of patches. ``keys``: of a vision tower
        nothing but the keys. ``last``: the last query row of the prompt. ``text``: every text row
        after the last visual token. ``window``: the last ``n`` rows. ``columns``: attention
        received by each key, summed over all rows.
    n : int
        Number of rows for ``window``.
    ahead : bool
        Of the language model only: what the layer would attend to, computed from its own queries
        and keys before it runs, so that a drop before that very layer can be ranked by it.
    keys : bool
        Of a vision tower only: also the layer's keys, mean over heads.
    wide : bool
        With ``keys``: those of all heads side by side, instead of their mean.
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
        """What serves both, or ``None`` when they want different rows."""
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
    """What a cache stage wants to know of one layer: attention received by each key.

    Parameters
    ----------
    rows : {"all", "text", "window", "probe"}
        Query rows that are summed: all of them; the text behind the last visual token (the last row
        where there is none); the last ``n``; the last ``n`` and ``random`` others, drawn without
        replacement by ``seed`` and layer.
    n, random : float
        Rows; below 1 shares of the prompt's S rows, ``S - int((1 - n) S)`` and ``int(random S)``.
    seed : int
    threshold : float
        What ``count`` counts: the entries that reach this share of their row's largest.
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
        The query rows, as indices into the prompt that is left at this layer, ascending.
    """

    nnz: Tensor
    rows: Tensor
    sum: Tensor | None = None
    sumsq: Tensor | None = None
    max: Tensor | None = None
    entropy: Tensor | None = None
    count: Tensor | None = None


class Phase(Enum):
    VISION = "vision"
    PROBE = "probe"  # statistics of one layer, without running it
    PREFILL = "prefill"
    EXTEND = "extend"  # several more tokens of a prompt behind a frozen cache
    DECODE = "decode"
    VERIFY = "verify"


@dataclass
class Step:
    """The context of one forward pass; one object per pass, owned by the engine.

    Parameters
    ----------
    phase : Phase
        Which kind of pass this is.
    depth : int
        Number of layers of the model that the pass goes through.
    layout : TokenLayout, optional
        The tokens that enter the current layer (prefill).
    requests : dict of int to StatRequest
        Layer index to the rows that are wanted of it.
    stats : dict of int to Tensor
        Layer index to softmax attention, float32. Vision: (views, heads, rows, keys).
        Text: (heads, rows, keys) over the tokens of ``layout``; its columns are kept aligned with
        ``layout`` when rows are dropped. ``columns`` requests have one row.
    received : dict of int to Tensor
        Text: layer index to mean logits received from the visual rows, float32, (heads, 1, keys).
    keys : dict of int to Tensor
        Vision: layer index to keys, mean over heads, float32, (views, rows, head_dim); ``wide``
        ones (views, rows, heads * head_dim).
    hidden : Tensor, (S, D), optional
        Prefill: what enters the layer before which `PrefillStage.keep` is asked. A stage that
        merges puts there what its rows become, of the same shape, before it says which stay.
    norm : callable, optional
        Prefill: the language model's last norm.
    items : tuple of ItemGeometry
        Vision: the pictures that are in the batch.
    modules : dict of int to int
        ``id`` of a vision attention module to its layer index (vision modules do not know theirs).
    merged : Tensor, int64, (views, rows), optional
        Vision: for each row that entered the tower (CLS first), the row that it is part of now. A
        stage with `InEncoderStage.cells` sees the same of CLS and cells.
    sizes : iterator of Tensor, each float32, (n,), optional
        Vision: of towers that take all images in one row, how many rows that entered each row
        stands for now; chunk by chunk, as the block that runs attends to them.
    lengths : Tensor, int64, (views,), optional
        Vision: rows of each view that exist, where merging left fewer of some; the others, at the
        end, are padding.
    specials : int
        Vision: rows in front of the patches of each view (CLS).
    chunks : dict of int to list of (Tensor, Tensor), optional
        Vision: of towers that take all images in one row and attend to each by itself, ``stats``
        and ``keys`` of each image.
    cache : object, optional
        The cache of the sequence.
    mask_rule : callable, optional
        ``(layout) -> (S, S) bool`` for models that are not plainly causal over their prompt, apart
        from the windows of layers, which the cache knows.
    notes : dict of str to dict
        What one part of a method tells a later part of the same method, by method name.
    trained : dict of str to Module
        The weights of trained methods, by method name, on the model's device in float32.
    repair : bool
        Attention adds the logarithm of each key's weight, so that a merged token counts for all
        that it stands for.
    soft : Tensor, float32, (S,), optional
        Training: how much of each row of ``layout`` is there for the layers to come, in (0, 1].
    answer : int
        Training: rows at the end that are the answer; statistics do not look from them.
    attend : dict of int to PrefillStage
        Layers whose attention a stage computes itself.
    after : callable, optional
        ``(layer, query, key, value, scaling)``, asked behind the attention of every layer in
        prefill; how cache stages see what flows past.
    rotate : callable, optional
        ``(keys (H, N, D), delta (H, N)) -> keys`` with ``delta`` added to their rotary ids.
    limit : int, optional
        Block-wise prefill: slots of this block that each layer may keep.
    tree : Tensor, bool, (B, T, T), optional
        Verification of drafts: which of the T new tokens each of them sees.
    ancestors : Tensor, int64, (B, T, 1), optional
        The same as bits, for up to 64 tokens.
    """

    phase: Phase
    depth: int = 0
    layout: TokenLayout | None = None
    requests: dict[int, StatRequest] = field(default_factory=dict)
    stats: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    norm: Callable[[Tensor], Tensor] | None = None
    items: tuple[ItemGeometry, ...] = ()
    modules: dict[int, int] = field(default_factory=dict)
    merged: Tensor | None = None
    sizes: Iterator[Tensor] | None = None
    lengths: Tensor | None = None
    specials: int = 0
    chunks: dict[int, list[tuple[Tensor | None, Tensor | None]]] | None = None
    cache: Any = None
    mask_rule: Any = None
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)
    repair: bool = False
    soft: Tensor | None = None
    answer: int = 0
    attend: dict[int, PrefillStage] = field(default_factory=dict)
    after: Callable[..., None] | None = None
    rotate: Callable[[Tensor, Tensor], Tensor] | None = None
    limit: int | None = None
    tree: Tensor | None = None
    ancestors: Tensor | None = None

    def select(self, index: Tensor) -> None:
        """Keep rows ``index`` of the current tokens, in the layout and in every statistic."""
        self.layout = self.layout.select(index)
        for of in (self.stats, self.received):
            of.update({layer: s.index_select(-1, index) for layer, s in of.items()})
        if self.soft is not None:
            self.soft = self.soft.index_select(0, index)

    def window(self, layer: int) -> int | None:
        """The window of a layer, where the rows of ``layout`` do not all fit into it.

        Row ``i`` of those that enter the layer sees none before row ``i - window + 1``.
        """
        window = None if self.cache is None else self.cache.layers[layer].window
        return window if window is not None and len(self.layout) > window else None

    def visible(self, layer: int) -> Tensor | None:
        """Bool (S, S): what each row of ``layout`` sees of them; ``None`` where plainly causal."""
        mask = None if self.mask_rule is None else self.mask_rule(self.layout)
        if (window := self.window(layer)) is None:
            return mask
        place = torch.arange(len(self.layout), device=self.layout.device)
        mask = place[:, None] >= place if mask is None else mask
        return mask & (place > place[:, None] - window)

    def key_bias(self) -> Tensor | None:
        """What is added to the logits of each key, float32, (S,); ``None`` for nothing."""
        bias = self.layout.weight.log() if self.repair else None
        if self.soft is None:
            return bias
        return self.soft.log() if bias is None else bias + self.soft.log()


# The carrier of `Step` for passes that run eagerly (vision, prefill). Several vision towers swallow
# unknown keyword arguments, so an argument cannot reach their attention.
current_step: ContextVar[Step | None] = ContextVar("vlmfast_step", default=None)


@contextmanager
def active(step: Step) -> Iterator[Step]:
    """Make ``step`` the context of the passes that run inside the block."""
    token = current_step.set(step)
    try:
        yield step
    finally:
        current_step.reset(token)


@dataclass(frozen=True)
class ItemGeometry:
    """How one picture went through the vision tower.

    Parameters
    ----------
    size : (int, int)
        Height and width of the picture in pixels.
    tiles : (int, int)
        Rows and columns of crops; (0, 0) when there is only a base view.
    views : (int, int)
        First row and one past the last row of the picture in the vision batch (base first).
    patches : (int, int)
        Rows and columns of visual tokens per view, before anything was dropped.
    clip : int
        Which clip of the prompt the picture is a frame of; -1 for a picture of its own.
    frame : (int, int)
        Which frame of how many.
    """

    size: tuple[int, int]
    tiles: tuple[int, int]
    views: tuple[int, int]
    patches: tuple[int, int]
    clip: int = -1
    frame: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class VisionStats:
    """What the vision tower tells an encode stage.

    Parameters
    ----------
    items : tuple of ItemGeometry
        One per picture (or frame), by ``TokenLayout.item``.
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
        Parts of methods that the tower cannot serve.
    """

    items: tuple[ItemGeometry, ...]
    rows: dict[int, Tensor]
    keys: dict[int, Tensor] = field(default_factory=dict)
    cls: Tensor | None = None
    saliency: dict[str, tuple[Saliency, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def sources(self) -> str:
        """Where saliency came from, ``cls`` for example; nothing where no stage asked."""
        return ", ".join(sorted({of.source for each in self.saliency.values() for of in each}))

    def salient(self, request: SaliencyRequest, item: ItemGeometry) -> Saliency:
        """What a stage asked for with `EncodeStage.saliencies`, of one of ``items``."""
        return self.saliency[request.key][self.items.index(item)]


@dataclass(frozen=True)
class EncodeRequest:
    """The question that the visual tokens will serve.

    Parameters
    ----------
    question : str
        The text of the last user turn.
    question_embeds : Tensor, (T, D)
        Input embeddings of the prompt's text tokens.
    depth : int
        Number of layers of the language model.
    notes, trained : dict
        As in `Step`.
    order : Tensor, int64, (T,), optional
        Where these tokens stand in the full prompt.
    pictures : sequence of PIL.Image.Image
        By ``TokenLayout.item``; empty where only their features are known.
    """

    question: str
    question_embeds: Tensor
    depth: int
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, nn.Module] = field(default_factory=dict)
    order: Tensor | None = None
    pictures: Sequence[Any] = ()


# --- protocols -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MediaStage(Stage):
    """Chooses the frames of a clip before anything is encoded."""

    protocol: ClassVar[str] = "media"
    asks_question: ClassVar[bool] = True

    def frames(self, video: Any, question: str) -> list[int]:
        """Indices of the frames to read, ascending."""
        raise NotImplementedError(f"{type(self).__name__}.frames")


@dataclass(frozen=True)
class InEncoderStage(Stage):
    """Works between the blocks of the vision tower."""

    protocol: ClassVar[str] = "in-encoder"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    optional = False  # whether its method does without it where a tower cannot serve it
    cells = False  # whether it takes all patches of a visual token as one row, see `on_block`
    # Whether it takes any number of patches for each token, where the projector takes a row of
    # them together (`Adapter.token_rows`); `on_output` then sees tokens.
    token_rows = False

    def vision_stats(self, depth: int) -> dict[int, StatRequest]:
        """Vision layer index to the keys that `on_block` reads, in ``step.keys``."""
        return {}

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Vision blocks (1 .. depth-1) before which `on_block` is asked."""
        raise NotImplementedError(f"{type(self).__name__}.blocks")

    def on_block(self, step: Step, index: int, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """New hidden states, and where each row went.

        Without `cells` a stage is asked only where the tower makes one visual token of each patch,
        or as `token_rows` says.
        With it rows are *cells*: the ``m`` patches that become one visual token side by side, so
        that D is ``m`` times the tower's width, as that of ``step.keys`` is; special rows are
        repeated to that width. ``step.items`` are the images that lie in ``hidden``, all of one
        grid of visual tokens. Such a stage changes rows by merging alone.

        Parameters
        ----------
        hidden : Tensor, (V, N, D)
            What would enter block ``index``; the CLS row first where the tower has one.

        Returns
        -------
        hidden : Tensor, (V, M, D)
        source : Tensor, int64, (V, N), or None
            Row of the new hidden states that each old row is now part of; ``None`` when no row was
            merged. Merged rows stay together from there on; the token nearest to their middle
            stands for them in the prompt.
        """
        raise NotImplementedError(f"{type(self).__name__}.on_block")

    def on_output(self, step: Step, hidden: Tensor) -> Tensor:
        """Asked once, in front of the projector, with what goes into it.

        Parameters
        ----------
        hidden : Tensor, (V', N, D)
            Without the CLS row where the family cuts it off.

        Returns
        -------
        Tensor, (V, N, D)
            One row per view of the batch, as the projector and the packing behind it expect; what
            a later part of the method needs beyond it goes to ``step.notes``.
        """
        return hidden


@dataclass(frozen=True)
class EncodeStage(Stage):
    """Reduces the visual tokens between vision encoder and language model.

    A stage with a field ``positions = "compact"`` has the rows of the prompt renumbered if it drops
    some.
    """

    protocol: ClassVar[str] = "encode"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    positions = "keep"
    wants_cls = False  # whether `reduce` reads ``stats.cls``

    def vision_stats(self, depth: int) -> dict[int, StatRequest]:
        """Vision layer index (0 .. depth-1) to the rows that `reduce` wants of it."""
        return {}

    def saliencies(self) -> tuple[SaliencyRequest, ...]:
        """What `reduce` wants to know of each token's saliency; every tower has one."""
        return ()

    def reduce(
        self, tokens: VisualTokens, stats: VisionStats, request: EncodeRequest
    ) -> VisualTokens:
        """Fewer tokens. By default each picture is reduced by itself with `reduce_item`."""
        parts = [
            self.reduce_item(tokens.select(index), stats.items[item], stats, request)
            for item, index in tokens.items()
        ]
        if all(part is None for part in parts):
            return tokens
        kept = [
            tokens.select(index) if part is None else part
            for part, (_, index) in zip(parts, tokens.items(), strict=True)
        ]
        levels = zip(*(part.extra for part in kept), strict=True)
        return VisualTokens(
            torch.cat([part.features for part in kept]),
            TokenLayout.cat([part.layout for part in kept]),
            tuple(torch.cat(level) for level in levels),
        )

    def reduce_item(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> VisualTokens | None:
        """The reduced tokens of one picture, or ``None`` when all of them stay.

        By default the rows that `keep` names.
        """
        index = self.keep(tokens, geometry, stats, request)
        return None if index is None else tokens.select(index)

    def keep(
        self,
        tokens: VisualTokens,
        geometry: ItemGeometry,
        stats: VisionStats,
        request: EncodeRequest,
    ) -> Tensor | None:
        """Rows of one picture that stay: int64 indices, ascending; ``None`` for all."""
        raise NotImplementedError(f"{type(self).__name__}.keep")


@dataclass(frozen=True)
class PrefillStage(Stage):
    """Drops visual tokens between the layers of the language model, during prefill.

    A stage with a field ``positions = "compact"`` has the rows renumbered after each of its drops.
    """

    protocol: ClassVar[str] = "prefill"
    # Not annotated: a ClassVar would come first among the fields of a stage that declares it.
    positions = "keep"

    def layers(self, depth: int) -> tuple[int, ...]:
        """Layers (0 .. depth-1) before which `keep` is asked."""
        raise NotImplementedError(f"{type(self).__name__}.layers")

    def text_stats(self, depth: int) -> dict[int, StatRequest]:
        """Layer index to the attention rows that `keep` wants of it."""
        return {}

    def keep(self, step: Step, layer: int) -> Tensor | None:
        """Rows of ``step.layout`` that enter ``layer``: int64, ascending, all text among them."""
        raise NotImplementedError(f"{type(self).__name__}.keep")

    def attends(self, depth: int) -> tuple[int, ...]:
        """Layers (0 .. depth-1) whose attention `attend` computes."""
        return ()

    def attend(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
    ) -> Tensor | None:
        """Causal attention of one layer over the rows of ``step.layout``.

        Parameters
        ----------
        query : Tensor, (1, Hq, S, D)
        key, value : Tensor, (1, Hkv, S, D)

        Returns
        -------
        Tensor, (1, Hq, S, D), or None
            ``None`` for the model's own attention.
        """
        raise NotImplementedError(f"{type(self).__name__}.attend")


@dataclass(frozen=True)
class CacheStage(Stage):
    """Shrinks the keys and values of a prompt, layer by layer while the prompt is read.

    `compress` is asked right behind a layer's own attention, so that a prefill is exact and its
    memory falls layer by layer; where budgets need all layers, `finish` is asked at the end, and
    stages behind it then. Prompts without a picture are left alone.
    """

    protocol: ClassVar[str] = "cache"
    blockwise: ClassVar[bool] = False  # whether `compress` may see a prompt block by block
    quantises: ClassVar[bool] = False  # whether what it hands on may hold segments

    def text_stats(self, depth: int) -> dict[int, ColumnRequest]:
        """Layer index to the statistics that `compress` wants of it."""
        return {}

    def compress(self, step: Step, layer: int, kv: KV, stats: ColumnStats | None) -> KV:
        """What ``layer`` keeps of ``kv``; ``step.layout`` are the prompt's rows at that layer."""
        return kv

    def finish(self, step: Step, cache: list[KV]) -> list[KV]:
        """The same for all layers at once, when the last has run."""
        return cache


@dataclass(frozen=True)
class DecodeStage(Stage):
    """Works on the cache between decode steps."""

    protocol: ClassVar[str] = "decode"
    mass: ClassVar[bool] = False  # whether `step` reads the attention that each slot receives
    every: ClassVar[int] = 1  # decode steps from one call to the next

    def step(self, slots: Slots, layer: int) -> None:
        """Change the float part of one layer of one sequence, in place, without a host sync.

        Asked before the token of the next step is written.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")

    def quiet(self, slots: Slots, layer: int) -> int:
        """How many of the next calls of `step` have nothing to do; asked right behind one.

        So many drafted tokens can be checked at once: the cache is as if they came one by one.
        """
        return 0


class Slots(Protocol):
    """The float part of one layer of one sequence, while it is decoded.

    Attributes
    ----------
    keys, values : Tensor, (H, capacity, D)
        Views of the cache's buffers.
    order : Tensor, int64, (H, capacity)
        Index of each slot's token in the full sequence, answer included. Slots beyond ``length``
        hold anything.
    mass : Tensor, float32, (H, capacity)
        Attention received since the prompt, mean over the query heads of each KV head; only where
        a stage of the recipe sets ``mass``. Writable.
    length : Tensor, int64, (H,)
        Slots that exist; on the device.
    held : int
        The largest of ``length``, on the host.
    prompt : Tensor, int64, (H,)
        What ``length`` was when decoding began.
    seen : int
        Tokens of the full sequence so far, dropped ones included: the next one's ``order``.
    notes : dict
        The sequence's `Step.notes`.
    """

    keys: Tensor
    values: Tensor
    order: Tensor
    mass: Tensor
    length: Tensor
    held: int
    prompt: Tensor
    seen: int
    notes: dict[str, dict[str, Any]]

    def evict(self, slot: Tensor) -> None:
        """Remove one slot per head, (H,); the last slot takes its place."""

    def quantise(self, count: int, make: Callable[[Tensor, Tensor], Segment]) -> None:
        """Move the first ``count`` slots of every head, keys and values (H, count, D), to a page.

        Only where no stage of the recipe evicts in decode: slots are then in order.
        """

    def rotate(self, keys: Tensor, delta: Tensor) -> Tensor:
        """As `Step.rotate`."""


@dataclass(frozen=True, eq=False)
class Target:
    """What a drafter may use of the model that it drafts for.

    Parameters
    ----------
    embed : callable
        Ids, int64, (...) to input embeddings (..., D).
    logits : callable
        Hidden states behind the last norm (..., D) to logits (..., V).
    width, depth, vocabulary : int
        D, decoder layers, V.
    banned : tuple of int
        Ids that are never drafted: placeholders of pictures and clips.
    trained : Module, optional
        The drafter's own weights.
    shallow : callable, optional
        ``(token, behind, layers) -> logits (V,)``: what only ``layers`` of the model make of a
        token, ``behind`` such tokens after the cache.
    kept : dict
        The drafter's own, of this model, from one request to the next.
    """

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    width: int
    depth: int
    vocabulary: int
    banned: tuple[int, ...] = ()
    trained: nn.Module | None = None
    shallow: Callable[..., Tensor] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Read:
    """A part of a prompt behind the target's last layer.

    Parameters
    ----------
    ids : list of int
        The full part, placeholders and dropped rows included.
    layout : TokenLayout
        The S rows that are left behind the last layer.
    embeds : Tensor, (S, D)
        What went into the first layer of these rows.
    features : Tensor, (S, D), optional
        Behind the last norm; where the drafter `DrafterStage.features`.
    taps : Tensor, (S, K, D), optional
        What went into the K layers of `DrafterStage.taps`.
    """

    ids: list[int]
    layout: TokenLayout
    embeds: Tensor
    features: Tensor | None = None
    taps: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Round:
    """A tree that the target has checked.

    Parameters
    ----------
    tree : Tree
    path : list of int
        Nodes that were accepted, the root first.
    emitted : list of int
        The tokens of ``path`` behind the root, and the target's own next one.
    logits : Tensor, (N, V), optional
        The target's, of every node; where a drafter of the recipe reads `DrafterStage.logits`.
    features, taps : Tensor, (N, D) and (N, K, D), optional
        As in `Read`, of every node.
    """

    tree: Tree
    path: list[int]
    emitted: list[int]
    logits: Tensor | None = None
    features: Tensor | None = None
    taps: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Budget:
    """How large a tree may be, and how its tokens are ranked.

    Parameters
    ----------
    nodes : int
        Of the whole tree, the root included.
    depth : int
        Drafted tokens on one path.
    warp : callable, optional
        Logits (K, V) to logits as the request samples from them. ``None`` when it is greedy.
    noise : callable, optional
        Depth (1, 2, ...) to the Gumbel noise (V,) that the target will add at that depth.
    """

    nodes: int
    depth: int
    warp: Callable[[Tensor], Tensor] | None = None
    noise: Callable[[int], Tensor] | None = None

    def rank(self, logits: Tensor, depth: int) -> Tensor:
        """By what children at ``depth`` are ranked: (K, V), log-probabilities, or these with noise.

        With the target's own noise the best child is the token that the target takes wherever the
        drafter's probabilities are the target's: sampling without replacement, coupled to it.
        """
        if self.noise is None:
            return logits.float().log_softmax(-1)
        return self.warp(logits.float()).log_softmax(-1) + self.noise(depth)


class Drafter(Protocol):
    """Drafts the answer of one request."""

    def prefill(self, read: Read) -> None:
        """See a prompt, or the next part of one."""

    def propose(self, root: int, budget: Budget) -> Tree:
        """A tree below ``root``, the token that was emitted last; it may be the root alone."""

    def extend(self, done: Round) -> None:
        """See what the target made of a tree."""


@dataclass(frozen=True)
class DrafterStage(Stage):
    """Guesses tokens of the answer, which the model checks all at once. Never changes an answer."""

    protocol: ClassVar[str] = "drafter"
    merges: ClassVar[bool] = False  # whether its trees may stand beside another drafter's
    features: ClassVar[bool] = False  # whether it reads the target's hidden states
    logits: ClassVar[bool] = False  # whether it reads the target's logits
    governs: ClassVar[bool] = False  # whether it drafts nothing, and decides for those that do

    def taps(self, depth: int) -> tuple[int, ...]:
        """Decoder layers (0 .. depth-1) whose input it reads."""
        return ()

    def largest(self) -> tuple[int, int]:
        """Nodes of a tree, the root included, and drafted tokens on one path, at most."""
        raise NotImplementedError(f"{type(self).__name__}.largest")

    def open(self, target: Target) -> Drafter:
        """A drafter for one request.

        Raises
        ------
        RecipeError
            When it does not belong to ``target``.
        """
        raise NotImplementedError(f"{type(self).__name__}.open")


# --- finding methods -----------------------------------------------------------------------------

_HOMES = ("compressors", "drafters")
_SHARED = ("tree",)  # modules there that are no methods


@cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {e.name: e for e in importlib.metadata.entry_points(group="vlmfast.stages")}


@cache
def stage_names() -> dict[str, str]:
    """Recipe word to the module that defines it, for every method that can be found."""
    found = {}
    for home in _HOMES:
        package = importlib.import_module(f"{__package__}.{home}")
        for info in pkgutil.iter_modules(package.__path__):
            if info.name not in _SHARED and not info.name.startswith("_"):
                found[info.name.replace("_", "-")] = f"{package.__name__}.{info.name}"
    return found | {name: entry.module for name, entry in _entry_points().items()}


@cache
def stage_class(name: str) -> type[Stage]:
    """The class behind a recipe word.

    Raises
    ------
    RecipeError
        When no method has that name; lists the nearest and all of them.
    """
    names = stage_names()
    if name not in names:
        raise RecipeError(
            f"unknown method {name!r}{nearest(name, list(names))}; known: {_list(sorted(names))}"
        )
    module = importlib.import_module(names[name])
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Stage) and value.name == name:
            return value
    raise RecipeError(f"module {names[name]} defines no stage called {name!r}")


def nearest(word: str, words: list[str]) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    match = difflib.get_close_matches(word.lower(), words, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
