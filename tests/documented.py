"""The commands, Python blocks and outputs on the project's pages, and their checks.

A page is parsed as Markdown: fenced blocks, and paragraphs with inline code. A command is a line
of a shell block, or inline code whose first words are a program that `CHECKS` knows. Each is
checked against the program's own parser; `Wrong` names what does not exist.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from vlmfast.cli import commands as cli
from vlmfast.core.recipe import Recipe
from vlmfast.errors import VLMFastError
from vlmfast.serve.commands import config_of

ROOT = Path(cli.__file__).parents[2]
SHELL = ("bash", "sh", "shell", "console")


class Wrong(Exception):
    """A page shows something that does not exist."""


# --- parsing a page ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, or a paragraph (``language`` is None) with its lines joined."""

    page: str
    line: int
    language: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command, in one line, without prompt and comment."""

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
    single = "README.md", "CONTRIBUTING.md", "benchmarks/NOTES.md", "vlmfast/models/tiny/CARD.md"
    files = [*(root / name for name in single), *sorted((root / "docs").rglob("*.md"))]
    names = {file: file.relative_to(root).as_posix() for file in files}
    return {
        name: file.read_text(encoding="utf-8")
        for file, name in names.items()
        if not name.startswith("docs/results/")
    }


def blocks(page: str, text: str) -> Iterator[Block]:
    """Fenced blocks and paragraphs, in order; each row of a table is a paragraph."""
    held: list[str] = []
    fence, start, language = None, 0, None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = re.match(r"\s*(```+|~~~+)\s*([\w+-]*)", line)
        if fence is not None:
            if found and found[1].startswith(fence) and not found[2]:
                yield Block(page, start + 1, language, textwrap.dedent("\n".join(held)))
                held, fence = [], None
            else:
                held.append(line)
            continue
        if held and (found or not line.strip() or line.lstrip().startswith("|")):
            yield Block(page, start, None, " ".join(held))
            held = []
        if found:
            fence, start, language = found[1], number, found[2].lower()
        elif line.strip():
            start = start if held else number
            held.append(line.strip())
    if fence is not None:
        raise Wrong(f"{page}:{start}: a block that does not end")


def inline(block: Block) -> list[str]:
    """The inline code of a paragraph."""
    return [m[2].strip() for m in re.finditer(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", block.text)]


def split(text: str) -> list[str]:
    """The words of a command, without environment settings before it or a file for its output."""
    words = shlex.split(text, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    return words


def program(text: str) -> str | None:
    """The entry of `CHECKS` that a command belongs to."""
    try:
        words = split(text)
    except ValueError:  # unclosed quotes: a sentence, no command
        return None
    for length in (3, 2, 1):
        name = " ".join(words[:length])
        if name in CHECKS:
            return name
        if length == 2 and name.startswith("python benchmarks/"):
            return "python benchmarks/"
        if length == 3 and name.startswith("python -m vlmfast."):
            return "python -m vlmfast."
    return None


def shell_lines(block: Block) -> list[tuple[int, str]]:
    """The commands of a fenced block with their lines; none where it is no shell block.

    Without a language it is one when a line is a known command. In a block with
    prompts the lines without one are output.
    """
    lines, number, prompts = [], block.line, bool(re.search(r"^\$ ", block.text, re.M))
    for line in re.sub(r"[ \t]*\\\n\s*", lambda m: "\0", block.text).splitlines():
        here, number = number, number + 1 + line.count("\0")
        line = line.replace("\0", " ")
        if prompts and not line.startswith("$ "):
            continue
        line = line.removeprefix("$ ").strip()
        if line and not line.startswith("#"):
            lines.append((here, line))
    known = block.language == "" and any(program(line) is not None for _, line in lines)
    return lines if known or block.language in SHELL else []


def commands(page: str, text: str) -> list[Command]:
    """Every shell command on a page."""
    found = []
    for block in blocks(page, text):
        if block.language is None:
            for code in inline(block):
                if program(code) is not None and len(split(code)) > 1:
                    found.append(Command(page, block.line, code, inline=True))
        for line, code in shell_lines(block) if block.language is not None else ():
            # Text after # is no part of a command, except in quotes.
            found.append(Command(page, line, shlex.join(split(code)) if "#" in code else code))
    return found


def outputs(page: str, text: str) -> dict[str, str]:
    """The output that a page shows for a command: the block without language directly after a
    paragraph that begins with the command."""
    found, before = {}, None
    for block in blocks(page, text):
        if block.language == "" and before and not shell_lines(block):
            found[before] = block.text
        before = None
        if block.language is None and re.match(r"\W*`", block.text):
            first = inline(block)[:1]
            before = first[0] if first and program(first[0]) else None
    return found


# --- commands ------------------------------------------------------------------------------------

# Placeholders for something of the reader's own. Whole words in capitals (FILE, DIR, MODEL)
# need no rule: they are names like any other.
TRAINED = "atp"  # for a method's name: it has a budget and can be trained
PLACEHOLDERS = [
    (r"\.\.\.", None),  # and so on
    (r"…", "X"),  # any value
    (r"N", "1"),
    (r"NAME|your\w*", TRAINED),
]


def filled(words: list[str]) -> list[str]:
    """The words of a command with its placeholders filled."""
    for pattern, value in PLACEHOLDERS:
        words = [value if re.fullmatch(pattern, word) else word for word in words]
        words = [word for word in words if word is not None]
    return words


def parsed(
    parse: Callable[[list[str]], argparse.Namespace], words: list[str], partial: bool = False
) -> argparse.Namespace | None:
    """The parsed arguments; None where the parser prints its help.

    ``partial``: words in a sentence, which may omit required arguments.
    """
    original = argparse.ArgumentParser.parse_known_args

    def relaxed(self: Any, *args: Any, **kwargs: Any) -> Any:
        for action in (*self._actions, *self._mutually_exclusive_groups):
            action.required = False
        return original(self, *args, **kwargs)

    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        if partial:
            stack.enter_context(
                mock.patch.object(argparse.ArgumentParser, "parse_known_args", relaxed)
            )
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            return parse(words)
        except SystemExit as leaving:
            if not leaving.code:
                return None
            raise Wrong(said.getvalue().strip().splitlines()[-1]) from None


def whole(words: list[str]) -> bool:
    """Whether the command line has all required arguments."""
    try:
        parsed(cli._parser().parse_args, words)
    except Wrong:
        return False
    return True


def parse_recipe(text: str) -> None:
    """Raise for a recipe that does not exist; ``auto`` depends on the checkpoint."""
    if text != "auto":
        Recipe.parse(text)


def check_vlmfast(words: list[str], partial: bool) -> None:
    args = parsed(cli._parser().parse_args, words, partial)
    if args is None or args.command is None:
        return
    try:
        if args.command == "eval":
            check_eval(args)
            return
        if args.command == "serve":
            config_of(args)
        recipes = [getattr(args, key, None) or () for key in ("recipe", "recipes", "drafters")]
        for recipe in recipes:
            for text in [recipe] if isinstance(recipe, str) else recipe:
                parse_recipe(text)
    except VLMFastError as error:
        raise Wrong(str(error)) from None


def check_eval(args: argparse.Namespace) -> None:
    from vlmfast.eval.commands import _OF_TASKS, planned
    from vlmfast.eval.tasks import find_task
    from vlmfast.eval.workers import chosen

    own = {key: getattr(args, key) for key in _OF_TASKS if getattr(args, key) is not None}
    if "videos" in own:
        own["videos"] = str(ROOT)  # the reader's own folder
    for task in args.tasks or ():
        find_task(task, **own)
    chosen(args.shard)
    axes = args.budget, args.positions, args.share
    if args.recipe or any(axes):
        planned(args.recipe or ["none"], *axes)


@functools.cache
def benchmark(name: str) -> Any:
    """A script of ``benchmarks`` as a module; its own folder is first on the path, as in Python.

    Packages of an extra that is not installed are mocked: only the parser is needed.
    """
    file = ROOT / "benchmarks" / name
    if not file.is_file():
        raise Wrong(f"there is no benchmarks/{name}")
    spec = importlib.util.spec_from_file_location(f"documented_{file.stem}", file)
    missing: dict[str, Any] = {}
    while True:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(sys, "path", [str(file.parent), *sys.path]))
            # `tests` has a folder with the name of a script, which may have been imported.
            for other in [path.stem for path in file.parent.glob("*.py")]:
                if other in sys.modules:
                    stack.callback(sys.modules.__setitem__, other, sys.modules.pop(other))
            for absent, stand_in in missing.items():
                stack.callback(sys.modules.pop, absent, None)
                sys.modules[absent] = stand_in
            try:
                spec.loader.exec_module(module)
                return module
            except ModuleNotFoundError as error:
                if error.name in missing or error.name.partition(".")[0] == "vlmfast":
                    raise Wrong(f"benchmarks/{name}: {error}") from error
                missing[error.name] = mock.MagicMock()


class Read(Exception):
    """Ends a script after it has parsed its arguments, which it carries."""


def reader(module: Any) -> Callable[[list[str]], argparse.Namespace]:
    """The parser of a script's arguments: its `parse`, or its `main`, ended after parsing."""
    if hasattr(module, "parse"):
        return module.parse

    def read(words: list[str]) -> argparse.Namespace:
        original = argparse.ArgumentParser.parse_args

        def parse_args(*args: Any, **kwargs: Any) -> None:
            raise Read(original(*args, **kwargs))

        try:
            with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args):
                module.main(words)
        except Read as done:
            return done.args[0]
        raise Wrong(f"{module.__file__} does not read its arguments")

    return read


