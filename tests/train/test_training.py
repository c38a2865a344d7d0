"""The training loop for stages of a frozen model, with a minimal stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from PIL import Image
from torch import nn

import vlmfast.core.weights
import vlmfast.train.stages as loop
from support.closeness import apart, close
from support.tower_terms import answer
from vlmfast import VLM
from vlmfast.core.layout import VisualTokens
from vlmfast.core.params import weights_param
from vlmfast.core.protocols import EncodeStage
from vlmfast.core.training import Training
from vlmfast.core.weights import load_weights
from vlmfast.errors import RecipeError, VLMFastError
from vlmfast.scenes.vocabulary import EVAL_SEED_START
from vlmfast.train.lessons import lesson


class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(-1, 1, width))


@dataclass(frozen=True)
class Scale(EncodeStage):
    """Multiplies every feature by a learned number."""

    name: ClassVar[str] = "scale"
    trained: ClassVar[bool] = True

    weights: str = weights_param()

    def reduce(self, tokens, stats, request):
        gain = request.trained[self.name].gain
        request.notes[self.name] = {"rows": len(request.question_embeds)}
        return VisualTokens(tokens.features * gain, tokens.layout, tokens.extra)

    @classmethod
    def build(cls, config):
        return Gain(config["width"])


class ScaleTraining(Training):
    stage = Scale

    def loss(self, module, outcomes, progress):
        return outcomes[0].answer, {"gain": float(module.gain.detach().mean())}


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """Registers the stage with the loop and the loader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "stage_class", lambda name: Scale)
        patch.setattr(loop, "training_class", lambda name: ScaleTraining)
        patch.setattr(vlmfast.core.weights, "stage_class", lambda name: Scale)
        yield


def arguments(out, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    loop.add_arguments(parser, "scale")
    return parser.parse_args(["--out", str(out), "--batch", "2", "--lr", "0.05", *flags])


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu", dtype="float32")


def test_training_lowers_the_loss_and_freezes_the_model(known, tmp_path) -> None:
    trainer = loop.StageTrainer(
        "scale", arguments(tmp_path, "--steps", "10", "--lr", "0.2", "--batch", "1")
    )

    def loss() -> float:
        return sum(float(trainer.sample_loss(i)[0].detach()) for i in range(2))

    at_first = loss()
    before = {k: v.clone() for k, v in trainer.vlm.model.state_dict().items()}
    trainer.train()
    # In full precision, only the module may have changed.
    after = trainer.vlm.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert all(p.grad is None for p in trainer.vlm.model.parameters())
    assert loss() < 0.9 * at_first
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[0]["step"] == 10 and lines[0]["gain"] != 0 and lines[0]["tokens"] == 1


def test_resumed_run_equals_uninterrupted_run(known, tmp_path) -> None:
    whole = loop.StageTrainer("scale", arguments(tmp_path / "a", "--steps", "2"))
    whole.train()
    loop.StageTrainer(
        "scale", arguments(tmp_path / "b", "--steps", "2", "--stop-after", "1")
    ).train()
    rest = loop.StageTrainer("scale", arguments(tmp_path / "b", "--steps", "2"))
    assert rest.step == 1
    assert not torch.equal(rest.module.gain, whole.module.gain)
    rest.train()
    assert torch.equal(rest.module.gain, whole.module.gain)


@pytest.mark.cases(1)
@pytest.mark.parametrize("flags", [("--seed", "3"), ("--lr", "0.1"), ("--batch", "4")])
def test_resuming_with_other_settings_raises(known, tmp_path, flags) -> None:
    loop.StageTrainer("scale", arguments(tmp_path, "--stop-after", "1")).train()
    with pytest.raises(loop.TrainingError, match=rf"{flags[0][2:]}=.*--fresh"):
        loop.StageTrainer("scale", arguments(tmp_path, *flags))
    assert loop.StageTrainer("scale", arguments(tmp_path, *flags, "--fresh")).step == 0


def test_damaged_checkpoint_raises(known, tmp_path) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"x")
    with pytest.raises(loop.TrainingError, match="no checkpoint of this training"):
        loop.StageTrainer("scale", arguments(tmp_path))


