"""Turns the arguments of a request into a sequence that the engine answers.

Messages and generation arguments (`generation`) are checked, media are read, the chat template
writes the prompt, and the processor makes tensors of both. A request that cannot be answered is
rejected as early as possible: arguments before any image is read, a text that is too long before
the processor runs, a prompt that is too long before the vision tower runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vlmfast.core.params import check_keys, nearest
from vlmfast.core.protocols import EncodeStage, MediaStage, tower_stages
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import Stage
from vlmfast.engine.engine import engine_of
from vlmfast.engine.features import hashed
from vlmfast.engine.handle import Handle, pieces_of, result_of
from vlmfast.engine.opening import open_sequence
from vlmfast.engine.prefill import Inputs
from vlmfast.engine.prefiller import too_long
from vlmfast.engine.prefix_cache import prefix_cache_of
from vlmfast.engine.sequence import Sequence
from vlmfast.engine.stats import Stats
from vlmfast.errors import MediaError, VLMFastError, is_out_of_memory, one_line
from vlmfast.models.base import Adapter

from .answer import Answer, Request
from .generation import DEFAULT_NEW_TOKENS, Generation, gate, shown
from .stored_recipe import AUTO, stored_recipe
from .template import templated

if TYPE_CHECKING:
    from PIL import Image

    from vlmfast.media import FrameTimes
    from vlmfast.media.types import ImageLike, VideoLike

# Parameters of the public methods, suggested for misspelt arguments.
ASK = (
    *("question", "images", "video", "num_frames", "fps", "timestamps"),
    *("recipe", "max_kv_tokens", "progress"),
)
CHAT = ("messages", "recipe")
OF_ASK = dict.fromkeys(("max_kv_tokens", "progress"), "it is an argument of VLM.ask")
# Keys of content entries by type: those of which one holds the content, and settings.
_SOURCES = {
    "text": ("text",),
    "image": ("image", "path", "url", "base64"),
    "video": ("video", "path", "url"),
}
_SETTINGS = {"video": ("num_frames", "fps", "timestamps")}
_SLACK = 16  # extra tokens that cutting a text may produce at its end


@dataclass
class Rendered:
    """A prompt in the form that the processor takes.

    Parameters
    ----------
    text : str
    images : list of PIL.Image.Image
        RGB, one for each placeholder in the text, frames of videos included.
    frames : list of tuple
        The video that each is a frame of, as in `engine.prefill.Inputs`.
    times : list of FrameTimes
        Of each video.
    question : str
        Text of the last user turn.
    """

    text: str
    images: list[Image.Image] = field(default_factory=list)
    frames: list[tuple] = field(default_factory=list)
    times: list[FrameTimes] = field(default_factory=list)
    question: str = ""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each image in pixels."""
        return [(image.height, image.width) for image in self.images]


def recipe_of(adapter: Adapter, recipe: str | Stage | Recipe | None) -> Recipe:
    """Parse a recipe for a model; ``auto`` depends on its weights."""
    if isinstance(recipe, str) and recipe.strip() == AUTO:
        return stored_recipe(adapter)
    return Recipe.of(recipe)


# --- messages ------------------------------------------------------------------------------------


def messages_of(
    question: str | None,
    images: ImageLike | Many[ImageLike] | None = None,
    video: VideoLike | None = None,
    num_frames: int | None = None,
    fps: float | None = None,
    timestamps: Many[float] | None = None,
) -> list[dict]:
    """A question about images or a video in Hugging Face's chat schema."""
    check_question(question)
    media = media_of(images, video, num_frames, fps, timestamps)
    content = [*media, {"type": "text", "text": question}] if media else question
    return [{"role": "user", "content": content}]


def media_of(
    images: ImageLike | Many[ImageLike] | None,
    video: VideoLike | None,
    num_frames: int | None,
    fps: float | None,
    timestamps: Many[float] | None,
) -> list[dict]:
    """Content entries of images and a video."""
    frames = {"num_frames": num_frames, "fps": fps, "timestamps": timestamps}
    if video is None and any(value is not None for value in frames.values()):
        raise VLMFastError("timestamps, num_frames and fps are for video=, and no video was given")
    if images is None:
        images = []
    entries = [
        {"type": "image", "image": image}
        for image in (images if isinstance(images, list | tuple) else [images])
    ]
    if video is not None:
        entries.append({"type": "video", "video": video, **frames})
    return entries


