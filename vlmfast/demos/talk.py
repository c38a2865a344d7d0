"""Conversations: what is asked of the full model and of a recipe, and in which order.

Nothing here knows of a page; `app` shows what these generators yield.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmfast.api.session import Session
from vlmfast.api.vlm import VLM, Answer, agreement
from vlmfast.core.protocols import MediaStage
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaError, VLMFastError
from vlmfast.media import kind_of, load_image, load_video

FULL, RECIPE, RESTORED = "full", "recipe", "restored"
_TABS = {"image": "Picture", "video": "Clip"}


class Stopped(VLMFastError):
    """The user did not want to hear the rest."""


@dataclass(frozen=True)
class Media:
    """What a user chose: a picture, or a clip with the number of its frames that are read."""

    kind: str
    path: str | None
    num_frames: int = 4

    def load(self) -> dict[str, Any]:
        """The arguments of `VLM.ask`, decoded, so that no later question can fail on them.

        Raises
        ------
        MediaError
            For what is missing, belongs in the other tab or cannot be read. Files go by their
            name alone.
        """
        if not self.path:
            what = "picture" if self.kind == "image" else "clip"
            raise MediaError(f"there is no {what}: upload one, or choose an example")
        try:
            found = kind_of(self.path)
            if found != self.kind:
                what = "a picture" if found == "image" else "a clip"
                raise MediaError(f"{self.path} is {what}: ask about it in the tab {_TABS[found]}")
            if self.kind == "image":
                return {"images": load_image(self.path)}
            return {"video": load_video(self.path, num_frames=self.num_frames).frames}
        except MediaError as error:
            said = str(error).replace(self.path, Path(self.path).name)
            what = "" if "in the tab" in said else "; choose another file"
            raise MediaError(said + what) from error


@dataclass
class Turn:
    """One question and its answers; texts grow while they are written."""

    question: str
    texts: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def shown(self) -> Answer | None:
        """The answer of the recipe's side that came last."""
        return self.answers.get(RESTORED) or self.answers.get(RECIPE)

    @property
    def agreement(self) -> float | None:
        full, shown = self.answers.get(FULL), self.shown
        return full and shown and agreement(shown.token_ids, full.token_ids)


