"""``vlmfast encode``: features of images in a folder, resumable, the same bytes each time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny_families, tiny_models
from vlmfast import VLM, MediaError, RecipeError, VLMFastError, exact_count
from vlmfast.api.encoding import encode_image
from vlmfast.cli import main
from vlmfast.integrations import features
from vlmfast.integrations.features import MANIFEST, encode_files, open_features

RECIPE = "hired:budget=0.2"


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*tiny_models.build_llava_next())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    sizes = [(80, 60), (64, 64), (30, 90)]
    for number, size in enumerate(sizes):
        tiny_models.make_image(*size, seed=number).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def whole(vlm: VLM, images: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was written without an interruption."""
    out = tmp_path_factory.mktemp("features")
    encode_files(vlm, images, RECIPE, out, model="tiny")
    return out


@pytest.mark.parametrize("family", ["idefics3", "mistral3", "aya_vision"])
def test_kept_counts_tokens_of_the_image_alone(family: str) -> None:
    """Where text stands between the views of an image, too."""
    vlm = VLM(*tiny_families.builders()[family]())
    image = tiny_models.make_image(90, 60)
    for recipe, share in (("none", 1.0), ("divprune:0.5", 0.6)):
        found = encode_image(vlm.adapter, image, vlm.recipe(recipe))
        assert found.kept.tolist() == sorted(set(found.kept.tolist()))
        assert int(found.kept[0]) >= 0 and int(found.kept[-1]) < found.tokens
        assert len(found.kept) <= share * found.tokens
        if recipe == "none":
            assert found.kept.tolist() == list(range(found.tokens))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_features_are_those_that_an_answer_reads(vlm: VLM, images: list[Path], whole: Path) -> None:
    found = open_features(whole, vlm)
    for index, path in enumerate(images):
        tensors, entry = found.load(index), found.entries[index]
        full = vlm.ask("What?", images=path, max_new_tokens=1)
        answer = vlm.ask("Another question", images=path, recipe=RECIPE, max_new_tokens=1)
        order = answer.trace.entered.order
        assert torch.equal(tensors["kept"], order - full.trace.layout.order[0])
        assert entry["kept"] == tensors["image_embeds"].shape[1] == len(order)
        assert entry["tokens"] == full.stats.visual_tokens_in > entry["kept"]
        assert entry["kept"] == exact_count(RECIPE, vlm.image_layout(tuple(entry["size"])))
        assert torch.equal(tensors["position_ids"][0], tensors["kept"])
        assert not torch.equal(tensors["kept"], torch.arange(entry["kept"]))


def test_rotary_ids_of_a_recipe_that_renumbers(
    vlm: VLM, images: list[Path], tmp_path: Path
) -> None:
    found = encode_files(vlm, images[:1], f"{RECIPE},positions=compact", tmp_path)
    tensors = found.load(0)
    assert torch.equal(tensors["position_ids"][0], torch.arange(len(tensors["kept"])))


def test_the_model_answers_from_the_features(vlm: VLM, images: list[Path], whole: Path) -> None:
    """Features in place of the placeholders, numbered without gaps, as by other engines."""
    renumbered = f"{RECIPE},positions=compact"
    answer = vlm.ask("How many?", images=images[0], recipe=renumbered, max_new_tokens=8)
    full = vlm.ask("How many?", images=images[0], max_new_tokens=8)
    assert full.token_ids != answer.token_ids

    def tokens(embeds: torch.Tensor) -> list[int]:
        ids = vlm.inputs("How many?", images=images[0])["input_ids"]
        text = vlm.model.get_input_embeddings()(ids)[0]
        visual = vlm.adapter.visual(ids[0]).nonzero()[:, 0]
        prompt = torch.cat([text[: visual[0]], embeds, text[visual[-1] + 1 :]])
        decoder, found = vlm.adapter.decoder, []
        with torch.no_grad():
            for _ in range(len(answer.token_ids)):
                hidden = decoder(inputs_embeds=prompt[None]).last_hidden_state
                found.append(int(vlm.adapter.logits(hidden[:, -1]).argmax()))
                prompt = torch.cat(
                    [prompt, vlm.model.get_input_embeddings()(torch.tensor([found[-1]]))]
                )
        return found

    embeds = open_features(whole).load(0)["image_embeds"][0]
    assert tokens(embeds) == answer.token_ids
    assert tokens(embeds.flip(0)) != answer.token_ids


