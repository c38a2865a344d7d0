"""`vlmfast.attach`: a model's own ``generate`` under a recipe for every family, then restored."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

import vlmfast
from support import tiny_families, tiny_models
from support.closeness import close, network
from support.engine.private import runs, tiling
from vlmfast import VLM, Attachment, ModelError, RecipeError, VLMFastError

BUILD = tiny_families.builders()
VIDEOS = ("llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl")
NEW = 6


def make_image(seed: int, width: int = 60, height: int = 44) -> Image.Image:
    of = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(of)


# Three rows of different lengths: one image, three, none.
ROWS = [
    ("what is here ?", [make_image(0)]),
    ("and in these ?", [make_image(1, 30, 70), make_image(2, 90, 33), make_image(3)]),
    ("hello", []),
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(n, marks=[] if n in tiny_families.FIRST else pytest.mark.slow) for n in BUILD
    ],
)
def pair(request) -> tuple[Any, Any]:
    return BUILD[request.param]()


@pytest.fixture(scope="module")
def llava() -> tuple[Any, Any]:
    return BUILD["llava"]()


def prompt(processor: Any, question: str, images: int = 0, videos: int = 0) -> str:
    content = [{"type": "image"}] * images + [{"type": "video"}] * videos
    content.append({"type": "text", "text": question})
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )


def ready(vlm: VLM, texts: list[str], images: list[list], side: str = "left", **more) -> dict:
    """The processor's inputs for a batch."""
    # The adapter's processor, which fills in what older checkpoints lack.
    processor = vlm.adapter.processor
    processor.tokenizer.padding_side = side
    images = images if vlm.adapter.nested else [one for row in images for one in row]
    if vlm.adapter.config.model_type == "llava_onevision":
        images = [row for row in images if row]
    if any(images):
        more["images"] = images
    return dict(processor(text=texts, padding=True, return_tensors="pt", **more))


def batch(vlm: VLM, rows: list[tuple[str, list]] = ROWS, side: str = "left") -> dict:
    texts = [prompt(vlm.processor, question, len(of)) for question, of in rows]
    return ready(vlm, texts, [of for _, of in rows], side)


def alone(vlm: VLM, recipe: str = "none", **generation) -> list[list[int]]:
    """The ids that `VLM.ask` gives for `ROWS`."""
    given = {"max_new_tokens": NEW, **generation}
    return [
        vlm.ask(question, images=images, recipe=recipe, **given).token_ids
        for question, images in ROWS
    ]


def answer_ids(ids: torch.Tensor, inputs: dict) -> list[list[int]]:
    rows = ids[:, inputs["input_ids"].shape[1] :].tolist()
    return [[token for token in row if token != 0] for row in rows]


@pytest.mark.cases(4)
def test_padded_batch_equals_hugging_face(pair):
    model, processor = pair
    inputs = batch(VLM(model, processor))
    full = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    before = dict(vars(model))
    with vlmfast.attach(model, processor) as attached:
        got = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        assert len(attached.answers) == len(ROWS)
        assert attached.answers[2].stats.visual_tokens_in == 0
        assert attached.answers[1].stats.visual_tokens_in > 0
    assert vars(model).keys() == before.keys()
    assert torch.equal(got, full)
    # Control: other pixels give other tokens.
    turned = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
    with vlmfast.attach(model, processor):
        assert not torch.equal(model.generate(**turned, max_new_tokens=NEW), full)


