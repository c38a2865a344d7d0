"""Common setup of the tests: no network, few threads, random-weight models built once."""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch and transformers are imported. A parallel run gives each worker one thread: several
# threads each would only wait for each other. `make test-cpus` still sets its own number.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("VLMFAST_THREADS", "1")
if "VLMFAST_THREADS" in os.environ:
    os.environ["OMP_NUM_THREADS"] = os.environ["VLMFAST_THREADS"]
    os.environ["MKL_NUM_THREADS"] = os.environ["VLMFAST_THREADS"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import pytest
import torch

# The duration of an example depends on the machine and its load.
hypothesis.settings.register_profile("vlmfast", deadline=None)
hypothesis.settings.load_profile("vlmfast")

# PyTorch's convolutions on a GPU round float32 to TF32 by default.
torch.backends.cudnn.allow_tf32 = False

if not torch.cuda.is_available():  # kernels run in Triton's interpreter where a test requests them
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        metavar="I/N",
        help="of the tests marked slow only part I of N, any number I modulo N",
    )


def pytest_configure() -> None:
    if threads := os.environ.get("VLMFAST_THREADS"):
        torch.set_num_threads(int(threads))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect tests without searching for garbage, and leave what exists then out of searches.

    Fifteen thousand tests and the libraries are a million objects, which stay to the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefix cache in tests that count what is computed."""
    if request.node.get_closest_marker("cold") is not None:
        from vlmfast.engine.prefix_cache import PrefixCache

        monkeypatch.setattr(PrefixCache, "enabled", property(lambda cache: False))


@pytest.fixture(scope="session", autouse=True)
def _threads() -> int:
    """Number of threads of the run."""
    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def _same_threads(_threads: int) -> Iterator[None]:
    """More threads than a worker has cores would slow down all tests that follow."""
    yield
    assert torch.get_num_threads() == _threads, "the test has changed the number of threads"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the slow tests, and mark those that compare by `closeness`, by whatever helper."""
    for item in _beyond(items):
        item.add_marker(pytest.mark.slow)
    if (part := config.getoption("--part")) is not None:
        number, count = map(int, part.split("/"))
        left_out = [item for item in items if _left_out(item, number % count, count)]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    for item in items:
        owner = item.cls.__name__ if item.cls else item.originalname
        if owner in _comparing(item.path):
            item.add_marker(pytest.mark.equality)


def _beyond(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases of tests with the marker ``cases`` that are beyond its number.

    They are chosen by their names, like those of a part, and spread over all parameters.
    """
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        marked = item.get_closest_marker
        if marked("cases") is not None and marked("slow") is None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        (most,) = cases[0].get_closest_marker("cases").args
        yield from sorted(cases, key=_order)[most:]


def _order(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


def _left_out(item: pytest.Item, number: int, count: int) -> bool:
    """By the name of the test, so that a part does not depend on what else is collected."""
    slow = item.get_closest_marker("slow") is not None
    return slow and _order(item) % count != number


@functools.cache
def _comparing(path: Path) -> frozenset[str]:
    """Names of a module that compare: those of `closeness`, and functions that use one."""
    text = path.read_text(encoding="utf-8")
    inside = {module: names for module in _imported(text) if (names := _of_helper(module, path))}
    if not inside:
        return frozenset()
    found: set[str] = set()
    parts: dict[str, set[str]] = {}
    for definition in ast.parse(text).body:
        used: set[str] = set()  # names that it reads; fixtures are among its arguments
        for node in ast.walk(definition):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.arg):
                used.add(node.arg)
            elif isinstance(node, ast.ImportFrom):
                names = inside.get(node.module or "", ())
                found |= {of.asname or of.name for of in node.names if of.name in names}
            elif isinstance(node, ast.Import):
                found |= {of.asname or of.name for of in node.names if of.name in inside}
        parts |= dict.fromkeys(_defined(definition), used)
    while more := {name for name, used in parts.items() if name not in found and used & found}:
        found |= more
    return frozenset(found)


def _imported(text: str) -> set[str]:
    """Modules that a text may import; without a dot, as helpers are."""
    return set(re.findall(r"^\s*(?:from|import) (\w+)\b(?!\.)", text, re.MULTILINE))


def _of_helper(module: str, path: Path) -> frozenset[str]:
    """The same for a module in this folder; all names of `closeness` itself."""
    helper = Path(__file__).with_name(f"{module}.py")
    if module == "closeness":
        return frozenset({"close", "apart", "tolerance", "network", "tower"})
    return _comparing(helper) if helper.is_file() and helper != path else frozenset()


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [of.id for of in targets if isinstance(of, ast.Name)]


@pytest.fixture(scope="session")
def random_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random-weight LLaVA-1.5 with its processor."""
    import tiny_models

    folder = tmp_path_factory.mktemp("llava")
    tiny_models.build_llava(folder)
    return folder


@pytest.fixture(scope="session")
def random_llava_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random-weight LLaVA-NeXT with its processor."""
    import tiny_models

    folder = tmp_path_factory.mktemp("llava_next")
    tiny_models.build_llava_next(folder)
    return folder


@pytest.fixture(scope="session", params=["llava", "llava_next"])
def random_vlm(request: pytest.FixtureRequest):
    """A `vlmfast.VLM` of each family on random weights; shared, so leave it unchanged."""
    import tiny_models
    import vlmfast

    build = {"llava": tiny_models.build_llava, "llava_next": tiny_models.build_llava_next}
    return vlmfast.VLM(*build[request.param]())


@pytest.fixture(scope="session")
def tiny():
    """The shipped model; a checkout without its weights fails here."""
    import vlmfast

    return vlmfast.VLM.from_pretrained("tiny", device="cpu")
