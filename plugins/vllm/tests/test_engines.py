"""vLLM with the plug-in answers as `VLM.ask` under the same recipe: ``make test-vllm``."""

from __future__ import annotations

import gc
import io
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

vllm = pytest.importorskip("vllm", reason="make test-vllm builds its environment")
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import random_models  # noqa: E402

import tiny_models  # noqa: E402
from vlmfast import VLM, Recipe, exact_count  # noqa: E402
from vlmfast.eval.axes import with_field  # noqa: E402
from vlmfast.integrations.features import encode_files, open_features  # noqa: E402
from vlmfast.integrations.vllm import export  # noqa: E402
from vlmfast.scenes.examples import EVAL_SEED_START, image_example  # noqa: E402

SCENES, NEW_TOKENS = 10, 12
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
Case = tuple[str, list[Image.Image]]


class Engine:
    """Holds the only reference to an engine: vLLM shuts it down when it is collected."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, *args: Any, **options: Any) -> list[Any]:
        return self.llm.generate(*args, use_tqdm=False, **options)

    def chat(self, *args: Any, **options: Any) -> list[Any]:
        return self.llm.chat(*args, use_tqdm=False, **options)


@contextmanager
def engine(folder: Path, recipe: str | None = None, **options: Any) -> Iterator[Engine]:
    """An engine in this process; ``recipe`` as a server gets it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    overrides = {} if recipe is None else {"hf_overrides": {"vlmfast_recipe": recipe}}
    running = Engine(
        vllm.LLM(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=16,
            limit_mm_per_prompt={"image": 3},
            **overrides,
            **options,
        )
    )
    try:
        yield running
    finally:
        running.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def prompted(vlm: VLM, question: str, images: int) -> str:
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    text = vlm.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text.removeprefix(vlm.processor.tokenizer.bos_token)  # which `generate` adds


def generated(llm: Engine, vlm: VLM, cases: Sequence[tuple[str, Any]]) -> list[Any]:
    """vLLM's answers: questions about images, or about the features of one."""
    sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    prompts = [
        {
            "prompt": prompted(vlm, question, len(media) if isinstance(media, list) else 1),
            "multi_modal_data": {"image": media},
        }
        for question, media in cases
    ]
    return llm.generate(prompts, sampling)


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def asked(vlm: VLM, cases: Sequence[Case], recipe: str | None) -> list[list[int]]:
    renumbered = with_field(Recipe.of(recipe), "positions", "compact")
    answers = (
        vlm.ask(question, images=images, recipe=renumbered, max_new_tokens=NEW_TOKENS)
        for question, images in cases
    )
    return [list(answer.token_ids) for answer in answers]


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
    return asked(vlm, cases, None)


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
        sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
        (chat,) = llm.chat(messages, sampling)
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
    wanted = asked(vlm, cases, recipe)
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
    assert tokens(outputs) == asked(vlm, several, recipe)
    assert tokens(outputs) != asked(vlm, several, None)
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
    return found


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision"])
def test_counts_are_equal_on_500_sizes(families: dict[str, Path], family: str) -> None:
    vlm = VLM.from_pretrained(families[family], dtype="float32", device="cpu")
    recipe, rng = "hired:budget=0.3+divprune:0.7", random.Random(0)
    stock, reduced = (info_of(families[family], r) for r in (None, recipe))
    for _ in range(500):
        size = rng.randint(16, 2000), rng.randint(16, 2000)
        layout, given = vlm.image_layout(size), {"image_height": size[0], "image_width": size[1]}
        assert stock.get_num_image_tokens(**given) == len(layout), size
        assert reduced.get_num_image_tokens(**given) == exact_count(recipe, layout), size


@pytest.mark.parametrize("family", ["llava", "llava_onevision"])
@pytest.mark.parametrize("recipe", [None, "hired:budget=0.4", "divprune:0.4", "visionzip:0.4"])
def test_other_families(families: dict[str, Path], family: str, recipe: str | None) -> None:
    vlm = VLM.from_pretrained(families[family], dtype="float32", device="cpu")
    sizes = [(64, 64), (90, 40), (33, 120)]
    images = [tiny_models.make_image(*size, seed=n) for n, size in enumerate(sizes)]
    cases = [(question, [image]) for image in images for question in ("What?", "How many?")]
    with engine(families[family], recipe) as llm:
        found = tokens(generated(llm, vlm, cases))
    assert found == asked(vlm, cases, recipe)
    if recipe is not None:
        assert found != asked(vlm, cases, None)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("mmtok:0.2", "reads the question"),
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