# Every two of family, recipe and side meet; the other half is slow.
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("pair", "recipe", "side"),
    [
        pytest.param(
            family,
            recipe,
            side,
            marks=[]
            if (i + j + k) % 2 == 0 and family in tiny_families.FIRST
            else [pytest.mark.slow],
        )
        # PaliGemma's processor needs an image in each row.
        for i, family in enumerate(name for name in BUILD if name != "paligemma")
        for j, recipe in enumerate(["random:0.5", "fastv", "snapkv:0.5,window=0.1", "draft-ngram"])
        for k, side in enumerate(["left", "right"])
    ],
    indirect=["pair"],
)
def test_each_row_equals_its_single_answer(pair, recipe, side):
    model, processor = pair
    vlm = VLM(model, processor)
    if recipe.startswith("draft") and vlm.adapter.state_layers:
        pytest.skip("states cannot be rolled back, so drafts are refused")
    inputs = batch(vlm, side=side)
    with vlmfast.attach(model, processor, recipe) as attached:
        got = model.generate(**inputs, max_new_tokens=NEW)
    expected = alone(vlm, recipe)
    assert answer_ids(got, inputs) == [[t for t in row if t != 0] for row in expected]
    assert [answer.token_ids for answer in attached.answers] == expected
    if recipe == "random:0.5":
        assert expected != alone(vlm)  # control: the recipe changes something
        for answer in attached.answers[:2]:
            assert answer.stats.equivalent_tokens < 0.6 * answer.stats.visual_tokens_in


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", VIDEOS)
def test_videos_and_images_go_to_their_rows(family):
    model, processor = BUILD[family]()
    vlm = VLM(model, processor)
    frames = [[make_image(10 * n + i, 40, 40) for i in range(4)] for n in range(2)]
    asked = [("what happens ?", 1), ("hello", 0), ("and then, in the other one ?", 1)]
    videos = [np.stack([np.asarray(frame) for frame in video]) for video in frames]
    about = [{"fps": 1.0, "total_num_frames": 4, "frames_indices": list(range(4))} for _ in videos]
    texts = [prompt(processor, question, 0, count) for question, count in asked]
    inputs = ready(
        vlm,
        texts,
        [],
        videos=videos,
        video_metadata=about,
        do_sample_frames=False,
    )
    full = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    with vlmfast.attach(model, processor) as attached:
        assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), full)
    with vlmfast.attach(model, processor, "grid:0.5"):
        got = model.generate(**inputs, max_new_tokens=NEW)
    kept = [answer.stats.visual_tokens_in for answer in attached.answers]
    assert kept[0] == kept[2] > 0 == kept[1]
    video = {"video": frames[1], "num_frames": 4}
    expected = vlm.ask(asked[2][0], **video, recipe="grid:0.5", max_new_tokens=NEW).token_ids
    assert answer_ids(got, inputs)[2] == [t for t in expected if t != 0]


def test_flat_image_list_is_cropped_per_image_by_onevision():
    model, processor = BUILD["llava_onevision"]()
    text = prompt(processor, "both ?", 2)
    given = {"text": [text], "return_tensors": "pt"}
    images = [make_image(0), make_image(1, 30, 70)]
    flat = dict(processor(images=images, **given))
    nested = dict(processor(images=[images], **given))
    assert flat["input_ids"].shape[1] > nested["input_ids"].shape[1]
    for inputs in (flat, nested):
        full = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        with vlmfast.attach(model, processor):
            assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, do_sample=False), full)


# --- what generate returns -----------------------------------------------------------------------


def test_arguments_and_results_equal_hugging_face(llava):
    model, processor = llava
    vlm = VLM(model, processor)
    inputs = batch(vlm)
    given = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    cases = [
        {"max_new_tokens": 5},
        {"max_length": inputs["input_ids"].shape[1] + 3},
        {"min_new_tokens": 3, "max_new_tokens": 4, "repetition_penalty": 1.3},
        {},  # 20 new tokens
        {"generation_config": GenerationConfig(max_new_tokens=3, eos_token_id=2, pad_token_id=0)},
        {"max_new_tokens": 5, "suppress_tokens": [40, 41, 42]},
    ]
    for case in cases:
        config = model.generation_config.to_dict()
        full = model.generate(**inputs, **given, do_sample=False, **case)
        with vlmfast.attach(model, processor):
            got = model.generate(**inputs, **given, do_sample=False, **case)
            plain = model.generate(**inputs, do_sample=False, **case)
        assert torch.equal(got.sequences, full.sequences)
        assert torch.equal(plain, full.sequences)
        assert len(got.scores) == len(full.scores) == len(got.logits)
        terms = network(model, full.sequences.shape[1])
        for a, b in zip(got.scores, full.scores, strict=True):
            close(a[:2], b[:2], terms=terms)
        assert model.generation_config.to_dict() == config


