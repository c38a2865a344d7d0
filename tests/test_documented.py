"""Every command and every block of Python that README, docs and the project's other pages show.

All of them are checked against the parsers and names that they use (`documented`). Offline and
quick ones also run as written, in a folder with the examples. A new command is run by default,
unless a line of `NOT_RUN` gives a reason.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

import vlmfast
from documented import (
    CHECKS,
    ROOT,
    TRAINED,
    Block,
    Command,
    Wrong,
    all_options,
    blocks,
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
from vlmfast.cli import commands as cli
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_names

if not (ROOT / "docs" / "evaluation.md").is_file():
    pytest.skip("the pages are not part of this distribution", allow_module_level=True)

PAGES = pages()
COMMANDS = [command for page, text in PAGES.items() for command in commands(page, text)]
PYTHON = {page: found for page, text in PAGES.items() if (found := python_blocks(page, text))}

# Commands that are checked and not run, and why. Each line must match a command (see the test).
NOT_RUN = {
    r"--model (?!tiny\b)": "online: a hub id, or a model of the reader's",
    r"^make ask MODEL=pocket$": "needs the packages of `make pocket`",
    r"^vlmfast check": "half a minute, and it writes a file; tests/test_check.py runs its parts",
    r"^vlmfast demo": "serves until it is stopped",
    r"^vllm serve": "another project's server; make test-vllm runs the plug-in",
    r"^vlmfast serve": "tests/serve/test_documented_server.py runs it, and what asks it",
    r"^curl ": "asks a server, as above",
    r"^docker ": "needs a builder",
    r"^vlmfast train (?!.*(--help|--steps 1 ))": "minutes to days",
    r"^vlmfast reproduce (?!.*(--list|--dry))": "online; tests/test_reproduce.py runs it",
    r"^vlmfast eval ": "minutes to hours; recipes and tasks are looked at, some run shortened",
    r"^python benchmarks/": "measures for minutes",
    r"^python -m vlmfast\.kernels\.compile": "minutes; the tests of the kernels do the same",
    r"^make (?!ask\b|help$)": "tests, linters and benchmarks themselves, or a server",
    r"^pip install": "online",
    r"^(torchrun|accelerate launch) ": "eight processes on eight GPUs",
    r"^python -m lmms_eval ": "online: data sets",
    r"^python run_vlmfast\.py ": "as above",
}
# Run too, but not in the quick suite.
SLOW = {r"^vlmfast bench --audit-lossless$": "half a minute: every drafter on 24 prompts"}
# Long ones that run with less work: each of their options is still exercised.
SHORTENED = {
    r"^vlmfast eval shapes --recipe hired --recipe random --recipe downsample": ["--limit", "1"],
}

# Blocks of Python that are not run, and why.
NOT_RUN_PYTHON = {
    r'"cuda"': "needs a GPU",
    r'"[\w.-]+-hf/[\w.-]+"': "online: a hub id",
    r"mm_processor_kwargs": "asks a server of vLLM; plugins/vllm/tests/test_server.py does",
    r"\bclient\.": "asks a server; tests/serve/test_documented_server.py runs it",
    r"^# run_vlmfast": "needs VLMEvalKit; tests/test_vlmevalkit_model.py runs it",
    r'"Qwen/': "asks a server with vLLM; plugins/vllm/tests/test_serve.py does",
    r"push_to_hub": "online: tests/test_sharing.py uploads to a local hub",
    r'check_stage\("(large|draft-repeat)|VipLlava': "needs the package of the page, which "
    "tests/test_outside.py installs before it runs the block",
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


def unique(found: list[Command]) -> list[Command]:
    """Each text once, at its first occurrence."""
    return list({command.text: command for command in reversed(found)}.values())[::-1]


RUN = unique([c for c in COMMANDS if is_run(c)])
SHORT = {c: more for c in unique(COMMANDS) for p, more in SHORTENED.items() if re.search(p, c.text)}


# --- a folder to run in --------------------------------------------------------------------------


def stand_in(folder: Path, text: str) -> None:
    """An example image or video under a file name of a page (``street.jpg``)."""
    examples = {".png": "picture.png", ".jpg": "picture.png", ".mp4": "clip.mp4"}
    example = examples.get(Path(text).suffix)
    if example and Path(text).name == text and not (folder / text).exists():
        shutil.copy(ROOT / "examples" / example, folder / text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples, and a file for each file name of a page."""
    folder = tmp_path_factory.mktemp("documented")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "docs" / "images").mkdir(parents=True)  # some commands plot into it
    for text in PAGES.values():
        for name in re.findall(r"[\w/.-]+\.(?:png|jpg|mp4)\b", text):
            stand_in(folder, name)
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def results(folder: Path) -> Path:
    """Output of `vlmfast eval`, for the reports."""
    out = folder / "results"
    run(["eval", "shapes", "--recipe", "random:0.2", "--limit", "1", "--out", str(out)])
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


