"""Every command and every block of Python that README, docs and the project's other pages show.

All of them are checked against the parsers and names that they use (`documented`). Offline and
quick ones also run as written, in a folder with the examples. A new command is run by default,
unless a line of `NOT_RUN` gives a reason.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

import vlmfast
from support.documented import (
    CHECKS,
    ROOT,
    Command,
    Wrong,
    all_options,
    check,
    check_python,
    commands,
    differs_from_file,
    filled,
    make,
    not_ours,
    outputs,
    pages,
    parsed,
    program,
    python_blocks,
    run_python,
    stray_options,
    whole,
)
from vlmfast import compressors
from vlmfast.core.recipe import Recipe
from vlmfast.core.stage import TIERS

if not (ROOT / "docs" / "evaluation.md").is_file():
    pytest.skip("the pages are not part of this distribution", allow_module_level=True)

PAGES = pages()
COMMANDS = [command for page, text in PAGES.items() for command in commands(page, text)]
PYTHON = {page: found for page, text in PAGES.items() if (found := python_blocks(page, text))}

# Commands that are checked and not run, and why.
NOT_RUN = {
    r"--model (?!tiny\b)": "online: a hub id, or a model of the reader's",
    r"^make ask MODEL=pocket$": "needs the packages of `make pocket`",
    r"^vlmfast check": "half a minute, and it writes a file; test_check.py runs its parts",
    r"^vlmfast demo": "serves until it is stopped",
    r"^vlmfast bench --audit-lossless$": "half a minute: `SLOW`",
    r"^vllm serve": "another project's server; make test-vllm runs the plug-in",
    r"^vlmfast serve": "tests/serve/test_documented_server.py runs it, and what asks it",
    r"^curl ": "asks a server, as above",
    r"^docker ": "needs a builder",
    r"^vlmfast train (?!.*(--help|--steps 1 ))": "minutes to days",
    r"^vlmfast reproduce (?!.*(--list|--dry))": "online; tests/eval/test_reproduce.py runs it",
    r"^vlmfast eval ": "minutes to hours; recipes and tasks are looked at, some run shortened",
    r"^python benchmarks/": "measures for minutes",
    r"^python -m vlmfast\.kernels\.compile": "minutes; the tests of the kernels do the same",
    r"^make (?!ask\b|help$)": "tests, linters and benchmarks themselves, or a server",
    r"^pip install": "online",
    r"^(torchrun|accelerate launch) ": "eight processes on eight GPUs",
    r"^python -m lmms_eval ": "online: data sets",
    r"^python run_vlmfast\.py ": "as above",
}
# Run too, but not in the quick suite, and with what more.
SLOW = {
    r"^vlmfast bench --audit-lossless$": [],
    r"^vlmfast eval shapes --recipe hired --recipe random --recipe downsample": ["--limit", "1"],
}

# Blocks of Python that are not run, and why.
NOT_RUN_PYTHON = {
    r'"cuda"': "needs a GPU",
    r'"[\w.-]+-hf/[\w.-]+"': "online: a hub id",
    r"mm_processor_kwargs": "asks a server of vLLM; plugins/vllm/tests/test_server.py does",
    r"\bclient\.": "asks a server; tests/serve/test_documented_server.py runs it",
    r"^# run_vlmfast": "needs VLMEvalKit; tests/eval/test_vlmevalkit_model.py runs it",
    r'model="Qwen/': "asks a server with vLLM; plugins/vllm/tests/test_serve.py does",
    r'check_stage\("(large|draft-repeat)|VipLlava': "needs the package of the page, which "
    "tests/core/test_outside.py installs before it runs the block",
}
QUESTION, IMAGE = "What is in the bottom left?", "examples/picture.png"
VLLM = "docs/vllm.md"  # names options of vLLM, too; tests/serve/test_engine_option.py reads it
# The names in the fragments of `extending`.
OF_METHODS = {
    **{name: getattr(compressors, name) for name in compressors.__all__},
    "dataclass": dataclass,
    "ClassVar": ClassVar,
}

TIMES = ("TTFT", "prefill", "tokens/s", "peak memory")  # columns that differ between runs


def given(vlm: vlmfast.VLM) -> dict[str, Any]:
    """Names that pages expect the reader to define."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = vlm.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = vlm.processor(images=[Image.open(IMAGE)], text=text, return_tensors="pt")
    return {
        "vlm": vlm,
        "vlmfast": vlmfast,
        "model": vlm.model,
        "processor": vlm.processor,
        "inputs": inputs.to(vlm.model.device, vlm.model.dtype),
        "name": "llava-hf/llava-v1.6-mistral-7b-hf",
        "q": QUESTION,
        "p": IMAGE,
        "frames": [Image.open(IMAGE)] * 4,
    }