def check_question(question: object) -> None:
    """Raise unless a question is a text that is not blank."""
    if not isinstance(question, str):
        raise VLMFastError(f"question={shown(question)} must be a text")
    if not question.strip():
        raise VLMFastError("question is empty; it must be a text with at least one letter")


def check_messages(adapter: Adapter, messages: object) -> None:
    """Check messages against the supported part of Hugging Face's chat schema.

    Raises
    ------
    VLMFastError
        Also for a text that contains a placeholder of the model, or exceeds its positions.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise VLMFastError("messages must be a list of at least one turn")
    for turn in messages:
        if not isinstance(turn, dict) or "role" not in turn:
            raise VLMFastError(f"a turn must be a dict with a role and content, not {shown(turn)}")
        if not isinstance(turn["role"], str) or not turn["role"].strip():
            raise VLMFastError(f"role={shown(turn['role'])} must be a name such as 'user'")
        check_keys("a turn", _given(turn), ("role", "content"))
        content = turn.get("content")
        if isinstance(content, str):
            continue
        if not isinstance(content, list | tuple) or not all(isinstance(p, dict) for p in content):
            raise VLMFastError("the content of a turn must be a text, or a list of dicts")
        for part in content:
            _content(part)
    last = next((turn for turn in reversed(messages) if turn["role"] == "user"), None)
    if last is None or not (_text(last).strip() or len(_texts(last)) < len(_parts(last))):
        raise VLMFastError("the last user turn has no text and no image")
    check_texts(adapter, [text for turn in messages for text in _texts(turn)])


def check_texts(adapter: Adapter, texts: list[str]) -> None:
    """Raise if texts contain placeholders or are too long for a prompt."""
    marks = placeholder_texts(adapter)
    for text in texts:
        for mark in marks:
            if mark in text:
                raise VLMFastError(
                    f"the text {shown(text)} contains {mark}, the placeholder of an image or a "
                    "video in prompts of this model; write it in another way"
                )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise VLMFastError(
                f"the text {shown(text)} contains half of a character (a lone surrogate)"
            ) from error
    most = adapter.max_positions
    if most is None or sum(map(len, texts)) <= most:
        return
    tokens = 0
    for text in texts:
        tokens += _tokens(adapter, text, most)
        if tokens >= most:
            raise too_long(tokens, 1, most, least=True)


def placeholder_texts(adapter: Adapter) -> tuple[str, ...]:
    """The placeholders of images and videos, as text."""
    tokenizer, found = adapter.processor.tokenizer, list(adapter.marks())
    for token in adapter.placeholders():
        if 0 <= token < len(tokenizer):
            found.append(tokenizer.convert_ids_to_tokens(token))
    return tuple(dict.fromkeys(mark for mark in found if mark))


def _tokens(adapter: Adapter, text: str, most: int) -> int:
    """Number of tokens of a text, or a lower bound above ``most``.

    The beginning is counted before the whole, since tokenizing a long text is expensive.
    """
    stop = 8 * most
    while True:
        found = adapter.processor.tokenizer(text[:stop], add_special_tokens=False).input_ids
        if stop >= len(text):
            return len(found)
        if len(found) - _SLACK > most:
            return len(found) - _SLACK
        stop *= 2


def question_of(messages: Many[dict]) -> str:
    """Text of the last user turn with one; else of another turn that is not an answer."""
    turns = sorted(messages, key=lambda turn: turn["role"] == "user")[::-1]
    texts = (_text(turn) for turn in turns if turn["role"] != "assistant")
    return next((text for text in texts if text.strip()), "")


def _parts(turn: dict) -> list[dict]:
    """The content entries of a turn; a text is one."""
    content = turn["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(turn: dict) -> list[str]:
    return [part["text"] for part in _parts(turn) if part["type"] == "text"]


def _text(turn: dict) -> str:
    return "".join(_texts(turn))


def _given(entry: dict) -> list[Any]:
    """Keys with a value: Hugging Face's processors drop the others."""
    return [key for key, value in entry.items() if value is not None]


