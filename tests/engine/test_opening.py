"""The settings of a sequence are those that Hugging Face's ``generate`` prepares for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from support.engine.passes import preparations, prepared
from support.tiny_models import build_llava
from vlmfast import VLM


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava(layers=1))


def allowed(row: int, ids: Tensor) -> list[int]:
    return [1, 2]


OWN = [TemperatureLogitsWarper(0.3)], [MaxTimeCriteria(9.0)]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "greedy": {"max_new_tokens": 4, "do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "other distributions": {"do_sample": True, "typical_p": 0.4, "epsilon_cutoff": 0.1},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "max_new_tokens": 3},
    "lengths": {"max_length": 30, "min_length": 9},
    "both lengths": {"max_length": 30, "max_new_tokens": 5, "min_new_tokens": 2, "min_length": 1},
    "a length that cannot be reached": {"max_new_tokens": 2, "min_new_tokens": 5},
    "a length that is too small": {"max_length": 2},
    "ends": {"eos_token_id": [3, 4], "pad_token_id": 2, "exponential_decay_length_penalty": (2, 1)},
    "no end": {"eos_token_id": None},
    "the prompt": {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "ids": {"suppress_tokens": [3], "bad_words_ids": [[4]], "forced_eos_token_id": 2},
    "biases": {"sequence_bias": [[[5], 2.0]], "begin_suppress_tokens": [3], "max_time": 7.0},
    "outputs": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "functions": {
        "logits_processor": LogitsProcessorList(OWN[0]),
        "stopping_criteria": StoppingCriteriaList(OWN[1]),
        "prefix_allowed_tokens_fn": allowed,
    },
    "a config": {"generation_config": GenerationConfig(max_length=40, do_sample=True, top_k=3)},
    "a config and more": {"generation_config": GenerationConfig(min_length=3), "top_k": 4},
    "a wrong value": {"do_sample": True, "temperature": -1.0},
    "an unknown name": {"max_tokens": 3},
}
MODELS: dict[str, Callable[[GenerationConfig], Any]] = {
    "lengths of the model": lambda own: own.update(max_length=50, min_length=2),
    "settings of the model": lambda own: own.update(do_sample=True, top_p=0.5, eos_token_id=[2, 5]),
    "a setting without a name": lambda own: setattr(own, "custom", 3),
}


def described(value: Any) -> Any:
    """What can be compared of settings, processors and criteria."""
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if isinstance(value, GenerationConfig) or type(value).__module__.startswith("transformers"):
        state = {name: described(of) for name, of in vars(value).items() if name not in UNREAD}
        return type(value).__name__, state
    return value


# The time of a call; how long a mask was that ``generate`` leaves out.
UNREAD = ("initial_timestamp", "_mask_length")


def both(model: Any, arguments: dict[str, Any]) -> list[Any]:
    """What the engine and ``generate`` prepare, or the errors, with their warnings."""
    ids = torch.tensor([[5, 6, 7, 8]])

    def generated() -> Any:
        def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **more):
            return input_ids, logits_processor, stopping_criteria, generation_config

        return model.generate(input_ids=ids, custom_generate=loop, **arguments)

    found: list[Any] = []
    for call in (lambda: prepared(model, ids, arguments), generated):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                outcome = described(call())
            except ValueError as error:
                outcome = type(error), str(error)
        found.append((outcome, [str(warning.message) for warning in warned]))
    return found


@pytest.mark.parametrize("case", ARGUMENTS)
def test_settings_are_those_of_generate(vlm: VLM, case: str) -> None:
    own, theirs = both(vlm.model, ARGUMENTS[case])
    assert own == theirs
    assert case == "nothing" or own != both(vlm.model, {})[0]


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("arguments", ["nothing", "greedy", "a config"])
def test_settings_of_the_model_count(case: str, arguments: str) -> None:
    model, _ = build_llava(layers=1)
    before, _ = both(model, ARGUMENTS[arguments])
    MODELS[case](model.generation_config)
    own, theirs = both(model, ARGUMENTS[arguments])
    assert own == theirs != before


def test_inputs_and_cache_are_not_prepared(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    called = preparations(monkeypatch, vlm.model)
    vlm.ask("what ?", max_new_tokens=2)
    assert not called
    vlm.model.generate(**vlm.inputs("what ?"), max_new_tokens=2)
    assert called


def test_generate_of_a_subclass_is_called() -> None:
    model, processor = build_llava(layers=1)
    asked: list[Any] = []

    class Own(type(model)):  # type: ignore[misc]
        def generate(self, *args: Any, **more: Any) -> Any:
            asked.append(more)
            warper = TemperatureLogitsWarper(0.5)
            return super().generate(*args, logits_processor=LogitsProcessorList([warper]), **more)

    model.__class__ = Own
    vlm = VLM(model, processor)
    answer = vlm.ask("what ?", max_new_tokens=2, output_scores=True)
    assert len(asked) == 1
    ids = torch.tensor([[5, 6]])
    _, processors, *_ = prepared(model, ids, {})
    assert [type(of) for of in processors] == [TemperatureLogitsWarper]
    assert len(answer.token_ids) == 2