@pytest.fixture
def settings(llava) -> Iterator[GenerationConfig]:
    """The model's generation config; changes are undone."""
    model, _ = llava
    own = model.generation_config
    model.generation_config = copy.deepcopy(own)
    yield model.generation_config
    model.generation_config = own


def test_arguments_and_configs_merge_as_in_hugging_face(llava, settings):
    model, processor = llava
    vlm = VLM(model, processor)
    inputs, tokens = batch(vlm), alone(vlm)
    length, given = inputs["input_ids"].shape[1], GenerationConfig(do_sample=False)
    stop = processor.tokenizer.decode(tokens[1][2:4])
    cases = [
        ({"max_length": length + 3}, {"generation_config": given}),
        ({"max_new_tokens": 3}, {"max_new_tokens": None}),  # 20 new tokens
        ({"max_new_tokens": 3}, {"generation_config": GenerationConfig(max_length=length + 2)}),
        ({"eos_token_id": tokens[0][1]}, {"eos_token_id": None, "max_new_tokens": NEW}),
        ({"eos_token_id": tokens[0][1]}, {"generation_config": given, "max_new_tokens": NEW}),
        ({"stop_strings": [stop]}, {"generation_config": given, "max_new_tokens": NEW}),
        ({"do_sample": True, "top_k": 1}, {"do_sample": None, "max_new_tokens": 2}),
        ({"pad_token_id": None}, {"eos_token_id": torch.tensor([7, 9]), "max_new_tokens": 2}),
    ]
    for own, more in cases:
        before = {key: getattr(settings, key) for key in own}
        vars(settings).update(own)
        # Hugging Face needs a tokenizer for stop strings.
        full = model.generate(**inputs, **more, tokenizer=processor.tokenizer)
        with vlmfast.attach(model, processor):
            assert torch.equal(model.generate(**inputs, **more), full), (own, more)
        vars(settings).update(before)
    # Control: the setting that was switched off has an effect.
    settings.eos_token_id = tokens[0][1]
    with vlmfast.attach(model, processor):
        assert answer_ids(model.generate(**inputs, max_new_tokens=NEW), inputs)[0] == tokens[0][:2]
    settings.top_k, settings.do_sample = 1, True
    one, free = batch(vlm, ROWS[:1]), {"top_k": None, "temperature": 9.0, "max_new_tokens": NEW}
    torch.manual_seed(0)
    full = model.generate(**one, **free)
    with vlmfast.attach(model, processor):
        torch.manual_seed(0)
        assert torch.equal(model.generate(**one, **free), full)
    assert answer_ids(full, one)[0] != tokens[0]


def test_missing_mask_is_inferred_as_in_hugging_face(llava, settings):
    model, processor = llava
    inputs = batch(VLM(model, processor))
    mask, seen = inputs.pop("attention_mask"), []
    for pad, ends in ((0, 2), (0, 0), (9, 2), (None, 0)):
        settings.pad_token_id = None if pad is None else 0
        ids = inputs["input_ids"].where(mask.bool(), 0 if pad is None else pad)
        given = {"eos_token_id": ends, "max_new_tokens": NEW, "generation_config": None}
        if pad == 9:
            given["pad_token_id"] = 9
        if pad == 0 and ends == 2:
            given["generation_config"] = GenerationConfig()
        full = model.generate(**{**inputs, "input_ids": ids}, **given, do_sample=False)
        with vlmfast.attach(model, processor):
            got = model.generate(**{**inputs, "input_ids": ids}, **given, do_sample=False)
        assert torch.equal(got, full), (pad, ends)
        seen.append(got[0, -NEW:].tolist())
    assert seen[0] == seen[2] != seen[1]  # padding that ends an answer is taken for text


