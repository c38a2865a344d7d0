"""Layers on two devices: the answers are those of one device, and tensors follow the layers.

The devices are pretended (`vlmfast.check.devices`): every operation computes real values, and
complains if its tensors are on different devices. accelerate dispatches the models.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from transformers import LogitsProcessorList

from support import rope_types, tiny_families, tiny_models
from support.engine.batched import caches_at_end
from support.engine.turns import renewed
from vlmfast import VLM, Request
from vlmfast.check.devices import pretended
from vlmfast.errors import ModelError, VLMFastError

QUESTION = "what is to the left of the large thing in the lower half of this image ?"
IMAGE = tiny_models.make_image(128, 96)
TOKENS = 6
BUILD = {
    "llava": tiny_models.build_llava,
    "qwen2_5_vl": tiny_families.build_qwen2_5_vl,
    "gemma3": tiny_families.build_gemma3,
}
RECIPES = ("none", "divprune:0.2", "snapkv:0.5", "fastv:keep=0.5", "h2o:0.6", "draft-ngram")
MORE = (
    "pyramiddrop",
    "pyramiddrop:layers=1,positions=compact",
    "sparsevlm",
    "dart",
    "mustdrop",
    "zipvl:tau=0.9",
    "fastkv:keep=0.7,tsp=0.9,window=3",
    "pyramidkv:keep=0.8,window=3",
    "vlcache:0.6",
    "cake:keep=0.7,window=4",
    "streamingllm:0.6",
    "lookm:keep=0.9",
    "lookm:keep=0.9,merge=avg,proportional_attention=true",
    "kivi:group=4,residual=8",
    "zipcache",
    "quickprefill:0.4",
    "catp",
    "tome:0.5",
    "visionzip:dominant=4,contextual=3,proportional_attention=true",
    "draft-recycle",
    "draft-layerskip",
    "snapkv:0.5+draft-ngram",
    "snapkv:keep=0.8,window=4+kivi:group=4,residual=32",
)
WITHOUT = {("qwen2_5_vl", "streamingllm:0.6"), ("gemma3", "streamingllm:0.6")}


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    with pretended():
        yield
    models.cache_clear()


def placed(model: Any, last: int, **other: str) -> Any:
    """The model with the second half of its layers, its last norm and its head on ``cuda:last``.

    ``other``: further devices, by what the name of a module ends with.
    """
    text, there = "model.language_model", f"cuda:{last}"
    depth = len(model.get_decoder().layers)
    parts = {
        **{f"model.{name}": "cuda:0" for name, _ in model.model.named_children()},
        f"{text}.embed_tokens": "cuda:0",
        f"{text}.norm": there,
        f"{text}.rotary_emb": there,
        "lm_head": there,
        **{f"{text}.layers.{i}": there if 2 * i >= depth else "cuda:0" for i in range(depth)},
    }
    del parts[text]
    for name in [name for name in parts for end in other if name.endswith(end)]:
        parts[name] = next(device for end, device in other.items() if name.endswith(end))
    return accelerate.dispatch_model(model, parts, main_device="cuda:0", force_hooks=True)


@functools.cache
def models(built: Any) -> tuple[VLM, VLM]:
    one, two = (
        VLM(placed(model, last), own) for last, (model, own) in enumerate((built(), built()))
    )
    assert two.adapter.split and not one.adapter.split
    return one, two


def pair(built: Any = tiny_models.build_llava) -> tuple[VLM, VLM]:
    """The same model on one device and on two."""
    one, two = models(built)
    return renewed(one), renewed(two)


def asked(vlm: VLM, recipe: str | None = None, tokens: int = TOKENS) -> list[int]:
    return vlm.ask(QUESTION, IMAGE, recipe=recipe, max_new_tokens=tokens).token_ids


def check(family: str, recipes: tuple[str, ...], tokens: int = TOKENS) -> None:
    one, two = pair(BUILD[family])
    for recipe in recipes:
        if (family, recipe) not in WITHOUT:
            assert asked(two, recipe, tokens) == asked(one, recipe, tokens), recipe


def test_no_layer_waits_for_the_device() -> None:
    """The times of stages in each layer are read when the pass has ended."""
    waits: list[int] = []
    model, processor = tiny_models.build_llava(layers=2)
    for vlm in (VLM(placed(model, 0), processor), pair()[0]):  # two layers and four
        vlm.prefix_cache.limit = 0
        before = torch.cuda.synchronize.call_count
        answer = vlm.ask("what is here ?", recipe="h2o:0.6", images=IMAGE, max_new_tokens=1)
        waits.append(torch.cuda.synchronize.call_count - before)
        assert 0 < answer.stats.time_reduce_s < answer.stats.time_total_s
    assert waits[0] == waits[1]


def test_pixels_of_a_request_that_waits_are_in_host_memory() -> None:
    (vlm, _), go = pair(), threading.Event()
    vlm.engine.max_rows = 1
    generation = {"max_new_tokens": 4, "eos_token_id": None}
    wanted = vlm.ask(QUESTION, tiny_models.make_image(seed=1), **generation).token_ids
    vlm.prefix_cache.clear()
    held = LogitsProcessorList([lambda ids, scores: scores if go.wait(60) else None])
    first = vlm.submit(Request(QUESTION, generation=generation | {"logits_processor": held}))
    second = vlm.submit(Request(QUESTION, tiny_models.make_image(seed=1), generation=generation))
    tensors = second.sequence.inputs.tensors
    assert tensors["pixel_values"].device.type == "cpu"
    assert tensors["input_ids"].device.type == "cuda"
    go.set()
    assert second.result(60).token_ids == wanted and first.result(60).token_ids


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "recipes"), [("llava", RECIPES[1:5:2]), ("qwen2_5_vl", RECIPES[2:3])]
)
def test_answers_are_those_of_one_device(family, recipes):
    check(family, recipes)


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILD)
def test_answers_of_all_methods(family):
    check(family, (*RECIPES, *MORE), 10)


# Weights on the host, which are loaded to the device for each forward pass.
ON_HOST = {
    "layers": ("layers.1", "layers.2"),
    "tower and head": ("vision_tower", "multi_modal_projector", "visual", "lm_head"),
}
EACH = [(family, parts, RECIPES[:3]) for family in ("llava", "qwen2_5_vl") for parts in ON_HOST]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in EACH]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("family", "parts", "recipes"), [("llava", "layers", RECIPES[1:2]), *SLOW])
def test_offloaded_weights(family, parts, recipes):
    """Equal to the model whose weights are all on the device."""
    model, processor = BUILD[family]()
    offloaded = VLM(placed(model, 0, **dict.fromkeys(ON_HOST[parts], "cpu")), processor)
    plain, _ = pair(BUILD[family])
    on_meta = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    own = [end for end in ON_HOST[parts] if any(f"{end}." in name for name in on_meta)]
    assert on_meta and all(any(f"{end}." in name for end in own) for name in on_meta)
    assert str(offloaded.adapter.device) == "cuda:0" and not offloaded.adapter.split
    for recipe in recipes:
        assert asked(offloaded, recipe) == asked(plain, recipe), recipe
    # Nothing stays on the device.
    assert on_meta == [n for n, weight in model.named_parameters() if weight.device.type == "meta"]


@pytest.mark.parametrize("family", BUILD)
def test_auto_splits_no_layer(family):
    """As the page says: tower, projector and embedding first if they fit, and whole layers."""
    from transformers.integrations.accelerate import _get_device_map

    model, _ = BUILD[family]()
    whole = sum(weight.nbytes for weight in model.parameters())
    used = set()
    for share in (0.3, 0.7, 0.8, 0.9):
        memory = {0: int(share * whole), 1: 2 * whole}
        found = _get_device_map(model, "auto", memory, None)
        used |= {(share, device) for device in found.values()}
        inside = [name for name in found if re.search(r"language_model\.layers\.\d+\.", name)]
        assert not inside
        first = [name for name in found if re.search("vision|visual|project|embed_tokens", name)]
        assert ({found[name] for name in first} == {0}) is (share > 0.3)
    assert {(0.7, 0), (0.7, 1)} < used


def test_none_equals_hugging_face():
    _, vlm = pair()
    inputs = vlm.inputs(QUESTION, images=IMAGE)
    ids = vlm.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    assert asked(vlm) == ids[0, inputs["input_ids"].shape[1] :].tolist()


def test_cache_is_where_its_layer_is():
    with caches_at_end() as found:
        asked(pair()[1])
    layers, lengths = zip(*found[0], strict=True)
    assert layers == (("cuda:0", "cuda:0"),) * 2 + (("cuda:1", "cuda:1"),) * 2
    assert lengths == lengths[:1] * 4


def test_several_requests():
    frames = [tiny_models.make_image(seed=i) for i in range(2)]
    requests = [
        Request(QUESTION, images=IMAGE, recipe="snapkv:keep=0.6,window=4"),
        Request("what is here, and what is there ?", images=frames[0], recipe="h2o:0.8"),
        Request("and here ?", images=frames),
    ]
    one, two = ([a.token_ids for a in vlm.ask_many(requests, max_new_tokens=4)] for vlm in pair())
    assert one == two


@pytest.mark.slow
def test_sessions_and_long_videos():
    frames = [tiny_models.make_image(seed=i) for i in range(6)]
    answers = []
    for vlm in pair():
        with vlm.session(images=IMAGE, recipe="snapkv:keep=0.8,window=4") as session:
            turns = [session.ask(text, max_new_tokens=6) for text in ("what ?", "and then ?")]
        long = vlm.ask(
            "what ?", video=frames, max_kv_tokens=150, max_new_tokens=6, progress=False,
            recipe="draft-ngram",
        )  # fmt: skip
        answers.append([answer.token_ids for answer in (*turns, long)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("rope_type", ["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
def test_rotary_tables_by_length(rope_type):
    one, two = pair(lambda: rope_types.build(rope_type, layers=2, kv_heads=2))
    assert asked(two) == asked(one)


def test_wrong_placements_are_refused(tmp_path):
    model, processor = tiny_models.build_llava()
    vlm = VLM(placed(model, 1), processor)
    session = vlm.session(images=IMAGE)
    with pytest.raises(ModelError, match="sessions of a model on several devices cannot be saved"):
        session.save(tmp_path / "session")
    with pytest.raises(VLMFastError, match="decoding='graph' needs a model on one device"):
        VLM(model, processor, decoding="graph")
    with pytest.raises(ModelError, match="embedding runs on cuda:1 and the vision tower on cuda:0"):
        VLM(placed(tiny_models.build_llava()[0], 1, embed_tokens="cuda:1"), processor)
    model, _ = tiny_models.build_llava()
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cuda:1", offload=True)
    accelerate.hooks.add_hook_to_module(model.get_decoder().layers[1].mlp.up_proj, hook)
    with pytest.raises(ModelError, match="layer 1 runs on cpu and cuda:1"):
        VLM(model, processor)


def test_mixed_devices_are_detected():
    """The pretended devices refuse what a GPU refuses."""
    a, b = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="aten::add works on cuda:0, cuda:1"):
        a + b
    with pytest.raises(RuntimeError, match="aten::mul works on cpu, cuda:1"):
        b * torch.ones(2)
    assert (a + b.to("cuda:0")).tolist() == [2, 2]
