"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL with the plug-in answer as `VLM.ask`: ``make test-vllm``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from engines import Engine, asked, engine, filmed, greedy, pictured

from support import tiny_models
from vlmfast import VLM, ModelError, exact_count

QWENS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
RECIPES = (
    "none",
    "hired:budget=0.3",
    "hired:budget=0.3,reserve=0.3",
    "divprune:0.3",
    "divprune:budget=0.5,across=frame",
    "visionzip:budget=0.3",
    "visionzip:budget=0.3,saliency=norm",
    "visionzip:budget=0.6",
    "scope:budget=0.3",
    "scope:budget=0.4,saliency=norm",
    "flashvid:budget=0.3",
    "prumerge:budget=0.4",
    "prumerge-plus:budget=0.4",
    "grid:budget=0.3",
    "downsample:budget=0.3",
    "mmtok:budget=0.3",
    "mmtok:budget=0.6",
    "hired:budget=0.5+divprune:budget=0.5",
    "balanced",
    "hired:budget=0.3,positions=compact",
    "divprune:budget=0.3,positions=compact",
    "visionzip:budget=0.6,positions=compact",
    "flashvid:budget=0.3,positions=compact",
    "grid:budget=0.3,positions=compact",
    "mmtok:budget=0.3,positions=compact",
    "hired:budget=0.5+divprune:budget=0.5,positions=compact",
)
QUESTIONS = ("What is it?", "How many shapes are in the picture, and where?")
LONG = "Look at the picture with care and answer the next question in a few short words. "
Models = dict[str, tuple[Path, VLM]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    found = {}
    for name in QWENS:
        folder = tmp_path_factory.mktemp(name)
        random_models.build_qwen(name, folder)
        found[name] = folder, VLM.from_pretrained(folder, dtype="float32", device="cpu")
    return found


@pytest.fixture(scope="module", params=QWENS)
def running(request: Any, models: Models) -> Iterator[tuple[VLM, Engine]]:
    """A server whose own recipe is one of those that requests name, too."""
    folder, vlm = models[request.param]
    with engine(folder, RECIPES[1], block_size=32) as llm:
        yield vlm, llm


def scenes() -> list[Any]:
    sizes = ((64, 64), (128, 48), (40, 120))
    return [tiny_models.make_image(*size, seed=n) for n, size in enumerate(sizes)]


def clips() -> list[Any]:
    """Videos of 2, 4 and 3 steps; the last has an odd number of frames."""
    sizes = ((4, 64, 48), (8, 48, 64), (5, 64, 64))
    return [
        [tiny_models.make_image(width, height, seed=3 * n + i // 2) for i in range(frames)]
        for n, (frames, width, height) in enumerate(sizes)
    ]


def test_recipes_of_requests_in_one_batch(running: tuple[VLM, Engine]) -> None:
    """First, again from the caches, and with a new question about the same images."""
    vlm, llm = running
    cases = [(QUESTIONS[0], [image]) for image in scenes()] + [("Compare.", scenes()[1:])]
    later = [(QUESTIONS[1], images) for _, images in cases]
    full, changed = asked(vlm, cases, None), 0
    wanted = {recipe: asked(vlm, cases, recipe) for recipe in RECIPES}
    prompts = [pictured(vlm, case, recipe) for recipe in RECIPES for case in cases]
    for number in range(2):
        found = iter(llm.answers(prompts))
        for recipe in RECIPES:
            assert [next(found) for _ in cases] == wanted[recipe], (recipe, number)
    found = iter(llm.answers([pictured(vlm, c, recipe) for recipe in RECIPES for c in later]))
    for recipe in RECIPES:
        assert [next(found) for _ in later] == asked(vlm, later, recipe), recipe
        changed += sum(a != b for a, b in zip(wanted[recipe], full, strict=True))
    assert changed > len(cases) * (len(RECIPES) - 1) * 0.9  # the control: recipes change answers


def test_a_request_without_a_recipe_has_that_of_the_server(running: tuple[VLM, Engine]) -> None:
    vlm, llm = running
    cases = [(QUESTIONS[0], [image]) for image in scenes()]
    outputs = llm.generate([pictured(vlm, case) for case in cases], greedy())
    assert [list(o.outputs[0].token_ids) for o in outputs] == asked(vlm, cases, RECIPES[1])
    for output, (_, (image,)) in zip(outputs, cases, strict=True):
        count = exact_count(RECIPES[1], vlm.image_layout(image.size[::-1]))
        assert list(output.prompt_token_ids).count(vlm.adapter.image_token_id) == count


def test_random_draws_as_for_the_first_image(running: tuple[VLM, Engine]) -> None:
    vlm, llm = running
    cases = [(question, [image]) for question in QUESTIONS for image in scenes()]
    recipe = "random:budget=0.3"
    assert llm.answers([pictured(vlm, c, recipe) for c in cases]) == asked(vlm, cases, recipe)


def test_an_image_is_encoded_once_for_each_recipe_and_question(
    running: tuple[VLM, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe is a part of the key of the encoder's cache; the question where it is read."""
    vlm, llm = running
    model, encoded = llm.model, []
    original = model.embed_multimodal

    def counted(**given: Any) -> Any:
        found = original(**given)
        encoded.append(len(found))
        return found

    monkeypatch.setattr(model, "embed_multimodal", counted)
    image = tiny_models.make_image(72, 56, seed=77)

    def encodings(question: str, recipe: str | None) -> int:
        encoded.clear()
        llm.answers([pictured(vlm, (question, [image]), recipe)])
        return sum(encoded)

    one, other = "divprune:budget=0.31", "mmtok:budget=0.31"
    assert [encodings(q, one) for q in (*QUESTIONS, QUESTIONS[0])] == [1, 0, 0]
    assert [encodings(q, other) for q in (*QUESTIONS, QUESTIONS[0])] == [1, 1, 0]
    assert encodings(QUESTIONS[0], None) == 1  # the server's own, which it is keyed by, too
    assert encodings(QUESTIONS[0], RECIPES[1]) == 0


@pytest.mark.parametrize("name", QWENS)
def test_chunks_and_prefixes(models: Models, name: str) -> None:
    """Prompts in chunks of 24 tokens, most of which the prefix cache has later."""
    folder, vlm = models[name]
    sizes = ((128, 96), (160, 96), (90, 190))
    images = [tiny_models.make_image(*size, seed=n) for n, size in enumerate(sizes)]
    recipes = ["none", "hired:budget=0.4", "divprune:budget=0.6", "visionzip:0.4", "mmtok:0.5"]
    recipes += [f"{recipe},positions=compact" for recipe in recipes[1:]]
    rounds = [
        [(LONG + QUESTIONS[0], [image]) for image in images],
        [(LONG + QUESTIONS[1], [image]) for image in images],
        [(LONG + QUESTIONS[0], images[:2])],
        [(LONG + QUESTIONS[0], [image]) for image in images],
    ]
    cached = 0
    with engine(folder, "none", block_size=32, max_num_batched_tokens=24, max_num_seqs=2) as llm:
        for cases in rounds:
            prompts = [pictured(vlm, case, recipe) for recipe in recipes for case in cases]
            outputs = llm.generate(prompts, greedy())
            found = iter([list(output.outputs[0].token_ids) for output in outputs])
            for recipe in recipes:
                assert [next(found) for _ in cases] == asked(vlm, cases, recipe), recipe
            cached += sum(output.num_cached_tokens or 0 for output in outputs)
    assert cached > 1000


def test_the_language_model_may_be_compiled(models: Models) -> None:
    folder, vlm = models["qwen3_vl"]
    cases = [(question, [image]) for question in QUESTIONS for image in scenes()]
    recipes = ("none", "hired:budget=0.3", "divprune:budget=0.3,positions=compact")
    with engine(folder, "none", enforce_eager=False) as llm:
        found = iter(llm.answers([pictured(vlm, c, recipe) for recipe in recipes for c in cases]))
    for recipe in recipes:
        assert [next(found) for _ in cases] == asked(vlm, cases, recipe), recipe


@pytest.mark.parametrize("name", QWENS)
def test_videos(models: Models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All recipes, again from the caches; several in one pass of the encoder.

    Text after a video stands where transformers puts it.
    """
    from vlmfast_vllm.grids import Grids

    if name != "qwen3_vl":
        monkeypatch.setattr(Grids, "counted", (1, 2))
    folder, vlm = models[name]
    question = LONG + "What moves in the video?"
    cases = [(question, clip) for clip in clips()]
    wanted = {recipe: asked(vlm, cases, recipe, video=True) for recipe in RECIPES}
    # The normalization of vLLM is that of images, and the tiny processors differ.
    options = {"mm_device_do_normalize": False, "block_size": 32}
    limit, passes = {"limit_mm_per_prompt": {"image": 0, "video": 1}}, []
    with engine(folder, "none", **options, **limit) as llm:
        process = llm.model._process_video_input

        def counted(given: Any) -> Any:
            passes.append(len(given["video_grid_thw"]))
            return process(given)

        monkeypatch.setattr(llm.model, "_process_video_input", counted)
        prompts = [filmed(vlm, case, recipe) for recipe in RECIPES for case in cases]
        for number in range(2):
            found = iter(llm.answers(prompts))
            for recipe in RECIPES:
                assert [next(found) for _ in cases] == wanted[recipe], (recipe, number)
    assert max(passes) > 2
    assert sum(wanted[recipe] != wanted["none"] for recipe in RECIPES) == len(RECIPES) - 1


@pytest.mark.parametrize("gathered", [True, False])
def test_two_ranks_choose_the_same_tokens(models: Models, gathered: bool) -> None:
    """Each has half of the heads; the control leaves the other half out."""
    folder, vlm = models["qwen2_5_vl"]
    cases = [(QUESTIONS[0], [image]) for image in scenes()]
    recipes = ["none", "divprune:0.3", "mmtok:budget=0.3"] if gathered else []
    recipes += ["hired:budget=0.3", "visionzip:budget=0.3", "scope:budget=0.3,positions=compact"]
    split = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    extension = {} if gathered else {"worker_extension_cls": "ungathered.Worker"}
    with engine(folder, "none", **split, **extension) as llm:
        found = iter(llm.answers([pictured(vlm, c, recipe) for recipe in recipes for c in cases]))
    for recipe in recipes:
        assert ([next(found) for _ in cases] == asked(vlm, cases, recipe)) is gathered, recipe


def test_the_encoder_holds_no_more_than_without_a_recipe(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM schedules by kept tokens: of images that it encodes at once, more may be too many."""
    folder, vlm = models["qwen2_5_vl"]
    image = vlm.image_layout((240, 240))
    most = 2 * len(image)
    cases = [(QUESTIONS[0], [tiny_models.make_image(240, 240, seed=n)]) for n in range(8)]
    asked_for, passes = [], []
    with engine(folder, "none", max_num_batched_tokens=most, max_num_seqs=8) as llm:
        model = llm.model
        embed, process = model.embed_multimodal, model._process_image_input

        def embedded(**given: Any) -> Any:
            asked_for.append(len(given["image_grid_thw"]))
            return embed(**given)

        def processed(given: Any) -> Any:
            passes.append(len(given["image_grid_thw"]))
            return process(given)

        monkeypatch.setattr(model, "embed_multimodal", embedded)
        monkeypatch.setattr(model, "_process_image_input", processed)
        found = llm.answers([pictured(vlm, case, "divprune:0.1") for case in cases])
    assert found == asked(vlm, cases, "divprune:0.1")
    assert max(asked_for) > 2 >= max(passes) and sum(asked_for) == sum(passes) == len(cases)


@pytest.mark.parametrize("kind", ["positions", "order", "keys"])
def test_what_is_off_by_one_changes_answers(
    models: Models, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all other tests here."""
    from vlmfast_vllm import qwen

    folder, vlm = models["qwen2_5_vl"]
    cases, recipes = [(QUESTIONS[0], [image]) for image in scenes()], RECIPES[1:5:2]
    wanted = [answer for recipe in recipes for answer in asked(vlm, cases, recipe)]
    given = qwen.with_places
    if kind == "positions":
        low = torch.tensor([0, 1, 0, 1, 0, 1])
        monkeypatch.setattr(qwen, "with_places", lambda parts, ids: given(parts, ids + low))
    elif kind == "order":
        monkeypatch.setattr(
            qwen, "with_places", lambda parts, ids: given([x.roll(1, 0) for x in parts], ids)
        )
    else:
        processor = qwen.Processor

        def shared(self: Any, inputs: Any) -> Any:
            plain = replace(inputs, hf_processor_mm_kwargs={})
            return super(processor, self)._get_mm_hashes(plain)

        monkeypatch.setattr(processor, "_get_mm_hashes", shared, raising=False)
    with engine(folder, "none") as llm:
        prompts = [pictured(vlm, case, recipe) for recipe in recipes for case in cases]
        found = llm.answers(prompts)
    differ = [a != b for a, b in zip(found, wanted, strict=True)]
    assert sum(differ) >= len(cases)


def test_ids_travel_exactly_in_bfloat16() -> None:
    from vlmfast_vllm.travel import digits, split_places, with_places

    ids = torch.arange(65536).expand(3, -1) - torch.tensor([0, 1, 2])[:, None]
    ids = ids.clamp(min=0)
    features = torch.randn(65536, 4, dtype=torch.bfloat16)
    found, places = split_places(with_places([features], digits(ids)))
    assert torch.equal(places, ids) and torch.equal(found, features)
    rounded = torch.cat([features, ids.T.to(torch.bfloat16)], dim=1)[:, 4:].long().T
    assert not torch.equal(rounded, ids)  # the control
    with pytest.raises(ModelError, match="65537 rotary ids"):
        digits(torch.full((3, 1), 65536))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hf_overrides": {"vlmfast_recipe": "tome:0.3"}}, "acts in the in-encoder step"),
        ({"video_pruning_rate": 0.5}, "video_pruning_rate cannot be used"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(
    models: Models, options: dict[str, Any], reason: str
) -> None:
    folder, _ = models["qwen2_5_vl"]
    with pytest.raises(ValueError, match=reason), engine(folder, "none", **options):
        pass
