"""Common setup of the tests: no network, few threads, random-weight models built once."""

from __future__ import annotations

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

_SUPPORT = Path(__file__).with_name("support")

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
def _cold(request: pytest.FixtureRequest) -> Iterator[None]:
    """No prefix cache in tests that count what is computed."""
    if request.node.get_closest_marker("cold") is None:
        yield
        return
    from support.engine.turns import without_prefix_cache

    with without_prefix_cache():
        yield


@pytest.fixture(scope="module", autouse=True)
def _examined(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models of one config are examined once, but where the examination is tested."""
    if request.path.parent.name == "models":
        yield
        return
    from support.engine.examined import examined_once

    with examined_once():
        yield


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
    """Choose the slow tests, and mark those of modules that compare by `closeness`."""
    for item in _beyond(items):
        item.add_marker(pytest.mark.slow)
    if (part := config.getoption("--part")) is not None:
        number, count = map(int, part.split("/"))
        left_out = [item for item in items if _left_out(item, number % count, count)]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    for item in items:
        if _compares(item.path):
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
    """By the names of the file and the test, so that most files may move."""
    name, folder = item.nodeid.partition("::")[2], item.path.parent.name
    within = f"{folder}/" if folder in ("demos", "kernels", "serve") else ""
    return zlib.crc32(f"tests/{within}{item.path.name}::{name}".encode())


def _left_out(item: pytest.Item, number: int, count: int) -> bool:
    """By the name of the test, so that a part does not depend on what else is collected."""
    slow = item.get_closest_marker("slow") is not None
    return slow and _order(item) % count != number


@functools.cache
def _compares(path: Path) -> bool:
    """Whether a module imports `closeness`, itself or through what it takes from `support`."""
    text = path.read_text(encoding="utf-8")
    names = set(re.findall(r"^\s*from support\.([\w.]+) import", text, re.MULTILINE))
    for below, listed in re.findall(
        r"^\s*from support(\.golden)? import (\([^)]*\)|.*)$", text, re.MULTILINE
    ):
        names |= {f"{below}.{name}".strip(".") for name in re.findall(r"\w+", listed)}
    files = (_SUPPORT.joinpath(*name.split(".")).with_suffix(".py") for name in names)
    return "closeness" in names or any(map(_compares, filter(Path.is_file, files)))


@pytest.fixture(scope="session")
def random_llava_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small random-weight LLaVA-NeXT with its processor."""
    from support import tiny_models

    folder = tmp_path_factory.mktemp("llava_next")
    tiny_models.build_llava_next(folder)
    return folder


@pytest.fixture(scope="session", params=["llava", "llava_next"])
def random_vlm(request: pytest.FixtureRequest):
    """A `vlmfast.VLM` of each family on random weights; shared, so leave it unchanged."""
    import vlmfast
    from support import tiny_models

    build = {"llava": tiny_models.build_llava, "llava_next": tiny_models.build_llava_next}
    return vlmfast.VLM(*build[request.param]())


@pytest.fixture(scope="session")
def tiny():
    """The shipped model; a checkout without its weights fails here."""
    import vlmfast

    return vlmfast.VLM.from_pretrained("tiny", device="cpu")
