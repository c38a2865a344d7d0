"""Towers that attend within images, frames or windows: few calls, and Hugging Face's features."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from support import tiny_families
from support.closeness import apart, close
from support.tiny_models import make_image
from vlmfast import VLM

BUILD = tiny_families.builders()
PATCH = 14
WINDOWED, GLOBAL = 0, 1  # blocks
# Width and height in pixels, and the calls of Hugging Face's windowed block.
SIZES = {
    "square": ((448, 448), 16),
    "larger": ((672, 672), 36),
    "landscape": ((1344, 1008), 108),
    "portrait": ((420, 1148), 44),  # windows of 64, 48, 16 and 12 patches
    "strip": ((56, 1120), 10),  # half windows alone
}
LENGTH = 3


def build_real() -> VLM:
    """Qwen2.5-VL with the real patches, windows and rope, of small width."""
    model, processor = BUILD["qwen2_5_vl"](
        patch=PATCH,
        largest=2 * 10**6,
        depth=2,
        window_size=8 * PATCH,
        fullatt_block_indexes=[GLOBAL],
    )
    return VLM(model, processor)


class Calls(TorchFunctionMode):
    """Counts calls of attention by the block that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.block = -1
        self.counts: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention and self.block >= 0:
            self.counts[self.block] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(vlm: VLM) -> Iterator[Counter[int]]:
    """Calls of attention by block of the vision tower."""
    calls, hooks = Calls(), []

    def enter(index: int) -> Any:
        def hook(*_: Any) -> None:
            calls.block = index

        return hook

    for index, block in enumerate(vlm.adapter.vision_blocks()):
        hooks.append(block.register_forward_pre_hook(enter(index)))
        hooks.append(block.register_forward_hook(enter(-1)))
    try:
        with calls:
            yield calls.counts
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def features(vlm: VLM) -> Iterator[list[Tensor]]:
    """What the tower makes of each call, for the language model."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found.append(output.pooler_output)

    with vlm.model.base_model.visual.register_forward_hook(hook):
        yield found


def generated(vlm: VLM, **media: Any) -> list[int]:
    inputs = vlm.inputs("what ?", **media)
    given = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None}
    ids = vlm.model.generate(**inputs, **given)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def asked(vlm: VLM, **media: Any) -> list[int]:
    return vlm.ask("what ?", max_new_tokens=LENGTH, eos_token_id=None, **media).token_ids


def terms(vlm: VLM, rows: int) -> int:
    """Sums from a pixel to a feature."""
    vision = vlm.model.config.vision_config
    block = 3 * vision.hidden_size + vision.intermediate_size + rows
    return 6 * PATCH**2 + vision.depth * block + 8 * vision.hidden_size


@contextmanager
def mixed_up(vlm: VLM) -> Iterator[None]:
    """Control: windows begin one merged row of patches later."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        ends = kwargs["cu_seqlens"].clone()
        ends[1:-1] -= 4
        return args, {**kwargs, "cu_seqlens": ends}

    block = vlm.adapter.vision_blocks()[WINDOWED]
    with block.register_forward_pre_hook(hook, with_kwargs=True):
        yield


@pytest.mark.cases(1)
@pytest.mark.parametrize("size", ["portrait", "strip", "square", "larger", "landscape"])
def test_windows_are_batches(size) -> None:
    """One image: at most two calls a block, and the features and tokens of Hugging Face."""
    vlm, (shape, windows) = build_real(), SIZES[size]
    image = make_image(*shape)
    with counted(vlm) as calls, features(vlm) as want:
        wanted = generated(vlm, images=image)
    assert calls == {WINDOWED: windows, GLOBAL: 1}
    with counted(vlm) as calls, features(vlm) as got:
        assert asked(vlm, images=image) == wanted
    assert set(calls) == {WINDOWED, GLOBAL} and max(calls.values()) <= 2
    rows = shape[0] * shape[1] // PATCH**2
    close(got[0], want[0], terms=terms(vlm, rows))
    with mixed_up(vlm), features(vlm) as control:
        asked(vlm, images=image)
    apart(got[0], control[0], terms=terms(vlm, rows))


