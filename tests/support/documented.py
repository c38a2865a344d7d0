"""The commands, Python blocks and outputs on the project's pages, and their checks.

A command is a line of a shell block, or inline code whose first words are a program that `CHECKS`
knows. Each is checked against the program's own parser; `Wrong` names what does not exist.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from markdown_it import MarkdownIt

import vlmfast
from support.paths import ROOT
from vlmfast.cli.commands import build_parser
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class, stage_names
from vlmfast.errors import VLMFastError
from vlmfast.serve.commands import config_of

SHELL = ("bash", "sh", "shell", "console")
TRAINED = "atp"  # in the place of a method's name: it has a budget and can be trained
PLACEHOLDERS = {"…": "X", "N": "1", "NAME": TRAINED, "yourmethod": TRAINED}


class Wrong(Exception):
    """A page shows something that does not exist."""


# --- a page --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, or a paragraph or a cell of a table (``language`` is None)."""

    page: str
    line: int
    language: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command, in one line, without prompt and comment; ``line`` is that of its block."""

    page: str
    line: int
    text: str
    inline: bool = False

    @property
    def words(self) -> list[str]:
        return split(self.text)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages(root: Path = ROOT) -> dict[str, str]:
    """The text of each page by its path; generated results are left out."""
    single = "README.md", "CONTRIBUTING.md", "benchmarks/NOTES.md", "vlmfast/weights/tiny/README.md"
    files = [*(root / name for name in single), *sorted((root / "docs").glob("*.md"))]
    return {f.relative_to(root).as_posix(): f.read_text(encoding="utf-8") for f in files}


@functools.cache
def blocks(page: str, text: str) -> list[Block]:
    """Fenced blocks, paragraphs and cells, in order."""
    found = []
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "fence":
            language = token.info.strip().lower()
            found.append(Block(page, token.map[0] + 2, language, textwrap.dedent(token.content)))
        elif token.type == "inline":
            found.append(Block(page, token.map[0] + 1, None, " ".join(token.content.split("\n"))))
    return found


def inline(block: Block) -> list[str]:
    """The inline code of a paragraph."""
    return [m[2].strip() for m in re.finditer(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", block.text)]


def split(text: str) -> list[str]:
    """The words of a command, without environment settings before it or a file for its output."""
    words = shlex.split(text, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    return words


def program(text: str) -> str | None:
    """The entry of `CHECKS` that a command belongs to."""
    try:
        line = " ".join(split(text)) + " "
    except ValueError:  # unclosed quotes: a sentence, no command
        return None
    ends = {name: name if name[-1] in "./" else f"{name} " for name in CHECKS}
    return next((name for name, end in ends.items() if line.startswith(end)), None)


def shell_lines(block: Block) -> list[str]:
    """The commands of a fenced block; none where it is no shell block.

    Without a language it is one when a line is a known command. In a block with prompts the lines
    without one are output.
    """
    lines = re.sub(r"[ \t]*\\\n\s*", " ", block.text).splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    known = block.language == "" and any(map(program, lines))
    return lines if known or block.language in SHELL else []


def commands(page: str, text: str) -> list[Command]:
    """Every shell command on a page."""
    found = []
    for block in blocks(page, text):
        if block.language is None:
            lines = [code for code in inline(block) if program(code) and len(split(code)) > 1]
        else:  # text after # is no part of a command, except in quotes
            lines = [shlex.join(split(x)) if "#" in x else x for x in shell_lines(block)]
        found += [Command(page, block.line, line, block.language is None) for line in lines]
    return found


def outputs(page: str, text: str) -> dict[str, str]:
    """The output that a page shows for a command: the block without language directly after a
    paragraph that begins with the command."""
    found, before = {}, None
    for block in blocks(page, text):
        if block.language == "" and before and not shell_lines(block):
            found[before] = block.text
        shown = re.match(r"\W*`", block.text) and block.language is None and inline(block)
        before = shown[0] if shown and program(shown[0]) else None
    return found


# --- commands ------------------------------------------------------------------------------------


def filled(words: list[str]) -> list[str]:
    """The words of a command with its placeholders filled."""
    return [PLACEHOLDERS.get(word, word) for word in words if word != "..."]


@functools.cache
def parser_of(partial: bool) -> argparse.ArgumentParser:
    """The one of ``vlmfast``; that for partial commands comes to require nothing."""
    return build_parser()


def parsed(words: list[str], partial: bool = False) -> Any:
    """The arguments of a command; None where it prints its help.

    ``partial``: words in a sentence, which may omit required arguments.
    """
    original, said = argparse.ArgumentParser.parse_known_args, io.StringIO()

    def relaxed(self: Any, *args: Any, **kwargs: Any) -> Any:
        for action in (*self._actions, *self._mutually_exclusive_groups):
            action.required = action.required and not partial
        return original(self, *args, **kwargs)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", relaxed),
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            return parser_of(partial).parse_args(words)
        except SystemExit as leaving:
            if leaving.code:
                raise Wrong(said.getvalue().strip().splitlines()[-1]) from None
            return None


def whole(words: list[str]) -> bool:
    """Whether the command line has all required arguments."""
    try:
        parsed(words)
    except Wrong:
        return False
    return True


def parse_recipe(text: str) -> None:
    """Raise for a recipe that does not exist; ``auto`` depends on the checkpoint."""
    if text != "auto":
        Recipe.parse(text)


def check_vlmfast(words: list[str], partial: bool) -> None:
    args = parsed(words, partial)
    if args is None or args.command is None:
        return
    if args.command == "serve":
        config_of(args)
    if args.command == "eval":  # some of its recipes stand for several
        check_eval(args)
        return
    for key in ("recipe", "recipes", "drafters"):
        given = getattr(args, key, None) or ()
        for text in [given] if isinstance(given, str) else given:
            parse_recipe(text)


def check_eval(args: argparse.Namespace) -> None:
    from vlmfast.eval.commands import OF_TASKS, planned
    from vlmfast.eval.tasks import find_task
    from vlmfast.eval.workers import chosen

    own = {key: getattr(args, key) for key in OF_TASKS if getattr(args, key) is not None}
    if "videos" in own:
        own["videos"] = str(ROOT)  # the reader's own folder
    for task in args.tasks or ():
        find_task(task, **own)
    chosen(args.shard)
    axes = args.budget, args.positions, args.share
    if args.recipe or any(axes):
        planned(args.recipe or ["none"], *axes)


def check_script(folder: str, words: list[str]) -> None:
    """A script exists, and it or what it imports has these options; recipes are read."""
    script = ROOT / folder / words[0]
    if not script.is_file():
        raise Wrong(f"there is no {folder}/{words[0]}")
    text = script.read_text(encoding="utf-8")
    for name in re.findall(r"^ *(?:from|import) ([\w.]+)", text, re.M):
        for file in (script.with_name(f"{name}.py"), ROOT / f"{name.replace('.', '/')}.py"):
            text += file.read_text(encoding="utf-8") if file.is_file() else ""
    for word, value in zip(words, [*words[1:], ""], strict=True):
        option = word.partition("=")[0].replace("--no-", "--")
        name = option[2:].replace("-", "_")
        field = re.search(rf"^    {name}: ", text, re.M)  # of settings that are options
        field = field or (f'"{name}": {{' in text and f"{name}=" in text)  # of the harness
        if word.startswith("--") and f'"{option}"' not in text.replace("--no-", "--") and not field:
            raise Wrong(f"{folder}/{words[0]} has no option {word}")
        if word == "--recipe":
            parse_recipe(value)


def check_files(words: list[str], partial: bool) -> None:
    for word in words:
        if "/" in word and not (ROOT / word).exists():
            raise Wrong(f"there is no {word}")


def make(*words: str) -> str:
    """Output of a dry run of make, independent of an outer make."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise Wrong(done.stderr.strip())
    return done.stdout


