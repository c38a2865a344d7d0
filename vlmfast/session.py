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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import session_checks, session_file, snapshot
from .engine.attention import lock_of, switched
from .engine.cache import KVCache
from .engine.decode import Decoder
from .engine.prefill import Inputs, Prompt, Seen, look, prepare
from .engine.run import Run
from .engine.stats import Stats, Trace
from .engine.turn import Turn, answer, open_turn
from .errors import ModelError, RecipeError, VLMFastError
from .layout import TokenLayout
from .models.base import Adapter
from .recipe import Recipe
from .stages import Read

if TYPE_CHECKING:
    from .vlm import VLM, Answer

_ROOM = 128  # free slots that a cache begins with
_AT_ONCE = 1024  # rows that are read at once behind a cache: bounds the size of their mask
_BUFFERS = ("keys", "values", "order", "rank", "mass", "bias")
_SHARED = (
    "saliency",
    "left_out",
    "visual_tokens_in",
    "visual_tokens_kept",
    "visual_tokens_per_layer",
    "equivalent_tokens",
)


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


@dataclass
class Kept:
    """A cache that waits for the next question.

    Parameters
    ----------
    cache : KVCache
    decoder : Decoder
        Of one row, over ``cache``.
    ids : list of int
        What the cache has consumed.
    base : int
        How many of these were read first, under the recipe.
    stats, trace
        As that left them.
    reads : list of Read
        What drafters remember of the first part; not saved.
    """

    cache: KVCache
    decoder: Decoder
    ids: list[int]
    base: int
    stats: Stats
    trace: Trace
    reads: list[Read] = field(default_factory=list)

    def rewind(self, ids: int) -> bool:
        """Forget all but the first ``ids``; whether that was possible."""
        gone = len(self.ids) - ids
        if gone == 0:
            return True
        try:
            self.cache.crop(gone)
        except ValueError:
            return False
        self.decoder.position.sub_(gone)
        self.decoder.rows[0].prompt = self.cache.length[:, 0].clone()
        self.ids = self.ids[:ids]
        return True

    def clone(self) -> Kept:
        """A copy that shares nothing that changes."""
        cache, (row,) = self.cache.clone(), self.decoder.rows
        row = replace(row, notes=copy.deepcopy(row.notes), prompt=row.prompt.clone())
        position = self.decoder.position.clone()
        decoder = Decoder(self.decoder.adapter, cache, position, [row])
        return replace(self, cache=cache, decoder=decoder, ids=list(self.ids))

    @property
    def bytes(self) -> int:
        total = 0
        for layer in self.cache.layers:
            buffers = [getattr(layer, name) for name in _BUFFERS]
            for segment in layer.segments:
                buffers += [of for of in vars(segment).values() if isinstance(of, Tensor)]
            total += sum(of.nbytes for of in buffers if of is not None)
        return total


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
        self, vlm: VLM, recipe: Recipe, history: bool, pictures: Pictures | None, stats: Stats
    ) -> None:
        self._vlm, self._pictures = vlm, pictures
        self.recipe, self.history, self.stats = recipe, history, stats
        asks = any(p.asks_question for p in _parts(recipe))
        self.reuses = "features" if asks or not (pictures is None or pictures.ends) else "kv"
        self._messages: list[dict] = []
        self._kept: Kept | None = None
        self._closed = False
        self._used = time.perf_counter_ns()
        vlm._sessions.add(self)

    # --- opening and closing ---------------------------------------------------------------------

    @classmethod
    def _open(
        cls,
        vlm: VLM,
        images: Any,
        video: Any,
        num_frames: int | None,
        fps: float | None,
        recipe: Recipe,
        history: bool,
    ) -> Session:
        start = time.perf_counter()
        for stage in recipe.acting("media"):
            if stage.asks_question:
                raise RecipeError(
                    f"{stage.name} chooses frames by the question, so a session would have to read "
                    "the clip anew with each; use ask"
                )
        question = "?"  # stands in for those to come
        messages = vlm._messages(question, images, video, num_frames, fps)
        pictures, frames = [], []
        choose = [partial(stage.frames, question="") for stage in recipe.acting("media")]
        select = choose[0] if choose else None
        media = vlm._content(messages[0]["content"][:-1], pictures, frames, select)
        loaded = time.perf_counter()
        with lock_of(vlm.model):
            if not pictures:
                Run(vlm.adapter, Inputs({}), recipe, start)  # refuses what the engine does not run
                return cls(vlm, recipe, history, None, Stats())
            adapter, begin = vlm.adapter, time.perf_counter()
            text, _, _ = vlm._render(_turns(media, [], question), Recipe())
            tensors = adapter.inputs(text, pictures, frames)
            sizes = [(picture.height, picture.width) for picture in pictures]
            run = Run(adapter, Inputs(tensors, sizes, "", frames), recipe, begin)
            run.stats.time_media_s = loaded - start
            run.stats.time_processor_s = time.perf_counter() - begin
            run.trace.images = pictures
            head, tail = _split(text, adapter.marks())
            ids = tensors.pop("input_ids")
            prefix = _before(adapter, ids[0].tolist(), tail)
            run.inputs.tensors = {**tensors, "input_ids": ids}
            with switched(vlm.model), torch.no_grad():
                seen = look(adapter, run.inputs, recipe, run.stats, run.trace)
            position, n = adapter.positions(run.inputs.tensors), len(prefix)
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
                snapshot.moved(pixels, "cpu") if recipe.acting("in-encoder") else {},
                snapshot.moved(seen, "cpu"),
                copy.deepcopy(run.stats),
                _copied(run.trace, "cpu", []),
                pictures,
                ends,
            )
            session = cls(vlm, recipe, history, known, run.stats)
            if session.reuses == "kv":
                with switched(vlm.model), torch.no_grad():
                    session._read(run, ids)
                run.stats.prompt_fed = len(prefix)
                session._make_room()
            run.stats.time_total_s = time.perf_counter() - start
            return session

    def close(self) -> None:
        """Give everything back; a session that is closed answers no more."""
        with lock_of(self._vlm.model):
            self._drop()
            self._closed, self._pictures = True, None
            self._vlm._sessions.discard(self)

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
        self._check(question, restore, generation)
        with lock_of(self._vlm.model):
            return self._answer(question, restore, generation)

    def stream(
        self, question: str, *, restore: bool = False, **generation: Any
    ) -> Iterator[str | Answer]:
        """Like `ask`, piece by piece: yields ``str``, and the `Answer` as the last item.

        Where the reader goes away, the conversation goes on with what had been said.
        """
        from .engine.streaming import stream

        self._check(question, restore, generation)
        criteria = list(generation.pop("stopping_criteria", None) or [])
        return stream(
            self._vlm.processor.tokenizer,
            lambda streamer, cancelled: self.ask(
                question,
                restore=restore,
                **generation,
                vlmfast_streamer=streamer,
                stopping_criteria=[*criteria, cancelled],
            ),
        )

    @property
    def messages(self) -> list[dict]:
        return [dict(turn) for turn in self._messages]

    @messages.setter
    def messages(self, messages: list[dict]) -> None:
        if messages and not self.history:
            raise VLMFastError("messages: this session was opened with history=False")
        for number, turn in enumerate(messages):
            role = ("user", "assistant")[number % 2]
            if turn.get("role") != role or not isinstance(turn.get("content"), str):
                raise VLMFastError(f"messages[{number}] must have the role {role} and a text")
        if len(messages) % 2:
            raise VLMFastError("messages must end with an answer; ask puts the next question")
        self._messages = [{"role": m["role"], "content": m["content"]} for m in messages]

    @property
    def bytes(self) -> int:
        """Bytes that its cache takes on the device between questions, free slots included."""
        kept = self._kept
        return 0 if kept is None else kept.bytes

    def _check(self, question: str, restore: bool, generation: dict) -> None:
        self._must_be_open()
        self._vlm._messages(question, None, None, None, None)  # the usual checks
        if "recipe" in generation:
            raise RecipeError(
                f"a session has one recipe, here {self.recipe}; open another session for another"
            )
        if restore and self._pictures is None:
            raise VLMFastError("restore reads the pictures again, and this session has none")

    def _must_be_open(self) -> None:
        if self._closed:
            raise VLMFastError("the session is closed; vlm.session(...) opens another one")

    def _answer(self, question: str, restore: bool, generation: dict) -> Answer:
        self._must_be_open()
        vlm, known, begin = self._vlm, self._pictures, time.perf_counter()
        media = [] if known is None else known.media
        text, _, _ = vlm._render(_turns(media, self._messages, question), Recipe())
        inputs = self._inputs(self._ids(text), question)
        run = Run(vlm.adapter, inputs, Recipe() if restore else self.recipe, begin)
        run.stats.time_processor_s = time.perf_counter() - begin
        turn = open_turn(run, vlm._generation(generation))
        self._used = time.perf_counter_ns()
        if self._kept is not None and self._kept.cache.seen.device != vlm.adapter.device:
            self._drop()  # the model has moved since
        self._make_room()
        if vlm.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(vlm.model.device)
        if restore or self.reuses == "features":
            answer(turn, partial(self._anew, turn, restore))
            run.release()
        else:
            self._go_on(turn)
            self._make_room()
        said = vlm._said(turn)
        if self.history:
            self._messages.append({"role": "user", "content": question})
            self._messages.append({"role": "assistant", "content": said.text})
        return said

    def _ids(self, text: str) -> Tensor:
        """Ids (1, S) of a prompt, placeholders included."""
        adapter, known = self._vlm.adapter, self._pictures
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

    def _seen(self, run: Run) -> Seen | None:
        """The pictures on the device, and what the tower cost and left in the run's books."""
        known = self._pictures
        if known is None:
            return None
        run.stats.visual_tokens_in = known.stats.visual_tokens_in
        run.stats.visual_tokens_kept = dict(known.stats.visual_tokens_kept)
        run.trace = _copied(known.trace, self._vlm.adapter.device, known.images)
        return snapshot.moved(known.seen, self._vlm.adapter.device)

    def _anew(self, turn: Turn, restore: bool) -> Tensor:
        """Read the whole prompt. Returns the logits (1, V) behind it."""
        run, known = turn.run, self._pictures
        run.stats.prompt_fed = turn.prompt
        if restore and known.pixels:
            run.inputs.tensors |= snapshot.moved(known.pixels, self._vlm.adapter.device)
            run.trace.images = known.images
            return run.start(turn.room)
        seen = self._seen(run)
        prompt = prepare(run.adapter, run.inputs, run.recipe, run.stats, run.trace, seen)
        return run.start_from(prompt, turn.room)

    def _go_on(self, turn: Turn) -> None:
        """Answer a turn behind what the cache holds."""
        run, apart = turn.run, not self.history
        if apart and self._pictures is None:  # nothing to share
            answer(turn, partial(self._anew, turn, False))
            run.release()
            return
        whole = turn.ids[0].tolist()
        try:
            answer(turn, partial(self._behind, turn, whole))
        except BaseException:  # a cache in the middle of something serves nobody
            if run.cache is not None and (self._kept is None or run.cache is not self._kept.cache):
                run.release()
            self._drop()
            raise
        kept = self._kept
        if run.cache is not kept.cache:
            run.release()
            return
        kept.ids = turn.ids[0, :-1].tolist()  # the last token of an answer is never fed
        if apart and not kept.rewind(kept.base):
            self._drop()

    def _behind(self, turn: Turn, whole: list[int]) -> Tensor:
        """Read what the cache has not consumed of a prompt. Returns the logits (1, V) behind it."""
        run, kept = turn.run, self._kept
        if kept is not None and not kept.rewind(min(_common(kept.ids, whole), len(whole) - 1)):
            self._drop()
            kept = None
        run.stats.prompt_reused = 0 if kept is None else len(kept.ids)
        run.stats.prompt_fed = len(whole) - run.stats.prompt_reused
        if kept is None:
            kept, logits = self._read(run, turn.ids)
        else:
            for name in _SHARED:
                setattr(run.stats, name, copy.copy(getattr(kept.stats, name)))
            images = [] if self._pictures is None else self._pictures.images
            run.trace = _copied(kept.trace, run.adapter.device, images)
        if not self.history and kept.cache.track:  # its stages will not let go of this question
            kept = kept.clone()
        run.cache, run.decoder = kept.cache, kept.decoder
        if run.watch is not None:
            run.watch.reads = list(kept.reads)
        new = turn.ids[:, len(kept.ids) : turn.prompt]
        run._fits(int(run.position.max()) + new.shape[1] + turn.room)
        for part in new.split(_AT_ONCE, dim=1) if new.shape[1] else ():
            logits = run.extend(_text(run.adapter, part, run.cache, run.decoder))
        stats = run.stats
        stats.kv_bytes, stats.kv_tokens_per_layer = run.cache.held_bytes(), run.cache.lengths()
        stats.kv_bytes_full = run.adapter.cache_bytes(len(whole))
        return logits

    def _read(self, run: Run, ids: Tensor) -> tuple[Kept, Tensor]:
        """Read the pictures, or a whole prompt without any, under the recipe, and keep the cache.

        Returns the logits (1, V) behind it too.
        """
        seen = self._seen(run)
        if seen is not None:
            ids = ids[:, : len(self._pictures.prefix)]
        inputs = self._inputs(ids, run.inputs.question)
        prompt = prepare(run.adapter, inputs, self.recipe, run.stats, run.trace, seen)
        logits = run.start_from(prompt, _ROOM, bounded=False)
        consumed = ids[0].tolist()
        self._kept = Kept(
            run.cache,
            run.decoder,
            consumed,
            len(consumed),
            copy.deepcopy(run.stats),
            _copied(run.trace, "cpu", []),
            [] if run.watch is None else list(run.watch.reads),
        )
        return self._kept, logits

    # --- memory ----------------------------------------------------------------------------------

    def _drop(self) -> None:
        """Let go of the cache; the next question builds it again."""
        if self._kept is not None:
            self._kept.decoder.release()
            self._kept = None

    def _make_room(self) -> None:
        """Take the caches of those sessions that were not used for longest, as far as need be."""
        bound = self._vlm.session_bytes
        if bound is None:
            return
        others = [s for s in self._vlm._sessions if s is not self and s._kept is not None]
        total = self.bytes + sum(s.bytes for s in others)
        for session in sorted(others, key=lambda s: s._used):
            if total <= bound:
                return
            total -= session.bytes
            session._drop()

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
        with lock_of(self._vlm.model):
            self._must_be_open()
            known, kept = self._pictures, self._kept
            if known is not None:
                known = replace(known, seen=replace(known.seen, trained={}), images=[])
            state = {
                "history": self.history,
                "messages": self._messages,
                "stats": self.stats,
                "pictures": known,
                "cache": None if kept is None else _frozen(kept),
            }
            session_file.write(path, self._vlm.adapter, self.recipe, state)

    @classmethod
    def _load(cls, vlm: VLM, path: str | Path, recipe: Any) -> Session:
        def choose(saved: str) -> Recipe:
            return vlm.recipe(saved if recipe is None else recipe)

        def build(chosen: Recipe, state: dict[str, Any]) -> Session:
            known, kept = _checked(vlm, chosen, state)
            session = cls(vlm, chosen, state["history"], known, state["stats"])
            session._messages, session._kept = state["messages"], kept
            return session

        with lock_of(vlm.model):
            session = session_file.read(path, vlm.adapter, choose, (Pictures,), build)
            session._make_room()
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
    blanks = {"image": {"image": blank}, "video": {"video": [blank]}}
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


