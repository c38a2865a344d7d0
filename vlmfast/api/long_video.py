"""Prefills a long video block by block into a cache of bounded size.

Each block of frames goes through the vision tower and, after the cached tokens, through the
language model. Then the recipe's block-wise cache method compresses it, and the next block follows.
Frames are decoded and processed in a thread meanwhile and are never all in memory. The text after
the video is not compressed.

If the whole prompt has more tokens than the model has positions, cached tokens get new rotary ids
without gaps whenever the next block would not fit: their keys are rotated, and the cache never
contains more tokens than there are positions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from vlmfast.core.contexts import PrefillContext
from vlmfast.core.kv import KV
from vlmfast.core.progress import Progress
from vlmfast.core.protocols import CacheStage
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class
from vlmfast.core.statistics import ColumnStats
from vlmfast.engine.engine import engine_of
from vlmfast.engine.handle import result_of
from vlmfast.engine.prefill import Inputs, prepare
from vlmfast.engine.prefiller import Prefiller, too_long
from vlmfast.engine.sequence import Prefill, Sequence
from vlmfast.engine.stats import Stats, Trace
from vlmfast.errors import MediaError, ModelError, RecipeError, VLMFastError
from vlmfast.media import OpenVideo, open_video
from vlmfast.models.base import Adapter

from .answer import Answer
from .generation import Generation, check_whole
from .request import (
    check_messages,
    chooser,
    frame_parts,
    messages_of,
    opened,
    submitted,
)
from .template import templated

if TYPE_CHECKING:
    from vlmfast.media.types import VideoLike

FRAMES = 16  # maximum per block, the group of QuickPrefill
_SHARE = 4  # a block takes at most 1 / _SHARE of the cache
HUGE = 2**62  # positions of a model without a bound


@dataclass
class Block:
    """Consecutive frames of the video, each with the text before it.

    Parameters
    ----------
    tensors : dict of str to Tensor
        The processor's output for the frames; ``input_ids`` (1, S) of this block alone.
    sizes : list of (int, int)
    first : int
        Index of the first frame in the video.
    """

    tensors: dict[str, Tensor]
    sizes: list[tuple[int, int]]
    first: int


class Positions(CacheStage):
    """Records the rotary ids that each layer keeps, by head, and changes nothing.

    Attributes
    ----------
    kept : dict of int to list of Tensor
        Rotary ids of each layer, block by block: int64, (H, N).
    """

    name: ClassVar[str] = "positions"
    blockwise: ClassVar[bool] = True
    kept: dict[int, list[Tensor]]

    def __init__(self) -> None:
        object.__setattr__(self, "kept", {})  # stages are frozen

    def compress(
        self, context: PrefillContext, layer: int, kv: KV, stats: ColumnStats | None
    ) -> KV:
        self.kept.setdefault(layer, []).append(kv.position)
        return kv


def answer_long(
    adapter: Adapter,
    question: str,
    source: tuple[VideoLike, int | None, float | None, Many[float] | None],
    recipe: Recipe,
    max_kv_tokens: int,
    generation: Generation,
    *,
    progress: bool = True,
) -> Answer:
    """Answer a question about a video whose frames are never all in the cache.

    Parameters
    ----------
    source : (video, num_frames, fps, timestamps)
        As `VLM.ask` takes them.
    """
    recipe = checked(recipe, max_kv_tokens)
    video, num_frames, fps, timestamps = source
    check_messages(adapter, messages_of(question, None, *source))
    choose = chooser(recipe, question)
    chosen: Any = {"num_frames": num_frames, "fps": fps, "timestamps": timestamps}
    # The reader ends before the video is closed.
    with (
        open_video(video, **chosen, select=choose) as opening,
        ThreadPoolExecutor(1) as reader,
    ):
        content = [*frame_parts(adapter, opening.times), {"type": "text", "text": question}]
        text = templated(adapter, [{"role": "user", "content": content}])
        begin = time.perf_counter()
        long = LongVideo(adapter, opening, text, max_kv_tokens, reader, progress)
        inputs = Inputs({"input_ids": long.ids()}, question=question)
        given = adapter, inputs, recipe, begin, generation
        sequence = opened(*given, whole=False, prefill=long.prefill)
        return result_of(lambda: submitted(adapter, sequence))


def checked(recipe: Recipe, max_kv_tokens: int) -> Recipe:
    """Return the recipe with a block-wise cache method; ``quickprefill`` by default.

    Raises
    ------
    VLMFastError, RecipeError
        For an invalid bound, and for stages that need the whole prompt at once.
    """
    check_whole("max_kv_tokens", max_kv_tokens, 1)
    for stage in (part for outer in recipe for part in outer.expand()):
        if stage.protocol in ("prefill", "decode") or (
            isinstance(stage, CacheStage) and not stage.blockwise
        ):
            raise RecipeError(
                f"{stage.name} needs the whole prompt at once, and max_kv_tokens reads a video "
                "block by block; use encode stages and quickprefill instead"
            )
    if recipe.acting(CacheStage):
        return recipe
    drafters = tuple(stage for stage in recipe if stage.protocol == "drafter")
    others = tuple(stage for stage in recipe if stage.protocol != "drafter")
    return Recipe((*others, stage_class("quickprefill").from_texts({None: "1"}), *drafters))


class LongVideo:
    """A video and the text around it.

    Parameters
    ----------
    adapter : Adapter
    clip : OpenVideo
    text : str
        The rendered prompt, one placeholder per frame.
    max_kv_tokens : int
        Maximum of cached tokens per layer, including the current block and the answer.
    reader : ThreadPoolExecutor
        Decodes and processes the next block.
    progress : bool
    """

    def __init__(
        self,
        adapter: Adapter,
        video: OpenVideo,
        text: str,
        max_kv_tokens: int,
        reader: ThreadPoolExecutor,
        progress: bool,
    ) -> None:
        if not adapter.blocks:
            raise ModelError(
                f"max_kv_tokens reads a video as images, which prompts of "
                f"{adapter.config.model_type} do not allow; ask without it, with fewer frames"
            )
        if any(adapter.windows):
            raise ModelError(
                f"max_kv_tokens reads a video block by block, and layers of "
                f"{adapter.config.model_type} attend within a window, which needs the whole "
                "prompt; ask without it, with fewer frames"
            )
        self.adapter, self.video, self.cap = adapter, video, max_kv_tokens
        self.reader, self.progress = reader, progress
        self.frames = len(video.indices)
        bos = adapter.processor.tokenizer.bos_token
        ids = adapter.processor.tokenizer(
            text, add_special_tokens=not (bos and text.startswith(bos)), return_tensors="pt"
        ).input_ids[0]
        # Text before each frame, and after the last.
        marks = (ids == adapter.image_token_id).nonzero().flatten().tolist()
        starts = [0, *(mark + 1 for mark in marks)]
        self.pieces = [ids[a:b] for a, b in zip(starts, [*marks, len(ids)], strict=True)]
        if len(marks) != self.frames:
            raise MediaError(
                f"the prompt has {len(marks)} image placeholders ({adapter.image_token()}) and "
                f"{self.frames} images were given"
            )
        most = adapter.max_positions
        self.most = HUGE if most is None else most
        first = self._processed(0, 1)
        self.per_frame = int((first.tensors["input_ids"] == adapter.image_token_id).sum())
        self.block = 1

    def ids(self) -> Tensor:
        """The full prompt (1, S), placeholders included."""
        return torch.cat([self._ids(0, self.frames), self.pieces[-1]])[None].to(self.adapter.device)

    def _ids(self, start: int, stop: int) -> Tensor:
        """Ids of some frames, each with the text before it, (S,)."""
        frame = torch.full((self.per_frame,), self.adapter.image_token_id)
        return torch.cat([part for piece in self.pieces[start:stop] for part in (piece, frame)])

    def _processed(self, start: int, stop: int) -> Block:
        frames = self.video.read(start, stop)
        tensors = self.adapter.inputs(self.adapter.image_token() * len(frames), frames)
        return Block(tensors, [(f.height, f.width) for f in frames], start)

    def _blocks(self) -> Iterator[Block]:
        for start in range(0, self.frames, self.block):
            stop = min(start + self.block, self.frames)
            block = self._processed(start, stop)
            ids = self._ids(start, stop)[None].to(self.adapter.device)
            yield replace(block, tensors=block.tensors | {"input_ids": ids})

    def _plan(self, max_new_tokens: int) -> tuple[int, int]:
        """Choose the block size. Returns the number of blocks and of visual tokens to keep in all.

        The current block, the question and the answer must fit in addition. Text is never dropped,
        and each block keeps at least one visual token.
        """
        lengths, least = [len(piece) for piece in self.pieces], []
        text, last, cap = sum(lengths[:-1]), lengths[-1] + max_new_tokens, min(self.cap, self.most)
        for size in range(min(FRAMES, self.frames), 0, -1):
            starts = range(0, self.frames, size)
            ends = [min(at + size, self.frames) for at in starts]
            widest = max(
                sum(lengths[at:end]) + self.per_frame * (end - at)
                for at, end in zip(starts, ends, strict=True)
            )
            taken, block = max(widest, last) + text, size * self.per_frame * _SHARE
            least.append(max(taken + len(starts), block if size > 1 else 0))
            if cap >= least[-1]:
                self.block = size
                return len(starts), cap - taken
        if self.cap > self.most:
            raise too_long(min(least) - max_new_tokens, max_new_tokens, self.most)
        raise VLMFastError(
            f"max_kv_tokens={self.cap} is too small for {self.frames} frames of "
            f"{self.per_frame} tokens, {sum(lengths)} tokens of text and {max_new_tokens} of "
            f"answer; it must be at least {min(least)}"
        )

    def prefill(self, sequence: Sequence) -> Prefill:
        """Prefill the prompt of a sequence block by block."""
        prefiller, question = engine_of(self.adapter).prefiller, sequence.inputs.question
        max_new_tokens = sequence.max_new_tokens
        # One token per block; the rest is distributed over frames.
        blocks, space = self._plan(max_new_tokens)
        fed, kept, text_tokens, entered, flops = 0, 0, 0, 0, 0.0
        config = self.adapter.config.get_text_config()
        d, m = config.hidden_size, config.intermediate_size
        logits: Tensor | None = None
        noted = Positions()
        whole = sum(map(len, self.pieces)) + self.frames * self.per_frame
        noting = (noted,) if whole + max_new_tokens > self.most else ()
        ahead = self._blocks()
        waiting = self.reader.submit(next, ahead, None)
        with Progress("reading", self.frames, "frames", show=self.progress) as bar:
            for number in range(1, blocks + 1):
                while not waiting.done():
                    yield False
                block = waiting.result()
                assert block is not None  # the plan has counted them
                waiting = self.reader.submit(next, ahead, None)
                self._make_room(prefiller, sequence, noted, block.tensors["input_ids"].shape[1])
                inputs = Inputs(
                    block.tensors,
                    block.sizes,
                    question,
                    [(0, block.first + i, self.frames) for i in range(len(block.sizes))],
                    offset=fed,
                    start=0 if sequence.prompt is None else sequence.prompt.next_position,
                )
                own = Stats()
                prompt = prepare(self.adapter, inputs, sequence.recipe, own, Trace())
                visual = int(prompt.layout.visual.sum())
                entered += visual
                text_tokens += len(prompt.layout) - visual
                flops += visual * (4 * d * d + 2 * (kept + visual) * d + 3 * d * m)
                done = block.first + len(block.sizes)
                limit = text_tokens + number + (space - blocks) * done // self.frames - kept
                if sequence.group is None:
                    logits = prefiller.prefill(
                        sequence, prompt, max_new_tokens, limit, bounded=False, noting=noting
                    )
                else:
                    logits = prefiller.extend(
                        sequence, prompt, compress=True, limit=limit, noting=noting
                    )
                fed += prompt.full_length
                assert sequence.group is not None
                kept = max(sequence.group.cache.lengths())
                prefiller.count_block(sequence, own)
                bar.update(done)
                yield True
        assert sequence.prompt is not None and logits is not None
        self._make_room(prefiller, sequence, noted, len(self.pieces[-1]) + max_new_tokens)
        start = sequence.prompt.next_position
        prefiller.fit(sequence, start + len(self.pieces[-1]), max_new_tokens)
        if len(self.pieces[-1]):
            ids = self.pieces[-1][None].to(self.adapter.device)
            inputs = Inputs({"input_ids": ids}, offset=fed, start=start)
            text = prepare(self.adapter, inputs, Recipe(), Stats(), Trace())
            logits = prefiller.extend(sequence, text)
            fed += ids.shape[1]
        # A block attends to what is left of those before it.
        prefiller.count_blocks(sequence, fed, entered, flops * self.adapter.depth)
        return logits

    def _make_room(
        self, prefiller: Prefiller, sequence: Sequence, noted: Positions, tokens: int
    ) -> None:
        """Close the gaps between the cache's rotary ids if ``tokens`` more do not fit."""
        if sequence.prompt is None or sequence.prompt.next_position + tokens <= self.most:
            return
        old = [torch.cat(noted.kept[index], dim=1) for index in range(self.adapter.depth)]
        new = prefiller.close_up(sequence, old)
        if new is None:
            raise too_long(sequence.prompt.next_position, tokens, self.most)
        noted.kept.update({index: [position] for index, position in enumerate(new)})
