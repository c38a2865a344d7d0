"""Many questions about the same pictures.

Pictures are decoded and go through the vision tower once. What comes after that can be shared as
well, unless the recipe chooses by the question: then the language model's keys and values of the
pictures, compressed by the recipe, serve every question, and a question costs its own tokens alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
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
from vlmfast.engine.attention import lock_of, switched
from vlmfast.engine.engine import Engine
from vlmfast.engine.prefill import Inputs, Seen, look
from vlmfast.engine.prefix import Prefix, copied
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import ModelError, RecipeError, VLMFastError
from vlmfast.models.base import Adapter

from . import session_checks, session_file
from .answer import Answer
from .generation import Generation, gate, shown
from .request import (
    Rendered,
    answer_of,
    check_length,
    check_question,
    chooser,
    messages_of,
    opened,
    read_media,
    recipe_of,
    render,
    tensors_of,
)

_ROOM = 128  # free slots that a cache begins with
_AT_ONCE = 1024  # rows that are read at once behind a cache: bounds the size of their mask


@dataclass
class Pictures:
    """What a session knows of its pictures; tensors in host memory.

    Parameters
    ----------
    media : list of dict
        The first user turn without its question, as chat templates take it.
    head : str
        The prompt's text up to its last picture.
    prefix : list of int
        Its ids.
    sizes, frames : list
        As in `engine.prefill.Inputs`.
    tensors : dict of str to Tensor
        What the processor made beside ids and pixels.
    pixels : dict of str to Tensor
        The pixels, where the recipe works inside the tower: full features must then be made anew.
    seen : Seen
    stats, trace
        As the tower left them.
    images : list of PIL.Image.Image
        For overlays.
    ends : bool
        Whether the rotary ids of what comes behind the pictures follow the largest so far.
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
        What their caches may take together between questions, see `VLM.session_bytes`.
    open : WeakSet of Session
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.bytes: int | None = None
        self.open: WeakSet[Session] = WeakSet()

    def make_room(self, used: Session) -> None:
        """Take the caches of those that were not used for longest, as far as need be."""
        if self.bytes is None:
            return
        others = [s for s in self.open if s is not used and s.bytes]
        total = used.bytes + sum(s.bytes for s in others)
        for session in sorted(others, key=lambda s: s._used):
            if total <= self.bytes:
                return
            total -= session.bytes
            session._drop()


