"""Recipes: round trips of valid texts, and errors for invalid ones."""

from __future__ import annotations

import copy
import pickle
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from vlmfast.compressors.tokens.grid import Grid
from vlmfast.compressors.tokens.hired import HiRED
from vlmfast.compressors.tokens.random import Random
from vlmfast.core.params import recipe_name
from vlmfast.core.protocols import PROTOCOLS
from vlmfast.core.recipe import PRESETS, Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.core.stage import Stage, at_budget
from vlmfast.errors import RecipeError, VLMFastError

NAMES = sorted(stage_names())


def values(field: Field, hint: Any) -> st.SearchStrategy:
    """Values that ``field`` allows."""
    options = get_args(hint)
    if NoneType in options:
        (inner,) = (option for option in options if option is not NoneType)
        return st.none() | values(field, inner)
    if get_origin(hint) is tuple:
        return st.lists(values(field, options[0]), min_size=1, max_size=4).map(tuple)
    meta = field.metadata
    if meta.get("choices"):
        return st.sampled_from(meta["choices"])
    low, high = meta.get("gt", meta.get("ge")), meta.get("lt", meta.get("le"))
    if hint is bool:
        return st.booleans()
    if hint is int:
        least = -99 if low is None else int(low) + ("gt" in meta)
        most = least + 10**6 if high is None else int(high) - ("lt" in meta)
        return st.integers(least, most)
    if hint is float:
        return st.floats(
            low,
            high,
            exclude_min="gt" in meta,
            exclude_max="lt" in meta,
            allow_nan=False,
            allow_infinity=False,
        )
    if field.name == "view":  # the name of another method
        return st.sampled_from(("topk", "snapkv", "divprune"))
    if hint is str:
        return st.from_regex(r"[a-z0-9_./-]{1,12}", fullmatch=True).filter(lambda s: s != "none")
    raise NotImplementedError(f"{field.name}: {hint}")


@st.composite
def stages(draw: st.DrawFn, name: str) -> Stage:
    """A stage with any of its parameters set."""
    cls = stage_class(name)
    hints, given_ = get_type_hints(cls), {}
    for field in fields(cls):
        needed = field.default is MISSING and field.default_factory is MISSING
        if needed or draw(st.booleans()):
            given_[field.name] = draw(values(field, hints[field.name]))
    try:
        return cls(**given_)
    except VLMFastError:  # parameters that are valid alone but not together
        return reject()


@pytest.mark.parametrize("name", NAMES)
def test_stages_declare_name_protocol_and_paper(name: str) -> None:
    cls = stage_class(name)
    assert cls.name == name
    assert cls.protocol in PROTOCOLS or cls.expand is not Stage.expand
    assert cls.paper
    assert cls.lead is None or cls.lead in [field.name for field in fields(cls)]
    assert cls.__doc__
    for field in fields(cls):
        assert field.metadata.get("doc"), f"{name}: {field.name} is not documented"
    assert str(Recipe.parse(name)) == name


def test_tokens_keep_their_positions_by_default() -> None:
    renumbered = {n for n in NAMES if getattr(stage_class(n)(), "positions", "keep") != "keep"}
    assert not renumbered
    assert str(Recipe.parse("hired:budget=0.11,positions=keep")) == "hired:budget=0.11"
    assert Recipe.parse("hired:positions=compact") != Recipe.parse("hired")


