"""Packages of other authors: three that work, and one that is broken in every way known.

They are built and installed into a temporary folder, as pip installs them anywhere else.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

import vlmfast
from support import tiny_families
from support.engine.private import own
from support.paths import DATA, ROOT
from vlmfast import VLM, ModelError, RecipeError
from vlmfast.core import outside, registry
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class
from vlmfast.models import adapter_class, families
from vlmfast.testing import check_family, check_stage

HERE = DATA / "outside"
DOCS = ROOT / "docs"
PAGE = DOCS / "extending.md"
# Packages, the sections that show them, and the modules whose names these import.
WORKING = {
    "large": ("Add a method", "compressors"),
    "vipllava": ("Add a family", "models"),
    "repeat": ("Add a drafter", "drafters"),
}
PUBLIC = {"vlmfast.compressors", "vlmfast.drafters", "vlmfast.models", "vlmfast.testing"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the four packages are installed."""
    folder = tmp_path_factory.mktemp("site")
    sources = tmp_path_factory.mktemp("sources")
    packages = []
    for package in sorted(HERE.iterdir()):  # building must not write beside the sources
        (sources / package.name).mkdir()
        for file in package.iterdir():
            if file.is_file():
                (sources / package.name / file.name).write_bytes(file.read_bytes())
        packages.append(str(sources / package.name))
    assert len(packages) == 4
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *how, "--target", str(folder)]
    subprocess.run([*command, *packages], check=True, timeout=300)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages can be found; returns what was reported about them."""
    monkeypatch.syspath_prepend(str(site))
    caches = outside.found_outside, registry.stage_class
    for cached in caches:
        cached.cache_clear()
    with pytest.warns(outside.OutsideWarning) as warned:
        assert registry.stage_names() and families()
    messages = (of for of in warned if of.category is outside.OutsideWarning)
    yield [str(of.message) for of in messages]
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.startswith("vlmfast_")]:
        del sys.modules[name]


@pytest.mark.slow
def test_working_packages_pass_the_kits(installed: list[str], tiny: VLM) -> None:
    assert {"large", "draft-repeat"} < set(registry.stage_names())
    assert "vipllava" in families()
    for recipe in ("large:0.3", "draft-repeat:3", "large:0.4+draft-repeat"):
        assert str(Recipe.parse(recipe)) == recipe
    assert "effect" in check_stage("large:0.3", tiny).names()
    assert "effect" in check_stage("draft-repeat", tiny).names()
    report = check_family(*vipllava())
    assert report.of == "vipllava" and not report.names(ran=False)


def vipllava() -> tuple[Any, Any]:
    """A LLaVA whose projector takes two layers of the tower."""
    from transformers import VipLlavaConfig

    from support import tiny_models

    llava, processor = tiny_models.build_llava()
    config = VipLlavaConfig(
        text_config=llava.config.text_config,
        vision_config=llava.config.vision_config,
        vision_feature_layer=[-2, 1],
        image_token_index=llava.config.image_token_id,
        tie_word_embeddings=False,
    )
    return tiny_families.filled(config, 5), processor


def test_broken_packages_are_reported_and_skipped(
    installed: list[str], tiny: VLM, tmp_path: Path
) -> None:
    from transformers import AutoConfig, PreTrainedConfig

    reasons = {
        ("stages", "broken"): "ModuleNotFoundError: No module named 'a_package_that_is_not_in",
        ("stages", "hired"): "vlmfast has this name itself; names are not replaced",
        ("stages", "other-name"): "TypeError: its class HiRED has the name 'hired'",
        ("stages", "no-stage"): "TypeError: it refers to no stage class with the name 'no-stage'",
        ("families", "broken_vl"): "ModuleNotFoundError: No module named 'a_package_that_is_not",
        ("families", "llava"): "vlmfast has this name itself; names are not replaced",
        ("families", "no_adapter"): "TypeError: it refers to no subclass of vlmfast.models.Adapter",
    }
    assert len(installed) == len(reasons)
    for (group, name), reason in reasons.items():
        start = f"vlmfast.{group}: {name!r} of vlmfast-broken 0.1 is skipped: {reason}"
        assert any(line.startswith(start) for line in installed), name
    assert registry.stage_class("hired").__module__ == "vlmfast.compressors.tokens.hired"
    assert adapter_class("llava").__module__ == "vlmfast.models.llava"
    assert not {"broken", "other-name", "no-stage"} & set(registry.stage_names())
    # All others are still found; asking for a broken one says why.
    assert {method["name"] for method in vlmfast.methods()} == set(registry.stage_names())
    with pytest.raises(RecipeError, match=r"'broken' of vlmfast-broken 0\.1 is skipped: Mod"):
        Recipe.parse("broken:0.3")
    skipped = r"'broken_vl' of vlmfast-broken 0\.1 is skipped: M"
    with pytest.raises(ModelError, match=skipped):
        adapter_class("broken_vl")
    AutoConfig.register(
        "broken_vl", type("C", (PreTrainedConfig,), {"model_type": "broken_vl"}), True
    )
    (tmp_path / "config.json").write_text('{"model_type": "broken_vl"}')
    with pytest.raises(ModelError, match=f"is a 'broken_vl' model: vlmfast.families: {skipped}"):
        VLM.from_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore::vlmfast.core.outside.OutsideWarning")
def test_two_packages_with_one_name_are_both_skipped(
    site: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever is found first must not decide."""
    import importlib.metadata

    twin = importlib.metadata.EntryPoint("large", "vlmfast_stray", outside.STAGES)
    found = [*importlib.metadata.entry_points(group=outside.STAGES), twin]
    monkeypatch.setattr(outside, "entry_points", lambda group: found)
    outside.found_outside.cache_clear()
    registry.stage_class.cache_clear()
    with pytest.warns(outside.OutsideWarning, match="several packages have this name"):
        assert "large" not in registry.stage_names()
    with pytest.raises(RecipeError, match="several packages have this name"):
        registry.stage_class("large")


