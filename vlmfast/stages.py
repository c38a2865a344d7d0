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
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    get_args,
    get_type_hints,
    overload,
)

import torch
from torch import Tensor, nn

from .contexts import EncodeRequest, PrefillContext, VisionContext
from .drafting import Budget, Drafter, Governor, Read, Round, Target
from .errors import RecipeError
from .kv import KV
from .layout import TokenLayout, VisualTokens
from .saliency import SOURCES, SaliencyRequest
from .statistics import ColumnRequest, ColumnStats, ItemGeometry, StatRequest, VisionStats

if TYPE_CHECKING:
    from .kernels.quantize_kv import Segment

__all__ = [
    "PROTOCOLS",
    "Budget",
    "CacheStage",
    "ColumnRequest",
    "ColumnStats",
    "DecodeStage",
    "Drafter",
    "DrafterStage",
    "EncodeRequest",
    "EncodeStage",
    "InEncoderStage",
    "ItemGeometry",
    "MediaStage",
    "PrefillContext",
    "PrefillStage",
    "Read",
    "Round",
    "Slots",
    "Stage",
    "Stages",
    "StatRequest",
    "Target",
    "VisionContext",
    "VisionStats",
    "budget_param",
    "nearest",
    "param",
    "positions_param",
    "repair_param",
    "saliency_param",
    "stage_class",
    "stage_names",
    "weights_param",
    "word_of",
]

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


class Stages(tuple[Stage, ...]):
    """Stages in pipeline order; ``a + b`` appends."""

    def __add__(self, other: Stage | tuple[Stage, ...]) -> Self:
        if not isinstance(other, Stage | tuple):
            return NotImplemented
        return type(self)((*self, *((other,) if isinstance(other, Stage) else other)))

    def __str__(self) -> str:
        return "+".join(str(stage) for stage in self) or "none"

    @overload
    def acting(self, protocol: Literal["media"]) -> list[MediaStage]: ...
    @overload
    def acting(self, protocol: Literal["in-encoder"]) -> list[InEncoderStage]: ...
    @overload
    def acting(self, protocol: Literal["encode"]) -> list[EncodeStage]: ...
    @overload
    def acting(self, protocol: Literal["prefill"]) -> list[PrefillStage]: ...
    @overload
    def acting(self, protocol: Literal["cache"]) -> list[CacheStage]: ...
    @overload
    def acting(self, protocol: Literal["decode"]) -> list[DecodeStage]: ...
    @overload
    def acting(self, protocol: Literal["drafter"]) -> list[DrafterStage]: ...
    @overload
    def acting(self, protocol: str) -> list[Any]: ...

    def acting(self, protocol: str) -> list[Any]:
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
        """Vision layer index to the keys that `on_block` reads, in ``context.keys``."""
        return {}

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Vision blocks (1 .. depth-1) before which `on_block` is asked."""
        raise NotImplementedError(f"{type(self).__name__}.blocks")

    def on_block(
        self, context: VisionContext, index: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """New hidden states, and where each row went.

        Without `cells` a stage is asked only where the tower makes one visual token of each patch,
        or as `token_rows` says.
        With it rows are *cells*: the ``m`` patches that become one visual token side by side, so
        that D is ``m`` times the tower's width, as that of ``context.keys`` is; special rows are
        repeated to that width. ``context.items`` are the images that lie in ``hidden``, all of one
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

    def on_output(self, context: VisionContext, hidden: Tensor) -> Tensor:
        """Asked once, in front of the projector, with what goes into it.

        Parameters
        ----------
        hidden : Tensor, (V', N, D)
            Without the CLS row where the family cuts it off.

        Returns
        -------
        Tensor, (V, N, D)
            One row per view of the batch, as the projector and the packing behind it expect; what
            a later part of the method needs beyond it goes to ``context.notes``.
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

    def keep(self, context: PrefillContext, layer: int) -> Tensor | None:
        """Rows of ``context.layout`` that enter ``layer``: int64, ascending, with all text."""
        raise NotImplementedError(f"{type(self).__name__}.keep")

    def attends(self, depth: int) -> tuple[int, ...]:
        """Layers (0 .. depth-1) whose attention `attend` computes."""
        return ()

    def attend(
        self,
        context: PrefillContext,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
    ) -> Tensor | None:
        """Causal attention of one layer over the rows of ``context.layout``.

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

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        """What ``layer`` keeps of ``kv``; ``context.layout`` are the rows at that layer."""
        return kv

    def finish(self, context: PrefillContext, cache: list[KV]) -> list[KV]:
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
        The sequence's `PrefillContext.notes`.
    """

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def order(self) -> Tensor: ...
    @property
    def mass(self) -> Tensor: ...
    @property
    def length(self) -> Tensor: ...
    @property
    def held(self) -> int: ...
    @property
    def prompt(self) -> Tensor: ...
    @property
    def seen(self) -> int: ...
    @property
    def notes(self) -> dict[str, dict[str, Any]]: ...

    def evict(self, slot: Tensor) -> None:
        """Remove one slot per head, (H,); the last slot takes its place."""

    def quantise(self, count: int, make: Callable[[Tensor, Tensor], Segment]) -> None:
        """Move the first ``count`` slots of every head, keys and values (H, count, D), to a page.

        Only where no stage of the recipe evicts in decode: slots are then in order.
        """

    def rotate(self, keys: Tensor, delta: Tensor) -> Tensor:
        """As `PrefillContext.rotate`."""


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

    def choice(self, ships: Callable[[Stage], bool]) -> list[DrafterStage]:
        """Of one that `governs`: the drafters of a recipe that names none.

        ``ships`` says whether there are weights of a trained one for the model.
        """
        raise NotImplementedError(f"{type(self).__name__}.choice")

    def govern(self, limit: tuple[int, int], known: dict[Any, Any]) -> Governor:
        """Of one that `governs`: what decides for the drafters of one answer.

        Parameters
        ----------
        limit : (int, int)
            Nodes and depth of the largest tree.
        known : dict
            What is known about this model and these drafters; shared by all answers.
        """
        raise NotImplementedError(f"{type(self).__name__}.govern")


# --- finding methods -----------------------------------------------------------------------------

_HOMES = ("compressors", "drafters")


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
            if not info.name.startswith("_"):
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