def test_finished_rows_are_padded_as_in_hugging_face(llava):
    model, processor = llava
    vlm = VLM(model, processor)
    inputs = batch(vlm)
    tokens = alone(vlm)
    ends = tokens[0][1]  # the second token of the first row ends it
    assert ends not in tokens[1][:2]
    given = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 3, "do_sample": False}
    full = model.generate(**inputs, **given)
    with vlmfast.attach(model, processor):
        got = model.generate(**inputs, **given, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(got.sequences, full)
    assert got.sequences[0, -1] == 3 != got.sequences[1, -1]
    assert got.scores[-1][0].argmax() == 3


def test_single_row_samples_and_streams_as_hugging_face(llava):
    model, processor = llava
    inputs = batch(VLM(model, processor), ROWS[:1])
    given = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(3)
    full = model.generate(**inputs, **given)
    streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=True, timeout=30)
    with vlmfast.attach(model, processor):
        torch.manual_seed(3)
        got = model.generate(**inputs, **given, streamer=streamer)
        seeded = [model.generate(**inputs, **given, seed=5) for _ in range(2)]
    assert torch.equal(got, full)
    assert torch.equal(*seeded) and not torch.equal(seeded[0], full)
    new = got[0, inputs["input_ids"].shape[1] :]
    assert "".join(streamer) == processor.tokenizer.decode(new)


@pytest.mark.parametrize("side", ["left", "right"])
def test_user_callables_get_rows_with_padding(llava, side):
    model, processor = llava
    inputs = batch(VLM(model, processor), side=side)
    ids, seen = inputs["input_ids"], []
    length = ids.shape[1]

    class Counts(LogitsProcessor):
        def __call__(self, row, scores):
            scores[:, 50 + row.shape[1] - length] = 100.0
            return scores

    class Three(StoppingCriteria):
        def __call__(self, row, scores, **kwargs):
            seen.append(row[0, :length])
            return torch.full((len(row),), row.shape[1] - length == 3)

    def allowed(number: int, row: torch.Tensor) -> list[int]:
        assert torch.equal(row[:length], ids[number])
        return [70 + len(row) - length]

    with vlmfast.attach(model, processor):
        made = model.generate(
            **inputs, max_new_tokens=5, logits_processor=[Counts()], stopping_criteria=[Three()]
        )
        prefixed = model.generate(**inputs, max_new_tokens=2, prefix_allowed_tokens_fn=allowed)
    assert answer_ids(made, inputs) == [[50, 51, 52]] * 3
    assert answer_ids(prefixed, inputs) == [[70, 71]] * 3
    assert {tuple(row.tolist()) for row in seen} == {tuple(row.tolist()) for row in ids}


def test_sizes_may_be_lists():
    model, processor = BUILD["llava_next"]()
    inputs = batch(VLM(model, processor))
    full = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    inputs["image_sizes"] = [tuple(size) for size in inputs["image_sizes"].tolist()]
    with vlmfast.attach(model, processor):
        assert torch.equal(model.generate(**inputs, max_new_tokens=NEW), full)
        inputs["image_sizes"][0] = (1,)
        with pytest.raises(VLMFastError, match="image_sizes must be a tensor"):
            model.generate(**inputs)


def test_pipeline_runs_on_attached_model():
    from transformers import pipeline

    model, processor = BUILD["llava_next"]()
    vlm = VLM(model, processor)
    pipe = pipeline("image-text-to-text", model=model, processor=vlm.adapter.processor)
    text = prompt(processor, "what is here ?", 1)

    def ask() -> str:
        (got,) = pipe(images=make_image(0), text=text, max_new_tokens=NEW, return_full_text=False)
        return got["generated_text"]

    full = ask()
    with vlmfast.attach(model, processor) as attached:
        assert ask() == full
        assert attached.answers
    with vlmfast.attach(model, processor, "random:0.2"):
        assert ask() != full


# --- put in and given back -----------------------------------------------------------------------


def test_copies_of_an_attached_model_are_without_the_recipe():
    model, processor = tiny_models.build_llava()
    pickled = pickle.dumps(model)
    inputs = batch(VLM(copy.deepcopy(model), processor))
    given = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    with vlmfast.attach(model, processor, "random:0.2"):
        with vlmfast.attach(model, processor, "random:0.3"):
            assert len(pickle.dumps(model)) == len(pickled)
            copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
        reduced = model.generate(**given)
    full = model.generate(**given)
    assert not torch.equal(reduced, full)
    for own in copies:
        assert torch.equal(own.generate(**given), full) and vars(own).keys() == vars(model).keys()


def test_copies_keep_a_generate_of_the_users():
    model, processor = tiny_models.build_llava()
    model.generate = own = lambda **given: given
    with vlmfast.attach(model, processor, "random:0.2"):
        assert copy.copy(model).generate is own is not model.generate


