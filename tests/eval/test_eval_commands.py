"""``vlmfast eval`` and ``vlmfast report`` from the command line."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from types import SimpleNamespace
from typing import ClassVar

import pytest

import vlmfast
from support.closeness import close
from support.engine.commands import loads
from support.eval_fakes import FakeVLM, run
from vlmfast.core.exit_codes import ExitCode
from vlmfast.core.recipe import Recipe
from vlmfast.errors import MediaError, ModelError, RecipeError, VLMFastError
from vlmfast.eval import commands, failures
from vlmfast.eval.axes import shrinks_cache
from vlmfast.eval.commands import add_report, fractions, planned, run_report
from vlmfast.eval.draws import with_draws
from vlmfast.eval.results import read
from vlmfast.eval.runner import evaluate, refusal
from vlmfast.eval.shapes import Shapes
from vlmfast.eval.summary import summarise


@pytest.fixture
def fake(monkeypatch):
    """Replaces every model with the fake; returns the list of loaded models."""
    loaded = []

    def load(name, device, dtype):
        loaded.append(FakeVLM())
        loaded[-1].dtype = dtype
        return loaded[-1]

    loads(monkeypatch, load)
    return loaded


def report(*words: object) -> int:
    parser = ArgumentParser()
    add_report(parser)
    return run_report(parser.parse_args([str(word) for word in words]))


def answered(vlm: FakeVLM) -> int:
    """Number of questions, without the single tokens that test whether a recipe runs."""
    return sum(call.get("max_new_tokens") != 1 for _, call in vlm.asked)


def test_random_selection_is_drawn_several_times():
    recipes = planned(["random", "hired"], [0.3])
    drawn = ["random:budget=0.3", "random:budget=0.3,seed=1", "random:budget=0.3,seed=2"]
    assert {Recipe.parse(text) for text in drawn} == {
        r for r in with_draws(recipes, 3) if r[0].name == "random"
    }
    assert with_draws(recipes, 1) == recipes
    alone = [Recipe.parse("random:0.3,seed=4")]
    assert with_draws(alone, 3) == alone


def names(recipes):
    return [str(recipe) for recipe in recipes]


def test_fractions():
    assert fractions("0.33, 0.11,1,0.33") == (0.33, 0.11, 1.0)


@pytest.mark.parametrize("text", ["", "0", "1.1", "-0.2", "a", "0.3,", "nan", "inf", "0.3;0.2"])
def test_fractions_out_of_range(text):
    with pytest.raises(ArgumentTypeError, match="is not a number above 0 and at most 1"):
        fractions(text)


@pytest.mark.parametrize(
    ("recipe", "budgets", "shares", "message"),
    [
        ("hired", [], [0.2], "'hired' has no cache method; drop --share"),
        ("none", [], [0.2], "--share is for recipes with a cache method; add"),
        ("lookm", [0.2], [], "'lookm' has no stage with a budget"),
        ("none", [0.3], [], "--budget is for recipes that drop tokens; add --recipe"),
    ],
)
def test_budgets_and_shares_need_a_method_that_takes_them(recipe, budgets, shares, message):
    with pytest.raises(RecipeError, match=message):
        planned([recipe], budgets, None, shares)


def test_planned_recipes():
    assert names(planned(["none"], [])) == []
    assert names(planned(["hired", "hired", "none", "random:0.3"], [])) == ["hired", "random:0.3"]
    assert names(planned(["none", "hired", "grid"], [0.33, 0.11])) == [
        "hired:budget=0.33",
        "hired:budget=0.11",
        "grid:budget=0.33",
        "grid:budget=0.11",
    ]


def test_all_is_every_method_at_each_budget():
    recipes = planned(["all"], [0.33, 0.11])
    found = {recipe[0].name for recipe in recipes}
    assert {"hired", "random", "grid", "downsample"} <= found
    assert found == {m["name"] for m in vlmfast.methods()}
    for method in vlmfast.methods():
        runs = [r for r in recipes if r[0].name == method["name"]]
        if any(p["name"] == "budget" for p in method["parameters"]):
            assert [r[0].budget for r in runs] == [0.33, 0.11]
    assert len(set(recipes)) == len(recipes)
    assert len(planned(["all"], [])) == len(found)


def test_cache_is_every_cache_method_at_each_share():
    shares = [0.5, 0.2, 0.1]
    recipes = planned(["cache"], [], None, shares)
    found = {}
    for (stage,) in recipes:
        found.setdefault(stage.name, []).append(stage)
    names = {m["name"] for m in vlmfast.methods() if shrinks_cache(Recipe.parse(m["name"]))}
    assert {"lookm", "snapkv", "fastkv", "kivi", "zipvl"} <= names == set(found)
    for stages in found.values():
        if hasattr(stages[0], "keep"):
            assert [stage.keep for stage in stages] == shares
        # A separate window would fill the budget of a short prompt.
        windows = {getattr(stage, "window", 0) for stage in stages}
        assert windows <= {0, 0.1}
    assert [stage.bits for stage in found["kivi"]] == [4, 2]
    assert len(found["zipcache"]) == len(found["zipvl"]) == 1
    # Without a share, a method named explicitly runs with its defaults.
    assert {str(recipe) for recipe in planned(["cache"], [])} == names
    assert [str(r) for r in planned(["snapkv", "kivi"], [], None, [0.5])] == ["snapkv:0.5", "kivi"]
    # The reducers of 'all' do not change.
    every = planned(["all"], [0.33], None, shares)
    assert set(recipes) <= set(every)
    reducers = {r for r in every if not shrinks_cache(r)}
    assert reducers == {r for r in planned(["all"], [0.33]) if not shrinks_cache(r)}


def test_budgets_and_shares_of_a_stack():
    stack = planned(["random+lookm"], [0.5], None, [0.5, 0.2])
    assert names(stack) == ["random:budget=0.5+lookm:0.5", "random:budget=0.5+lookm"]


def test_positions_are_set_in_every_stage_that_has_them():
    found = planned(["hired+pyramiddrop", "kivi"], [], "compact")
    assert names(found) == ["hired:positions=compact+pyramiddrop:positions=compact", "kivi"]
    assert names(planned(["fastv:positions=compact"], [], "keep")) == ["fastv"]


def test_eval_writes_answers_and_numbers(tmp_path, fake, capsys):
    out, file = tmp_path / "out", tmp_path / "deep" / "numbers.json"
    words = ("shapes", "--limit", 2, "--out", out, "--json", file)
    assert run(*words, "--recipe", "random", "--recipe", "hired", "--budget", "0.33,0.11") == 0
    value = json.loads(file.read_text())
    assert list(value["recipes"]) == [
        "none",
        "random:budget=0.33",
        "random:budget=0.11",
        "hired:budget=0.33",
        "hired:budget=0.11",
    ]
    assert value["recipe"] == "random:budget=0.33"
    first = value["recipes"]["random:budget=0.33"]
    for key in (
        "accuracy_image", "accuracy_video", "accuracy_image_ci", "accuracy_video_ci",
        "caption_image", "caption_video", "loyalty", "equivalent_tokens", "types",
    ):  # fmt: skip
        assert value[key] == first[key]
        assert first[key] is not None
    assert value["recipes"]["none"]["loyalty"] == 1.0
    assert value["failed"] == {}
    assert answered(fake[0]) == (3 + 2 * 5) * 42  # random selection is drawn five times
    assert first["draws"] == 5
    printed = capsys.readouterr().out
    assert "| `hired:budget=0.11` (cls) |" in printed
    assert str(out) in printed
    # Again: no question is asked, and the numbers are the same.
    assert run(*words, "--recipe", "random", "--budget", "0.33") == 0
    assert not fake[1].asked
    assert json.loads(file.read_text())["recipes"]["none"] == value["recipes"]["none"]


def test_controls(tmp_path, fake):
    file = tmp_path / "n.json"
    run("shapes", "--limit", 1, "--controls", "--out", tmp_path, "--json", file)
    value = json.loads(file.read_text())
    assert list(value["recipes"]) == ["none", "none@question-only", "none@background-only"]
    assert value["recipe"] == "none"
    assert value["control"] is None


def test_sessions(tmp_path, fake, capsys):
    file = tmp_path / "n.json"
    words = ("shapes", "--limit", 2, "--out", tmp_path / "o", "--json", file)
    run(*words, "--recipe", "lookm", "--recipe", "streamingllm", "--share", "0.5,0.2", "--session")
    value = json.loads(file.read_text())
    alone = ["none", "lookm:0.5", "lookm", "streamingllm:0.5", "streamingllm"]
    assert set(value["recipes"]) == {*alone, *(f"{name}@session" for name in alone)}
    asked = value["recipes"]["lookm@session"]
    for key in ("accuracy_first_image", "accuracy_later_image", "accuracy_later_video"):
        assert asked[key] is not None
        assert value["recipes"]["lookm"][key] is None
    close(asked["held"], 0.2, terms=100)  # a mean over fewer samples than that
    printed = capsys.readouterr().out
    assert printed.count("| `lookm:0.5") == 2  # alone and in sessions
    run(*words, "--recipe", "lookm", "--share", "0.5")
    assert not fake[1].asked  # finished samples are not asked again


def test_report_of_an_eval(tmp_path, fake, capsys):
    words = ("--recipe", "random", "--recipe", "grid", "--budget", "0.33,0.11")
    run("shapes", "--limit", 1, "--out", tmp_path / "a", *words)
    run("shapes", "--limit", 1, "--out", tmp_path / "b", *words)
    capsys.readouterr()
    assert report(tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Accuracy")
    assert str(tmp_path / "a" / "shapes.html") in printed
    assert report(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c") == 0
    assert (tmp_path / "c" / "difference.md").exists()
    # Reports are written next to the results and do not disturb them.
    assert report(tmp_path / "a") == 0


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("shape",), VLMFastError, "unknown task 'shape'.*tasks: shapes"),
        (("shapes", "--seed", "99"), VLMFastError, "seed is 99"),
        (("shapes", "--recipe", "hirde"), RecipeError, "did you mean 'hired'"),
        (("shapes", "--recipe", "hired:2"), RecipeError, "out of range"),
        (("shapes", "--budget", "0.5"), RecipeError, "add --recipe"),
        (("shapes", "--recipe", "hired", "--share", "0.2"), RecipeError, "drop --share"),
        (("shapes", "--recipe", "hired", "--budget", "1.5"), SystemExit, "2"),
        (("shapes", "--draws", "0"), SystemExit, "2"),
        (("shapes", "--device", "abacus"), ModelError, "device 'abacus' cannot be used"),
        (("shapes", "--out", "FILE/x"), VLMFastError, "cannot be written"),
        (("shapes", "--out", "FILE"), VLMFastError, "cannot be written"),
        (("shapes", "--json", "."), VLMFastError, "is a folder"),
        (("shapes", "--json", "FILE/x.json"), VLMFastError, "cannot be written"),
    ],
)
def test_invalid_input_is_refused_before_a_model_is_loaded(
    tmp_path, fake, monkeypatch, words, error, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    with pytest.raises(error, match=message) as caught:
        run(words[0], "--limit", 1, *words[1:])
    assert "\n" not in str(caught.value)
    assert not fake


def test_failing_recipe_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    vlm = FakeVLM()
    ask = vlm.ask

    def picky(question, *args, recipe=None, **more):
        if str(recipe) == "grid" and more["max_new_tokens"] > 1:
            raise MediaError("unreadable")
        return ask(question, *args, recipe=recipe, **more)

    vlm.ask = picky
    loads(monkeypatch, lambda *_: vlm)
    file = tmp_path / "n.json"
    words = ("--recipe", "grid", "--recipe", "random", "--max-errors", 2, "--json", file)
    code = run("shapes", "--limit", 1, "--out", tmp_path / "o", *words)
    assert code == ExitCode.CUT_SHORT
    assert "| `grid` | grid: 3 samples failed" in capsys.readouterr().out
    value = json.loads(file.read_text())
    assert value["recipe"] == "random"
    report(tmp_path / "o")
    for found in (
        value,
        json.loads((tmp_path / "o" / "report.json").read_text())["tasks"]["shapes"],
    ):
        assert list(found["recipes"]) == ["none", "random"]
        assert found["recipes"]["none"]["samples"] == 21  # of all samples, not of three
        assert "grid: 3 samples failed" in found["failed"]["grid"]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("words", "dtype"), [((), "auto"), (("--dtype", "float32"), "float32")])
def test_the_model_has_the_dtype_that_was_asked_for(tmp_path, fake, words, dtype):
    run("shapes", "--limit", 1, "--out", tmp_path, *words)
    assert fake[0].dtype == dtype


class Refusing(FakeVLM):
    """Refuses the recipes that ``refused`` names, for videos alone with ``videos``."""

    def __init__(self, *refused: str, videos: bool = False) -> None:
        super().__init__()
        self.refused, self.videos = refused, videos

    def ask(self, question, images=None, video=None, **more):
        recipe = str(more.get("recipe"))
        if recipe in self.refused and (video is not None or not self.videos):
            self.asked.append((question, more))
            raise RecipeError(f"{recipe} does not run | on this model")
        return super().ask(question, images, video, **more)


@pytest.mark.parametrize("videos", [False, True])
def test_impossible_recipe_is_refused_before_the_first_sample(tmp_path, monkeypatch, videos):
    vlm = Refusing("grid", videos=videos)
    loads(monkeypatch, lambda *_: vlm)
    with pytest.raises(RecipeError, match=r"^grid: grid does not run"):
        run("shapes", "--limit", 1, "--out", tmp_path, "--recipe", "grid")
    assert answered(vlm) == 0 and vlm.asked
    assert not (tmp_path / "shapes").exists()


def test_impossible_recipe_is_a_row_if_others_run(tmp_path, monkeypatch, capsys):
    vlm = Refusing("grid")
    loads(monkeypatch, lambda *_: vlm)
    words = ("shapes", "--limit", 1, "--draws", 1, "--out", tmp_path)
    words += ("--recipe", "grid", "--recipe", "random")
    file = tmp_path / "n.json"
    assert run(*words, "--json", file) == ExitCode.CUT_SHORT
    out, err = capsys.readouterr()
    row = r"| `grid` | grid does not run \| on this model |"
    assert row in out
    assert err == "left out: grid: grid does not run | on this model\n"
    assert answered(vlm) == 2 * 21
    reason = {"grid": "grid does not run | on this model"}
    assert json.loads(file.read_text())["failed"] == reason
    # A report has the row too, in text and JSON.
    report(tmp_path, "--out", tmp_path / "report")
    assert row in (tmp_path / "report" / "report.md").read_text()
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())["tasks"]["shapes"]
    assert numbers["failed"] == reason and list(numbers["recipes"]) == ["none", "random"]
    report(tmp_path, tmp_path, "--out", tmp_path / "report")
    assert row in (tmp_path / "report" / "difference.md").read_text()
    capsys.readouterr()
    vlm.refused = ()
    assert run(*words) == ExitCode.FINISHED
    assert "no result" not in capsys.readouterr().out
    assert failures.read_failures(tmp_path / "shapes") == {}


def test_missing_weights_are_a_row_if_others_run(tmp_path, monkeypatch, capsys):
    def trained(stage):
        raise RecipeError(f"{stage.name}: there are no weights")

    vlm = FakeVLM()
    vlm.adapter = SimpleNamespace(**vars(FakeVLM.adapter), trained=trained)
    loads(monkeypatch, lambda *_: vlm)
    words = ("shapes", "--limit", 1, "--out", tmp_path)
    elastic = ("--recipe", "elastic", "--budget", "0.33,0.11")
    with pytest.raises(RecipeError, match=r"elastic:budget=0\.11: elastic: there are no weights"):
        run(*words, *elastic)
    assert not vlm.asked
    assert run(*words, *elastic, "--recipe", "random") == ExitCode.CUT_SHORT
    names = "elastic:budget=0.33, elastic:budget=0.11"
    assert capsys.readouterr().err == f"left out: {names}: elastic: there are no weights\n"
    assert list(failures.read_failures(tmp_path / "shapes")) == names.split(", ")


def test_impossible_session_is_refused_before_the_first_sample(tmp_path, monkeypatch):
    vlm = FakeVLM()
    session = vlm.session

    def picky(*, recipe, **more):
        if str(recipe) == "grid":
            raise RecipeError("grid runs in no session")
        return session(recipe=recipe, **more)

    vlm.session = picky
    loads(monkeypatch, lambda *_: vlm)
    words = ("shapes", "--limit", 1, "--out", tmp_path, "--recipe", "grid", "--session")
    assert run(*words) == ExitCode.CUT_SHORT
    assert failures.read_failures(tmp_path / "shapes") == {
        "grid@session": "grid runs in no session"
    }
    assert (tmp_path / "shapes" / "grid").is_dir()
    assert not (tmp_path / "shapes" / "grid@session").exists()


def test_damaged_reasons_are_refused(tmp_path):
    for text in ("{\n{}\n", "[]\n{}\n", '{"grid": 1}\n'):
        (tmp_path / failures.FAILED).write_text(text)
        with pytest.raises(VLMFastError, match=r"failed\.jsonl.* is damaged"):
            failures.read_failures(tmp_path)


def test_impossible_method_of_a_group_is_left_out(tmp_path, monkeypatch, capsys):
    vlm = Refusing("lookm")
    loads(monkeypatch, lambda *_: vlm)
    group = lambda shares: [Recipe.parse("lookm"), Recipe.parse("h2o")]  # noqa: E731
    monkeypatch.setitem(commands.GROUPS, "cache", group)
    words = ("shapes", "--limit", 1, "--out", tmp_path, "--recipe", "cache")
    assert run(*words) == ExitCode.FINISHED
    out, err = capsys.readouterr()
    assert "left out: lookm" in err and "| `lookm` |" in out and "| `h2o` |" in out


def test_unreadable_media_refuse_no_recipe(tmp_path):
    docs = Shapes().docs(1, 0)
    vlm = FakeVLM(fail=lambda _: True)  # a MediaError
    assert refusal(vlm, Shapes(), Recipe.parse("grid"), docs) is None
    assert refusal(Refusing("grid"), Shapes(), Recipe.parse("grid"), docs).startswith("grid does")
    assert refusal(Refusing("grid"), Shapes(), Recipe(), docs) is None


def test_failing_full_model_stops_the_run(tmp_path, monkeypatch):
    loads(monkeypatch, lambda *_: FakeVLM(fail=lambda _: True))
    with pytest.raises(VLMFastError, match="none: 11 samples failed"):
        run("shapes", "--limit", 1, "--out", tmp_path, "--recipe", "random")
    assert not (tmp_path / "shapes" / "random").exists()


class FewDocs(Shapes):
    """A few docs and two tokens for each."""

    generation: ClassVar = {k: {"do_sample": False, "max_new_tokens": 2} for k in Shapes.generation}

    def docs(self, limit, seed):
        return super().docs(limit, seed)[::5]


def test_eval_on_random_weights(tmp_path, random_vlm):
    """The real library end to end, with meaningless answers."""
    full = evaluate(random_vlm, FewDocs(), None, tmp_path, 1)
    assert {s["modality"] for s in full.samples.values()} == {"image", "video"}
    assert not any("error" in s for s in full.samples.values())
    assert len(full.meta["weights_sha256"]) == 64
    half = evaluate(random_vlm, FewDocs(), "random:budget=0.5", tmp_path, 1)
    for doc, s in half.samples.items():
        whole = full.samples[doc]
        assert s["prompt_hash"] == whole["prompt_hash"]
        assert whole["equivalent_tokens"] == whole["visual_tokens_in"] == s["visual_tokens_in"]
        assert s["equivalent_tokens"] == pytest.approx(0.5 * s["visual_tokens_in"], rel=0.1)
    assert all(line["ttft_s"] > 0 for line in full.timings.values())


def test_cache_methods_in_sessions(tmp_path, tiny):
    """The real library again: a smaller cache, which later questions also use."""
    full = evaluate(tiny, FewDocs(), None, tmp_path, 1, session=True)
    kept = evaluate(tiny, FewDocs(), "lookm:0.3", tmp_path, 1, session=True)
    assert {s["turn"] for s in kept.samples.values()} > {0}
    assert summarise(full, full)["held"] == 1
    # The images are reduced to that, and the question follows.
    assert 0.3 < summarise(kept, full)["held"] < 0.36
    assert not any("error" in s for s in kept.samples.values())


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_shipped_model_is_above_chance(tmp_path, tiny, limit):
    """Far above chance, and random selection measurably costs accuracy."""
    full = evaluate(tiny, "shapes", None, tmp_path, limit)
    blind = evaluate(tiny, "shapes", None, tmp_path, limit, control="question-only")
    poor = evaluate(tiny, "shapes", "random:budget=0.05", tmp_path, limit)
    scores = [summarise(r, full)["accuracy_image"] for r in (full, blind, poor)]
    assert scores[0] > 0.6
    assert scores[0] > scores[1] + 0.15
    assert scores[0] > scores[2]
    assert summarise(full)["errors"] == 0
    assert read(full.path).samples == full.samples