def test_unreadable_images_are_skipped(known, tmp_path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Red."}]
    data = [{"image": name, "conversations": turns} for name in ("a.png", "missing.png")]
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = ("--data", str(tmp_path / "data.json"), "--media", str(tmp_path), "--stop-after", "1")
    trainer = loop.StageTrainer("scale", arguments(tmp_path / "out", *flags))
    trainer.train()
    assert trainer.step == 1
    assert "missing.png" in (tmp_path / "out" / "log.jsonl").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "nowhere.json"), "nowhere.json"),
        (("--device", "abacus"), "device 'abacus' cannot be used"),
    ],
)
def test_invalid_options_raise(known, tmp_path, flags, message) -> None:
    with pytest.raises(VLMFastError, match=message):
        loop.StageTrainer("scale", arguments(tmp_path, *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch", "0"), "--batch: '0' is not a whole number above 0"),
        (("--seed", "256"), "--seed: '256' is not a whole number of at least 0 and at most 255"),
        (("--distill", "2"), "--distill: '2' is not"),
        (("--lr", "0"), "--lr: '0' is not a number above 0"),
        (("--minutes", "-1"), "--minutes: '-1' is not a number of at least 0"),
        (("--minutes", "nan"), "--minutes: 'nan' is not"),
        (("--minutes", "inf"), "--minutes: 'inf' is not"),
    ],
)
def test_numbers_out_of_range_are_usage_errors(known, tmp_path, capsys, flags, message) -> None:
    with pytest.raises(SystemExit):
        arguments(tmp_path, *flags)
    assert message in capsys.readouterr().err


# --- inputs --------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [0, 1, 6, 7])
def test_training_prompt_equals_inference_prompt(tiny: VLM, number: int) -> None:
    sample = loop.drawn(("image", "video"))(number)
    inputs = loop.inputs_of(tiny, sample)
    ids = inputs.tensors["input_ids"][0]
    prompt = tiny.inputs(sample.question, **sample.media)["input_ids"][0]
    assert torch.equal(ids[: -inputs.answer], prompt)
    tokenizer = tiny.processor.tokenizer
    assert ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(ids[-inputs.answer :], skip_special_tokens=True)
    assert text.strip() == sample.answer
    generated = tiny.ask(sample.question, **sample.media).token_ids
    if tokenizer.decode(generated, skip_special_tokens=True).strip() == sample.answer:
        assert generated == ids[-inputs.answer :].tolist()


def test_answer_logits_equal_the_full_model(tiny: VLM) -> None:
    inputs = loop.inputs_of(tiny, loop.drawn(("image",))(3))
    with torch.no_grad():
        logits, _, share = loop.run(tiny, inputs, None)
        whole = tiny.model(**inputs.tensors).logits[0]
    assert share == 1
    terms = answer(tiny, len(whole))
    close(logits, whole[-1 - inputs.answer : -1], terms=terms)
    apart(logits, whole[-inputs.answer :], terms=terms)


def test_stages_do_not_see_the_answer(known, tiny: VLM) -> None:
    inputs = loop.inputs_of(tiny, loop.drawn(("image",))(3))
    tiny.adapter.modules["scale", "auto", ""] = Gain(256)
    try:
        _, notes, _ = loop.run(tiny, inputs, Scale())
    finally:
        tiny.adapter.modules.clear()
    text = int((inputs.tensors["input_ids"][0] != tiny.adapter.image_token_id).sum())
    assert notes["rows"] == text - inputs.answer


def test_training_samples_are_drawn_outside_the_evaluation() -> None:
    for modality, frames in (("image", 1), ("video", 4)):
        drawn = lesson(modality, 5)
        assert drawn == lesson(modality, 5) != lesson(modality, 6)
        assert len(drawn.frames) == frames
    with pytest.raises(ValueError, match="evaluation"):
        lesson("image", EVAL_SEED_START)