def test_model_is_restored_after_an_exception(llava):
    model, processor = llava
    inputs = batch(VLM(model, processor))

    class Fails(LogitsProcessor):
        def __call__(self, ids, scores):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), vlmfast.attach(model, processor, "random:0.5"):
        model.generate(**inputs, max_new_tokens=NEW, logits_processor=[Fails()])
    assert "generate" not in vars(model)
    with vlmfast.attach(model, processor) as attached:
        with pytest.raises(KeyError):
            model.generate(**inputs, max_new_tokens=NEW, logits_processor=[Fails()])
        model.generate(**inputs, max_new_tokens=NEW)  # the next call works
        assert [answer.token_ids for answer in attached.answers] == alone(VLM(model, processor))


def test_lower_attachment_cannot_reattach(llava):
    model, processor = llava
    below, above = (vlmfast.attach(model, processor, f"random:0.{n}") for n in (2, 4))
    below.detach()
    with pytest.raises(VLMFastError, match="still under a later attachment"), below:
        pass
    assert model.generate == above.generate
    above.detach()
    assert "generate" not in vars(model)
    with below:  # it is no longer attached
        assert model.generate == below.generate
    assert "generate" not in vars(model)


@pytest.mark.cases(2)
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_attachments_detach_in_any_order(llava, order):
    model, processor = llava
    three = [vlmfast.attach(model, processor, f"random:0.{n}") for n in (2, 4, 6)]
    for number in order:
        left = [one for one in three if one.attached and one is not three[number]]
        three[number].detach()
        three[number].detach()  # a second detach does nothing
        assert ("generate" in vars(model)) == bool(left)
        if left:
            assert model.generate == left[-1].generate
    assert not any(one.attached for one in three)


def test_user_override_of_generate_is_restored(llava):
    model, processor = llava
    calls = []
    model.generate = lambda *args, **kwargs: calls.append(kwargs)
    mine = model.generate
    try:
        with vlmfast.attach(model, processor) as attached:
            model.generate(**batch(attached.vlm), max_new_tokens=1)
            assert not calls
        assert model.generate is mine
        attached.generate(max_new_tokens=7)  # a kept reference calls the original
        assert calls == [{"max_new_tokens": 7}]
    finally:
        del model.generate