def check_make(words: list[str], partial: bool) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in (word.partition("=")[0] for word in words if "=" in word):
        if not re.search(rf"^{name}\s*[?:]?=", text, re.M):
            raise Wrong(f"the Makefile has no variable {name}")
    make(*words)


def check_pip(words: list[str], partial: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        found = re.fullmatch(r"(?:\.|vlmfast)\[(.+)\]", word)
        for extra in found[1].split(",") if found else ():
            if extra not in project["optional-dependencies"]:
                raise Wrong(f"there is no extra {extra}")


def check_launched(words: list[str], partial: bool) -> None:
    """The part of vlmfast after ``torchrun`` and ``accelerate launch``."""
    if "-m vlmfast " not in " ".join(words):
        raise Wrong("does not launch -m vlmfast")
    check_vlmfast(words[words.index("vlmfast") + 1 :], partial)


def check_lmms(words: list[str], partial: bool) -> None:
    """The arguments are those of `vlmfast.eval.lmms_model`, whose package need not be installed."""
    source = (ROOT / "vlmfast/eval/lmms_model.py").read_text(encoding="utf-8")
    init = source.partition("def __init__(")[2].partition(")")[0]
    known = re.findall(r"^        (\w+): ", init, re.M)
    given = words[words.index("--model_args") + 1].split(",") if "--model_args" in words else ()
    for pair in given:
        key, _, value = pair.partition("=")
        if key not in known:
            raise Wrong(f"vlmfast has no model_args {key}")
        if key == "recipe":
            Recipe.parse(value.replace(";", ","))


def check_module(words: list[str], partial: bool) -> None:
    if importlib.util.find_spec(f"vlmfast.{words[0]}") is None:
        raise Wrong(f"there is no module vlmfast.{words[0]}")


def not_ours(words: list[str], partial: bool) -> None:
    """A command of the system or of another project."""


# By the first words of a command, the longer ones first.
CHECKS: dict[str, Callable[[list[str], bool], None]] = {
    "vlmfast": check_vlmfast,
    "python -m vlmfast.": check_module,
    "python -m vlmfast": check_vlmfast,
    "python benchmarks/": lambda words, partial: check_script("benchmarks", words),
    "python tools/": lambda words, partial: check_script("tools", words),
    "make": check_make,
    **dict.fromkeys(("pip install", "python -m pip install"), check_pip),
    **dict.fromkeys(("torchrun", "accelerate launch"), check_launched),
    "python -m lmms_eval": check_lmms,
    **dict.fromkeys(("python -m pytest", "pytest", "docker"), check_files),
    # tests/serve/test_documented_server.py sends the requests.
    **dict.fromkeys(("curl", "vllm serve", "python run_vlmfast.py"), not_ours),
    **dict.fromkeys(("apt-get install", "install", "npm pack", "source", "systemctl"), not_ours),
}


def check(command: Command) -> None:
    """Raises `Wrong` where a command is invalid."""
    name = program(command.text)
    if name is None:
        raise Wrong(f"{command}: a program that the checks do not know")
    first = name.split()
    words = filled(command.words)[len(first) - 1 :]
    # Of `python benchmarks/ask.py` the name of the script is an argument.
    words = [words[0].removeprefix(first[-1]), *words[1:]] if name[-1] in "./" else words[1:]
    try:
        CHECKS[name](words, command.inline)
    except (Wrong, VLMFastError) as error:
        raise Wrong(f"{command}: {error}") from None


@functools.cache
def all_options() -> set[str]:
    """Every option that a parser of the project adds."""
    folders = ("vlmfast", "benchmarks", "plugins", "tools")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {o for f in files for o in re.findall(r'"(--[a-z][\w-]*)"', f.read_text("utf-8"))}


def stray_options(page: str, text: str) -> list[tuple[Block, str]]:
    """Options that a sentence names without their command."""
    return [
        (block, name)
        for block in blocks(page, text)
        for code in (inline(block) if block.language is None else ())
        for name in re.findall(r"(?<!\S)--[\w-]+", code if code.startswith("--") else "")
    ]


# --- Python --------------------------------------------------------------------------------------


def python_blocks(page: str, text: str) -> list[Block]:
    return [block for block in blocks(page, text) if block.language in ("python", "py")]


def check_python(block: Block, vlm: Any) -> None:
    """Look up the attributes of ``vlmfast`` and ``vlm`` and what is imported, and read recipes."""
    owners = {"vlmfast": vlmfast, "vlm": vlm}
    try:
        for node in ast.walk(ast.parse(block.text)):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in owners:
                    getattr(owners[name], attr)
                case ast.ImportFrom(module=str(name)) if name.partition(".")[0] == "vlmfast":
                    try:
                        exec(ast.unparse(node), {})
                    except ModuleNotFoundError as error:  # of another project
                        if str(error.name).partition(".")[0] == "vlmfast":
                            raise
                case ast.keyword(arg="recipe" | "recipes", value=value):
                    texts = (n.value for n in ast.walk(value) if isinstance(n, ast.Constant))
                    for text in texts:
                        if isinstance(text, str):
                            parse_recipe(text)
    except (SyntaxError, ImportError, AttributeError, VLMFastError) as error:
        raise Wrong(f"{block}: {error}") from None


class _Shown(ast.NodeTransformer):
    """Compares an expression with the value in the comment after it, if it has one."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        found = re.match(r"\s*#\s*(.+)", self.lines[node.end_lineno - 1][node.end_col_offset :])
        try:
            value = ast.literal_eval(found[1] if found else "")
        except (SyntaxError, ValueError):  # prose
            return node
        call = ast.Call(ast.Name("_shown", ast.Load()), [node.value, ast.Constant(repr(value))], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))


def _shown(value: Any, shown: str) -> None:
    """``value`` equals the one the page shows; of several, the last."""
    if repr(value) != shown and not (isinstance(value, tuple) and repr(value[-1]) == shown):
        raise Wrong(f"is {value!r}, not {shown}")


def run_python(block: Block, namespace: dict[str, Any]) -> None:
    """Run a block; a failure raises `Wrong` with the line of the page.

    An expression with a value in a comment after it must have this value.
    """
    # With the page's line numbers in tracebacks.
    text = "\n" * (block.line - 1) + block.text
    namespace["_shown"] = _shown
    try:
        # Columns of the tree count bytes.
        tree = _Shown(text.encode().decode("latin-1").split("\n")).visit(ast.parse(text))
        exec(compile(tree, block.page, "exec", dont_inherit=True), namespace)
    except Exception as error:
        raise Wrong(f"{block}: {type(error).__name__}: {error}") from error


def differs_from_file(block: Block) -> list[str]:
    """Statements of a shipped method's fragment that its class does not contain.

    A method belongs to the class that a comment after its first line names. Annotations may be
    left out.
    """
    classes = {stage_class(name).__name__: stage_class(name) for name in stage_names()}
    lines, wrong = block.text.splitlines(), []
    for node in ast.parse(block.text).body:
        comment = re.search(r"# (\w+)$", lines[node.lineno - 1])
        name = node.name if isinstance(node, ast.ClassDef) else comment and comment[1]
        if name in classes:
            source = ast.parse(textwrap.dedent(inspect.getsource(classes[name])))
            own = {ast.unparse(n) for n in ast.walk(source) if isinstance(n, ast.stmt)}
            shown = {ast.unparse(n) for n in node.body if not isinstance(n, ast.FunctionDef)}
            wrong += [f"{block}: {name} has no {statement!r}" for statement in shown - own]
    return wrong
