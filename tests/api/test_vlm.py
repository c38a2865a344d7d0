"""The public API: inputs, results and errors."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
from PIL import Image

import vlmfast
from support.tiny_models import build_llava, build_llava_next, build_text_only, make_image
from vlmfast import VLM, MediaError, ModelError, RecipeError, VLMFastError

ASK = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava_next())


@pytest.fixture(scope="module")
def expected(vlm) -> list[int]:
    """The answer that the VLM must still give after every error."""
    return vlm.ask("what is here ?", make_image(), **ASK).token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    build_llava_next(path)
    return path


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_chat_accepts_hugging_face_messages(vlm, expected, tmp_path):
    path = tmp_path / "a.png"
    make_image().save(path)
    content = [{"type": "image", "path": str(path)}, {"type": "text", "text": "what is here ?"}]
    answer = vlm.chat([{"role": "user", "content": content}], **ASK)
    assert answer.token_ids == expected
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "a thing"},
        {"role": "user", "content": "and what else ?"},
    ]
    assert vlm.chat(turns, **ASK).stats.prompt_tokens > answer.stats.prompt_tokens
    audio = [{"type": "audio"}, {"type": "text", "text": "what ?"}]
    with pytest.raises(VLMFastError, match="content type 'audio'"):
        vlm.chat([{"role": "user", "content": audio}])
    question = {"type": "text", "text": "what ?"}
    with pytest.raises(VLMFastError, match="needs one of image, path, url, base64"):
        vlm.chat([{"role": "user", "content": [{"type": "image"}, question]}])
    for messages, message in {
        "empty": ([], "at least one turn"),
        "a text": ("what ?", "list of at least one turn"),
        "no role": ([{"content": "what ?"}], "a role and content"),
        "no content": ([{"role": "user"}], "text, or a list of dicts"),
        "texts": ([{"role": "user", "content": ["what ?"]}], "text, or a list of dicts"),
        "no text": ([{"role": "user", "content": [{"type": "text"}]}], "under 'text'"),
        "no words": ([{"role": "user", "content": " "}], "no text"),
    }.values():
        with pytest.raises(VLMFastError, match=message):
            vlm.chat(messages)


def test_python_and_text_recipes_are_equivalent(vlm):
    from vlmfast.compressors.tokens.hired import HiRED

    by_text = vlm.ask("what ?", make_image(), recipe="hired:0.4", **ASK)
    in_python = vlm.ask("what ?", make_image(), recipe=HiRED(0.4), **ASK)
    assert by_text.token_ids == in_python.token_ids
    assert by_text.recipe == in_python.recipe == "hired:0.4"


@pytest.mark.cases(1)
@pytest.mark.parametrize("given", ["hired:0.2", "balanced", "hired:keep=0.20+grid", "none"])
def test_answers_name_the_recipe_as_given(vlm, given):
    image, canonical = make_image(), str(vlm.recipe(given))
    *_, streamed = vlm.stream("what ?", image, recipe=given, **ASK)
    with vlm.session(image, recipe=given) as session:
        answers = [
            vlm.ask("what ?", image, recipe=given, **ASK),
            vlm.chat([{"role": "user", "content": "what ?"}], recipe=given, **ASK),
            vlm.ask_many([vlmfast.Request("what ?", image, recipe=given)], **ASK)[0],
            vlm.submit(vlmfast.Request("what ?", image, recipe=given), **ASK).result(60),
            vlm.compare("what ?", image, recipes=[given], **ASK)[1].answer,
            session.ask("what ?", **ASK),
            streamed,
        ]
    with vlmfast.attach(vlm.model, vlm.processor, given) as attached:
        vlm.model.generate(**vlm.inputs("what ?", image), **ASK)
        assert f"recipe {given} of" in repr(attached)
        answers += attached.answers
    assert {answer.recipe for answer in answers} == {given}
    assert {answer.canonical_recipe for answer in answers} == {canonical}


BAD_CALLS = {
    "empty question": (lambda v: v.ask("  ", make_image()), VLMFastError, "question is empty"),
    "no such file": (lambda v: v.ask("what ?", "nowhere.png"), MediaError, "nowhere.png"),
    "frames without a video": (
        lambda v: v.ask("what ?", make_image(), num_frames=3),
        VLMFastError,
        "no video was given",
    ),
    "a cache limit of a stream": (
        lambda v: v.stream("what ?", video=[make_image()] * 3, max_kv_tokens=99),
        VLMFastError,
        "max_kv_tokens cannot be given here: it is an argument of VLM.ask",
    ),
    "a cache limit of a comparison": (
        lambda v: v.compare("what ?", make_image(), recipes=["hired"], max_kv_tokens=99),
        VLMFastError,
        "max_kv_tokens cannot be given here: it is an argument of VLM.ask",
    ),
    "one recipe of a comparison": (
        lambda v: v.compare("what ?", make_image(), recipes=["hired"], recipe="tome"),
        VLMFastError,
        "recipe cannot be given here: compare takes a list, recipes=",
    ),
    "no frames": (lambda v: v.ask("what ?", video=[]), MediaError, "frame"),
    "layers beyond the depth": (
        lambda v: v.ask("what ?", make_image(), recipe="pyramiddrop:layers=2/9"),
        RecipeError,
        "stay below 4",
    ),
    "ratios that grow": (
        lambda v: v.ask("what ?", make_image(), recipe="pyramiddrop:layers=1/2,ratios=0.3/0.5"),
        RecipeError,
        "must not grow",
    ),
    "k beyond the depth": (
        lambda v: v.ask("what ?", make_image(), recipe="fastv:k=4"),
        RecipeError,
        "below the model's 4 layers",
    ),
    "a filter beyond the depth": (
        lambda v: v.ask("what ?", make_image(), recipe="mustdrop:layers=1/4"),
        RecipeError,
        "stay below 4",
    ),
    "trained, without weights": (
        lambda v: v.ask("what ?", make_image(), recipe="atp"),
        RecipeError,
        "no weights for this",
    ),
    "trained, weights that are not there": (
        lambda v: v.ask("what ?", make_image(), recipe="elastic:weights=nowhere"),
        RecipeError,
        "nowhere",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_invalid_calls_raise_and_leave_the_vlm_usable(vlm, expected, case):
    call, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message):
        call(vlm)
    assert vlm.ask("what is here ?", make_image(), **ASK).token_ids == expected


# --- loading -------------------------------------------------------------------------------------


def test_saved_checkpoint_gives_the_same_answer(folder, expected):
    loaded = VLM.from_pretrained(folder, device="cpu")
    assert loaded.ask("what is here ?", make_image(), **ASK).token_ids == expected


def test_dtype_defaults_to_the_checkpoint(tmp_path):
    build_llava(tmp_path, dtype=torch.bfloat16)
    loaded = VLM.from_pretrained(tmp_path, device="cpu")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.ask("what ?", make_image(), recipe="hired:0.5", **ASK).token_ids
    assert VLM.from_pretrained(tmp_path, device="cpu", dtype="float32").model.dtype == torch.float32


def test_folders_saved_with_older_processors(folder, expected, tmp_path):
    """They do not state the number of placeholders per image; the model does."""
    for path in folder.iterdir():
        shutil.copy(path, tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    for key in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens"):
        saved.pop(key)
    (tmp_path / "processor_config.json").write_text(json.dumps(saved))
    old = VLM.from_pretrained(tmp_path, device="cpu")
    assert old.processor.patch_size is None
    assert old.ask("what is here ?", make_image(), **ASK).token_ids == expected
    assert old.processor.patch_size is None  # the user's processor is not modified


def test_device_map_and_device_raise(folder):
    with pytest.raises(ModelError, match="device_map and device both say"):
        VLM.from_pretrained(folder, device_map="auto", device="cpu")


def test_folder_without_processor_raises(folder, tmp_path):
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(folder / name, tmp_path)
    with pytest.raises(ModelError, match=f"no processor in {tmp_path}"):
        VLM.from_pretrained(tmp_path)


def test_text_only_model_raises(tmp_path):
    build_text_only(tmp_path)
    with pytest.raises(ModelError, match=r"'llama'.*supported are .*llava, llava_next"):
        VLM.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"supported are .*llava, llava_next"):
        VLM(build_text_only(tmp_path), None)


def test_missing_weights_or_folder_raises(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in folder.iterdir():
        shutil.copy(path, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(k for k in weights if k.endswith("q_proj.weight"))
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights"):
        VLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="do not load"):
        VLM.from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="nowhere is no folder, and no hub id"):
        VLM.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="no model configuration"):
        VLM.from_pretrained(tmp_path)


def test_mismatched_processor_raises():
    model, processor = build_llava_next()
    with pytest.raises(ModelError, match="no image processor"):
        VLM(model, processor.tokenizer)
    with torch.device("meta"):
        ghost = type(model)(model.config)
    with pytest.raises(ModelError, match="meta device"):
        VLM(ghost, processor)
    for one, another in ((build_llava, build_llava_next), (build_llava_next, build_llava)):
        with pytest.raises(ModelError, match=r"does not belong|do not belong"):
            VLM(one()[0], another()[1]).ask("what ?", make_image())
    processor.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        VLM(model, processor).ask("what ?", make_image())


def test_tower_without_cls_uses_received_attention():
    """No released LLaVA has this tower, but other towers occur under the same family name."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

    model, processor = build_llava()
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        vision_use_head=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=model.config.text_config,
        image_token_id=model.config.image_token_id,
        vision_feature_select_strategy="full",
    )
    processor.num_additional_image_tokens = 0
    processor.vision_feature_select_strategy = "full"
    vlm = VLM(LlavaForConditionalGeneration(config).eval(), processor)
    assert vlm.ask("what ?", make_image(), recipe="grid:0.5", **ASK).token_ids
    assert vlm.ask("what ?", make_image(), recipe="hired:0.2", **ASK).stats.saliency == "received"
    with pytest.raises(RecipeError, match="CLS"):
        vlm.ask("what ?", make_image(), recipe="hired:0.2,saliency=cls")
