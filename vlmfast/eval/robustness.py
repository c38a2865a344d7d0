"""The task ``robustness``: the questions of ``shapes`` about slightly perturbed images.

Each recipe answers the same questions about the clean images, about images with random noise, and
about images that are optimized against the selection of its reducer (`robustness_attacks`). The
full model answers those about the same perturbed images too: what it loses is not due to the
compression. Verbose images are optimized for long answers of the full model, and every recipe
describes them.

A perturbed run is a run of the task with its own ``control`` (``noise-4``), so that it is stored,
resumed and compared like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError

from .results import slug
from .robustness_attacks import SelectionAttack, VerboseAttack, noisy, reducer_of
from .shapes import Shapes
from .tasks import Doc

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.api.vlm import VLM

NAME = "robustness"
EPS, STEPS = (2, 4, 8), 20
_MOST_STEPS = 10_000
_LIMIT = 10


@dataclass
class Robustness:
    """Questions about images, as in ``shapes``.

    Parameters
    ----------
    eps : sequence of int
        Largest changes of a pixel value, of 0 to 255.
    steps : int
        Of the optimization of an image.
    """

    eps: tuple[int, ...] = EPS
    steps: int = STEPS

    name: ClassVar[str] = NAME
    version: ClassVar[str] = "1"
    controls: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str] = "question"
    generation: ClassVar[dict[str, dict[str, Any]]] = Shapes.generation
    shapes: ClassVar[Shapes] = Shapes()
    _known: dict[tuple[int, int], list[Doc]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.eps = tuple(dict.fromkeys(self.eps))
        if not self.eps or any(not isinstance(e, int) or not 1 <= e <= 255 for e in self.eps):
            raise VLMFastError(
                f"eps is {','.join(map(str, self.eps))!r}; it must be whole numbers from 1 to 255"
            )
        if not 1 <= self.steps <= _MOST_STEPS:
            raise VLMFastError(f"steps is {self.steps}; it must be from 1 to {_MOST_STEPS}")

    @property
    def options(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def docs(self, limit: int | None, seed: int) -> list[Doc]:
        """``limit`` questions of each type about images, by default 10."""
        limit = _LIMIT if limit is None else limit
        if (limit, seed) not in self._known:
            self._known[limit, seed] = [
                doc
                for doc in self.shapes.docs(limit, seed)
                if doc.modality == "image" and doc.kind == self.kind
            ]
        return self._known[limit, seed]

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        return self.shapes.media(doc)

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        return self.shapes.judge(doc, text)

    def plan(self, vlm: VLM, recipes: list[Recipe]) -> Iterator[tuple[Any, Recipe, str | None]]:
        """All runs: the task, the recipe, and the ``control`` that names the perturbation.

        Runs that share optimized images follow each other, and images are made when they are
        needed.
        """
        full = Recipe()
        yield self, full, None
        for eps in self.eps:
            yield Perturbed(self, (f"noise-{eps}",), noise(eps)), full, f"noise-{eps}"
        for recipe in recipes:
            attack = SelectionAttack(vlm, recipe)
            yield self, recipe, None
            for eps in self.eps:
                name = f"noise-{eps}"
                yield Perturbed(self, (name,), noise(eps), attack), recipe, name
                names = f"attack-{eps}", f"attack-{eps}-{slug(str(recipe))}"
                attacked = Perturbed(self, names, optimized(attack, eps, self.steps), attack)
                yield attacked, recipe, names[0]
                yield attacked, full, names[1]
        verbose, eps = Verbose(self.eps, self.steps), max(self.eps)
        longest = Verbose.generation["caption"]["max_new_tokens"]
        names = f"noise-{eps}", f"verbose-{eps}"
        make = optimized(VerboseAttack(vlm, longest), eps, self.steps)
        long = Perturbed(verbose, names[1:], make)
        for recipe in (full, *recipes):
            yield verbose, recipe, None
            yield Perturbed(verbose, names[:1], noise(eps)), recipe, names[0]
            yield long, recipe, names[1]


@dataclass
class Verbose(Robustness):
    """Descriptions of the same images; the length of an answer is ``generated_tokens``."""

    name: ClassVar[str] = f"{NAME}-verbose"
    kind: ClassVar[str] = "caption"


@dataclass
class Perturbed:
    """A task with perturbed images, which are made once.

    Parameters
    ----------
    task : Robustness
    controls : tuple of str
        Names of the runs that use these images.
    make : callable
        ``(image, name) -> image``.
    attack : SelectionAttack, optional
        Samples get the fraction of the kept tokens that it finds ``changed``.
    """

    task: Robustness
    controls: tuple[str, ...]
    make: Callable[[Image.Image, str], Image.Image]
    attack: SelectionAttack | None = None
    _made: dict[str, Image.Image] = field(default_factory=dict, init=False, repr=False)
    _changed: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the task."""
        return getattr(self.task, name)

    def media(self, doc: Doc, control: str | None = None) -> dict[str, Any]:
        name = doc.media_id
        if name not in self._made:
            clean = self.task.media(doc)["images"]
            self._made[name] = self.make(clean, name)
            if self.attack is not None:
                self._changed[name] = self.attack.changed(clean, self._made[name])
        return {"images": self._made[name]}

    def judge(self, doc: Doc, text: str) -> dict[str, Any]:
        found = self.task.judge(doc, text)
        if self.attack is not None:
            found["changed"] = self._changed[doc.media_id]
        return found


def check(recipes: list[Recipe], session: bool, controls: bool) -> None:
    """Check the arguments of a run before a model is loaded.

    Raises
    ------
    RecipeError
        For a recipe whose selection cannot be attacked.
    VLMFastError
        For other arguments that the task does not support.
    """
    if session or controls:
        raise VLMFastError(f"--{'session' if session else 'controls'} is not for {NAME}")
    for recipe in recipes:
        reducer_of(recipe)


def noise(eps: int) -> Callable[[Image.Image, str], Image.Image]:
    """Makes images with random noise."""
    return lambda image, name: noisy(image, eps, name)


def optimized(
    attack: SelectionAttack | VerboseAttack, eps: int, steps: int
) -> Callable[[Image.Image, str], Image.Image]:
    """Makes optimized images."""
    return lambda image, name: attack(image, eps, steps)
