"""Log-probabilities of an answer's tokens, and why the answer ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.closeness import apart, close
from support.tiny_models import build_llava, make_image
from vlmfast import VLM, Answer, Request, VLMFastError

QUESTION = "what is here ?"


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava(layers=2, dtype=torch.float64))


def ask(vlm: VLM, **generation: Any) -> Answer:
    generation = {"max_new_tokens": 5, "eos_token_id": None} | generation
    return vlm.ask(QUESTION, make_image(), **generation)


def expected(vlm: VLM, **generation: Any) -> torch.Tensor:
    """Log-probabilities by Hugging Face, (tokens, V)."""
    inputs = vlm.inputs(QUESTION, make_image())
    found = vlm.model.generate(
        **inputs,
        max_new_tokens=5,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **generation,
    )
    return torch.cat(found.logits).log_softmax(-1)


@pytest.mark.parametrize("generation", [{}, {"repetition_penalty": 1.8}], ids=["plain", "penalty"])
def test_logprobs_are_those_of_the_model(vlm: VLM, generation: dict[str, Any]) -> None:
    answer = ask(vlm, top_logprobs=3, **generation)
    logprobs = expected(vlm, **generation)
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == 5
    found = torch.tensor([step.logprob for step in answer.logprobs])
    own = logprobs[range(5), answer.token_ids]
    close(found, own.float(), terms=logprobs.shape[1])
    best = logprobs.topk(3)
    for step, ids in zip(answer.logprobs, best.indices.tolist(), strict=True):
        assert [token for token, _ in step.top] == ids
    tops = torch.tensor([[value for _, value in step.top] for step in answer.logprobs])
    close(tops, best.values.float(), terms=logprobs.shape[1])
    other = logprobs[range(5), logprobs.argmin(-1)]
    apart(found, other.float(), terms=logprobs.shape[1])  # the control


def test_logprobs_precede_processors(vlm: VLM) -> None:
    """A penalty changes the answer and not the probabilities that the model had."""
    plain = ask(vlm, top_logprobs=2)
    barred = ask(vlm, top_logprobs=2, suppress_tokens=[plain.token_ids[0]])
    assert barred.token_ids[0] != plain.token_ids[0]
    assert barred.logprobs[0].top == plain.logprobs[0].top
    assert barred.logprobs[0].logprob < plain.logprobs[0].logprob

    def ruin(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0.0)

    ruined = ask(vlm, top_logprobs=2, logits_processor=[ruin])
    assert ruined.logprobs[0].top == plain.logprobs[0].top


def test_no_top_tokens_and_more_than_the_vocabulary(vlm: VLM) -> None:
    assert ask(vlm).logprobs is None
    assert [step.top for step in ask(vlm, top_logprobs=0).logprobs] == [[]] * 5
    size = expected(vlm).shape[1]
    assert len(ask(vlm, top_logprobs=10**6).logprobs[0].top) == size


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_bad_top_logprobs_raise(vlm: VLM, value: Any) -> None:
    with pytest.raises(VLMFastError, match="top_logprobs"):
        ask(vlm, top_logprobs=value)


def test_rows_of_a_batch_have_their_own_logprobs(vlm: VLM) -> None:
    asked = [None, 2, 0, 4]
    generation = {"max_new_tokens": 4, "eos_token_id": None}
    requests = [
        Request(QUESTION, make_image(seed=n), generation=generation | {"top_logprobs": size})
        for n, size in enumerate(asked)
    ]
    together = vlm.ask_many(requests)
    for request, answer, size in zip(requests, together, asked, strict=True):
        alone = vlm.ask(request.question, request.images, **request.generation)
        assert (answer.logprobs is None) == (size is None)
        if size is not None:
            assert [step.token for step in answer.logprobs] == answer.token_ids == alone.token_ids
            assert [len(step.top) for step in answer.logprobs] == [size] * 4
            ids = [[token for token, _ in step.top] for step in answer.logprobs]
            assert ids == [[token for token, _ in step.top] for step in alone.logprobs]


def test_drafts_do_not_change_logprobs(vlm: VLM) -> None:
    plain = ask(vlm, top_logprobs=2, max_new_tokens=24)
    drafted = vlm.ask(
        QUESTION,
        make_image(),
        recipe="draft-ngram",
        max_new_tokens=24,
        eos_token_id=None,
        top_logprobs=2,
    )
    assert drafted.stats.accepted > 0
    assert [s.token for s in drafted.logprobs] == [s.token for s in plain.logprobs]
    tops = [[token for token, _ in step.top] for step in drafted.logprobs]
    assert tops == [[token for token, _ in step.top] for step in plain.logprobs]


def test_finish_reason(vlm: VLM) -> None:
    full = ask(vlm)
    assert full.finish_reason == "length"
    assert ask(vlm, eos_token_id=full.token_ids[2]).finish_reason == "stop"
    word = vlm.processor.tokenizer.decode(full.token_ids[1:2])
    assert ask(vlm, stop_strings=[word.strip()]).finish_reason == "stop"
    assert ask(vlm, stopping_criteria=[lambda ids, scores: True]).finish_reason == "stop"