def test_attachment_is_not_reentrant(llava):
    model, processor = llava
    attached = vlmfast.attach(model, processor, "random:0.5")
    assert isinstance(attached, Attachment) and "attached recipe random:0.5" in repr(attached)
    with attached:
        with pytest.raises(VLMFastError, match="used twice"):
            attached.__enter__()
        assert model.generate == attached.generate
    assert "generate" not in vars(model) and "detached" in repr(attached)
    with attached:  # sequential use is fine
        assert model.generate == attached.generate
    assert "generate" not in vars(model)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 2, 3)}, VLMFastError, "inputs_embeds cannot be given"),
        ({"num_beams": 2}, VLMFastError, "num_beams"),
        ({"output_attentions": True}, VLMFastError, "output_attentions cannot"),
        ({"assistant_model": object()}, VLMFastError, "assistant_model cannot"),
        ({"pixel_values_videos": torch.zeros(1, 4, 3, 8, 8)}, ModelError, "is no input of a llava"),
        ({"input_ids": None}, VLMFastError, "input_ids must be"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, VLMFastError, "input_ids must be"),
        ({"pixel_values": None}, ModelError, "row 0 .* placeholders of one image too many"),
        ({"attention_mask": torch.ones(3, 2)}, VLMFastError, "attention_mask has the shape"),
        ({"attention_mask": "none"}, VLMFastError, "masks all of row 1"),
        ({"attention_mask": "gaps"}, VLMFastError, "has gaps in row 1"),
        ({"pixel_values": "fewer"}, ModelError, "placeholders"),
        ({"pixel_values": "more"}, ModelError, "placeholders"),
        ({"streamer": object()}, VLMFastError, "streamer=a object must be a streamer"),
        ({"streamer": TextStreamer(None)}, VLMFastError, "streamer is for one prompt"),
        ({"input_ids": torch.full((3, 4), 10**6)}, VLMFastError, "ids from 0 to 260"),
        ({"input_ids": torch.full((3, 4), -1)}, VLMFastError, "contains -1"),
        ({"input_ids": torch.ones(3, 4)}, VLMFastError, "not float32 of shape"),
        ({"input_ids": "x"}, VLMFastError, "must be a tensor"),
        ({"pixel_values": torch.full((4, 3, 32, 32), torch.nan)}, VLMFastError, "not finite"),
        ({"pixel_values": torch.zeros(4, 3, 32, 31)}, VLMFastError, r"3, 32, 32\), not"),
        ({"pixel_values": torch.zeros(4, 1, 32, 32)}, VLMFastError, r"3, 32, 32\), not"),
        ({"pixel_values": torch.zeros(0, 3, 32, 32)}, VLMFastError, "must be numbers, not"),
        ({"no_such_thing": 1}, ValueError, "no_such_thing"),
        ({"no_such_thing": "ids"}, ModelError, "no_such_thing is no input"),
        ({"position_ids": "ids"}, VLMFastError, "position_ids cannot"),
        ({"vision_feature_layer": -1}, VLMFastError, "vision_feature_layer cannot"),
        ({"penalty_alpha": 0.6}, VLMFastError, "penalty_alpha cannot"),
        ({"cache_implementation": "paged"}, VLMFastError, "cache_implementation='paged' cannot"),
        (
            {"generation_config": GenerationConfig(prompt_lookup_num_tokens=2)},
            VLMFastError,
            "prompt_lookup_num_tokens cannot",
        ),
    ],
)
def test_invalid_input_is_refused(llava, change, error, message):
    model, processor = llava
    inputs = batch(VLM(model, processor))
    mask, pixels = inputs["attention_mask"], inputs["pixel_values"]
    ((name, value),) = change.items()
    none, gaps = mask.clone(), mask.clone()
    none[1], gaps[1, -3] = 0, 0
    named = {
        "none": none,
        "gaps": gaps,
        "fewer": pixels[:2],
        "more": torch.cat([pixels, pixels[:1]]),
    }
    named["ids"] = inputs["input_ids"]
    inputs[name] = named.get(value, value) if isinstance(value, str) else value
    with vlmfast.attach(model, processor), pytest.raises(error, match=message):
        model.generate(**inputs, max_new_tokens=2)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("family", ["internvl", "cohere2_vision", "aya_vision", "ovis2"])
@pytest.mark.parametrize("change", ["more pixels", "a row without placeholders"])
def test_images_without_placeholders_are_refused(family, change):
    """Images are found by their placeholders: others must not take their place."""
    model, processor = BUILD[family]()
    vlm = VLM(model, processor)
    inputs = batch(vlm)
    if change == "more pixels":
        inputs["pixel_values"] = inputs["pixel_values"].repeat(2, 1, 1, 1)
    else:
        ids = inputs["input_ids"]
        ids[0] = torch.where(vlm.adapter.visual(ids[0]), ids[0, -1], ids[0])
    with vlmfast.attach(model, processor), pytest.raises(ModelError, match="placeholders"):
        model.generate(**inputs, max_new_tokens=2)


