"""Running a recipe on a task, resumably."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..env import environment
from ..errors import VLMFastError
from ..recipe import Recipe
from ..stages import Stage
from .results import SCHEMA, Results, Writer, read, slug
from .tasks import Doc, Task, find_task

# What a sample says of its cost; no times, which are never the same twice.
_COSTS = ("visual_tokens_in", "equivalent_tokens", "kv_bytes", "kv_bytes_full")


class TooManyErrors(VLMFastError):
    """More samples failed than a run may have."""


def evaluate(
    vlm: Any,
    task: str | Task,
    recipe: Any = None,
    out: str | Path = "vlmfast-results",
    limit: int = 100,
    *,
    seed: int = 0,
    control: str | None = None,
    session: bool = False,
    max_errors: int = 10,
    model: str | None = None,
    weights: str | None = None,
    command: str | None = None,
    progress: bool = False,
) -> Results:
    """Ask a model the questions of a task under a recipe.

    Every answer is written when it is there. A run that was interrupted goes on where it stopped,
    a larger ``limit`` adds to what is there, and no sample is done twice.

    Parameters
    ----------
    vlm : VLM
    task : str or Task
    recipe : str, Stage or Recipe, optional
        Nothing is dropped by default.
    out : str or Path
        The results go to ``out/<task>/<recipe>``.
    limit : int
        Questions of each type.
    seed : int
        Another seed, other questions.
    control : str, optional
        One of the task's controls: what can be answered without seeing the answer.
    session : bool
        Ask all questions about a picture in one `Session` without history. They follow each other
        in an order of their own for each picture, so that every type has its turn as the first.
    max_errors : int
        A sample that fails with a `VLMFastError` counts as wrong and is recorded with its
        ``error``; more of them than this end the run.
    model : str, optional
        Its name in the results; by default the name it was loaded by.
    weights : str, optional
        `weights_sha256` of the model where it is known already.
    command : str, optional
        Command line, for the record.
    progress : bool
        A bar on stderr when that is a terminal.

    Returns
    -------
    Results
        Of the samples that were asked for.

    Raises
    ------
    VLMFastError
        When the folder cannot be used (`results.Writer`) or too many samples failed.
    """
    task = find_task(task) if isinstance(task, str) else task
    recipe = Recipe.of(recipe)
    if control is not None and control not in task.controls:
        raise VLMFastError(
            f"task {task.name} has no control {control!r}; controls: {', '.join(task.controls)}"
        )
    docs = task.docs(limit, seed)
    method, budget = method_of(recipe)
    meta = {
        "schema": SCHEMA,
        "task": task.name,
        "task_version": task.version,
        "model": model or _model_name(vlm),
        "weights_sha256": weights or weights_sha256(vlm),
        "stage_weights": stage_weights(vlm, recipe),
        "recipe": str(recipe),
        "method": method,
        "budget": budget,
        "control": control,
        "session": session or None,
        "seed": seed,
        "generation": task.generation,
    }
    path = Path(out) / task.name / slug(str(recipe), control or ("session" if session else None))
    with Writer(path, json.loads(json.dumps(meta))) as writer:
        left = [doc for doc in docs if doc.doc_id not in writer.done]
        if left:
            writer.note(_run(vlm, command))
        asking = _Asking(vlm, task, recipe, control, seed)
        lines = asking.sessions(docs, set(writer.done)) if session else map(asking.alone, left)
        done = len(docs) - len(left)
        _check_errors(writer, max_errors)
        for line in _bar(lines, done, len(docs), path.name) if progress else lines:
            writer.add(*line)
            _check_errors(writer, max_errors)
    return read(path).only({doc.doc_id for doc in docs})


@dataclass(frozen=True)
class _Asking:
    """Turns questions into lines: one for the samples, and one for the times or None."""

    vlm: Any
    task: Task
    recipe: Recipe
    control: str | None
    seed: int

    def alone(self, doc: Doc) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """A question by itself."""

        def ask(media: dict[str, Any], generation: dict[str, Any]) -> Any:
            return self.vlm.ask(doc.question, **media, recipe=self.recipe, **generation)

        return self._lines(doc, ask, {})

    def sessions(
        self, docs: list[Doc], done: set[str]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """The questions that are not ``done``, picture by picture; ``turn`` counts from 0."""
        for about in _by_picture(docs):
            if done.issuperset(doc.doc_id for doc in about):
                continue
            with ExitStack() as stack:
                ask = self._session(stack)
                for turn, doc in enumerate(about):
                    # The first is asked again where others follow: these are later ones.
                    if turn and doc.doc_id in done:
                        continue
                    lines = self._lines(doc, partial(ask, doc.question), {"turn": turn})
                    if doc.doc_id not in done:
                        yield lines

    def _session(self, stack: ExitStack) -> Callable[..., Any]:
        """Asks in a session, which is opened by the first question and closed by ``stack``."""
        opened: list[Any] = []

        def ask(question: str, media: dict[str, Any], generation: dict[str, Any]) -> Any:
            if not opened:
                session = self.vlm.session(**media, recipe=self.recipe, history=False)
                opened.append(stack.enter_context(session))
            return opened[0].ask(question, **generation)

        return ask

    def _lines(
        self, doc: Doc, ask: Callable[..., Any], place: dict[str, int]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        task, generation = self.task, self.task.generation[doc.kind]
        sample: dict[str, Any] = {
            "doc_id": doc.doc_id,
            "type": doc.type,
            "modality": doc.modality,
            "picture": doc.picture,
            **place,
            "prompt_hash": None,
            "target": doc.target,
            "resps": [],
            "filtered_resps": [],
            "score": 0.0,
            **dict.fromkeys(_COSTS),
        }
        try:
            media = task.media(doc, self.control)
            sample["prompt_hash"] = prompt_hash(self.vlm, doc.question, media, generation)
            with _own_randomness(f"{self.seed} {doc.doc_id}"):
                answer = ask(media, generation)
        except VLMFastError as error:
            return {**sample, "error": str(error)}, None
        filtered = task.filter(doc, answer.text)
        stats = answer.stats.to_dict()
        sample |= {
            "resps": [[answer.text]],  # lists as in lmms-eval: one per request, with its samples
            "filtered_resps": [filtered],
            "score": task.score(doc, filtered),
            **{key: stats[key] for key in _COSTS},
        }
        times = {key: value for key, value in stats.items() if key.endswith("_s")}
        return sample, {"doc_id": doc.doc_id, **times}


def _by_picture(docs: list[Doc]) -> list[list[Doc]]:
    """The questions about each picture, in an order that neither types nor limits decide."""
    groups: dict[str, list[Doc]] = {}
    for doc in docs:
        groups.setdefault(doc.picture, []).append(doc)
    return [sorted(of, key=lambda doc: zlib.crc32(doc.doc_id.encode())) for of in groups.values()]


def prompt_hash(vlm: Any, question: str, media: dict[str, Any], generation: dict[str, Any]) -> str:
    """SHA-256 of the prompt's token ids, before anything is dropped, and of the arguments."""
    if hasattr(vlm, "inputs"):
        prompt = vlm.inputs(question, **media)["input_ids"][0].tolist()
    else:  # something else that answers questions
        prompt = question
    text = json.dumps([prompt, generation], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def method_of(recipe: Recipe) -> tuple[str, float | None]:
    """What makes a curve: the recipe without its shares, and the budget it was put at."""
    plain, budgets = [], []
    for stage in recipe:
        budgets.append(getattr(stage, "budget", None))
        shares = {
            f.name: f.default
            for f in fields(stage)
            if f.name in ("budget", stage.lead) and f.default is not MISSING
        }
        plain.append(str(replace(stage, **shares)))
    given = {b for b in budgets if b is not None}
    return "+".join(plain) or "none", given.pop() if len(given) == 1 else None


def takes_budget(recipe: Recipe) -> bool:
    """Whether any stage of a recipe can be put at a budget."""
    return any(_has(stage, "budget") for stage in recipe)


def with_budget(recipe: Recipe, budget: float | None) -> Recipe:
    """The recipe with all its reducers at ``budget``."""
    return with_field(recipe, "budget", budget)


def shrinks_cache(stages: Stage | Recipe) -> bool:
    """Whether a stage, or any stage of a recipe, is there to make the cache smaller.

    Not so reducers, which are judged by the visual tokens that they keep, even where one of their
    parts works on the cache.
    """
    if isinstance(stages, Stage):
        return any(p.protocol == "cache" for p in stages.expand()) and not _has(stages, "budget")
    return any(shrinks_cache(stage) for stage in stages)


def share_of(recipe: Recipe) -> float | None:
    """The share of the cache that a recipe is put at."""
    shares = {stage.share for stage in recipe if _has(stage, "share")}
    return shares.pop() if len(shares) == 1 else None


def with_share(recipe: Recipe, share: float) -> Recipe:
    """The recipe with all its cache methods at ``share``, as far as they have one."""
    return with_field(recipe, "share", share)


def with_field(recipe: Recipe, name: str, value: Any) -> Recipe:
    """The recipe with one parameter set in every stage that has it."""
    return Recipe(tuple(replace(s, **{name: value}) if _has(s, name) else s for s in recipe))


def _has(stage: Stage, name: str) -> bool:
    return any(f.name == name for f in fields(stage))


def weights_sha256(vlm: Any) -> str | None:
    """SHA-256 over name, type, shape and bytes of every weight; None without a model."""
    return None if getattr(vlm, "model", None) is None else _sha256(vlm.model)


def stage_weights(vlm: Any, recipe: Recipe) -> dict[str, str] | None:
    """SHA-256 of the weights of each trained stage; None where none is trained."""
    return {s.name: _sha256(vlm.adapter.trained(s)) for s in recipe if s.trained} or None


def _sha256(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        if flat.numel():
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def _check_errors(writer: Writer, most: int) -> None:
    if len(writer.errors) > most:
        raise TooManyErrors(
            f"{writer.path.name}: {len(writer.errors)} samples failed, more than {most} "
            f"(max-errors); the last one: {writer.errors[-1]}"
        )


@contextmanager
def _own_randomness(text: str) -> Iterator[None]:
    """Random numbers that do not depend on which samples came before."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(zlib.crc32(text.encode()))
        yield


def _bar(lines: Iterator, done: int, total: int, name: str) -> Any:
    from tqdm import tqdm

    return tqdm(lines, desc=name, initial=done, total=total, unit="q", disable=None)


def _model_name(vlm: Any) -> str:
    config = getattr(getattr(vlm, "model", None), "config", None)
    return Path(getattr(config, "_name_or_path", "")).name or type(vlm).__name__


def _run(vlm: Any, command: str | None) -> dict[str, Any]:
    """Where and when, and with what versions."""
    facts = environment()
    device = torch.device(getattr(getattr(vlm, "model", None), "device", "cpu"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": facts["cpu"] if device.type == "cpu" else torch.cuda.get_device_name(device),
        "versions": {key: facts[key] for key in ("python", "vlmfast")} | facts["packages"],
    }
