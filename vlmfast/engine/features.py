"""Features of images in the prefix cache: the vision tower runs only on images that are missing.

Where no stage of the recipe works inside the tower or reuses frames, every image is an entry of its
own, and so is a video that is not read as images. Otherwise all images of a prompt are one entry,
because such stages may see all of them.

The tower runs once on all missing images. Features then do not depend on which other images were
there, apart from rounding: matrix products of another size may differ in the last bits.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.layout import TokenLayout
from vlmfast.core.nested import mapped
from vlmfast.core.saliency import Saliency
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.models.base import Adapter, Encoded, Part

from .fingerprint import fingerprint, fingerprints, settings_sha256, structures_of
from .mode import Mode
from .prefix_cache import Key, prefix_cache_of
from .stats import Stats
from .vision import Images, Wanted, encode

ModelPart = tuple[list[nn.Module], list[nn.Module]]  # modules, and what of them is left out

KIND = "images"
_PROCESSORS = ("image_processor", "video_processor")
_BLOCKS, _LEVELS = 64, 64  # of `with_digests`; normalised pixels are between about -2 and 3


@dataclass(frozen=True, eq=False)
class Hashed:
    """Images of a prompt that are found together.

    Parameters
    ----------
    part : Part
    digest : bytes
        Of the content of its tensors.
    """

    part: Part
    digest: bytes


@dataclass(frozen=True, eq=False)
class Item:
    """One of ``VisionStats.items`` after the tower; views are counted from its own first one.

    Parameters
    ----------
    features, layout, extra
        As in `Encoded`.
    rows, keys, cls
        Those of its views, as in `VisionStats`.
    saliency : dict of str to Saliency
    skipped : Tensor, optional
        As in `VisionStats`.
    """

    features: Tensor
    layout: TokenLayout
    extra: tuple[Tensor, ...]
    rows: dict[int, Tensor]
    keys: dict[int, Tensor]
    cls: Tensor | None
    saliency: dict[str, Saliency]
    skipped: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Kept:
    """The value of an entry: images that were encoded; see `Images`.

    Parameters
    ----------
    items : tuple of Item
    groups, notes : dict
    """

    items: tuple[Item, ...]
    groups: dict[int, Tensor] = field(default_factory=dict)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)


def hashed(
    adapter: Adapter, tensors: dict[str, Tensor], items: tuple[ItemGeometry, ...]
) -> list[Hashed]:
    """The images of a prompt with digests of their content: a transfer to the host on a GPU."""
    return [Hashed(part, digest(part.tensors)) for part in _parts(adapter, tensors, items)]


def _parts(
    adapter: Adapter, tensors: dict[str, Tensor], items: tuple[ItemGeometry, ...]
) -> list[Part]:
    """The images of a prompt that are encoded independently."""
    parts = adapter.parts(tensors, items)
    if parts is None:
        keys = {*adapter.tensors, *adapter.video_tensors, *adapter.beside}
        whole = {key: value for key, value in tensors.items() if key in keys}
        parts = [Part(tuple(range(len(items))), whole)]
    return parts


def with_digests(
    adapter: Adapter, tensors: dict[str, Tensor], items: tuple[ItemGeometry, ...]
) -> tuple[ItemGeometry, ...]:
    """The images of a prompt with `ItemGeometry.digest`.

    It is a hash of means over blocks of pixels, rounded coarsely: the arithmetic of another CPU,
    device or dtype hardly ever changes it.
    """
    found = list(items)
    for part in _parts(adapter, tensors, items):
        content = hashlib.blake2b(digest_size=7)
        for name, tensor in sorted(part.tensors.items()):
            values = tensor.detach().flatten().double().cpu()
            if tensor.is_floating_point():
                blocks = values.tensor_split(_BLOCKS)
                values = torch.stack([b.mean() for b in blocks if len(b)]) * _LEVELS
            content.update(f"{name} {values.round().long().tolist()}".encode())
        for at, item in enumerate(part.items):
            own = content.copy()
            own.update(at.to_bytes(4))
            found[item] = replace(items[item], digest=int.from_bytes(own.digest()))
    return tuple(found)


def digest(tensors: dict[str, Tensor]) -> bytes:
    """Of the content of tensors, whatever device they are on."""
    digest = hashlib.blake2b(digest_size=32)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def encoded(
    adapter: Adapter,
    tensors: dict[str, Tensor],
    items: tuple[ItemGeometry, ...],
    known: list[Hashed] | None,
    wanted: Wanted,
    tenant: str,
    stats: Stats,
    trained: dict[str, nn.Module],
    tower: bytes | None = None,
) -> Images:
    """The images of a prompt after the vision tower; those in the prefix cache are not encoded.

    Parameters
    ----------
    known : list of Hashed, optional
        The result of `hashed`, if it was computed before.
    tenant : str
        As in `Key`.
    tower : bytes, optional
        The result of `tower_fingerprint`, if nothing has run since.
    """
    cache = prefix_cache_of(adapter)
    state = _state(adapter, wanted, trained, tower) if cache.enabled else None
    if state is None:
        return encode(adapter, tensors, items, wanted, stats, trained)
    known = hashed(adapter, tensors, items) if known is None else known
    groups = [known] if wanted.joint else [[one] for one in known]
    keys = [Key(KIND, tenant, (state, _content(group, items, wanted))) for group in groups]
    values: dict[Key, Kept] = {}
    use = Lock()
    with use:
        for key in dict.fromkeys(keys):
            if (entry := cache.find(key, use)) is not None:
                values[key] = entry.value
        hits, by_key = set(values), dict[Key, list[Hashed]]()
        for key, group in zip(keys, groups, strict=True):
            by_key.setdefault(key, group)  # the first of equal images is the one that is encoded
        missing = {key: _indices(group) for key, group in by_key.items() if key not in hits}
        everything = len(missing) == len(keys)
        if missing:
            own, chosen = items, list(range(len(items)))
            if not everything:
                chosen = sorted(i for indices in missing.values() for i in indices)
                own = _alone([items[i] for i in chosen])
                parts = [one.part.tensors for key in missing for one in by_key[key]]
                tensors = adapter.joined(parts)
            made = encode(adapter, tensors, own, wanted, stats, trained)
            encoded_items = dict(zip(chosen, separated(made.encoded), strict=True))
            for key, indices in missing.items():
                value = Kept(tuple(encoded_items[i] for i in indices), made.groups, made.notes)
                # Not views of tensors that belong to all images.
                values[key] = value = mapped(value, Tensor.clone)
                cache.put(key, value, _bytes(value), use=use)
            if everything:
                return made
        found = {
            i: item
            for key, group in zip(keys, groups, strict=True)
            for i, item in zip(_indices(group), values[key].items, strict=True)
        }
        stats.cached_tokens = sum(
            len(found[i].features)
            for key, group in zip(keys, groups, strict=True)
            for i in (_indices(group) if key in hits else ())
        )
        joined = _joined(items, [found[i] for i in range(len(items))], wanted)
        whole = values[keys[0]]  # of joint stages; all images are one entry
        return Images(joined, whole.groups, whole.notes)


def _indices(group: list[Hashed]) -> list[int]:
    return [i for one in group for i in one.part.items]


def tower_state(adapter: Adapter, trained: dict[str, nn.Module]) -> Hashable:
    """All that the features of given images depend on, apart from the recipe.

    Parameters
    ----------
    trained : dict of str to Module
        Of the recipe's stages.
    """
    given: dict[str, Any] = {"hooks": True, "training": True, "values": True}
    given["kept"] = structures_of(adapter)
    weights = tower_fingerprint(adapter, **given), fingerprint(*trained.values(), **given)
    return *weights, Mode.current(adapter.device).autocast, settings_of(adapter)


def settings_of_files(adapter: Adapter, *, language: bool) -> str:
    """SHA-256 of the settings of model and processor, for files that other processes read.

    Parameters
    ----------
    language : bool
        Whether the language model is part of it.
    """
    model = settings_sha256(adapter.model, skip=() if language else _language(adapter))
    found = [getattr(adapter.processor, kind, None) for kind in _PROCESSORS]
    # Other attributes depend on how the processor was read; names of filters are numbers, too.
    processor = [
        (name, value.value if isinstance(value, enum.Enum) else value)
        for of in found
        for name, value in sorted(vars(of).items() if of is not None else ())
        if name[0] != "_" and not name.endswith(("_type", "_class"))
    ]
    return hashlib.sha256(f"{model} {processor}".encode()).hexdigest()


def tower_fingerprint(adapter: Adapter, **given: Any) -> bytes | None:
    """The `fingerprint` of the model without its language model."""
    return fingerprints(model_parts(adapter)[0], **given)[0]


def model_parts(adapter: Adapter) -> tuple[ModelPart, ModelPart]:
    """The model without its language model, and that, for `fingerprints`."""
    language = _language(adapter)
    return ([adapter.model], language), (language, [])


def _language(adapter: Adapter) -> list[nn.Module]:
    """The modules of the language model."""
    model = adapter.model
    return [adapter.decoder, model.get_input_embeddings(), model.get_output_embeddings()]


# --- keys ----------------------------------------------------------------------------------------


def _state(
    adapter: Adapter, wanted: Wanted, trained: dict[str, nn.Module], tower: bytes | None = None
) -> Hashable | None:
    """All that features depend on except the images; ``None`` where they are not shared.

    ``tower`` is as in `encoded`.
    """
    training = adapter.model.training or torch.is_grad_enabled()
    if training or torch.is_inference_mode_enabled():  # whose tensors others cannot use
        return None
    mode = Mode.current(adapter.device)
    kept = structures_of(adapter)
    weights = [tower_fingerprint(adapter, kept=kept) if tower is None else tower]
    if wanted.inside and trained:
        weights.append(fingerprint(*trained.values(), kept=kept))
    asked = (
        tuple((type(stage), stage) for stage in (*wanted.views, *wanted.inside)),
        tuple(sorted(wanted.requests.items())),
        tuple(sorted(wanted.saliency.items())),
        wanted.cls,
    )
    try:
        hash(asked)
    except TypeError:  # a stage whose parameters can change
        return None
    if None in weights:
        return None
    precision = torch.get_float32_matmul_precision()
    return (*weights, str(mode.device), mode.autocast, precision, settings_of(adapter), asked)


def settings_of(adapter: Adapter) -> Hashable:
    """The settings of the processor, which pixels do not show: how it crops, for example."""
    found = [getattr(adapter.processor, kind, None) for kind in _PROCESSORS]
    return tuple(repr(None if of is None else sorted(vars(of).items())) for of in found)


def _content(
    group: list[Hashed], items: tuple[ItemGeometry, ...], wanted: Wanted
) -> tuple[Hashable, ...]:
    """What identifies images: their pixels, and how these are divided."""
    digests = tuple(one.digest for one in group)
    if wanted.joint:  # its stages see which image is a frame of which video
        return (*digests, items)
    return (*digests, tuple(_plain(items[i]) for i in _indices(group)))


def _plain(item: ItemGeometry) -> Hashable:
    """The geometry of an item, wherever it is in a prompt."""
    first, stop = item.views
    return item.size, item.tiles, item.patches, stop - first, item.video >= 0


# --- items ---------------------------------------------------------------------------------------


def _alone(items: list[ItemGeometry]) -> tuple[ItemGeometry, ...]:
    """Some items of a prompt, as if there were no others: their views follow each other."""
    first, found = 0, list(items)
    for i in _by_view(items):
        count = items[i].views[1] - items[i].views[0]
        found[i] = replace(items[i], views=(first, first + count))
        first += count
    return tuple(found)


def _by_view(items: Sequence[ItemGeometry]) -> list[int]:
    """Indices of items in the order of their views in the tower."""
    return sorted(range(len(items)), key=lambda i: items[i].views[0])


def separated(of: Encoded) -> list[Item]:
    """Each item of encoded images."""
    found = []
    for i, (item, layout) in enumerate(zip(of.stats.items, of.layouts, strict=True)):
        views = slice(*item.views)
        found.append(
            Item(
                of.features[i],
                _moved(layout, 0, -item.views[0]),
                of.extra[i],
                {layer: rows[views] for layer, rows in of.stats.rows.items()},
                {layer: keys[views] for layer, keys in of.stats.keys.items()},
                None if of.stats.cls is None else of.stats.cls[views],
                {key: each[i] for key, each in of.stats.saliency.items()},
                None if of.stats.skipped is None else of.stats.skipped[views],
            )
        )
    return found


def _joined(items: tuple[ItemGeometry, ...], kept: list[Item], wanted: Wanted) -> Encoded:
    """The inverse of `separated`, for the items of a prompt."""
    ordered = [kept[i] for i in _by_view(items)]
    first = kept[0]
    stats = VisionStats(
        items,
        {layer: torch.cat([of.rows[layer] for of in ordered]) for layer in first.rows},
        {layer: torch.cat([of.keys[layer] for of in ordered]) for layer in first.keys},
        None if first.cls is None else torch.cat([of.cls for of in ordered if of.cls is not None]),
        {key: tuple(of.saliency[key] for of in kept) for key in first.saliency},
        wanted.left_out,
        None
        if first.skipped is None
        else torch.cat([of.skipped for of in ordered if of.skipped is not None]),
    )
    pairs = zip(items, kept, strict=True)
    layouts = [_moved(of.layout, i, item.views[0]) for i, (item, of) in enumerate(pairs)]
    return Encoded([of.features for of in kept], layouts, stats, [of.extra for of in kept])


def _moved(layout: TokenLayout, item: int, views: int) -> TokenLayout:
    """A layout as that of item ``item``, with ``views`` added to its views."""
    moved = layout.replace(
        item=torch.full_like(layout.item, item),
        view=torch.where(layout.view >= 0, layout.view + views, layout.view),
    )
    if not layout.is_seen:
        return moved
    known = layout.on_host.clone()
    known[1], known[3] = item, torch.where(known[3] >= 0, known[3] + views, known[3])
    return moved.seen(known)


def _bytes(value: Kept) -> int:
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    mapped(value, count)
    return sum(sizes)
