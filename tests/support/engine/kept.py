"""What the engine keeps for later requests: encoded images, prefixes, fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn

from vlmfast import VLM
from vlmfast.api.conversation import Consumed
from vlmfast.api.session import Session
from vlmfast.core.nested import mapped
from vlmfast.engine import features, prefill, prefixes
from vlmfast.engine import fingerprint as fingerprints
from vlmfast.engine.features import with_digests
from vlmfast.engine.fingerprint import _KEPT as KEPT
from vlmfast.engine.fingerprint import _PLACES as PLACES
from vlmfast.engine.fingerprint import _WHOLE as WHOLE
from vlmfast.engine.fingerprint import Structure, fingerprint
from vlmfast.engine.prefix_cache import (
    CacheStats,
    Entry,
    Key,
    KindStats,
    PrefixCache,
    prefix_cache_of,
)
from vlmfast.engine.prefixes import KIND, Prefix, Prefixes

__all__ = [
    "KEPT",
    "KIND",
    "PLACES",
    "WHOLE",
    "CacheStats",
    "Entry",
    "Key",
    "KindStats",
    "PrefixCache",
    "fingerprint",
    "prefix_cache_of",
    "with_digests",
]


# --- the store -----------------------------------------------------------------------------------


def recent(cache: PrefixCache) -> list[Entry]:
    """All entries, the most recently used first."""
    return sorted(cache._entries.values(), key=lambda entry: -entry.touched)


def held_bytes(cache: PrefixCache) -> int:
    """Bytes of all entries that are stored or in use."""
    return cache._bytes


def beginnings(cache: PrefixCache) -> int:
    """How many beginnings of prefixes can be found."""
    return len(cache._beginnings) + len(cache._ends)


@contextmanager
def locked(cache: PrefixCache) -> Iterator[None]:
    """A look-up is under way."""
    with cache._lock:
        yield


def tensors_of(entry: Entry) -> list[Tensor]:
    """Copies of all tensors of an entry."""
    found: list[Tensor] = []
    if not isinstance(entry.value, Prefix):
        mapped(entry.value, lambda tensor: found.append(tensor.clone()) or tensor)
        return found
    cache = entry.value.cache
    found += [cache.length.clone(), cache.seen.clone(), entry.value.group.position.clone()]
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values, layer.order, layer.attention_mass, layer.bias):
            found += [] if buffer is None else [buffer.clone()]
        for segment in layer.segments:
            found += [x.clone() for x in vars(segment).values() if isinstance(x, Tensor)]
    return found


# --- what finds an entry -------------------------------------------------------------------------


def features_alone(patch: pytest.MonkeyPatch) -> None:
    """Store features of images, and no keys and values."""
    patch.setattr(Prefixes, "scope", lambda *given, **more: None)


def overlook(patch: pytest.MonkeyPatch, what: str) -> None:
    """Find entries whatever their ``what`` is: the control of a test that it counts.

    ``"uses"``: entries in use are dropped like others.
    """

    def same(*parts: object, **more: object) -> list[bytes]:
        return [b""] * len(parts)

    match what:
        case "pixels":
            patch.setattr(features, "digest", lambda tensors: b"")
        case "tower":
            patch.setattr(features, "fingerprints", same)
            patch.setattr(features, "settings_of", lambda adapter: "")
        case "weights":
            patch.setattr(prefixes, "fingerprints", same)
        case "tenant":
            patch.setattr(features, "Key", lambda kind, tenant, content: Key(kind, "", content))
        case "ids":
            patch.setattr(Key, "hashes", lambda key, least: [0] * len(key.ids))
        case "uses":
            patch.setattr(Entry, "used", lambda entry, use: None)
        case _:
            raise ValueError(what)


def before_ids_are_compared(patch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    begins = Key.begins
    patch.setattr(Key, "begins", lambda *given: (call(), begins(*given))[1])


# --- what is read of entries ---------------------------------------------------------------------


def images_read(patch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Copies of what each prompt reads of its images: features and statistics."""
    read, place = list[list[Tensor]](), prefill.place

    def noted(adapter: object, images: features.Images, *more: object) -> object:
        tensors: list[Tensor] = []
        mapped(images.encoded, lambda tensor: tensors.append(tensor.clone()) or tensor)
        read.append(tensors)
        return place(adapter, images, *more)

    patch.setattr(prefill, "place", noted)
    return read


def before_images_are_joined(patch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """Call when all images of a prompt have been found or encoded, and when new ones have been."""
    joined = features._joined
    patch.setattr(features, "_joined", lambda *given: (call(), joined(*given))[1])


def released_prefixes(patch: pytest.MonkeyPatch, before_copy: Callable[[], None]) -> list[Prefix]:
    """Those whose buffers return from now on; calls before a request copies a stored one."""
    released, release, clone = list[Prefix](), Prefix.release, Prefix.clone

    def cloned(prefix: Prefix, ids: int | None = None) -> Prefix:
        if ids is not None:
            before_copy()
        return clone(prefix, ids)

    patch.setattr(Prefix, "release", lambda own: (released.append(own), release(own))[1])
    patch.setattr(Prefix, "clone", cloned)
    return released


def free_for_copies(patch: pytest.MonkeyPatch, free: int) -> None:
    """So many bytes are free where a prefix is copied."""
    patch.setattr(prefixes, "free_bytes", lambda device: free)


# --- sessions ------------------------------------------------------------------------------------


def open_sessions(vlm: VLM) -> list[Session]:
    return [*vlm._sessions.open]


def beginning(session: Session) -> list[int]:
    """Ids of a session up to the end of its images; none without images."""
    return [] if session._images is None else session._images.prefix


def consumed(session: Session, ids: list[int]) -> str:
    """Go on as if a session had read these ids after its images; the text before them."""
    known = session._images
    session.messages, session._consumed = [], Consumed(known.head, known.prefix + ids)
    return known.head


# --- fingerprints --------------------------------------------------------------------------------


def structures_read(patch: pytest.MonkeyPatch) -> list[object]:
    """Grows whenever the settings of a model are read, and not compared with those before."""
    made, build = list[object](), Structure.__init__
    patch.setattr(
        Structure, "__init__", lambda own, *given: (made.append(own), build(own, *given))[0]
    )
    return made


def samples_read(patch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The tensors of each transfer of samples to the host."""
    read, samples = list[list[Tensor]](), fingerprints._samples

    def noted(*parts: tuple[list[Tensor], object]) -> list[bytes]:
        read.append([tensor for tensors, _ in parts for tensor in tensors])
        return samples(*parts)

    patch.setattr(fingerprints, "_samples", noted)
    return read


def sampled(tensor: Tensor) -> Tensor:
    """The elements of a tensor that a fingerprint reads."""
    return tensor.as_strided(*fingerprints._view(tensor))


def tensors_in(*modules: nn.Module) -> list[Tensor]:
    """All tensors that a fingerprint of modules covers."""
    return Structure(modules, ()).weights()[0]