@pytest.mark.cases(9)
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
# Few draws satisfy the constraints between parameters.
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_stage_round_trip(name: str, data: st.DataObject) -> None:
    stage = data.draw(stages(name))
    text = str(stage)
    assert Recipe.parse(text) == Recipe((stage,))
    assert str(Recipe.parse(text)) == text
    assert not set(text) & set(" '\"()[]{}$&;|<>*?\\!#~")  # no shell quoting is needed


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_recipe_round_trip(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    parts = [data.draw(stages(name)) for name in chosen]
    parts.sort(key=lambda stage: PROTOCOLS.index(stage.expand()[0].protocol))
    try:
        recipe = Recipe(tuple(parts))
    except RecipeError:  # stages that cannot be combined
        reject()
    assert Recipe.parse(str(recipe)) == recipe
    assert hash(Recipe.parse(str(recipe))) == hash(recipe)


MARKS = ["+", ":", "=", ",", ";", " ", "%", "(", ")", "/", ".", "-", "\n", "\x00", "\ud800"]
NUMBERS = ["0.2", "20", "20%", "0", "1", "-1", "1e999", "nan", "inf", "9" * 40, "0x1", "½", "none"]
PARAMETERS = sorted({recipe_name(field) for name in NAMES for field in fields(stage_class(name))})


def nearly(data: st.DataObject) -> str:
    """Names, marks and numbers of recipes in any order."""
    parts = st.sampled_from([*NAMES, *PRESETS, *PARAMETERS, *MARKS, *MARKS, *NUMBERS, "HiRED"])
    return "".join(data.draw(st.lists(parts, max_size=9)))


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_any_text_parses_or_raises(data: st.DataObject) -> None:
    anything = st.text(max_size=30) | st.text("hired:+=,.0123/ratelpbudgonm ", max_size=30)
    text = data.draw(anything) if data.draw(st.booleans()) else nearly(data)
    try:
        recipe = Recipe.parse(text)
    except RecipeError as error:
        lines = str(error)
        assert lines.isprintable() and len(lines) < 1500
        return
    assert Recipe.parse(str(recipe)) == recipe == Recipe.parse(recipe.text)


@pytest.mark.parametrize(
    "text",
    ["x" * 10**6, "hired:" + "9" * 10**5, "hired:keep=" + "x" * 10**5, "hired:" + ",1" * 10**5],
)
def test_errors_of_long_texts_are_short(text: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.parse(text)
    assert len(str(error.value)) < 1500


# --- canonical text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", "none"),
        ("none", "none"),
        ("hired", "hired"),
        ("hired:0.2", "hired"),
        ("hired:keep=0.20", "hired"),
        ("hired:0.4", "hired:0.4"),
        (" hired: 0.4 , alpha = 0.5 + grid ", "hired:0.4+grid"),
        ("hired:0.4,alpha=0.25", "hired:keep=0.4,alpha=0.25"),
        ("hired:alpha=0.25,keep=0.4", "hired:keep=0.4,alpha=0.25"),
        ("hired:grid_compat=yes", "hired:grid_compat=true"),
        ("hired:budget=None", "hired"),
        ("hired:budget=1e-05", "hired:budget=1e-05"),
        ("random:seed=3+grid:0.5", "random:seed=3+grid:0.5"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Recipe.parse(text)) == canonical
    assert Recipe.parse(canonical) == Recipe.parse(text)


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ("hired:0.2", "hired:0.2"),
        (" hired: 0.4 , alpha = 0.5\n+ grid ", "hired: 0.4 , alpha = 0.5 + grid"),
        ("balanced", "balanced"),
        ("none", "none"),
        ("", "none"),
        (None, "none"),
        (HiRED(0.2), "hired"),
        (HiRED(0.4), "hired:0.4"),
        (HiRED(0.2) + Grid(), "hired+grid"),
        (Recipe.parse("hired:0.2"), "hired:0.2"),
    ],
)
def test_text_is_as_given(given_: Any, text: str) -> None:
    recipe = Recipe.of(given_)
    assert recipe.text == text
    assert Recipe.parse(recipe.text) == recipe
    assert recipe.fitted(24, 2).text == text
    assert pickle.loads(pickle.dumps(recipe)).text == copy.deepcopy(recipe).text == text


def test_text_does_not_change_equality() -> None:
    short, long = Recipe.parse("hired"), Recipe.parse("hired:keep=0.2")
    assert short == long and hash(short) == hash(long) and short.text != long.text
    assert (long + Grid()).text == "hired:keep=0.2+grid"
    assert str(long + Grid()) == str(short + Grid()) == "hired+grid"