def _text(adapter: Adapter, ids: Tensor, cache: KVCache, decoder: Decoder) -> Prompt:
    """Text (1, S) that continues what ``cache`` has consumed."""
    (row,) = decoder.rows
    count = torch.arange(ids.shape[1], device=ids.device)
    position = decoder.position.reshape(-1, 1) + count
    return Prompt(
        adapter.embed(ids)[0],
        TokenLayout.text(count + cache.logical[0], position),
        ids.shape[1],
        int(position.max()) + 1,
        notes=row.notes,
    )


def _copied(trace: Trace, device: torch.device | str, images: list) -> Trace:
    """A trace of its own: stages go on writing to it."""
    depth = None if trace.depth is None else trace.depth.clone()
    return snapshot.moved(replace(trace, depth=depth, images=images), device)


# --- saved sessions ------------------------------------------------------------------------------


def _frozen(kept: Kept) -> dict[str, Any]:
    """A cache as it is saved."""
    own = {name: getattr(kept, name) for name in ("ids", "base", "stats", "trace")}
    return session_file.frozen(kept.decoder) | own


def _checked(
    vlm: VLM, recipe: Recipe, state: dict[str, Any]
) -> tuple[Pictures | None, Kept | None]:
    """Images and cache of a file, once everything in it was found to belong together.

    Raises
    ------
    ValueError
        Says what does not.
    """
    keys = ("history", "messages", "stats", "pictures", "cache")
    session_checks.need(state.keys() == set(keys), "its parts are others")
    known, cache, adapter = state["pictures"], state["cache"], vlm.adapter
    session_checks.need(isinstance(state["stats"], Stats), "stats are none")
    session_checks.check_messages(state["messages"], state["history"])
    top = -1
    if known is not None:
        session_checks.need(isinstance(known, Pictures), "its images are none")
        session_checks.check_pictures(known, adapter)
        tensors, length = _blank_prompt(vlm, known, state["messages"])
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
    decoder = session_file.thawed(adapter, recipe, cache)
    own = (cache[name] for name in ("ids", "base", "stats", "trace"))
    return known, Kept(decoder.cache, decoder, *own)


def _blank_prompt(vlm: VLM, known: Pictures, messages: list[dict]) -> tuple[dict[str, Tensor], int]:
    """What the processor makes of blank images of the same sizes.

    Returns its tensors, and how many of the ids stand before the question.
    """
    from PIL import Image

    adapter = vlm.adapter
    # The conversation too: a placeholder in it would be taken for one of the images.
    for said in (messages, []):
        text, _, _ = vlm._render(_turns(known.media, said, "?"), Recipe())
        head, tail = _split(text, adapter.marks())
        session_checks.need(head == known.head, "its images stand in another prompt")
    blanks = [Image.new("RGB", (width, height)) for height, width in known.sizes]
    tensors = adapter.inputs(text, blanks, known.frames)
    return tensors, len(_before(adapter, tensors["input_ids"][0].tolist(), tail))
