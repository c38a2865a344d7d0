"""vLLM with the plug-in answers as `VLM.ask` under the same recipe: ``make test-vllm``."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from engines import Case, Engine, asked, engine, greedy, pictured, prompted, tokens
from PIL import Image

from support import tiny_models
from vlmfast import VLM, exact_count
from vlmfast.integrations.features import encode_files, open_features
from vlmfast.integrations.vllm import export
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

SCENES = 10
RECIPES = (
    "hired:budget=0.2",
    "hired:budget=0.3,newline=keep,rule=code",
    "divprune:0.2",
    "scope:0.2",
    "visionzip:0.25",
    "flashvid:0.2",
    "random:0.3",
    "grid:0.3",
    "downsample:0.3",
    "hired:budget=0.5,saliency=received",
    "hired:budget=0.5+divprune:0.5",
)


def generated(llm: Engine, vlm: VLM, cases: Sequence[tuple[str, Any]]) -> list[Any]:
    """vLLM's answers: questions about images, or about the features of one."""
    prompts = [
        {
            "prompt": prompted(vlm, question, len(media) if isinstance(media, list) else 1),
            "multi_modal_data": {"image": media},
        }
        for question, media in cases
    ]
    return llm.generate(prompts, greedy())


def renumbered(vlm: VLM, cases: Sequence[Case], recipe: str | None) -> list[list[int]]:
    """The answers of `VLM.ask`, whose tokens count as vLLM counts them."""
    return asked(vlm, cases, recipe, compact=True)


def places(vlm: VLM, output: Any) -> int:
    """Image placeholders in a prompt."""
    return list(output.prompt_token_ids).count(vlm.adapter.image_token_id)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "tiny"
    export("tiny", out)
    return out