def test_addition_of_stages() -> None:
    recipe = Recipe.parse("random:0.4+grid")
    assert Recipe.of(Random(0.4) + Grid()) == recipe
    assert Recipe.of([Random(0.4), Grid()]) == recipe
    assert Recipe((Random(0.4),)) + Grid() == recipe
    assert isinstance(Recipe((Random(0.4),)) + Grid(), Recipe)
    assert str(Random(0.4) + Grid() + HiRED(0.1)) == "random:0.4+grid+hired:0.1"
    assert Recipe.of(HiRED(0.4)) == Recipe.parse("hired:0.4") == Recipe.of("hired:0.4")
    assert Recipe.of(None) == Recipe() == Recipe.of("none")
    assert HiRED(1) == HiRED(1.0)


def test_presets() -> None:
    for name, text in PRESETS.items():
        assert Recipe.parse(name) == Recipe.parse(text)
    assert Recipe.parse("none") == Recipe()
    with pytest.raises(RecipeError, match="preset 'fast' must be the whole recipe"):
        Recipe.parse("fast+grid")


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    for text in ("none", "hired:keep=0.4,alpha=0.25+grid", "random:0.1"):
        Recipe.parse(text).save(path)
        assert Recipe.load(path) == Recipe.parse(text)
    for content in ("- hired\n", "recipe: 3\n", "recipe: [\n", "other: hired\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(RecipeError, match=r"recipe\.yaml"):
            Recipe.load(path)
    path.write_text("recipe: hired\nbudgets: 0.2\n", encoding="utf-8")
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml has the unknown key 'budgets'; known are recipe"
    ):
        Recipe.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        Recipe.load(path)
    with pytest.raises(RecipeError, match="absent"):
        Recipe.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("spelled", "text"),
    [
        ("HiRED", "hired"),
        ("HiRED:keep=0.20 + PyramidDrop", "hired:keep=0.20+pyramiddrop"),
        ("VisionZip+LOOK-M:0.4", "visionzip+lookm:0.4"),
        ("ZipVL", "zipvl"),
        ("clip_relevance:0.2", "clip-relevance:0.2"),
        ("PruMerge-Plus", "prumerge-plus"),
    ],
)
def test_spellings_of_papers_name_methods(spelled: str, text: str) -> None:
    recipe = Recipe.parse(spelled)
    assert recipe == Recipe.parse(text)
    assert recipe.text == text


# Parameters of the same purpose, besides ``keep`` and ``budget``.
SAME = [
    "pvc:budget=0.5,side=4",
    "quickprefill:top_k=4,keep=0.5",
    "draft-layerskip:layers=0/3,skip=0.45",
    "draft-eagle:pool,keep=0.5,queries=2",
    "elastic:keep=0.5,prune=0.05",
    "elastic:budget=0.5,queries=2",
    "pyramiddrop:ratios=0.5/0.2/0.1,keep=0.5",
    "pyramiddrop:budget=0.6,ratios=1/1/1",
    "sparsevlm:keep=0.5,published=192",
    "sparsevlm:budget=0.5,published=64",
    "tome:r=4,keep=0.5",
    "tome:r=4,budget=0.5",
    "visionzip:dominant=54,keep=0.2",
    "visionzip:contextual=10,budget=0.2",
]


