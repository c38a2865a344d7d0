"""Sessions: many questions about the same images.

Images are decoded and encoded once. Unless the recipe depends on the question, their keys and
values in the language model, compressed by the recipe, are shared as well. Each question then costs
only its own tokens.
"""

from __future__ import annotations

import copy
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from vlmfast.core.display import plural
from vlmfast.core.nested import moved
from vlmfast.core.protocols import MediaStage, tower_stages
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.engine.engine import engine_of
from vlmfast.engine.features import tower_state
from vlmfast.engine.handle import Handle, pieces_of, result_of
from vlmfast.engine.opening import fitted, open_sequence
from vlmfast.engine.prefill import Inputs, look
from vlmfast.engine.prefix_cache import Entry
from vlmfast.engine.prefixes import Prefix, Prefixes, Scope, copied, parts
from vlmfast.engine.sequence import Phase, Prefill, Sequence
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import ModelError, RecipeError, RequestCancelled, VLMFastError
from vlmfast.models.base import Adapter

from . import session_file
from .answer import Answer
from .conversation import Consumed, answered, continued, split, tail_ids, turns
from .generation import Generation, gate
from .request import (
    Rendered,
    answer_of,
    check_length,
    check_question,
    check_streamer,
    chooser,
    identify,
    media_of,
    opened,
    read_media,
    recipe_of,
    render,
    submitted,
)
from .session_media import Images, Media

if TYPE_CHECKING:
    from vlmfast.media.types import ImageLike, VideoLike

_FREE_SLOTS = 128  # of a new cache


@dataclass
class _Claim:
    """A use of a session: by a question, until its sequence has ended, or by a method."""

    sequence: Sequence | None = None
    freed: bool = False

    @property
    def ended(self) -> bool:
        return self.freed or (self.sequence is not None and self.sequence.finished)


