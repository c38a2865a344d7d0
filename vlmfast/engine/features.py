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
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from vlmfast.core.layout import TokenLayout
from vlmfast.core.nested import mapped
from vlmfast.core.statistics import ItemGeometry, VisionStats
from vlmfast.models.base import Adapter, Encoded, Part

from .fingerprint import fingerprints, settings_sha256, structures_of
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
        The fingerprint of the model without its language model, if nothing has run since.
    """
    cache = prefix_cache_of(adapter)
    state = _state(adapter, wanted, trained, tower) if cache.enabled else None
    if state is None:
        return encode(adapter, tensors, items, wanted, stats, trained)
    known = hashed(adapter, tensors, items) if known is None else known
    groups = [known] if wanted.joint else [[one] for one in known]
    keys = [Key(KIND, tenant, (state, _content(group, items, wanted))) for group in groups]
    values: dict[Key, Images] = {}
    use = Lock()
    with use:
        for key in dict.fromkeys(keys):
            if (entry := cache.find(key, use)) is not None:
                values[key] = entry.value
        hits, missing = set(values), dict[Key, list[Hashed]]()
        for key, group in zip(keys, groups, strict=True):
            if key not in hits:
                missing.setdefault(key, group)  # the first of equal images is encoded
        if missing:
            own, everything = items, len(missing) == len(keys)
            chosen = sorted(i for group in missing.values() for i in _indices(group))
            if not everything:
                own = _alone([items[i] for i in chosen])
                tensors = adapter.joined(
                    [one.part.tensors for group in missing.values() for one in group]
                )
            made = encode(adapter, tensors, own, wanted, stats, trained)
            places = {i: (made.encoded, at) for at, i in enumerate(chosen)}
            for key, group in missing.items():
                indices = _indices(group)
                alone = _alone([items[i] for i in indices])
                part = _joined(alone, [places[i] for i in indices], wanted)
                # Not views of tensors that belong to all images.
                values[key] = value = mapped(Images(part, made.groups, made.notes), Tensor.clone)
                cache.put(key, value, _bytes(value), use=use)
            if everything:
                return made
        places = {
            i: (values[key].encoded, at)
            for key, group in zip(keys, groups, strict=True)
            for at, i in enumerate(_indices(group))
        }
        stats.cached_tokens = sum(
            sum(map(len, values[key].encoded.features)) for key in keys if key in hits
        )
        whole = values[keys[0]]  # of joint stages; all images are one entry
        joined = _joined(items, [places[i] for i in range(len(items))], wanted)
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
    parts: list[ModelPart] = [model_parts(adapter)[0], (list(trained.values()), [])]
    given: dict[str, Any] = {"hooks": True, "training": True, "values": True}
    weights = fingerprints(*parts, kept=structures_of(adapter), **given)
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
    parts = [model_parts(adapter)[0]] if tower is None else []
    if wanted.inside and trained:
        parts.append((list(trained.values()), []))
    weights: list[bytes | None] = [] if tower is None else [tower]
    weights += fingerprints(*parts, kept=structures_of(adapter))
    asked = (
        tuple((type(stage), stage) for stage in (*wanted.views, *wanted.inside)),
        tuple(sorted(wanted.requests.items())),
        tuple(sorted(wanted.saliency.items())),
        wanted.cls,
    )
    if None in weights or not is_hashable(asked):
        return None
    return (*weights, *surroundings(adapter), asked)


def is_hashable(asked: Any) -> bool:
    """Whether no parameter of the stages in it can change."""
    try:
        hash(asked)
    except TypeError:
        return False
    return True


def surroundings(adapter: Adapter) -> tuple[Hashable, ...]:
    """What results depend on beside weights and recipe."""
    mode, precision = Mode.current(adapter.device), torch.get_float32_matmul_precision()
    return str(mode.device), mode.autocast, precision, settings_of(adapter)


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
    # Wherever an image is in a prompt.
    found = [items[i] for i in _indices(group)]
    shapes = [(i.size, i.tiles, i.patches, i.views[1] - i.views[0], i.video >= 0) for i in found]
    return (*digests, *shapes)


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


def _joined(
    items: tuple[ItemGeometry, ...], found: list[tuple[Encoded, int]], wanted: Wanted
) -> Encoded:
    """Images, each one of those that were encoded together, as the ``items`` of a prompt."""
    by_view, first = [found[i] for i in _by_view(items)], found[0][0].stats
    known = [of.stats for of, _ in by_view]
    slices = [slice(*of.stats.items[i].views) for of, i in by_view]

    def views(parts: list[Tensor]) -> Tensor:
        return torch.cat([part[own] for part, own in zip(parts, slices, strict=True)])

    stats = VisionStats(
        items,
        {layer: views([of.rows[layer] for of in known]) for layer in first.rows},
        {layer: views([of.keys[layer] for of in known]) for layer in first.keys},
        None if first.cls is None else views([of.cls for of in known if of.cls is not None]),
        {key: tuple(of.stats.saliency[key][i] for of, i in found) for key in first.saliency},
        wanted.left_out,
        None
        if first.skipped is None
        else views([of.skipped for of in known if of.skipped is not None]),
    )
    layouts = [
        _moved(of.layouts[i], at, items[at].views[0] - of.stats.items[i].views[0])
        for at, (of, i) in enumerate(found)
    ]
    features, extra = [of.features[i] for of, i in found], [of.extra[i] for of, i in found]
    return Encoded(features, layouts, stats, extra)


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


def _bytes(value: Images) -> int:
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    mapped(value, count)
    return sum(sizes)