def _content(part: dict) -> Any:
    """The text or the medium of a content entry.

    Raises
    ------
    VLMFastError
        Unless exactly one of its keys holds it, and all others are known.
    """
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _SOURCES:
        similar = nearest(kind, list(_SOURCES)) if isinstance(kind, str) else ""
        raise VLMFastError(
            f"content type {shown(kind)} is not known{similar}; allowed are text, image and video"
        )
    about, sources, given = f"a content entry of type {kind}", _SOURCES[kind], _given(part)
    check_keys(about, given, ("type", *sources, *_SETTINGS.get(kind, ())))
    found = [key for key in sources if key in given]
    if len(found) > 1:
        raise VLMFastError(f"{about} has {' and '.join(found)}; give one of them")
    value = part[found[0]] if found else None
    if kind == "text" and not isinstance(value, str):
        raise VLMFastError("a content entry of type text needs its text under 'text'")
    if not found:
        raise VLMFastError(f"{about} needs one of {', '.join(sources)}")
    return f"data:;base64,{value}" if found[0] == "base64" else value


# --- media and template --------------------------------------------------------------------------


def render(
    adapter: Adapter, messages: list[dict], recipe: Recipe, loaded: dict[int, Any] | None = None
) -> Rendered:
    """Read the media of a conversation and write its prompt; ``loaded`` is as in `read_media`."""
    check_messages(adapter, messages)
    prompt = Rendered("", question=question_of(messages))
    select = chooser(recipe, prompt.question)
    plain = [
        {
            "role": turn["role"],
            "content": read_media(adapter, turn["content"], prompt, select, loaded),
        }
        for turn in messages
    ]
    prompt.text = templated(adapter, plain)
    marks = adapter.marks()
    placeholders = sum(map(prompt.text.count, marks))
    images, videos = adapter.parted(prompt.images, prompt.frames)
    if placeholders != len(images) + len(videos):
        raise MediaError(
            f"the prompt has {placeholders} image placeholders ({', '.join(marks)}) "
            f"and {len(images) + len(videos)} images were given"
        )
    return prompt


def chooser(recipe: Recipe, question: str) -> Callable | None:
    """The function that chooses the frames of a video, if a stage of the recipe does."""
    stages = recipe.acting(MediaStage)
    return partial(stages[0].frames, question=question) if stages else None


def read_media(
    adapter: Adapter,
    content: Any,
    prompt: Rendered,
    select: Any,
    loaded: dict[int, Any] | None = None,
) -> Any:
    """Return the content of a turn without its media, which are appended to ``prompt``.

    Parameters
    ----------
    loaded : dict, optional
        Media by the ``id`` of their content entry. Those in it are not decoded again, others are
        added. Videos whose frames a stage chooses are not in it.
    """
    from vlmfast.media import load_image, load_video

    if isinstance(content, str):
        return content
    plain: list[dict] = []
    loaded = {} if loaded is None else loaded
    for part in content:
        kind, source = part.get("type"), _content(part)
        if kind == "text":
            plain.append({"type": "text", "text": source})
        elif kind == "image":
            if id(part) not in loaded:
                loaded[id(part)] = load_image(source)
            prompt.images.append(loaded[id(part)])
            prompt.frames.append((-1, 0, 1))
            plain.append({"type": "image"})
        else:
            listed = isinstance(source, list | tuple)  # its rate chooses no frames
            if select and (part.get("num_frames") or (part.get("fps") and not listed)):
                raise VLMFastError(
                    "the recipe has a stage that chooses the frames; "
                    "num_frames and fps cannot be given too"
                )
            video = None if select else loaded.get(id(part))
            if video is None:
                video = load_video(
                    source,
                    num_frames=part.get("num_frames"),
                    fps=part.get("fps"),
                    timestamps=part.get("timestamps"),
                    select=select,
                )
            if not select:
                loaded[id(part)] = video
            if adapter.video_tensors:
                plain.append({"type": "video"})
            else:
                plain += frame_parts(adapter, video.times)
            prompt.images += video.frames
            number, total = len(prompt.times), len(video)
            prompt.frames += [(number, index, total) for index in range(total)]
            prompt.times.append(video.times)
    return plain


