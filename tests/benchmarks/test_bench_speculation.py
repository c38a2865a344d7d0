"""The speculation benchmark: the audit for changed answers, and the timing of drafts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.bench_script import script
from support.engine.commands import gap
from support.engine.draws import drafted_scores, unmoved
from support.fake_drafters import Knows
from support.tiny_models import SPECIAL_TOKENS, build_llava
from vlmfast import VLM
from vlmfast.cli import main as cli
from vlmfast.core.drafting import Budget, Round
from vlmfast.core.recipe import Recipe
from vlmfast.core.tree import Tree
from vlmfast.errors import RecipeError
from vlmfast.eval import bench

speculation = script("speculation")
AUDITED = {"count": 4, "new_tokens": 32}


# --- the audit -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_audit_of_correct_answers(tiny: VLM) -> None:
    found = bench.audit(tiny, ["none", "hired:0.5"], ["draft-recycle", "draft-ngram"], **AUDITED)
    pairs = [(row.recipe, row.drafter) for row in found]
    assert pairs == [
        (str(Recipe.parse(recipe)), drafter)
        for recipe in ("none", "hired:0.5")
        for drafter in ("draft-recycle", "draft-ngram")
    ]
    for row in found:
        assert row.bugs == 0 and row.prompts == len(row.lengths) == 4
        assert row.identical == 4 - len(row.divergences)
        assert max(row.lengths) > 20 > 5 > min(row.lengths)  # captions and questions
        assert 0 < row.accepted < row.drafted and row.rounds > 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("strict", [False, True])
def test_audit_finds_a_planted_bug(
    tiny: VLM, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    unmoved(monkeypatch)
    (row,) = bench.audit(tiny, drafters=["draft-recycle"], count=2, new_tokens=32, strict=strict)
    assert row.bugs > 0 and row.identical < 2
    first = row.divergences[0]
    assert first.bug and first.gap > bench.NEAR
    assert first.at == row.prefix[first.prompt] < row.lengths[first.prompt]


@pytest.mark.slow
def test_audit_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    unmoved(monkeypatch)
    argv = ["bench", "--audit-lossless", "--device", "cpu", "--drafter", "draft-recycle"]
    argv += ["--prompts", "4"]
    assert cli(argv) == 1
    out, err = capsys.readouterr()
    assert err == "" and "BUG: draft-recycle, prompt" in out
    for said in ("dtype bfloat16", "attention sdpa", f"torch {torch.__version__}"):
        assert said in out.splitlines()[0]
    assert cli([*argv, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bugs"] == told["rows"][0]["bugs"] > 0
    assert {"date", "environment", "dtype", "attention", "torch", "near"} <= set(told)
    monkeypatch.undo()
    assert cli([*argv, "--recipe", "none"]) == 0
    out = capsys.readouterr().out
    assert "BUG" not in out and "nothing was drafted" not in out
    assert cli([*argv[:-2], "--prompts", "2", "--new-tokens", "2"]) == 0
    assert "nothing was drafted: draft-recycle" in capsys.readouterr().out


def paired(monkeypatch: pytest.MonkeyPatch) -> VLM:
    """A model whose tokens come in pairs with equal logits, and drafts that take the other one."""
    model, processor = build_llava(dtype=torch.bfloat16)
    head, first = model.get_output_embeddings().weight, len(SPECIAL_TOKENS)
    with torch.no_grad():
        head[first + 1 :: 2] = head[first:-1:2]

    def other(scores: torch.Tensor) -> torch.Tensor:
        scores[:, first + 1 :: 2] = scores[:, first:-1:2] + 1e-3
        return scores

    drafted_scores(monkeypatch, other)
    return VLM(model, processor)


@pytest.mark.cases(1)
@pytest.mark.parametrize("strict", [False, True])
def test_near_tie_is_a_bug_only_when_strict(monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    vlm = paired(monkeypatch)
    (row,) = bench.audit(
        vlm, drafters=[Knows(answer=(), beside=0)], count=2, new_tokens=1, strict=strict
    )
    assert row.identical == 2  # one token: no drafts
    (row,) = bench.audit(vlm, drafters=["draft-ngram"], count=2, new_tokens=4, strict=strict)
    assert row.identical == 0 and len(row.divergences) == 2
    for gone in row.divergences:
        assert gone.at == 1 and gone.drafted == gone.plain + 1
        assert gone.gap <= 1 and gone.bug is strict
    assert row.bugs == (2 if strict else 0)


def test_truncated_answer_is_a_bug(tiny: VLM) -> None:
    judge = bench.Referee(tiny).judge
    gone = judge(lambda *_, **__: pytest.fail("nothing to ask"), Recipe(), [7, 8, 9], [7, 8], 3)
    assert gone == bench.Divergence(3, 2, 9, None, None, None, bug=True)
    assert judge(lambda *_, **__: pytest.fail("nothing to ask"), Recipe(), [7], [7]) is None


def test_gaps_are_in_units_of_the_model_dtype(tiny: VLM) -> None:
    assert tiny.adapter.dtype == torch.bfloat16
    referee = bench.Referee(tiny)
    scores = torch.tensor([20.0, 19.875, 19.0, 3.0])  # bfloat16 has steps of 1/8 here
    assert gap(referee, scores, [0, 1]) == 1
    assert gap(referee, scores, [0, 2]) == 8
    assert gap(referee, scores, [1, 2]) == 8  # neither is the best
    assert gap(referee, scores / 16, [0, 1]) == 1
    assert referee.wide.adapter.dtype == torch.float32
    assert tiny.adapter.dtype == torch.bfloat16


def test_what_an_audit_refuses(tiny: VLM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="not in recipes"):
        bench.audit(tiny, ["hired:0.2+draft-ngram"])
    for drafter in ("hired:0.2+draft-ngram", "none"):
        with pytest.raises(RecipeError, match="must contain drafters"):
            bench.audit(tiny, drafters=[drafter])
    for flag in (["--strict"], ["--prompts", "3"], ["--drafter", "draft-ngram"]):
        assert cli(["bench", *flag]) == 2
        assert "belong to --audit-lossless" in capsys.readouterr().err
    assert cli(["bench", "--audit-lossless", "--drafter", "draft-nonsense"]) == 2
    assert "draft-nonsense" in capsys.readouterr().err


# --- recorded acceptance -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job_and_args() -> tuple[Any, Any]:
    args = speculation.parse(["--shape", "tiny-shape", "--device", "cpu"])
    return speculation.prepared(args), args


def played(rate: float, layer: str = "", nodes: int = 10) -> Any:
    stage = speculation.Recorded(tuple(range(50, 80)), rate, nodes=nodes, layer=layer)
    return speculation.Playing(stage, SimpleNamespace(vocabulary=100, banned=(0, 3)), None)


def test_trees_follow_recorded_answers() -> None:
    play = played(1.0)
    assert play.propose(50, Budget(5, 4)) == Tree.chain(range(50, 55))
    assert play.propose(50, Budget(5, 2)) == Tree.chain(range(50, 53))
    assert play.propose(51, Budget(5, 4)) == Tree.chain([51])  # not in the recorded answer
    play.extend(Round(Tree.chain([50, 51]), [0, 1], [51, 52]))
    assert play.propose(52, Budget(5, 4)) == Tree.chain(range(52, 57))
    tree = play.filled(52, 12, 4)
    assert len(tree) == 12 and tree.depth == 4
    node = 0
    for token in range(53, 57):
        node = tree.children[node][token]
    wrong = played(0.0).filled(50, 12, 4)
    assert not set(wrong.tokens) & {51, 52, 53, 54} and not set(wrong.tokens) & {0, 3}
    assert (wrong.depth, len(wrong)) == (4, 12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["recorded 1", "recorded 1 + layer", "recorded 0"])
def test_recorded_acceptance_meets_the_rate(job_and_args: tuple[Any, Any], name: str) -> None:
    job, args = job_and_args
    row = speculation.part(job, "question", "none", name, args)
    assert row["identical"] == row["pairs"] == args.pairs and row["bugs"] == 0
    assert row["plain_calls"] == args.pairs * 11
    if name == "recorded 0":
        assert row["accepted"] == 0 < row["drafted"] and row["calls"] == row["plain_calls"]
    else:  # 11 tokens in rounds of 5, 5 and 1
        assert row["calls"] == args.pairs * 3 and row["mean_emitted"] == 11 / 3
        assert row["accepted_at_depth"] == row["drafted_at_depth"] == [2 * args.pairs] * 4
    assert row["wall"]["low"] <= row["wall"]["value"] <= row["wall"]["high"]


def test_steered_answers_are_judged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    args = speculation.parse(
        ["--shape", "tiny-shape", "--device", "cpu", "--dtype", "bfloat16", "--pairs", "1"]
    )
    job, compared = speculation.prepared(args), []
    judge = bench.Referee.judge
    monkeypatch.setattr(
        bench.Referee,
        "judge",
        lambda self, *given: compared.append(given[2:4]) or judge(self, *given),
    )
    row = speculation.part(job, "question", "none", "recorded 0.5 + layer", args)
    assert len(compared) == 2 and row["bugs"] == 0 and row["identical"] == 1


# --- reports -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_ratio_with_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unmoved(monkeypatch)
    out, key = tmp_path / "out.json", "captions | none | draft-recycle"
    argv = ["--device", "cpu", "--workload", "captions", "--recipe", "none"]
    argv += ["--drafter", "draft-recycle", "--pairs", "2", "--out", str(out)]
    assert speculation.main(argv) == 1
    table = capsys.readouterr().out
    assert f"WRONG: {key}" in table
    row = json.loads(out.read_text())["parts"][key]
    assert row["bugs"] > 0 and row["wall"] is None and row["decode"] is None


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(workload, marks=[pytest.mark.slow] if number else [])
        for number, workload in enumerate(speculation.WORKLOADS)
    ],
)
def test_drafters_of_the_shipped_model(workload: str) -> None:
    args = speculation.parse(["--device", "cpu", "--pairs", "1", "--new-tokens", "16"])
    job = speculation.prepared(args)
    row = speculation.part(job, workload, "hired:0.5", "draft-ngram+draft-recycle", args)
    assert row["identical"] == row["pairs"] == 1 and row["divergences"] == []
    assert row["distinct"] > 1
    assert 0 < row["calls"] <= row["plain_calls"] and row["verify_s"] > 0
    assert row["speculation"] == "draft-ngram+draft-recycle"


@pytest.mark.slow
def test_command_measures_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = [
        "--shape",
        "tiny-shape",
        "--device",
        "cpu",
        "--recipe",
        "none",
        "--rates",
        "1",
        "--pairs",
        "1",
    ]
    assert speculation.main([*argv, "--new-tokens", "6", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    names = ("recorded 1", "recorded 1 + layer", "draft-auto over recorded 1 + layer")
    assert list(report["parts"]) == [f"question | none | {name}" for name in names]
    assert {"date", "command", "environment", "settings", "numerics", "device"} <= set(report)
    assert "| question, none, recorded 1 + layer | " in capsys.readouterr().out
