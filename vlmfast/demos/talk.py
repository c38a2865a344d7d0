"""Conversations with the full model and a recipe, independent of the page.

`app` displays what these generators yield.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from PIL import Image

from vlmfast.api.answer import Request
from vlmfast.api.session import Session
from vlmfast.api.vlm import VLM, Answer, agreement
from vlmfast.core.protocols import MediaStage
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaError, RecipeError, VLMFastError
from vlmfast.media import kind_of, load_image, load_video

from .remote import RemoteSession, RemoteVLM

FULL, RECIPE, RESTORED = "full", "recipe", "restored"
_OPENING_TOKENS = 96
_TABS = {"image": "Image", "video": "Video"}


class Stopped(VLMFastError):
    """The user stopped the answer."""


@dataclass(frozen=True)
class Media:
    """The selected input: an image, or a video with the number of frames to use."""

    kind: str
    path: str | None
    num_frames: int = 4

    def load(self) -> dict[str, Any]:
        """Decode the file and return it as arguments of `VLM.ask`.

        Raises
        ------
        MediaError
            If the file is missing, belongs in the other tab or cannot be read. The message
            contains the file's name without its folder.
        """
        if not self.path:
            raise MediaError(f"no {self.kind}: upload one, or choose an example")
        try:
            found = kind_of(self.path)
            if found != self.kind:
                what = "an image" if found == "image" else "a video"
                raise MediaError(f"{self.path} is {what}: use the tab {_TABS[found]}")
            if self.kind == "image":
                return {"images": load_image(self.path)}
            return {"video": load_video(self.path, num_frames=self.num_frames)}
        except MediaError as error:
            text = str(error).replace(self.path, Path(self.path).name)
            advice = "" if "use the tab" in text else "; choose another file"
            raise MediaError(text + advice) from error

    def images(self) -> list[Image.Image]:
        """The image, or the frames of the video; raises as `load`."""
        return _images_of(self.load())


@dataclass
class Turn:
    """One question and its answers; the texts grow during decoding."""

    question: str
    texts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def shown(self) -> Answer | None:
        """The latest answer of the recipe."""
        return self.answers.get(RESTORED) or self.answers.get(RECIPE)

    @property
    def agreement(self) -> float | None:
        full, shown = self.answers.get(FULL), self.shown
        if full is None or shown is None:
            return None
        return agreement(shown.token_ids, full.token_ids)


class Conversation:
    """Questions about one image or video to the full model and to one recipe.

    The first question is a request of its own, so that its cost is that of a single question. Later
    questions use sessions, which prefill the images once. What others have asked makes neither of
    them faster.

    Parameters
    ----------
    vlm : VLM or RemoteVLM
    media : Media
    recipe : Recipe
    history : bool
        Whether earlier questions and answers are part of the context.
    """

    def __init__(self, vlm: VLM | RemoteVLM, media: Media, recipe: Recipe, history: bool) -> None:
        self.vlm, self.media, self.recipe, self.history = vlm, media, recipe, history
        self.turns: list[Turn] = []
        self.current: Turn | None = None
        self.closed = self._stopped = False
        self._loaded = media.load()
        self._sessions: dict[str, Session | RemoteSession] = {}

    def ask(self, question: str, **generation: Any) -> Generator[Turn, None, None]:
        """Yield the turn after each new piece of text; a complete turn is added to ``turns``.

        The full model and the recipe run one after the other, so that neither slows the other.
        """
        turn = self.current = Turn(question)
        for side in (FULL, RECIPE):
            recipe = Recipe() if side == FULL else self.recipe
            # A session cannot reuse frames that depend on the question.
            per_question = any(stage.query_dependent for stage in recipe.acting(MediaStage))
            if self.turns and (self.history or not per_question):
                pieces: Callable[..., Generator] = self._session(side, recipe).stream
            else:
                pieces = self._first(recipe)
            yield from self._written(turn, side, pieces(question, **generation))
        for past in self.turns:  # traces contain images: keep only the last turn's
            past.answers.clear()
        self.turns.append(turn)
        self.current, self._stopped = None, False

    def look_again(self, **generation: Any) -> Generator[Turn, None, None]:
        """Repeat the last question in the recipe's session with all visual tokens restored."""
        if not self.turns:
            raise VLMFastError("no question to repeat: ask a question first")
        turn = self.current = self.turns[-1]
        session = self._session(RECIPE, self.recipe)
        if self.history:  # the new answer replaces the recipe's first one
            session.messages = session.messages[: 2 * (len(self.turns) - 1)]
        turn.answers.pop(RESTORED, None)
        pieces = session.stream(turn.question, restore=True, **generation)
        yield from self._written(turn, RESTORED, pieces)
        self.current, self._stopped = None, False

    @property
    def images(self) -> list[Image.Image]:
        """The image, or the frames of the video."""
        return _images_of(self._loaded)

    def adopt(self, turn: Turn) -> None:
        """Continue after a turn of another conversation about the same media and recipe."""
        self.turns.append(Turn(turn.question, dict(turn.texts), dict(turn.answers)))

    def stop(self) -> None:
        """End the current answer at its next piece of text."""
        self._stopped = self.current is not None

    def close(self) -> None:
        """Free the caches; the current answer ends at its next piece of text."""
        self.closed = True
        self._drop()

    def _drop(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _first(self, recipe: Recipe) -> Callable[..., Generator]:
        def pieces(question: str, **generation: Any) -> Generator:
            given = self._given(recipe) | {"recipe": recipe, "tenant": _new()}
            with self.vlm.submit(Request(question, **given, generation=generation)) as handle:
                yield from handle

        return pieces

    def _given(self, recipe: Recipe) -> dict[str, Any]:
        """The decoded input, or the video's path if the recipe selects frames or a server does."""
        if self.media.kind == "image":
            return self._loaded
        if recipe.acting(MediaStage):
            return {"video": self.media.path}
        if isinstance(self.vlm, RemoteVLM):
            return {"video": self.media.path, "num_frames": self.media.num_frames}
        return self._loaded

    def _session(self, side: str, recipe: Recipe) -> Session | RemoteSession:
        if side not in self._sessions:
            given = self._given(recipe) | {"history": self.history, "tenant": _new()}
            session = self.vlm.session(**given, recipe=recipe)
            if self.history:
                session.messages = self._earlier_messages(side)
            self._sessions[side] = session
        return self._sessions[side]

    def _earlier_messages(self, side: str) -> list[dict[str, str]]:
        """The history of one side; the recipe's contains its answers with restored tokens."""
        messages = []
        for turn in self.turns:
            text = turn.texts.get(RESTORED if side == RECIPE else FULL) or turn.texts[side]
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": text})
        return messages

    def _written(
        self, turn: Turn, side: str, pieces: Generator[str | Answer, None, None]
    ) -> Iterator[Turn]:
        turn.texts[side] = ""
        try:
            with closing(pieces):
                yield turn
                for piece in pieces:
                    if self.closed:
                        raise VLMFastError("the conversation was closed")
                    if self._stopped:
                        raise Stopped("Stopped; the partial answer was discarded.")
                    if isinstance(piece, Answer):
                        turn.answers[side], turn.texts[side] = piece, piece.text
                    else:
                        turn.texts[side] += piece
                    yield turn
        except BaseException:
            # Discard this turn: new sessions start from the last complete one.
            if turn.answers.get(side) is None:
                turn.texts.pop(side)
            self.current, self._stopped = None, False
            self._drop()
            raise


def _images_of(loaded: dict[str, Any]) -> list[Image.Image]:
    return list(loaded["video"]) if "video" in loaded else [loaded["images"]]


def _check_names_no_file(stage: Any, known: set[str]) -> None:
    if stage.other_model and stage.name not in known:
        raise RecipeError(
            f"{stage.name} needs another model; start the demo with it, as in --recipe {stage.name}"
        )
    for f in fields(stage):
        value = getattr(stage, f.name)
        # A text without choices names a file, a folder or a checkpoint.
        if isinstance(value, str) and not f.metadata.get("choices") and value != f.default:
            raise RecipeError(
                f"{stage.name}: {f.name} cannot be set on this page, only with --recipe when the "
                "demo starts; leave it out"
            )


def _new() -> str:
    """A tenant that has found nothing in the prefix cache yet, for what is timed."""
    return secrets.token_hex()


@dataclass(frozen=True)
class Limits:
    """Limits of the demo server.

    Parameters
    ----------
    seconds : float
        Maximum time of one answer of one side.
    users : int
        Maximum number of conversations; the least recently used one is closed first.
    tokens : int
        Maximum length of an answer.
    """

    seconds: float = 120.0
    users: int = 16
    tokens: int = 512


@dataclass(frozen=True)
class Opening:
    """The comparison that a tab of the page opens with."""

    media: Media
    question: str


class Desk:
    """All conversations about one model.

    Parameters
    ----------
    vlm : VLM or RemoteVLM
    name : str
        Name of the model on the page.
    limits : Limits
    recipe : str
        The recipe that the page starts with. Other recipes cannot name files or models unless this
        one does.

    Raises
    ------
    RecipeError
        If the recipe cannot be used.
    """

    def __init__(
        self,
        vlm: VLM | RemoteVLM,
        name: str,
        limits: Limits | None = None,
        recipe: str = "none",
    ) -> None:
        self.vlm, self.name, self.limits = vlm, name, limits or Limits()
        self.first = vlm.recipe(recipe)
        self._given = recipe
        self._talks: OrderedDict[str, Conversation] = OrderedDict()
        self._opened: dict[Opening, Conversation] = {}
        self._lock = threading.Lock()
        self._opening = threading.Lock()

    @property
    def is_demo_model(self) -> bool:
        return self.name == "tiny"

    def recipe(self, text: str) -> Recipe:
        """Parse a recipe of a user.

        Raises
        ------
        RecipeError
            Also for a recipe that names files, folders or other models, which would be those of
            this machine.
        """
        if Recipe.reads_file(text) and text.strip() not in (self._given, str(self.first)):
            raise RecipeError("a recipe of this page cannot name a recipe file")
        recipe = self.vlm.recipe(text)
        for stage in recipe:
            if stage not in self.first:
                _check_names_no_file(stage, {known.name for known in self.first})
        return recipe

    def opened(self, opening: Opening) -> Conversation | None:
        """The conversation that the page opens with, once it is complete."""
        return self._opened.get(opening)

    def open(self, opening: Opening) -> Generator[Conversation, None, None]:
        """Answer the question that the page opens with; later calls return the same answers.

        Both sides first generate one token each, so that the times do not contain what only the
        first question of a process waits for.
        """
        with self._opening:
            talk = self._opened.get(opening)
            if talk is None:
                talk = self._conversation(opening)
                for _ in talk.ask(opening.question, **self._generation(1)):
                    yield talk
                talk = self._conversation(opening)
                most = min(_OPENING_TOKENS, self.limits.tokens)
                for _ in talk.ask(opening.question, **self._generation(most)):
                    yield talk
                self._opened[opening] = talk
        yield talk

    def _conversation(self, opening: Opening) -> Conversation:
        return Conversation(self.vlm, opening.media, self.first, not self.is_demo_model)

    def ask(
        self, user: str, media: Media, question: str, recipe: str, tokens: int, history: bool
    ) -> Generator[Conversation, None, None]:
        """Answer a question; yields the conversation after each update.

        Changing the input, the recipe or ``history`` starts a new conversation.

        Raises
        ------
        VLMFastError
            For user errors; the user can ask again.
        """
        if not question.strip():
            raise VLMFastError("the question is empty: write one, or choose an example")
        chosen = self.recipe(recipe)
        talk = self.talk(user)
        same = (media, chosen, history)
        if talk is None or (talk.media, talk.recipe, talk.history) != same:
            talk = Conversation(self.vlm, media, chosen, history)
            self._enter(user, talk)
        with closing(talk.ask(question.strip(), **self._generation(tokens))) as turns:
            for _ in turns:
                yield talk
        yield talk

    def look_again(
        self, user: str, tokens: int, opening: Opening | None = None
    ) -> Generator[Conversation, None, None]:
        """Repeat the last question with all visual tokens.

        Without a question of the user, that of ``opening`` is repeated.
        """
        talk = self.talk(user)
        if talk is None and opening is not None and (shown := self.opened(opening)):
            talk = self._conversation(opening)
            talk.adopt(shown.turns[-1])
            self._enter(user, talk)
        if talk is None:
            raise VLMFastError("no question to repeat: ask a question first")
        with closing(talk.look_again(**self._generation(tokens))) as turns:
            for _ in turns:
                yield talk

    def talk(self, user: str) -> Conversation | None:
        with self._lock:
            if user in self._talks:
                self._talks.move_to_end(user)
            return self._talks.get(user)

    def _enter(self, user: str, talk: Conversation) -> None:
        self.forget(user)
        with self._lock:
            self._talks[user] = talk
        self._close_oldest()

    def forget(self, user: str) -> None:
        """Close the conversation of a user who left the page."""
        with self._lock:
            talk = self._talks.pop(user, None)
        if talk is not None:
            talk.close()

    def _generation(self, tokens: int) -> dict[str, Any]:
        most = self.limits.tokens
        if not 1 <= tokens <= most:
            raise VLMFastError(f"an answer of {tokens} tokens is out of range: 1 to {most}")
        return {"max_new_tokens": int(tokens), "max_time": self.limits.seconds, "do_sample": False}

    def _close_oldest(self) -> None:
        while True:
            with self._lock:
                if len(self._talks) <= self.limits.users:
                    return
                _, oldest = self._talks.popitem(last=False)
            oldest.close()