def frame_parts(adapter: Adapter, times: FrameTimes) -> list[dict]:
    """Content entries of a video that is read as images, with the family's labels of frames."""
    plain: list[dict] = []
    for index, seconds in enumerate(times.timestamps_s):
        before, after = adapter.frame_labels(index, seconds)
        plain += [{"type": "text", "text": before}] if before else []
        plain.append({"type": "image"})
        plain += [{"type": "text", "text": after}] if after else []
    return plain


# --- sequences -----------------------------------------------------------------------------------


def tensors_of(adapter: Adapter, prompt: Rendered) -> dict[str, torch.Tensor]:
    """The processor's output for a prompt, on the model's device."""
    return adapter.inputs(prompt.text, prompt.images, prompt.frames, prompt.times)


def check_length(
    adapter: Adapter, tensors: dict[str, torch.Tensor], recipe: Recipe, generation: Generation
) -> None:
    """Reject a prompt that exceeds the model's positions, whatever the recipe drops."""
    ids, most = tensors["input_ids"], adapter.max_positions
    max_new_tokens = generation.max_new_tokens(ids.shape[1])
    if max_new_tokens < 1:
        raise VLMFastError(
            f"max_length={generation.config.max_length} leaves no token for the answer: the prompt "
            f"has {ids.shape[1]}"
        )
    least = max_new_tokens if generation.explicit else 1
    if most is None or ids.shape[1] + least <= most:
        return  # prompts with more positions than tokens are checked where positions are counted
    closing = (*tower_stages(recipe), *recipe.acting(EncodeStage))
    if any(getattr(stage, "positions", "keep") == "compact" for stage in closing):
        visual = adapter.visual(ids[0])
        taken = int((~visual).sum()) + int(visual.any())
    else:
        taken = int(adapter.positions(tensors).max()) + 1
    if taken + least > most:
        raise too_long(taken, least, most, least=True)


def identify(adapter: Adapter, inputs: Inputs) -> None:
    """Hash the images of a prompt for the prefix cache, before the engine is occupied by it."""
    has_pixels = any(key.startswith("pixel_values") for key in inputs.tensors)
    if has_pixels and prefix_cache_of(adapter).enabled:
        if inputs.items is None:
            inputs.items = adapter.items(inputs.tensors, inputs.sizes, inputs.frames)
        inputs.hashed = hashed(adapter, inputs.tensors, inputs.items)


def opened(
    adapter: Adapter,
    inputs: Inputs,
    recipe: Recipe,
    begin: float,
    generation: Generation,
    *,
    whole: bool = True,
    **more: Any,
) -> Sequence:
    """Open the sequence of a prompt; nothing is computed yet.

    Errors of Hugging Face become `VLMFastError`.

    Parameters
    ----------
    whole : bool
        Whether its tokens must fit into the positions of the model at once.
    begin, **more
        Passed to `engine.opening.open_sequence`.
    """
    if whole:
        check_length(adapter, inputs.tensors, recipe, generation)
        identify(adapter, inputs)
    try:
        return open_sequence(
            adapter,
            inputs,
            recipe,
            generation.for_loop(),
            begin=begin,
            streamer=generation.streamer,
            seed=generation.seed,
            top_logprobs=generation.top_logprobs,
            strict=generation.strict,
            cut=not generation.explicit,
            **more,
        )
    except VLMFastError:
        raise
    except ValueError as error:
        raise VLMFastError(f"generation arguments were rejected: {one_line(error)}") from error


def sequence_of(
    adapter: Adapter,
    messages: list[dict],
    recipe: Recipe,
    generation: Generation,
    number: int = 0,
    *,
    tenant: str = "",
    loaded: dict[int, Any] | None = None,
) -> Sequence:
    """Read and process the media of a conversation; nothing is computed yet.

    Parameters
    ----------
    tenant : str
        As in `answer.Request`.
    loaded : dict, optional
        As in `read_media`.
    """
    start = time.perf_counter()
    prompt = render(adapter, messages, recipe, loaded)
    read = time.perf_counter()
    begin = time.perf_counter()
    inputs = Inputs(
        tensors_of(adapter, prompt), prompt.sizes, prompt.question, prompt.frames, tenant=tenant
    )
    spent = Stats(time_media_s=read - start, time_processor_s=time.perf_counter() - begin)
    more: dict[str, Any] = {"number": number, "stats": spent, "images": prompt.images}
    return opened(adapter, inputs, recipe, begin, generation, **more)