@pytest.fixture(scope="module")
def vlm(folder: Path) -> VLM:
    return VLM.from_pretrained(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """50 questions about scenes, at sizes that are cropped in different ways."""
    rng, found = random.Random(0), []
    for number in range(SCENES):
        example = image_example(EVAL_SEED_START + number)
        image = example.image.convert("RGB")
        if number % 2:
            image = image.resize((rng.randint(40, 200), rng.randint(40, 200)))
        questions = [qa.question for qa in example.qa] * 5
        found += [(question, [image]) for question in questions[:5]]
    assert len(found) == 50
    return found


@pytest.fixture(scope="module")
def full(vlm: VLM, cases: list[Case]) -> list[list[int]]:
    return renumbered(vlm, cases, None)


def test_without_a_recipe_answers_are_those_of_the_full_model(
    folder: Path, vlm: VLM, cases: list[Case], full: list[list[int]]
) -> None:
    """With BOS once in each prompt, also by the chat route."""
    with engine(folder) as llm:
        outputs = generated(llm, vlm, cases)
        question, (image,) = cases[0]
        messages = [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": image},
                    {"type": "text", "text": question},
                ],
            }
        ]
        (chat,) = llm.chat(messages, greedy())
    assert tokens(outputs) == full
    assert [places(vlm, output) for output in outputs] == [
        len(vlm.image_layout(images[0].size[::-1])) for _, images in cases
    ]
    assert tokens([chat]) == full[:1]
    bos = vlm.processor.tokenizer.bos_token_id
    assert {list(o.prompt_token_ids).count(bos) for o in [*outputs, chat]} == {1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_are_those_of_ask_under_the_recipe(
    folder: Path, vlm: VLM, cases: list[Case], full: list[list[int]], recipe: str
) -> None:
    with engine(folder, recipe) as llm:
        outputs = generated(llm, vlm, cases)
        again = generated(llm, vlm, cases[:3])  # their images are cached
    wanted = renumbered(vlm, cases, recipe)
    assert tokens(outputs) == wanted
    assert tokens(again) == wanted[:3]
    assert wanted != full
    for output, (_, images) in zip(outputs, cases, strict=True):
        count = exact_count(recipe, vlm.image_layout(images[0].size[::-1]))
        assert places(vlm, output) == count


def test_several_images_of_odd_sizes(folder: Path, vlm: VLM, cases: list[Case]) -> None:
    """An image that was cached alone is reused in a prompt with others."""
    recipe = "hired:budget=0.3"
    images = [cases[0][1][0], cases[5][1][0], tiny_models.make_image(31, 190)]
    several = [
        ("What is in the first image?", images[:2]),
        ("How many shapes are there?", images[::-1]),
        ("Describe the images.", images),
    ]
    with engine(folder, recipe) as llm:
        generated(llm, vlm, [("Describe the image.", images[:1])])
        outputs = generated(llm, vlm, several)
    assert tokens(outputs) == renumbered(vlm, several, recipe)
    assert tokens(outputs) != renumbered(vlm, several, None)
    layouts = [[vlm.image_layout(i.size[::-1], alone=False) for i in of] for _, of in several]
    assert [places(vlm, output) for output in outputs] == [
        sum(exact_count(recipe, layout) for layout in of) for of in layouts
    ]


def test_encoded_features_give_the_tokens_of_the_plug_in(
    folder: Path, vlm: VLM, tmp_path: Path
) -> None:
    recipe, files = "hired:budget=0.2", []
    for number in range(20):
        files.append(tmp_path / f"{number}.png")
        image_example(EVAL_SEED_START + number).image.convert("RGB").save(files[-1])
    encode_files(vlm, files, recipe, tmp_path / "features")
    features = open_features(tmp_path / "features", vlm)
    images = [[Image.open(io.BytesIO(file.read_bytes()))] for file in files]
    question = "Describe the image."
    with engine(folder, recipe) as llm:
        wanted = tokens(generated(llm, vlm, [(question, of) for of in images]))
    # Stock vLLM: without a recipe the plug-in changes nothing.
    with engine(folder, enable_mm_embeds=True) as llm:
        embeds = [features.load(index)["image_embeds"] for index in range(20)]
        found = generated(llm, vlm, [(question, tensor) for tensor in embeds])
        other = generated(llm, vlm, [(question, tensor.flip(1)) for tensor in embeds])
    assert tokens(found) == wanted
    assert tokens(other) != wanted
    assert [places(vlm, output) for output in found] == [e["kept"] for e in features.entries]


def info_of(folder: Path, recipe: str | None) -> Any:
    """What counts the places of images, without an engine."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    overrides = {} if recipe is None else {"vlmfast_recipe": recipe}
    config = ModelConfig(str(folder), dtype="float32", hf_overrides=overrides)
    return MULTIMODAL_REGISTRY.create_processor(config).info


@pytest.fixture(scope="module")
def families(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"llava_next": folder}
    for name, build in (
        ("llava", random_models.build_llava),
        ("llava_onevision", random_models.build_onevision),
    ):
        base = tmp_path_factory.mktemp(name)
        build(base / "saved")
        export(base / "saved", base / "exported")
        found[name] = base / "exported"
    found["internvl"] = tmp_path_factory.mktemp("internvl")
    random_models.build_internvl(found["internvl"])
    return found


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
def test_counts_are_equal_on_many_sizes(families: dict[str, Path], family: str) -> None:
    vlm = VLM.from_pretrained(families[family], dtype="float32", device="cpu")
    recipe, rng = "hired:budget=0.3+divprune:0.7", random.Random(0)
    info = info_of(families[family], recipe)
    assert info_of(families[family], None).plans is None
    for _ in range(150):
        size = rng.randint(16, 2000), rng.randint(16, 2000)
        layout, given = vlm.image_layout(size), {"image_height": size[0], "image_width": size[1]}
        assert info.get_num_image_tokens(**given) == len(layout), size
        counted = info.plans.of().count(info.plans.family.media(size))
        assert counted == exact_count(recipe, layout), size


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "internvl"])
@pytest.mark.parametrize("recipe", [None, "hired:budget=0.4", "divprune:0.4", "visionzip:0.4"])
def test_other_families(families: dict[str, Path], family: str, recipe: str | None) -> None:
    vlm = VLM.from_pretrained(families[family], dtype="float32", device="cpu")
    sizes = [(64, 64), (90, 40), (33, 120)]
    images = [tiny_models.make_image(*size, seed=n) for n, size in enumerate(sizes)]
    cases = [(question, [image]) for image in images for question in ("What?", "How many?")]
    with engine(families[family], recipe) as llm:
        found = tokens(generated(llm, vlm, cases))
    assert found == renumbered(vlm, cases, recipe)
    if recipe is not None:
        assert found != renumbered(vlm, cases, None)


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "internvl"])
def test_recipes_of_requests_in_one_batch(families: dict[str, Path], family: str) -> None:
    """Also one that reads the question; first, again from the caches, and of no request."""
    vlm = VLM.from_pretrained(families[family], dtype="float32", device="cpu")
    images = [image_example(EVAL_SEED_START + n).image.convert("RGB") for n in range(3)]
    cases = [(question, [image]) for image in images for question in ("What?", "How many?")]
    recipes = ("none", "hired:budget=0.4", "visionzip:0.3", "mmtok:0.4", "grid:0.3")
    wanted = {recipe: renumbered(vlm, cases, recipe) for recipe in recipes}
    prompts = [pictured(vlm, case, recipe) for recipe in recipes for case in cases]
    with engine(families[family], recipes[1]) as llm:
        for number in range(2):
            found = iter(llm.answers(prompts))
            for recipe in recipes:
                assert [next(found) for _ in cases] == wanted[recipe], (recipe, number)
        assert llm.answers([pictured(vlm, case) for case in cases]) == wanted[recipes[1]]
    assert len({str(answers) for answers in wanted.values()}) == len(recipes)


@pytest.mark.parametrize("recipe", ["scope:budget=0.3", "balanced"])
def test_choices_differ_only_where_gains_are_equal(
    folder: Path, vlm: VLM, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two towers round differently; plain images have patches whose gains are the same."""
    from vlmfast.compressors.tokens import scope

    choices, cover = [], scope.cover

    def noted(alike: Any, count: int, scale: Any) -> Any:
        choices.append((alike.double(), scale.double(), cover(alike, count, scale=scale)))
        return choices[-1][2]

    monkeypatch.setattr(scope, "cover", noted)
    cases = [("What is here?", [tiny_models.make_image(64, 64, seed=n)]) for n in range(12)]
    with engine(folder, "none") as llm:
        llm.answers([pictured(vlm, case, recipe) for case in cases])
    renumbered(vlm, cases, recipe)
    differ = []
    for found, wanted in zip(choices[:12], choices[12:], strict=True):
        for one, other in zip(found[:2], wanted[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        rows = (found[2] != wanted[2]).nonzero().flatten()
        differ.append(len(rows) > 0)
        if len(rows):
            alike, scale, order = wanted
            known = alike[:, order[: rows[0]]]
            covered = known.amax(1) if known.numel() else torch.zeros(len(alike)).double()
            gains = (alike - covered[:, None]).clamp(min=0).sum(0) * scale
            own, others = gains[order[rows[0]]], gains[found[2][rows[0]]]
            torch.testing.assert_close(own, others, rtol=1e-6, atol=0.0)
    assert sum(differ) < len(differ)


@pytest.mark.parametrize("family", ["llava", "llava_onevision", "internvl"])
def test_two_ranks_choose_the_same_tokens(families: dict[str, Path], family: str) -> None:
    """Each has half of the heads of the vision tower: the first by CLS, the second by all rows."""
    vlm = VLM.from_pretrained(families[family], dtype="float32", device="cpu")
    cases = [("What?", [tiny_models.make_image(80, 60, seed=n)]) for n in range(3)]
    recipes = ("none", "hired:budget=0.4", "visionzip:0.4")
    split = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(families[family], "none", **split) as llm:
        found = iter(llm.answers([pictured(vlm, c, recipe) for recipe in recipes for c in cases]))
    for recipe in recipes:
        assert [next(found) for _ in cases] == renumbered(vlm, cases, recipe), recipe


@pytest.mark.parametrize(
    ("own", "given", "reason"),
    [
        (None, {"vlmfast_recipe": "divprune:0.2"}, "this server takes no recipes"),
        ("none", {"vlmfast_recipe": "hired:0.2+snapkv:0.5"}, "acts in the cache step"),
        ("none", {"vlmfast_recipe": "divprone:0.2"}, "divprune"),
        ("none", {"vlmfast_recipe": "mine.yaml"}, "must be the text of a recipe"),
        ("none", {"vlmfast_text": [1, 2]}, "vlmfast_text is unknown"),
    ],
)
def test_requests_are_refused_with_the_reason_and_the_server_lives_on(
    folder: Path, vlm: VLM, cases: list[Case], own: str | None, given: Any, reason: str
) -> None:
    with engine(folder, own) as llm:
        with pytest.raises(ValueError, match=reason):
            llm.answers([{**pictured(vlm, cases[0]), "mm_processor_kwargs": given}])
        assert llm.answers([pictured(vlm, cases[0])]) == renumbered(vlm, cases[:1], None)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("elastic:0.2", "trained"),
        ("hired:0.2+snapkv:0.5", "acts in the cache step"),
    ],
)
def test_refused_at_the_start_with_the_reason(folder: Path, recipe: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason), engine(folder, recipe):
        pass


def test_registering_twice_is_harmless() -> None:
    from vllm import ModelRegistry
    from vlmfast_vllm import ARCHITECTURES, register

    register()
    before = {name: ModelRegistry.models[name] for name in ARCHITECTURES}
    register()
    assert before.keys() <= ModelRegistry.models.keys()
    assert all(ModelRegistry.models[name].module_name.startswith("vlmfast_vllm") for name in before)
