"""What every test stands on: no network, few threads, random-weight models built once."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch and transformers are imported. A parallel run gives each worker one thread: several
# threads each would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest
import torch

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, where a test asks for them
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


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
    """A `vlmfast.VLM` of each family on random weights; shared, so leave it as it was."""
    import tiny_models
    import vlmfast

    build = {"llava": tiny_models.build_llava, "llava_next": tiny_models.build_llava_next}
    return vlmfast.VLM(*build[request.param]())


@pytest.fixture(scope="session")
def tiny():
    """The shipped model; a checkout without its weights fails here."""
    import vlmfast

    return vlmfast.VLM.from_pretrained("tiny", device="cpu")