@pytest.mark.parametrize("lost", ["a view", "all views", "a placeholder"])
def test_lost_placeholders_of_views_are_refused(lost):
    model, processor = BUILD["idefics3"]()
    vlm = VLM(model, processor)
    inputs = batch(vlm)
    ids = inputs["input_ids"]
    found = runs(ids[0], vlm.adapter.image_token_id)
    assert len(found) > 2
    last = {"a view": 1, "all views": len(found), "a placeholder": 0}[lost]
    for first, length in found[:last]:
        ids[0, first : first + length] = ids[0, -1]
    if lost == "a placeholder":
        ids[0, found[1][0]] = ids[0, -1]
    message = "row 0 of the batch has .* placeholders of images.* which do not fit"
    with vlmfast.attach(model, processor), pytest.raises(ModelError, match=message):
        model.generate(**inputs, max_new_tokens=2)


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llava_next", {"image_sizes": None}, "pixel_values was given without image_sizes"),
        ("llava_next", {"image_sizes": torch.zeros(1, 2).long()}, "image_sizes must be from 1"),
        ("llava_next", {"image_sizes": torch.ones(3, 2).long()}, "has 3 items and pixel_values 1"),
        ("llava_next", {"image_sizes": torch.ones(1, 3).long()}, "whole numbers of shape"),
        ("qwen2_5_vl", {"image_grid_thw": None}, "pixel_values was given without image_grid_thw"),
        ("qwen2_5_vl", {"image_grid_thw": torch.tensor([[1, 4, 3]])}, "must be numbers of shape"),
        ("qwen2_5_vl", {"image_grid_thw": torch.tensor([[1, 0, 4]])}, "must be from 1"),
        ("llava_onevision", {"batch_num_images": torch.tensor([7])}, "counts 7 images"),
        ("idefics3", {"pixel_attention_mask": torch.ones(1, 2, 3, 4)}, "pixel_attention_mask must"),
    ],
)
def test_mismatched_tensors_are_refused(family, change, message):
    model, processor = BUILD[family]()
    inputs = batch(VLM(model, processor), ROWS[:1])
    with vlmfast.attach(model, processor):
        with pytest.raises(VLMFastError, match=message):
            model.generate(**{**inputs, **change}, max_new_tokens=1)
        assert model.generate(**inputs, max_new_tokens=1).shape[1] > 1


def test_duplicate_prompt_and_frame_selection_are_refused(llava):
    model, processor = llava
    inputs = batch(VLM(model, processor))
    with vlmfast.attach(model, processor):
        with pytest.raises(VLMFastError, match="given twice"):
            model.generate(inputs["input_ids"], **inputs)
        ids = inputs.pop("input_ids")
        assert model.generate(ids, **inputs, max_new_tokens=2).shape[1] == ids.shape[1] + 2
        two = GenerationConfig(max_new_tokens=2)
        assert model.generate(ids, two, **inputs).shape[1] == ids.shape[1] + 2
    with pytest.raises(RecipeError, match="frames-clip chooses the frames"):
        vlmfast.attach(model, processor, "frames-clip")
    with pytest.raises(RecipeError, match="hird"):
        vlmfast.attach(model, processor, "hird:0.2")
    with pytest.raises(RecipeError, match="weights"):
        vlmfast.attach(model, processor, "elastic")
    assert "generate" not in vars(model)


# --- crops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("down", "across"), [(1, 6), (2, 3), (3, 2), (6, 1), (1, 1), (2, 2)])
def test_crop_grid_is_inferred_from_the_crops(down, across):
    side = 16
    of = Image.fromarray(
        np.random.default_rng(down).integers(0, 256, (down * 4, across * 4, 3), dtype=np.uint8)
    ).resize((across * side, down * side), Image.Resampling.BICUBIC)
    canvas = torch.from_numpy(np.asarray(of).copy()).permute(2, 0, 1).float()
    whole = torch.from_numpy(np.asarray(of.resize((side, side))).copy()).permute(2, 0, 1).float()
    crops = [c for row in canvas.split(side, 1) for c in row.split(side, 2)]
    assert tiling(torch.stack([*crops, whole])) == (down, across)


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm", "llava_next"])
def test_layouts_equal_those_from_images(family):
    model, processor = BUILD[family]()
    vlm = VLM(model, processor)
    smooth = Image.fromarray(
        np.random.default_rng(4).integers(0, 256, (3, 7, 3), dtype=np.uint8)
    ).resize((140, 60), Image.Resampling.BICUBIC)
    inputs = batch(vlm, [("where ?", [smooth])])
    with vlmfast.attach(model, processor) as attached:
        model.generate(**inputs, max_new_tokens=1)
    got = attached.answers[0].trace.layout
    expected = vlm.ask("where ?", images=[smooth], max_new_tokens=1).trace.layout
    assert torch.equal(got.grid, expected.grid) and torch.equal(got.tile, expected.tile)
    # A batch does not tell an image's size: its edge is known only to a fraction of a token.
    assert torch.equal(got.box.isnan(), expected.box.isnan())
    assert (got.box - expected.box).nan_to_num(0.0).abs().max() < 0.06
