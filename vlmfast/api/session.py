"""Sessions: many questions about the same images.

Images are decoded and encoded once. Unless the recipe depends on the question, their keys and
values in the language model, compressed by the recipe, are shared as well. Each question then costs
only its own tokens.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from vlmfast.core import snapshot
from vlmfast.core.protocols import InEncoderStage, MediaStage
from vlmfast.core.recipe import Recipe
from vlmfast.engine.engine import engine_of
from vlmfast.engine.handle import Handle
from vlmfast.engine.opening import fitted, reading
from vlmfast.engine.prefill import Inputs, Seen, look
from vlmfast.engine.prefix import Prefix, copied
from vlmfast.engine.sequence import Phase, Prefill, Sequence
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import ModelError, RecipeError, RequestCancelled, VLMFastError
from vlmfast.models.base import Adapter

from . import session_checks, session_file
from .answer import Answer
from .generation import Generation, gate, shown
from .request import (
    Rendered,
    answer_of,
    check_length,
    check_question,
    check_streamer,
    chooser,
    messages_of,
    opened,
    read_media,
    recipe_of,
    render,
    submitted,
    tensors_of,
)

_FREE_SLOTS = 128  # of a new cache
_AT_ONCE = 1024  # rows prefilled at once after a cache: bounds the size of their mask


@dataclass
class Images:
    """A session's images and their features; tensors in host memory.

    Parameters
    ----------
    media : list of dict
        The first user turn without its question, as chat templates take it.
    head : str
        The prompt's text up to its last image.
    prefix : list of int
        Its ids.
    sizes, frames : list
        As in `engine.prefill.Inputs`.
    tensors : dict of str to Tensor
        Outputs of the processor other than ids and pixels.
    pixels : dict of str to Tensor
        The pixels, if the recipe works inside the tower and full features must be recomputed.
    seen : Seen
    stats, trace
        State after the tower.
    images : list of PIL.Image.Image
        For overlays.
    ends : bool
        Whether the text after the images continues from their largest rotary id.
    """

    media: list[dict]
    head: str
    prefix: list[int]
    sizes: list[tuple[int, int]]
    frames: list[tuple]
    tensors: dict[str, Tensor]
    pixels: dict[str, Tensor]
    seen: Seen
    stats: Stats
    trace: Trace
    images: list[Any] = field(default_factory=list)
    ends: bool = True


class Sessions:
    """The open sessions of one model.

    Parameters
    ----------
    adapter : Adapter

    Attributes
    ----------
    bytes : int or None
        Upper bound on their caches between questions, see `VLM.session_bytes`.
    open : WeakSet of Session
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.bytes: int | None = None
        self.open: WeakSet[Session] = WeakSet()
        self.lock = threading.Lock()

    def make_room(self, used: Session) -> None:
        """Drop the caches of the least recently used sessions until the bound is met."""
        if self.bytes is None:
            return
        with self.lock:
            others = [s for s in self.open if s is not used and s.bytes]
            total = used.bytes + sum(s.bytes for s in others)
            for session in sorted(others, key=lambda s: s._used):
                if total <= self.bytes:
                    return
                if not session._busy:
                    total -= session.bytes
                    session._drop()