def sequences_of(
    adapter: Adapter,
    requests: Iterable[Request | str],
    generation: dict[str, Any],
    failed: dict[int, Any] | None,
) -> Iterator[Sequence]:
    """Open the sequences of requests; errors are put into ``failed``, if it is given."""
    for number, request in enumerate(requests):
        try:
            sequence = sequence_of_request(adapter, request, generation, number)
        except Exception as error:
            named = isinstance(error, VLMFastError)
            if failed is not None and (named or is_out_of_memory(error)):
                failed[number] = error
                continue
            if named:
                raise type(error)(f"request {number}: {error}") from error
            error.add_note(f"request {number}")
            raise
        yield sequence


def sequence_of_request(
    adapter: Adapter,
    request: object,
    generation: dict[str, Any],
    number: int = 0,
    *,
    default_new_tokens: int = DEFAULT_NEW_TOKENS,
) -> Sequence:
    """Open the sequence of one request of a batch; its ``generation`` overrides the batch's."""
    one = Request(request) if isinstance(request, str) else request
    if not isinstance(one, Request):
        raise VLMFastError(f"is a {type(request).__name__}; it must be a vlmfast.Request or a str")
    if not isinstance(one.generation, dict):
        raise VLMFastError(f"generation={shown(one.generation)} must be a dict of arguments")
    recipe = recipe_of(adapter, one.recipe)
    names = [entry.name for entry in fields(Request)]
    given = {**generation, **one.generation}
    fields_of = dict.fromkeys(names, "it is a field of vlmfast.Request")
    passed = gate(adapter, given, names=names, elsewhere=fields_of, default=default_new_tokens)
    check_tenant(one.tenant)
    media = (one.images, one.video, one.num_frames, one.fps, one.timestamps)
    if one.messages is None:
        messages = messages_of(one.question, *media)
    elif one.question is not None or any(value is not None for value in media):
        raise VLMFastError("messages replace question, images and video; give one or the other")
    else:
        messages = one.messages
    return sequence_of(adapter, messages, recipe, passed, number, tenant=one.tenant)


def submitted(adapter: Adapter, sequence: Sequence, **more: Any) -> Handle[Answer]:
    """Submit a sequence; its handle gives an `Answer`. ``more`` is passed to `Engine.submit`."""
    return engine_of(adapter).submit(sequence, partial(answer_of, adapter), **more)


def answered(
    adapter: Adapter,
    messages: list[dict],
    recipe: Recipe,
    generation: Generation,
    loaded: dict[int, Any] | None = None,
) -> Answer:
    """Answer a conversation; ``loaded`` is as in `read_media`."""
    sequence = sequence_of(adapter, messages, recipe, generation, loaded=loaded)
    return result_of(lambda: submitted(adapter, sequence))


def streamed(
    adapter: Adapter, messages: list[dict], recipe: Recipe, generation: Generation
) -> Generator[str | Answer, None, None]:
    """Yield the pieces of an answer, then the answer; closing the iterator cancels the request."""
    sequence = sequence_of(adapter, messages, recipe, generation)
    yield from pieces_of(lambda: submitted(adapter, sequence))


def check_tenant(tenant: object) -> None:
    """Raise unless the name of a tenant is a text."""
    if not isinstance(tenant, str):
        raise VLMFastError(f"tenant={shown(tenant)} must be a text")


def check_streamer(generation: Generation) -> None:
    """Raise where a call that streams was given a streamer."""
    if generation.streamer is not None:
        raise VLMFastError("streamer cannot be given: stream yields the text itself")


def answer_of(adapter: Adapter, sequence: Sequence) -> Answer:
    """The `Answer` of a finished sequence."""
    text = adapter.processor.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    sampler = sequence.sampler
    return Answer(
        text.strip(),
        sequence.tokens,
        sequence.stats,
        sequence.trace,
        sequence.recipe.text,
        canonical_recipe=str(sequence.recipe),
        finish_reason=sampler.finish_reason,
        logprobs=None if sampler.top_logprobs is None else list(sampler.logprobs),
    )