def is_run(command: Command) -> bool:
    if CHECKS.get(program(command.text)) is not_ours:
        return False
    if program(command.text) == "vlmfast" and not whole(filled(command.words)[1:]):
        return False  # named in a sentence, without its arguments
    return not any(re.search(pattern, command.text) for pattern in NOT_RUN)


# Each text once, at its first occurrence.
EACH = list({command.text: command for command in reversed(COMMANDS)}.values())[::-1]
RUN = [command for command in EACH if is_run(command)]
LONG = [(c, more) for c in EACH for p, more in SLOW.items() if re.search(p, c.text)]


# --- a folder to run in --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples, and a file for each file name of a page."""
    folder = tmp_path_factory.mktemp("documented")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "docs" / "images").mkdir(parents=True)  # some commands plot into it
    examples = {"png": "picture.png", "jpg": "picture.png", "mp4": "clip.mp4"}
    text = "\n".join(PAGES.values())
    for name, kind in re.findall(r"(?<![\w/])([\w.-]+\.(png|jpg|mp4))\b", text):
        shutil.copy(ROOT / "examples" / examples[kind], folder / name)
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    """Output of `vlmfast eval`, for the reports."""
    out = folder / "results"
    run(["eval", "shapes", "--recipe", "hired:0.2", "--limit", "1", "--out", str(out)])
    return out


def run(words: list[str]) -> None:
    """A command through the entry point of the installed package."""
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="vlmfast")
    try:
        code = point.load()(words)
    except SystemExit as leaving:  # --help
        code = leaving.code
    assert not code, f"vlmfast {' '.join(words)} ended with {code}"


def without_times(text: str) -> list[list[str]]:
    """Lines of a printed text; of tables, the cells that do not depend on the machine's speed."""
    lines, dropped = [], None
    for line in text.strip().splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] == "recipe":
            dropped = [i for i, cell in enumerate(cells) if cell in TIMES]
        if not line.strip():
            dropped = None
        lines.append([c for i, c in enumerate(cells) if i not in (dropped or ())])
    return lines


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.cases(5)
@pytest.mark.parametrize("command", EACH, ids=str)
def test_command_exists(command: Command) -> None:
    check(command)


def test_options_that_sentences_name_exist() -> None:
    # Options such as `--batch_size` belong to other projects.
    named = [o for page, text in PAGES.items() if page != VLLM for o in stray_options(page, text)]
    assert len(named) > 20
    assert not [f"{block}: {name}" for block, name in named if name not in all_options()]


@pytest.mark.cases(2)
@pytest.mark.parametrize("command", [c for c in RUN if program(c.text) == "vlmfast"], ids=str)
def test_command_runs(
    command: Command, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    words = filled(command.words)[1:]
    if words[0] == "report":
        args = parsed(words)
        for read in filter(None, (args.folder, args.other)):
            shutil.copytree(request.getfixturevalue("results"), read, dirs_exist_ok=True)
    capsys.readouterr()
    run(words)
    out = capsys.readouterr().out
    assert out.strip()
    shown = outputs(command.page, PAGES[command.page]).get(command.text)
    if shown is not None:
        assert without_times(out) == without_times(shown)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "more"), LONG, ids=str)
