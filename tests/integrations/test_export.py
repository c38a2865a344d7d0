"""``vlmfast export --for vllm``: names of weights, and BOS exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support import tiny_models
from vlmfast import VLM, ModelError, VLMFastError
from vlmfast.cli import main
from vlmfast.core.exit_codes import ExitCode
from vlmfast.integrations.vllm import export, new_name, with_bos
from vlmfast.scenes.files import image

QUESTION = "What is in the bottom left?"
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "tiny"
    export("tiny", out)
    return out


@pytest.fixture(scope="module")
def exported(folder: Path) -> VLM:
    return VLM.from_pretrained(folder)


def test_bos_is_there_once_in_every_route(exported: VLM, tiny: VLM, tmp_path: Path) -> None:
    """In the processor, in a chat route that adds no special tokens, and in `ask`."""
    processor, shown = exported.processor, image()[0]
    bos = processor.tokenizer.bos_token_id

    def count(ids: Any) -> int:
        return list(ids).count(bos)

    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    chat_route = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    path = tmp_path / "picture.png"
    path.write_bytes(shown)
    parts = [{"type": "image", "url": str(path)}, {"type": "text", "text": QUESTION}]
    with_image = [{"role": "user", "content": parts}]
    tokenized = processor.apply_chat_template(
        with_image, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )["input_ids"][0]
    asked = exported.inputs(QUESTION, images=shown)["input_ids"][0]
    assert [count(chat_route), count(tokenized.tolist()), count(asked.tolist())] == [1, 1, 1]
    # `tiny` itself leaves BOS to the tokenizer, and a chat route without special tokens loses it.
    own = tiny.processor.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert count(tiny.processor.tokenizer(own, add_special_tokens=False)["input_ids"]) == 0
    assert count(tiny.inputs(QUESTION, images=shown)["input_ids"][0].tolist()) == 1


def test_exported_model_gives_the_same_answers(exported: VLM, tiny: VLM) -> None:
    shown = image()[0]
    for recipe in (None, "hired:budget=0.2"):
        first, second = (
            vlm.ask(QUESTION, images=shown, recipe=recipe, max_new_tokens=12)
            for vlm in (tiny, exported)
        )
        assert first.token_ids == second.token_ids
    other = tiny.ask("Describe the image.", images=shown, max_new_tokens=12)
    assert other.token_ids != first.token_ids


def test_weights_of_the_tower_have_the_names_that_vllm_reads(folder: Path) -> None:
    keys = set(load_file(folder / "model.safetensors"))
    tower = {key for key in keys if key.startswith("vision_tower.")}
    assert tower and all(key.startswith("vision_tower.vision_model.") for key in tower)
    assert {"image_newline", "multi_modal_projector.linear_1.weight"} <= keys


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("vision_tower.encoder.x", "vision_tower.vision_model.encoder.x"),
        ("model.vision_tower.encoder.x", "model.vision_tower.vision_model.encoder.x"),
        ("vision_tower.vision_model.encoder.x", "vision_tower.vision_model.encoder.x"),
        ("language_model.layers.0.x", "language_model.layers.0.x"),
        ("other_vision_tower.x", "other_vision_tower.x"),
    ],
)
def test_new_name(key: str, new: str) -> None:
    assert new_name(key) == new


def test_template_with_bos_is_left_alone() -> None:
    assert with_bos("{{ bos_token }}USER") == "{{ bos_token }}USER"
    assert with_bos("USER").startswith("{{- bos_token -}}")


def test_sharded_checkpoint_keeps_its_index(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny_models.build_llava(source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in files.items():
        save_file({key: weights[key] for key in keys}, source / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {k: f for f, keys in files.items() for k in keys}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    export(source, out)
    written = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert written == {key: f for f in files for key in load_file(out / f)}
    first, second = (VLM.from_pretrained(path, dtype="float32") for path in (source, out))
    shown = tiny_models.make_image(64, 64)
    answers = [v.ask("What?", images=shown, max_new_tokens=8).token_ids for v in (first, second)]
    assert answers[0] == answers[1]


def test_wrong_sources_and_targets_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VLMFastError, match="is not empty"):
        export("tiny", folder)
    with pytest.raises(ModelError, match="is no folder of a checkpoint"):
        export("owner/name", tmp_path / "x")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with pytest.raises(ModelError, match="exports llava, llava_next, llava_onevision"):
        export(tmp_path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_models.build_llava(source)
    (source / "notes.md").symlink_to("nowhere")
    with pytest.raises(ModelError, match=r"notes\.md cannot be read: No such file"):
        export(source, tmp_path / "out")


def test_checkpoint_without_a_template_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: Any
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny_models.build_llava(source)
    command = ["export", str(out), "--for", "vllm", "--model", str(source)]
    for file in source.iterdir():
        if file.name == "chat_template.jinja":
            file.unlink()
        elif file.suffix == ".json":
            values = json.loads(file.read_text())
            values.pop("chat_template", None)
            file.write_text(json.dumps(values))
    assert main(command) == ExitCode.USER_ERROR
    assert "has no chat template to export" in capsys.readouterr().err
    assert not out.exists()


def test_command(tmp_path: Path, capsys: Any) -> None:
    assert main(["export", str(tmp_path / "out"), "--for", "vllm"]) == 0
    assert "files for vLLM" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").exists()