class Session:
    """Ask many questions about images that are encoded once; opened by `VLM.session`.

    ``session.reuses`` tells what questions share:

    ``"kv"``
        The recipe does not depend on the question. The keys and values of the images, compressed by
        the recipe, are shared by all questions, and each question costs only its own tokens.
        Answers equal those of `VLM.ask` unless the recipe compresses the cache: in `VLM.ask` the
        question attends to the images before compression, in a session only afterwards. Questions
        and answers are not compressed in prefill; methods that work in decode include them.
    ``"features"``
        A stage of the recipe depends on the question (``query_dependent`` of its class). The tower
        does not run again, but each question is prefilled with the images. Its answer is that of
        `VLM.ask`, or of `VLM.chat` with the conversation so far.

    All features of the tower stay in host memory, so that ``restore=True`` can run the full model.

    Attributes
    ----------
    recipe : Recipe
    history : bool
        Whether a question sees the previous ones and their answers.
    reuses : str
    messages : list of dict
        The conversation so far, without the images; empty without ``history``. It can be set to
        another conversation; a common beginning is not prefilled again.
    stats : Stats
        Cost of opening the session.
    """

    def __init__(
        self,
        group: Sessions,
        recipe: Recipe,
        history: bool,
        images: Images | None,
        stats: Stats,
    ) -> None:
        self._group, self._adapter, self._images = group, group.adapter, images
        self._engine = engine_of(group.adapter)
        self.recipe, self.history, self.stats = recipe, history, stats
        asks = any(p.query_dependent for p in _parts(recipe))
        self.reuses = "features" if asks or not (images is None or images.ends) else "kv"
        self._messages: list[dict] = []
        self._kept: Prefix | None = None
        self._closed = self._busy = False
        self._cloned = False  # whether the current question continues from a copy of the cache
        self._used = time.perf_counter_ns()
        group.open.add(self)

    # --- opening and closing ---------------------------------------------------------------------

    @classmethod
    def _open(
        cls,
        group: Sessions,
        images: Any,
        video: Any,
        num_frames: int | None,
        fps: float | None,
        recipe: Recipe,
        history: bool,
    ) -> Session:
        start = time.perf_counter()
        for stage in recipe.acting(MediaStage):
            if stage.query_dependent:
                raise RecipeError(
                    f"{stage.name} chooses frames by the question, so a session would have to read "
                    "the video again for each; use ask"
                )
        question = "?"  # a placeholder
        messages = messages_of(question, images, video, num_frames, fps)
        adapter, prompt = group.adapter, Rendered("")
        select = chooser(recipe, "")
        media = read_media(adapter, messages[0]["content"][:-1], prompt, select)
        images_read, frames, sizes = prompt.images, prompt.frames, prompt.sizes
        loaded = time.perf_counter()
        engine = engine_of(adapter)
        fitted(adapter, recipe)  # raises for recipes that the engine does not run
        if not images_read:
            return cls(group, recipe, history, None, Stats())
        begin = time.perf_counter()
        text = prompt.text = render(adapter, _turns(media, [], question), Recipe()).text
        tensors = tensors_of(adapter, prompt)
        check_length(adapter, tensors, recipe, gate(adapter, {"max_new_tokens": 1}))
        stats = Stats(time_media_s=loaded - start, time_processor_s=time.perf_counter() - begin)
        head, tail = _split(text, adapter.marks())
        ids = tensors.pop("input_ids")
        prefix = _before(adapter, ids[0].tolist(), tail)
        inputs = Inputs({**tensors, "input_ids": ids}, sizes, "", frames)
        position, n = adapter.positions(inputs.tensors), len(prefix)
        ends = int(position[:, n:].min()) > int(position[:, :n].max())
        ends = ends and not _times_may_lead(adapter, recipe, ids, position)
        tensors.pop("attention_mask", None)
        pixels = {k: value for k, value in tensors.items() if k.startswith("pixel_values")}
        opened: list[Session] = []

        def prefill(sequence: Sequence) -> Prefill:
            trace = Trace(images=images_read)
            seen = look(adapter, inputs, recipe, stats, trace)
            known = Images(
                media,
                head,
                prefix,
                sizes,
                frames,
                snapshot.moved({k: v for k, v in tensors.items() if k not in pixels}, "cpu"),
                snapshot.moved(pixels, "cpu") if recipe.acting(InEncoderStage) else {},
                snapshot.moved(seen, "cpu"),
                copy.deepcopy(stats),
                copied(trace, "cpu", []),
                images_read,
                ends,
            )
            yield True
            session = cls(group, recipe, history, known, stats)
            opened.append(session)
            if session.reuses == "kv":
                session._keep(sequence, ids)
                stats.prompt_fed = len(prefix)
                group.make_room(session)
            return None

        more = {"prefill": prefill, "keeps_cache": True}
        sequence = reading(adapter, inputs, recipe, begin, stats, images_read, **more)
        with engine.submit(sequence, lambda sequence: opened[0]) as handle:
            session = handle.result()
        stats.time_total_s = time.perf_counter() - start
        return session

    def close(self) -> None:
        """Release all memory; a closed session cannot be asked."""
        with self._claimed():
            self._drop()
            self._closed, self._images = True, None
            self._group.open.discard(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- questions -------------------------------------------------------------------------------

    def ask(self, question: str, *, restore: bool = False, **generation: Any) -> Answer:
        """Answer a question about the images.

        ``answer.stats`` counts the ids of the prompt that were in the cache (``prompt_reused``) and
        those that were prefilled (``prompt_fed``).

        Parameters
        ----------
        question : str
        restore : bool
            Ask the full model: all features of the images are loaded from host memory and no
            stage runs. Later questions use the compressed images again.
        **generation
            Hugging Face's generation arguments.

        Raises
        ------
        VLMFastError
            For an empty question, a closed session, or ``restore`` without images.
        """
        passed = self._check(question, restore, generation)
        with self._submit(question, restore, passed) as handle:
            return handle.result()

    def stream(
        self, question: str, *, restore: bool = False, **generation: Any
    ) -> Iterator[str | Answer]:
        """Stream an answer: like `ask`, but yields ``str`` pieces and finally the `Answer`.

        If the stream is closed early, the conversation continues with the partial answer.
        """
        passed = self._check(question, restore, generation)
        check_streamer(passed)
        return self._streamed(question, restore, passed)

    def _streamed(
        self, question: str, restore: bool, generation: Generation
    ) -> Iterator[str | Answer]:
        with self._submit(question, restore, generation) as handle:
            yield from handle

    @property
    def messages(self) -> list[dict]:
        return [dict(turn) for turn in self._messages]

    @messages.setter
    def messages(self, messages: list[dict]) -> None:
        if not isinstance(messages, list | tuple):
            raise VLMFastError(f"messages must be a list of turns, not {shown(messages)}")
        if messages and not self.history:
            raise VLMFastError("messages: this session was opened with history=False")
        for number, turn in enumerate(messages):
            role = ("user", "assistant")[number % 2]
            if (
                not isinstance(turn, dict)
                or turn.get("role") != role
                or not isinstance(turn.get("content"), str)
            ):
                raise VLMFastError(f"messages[{number}] must have the role {role} and a text")
        if len(messages) % 2:
            raise VLMFastError("messages must end with an answer; ask puts the next question")
        self._messages = [{"role": m["role"], "content": m["content"]} for m in messages]

    @property
    def bytes(self) -> int:
        """Bytes of its cache on the device between questions, free slots included."""
        kept = self._kept
        return 0 if kept is None else kept.bytes

    def _check(self, question: str, restore: bool, generation: dict) -> Generation:
        """Check a question and its generation arguments, and return these."""
        self._must_be_open()
        check_question(question)
        if "recipe" in generation:
            raise RecipeError(
                f"a session has one recipe, here {self.recipe}; open another session for another"
            )
        if restore and self._images is None:
            raise VLMFastError("restore needs images, and this session has none")
        return gate(self._adapter, generation, names=("question", "restore"))

    def _submit(self, question: str, restore: bool, generation: Generation) -> Handle[Answer]:
        """Submit a question when the one before has been answered."""
        self._claim()
        try:
            self._must_be_open()
            sequence = self._sequence(question, restore, generation)
            return submitted(self._adapter, sequence)
        except BaseException:
            self._free()
            raise

    def _claim(self) -> None:
        """Wait until nothing else uses the session, and keep others from using it."""
        while True:
            self._engine.run(lambda: not self._busy)
            with self._group.lock:
                if not self._busy:
                    self._busy = True
                    return

    def _free(self) -> None:
        self._busy = False
        self._engine.notify()

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        self._claim()
        try:
            yield
        finally:
            self._free()

    def _must_be_open(self) -> None:
        if self._closed:
            raise VLMFastError("the session is closed; vlm.session(...) opens another one")

    def _sequence(self, question: str, restore: bool, generation: Generation) -> Sequence:
        """Open the sequence of a question; nothing is computed yet."""
        adapter, known, begin = self._adapter, self._images, time.perf_counter()
        media = [] if known is None else known.media
        text = render(adapter, _turns(media, self._messages, question), Recipe()).text
        inputs = self._inputs(self._ids(text), question)
        if restore and known is not None:
            inputs.tensors |= snapshot.moved(known.pixels, adapter.device)
        recipe = Recipe() if restore else self.recipe
        spent = Stats(time_processor_s=time.perf_counter() - begin)
        # Without history and images there is nothing to share.
        continues = not restore and self.reuses == "kv" and (self.history or known is not None)
        self._used = time.perf_counter_ns()
        return opened(
            adapter,
            inputs,
            recipe,
            begin,
            generation,
            stats=spent,
            images=[] if known is None else known.images,
            prefill=partial(self._prefill, restore, continues),
            keeps_cache=continues,
            on_end=partial(self._ended, question, continues),
        )

    def _prefill(self, restore: bool, continues: bool, sequence: Sequence) -> Prefill:
        """Prefill the prompt of a question."""
        kept, prefiller = self._kept, self._engine.prefiller
        if kept is not None and kept.cache.seen.device != self._adapter.device:
            self._drop()  # the model has moved since
        self._group.make_room(self)
        if continues:
            return (yield from self._extend(sequence))
        prefiller.count_prompt(sequence, reused=0)
        if restore and self._images is not None and self._images.pixels:
            return prefiller.read(sequence)  # the features have to be recomputed
        return self._read(sequence, sequence.ids)

    def _ended(self, question: str, continues: bool, sequence: Sequence) -> None:
        """Keep the cache and the answer of a question, complete or cut short by its reader."""
        try:
            short = isinstance(sequence.error, RequestCancelled) and sequence.phase is Phase.DECODE
            complete = sequence.error is None or short
            if continues and sequence.phase is not Phase.WAITING:
                self._keep_cache(sequence, complete)
                self._group.make_room(self)
            if complete and self.history:
                text = answer_of(self._adapter, sequence).text
                self._messages.append({"role": "user", "content": question})
                self._messages.append({"role": "assistant", "content": text})
        finally:
            self._free()

    def _keep_cache(self, sequence: Sequence, complete: bool) -> None:
        """Take the cache back from a question; without an answer it may be inconsistent."""
        kept = self._kept
        if kept is None or self._cloned:
            self._engine.prefiller.release(sequence)
        elif complete:
            kept.update(sequence)
        else:
            kept.reclaim(sequence)
        if kept is not None and self._cloned:
            kept.group.seat([])
        undone = self._cloned or self.history or kept is None or kept.rewind(kept.base)
        if not complete or not undone:
            self._drop()
        self._cloned = False

    def _ids(self, text: str) -> Tensor:
        """Ids (1, S) of a prompt, placeholders included."""
        adapter, known = self._adapter, self._images
        if known is None:
            return adapter.inputs(text, [])["input_ids"]
        head, tail = _split(text, adapter.marks())
        if head != known.head:
            raise ModelError(
                "the chat template now writes another text before the images than when the session "
                "was opened; open another one"
            )
        return torch.tensor([known.prefix + _tokens(adapter, tail)], device=adapter.device)

    def _inputs(self, ids: Tensor, question: str) -> Inputs:
        known = self._images
        if known is None:
            return Inputs({"input_ids": ids}, question=question)
        tensors = snapshot.moved(known.tensors, ids.device)
        return Inputs({**tensors, "input_ids": ids}, known.sizes, question, known.frames)

    def _read(self, sequence: Sequence, ids: Tensor, **more: Any) -> Tensor:
        """Prefill a prompt, or its first ``ids`` (1, S). Returns the logits (1, V) after it.

        ``more`` is passed to `Prefiller.read`.
        """
        known, seen = self._images, None
        if known is not None:
            self._engine.prefiller.adopt(sequence, known.stats, known.trace)
            seen = snapshot.moved(known.seen, self._adapter.device)
        inputs = self._inputs(ids, sequence.inputs.question)
        return self._engine.prefiller.read(sequence, inputs=inputs, seen=seen, **more)

    def _extend(self, sequence: Sequence) -> Prefill:
        """Prefill the part of a prompt after the cache."""
        prefiller, kept = self._engine.prefiller, self._kept
        whole = sequence.ids[0].tolist()
        if kept is not None and not kept.rewind(min(_common(kept.ids, whole), len(whole) - 1)):
            self._drop()
            kept = None
        prefiller.count_prompt(sequence, reused=0 if kept is None else len(kept.ids))
        logits = None
        if kept is None:
            kept, logits = self._keep(sequence, sequence.ids)
        else:
            kept.resume(sequence)
        if not self.history and kept.cache.track:  # its stages cannot undo this question
            kept.clone().resume(sequence)
            self._cloned = True
        new = sequence.ids[:, len(kept.ids) :]
        return (yield from prefiller.extend_text(sequence, new, _AT_ONCE, logits))

    def _keep(self, sequence: Sequence, ids: Tensor) -> tuple[Prefix, Tensor]:
        """Prefill the images, or a whole prompt without any, under the recipe and keep the cache.

        Also returns the logits (1, V) after it.
        """
        if self._images is not None:
            ids = ids[:, : len(self._images.prefix)]
        logits = self._read(sequence, ids, max_new_tokens=_FREE_SLOTS, bounded=False)
        self._kept = Prefix.of(sequence, ids[0].tolist())
        return self._kept, logits

    # --- memory ----------------------------------------------------------------------------------

    def _drop(self) -> None:
        """Release the cache; the next question rebuilds it."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the session to one safetensors file, which `VLM.load_session` reads.

        The file contains the features of the images, their compressed cache and the conversation.
        It does not contain the images, except for the processor's pixels if the recipe works inside
        the vision tower. If saving fails, an older file is left unchanged.

        Raises
        ------
        VLMFastError
            With the reason, if the file cannot be written.
        """
        with self._claimed():
            self._must_be_open()
            known = self._images
            if known is not None:
                known = replace(known, seen=replace(known.seen, trained={}), images=[])
            state = {
                "history": self.history,
                "messages": self._messages,
                "stats": self.stats,
                "pictures": known,
                "cache": None if self._kept is None else session_file.frozen(self._kept),
            }
            session_file.write(path, self._adapter, self.recipe, state)

    @classmethod
    def _load(cls, group: Sessions, path: str | Path, recipe: Any) -> Session:
        adapter = group.adapter

        def choose(saved: str) -> Recipe:
            return recipe_of(adapter, saved if recipe is None else recipe)

        def build(chosen: Recipe, state: dict[str, Any]) -> Session:
            known, kept = _checked(adapter, chosen, state)
            session = cls(group, chosen, state["history"], known, state["stats"])
            session._messages, session._kept = state["messages"], kept
            return session

        session = session_file.read(path, adapter, choose, (Images,), build)
        group.make_room(session)
        return session


# --- prompts -------------------------------------------------------------------------------------


def _parts(recipe: Recipe) -> list:
    """The stages of a recipe and the stages that they expand to."""
    return [part for stage in recipe for part in (stage, *stage.expand())]


def _turns(media: list[dict], messages: list[dict], question: str) -> list[dict]:
    """The conversation as `VLM.chat` takes it, with blank images, to render its text.

    ``media`` are the content entries before the first question.
    """
    from PIL import Image

    blank = Image.new("RGB", (1, 1))
    blanks: dict[str, dict[str, Any]] = {"image": {"image": blank}, "video": {"video": [blank]}}
    shown = [{**part, **blanks.get(part["type"], {})} for part in media]
    first, *rest = [*messages, {"role": "user", "content": question}]
    return [
        {"role": "user", "content": [*shown, {"type": "text", "text": first["content"]}]},
        *rest,
    ]


def _split(text: str, marks: tuple[str, ...]) -> tuple[str, str]:
    """A prompt's text up to the end of its last image or video, and the rest."""
    end = max(text.rindex(mark) + len(mark) for mark in marks if mark in text)
    return text[:end], text[end:]


def _tokens(adapter: Adapter, tail: str) -> list[int]:
    """Ids of the text after an image: it is tokenized after one, as in the whole prompt."""
    text = adapter.image_token() + tail
    return adapter.processor.tokenizer(text, add_special_tokens=False).input_ids[1:]


def _before(adapter: Adapter, ids: list[int], tail: str) -> list[int]:
    """The ids of a prompt without those of ``tail``."""
    tail_ids = _tokens(adapter, tail)
    end = len(ids) - len(tail_ids)
    if ids[end:] != tail_ids or adapter.image_token_id in tail_ids:
        raise ModelError(
            f"{type(adapter.processor).__name__} does not tokenize the text after an image on its "
            "own; sessions cannot be opened on this model"
        )
    return ids[:end]


def _times_may_lead(adapter: Adapter, recipe: Recipe, ids: Tensor, position: Tensor) -> bool:
    """Whether text after a video may get ids below the video's times once gaps are closed.

    Text follows the rows and columns that are left, while a video's times are not compacted.
    """
    if len(position) == 1 or all(
        getattr(part, "positions", "keep") != "compact" for part in _parts(recipe)
    ):
        return False
    visual = adapter.visual(ids[0])
    inside = visual[1:] & (ids[0, 1:] == ids[0, :-1])
    return bool((position[0].diff() != 0)[inside].any())


def _common(one: list[int], another: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, another, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(another)))


