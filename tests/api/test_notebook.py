"""Answers, comparisons, models and sessions as text."""

from __future__ import annotations

import pickle
import re
import sys
from typing import Any

import pytest
import torch

from support.engine.prompts import Stats, Trace
from support.tiny_models import build_llava_next, make_image
from vlmfast import VLM, Answer, ComparisonTable, RecipeError, VLMFastError
from vlmfast.core.display import Cost, shortened, text_table

ASK = {"max_new_tokens": 3}


def stats_of(**more: Any) -> Stats:
    known = {
        "visual_tokens_in": 336,
        "visual_tokens_per_layer": [74] * 4,
        "equivalent_tokens": 74.0,
        "kv_bytes": 1_200_000,
        "kv_bytes_full": 3_400_000,
        "ttft_s": 0.012,
        "generated_tokens": 3,
    }
    return Stats(**known | more)


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*build_llava_next())


@pytest.fixture(scope="module")
def table(vlm: VLM) -> ComparisonTable:
    """A preset, a recipe that is invalid, one that this model refuses, and one that runs."""
    recipes = ["balanced", "hird:0.2", "atp", "random:0.5"]
    return vlm.compare("what is here ?", make_image(), recipes=recipes, **ASK)


# --- text ----------------------------------------------------------------------------------------


def test_repr_of_an_answer_is_one_line() -> None:
    answer = Answer("a red\ncircle", [1], stats_of(), Trace(), "hired:0.2")
    assert repr(answer) == (
        "Answer('a red circle', hired:0.2, visual tokens 336 → 74 (22%), "
        "KV cache 3.4 MB → 1.2 MB (35%), first token 12 ms)"
    )
    long = Answer("word " * 500, [1], Stats(), Trace())
    assert len(repr(long)) < 200 and "…" in repr(long)
    assert repr(Answer("yes", [1], Stats(), Trace())) == "Answer('yes', none)"


def test_repr_of_stats_and_trace() -> None:
    stats = stats_of(visual_tokens_per_layer=[336, 74], equivalent_tokens=205.0, kv_bytes=900)
    assert repr(stats) == (
        "Stats(visual tokens 336 → 205 (61%), KV cache 3.4 MB → 900 B (0%), first token 12 ms, "
        "3 tokens generated)"
    )
    assert repr(Stats(generated_tokens=1)) == "Stats(1 token generated)"
    # A session that was opened without prefilling its images.
    assert repr(Stats(visual_tokens_in=9)) == "Stats(visual tokens 9, 0 tokens generated)"
    trace = Trace(layers=4, depth=torch.tensor([4, 4, 2, 0]), stages=[("hired", 0), ("fastv", 2)])
    assert repr(trace) == (
        "Trace(4 visual tokens, 3 after hired before layer 0, 2 after fastv before layer 2, "
        "2 in all 4 layers)"
    )
    assert repr(Trace()) == "Trace(0 visual tokens)"


def test_costs_against_the_full_model() -> None:
    own, full = stats_of(), stats_of(ttft_s=0.03)
    assert str(own.costs(full)[-1]) == "first token 30 ms → 12 ms (40%)"
    assert own.costs(full)[-1].fraction == pytest.approx(0.4)
    assert own.costs()[-1] == Cost("first token", "12 ms", "0 ms")
    assert str(full.costs(full)[-1]) == "first token 30 ms"


def test_repr_of_a_comparison(table: ComparisonTable) -> None:
    lines = repr(table).splitlines()
    names = ["recipe", "visual tokens", "KV cache", "first token", "agreement", "answer"]
    assert re.split("  +", lines[0]) == names
    start = lines[0].index("answer")
    for line, row in zip(lines[1:], table, strict=True):
        shown = "refused: " if row.answer is None else shortened(row.answer.text, 120)
        assert line[start:].startswith(shown)
    assert [line.split()[0] for line in lines[1:]] == [row.recipe for row in table]
    assert "refused: unknown method 'hird'" in lines[3]
    assert (
        len({line.index("%  ") for line in lines if "%  " in line and "refused" not in line}) >= 1
    )
    assert repr(table[2]).startswith("Comparison(hird:0.2, refused: unknown method 'hird'")
    assert repr(table[1]).startswith(f"Comparison({table[1].answer.text!r}, balanced, ")
    assert "\n" not in "".join(repr(row) for row in table)
    assert repr(ComparisonTable()) == "ComparisonTable([])"


