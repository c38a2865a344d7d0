"""``vlmfast serve --engine vllm`` without vLLM: what is refused before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fastapi", reason="pip install 'vlmfast[serve]'")

from support import tiny_families
from support.paths import ROOT
from support.tiny_models import make_image
from vlmfast import VLM, RecipeError
from vlmfast.cli import main
from vlmfast.cli.commands import build_parser
from vlmfast.cli.parser import every_parser
from vlmfast.core.recipe import Recipe
from vlmfast.scenes.files import video as clip

PLUGIN = ROOT / "plugins" / "vllm"
if not PLUGIN.is_dir():
    pytest.skip("the plug-in is not part of this distribution", allow_module_level=True)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setitem(sys.modules, "vllm", None)
    from vlmfast_vllm import options

    return options


def saved(family: str, folder: Path) -> VLM:
    model, processor = tiny_families.builders()[family]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return VLM(model, processor)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a server does not start."""
    assert main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vlmfast: error: ")
    return line


def test_without_the_plug_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vlmfast_vllm", None)
    assert "pip install vlmfast-vllm" in refused(capsys, "tiny", "--engine", "vllm")
    line = refused(capsys, "no-such-model", "--", "--max-model-len", "2048")
    assert "'--max-model-len' stands after --, which is for --engine vllm" in line


def test_every_option_is_in_one_list(options: ModuleType) -> None:
    parser = dict(every_parser(build_parser()))[("serve",)]
    shared = {"--help", "--debug", "--log-level"}
    found = {
        name
        for action in parser._actions
        for name in (action.option_strings or [action.metavar])
        if name.startswith("--") or not action.option_strings
    } - shared
    same, translated, refused = map(set, (options.SAME, options.TRANSLATED, options.REFUSED))
    assert same | translated | refused == found
    assert not same & (translated | refused)
    assert translated & refused == {"--prefix-cache-bytes"}  # of which one value has an equal


def test_options_and_recipes_are_refused_before_vllm_is_imported(
    options: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"--device": "cpu", "--prefix-cache-bytes": "1"}
    for option, reason in options.REFUSED.items():
        value = values.get(option, "64")
        line = refused(capsys, "no-such-model", "--engine", "vllm", option, value)
        assert f"{option} {value} has no meaning with --engine vllm: {reason}" in line
    for words, reason in (
        ("--recipe snapkv:0.5", "snapkv acts in the cache step"),
        ("--alias small=hired:0.2+kivi:4", "kivi acts in the cache step"),
        ("--recipe hird:0.2", "did you mean 'hired"),
        ("--recipe auto", "depends on the weights of the model"),
        ("--recipe hired:0.2,positions=keep", "positions=keep"),
        ("", "--engine vllm needs vLLM: pip install vllm"),  # the control
    ):
        assert reason in refused(capsys, "tiny", "--engine", "vllm", *words.split())


def test_translated_options(options: ModuleType) -> None:
    words = ["serve", "tiny", "--engine", "vllm", "--dtype", "float32", "--max-rows", "3"]
    given = build_parser().parse_args([*words, "--prefix-cache-bytes", "0", "--", "--max-num-seqs"])
    assert given.engine_options == ["--max-num-seqs"]
    options.check(given)
    assert options.translated(given) == {
        "dtype": "float32",
        "max_num_seqs": 3,
        "enable_prefix_caching": False,
    }
    plain = build_parser().parse_args(["serve", "tiny"])
    assert options.translated(plain) == {"dtype": "auto"} and plain.engine_options == []
    shadowed = build_parser().parse_args(["serve", "tiny", "--shadow", "0.01"])
    assert options.translated(shadowed)["max_logprobs"] == -1


def test_the_page_prints_what_differs(options: ModuleType) -> None:
    page = ROOT / "docs" / "vllm.md"
    if not page.is_file():
        pytest.skip("the pages are not part of this distribution")
    text = page.read_text(encoding="utf-8")
    assert options.table() in text and options.differences() in text


@pytest.mark.parametrize(
    "family",
    ["llava_next", pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl", "internvl"],
)
def test_counts_are_those_of_the_library(options: ModuleType, tmp_path: Path, family: str) -> None:
    """Tokens in and kept of images and a video, without weights."""
    from vlmfast_vllm.frontend import Frontend, kept

    vlm = saved(family, tmp_path)
    frontend = Frontend(tmp_path, "none")
    video = {"type": "video", "video": clip()[0], "num_frames": 5}
    images = [{"type": "image", "image": make_image(*size)} for size in ((64, 48), (90, 128))]
    question = {"type": "text", "text": "What is it?"}
    for recipe in ("hired:budget=0.3", "downsample:budget=0.5+hired:budget=0.4"):
        plan = frontend.plan(str(frontend.recipe(recipe)))
        for media in ([images[0]], images, [video]):
            messages = [{"role": "user", "content": [*media, question]}]
            if family == "internvl" and media == [video]:
                with pytest.raises(RecipeError, match="only images of this model"):
                    frontend.prompt(messages, plan, "")
                continue
            prompt = frontend.prompt(messages, plan, "")
            stats = vlm.chat(messages, recipe=recipe, max_new_tokens=1).stats
            assert sum(map(len, prompt.layouts)) == stats.visual_tokens_in
            found = kept(plan, prompt.layouts)
            assert found == stats.visual_tokens_kept
            assert [*found.values()][-1] < stats.visual_tokens_in  # the control


def test_a_model_of_another_family(options: ModuleType, tmp_path: Path) -> None:
    from vlmfast_vllm.frontend import Frontend

    model, processor = tiny_families.builders()["smolvlm"]()
    model.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with pytest.raises(Exception, match="is a 'smolvlm' model; --engine vllm serves llava"):
        Frontend(tmp_path, "none")


def test_recipes_of_requests(options: ModuleType, tmp_path: Path) -> None:
    from vlmfast_vllm.frontend import Frontend

    from vlmfast.serve.config import ServerConfig
    from vlmfast.serve.errors import RequestError
    from vlmfast.serve.query import Recipes

    saved("qwen2_5_vl", tmp_path)
    frontend = Frontend(tmp_path, "hired:0.2")
    recipes = Recipes(frontend, ServerConfig(model="m", aliases={"fast": "divprune:0.1"}))
    asked = type("Asked", (), {"model": "fast", "recipe": None})
    assert recipes.of(asked) == Recipe.parse("divprune:0.1")
    for text, reason in (
        ("divprun:0.1", "did you mean"),
        ("kivi:4", "kivi acts in the cache step"),
        ("recipes.yaml", "cannot name a recipe file"),
    ):
        asked.recipe = text
        with pytest.raises(RequestError, match=reason) as caught:
            recipes.of(asked)
        assert caught.value.status == 400 and caught.value.param == "recipe"
    with pytest.raises(RecipeError, match="kivi"):
        frontend.recipe("kivi:4")