class Session:
    """Questions about pictures that were read once; `VLM.session` opens one.

    ``session.reuses`` says what a question finds there:

    ``"kv"``
        The recipe does not look at the question. The keys and values of the pictures, compressed
        by the recipe, serve all questions, which cost their own tokens alone. Answers are those of
        `VLM.ask` unless the recipe compresses the cache: there the question, as part of the prompt,
        sees the pictures before that happens, and here it does not. What is said in the session is
        not compressed when it is read; a method that works in decode goes on with it.
    ``"features"``
        A stage of the recipe chooses by the question (its class says ``asks_question``). The tower
        does not run again; from there on each question goes its whole way, and its answer is that
        of `VLM.ask`, or of `VLM.chat` with the conversation so far.

    The tower's features wait in host memory, all of them, so ``restore=True`` asks the full model.

    Attributes
    ----------
    recipe : Recipe
    history : bool
        Whether a question sees the ones before it and their answers.
    reuses : str
    messages : list of dict
        The conversation so far, without the pictures; stays empty without ``history``. Another one
        can be put in its place: what both begin with is not read again.
    stats : Stats
        What opening the session cost.
    """

    def __init__(
        self,
        group: Sessions,
        recipe: Recipe,
        history: bool,
        pictures: Pictures | None,
        stats: Stats,
    ) -> None:
        self._group, self._adapter, self._pictures = group, group.adapter, pictures
        self._engine = Engine(group.adapter)
        self.recipe, self.history, self.stats = recipe, history, stats
        asks = any(p.asks_question for p in _parts(recipe))
        self.reuses = "features" if asks or not (pictures is None or pictures.ends) else "kv"
        self._messages: list[dict] = []
        self._kept: Prefix | None = None
        self._closed = False
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
            if stage.asks_question:
                raise RecipeError(
                    f"{stage.name} chooses frames by the question, so a session would have to read "
                    "the clip anew with each; use ask"
                )
        question = "?"  # stands in for those to come
        messages = messages_of(question, images, video, num_frames, fps)
        adapter, prompt = group.adapter, Rendered("")
        select = chooser(recipe, "")
        media = read_media(adapter, messages[0]["content"][:-1], prompt, select)
        pictures, frames, sizes = prompt.images, prompt.frames, prompt.sizes
        loaded = time.perf_counter()
        with lock_of(adapter.model):
            engine = Engine(adapter)
            engine.fitted(recipe)  # refuses what the engine does not run
            if not pictures:
                return cls(group, recipe, history, None, Stats())
            begin = time.perf_counter()
            text = prompt.text = render(adapter, _turns(media, [], question), Recipe()).text
            tensors = tensors_of(adapter, prompt)
            check_length(adapter, tensors, recipe, gate(adapter, {"max_new_tokens": 1}))
            stats = Stats(time_media_s=loaded - start, time_processor_s=time.perf_counter() - begin)
            trace = Trace(images=pictures)
            head, tail = _split(text, adapter.marks())
            ids = tensors.pop("input_ids")
            prefix = _before(adapter, ids[0].tolist(), tail)
            inputs = Inputs({**tensors, "input_ids": ids}, sizes, "", frames)
            with switched(adapter.model), torch.no_grad():
                seen = look(adapter, inputs, recipe, stats, trace)
            position, n = adapter.positions(inputs.tensors), len(prefix)
            ends = int(position[:, n:].min()) > int(position[:, :n].max())
            ends = ends and not _times_may_lead(adapter, recipe, ids, position)
            tensors.pop("attention_mask", None)
            pixels = {key: of for key, of in tensors.items() if key.startswith("pixel_values")}
            known = Pictures(
                media,
                head,
                prefix,
                sizes,
                frames,
                snapshot.moved({k: of for k, of in tensors.items() if k not in pixels}, "cpu"),
                snapshot.moved(pixels, "cpu") if recipe.acting(InEncoderStage) else {},
                snapshot.moved(seen, "cpu"),
                copy.deepcopy(stats),
                copied(trace, "cpu", []),
                pictures,
                ends,
            )
            session = cls(group, recipe, history, known, stats)
            if session.reuses == "kv":
                sequence = engine.reading(inputs, recipe, begin, stats, pictures)
                with switched(adapter.model), torch.no_grad():
                    session._keep(sequence, ids)
                stats.prompt_fed = len(prefix)
                group.make_room(session)
            stats.time_total_s = time.perf_counter() - start
            return session

    def close(self) -> None:
        """Give everything back; a session that is closed answers no more."""
        with lock_of(self._adapter.model):
            self._drop()
            self._closed, self._pictures = True, None
            self._group.open.discard(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- questions -------------------------------------------------------------------------------

    def ask(self, question: str, *, restore: bool = False, **generation: Any) -> Answer:
        """Answer a question about the pictures.

        ``answer.stats`` says how many ids of its prompt were in the cache already
        (``prompt_reused``) and how many were read for it (``prompt_fed``).

        Parameters
        ----------
        question : str
        restore : bool
            Ask the full model: all features of the pictures come back from host memory and no
            stage runs. What the recipe left of them stays for later questions.
        **generation
            Hugging Face's generation arguments.

        Raises
        ------
        VLMFastError
            For an empty question, a closed session, or pictures to restore where there are none.
        """
        return self._answered(question, restore, self._check(question, restore, generation))

    def stream(
        self, question: str, *, restore: bool = False, **generation: Any
    ) -> Iterator[str | Answer]:
        """Like `ask`, piece by piece: yields ``str``, and the `Answer` as the last item.

        Where the reader goes away, the conversation goes on with what had been said.
        """
        from vlmfast.engine.streaming import stream

        passed = self._check(question, restore, generation)
        if passed.streamer is not None:
            raise VLMFastError("streamer cannot be given: stream yields the text itself")
        return stream(
            self._adapter.processor.tokenizer,
            lambda streamer, cancelled: self._answered(
                question, restore, passed.streamed(streamer, cancelled)
            ),
        )

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
        """Bytes that its cache takes on the device between questions, free slots included."""
        kept = self._kept
        return 0 if kept is None else kept.bytes

    def _check(self, question: str, restore: bool, generation: dict) -> Generation:
        """Generation arguments of a question, which passes the usual checks."""
        self._must_be_open()
        check_question(question)
        if "recipe" in generation:
            raise RecipeError(
                f"a session has one recipe, here {self.recipe}; open another session for another"
            )
        if restore and self._pictures is None:
            raise VLMFastError("restore reads the pictures again, and this session has none")
        return gate(self._adapter, generation, names=("question", "restore"))

    def _answered(self, question: str, restore: bool, generation: Generation) -> Answer:
        with lock_of(self._adapter.model):
            return self._answer(question, restore, generation)

    def _must_be_open(self) -> None:
        if self._closed:
            raise VLMFastError("the session is closed; vlm.session(...) opens another one")

    def _answer(self, question: str, restore: bool, generation: Generation) -> Answer:
        self._must_be_open()
        adapter, known, begin = self._adapter, self._pictures, time.perf_counter()
        media = [] if known is None else known.media
        text = render(adapter, _turns(media, self._messages, question), Recipe()).text
        inputs = self._inputs(self._ids(text), question)
        if restore and known is not None:
            inputs.tensors |= snapshot.moved(known.pixels, adapter.device)
        recipe = Recipe() if restore else self.recipe
        spent = Stats(time_processor_s=time.perf_counter() - begin)
        images = [] if known is None else known.images
        sequence = opened(adapter, inputs, recipe, begin, generation, stats=spent, images=images)
        self._used = time.perf_counter_ns()
        if self._kept is not None and self._kept.cache.seen.device != adapter.device:
            self._drop()  # the model has moved since
        self._group.make_room(self)
        if adapter.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(adapter.device)
        if restore or self.reuses == "features":
            read = self._restored if restore else self._reprefill
            self._engine.answer(sequence, partial(read, sequence))
            self._engine.release(sequence)
        else:
            self._go_on(sequence)
            self._group.make_room(self)
        said = answer_of(adapter, sequence)
        if self.history:
            self._messages.append({"role": "user", "content": question})
            self._messages.append({"role": "assistant", "content": said.text})
        return said

    def _ids(self, text: str) -> Tensor:
        """Ids (1, S) of a prompt, placeholders included."""
        adapter, known = self._adapter, self._pictures
        if known is None:
            return adapter.inputs(text, [])["input_ids"]
        head, tail = _split(text, adapter.marks())
        if head != known.head:
            raise ModelError(
                "the chat template now writes something else in front of the pictures than when "
                "the session was opened; open another one"
            )
        return torch.tensor([known.prefix + _tokens(adapter, tail)], device=adapter.device)

    def _inputs(self, ids: Tensor, question: str) -> Inputs:
        known = self._pictures
        if known is None:
            return Inputs({"input_ids": ids}, question=question)
        tensors = snapshot.moved(known.tensors, ids.device)
        return Inputs({**tensors, "input_ids": ids}, known.sizes, question, known.frames)

    def _read(self, sequence: Sequence, ids: Tensor, **more: Any) -> Tensor:
        """Read a prompt, or its first ``ids`` (1, S). Returns the logits (1, V) after it.

        ``more`` is for `Engine.read`.
        """
        known, seen = self._pictures, None
        if known is not None:
            self._engine.adopt(sequence, known.stats, known.trace)
            seen = snapshot.moved(known.seen, self._adapter.device)
        inputs = self._inputs(ids, sequence.inputs.question)
        return self._engine.read(sequence, inputs=inputs, seen=seen, **more)

    def _reprefill(self, sequence: Sequence) -> Tensor:
        """Read the whole prompt. Returns the logits (1, V) after it."""
        self._engine.count_prompt(sequence, reused=0)
        return self._read(sequence, sequence.ids)

    def _restored(self, sequence: Sequence) -> Tensor:
        """The same for the full model, whose features may have to be made again."""
        if self._pictures is None or not self._pictures.pixels:
            return self._reprefill(sequence)
        self._engine.count_prompt(sequence, reused=0)
        return self._engine.read(sequence)

    def _go_on(self, sequence: Sequence) -> None:
        """Answer a sequence with what the cache holds."""
        apart = not self.history
        if apart and self._pictures is None:  # nothing to share
            self._engine.answer(sequence, partial(self._reprefill, sequence))
            self._engine.release(sequence)
            return
        try:
            self._engine.answer(sequence, partial(self._extend, sequence))
        except BaseException:  # a cache in the middle of something serves nobody
            kept = self._kept
            if kept is None or sequence.decoder is not kept.decoder:
                self._engine.release(sequence)
            self._drop()
            raise
        kept = self._kept
        assert kept is not None
        if sequence.decoder is not kept.decoder:
            self._engine.release(sequence)
            kept.decoder.seat([])
            return
        kept.update(sequence)
        if apart and not kept.rewind(kept.base):
            self._drop()

    def _extend(self, sequence: Sequence) -> Tensor:
        """Read what the cache has not consumed of a prompt. Returns the logits (1, V) after it."""
        engine, kept = self._engine, self._kept
        whole = sequence.ids[0].tolist()
        if kept is not None and not kept.rewind(min(_common(kept.ids, whole), len(whole) - 1)):
            self._drop()
            kept = None
        engine.count_prompt(sequence, reused=0 if kept is None else len(kept.ids))
        logits = None
        if kept is None:
            kept, logits = self._keep(sequence, sequence.ids)
        else:
            kept.resume(sequence)
        if not self.history and kept.cache.track:  # its stages will not let go of this question
            kept.clone().resume(sequence)
        new = sequence.ids[:, len(kept.ids) :]
        return engine.extend_text(sequence, new, _AT_ONCE, logits)

    def _keep(self, sequence: Sequence, ids: Tensor) -> tuple[Prefix, Tensor]:
        """Read the images, or a whole prompt without any, under the recipe, and keep the cache.

        Returns the logits (1, V) after it too.
        """
        if self._pictures is not None:
            ids = ids[:, : len(self._pictures.prefix)]
        logits = self._read(sequence, ids, max_new_tokens=_ROOM, bounded=False)
        self._kept = Prefix.of(sequence, ids[0].tolist())
        return self._kept, logits

    # --- memory ----------------------------------------------------------------------------------

    def _drop(self) -> None:
        """Let go of the cache; the next question builds it again."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the session to one safetensors file, which `VLM.load_session` reads.

        It holds what the model made of the pictures, before and behind the recipe, and the
        conversation; not the pictures themselves, but for the processor's pixels where the recipe
        works inside the vision tower. A save that fails leaves an older file as it was.

        Raises
        ------
        VLMFastError
            With the reason, when the file cannot be written.
        """
        with lock_of(self._adapter.model):
            self._must_be_open()
            known = self._pictures
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

        with lock_of(adapter.model):
            session = session_file.read(path, adapter, choose, (Pictures,), build)
            group.make_room(session)
            return session


# --- prompts -------------------------------------------------------------------------------------


def _parts(recipe: Recipe) -> list:
    """The words of a recipe and all that they stand for."""
    return [part for word in recipe for part in (word, *word.expand())]


def _turns(media: list[dict], messages: list[dict], question: str) -> list[dict]:
    """The conversation as `VLM.chat` takes it, every picture a blank one: only text is made of it.

    ``media`` are what stands before the first question.
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
    """A prompt's text behind its last picture or clip, and what is before that."""
    end = max(text.rindex(mark) + len(mark) for mark in marks if mark in text)
    return text[:end], text[end:]


def _tokens(adapter: Adapter, tail: str) -> list[int]:
    """Ids of what stands behind a picture: it is tokenised behind one, as in the whole prompt."""
    text = adapter.image_token() + tail
    return adapter.processor.tokenizer(text, add_special_tokens=False).input_ids[1:]


def _before(adapter: Adapter, ids: list[int], tail: str) -> list[int]:
    """The ids of a prompt without those of ``tail``."""
    of_tail = _tokens(adapter, tail)
    end = len(ids) - len(of_tail)
    if ids[end:] != of_tail or adapter.image_token_id in of_tail:
        raise ModelError(
            f"{type(adapter.processor).__name__} treats the text behind a picture in a way of its "
            "own; sessions cannot be opened on this model"
        )
    return ids[:end]


def _times_may_lead(adapter: Adapter, recipe: Recipe, ids: Tensor, position: Tensor) -> bool:
    """Whether text after a video may get ids below the video's times once drops are closed up.

    Text follows the rows and columns that are left, and a video keeps its times apart.
    """
    if len(position) == 1 or all(
        getattr(part, "positions", "keep") != "compact" for part in _parts(recipe)
    ):
        return False
    visual = adapter.visual(ids[0])
    inside = visual[1:] & (ids[0, 1:] == ids[0, :-1])
    return bool((position[0].diff() != 0)[inside].any())


def _common(one: list[int], another: list[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(one, another, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(another)))


# --- saved sessions ------------------------------------------------------------------------------


def _checked(
    adapter: Adapter, recipe: Recipe, state: dict[str, Any]
) -> tuple[Pictures | None, Prefix | None]:
    """Images and cache of a file, once everything in it was found to belong together.

    Raises
    ------
    ValueError
        Says what does not.
    """
    keys = ("history", "messages", "stats", "pictures", "cache")
    session_checks.need(state.keys() == set(keys), "its parts are others")
    known, cache = state["pictures"], state["cache"]
    session_checks.need(isinstance(state["stats"], Stats), "stats are none")
    session_checks.check_messages(state["messages"], state["history"])
    top = -1
    if known is not None:
        session_checks.need(isinstance(known, Pictures), "its images are none")
        session_checks.check_pictures(known, adapter)
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
    adapter: Adapter, known: Pictures, messages: list[dict]
) -> tuple[dict[str, Tensor], int]:
    """What the processor makes of blank images of the same sizes.

    Returns its tensors, and how many of the ids stand before the question.
    """
    from PIL import Image

    # The conversation too: a placeholder in it would be taken for one of the images.
    for said in (messages, []):
        text = render(adapter, _turns(known.media, said, "?"), Recipe()).text
        head, tail = _split(text, adapter.marks())
        session_checks.need(head == known.head, "its images stand in another prompt")
    blanks = [Image.new("RGB", (width, height)) for height, width in known.sizes]
    tensors = adapter.inputs(text, blanks, known.frames)
    return tensors, len(_before(adapter, tensors["input_ids"][0].tolist(), tail))