class Sessions:
    """The open sessions of one model.

    Parameters
    ----------
    adapter : Adapter

    Attributes
    ----------
    open : WeakSet of Session
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.open: WeakSet[Session] = WeakSet()
        self.lock = threading.Lock()


class Session:
    """Ask many questions about images that are encoded once; opened by `VLM.session`.

    ``session.reuses`` tells what the last question shared with earlier ones, before the first
    question what there is to share:

    ``"kv"``
        The recipe does not depend on the question. The keys and values of the images, compressed by
        the recipe, are shared by all questions, and each question costs only its own tokens. They
        are in the model's prefix cache, where sessions and other requests about the same images
        find them, too, until others need the room.
        Answers equal those of `VLM.ask` unless the recipe compresses the cache: in `VLM.ask` the
        question attends to the images before compression, in a session only afterwards. Questions
        and answers are not compressed in prefill; methods that work in decode include them.
    ``"features"``
        A stage of the recipe depends on the question (``query_dependent`` of its class), or the
        keys and values are no longer in the prefix cache. The tower does not run again, but the
        question is prefilled with the images. Where a stage depends on the question, its answer is
        that of `VLM.ask`, or of `VLM.chat` with the conversation so far.

    A conversation keeps the ids that the model has consumed and generated. Where the chat template
    does not repeat an answer verbatim, the prompt is prefilled again from there on.

    All features of the tower stay in host memory, so that ``restore=True`` can run the full model,
    and the pixels that the tower has read, so that the session can be saved.

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
        tenant: str = "",
    ) -> None:
        self._group, self._adapter, self._images = group, group.adapter, images
        self._engine = engine_of(group.adapter)
        self.recipe, self.history, self.stats = recipe, history, stats
        asks = any(p.query_dependent for p in parts(recipe))
        self._shares = group.adapter.reusable and not asks
        self._inside = bool(tower_stages(recipe))  # the tower's full features are not there
        self.reuses = "kv" if self._shares else "features"
        self._messages: list[dict] = []
        self._consumed: Consumed | None = None
        self._prefixes, self._tenant = Prefixes(group.adapter), tenant
        self._entries: list[Entry] = []  # of the conversation, in the prefix cache
        self._scope: Scope | None = None  # of the current question, with what it continues
        self._prefix: Prefix | None = None
        self._closed, self._claimed_by = False, _Claim(freed=True)
        self._checked: Scope | None = None  # of the last question; its vision tower was this one:
        self._tower = None if images is None else tower_state(group.adapter, images.seen.trained)
        group.open.add(self)

    # --- opening and closing ---------------------------------------------------------------------

    @classmethod
    def _open(
        cls,
        group: Sessions,
        images: ImageLike | Many[ImageLike] | None,
        video: VideoLike | None,
        num_frames: int | None,
        fps: float | None,
        timestamps: Many[float] | None,
        recipe: Recipe,
        history: bool,
        tenant: str,
    ) -> Session:
        start, adapter = time.perf_counter(), group.adapter
        _check_recipe(adapter, recipe)
        entries, prompt = media_of(images, video, num_frames, fps, timestamps), Rendered("")
        content = read_media(adapter, entries, prompt, chooser(recipe, ""))
        if not prompt.images:
            return cls(group, recipe, history, None, Stats(), tenant)
        loaded = time.perf_counter()
        media = Media.of(adapter, content, prompt)
        stats = Stats(time_media_s=loaded - start, time_processor_s=time.perf_counter() - loaded)
        return cls._encoded(group, recipe, history, media, stats, tenant, start)

    @classmethod
    def _encoded(
        cls,
        group: Sessions,
        recipe: Recipe,
        history: bool,
        media: Media,
        stats: Stats,
        tenant: str,
        start: float,
    ) -> Session:
        """Encode media and, where questions share their keys and values, prefill them."""
        adapter = group.adapter
        ids = torch.tensor([media.prefix + media.tail], device=adapter.device)
        inputs = media.inputs(adapter, ids, pixels=True, tenant=tenant)
        media.tensors = moved(media.tensors, "cpu")
        check_length(adapter, inputs.tensors, recipe, gate(adapter, {"max_new_tokens": 1}))
        identify(adapter, inputs)
        opened: list[Session] = []

        def prefill(sequence: Sequence) -> Prefill:
            trace = Trace(images=media.images)
            seen = look(adapter, inputs, recipe, stats, trace)
            known = Images(
                **vars(media),
                seen=moved(seen, "cpu"),
                stats=copy.deepcopy(stats),
                trace=copied(trace, "cpu", []),
                digests=tuple(image.digest.hex() for image in inputs.hashed or ()),
            )
            yield True
            session = cls(group, recipe, history, known, stats, tenant)
            opened.append(session)
            if session._shares:
                session._prepare(sequence)
            return None

        more: dict[str, Any] = {"begin": start, "prefill": prefill, "images": media.images}
        sequence = open_sequence(adapter, inputs, recipe, stats=stats, **more)
        submit = engine_of(adapter).submit
        session = result_of(lambda: submit(sequence, lambda sequence: opened[-1]))
        stats.time_total_s = time.perf_counter() - start
        return session

    def close(self) -> None:
        """Release its memory; a closed session cannot be asked.

        The keys and values of the images stay in the prefix cache, where another session about them
        finds them.
        """
        with self._claimed():
            self._drop()
            self._closed, self._images = True, None
            self._group.open.discard(self)

    def __repr__(self) -> str:
        costs = [str(cost) for cost in self.stats.costs()]
        return f"Session({', '.join([self.recipe.text, *costs, *self._facts()])})"

    def _facts(self) -> list[str]:
        if self._closed:
            return ["closed"]
        images = 0 if self._images is None else len(self._images.sizes)
        facts = [plural(images, "image"), f"reuses {self.reuses}"]
        if self.history:
            facts.append(plural(len(self._messages) // 2, "question") + " answered")
        return facts

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
        return result_of(lambda: self._submit(question, restore, passed))

    def stream(
        self, question: str, *, restore: bool = False, **generation: Any
    ) -> Generator[str | Answer, None, None]:
        """Stream an answer: like `ask`, but yields ``str`` pieces and finally the `Answer`.

        If the stream is closed early, the conversation continues with the partial answer.
        """
        passed = self._check(question, restore, generation)
        check_streamer(passed)
        return pieces_of(lambda: self._submit(question, restore, passed))

    @property
    def messages(self) -> list[dict]:
        return [dict(turn) for turn in self._messages]

    @messages.setter
    def messages(self, messages: list[dict]) -> None:
        self._messages = session_file.checked_messages(messages, self.history)

    @property
    def bytes(self) -> int:
        """Bytes of what its next question continues from in the prefix cache."""
        return self._prefixes.bytes(*self._known())

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
        claim = _Claim()
        try:
            self._claim(claim)
            self._must_be_open()
            claim.sequence = self._sequence(question, restore, generation, claim)
            return submitted(self._adapter, claim.sequence)
        except BaseException:
            self._free(claim)
            raise

    def _claim(self, claim: _Claim) -> None:
        """Wait until nothing else uses the session, and keep others from using it."""
        while self._claimed_by is not claim:
            self._engine.run(lambda: self._claimed_by.ended)
            with self._group.lock:
                if self._claimed_by.ended:
                    self._claimed_by = claim

    def _free(self, claim: _Claim) -> None:
        claim.freed = True
        self._engine.notify()

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        claim = _Claim()
        try:
            self._claim(claim)
            yield
        finally:
            self._free(claim)

    def _must_be_open(self) -> None:
        if self._closed:
            raise VLMFastError("the session is closed; vlm.session(...) opens another one")

    def _check_tower(self, scope: Scope | None = None) -> None:
        """The features of the images must be those of today's vision tower.

        ``scope`` is that of a question, which says without a second look that nothing has changed.
        """
        known = self._images
        if known is None or (scope is not None and scope == self._checked):
            return
        if tower_state(self._adapter, known.seen.trained) != self._tower:
            raise ModelError(
                "the vision tower has changed since the session was opened: its weights, adapters, "
                "settings, hooks or mode, autocast, or the image processor; open another session"
            )
        self._checked = scope

    def _sequence(
        self, question: str, restore: bool, generation: Generation, claim: _Claim
    ) -> Sequence:
        """Open the sequence of a question; nothing is computed yet."""
        adapter, known, begin = self._adapter, self._images, time.perf_counter()
        content = [] if known is None else known.content
        text = render(adapter, turns(content, self._messages, question), Recipe()).text
        inputs = self._inputs(self._ids(text), question, pixels=restore and self._inside)
        recipe = Recipe() if restore else self.recipe
        spent = Stats(time_processor_s=time.perf_counter() - begin)
        # Without history and images there is nothing to share.
        continues = not restore and self._shares and (self.history or known is not None)
        return opened(
            adapter,
            inputs,
            recipe,
            begin,
            generation,
            stats=spent,
            images=[] if known is None else known.images,
            prefill=partial(self._prefill, restore, continues),
            keeps_cache=continues and self.history,
            on_end=partial(self._ended, question, text, continues, claim),
        )

    def _prefill(self, restore: bool, continues: bool, sequence: Sequence) -> Prefill:
        """Prefill the prompt of a question."""
        self._scope = self._scoped(sequence.recipe) if continues else None
        self._check_tower(self._scope)
        if continues:
            return (yield from self._extend(sequence))
        prefiller = self._engine.prefiller
        prefiller.count_prompt(sequence, reused=0)
        if restore and self._inside:
            return prefiller.read(sequence)  # the features have to be recomputed
        return self._read(sequence, sequence.ids)

    def _ended(
        self, question: str, text: str, continues: bool, claim: _Claim, sequence: Sequence
    ) -> None:
        """Keep the cache and the answer of a question, complete or cut short by its reader."""
        try:
            short = isinstance(sequence.error, RequestCancelled) and sequence.emitted > 0
            complete = sequence.error is None or short
            if sequence.phase is not Phase.WAITING:
                shared = continues and (self._images is None or sequence.stats.prompt_reused > 0)
                self.reuses = "kv" if shared else "features"
            prefix = None if sequence.group is None else self._prefix
            cached = sequence.error is None or sequence.phase is Phase.DECODE
            if continues and self.history and complete and cached and prefix is not None:
                self._store(prefix.extended(sequence), self._prefixes.keep)
            if complete and self.history:
                self._consumed = answered(
                    self._adapter,
                    text,
                    sequence.ids[0, : sequence.prompt_length].tolist(),
                    sequence.tokens,
                )
                answer = answer_of(self._adapter, sequence).text
                asked = {"role": "user", "content": question}
                self._messages += [asked, {"role": "assistant", "content": answer}]
        finally:
            self._engine.prefiller.release(sequence)
            self._prefix = self._scope = None
            self._free(claim)

    def _ids(self, text: str) -> Tensor:
        """Ids (1, S) of a prompt, placeholders included."""
        adapter, known = self._adapter, self._images
        if known is None:
            ids = adapter.inputs(text, [])["input_ids"][0].tolist()
        else:
            head, tail = split(text, adapter.marks())
            if head != known.head:
                raise ModelError(
                    "the chat template now writes another text before the images than when the "
                    "session was opened; open another one"
                )
            ids = known.prefix + tail_ids(adapter, tail)
        return torch.tensor([continued(adapter, text, ids, self._consumed)], device=adapter.device)

    def _inputs(self, ids: Tensor, question: str, *, pixels: bool = False) -> Inputs:
        given: dict[str, Any] = {"question": question, "tenant": self._tenant}
        if self._images is None:
            return Inputs({"input_ids": ids}, **given)
        return self._images.inputs(self._adapter, ids, pixels=pixels, **given)

    def _read(self, sequence: Sequence, ids: Tensor, **more: Any) -> Tensor:
        """Prefill a prompt, or its first ``ids`` (1, S). Returns the logits (1, V) after it.

        ``more`` is passed to `Prefiller.read`.
        """
        known, seen = self._images, None
        if known is not None:
            self._engine.prefiller.adopt(sequence, known.stats, known.trace)
            seen = moved(known.seen, self._adapter.device)
        inputs = self._inputs(ids, sequence.inputs.question)
        return self._engine.prefiller.read(sequence, inputs=inputs, seen=seen, **more)

    # --- shared keys and values ------------------------------------------------------------------

    def _prepare(self, sequence: Sequence) -> None:
        """Prefill the images when the session is opened, unless the prefix cache has them."""
        assert self._images is not None
        count, stats = len(self._images.prefix), sequence.stats
        self._scope = self._scoped(sequence.recipe)
        if self._prefixes.resume(self._scope, sequence, count) is None:
            self._begin(sequence)
            stats.prompt_fed = count
        else:
            stats.prompt_reused = count
            self._engine.prefiller.count_cache(sequence)
        self.reuses = "kv" if stats.prompt_reused or self._entries else "features"
        self._scope = None

    def _extend(self, sequence: Sequence) -> Prefill:
        """Prefill the part of a prompt after what the prefix cache has of it."""
        prefiller, known, logits = self._engine.prefiller, self._images, None
        least = 0 if known is None else len(known.prefix)
        prefix = self._prefixes.resume(self._scope, sequence, least)
        prefiller.count_prompt(sequence, reused=0 if prefix is None else len(prefix.ids))
        if prefix is None:
            prefix, logits = self._begin(sequence)
        new = sequence.ids[:, len(prefix.ids) :]
        logits = yield from prefiller.extend_text(sequence, new, logits)
        self._prefix = prefix
        if self.history and prefix.cache.track:  # decoding changes what was prefilled
            before = prefix.after(sequence, sequence.ids[0].tolist())
            self._store(before, self._prefixes.keep_copy)
        return logits

    def _begin(self, sequence: Sequence) -> tuple[Prefix, Tensor]:
        """Prefill the images, or a whole prompt without any, under the recipe, and store that.

        Also returns the logits (1, V) after it.
        """
        ids = sequence.ids
        if self._images is not None:
            ids = ids[:, : len(self._images.prefix)]
        logits = self._read(sequence, ids, max_new_tokens=_FREE_SLOTS, bounded=False)
        prefix = Prefix.of(sequence, ids[0].tolist())
        self._store(prefix, partial(self._prefixes.keep_copy, at_once=True))
        return prefix, logits

    def _scoped(self, recipe: Recipe) -> Scope | None:
        """The scope of its prompts in the prefix cache."""
        known = self._images
        about = () if known is None else (known.digests, known.sizes, known.frames)
        return self._prefixes.scope(recipe, *about, tenant=self._tenant, apart=True)

    def _store(self, prefix: Prefix, keep: Callable[..., Entry | None]) -> None:
        """Store a prefix of the conversation, in place of what led to the answer before the last.

        The images alone, and the last prompt with and without its answer, stay.

        Parameters
        ----------
        keep : callable
            `Prefixes.keep` or `Prefixes.keep_copy`.
        """
        entry = keep(self._scope, prefix)
        if entry is not None:
            self._entries = [own for own in self._entries if own.stored and own is not entry]
            self._entries.append(entry)
            for old in self._entries[1:-2]:
                self._prefixes.cache.remove(old)

    # --- memory ----------------------------------------------------------------------------------

    def _drop(self) -> None:
        """Remove the conversation from the prefix cache; the next question reads it again."""
        for entry in self._entries:
            self._prefixes.cache.remove(entry)
        self._entries.clear()

    def _known(self) -> tuple[Scope | None, list[int]]:
        """The scope of its prompts, and the ids that the next one begins with."""
        if not self._shares:
            return None, []
        ids = [] if self._images is None else self._images.prefix
        ids = ids if self._consumed is None else self._consumed.ids
        return self._scoped(fitted(self._adapter, self.recipe)[0]), ids

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the session to one safetensors file, which `VLM.load_session` reads.

        The file contains the conversation with its ids, and the pixels of the images as the vision
        tower takes them: who can read the file can see the images. It contains neither features
        nor keys and values. If saving fails, an older file is left unchanged.

        Raises
        ------
        VLMFastError
            With the reason, if the file cannot be written.
        """
        with self._claimed():
            self._must_be_open()
            self._check_tower()
            state = session_file.State(self.history, self._messages, self._consumed, self._images)
            session_file.write(path, self._adapter, self.recipe, state)

    @classmethod
    def _load(
        cls, group: Sessions, path: str | Path, recipe: str | Stage | Recipe | None
    ) -> Session:
        start, adapter = time.perf_counter(), group.adapter

        def choose(saved: str) -> Recipe:
            chosen = recipe_of(adapter, saved if recipe is None else recipe)
            _check_recipe(adapter, chosen)
            return chosen

        chosen, state = session_file.read(path, adapter, choose)
        # No one else continues from what a file contains.
        given = group, chosen, state.history
        tenant = secrets.token_hex()
        if state.media is None:
            session = cls(*given, None, Stats(), tenant)
        else:
            stats = Stats(time_media_s=time.perf_counter() - start)
            session = cls._encoded(*given, state.media, stats, tenant, start)
        session._messages, session._consumed = state.messages, state.consumed
        return session


def _check_recipe(adapter: Adapter, recipe: Recipe) -> None:
    """Raise for recipes that the engine does not run, or not before there is a question."""
    for stage in recipe.acting(MediaStage):
        if stage.query_dependent:
            raise RecipeError(
                f"{stage.name} chooses frames by the question, so a session would have to read "
                "the video again for each; use ask"
            )
    fitted(adapter, recipe)