class Conversation:
    """Questions about one picture or clip, put to the full model and to one recipe.

    The first question goes through `VLM.stream`, so that its cost is that of a single question;
    later ones through sessions, which read the pictures once.

    Parameters
    ----------
    vlm : VLM
    media : Media
    recipe : Recipe
    history : bool
        Whether a question sees the ones before it.
    """

    def __init__(self, vlm: VLM, media: Media, recipe: Recipe, history: bool) -> None:
        self.vlm, self.media, self.recipe, self.history = vlm, media, recipe, history
        self.turns: list[Turn] = []
        self.current: Turn | None = None
        self.closed = self._stopped = False
        self._loaded = media.load()
        self._sessions: dict[str, Session] = {}

    def ask(self, question: str, **generation: Any) -> Iterator[Turn]:
        """Yield the turn whenever a piece of text was added to it; it counts once it is complete.

        The sides take turns, so that each has the machine for itself while it is timed.
        """
        turn = self.current = Turn(question)
        for side, recipe in ((FULL, Recipe()), (RECIPE, self.recipe)):
            # Frames chosen by the question leave nothing for a session to keep.
            chosen = any(stage.asks_question for stage in recipe.acting(MediaStage))
            if self.turns and (self.history or not chosen):
                pieces: Callable[..., Iterator] = self._session(side, recipe).stream
            else:
                pieces = self._first(recipe)
            yield from self._written(turn, side, pieces(question, **generation))
        for past in self.turns:  # traces hold pictures; those of the last turn are enough
            past.answers.clear()
        self.turns.append(turn)
        self.current = None

    def look_again(self, **generation: Any) -> Iterator[Turn]:
        """Put the last question to the recipe's session with all visual tokens back."""
        if not self.turns:
            raise VLMFastError("there is nothing to look at again: ask a question first")
        turn = self.current = self.turns[-1]
        session = self._session(RECIPE, self.recipe)
        if self.history:  # the new answer takes the place of the recipe's own
            session.messages = session.messages[: 2 * (len(self.turns) - 1)]
        turn.answers.pop(RESTORED, None)
        pieces = session.stream(turn.question, restore=True, **generation)
        yield from self._written(turn, RESTORED, pieces)
        self.current = None

    def stop(self) -> None:
        """End the answer that is being written, at its next piece."""
        self._stopped = self.current is not None

    def close(self) -> None:
        """Give the caches back; an answer that is being written stops at its next piece."""
        self.closed = True
        self._drop()

    def _drop(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _first(self, recipe: Recipe) -> Callable[..., Iterator]:
        return lambda question, **generation: self.vlm.stream(
            question, **self._given(recipe), recipe=recipe, **generation
        )

    def _given(self, recipe: Recipe) -> dict[str, Any]:
        """The pictures; a recipe that chooses frames itself gets the clip to choose from."""
        chooses = self.media.kind == "video" and recipe.acting(MediaStage)
        return {"video": self.media.path} if chooses else self._loaded

    def _session(self, side: str, recipe: Recipe) -> Session:
        if side not in self._sessions:
            session = self.vlm.session(**self._given(recipe), recipe=recipe, history=self.history)
            if self.history:
                session.messages = self._said_before(side)
            self._sessions[side] = session
        return self._sessions[side]

    def _said_before(self, side: str) -> list[dict[str, str]]:
        """The conversation as one side knows it: the recipe's has the second looks in it."""
        messages = []
        for turn in self.turns:
            said = turn.texts.get(RESTORED if side == RECIPE else FULL) or turn.texts[side]
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": said})
        return messages

    def _written(self, turn: Turn, side: str, pieces: Iterator[str | Answer]) -> Iterator[Turn]:
        turn.texts[side] = ""
        try:
            with closing(pieces):
                yield turn
                for piece in pieces:
                    if self.closed:
                        raise VLMFastError("the conversation was closed")
                    if self._stopped:
                        raise Stopped("Stopped; what was being said is forgotten.")
                    if isinstance(piece, Answer):
                        turn.answers[side], turn.texts[side] = piece, piece.text
                    else:
                        turn.texts[side] += piece
                    yield turn
        except BaseException:
            # Whatever was said of this turn is forgotten: sessions begin again at the last one.
            if turn.answers.get(side) is None:
                turn.texts.pop(side)
            self.current, self._stopped = None, False
            self._drop()
            raise


@dataclass(frozen=True)
class Limits:
    """What one user may take.

    Parameters
    ----------
    seconds : float
        For one answer of one side.
    users : int
        Conversations that are kept; beyond it the one that was not used for longest ends.
    tokens : int
        The longest answer.
    """

    seconds: float = 120.0
    users: int = 16
    tokens: int = 512


class Desk:
    """All conversations about one model.

    Parameters
    ----------
    vlm : VLM
    name : str
        What the model is called.
    limits : Limits
    """

    def __init__(self, vlm: VLM, name: str, limits: Limits | None = None) -> None:
        self.vlm, self.name, self.limits = vlm, name, limits or Limits()
        self._talks: OrderedDict[str, Conversation] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def toy(self) -> bool:
        return self.name == "tiny"

    def ask(
        self, user: str, media: Media, question: str, recipe: str, tokens: int, history: bool
    ) -> Iterator[Conversation]:
        """Answer a question; yields the conversation whenever there is more of it to show.

        Another picture, recipe or way of remembering begins another conversation.

        Raises
        ------
        VLMFastError
            For whatever the user can mend; the next question works.
        """
        if not question.strip():
            raise VLMFastError("the question is empty: write one, or choose an example")
        chosen = self.vlm.recipe(recipe)
        talk = self.talk(user)
        same = talk and (talk.media, talk.recipe, talk.history) == (media, chosen, history)
        if not same:
            talk = Conversation(self.vlm, media, chosen, history)
            self.forget(user)
            with self._lock:
                self._talks[user] = talk
            self._make_room()
        with closing(talk.ask(question.strip(), **self._generation(tokens))) as turns:
            for _ in turns:
                yield talk
        yield talk

    def look_again(self, user: str, tokens: int) -> Iterator[Conversation]:
        """The last question once more, with every visual token."""
        talk = self.talk(user)
        if talk is None:
            raise VLMFastError("there is nothing to look at again: ask a question first")
        with closing(talk.look_again(**self._generation(tokens))) as turns:
            for _ in turns:
                yield talk

    def talk(self, user: str) -> Conversation | None:
        with self._lock:
            if user in self._talks:
                self._talks.move_to_end(user)
            return self._talks.get(user)

    def forget(self, user: str) -> None:
        """End the conversation of a user who has gone."""
        with self._lock:
            talk = self._talks.pop(user, None)
        if talk is not None:
            talk.close()

    def load(self, name: str, **loading: Any) -> None:
        """Take another model for everybody; one that cannot be loaded leaves the old one there.

        Raises
        ------
        ModelError
        """
        if not name.strip():
            raise VLMFastError("the model is empty: write tiny, a folder or a hub id")
        vlm = VLM.from_pretrained(name.strip(), **loading)
        for user in list(self._talks):
            self.forget(user)
        self.vlm, self.name = vlm, name.strip()

    def _generation(self, tokens: int) -> dict[str, Any]:
        most = self.limits.tokens
        if not 1 <= tokens <= most:
            raise VLMFastError(f"an answer of {tokens} tokens is out of range: 1 to {most}")
        return {"max_new_tokens": int(tokens), "max_time": self.limits.seconds, "do_sample": False}

    def _make_room(self) -> None:
        while True:
            with self._lock:
                if len(self._talks) <= self.limits.users:
                    return
                _, oldest = self._talks.popitem(last=False)
            oldest.close()
