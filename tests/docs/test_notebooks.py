"""The notebooks of ``examples`` run offline, are stored without outputs, and print what they say.

Their outputs are those of this run; `vlmfast` is imported once, in a kernel that all of them share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from support.paths import ROOT

FOLDER = ROOT / "examples"
NAMES = sorted(file.stem for file in FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """A running kernel."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(FOLDER))
    yield manager
    manager.shutdown_kernel(now=True)


def executed(notebook: NotebookNode, kernel: KernelManager) -> NotebookNode:
    """The notebook with its outputs, in an empty namespace."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    NotebookClient(notebook, km=kernel, timeout=300).execute()
    return notebook


def read(name: str) -> NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def text_of(notebook: NotebookNode) -> str:
    """Everything that cells print or show as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    data = [output.get("data", {}) for output in outputs]
    shown = [of.get("text/markdown") or of.get("text/plain", "") for of in data]
    return "\n".join([*(output.get("text", "") for output in outputs), *shown])


def kinds_of(notebook: NotebookNode) -> set[str]:
    """The MIME types that cells show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return {kind for output in outputs for kind in output.get("data", {})}


@pytest.mark.parametrize("name", NAMES)
def test_stored_without_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown" and kinds.count("markdown") > 4


def test_every_notebook_has_a_test() -> None:
    assert NAMES == ["add_a_method", "compare", "quickstart"]


def test_quickstart(kernel) -> None:
    shown = executed(read("quickstart"), kernel)
    text = text_of(shown)
    assert re.findall(r"yellow triangle with ([\d.]+)", text) == ["336.0", "77.0"]
    assert "downsample:budget=0.5+scope:budget=0.44" in text
    assert "\nup\n" in text
    assert "image/png" in kinds_of(shown)


@pytest.mark.slow
def test_add_a_method(kernel) -> None:
    notebook = read("add_a_method")
    (source,) = (cell.source for cell in notebook.cells if "class Unusual" in cell.source)
    assert len(source.splitlines()) <= 30
    text = text_of(executed(notebook, kernel))
    assert re.search(r"yellow triangle with 3\d\.0 of 336", text)
    low, high = map(int, re.search(r"interval ([+-]\d+) to ([+-]\d+)", text).groups())
    assert 0 < low < high


@pytest.mark.slow
def test_compare(kernel) -> None:
    shown = executed(read("compare"), kernel)
    text = text_of(shown)
    assert re.search(r"^none +336 tokens +100%   yellow triangle$", text, re.M)
    assert len(re.findall(r"^(?:hired|divprune|random):\S+ +37 tokens", text, re.M)) == 3
    assert re.search(r"^\| `divprune:budget=0.11` \| .*[\d.]+ \[", text, re.M)
    assert "application/vnd.plotly.v1+json" in kinds_of(shown)
