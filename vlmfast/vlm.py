"""What a user holds: `VLM` answers questions about pictures and clips under a recipe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from .errors import MediaError, ModelError, VLMFastError
from .recipe import Recipe
from .stages import Stage, stage_class, stage_names, word_of

if TYPE_CHECKING:
    from .engine.stats import Stats, Trace
    from .engine.turn import Turn
    from .session import Session

_DEFAULT_NEW_TOKENS = 128
_DECODING = ("auto", "graph", "compile", "eager")
_SHIPPED = {"tiny": Path(__file__).parent / "weights" / "tiny"}


@dataclass
class Answer:
    """One answer, what it cost and what was dropped for it.

    Parameters
    ----------
    text : str
    token_ids : list of int
        Generated ids, the end token included when one was produced.
    stats : Stats
    trace : Trace
    recipe : str
        Canonical text of the recipe.
    """

    text: str
    token_ids: list[int]
    stats: Stats
    trace: Trace = field(repr=False)
    recipe: str = "none"


@dataclass
class Request:
    """One question of a batch; the parameters are those of `VLM.ask`.

    Parameters
    ----------
    question : str
    images, video, num_frames, fps, recipe : optional
    generation : dict
        Hugging Face's generation arguments.
    """

    question: str
    images: Any = None
    video: Any = None
    num_frames: int | None = None
    fps: float | None = None
    recipe: Any = None
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass
class Comparison:
    """A recipe beside the full model.

    Parameters
    ----------
    recipe : str
    answer : Answer
    agreement : float
        Share of positions whose token equals the full model's, over the longer of both answers.
    """

    recipe: str
    answer: Answer
    agreement: float


class VLM:
    """A vision-language model under vlmfast.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Stays usable as it was: attention functions and hooks are put in for the length of a call.
    processor : transformers.ProcessorMixin
        The processor that belongs to the model.
    decoding : {"auto", "graph", "compile", "eager"}
        How decode steps run: as CUDA graphs that are captured once per shape (``auto`` on a GPU),
        through ``torch.compile``, or operation by operation (``auto`` on a CPU).

    Attributes
    ----------
    session_bytes : int or None
        What the caches of all open sessions may take together between questions; no bound by
        default. Beyond it the sessions that were not used for longest lose their caches, and build
        them again when they are asked next. A session that is being used keeps its own, even where
        that is larger than the bound.

    Raises
    ------
    ModelError
        For an unsupported family, several devices, or a processor without an image processor.
    """

    session_bytes: int | None = None

    def __init__(self, model: nn.Module, processor: Any, *, decoding: str = "auto") -> None:
        from .models import adapter_for

        if decoding not in _DECODING:
            raise VLMFastError(f"decoding={decoding!r} must be one of {', '.join(_DECODING)}")
        self.adapter = adapter_for(model, processor)
        if decoding == "graph" and self.adapter.device.type != "cuda":
            raise VLMFastError(
                f"decoding='graph' needs a CUDA device, and the model is on {self.adapter.device}"
            )
        self.adapter.decoding = decoding
        self.model, self.processor = model, processor
        self._sessions: WeakSet[Session] = WeakSet()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        **kwargs: Any,
    ) -> VLM:
        """Load a checkpoint and its processor.

        Parameters
        ----------
        name : str or Path
            ``"tiny"`` (the shipped model), a local folder, or a hub id.
        device : str, optional
            A CUDA device when there is one, else the CPU.
        dtype : str or torch.dtype
            ``"auto"`` is the checkpoint's own.
        **kwargs
            For Hugging Face's ``from_pretrained`` (``revision``, ``token``, ...).

        Raises
        ------
        ModelError
            When there is no such checkpoint, it has no processor, its family is not supported or
            its weights do not fit.
        """
        from .loading import load

        path = _SHIPPED.get(str(name), name)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(*load(path, device, dtype, **kwargs))

    def recipe(self, recipe: Any) -> Recipe:
        """What ``recipe=`` means on this model; presets differ by what its vision tower has.

        Parameters
        ----------
        recipe : str, Stage, Recipe or None

        Raises
        ------
        RecipeError
            For an unknown method or parameter, a value out of range or stages in the wrong order.
        """
        return Recipe.of(recipe, self.adapter.sources()[0])

    # --- questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        images: Any = None,
        video: Any = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        recipe: Any = None,
        max_kv_tokens: int | None = None,
        progress: bool = True,
        **generation: Any,
    ) -> Answer:
        """Answer a question about pictures or a clip.

        Parameters
        ----------
        question : str
        images : picture or list of pictures, optional
            PIL image, path, URL, bytes, NumPy array or torch tensor.
        video : path, bytes or list of frames, optional
        num_frames, fps : optional
            How many frames are read: a number, or so many a second; 8 when neither is given.
        recipe : str, Stage or Recipe, optional
            What is dropped; nothing by default.
        max_kv_tokens : int, optional
            Read the clip block by block, so that no layer ever caches more tokens, however long it
            is. Each block is thinned out by the recipe's block-wise cache method, or by
            ``quickprefill``. The answer then has no trace.
        progress : bool
            Whether a bar shows how much of such a clip has been read.
        **generation
            Hugging Face's generation arguments (``max_new_tokens``, ``do_sample``, ...).

        Raises
        ------
        VLMFastError
            `MediaError` for pictures and clips that cannot be read, `RecipeError` for a recipe
            that cannot run on this model.
        """
        recipe = self.recipe(recipe)
        if max_kv_tokens is not None:
            if video is None or images is not None:
                raise VLMFastError("max_kv_tokens is for video= alone")
            self._messages(question, None, video, num_frames, fps)  # the usual checks
            clip = (video, num_frames, fps)
            return self._answer_long(question, clip, recipe, max_kv_tokens, progress, generation)
        messages = self._messages(question, images, video, num_frames, fps)
        return self._answer(messages, recipe, generation)

    def chat(self, messages: list[dict], *, recipe: Any = None, **generation: Any) -> Answer:
        """Answer the last turn of a conversation in Hugging Face's chat schema.

        A content entry ``{"type": "image", ...}`` holds its picture under ``image``, ``path``,
        ``url`` or ``base64``; ``{"type": "video", ...}`` its clip under ``video``, ``path`` or
        ``url``, with ``num_frames`` or ``fps`` beside it.
        """
        return self._answer(messages, self.recipe(recipe), generation)

    def stream(
        self,
        question: str,
        images: Any = None,
        video: Any = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        recipe: Any = None,
        **generation: Any,
    ) -> Iterator[str | Answer]:
        """Like `ask`, piece by piece: yields ``str``, and the `Answer` as the last item."""
        from .engine.streaming import stream

        recipe = self.recipe(recipe)
        messages = self._messages(question, images, video, num_frames, fps)
        criteria = list(generation.pop("stopping_criteria", None) or [])
        return stream(
            self.processor.tokenizer,
            lambda streamer, cancelled: self._answer(
                messages,
                recipe,
                {
                    **generation,
                    "vlmfast_streamer": streamer,
                    "stopping_criteria": [*criteria, cancelled],
                },
            ),
        )

    def compare(
        self,
        question: str,
        images: Any = None,
        video: Any = None,
        *,
        recipes: list[Any],
        num_frames: int | None = None,
        fps: float | None = None,
        **generation: Any,
    ) -> list[Comparison]:
        """The full model's answer first, then each recipe's."""
        recipes = [recipes] if isinstance(recipes, str | Stage) else recipes
        chosen = [Recipe(), *(self.recipe(recipe) for recipe in recipes)]
        messages = self._messages(question, images, video, num_frames, fps)
        answers = [self._answer(messages, recipe, generation) for recipe in chosen]
        full = answers[0].token_ids
        return [Comparison(a.recipe, a, agreement(a.token_ids, full)) for a in answers]

    def ask_many(
        self, requests: Iterable[Request | str], *, batch_size: int = 8, **generation: Any
    ) -> list[Answer]:
        """Answer many questions, up to ``batch_size`` of them decoded together.

        Every request has its own pictures, recipe, length and end. Prompts are read one at a time
        and never padded, so each greedy answer is the one that `ask` gives; sampled answers draw
        from the one random stream in the order of the batch.

        Parameters
        ----------
        requests : iterable of Request or str
            Read as rows become free. A ``str`` is a question without a picture.
        batch_size : int
        **generation
            For requests that do not say otherwise.

        Returns
        -------
        list of Answer
            In the order of the requests.

        Raises
        ------
        VLMFastError
            For the first request that cannot be answered; says which one.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise VLMFastError(f"batch_size={batch_size!r} must be a whole number of at least 1")
        return self._many(requests, batch_size, generation)

    # --- sessions --------------------------------------------------------------------------------

    def session(
        self,
        images: Any = None,
        video: Any = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        recipe: Any = None,
        history: bool = True,
    ) -> Session:
        """Open a session: pictures are encoded, and read where the recipe allows, once.

        Parameters
        ----------
        images, video, num_frames, fps, recipe : optional
            As in `ask`.
        history : bool
            Whether each question sees the ones before it and their answers, as in `chat`. Otherwise
            every question stands alone, as in `ask`.

        Returns
        -------
        Session
            ``session.reuses`` says what is shared. Close it, or open it in a ``with`` statement.

        Raises
        ------
        VLMFastError
            As `ask` does, for pictures and recipes that cannot be used.
        """
        from .session import Session

        recipe = self.recipe(recipe)
        return Session._open(self, images, video, num_frames, fps, recipe, history)

    def load_session(self, path: str | Path, *, recipe: Any = None) -> Session:
        """A session that `Session.save` wrote, to go on with.

        Parameters
        ----------
        path : str or Path
        recipe : str, Stage or Recipe, optional
            What the session must have been saved under; by default whatever it was.

        Raises
        ------
        VLMFastError
            For a file that is damaged or none of these; `ModelError` where it was saved with
            another model, `RecipeError` where under another recipe than ``recipe``.
        """
        from .session import Session

        return Session._load(self, path, recipe)

    # --- the way in ------------------------------------------------------------------------------

    def inputs(
        self,
        question: str,
        images: Any = None,
        video: Any = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors that `ask` works on; ``vlm.model.generate(**inputs)`` is the full model."""
        messages = self._messages(question, images, video, num_frames, fps)
        return self.adapter.inputs(*self._render(messages, Recipe()))

    def _messages(
        self, question: str, images: Any, video: Any, num_frames: int | None, fps: float | None
    ) -> list[dict]:
        if not isinstance(question, str) or not question.strip():
            raise VLMFastError("question is empty; it must be a text with at least one letter")
        if video is None and (num_frames is not None or fps is not None):
            raise VLMFastError("num_frames and fps are for video=, and no video was given")
        if images is None:
            images = []
        content = [
            {"type": "image", "image": image}
            for image in (images if isinstance(images, list | tuple) else [images])
        ]
        if video is not None:
            content.append({"type": "video", "video": video, "num_frames": num_frames, "fps": fps})
        content.append({"type": "text", "text": question})
        return [{"role": "user", "content": content}]

    def _render(self, messages: list[dict], recipe: Recipe) -> tuple[str, list[Any], list[tuple]]:
        """Prompt text, RGB pictures, one per placeholder in it, and which clip each is a frame of.

        The last as in `engine.prefill.Inputs.frames`.
        """
        _check_messages(messages)
        pictures: list[Any] = []
        frames: list[tuple] = []
        select = self._chooser(recipe, _question(messages))
        plain = [
            {
                "role": turn["role"],
                "content": self._content(turn["content"], pictures, frames, select),
            }
            for turn in messages
        ]
        text = self._templated(plain)
        marks = self.adapter.marks()
        placeholders = sum(map(text.count, marks))
        alone, clips = self.adapter.parted(pictures, frames)
        if placeholders != len(alone) + len(clips):
            raise MediaError(
                f"the prompt has {placeholders} picture placeholders ({', '.join(marks)}) "
                f"and {len(alone) + len(clips)} pictures were given"
            )
        return text, pictures, frames

    def _chooser(self, recipe: Recipe, question: str) -> Any:
        """What chooses the frames of a clip, where a stage of the recipe does."""
        stages = recipe.acting("media")
        return partial(stages[0].frames, question=question) if stages else None

    def _templated(self, plain: list[dict]) -> str:
        """The prompt of turns whose pictures stand as ``{"type": "image"}``."""
        from jinja2 import TemplateError

        if not getattr(self.processor, "chat_template", None):
            raise ModelError(
                f"the processor of {self.adapter.config.model_type} has no chat template; "
                "set vlm.processor.chat_template"
            )
        try:
            return self.processor.apply_chat_template(
                plain, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise VLMFastError(f"the chat template refused the messages: {error}") from error

    def _content(
        self,
        content: Any,
        pictures: list[Any],
        frames: list[tuple],
        select: Any,
    ) -> list[dict]:
        from .media import load_image, load_video

        plain: list[dict] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = part.get("type")
            if kind == "text":
                plain.append({"type": "text", "text": part["text"]})
            elif kind == "image":
                pictures.append(load_image(_source(part, "image", "path", "url", "base64")))
                frames.append((-1, 0, 1))
                plain.append({"type": "image"})
            elif kind == "video":
                source = _source(part, "video", "path", "url")
                if select and (part.get("num_frames") or part.get("fps")):
                    raise VLMFastError(
                        "the recipe has a stage that chooses the frames; "
                        "num_frames and fps cannot be given too"
                    )
                clip = load_video(
                    source,
                    num_frames=part.get("num_frames"),
                    fps=part.get("fps"),
                    select=select,
                )
                number = 1 + max((of for of, *_ in frames), default=-1)
                if self.adapter.clip_tensors:
                    plain.append({"type": "video"})
                for index, frame in enumerate(clip.frames):
                    if not self.adapter.clip_tensors:
                        if label := self.adapter.frame_label(index):
                            plain.append({"type": "text", "text": label})
                        plain.append({"type": "image"})
                    pictures.append(frame)
                    frames.append((number, index, len(clip.frames), clip.timestamps_s[index]))
            else:
                raise VLMFastError(
                    f"content type {kind!r} is not known; allowed are text, image and video"
                )
        return plain

    def _turn(self, messages: list[dict], recipe: Recipe, generation: dict) -> Turn:
        """The answer to come: pictures decoded and processed, nothing computed yet."""
        from .engine.attention import lock_of
        from .engine.prefill import Inputs
        from .engine.run import Run
        from .engine.turn import open_turn

        start = time.perf_counter()
        text, pictures, frames = self._render(messages, recipe)
        loaded = time.perf_counter()
        with lock_of(self.model):
            begin = time.perf_counter()
            tensors = self.adapter.inputs(text, pictures, frames)
            sizes = [(picture.height, picture.width) for picture in pictures]
            inputs = Inputs(tensors, sizes, _question(messages), frames)
            run = Run(self.adapter, inputs, recipe, begin)
            run.stats.time_media_s = loaded - start
            run.stats.time_processor_s = time.perf_counter() - begin
            run.trace.images = pictures
            return open_turn(run, self._generation(generation))

    def _answer(self, messages: list[dict], recipe: Recipe, generation: dict) -> Answer:
        from .engine.attention import lock_of
        from .engine.turn import answer

        turn = self._turn(messages, recipe, generation)
        with lock_of(self.model):
            if self.model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.model.device)
            answer(turn)
            turn.run.release()
        return self._said(turn)

    def _answer_long(
        self,
        question: str,
        source: tuple[Any, int | None, float | None],
        recipe: Recipe,
        max_kv_tokens: int,
        progress: bool,
        generation: dict,
    ) -> Answer:
        from .engine.attention import lock_of
        from .engine.prefill import Inputs
        from .engine.run import Run
        from .engine.turn import answer, open_turn
        from .long_video import LongVideo, checked
        from .media import open_video

        recipe = checked(recipe, max_kv_tokens)
        video, num_frames, fps = source
        choose = self._chooser(recipe, question)
        with open_video(video, num_frames=num_frames, fps=fps, select=choose) as clip:
            content: list[dict] = []
            for index in range(len(clip.indices)):
                if label := self.adapter.frame_label(index):
                    content.append({"type": "text", "text": label})
                content.append({"type": "image"})
            content.append({"type": "text", "text": question})
            text = self._templated([{"role": "user", "content": content}])
            with lock_of(self.model):
                begin = time.perf_counter()
                long = LongVideo(self.adapter, clip, text, max_kv_tokens, progress)
                run = Run(self.adapter, Inputs({"input_ids": long.ids()}), recipe, begin)
                turn = open_turn(run, self._generation(generation))
                answer(turn, lambda: long.read(run, turn.room, question))
                run.release()
        return self._said(turn)

    def _said(self, turn: Turn) -> Answer:
        ids, run = turn.generated, turn.run
        text = self.processor.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(text.strip(), ids, run.stats, run.trace, str(run.recipe))

    def _many(
        self, requests: Iterable[Request | str], batch_size: int, generation: dict
    ) -> list[Answer]:
        from .engine.turn import answer_many

        def turns() -> Iterator[Turn]:
            for number, request in enumerate(requests):
                r = Request(request) if isinstance(request, str) else request
                try:
                    if not isinstance(r, Request):
                        raise VLMFastError(
                            f"is a {type(request).__name__}; it must be a vlmfast.Request or a str"
                        )
                    messages = self._messages(r.question, r.images, r.video, r.num_frames, r.fps)
                    recipe = self.recipe(r.recipe)
                    turn = self._turn(messages, recipe, {**generation, **r.generation})
                except VLMFastError as error:
                    raise type(error)(f"request {number}: {error}") from error
                turn.number = number
                yield turn

        answers: dict[int, Answer] = {}
        for turn in answer_many(self.model, turns(), batch_size):
            answers[turn.number] = self._said(turn)
        return [answers[number] for number in sorted(answers)]

    def _generation(self, generation: dict, default: int | None = _DEFAULT_NEW_TOKENS) -> dict:
        """Generation arguments as our loop takes them; ``default`` is of new tokens.

        Hugging Face hands neither streamer nor tokenizer to a loop of one's own, so the streamer
        travels under another name and stop strings become a criterion.
        """
        generation = dict(generation)
        config = generation.get("generation_config") or self.model.generation_config
        given = {"max_new_tokens", "max_length"} & set(generation)
        unset = not given and config.max_new_tokens is None and config.max_length in (None, 20)
        if unset and default is not None:
            generation["max_new_tokens"] = default
        if streamer := generation.pop("streamer", None):
            generation["vlmfast_streamer"] = streamer
        criteria = list(generation.pop("stopping_criteria", None) or [])
        for name in ("seed", "strict"):
            if name in generation:
                generation[f"vlmfast_{name}"] = generation.pop(name)
        stop = generation.get("stop_strings", config.stop_strings)
        generation["stop_strings"] = None  # or `generate` would look for a tokenizer
        if stop:
            from transformers import StopStringCriteria

            criteria.append(StopStringCriteria(self.processor.tokenizer, stop))
        if criteria:
            from transformers import StoppingCriteriaList

            generation["stopping_criteria"] = StoppingCriteriaList(criteria)
        return generation


def agreement(tokens: list[int], full: list[int]) -> float:
    """Share of equal positions over the longer answer; 1.0 when both are empty."""
    longest = max(len(tokens), len(full))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(tokens, full, strict=False)) / longest


def methods() -> list[dict[str, Any]]:
    """Every stage and drafter: name, protocol, parameters, paper, whether it needs training.

    ``floor`` is the lowest share of the visual tokens, averaged over 32 layers, that it can reach.
    """
    return [_method(stage_class(name)) for name in sorted(stage_names())]


def _method(cls: type[Stage]) -> dict[str, Any]:
    return {
        "name": cls.name,
        "protocol": cls.protocol,
        "paper": cls.paper,
        "trained": cls.trained,
        "floor": cls().floor(32),
        "value": cls.lead,
        "summary": (cls.__doc__ or "").strip().partition("\n")[0],
        "parameters": [
            {
                "name": word_of(f),
                "type": str(f.type),
                "default": None if f.default is MISSING else f.default,
                **{key: value for key, value in f.metadata.items() if key != "word"},
            }
            for f in fields(cls)
        ],
    }


def _source(part: dict, *keys: str) -> Any:
    for key in keys:
        if part.get(key) is not None:
            return part[key] if key != "base64" else f"data:;base64,{part[key]}"
    raise VLMFastError(f"a content entry of type {part['type']} needs one of {', '.join(keys)}")


def _check_messages(messages: Any) -> None:
    """Hugging Face's chat schema, as far as it is used."""
    if not isinstance(messages, list | tuple) or not messages:
        raise VLMFastError("messages must be a list of at least one turn")
    for turn in messages:
        if not isinstance(turn, dict) or "role" not in turn:
            raise VLMFastError(f"a turn must be a dict with a role and content, not {turn!r}")
        content = turn.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list | tuple) or not all(isinstance(p, dict) for p in parts):
            raise VLMFastError("the content of a turn must be a text, or a list of dicts")
        for part in parts:
            if part.get("type") == "text" and not isinstance(part.get("text"), str):
                raise VLMFastError("a content entry of type text needs its text under 'text'")
    if not _question(messages).strip():
        raise VLMFastError("the last user turn has no text")


def _question(messages: list[dict]) -> str:
    """Text of the last user turn."""
    content = next((t["content"] for t in reversed(messages) if t["role"] == "user"), "")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if part.get("type") == "text")
