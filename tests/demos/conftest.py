"""Examples of the demo."""

from __future__ import annotations

import pytest

from vlmfast.demos import drawn
from vlmfast.demos.talk import Media


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    return drawn.write_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="session")
def image(examples) -> Media:
    return Media("image", examples["image"][0][0])
