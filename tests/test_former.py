"""Former names: module paths, parameters, attributes, and files of earlier versions."""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import vlmfast
from vlmfast import VLM, Recipe, RecipeError
from vlmfast.cli import main
from vlmfast.compressors.cache.h2o import H2O
from vlmfast.compressors.prefill.pyramiddrop import PyramidDrop
from vlmfast.compressors.tokens.divprune import DivPrune
from vlmfast.compressors.tokens.hired import HiRED
from vlmfast.compressors.tokens.visionzip import VisionZip
from vlmfast.core.moved import MOVED, former_names
from vlmfast.core.params import param
from vlmfast.core.protocols import DrafterStage, EncodeStage, PrefillStage
from vlmfast.core.registry import stage_names

# Elsewhere in the suite a deprecated name is an error.
pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]
FILES = Path(__file__).parent / "data" / "former"
IMAGE = str(Path(__file__).parents[1] / "examples" / "picture.png")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Former modules are imported as if for the first time."""
    names = {name: sys.modules.pop(name) for name in MOVED if name in sys.modules}
    yield
    for name in MOVED:
        sys.modules.pop(name, None)
    sys.modules.update(names)


# --- module paths --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MOVED))
def test_former_module_warns_and_has_the_names_of_the_new_one(fresh: None, name: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf"^{name} has moved: import from {MOVED[name][0]}"
    ):
        module = importlib.import_module(name)
    for new in map(importlib.import_module, MOVED[name]):
        public = [key for key in vars(new) if not key.startswith("_")]
        own = [key for key in public if getattr(vars(new)[key], "__module__", "") == new.__name__]
        assert all(getattr(module, key) is vars(new)[key] for key in own)
    with pytest.raises(AttributeError, match=f"{name}' has no attribute 'nothing'"):
        _ = module.nothing


def test_former_module_warns_once(fresh: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            from vlmfast.layout import TokenLayout  # noqa: F401
    assert [str(w.message) for w in caught] == [
        "vlmfast.layout has moved: import from vlmfast.core.layout"
    ]
    assert caught[0].filename == __file__


def test_former_modules_do_not_exist_as_files() -> None:
    root = Path(vlmfast.__file__).parents[1]
    for name in MOVED:
        path = root.joinpath(*name.split("."))
        assert not path.with_suffix(".py").exists()
        assert not (path / "__init__.py").exists()


def test_every_method_of_version_0_1_has_an_alias() -> None:
    moved = {name.rpartition(".")[2] for name in MOVED if name.startswith("vlmfast.compressors.")}
    methods = [m.split(".") for m in stage_names().values() if m.startswith("vlmfast.compressors")]
    newer = {"crops", "static_frames"}
    assert {parts[-1] for parts in methods} - newer <= moved


def test_former_names_of_a_class() -> None:
    assert former_names(HiRED) == ["vlmfast.compressors.hired.HiRED"]
    assert former_names(VLM) == ["vlmfast.vlm.VLM"]
    assert "vlmfast.stages.VisionStats" in former_names(vlmfast.core.statistics.VisionStats)
    assert former_names(Path) == []


def test_former_module_runs_as_a_program(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["training", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("vlmfast.models.tiny.training", run_name="__main__", alter_sys=True)
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    assert "--minutes" in printed or "--hours" in printed or "--max-steps" in printed


def test_unknown_modules_stay_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vlmfast.nothing")


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("former", "today", "old"),
    [
        (lambda: HiRED(rate=0.3), HiRED(0.3), "rate"),
        (lambda: H2O(share=0.4), H2O(keep=0.4), "share"),
        (lambda: PyramidDrop(ratio=0.3), PyramidDrop(keep=0.3), "ratio"),
        (
            lambda: VisionZip(0.3, repair=True),
            VisionZip(0.3, proportional_attention=True),
            "repair",
        ),
    ],
)
def test_former_parameters_warn_and_work(former, today, old: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"\({old}=\) is deprecated, use"):
        stage = former()
    assert stage == today
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated, use"):
        assert getattr(stage, old) in (0.3, 0.4, True)


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("hired:rate=0.3,alpha=0.4", "hired:keep=0.3,alpha=0.4"),
        ("h2o:share=0.4,recent=0.3", "h2o:keep=0.4,recent=0.3"),
        ("visionzip:0.3,repair=true", "visionzip:keep=0.3,proportional_attention=true"),
        ("pyramiddrop:ratio=0.3", "pyramiddrop:0.3"),
        ("draft-eagle:prune,share=0.3", "draft-eagle:visual=prune,keep=0.3"),
        ("divprune:across=clip", "divprune"),
    ],
)
def test_former_recipes_warn_and_parse(former: str, today: str) -> None:
    with pytest.warns(FutureWarning, match="is deprecated, use"):
        recipe = Recipe.parse(former)
    assert recipe == Recipe.parse(today)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Recipe.parse(str(recipe)) == recipe  # what is written has the names of today
        assert Recipe.parse(today) == recipe


def test_command_line_shows_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ask", IMAGE, "What is there?", "--max-new-tokens", "1", "--recipe"]
    assert main([*words, "hired:rate=0.3"]) == 0
    assert capsys.readouterr().err == "vlmfast: warning: hired:rate= is deprecated, use keep=\n"
    assert main([*words, "hired:keep=0.3"]) == 0
    assert capsys.readouterr().err == ""


def test_former_and_present_name_together_are_refused() -> None:
    with pytest.raises(RecipeError, match="hired: rate is given twice"):
        Recipe.parse("hired:keep=0.2,rate=0.3")
    with pytest.raises(TypeError, match="keep is given twice"):
        HiRED(keep=0.2, rate=0.3)


def test_former_value_of_a_choice() -> None:
    with pytest.warns(DeprecationWarning, match="'clip'"):
        assert DivPrune(across="clip") == DivPrune(across="video")
    with pytest.raises(RecipeError, match="across=films is out of range"):
        DivPrune(across="films")


def test_present_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage = HiRED(keep=0.3)
        assert replace(stage, keep=0.4).keep == 0.4
        assert not stage.query_dependent
    with pytest.raises(AttributeError, match="no attribute 'share'"):
        _ = stage.share
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = HiRED.nothing


# --- classes of other packages -------------------------------------------------------------------


def test_a_reducer_with_former_names_works(tiny: VLM) -> None:
    with pytest.warns(DeprecationWarning, match=r"asks_question is deprecated|keep is deprecated"):

        @dataclass(frozen=True)
        class First(EncodeStage):
            name: ClassVar[str] = "first"
            asks_question: ClassVar[bool] = True
            count: int = param(5, "tokens kept", ge=1)

            def keep(self, tokens, geometry, stats, request):
                return torch.arange(self.count)

    assert First().query_dependent
    assert First.query_dependent
    image = Path(__file__).parents[1] / "examples" / "picture.png"
    answer = tiny.ask("What is there?", image, recipe=First(), max_new_tokens=1)
    assert answer.stats.visual_tokens_kept == {"first": 5}


def test_prefill_and_drafter_stages_with_former_names() -> None:
    with pytest.warns(DeprecationWarning, match="repair is deprecated"):

        @dataclass(frozen=True)
        class Merges(PrefillStage):
            name: ClassVar[str] = "merges"
            repair: bool = param(True, "")

    with pytest.warns(DeprecationWarning, match="taps is deprecated"):

        @dataclass(frozen=True)
        class Drafts(DrafterStage):
            name: ClassVar[str] = "drafts"

            def taps(self, depth):
                return (depth - 1,)

    assert Merges().proportional_attention
    assert not Merges(repair=False).proportional_attention
    assert Drafts().aux_hidden_state_layers(4) == (3,)


def test_a_present_class_attribute_is_found_by_its_former_name() -> None:
    with pytest.warns(DeprecationWarning, match="asks_question"):
        assert PyramidDrop.asks_question
    with pytest.warns(DeprecationWarning, match="repair"):
        assert not HiRED().repair


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> VLM:
    return VLM.from_pretrained("tiny")


@pytest.mark.parametrize(
    ("file", "recipe", "answer"),
    [
        (
            "session-hired-lookm",
            "hired:keep=0.15,alpha=0.4+lookm:proportional_attention=true",
            "green",
        ),
        ("session-h2o", "hired:keep=0.15,alpha=0.6+h2o:0.6", "yellow"),
        ("session-kivi", "visionzip:keep=0.1,proportional_attention=true+kivi:4", "yellow"),
    ],
)
def test_sessions_of_the_first_version_go_on(
    tiny: VLM, file: str, recipe: str, answer: str
) -> None:
    """Written by version 0.1.0 before its modules moved; the answers are those that it gave."""
    session = tiny.load_session(FILES / f"{file}.safetensors")
    assert session.reuses == "kv"
    assert str(session.recipe).split("+")[0] == str(Recipe.parse(recipe)).split("+")[0]
    given = session.ask("What color is it?", max_new_tokens=6)
    # By 2.4, 5.9 and 5.5 logits the likeliest, so that rounding changes nothing.
    assert given.text == answer
    assert given.stats.prompt_reused > 300
    session.close()


def test_a_trained_stage_of_the_first_version_loads(tiny: VLM) -> None:
    image = Path(__file__).parents[1] / "examples" / "picture.png"
    kept = [
        tiny.ask("What is in the bottom left?", image, recipe=recipe).stats.equivalent_tokens
        for recipe in (f"atp:0.3,weights={FILES / 'atp'}", "atp:0.3")
    ]
    assert kept[0] == kept[1]


def test_a_recipe_file_of_the_first_version_loads(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="repair"):
        recipe = Recipe.load(FILES / "recipe.yaml")
    assert str(recipe) == (
        "tome:keep=0.5,proportional_attention=false+divprune:0.3+"
        "pyramiddrop:keep=0.4,layers=0.3/0.6+h2o:keep=0.3,recent=0.4+draft-recycle"
    )
    recipe.save(tmp_path / "recipe.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Recipe.load(tmp_path / "recipe.yaml") == recipe