def test_methods_command_survives_a_broken_package(site: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    command = [sys.executable, "-m", "vlmfast", "methods", "large", "draft-repeat"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Keeps the tokens with the largest norms." in done.stdout
    assert "draft-repeat  (experimental, drafter, training-free, query-independent)" in done.stdout
    assert "warning: vlmfast.stages: 'hired' of vlmfast-broken 0.1 is skipped" in done.stderr


def imported(path: Path) -> set[str]:
    """Modules of vlmfast from which a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "vlmfast"}


@pytest.mark.parametrize("package", WORKING)
def test_guides_show_the_packages(package: str) -> None:
    """Line by line, with public imports alone."""
    (file,) = (HERE / package).glob("*.py")
    assert imported(file) <= PUBLIC
    if not PAGE.is_file():
        pytest.skip("the pages are not part of this distribution")
    text = section(package)
    assert file.read_text(encoding="utf-8") in text
    assert (HERE / package / "pyproject.toml").read_text(encoding="utf-8") in text


def test_public_names_exist() -> None:
    for name in sorted(PUBLIC):
        module = importlib.import_module(name)
        assert module.__all__ == sorted(module.__all__)
        assert all(getattr(module, public) is not None for public in module.__all__)
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name  # noqa: B018
        # A module of this name would replace it as soon as it is imported.
        assert not set(module.__all__) & {info.name for info in iter_modules(module.__path__)}


# --- what the guides and vlmfast's own methods import --------------------------------------------

# Documented under their own paths: modules of `vlmfast.compressors` have or had these names.
IN_MODULES = {("vlmfast.kernels.coverage", "cover"), ("vlmfast.core.views", "cells")}
# What methods and families of vlmfast import that others do not need.
OWN = {
    ("vlmfast.compressors", "clip"),  # loads OpenCLIP models
    ("vlmfast.compressors.groups", "groups_of"),  # `together`, where the host counts
    ("vlmfast.compressors.evictor", "kept_param"),  # a parameter in the words of `Evictor`
    # `quantize`, as several methods call it.
    *(("vlmfast.compressors.coded", name) for name in ("check_bits", "coded", "dtype_of", "paged")),
    ("vlmfast.core.saliency", "BLOCKS"),  # choices of a parameter
    ("vlmfast.kernels.quantize_kv", "check"),
    # Types for annotations alone.
    ("vlmfast.models.base", "Model"),
    *(("vlmfast.models._media", name) for name in ("Frames", "Items", "Sizes", "Tensors")),
    ("vlmfast.models._media", "tiled_views"),  # of crops of one size
    ("vlmfast.models._prompts", "framed"),
    ("vlmfast.models.internvl", "whole_last"),
    ("vlmfast.core.views", "spread"),  # of tiles of different sizes
    ("vlmfast.models.internvl", "Cropped"),  # base of `Marked`
    ("vlmfast.models.internvl", "tile_box"),
    ("vlmfast.core.packing", "Packing"),  # of towers that pack images in one row
    ("vlmfast.models.mistral3", "passing"),  # of views of different sizes
    ("vlmfast.models.mistral3", "in_order"),
}


def origins() -> set[tuple[str, str]]:
    """Module and name of all that the public packages give."""
    found = {(name, public) for name in PUBLIC for public in importlib.import_module(name).__all__}
    found |= {(getattr(importlib.import_module(m), n).__module__, n) for m, n in found}
    return found | {("vlmfast", name) for name in vlmfast.__all__}


def names(code: str, package: str = "") -> set[tuple[str, str]]:
    """Module and name of all that a program of ``package`` imports from vlmfast."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            found |= {(module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "vlmfast"}


def section(package: str) -> str:
    """The guide to a package."""
    _, found, text = PAGE.read_text(encoding="utf-8").partition(f"\n## {WORKING[package][0]}\n")
    assert found
    return text.partition("\n## ")[0] + "\n"


def programs(package: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", section(package), re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(not PAGE.is_file(), reason="the pages are not part of this distribution")
@pytest.mark.parametrize("package", WORKING)
def test_guides_import_public_names(package: str) -> None:
    imports = set().union(*map(names, programs(package)))
    assert imports and imports <= origins() | IN_MODULES
    # Neither do their texts lead to private modules, nor to others of vlmfast as files.
    text = section(package)
    assert not re.findall(r"\bvlmfast[/.][\w/.]*\b_\w+|\w+/_\w+\.py|compressors/\w+\.py", text)
    # Base classes and arguments that the tables name.
    public = importlib.import_module(f"vlmfast.{WORKING[package][1]}").__all__
    cells = " ".join(line for line in text.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([A-Z][a-z]+\w*)(?:`|\()", cells))
    assert named and named <= set(public)


def test_own_methods_and_families_need_public_names_alone() -> None:
    """Those of vlmfast could be packages of their own."""
    known, root, seen = origins() | IN_MODULES | OWN, Path(vlmfast.__file__).parent, set()
    methods = [stage_class(name).__module__ for name in registry.stage_names()]
    methods = [name for name in methods if name.startswith("vlmfast.compressors.")]
    for module in (*methods, *(f"vlmfast.models.{name}" for name in own())):
        file = root.joinpath(*module.split(".")[1:])
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        beside = module.removesuffix(".stage")  # the folder of a trained method
        seen |= {
            (where, name)
            for where, name in names(file.read_text(encoding="utf-8"), package)
            # Other methods, and the adapters of other families.
            if not where.startswith((beside, *methods)) and name != "FamilyAdapter"
        }
    assert {("vlmfast.compressors.guard", "Guarded"), ("vlmfast.core.kv", "KV")} < seen
    assert sorted(seen - known) == []
    assert seen >= IN_MODULES | OWN  # none is listed in vain


@pytest.mark.skipif(not DOCS.is_dir(), reason="the pages are not part of this distribution")
def test_public_names_are_documented() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = {tuple(path.rsplit(".", 1)) for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert sorted({(m, n) for m, n in origins() if m not in ("vlmfast", *PUBLIC)} - shown) == []
    assert shown >= IN_MODULES


# --- the guides, in an environment of their own --------------------------------------------------


def written(package: str, folder: Path) -> str:
    """Write a package as its guide shows it: its first program and its ``pyproject.toml``.

    Returns the argument of the guide's ``pip install``, the folder that is written.
    """
    text = section(package)
    project = re.search(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    (shown,) = re.findall(r"^```bash\npip install (\./[\w-]+)\n```", text, re.MULTILINE)
    (name,) = tomllib.loads(project)["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    (folder / shown).mkdir()
    (folder / shown / "pyproject.toml").write_text(project, encoding="utf-8")
    program = next(program for program in programs(package) if program.startswith('"""'))
    (folder / shown / name).write_text(program, encoding="utf-8")
    return shown


def check_of(package: str) -> str:
    """The program that checks a package."""
    (found,) = (program for program in programs(package) if "vlmfast.testing import" in program)
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment into which the three packages were installed.

    vlmfast and what it needs are found where they are installed: nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("environment")
    if not PAGE.is_file():
        pytest.skip("the pages are not part of this distribution")
    sources = [written(package, folder) for package in WORKING]
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    paths = [str(ROOT), *(p for p in sys.path if "-packages" in p)]
    (Path(own) / "found.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    how = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [python, "-m", "pip", "install", *how, *sources]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return python


@pytest.mark.slow
@pytest.mark.parametrize("package", WORKING)
def test_guides_work_word_by_word(environment: Path, package: str, tmp_path: Path) -> None:
    """What a guide shows is all that its package needs: to be installed, found and checked."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [environment, "-c", check_of(package)],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    of = {"large": "large:0.3", "repeat": "draft-repeat", "vipllava": "vipllava"}[package]
    assert done.stdout.startswith(of) and "checks passed" in done.stdout
    assert "CheckFailed" not in done.stderr
    listed = subprocess.run(
        [environment, "-c", "import vlmfast, vlmfast.models as m\n"
         "print([x['name'] for x in vlmfast.methods()], m.families())"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    ).stdout  # fmt: skip
    assert all(f"'{name}'" in listed for name in ("large", "draft-repeat", "vipllava"))