def test_parameters_of_the_same_purpose_are_refused() -> None:
    texts, message = list(SAME), r"^{}: .* replace each other; give one of them"
    for name in NAMES:
        names = {recipe_name(f): f.default for f in fields(stage_class(name))}
        if names.keys() >= {"keep", "budget"}:  # the default too is refused, being typed
            texts += [f"{name}:budget=0.7,keep={names['keep'] or 0.2!r}", f"{name}:0.7,budget=0.7"]
    assert len(texts) > 50
    for text in texts:
        name, _, rest = text.partition(":")
        *shared, first, second = rest.split(",")
        with pytest.raises(RecipeError, match=message.format(name)):
            Recipe.parse(text)
        for alone in (first, second):
            assert Recipe.parse(f"{name}:{','.join([*shared, alone])}")
    with pytest.raises(RecipeError, match=r"hired: keep=0.2 and budget=0.2 replace each other"):
        HiRED(0.2, budget=0.2)
    with pytest.raises(RecipeError, match="replace each other"):
        HiRED(keep=0.2, budget=0.3)
    with pytest.raises(RecipeError, match="replace each other"):
        replace(HiRED(0.4), budget=0.2)
    with pytest.raises(RecipeError, match=r"hired has no parameter 'alfa' \(did you mean 'alpha'"):
        HiRED(alfa=0.3)
    # A copy has its values from the stage, not from a call.
    assert replace(HiRED(budget=0.2), alpha=0.4) == HiRED(alpha=0.4, budget=0.2)
    assert at_budget(HiRED(0.4, alpha=0.3), 0.2) == HiRED(alpha=0.3, budget=0.2)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hirde", r"'hirde' \(did you mean 'hired'\?\); nearest are hired, [\w-]+, [\w-]+;"),
        ("xyzzy", r"unknown method 'xyzzy'; nearest are [\w-]+, [\w-]+, [\w-]+; `vlmfast methods`"),
        ("hired+hired:0.2", r"appears twice in the recipe hired\+hired:0.2$"),
        ("pyramiddrop+hired:0.2", r"write hired:0.2\+pyramiddrop$"),
        ("hired:", r"ends in ':'"),
        ("hired:0.2,", r"cannot read ''"),
        ("hired:=0.2", r"no parameter ''"),
        ("hired:keep=", r"cannot read 'keep='"),
        ("hired:0.2,0.4", r"cannot read '0.4'"),
        ("hired:0.2,keep=0.4", r"keep is given twice"),
        ("hired++grid", r"empty method name"),
        ("+hired", r"empty method name"),
        ("random:seed=1.5", r"random: seed='1.5' cannot be read as int"),
        ("random:seed=-1", r"random: seed=-1 is out of range, allowed is >= 0"),
        (f"random:seed={10**30}", r"random: seed=10+ is out of range, whole numbers are at most"),
        ("hired:20", r"allowed is > 0 and <= 1$"),
        ("hired:20%", r"cannot be read as float$"),
        ("HiRED:20", r"hired: keep=20 .*allowed is > 0 and <= 1$"),
        ("hird", r"unknown method 'hird' \(did you mean 'hired'\?\)"),
        ("hired 0.2", r"unknown method 'hired 0.2' \(did you mean 'hired'\?\)"),
        ("hired:keep:0.2", r"'keep:0.2' cannot be read as float$"),
        ("hired:0,2", r"cannot read '2' in .*: write hired:key=value,key=value$"),
        ("+", r"recipe '\+' has an empty method name$"),
        ("hired:positions=kep", r"one of keep, compact \(did you mean 'keep'\?\)"),
        ("Fast", r"unknown method 'Fast' \(did you mean 'fast'\?\)"),
        ("blanced", r"'blanced' \(did you mean 'balanced'\?\); nearest are balanced, "),
        ("fast:0.2", r"preset 'fast' has no parameters$"),
        ("fast+scope", r"not joined with methods; write downsample:budget=0.33\+.* in its place$"),
        ("none+scope", r"preset 'none' must be the whole recipe, .*; leave it out$"),
        ("pvc:weights=a\nb", r"'a\\nb' cannot be used in a recipe"),
        ("grid:sead=1", r"grid has no parameter 'sead'; parameters: keep, positions, budget"),
        ("hired+mustdrop", r"pipeline order; write mustdrop\+hired"),
        ("hired+crops", r"pipeline order; write crops\+hired"),
        ("vlcache+fastkv", r"write fastkv\+vlcache"),
        ("tome+mustdrop", r"tome and mustdrop, which both modify the rows"),
        ("mustdrop:merge=all", r"merge=all is out of range, allowed is one of view, call"),
        ("mustdrop:layers=three", r"layers='three' cannot be read"),
        ("mustdrop:layers=2.5", r"layers=2.5 must be one or more whole numbers"),
        ("mustdrop:layers=inf", r"layers=inf must be one or more whole numbers"),
        ("mustdrop:layers=7/3", r"layers=7/3 must be .* that ascend"),
        ("mustdrop:layers=0.1/0.1", r"layers=0.1/0.1 must be .* that ascend"),
        ("mustdrop:published=100", r"published=100 .* one of 192, 128, 64, 64-vizwiz"),
        ("mustdrop:published=64,global_thr=0.5", r"published=64 and global_thr=0.5 replace"),
        ("mustdrop:published=192,individual_thr=0", r"published=192 and individual_thr=0 replace"),
        ("mustdrop:0.5,global_thr=0", r"global_thr=0 cannot be combined with budget"),
        ("mustdrop:budget=0.5,individual_thr=0", r"individual_thr=0 cannot be combined"),
        ("sparsevlm:published=100", r"published=100 is out of range, allowed is one of 192, 128"),
        ("sparsevlm:layers=2/8", r"the published counts are for 3 drops, layers has 2"),
        ("sparsevlm:0.5,layers=8/2", r"layers=8/2 must be one or more whole numbers"),
        ("pyramiddrop:rule=first", r"rule=first.*one of next, last"),
        ("pyramiddrop:ratios=0.5/0.2", r"one ratio per drop"),
        ("pyramiddrop:layers=0.5/0.25", r"layers=.* whole numbers, or fractions"),
        ("pyramiddrop:layers=8/8", r"layers=.* whole numbers, or fractions"),
        ("pyramiddrop:layers=8/2.5", r"layers=.* whole numbers, or fractions"),
        ("atp:layers=0.5/0.25", r"atp.*layers=0.5/0.25"),
        ("atp:layers=2/2", r"atp.*layers=2/2"),
        ("fastkv:layer=2.5", r"must be one or more whole numbers"),
        ("cake:kernel=4", r"kernel=4 is even"),
        ("cake:window=8.5", r"window=8.5 must be a whole number"),
        ("elastic:mode=concat,branch=pool", r"elastic: .*mode=concat"),
        ("elastic:mode=weighted,text=true", r"elastic: .*mode=weighted"),
        ("elastic:0.1,text=true", r"elastic: .*keep=0.1"),
        ("elastic:budget=0.1,branch=text", r"elastic: .*budget=0.1"),
        ("pvc:image_repeat=5", r"image_repeat=5"),
        ("pvc:side=4,video_repeat=17", r"video_repeat=17"),
        ("zipvl:bits_low=3", r"zipvl: bits_low=3 cannot be packed; allowed are 2, 4"),
        ("kivi:bits=3", r"kivi: bits=3 cannot be packed; allowed are 2, 4 and 8"),
        ("kivi:residual=100", r"kivi: residual=100 does not consist of groups of 32"),
        ("zipcache:bits_high=6", r"zipcache: bits_high=6 cannot be packed; allowed are 2, 4 and 8"),
        ("zipcache:bits_high=2,bits_low=4", r"bits_low=4 is more than bits_high=2"),
        ("h2o:agg=max", r"h2o: agg=max ranks the prompt alone"),
        ("h2o:average=true", r"h2o: average=true ranks the prompt alone"),
        ("crops:saliency=norm", r"saliency=norm is out of range, allowed is one of auto, cls, rec"),
        ("crops:budget=0.5", r"crops has no parameter 'budget'"),
        ("divprune:guard=2", r"divprune has no parameter 'guard'; parameters: keep"),
        ("scope:reserve=0.2", r"scope has no parameter 'reserve'; parameters: keep"),
        ("hired:reserve=0.2,newline=rows", r"reserve cannot be combined with newline=rows"),
        ("draft-eagle:top_k=2,depth=2,nodes=8", r"at most 7 nodes"),
        ("draft-eagle:all,keep=0.1", r"keep=0.1 applies to"),
    ],
)
def test_invalid_recipes_raise(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.parse(text)


@pytest.mark.parametrize("bad", [3, 0.2, {"hired": 0.2}, HiRED])
def test_invalid_types_raise(bad: Any) -> None:
    with pytest.raises(RecipeError, match="recipe must be"):
        Recipe.of(bad)
    with pytest.raises(RecipeError, match="a recipe holds stages"):
        Recipe((bad,))


@pytest.mark.parametrize("path", ["runs/one+two", "a,b", " left"])
def test_paths_with_reserved_characters_raise(path):
    from vlmfast.compressors.encoder.pvc import PVC

    with pytest.raises(RecipeError, match="cannot be used in a recipe"):
        PVC(weights=path)
    assert Recipe.parse(str(PVC(weights="runs/1e+5".replace("+", "")))) == Recipe(
        (PVC(weights="runs/1e5"),)
    )