@pytest.mark.parametrize("part", range(6))
def test_cut_manifest_is_resumed_to_the_same_bytes(
    vlm: VLM, images: list[Path], whole: Path, tmp_path: Path, part: int
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    manifest = out / MANIFEST
    data = manifest.read_bytes()
    manifest.write_bytes(data[: len(data) * part // 6])
    encode_files(vlm, images, RECIPE, out, model="tiny")
    assert content(out) == content(whole)


@pytest.mark.parametrize("damage", ["cut short", "damaged", "cannot be read"])
def test_damaged_file_is_named_and_encoded_again(
    vlm: VLM, images: list[Path], whole: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    found = open_features(out)
    path = out / found.entries[1]["file"]
    data = path.read_bytes()
    if damage == "cut short":
        path.write_bytes(data[:-1])
    elif damage == "damaged":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.unlink()
    with pytest.raises(VLMFastError, match=rf"{path.name}.*{damage}"):
        found.load(1)
    encode_files(vlm, images, RECIPE, out, model="tiny")
    assert content(out) == content(whole)


def test_images_that_are_there_are_not_encoded_again(
    vlm: VLM, images: list[Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    ran: list[bytes] = []
    monkeypatch.setattr(
        features, "encode_image", lambda *given: ran.append(given[1]) or encode_image(*given)
    )
    other = tmp_path / "other.png"
    tiny_models.make_image(50, 50, seed=9).save(other)
    found = encode_files(vlm, [*images, other], RECIPE, out, model="tiny")
    assert ran == [other.read_bytes()]
    assert [entry["source"] for entry in found.entries] == [*map(str, images), str(other)]


@pytest.mark.parametrize(
    ("change", "named"), [({"recipe": "divprune:budget=0.2"}, "recipe"), ({"model": "x"}, "model")]
)
def test_folder_of_another_run_is_refused(
    vlm: VLM, images: list[Path], whole: Path, change: dict[str, str], named: str
) -> None:
    before = content(whole)
    asked = {"recipe": RECIPE, "model": "tiny"} | change
    with pytest.raises(
        VLMFastError, match=rf"{MANIFEST} is of another run: {named} is .* use another"
    ):
        encode_files(vlm, images, asked["recipe"], whole, model=asked["model"])
    assert content(whole) == before


@pytest.mark.parametrize("part", ["tower", "processor", "language model"])
def test_features_of_other_settings_are_refused(
    images: list[Path], whole: Path, tmp_path: Path, part: str
) -> None:
    """Those of the language model do not matter."""
    vlm, out = VLM(*tiny_models.build_llava_next()), tmp_path / "out"
    shutil.copytree(whole, out)
    if part == "tower":
        vlm.adapter.vision_blocks()[0].layer_norm1.eps = 0.5
    elif part == "processor":
        vlm.processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    else:
        vlm.adapter.decoder.norm.variance_epsilon = 0.5
        assert len(open_features(whole, vlm)) == len(images)
        return
    with pytest.raises(VLMFastError, match="other settings of the model, its adapters or its proc"):
        open_features(whole, vlm)
    with pytest.raises(VLMFastError, match=rf"{MANIFEST} is of another run: settings_sha256 is"):
        encode_files(vlm, images, RECIPE, out, model="tiny")


def test_features_of_another_model_are_refused(whole: Path) -> None:
    with pytest.raises(VLMFastError, match="belongs to the model tiny"):
        open_features(whole, VLM(*tiny_models.build_llava_next(seed=1)))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("mmtok:0.2", "reads the question"),
        ("hired:0.2+snapkv:0.5", "snapkv acts in the cache step"),
        ("fastv:0.5", "fastv acts in the prefill step"),
        ("tome:0.5", "proportional_attention=false"),
        ("hierd:0.2", "hired"),
    ],
)
def test_recipes_that_features_cannot_carry_are_refused(
    recipe: str, reason: str, vlm: VLM, images: list[Path], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:  # before the model is loaded
        patch.setattr(VLM, "from_pretrained", lambda *args, **options: pytest.fail("loaded"))
        assert main(["encode", str(images[0]), "--recipe", recipe, "--out", str(out)]) == 2
    assert reason in capsys.readouterr().err
    with pytest.raises(RecipeError, match=reason):
        encode_files(vlm, images, recipe, out)
    assert not out.exists()


def test_merging_in_the_tower_without_weights_is_encoded(
    vlm: VLM, images: list[Path], tmp_path: Path
) -> None:
    recipe = "tome:keep=0.5,proportional_attention=false"
    found = encode_files(vlm, images[:1], recipe, tmp_path)
    answer = vlm.ask("What?", images=images[0], recipe=recipe, max_new_tokens=1)
    assert found.entries[0]["kept"] == len(answer.trace.entered)


def test_what_cannot_be_read_is_named(vlm: VLM, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    for path, reason in ((text, "text.png"), (tmp_path / "none.png", "cannot be read")):
        with pytest.raises(MediaError, match=reason):
            encode_files(vlm, [path], RECIPE, tmp_path / "out")
    (tmp_path / MANIFEST).write_text('{"format": "other"}\n')
    for folder, reason in ((tmp_path, "line 1 is damaged: it has no layout"),
                           (tmp_path / "none", r"has no manifest.jsonl")):  # fmt: skip
        with pytest.raises(VLMFastError, match=reason):
            open_features(folder)


def test_manifest_cannot_name_files_elsewhere(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    lines = (out / MANIFEST).read_text().splitlines()
    entry = json.loads(lines[1]) | {"file": "../secret"}
    (out / MANIFEST).write_text("\n".join([lines[0], json.dumps(entry), ""]))
    with pytest.raises(VLMFastError, match="outside its folder"):
        open_features(out).load(0)


def test_command_prints_counts(images: list[Path], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    argv = ["encode", *map(str, images), "--recipe", RECIPE, "--out", str(out)]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["images"]) == len(images) and found["recipe"] == RECIPE
    assert main(argv) == 0  # resumed
    before, kept = (sum(image[key] for image in found["images"]) for key in ("tokens", "kept"))
    assert kept < before
    assert f"3 images, {before:,} → {kept:,} visual tokens" in capsys.readouterr().out