# --- saved sessions ------------------------------------------------------------------------------


def _checked(
    adapter: Adapter, recipe: Recipe, state: dict[str, Any]
) -> tuple[Images | None, Prefix | None]:
    """Images and cache of a file, after checking that all of it is consistent.

    Raises
    ------
    ValueError
        For the first part that is not.
    """
    keys = ("history", "messages", "stats", "pictures", "cache")
    session_checks.need(state.keys() == set(keys), "its parts are others")
    known, cache = state["pictures"], state["cache"]
    session_checks.need(isinstance(state["stats"], Stats), "stats are none")
    session_checks.check_messages(state["messages"], state["history"])
    top = -1
    if known is not None:
        session_checks.need(isinstance(known, Images), "its images are none")
        session_checks.check_images(known, adapter)
        tensors, length = _blank_prompt(adapter, known, state["messages"])
        session_checks.check_seen(known, adapter, recipe, tensors, length)
        top = int(adapter.positions(tensors)[:, :length].max())
        trained = {s.name: adapter.trained(s) for s in recipe if s.trained}
        known.seen = replace(known.seen, trained=trained)
    if cache is None:
        return known, None
    wanted = {"ids", "base", "stats", "trace", *session_file.OF_CACHE}
    session_checks.need(isinstance(cache, dict) and cache.keys() == wanted, "its cache lacks parts")
    fine = isinstance(cache["stats"], Stats) and isinstance(cache["trace"], Trace)
    session_checks.need(fine, "its cache has no stats or no trace")
    session_checks.check_cache(cache, adapter, recipe, known, top)
    return known, session_file.thawed(adapter, recipe, cache)


def _blank_prompt(
    adapter: Adapter, known: Images, messages: list[dict]
) -> tuple[dict[str, Tensor], int]:
    """The processor's output for blank images of the same sizes.

    Returns its tensors, and the number of ids before the question.
    """
    from PIL import Image

    # The conversation too: a placeholder in it would be mistaken for one of the images.
    for turns in (messages, []):
        text = render(adapter, _turns(known.media, turns, "?"), Recipe()).text
        head, tail = _split(text, adapter.marks())
        session_checks.need(head == known.head, "its images stand in another prompt")
    blanks = [Image.new("RGB", (width, height)) for height, width in known.sizes]
    tensors = adapter.inputs(text, blanks, known.frames)
    return tensors, len(_before(adapter, tensors["input_ids"][0].tolist(), tail))