def test_every_page_is_read() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/demo.md", "docs/evaluation.md"} <= set(PAGES)
    assert not any(page.startswith("docs/results") for page in PAGES)
    programs = {program(command.text) for command in COMMANDS}
    assert {"vlmfast", "make", "python benchmarks/", "pip install", "torchrun"} <= programs


@pytest.mark.cases(5)
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_command_exists(command: Command) -> None:
    check(command)


def test_options_that_sentences_name_exist() -> None:
    # Options such as `--batch_size` belong to other projects.
    named = [o for page, text in PAGES.items() if page != VLLM for o in stray_options(page, text)]
    assert len(named) > 20
    assert not [f"{block}: {name}" for block, name in named if name not in all_options()]


def test_every_exception_matches_something(tiny: vlmfast.VLM) -> None:
    texts = [command.text for command in COMMANDS]
    sources = [block.text for found in PYTHON.values() for block in found]
    for pattern in (*NOT_RUN, *SLOW, *SHORTENED):
        assert any(re.search(pattern, text) for text in texts), pattern
    for pattern in NOT_RUN_PYTHON:
        assert any(re.search(pattern, text) for text in sources), pattern
    names = {n.id for text in sources for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert set(given(tiny)) <= names


def marked(command: Command) -> Any:
    slow = any(re.search(pattern, command.text) for pattern in SLOW)
    return pytest.param(command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "command", [marked(c) for c in RUN if program(c.text) == "vlmfast"], ids=str
)
def test_command_runs(
    command: Command, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    words = filled(command.words)[1:]
    if words[0] == "report":
        args = parsed(cli._parser().parse_args, words)
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
@pytest.mark.parametrize("command", SHORT, ids=str)
def test_shortened_command_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    run([*filled(command.words)[1:], *SHORT[command]])
    assert "| `none` |" in capsys.readouterr().out


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "command", [c for c in RUN if program(c.text) == "make" and c.words[1] == "ask"], ids=str
)
def test_make_ask_prints_what_the_page_shows(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the target, without its environment setup."""
    printed = ""
    for line in make(*command.words[1:]).splitlines():
        words = Command("Makefile", 0, line).words
        if words[0] == "echo":
            printed += "\n"
        elif Path(words[0]).name == "vlmfast":
            run(words[1:])
            printed += capsys.readouterr().out
    assert printed.count("\nnone ") == 2  # tables
    shown = outputs(command.page, PAGES[command.page]).get(command.text)
    assert (shown is not None) == (command.page == "README.md")
    if shown is None:
        return
    assert without_times(printed) == without_times(shown)
    other = shown.replace("yellow triangle", "red circle", 1)
    assert without_times(printed) != without_times(other)
    assert without_times(printed) != without_times(shown.replace("→ 77", "→ 78"))


def test_make_help_names_the_targets_of_contributing() -> None:
    help_text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    shown = {c.words[1] for c in COMMANDS if program(c.text) == "make"}
    assert {"ask", "test", "lint"} <= shown
    assert shown <= {line.split()[0] for line in help_text.splitlines()}


def test_other_commands_are_run_by_tests() -> None:
    others = [command for command in RUN if program(command.text) != "vlmfast"]
    assert {program(command.text) for command in others} == {"make"}
    assert {command.words[1] for command in others} == {"ask", "help"}


def test_installed_command_lists_the_methods_of_the_readme() -> None:
    script = shutil.which("vlmfast", path=str(Path(sys.executable).parent))
    assert script, "the package is not installed: pip install -e ."
    done = subprocess.run(
        [script, "methods", "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    listed = {method["name"] for method in json.loads(done.stdout)}
    table = PAGES["README.md"].partition("| method | where |")[2].partition("\n\n")[0]
    words = {w for row in table.splitlines()[2:] for w in re.findall(r"`(.+?)`", row.split("|")[1])}
    assert len(words) > 30
    assert words <= listed == set(stage_names())


# --- Python --------------------------------------------------------------------------------------


def skipped(block: Block) -> bool:
    return any(re.search(pattern, block.text) for pattern in NOT_RUN_PYTHON)


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
    known, ran = set(namespace), 0
    for block in PYTHON[page]:
        known |= check_python(block, known, tiny)
        if not skipped(block):
            run_python(block, namespace)
            ran += 1
    assert ran or all(map(skipped, PYTHON[page]))


def test_fragments_equal_the_methods_files() -> None:
    found = PYTHON["docs/extending.md"]
    assert not [line for block in found for line in differs_from_file(block)]
    for old, new in (("param(0.5", "param(0.6"), ("self.k - 1", "self.k"), ("| ~", "& ~")):
        changed = [Block(b.page, b.line, b.language, b.text.replace(old, new)) for b in found]
        assert any(differs_from_file(block) for block in changed), old


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


# --- controls: errors are found ------------------------------------------------------------------


def page_of(*lines: str) -> list[Command]:
    return commands("page.md", "\n".join(lines))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vlmfast ask FILE QUESTION --recipes hired", "--recipes"),
        ("vlmfast aks FILE QUESTION", "aks"),
        ("vlmfast ask FILE", "QUESTION"),
        ("vlmfast ask FILE QUESTION --recipe hird:0.2", "hird"),
        ("vlmfast compare FILE Q --recipe hired --recipe fastv:speed=2", "speed"),
        ("vlmfast demo --recipe quick", "quick"),
        ("vlmfast eval shape --recipe hired", "shape"),
        ("vlmfast eval shapes --split dev", "split"),
        ("vlmfast eval shapes --recipe hired --share 0.5", "cache method"),
        ("vlmfast eval shapes --recipe hired \\\n  --budget 2", "budget"),
        ("vlmfast train pyramid --out DIR", "pyramid"),
        ("vlmfast train atp --stepz 4", "stepz"),
        ("vlmfast bench --drafter draft-none", "draft-none"),
        ("python benchmarks/ask.py --twoer small", "--twoer"),
        ("python benchmarks/reduce.py --repeats few", "few"),
        ("python benchmarks/kv.py --recipe loookm", "loookm"),
        ("python benchmarks/asks.py", "asks.py"),
        ("python -m vlmfast.kernels.compiler", "compiler"),
        ("make tea", "tea"),
        ("make test FLAGS=-x", "FLAGS"),
        ("pip install 'vlmfast[evaluation]'", "evaluation"),
        ('pip install -e ".[test,tset]"', "tset"),
        ("torchrun --nproc 8 -m vlmfast eval mmmu --limits 2", "--limits"),
        ("torchrun --processes 8 -m vlmfast eval mmmu", "--processes"),
        ("accelerate launch --num_processes 8 -m vlmfast evaluate mmmu", "evaluate"),
        ("python -m lmms_eval --model vlmfast --model_args recipe=hird", "hird"),
        ("python -m lmms_eval --model vlmfast --model_args recipes=hired", "recipes"),
        ("pytest tests/test_nothing.py", "test_nothing"),
        ("vlmfast serve tiny --recipes hired", "--recipes"),
        ("vlmfast serve --recipe hird", "hird"),
        ("vlmfast serve --alias fast=hird", "hird"),
        ("curl http://127.0.0.1:8000/v1/model", "/v1/model"),
        ("curl http://127.0.0.1:8080/v1/models", "8080"),
        ("docker build -f Dockerfiles .", "Dockerfiles"),
        ("docker build -f examples/Dockerfile --build-arg GPU=1 .", "GPU=1"),
        ("docker run vlmfats", "vlmfats"),
    ],
)
@pytest.mark.parametrize("how", ["block", "console"])
def test_wrong_command_is_found(line: str, words: str, how: str) -> None:
    fence = {"block": ("```bash", line, "```"), "console": ("```", f"$ {line}", "printed", "```")}
    (command,) = page_of("Text.", "", *fence[how], "", "More.")
    with pytest.raises(Wrong, match=re.escape(words)):
        check(command)


def test_unknown_program_is_found() -> None:
    (command,) = page_of("```sh", "vlmfats ask FILE QUESTION", "```")
    with pytest.raises(Wrong, match="vlmfats"):
        check(command)


def test_wrong_inline_command_is_found() -> None:
    """In a sentence arguments may be missing, but none may be wrong."""
    line = "Take `vlmfast eval shapes\n--recipe hired`, `vlmfast train`, or `vlmfast train {}`."
    for good in ("atp --steps 4", "NAME", "yourmethod --model … --out DIR"):
        for command in page_of(line.format(good)):
            check(command)
    for bad in ("apt --steps 4", "atp --step-count 4", "NOTHING"):
        *right, wrong = page_of(line.format(bad))
        assert len(right) == 2
        with pytest.raises(Wrong, match=re.escape(bad.split()[-2 if "step-" in bad else 0])):
            check(wrong)


def test_comments_prompts_and_continuations() -> None:
    text = """
1. In a list:

   ```console
   $ vlmfast ask a.png "What # is it?" \\
       --recipe hired:0.2     # a comment
   yellow triangle
   $ make test
   ```

```
vlmfast env            # first word is known
VLMFAST_KERNELS=torch pytest tests/test_cli.py
```

```
vision ──▶ language
```
"""
    found = page_of(text)
    assert [(c.line, c.words) for c in found] == [
        (5, ["vlmfast", "ask", "a.png", "What # is it?", "--recipe", "hired:0.2"]),
        (8, ["make", "test"]),
        (12, ["vlmfast", "env"]),
        (13, ["pytest", "tests/test_cli.py"]),
    ]
    with pytest.raises(Wrong, match="end"):
        list(blocks("page.md", "```\nvlmfast env"))


def test_unknown_option_in_a_sentence_is_found() -> None:
    found = stray_options("page.md", "Take `--limit 4`\nor `--limits 4 --recipe x`.")
    assert [name for _, name in found if name not in all_options()] == ["--limits"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("vlm.ask(q, images=pp)", "pp"),
        ("vlmfast.Vlm", "Vlm"),
        ("vlm.aks(q)", "aks"),
        ("vlm.ask(q, images=p).text    # 'red circle'", "'yellow triangle', not 'red circle'"),
        ("q, vlm.ask(q, images=p).stats.visual_tokens_in  # 335", "336), not 335"),
        ('vlm.ask(q, images=p, recipe="hird:0.2")', "hird"),
        ('vlm.compare(q, images=p, recipes=["none", "hired:x=1"])', "x"),
        ("vlm.ask(q", "never closed"),
        ("from vlmfast import nothing", "nothing"),
        ('vlm.ask(q, images="nowhere.png")', "nowhere.png"),
        ('vlm.session(images="examples/picture.png").answer(q)', "answer"),
        ('vlm.ask(q, photo="examples/picture.png")', "photo"),
    ],
)
def test_wrong_python_is_found(code: str, words: str, tiny: vlmfast.VLM) -> None:
    (block,) = python_blocks("page.md", f"Text:\n\n```python\n{code}\n```\n")
    namespace = given(tiny)

    def checked() -> None:
        check_python(block, set(namespace), tiny)
        run_python(block, namespace)

    with pytest.raises(Wrong, match=rf"page\.md:4: .*{re.escape(words)}"):
        checked()


def test_new_commands_are_run_unless_excepted() -> None:
    shown = textwrap.dedent(f"""
        ```
        vlmfast env --json
        vlmfast train {TRAINED} --help
        vlmfast ask a.png What --model llava-hf/llava-1.5-7b-hf
        vlmfast demo
        ```
        and `vlmfast ask`
    """)
    assert [c.words[1:3] for c in page_of(shown) if is_run(c)] == [
        ["env", "--json"],
        ["train", TRAINED],
    ]