MEDIA: dict[str, dict[str, Any]] = {
    # Of two sizes, and of four; the last window of some is a single patch wide.
    "two sizes": {
        "images": [make_image(*s, i) for i, s in enumerate([(280, 224), (504, 252)] * 3)]
    },
    "four sizes": {
        "images": [make_image(*s) for s in [(84, 84), (308, 392), (476, 588), (588, 476)]]
    },
    "a video": {"video": [make_image(224, 168, i) for i in range(8)], "num_frames": 8},
}
MOST = {"two sizes": 3, "four sizes": 5, "a video": 2}


@pytest.mark.cases(1)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["two sizes", "a video", "four sizes"])
def test_images_of_a_size_are_a_batch(case, implementation) -> None:
    vlm, media = build_real(), MEDIA[case]
    vlm.model.set_attn_implementation(implementation)
    with features(vlm) as want:
        wanted = generated(vlm, **media)
    with counted(vlm) as calls, features(vlm) as got:
        assert asked(vlm, **media) == wanted
    assert set(calls) == {WINDOWED, GLOBAL} and max(calls.values()) <= MOST[case]
    assert calls[WINDOWED] <= 2
    for one, other in zip(got, want, strict=True):
        close(one, other, terms=terms(vlm, 2000))
    with mixed_up(vlm), features(vlm) as control:
        asked(vlm, **media)
    apart(torch.cat(got), torch.cat(control), terms=terms(vlm, 2000))


EACH = dict.fromkeys(["mistral3", "lfm2_vl", "qwen3_vl", *BUILD])


@contextmanager
def entering(vlm: VLM) -> Iterator[list[Tensor]]:
    """The rows that enter the language model."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    layer = vlm.adapter.decoder.layers[0]
    with layer.register_forward_pre_hook(hook, with_kwargs=True):
        yield found


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", EACH)
def test_calls_do_not_grow_with_the_images(name) -> None:
    """Six images of two sizes: at most three calls a block, and Hugging Face's features."""
    if name == "smolvlm":
        pytest.importorskip("num2words")
    vlm = VLM(*BUILD[name]())
    images = [make_image(*s, i) for i, s in enumerate([(60, 44), (40, 64)] * 3)]
    with entering(vlm) as want:
        wanted = generated(vlm, images=images)
    with counted(vlm) as calls, entering(vlm) as got:
        assert asked(vlm, images=images) == wanted
    assert calls and max(calls.values()) <= 3
    close(got[0], want[0], terms=4 * 512)
    with entering(vlm) as control:  # images of one size change places
        generated(vlm, images=[images[i] for i in (2, 1, 4, 3, 0, 5)])
    apart(got[0], control[0], terms=4 * 512)


READS = {
    Tensor.tolist,
    Tensor.item,
    Tensor.cpu,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.nonzero,
    Tensor.unique_consecutive,
    torch.unique_consecutive,
    torch.repeat_interleave,
}


class Reads(TorchFunctionMode):
    """The functions that read a tensor on the host, or whose shape depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def read_in_tower(vlm: VLM) -> Iterator[list[str]]:
    """What the host reads during forward passes of the tower."""
    reads = Reads()

    def enter(*_: Any) -> None:
        reads.__enter__()

    def leave(*_: Any) -> None:
        reads.__exit__(None, None, None)

    tower = vlm.adapter.tower()
    with tower.register_forward_pre_hook(enter), tower.register_forward_hook(leave):
        yield reads.found


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "qwen2_vl", "qwen3_5"])
def test_host_reads_nothing_in_the_tower(name) -> None:
    vlm = VLM(*BUILD[name]())
    media = {"images": [make_image(60, 44), make_image(40, 64)]}
    with read_in_tower(vlm) as reads:
        generated(vlm, **media)
    assert len(reads) > 3 * len(vlm.adapter.vision_blocks())  # control: three for each block
    with read_in_tower(vlm) as reads:
        asked(vlm, **media)
    assert reads == []


def test_arguments_of_the_tower_follow_its_attributes() -> None:
    """They are kept by size, and are others where a window is."""
    vlm = build_real()
    image = make_image(280, 224)
    with features(vlm) as before:
        asked(vlm, images=image)
    vlm.model.base_model.visual.window_size = 4 * PATCH
    with features(vlm) as want:
        wanted = generated(vlm, images=image)
    with features(vlm) as got:
        assert asked(vlm, images=image) == wanted
    close(got[0], want[0], terms=terms(vlm, 320))
    apart(got[0], before[0], terms=terms(vlm, 320))
