"""Run a recipe on a task, resumably."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from vlmfast.core.env import environment
from vlmfast.core.progress import Progress
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.errors import ModelError, RecipeError, VLMFastError

from .axes import method_of
from .results import (
    COSTS,
    META,
    SCHEMA,
    Results,
    Writer,
    read,
    slug,
    variant_of,
    write_json,
)
from .tasks import HIDDEN, Doc, Task, find_task

# Stored with the times: also measured, or not needed for the score.
_MEASURED = ("flops_prefill", "generated_tokens", "peak_memory_bytes")
_READ_AHEAD = 4  # requests per batch row: finished rows are refilled from them
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT
_PROBES = 3  # images or videos that a recipe must refuse

LOG = logging.getLogger(__name__)


class TooManyErrors(VLMFastError):
    """More samples failed than ``max_errors``."""


def evaluate(
    vlm: Any,
    task: str | Task,
    recipe: str | Stage | Recipe | None = None,
    out: str | Path = "vlmfast-results",
    limit: int | None = None,
    *,
    seed: int = 0,
    control: str | None = None,
    session: bool = False,
    batch_size: int = 1,
    shard: tuple[int, int] | None = None,
    max_errors: int = 10,
    model: str | None = None,
    weights: str | None = None,
    command: str | None = None,
    progress: bool = False,
) -> Results:
    """Answer the questions of a task with a model under a recipe.

    Every answer is saved immediately, in batches with those beside it. An interrupted run is
    resumed, a larger ``limit`` adds samples to the existing ones, and no saved sample is computed
    twice.

    Parameters
    ----------
    vlm : VLM
    task : str or Task
    recipe : str, Stage or Recipe, optional
        By default the full model.
    out : str or Path
        The results are written to ``out/<task>/<recipe>``.
    limit : int, optional
        Questions of each type; by default all of a data set, and 100 of a generated task.
    seed : int
        Seed of the questions.
    control : str, optional
        One of the task's controls: inputs that do not show the answer.
    session : bool
        Ask all questions about an image in one `Session` without history. Their order differs
        between images, so that every type is asked first for some images.
    batch_size : int
        Questions decoded together. Greedy answers are the same up to rounding.
    shard : (int, int), optional
        Use only a part of the images: ``(i, n)`` is part i of n, counted from 0. Parts may run
        concurrently and write to one folder, which is read as one run.
    max_errors : int
        A sample that fails with a `VLMFastError` counts as wrong and is recorded with its
        ``error``. If more samples fail, the run ends.
    model : str, optional
        Name of the model in the results; by default the name that it was loaded with.
    weights : str, optional
        `weights_sha256` of the model if already known.
    command : str, optional
        Command line, recorded in the results.
    progress : bool
        Report progress on stderr: a bar in a terminal, else a line every 30 seconds.

    Returns
    -------
    Results
        Of the requested samples that exist.

    Raises
    ------
    VLMFastError
        If the folder cannot be used (`results.Writer`) or too many samples failed.
    """
    task = find_task(task) if isinstance(task, str) else task
    recipe = cast(Recipe, vlm.recipe(recipe))
    if control is not None and control not in task.controls:
        raise VLMFastError(
            f"task {task.name} has no control {control!r}; controls: {', '.join(task.controls)}"
        )
    if batch_size < 1 or (session and batch_size > 1):
        raise VLMFastError(f"batch_size is {batch_size}; it must be at least 1, and 1 in sessions")
    if session and getattr(task, "interleaved", False):
        raise VLMFastError(
            f"the prompts of {task.name} place images within the text, and sessions need them "
            "before it; use another mode"
        )
    docs = task.docs(limit, seed)
    docs = docs if shard is None else part_of(docs, *shard)
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
        "options": task.options or None,
    }
    path = Path(out) / task.name / slug(str(recipe), variant_of(control, session))
    with Writer(path, json.loads(json.dumps(meta)), shard) as writer:
        left = [doc for doc in docs if doc.doc_id not in writer.done]
        if left or not (path / META).exists():  # a part of a run may have no questions
            asked = [name for stage in recipe.acting(EncodeStage) for name in stage.saliencies()]
            sources = sorted({vlm.adapter.source(name) for name in asked})
            about = {"data": _data_name(task), "saliency": ", ".join(sources) or None}
            writer.note({**about, **_run(vlm, command, batch_size)})
        asking = _Asking(vlm, task, recipe, control, seed)
        if session:
            lines = asking.sessions(docs, set(writer.done))
        elif batch_size > 1:
            lines = asking.batches(left, batch_size)
        else:
            lines = map(asking.alone, left)
        done = len(docs) - len(left)
        check_errors(writer.errors, path, max_errors)
        LOG.info("%s: %d of %d questions left", path, len(left), len(docs))
        bar = Progress(path.name, len(docs), "questions", done=done, show=progress)
        with _uncached(vlm), bar:
            for line in lines:
                writer.add(*line)
                check_errors(writer.errors, path, max_errors)
                bar.update()
    return finished(task, path, limit, seed)


def refusal(
    vlm: Any, task: Task, recipe: Recipe, docs: list[Doc], *, session: bool = False
) -> str | None:
    """Why a recipe cannot run on a model or task; None if it can.

    The weights of its trained stages are loaded. Then it is asked about the first image and the
    first video, for one token. If it refuses, the next ones are tried: a limit may depend on the
    length of a prompt.

    Parameters
    ----------
    vlm : VLM
    task : Task
    recipe : Recipe
    docs : list of Doc
        The questions of the run.
    session : bool
        Ask in a session.
    """
    try:
        for stage in recipe:
            if stage.trained:
                vlm.adapter.trained(stage)
    except (RecipeError, ModelError) as error:
        return str(error)
    asking = _Asking(vlm, task, recipe, None, 0)
    for modality in dict.fromkeys(doc.modality for doc in docs):
        shown = {doc.media_id: doc for doc in docs if doc.modality == modality}
        reason = None
        for doc in islice(shown.values(), _PROBES):
            reason = asking.refusal(doc, session)
            if reason is None:
                break
        if reason is not None:
            return reason
    return None


def finished(task: Task, path: Path, limit: int | None, seed: int) -> Results:
    """The existing results of the requested samples.

    Of a split with hidden answers, they are also written as ``submission.json``.
    """
    run = read(path).only({doc.doc_id for doc in task.docs(limit, seed)})
    answers = getattr(task, "submission", lambda _: None)(run.samples.values())
    if answers is not None:
        write_json(path / "submission.json", answers)
    return run


def part_of(docs: list[Doc], part: int, parts: int) -> list[Doc]:
    """Every ``parts``-th image, starting at index ``part``, with all its questions.

    Raises
    ------
    VLMFastError
        If ``part`` is out of range.
    """
    if not 0 <= part < parts:
        raise VLMFastError(f"shard {part}/{parts} is invalid; of 4 shards, the first is 0/4")
    index = {name: i for i, name in enumerate(dict.fromkeys(doc.media_id for doc in docs))}
    return [doc for doc in docs if index[doc.media_id] % parts == part]


@dataclass(frozen=True)
class _Asking:
    """Converts questions to lines: one for the samples, and one for the times or None."""

    vlm: Any
    task: Task
    recipe: Recipe
    control: str | None
    seed: int

    def alone(self, doc: Doc) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Ask a single question."""
        return self._lines(doc, self._ask, {})

    def refusal(self, doc: Doc, session: bool) -> str | None:
        """The reason for which the recipe is refused; errors of the media are not among them."""
        generation = {**self.task.generation[doc.kind], "max_new_tokens": 1}
        try:
            question, media = self._shown(doc)
            with _own_randomness(""), _uncached(self.vlm), ExitStack() as stack:
                ask = self._session(stack) if session else self._ask
                ask(question, media, generation)
        except (RecipeError, ModelError) as error:
            return str(error)
        except VLMFastError:
            return None
        return None

    def batches(
        self, docs: list[Doc], size: int
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Decode ``size`` questions together; if one fails, its batch is asked one by one."""
        for start in range(0, len(docs), _READ_AHEAD * size):
            chunk = docs[start : start + _READ_AHEAD * size]
            lines = self._batch(chunk, size)
            for doc in chunk:
                yield lines[doc.doc_id] if doc.doc_id in lines else self.alone(doc)

    def _batch(self, docs: list[Doc], size: int) -> dict[str, Any]:
        from vlmfast.api.vlm import Request

        samples: dict[str, dict[str, Any]] = {}

        def requests() -> Iterator[Request]:
            for doc in docs:
                generation = self.task.generation[doc.kind]
                try:
                    question, media, sample = self._prepared(doc, generation)
                except VLMFastError:
                    continue  # `alone` records the error
                samples[doc.doc_id] = sample
                # Its prefill precedes the next request; decoding is greedy.
                torch.manual_seed(_seed(f"{self.seed} {doc.doc_id}"))
                asked = media if "messages" in media else {"question": question, **media}
                yield Request(**asked, recipe=self.recipe, generation=generation)

        by_id = {doc.doc_id: doc for doc in docs}
        try:
            with _own_randomness(""):
                answers = self.vlm.ask_many(requests(), batch_size=size)
        except VLMFastError:
            return {}
        return {
            doc_id: self._answered(by_id[doc_id], sample, answer)
            for (doc_id, sample), answer in zip(samples.items(), answers, strict=True)
        }

    def sessions(
        self, docs: list[Doc], done: set[str]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Ask the questions that are not ``done``, image by image; ``turn`` counts from 0."""
        for about in _by_image(docs):
            if done.issuperset(doc.doc_id for doc in about):
                continue
            with ExitStack() as stack:
                ask = self._session(stack)
                for turn, doc in enumerate(about):
                    # Repeat the first question if others follow, so that they are later ones.
                    if turn and doc.doc_id in done:
                        continue
                    lines = self._lines(doc, ask, {"turn": turn})
                    if doc.doc_id not in done:
                        yield lines

    def _ask(self, question: str, media: dict[str, Any], generation: dict[str, Any]) -> Any:
        if "messages" in media:
            return self.vlm.chat(media["messages"], recipe=self.recipe, **generation)
        return self.vlm.ask(question, **media, recipe=self.recipe, **generation)

    def _session(self, stack: ExitStack) -> Callable[..., Any]:
        """Ask in a session that the first question opens and ``stack`` closes."""
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
        generation = self.task.generation[doc.kind]
        sample = self._sample(doc, place)
        try:
            question, media, sample = self._prepared(doc, generation, place)
            with _own_randomness(f"{self.seed} {doc.doc_id}"):
                answer = ask(question, media, generation)
        except VLMFastError as error:
            return {**sample, "error": str(error)}, None
        return self._answered(doc, sample, answer)

    def _sample(self, doc: Doc, place: dict[str, int]) -> dict[str, Any]:
        """The fields known before the answer; a failed sample has no others except its error."""
        return {
            "doc_id": doc.doc_id,
            "type": doc.type,
            "modality": doc.modality,
            "picture": doc.media_id,
            **({"groups": dict(doc.groups)} if doc.groups else {}),
            **place,
            "prompt_hash": None,
            "target": doc.target,
            "resps": [],
            "filtered_resps": [],
            "score": None if doc.target == HIDDEN else 0.0,
            **dict.fromkeys(COSTS),
        }

    def _shown(self, doc: Doc) -> tuple[str, dict[str, Any]]:
        """The question, which a control may replace, and the media."""
        media = self.task.media(doc, self.control)
        return media.pop("question", doc.question), media

    def _prepared(
        self, doc: Doc, generation: dict[str, Any], place: dict[str, int] | None = None
    ) -> tuple[str, dict[str, Any], dict[str, Any]]:
        question, media = self._shown(doc)
        sample = self._sample(doc, place or {})
        sample["prompt_hash"] = prompt_hash(self.vlm, question, media, generation)
        return question, media, sample

    def _answered(
        self, doc: Doc, sample: dict[str, Any], answer: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        stats = answer.stats.to_dict()
        sample |= {
            "resps": [[answer.text]],  # lists as in lmms-eval: one per request, with its samples
            **self.task.judge(doc, answer.text),
            **{key: stats[key] for key in COSTS},
        }
        times = {
            key: value for key, value in stats.items() if key.endswith("_s") or key in _MEASURED
        }
        return sample, {"doc_id": doc.doc_id, **times}


def _by_image(docs: list[Doc]) -> list[list[Doc]]:
    """The questions about each image, in an order that does not depend on types or limits."""
    groups: dict[str, list[Doc]] = {}
    for doc in docs:
        groups.setdefault(doc.media_id, []).append(doc)
    return [sorted(own, key=lambda doc: zlib.crc32(doc.doc_id.encode())) for own in groups.values()]


def prompt_hash(vlm: Any, question: str, media: dict[str, Any], generation: dict[str, Any]) -> str:
    """SHA-256 of the prompt's token ids, the sizes of its images, and the arguments.

    With one id per image: running the image processor would take as long as the answer.
    """
    if hasattr(vlm, "processor"):
        from vlmfast.api.request import messages_of, render

        messages = media.get("messages") or messages_of(question, **media)
        rendered = render(vlm.adapter, messages, Recipe())
        ids = vlm.processor.tokenizer(rendered.text)["input_ids"]
        prompt: Any = [ids, [image.size for image in rendered.images]]
    else:  # another object with an ``ask`` method
        prompt = question
    text = json.dumps([prompt, generation], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_sha256(vlm: Any) -> str | None:
    """SHA-256 over name, dtype, shape and bytes of every weight; None without a model.

    Of adapters also over which are active, disabled or merged, and their scaling.
    """
    return None if getattr(vlm, "model", None) is None else _sha256(vlm.model)


def stage_weights(vlm: Any, recipe: Recipe) -> dict[str, str] | None:
    """SHA-256 of the weights of each trained stage; None without trained stages."""
    return {s.name: _sha256(vlm.adapter.trained(s)) for s in recipe if s.trained} or None


def _sha256(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        if flat.numel():
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    for name, part in module.named_modules():
        state = {key: vars(part)[key] for key in _ADAPTERS if key in vars(part)}
        if state:
            digest.update(f"{name} {state}\n".encode())
    return digest.hexdigest()


def _uncached(vlm: Any) -> AbstractContextManager:
    """Without the prefix cache: the cost of a sample does not depend on those before it."""
    cache = getattr(vlm, "prefix_cache", None)
    return nullcontext() if cache is None else cache.bypassed()


def check_errors(errors: list[str], path: Path, most: int) -> None:
    """Raise `TooManyErrors` for more than ``most`` of them."""
    if len(errors) > most:
        raise TooManyErrors(
            f"{path.name}: {len(errors)} samples failed, more than {most} "
            f"(max-errors); the last one: {errors[-1]}"
        )


@contextmanager
def _own_randomness(text: str) -> Iterator[None]:
    """Seed the random numbers, independently of earlier samples."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(_seed(text))
        yield


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())


def _model_name(vlm: Any) -> str:
    config = getattr(getattr(vlm, "model", None), "config", None)
    return Path(getattr(config, "_name_or_path", "")).name or type(vlm).__name__


def _data_name(task: Task) -> str | None:
    """The hub id, or the last part of a path."""
    data = getattr(task, "data", None)
    return None if data is None else Path(data).name if Path(data).exists() else str(data)


def _run(vlm: Any, command: str | None, batch_size: int) -> dict[str, Any]:
    """Date, hardware, versions, and the revision of the model."""
    facts, model = environment(), getattr(vlm, "model", None)
    device = torch.device(getattr(model, "device", "cpu"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "device": facts["cpu"] if device.type == "cpu" else torch.cuda.get_device_name(device),
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch.") or None,
        "model_revision": getattr(getattr(model, "config", None), "_commit_hash", None),
        "batch_size": batch_size,
        "versions": {key: facts[key] for key in ("python", "vlmfast")} | facts["packages"],
    }
