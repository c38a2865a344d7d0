"""Engines of vLLM in this process, and what `VLM.ask` answers."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
vllm = pytest.importorskip("vllm", reason="make test-vllm builds its environment")

from vlmfast import VLM, Recipe  # noqa: E402
from vlmfast.eval.axes import with_field  # noqa: E402
from vlmfast.media import load_video  # noqa: E402

NEW_TOKENS = 12
Case = tuple[str, list[Image.Image]]


class Engine:
    """Holds the only reference to an engine: vLLM shuts it down when it is collected."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, *args: Any, **options: Any) -> list[Any]:
        return self.llm.generate(*args, use_tqdm=False, **options)

    def chat(self, *args: Any, **options: Any) -> list[Any]:
        return self.llm.chat(*args, use_tqdm=False, **options)

    def answers(self, prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
        return tokens(self.generate(list(prompts), greedy()))

    @property
    def model(self) -> Any:
        """The model of its only worker."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model


@contextmanager
def engine(folder: Path, recipe: str | None = None, **options: Any) -> Iterator[Engine]:
    """An engine in this process; ``recipe`` as a server gets it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    overrides = {} if recipe is None else {"hf_overrides": {"vlmfast_recipe": recipe}}
    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "limit_mm_per_prompt": {"image": 3},
    }
    running = Engine(vllm.LLM(str(folder), **{**given, **overrides, **options}))
    try:
        yield running
    finally:
        running.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def greedy() -> Any:
    return vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompted(vlm: VLM, question: str, images: int, videos: int = 0) -> str:
    media = [{"type": "image"}] * images + [{"type": "video"}] * videos
    messages = [{"role": "user", "content": [*media, {"type": "text", "text": question}]}]
    text = vlm.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text.removeprefix(vlm.processor.tokenizer.bos_token or "\0")  # which `generate` adds


def named(recipe: str | None) -> dict[str, Any]:
    """What a request names its recipe by."""
    return {} if recipe is None else {"mm_processor_kwargs": {"vlmfast_recipe": recipe}}


def pictured(vlm: VLM, case: Case, recipe: str | None = None) -> dict[str, Any]:
    """A prompt about images."""
    question, images = case
    text = prompted(vlm, question, len(images))
    return {"prompt": text, "multi_modal_data": {"image": images}, **named(recipe)}


def filmed(vlm: VLM, case: Case, recipe: str | None = None) -> dict[str, Any]:
    """A prompt about a video."""
    question, shown = case
    video = load_video(shown)
    (about,) = vlm.adapter.of_videos([shown], [video.times])["video_metadata"]
    frames = np.stack([np.asarray(frame) for frame in video.frames])
    data = {"video": [(frames, {**about, "do_sample_frames": False})]}
    text = prompted(vlm, question, 0, 1)
    return {"prompt": text, "multi_modal_data": data, **named(recipe)}


def asked(
    vlm: VLM, cases: Sequence[Case], recipe: str | None, video: bool = False, compact: bool = False
) -> list[list[int]]:
    """The answers of `VLM.ask`; ``compact`` numbers tokens as vLLM counts those of LLaVAs."""
    run = with_field(Recipe.of(recipe), "positions", "compact") if compact else recipe
    media = "video" if video else "images"
    return [
        list(vlm.ask(question, **{media: of}, recipe=run, max_new_tokens=NEW_TOKENS).token_ids)
        for question, of in cases
    ]
