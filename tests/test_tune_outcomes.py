"""The recorded outcomes of recipes, and the race on them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_trainer import batches
from vlmfast.api.vlm import VLM
from vlmfast.errors import VLMFastError
from vlmfast.models.tiny.tokenizer import build_tokenizer
from vlmfast.scenes.vocabulary import EVAL_SEED_START, EVAL_SEED_STOP
from vlmfast.train.lessons import lesson

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import outcomes

FEW = ("hired:budget=0.11", "snapkv:0.5,window=8")


def test_seeds_are_of_no_other_use(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    build_tokenizer().save(str(tokenizer))
    own = range(outcomes.OUTCOME_SEED_START, outcomes.OUTCOME_SEED_STOP)
    evaluation = range(EVAL_SEED_START, EVAL_SEED_STOP)
    assert own.start >= evaluation.stop
    for seed in (own.start, own.stop - 1):
        with pytest.raises(VLMFastError, match="reserved"):
            lesson("image", seed)
        with pytest.raises(batches.DataError, match="reserved"):
            batches.make_batch(batches.Spec("image", seed, 1, (("color", 1.0),)), tokenizer)
    last = outcomes.OUTCOME_SEED_START + outcomes.SCENES * outcomes.TRIES
    assert last <= own.stop


def test_questions_are_balanced_and_reproducible() -> None:
    found = [outcomes.scene(number) for number in range(38)]
    types = Counter((modality, qa.type) for modality, qa, _, _ in found)
    assert types == dict.fromkeys(outcomes.TYPES, 2)
    seeds = [seed for *_, seed in found]
    assert len(set(seeds)) == len(seeds)
    again = outcomes.scene(20)
    assert (again[1], again[3]) == (found[20][1], seeds[20])


def test_block_holds_what_each_recipe_answers(tiny: VLM) -> None:
    numbers = range(11, 13)  # the last image and the first video
    block = outcomes.record_block(tiny, numbers, FEW)
    for column, number in enumerate(numbers):
        _, qa, media, seed = outcomes.scene(number)
        assert block["seed"][column] == seed
        texts = []
        for row, recipe in enumerate((outcomes.FULL, *FEW)):
            answer = tiny.ask(qa.question, **media, recipe=recipe, max_new_tokens=16)
            texts.append(outcomes.normalise(answer.text))
            expected = outcomes.CORRECT * (texts[row] == outcomes.normalise(qa.answer))
            expected += outcomes.AGREES * (texts[row] == texts[0])
            assert block["outcome"][row, column] == expected
            assert block["equivalent_tokens"][row, column] == answer.stats.equivalent_tokens
            assert block["kv_bytes"][row, column] == answer.stats.kv_bytes


def test_recording_continues_after_an_interruption(
    tiny: VLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[range] = []

    def block(vlm: Any, numbers: range, recipes: tuple[str, ...]) -> dict[str, np.ndarray]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(numbers)
        shape = (len(recipes) + 1, len(numbers))
        outcome = np.tile(np.array(numbers, np.uint8), (shape[0], 1))
        return {"outcome": outcome, "seed": np.array(numbers)}

    monkeypatch.setattr(outcomes, "record_block", block)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    with pytest.raises(KeyboardInterrupt):
        outcomes.record(tmp_path / "all.npz", 100)
    first = list(done)
    done[:] = [range(0)]
    outcomes.record(tmp_path / "all.npz", 100)
    assert first + done[1:] == [range(40), range(40, 80), range(80, 100)]
    with np.load(tmp_path / "all.npz") as packed:
        assert packed["seed"].tolist() == list(range(100))
        assert packed["outcome"][0].tolist() == list(range(100))


# --- the race ------------------------------------------------------------------------------------


def matrix(losses: dict[str, tuple[float, float]], scenes: int = 3000) -> outcomes.Matrix:
    """Of recipes with a cost and a probability to be wrong where the full model is right."""
    rng = np.random.default_rng(0)
    full = rng.random(scenes) < 0.95
    score = [full, *(full & (rng.random(scenes) >= loss) for _, loss in losses.values())]
    costs = np.array([[1.0], *([cost] for cost, _ in losses.values())])
    tokens = np.repeat(400 * costs, scenes, 1)
    return outcomes.Matrix(("none", *losses), np.array(score, np.uint8), tokens, 1000 * tokens)


def test_proof_counts_draws_that_stay_within_the_bound() -> None:
    found = outcomes.prove(matrix({"a": (0.1, 0.001), "b": (0.05, 0.3)}), range(1000, 1004))
    for objective in outcomes.OBJECTIVES:
        about = found[objective]
        assert (about["draws"], about["within_bound"]) == (4, 4)
        assert about["median_cost_over_cheapest"] == pytest.approx(1)
        assert {one["chosen"] for one in about["each"]} == {"a"}
        assert all(0 <= one["loss_on_rest"] < 0.005 for one in about["each"])


def test_drawn_scenes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that is right on the drawn scenes alone is found out on the rest."""
    scenes = 1000
    drawn = np.random.default_rng(7).choice(scenes, outcomes.DRAWN, replace=False)
    lucky = np.isin(np.arange(scenes), drawn)
    score = np.array([np.ones(scenes), lucky], np.uint8)
    tokens = np.repeat([[400.0], [40.0]], scenes, 1)
    found = outcomes.draw(outcomes.Matrix(("none", "lucky"), score, tokens, tokens), 7, "ttft")
    assert (found["chosen"], found["loss_on_rest"]) == ("lucky", 1.0)


@pytest.mark.skipif(not outcomes.MATRIX.exists(), reason="the matrix is not part of this copy")
def test_committed_matrix() -> None:
    assert outcomes.MATRIX.stat().st_size < 1_000_000
    found = outcomes.Matrix.load(outcomes.MATRIX)
    assert found.recipes == (outcomes.FULL, *outcomes.RECIPES)
    assert found.score.shape == found.tokens.shape == found.bytes.shape
    assert found.score.shape[1] > outcomes.DRAWN
    assert found.losses()[0] == 0 and 0.9 < found.score[0].mean() < 1
    assert (found.costs("ttft")[1:] <= 1).all() and (found.costs("memory")[1:] < 1).all()
    with np.load(outcomes.MATRIX) as file:
        agrees = (file["outcome"] & outcomes.AGREES).astype(bool)
        seeds = file["seed"].tolist()
    assert agrees[0].all()
    assert len(set(seeds)) == len(seeds)
    own = range(outcomes.OUTCOME_SEED_START, outcomes.OUTCOME_SEED_STOP)
    assert all(seed in own for seed in seeds)