def test_repr_of_models_and_sessions(vlm: VLM) -> None:
    assert repr(vlm).startswith("VLM(LlavaNextForConditionalGeneration, ")
    assert repr(vlm).endswith("K parameters, float32 on cpu)")
    with vlm.session([make_image(), make_image()], recipe="hired:0.2") as session:
        assert repr(session).startswith("Session(hired:0.2, visual tokens ")
        assert repr(session).endswith("2 images, reuses kv, 0 questions answered)")
        session.ask("what ?", **ASK)
        assert repr(session).endswith("1 question answered)")
    assert repr(session).endswith("closed)")
    with vlm.session(history=False) as session:
        assert repr(session) == "Session(none, 0 images, reuses kv)"


def test_text_table_is_aligned() -> None:
    rows = [{"name": "a", "n": "1"}, {"name": "long", "n": "100"}]
    assert text_table(rows, left=["name"]) == "name    n\na       1\nlong  100"
    assert shortened(" a\n b ", 9) == "a b" and shortened("abcdef", 4) == "abc…"


# --- comparisons ---------------------------------------------------------------------------------


def test_refused_recipes_are_rows(table: ComparisonTable) -> None:
    assert isinstance(table, list)
    assert [row.recipe for row in table] == ["none", "balanced", "hird:0.2", "atp", "random:0.5"]
    assert [row.error is None for row in table] == [True, True, False, False, True]
    for row in table:
        assert (row.answer is None) == (row.agreement is None) == (row.error is not None)
        assert row.full is table[0].answer
    assert "did you mean 'hired'" in table[2].error
    assert table[4].answer.token_ids and table[0].agreement == 1.0


def test_refused_recipes_raise_on_request(vlm: VLM) -> None:
    for recipes in (["random:0.5", "hird"], ["random:0.5", "atp"]):
        with pytest.raises(VLMFastError):
            vlm.compare("what ?", make_image(), recipes=recipes, errors="raise", **ASK)
    with pytest.raises(VLMFastError, match="errors='no' must be 'row' or 'raise'"):
        vlm.compare("what ?", make_image(), recipes=["random"], errors="no", **ASK)


def test_comparison_without_any_valid_recipe_raises(vlm: VLM) -> None:
    for recipes in ("hird", ["hird"], ["hird", "gird:7"], [3]):
        with pytest.raises(RecipeError):
            vlm.compare("what ?", "not read.png", recipes=recipes, **ASK)
    with pytest.raises(VLMFastError, match="atp"):
        vlm.compare("what ?", make_image(), recipes=["atp", "hird"], **ASK)
    assert len(vlm.compare("what ?", make_image(), recipes=[], **ASK)) == 1


def test_errors_of_the_request_raise(vlm: VLM) -> None:
    with pytest.raises(VLMFastError, match=r"nowhere\.png"):
        vlm.compare("what ?", "nowhere.png", recipes=["random"], **ASK)
    with pytest.raises(VLMFastError, match="max_new_tokens"):
        vlm.compare("what ?", make_image(), recipes=["random"], max_new_tokens=-1)


def test_recipes_of_other_types_are_rows(vlm: VLM) -> None:
    rows = vlm.compare("what ?", make_image(), recipes=[vlm.recipe("random:0.50"), 3], **ASK)
    assert [row.recipe for row in rows] == ["none", "random:0.50", "3"]
    assert "recipe must be" in rows[2].error


def test_comparison_as_a_data_frame(
    table: ComparisonTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame["recipe"]) == [row.recipe for row in table]
    assert list(frame.columns) == list(table[0].to_dict())
    assert list(frame["answer"].isna()) == [row.answer is None for row in table]
    assert frame["kv_bytes"][1] == table[1].answer.stats.kv_bytes
    assert frame["equivalent_tokens"].dtype == frame["agreement"].dtype == float
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(VLMFastError, match="to_pandas needs the package pandas: pip install"):
        table.to_pandas()


def test_comparisons_can_be_sliced_and_pickled(table: ComparisonTable) -> None:
    assert [row.recipe for row in table[:2]] == ["none", "balanced"]
    again = pickle.loads(pickle.dumps(ComparisonTable([table[2]])))
    assert isinstance(again, ComparisonTable) and again[0].error == table[2].error
