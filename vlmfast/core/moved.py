"""Former module paths: importing one warns once and gives the names of the new module.

Session files name classes by their modules; `former_names` finds those of older files.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

__all__ = ["MOVED", "former_names", "install"]

# Folder of today: modules that were in the package itself under the same name.
_FROM_PACKAGE = {
    "core": (
        "buffers contexts drafting env files kv layout recipe saliency snapshot statistics tree"
    ),
    "api": "answer attachment generation long_video overlays request session support vlm",
    "eval": "bench",
}
# Folder of today: modules that were in `vlmfast.compressors` under the same name.
_FROM_COMPRESSORS = {
    "compressors.frames": "frames_clip",
    "compressors.encoder": "mustdrop pvc tome",
    "compressors.tokens": (
        "catp clip_relevance divprune downsample elastic flashvid grid hired mmtok prumerge "
        "prumerge_plus random scope visionzip"
    ),
    "compressors.prefill": "atp dart fastv pyramiddrop sparsevlm zipvl",
    "compressors.cache": (
        "cake fastkv h2o kivi lookm pyramidkv quickprefill snapkv streamingllm vlcache zipcache"
    ),
}
# Trained methods are packages of several modules.
_PARTS = {
    "atp": "module stage training",
    "elastic": "module stage training",
    "pvc": "module plan stage training",
}
# Shared by methods, once private to their folder.
_SHARED = "budget cells clip evictor groups layered part reducer select"
_SCENES = "captions drawing glyphs questions vocabulary"
_TINY = (
    "blocks data evaluation export heads labels lessons network optim parallel references schedule "
    "training"
)


def _table() -> Iterator[tuple[str, tuple[str, ...]]]:
    for folder, names in _FROM_PACKAGE.items():
        yield from ((name, (f"{folder}.{name}",)) for name in names.split())
    for folder, names in _FROM_COMPRESSORS.items():
        for name in names.split():
            for part in ("", *(f".{of}" for of in _PARTS.get(name, "").split())):
                yield f"compressors.{name}{part}", (f"{folder}.{name}{part}",)
    for name in _SHARED.split():
        yield f"compressors._{name}", (f"compressors.{name}",)
    for name in _SCENES.split():
        yield f"models.tiny.{name}", (f"scenes.{name}",)
    for name in _TINY.split():
        yield f"models.tiny.{name}", (f"train.tiny.{name}",)
    yield "models.tiny.scenes", ("scenes.examples",)
    for name in ("compressors.cover", "compressors._cover"):
        yield name, ("kernels.coverage",)
    yield "checkpoints", ("core.weights",)
    yield "loading", ("models._loading",)
    yield "training", ("train.stages",)
    yield "drafter_training", ("train.drafters",)
    yield "drafters.tree", ("core.tree",)
    yield "compressors._training", ("core.training",)
    yield "compressors._views", ("core.views",)
    yield (
        "stages",
        tuple(
            f"core.{name}"
            for name in (
                "protocols",
                "params",
                "stage",
                "registry",
                "contexts",
                "drafting",
                "statistics",
            )
        ),
    )


_ROOT = "vlmfast"
_RENAMED_CLASSES = {"vlmfast.session.Pictures": "vlmfast.api.session.Images"}
MOVED: dict[str, tuple[str, ...]] = {
    f"{_ROOT}.{old}": tuple(f"{_ROOT}.{name}" for name in new) for old, new in _table()
}
"""Former module: the modules that have its names today."""


def former_names(cls: type) -> list[str]:
    """Paths, as ``module.Class``, under which ``cls`` could be imported before it moved."""
    renamed = [
        old
        for old, new in _RENAMED_CLASSES.items()
        if new == f"{cls.__module__}.{cls.__qualname__}"
    ]
    return renamed + [
        f"{old}.{cls.__qualname__}" for old, new in MOVED.items() if cls.__module__ in new
    ]


class _Loader(Loader):
    """Makes a module without contents of its own, which looks names up where they are today."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        targets = MOVED[module.__name__]
        warnings.warn(
            f"{module.__name__} has moved: import from {' or '.join(targets)}",
            DeprecationWarning,
            stacklevel=2,
        )

        def find(name: str) -> Any:
            for target in targets:
                found = importlib.import_module(target)
                if hasattr(found, name):
                    return getattr(found, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = find

    def get_code(self, name: str) -> CodeType:
        """What ``python -m NAME`` runs."""
        (target,) = MOVED[name]
        text = f"import runpy; runpy.run_module({target!r}, run_name='__main__', alter_sys=True)"
        return compile(text, target, "exec")


class _Finder(MetaPathFinder):
    """Finds the former modules, after everything that exists was not found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in MOVED:
            return None
        package = any(other.startswith(f"{name}.") for other in MOVED)
        return ModuleSpec(name, _Loader(), is_package=package)


def install() -> None:
    """Let the former modules be imported; a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
