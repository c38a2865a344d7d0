"""Public entry point: `VLM` answers questions about images and videos under a recipe."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch

from vlmfast.core.display import brief_count
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.errors import VLMFastError

from .answer import Answer, Comparison, ComparisonTable, Request, agreement
from .generation import DEFAULT_NEW_TOKENS, check_whole, gate, shown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

    from vlmfast.core.counting import ImageLayout, VideoLayout
    from vlmfast.engine.engine import Engine
    from vlmfast.engine.handle import Handle
    from vlmfast.engine.prefix_cache import PrefixCache
    from vlmfast.media.types import ImageLike, VideoLike
    from vlmfast.models.base import Model

    from .session import Session

__all__ = ["VLM", "Answer", "Comparison", "ComparisonTable", "Request", "agreement"]

_DECODING = ("auto", "graph", "compile", "eager")
_SHIPPED = {"tiny": Path(__file__).parents[1] / "weights" / "tiny"}


class VLM:
    """A Hugging Face vision-language model that runs recipes.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Also quantized, with adapters of PEFT, or offloaded by accelerate. Remains usable on its
        own: attention functions and hooks are installed only during a call.
    processor : transformers.ProcessorMixin
        The processor that belongs to the model.
    decoding : {"auto", "graph", "compile", "eager"}
        How decode steps run: as CUDA graphs, captured once per shape (``auto`` on a GPU), through
        ``torch.compile``, or eagerly (``auto`` on a CPU).
    prefix_cache_bytes : int, optional
        Upper bound on the prefix cache, in which requests share the features of their images, and
        keys and values of the beginnings of their prompts; 0 turns it off. By default a tenth of
        the memory of the device.

    Raises
    ------
    ModelError
        For an unsupported family, a processor without an image processor, weights that are not
        loaded, or parts on several devices that must be on one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        *,
        decoding: str = "auto",
        prefix_cache_bytes: int | None = None,
    ) -> None:
        from vlmfast.engine.prefix_cache import default_limit
        from vlmfast.models import adapter_for

        from .session import Sessions

        if decoding not in _DECODING:
            raise VLMFastError(f"decoding={decoding!r} must be one of {', '.join(_DECODING)}")
        self.adapter = adapter_for(model, processor)
        if decoding == "graph" and self.adapter.device.type != "cuda":
            raise VLMFastError(
                f"decoding='graph' needs a CUDA device, and the model is on {self.adapter.device}"
            )
        if decoding == "graph" and not self.adapter.capturable:
            raise VLMFastError(
                "decoding='graph' needs a model on one device, without offloaded weights and "
                "without LLM.int8 of bitsandbytes; use decoding='auto'"
            )
        self.adapter.decoding, self.adapter.writer = decoding, processor
        self.model, self.processor = cast("Model", model), processor
        _check_bytes("prefix_cache_bytes", prefix_cache_bytes)
        limit = default_limit(self.adapter) if prefix_cache_bytes is None else prefix_cache_bytes
        self.prefix_cache.limit = int(limit)
        self._sessions = Sessions(self.adapter)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        prefix_cache_bytes: int | None = None,
        **kwargs: Any,
    ) -> VLM:
        """Load a checkpoint and its processor.

        Parameters
        ----------
        name : str or Path
            ``"tiny"`` (the shipped model), a local folder, or a hub id.
        device : str, optional
            By default a CUDA device if one is available, else the CPU. Not together with
            ``device_map``.
        dtype : str or torch.dtype
            ``"auto"`` keeps the checkpoint's dtype.
        prefix_cache_bytes : int, optional
            As in `VLM`.
        **kwargs
            Passed to Hugging Face's ``from_pretrained`` (``revision``, ``quantization_config``,
            ``device_map``, ...).

        Raises
        ------
        ModelError
            If the checkpoint does not exist, has no processor, is of an unsupported family, or its
            weights do not fit.
        """
        from vlmfast.models._loading import load

        _check_bytes("prefix_cache_bytes", prefix_cache_bytes)
        path = _SHIPPED.get(str(name), name)
        loaded = load(path, device, dtype, **kwargs)
        return cls(*loaded, prefix_cache_bytes=prefix_cache_bytes)

    def __repr__(self) -> str:
        model, device = self.model, self.adapter.device
        kind = type(model).__name__
        name = getattr(model.config, "_name_or_path", "") or kind
        name = Path(name).name if Path(name).is_absolute() else name
        dtype = str(model.dtype).removeprefix("torch.")
        parameters = brief_count(model.num_parameters())
        return f"VLM({name}, {kind}, {parameters} parameters, {dtype} on {device})"

    @property
    def prefix_cache(self) -> PrefixCache:
        """What requests share; ``stats()`` describes it, ``clear()`` empties it."""
        from vlmfast.engine.prefix_cache import prefix_cache_of

        return prefix_cache_of(self.adapter)

    def recipe(self, recipe: str | Stage | Recipe | None) -> Recipe:
        """Parse a recipe for this model.

        Parameters
        ----------
        recipe : str, Stage, Recipe or None
            ``"auto"`` is the recipe that `vlmfast tune` chose for this model.

        Raises
        ------
        RecipeError
            For an unknown method or parameter, a value out of range or stages in the wrong order,
            and for ``"auto"`` if no choice is stored.
        """
        from .request import recipe_of

        return recipe_of(self.adapter, recipe)

    def image_layout(self, size: tuple[int, int], *, alone: bool = True) -> ImageLayout:
        """The visual tokens of an image, from its size; for `exact_count`.

        The processor runs on a blank image, and the model does not run.

        Parameters
        ----------
        size : (int, int)
            Height and width in pixels.
        alone : bool
            Whether it is the only image of its prompt: LLaVA-OneVision does not crop several.

        Raises
        ------
        VLMFastError
            `MediaError` for a size that an image cannot have, `ModelError` if the family comes
            from another package and does not define the layouts of its tokens.
        """
        from .layouts import image_layout

        return image_layout(self.adapter, size, alone)

    def video_layout(
        self, size: tuple[int, int], frames: int, *, fps: float | None = None
    ) -> VideoLayout:
        """The visual tokens of a video, from its size; for `exact_count` and `exact_counts`.

        Parameters
        ----------
        size : (int, int)
            Height and width of each frame in pixels.
        frames : int
            How many are read.
        fps : float, optional
            Their rate, one per second by default. The number of tokens does not depend on it.

        Raises
        ------
        VLMFastError
            As of `image_layout`.
        """
        from .layouts import video_layout

        return video_layout(self.adapter, size, frames, fps)

    # --- questions -------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        images: ImageLike | Sequence[ImageLike] | None = None,
        video: VideoLike | None = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
        recipe: str | Stage | Recipe | None = None,
        max_kv_tokens: int | None = None,
        progress: bool = True,
        **generation: Any,
    ) -> Answer:
        """Answer a question about images or a video.

        Parameters
        ----------
        question : str
        images : image or list of images, optional
            PIL image, path, URL, bytes, NumPy array or torch tensor.
        video : path, bytes, list of frames or VideoFrames, optional
        num_frames, fps : optional
            Number of frames, or frames per second, to read; 8 frames if neither is given. Of a
            list all frames are read, and ``fps`` states their rate: without times, they count as
            one second apart.
        timestamps : list of float, optional
            The second at which each frame of a list is shown, in place of ``fps``.
        recipe : str, Stage or Recipe, optional
            Which tokens are dropped; none by default.
        max_kv_tokens : int, optional
            Prefill the video block by block, so that no layer ever caches more tokens. Each block
            is compressed by the recipe's block-wise cache method, or by ``quickprefill``. The
            answer then has no trace.
        progress : bool
            Whether to show a progress bar for such a video.
        **generation
            Hugging Face's generation arguments (``max_new_tokens``, ``do_sample``, ...).

        Raises
        ------
        VLMFastError
            `MediaError` for images and videos that cannot be read, `RecipeError` for a recipe
            that cannot run on this model.
        """
        from .request import ASK, answered, messages_of

        recipe, passed = self.recipe(recipe), gate(self.adapter, generation, names=ASK)
        if max_kv_tokens is not None:
            from .long_video import answer_long

            if video is None or images is not None:
                raise VLMFastError("max_kv_tokens is for video= alone")
            source = (video, num_frames, fps, timestamps)
            return answer_long(
                self.adapter, question, source, recipe, max_kv_tokens, passed, progress=progress
            )
        messages = messages_of(question, images, video, num_frames, fps, timestamps)
        return answered(self.adapter, messages, recipe, passed)

    def chat(
        self, messages: list[dict], *, recipe: str | Stage | Recipe | None = None, **generation: Any
    ) -> Answer:
        """Answer the last turn of a conversation in Hugging Face's chat schema.

        A content entry ``{"type": "image", ...}`` gives its image under ``image``, ``path``,
        ``url`` or ``base64``. ``{"type": "video", ...}`` gives its video under ``video``, ``path``
        or ``url``, optionally with ``num_frames``, ``fps`` or ``timestamps``. Other keys are
        refused, except those whose value is ``None``.

        The chat template sees texts and lists of entries as Hugging Face's ``apply_chat_template``
        shows them. A turn may consist of an image alone; methods that read the question then read
        the last text of a user, else of the system.
        """
        from .request import CHAT, answered

        recipe, passed = self.recipe(recipe), gate(self.adapter, generation, names=CHAT)
        return answered(self.adapter, messages, recipe, passed)

    def stream(
        self,
        question: str,
        images: ImageLike | Sequence[ImageLike] | None = None,
        video: VideoLike | None = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
        recipe: str | Stage | Recipe | None = None,
        **generation: Any,
    ) -> Generator[str | Answer, None, None]:
        """Stream an answer: like `ask`, but yields ``str`` pieces and finally the `Answer`."""
        from .request import ASK, OF_ASK, check_streamer, messages_of, streamed

        recipe = self.recipe(recipe)
        passed = gate(self.adapter, generation, names=ASK, elsewhere=OF_ASK)
        check_streamer(passed)
        messages = messages_of(question, images, video, num_frames, fps, timestamps)
        return streamed(self.adapter, messages, recipe, passed)

    def submit(
        self,
        request: Request | str,
        *,
        priority: int = 0,
        deadline: float | None = None,
        default_new_tokens: int = DEFAULT_NEW_TOKENS,
        **generation: Any,
    ) -> Handle[Answer]:
        """Queue a request, and return without waiting for its answer.

        Any thread may call this. Requests that were submitted are answered together, with those of
        `ask`, `stream`, `ask_many` and sessions of this `VLM`.

        >>> handles = [vlm.submit(Request("What is this?", path)) for path in paths]
        >>> answers = [handle.result() for handle in handles]

        Parameters
        ----------
        request : Request or str
            A ``str`` is a question without an image. Its media are read before this returns.
        priority : int
            Lower values are answered first.
        deadline : float, optional
            Seconds from now, reading the media included, after which the request is given up.
        default_new_tokens : int
            Length of the answer where neither the request nor the checkpoint sets one; less where
            the model has not as many positions.
        **generation
            Defaults; the request's own ``generation`` overrides them.

        Returns
        -------
        Handle
            ``handle.result(timeout)`` waits for the `Answer`, ``handle.cancel()`` ends the
            request, and iterating over it yields the text in pieces and finally the `Answer`.

        Raises
        ------
        VLMFastError
            For a request that cannot be answered.
        """
        from .request import sequence_of_request, submitted

        check_whole("priority", priority)
        check_whole("default_new_tokens", default_new_tokens, 1)
        timed = isinstance(deadline, Real) and not isinstance(deadline, bool)
        if deadline is not None and not (timed and deadline > 0):
            raise VLMFastError(f"deadline={shown(deadline)} must be a number above 0")
        start = time.monotonic()
        sequence = sequence_of_request(
            self.adapter, request, generation, default_new_tokens=default_new_tokens
        )
        if deadline is not None:
            deadline -= time.monotonic() - start
        handle = None
        try:
            handle = submitted(self.adapter, sequence, priority=priority, deadline=deadline)
            self.engine.start()
            return handle
        except BaseException:  # interrupted: no one waits for it
            if handle is not None:
                handle.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine that answers the requests; ``max_rows`` and ``max_cache_bytes`` bound it."""
        from vlmfast.engine.engine import engine_of

        return engine_of(self.adapter)

    def compare(
        self,
        question: str,
        images: ImageLike | Sequence[ImageLike] | None = None,
        video: VideoLike | None = None,
        *,
        recipes: Sequence[str | Stage | Recipe | None],
        num_frames: int | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
        errors: str = "row",
        **generation: Any,
    ) -> ComparisonTable:
        """Answer with the full model first, then under each recipe.

        Images and videos are decoded once. Everything else is computed for each recipe, without the
        prefix cache.

        Parameters
        ----------
        question, images, video, num_frames, fps, timestamps : optional
            As in `ask`.
        recipes : list of str, Stage or Recipe
        errors : {"row", "raise"}
            Whether a recipe that is invalid, or that this model refuses, becomes a row with its
            ``error`` and without an answer, or is raised. The first error is always raised if every
            recipe was refused.
        **generation
            As in `ask`.

        Returns
        -------
        ComparisonTable
            A list of `Comparison`: the full model, then the recipes in their order.

        Raises
        ------
        VLMFastError
            For a request that the full model cannot answer, or see ``errors``.
        """
        from .comparing import compared
        from .request import messages_of

        messages = partial(messages_of, question, images, video, num_frames, fps, timestamps)
        return compared(self.adapter, messages, recipes, errors, generation)

    @overload
    def ask_many(
        self,
        requests: Iterable[Request | str],
        *,
        batch_size: int = ...,
        errors: Literal["raise"] = ...,
        **generation: Any,
    ) -> list[Answer]: ...

    @overload
    def ask_many(
        self,
        requests: Iterable[Request | str],
        *,
        batch_size: int = ...,
        errors: Literal["keep"],
        **generation: Any,
    ) -> list[Answer | Exception]: ...

    def ask_many(
        self,
        requests: Iterable[Request | str],
        *,
        batch_size: int = 8,
        errors: Literal["raise", "keep"] = "raise",
        **generation: Any,
    ) -> Any:
        """Answer many questions, up to ``batch_size`` of them decoded together.

        Every request has its own images, recipe, length and stopping criteria. Prompts are
        prefilled one at a time without padding, so each greedy answer equals that of `ask`. Sampled
        answers draw from one random stream in the order of the batch.

        Parameters
        ----------
        requests : iterable of Request or str
            Consumed as batch rows become free. A ``str`` is a question without an image.
        batch_size : int
        errors : {"raise", "keep"}
            Whether the first error is raised and cancels the other requests, or stands in the
            place of its answer.
        **generation
            Defaults for all requests; a request's own ``generation`` overrides them.

        Returns
        -------
        list of Answer
            In the order of the requests; with ``errors="keep"`` also exceptions.

        Raises
        ------
        VLMFastError
            For the first request that cannot be answered; the message gives its number.
        """
        from .request import answer_of, sequences_of

        check_whole("batch_size", batch_size, 1)
        if isinstance(requests, str | bytes | Request | Mapping | torch.Tensor) or not isinstance(
            requests, Iterable
        ):
            raise VLMFastError(
                f"requests={shown(requests)} must be a list of vlmfast.Request or of questions"
            )
        if errors not in ("raise", "keep"):
            raise VLMFastError(f"errors={shown(errors)} must be 'raise' or 'keep'")
        found: dict[int, Any] = {}
        failed = found if errors == "keep" else None
        sequences = sequences_of(self.adapter, requests, generation, failed)
        keep = errors == "keep"
        with closing(self.engine.answer_many(sequences, batch_size, keep_errors=keep)) as ended:
            for sequence in ended:
                error = sequence.error
                answer = answer_of(self.adapter, sequence) if error is None else error
                found[sequence.number] = answer
        return [found[number] for number in sorted(found)]

    # --- sessions --------------------------------------------------------------------------------

    def session(
        self,
        images: ImageLike | Sequence[ImageLike] | None = None,
        video: VideoLike | None = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
        recipe: str | Stage | Recipe | None = None,
        history: bool = True,
        tenant: str = "",
    ) -> Session:
        """Open a session: encode images once and, if the recipe allows, prefill them once.

        Parameters
        ----------
        images, video, num_frames, fps, timestamps, recipe : optional
            As in `ask`.
        history : bool
            Whether each question sees the previous ones and their answers, as in `chat`. Otherwise
            every question is independent, as in `ask`.
        tenant : str
            As in `Request`.

        Returns
        -------
        Session
            ``session.reuses`` tells what questions share. Close it, or use a ``with`` statement.

        Raises
        ------
        VLMFastError
            As `ask`, for images and recipes that cannot be used.
        """
        from .request import check_tenant
        from .session import Session

        recipe = self.recipe(recipe)
        check_tenant(tenant)
        media = images, video, num_frames, fps, timestamps
        return Session._open(self._sessions, *media, recipe, history, tenant)

    def load_session(
        self, path: str | Path, *, recipe: str | Stage | Recipe | None = None
    ) -> Session:
        """Load a session that `Session.save` wrote, and continue it.

        This costs as much as opening it: the images are encoded and, if the recipe allows,
        prefilled. The first question also prefills the conversation so far. In float32, answers
        have the ids that those of the saved session would have had. Methods that change the cache
        in decode (`DecodeStage`) are the exception: earlier answers are prefilled instead of
        decoded, so other tokens of them may be kept.

        Parameters
        ----------
        path : str or Path
        recipe : str, Stage or Recipe, optional
            The recipe that the session must have been saved under; any by default.

        Raises
        ------
        VLMFastError
            For a file that is damaged or not a session; `ModelError` if it was saved with another
            model, `RecipeError` if it was saved under another recipe than ``recipe``.
        """
        from .session import Session

        return Session._load(self._sessions, path, recipe)

    # --- preparation -----------------------------------------------------------------------------

    def warmup(
        self,
        recipe: str | Stage | Recipe | None = None,
        images: ImageLike | Sequence[ImageLike] | None = None,
        video: VideoLike | None = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
        max_new_tokens: int = 8,
    ) -> float:
        """Answer one question, so that later ones need not wait for what happens once.

        On a GPU these are the compilation of the kernels that the recipe needs, and the capture
        of the decode step of one row; on all devices, memory and tables of the libraries. A step
        is captured for the size of the cache: images like those that will follow prepare theirs.

        Parameters
        ----------
        recipe, images, video, num_frames, fps, timestamps : optional
            As in `ask`; a gray image of 336 x 336 by default.
        max_new_tokens : int
            Decode steps to run; drafters need several.

        Returns
        -------
        float
            Seconds that it took.

        Raises
        ------
        VLMFastError
            As `ask`.
        """
        from PIL import Image

        if images is None and video is None:
            images = Image.new("RGB", (336, 336), "gray")
        start = time.perf_counter()
        with self.prefix_cache.bypassed():
            self.ask(
                "What is this?",
                images,
                video,
                num_frames=num_frames,
                fps=fps,
                timestamps=timestamps,
                recipe=recipe,
                max_new_tokens=max_new_tokens,
                eos_token_id=None,
            )
        return time.perf_counter() - start

    # --- inputs ----------------------------------------------------------------------------------

    def inputs(
        self,
        question: str,
        images: ImageLike | Sequence[ImageLike] | None = None,
        video: VideoLike | None = None,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Build the tensors of `ask`; ``vlm.model.generate(**inputs)`` runs the full model."""
        from .request import messages_of, render, tensors_of

        messages = messages_of(question, images, video, num_frames, fps, timestamps)
        return tensors_of(self.adapter, render(self.adapter, messages, Recipe()))


def _check_bytes(name: str, bytes: int | None) -> None:
    if bytes is not None:
        check_whole(name, bytes, 0)