def test_long_command_runs(
    command: Command, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run([*filled(command.words)[1:], *more])
    assert capsys.readouterr().out.strip()


def test_make_ask_prints_what_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of the target, without its environment setup."""
    printed = ""
    for line in make("ask").splitlines():
        words = Command("Makefile", 0, line).words
        if Path(words[0]).name == "vlmfast":
            run(words[1:])
        printed += "\n" if words[0] == "echo" else capsys.readouterr().out
    shown = outputs("README.md", PAGES["README.md"])["make ask"]
    assert without_times(printed) == without_times(shown)
    assert without_times(printed) != without_times(shown.replace("→ 77", "→ 78"))


def test_readme_lists_the_methods_by_tier() -> None:
    table = PAGES["README.md"].partition("| where | core |")[2].partition("\n\n")[0]
    rows = [row.split("|")[2:5] for row in table.splitlines()[2:]]
    for tier, cells in zip(TIERS, zip(*rows, strict=True), strict=True):
        names = {m["name"] for m in vlmfast.methods() if m["tier"] == tier}
        assert set(re.findall(r"`(.+?)`", "".join(cells))) == names


# --- Python --------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(page: str, tiny: vlmfast.VLM) -> None:
    """Page by page in one namespace, in order."""
    namespace = given(tiny)
    if page == "docs/extending.md":
        namespace |= OF_METHODS
    if page == "README.md":  # begins with a whole program
        del namespace["vlm"], namespace["vlmfast"]
    if page == "docs/serving.md":  # a block follows one of its commands
        run(next(c.words[1:] for c in RUN if c.text.startswith("vlmfast encode")))
    namespace["__name__"] = "documented_page"
    for block in PYTHON[page]:
        check_python(block, tiny)
        if not any(re.search(pattern, block.text) for pattern in NOT_RUN_PYTHON):
            run_python(block, namespace)


def test_fragments_equal_the_methods_files() -> None:
    found = PYTHON["docs/extending.md"]
    assert not [line for block in found for line in differs_from_file(block)]
    changed = [replace(block, text=block.text.replace("self.k - 1", "self.k")) for block in found]
    assert any(map(differs_from_file, changed))


def test_method_of_the_page_compresses(tiny: vlmfast.VLM) -> None:
    """`Loud`, as written, is a complete cache method."""
    (block,) = (b for b in PYTHON["docs/extending.md"] if "class Loud" in b.text)
    namespace = {**OF_METHODS, "__name__": "documented_page"}
    run_python(block, namespace)
    asked = {"question": QUESTION, "images": IMAGE, "max_new_tokens": 4}
    full = tiny.ask(**asked)
    none, half, fifth = (
        tiny.ask(**asked, recipe=Recipe((namespace["Loud"](keep=share),)))
        for share in (1.0, 0.5, 0.2)
    )
    assert none.token_ids == full.token_ids
    assert none.stats.kv_bytes == full.stats.kv_bytes
    assert full.stats.kv_bytes * 0.45 < half.stats.kv_bytes < full.stats.kv_bytes * 0.55
    assert fifth.stats.kv_bytes < full.stats.kv_bytes * 0.25


# --- controls: what is wrong is found ------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vlmfast ask FILE QUESTION --recipes hired", "--recipes"),
        ("vlmfast aks FILE QUESTION", "aks"),
        ("vlmfast ask FILE", "QUESTION"),
        ("vlmfast ask FILE QUESTION --recipe hird:0.2", "hird"),
        ("vlmfast compare FILE Q --recipe hired --recipe fastv:speed=2", "speed"),
        ("vlmfast eval shape --recipe hired", "shape"),
        ("vlmfast eval shapes --split dev", "split"),
        ("vlmfast eval shapes --recipe hired \\\n  --budget 2", "budget"),
        ("vlmfast train atp --stepz 4", "stepz"),
        ("vlmfast serve --alias fast=hird", "hird"),
        ("python benchmarks/ask.py --twoer small", "--twoer"),
        ("python benchmarks/asks.py", "asks.py"),
        ("python -m vlmfast.kernels.compiler", "compiler"),
        ("make tea", "tea"),
        ("make test FLAGS=-x", "FLAGS"),
        ("pip install 'vlmfast[evaluation]'", "evaluation"),
        ("torchrun --nproc 8 -m vlmfast eval mmmu --limits 2", "--limits"),
        ("python -m lmms_eval --model vlmfast --model_args recipes=hired", "recipes"),
        ("pytest tests/test_nothing.py", "test_nothing"),
        ("docker build -f examples/Dockerfiles .", "Dockerfiles"),
        ("vlmfats ask FILE QUESTION", "vlmfats"),
    ],
)
def test_wrong_command_is_found(line: str, words: str) -> None:
    text = f"Text.\n\n```bash\n{line}\n```\n\n```\n$ {line}\nprinted\n```\n\nMore."
    first, *console = commands("page.md", text)
    assert len(console) == ("vlmfats" not in line)
    for command in (first, *console):
        with pytest.raises(Wrong, match=re.escape(words)):
            check(command)


def test_wrong_command_of_a_sentence_is_found() -> None:
    """Arguments may be missing, but none may be wrong."""
    line = "Take `vlmfast eval shapes\n--recipe hired`, or `vlmfast train {}` and `--limits`."
    *right, wrong = commands("page.md", line.format("NAME --step-count 4"))
    for command in (*right, *commands("page.md", line.format("NAME --steps 4"))):
        check(command)
    with pytest.raises(Wrong, match="step-count"):
        check(wrong)
    assert {name for _, name in stray_options("page.md", line)} - all_options() == {"--limits"}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("vlm.ask(q, images=pp)", "pp"),
        ("vlmfast.Vlm", "Vlm"),
        ("if False: vlm.aks(q)", "aks"),
        ("vlm.ask(q, images=p).text    # 'red circle'", "'yellow triangle', not 'red circle'"),
        ('vlm.compare(q, images=p, recipes=["none", "hired:x=1"])', "x"),
        ("vlm.ask(q", "never closed"),
        ("from vlmfast import nothing", "nothing"),
    ],
)
def test_wrong_python_is_found(code: str, words: str, tiny: vlmfast.VLM) -> None:
    (block,) = python_blocks("page.md", f"Text:\n\n```python\n{code}\n```\n")

    def checked() -> None:
        check_python(block, tiny)
        run_python(block, given(tiny))

    with pytest.raises(Wrong, match=rf"page\.md:4: .*{re.escape(words)}"):
        checked()
