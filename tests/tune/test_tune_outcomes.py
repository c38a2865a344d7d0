"""The recorded outcomes of recipes, and the race on them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from support.paths import ROOT
from support.tiny_trainer import batches
from vlmfast.api.vlm import VLM
from vlmfast.errors import VLMFastError
from vlmfast.eval.scores import normalise
from vlmfast.scenes.vocabulary import EVAL_SEED_START, EVAL_SEED_STOP
from vlmfast.train.lessons import lesson

sys.path.insert(0, str(ROOT / "benchmarks"))

import outcomes

FEW = ("hired:budget=0.11", "snapkv:0.5,window=8")


def test_seeds_are_of_no_other_use() -> None:
    own = range(outcomes.OUTCOME_SEED_START, outcomes.OUTCOME_SEED_STOP)
    evaluation = range(EVAL_SEED_START, EVAL_SEED_STOP)
    assert own.start >= evaluation.stop
    for seed in (own.start, own.stop - 1):
        with pytest.raises(VLMFastError, match="reserved"):
            lesson("image", seed)
        with pytest.raises(VLMFastError, match="reserved"):
            batches.make_batch(batches.Spec("image", seed, 1, (("color", 1.0),)))
    last = outcomes.OUTCOME_SEED_START + outcomes.SCENES * outcomes.TRIES
    assert last <= own.stop


def test_questions_are_balanced_and_reproducible() -> None:
    found = [outcomes.scene(number) for number in range(38)]
    types = Counter(one.type for one in found)
    assert types == dict.fromkeys(outcomes.TYPES, 2)
    seeds = [one.seed for one in found]
    assert len(set(seeds)) == len(seeds)
    outcomes.scene.cache_clear()
    again = outcomes.scene(20)
    assert (again.question, again.seed) == (found[20].question, seeds[20])


def test_record_holds_what_each_recipe_answers(tiny: VLM, tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    outcomes.record(tiny, path, 2, FEW)
    outcomes.record(tiny, path, 13, FEW)  # continues: the last image and the first video
    with np.load(path) as file:
        found = {key: file[key] for key in file.files if key != "about"}
    assert {of.shape for of in found.values()} == {(3, 13), (13,)}
    for number in (1, 11, 12):
        asked = outcomes.scene(number)
        assert found["seed"][number] == asked.seed
        for row, recipe in enumerate((outcomes.FULL, *FEW)):
            answer = tiny.ask(asked.question, **asked.media, recipe=recipe, max_new_tokens=16)
            right = normalise(answer.text) == normalise(asked.answers[0])
            assert found["outcome"][row, number] == outcomes.CORRECT * right
            assert found["equivalent_tokens"][row, number] == answer.stats.equivalent_tokens
            assert found["kv_bytes"][row, number] == answer.stats.kv_bytes
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 1 + 3 * 13


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
        seeds = file["seed"].tolist()
    assert len(set(seeds)) == len(seeds)
    own = range(outcomes.OUTCOME_SEED_START, outcomes.OUTCOME_SEED_STOP)
    assert all(seed in own for seed in seeds)
