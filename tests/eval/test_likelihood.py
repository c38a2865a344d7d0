"""Log-likelihoods of given answers."""

from __future__ import annotations

import pytest
import torch

from vlmfast import VLM
from vlmfast.errors import VLMFastError
from vlmfast.eval.likelihood import likelihoods
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

# Of one token, of several, and with blanks around them, which are ignored.
CHOICES = ("red", "the red circle", " purple ", "left of it")


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM.from_pretrained("tiny", device="cpu", dtype="float32")


def asked(number: int) -> tuple[str, list]:
    """A question and its image."""
    scene = image_example(EVAL_SEED_START + number)
    return scene.qa[0].question, [scene.image]


def prompts(number: int, *answers: str) -> list[tuple[list[dict], str]]:
    question, (image,) = asked(number)
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return [([{"role": "user", "content": content}], answer) for answer in answers]


def hugging_face(vlm: VLM, number: int, answer: str) -> tuple[float, bool]:
    """By one forward pass over the prompt and the answer."""
    tensors = vlm.inputs(*asked(number))
    prompt = tensors["input_ids"]
    # The shipped model's template writes a blank before the answer.
    ids = vlm.processor.tokenizer(f": {answer.strip()}", add_special_tokens=False).input_ids[1:]
    tensors["input_ids"] = torch.cat([prompt, torch.tensor([ids])], 1)
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    with torch.inference_mode():
        logits = vlm.model(**tensors).logits[0, prompt.shape[1] - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
    return float(logprobs.sum()), logits.argmax(-1).tolist() == ids


def test_equal_to_hugging_face(vlm):
    wanted, expected = [], []
    for number in range(4):
        greedy = vlm.ask(*asked(number), do_sample=False, max_new_tokens=3).text
        for answer in (*CHOICES, greedy):
            wanted += prompts(number, answer)
            expected.append(hugging_face(vlm, number, answer))
    found = likelihoods(vlm, wanted, batch_size=3)
    assert [one.greedy for one in found] == [greedy for _, greedy in expected]
    assert {one.greedy for one in found} == {True, False}
    for one, (logprob, _) in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(logprob, abs=1e-3)
    # A control: with another image they differ.
    other = [hugging_face(vlm, 1, answer)[0] for answer in CHOICES]
    assert max(abs(a.logprob - b) for a, b in zip(found, other, strict=False)) > 0.1


def test_those_of_the_recipe(vlm):
    """A compressed cache changes them; they are those of decoding with that cache."""
    recipe = "snapkv:0.1"
    full = likelihoods(vlm, prompts(1, *CHOICES))
    small = likelihoods(vlm, prompts(1, *CHOICES), recipe)
    assert max(abs(a.logprob - b.logprob) for a, b in zip(full, small, strict=True)) > 1e-3
    settings = {"do_sample": False, "max_new_tokens": 6, "top_logprobs": 1}
    for number in range(3):
        answer = vlm.ask(*asked(number), recipe=recipe, **settings)
        assert answer.token_ids[-1] == vlm.processor.tokenizer.eos_token_id
        (again,) = likelihoods(vlm, prompts(number, answer.text), recipe)
        decoded = sum(one.logprob for one in answer.logprobs[:-1])
        assert again == (pytest.approx(decoded, abs=1e-3), True)


def test_impossible_answers_are_refused(vlm, monkeypatch):
    with pytest.raises(VLMFastError, match="answer 1 is empty; it must have a token"):
        likelihoods(vlm, prompts(0, "red", " "))
    ids = vlm.processor.tokenizer(": red", add_special_tokens=False).input_ids[1:]
    monkeypatch.setattr(vlm.model.generation_config, "suppress_tokens", ids)
    with pytest.raises(VLMFastError, match="suppresses some of them"):
        likelihoods(vlm, prompts(0, "red"))