def check_benchmark(words: list[str], partial: bool) -> None:
    args = parsed(reader(benchmark(words[0])), words[1:], partial)
    for recipe in getattr(args, "recipes", None) or ():
        try:
            Recipe.parse(recipe)
        except VLMFastError as error:
            raise Wrong(str(error)) from None


def check_tables(words: list[str], partial: bool) -> None:
    if words:
        raise Wrong(f"tools/tables.py takes no arguments: {' '.join(words)}")


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
    variables = re.findall(r"^([A-Z_]+)\s*[?:]?=", text, re.M)
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and name not in variables:
            raise Wrong(f"the Makefile has no variable {name}")
    make(*words)


def check_pip(words: list[str], partial: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = [word for word in words if not word.startswith("-")]
    if not packages:
        raise Wrong("nothing is installed")
    for package in packages:
        name, _, extras = package.rstrip("]").partition("[")
        if name not in (".", project["name"]):
            continue
        for extra in extras.split(",") if extras else ():
            if extra.strip() not in project["optional-dependencies"]:
                raise Wrong(f"there is no extra {extra}")


def check_launched(words: list[str], partial: bool) -> None:
    """The part of vlmfast after ``torchrun`` and ``accelerate launch``."""
    if "vlmfast" not in words or words[words.index("vlmfast") - 1] != "-m":
        raise Wrong("does not launch -m vlmfast")
    check_vlmfast(words[words.index("vlmfast") + 1 :], partial)


def check_torchrun(words: list[str], partial: bool) -> None:
    from torch.distributed.run import parse_args

    args = parsed(parse_args, words)
    if not args.module:
        raise Wrong("does not launch a module")
    check_launched(words, partial)


def check_lmms(words: list[str], partial: bool) -> None:
    """How `vlmfast.eval.lmms_model` parses ``--model_args``; the package need not be installed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["vlmfast"], required=True)
    parser.add_argument("--model_args", default="")
    args, _ = parsed(parser.parse_known_args, words, partial) or (argparse.Namespace(), [])
    source = ast.parse((ROOT / "vlmfast/eval/lmms_model.py").read_text(encoding="utf-8"))
    model = next(n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "_Model")
    init = next(n for n in model.body if getattr(n, "name", None) == "__init__")
    known = {arg.arg for arg in init.args.args} - {"self"}
    for pair in args.model_args.split(",") if args.model_args else ():
        key, _, value = pair.partition("=")
        if key not in known:
            raise Wrong(f"vlmfast has no model_args {key}")
        if key == "recipe":
            try:
                Recipe.parse(value.replace(";", ","))
            except VLMFastError as error:
                raise Wrong(str(error)) from None


def check_module(words: list[str], partial: bool) -> None:
    if importlib.util.find_spec(words[0]) is None:
        raise Wrong(f"there is no module {words[0]}")


def check_pytest(words: list[str], partial: bool) -> None:
    for word in words:
        if not word.startswith("-") and word.endswith(".py") and not (ROOT / word).is_file():
            raise Wrong(f"there is no {word}")


def check_curl(words: list[str], partial: bool) -> None:
    """Its URL is a route of the server; `test_documented_server` sends the request."""
    from vlmfast.serve.app import Server, create_app
    from vlmfast.serve.config import ServerConfig

    address = "http://127.0.0.1:8000"
    found = [word for word in words if word.startswith("http")]
    if len(found) != 1 or not found[0].startswith(f"{address}/"):
        raise Wrong(f"{found} must be one URL of {address}")
    app = create_app(Server(ServerConfig(), mock.Mock()))._app
    if found[0].removeprefix(address) not in app.openapi()["paths"]:
        raise Wrong(f"the server has no route {found[0]}")


def check_docker(words: list[str], partial: bool) -> None:
    """Files and arguments of a build exist."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    build, run = commands.add_parser("build"), commands.add_parser("run")
    build.add_argument("-f", default="Dockerfile")
    build.add_argument("-t")
    build.add_argument("--build-arg", default=[], action="append")
    build.add_argument("context")
    for option in ("-p", "-e", "--stop-timeout", "--gpus"):
        run.add_argument(option)
    run.add_argument("--rm", action="store_true")
    run.add_argument("image", choices=["vlmfast"])
    args = parsed(parser.parse_args, words, partial)
    if words[0] == "build":
        if not (ROOT / args.f).is_file():
            raise Wrong(f"there is no {args.f}")
        known = re.findall(r"^ARG (\w+)", (ROOT / args.f).read_text(encoding="utf-8"), re.M)
        for argument in args.build_arg:
            if argument.partition("=")[0] not in known:
                raise Wrong(f"{args.f} has no argument {argument}")


def not_ours(words: list[str], partial: bool) -> None:
    """A system command; no part of this project."""


CHECKS: dict[str, Callable[[list[str], bool], None]] = {
    "vlmfast": check_vlmfast,
    "python -m vlmfast": check_vlmfast,
    "python -m vlmfast.": check_module,
    "python benchmarks/": check_benchmark,
    "python tools/tables.py": check_tables,
    "make": check_make,
    "pip install": check_pip,
    "python -m pip install": check_pip,
    "python -m pip": not_ours,
    "torchrun": check_torchrun,
    "accelerate launch": check_launched,
    "lmms_eval": check_lmms,
    "python -m lmms_eval": check_lmms,
    "python run_vlmfast.py": not_ours,
    "pytest": check_pytest,
    "python -m pytest": check_pytest,
    "vllm serve": not_ours,
    "curl": check_curl,
    "docker": check_docker,
    "apt-get install": not_ours,
    "install": not_ours,
    "source": not_ours,
    "systemctl": not_ours,
}


def check(command: Command) -> None:
    """Raises `Wrong` where a command is invalid."""
    name = program(command.text)
    if name is None:
        raise Wrong(f"{command}: a program that the checks do not know")
    words = filled(command.words)
    if name.endswith("/"):
        words = [words[1].removeprefix("benchmarks/"), *words[2:]]
    else:
        words = words[2:] if name.endswith(".") else words[len(name.split()) :]
    try:
        CHECKS[name](words, command.inline)
    except Wrong as error:
        raise Wrong(f"{command}: {error}") from None


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a parser and of the commands below it."""
    if getattr(parser, "fill", None) is not None:
        fill, parser.fill = parser.fill, None
        fill(parser)
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(options, action.choices.values()))
    return found


@functools.cache
def all_options() -> set[str]:
    """Every option of the command line and of the benchmarks."""
    found = options(cli._parser())
    kept: list[argparse.ArgumentParser] = []

    def keep(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        kept.append(self)
        raise SystemExit

    for file in (ROOT / "benchmarks").rglob("*.py"):
        module = benchmark(file.relative_to(ROOT / "benchmarks").as_posix())
        if not hasattr(module, "main"):  # what others share
            continue
        with (
            mock.patch.object(argparse.ArgumentParser, "parse_args", keep),
            contextlib.suppress(SystemExit),
        ):
            reader(module)([])
    return found.union(*map(options, kept))


def stray_options(page: str, text: str) -> list[tuple[Block, str]]:
    """Options that a sentence names without their command."""
    found = []
    for block in blocks(page, text):
        for code in inline(block) if block.language is None else ():
            if code.startswith("--"):
                names = re.findall(r"(?<!\S)--[\w-]+", code)
                found += [(block, name) for name in names]
    return found


# --- blocks of Python ----------------------------------------------------------------------------


def python_blocks(page: str, text: str) -> list[Block]:
    return [block for block in blocks(page, text) if block.language in ("python", "py")]


def texts(tree: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str]


def check_python(block: Block, given: set[str], vlm: Any) -> set[str]:
    """Static checks of a block; returns the names that it binds.

    Names are builtins, ``given``, or of torch and transformers; attributes of ``vlmfast`` and of
    ``vlm`` are looked up; recipes are parsed.
    """
    import transformers

    import vlmfast

    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        raise Wrong(f"{block}: {error}") from None
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(node.name)
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    for name in {n.id for n in names} - bound - given - {"torch", "vlmfast"}:
        if not hasattr(builtins, name) and not hasattr(transformers, name):
            raise Wrong(f"{block}: {name!r} is not known")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"vlmfast": vlmfast, "vlm": vlm}.get(node.value.id)
            if owner is not None and not hasattr(owner, node.attr):
                raise Wrong(f"{block}: {node.value.id} has no {node.attr!r}")
        if isinstance(node, ast.keyword) and node.arg in ("recipe", "recipes"):
            for text in texts(node.value):
                try:
                    parse_recipe(text)
                except VLMFastError as error:
                    raise Wrong(f"{block}: {error}") from None
    return bound


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
    tree = _Shown(text.encode().decode("latin-1").split("\n")).visit(ast.parse(text))
    namespace["_shown"] = _shown
    try:
        exec(compile(tree, block.page, "exec", dont_inherit=True), namespace)
    except Exception as error:
        raise Wrong(f"{block}: {type(error).__name__}: {error}") from error


def differs_from_file(block: Block) -> list[str]:
    """Lines of a shipped method's fragment that its file does not contain.

    A class is compared with the class of its method name, a method with that of the class that a
    comment after its first line names: each statement is in the file, in this order.
    Annotations may be left out.
    """
    from vlmfast.core.registry import stage_class, stage_names

    classes = {stage_class(name).__name__: stage_class(name) for name in stage_names()}
    lines, wrong = block.text.splitlines(), []
    for node in ast.parse(block.text).body:
        comment = re.search(r"# (\w+)$", lines[node.lineno - 1])
        name = node.name if isinstance(node, ast.ClassDef) else comment and comment[1]
        if name not in classes:
            continue
        (source,) = ast.parse(textwrap.dedent(inspect.getsource(classes[name]))).body
        of = source
        if isinstance(node, ast.FunctionDef):
            of = next((n for n in source.body if getattr(n, "name", None) == node.name), None)
        rest = iter([] if of is None else [ast.dump(n) for n in of.body])
        wrong += [
            f"{block}: {name} has no {ast.unparse(n)!r}"
            for n in node.body
            if ast.dump(n) not in rest
        ]
    return wrong