def test_conversations_in_llava_format(tmp_path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    turns = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": " This. "},
        {"from": "human", "value": "And?"},
        {"from": "gpt", "value": "That."},
    ]
    data = [{"image": "a.png", "conversations": turns}, {"conversations": turns}]
    (tmp_path / "data.json").write_text(json.dumps(data))
    sample = loop.conversations(tmp_path / "data.json", tmp_path, ("image",), 4)
    seen = {(sample(i).question, sample(i).answer) for i in range(20)}
    assert seen == {("What?", "This."), ("And?", "That.")}
    assert sample(0).media == {"images": str(tmp_path / "a.png")}
    with pytest.raises(loop.TrainingError, match="video"):
        loop.conversations(tmp_path / "data.json", tmp_path, ("video",), 4)


@pytest.mark.parametrize(
    "data",
    [
        {},
        [1],
        [{"image": "a.png"}],
        [{"image": "a.png", "conversations": None}],
        [{"image": "a.png", "conversations": ["Hello", "there"]}],
        [{"image": "a.png", "conversations": [{"from": "human"}, {"from": "gpt", "value": 3}]}],
        [{"image": 3, "conversations": []}],
        [
            {
                "image": "a.png",
                "conversations": [
                    {"from": "human", "value": "<image>"},
                    {"from": "gpt", "value": "?"},
                ],
            }
        ],
    ],
)
def test_files_without_conversations_raise(tmp_path, data) -> None:
    (tmp_path / "data.json").write_text(json.dumps(data))
    with pytest.raises(loop.TrainingError, match='no conversation with "image"'):
        loop.conversations(tmp_path / "data.json", tmp_path, ("image",), 4)


def test_end_of_turn_blank_is_not_trained_on() -> None:
    """A template may put a blank between answer and end token; the model does not generate it."""
    from support.tiny_models import build_llava, make_image

    other = VLM(*build_llava())
    inputs = loop.inputs_of(other, loop.Sample({"images": make_image()}, "what ?", "a cat"))
    ids = inputs.tensors["input_ids"][0, -inputs.answer :]
    assert other.processor.tokenizer.decode(ids).strip() == "a cat</s>"


# --- weights -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(known, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    loop.StageTrainer("scale", arguments(folder, "--stop-after", "1", "--batch", "1")).train()
    return folder / "weights"


def test_weights_load_for_their_model(saved, tiny: VLM) -> None:
    adapter = tiny.adapter
    module = load_weights(Scale(weights=str(saved)), adapter.sizes(), adapter.signature())
    assert module.gain.dtype == torch.float32 and not module.training
    load_weights(Scale(weights=str(saved.parent)), adapter.sizes(), adapter.signature())
    # The signature does not depend on the dtype of the model.
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.tensor(adapter.signature()).to(dtype).float().tolist()
        load_weights(Scale(weights=str(saved)), adapter.sizes(), half)


def test_weights_of_another_model_raise(saved, tiny: VLM) -> None:
    sizes, signature = tiny.adapter.sizes(), tiny.adapter.signature()
    stage = Scale(weights=str(saved))
    with pytest.raises(RecipeError, match="another model"):
        load_weights(stage, sizes | {"depth": 7}, signature)
    with pytest.raises(RecipeError, match="another model"):
        load_weights(stage, sizes, [-x for x in signature])
    with pytest.raises(RecipeError, match="no weights for this llava_next model"):
        load_weights(Scale(), sizes, signature)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_weights(Scale(weights="nowhere"), sizes, signature)


def test_trained_stage_in_an_answer(saved, tiny: VLM) -> None:
    sample = loop.drawn(("image",))(2)
    stage = Scale(weights=str(saved))
    try:
        answer = tiny.ask(sample.question, **sample.media, recipe=stage)
        assert answer.stats.visual_tokens_kept == {"scale": 336}
        with pytest.raises(RecipeError, match="no weights"):
            tiny.ask(sample.question, **sample.media, recipe=Scale())
    finally:
        tiny.adapter.modules.clear()
