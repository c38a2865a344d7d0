"""One small case for each kind of fault that users of such libraries have reported in public.

Each names a thread about another library. Where it has more to say, other modules test the kind as
a whole.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

import tiny_families
from media_fixtures import write_video
from vlmfast import VLM, VLMFastError

SHORT: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


def image(width: int = 64, height: int = 64, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def qwen3() -> VLM:
    return VLM(*tiny_families.build_qwen3_vl())


@pytest.fixture(scope="module")
def qwen2_5() -> VLM:
    return VLM(*tiny_families.build_qwen2_5_vl())


def test_chosen_frames_are_told_apart_by_their_times(qwen3: VLM) -> None:
    """QwenLM/Qwen3-VL#2117: a list of frames was timed by its places, however it was chosen."""
    frames = [image(seed=seed) for seed in range(4)]
    evenly, unevenly = (
        qwen3.inputs("What happens?", video=frames, timestamps=times)["input_ids"][0].tolist()
        for times in ([0.9, 4.5, 8.1, 11.7], [1.8, 5.0, 7.5, 9.7])
    )
    text = qwen3.processor.tokenizer.decode(evenly)
    assert evenly != unevenly and "<2.7 seconds>" in text and "<9.9 seconds>" in text


def test_sampled_frames_have_the_times_of_the_file(qwen3: VLM, tmp_path: Path) -> None:
    """vllm-project/vllm#46988: metadata described the sampled frames instead of the video."""
    path = tmp_path / "video.mp4"
    write_video(path, 10, rate=5)
    ours = qwen3.inputs("What happens?", video=path, num_frames=4)["input_ids"][0]
    entries = [{"type": "video"}, {"type": "text", "text": "What happens?"}]
    processor, frames = qwen3.processor, [np.asarray(image())] * 4
    text = processor.apply_chat_template(
        [{"role": "user", "content": entries}], add_generation_prompt=True, tokenize=False
    )

    def theirs(indices: list[int], rate: float) -> list[int]:
        metadata = VideoMetadata(10, fps=rate, frames_indices=indices, duration=2.0)
        given = {"video_metadata": [metadata], "do_sample_frames": False}
        return processor(text=[text], videos=[frames], **given)["input_ids"][0]

    def times(ids: list[int]) -> list[str]:
        return re.findall(r"([\d.]+) seconds>", processor.tokenizer.decode(ids))

    assert times(ours) == times(theirs([0, 3, 6, 9], 5.0)) != times(theirs([0, 1, 2, 3], 0.5))


def test_templates_that_take_texts_get_texts(qwen2_5: VLM, monkeypatch) -> None:
    """vllm-project/vllm#11781: texts reached such templates as lists of entries."""
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}A:"
    monkeypatch.setattr(qwen2_5.processor, "chat_template", template)
    answer = qwen2_5.chat([{"role": "user", "content": "Hello"}], **SHORT)
    assert answer.stats.prompt_tokens == len(
        qwen2_5.processor.tokenizer("user: Hello A:").input_ids
    )


@pytest.mark.parametrize("key", ["nframes", "max_pixels"])
def test_settings_of_other_libraries_are_not_ignored(qwen2_5: VLM, key: str) -> None:
    """EvolvingLMMs-Lab/lmms-eval#571, Blaizzy/mlx-vlm#2050: frames were sampled by default."""
    entry = {"type": "video", "video": [image(), image()], key: 2}
    turn = {"role": "user", "content": [entry, {"type": "text", "text": "What happens?"}]}
    with pytest.raises(VLMFastError, match=key):
        qwen2_5.chat([turn], **SHORT)


def test_turns_of_an_image_alone(qwen2_5: VLM) -> None:
    """vllm-project/vllm#21089: parts of a conversation without text were refused."""
    turns = [
        {"role": "user", "content": "Name the color of what I send."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "image", "image": image()}]},
    ]
    assert len(qwen2_5.chat(turns, **SHORT).token_ids) == 4


def test_tiles_of_lfm2_vl(monkeypatch) -> None:
    """Blaizzy/mlx-vlm#1885: without tiles, large images lose half of the accuracy."""
    vlm = VLM(*tiny_families.build_lfm2_vl())
    large = image(400, 300)
    whole = vlm.ask("a", large, **SHORT).stats.visual_tokens_in
    monkeypatch.setattr(vlm.processor.image_processor, "do_image_splitting", True)
    assert vlm.ask("a", large, **SHORT).stats.visual_tokens_in > whole


def test_adapters_do_not_answer_for_each_other(qwen2_5: VLM) -> None:
    """vllm-project/vllm#42125: a replaced adapter answered with the cache of the one before."""
    peft = pytest.importorskip("peft")
    model, processor = tiny_families.build_qwen2_5_vl()
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).eval()
    vlm = VLM(adapted, processor)

    def logprob() -> float:
        return vlm.ask("a", image(), top_logprobs=1, **SHORT).logprobs[0].logprob

    first = logprob()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.mul_(-3)
    second = logprob()
    vlm.prefix_cache.clear()
    assert logprob() == second != first
